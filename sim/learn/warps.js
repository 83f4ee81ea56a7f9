// A tile of S shared out among warps: by rows, or by keys.

class Warps extends Lesson {
  constructor() {
    super("warps", {});
    const tall = width => 40 + this.unit(width) * this.state.rows, heads = () => ["warps.what", "warps.rows_title", "warps.keys_title"].map(text);
    const both = [["rows", "split-Q"], ["keys", "split-K"]];
    this.root = this.build(
      el("div", { className: "pictures" },
        ...both.map(([name]) => figure(el("h3", { className: "order" }), picture(this, tall, (...place) => this.paint(name, ...place)), caption(this, `warps.${name}_caption`, () => this.values())))),
      bars(this, () => both.map(([name, form]) => {
        const moved = this.counted()[form];
        return { name, label: text(`warps.${name}_title`), parts: [["in", moved.Q], ["own", moved["K and V"]], ["out", moved.O + moved.maxima]], told: bytes(totalOf(moved)) };
      })),
      legend(this, [["--read", "warps.Q"], ["--made", "warps.KV"], ["--write", "warps.exchanged"]]),
      this.verdict = el("p", { className: "verdict" }),
      el("div", { className: "controls" },
        slider(this, { name: "rows", stops: [16, 32, 48, 64, 96, 128, 192, 256] }),
        slider(this, { name: "cols", stops: [16, 32, 48, 64, 96, 128, 192, 256] }),
        slider(this, { name: "head_dim", stops: [32, 64, 96, 128, 256] }),
        slider(this, { name: "count", stops: [1, 2, 4, 8] })),
      details(this, "warps.table", heads, () => this.table()));
    this.titles = [...this.root.querySelectorAll(".order")];
    this.draws.push(() => {
      this.titles.forEach((node, n) => node.replaceChildren(...say(`warps.${both[n][0]}_title`)));
      const by = this.totals();
      this.verdict.className = `verdict ${by.rows <= by.keys ? "good" : "bad"}`;
      this.verdict.replaceChildren(...say(by.rows <= by.keys ? "warps.rows_win" : "warps.keys_win", this.values()));
    });
  }

  counted() {
    const { rows, cols, head_dim, count } = this.state;
    return forms.warps(rows, cols, head_dim, count);
  }
  totals() { const moved = this.counted(); return { rows: totalOf(moved["split-Q"]), keys: totalOf(moved["split-K"]) }; }
  values() {
    const { rows, keys } = this.totals(), { count, state } = { count: this.state.count, state: this.state };
    return { rows: bytes(rows), keys: bytes(keys), times: (Math.max(rows, keys) / Math.min(rows, keys)).toPrecision(3), count: number(count), tile: `${state.rows} × ${state.cols}` };
  }
  solved() { const { rows, keys } = this.totals(); return keys < rows; }
  told() { return plain(text("warps.told"), this.values()); }

  table() {
    const moved = this.counted(), [one, two] = [moved["split-Q"], moved["split-K"]];
    const rows = [["Q", "Q"], ["K, V", "K and V"], [text("warps.parts"), "O"], [text("warps.maxima"), "maxima"]].map(([label, name]) => [label, comma(one[name]), comma(two[name])]);
    return [...rows, [text("memory.all"), comma(totalOf(one)), comma(totalOf(two))]];
  }

  // Pixels of a row or key: the tile is as wide as its place, and not too tall
  unit(width) { return Math.min((width - 60) / this.state.cols, Math.min(width * 0.9, 260) / this.state.rows); }

  // S with one shade a warp; beside it who reads what of Q, K and V, and who adds to O
  paint(name, root, width, height) {
    const { rows, cols, count } = this.state, strip = 15, gap = 5, top = strip + gap + 16, left = strip + gap + 6;
    const unit = this.unit(width), w = unit * cols, h = unit * rows;
    const x = left, y = top, byRows = name === "rows";
    const shade = n => `color-mix(in srgb, var(--read) ${Math.round(25 + 75 * n / Math.max(count - 1, 1))}%, var(--paper))`;
    for (let n = 0; n < count; n++) {
      const [px, py, pw, ph] = byRows ? [x, y + h * n / count, w, h / count] : [x + w * n / count, y, w / count, h];
      box(root, px, py, pw, ph, shade(n), { stroke: "var(--paper)" });
      if (byRows) {
        box(root, x - gap - strip, py, strip, ph, shade(n), { stroke: "var(--paper)" });
        box(root, x + w + gap, py, strip, ph, shade(n), { stroke: "var(--paper)" });
        box(root, x, y - gap - strip + strip * n / count, w, strip / count, shade(n));
      } else {
        box(root, px, y - gap - strip, pw, strip, shade(n), { stroke: "var(--paper)" });
        box(root, x - gap - strip + strip * n / count, y, strip / count, h, shade(n));
        box(root, x + w + gap + strip * n / count, y, strip / count, h, shade(n));
      }
      if (Math.min(pw, ph) > 15) write(root, px + pw / 2, py + ph / 2 + 4, String(n + 1), { "text-anchor": "middle", style: n * 2 > count ? "fill: var(--paper)" : "" });
    }
    write(root, x - gap - strip / 2, y - 5, "Q", { "text-anchor": "middle" });
    write(root, x + w + gap + strip / 2, y - 5, "O", { "text-anchor": "middle" });
    write(root, x + w / 2, y - gap - strip - 5, "Kᵀ, V", { "text-anchor": "middle" });
  }
}
new Warps();
