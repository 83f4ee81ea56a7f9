// Python's rounding: a tie goes to the even digit, so that 12.5 % is 12 % here, too
const fixed = (x, digits) => {
  const up = x.toFixed(digits), tie = Math.abs(x * 2 ** (digits + 1)) % 2 === 1;
  return tie && up.at(-1) % 2 ? (x - 10 ** -digits / 4).toFixed(digits) : up;
};
const percent = (part, whole) => whole ? `${fixed(100 * part / whole, 1)} %` : "–";
const sides = counts => Object.entries(counts.global).flatMap(([tensor, both]) => Object.entries(both).filter(([, one]) => one.requests).map(([side, one]) => ({ tensor, side, ...one })));
const METRICS = {
  instructions: ["Instructions", counts => counts.instructions],
  bytes: ["Bytes", counts => sum(sides(counts), one => one.bytes)],
  sectors: ["Sectors", counts => sum(sides(counts), one => one.sectors)],
  conflicts: ["Bank conflicts", counts => sum(counts.shared, one => one.conflicts)],
  divergence: ["Divergence", counts => counts.divergent_branches],
};
const MEANING = {
  instructions: "warp instructions", bytes: "bytes of global memory", sectors: "sectors of 32 bytes of global memory",
  conflicts: "wavefronts of shared memory beyond the ideal", divergence: "times that a warp split at a branch",
};

const counted = new Map(data.lines.map(line => [`${line.file}\n${line.line}`, line]));
const rows = new Map();
const id = (file, line) => `L${data.sources.findIndex(one => one.file === file)}-${line}`;
const short = (file, line) => {
  const found = data.sources.find(one => one.file === file);
  return found?.own ? `line ${line}` : `${found?.name ?? file}:${line}`;
};
const link = (file, line) => data.sources.some(one => one.file === file)
  ? el("a", { href: `#${id(file, line)}`, textContent: short(file, line) }) : el("span", { textContent: short(file, line) });
const at = finding => finding.source ?? ["PTX", finding.ptx_line];

const globalTable = (list, tensors) => table(
  ["tensor", "", "bytes", ...(tensors ? ["/ size"] : []), "unique", "requests", "sectors", "a request", "coalescing", ...(tensors && data.l2 ? ["DRAM", "reads hit"] : [])],
  list.map(one => [one.about ?? one.tensor, one.side, ...(one.side === "none" ? [] : [comma(one.bytes), ...(tensors ? [one.times] : []), comma(one.unique_bytes), comma(one.requests),
    comma(one.sectors), fixed(one.sectors_per_request, 1), `${fixed(100 * one.coalescing, 0)} %`, ...(tensors && data.l2 ? behind(one) : [])])]), 2);
// Of the bytes of one side of a tensor those that DRAM gives or gets, and the share of reads that the L2 has
function behind(one) {
  const found = data.l2.tensors[one.tensor === "total" ? "total (array)" : one.tensor];  // as in sim/traffic.py
  return [comma(found[`dram_${one.side}_bytes`]), one.side === "read" ? `${fixed(100 * found.hit_rate, 1)} %` : ""];
}
const sharedTable = list => table(["access", "a lane", "bytes", "requests", "wavefronts", "ideal", "conflicts"],
  list.map(one => [one.kind, `${one.width} B`, ...[one.bytes, one.requests, one.wavefronts, one.ideal_wavefronts, one.conflicts].map(comma)]));
const mixTable = counts => table(["class", "count", "share"], Object.entries(counts.by_class).map(([name, n]) => [name, comma(n), percent(n, counts.instructions)]));

// -- head -----------------------------------------------------------------------------------------------------------------

function head() {
  const size = triple => triple.join(" × "), all = data.total;
  document.title = `${data.name}: profile`;
  $("name").textContent = data.name;
  $("what").textContent = [data.file, data.target, `grid ${size(data.grid)}`, `block ${size(data.block)}`, data.cluster && `cluster ${size(data.cluster)}`,
    data.seed !== null && `seed ${data.seed}`].filter(Boolean).join(" · ");
  let lanes = `${fixed(all.active_lanes, 1)} of 32 an instruction`;
  if (all.predicated_off && all.instructions) lanes += `, ${fixed((all.thread_instructions - all.predicated_off) / all.instructions, 1)} less those that their predicate switches off`;
  const wavefronts = sum(all.shared, one => one.wavefronts);
  const facts = [
    ["warp instructions", comma(all.instructions)],
    ["active lanes", lanes],
    ["divergent branches", comma(all.divergent_branches)],
    ["global memory", `${plural(METRICS.bytes[1](all), "byte")} requested, ${plural(METRICS.sectors[1](all), "sector")}`],
    ["shared memory", `${plural(data.shared_bytes.static, "byte")} static + ${comma(data.shared_bytes.dynamic)} dynamic a block`],
    ["bank conflicts", `${comma(METRICS.conflicts[1](all))} of ${plural(wavefronts, "wavefront")}`],
    ["tensor cores", plural(all.mma_flops, "FLOP")],
    ["barriers", `${comma(data.barriers)} (completed by a block)`],
    ["findings", data.findings.length ? comma(data.findings_total) : "none"],
  ];
  $("summary").append(...facts.map(([name, value]) => el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }))));
  for (const [name, items] of Object.entries(data.refused)) {
    const more = items.length > 1 ? ` (and ${items.length - 1} more)` : "";
    $("findings").append(el("p", { className: "soft" }, `Not executed: ${name}: line ${items[0].line} of the PTX, ${items[0].text}: ${items[0].reason}${more}.`));
  }
}

function note(finding, here) {
  const made = el("div", { className: `finding ${finding.severity}` });
  const place = at(finding), others = finding.inlined_at.length ? finding.inlined_at.slice(-1) : [];
  made.append(el("b", { textContent: finding.severity === "error" ? finding.kind : `${finding.severity}: ${finding.kind}` }), " ");
  if (here) made.append(finding.message);
  else made.append(link(...place), ...others.flatMap(other => [" (inlined at ", link(...other), ")"]), ": ", finding.message);
  if (finding.other) made.append(" ", el("span", { className: "who" }, "Other side: ", link(...finding.other), "."));
  made.append(" ", el("span", { className: "who", textContent: `[block ${finding.block}, warp ${finding.warp}, lane ${finding.lane}; ${plural(finding.lanes, "lane")}]` }));
  return made;
}

function found() {
  if (data.findings.length) $("findings").append(el("h2", { textContent: `Findings: ${plural(data.findings_total, "lane")} at ${plural(data.findings.length, "place")}` }));
  $("findings").append(...data.findings.concat(data.notes).map(one => note(one, false)));
  $("findings").append(...data.suppressed.map(one => el("p", { textContent: one.text })));
  $("findings").append(...data.unmatched.map(one => el("p", { textContent: `Nothing to suppress for ${one.text}` })));
  if (!$("findings").childNodes.length) $("findings").remove();
}

// -- the source -------------------------------------------------------------------------------------------------------------

function sourceRow(file, number, text) {
  const line = counted.get(`${file.file}\n${number}`);
  const no = el(line ? "button" : "span", { className: "no", textContent: number });
  const row = el("div", { className: "row" + (line ? " counted" : ""), id: id(file.file, number) },
    no, el("span", { className: "value" }), el("span", { className: "part" }), el("pre", { textContent: text }));
  if (line) {
    no.setAttribute("aria-expanded", "false");
    no.setAttribute("aria-label", `Line ${number}: counts`);
    row.onclick = () => { if (!String(getSelection())) toggle(row, line); };
    rows.set(row, line);
  }
  const out = [row];
  for (const finding of data.findings.concat(data.notes)) {
    const same = place => place && place[0] === file.file && place[1] === number;
    if (same(at(finding))) out.push(note(finding, true));
    else if (same(finding.other)) out.push(el("div", { className: `finding ${finding.severity}` }, el("b", { textContent: finding.kind }), " other side of ", link(...at(finding)), "."));
    else if (finding.inlined_at.some(same)) out.push(el("div", { className: `finding ${finding.severity}` }, el("b", { textContent: finding.kind }), " in what is called here, ", link(...at(finding)), "."));
  }
  return out;
}

function toggle(row, line) {
  const open = row.nextElementSibling?.classList.contains("detail");
  row.querySelector(".no").setAttribute("aria-expanded", String(!open));
  if (open) row.nextElementSibling.remove();
  else row.after(detail(line));
}

function detail(line) {
  const split = line.divergent_branches ? `, split ${plural(line.divergent_branches, "time")}` : "";
  const made = el("div", { className: "detail" }, el("p", {}, `${plural(line.instructions, "warp instruction")} (${percent(line.instructions, data.total.instructions)}), `
    + `${fixed(line.active_lanes, 1)} of 32 lanes active${split}${line.mma_flops ? `, ${plural(line.mma_flops, "FLOP")} of tensor cores` : ""}`));
  if (line.inlined_at.length) made.append(el("p", {}, "inlined at ", ...line.inlined_at.flatMap((at, n) => [n ? ", " : "", link(at.file, at.line)])));
  const moved = sides(line);
  if (moved.length) made.append(globalTable(moved, false));
  if (line.shared.length) made.append(sharedTable(line.shared));
  for (const access of data.banks.filter(one => one.file === line.file && one.line === line.line)) made.append(banks(access));
  made.append(mixTable(line));
  made.onclick = event => event.stopPropagation();
  return made;
}

function source() {
  for (const file of data.sources) {
    const code = el("div", { className: "code" });
    let next = 1;
    for (const part of file.parts) {
      if (part.first > next) code.append(el("div", { className: "gap", textContent: plural(part.first - next, "line") + " that nothing was counted for" }));
      part.lines.forEach((text, n) => code.append(...sourceRow(file, part.first + n, text)));
      next = part.first + part.lines.length;
    }
    if (file.length >= next) code.append(el("div", { className: "gap", textContent: plural(file.length - next + 1, "line") + " that nothing was counted for" }));
    const unread = file.length ? "" : ", which could not be read";
    $("sources").append(el("details", { open: true }, el("summary", { title: file.file }, file.own ? data.file : file.name, el("span", { className: "sum" }), unread), code));
  }
  Object.entries(METRICS).forEach(([name, [title]], n) => $("metrics").append(
    el("button", { type: "button", role: "radio", id: `by-${name}`, title: `${MEANING[name]} (${n + 1})`, textContent: title, onclick: () => by(name) })));
}

function by(name) {
  const of = METRICS[name][1], whole = of(data.total), most = Math.max(...data.lines.map(of), 0);
  for (const each of Object.keys(METRICS)) $(`by-${each}`).setAttribute("aria-checked", String(each === name));
  for (const [row, line] of rows) {
    const value = of(line);
    row.classList.toggle("heat", value > 0);
    row.style.setProperty("--heat", most ? value / most : 0);
    row.querySelector(".value").textContent = value ? comma(value) : "";
    row.querySelector(".part").textContent = value ? percent(value, whole) : "";
  }
  document.querySelectorAll("#sources summary .sum").forEach((place, n) => {
    const own = sum(data.lines.filter(line => line.file === data.sources[n].file), of);
    place.textContent = ` · ${comma(own)} of ${comma(whole)} ${MEANING[name]}`;
  });
  document.body.dataset.by = name;
}

// -- one thread block ---------------------------------------------------------------------------------------------------------

// Of its sources, which have a row here: a click on a span goes there, and a row lights its spans
let choice = null;
function block() {
  if (!data.timeline && !data.timeline_why) return $("timeline").remove();
  const known = ([file, line]) => data.sources.find(one => (one.file === file || one.name === file) && $(id(one.file, line)));
  const words = source => { const one = known(source); return one ? link(one.file, source[1]) : el("span", { textContent: `${source[0]}:${source[1]}` }); };
  const go = source => { const one = known(source); if (one) goTo($(id(one.file, source[1]))); };
  choice = new Choice("One thread block, by its warps", [{ timeline: data.timeline, why: data.timeline_why }], words, go);
  $("timeline").append(choice.root);
  if (!data.timeline) return;
  const places = new Map();  // of a line, the numbers that it has as a source: one for each line that calls it
  data.timeline.sources.forEach((source, n) => { const one = known(source), at = one && id(one.file, source[1]); places.set(at, (places.get(at) ?? new Set()).add(n)); });
  let lit = null;
  $("sources").onmouseover = event => {
    const here = places.get(event.target.closest(".row")?.id) ?? null;
    if (here !== lit) choice.timeline?.light((lit = here) === null ? null : span => here.has(span[PLACE]));
  };
  $("sources").onmouseleave = () => { if (lit !== null) choice.timeline?.light(lit = null); };
}
function goTo(row) {
  row.closest("details").open = true;
  if (location.hash === `#${row.id}`) row.scrollIntoView({ block: "center" });
  else location.hash = row.id;
  row.querySelector(".no").focus({ preventScroll: true });
}

// -- memory ------------------------------------------------------------------------------------------------------------------

function global() {
  const list = Object.entries(data.total.global).flatMap(([tensor, both]) => {
    const known = data.tensors[tensor];
    const about = known ? `${tensor} ${known.dtype}[${known.shape.join(", ")}]` : tensor;
    const own = sides({ global: { [tensor]: both } }).map(one => ({ ...one, about, times: known ? fixed(one.bytes / known.bytes, 2) : "" }));
    return own.length ? own : known ? [{ about, side: "none" }] : [];
  });
  if (!list.length) return $("global").remove();
  $("global").append(el("h2", { textContent: "Global memory" }),
    el("p", { className: "soft", textContent: "sectors of 32 bytes; coalescing: bytes requested / bytes of their sectors" }), globalTable(list, true));
  if (!data.l2) return;
  const one = data.l2, total = one.tensors.total, registers = one.registers === null ? "" : ` with ${plural(one.registers, "register")} a thread`;
  $("global").append(el("p", { className: "soft", id: "l2", textContent: `DRAM behind the L2 of ${one.device}, by a model: ${comma(one.l2_bytes)} bytes, ${one.ways} ways, cold at the start; `
    + `${plural(one.thread_blocks[0], "thread block")}, ${comma(one.resident_blocks[0])} at a time${registers}, in lockstep. `
    + `In all ${plural(total.dram_read_bytes, "byte")} from DRAM and ${comma(total.dram_write_bytes)} to it.` }));
}

const ranges = numbers => {
  const runs = [];
  for (const n of numbers) if (runs.length && runs.at(-1)[1] === n - 1) runs.at(-1)[1] = n; else runs.push([n, n]);
  return runs.map(([a, b]) => a === b ? `${a}` : `${a} to ${b}`).join(", ");
};

// 32 columns are the banks, a row is a wavefront: which lanes it serves, and in which banks
function banks(access) {
  const W = 18, H = 16, LEFT = 30, TOP = 14, turn = lane => Math.floor(lane / (128 / Math.max(access.width, 4)));
  const cells = new Map(), begun = new Map();
  for (const one of access.lanes) {
    const key = `${one.wavefront} ${one.bank}`;
    cells.set(key, [...cells.get(key) ?? [], one]);
    begun.set(turn(one.lane), Math.min(begun.get(turn(one.lane)) ?? Infinity, one.wavefront));
  }
  const said = `${access.kind}, ${access.width} B a lane, warp ${access.warp} of block ${access.block}: ${plural(access.wavefronts, "wavefront")}, `
    + `${comma(access.ideal_wavefronts)} without conflicts: ${plural(access.conflicts, "conflict")}`;
  const drawn = svg("svg", { viewBox: `0 0 ${LEFT + 32 * W + 1} ${TOP + access.wavefronts * H + 1}`, role: "img", "aria-label": said });
  const write = (x, y, words, name = "") => { const made = svg("text", { x, y, class: name }); made.textContent = words; drawn.append(made); };
  for (let bank = 0; bank < 32; bank++) write(LEFT + (bank + 0.5) * W, TOP - 4, bank, "axis");
  for (let pass = 0; pass < access.wavefronts; pass++) {
    write(LEFT / 2, TOP + (pass + 0.7) * H, pass + 1, "axis");
    drawn.append(svg("rect", { x: LEFT, y: TOP + pass * H, width: 32 * W, height: H }));
  }
  const columns = Array.from({ length: 31 }, (_, n) => `M${LEFT + (n + 1) * W} ${TOP}v${access.wavefronts * H}`);
  drawn.append(svg("path", { d: columns.join("") }));
  for (const list of cells.values()) {
    const [one] = list, first = begun.get(turn(one.lane)) === one.wavefront;
    const box = svg("rect", { x: LEFT + one.bank * W + 1, y: TOP + one.wavefront * H + 1, width: one.banks * W - 2, height: H - 2, class: first ? "first" : "extra" });
    const title = svg("title");
    title.textContent = `${list.length > 1 ? "lanes" : "lane"} ${ranges(list.map(each => each.lane))}: offset 0x${one.offset.toString(16)}, wavefront ${one.wavefront + 1}`;
    box.append(title);
    drawn.append(box);
    write(LEFT + (one.bank + one.banks / 2) * W, TOP + (one.wavefront + 0.7) * H, list.length > 1 ? `${one.lane}+` : one.lane);
  }
  const words = new Map();
  for (const one of access.lanes) for (let n = 0; n < one.banks; n++) {
    const bank = one.bank + n;
    words.set(bank, [...words.get(bank) ?? [], one]);
  }
  const worst = [...words].map(([bank, list]) => [bank, new Set(list.map(one => one.wavefront)).size, list]).sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  const lines = worst.map(([bank, passes, list]) => `bank ${bank}: ${plural(passes, "wavefront")}, lanes ${ranges(list.map(one => one.lane))}`);
  return el("div", { className: "banks" }, el("p", { textContent: said }), el("div", { className: "wide", tabIndex: 0 }, drawn),
    el("p", { className: "key" }, el("span", {}, el("i"), "a turn's first wavefront: lane numbers (+: several lanes, one word)"),
      el("span", { className: "k-extra" }, el("i"), "one more, for a bank conflict")),
    el("details", {}, el("summary", { textContent: "The same in words" }), ...lines.map(text => el("p", { className: "mono", style: "padding:1px 12px;font-size:12.5px", textContent: text }))));
}

function shared() {
  const parts = [["Shared memory", data.total.shared], ["Distributed shared memory (of other blocks of the cluster)", data.total.distributed]];
  for (const [title, list] of parts) if (list.length) $("shared").append(el("h2", { textContent: title }), sharedTable(list));
  if (!data.banks.length) return $("shared").childNodes.length || $("shared").remove();
  const choice = el("select", { id: "access" }, ...data.banks.map((one, n) => el("option", {
    value: n, textContent: `${short(one.file, one.line)}: ${one.kind} ${one.width} B, ${plural(one.conflicts, "conflict")}` })));
  const drawn = el("div", { id: "drawn" });
  const show = () => {
    const one = data.banks[choice.value];
    drawn.replaceChildren(el("p", { className: "soft" }, link(one.file, one.line)), banks(one));
  };
  choice.onchange = show;
  $("shared").append(el("label", { className: "choose" }, "The 32 banks in the worst access of", choice), drawn);
  show();
}

// -- keys ---------------------------------------------------------------------------------------------------------------------

function move(by) {
  const list = [...rows.keys()].filter(row => row.closest("details").open), here = list.indexOf(document.activeElement?.closest?.(".row"));
  const next = list[Math.min(Math.max(here + by, 0), list.length - 1)];
  next?.querySelector(".no").focus();
}

let seen = -1;
function nextFinding() {
  const list = [...document.querySelectorAll(".code .finding")];
  if (!list.length) return;
  seen = (seen + 1) % list.length;
  list[seen].closest("details").open = true;
  list[seen].scrollIntoView({ block: "center" });
}

addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  const names = Object.keys(METRICS);
  const act = { ArrowDown: () => move(1), ArrowUp: () => move(-1), n: nextFinding }[event.key] ?? (names[event.key - 1] && (() => by(names[event.key - 1])));
  if (act) { event.preventDefault(); act(); }
});
addEventListener("hashchange", () => { const row = $(location.hash.slice(1)); if (row) { row.closest("details").open = true; row.scrollIntoView({ block: "center" }); } });

head();
found();
source();
by("instructions");
block();
global();
shared();
if (Object.keys(data.total.by_class).length) $("mix").append(el("h2", { textContent: "Instruction mix" }), mixTable(data.total));
