// The two orders of loops over the tiles of S: columns outside (Algorithm 1), or rows outside (FlashAttention-2).

class Loops extends Lesson {
  constructor() {
    super("loops", { at: 11 });
    const heads = () => ["loops.tensor", "loops.fa1", "loops.fa2"].map(text), tall = width => Math.min(width, 330);
    this.root = this.build(
      el("div", { className: "pictures" },
        ...["fa1", "fa2"].map(name => figure(el("h3", { className: "order" }), picture(this, tall, (...place) => this.paint(name, ...place)), caption(this, `loops.${name}_caption`, () => this.values())))),
      el("div", { className: "buttons" },
        button(this, "step", () => { this.state.at++; }, () => this.state.at < this.visits(), true),
        button(this, "back", () => { this.state.at--; }, () => this.state.at > 0),
        button(this, "end", () => { this.state.at = this.visits(); }, () => this.state.at < this.visits()),
        button(this, "reset", () => { this.state.at = 0; }, () => this.state.at > 0)),
      this.place = el("div"),
      bars(this, () => this.bars()),
      this.verdict = el("p", { className: "verdict" }),
      el("div", { className: "controls" },
        slider(this, { name: "block_rows", stops: [16, 32, 64, 128, 256] }),
        slider(this, { name: "block_cols", stops: [16, 32, 64, 128, 256] }),
        slider(this, { name: "seqlen", stops: [256, 512, 1024, 2048] }),
        slider(this, { name: "heads", stops: [1, 2, 4, 8, 16, 32, 64] }),
        slider(this, { name: "head_dim", stops: [32, 64, 128, 256] }),
        check(this, "causal")),
      details(this, "loops.table", heads, () => this.rows()));
    this.place.append(this.scrubber());
    this.titles = [...this.root.querySelectorAll(".order")];
    this.draws.push(() => {
      this.titles.forEach((node, n) => node.replaceChildren(...say(`loops.${["fa1", "fa2"][n]}`)));
      const { fa1, fa2 } = this.totals();
      this.verdict.className = `verdict ${fa2 <= fa1 ? "good" : "bad"}`;
      this.verdict.replaceChildren(...say(fa2 <= fa1 ? "loops.fewer" : "loops.more", this.values()));
    });
  }

  scrubber() {
    const input = el("input", { type: "range", min: 0, step: 1, id: "loops-at" }), label = el("label", { htmlFor: "loops-at" }), output = el("output", { htmlFor: "loops-at" });
    input.oninput = () => this.set("at", Number(input.value));
    this.draws.push(() => {
      label.replaceChildren(...say("loops.at"));
      input.max = this.visits();
      input.value = this.state.at;
      output.textContent = `${number(this.state.at)} / ${number(this.visits())}`;
      input.setAttribute("aria-valuetext", output.textContent);
    });
    return el("div", { className: "control main" }, label, output, input);
  }

  blocks() {
    const { seqlen, block_rows, block_cols } = this.state;
    return [Math.ceil(seqlen / block_rows), Math.ceil(seqlen / block_cols)];
  }
  order(name) {
    const { block_rows, block_cols, causal } = this.state, key = [name, this.state.seqlen, block_rows, block_cols, causal].join();
    this.orders ??= new Map();
    if (!this.orders.has(key)) this.orders.set(key, forms.visits(name, ...this.blocks(), block_rows, block_cols, causal));
    return this.orders.get(key);
  }
  visits() { return this.order("fa2").length; }
  walked(name, steps) {
    const { seqlen, head_dim, block_rows, block_cols, causal } = this.state;
    return forms.walk(name, seqlen, head_dim, block_rows, block_cols, causal, steps);
  }
  totals() {
    const { seqlen, head_dim, block_rows, block_cols, causal, heads } = this.state;
    const moved = name => { const one = forms.forward(name, seqlen, head_dim, block_rows, block_cols, causal, 4); return heads * (totalOf(one.read) + totalOf(one.written)); };
    return { fa1: moved("fa1"), fa2: moved("fa2") };
  }

  changed(name) {
    this.orders?.clear();
    if (name !== "at") this.state.at = Math.min(this.state.at, this.visits());
  }

  values() {
    const { fa1, fa2 } = this.totals(), [rows, cols] = this.blocks(), { at, heads } = this.state;
    const [one, two] = ["fa1", "fa2"].map(name => this.order(name)[at - 1]);
    const tile = place => place ? `${place[0] + 1}, ${place[1] + 1}` : "–";
    return {
      row_blocks: number(rows), col_blocks: number(cols), times: (fa1 > fa2 ? fa1 / fa2 : fa2 / fa1).toPrecision(3), fa1: bytes(fa1), fa2: bytes(fa2), heads: number(heads), blocks: number(rows * heads),
      at: number(at), tile1: tile(one), tile2: tile(two),
    };
  }
  solved() { const { fa1, fa2 } = this.totals(); return fa1 < fa2; }
  told() { return plain(text("loops.told"), this.values()); }

  bars() {
    const { fa1, fa2 } = this.totals(), { at, heads } = this.state;
    return ["fa1", "fa2"].map(name => {
      const { read, written } = this.walked(name, at), moved = [totalOf(read) * heads, totalOf(written) * heads], all = { fa1, fa2 }[name];
      return { name, label: text(`loops.${name}_short`), parts: [["in", moved[0]], ["out", moved[1]], ["rest", all - moved[0] - moved[1]]], told: bytes(moved[0] + moved[1]) };
    });
  }

  rows() {
    const { at, heads } = this.state, [one, two] = ["fa1", "fa2"].map(name => this.walked(name, at));
    const both = (moved, names) => names.reduce((all, name) => all + (moved.read[name] ?? 0) + (moved.written[name] ?? 0), 0) * heads;
    const rows = [["Q", ["Q"]], ["K", ["K"]], ["V", ["V"]], ["O", ["O", "O_acc"]], ["l, m", ["l", "m"]]].map(([label, names]) => [label, comma(both(one, names)), comma(both(two, names))]);
    const every = moved => (totalOf(moved.read) + totalOf(moved.written)) * heads;
    return [...rows, [text("memory.all"), comma(every(one)), comma(every(two))]];
  }

  // The tiles seen so far, the one at hand, what is held on chip (outlined) and what moved for this tile
  paint(name, root, width, height) {
    const [rows, cols] = this.blocks(), { at, causal, block_rows, block_cols } = this.state, strip = 14, gap = 5, top = strip + gap + 16, left = strip + gap + 6;
    const side = Math.min(width - left - strip - gap - 6, height - top - 4), x = left, y = top, wide = side / cols, tall = side / rows;
    const order = this.order(name), seen = order.slice(0, at), now = seen.at(-1), before = seen.at(-2);
    box(root, x, y, side, side, "var(--faint)", { stroke: "var(--soft)" });
    if (causal) for (let i = 0; i < rows; i++) {
      const from = Math.ceil((i + 1) * block_rows / block_cols);
      if (from < cols) box(root, x + wide * from, y + tall * i, side - wide * from, tall, "var(--paper)");
    }
    add(root, "path", { d: seen.map(([i, j]) => `M${x + wide * j} ${y + tall * i}h${wide}v${tall}h${-wide}z`).join(""), fill: "var(--made-soft)" });
    const lines = [];
    if (wide >= 3) for (let n = 1; n < cols; n++) lines.push(`M${x + n * wide} ${y}v${side}`);
    if (tall >= 3) for (let n = 1; n < rows; n++) lines.push(`M${x} ${y + n * tall}h${side}`);
    add(root, "path", { d: lines.join(""), class: "axis" });
    box(root, x, y, side, side, "none", { stroke: "var(--soft)" });
    const [i, j] = now ?? order[0], newRow = !before || before[0] !== i, newCol = !before || before[1] !== j, last = at === order.length || name === "fa1" || order[at]?.[0] !== i;
    const sides = [["Q", x - gap - strip, y, strip, side, 0, tall * i, strip, tall, !now ? "" : name === "fa1" || newRow ? "read" : "held"],
      ["O", x + side + gap, y, strip, side, 0, tall * i, strip, tall, !now ? "" : last ? "write" : "held"],
      ["Kᵀ, V", x, y - gap - strip, side, strip, wide * j, 0, wide, strip, !now ? "" : name === "fa2" || newCol ? "read" : "held"]];
    for (const [label, atX, atY, w, h, dx, dy, partW, partH, how] of sides) {
      box(root, atX, atY, w, h, "var(--faint)", { stroke: "var(--line)" });
      if (how) box(root, atX + dx, atY + dy, Math.max(partW, 2), Math.max(partH, 2), `var(--${{ read: "read", write: "write", held: "made" }[how]})`);
      write(root, atX + w / 2, atY - 5, label, { "text-anchor": "middle" });
    }
    if (now) box(root, x + wide * j, y + tall * i, Math.max(wide, 2), Math.max(tall, 2), "var(--made)", { stroke: "var(--ink)" });
  }
}
new Loops();
