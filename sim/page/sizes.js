// Other sizes, by the schedules: their reports are unpacked when one is asked for
class Sizes {
  constructor(told) {
    this.told = told;
    this.selects = Object.fromEntries(Object.entries(told.axes).map(([axis, values]) => {
      const name = value => axis !== "M" ? comma(value) : value % 1024 ? `${comma(value)} bytes` : `${comma(value / 1024)} KB`;
      const select = el("select", { id: `size-${axis}`, onchange: () => this.choose() }, ...values.map(value => el("option", { value, textContent: name(value) })));
      select.value = told.chosen[axis];
      return [axis, select];
    }));
    this.said = el("p", { className: "soft", id: "sizes-said" });
    this.said.setAttribute("aria-live", "polite");
    const labels = Object.entries(this.selects).map(([axis, select]) => el("label", { title: { N: "Queries and keys", d: "Head dimension", M: "SRAM of a thread block" }[axis] }, axis, select));
    this.root = el("div", { className: "sizes", role: "group" }, ...labels);
    this.root.setAttribute("aria-label", "Sizes: N queries and keys, d, M bytes of SRAM");
  }

  async choose() {
    const { told, selects } = this, key = Object.values(selects).map(select => select.value).join(), own = Object.values(told.chosen).join();
    if (told.refused[key]) { this.said.textContent = `Not with these sizes: ${told.refused[key]}.`; return; }
    if (key !== own) this.reports ??= await unpacked(told.packed);
    if (key !== Object.values(selects).map(select => select.value).join()) return;  // another was chosen meanwhile
    const before = shown;
    if (playing) set(false);
    load(key === own ? executed : this.reports[key]);
    view(before);
    $("timelines").hidden = key !== own;
    this.said.textContent = key === own ? "" : "These sizes are played by the schedules, without an execution; the bytes are the closed form's.";
    jump(players[shown ?? subject].opening);
  }
}
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), each => each.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
