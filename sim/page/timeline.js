// A Timeline is the chart of a thread block with its keys, its words and its tables; a Choice is the part of a page that has one
// for each of several launches, made when it is opened.

const LONGEST = 12;  // places of waits that are listed

class Timeline {
  // `link(source)` makes the words that name a line, `go(source)` is what a click on a span does; sources are the timeline's
  constructor(told, link, go) {
    this.told = told;
    this.link = link;
    this.go = go;
    this.partly = told.shown < told.clocks;
    const chart = this.chart = new Chart(told);
    chart.canvas.setAttribute("aria-label", `Thread block ${told.block} of ${told.kernel}: ${plural(told.rows.length, "row")} of spans over ${clocks(told.shown)} clocks. `
      + "Plus and minus zoom, left and right pan, up and down choose a row, with shift left and right go from span to span, 0 shows all. The numbers stand in tables below.");
    this.said = el("div", { className: "said" });
    this.spoken = el("p", { className: "hidden" });
    this.spoken.setAttribute("aria-live", "polite");
    const button = (textContent, label, onclick) => { const made = el("button", { type: "button", textContent, title: label, onclick }); made.setAttribute("aria-label", label); return made; };
    const tools = el("div", { className: "tools" }, button("−", "Zoom out (−)", () => chart.zoom(1 / 2)), button("+", "Zoom in (+)", () => chart.zoom(2)), button("Fit", "All of it (0)", () => chart.fit()),
      el("span", { className: "soft", textContent: this.about() }));
    this.root = el("div", { className: "timeline" }, tools, el("div", {}, this.said, chart.canvas), this.legend(), this.keys(), el("p", { className: "soft", textContent: told.model }), this.words(), this.spoken);
    this.down = new Map();  // pointers that are down, and where
    this.listen();
    this.tell();
  }

  about() {
    const { told } = this, part = this.partly ? `, the first ${clocks(told.shown)} of ${clocks(told.clocks)} clocks` : `, ${clocks(told.shown)} clocks`;
    return `${told.kernel} for ${told.target}, thread block ${told.block} of a grid of ${comma(told.blocks)}${part}`;
  }

  // A line in words; of an inlined function, with the kernel's line that called it
  place(source) {
    const [file, , text, call] = source;
    return [this.link(source), ` ${text.trim()}`, ...call < 0 ? [] : [" (called at ", this.link([file, call]), ")"]];
  }

  // -- what is told of a span

  // The span under a pointer or that a key has chosen, and the clock; without a span, of the picked one
  tell(found = this.chart.picked, row = null) {
    const { told, chart } = this, out = [];
    const met = chart.hair === null ? [] : chart.met(chart.hair).filter(([, , rows]) => row === null || rows.includes(row)).slice(0, 1);
    if (found) {
      const span = chart.span(found), [begin, end, kind, place, note] = span, of = told.rows[found.row], source = told.sources[place];
      out.push(el("p", {}, el("b", { textContent: of.name }), of.role ? ` (${of.role})` : "", ` ${told.kinds[kind].label}, `,
        el("span", { className: "num", textContent: `clocks ${clocks(begin)} to ${clocks(end)} (${clocks(end - begin)})` })));
      if (source) out.push(el("p", { className: "mono" }, ...this.place(source)));
      if (note >= 0) out.push(el("p", { textContent: told.notes[note] }));
    } else if (row !== null) out.push(el("p", {}, el("b", { textContent: told.rows[row].name }), " nothing here"));
    else if (!met.length) out.push(el("p", { className: "soft", textContent: "Point at a span, tap it, or choose it with the arrow keys: here it says what it is, and of which line." }));
    const gap = chart.hair === null ? null : chart.gap(chart.hair);
    if (gap) out.push(el("p", { className: "soft", textContent: `Left out at clock ${clocks(gap[0])}: ${gap[1]}` }));
    for (const [clock, number, rows] of met) out.push(el("p", { className: "soft", textContent: `${plural(rows.length, "warp")} met at ${number < 0 ? "the cluster's barrier" : `barrier ${number}`}, clock ${clocks(clock)}` }));
    this.said.replaceChildren(...out);
    this.found = found;
  }
  speak() { this.spoken.textContent = [...this.said.children].map(each => each.textContent).join("; "); }

  pick(found, near = false) {
    const { chart } = this;
    chart.picked = found;
    chart.hair = found ? chart.span(found)[BEGIN] : null;
    if (found && near) chart.near(found);
    if (found) chart.show(found);
    chart.redraw();
    this.tell();
    this.speak();
  }

  // -- pointers and keys

  listen() {
    const { canvas } = this.chart;
    canvas.addEventListener("pointerdown", event => {
      canvas.setPointerCapture(event.pointerId);
      this.down.set(event.pointerId, event.offsetX);
      this.moved = this.down.size > 1 ? Infinity : 0;
    });
    canvas.addEventListener("pointermove", event => this.down.has(event.pointerId) ? this.drag(event) : this.hover(event));
    canvas.addEventListener("pointerup", event => { if (this.down.delete(event.pointerId) && this.moved < 5) this.click(event); });
    canvas.addEventListener("pointercancel", event => this.down.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => { if (!this.down.size) this.leave(); });
    // Without focus a wheel scrolls the page, but for the pinch of a trackpad, which comes as one with ctrl
    canvas.addEventListener("wheel", event => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      if (!(event.ctrlKey || sideways || document.activeElement === canvas)) return;
      event.preventDefault();
      const { chart } = this, lines = event.deltaMode === 1 ? 16 : 1;
      if (sideways) chart.pan((event.deltaX || event.deltaY) * lines / chart.wide * (chart.view[1] - chart.view[0]));
      else chart.zoom(2 ** (-event.deltaY * lines / (event.ctrlKey ? 100 : 250)), chart.clock(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("keydown", event => this.key(event));
  }

  under(event) {
    const row = this.chart.rowAt(event.offsetY), clock = this.chart.clock(event.offsetX), inside = event.offsetX >= this.chart.left;
    return { row, clock: inside ? clock : null, found: row !== null && inside ? this.chart.hit(row, clock) : null };
  }

  hover(event) {
    const { row, clock, found } = this.under(event);
    this.chart.hair = clock;
    this.chart.canvas.style.cursor = found && this.go ? "pointer" : "crosshair";
    this.tell(found ?? (row === null ? undefined : null), row);
    this.chart.redraw();
  }

  leave() {
    const { chart } = this;
    chart.hair = chart.picked ? chart.span(chart.picked)[BEGIN] : null;
    this.tell();
    chart.redraw();
  }

  drag(event) {
    const { chart } = this, before = [...this.down.values()], was = this.down.get(event.pointerId);
    this.down.set(event.pointerId, event.offsetX);
    this.moved += Math.abs(event.offsetX - was);
    const scale = (chart.view[1] - chart.view[0]) / chart.wide;
    if (before.length === 1) {
      if (this.moved >= 5) chart.pan((was - event.offsetX) * scale);
      return;
    }
    const now = [...this.down.values()], far = ([a, b]) => Math.max(Math.abs(a - b), 10), middle = ([a, b]) => (a + b) / 2;
    chart.zoom(far(now) / far(before), chart.clock(middle(before)));
    chart.pan((middle(before) - middle(now)) * (chart.view[1] - chart.view[0]) / chart.wide);
  }

  click(event) {
    const { found } = this.under(event);
    if (!found && event.pointerType !== "mouse") this.hover(event);
    if (!found) return;
    this.chart.picked = found;
    this.chart.hair = this.chart.clock(event.offsetX);
    this.chart.redraw();
    this.tell();
    this.speak();
    const source = this.told.sources[this.chart.span(found)[PLACE]];
    if (source && this.go && event.pointerType === "mouse") this.go(source);  // a finger asks first what it is
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { chart } = this, { hair, view: [from, to] } = chart, wide = to - from, around = hair !== null && hair >= from && hair <= to ? hair : undefined;
    const act = {
      "+": () => chart.zoom(2, around), "=": () => chart.zoom(2, around), "-": () => chart.zoom(1 / 2, around), "0": () => chart.fit(),
      ArrowLeft: () => event.shiftKey ? this.step(-1) : chart.pan(-wide / 8), ArrowRight: () => event.shiftKey ? this.step(1) : chart.pan(wide / 8),
      ArrowUp: () => this.turn(-1), ArrowDown: () => this.turn(1), Home: () => chart.pan(-chart.end), End: () => chart.pan(chart.end),
      Enter: () => { const source = this.go && chart.picked && this.told.sources[chart.span(chart.picked)[PLACE]]; if (source) this.go(source); },
      Escape: () => this.pick(null),
    }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
    event.stopPropagation();  // what the page's own keys do is not meant
  }

  // To the next span of the row; from nothing, to the first in view
  step(by) {
    const { chart, told } = this, { picked } = chart;
    if (!picked) return this.turn(1);
    const n = picked.n + by;
    if (n >= 0 && n < told.rows[picked.row].spans.length) this.pick({ row: picked.row, n });
  }

  // To another row with spans, in the order drawn, at the same clock
  turn(by) {
    const { chart, told } = this, { picked } = chart;
    const order = chart.groups.flatMap(([, rows]) => rows).filter(row => told.rows[row].spans.length);
    if (!order.length) return;
    const at = picked ? order.indexOf(picked.row) + by : 0, row = order[Math.min(Math.max(at, 0), order.length - 1)];
    const clock = picked ? Math.max(chart.hair ?? 0, chart.span(picked)[BEGIN]) : chart.view[0];
    this.pick({ row, n: Math.min(chart.first(row, clock), told.rows[row].spans.length - 1) });
    chart.hair = clock;
  }

  // Spans that are not of a kind, or not of these lines, are dimmed; null: none
  light(test) {
    this.chart.lit = test;
    this.chart.redraw();
  }

  // -- words

  legend(rows = this.told.rows) {
    const { told, chart } = this, used = new Set(rows.flatMap(row => row.spans.map(span => span[KIND])));
    this.swatches = {};
    const items = told.kinds.map((kind, n) => {
      if (!used.has(n)) return null;
      const made = el("button", { type: "button", title: `Dim all but: ${kind.label}` }, this.swatches[n] = el("canvas", { className: "swatch" }), kind.label);
      made.setAttribute("aria-pressed", "false");
      made.onclick = () => {
        const on = made.getAttribute("aria-pressed") !== "true";
        for (const each of made.parentNode.querySelectorAll("button")) each.setAttribute("aria-pressed", String(on && each === made));
        this.light(on ? span => span[KIND] === n : null);
      };
      return made;
    });
    const made = el("div", { className: "legend", role: "group" }, ...items.filter(Boolean));
    if (told.meetings.length) made.append(el("span", { className: "meeting", textContent: "these warps met at a barrier" }));
    made.setAttribute("aria-label", "Kinds of spans: press one to dim the others");
    this.colour();
    return made;
  }

  // In the page's colours as they are now
  colour() {
    for (const [n, swatch] of Object.entries(this.swatches)) draw(swatch, this.chart.looks[n]);
    this.chart.colours = null;
    this.chart.redraw();
  }

  keys() {
    return el("p", { className: "soft hint" }, "Drag, ", el("kbd", { textContent: "←" }), " ", el("kbd", { textContent: "→" }), " pan · wheel (after a click), pinch, ", el("kbd", { textContent: "+" }), " ", el("kbd", { textContent: "−" }), " zoom · ",
      el("kbd", { textContent: "0" }), " all · ", el("kbd", { textContent: "↑" }), " ", el("kbd", { textContent: "↓" }), " rows · ", el("kbd", { textContent: "shift" }), " with ", el("kbd", { textContent: "←" }), " ", el("kbd", { textContent: "→" }), " spans");
  }

  words() {
    const { told } = this, names = told.rows.filter(row => row.group === "warps").map(row => row.role ? `${row.name} (${row.role})` : row.name);
    const kinds = told.kinds.map((_, n) => n).filter(n => told.shares.some(share => share[n]));
    const rows = names.map((name, at) => [name, ...kinds.map(n => comma(told.shares[at][n])), comma(sum(told.shares[at], n => n))]);
    const waits = this.waits(), made = waits.map(wait => {
      const there = el("button", { type: "button", className: "there", textContent: clocks(wait.longest), title: "Show it", onclick: () => { this.pick(wait.found, true); this.chart.canvas.focus(); } });
      const line = wait.source ? el("div", { className: "mono" }, ...this.place(wait.source)) : "";
      return [el("div", {}, told.kinds[wait.kind].label, line), comma(wait.times), clocks(wait.sum), there];
    });
    const out = el("details", { className: "words" }, el("summary", { textContent: "The same in words: clocks by warp, longest waits" }),
      el("h3", { textContent: "Clocks by warp and kind, of the whole block" }), table(["", ...kinds.map(n => told.kinds[n].label), "all"], rows));
    const busy = Object.entries(told.busy).sort((a, b) => b[1] - a[1]).map(([name, n]) => [name, comma(n), `${Math.round(100 * n / told.clocks)} %`]);
    out.append(el("h3", { textContent: "Clocks of this block that a unit is busy; of those that each sub-core has, the mean" }), table(["", "clocks", "of all"], busy));
    if (made.length) out.append(el("h3", { textContent: `Longest waits, by their line${this.partly ? "; of what is drawn" : ""}` }), table(["wait", "times", "clocks of all warps", "longest"], made));
    return out;
  }

  // By kind and line, the longest first
  waits() {
    const { told } = this, by = new Map();
    told.rows.forEach((row, at) => row.spans.forEach((span, n) => {
      const [begin, end, kind, place] = span;
      if (row.group !== "warps" || told.kinds[kind].class !== "wait") return;
      const key = `${kind} ${place}`, known = by.get(key) ?? { kind, source: told.sources[place], times: 0, sum: 0, longest: -1 };
      known.times++;
      known.sum += end - begin;
      if (end - begin > known.longest) Object.assign(known, { longest: end - begin, found: { row: at, n } });
      by.set(key, known);
    }));
    return [...by.values()].sort((a, b) => b.longest - a.longest).slice(0, LONGEST);
  }
}

// How a kind looks, in the legend
function draw(swatch, look) {
  const scale = devicePixelRatio || 1, colour = colours(), pen = swatch.getContext("2d");
  swatch.width = 22 * scale;
  swatch.height = 13 * scale;
  pen.scale(scale, scale);
  pen.fillStyle = paint(look, colour, scale);
  pen.fillRect(0, 0, 22, 13);
  pen.strokeStyle = colour(edge(look));
  pen.strokeRect(0.5, 0.5, 21, 12);
}

class Choice {
  // `launches` are { label, timeline, why }
  constructor(title, launches, link, go = null) {
    this.launches = launches;
    this.link = link;
    this.go = go;
    this.timeline = null;
    this.place = el("div");
    const clocks = ({ timeline }) => timeline?.clocks ?? 0, longest = Math.max(...launches.map(clocks));
    this.choice = el("select", { onchange: () => this.show() }, ...launches.map((one, value) => el("option", { value, textContent: one.label })));
    this.choice.selectedIndex = Math.max(launches.findIndex(one => clocks(one) === longest), 0);
    this.root = el("details", { className: "block" }, el("summary", { textContent: title }), launches.length > 1 ? el("label", { className: "choose" }, "Launch", this.choice) : "", this.place);
    addEventListener("theme", () => this.timeline?.colour());
    this.root.ontoggle = () => { if (this.root.open && !this.place.childNodes.length) this.show(); };
  }

  show() {
    const one = this.launches[this.choice.value];
    this.timeline = one.timeline ? new Timeline(one.timeline, this.link, this.go) : null;
    this.place.replaceChildren(this.timeline?.root ?? el("p", { className: "soft", textContent: `No timeline: ${one.why}.` }));
  }
}
