// The page around the sections, and its language

function relabel() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : language;
  document.title = $("title").textContent = text("page.title");
  $("skip").textContent = text("page.skip");
  $("theme").textContent = text(isDark() ? "page.light" : "page.dark");
  $("contents").setAttribute("aria-label", text("page.contents"));
  $("language").setAttribute("aria-label", text("page.language"));
  $("footer").replaceChildren(...text("page.footer").map(paragraph => el("p", {}, ...rich(paragraph))));
  outline();
  for (const lesson of lessons) lesson.draw();
}
const names = Object.keys(data.languages);
$("language").append(...names.map(name => el("option", { value: name, lang: name, selected: name === language }, data.languages[name])));
$("language").onchange = event => { language = event.target.value; relabel(); };
addEventListener("theme", relabel);
$("lessons").append(...lessons.map(lesson => lesson.root));
relabel();
