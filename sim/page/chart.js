// The spans of a thread block over its clocks, drawn on a canvas: only what is in view, so that 20,000 stay quick.

// How each kind looks, colours of the style sheets: work is grey, copies blue, products green, waits are hatched in the colour of
// what they wait for. No two are alike without their colours.
const LOOKS = {
  works: { fill: "--held" }, special: { fill: "--special-soft", hatch: ".", ink: "--special" }, shared: { fill: "--held", hatch: "|" }, global: { fill: "--held", hatch: "-" },
  copies: { fill: "--held", hatch: "\\", ink: "--read" }, products: { fill: "--held", hatch: "/", ink: "--made" },
  waits_fixed: { hatch: "'", ink: "--held" }, waits_operand: { hatch: ".", ink: "--held" }, waits_shared: { hatch: "_", ink: "--held" }, waits_turn: { hatch: "+", ink: "--soft" }, waits_unit: { hatch: "|", ink: "--soft" }, waits_load: { hatch: "-", ink: "--read" },
  waits_barrier: { hatch: "/", ink: "--write" }, waits_cluster: { hatch: "x", ink: "--write" }, waits_phase: { hatch: "\\", ink: "--phase" },
  waits_copies: { hatch: "=", ink: "--read" }, waits_stores: { hatch: ":", ink: "--read" }, waits_products: { hatch: "#", ink: "--made" },
  done: { fill: "--faint" },
  copy_flying: { fill: "--read" }, copy_there: { fill: "--read-soft", edge: "--read" }, product: { fill: "--made" },
};
const [BEGIN, END, KIND, PLACE, NOTE] = [0, 1, 2, 3, 4];
const TITLES = { warps: "Warps", copies: "Copies in flight", products: "Tensor cores" };
const ROW = 19, HEAD = 20, AXIS = 20, FOOT = 9, EDGE = 8;
const FINEST = 4;  // clocks in view at most zoomed in
const clocks = n => n.toLocaleString("en-US", { maximumFractionDigits: n < 1000 ? 1 : 0 });

class Chart {
  constructor(told) {
    this.told = told;
    this.end = Math.max(told.shown, FINEST);
    this.view = [0, this.end];
    this.looks = told.kinds.map(kind => LOOKS[kind.name]);
    this.groups = this.grouped();
    this.canvas = el("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "application");
    this.lit = null;  // which spans are not dimmed: (span) => boolean
    this.hair = null;  // a clock
    this.picked = null;  // { row, n }
    this.onlook = null;  // what follows the view
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }

  // Rows by what they are, in the order of the first of each: [title, places of rows]; and where each row is drawn
  grouped() {
    const groups = new Map();
    const roles = this.told.rows.some(row => row.role);
    this.told.rows.forEach((row, at) => {
      const title = row.role ? `${row.role[0].toUpperCase()}${row.role.slice(1)} warps` : roles && row.group === "warps" ? "Other warps" : TITLES[row.group];
      if (!groups.has(title)) groups.set(title, []);
      groups.get(title).push(at);
    });
    let y = AXIS;
    this.tops = [];
    this.heads = [];
    for (const [title, rows] of groups) {
      this.heads.push([title, y]);
      y += HEAD;
      for (const at of rows) { this.tops[at] = y; y += ROW; }
    }
    this.height = y + FOOT;
    return [...groups];
  }

  // -- places

  x(clock) { return this.left + (clock - this.view[0]) / (this.view[1] - this.view[0]) * this.wide; }
  clock(x) { return this.view[0] + (x - this.left) / this.wide * (this.view[1] - this.view[0]); }
  rowAt(y) { const at = this.tops.findIndex(top => y >= top && y < top + ROW); return at < 0 ? null : at; }
  // The place of the first span that ends after a clock
  first(row, clock) {
    const { spans } = this.told.rows[row];
    let a = 0, b = spans.length;
    while (a < b) { const m = a + b >> 1; if (spans[m][END] > clock) b = m; else a = m + 1; }
    return a;
  }
  // The span at a clock, or the next to it within a few pixels
  hit(row, clock) {
    const { spans } = this.told.rows[row], near = 3 / this.wide * (this.view[1] - this.view[0]), n = this.first(row, clock);
    const far = at => at < 0 || at >= spans.length ? Infinity : Math.max(spans[at][BEGIN] - clock, clock - spans[at][END], 0);
    const best = far(n) <= far(n - 1) ? n : n - 1;
    return far(best) <= near ? { row, n: best } : null;
  }
  // Which meetings are within a few pixels of a clock
  met(clock) {
    const near = 3 / this.wide * (this.view[1] - this.view[0]);
    return this.told.meetings.filter(([at]) => Math.abs(at - clock) <= near);
  }
  gap(clock) { return this.told.gaps.find(([at]) => Math.abs(at - clock) <= 3 / this.wide * (this.view[1] - this.view[0])); }
  span(picked) { return this.told.rows[picked.row].spans[picked.n]; }

  // -- moving

  look(from, to) {
    const wide = Math.min(Math.max(to - from, FINEST), this.end), begin = Math.min(Math.max(from + (to - from - wide) / 2, 0), this.end - wide);
    this.view = [begin, begin + wide];
    this.redraw();
    this.onlook?.(this.view);
  }
  // Times nearer, with a clock left where it is
  zoom(times, clock = (this.view[0] + this.view[1]) / 2) {
    const wide = Math.min(Math.max((this.view[1] - this.view[0]) / times, FINEST), this.end), part = (clock - this.view[0]) / (this.view[1] - this.view[0]);
    this.look(clock - part * wide, clock + (1 - part) * wide);
  }
  pan(by) { const wide = this.view[1] - this.view[0], from = Math.min(Math.max(this.view[0] + by, 0), this.end - wide); this.look(from, from + wide); }
  fit() { this.look(0, this.end); }
  // To where a span takes a third of the width
  near(picked) {
    const [begin, end] = this.span(picked);
    this.look(begin - (end - begin), end + (end - begin));
  }
  // A span into view, as near as it is
  show(picked) {
    const [begin, end] = this.span(picked), [from, to] = this.view, room = (to - from) / 12;
    if (begin < from + room || end > to - room) {
      const middle = end - begin > to - from - 2 * room ? begin - room + (to - from) / 2 : (begin + end) / 2;
      this.pan(middle - (from + to) / 2);
    }
  }

  // -- drawing

  redraw() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.draw(); });
  }

  measure() {
    const scale = devicePixelRatio || 1, full = this.canvas.clientWidth;
    this.canvas.style.height = `${this.height}px`;
    if (this.canvas.width !== Math.round(full * scale) || this.canvas.height !== Math.round(this.height * scale)) {
      this.canvas.width = Math.round(full * scale);
      this.canvas.height = Math.round(this.height * scale);
      this.colours = null;
    }
    const pen = this.pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.font(12);
    this.full = full;
    this.left = Math.min(Math.max(...this.told.rows.map(row => pen.measureText(row.name).width)) + 12, full * 0.3);
    this.wide = Math.max(full - this.left - EDGE, 10);
    if (!this.colours) this.colour(scale);
  }

  font(size) { this.pen.font = `${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`; }

  // The page's colours as they are now; each kind's paint, and without hatching
  colour(scale) {
    const named = this.colours = colours();
    this.paints = this.looks.map(look => paint(look, named, scale));
    this.flat = this.looks.map(look => look.hatch ? mixed(named(look.fill ?? "--paper"), named(edge(look)), 0.45) : named(look.fill));
  }

  draw() {
    if (!this.canvas.clientWidth) return;  // closed
    this.measure();
    const { pen } = this;
    pen.clearRect(0, 0, this.full, this.height);
    this.drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(this.left, AXIS, this.wide, this.height - AXIS);
    pen.clip();
    this.told.rows.forEach((_, at) => this.drawRow(at));
    this.drawMeetings();
    this.drawGaps();
    if (this.picked) this.outline(this.picked);
    pen.restore();
    this.drawNames();
    this.drawBar();
    if (this.hair !== null) this.drawHair();
  }

  drawAxis() {
    const { pen, colours } = this, rough = (this.view[1] - this.view[0]) / Math.max(this.wide / 80, 2), ten = 10 ** Math.floor(Math.log10(rough));
    const step = ten * [1, 2, 5, 10].find(times => times * ten > rough * 0.8);
    this.font(11);
    pen.textAlign = "center";
    for (let clock = Math.ceil(this.view[0] / step) * step; clock <= this.view[1]; clock += step) {
      const x = this.x(clock), words = clocks(clock), half = pen.measureText(words).width / 2;
      pen.fillStyle = colours("--line");
      pen.fillRect(Math.round(x), AXIS - 4, 1, this.height - AXIS - FOOT + 4);
      pen.fillStyle = colours("--soft");
      pen.fillText(words, Math.min(Math.max(x, this.left + half), this.full - half), 11);
    }
    pen.textAlign = "left";
  }

  // Spans of two pixels and more as boxes; of narrower ones, as many as make two pixels as the shares that each kind has of them
  drawRow(at) {
    const { pen } = this, { spans } = this.told.rows[at], top = this.tops[at] + 1, high = ROW - 2;
    const crumbs = new Map();
    let start = 0, last = 0;
    const flush = () => {
      if (!crumbs.size) return;
      const wide = Math.max(last - start, 1), unit = wide / this.wide * (this.view[1] - this.view[0]);
      let y = top + high;
      for (const [key, sum] of [...crumbs].sort((a, b) => a[0] - b[0])) {
        const part = Math.min(sum / unit, 1) * high;
        y = Math.max(y - part, top);
        pen.globalAlpha = key % 2 ? 0.15 : 1;
        pen.fillStyle = this.flat[key >> 1];
        pen.fillRect(start, y, wide, part);
      }
      crumbs.clear();
    };
    for (let n = this.first(at, this.view[0]); n < spans.length && spans[n][BEGIN] < this.view[1]; n++) {
      const span = spans[n], a = this.x(span[BEGIN]), b = this.x(span[END]), dim = this.lit && !this.lit(span);
      if (crumbs.size && (b - a >= 2 || a - start >= 2)) flush();
      if (b - a >= 2) {
        pen.globalAlpha = dim ? 0.15 : 1;
        this.box(span, a, b, top, high);
        continue;
      }
      if (!crumbs.size) start = a;
      last = b;
      const key = 2 * span[KIND] + (dim ? 1 : 0);
      crumbs.set(key, (crumbs.get(key) ?? 0) + span[END] - span[BEGIN]);
    }
    flush();
    pen.globalAlpha = 1;
  }

  box(span, a, b, top, high) {
    const { pen, colours } = this, look = this.looks[span[KIND]], gap = b - a >= 5 ? 1 : 0, x = Math.max(a, this.left - 4), wide = Math.min(b, this.full + 4) - x - gap;
    pen.fillStyle = (b - a < 8 ? this.flat : this.paints)[span[KIND]];  // hatching takes some width
    pen.fillRect(x, top, wide, high);
    if (b - a < 4) return;
    pen.strokeStyle = colours(edge(look));
    pen.lineWidth = 1;
    pen.strokeRect(x + 0.5, top + 0.5, wide - 1, high - 1);
    const from = Math.max(x, this.left) + 4, room = Math.min(b, this.full - EDGE) - from - 5;
    if (room >= 34) this.inscribe(span, look, from, look.hatch ? room * 0.6 : room, top, high);  // most of the hatching stays
  }

  // What a wide span is, in it
  inscribe(span, look, x, room, top, high) {
    const { pen, colours } = this, kind = this.told.kinds[span[KIND]], source = this.told.sources[span[PLACE]];
    const said = kind.class === "copy" && this.told.notes[span[NOTE]] || (source ? `${source[1]}: ${source[2].trim()}` : kind.label);
    this.font(10.5);
    const words = cut(pen, said, room);
    if (!words) return;
    if (look.hatch) {
      pen.fillStyle = colours(look.fill ?? "--paper");
      pen.fillRect(x - 2, top + 2, pen.measureText(words).width + 4, high - 4);
    }
    pen.fillStyle = colours(look.fill === "--read" || look.fill === "--made" ? "--paper" : "--ink");
    pen.fillText(words, x, top + high - 5);
  }

  // Thin where there are many, so that they do not hide the spans
  drawMeetings() {
    const { pen, colours } = this, here = this.told.meetings.filter(([clock]) => clock >= this.view[0] && clock <= this.view[1]);
    const known = new Set();
    pen.fillStyle = colours("--ink");
    pen.globalAlpha = Math.min(Math.max(this.wide / (12 * here.length), 0.2), 1);
    for (const [clock, , rows] of here) {
      const x = Math.round(this.x(clock)), key = `${x} ${rows}`;
      if (known.has(key)) continue;
      known.add(key);
      for (const at of rows) {
        pen.fillRect(x, this.tops[at], 1, ROW);
        if (here.length < this.wide / 12) pen.fillRect(x - 2, this.tops[at] + ROW / 2 - 2, 5, 5);
      }
    }
    pen.globalAlpha = 1;
  }

  // Where turns are left out
  drawGaps() {
    const { pen, colours } = this;
    pen.fillStyle = colours("--write");
    for (const [clock] of this.told.gaps) for (let y = AXIS; y < this.height - FOOT; y += 9) pen.fillRect(Math.round(this.x(clock)) - 1, y, 2, 6);
  }

  outline(picked) {
    const { pen, colours } = this, [begin, end] = this.span(picked), a = this.x(begin), b = Math.max(this.x(end), a + 3), top = this.tops[picked.row];
    pen.lineWidth = 2;
    pen.strokeStyle = colours("--paper");
    pen.strokeRect(a - 2, top - 1, b - a + 4, ROW + 2);
    pen.strokeStyle = colours("--ink");
    pen.strokeRect(a, top + 1, b - a, ROW - 2);
  }

  drawNames() {
    const { pen, colours } = this;
    for (const [title, y] of this.heads) {
      this.font(11);
      pen.fillStyle = colours("--soft");
      pen.fillText(title, 0, y + HEAD - 6);
      const after = pen.measureText(title).width + 6;
      pen.fillStyle = colours("--line");
      pen.fillRect(after, y + HEAD - 10, this.full - EDGE - after, 1);
    }
    this.font(12);
    pen.fillStyle = colours("--ink");
    this.told.rows.forEach((row, at) => pen.fillText(cut(pen, row.name, this.left - 6), 0, this.tops[at] + ROW - 6));
  }

  // Which part of all is in view
  drawBar() {
    const { pen, colours } = this, y = this.height - 5, [from, to] = this.view.map(clock => this.left + clock / this.end * this.wide);
    pen.fillStyle = colours("--faint");
    pen.fillRect(this.left, y, this.wide, 4);
    pen.fillStyle = colours("--soft");
    pen.fillRect(from, y, Math.max(to - from, 3), 4);
  }

  drawHair() {
    const { pen, colours } = this, x = Math.round(this.x(this.hair));
    if (x < this.left || x > this.left + this.wide) return;
    this.font(11);
    const words = clocks(this.hair), wide = pen.measureText(words).width + 8, at = Math.min(Math.max(x - wide / 2, this.left), this.full - wide);
    pen.fillStyle = colours("--ink");
    for (let y = AXIS; y < this.height - FOOT; y += 6) pen.fillRect(x, y, 1, 3);
    pen.fillRect(at, 0, wide, 15);
    pen.fillStyle = colours("--paper");
    pen.fillText(words, at + 4, 11);
  }
}

// As much of a text as a width has room for
function cut(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  let a = 0, b = text.length;
  while (a < b) { const m = a + b + 1 >> 1; if (pen.measureText(`${text.slice(0, m)}…`).width <= room) a = m; else b = m - 1; }
  return a > 1 ? `${text.slice(0, a).trimEnd()}…` : "";
}

// The page's colours as they are now, by name
function colours() {
  const style = getComputedStyle(document.documentElement), known = new Map();
  return name => { if (!known.has(name)) known.set(name, style.getPropertyValue(name).trim()); return known.get(name); };
}
// Of two colours, so much of the other; as #rrggbb or #rgb, which the style sheets have
function mixed(one, other, part) {
  const parts = text => [0, 1, 2].map(n => text.length === 4 ? 17 * parseInt(text[n + 1], 16) : parseInt(text.slice(2 * n + 1, 2 * n + 3), 16));
  const [a, b] = [parts(one), parts(other)];
  return `rgb(${a.map((x, n) => Math.round(x + (b[n] - x) * part)).join()})`;
}
const edge = look => look.edge ?? (look.hatch ? look.ink ?? "--soft" : look.fill);
const paint = (look, colours, scale) => look.hatch ? hatching(colours(look.fill ?? "--paper"), colours(edge(look)), look.hatch, scale) : colours(look.fill);

// A pattern of lines or dots of one colour on another
function hatching(back, ink, hatch, scale) {
  const size = 6, tile = el("canvas", { width: size * scale, height: size * scale }), pen = tile.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = back;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = pen.fillStyle = ink;
  pen.lineWidth = 1.3;
  const line = (...ends) => { pen.beginPath(); pen.moveTo(ends[0], ends[1]); pen.lineTo(ends[2], ends[3]); pen.stroke(); };
  // Three times, so that the corners of a tile meet those of its neighbours
  for (const by of [-size, 0, size]) {
    if ("/x".includes(hatch)) line(by - 1, size + 1, by + size + 1, -1);
    if ("\\x".includes(hatch)) line(by - 1, -1, by + size + 1, size + 1);
  }
  if ("|#".includes(hatch)) line(size / 2, 0, size / 2, size);
  if ("-#".includes(hatch)) line(0, size / 2, size, size / 2);
  if (hatch === "=") for (const y of [1, 4]) line(0, y, size, y);
  if (hatch === "'") for (const x of [1, 4]) line(x, 0, x, size);
  if (hatch === "_") pen.fillRect(0, 0, size, size / 2);
  if (hatch === "+") { line(3, 1, 3, 5); line(1, 3, 5, 3); }
  if (hatch === ".") pen.fillRect(size / 2 - 1, size / 2 - 1, 2, 2);
  if (hatch === ":") for (const x of [0, 3]) pen.fillRect(x, x, 2, 2);
  const made = pen.createPattern(tile, "repeat");
  made.setTransform(new DOMMatrix().scale(1 / scale));
  return made;
}
