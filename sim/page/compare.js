// Two timelines, one below the other on one scale of clocks, moved together, with the difference in a sentence and a table

class Compare {
  // `timelines` are { name, kernel, timeline }
  constructor(timelines) {
    this.timelines = timelines;
    const label = one => `${one.name}: ${one.kernel}`;
    const select = words => el("select", { ariaLabel: words, onchange: () => this.show() }, ...timelines.map((one, value) => el("option", { value, textContent: label(one) })));
    this.selects = [select("The first timeline"), select("The second timeline")];
    // The longest of the first algorithm that differs from the last one's, and that
    const last = this.longest(timelines.at(-1).name), other = timelines.findLast(one => one.name !== timelines[last].name);
    this.selects[0].selectedIndex = other ? this.longest(other.name) : 0;
    this.selects[1].selectedIndex = last;
    this.place = el("div");
    this.root = el("details", { className: "block compare" }, el("summary", { textContent: "Two timelines compared" }),
      el("p", { className: "choose" }, this.selects[0], "beside", this.selects[1]), this.place);
    this.root.ontoggle = () => { if (this.root.open && !this.place.childNodes.length) this.show(); };
    addEventListener("theme", () => this.pair?.forEach(each => each.colour()));
  }

  longest(name) {
    const own = this.timelines.map((one, at) => one.name === name ? [one.timeline.clocks, at] : [-1, at]);
    return own.reduce((a, b) => b[0] > a[0] ? b : a)[1];
  }

  show() {
    const told = this.selects.map(select => this.timelines[select.value]), source = ([file, line]) => el("span", { textContent: `${file}:${line}` });
    this.pair = told.map(one => new Timeline(one.timeline, source, null));
    const end = Math.max(...this.pair.map(each => each.chart.end));
    for (const [at, { chart }] of this.pair.entries()) {
      const other = this.pair[1 - at].chart;
      chart.end = end;
      chart.onlook = view => { other.view = [...view]; other.redraw(); };
    }
    // One legend below both, of all kinds, dims in both
    const [first, second] = this.pair;
    first.root.querySelector(".legend").remove();
    second.root.querySelector(".legend").replaceWith(second.legend(told.flatMap(one => one.timeline.rows)));
    second.light = test => { for (const { chart } of this.pair) { chart.lit = test; chart.redraw(); } };
    first.swatches = {};
    first.chart.fit();
    this.place.replaceChildren(el("p", { className: "verdict" }, this.sentence(told)), this.table(told),
      ...this.pair.flatMap((each, at) => [el("h3", { textContent: `${told[at].name}: ${told[at].kernel}` }), each.root]));
  }

  // The mean over a timeline's warps of the clocks of each kind, by its name
  means({ timeline }) {
    const { shares, kinds } = timeline;
    return new Map(kinds.map((kind, n) => [kind.name, sum(shares, share => share[n]) / Math.max(1, shares.length)]));
  }

  waits(one) { const means = this.means(one); return sum(one.timeline.kinds.filter(kind => kind.class === "wait"), kind => means.get(kind.name)); }

  sentence(told) {
    const [a, b] = told, clocks = told.map(one => one.timeline.clocks), ratio = clocks[1] / clocks[0];
    const blocks = told.map(one => comma(one.timeline.blocks)), share = told.map(one => Math.round(100 * this.waits(one) / one.timeline.clocks));
    return `A thread block of ${b.name} (${b.kernel}, ${blocks[1]} in the grid) takes ${comma(clocks[1])} clocks, ${ratio.toFixed(2)} of the ${comma(clocks[0])} of ${a.name}'s (${a.kernel}, ${blocks[0]}); `
      + `its warps wait for ${share[1]} % of them, the other's for ${share[0]} %.`;
  }

  table(told) {
    const [a, b] = told.map(one => this.means(one)), labels = new Map(told.flatMap(one => one.timeline.kinds.map(kind => [kind.name, kind.label])));
    const signed = n => `${n > 0 ? "+" : n < 0 ? "−" : ""}${comma(Math.abs(n))}`;
    const used = [...labels].filter(([name]) => (a.get(name) ?? 0) || (b.get(name) ?? 0));
    const rows = used.map(([name, label]) => { const [x, y] = [a, b].map(one => Math.round(one.get(name) ?? 0)); return [label, comma(x), comma(y), signed(y - x)]; });
    return table(["Clocks of a warp, the mean of all", ...told.map(one => one.name), "more or less"], rows);
  }
}
