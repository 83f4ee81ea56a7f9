// The roles of a Hopper kernel: a producer that copies, consumers that multiply and take exponentials.

const [COPY_K, COPY_V, SCORES, SOFTMAX, OUTPUT] = [0, 1, 2, 3, 4];
const ROLE_COLORS = { [COPY_K]: "--read", [COPY_V]: "--read", [SCORES]: "--made", [SOFTMAX]: "--write", [OUTPUT]: "--made" };

class Hopper extends Lesson {
  constructor() {
    super("hopper", { clock: 1900 });
    this.root = this.build(
      figure(picture(this, () => 40 + this.lanes().length * 42, (...place) => this.paint(...place)), caption(this, "hopper.caption", () => this.values())),
      this.place = el("div"),
      el("div", { className: "buttons" },
        button(this, "step", () => { this.state.clock = this.events().find(at => at > this.state.clock) ?? this.end(); }, () => this.state.clock < this.end(), true),
        button(this, "back", () => { this.state.clock = this.events().findLast(at => at < this.state.clock) ?? 0; }, () => this.state.clock > 0),
        button(this, "reset", () => { this.state.clock = 0; }, () => this.state.clock > 0)),
      this.doing = el("ul", { className: "doing" }),
      bars(this, () => this.bars()),
      legend(this, [["--read", "hopper.copies"], ["--made", "hopper.products"], ["--write", "hopper.exponentials"], ["--faint", "hopper.waits", "--soft"]]),
      el("div", { className: "controls" },
        slider(this, { name: "groups", stops: [1, 2, 3] }),
        slider(this, { name: "stages", stops: [1, 2, 3, 4] }),
        slider(this, { name: "copy", stops: [...new Set([100, 200, data.starts.hopper.copy, 600, 800, 1000, 1400, 2000, 3000])].sort((a, b) => a - b) }),
        slider(this, { name: "softmax", stops: [...new Set([100, 200, 400, data.starts.hopper.softmax, 1000, 1500])].sort((a, b) => a - b) }),
        check(this, "ahead")));
    this.place.append(this.scrubber());
    this.draws.push(() => this.doing.replaceChildren(...this.lanes().map(lane => el("li", {}, ...rich(this.doingOf(lane))))));
  }

  scrubber() {
    const input = el("input", { type: "range", min: 0, step: 1, id: "hopper-clock" }), label = el("label", { htmlFor: "hopper-clock" }), output = el("output", { htmlFor: "hopper-clock" });
    input.oninput = () => this.set("clock", Number(input.value));
    this.draws.push(() => {
      label.replaceChildren(...say("hopper.clock"));
      input.max = this.end();
      input.value = this.state.clock;
      output.textContent = number(this.state.clock);
      input.setAttribute("aria-valuetext", `${number(this.state.clock)}: ${this.lanes().map(lane => plain(this.doingOf(lane))).join("; ")}`);
    });
    return el("div", { className: "control main" }, label, output, input);
  }

  spans() {
    const { turns, stages, groups, ahead, copy, product, softmax } = this.state;
    return forms.roles(turns, stages, groups, ahead, copy, product, softmax);
  }
  end() { return Math.max(...this.spans().map(span => span[4])); }
  events() { return [...new Set(this.spans().flatMap(span => [span[3], span[4]]))].sort((a, b) => a - b); }
  changed(name) { if (name !== "clock") this.state.clock = Math.min(this.state.clock, this.end()); }

  // The producer, each consumer, and the tensor cores, which all consumers share
  lanes() {
    const spans = this.spans(), { groups } = this.state;
    const of = row => spans.filter(span => span[0] === row);
    return [
      { name: text("hopper.producer"), spans: of(0), role: "producer" },
      ...counting(1, groups).map(n => ({ name: plain(text("hopper.consumer"), { n }), spans: of(n), role: "consumer" })),
      { name: text("hopper.tensor"), spans: spans.filter(span => span[1] === SCORES || span[1] === OUTPUT), role: "tensor" },
    ];
  }

  doingOf(lane) {
    const { clock } = this.state, now = lane.spans.filter(span => span[3] <= clock && clock < span[4]);
    const next = lane.spans.filter(span => span[3] > clock).sort((a, b) => a[3] - b[3])[0];
    const what = span => filled(text(`hopper.kind_${span[1]}`), { j: span[2] + 1 });
    if (now.length) return `**${lane.name}**: ${now.map(what).join(text("hopper.and"))}`;
    return `**${lane.name}**: ${next ? filled(text(lane.role === "tensor" ? "hopper.idle" : "hopper.waits_for"), { what: what(next) }) : text("hopper.over")}`;
  }

  values() {
    const { groups, stages, clock } = this.state, spans = this.spans(), rows = groups;
    return { busy: `${fixed(100 * forms.busy(spans), 0)} %`, clocks: number(this.end()), each: number(this.end() / rows), clock: number(clock), groups: number(groups), stages: number(stages), product: number(this.state.product) };
  }
  solved() { return forms.busy(this.spans()) >= 0.9; }
  told() { return plain(text("hopper.told"), { ...this.values(), doing: this.lanes().map(lane => plain(this.doingOf(lane))).join("; ") }); }

  bars() {
    const busy = forms.busy(this.spans());
    return [{ name: "busy", label: text("hopper.busy"), parts: [["own", busy], ["none", 1 - busy]], told: this.values().busy }];
  }

  paint(root, width, height) {
    const lanes = this.lanes(), end = this.end(), left = 4, right = width - 4, x = clock => left + clock / end * (right - left), rowHeight = 42;
    lanes.forEach((lane, n) => {
      const y = 14 + n * rowHeight, tall = 22;
      write(root, left, y, lane.name, { class: "soft" });
      box(root, left, y + 4, right - left, tall, "var(--faint)");
      // Two products of one consumer may be under way at once: the later one is drawn half as high.
      for (const [, kind, j, from, to] of lane.spans) {
        const w = Math.max(x(to) - x(from) - 1, 1), over = lane.role === "consumer" && kind !== SOFTMAX && lane.spans.some(other => other[1] === SOFTMAX && other[3] < to && from < other[4]);
        const [top, high] = lane.role !== "consumer" ? [y + 4, tall] : kind === SOFTMAX ? [y + 4 + tall / 2, tall / 2] : over ? [y + 4, tall / 2] : [y + 4, tall];
        box(root, x(from), top, w, high, `var(${ROLE_COLORS[kind]})`, { opacity: kind === OUTPUT || kind === COPY_V ? 0.65 : 1 });
        const label = `${["K", "V", "S", "", "O"][kind]}${kind === SOFTMAX ? "" : `_${j + 1}`}`;
        if (w > 24 && kind !== SOFTMAX && high > 14) write(root, x(from) + w / 2, top + high / 2 + 4, label, { "text-anchor": "middle", style: "fill: var(--paper); font-size: 11px" });
      }
    });
    const bottom = 8 + lanes.length * rowHeight, at = x(this.state.clock);
    add(root, "path", { d: `M${at} 17V${bottom}`, stroke: "var(--ink)", "stroke-width": 1.5 });
    write(root, left, bottom + 16, "0", { class: "soft" });
    write(root, right, bottom + 16, plain(text("hopper.end"), { clocks: number(end) }), { "text-anchor": "end", class: "soft" });
  }
}
new Hopper();
