// Online softmax over eight numbers: m, l and O as they go.

const LIMIT = 20;  // of a score or value that can be typed

class Softmax extends Lesson {
  constructor() {
    super("softmax", { at: 1 });
    this.columns = this.state.scores.map((_, n) => this.column(n));
    this.names = ["weight", "score", "value"].map(() => el("span", { className: "weight" }));
    const eight = el("div", { className: "eight" },
      this.names[0], ...this.columns.map(one => one.place), el("span"), ...this.columns.map(one => one.weight),
      this.names[1], ...this.columns.map(one => one.score), this.names[2], ...this.columns.map(one => one.value));
    this.sums = ["m", "l", "O"].map(() => el("div", {}, el("span"), el("b"), el("small")));
    this.status = el("p", { className: "verdict" });
    const heads = () => [text("softmax.block_head"), "m", text("softmax.factor"), "l", "O", text("softmax.result_head")];
    this.root = this.build(
      eight,
      el("div", { className: "sums" }, ...this.sums),
      el("div", { className: "buttons" },
        button(this, "step", () => { this.state.at++; }, () => this.state.at < this.steps().length, true),
        button(this, "back", () => { this.state.at--; }, () => this.state.at > 0),
        button(this, "reset", () => Object.assign(this.state, structuredClone(this.start), { at: 0 }))),
      this.status,
      el("div", { className: "controls" },
        choice(this, { name: "block", options: [1, 2, 4, 8], shown: number }),
        slider(this, { name: "growth", stops: counting(0, 16).map(n => n / 2), shown: n => number(n, 1) })),
      details(this, "softmax.table", heads, () => this.rows(), true));
    this.start = structuredClone(this.state);
    this.draws.push(() => this.show());
  }

  column(n) {
    const field = list => {
      const input = el("input", { type: "number", step: 0.5, min: -LIMIT, max: LIMIT, inputMode: "decimal" });
      input.oninput = () => {
        if (input.value === "" || !input.checkValidity() && !input.validity.stepMismatch) return;
        this.state[list][n] = input.valueAsNumber;
        this.moved();
      };
      input.onblur = () => { input.value = this.state[list][n]; };
      return input;
    };
    const place = el("div", { className: "column" }, el("i"));
    return { place, weight: el("span", { className: "weight" }), score: field("scores"), value: field("values") };
  }

  changed(name) { if (name === "block") this.state.at = Math.min(this.state.at, this.steps().length); }

  steps() {
    const { scores, values, block, growth } = this.state;
    return forms.online(scores, values, block, growth);
  }

  // The state after the blocks seen, and the one before
  now() {
    const steps = this.steps(), { at } = this.state, whole = forms.online(this.state.scores, this.state.values, 8, 0)[0];
    return { steps, at, one: steps[at - 1], before: steps[at - 2], whole };
  }

  values() {
    const { steps, at, one, before, whole } = this.now(), last = steps.at(-1), shown = n => number(n, 3);
    const rescaled = steps.slice(1).filter(step => step.scale !== 1).length;
    return {
      at: number(at), blocks: number(steps.length), scale: one && before ? shown(one.scale) : "1", m: one ? shown(one.m) : "−∞", l: shown(one?.l ?? 0),
      O: shown(one?.O ?? 0), result: fixed(last.O / last.l, 4), whole: fixed(whole.O / whole.l, 4), later: number(steps.length - 1), rescaled: number(rescaled),
    };
  }

  solved() {
    const { block, growth } = this.state;
    return block === 2 && growth === 0 && this.steps().slice(1).every(step => step.scale === 1);
  }

  told() { return plain(text("softmax.told"), this.values()); }

  show() {
    const { steps, at, one, before } = this.now(), { scores, values, block } = this.state, shown = n => number(n, 3);
    this.names.forEach((node, n) => node.replaceChildren(...say(`softmax.${["weight", "score", "value"][n]}`)));
    const weights = scores.map(score => Math.exp(score - (one?.m ?? Math.max(...scores)))), most = Math.max(1, ...weights.slice(0, at * block));
    this.columns.forEach(({ place, weight, score, value }, n) => {
      const seen = n < at * block, now = seen && n >= (at - 1) * block;
      place.className = `column ${now ? "now" : seen ? "seen" : "later"}${n && n % block === 0 ? " edge" : ""}`;
      place.firstChild.style.height = `${Math.max(Math.min(weights[n] / most, 1) * 100, 1)}%`;
      weight.textContent = seen ? fixed(weights[n], 2) : "";
      for (const [input, list, name] of [[score, scores, "score_at"], [value, values, "value_at"]]) {
        if (document.activeElement !== input) input.value = list[n];
        input.setAttribute("aria-label", plain(text(`softmax.${name}`), { n: n + 1 }));
      }
    });
    const added = name => one[name] - (before?.[name] ?? 0) * (before ? one.scale : 0);
    const fill = (n, name, value, how) => {
      const [label, big, small] = this.sums[n].children;
      label.replaceChildren(...say(`softmax.${name}_is`));
      big.textContent = value;
      big.dataset.sum = name;
      small.replaceChildren(...how);
    };
    const grew = one && before && one.scale !== 1;
    this.sums.forEach(node => { node.className = !before ? "" : grew ? "rescaled" : "kept"; });
    const why = !one ? [] : !before ? say("softmax.m_first") : grew ? say("softmax.m_grew", { old: shown(before.m) })
      : one.top > one.m ? say("softmax.m_passed", { top: shown(one.top) }) : say("softmax.m_kept", { old: shown(before.m) });
    fill(0, "m", one ? shown(one.m) : "−∞", why);
    for (const [n, name] of [[1, "l"], [2, "O"]]) {
      fill(n, name, shown(one?.[name] ?? 0), before ? say("softmax.times", { old: shown(before[name]), scale: shown(one.scale), added: shown(added(name)) }) : []);
    }
    this.status.className = `verdict${at === steps.length ? " good" : ""}`;
    this.status.replaceChildren(...say(`softmax.${!at ? "begin" : at === steps.length ? "done" : "more"}`, this.values()));
  }

  rows() {
    const shown = n => number(n, 3);
    return this.now().steps.slice(0, this.state.at).map((step, n) => [number(n + 1), shown(step.m), n ? shown(step.scale) : "–", shown(step.l), shown(step.O), shown(step.O / step.l)]);
  }
}
new Softmax();
