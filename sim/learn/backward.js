// What the backward needs of the forward: P, or L and the product S once more.

const LENGTHS = [1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 256, 512, 1024].map(k => k * 1024);

class Backward extends Lesson {
  constructor() {
    super("backward", {});
    this.root = this.build(
      slider(this, { name: "seqlen", stops: LENGTHS, main: true }),
      bars(this, () => {
        const { P, L } = this.kept();
        return [{ name: "P", label: text("backward.P"), parts: [["out", P]], told: bytes(P) }, { name: "L", label: text("backward.L"), parts: [["own", L]], told: bytes(L) }];
      }),
      this.verdict = el("p", { className: "verdict" }),
      figure(picture(this, width => Math.min(width * 0.6, 270), (...place) => this.paint(...place)), caption(this, "backward.caption", () => this.values())),
      el("h3"),
      bars(this, () => {
        const { standard, fa1 } = this.counted();
        return [
          { name: "standard", label: text("backward.standard"), parts: [["in", totalOf(standard.read)], ["out", totalOf(standard.written)]], told: bytes(this.bytes(standard)) },
          { name: "fa1", label: text("backward.fa1"), parts: [["in", totalOf(fa1.read)], ["out", totalOf(fa1.written)]], told: bytes(this.bytes(fa1)) },
        ];
      }),
      el("h3"),
      bars(this, () => {
        const { flops, again } = this.kept(), told = n => inUnits(n, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"]);
        return [{ name: "flops", label: text("backward.four"), parts: [["rest", flops]], told: told(flops) }, { name: "again", label: text("backward.five"), parts: [["rest", flops], ["own", again - flops]], told: told(again) }];
      }),
      el("div", { className: "controls" },
        slider(this, { name: "heads", stops: [1, 2, 4, 8, 16, 32, 64, 128] }),
        slider(this, { name: "head_dim", stops: [32, 64, 128] }),
        check(this, "causal")));
    const [moved, products] = this.root.querySelectorAll(".live > h3");
    this.draws.push(() => {
      moved.replaceChildren(...say("backward.moved"));
      products.replaceChildren(...say("backward.products"));
      const full = this.kept().P > data.gpu_memory;
      this.verdict.className = `verdict ${full ? "bad" : "good"}`;
      this.verdict.replaceChildren(...say(full ? "backward.full" : "backward.fits", this.values()));
    });
  }

  kept(seqlen = this.state.seqlen) { return forms.kept(seqlen, this.state.heads, this.state.head_dim); }
  counted() {
    const { seqlen, head_dim, causal } = this.state, { block_rows, block_cols } = forms.tiles(Math.floor(data.backward_sram), head_dim);
    return Object.fromEntries(["standard", "fa1"].map(name => [name, forms.backward(name, seqlen, head_dim, block_rows, block_cols, causal)]));
  }
  bytes(one) { return (totalOf(one.read) + totalOf(one.written)) * this.state.heads; }
  values() {
    const { P, L } = this.kept(), { standard, fa1 } = this.counted();
    return {
      P: bytes(P), L: bytes(L), seqlen: number(this.state.seqlen), heads: number(this.state.heads), memory: bytes(data.gpu_memory), share: `${fixed(100 * P / data.gpu_memory, 1)} %`,
      times: number(P / L), standard: bytes(this.bytes(standard)), fa1: bytes(this.bytes(fa1)), fewer: (this.bytes(standard) / this.bytes(fa1)).toPrecision(3),
    };
  }
  // The first length that does not fit
  solved() {
    const at = LENGTHS.indexOf(this.state.seqlen);
    return at > 0 && this.kept().P > data.gpu_memory && this.kept(LENGTHS[at - 1]).P <= data.gpu_memory;
  }
  told() { return plain(text("backward.told"), this.values()); }

  paint(root, width, height) {
    const left = 54, right = width - 14, top = 12, bottom = height - 34, { seqlen } = this.state;
    const low = Math.log10(this.kept(LENGTHS[0]).L) - 0.2, high = Math.log10(Math.max(this.kept(LENGTHS.at(-1)).P, data.gpu_memory)) + 0.2;
    const x = n => left + Math.log2(n / LENGTHS[0]) / Math.log2(LENGTHS.at(-1) / LENGTHS[0]) * (right - left), y = n => bottom - (Math.log10(n) - low) / (high - low) * (bottom - top);
    for (let power = Math.ceil(low / 3) * 3; power <= high; power += 3) {
      add(root, "path", { d: `M${left} ${y(10 ** power)}H${right}`, class: "axis" });
      write(root, left - 6, y(10 ** power) + 4, bytes(10 ** power), { "text-anchor": "end", class: "soft" });
    }
    for (const k of [1, 8, 64, 512]) write(root, x(k * 1024), bottom + 15, `${k}k`, { "text-anchor": "middle", class: "soft" });
    write(root, right, height - 4, text("backward.axis"), { "text-anchor": "end", class: "soft" });
    add(root, "path", { d: `M${left} ${top}V${bottom}H${right}`, class: "axis" });
    add(root, "path", { d: `M${left} ${y(data.gpu_memory)}H${right}`, stroke: "var(--soft)", "stroke-dasharray": "5 4" });
    write(root, left + 6, y(data.gpu_memory) - 5, plain(text("backward.gpu"), { memory: bytes(data.gpu_memory) }), { class: "soft" });
    for (const [name, color] of [["P", "--write"], ["L", "--made"]]) {
      add(root, "path", { d: `M${LENGTHS.map(n => `${x(n)} ${y(this.kept(n)[name])}`).join("L")}`, class: "curve", stroke: `var(${color})` });
      write(root, right, y(this.kept(LENGTHS.at(-1))[name]) + 18, name, { "text-anchor": "end", style: `fill: var(${color}); font-weight: 600` });
      add(root, "circle", { cx: x(seqlen), cy: y(this.kept()[name]), r: 6, fill: `var(${color})`, stroke: "var(--paper)", "stroke-width": 2 });
    }
    add(root, "path", { d: `M${x(seqlen)} ${top}V${bottom}`, stroke: "var(--soft)", "stroke-dasharray": "2 3" });
  }
}
new Backward();
