"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const comma = n => Math.round(n).toLocaleString("en-US");
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
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
const named = () => $("theme").textContent = isDark() ? "Light" : "Dark";
$("theme").onclick = () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; named(); };
dark.onchange = named;
named();
