const calm = matchMedia("(prefers-reduced-motion: reduce)");
// Columns of a move
const [LAUNCH, BLOCK, TENSOR, WRITE, SLAB, R0, R1, C0, C1, BYTES, LINE, SOURCE, MADE] = [
  "launch", "block", "tensor", "write", "slab", "row", "row_end", "col", "col_end", "bytes", "line", "source", "scores"].map(name => data.columns.indexOf(name));
const place = (svg, [r0, r1, c0, c1]) => { svg.setAttribute("x", c0); svg.setAttribute("y", r0); svg.setAttribute("width", c1 - c0); svg.setAttribute("height", r1 - r0); };
const capital = name => name[0].toUpperCase() + name.slice(1);
// A name with an index or the like behind _ as a subscript: Q_i, O_acc, but key_lengths in two words
const spell = text => text.split(/_(ij|i|j|s|(?:acc|part|new)(?:,[0-9]+)*|[0-9]+(?:,[0-9]+)?)(?![a-z])/)
  .map((part, at) => at % 2 ? el("sub", { textContent: part }) : part.replaceAll("_", " "));
// New keys go where those of the cache do: K_new,2 is a piece of K_2
const home = name => name.replace("_new,", "_").replace("_new", "");
const span = (word, a, b) => b - a === 1 ? `${word} ${a + 1}` : `${word}s ${a + 1} to ${b}`;

class Player {
  constructor(told, number) {
    this.told = told;
    this.number = number;
    this.moves = told.moves;
    this.decodes = told.algorithm === "decode";
    let sum = 0;
    this.ends = this.moves.map(move => sum += move[BYTES]);
    this.total = sum;
    this.t = 0;
    this.build();
    this.reset();
  }

  // What a tile is called: K_2, S_2,1; without numbers where it is no whole tile
  tile(move) {
    const tensor = this.told.tensors[move[TENSOR]], launch = this.told.launches[move[LAUNCH]];
    const numbered = number => tensor.name + (tensor.name.includes("_") ? "," : "_") + number;
    if (this.decodes && tensor.axes === "j") return numbered(this.column(move));
    if (this.decodes && tensor.axes === "i") return numbered(this.row(move[SLAB], move[R0], launch));
    const i = move[R0] / launch.block_rows, j = (tensor.axes === "j" ? move[R0] : move[C0]) / launch.block_cols;
    const whole = Number.isInteger;
    let index = "";
    if (tensor.axes === "i" && whole(i) && (move[R1] - move[R0] === launch.block_rows || move[R1] === tensor.rows)) index = `_${i + 1}`;
    else if (tensor.axes === "j" && whole(j)) index = `_${j + 1}`;
    else if (tensor.axes === "ij" && whole(i) && whole(j) && move[R1] - move[R0] > 4 && move[C1] - move[C0] <= launch.block_cols) index = `_${i + 1},${j + 1}`;
    return tensor.name + (tensor.name.includes("_") ? index.replace("_", ",") : index);
  }

  // The page that a move's rows are on, or the sequence whose new keys they are: [sequence, first key]
  page(move) {
    const tensor = this.told.tensors[move[TENSOR]];
    if (!tensor.pages) return null;
    return tensor.pages[move[SLAB] * tensor.rows / tensor.page_rows + Math.floor(move[R0] / tensor.page_rows)];
  }

  // Which key of its sequence a move's first row is
  key(move) {
    const page = this.page(move);
    return page ? page[1] + move[R0] % this.told.tensors[move[TENSOR]].page_rows : move[R0];
  }

  // j of a move of keys, from 1
  column(move) { return Math.floor(this.key(move) / this.told.launches[move[LAUNCH]].block_cols) + 1; }

  // i of a row of a head, from 1; in decoding the rows of a group's heads lie in turns
  row(head, row, launch) {
    const group = this.decodes ? data.heads / data.key_heads : 1;
    return Math.floor((row * group + head % group) / launch.block_rows) + 1;
  }

  build() {
    const told = this.told;
    this.root = el("article", { className: "panel", id: `panel-${this.number}` });
    this.root.setAttribute("aria-label", told.name);
    const head = el("div", { className: "head" }, el("h2", { textContent: capital(told.name) }), el("span", { textContent: `${told.title}; Br ${told.block_rows}, Bc ${told.block_cols}` }));
    this.now = el("div", { className: "now" });
    this.tensors = el("div", { className: "tensors" });
    this.figures = told.tensors.map(tensor => this.tensorFigure(tensor));
    this.tensors.append(...this.figures.map(figure => figure.root));
    const hbm = el("div", { className: "side" }, el("h3", { textContent: "HBM" }), this.tensors);
    this.meter = el("div", { className: "meter" });
    this.rooms = el("div", { className: "rooms" });
    this.registers = el("div", { className: "registers" });
    this.capacity = el("h3");
    this.scores = this.scoresFigure();
    const sram = el("div", { className: "side" }, this.capacity, this.meter, this.rooms);
    const regs = el("div", { className: "side" }, el("h3", { textContent: "Registers" }), this.registers, this.scores.root);
    this.ghost = el("div", { className: "ghost" });
    this.ghost.setAttribute("aria-hidden", "true");
    this.lines = told.lines.map(([number, depth, text]) => {
      const item = el("li", {}, el("b", { textContent: number }), el("span", {}, ...spell(text)));
      item.style.setProperty("--deep", depth);
      return item;
    });
    this.root.append(head, this.now, el("div", { className: "machine" }, hbm, sram, regs), el("ol", {}, ...this.lines), this.table(), this.ghost);
    const standard = data.players.find(each => each.algorithm === "standard" && each.backward === told.backward);
    this.beside = standard && standard !== told && standard.total_bytes ? ` (${(told.total_bytes / standard.total_bytes).toFixed(2)} of standard)` : "";
    this.root.querySelector("ol").setAttribute("aria-label", told.title);
    $("panels").append(this.root);
    this.whole = el("i", { className: "whole" });
    this.bars = [el("i", { className: "in" }), el("i", { className: "out" })];
    this.moved = el("span", { className: "num" });
    this.choice = el("button", { type: "button", textContent: capital(told.name), onclick: () => view(this.number) });
    $("race").append(this.choice, el("div", { className: "track" }, this.whole, ...this.bars), this.moved);
  }

  tensorFigure(tensor) {
    const at = this.told.tensors.indexOf(tensor), cache = this.decodes && ["K", "V"].includes(tensor.name);
    const input = cache || tensor.write_bytes === 0;  // which is there from the beginning
    const longest = Math.max(data.rows, data.cols, ...this.told.tensors.map(each => each.axes === "j" ? each.rows : 0)), high = 108, unit = high / longest;
    const square = tensor.axes === "ij", height = tensor.axes ? Math.max(8, tensor.rows * unit) : 14;
    const width = square ? Math.max(8, tensor.cols * unit) : tensor.cols === 1 ? (tensor.axes ? 7 : 14) : Math.min(60, Math.max(34, tensor.cols * unit));
    const picture = svg("svg", { width, height, viewBox: `0 0 ${tensor.cols} ${tensor.rows}`, preserveAspectRatio: "none", class: `tensor ${input && !cache ? "input" : ""}`, role: "img" });
    picture.append(svg("rect", { class: "back", width: tensor.cols, height: tensor.rows }));
    const groups = new Map(), cells = new Map();
    const groupOf = slab => groups.get(slab) ?? groups.set(slab, picture.appendChild(svg("g"))).get(slab);
    const inPages = cache && tensor.pages;
    if (inPages) tensor.pages.forEach((page, number) => {  // those of a sequence, read or not
      if (!page) return;
      const first = number * tensor.page_rows % tensor.rows, rect = svg("rect", { class: "page" });
      place(rect, [first, first + tensor.page_rows, 0, tensor.cols]);
      groupOf(Math.floor(number * tensor.page_rows / tensor.rows)).append(rect);
    });
    for (const move of this.moves) {
      if (move[TENSOR] !== at || (move[WRITE] === 0) !== input && !cache) continue;
      const key = move.slice(SLAB, C1 + 1).join();
      if (cells.has(key)) continue;
      const fine = height * (move[R1] - move[R0]) / tensor.rows < 3;  // all edge, which would fill it
      const cell = svg("rect", { class: `cell${fine ? " fine" : ""}${inPages && move[WRITE] ? " due" : ""}` });
      place(cell, move.slice(R0, C1 + 1));
      groupOf(move[SLAB]).append(cell);
      cells.set(key, { cell, made: move[WRITE] === 1, on: false, shown: false });
    }
    const active = picture.appendChild(svg("rect", { class: "active" }));
    const label = el("span", {}, ...spell(tensor.name)), note = el("small");
    const words = tensor.cols === 1 && tensor.axes ? `${tensor.rows} rows` : `${comma(tensor.rows)} × ${comma(tensor.cols)}`;
    picture.append(Object.assign(svg("title"), { textContent: `${tensor.name}, ${words}, ${comma(tensor.bytes)} bytes${tensor.slabs > 1 ? " in all" : ""}` }));
    return { root: el("figure", {}, picture, el("figcaption", {}, label, note)), groups, cells, active, note, tensor, slab: 0 };
  }

  scoresFigure() {
    const tiles = this.moves.flatMap(move => move[MADE]), ratio = data.rows / Math.max(1, data.cols);
    const root = el("figure", { className: "scores" });
    if (!tiles.length) return { root, cells: new Map(), groups: new Map(), count: 0 };
    const width = ratio > 1 ? 180 / ratio : 180;
    const picture = svg("svg", { width, height: Math.max(10, width * ratio), viewBox: `0 0 ${data.cols} ${data.rows}`, preserveAspectRatio: "none", role: "img", class: "scores" });
    picture.style.cssText = `width: min(100%, ${width}px); height: auto; aspect-ratio: ${Math.max(1, data.cols)} / ${Math.max(1, data.rows, data.cols / 16)}`;
    picture.setAttribute("aria-label", "The tiles of S that have been made; the numbers stand below");
    picture.append(svg("rect", { class: "back", width: data.cols, height: data.rows }));
    const groups = new Map(), cells = new Map();
    for (const tile of tiles) {
      const key = tile.join();
      if (cells.has(key)) continue;
      if (!groups.has(tile[0])) groups.set(tile[0], picture.appendChild(svg("g")));
      const cell = svg("rect", { class: "cell" });
      place(cell, tile.slice(1));
      groups.get(tile[0]).append(cell);
      cells.set(key, { cell, times: 0, shown: "", tile });
    }
    // What rows do not see, score by score
    const pattern = `masked-${this.number}`, step = data.cols / 26, defs = svg("defs");
    const flat = Math.min(1, 16 * data.rows / data.cols);  // few rows are drawn higher than they are
    const hatch = svg("pattern", { id: pattern, width: step, height: step, patternUnits: "userSpaceOnUse", patternTransform: `scale(1 ${flat}) rotate(45)` });
    hatch.append(svg("rect", { width: step, height: step, fill: "var(--soft)", "fill-opacity": 0.16 }));
    hatch.append(svg("line", { x1: 0, y1: 0, x2: 0, y2: step, stroke: "var(--soft)", "stroke-width": step / 4 }));
    defs.append(hatch);
    picture.append(defs);
    this.masked = data.masks.map(rows => {
      const path = rows.map((ends, row) => ends.map((end, at) => at % 2 ? `H${end}v1H${ends[at - 1]}z` : `M${end} ${row}`).join("")).join("");
      return picture.appendChild(svg("path", { d: path, fill: `url(#${pattern})`, class: "masked" }));
    });
    const label = el("figcaption");
    label.style.whiteSpace = "normal";
    root.append(el("h3", { textContent: "S = Q Kᵀ, tile by tile" }), picture, label);
    const all = this.decodes ? 0 : Math.ceil(data.rows / this.told.block_rows) * Math.ceil(data.cols / this.told.block_cols) * data.heads * data.batch;
    return { root, picture, groups, cells, label, all, count: 0 };
  }

  table() {
    const body = el("tbody");
    this.cells = this.told.tensors.map(tensor => {
      const read = el("td"), write = el("td");
      body.append(el("tr", {}, el("td", {}, ...spell(tensor.name)), read, write));
      return [read, write];
    });
    this.sums = [el("td"), el("td")];
    body.append(el("tr", { className: "total" }, el("td", { textContent: "all" }), ...this.sums));
    const heads = ["tensor", "bytes read, of", "bytes written, of"].map(textContent => el("th", { textContent, scope: "col" }));
    return el("table", {}, el("thead", {}, el("tr", {}, ...heads)), body);
  }

  reset() {
    this.done = 0;
    this.counts = this.told.tensors.map(() => [0, 0]);
    for (const figure of this.figures) { for (const cell of figure.cells.values()) cell.on = !cell.made; figure.slab = 0; }
    for (const cell of this.scores.cells.values()) cell.times = 0;
    this.scores.count = this.scores.again = 0;
    this.work = null;
    this.launch = -1;
    this.block = -1;
    this.slots = {};
    this.i = this.j = null;
    this.head = 0;
  }

  // Move on by one
  apply(move) {
    const tensor = this.told.tensors[move[TENSOR]], figure = this.figures[move[TENSOR]];
    this.enter(move);
    this.counts[move[TENSOR]][move[WRITE]] += move[BYTES];
    if (move[WRITE]) { const cell = figure.cells.get(move.slice(SLAB, C1 + 1).join()); if (cell) cell.on = true; }
    this.hold(move);
    for (const made of move[MADE]) {
      const cell = this.scores.cells.get(made.join());
      if (!cell.times++) this.scores.count++; else this.scores.again++;
      this.work = cell;
      this.head = made[0];
      const launch = this.told.launches[move[LAUNCH]];
      [this.i, this.j] = [this.row(made[0], made[1], launch), Math.floor(made[3] / launch.block_cols) + 1];
    }
    this.done++;
  }

  // A new thread block has nothing on chip
  enter(move) {
    if (move[LAUNCH] !== this.launch || move[BLOCK] !== this.block) {
      [this.launch, this.block, this.slots, this.work, this.i, this.j] = [move[LAUNCH], move[BLOCK], {}, null, null, null];
    }
    const axes = this.told.tensors[move[TENSOR]].axes, launch = this.told.launches[move[LAUNCH]];
    if (axes[0] === "i" && !this.work) this.i = this.row(move[SLAB], move[R0], launch);
    if (axes === "j" && !this.work) this.j = this.column(move);
    if (axes === "ij" && !this.work) this.j = Math.floor(move[C0] / launch.block_cols) + 1;
    this.figures[move[TENSOR]].slab = move[SLAB];
  }

  hold(move) {
    const tensor = this.told.tensors[move[TENSOR]], inside = this.told.launches[move[LAUNCH]].inside[tensor.name];
    if (!inside) return;
    for (const each of Object.values(this.slots).flat()) each.gone ||= each.write;
    const [room, many] = inside, held = this.slots[room] ??= [], at = this.slot(move, room, many), piece = this.pieceOf(move, held[at]);
    const bytes = piece ? held[at].bytes + (move[WRITE] ? 0 : move[BYTES]) : move[BYTES];
    held[at] = { tensor: home(tensor.name), tile: home(this.tile(move)), turn: this.done, bytes, write: piece ? 0 : move[WRITE] };
  }

  // Whether a move is of a tile that is held: in decoding pages and new keys are pieces of K_j, and the rows of several heads of Q_i
  pieceOf(move, held) { return this.decodes && held && !held.gone && held.tile === home(this.tile(move)); }

  // Where in its room a tile goes: in the place of the oldest of its tensor, and where all are taken (O through Q's room) in the first
  slot(move, room, many) {
    const held = this.slots[room] ?? [], tensor = home(this.told.tensors[move[TENSOR]].name), begun = held.findIndex(each => this.pieceOf(move, each));
    if (begun >= 0) return begun;
    const own = held.flatMap((each, at) => each.tensor === tensor && !each.gone ? [at] : []);
    if (own.length >= many) return own.reduce((a, b) => held[a].turn < held[b].turn ? a : b);
    const free = held.findIndex(each => each.gone);
    return free >= 0 ? free : held.length < this.slotCount(room) ? held.length : 0;
  }

  // Tiles that a room has places for: of each tensor of a ring ("K, V") so many, else of one
  slotCount(room) {
    const inside = Object.entries(this.told.launches[Math.max(0, this.launch)].inside);
    const all = inside.flatMap(([name, place]) => place[0] === room && home(name) === name ? [place] : []);
    return (room.includes(",") ? all : all.slice(0, 1)).reduce((sum, [, many]) => sum + many, 0);
  }

  // All state after `t` bytes; a fraction of the next move is in flight
  seek(t) {
    if (t < this.t) this.reset();
    while (this.done < this.moves.length && this.ends[this.done] <= t) this.apply(this.moves[this.done]);
    this.t = Math.min(t, this.total);
    const begun = this.done ? this.ends[this.done - 1] : 0, next = this.moves[this.done];
    this.flying = next && t > begun ? next : null;
    this.fraction = this.flying ? (t - begun) / next[BYTES] : 1;
    this.current = this.flying ?? (this.done ? this.moves[this.done - 1] : null);
    if (this.flying) this.enter(this.flying);
  }

  render(moving) {
    const told = this.told, move = this.current;
    this.renderLaunch();
    for (const [at, figure] of this.figures.entries()) {
      for (const cell of figure.cells.values()) if (cell.on !== cell.shown) { cell.cell.classList.toggle("on", cell.on); cell.shown = cell.on; }
      if (figure.groups.size > 1) for (const [slab, group] of figure.groups) group.style.display = slab === figure.slab ? "" : "none";
      const many = figure.tensor.slabs > 1 && figure.tensor.axes;
      const text = many ? ` ${figure.slab + 1}/${figure.tensor.slabs}` : "";
      if (figure.note.textContent !== text) figure.note.textContent = text;
      const here = move && move[TENSOR] === at;
      figure.active.setAttribute("class", here ? `active ${move[WRITE] ? "write" : "read"}` : "active");
      if (here) place(figure.active, move.slice(R0, C1 + 1));
    }
    this.renderScores();
    this.renderLines(move);
    this.renderText(move);
    const sums = [0, 0];
    for (const [at, counts] of this.counts.entries()) {
      for (const side of [0, 1]) {
        const bytes = counts[side], whole = told.tensors[at][side ? "write_bytes" : "read_bytes"];
        sums[side] += bytes;
        this.showCount(this.cells[at][side], bytes, whole);
      }
    }
    for (const side of [0, 1]) this.showCount(this.sums[side], sums[side], told.tensors.reduce((sum, tensor) => sum + tensor[side ? "write_bytes" : "read_bytes"], 0));
    const scale = 100 / most;
    this.whole.style.width = `${told.total_bytes * scale}%`;
    this.bars[0].style.width = `${sums[0] * scale}%`;
    this.bars[1].style.left = `${sums[0] * scale}%`;
    this.bars[1].style.width = `${sums[1] * scale}%`;
    const all = `${comma(sums[0] + sums[1])} of ${comma(told.total_bytes)} bytes${this.beside}`;
    if (this.moved.textContent !== all) this.moved.textContent = all;
    this.renderGhost(moving);
  }

  showCount(cell, bytes, whole) {
    const text = whole ? `${comma(bytes)} / ${comma(whole)}` : "–";
    if (cell.dataset.text === text) return;
    cell.dataset.text = text;
    cell.replaceChildren(...(whole ? [comma(bytes), el("small", { textContent: ` / ${comma(whole)}` })] : [el("small", { textContent: "–" })]));
  }

  renderLaunch() {
    const number = Math.max(0, this.launch), launch = this.told.launches[number];
    if (this.shownLaunch !== number) {
      this.shownLaunch = number;
      const used = launch.rooms.reduce((sum, room) => sum + room[1], 0);
      this.capacity.textContent = `SRAM: ${comma(used)} of ${comma(this.told.sram_bytes)}`;
      this.meter.replaceChildren(...launch.rooms.map(([name, bytes]) => { const part = el("i", { title: `${name}: ${comma(bytes)} bytes` }); part.style.width = `${100 * bytes / this.told.sram_bytes}%`; return part; }));
      this.slotBoxes = {};
      this.rooms.replaceChildren(...launch.rooms.map(([name, bytes]) => {
        const inside = Object.values(launch.inside).some(([where]) => where === name);
        const boxes = inside ? Array.from({ length: this.slotCount(name) }, () => el("div", { className: "slot" })) : [];
        this.slotBoxes[name] = boxes;
        const label = el("span", { textContent: name.replaceAll("_", " ") }), size = el("span", { className: "soft num", textContent: comma(bytes) });
        return el("div", { className: "room" }, label, size, ...(boxes.length ? [el("div", { className: "slots" }, ...boxes)] : []));
      }));
      if (!launch.rooms.length) this.rooms.replaceChildren(el("div", { className: "soft room", textContent: "This kernel holds nothing there." }));
    }
    const move = this.current, target = move && this.target(move);
    for (const [room, boxes] of Object.entries(this.slotBoxes)) {
      const held = this.slots[room] ?? [];
      boxes.forEach((box, at) => {
        const full = held[at]?.gone ? null : held[at], side = target === box ? (move[WRITE] ? "out" : "in") : "";
        const name = `slot ${full ? "full" : ""} ${side}`;
        if (box.className !== name) box.className = name;
        const text = target === box ? home(this.tile(move)) : full ? full.tile : "";
        if (box.dataset.text !== text) { box.dataset.text = text; box.replaceChildren(...spell(text)); }
      });
    }
    const text = (launch.registers || "nothing of a tile").replaceAll("_ij", this.i && this.j ? `_${this.i},${this.j}` : "_ij").replace(/_i(?!j)/g, `_${this.i ?? "i"}`).replaceAll("_j", `_${this.j ?? "j"}`);
    if (this.registers.dataset.text !== text) { this.registers.dataset.text = text; this.registers.replaceChildren(...spell(text)); }
    const name = `registers ${target === this.registers ? (move[WRITE] ? "out" : "in") : ""}`;
    if (this.registers.className !== name) this.registers.className = name;
  }

  // Where a move's tile is on chip
  target(move) {
    const tensor = this.told.tensors[move[TENSOR]], inside = this.told.launches[move[LAUNCH]].inside[tensor.name];
    const boxes = inside && this.slotBoxes[inside[0]];
    if (!boxes?.length) return this.registers;
    if (this.flying) return boxes[this.slot(move, ...inside)];
    return boxes[(this.slots[inside[0]] ?? []).findIndex(each => each.turn === this.done - 1)] ?? boxes[0];  // the last that came
  }

  renderScores() {
    const { scores } = this;
    if (!scores.cells.size) return;
    for (const cell of scores.cells.values()) {
      const name = `cell ${cell.times ? "on" : ""} ${cell === this.work ? "at" : ""}`;
      if (name !== cell.shown) { cell.cell.setAttribute("class", name); cell.shown = name; if (cell === this.work) cell.cell.parentNode.append(cell.cell); }
    }
    for (const [head, group] of scores.groups) group.style.display = head === this.head ? "" : "none";
    this.masked.forEach((path, at) => path.style.display = at === data.mask_of[this.head] ? "" : "none");
    const of = scores.cells.size, skipped = scores.all - of, head = data.heads * data.batch > 1 ? `head ${this.head + 1} of ${data.heads * data.batch} shown; ` : "";
    const text = `${head}${scores.count} of ${of} tiles made${scores.again ? `, ${scores.again} made again` : ""}${skipped > 0 ? `; ${skipped} skipped` : ""}`;
    if (scores.label.textContent !== text) scores.label.textContent = text;
  }

  renderLines(move) {
    const working = this.work && move && !this.flyingIn() ? this.told.launches[Math.max(0, this.launch)].scores : [];
    const lit = move && this.t > 0 ? move[LINE] : -1, ended = this.done === this.moves.length;
    this.lines.forEach((line, at) => {
      const name = ended ? "" : at === lit ? (move[WRITE] ? "write" : "read") : working.includes(at) ? "work" : "";
      if (line.className !== name) { line.className = name; name && name !== "work" ? line.setAttribute("aria-current", "step") : line.removeAttribute("aria-current"); }
    });
  }

  // Whether a tile of Q or K is on its way with which the next tile of S begins
  flyingIn() { return this.flying && this.flying[MADE].length > 0; }

  describe(move) {
    const launch = this.told.launches[move[LAUNCH]], tensor = this.told.tensors[move[TENSOR]], tile = this.tile(move);
    const where = launch.inside[tensor.name] ? "SRAM" : "registers";
    const heads = data.heads * data.batch, split = tensor.name.includes("_part") ? `, split ${Math.floor(move[SLAB] / heads) + 1}` : "";
    const slab = `${split}${tensor.slabs > 1 && tensor.axes ? `, head ${(split ? move[SLAB] % heads : move[SLAB]) + 1}` : ""}`;
    const rows = tensor.axes ? `${span("row", move[R0], move[R1])}${tensor.axes === "ij" ? `, ${span("column", move[C0], move[C1])}` : ""}${slab}` : "";
    const part = this.place(move, slab) || rows;
    return [this.sentence(move, tile, where), part];
  }

  // What a move does and why, and which tile of S can be made with it, in one sentence
  sentence(move, tile, where) {
    const launch = this.told.launches[move[LAUNCH]], name = this.told.tensors[move[TENSOR]].name, write = move[WRITE];
    const why = write && launch.reasons.first && !this.reads(move) ? launch.reasons.first : launch.reasons[write ? "write" : "read"][name];
    const way = write ? `is written from ${where} to HBM` : `is read from HBM into ${where}`;
    const made = move[MADE].map(one => `${this.row(one[0], one[1], launch)},${Math.floor(one[3] / launch.block_cols) + 1}`);
    const [i, j] = made.length === 1 ? made[0].split(",") : [];
    const then = !made.length ? "" : i ? `; now S_${i},${j} = Q_${i} K_${j}ᵀ can be made on chip` : `; now ${made.length} tiles of S can be made on chip`;
    return `${tile} (${plural(move[BYTES], "byte")}) ${way}${why ? `, ${why}` : ""}${then}.`;
  }

  // Whether a move's thread block has read anything before it
  reads(move) {
    for (let at = this.moves.indexOf(move) - 1; at >= 0; at--) {
      const one = this.moves[at];
      if (one[LAUNCH] !== move[LAUNCH] || one[BLOCK] !== move[BLOCK]) return false;
      if (!one[WRITE]) return true;
    }
    return false;
  }

  // The bytes at which its first tile of S can be made
  get opening() { const at = this.moves.findIndex(move => move[MADE].length); return at < 0 ? 0 : this.ends[at]; }

  // Where keys of a cache are, and a table's places; nothing of all else
  place(move, slab) {
    const tensor = this.told.tensors[move[TENSOR]], page = this.page(move);
    if (tensor.name === "block_table") return `${span("page", move[C0], move[C1])} of sequence ${move[R0] + 1}`;
    if (!page) return "";
    const keys = `${span("key", this.key(move), this.key(move) + move[R1] - move[R0])} of sequence ${page[0] + 1}${slab}`;
    return tensor.name.endsWith("_new") ? keys : `page ${Math.floor(move[R0] / tensor.page_rows) + 1} of the cache: ${keys}`;
  }

  renderText(move) {
    const ended = this.done === this.moves.length, name = `now ${!move || ended ? "" : move[WRITE] ? "write" : "read"}`;
    let key = "start", lines = ["Nothing has moved yet.", "", ""];
    if (ended) [key, lines] = ["end", [`Done: ${comma(this.total)} bytes${this.total === this.told.total_bytes ? ", as the closed form says." : ", not the closed form's."}`, "", ""]];
    else if (move && this.t > 0) {
      key = `${this.flying ? this.done : this.done - 1}`;
      const launch = this.told.launches[move[LAUNCH]], [head, part] = this.describe(move), of = this.told.launches.length;
      lines = [head, part, `${launch.kernel}${of > 1 ? ` (${move[LAUNCH] + 1} of ${of} launches)` : ""}, thread block ${move[BLOCK] + 1} of ${launch.blocks}; ${this.told.sources[move[SOURCE]]}`];
    }
    if (this.shownText === key) return;
    this.shownText = key;
    this.now.className = name;
    this.now.replaceChildren(el("span", {}, ...spell(lines[0])), ...lines.slice(1).map(textContent => el("small", { textContent })));
    this.words = lines.filter(Boolean).join("; ");
  }

  renderGhost(moving) {
    const move = this.flying;
    if (!moving || !move || calm.matches || !this.root.offsetParent) { this.ghost.style.display = "none"; return; }
    const frame = this.root.getBoundingClientRect(), far = this.figures[move[TENSOR]].active.getBoundingClientRect(), near = this.target(move).getBoundingClientRect();
    const along = move[WRITE] ? 1 - this.fraction : this.fraction, smooth = along * along * (3 - 2 * along);
    const mix = (a, b) => a + (b - a) * smooth;
    const style = this.ghost.style, size = Math.min(near.width, 64);
    style.display = "block";
    style.transform = `translate(${mix(far.left, near.left) - frame.left}px, ${mix(far.top, near.top) - frame.top}px)`;
    style.width = `${mix(Math.max(far.width, 6), size)}px`;
    style.height = `${mix(Math.max(far.height, 6), near.height)}px`;
    this.ghost.className = `ghost ${move[WRITE] ? "write" : ""}`;
  }
}

// -- the page: players of one problem, one of them in full or all side by side

let players = [], most = 1, rate = 1, subject = 0, shown = null;

// Make the players of a report, and open where the subject can make its first tile of S
function load(report) {
  Object.assign(data, report);
  $("panels").replaceChildren();
  $("race").replaceChildren();
  most = Math.max(1, ...data.players.map(player => player.total_bytes));
  players = data.players.map((told, number) => new Player(told, number));
  // At 1x a move takes about a quarter of a second, and all of them no more than two minutes
  rate = most / Math.min(120, Math.max(15, players.reduce((sum, player) => Math.max(sum, player.moves.length), 1) * 0.25));
  subject = Math.max(0, data.players.findIndex(each => each.algorithm !== "standard"));
  const kept = data.players.map(player => player.name).join(", ").replace(/, ([^,]*)$/, " and $1");
  const backwards = data.players.filter(player => player.backward).length, gradients = backwards > 0 && backwards < data.players.length;
  const purpose = backwards && !gradients ? "for the gradients of" : "to compute";
  $("what").textContent = `What ${kept} ${data.players.length > 1 ? "move" : "moves"} between HBM and the SRAM of a thread block ${purpose} softmax(Q Kᵀ / √d) V${gradients ? " and its gradients" : ""}`;
  $("title").textContent = data.title;
  $("device").textContent = `simulated ${data.device}, ${comma(data.players[0].sram_bytes)} bytes of SRAM a thread block`;
}

const together = el("button", { type: "button", textContent: "All side by side", onclick: () => view(shown === null ? subject : null) });
function view(number) {
  shown = number;
  for (const id of ["panels", "race"]) $(id).classList.toggle("one", number !== null);
  for (const player of players) {
    const on = player.number === number;
    player.root.classList.toggle("chosen", on);
    player.moved.classList.toggle("chosen", on);
    player.choice.setAttribute("aria-pressed", String(on));
  }
  together.setAttribute("aria-pressed", String(number === null));
}

const executed = { ...data };
load(executed);
if (players.length > 1) $("views").append(together);
view(subject);

if (data.choices) { const sizes = new Sizes(data.choices); $("choose").prepend(sizes.root); $("choose").after(sizes.said); }

const timed = data.players.filter(told => told.launches.some(one => one.timeline || one.timeline_why));
const choices = timed.map(told => new Choice(`${capital(told.name)}: one thread block, by its warps`,
  told.launches.map(one => ({ label: `${one.kernel}: ${one.does}`, timeline: one.timeline, why: one.timeline_why })), ([file, line]) => el("span", { textContent: `${file}:${line}` })));
const drawn = timed.flatMap(told => told.launches.filter(one => one.timeline).map(one => ({ name: capital(told.name), kernel: one.kernel, timeline: one.timeline })));
const compare = drawn.length > 1 ? new Compare(drawn) : null;
if (choices.length) $("timelines").append(...choices.map(choice => choice.root), ...compare ? [compare.root] : []); else $("timelines").remove();
let t = 0, playing = false, last = 0, goal = null, clockText = "";

function show() {
  const quick = playing ? rate * Number($("speed").value) : 0;
  for (const player of players) {
    player.seek(t);
    const slow = !quick || (player.flying && player.flying[BYTES] / quick > 0.06);
    player.render((playing || goal !== null) && slow);
  }
  $("at").value = 1000 * t / most;
  const text = `${comma(t)} of ${comma(most)} bytes`;
  if (text !== clockText) { $("clock").textContent = clockText = text; $("at").setAttribute("aria-valuetext", text); }
}
function speak() { $("spoken").textContent = players.map(player => `${capital(player.told.name)}: ${player.words}.`).join(" "); }
function set(on) {
  if (on && t >= most) t = 0;
  playing = on;
  goal = null;
  $("play").textContent = on ? "Pause" : "Play";
  last = performance.now();
  if (on) requestAnimationFrame(frame); else { show(); speak(); }
}
function frame(now) {
  const passed = Math.min(100, now - last) / 1000;
  last = now;
  if (playing) {
    t = Math.min(most, t + passed * rate * Number($("speed").value));
    if (t >= most) return set(false);
  } else if (goal !== null) {
    const left = goal.to - t, speed = (goal.to - goal.from) / 0.28;
    t = left <= speed * passed ? goal.to : t + speed * passed;
    if (t === goal.to) goal = null;
  } else return;
  show();
  if (playing || goal !== null) requestAnimationFrame(frame); else speak();
}
// To where the next move of any player ends
function step() {
  if (playing) set(false);
  const from = goal === null ? t : goal.to;
  const to = Math.min(most, ...players.map(player => player.ends[upper(player.ends, from)] ?? Infinity));
  t = from;
  if (calm.matches || document.hidden || to === from) { t = to; goal = null; show(); speak(); return; }
  const idle = goal === null;
  goal = { from, to };
  last = performance.now();
  if (idle) requestAnimationFrame(frame);
}
function back() {
  if (playing) set(false);
  const from = goal === null ? t : goal.to;
  goal = null;
  t = Math.max(0, ...players.map(player => { const at = lower(player.ends, from); return at ? player.ends[at - 1] : 0; }));
  show();
  speak();
}
function jump(to) { if (playing) set(false); goal = null; t = to; show(); speak(); }
function upper(list, x) { let a = 0, b = list.length; while (a < b) { const m = a + b >> 1; if (list[m] > x) b = m; else a = m + 1; } return a; }
function lower(list, x) { let a = 0, b = list.length; while (a < b) { const m = a + b >> 1; if (list[m] < x) a = m + 1; else b = m; } return a; }
function faster(by) { const speed = $("speed"); speed.selectedIndex = Math.max(0, Math.min(speed.options.length - 1, speed.selectedIndex + by)); }

$("play").onclick = () => set(!playing);
$("step").onclick = step;
$("back").onclick = back;
$("home").onclick = () => jump(0);
$("end").onclick = () => jump(most);
$("at").oninput = event => { if (playing) set(false); goal = null; t = most * event.target.value / 1000; show(); };
$("at").onchange = speak;
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  if (event.key === " " && ["BUTTON", "SUMMARY"].includes(event.target.tagName)) return;
  const act = { " ": () => set(!playing), ArrowRight: step, ArrowLeft: back, Home: () => jump(0), End: () => jump(most), "+": () => faster(1), "=": () => faster(1), "-": () => faster(-1) }[event.key];
  if (act) { event.preventDefault(); act(); }
});
jump(players[subject].opening);
