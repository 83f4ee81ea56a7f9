// What all sections share: texts in the reader's language, controls, pictures that redraw, questions whose answer is found by moving.

const lessons = [];
const spoken = { timer: 0 };
let language = data.language ?? (Object.keys(data.languages).find(name => navigator.language.startsWith(name)) || "en");

// -- texts

// The text of a key such as "memory.title"; a list of paragraphs for some
const text = key => key.split(".").reduce((part, name) => part?.[name], data.texts[language]) ?? key;
const MARKS = /\[(.+?)\]\((\w+)=(.+?)\)|\*\*(.+?)\*\*|\*(.+?)\*|`(.+?)`|\{(\w+)\}|([A-Za-zτα]+)_(\w+|\{\w+\})|\^(\w+|\([^)]*\))/g;

// A text's nodes: **strong**, *emphasis*, `code`, {number} of `values`, B_r with its index below, d^2 with its exponent above, and
// [words](name=value), a button that moves a control of the lesson there, or back to where it began by name=start
function rich(source, values = {}, lesson = null) {
  const made = [];
  let at = 0;
  for (const found of source.matchAll(MARKS)) {
    made.push(source.slice(at, found.index));
    at = found.index + found[0].length;
    const [, words, name, wanted, strong, emphasis, code, value, base, index, power] = found;
    if (words) made.push(el("button", { type: "button", className: "try", onclick: () => lesson.set(name, wanted === "start" ? data.starts[lesson.name][name] : JSON.parse(wanted)) }, ...rich(words)));
    else if (strong) made.push(el("b", {}, ...rich(strong, values)));
    else if (emphasis) made.push(el("i", {}, ...rich(emphasis, values)));
    else if (code) made.push(el("code", {}, code));
    else if (value) made.push(el("b", { className: "live-number", "data-value": value }, values[value] ?? `{${value}}`));
    else if (base) made.push(base, el("sub", {}, index));
    else made.push(el("sup", {}, ...rich(power.replace(/^\((.*)\)$/, "$1"), values)));
  }
  return [...made, source.slice(at)];
}
const filled = (source, values) => source.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? name);
const plain = (source, values = {}) => filled(source, values).replace(/\*\*|\*|`|_|\^/g, "");
// Tells a text with other numbers: its nodes stay while it is the same, so that a button keeps its focus.
function retell(node, source, values, lesson) {
  if (node.source !== source) node.replaceChildren(...rich(node.source = source, values, lesson));
  else for (const each of node.querySelectorAll("[data-value]")) each.textContent = values[each.dataset.value];
}
const say = (key, values) => rich(text(key), values);

// Says a sentence to a screen reader, once nothing has moved for a while
function speak(sentence) {
  clearTimeout(spoken.timer);
  spoken.timer = setTimeout(() => { $("spoken").textContent = sentence; }, 350);
}

// -- numbers

const fixed = (n, digits, least = digits) => (n + 0).toLocaleString("en-US", { minimumFractionDigits: least, maximumFractionDigits: digits }).replace("-", "−");
const number = (n, digits = 0) => fixed(n, digits, 0);
function inUnits(n, step, units) {
  let at = 0;
  while (at < units.length - 1 && n >= step * (1 - 1e-9)) { n /= step; at++; }
  return `${n >= 100 || Number.isInteger(n) ? number(n) : n.toPrecision(3)} ${units[at]}`;
}
const bytes = n => inUnits(n, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
const kibibytes = n => inUnits(n / 1024, 1024, ["KB", "MB"]);
const totalOf = tensors => Object.values(tensors).reduce((all, each) => all + each, 0);
const counting = (first, last) => Array.from({ length: last - first + 1 }, (_, n) => first + n);

// -- controls: each is { name, stops or options, key of its label, shown: value -> text }; a move calls lesson.moved()

function slider(lesson, { name, stops, shown = number, main = false }) {
  const input = el("input", { type: "range", min: 0, max: stops.length - 1, step: 1, id: `${lesson.name}-${name}` });
  const label = el("label", { htmlFor: input.id }), output = el("output", { htmlFor: input.id });
  const nearest = value => stops.reduce((best, stop, at) => Math.abs(stop - value) < Math.abs(stops[best] - value) ? at : best, 0);
  input.oninput = () => lesson.set(name, stops[input.value]);
  lesson.draws.push(() => {
    const value = lesson.state[name], told = shown(value);
    label.replaceChildren(...say(`${lesson.name}.${name}`));
    output.textContent = told;
    input.value = nearest(value);
    input.setAttribute("aria-valuetext", told);
  });
  return el("div", { className: main ? "control main" : "control" }, label, output, input);
}
function choice(lesson, { name, options, shown = value => text(`${lesson.name}.${name}_${value}`) }) {
  const select = el("select", { id: `${lesson.name}-${name}` }), label = el("label", { htmlFor: select.id });
  select.onchange = () => lesson.set(name, options[select.selectedIndex]);
  lesson.draws.push(() => {
    label.replaceChildren(...say(`${lesson.name}.${name}`));
    select.replaceChildren(...options.map(value => el("option", { selected: value === lesson.state[name] }, plain(shown(value)))));
  });
  return el("div", { className: "control" }, label, select);
}
function check(lesson, name) {
  const input = el("input", { type: "checkbox", id: `${lesson.name}-${name}` }), label = el("span");
  input.onchange = () => lesson.set(name, input.checked);
  lesson.draws.push(() => { label.replaceChildren(...say(`${lesson.name}.${name}`)); input.checked = lesson.state[name]; });
  return el("label", { className: "check" }, input, label);
}
function button(lesson, name, act, allowed = () => true, main = false) {
  const made = el("button", { type: "button", id: `${lesson.name}-${name}`, className: main ? "main" : "", onclick: () => { act(); lesson.moved(); } });
  lesson.draws.push(() => { made.textContent = text(`${lesson.name}.${name}`); made.disabled = !allowed(); });
  return made;
}

// -- pictures

// An SVG as wide as its place, `height(width)` tall; paint(svg, width, height) fills it at each draw. It is told in words beside it.
function picture(lesson, height, paint) {
  const root = svg("svg", { "aria-hidden": "true" }), host = el("div", { className: "picture" });
  host.append(root);
  const draw = () => {
    const width = host.clientWidth;
    if (!width) return;
    const tall = typeof height === "number" ? height : height(width);
    root.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    root.setAttribute("height", tall);
    root.replaceChildren();
    paint(root, width, tall);
  };
  lesson.draws.push(draw);
  new ResizeObserver(draw).observe(host);
  host.root = root;
  return host;
}
const add = (root, tag, props, ...words) => { const made = svg(tag, props); made.append(...words); root.append(made); return made; };
const box = (root, x, y, width, height, fill, more = {}) => add(root, "rect", { x, y, width: Math.max(width, 0), height: Math.max(height, 0), fill, ...more });
// S_ij in an SVG: an index is a smaller span below the line
function write(root, x, y, source, props = {}) {
  const made = add(root, "text", { x, y, ...props });
  let at = 0;
  for (const found of source.matchAll(/_(\w+)/g)) {
    made.append(source.slice(at, found.index));
    at = found.index + found[0].length;
    add(made, "tspan", { "font-size": "9", dy: 3 }, found[1]);
    if (at < source.length) { add(made, "tspan", { dy: -3 }, source[at]); at++; }
  }
  made.append(source.slice(at));
  return made;
}

// Bars on one scale: rows() gives { label, parts: [[class, amount], ...], told }
function bars(lesson, rows) {
  const root = el("div", { className: "bars", role: "group" });
  lesson.draws.push(() => {
    const shown = rows(), most = Math.max(...shown.map(row => totalOf(row.parts.map(part => part[1]))), 1e-9);
    root.replaceChildren(...shown.flatMap(row => {
      let left = 0;
      const pieces = row.parts.map(([kind, amount]) => {
        const piece = el("i", { className: kind, style: `left:${left / most * 100}%;width:${amount / most * 100}%` });
        left += amount;
        return piece;
      });
      return [el("span", {}, ...rich(row.label)), el("div", { className: "bar", "aria-hidden": "true" }, ...pieces), el("span", { className: "num", "data-bar": row.name ?? "" }, row.told)];
    }));
  });
  return root;
}
function legend(lesson, entries) {
  const root = el("div", { className: "legend", "aria-hidden": "true" });
  lesson.draws.push(() => root.replaceChildren(...entries.map(([color, key, edge]) => el("span", { style: `--c:var(${color});${edge ? `--c-edge:var(${edge})` : ""}` }, ...say(key)))));
  return root;
}
function caption(lesson, key, values = () => ({})) {
  const root = el("figcaption");
  lesson.draws.push(() => root.replaceChildren(...say(key, values())));
  return root;
}
const figure = (...children) => el("figure", {}, ...children);
// A table in a <details>: rows() gives lists of texts
function details(lesson, key, heads, rows, open = false) {
  const summary = el("summary"), room = el("div");
  lesson.draws.push(() => {
    summary.replaceChildren(...say(key));
    room.replaceChildren(table(heads().map(head => plain(head)), rows()));
  });
  return el("details", { open }, summary, room);
}

// -- sections

class Lesson {
  // The state begins as data.starts has it, with what only the page has beside
  constructor(name, beside) {
    Object.assign(this, { name, state: { ...structuredClone(data.starts[name]), ...beside }, draws: [], found: false, shown: false });
    lessons.push(this);
  }

  // Overridden: the numbers in the prose; whether the answer of the question is on screen; a sentence for a screen reader
  values() { return {}; }
  solved() { return false; }
  told() { return ""; }

  set(name, value) {
    this.state[name] = value;
    this.changed(name);
    this.moved();
  }
  changed() {}

  moved() {
    this.draw();
    speak(this.told());
    if (!this.found && this.solved()) this.find();
  }

  // The answer was found by moving something, or else the reader asks for it
  find() {
    this.found = true;
    this.draw();
    outline();
    speak(`${text("page.found")} ${plain(text(`${this.name}.answer`), this.values())}`);
  }
  reveal() {
    this.shown = true;
    this.draw();
    speak(plain(text(`${this.name}.answer`), this.values()));
  }

  draw() { for (const draw of this.draws) draw(); }

  build(...live) {
    const head = el("h2", { id: `${this.name}-title` }), lead = el("p"), prose = el("div", { className: "prose" });
    const asked = el("h3"), question = el("p"), answer = el("p", { className: "answer" });
    const show = el("button", { type: "button", id: `${this.name}-show`, onclick: () => this.reveal() });
    const ask = el("div", { className: "ask" }, asked, question, answer, show);
    this.draws.unshift(() => {
      const values = this.values(), section = data.texts[language][this.name];
      head.replaceChildren(...rich(section.title));
      retell(lead, section.lead, values, this);
      if (prose.childElementCount !== section.prose.length) prose.replaceChildren(...section.prose.map(() => el("p")));
      section.prose.forEach((paragraph, n) => retell(prose.children[n], paragraph, values, this));
      asked.textContent = text(this.found ? "page.found" : "page.question");
      retell(question, section.question, values, this);
      const told = this.found || this.shown;
      retell(answer, told ? section.answer : "", values, this);
      answer.hidden = !told;
      ask.classList.toggle("found", this.found);
      show.textContent = text("page.show");
      show.hidden = told;
    });
    return el("section", { className: "lesson", id: this.name, "aria-labelledby": head.id },
      el("div", { className: "head" }, head, lead), el("div", { className: "live" }, ...live), prose, ask);
  }
}
// The list of sections, with those whose answer was found
function outline() {
  document.querySelector("#contents ol").replaceChildren(...lessons.map(lesson => el("li", {},
    el("a", { href: `#${lesson.name}`, className: lesson.found ? "found" : "" }, ...say(`${lesson.name}.short`), el("span", { className: "hidden" }, lesson.found ? text("page.found") : "")))));
}
