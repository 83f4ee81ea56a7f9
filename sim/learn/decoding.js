// One query, many keys: the keys in splits, so that all multiprocessors have some.

class Decoding extends Lesson {
  constructor() {
    super("decoding", {});
    this.root = this.build(
      slider(this, { name: "splits", stops: counting(1, 128), main: true }),
      picture(this, width => width < 500 ? 190 : 170, (...place) => this.paint(...place)),
      legend(this, [["--made", "decoding.one"], ["--write", "decoding.several"], ["--faint", "decoding.idle", "--soft"]]),
      el("h3"),
      bars(this, () => this.bars()),
      this.verdict = el("p", { className: "verdict" }),
      el("div", { className: "controls" },
        slider(this, { name: "keys", stops: [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072] }),
        slider(this, { name: "batch", stops: [1, 2, 4, 8, 16, 32, 64] }),
        slider(this, { name: "kv_heads", stops: [1, 2, 4, 8, 16, 32] }),
        slider(this, { name: "group", stops: [1, 2, 4, 8] }),
        choice(this, { name: "sms", options: data.devices.map(device => device.sms), shown: sms => { const device = data.devices.find(each => each.sms === sms); return `${device.name}: ${sms}`; } })));
    const title = this.root.querySelector(".live > h3");
    this.draws.push(() => {
      title.replaceChildren(...say("decoding.reads"));
      const best = this.best(), { splits } = this.state;
      this.verdict.className = `verdict ${this.now().longest === this.now(best).longest ? "good" : ""}`;
      this.verdict.replaceChildren(...say(splits > 1 ? "decoding.verdict" : "decoding.unsplit", this.values()));
    });
  }

  now(splits = this.state.splits) {
    const { batch, kv_heads, group, keys, head_dim, sms } = this.state;
    return forms.decoding(batch * kv_heads, group, keys, head_dim, splits, sms, data.block_keys);
  }
  // The fewest splits with the least keys one after the other
  best() {
    const longest = counting(1, 128).map(splits => this.now(splits).longest);
    return 1 + longest.indexOf(Math.min(...longest));
  }
  values() {
    const one = this.now(), { splits } = this.state, alone = this.now(1);
    return {
      splits: number(splits), blocks: number(one.blocks), busy: number(one.busy), sms: number(this.state.sms), rounds: number(one.rounds), longest: number(one.longest),
      bytes: bytes(one.bytes), partial: bytes(one.partial), share: `${fixed(100 * one.partial / one.bytes, 1)} %`, times: fixed(alone.longest / one.longest, 1), heads: number(this.state.batch * this.state.kv_heads),
      best: number(this.best()),
    };
  }
  solved() { return this.best() > 1 && this.state.splits === this.best(); }
  told() { return plain(text("decoding.told"), this.values()); }

  bars() {
    const one = this.now(), alone = this.now(1);
    return [
      { name: "alone", label: text("decoding.alone"), parts: [["rest", alone.longest]], told: `${number(alone.longest)}` },
      { name: "longest", label: text("decoding.longest"), parts: [["own", one.longest], ["none", Math.max(alone.longest - one.longest, 0)]], told: number(one.longest) },
    ];
  }

  // A square for each multiprocessor; the blocks that it gets, one a line of it
  paint(root, width, height) {
    const { sms } = this.state, one = this.now(), columns = Math.ceil(Math.sqrt(sms * width / height)), cell = Math.min(width / columns, height / Math.ceil(sms / columns));
    for (let n = 0; n < sms; n++) {
      const has = Math.floor(one.blocks / sms) + (n < one.blocks % sms), x = n % columns * cell, y = Math.floor(n / columns) * cell, inner = cell - 3;
      box(root, x + 1, y + 1, inner, inner, "var(--faint)", { stroke: "var(--line)" });
      const shown = Math.min(has, 8);
      for (let k = 0; k < shown; k++) box(root, x + 1, y + 1 + inner * k / shown, inner, inner / shown - (shown > 1 ? 1 : 0), has > 1 ? "var(--write)" : "var(--made)");
    }
  }
}
new Decoding();
