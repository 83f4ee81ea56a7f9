// The SRAM sets the tiles, the tiles set the bytes.

const ITEM = 4;  // float32: one item size for everything, as in the paper's count
const SRAM = (() => {
  const found = new Set([...data.devices.map(device => device.sram), ...[16, 32, 64, 128, 256].map(d => 12 * d * d)]);
  for (let at = 0; at <= 80; at++) found.add(Math.round(2 ** (at / 8)) * 1024);
  return [...found].filter(size => size >= 1024 && size <= 1 << 20).sort((a, b) => a - b);
})();

class Memory extends Lesson {
  constructor() {
    super("memory", { block_rows: 0, block_cols: 0 });
    this.changed("sram");
    const tall = width => Math.min(width * (width < 220 ? 0.92 : 0.74), 300);
    const heads = () => [text("memory.tensor"), ...["standard", "fa1"].flatMap(name => [`${text(`memory.${name}`)}, ${text("memory.read")}`, text("memory.written")])];
    this.root = this.build(
      slider(this, { name: "sram", stops: SRAM, shown: size => this.sramTold(size), main: true }),
      bars(this, () => this.bars()),
      this.verdict = el("p", { className: "verdict" }),
      el("div", { className: "pictures" },
        figure(picture(this, tall, (...place) => this.paintTiles(...place)), caption(this, "memory.tiles_caption", () => this.values())),
        figure(this.chart = picture(this, tall, (...place) => this.paintChart(...place)), caption(this, "memory.chart_caption", () => this.values()))),
      el("div", { className: "controls" },
        slider(this, { name: "head_dim", stops: [16, 32, 64, 96, 128, 192, 256] }),
        slider(this, { name: "seqlen", stops: [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536] }),
        slider(this, { name: "heads", stops: [1, 2, 4, 8, 16, 32, 64] }),
        slider(this, { name: "block_rows", stops: counting(1, 256) }),
        slider(this, { name: "block_cols", stops: counting(1, 512) }),
        check(this, "causal")),
      details(this, "memory.table", heads, () => this.rows()));
    this.draws.push(() => {
      const { ratio, fits } = this.now();
      this.verdict.className = `verdict ${!fits || ratio > 1 ? "bad" : "good"}`;
      this.verdict.replaceChildren(...say(fits ? ratio > 1 ? "memory.more" : "memory.less" : "memory.too_large", this.values()));
    });
    this.dragged();
  }

  changed(name) {
    const { state } = this;
    if (name === "sram" || name === "head_dim") Object.assign(state, forms.tiles(Math.floor(state.sram / ITEM), state.head_dim));
  }

  counted(algorithm, state) {
    const { read, written } = forms.forward(algorithm, state.seqlen, state.head_dim, state.block_rows, state.block_cols, state.causal, ITEM);
    const times = tensors => Object.fromEntries(Object.entries(tensors).map(([name, moved]) => [name, moved * state.heads]));
    return { read: times(read), written: times(written), total: (totalOf(read) + totalOf(written)) * state.heads };
  }

  now() {
    const { state } = this, standard = this.counted("standard", state), flash = this.counted("fa1", state);
    const paper = forms.tiles(Math.floor(state.sram / ITEM), state.head_dim);
    const need = 2 * (state.block_rows + state.block_cols) * state.head_dim;
    // The paper's ceil may ask for up to a row too much of each tile, which is let pass.
    const fits = need <= Math.max(state.sram / ITEM, 2 * (paper.block_rows + paper.block_cols) * state.head_dim);
    return { standard, flash, ratio: flash.total / standard.total, need, fits };
  }

  sramTold(size) {
    const device = data.devices.find(each => each.sram === size);
    return kibibytes(size) + (device ? ` (${device.name})` : "");
  }

  values() {
    const { state } = this, { ratio, need, standard, flash } = this.now();
    return {
      block_rows: number(state.block_rows), block_cols: number(state.block_cols), row_blocks: number(Math.ceil(state.seqlen / state.block_rows)),
      col_blocks: number(Math.ceil(state.seqlen / state.block_cols)), ratio: ratio.toPrecision(3), times: (ratio < 1 ? 1 / ratio : ratio).toPrecision(3),
      even: kibibytes(ITEM * forms.tiles(1, state.head_dim).break_even), head_dim: number(state.head_dim), need: kibibytes(need * ITEM),
      sram: kibibytes(state.sram), standard: bytes(standard.total), flash: bytes(flash.total),
    };
  }

  solved() {
    const { ratio, fits } = this.now(), { head_dim, causal, sram } = this.state;
    return head_dim === 128 && !causal && fits && Math.abs(ratio - 1) < 0.05 && Math.abs(sram / (ITEM * forms.tiles(1, head_dim).break_even) - 1) < 0.1;
  }

  told() { return plain(text("memory.told"), this.values()); }

  bars() {
    const { standard, flash } = this.now();
    const parts = one => [["in", totalOf(one.read)], ["out", totalOf(one.written)]];
    return [
      { name: "standard", label: text("memory.standard"), parts: parts(standard), told: bytes(standard.total) },
      { name: "fa1", label: text("memory.fa1"), parts: parts(flash), told: bytes(flash.total) },
    ];
  }

  rows() {
    const { standard, flash } = this.now(), shown = n => n === undefined ? "–" : comma(n);
    const names = [...new Set([standard.read, standard.written, flash.read, flash.written].flatMap(Object.keys))];
    const merged = names.filter(name => name !== "O_acc").map(name => {
      const sum = side => name === "O" && flash[side].O_acc !== undefined ? (flash[side].O ?? 0) + flash[side].O_acc : flash[side][name];
      return [name, shown(standard.read[name]), shown(standard.written[name]), shown(sum("read")), shown(sum("written"))];
    });
    return [...merged, [text("memory.all"), ...[standard, flash].flatMap(one => [comma(totalOf(one.read)), comma(totalOf(one.written))])]];
  }

  // S as tiles, Q and O beside it, K and V above it
  paintTiles(root, width, height) {
    const { state } = this, strip = 15, gap = 5, left = strip + gap + 16, top = strip + gap + 14;
    const side = Math.min(width - left - strip - gap - 18, height - top - 4), x = left, y = top;
    const rows = Math.ceil(state.seqlen / state.block_rows), cols = Math.ceil(state.seqlen / state.block_cols);
    const cellWidth = side / cols, cellHeight = side / rows, i = Math.floor(rows * 0.6), j = Math.floor(cols * 0.3);
    const atX = x + side * j / cols, atY = y + side * i / rows, wide = Math.max(cellWidth, 2), tall = Math.max(cellHeight, 2);
    box(root, x, y, side, side, "var(--faint)", { stroke: "var(--soft)" });
    if (state.causal) add(root, "path", { d: this.stairs(x, y, side, rows, cols), fill: "var(--paper)", stroke: "none" });
    const lines = [];
    if (cellWidth >= 2.5) for (let n = 1; n < cols; n++) lines.push(`M${x + n * cellWidth} ${y}V${y + side}`);
    if (cellHeight >= 2.5) for (let n = 1; n < rows; n++) lines.push(`M${x} ${y + n * cellHeight}H${x + side}`);
    add(root, "path", { d: lines.join(""), class: "axis" });
    box(root, x, y, side, side, "none", { stroke: "var(--soft)" });
    for (const [tensor, at, from] of [["Q", x - gap - strip, "input"], ["O", x + side + gap, "output"]]) {
      box(root, at, y, strip, side, "var(--held)");
      box(root, at, atY, strip, tall, from === "input" ? "var(--read)" : "var(--write)");
      write(root, at + strip / 2, y - 6, tensor, { "text-anchor": "middle" });
    }
    box(root, x, y - gap - strip, side, strip, "var(--held)");
    box(root, atX, y - gap - strip, wide, strip, "var(--read)");
    write(root, x + side / 2, y - gap - strip - 5, "Kᵀ, V", { "text-anchor": "middle" });
    box(root, atX, atY, wide, tall, "var(--made)", { stroke: "var(--ink)", "stroke-width": 1 });
    const room = atX + wide + 6 < x + side - 34 ? [atX + wide + 5, atY + tall / 2 + 4, "start"] : [atX - 5, atY + tall / 2 + 4, "end"];
    if (wide > 34 && tall > 18) write(root, atX + wide / 2, atY + tall / 2 + 4, "S_ij", { "text-anchor": "middle", style: "fill: var(--paper)" });
    else write(root, room[0], room[1], "S_ij", { "text-anchor": room[2] });
    write(root, x - gap - strip - 4, atY + tall / 2 + 4, "i", { "text-anchor": "end", class: "soft" });
    if (side > 150) write(root, atX + wide / 2 + 10, y - gap - strip - 5, "j", { "text-anchor": "middle", class: "soft" });
  }

  // The tiles that a causal mask leaves out: above the diagonal, whole tiles only
  stairs(x, y, side, rows, cols) {
    const { state } = this, points = [`M${x + side} ${y}`];
    for (let i = 0; i < rows; i++) {
      const seen = Math.ceil(Math.min((i + 1) * state.block_rows, state.seqlen) / state.block_cols);
      points.push(`L${x + side * seen / cols} ${y + side * i / rows}V${y + side * (i + 1) / rows}`);
    }
    return `${points.join("")}H${x + side}Z`;
  }

  // -- HBM bytes over M, both logarithmic

  scales(width, height) {
    const left = width < 260 ? 46 : 54, right = width - 12, top = 16, bottom = height - 34;
    const curve = SRAM.map(sram => [sram, this.counted("fa1", { ...this.state, sram, ...forms.tiles(Math.floor(sram / ITEM), this.state.head_dim) }).total]);
    const standard = this.now().standard.total, all = [...curve.map(point => point[1]), standard];
    const low = Math.log10(Math.min(...all)) - 0.15, high = Math.log10(Math.max(...all)) + 0.15;
    const span = Math.log2(SRAM.at(-1) / SRAM[0]);
    const x = sram => left + Math.log2(sram / SRAM[0]) / span * (right - left);
    return { left, right, top, bottom, curve, standard, low, high, x, y: moved => bottom - (Math.log10(moved) - low) / (high - low) * (bottom - top),
      sram: at => SRAM[0] * 2 ** ((at - left) / (right - left) * span) };
  }

  paintChart(root, width, height) {
    const { left, right, top, bottom, curve, standard, low, high, x, y } = this.scales(width, height), { state } = this;
    for (let power = Math.ceil(low); power <= high; power++) {
      add(root, "path", { d: `M${left} ${y(10 ** power)}H${right}`, class: "axis" });
      write(root, left - 6, y(10 ** power) + 4, bytes(10 ** power), { "text-anchor": "end", class: "soft" });
    }
    for (const size of width < 320 ? [1, 32, 1024] : [1, 4, 16, 64, 256, 1024]) write(root, x(size * 1024), bottom + 15, kibibytes(size * 1024), { "text-anchor": size === 1024 ? "end" : "middle", class: "soft" });
    write(root, right, height - 4, text("memory.axis"), { "text-anchor": "end", class: "soft" });
    add(root, "path", { d: `M${left} ${top}V${bottom}H${right}`, class: "axis" });
    const even = ITEM * forms.tiles(1, state.head_dim).break_even;
    if (even >= SRAM[0] && even <= SRAM.at(-1)) {
      add(root, "path", { d: `M${x(even)} ${top}V${bottom}`, stroke: "var(--soft)", "stroke-dasharray": "3 3" });
      const after = x(even) < left + 80, told = width > 260 ? `3 d² = ${kibibytes(even)}` : "3 d²";  // below the curve there is room, on its left if that is wide enough
      write(root, x(even) + (after ? 5 : -5), after ? top + 8 : bottom - 6, told, { class: "soft", "text-anchor": after ? "start" : "end" });
    }
    add(root, "path", { d: `M${left} ${y(standard)}H${right}`, class: "curve", stroke: "var(--soft)" });
    if (width > 260) write(root, right, y(standard) - 6, text("memory.standard"), { "text-anchor": "end", class: "soft" });
    add(root, "path", { d: `M${curve.map(([sram, moved]) => `${x(sram)} ${y(moved)}`).join("L")}`, class: "curve", stroke: "var(--made)" });
    const { flash, fits } = this.now(), atX = x(state.sram), atY = Math.min(Math.max(y(flash.total), top), bottom);
    add(root, "path", { d: `M${atX} ${atY}V${bottom}`, stroke: "var(--made)", "stroke-dasharray": "2 3" });
    add(root, "circle", { cx: atX, cy: atY, r: 8, fill: fits ? "var(--made)" : "var(--write)", stroke: "var(--paper)", "stroke-width": 2, class: "handle" });
    box(root, left, top, right - left, bottom - top, "transparent", { class: "handle", id: "memory-drag" });
  }

  dragged() {
    const { root } = this.chart;
    const move = event => {
      const place = root.getBoundingClientRect(), asked = this.scales(place.width, place.height).sram(event.clientX - place.left);
      this.set("sram", SRAM.reduce((best, size) => Math.abs(Math.log(size / asked)) < Math.abs(Math.log(best / asked)) ? size : best));
    };
    root.onpointerdown = event => { root.setPointerCapture(event.pointerId); move(event); };
    root.onpointermove = event => { if (root.hasPointerCapture(event.pointerId)) move(event); };
  }
}
new Memory();
