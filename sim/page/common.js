"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const comma = n => Math.round(n).toLocaleString("en-US");
const plural = (n, word) => `${comma(n)} ${word}${n === 1 ? "" : "s"}`;
const sum = (list, of) => list.reduce((all, each) => all + of(each), 0);
const $ = id => document.getElementById(id);
function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) name in made && name !== "style" ? made[name] = value : made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function svg(tag, props = {}) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
  return made;
}
function table(heads, body, left = 1) {
  const cell = (tag, text, n) => el(tag, { className: n < left ? "left" : "", ...(tag === "th" ? { scope: "col" } : {}) }, text);
  return el("div", { className: "wide", tabIndex: 0 }, el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map((text, n) => cell("th", text, n)))),
    el("tbody", {}, ...body.map(row => el("tr", {}, ...row.map((text, n) => text instanceof Node ? el("td", {}, text) : cell("td", text, n)))))));
}
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
const named = () => { $("theme").textContent = isDark() ? "Light" : "Dark"; dispatchEvent(new Event("theme")); };
$("theme").onclick = () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; named(); };
dark.onchange = named;
named();
