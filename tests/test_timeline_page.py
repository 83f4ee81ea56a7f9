"""The timeline of a thread block on the pages of `trace` and `profile`, in a real browser: what it shows and says is the JSON's."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import browsers
from cupyflash.sim.cli import main
from cupyflash.sim.clock.sass import disassembler
from cupyflash.sim.clock.timeline import KINDS
from cupyflash.sim.page import PAGE

pytest.importorskip("cupy")
pytestmark = [pytest.mark.wide, pytest.mark.skipif(disassembler() is None, reason="needs NVIDIA's disassemblers")]

DOCS = Path(__file__).resolve().parent.parent / "docs"
GEMM = Path(__file__).parent / "kernels" / "pipelined_gemm.cu"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a trace: standard attention's three launches, FlashAttention-2, and FlashAttention-3 with a producer, TMA and
    wgmma."""
    file = tmp_path_factory.mktemp("page") / "trace.html"
    sizes = ("--seqlen", "256", "--head-dim", "64", "--device", "H100-SXM", "--algorithms", "standard,fa2,fa3")
    result = CliRunner().invoke(main, ["trace", *sizes, "--html", str(file)])
    assert result.exit_code == 0, result.output
    return file


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a stranger's kernel: a GEMM with cp.async and mma."""
    file = tmp_path_factory.mktemp("page") / "profile.html"
    arrays = {"A": [64, 256], "B": [256, 64], "C": [64, 64], "parts": [2, 64, 64], "count": [1]}
    dtypes = {"A": "float16", "B": "float16", "count": "uint32"}
    args = {name: {"shape": shape, "dtype": dtypes.get(name, "float32"), "fill": "zeros"} for name, shape in arrays.items()}
    launch = ("--grid", "1,1,2", "--block", "128", "--args", json.dumps({**args, "M": 64, "N": 64, "K": 256}))
    result = CliRunner().invoke(main, ["profile", str(GEMM), *launch, "--timeline-block", "1", "--html", str(file)])
    assert result.exit_code == 0, result.output
    return file


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Any]:
    """The page of a trace with its last timeline open; nothing may be on its console afterwards."""
    yield from open_page(browser, page, "window.choice = choices.at(-1)")


@pytest.fixture
def profiled(browser: Any, profile: Path) -> Iterator[Any]:
    """The page of a profile with its timeline open."""
    yield from open_page(browser, profile, "window.choice = choice")


def open_page(browser: Any, page: Path, choose: str) -> Iterator[Any]:
    browsers.screen(browser, 1280, 1000)
    browser.get_log("browser")  # what others left
    browser.get("about:blank")
    browser.get(page.as_uri())
    browser.execute_script(f"{choose}; choice.root.open = true")
    until(browser, "choice.timeline?.chart.wide > 0")
    browser.execute_script("window.chart = choice.timeline.chart; chart.canvas.scrollIntoView({ block: 'center' })")
    yield browser
    assert browser.get_log("browser") == []


def until(browser: Any, condition: str) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda _: browser.execute_script(f"return {condition}"))


def told(page: Path) -> dict[str, Any]:
    """The data of a page."""
    return dict(json.loads(page.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0]))


def timeline_of(page: Path) -> dict[str, Any]:
    """The timeline of the last player's first launch that has one, which its section shows; or of a profile."""
    data = told(page)
    launches = data["players"][-1]["launches"] if "players" in data else [data]
    return next(one["timeline"] for one in launches if one["timeline"])


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser).send_keys(*(getattr(Keys, key, key) for key in keys)).perform()


def pointer(browser: Any, row: int, n: int) -> Any:
    """Actions that are over the middle of a span, which is brought near first."""
    from selenium.webdriver import ActionChains

    x, y, wide, high = browser.execute_script(
        "const at = { row: arguments[0], n: arguments[1] }; chart.near(at); const [begin, end] = chart.span(at);"
        "return [chart.x((begin + end) / 2), chart.tops[at.row] + 9, chart.canvas.clientWidth, chart.canvas.clientHeight]",
        row,
        n,
    )
    canvas = browser.execute_script("return chart.canvas")
    return ActionChains(browser).move_to_element_with_offset(canvas, round(x - wide / 2), round(y - high / 2))


def said(browser: Any) -> str:
    return str(browser.execute_script("return choice.timeline.said.textContent"))


def view(browser: Any) -> tuple[float, float]:
    begin, end = browser.execute_script("return chart.view")
    return begin, end


def number(text: str) -> float:
    return float(text.replace(",", ""))


def some_of(timeline: dict[str, Any], wanted: str) -> tuple[int, int]:
    """Row and place of the longest span of a class that has a line."""
    spans = (
        (end - begin, row, n)
        for row, each in enumerate(timeline["rows"])
        for n, (begin, end, kind, source, _) in enumerate(each["spans"])
        if timeline["kinds"][kind]["class"] == wanted and source >= 0
    )
    return max(spans)[1:]


def test_each_kind_looks_like_no_other_even_without_colours() -> None:
    (looks,) = re.findall(r"^const LOOKS = {\n(.*?)^};", (PAGE / "chart.js").read_text(), re.MULTILINE | re.DOTALL)
    found = dict(re.findall(r"(\w+): {([^}]*)}", looks))
    assert set(found) == {name for name, _, _ in KINDS}
    assert {name for name, look in found.items() if "hatch" in look and "fill" not in look} == {
        name for name, _, kind in KINDS if kind == "wait"
    }
    hatchings = {
        kind: [re.findall(r'hatch: "([^"]+)"', found[name]) or found[name] for name, _, of in KINDS if of == kind]
        for _, _, kind in KINDS
    }
    for kind, used in hatchings.items():
        assert len({str(each) for each in used}) == len(used), kind


def test_the_picture_is_of_today_s_clocks() -> None:
    spec = importlib.util.spec_from_file_location("screenshot", DOCS / "screenshot.py")
    assert spec is not None and spec.loader is not None
    screenshot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(screenshot)
    assert screenshot.TIMELINE in (DOCS / "trace.md").read_text()
    drawn = (DOCS / "timeline.png").read_bytes().split(b"tEXt" + screenshot.KEY.encode() + b"\0")[1][:64].decode()
    assert drawn == screenshot.timeline_digest(screenshot.told("--timeline-block", "0", command=screenshot.TIMELINE)), (
        "python docs/screenshot.py draws it anew"
    )


CLASSES = "wait", "work", "copy", "product"


@pytest.mark.parametrize("wanted", CLASSES)
def test_a_pointer_is_told_kind_clocks_line_and_note(wanted: str, opened: Any, page: Path) -> None:
    timeline = timeline_of(page)
    row, n = some_of(timeline, wanted)
    begin, end, kind, source, note = timeline["rows"][row]["spans"][n]
    top = "return chart.canvas.getBoundingClientRect().top"
    before = opened.execute_script(top)
    pointer(opened, row, n).perform()
    until(opened, f"choice.timeline.found?.row === {row} && choice.timeline.found.n === {n}")
    assert opened.execute_script(top) == before  # what is said moves nothing under the pointer
    words = said(opened)
    assert timeline["rows"][row]["name"] in words and timeline["kinds"][kind]["label"] in words
    file, line, text, call = timeline["sources"][source]
    assert f"{file}:{line}" in words and text.strip() in words
    assert ("called at" in words) == (call >= 0) and (call < 0 or f"(called at {file}:{call})" in words)
    assert note < 0 or timeline["notes"][note] in words
    clocks = words.split("clocks ")[1].split(")")[0].replace(" (", " to ").split(" to ")
    assert [number(text) for text in clocks] == pytest.approx([begin, end, end - begin], abs=0.51)


def test_every_span_can_be_reached_by_pointer_and_by_key(opened: Any, page: Path) -> None:
    missed = opened.execute_script("""
        const missed = [];
        chart.told.rows.forEach((row, at) => row.spans.forEach((span, n) => {
          chart.near({ row: at, n });
          const x = chart.x((span[0] + span[1]) / 2), inside = x >= chart.left && x <= chart.left + chart.wide;
          if (!inside || chart.hit(at, chart.clock(x))?.n !== n || chart.rowAt(chart.tops[at] + 9) !== at) missed.push([at, n]);
        }));
        return missed;""")
    assert missed == []
    rows = timeline_of(page)["rows"]
    order = [row for row, each in enumerate(rows) if each["spans"]]
    opened.execute_script("chart.fit(); chart.canvas.focus()")
    seen = []
    for _ in order:
        press(opened, "ARROW_DOWN")
        seen.append(opened.execute_script("return chart.picked.row"))
    assert sorted(seen) == order  # down, once through all
    shortest = min(order, key=lambda row: len(rows[row]["spans"]))
    walk = (
        "choice.timeline.pick({ row: arguments[0], n: 0 }); let n = 1;"
        "const step = () => { const was = chart.picked.n; choice.timeline.step(1); return chart.picked.n > was; };"
    )
    assert opened.execute_script(f"{walk} while (step()) n++; return n", shortest) == len(rows[shortest]["spans"])
    assert rows[shortest]["name"] in str(opened.execute_script("return choice.timeline.spoken.textContent"))


PIXELS = """
chart.draw();
const copied = Object.assign(document.createElement("canvas"), { width: chart.canvas.width, height: chart.canvas.height });
const pen = copied.getContext("2d", { willReadFrequently: true });
pen.drawImage(chart.canvas, 0, 0);
const pixels = (...box) => {
  const { data } = pen.getImageData(...box);
  return Array.from({ length: data.length / 4 }, (_, n) => [...data.slice(4 * n, 4 * n + 4)].join());
};
"""


def test_what_is_drawn_is_what_is_said(opened: Any, page: Path) -> None:
    """A span has its colour where a pointer finds it, a wait more than one, for it is hatched; with all in view no row is empty."""
    timeline = timeline_of(page)
    for wanted in CLASSES:
        row, n = some_of(timeline, wanted)
        kind = timeline["rows"][row]["spans"][n][2]
        opened.execute_script("chart.near({ row: arguments[0], n: arguments[1] })", row, n)
        hatched = opened.execute_script("return 'hatch' in chart.looks[arguments[0]]", kind)
        assert hatched or wanted != "wait"
        wide, high = (7, 12) if hatched else (3, 2)  # of what is hatched, a whole turn; of the rest, above the words
        inside = "[row, n, ...size] = arguments, x = chart.x(chart.span({ row, n })[1]) - 4 - size[0], y = chart.tops[row] + 2;"
        found = opened.execute_script(f"{PIXELS} const {inside} return [...new Set(pixels(x, y, ...size))]", row, n, wide, high)
        if hatched:
            assert len(found) > 1
        else:
            solid = opened.execute_script("return chart.paints[arguments[0]]", kind)
            assert found == [",".join(str(int(solid[i : i + 2], 16)) for i in (1, 3, 5)) + ",255"]
    rows = f"""chart.fit(); {PIXELS}
        const as_drawn = paint => {{ pen.fillStyle = paint; pen.fillRect(0, 0, 1, 1); return pixels(0, 0, 1, 1)[0]; }};
        const kinds = new Set(chart.flat.map(as_drawn));
        return chart.tops.map(top => pixels(chart.left + 1, top + 15, chart.wide - 2, 1).some(one => kinds.has(one)));"""
    assert opened.execute_script(rows) == [bool(row["spans"]) for row in timeline["rows"]]


def test_keys_are_the_timeline_s_where_it_has_the_focus_and_the_player_s_elsewhere(opened: Any) -> None:
    whole = view(opened)
    played = "return $('at').value"
    begun = opened.execute_script(played)  # the first tile
    opened.execute_script("chart.canvas.focus()")
    press(opened, "+")
    begin, end = view(opened)
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 2)
    press(opened, "ARROW_RIGHT")
    assert view(opened) == pytest.approx((begin + (end - begin) / 8, end + (end - begin) / 8))
    press(opened, "HOME")
    assert view(opened)[0] == 0
    press(opened, "END")
    assert view(opened)[1] == pytest.approx(whole[1])
    assert opened.execute_script(played) == begun
    press(opened, "-", "+", "+", "0")
    assert view(opened) == pytest.approx(whole)
    opened.execute_script("chart.canvas.blur()")
    press(opened, "END")
    assert opened.execute_script(played) != begun and view(opened) == pytest.approx(whole)


def test_the_wheel_zooms_where_the_timeline_has_the_focus(opened: Any) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    whole = view(opened)
    canvas = ScrollOrigin.from_element(opened.execute_script("return chart.canvas"))
    before = opened.execute_script("return scrollY")
    ActionChains(opened).scroll_from_origin(canvas, 0, -100).perform()
    until(opened, f"scrollY < {before}")  # elsewhere it scrolls the page
    assert view(opened) == whole
    opened.execute_script("chart.canvas.focus({ preventScroll: true })")
    ActionChains(opened).scroll_from_origin(canvas, 0, -100).perform()
    until(opened, "chart.view[1] - chart.view[0] < chart.end")


def test_two_fingers_zoom_and_a_tap_says_what_it_is(opened: Any, page: Path) -> None:
    browsers.screen(opened, 360)
    opened.execute_script("chart.canvas.scrollIntoView({ block: 'center' })")
    until(opened, "chart.full < 360")
    left, top, wide = opened.execute_script(
        "const box = chart.canvas.getBoundingClientRect(); return [box.left + chart.left, box.top, chart.wide]"
    )
    timeline = timeline_of(page)
    row, n = some_of(timeline, "copy")

    def touch(kind: str, *xs: float, y: float = top + 60) -> None:
        points = [{"x": x, "y": y, "id": finger} for finger, x in enumerate(xs)]
        opened.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    whole = view(opened)
    touch("touchStart", left + wide * 0.4, left + wide * 0.6)
    touch("touchMove", left + wide * 0.2, left + wide * 0.8)
    touch("touchEnd")
    begin, end = view(opened)
    assert end - begin == pytest.approx((whole[1] - whole[0]) / 3, rel=0.05)
    x, y = opened.execute_script(
        "const at = { row: arguments[0], n: arguments[1] }; chart.near(at); const [begin, end] = chart.span(at);"
        "return [chart.x((begin + end) / 2), chart.tops[at.row] + 9]",
        row,
        n,
    )
    opened.execute_script("scrollBy(0, chart.canvas.getBoundingClientRect().top + arguments[0] - 300)", y)
    left, top = opened.execute_script("const box = chart.canvas.getBoundingClientRect(); return [box.left, box.top]")
    touch("touchStart", left + x, y=top + y)
    touch("touchEnd")
    until(opened, f"chart.picked?.row === {row} && chart.picked.n === {n}")
    assert timeline["notes"][timeline["rows"][row]["spans"][n][4]] in said(opened)


def tables(browser: Any) -> list[list[list[str]]]:
    found = browser.execute_script(
        "return [...choice.timeline.root.querySelectorAll('table')]"
        ".map(one => [...one.rows].map(row => [...row.cells].map(cell => cell.textContent)))"
    )
    return list(found)


def test_the_tables_are_the_json_s(opened: Any, page: Path) -> None:
    timeline = timeline_of(page)
    (heads, *rows), (_, *busy), (_, *waits) = tables(opened)
    labels = [kind["label"] for kind in timeline["kinds"]]
    names = [row["name"] for row in timeline["rows"] if row["group"] == "warps"]
    assert [name.split(" (")[0] for name, *_ in rows] == names
    for (_, *shown), share in zip(rows, timeline["shares"], strict=True):
        by_label = dict(zip(heads[1:-1], shown, strict=False))
        assert [number(by_label.get(label, "0")) for label in labels] == pytest.approx(share, abs=0.51)
        assert number(shown[-1]) == pytest.approx(sum(share), abs=0.51)
    assert {name: number(clocks) for name, clocks, _ in busy} == pytest.approx(timeline["busy"], abs=0.51)
    lengths: dict[tuple[int, int], list[float]] = {}
    for row in timeline["rows"]:
        for begin, end, kind, source, _ in row["spans"]:
            if row["group"] == "warps" and timeline["kinds"][kind]["class"] == "wait":
                lengths.setdefault((kind, source), []).append(end - begin)
    longest = sorted(lengths.values(), key=max, reverse=True)[: len(waits)]
    assert len(waits) == min(len(lengths), 12)
    assert [number(row[3]) for row in waits] == pytest.approx([max(each) for each in longest], abs=0.51)
    assert sum(number(row[2]) for row in waits) == pytest.approx(sum(map(sum, longest)), rel=0.01)
    opened.execute_script("choice.timeline.root.querySelector('.there').click()")
    begin, end = opened.execute_script("return chart.span(chart.picked)")[:2]
    assert end - begin == max(longest[0]) and view(opened)[0] <= begin and end <= view(opened)[1]


@pytest.mark.parametrize("width", [320, 360, 1440])
def test_no_width_scrolls_sideways(opened: Any, width: int) -> None:
    browsers.screen(opened, width, prefers_color_scheme="dark")
    opened.execute_script("for (const one of document.querySelectorAll('details')) one.open = true")
    pointer(opened, *opened.execute_script("return [0, 0]")).perform()
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    until(opened, "chart.full === chart.canvas.clientWidth")
    assert opened.execute_script("return chart.wide > chart.full / 2 && chart.left + chart.wide <= chart.full")


def test_dark_and_light_are_the_page_s(opened: Any) -> None:
    colours = "chart.draw(); return [chart.colours('--ink'), getComputedStyle(document.documentElement).getPropertyValue('--ink')]"
    browsers.screen(opened, 1280, 1000, prefers_color_scheme="light")
    light, same = opened.execute_script(colours)
    assert light == same
    opened.execute_script("$('theme').click()")
    dark, same = opened.execute_script(colours)
    assert dark == same != light


def test_every_launch_has_its_timeline_or_says_why_not(opened: Any, page: Path) -> None:
    opened.execute_script("for (const one of choices) one.root.open = true")
    for number_, player in enumerate(told(page)["players"]):
        for n, launch in enumerate(player["launches"]):
            opened.execute_script(
                "const one = choices[arguments[0]]; one.choice.value = arguments[1]; one.choice.onchange()", number_, n
            )
            text = opened.execute_script("return choices[arguments[0]].place.textContent", number_)
            assert (launch["timeline"]["model"] if launch["timeline"] else launch["timeline_why"]) in text


CROWD = r"""
extern "C" __global__ void k(const float* x, float* y) {
    extern __shared__ __align__(128) float s[];
    __shared__ unsigned long long bar;
    const unsigned at = (unsigned)__cvta_generic_to_shared(&bar), to = (unsigned)__cvta_generic_to_shared(s);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 16384;" :: "r"(at) : "memory");
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 1024; i += blockDim.x)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
                     :: "r"(to + 16 * i), "l"(x + 4 * i), "r"(at) : "memory");
    asm volatile("{.reg .pred p;\nW: mbarrier.try_wait.parity.shared.b64 p, [%0], 0;\n@!p bra W;}" :: "r"(at) : "memory");
    y[threadIdx.x] = s[threadIdx.x];
}"""


def test_a_thousand_copies_at_a_time_and_the_beginning_of_a_long_block_are_drawn(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "k.cu").write_text(CROWD)
    args = {"x": {"shape": [4096], "fill": "arange"}, "y": {"shape": [128], "fill": "empty"}}
    launch = ("--arch", "sm_90", "--grid", "1", "--block", "128", "--shared-bytes", "16384", "--args", json.dumps(args))
    for most, says in ((10**6, "clocks"), (100, "the first")):
        monkeypatch.setattr("cupyflash.sim.clock.timeline.MOST_SPANS", most)
        page = tmp_path / "page.html"
        result = CliRunner().invoke(main, ["profile", str(tmp_path / "k.cu"), *launch, "--html", str(page)])
        assert result.exit_code == 0, result.output
        timeline = timeline_of(page)
        assert (timeline["clocks"] > timeline["shown"]) == (most == 100)
        for _ in open_page(browser, page, "window.choice = choice"):
            until(browser, "chart.pen?.getImageData(0, 0, chart.canvas.width, chart.canvas.height).data.some(Boolean)")
            assert browser.execute_script("return chart.canvas.clientHeight") < 1500
            assert says in browser.execute_script("return choice.timeline.about()")
            (_, *rows), (_, *busy), _ = tables(browser)
            assert all(number(shown[-1]) == pytest.approx(timeline["clocks"], rel=0.05) for shown in rows)
            assert all(0 <= int(part.removesuffix(" %")) <= 100 for *_, part in busy)


def test_in_a_profile_a_click_goes_to_the_line_and_a_line_lights_its_spans(profiled: Any, profile: Path) -> None:
    timeline = timeline_of(profile)
    row, n = some_of(timeline, "wait")
    source = timeline["rows"][row]["spans"][n][3]
    line = timeline["sources"][source][1]
    pointer(profiled, row, n).click().perform()
    until(profiled, f"location.hash === '#L0-{line}'")
    lit = "return chart.told.rows.flatMap(row => row.spans).filter(span => !chart.lit || chart.lit(span)).map(span => span[3])"
    from selenium.webdriver import ActionChains

    ActionChains(profiled).move_to_element(profiled.execute_script("return $(location.hash.slice(1))")).perform()
    until(profiled, "chart.lit !== null")
    assert set(profiled.execute_script(lit)) == {n for n, each in enumerate(timeline["sources"]) if each[1] == line}
    ActionChains(profiled).move_to_element(profiled.execute_script("return $('name')")).perform()
    until(profiled, "chart.lit === null")
    assert profiled.execute_script("return document.documentElement.scrollWidth <= innerWidth")


COMPARED = """
compare.root.open = true;
if (arguments.length) { compare.selects.forEach((select, at) => select.selectedIndex = arguments[at]); }
compare.show();
const cells = [...compare.place.querySelector('tbody').rows].map(row => [...row.cells].map(cell => cell.textContent));
return [compare.selects.map(select => select.selectedIndex), compare.place.querySelector('.verdict').textContent, cells];
"""


def test_two_timelines_are_compared(opened: Any) -> None:
    """The sentence and the table are sums of the JSON's."""
    told = opened.execute_script("return compare.timelines.map(one => [one.name, one.timeline])")
    names = [name for name, _ in told]
    chosen, _, _ = opened.execute_script(COMPARED)
    assert [names[at] for at in chosen] == ["FlashAttention-2", "FlashAttention-3"]
    for pair in (chosen, [0, 2]):
        _, said, rows = opened.execute_script(COMPARED, *pair)
        (one, a), (other, b) = (told[at] for at in pair)
        clocks = [round(each["clocks"]) for each in (a, b)]
        assert f"takes {clocks[1]:,} clocks" in said and f"of the {clocks[0]:,} of {one}'s" in said and other in said
        means = [[sum(share[n] for share in each["shares"]) / len(each["shares"]) for n in range(len(KINDS))] for each in (a, b)]
        waits = [sum(mean for mean, (_, _, kind) in zip(each, KINDS, strict=True) if kind == "wait") for each in means]
        shares = [float(share) for share in re.findall(r"for (\d+) %", said)]
        for share, wait, each in zip(shares, waits[::-1], (b, a), strict=True):
            assert abs(share - 100 * wait / each["clocks"]) <= 0.5
        labels = {label: n for n, (_, label, _) in enumerate(KINDS)}
        assert [row[0] for row in rows] == [label for label, n in labels.items() if means[0][n] or means[1][n]]
        for label, *shown, difference in rows:
            numbers = [int(cell.replace(",", "")) for cell in shown]
            assert all(abs(number - mean[labels[label]]) <= 0.5 for number, mean in zip(numbers, means, strict=True))
            assert int(difference.replace(",", "").replace("−", "-")) == numbers[1] - numbers[0]


VIEWS = "return compare.pair.map(each => each.chart.view)"


def test_compared_timelines_move_together(opened: Any) -> None:
    opened.execute_script(COMPARED)
    whole, other = opened.execute_script(VIEWS)
    ends = opened.execute_script("return compare.pair.map(each => each.told.shown)")
    assert whole == other == [0, max(ends)]
    for act in ("pair[0].chart.zoom(4, 900)", "pair[1].chart.pan(200)", "pair[1].chart.zoom(2)"):
        opened.execute_script(f"compare.{act}")
        one, other = opened.execute_script(VIEWS)
        assert one == other != whole
    opened.execute_script("compare.place.querySelector('.legend button').click()")
    assert opened.execute_script("return compare.pair.map(each => each.chart.lit !== null)") == [True, True]
    assert opened.execute_script("return compare.place.querySelectorAll('.legend').length") == 1
