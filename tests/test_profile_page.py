"""The page of `cupyflash profile --html`: its numbers are the JSON's, a race's lines are linked, the banks show what is counted."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import browsers
from cupyflash import sim
from cupyflash.sim.cli import main
from cupyflash.sim.profiling.banks import BankAccess
from cupyflash.sim.profiling.page import report
from cupyflash.sim.ptx.state.lane_sets import Wave, bank_passes

pytest.importorskip("cupy")

DOCS = Path(__file__).resolve().parent.parent / "docs"

KERNEL = """// </script><!-- <script> a stranger's text
#include "scale.cuh"
extern "C" __global__ void k(const float* x, float* y, float4* z, int n) {
    __shared__ float tile[32][32];
    __shared__ float4 wide[64];
    int col = threadIdx.x, row = threadIdx.y;
    tile[row][col] = scaled(x[row * n + col]);
    wide[(2 * col) % 64] = make_float4(1, 2, 3, 4);
    y[row * n + col] = tile[col][row];
    if (col % 2 && blockIdx.x == 0) y[row] += col;
    __syncthreads();
    z[32 * row + col] = wide[col];
}
"""
HEADER = "\n" * 60 + "__device__ float scaled(float x) {\n    return x * 2.f;\n}\n" + "\n" * 60
ARGS = {"x": {"shape": [8, 32], "fill": "normal"}, "y": {"shape": [8, 32]}, "z": {"shape": [256, 4]}, "n": 32}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page of a kernel, and the JSON of the same command."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "k.cu").write_text(KERNEL)
    (folder / "scale.cuh").write_text(HEADER)
    page = folder / "out.html"
    launch = ("--grid", "2", "--block", "32,8", "--args", json.dumps(ARGS))
    result = CliRunner().invoke(main, ["profile", str(folder / "k.cu"), *launch, "--json", "--html", str(page)])
    assert result.exit_code == 1 and f"wrote {page}" in result.stderr  # it has races
    return page, json.loads(result.stdout)


def told(page: Path) -> dict[str, Any]:
    """The data of a page."""
    return dict(json.loads(page.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0]))


def test_the_page_is_the_json_with_sources_and_banks(made: tuple[Path, dict[str, Any]]) -> None:
    page, expected = made
    data = told(page)
    parts = {
        (file["name"], part["first"] + n): text
        for file in data.pop("sources")
        for part in file["parts"]
        for n, text in enumerate(part["lines"])
    }
    banks = data.pop("banks")
    assert data == expected
    for line in expected["lines"]:
        assert parts[Path(line["file"]).name, line["line"]].strip() == line["text"]
    assert ("scale.cuh", 62) in parts and ("scale.cuh", 1) not in parts  # far from what was executed
    # Each line, kind and width has one; with conflicts where the line's counts have them, and never with more.
    counts = {
        (line["file"], line["line"], one["kind"], one["width"]): one["conflicts"]
        for line in expected["lines"]
        for one in line["shared"]
    }
    assert {(one["file"], one["line"], one["kind"], one["width"]) for one in banks} == set(counts)
    for one in banks:
        whole = counts[one["file"], one["line"], one["kind"], one["width"]]
        assert (one["conflicts"] > 0) == (whole > 0) and one["conflicts"] <= whole
    assert [one["conflicts"] for one in banks] == sorted((one["conflicts"] for one in banks), reverse=True)
    assert page.read_text(encoding="utf-8").count("</script>") == 2 and "<!-- <script>" not in page.read_text(encoding="utf-8")


def test_a_race_has_both_its_lines(made: tuple[Path, dict[str, Any]]) -> None:
    places = {frozenset((one["source"][1], one["other"][1])) for one in made[1]["findings"] if one["kind"] == "race"}
    assert {frozenset((7, 9)), frozenset((9, 10))} <= places


def test_without_html_nobody_looks_on(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text(PTX)
    quiet = sim.profile(tmp_path / "k.ptx", grid=1, block=64)
    asked = sim.profile(tmp_path / "k.ptx", grid=1, block=64, banks=True)
    assert quiet.banks == () and quiet.to_dict() == asked.to_dict()
    (access,) = asked.banks
    assert (access.line[0], access.block, access.warp, access.lanes) == ("PTX", 0, 0, tuple(range(32)))
    assert access.offsets == tuple(range(0, 256, 8)) and access.to_dict()["conflicts"] == 1
    data = report(asked)
    assert [file["name"] for file in data["sources"]] == ["PTX"]


PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k() {
    .reg .b32 %r<4>;
    .shared .align 4 .b8 tile[512];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 3;
    mov.u32 %r3, tile;
    add.u32 %r3, %r3, %r2;
    st.shared.u32 [%r3], %r1;
    ret;
}
"""


def test_the_screenshot_is_of_today_s_counts(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("screenshot", DOCS / "screenshot.py")
    assert spec is not None and spec.loader is not None
    screenshot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(screenshot)
    drawn = (DOCS / "profile.png").read_bytes().split(b"tEXt" + screenshot.KEY.encode() + b"\0")[1][:64].decode()
    assert drawn == screenshot.profile_digest(screenshot.profiled(tmp_path)), "python docs/screenshot.py draws it anew"


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_the_picture_has_as_many_wavefronts_as_are_counted(size: int) -> None:
    """For any lanes of a warp at any addresses: the rows of the picture are the count, and in each a bank has one word."""
    draw = np.random.default_rng(size)
    wave = Wave(0, 1, 32, 4096, 32)
    for _ in range(60):
        index = np.flatnonzero(draw.random(32) < draw.choice([0.2, 0.7, 1]))
        if not len(index):
            continue
        offsets = size * draw.integers(0, draw.choice([8, 64, 4096 // size]), len(index))
        access = BankAccess(("k.cu", 1), "ld", size, 0, 0, tuple(index.tolist()), tuple(offsets.tolist()))
        shown = access.to_dict()
        assert (shown["wavefronts"], shown["ideal_wavefronts"]) == bank_passes(wave.lanes(index), offsets, size)
        words: dict[tuple[int, int], set[int]] = {}
        for lane in shown["lanes"]:
            for n in range(lane["banks"]):
                words.setdefault((lane["wavefront"], lane["bank"] + n), set()).add(lane["offset"] // 4 + n)
        assert all(len(found) == 1 for found in words.values()) and max(bank for _, bank in words) < 32
        assert {wavefront for wavefront, _ in words} == set(range(shown["wavefronts"]))


# -- in a browser ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(browser: Any, made: tuple[Path, dict[str, Any]]) -> Iterator[Any]:
    """The page, loaded anew; nothing may be on its console afterwards."""
    browsers.screen(browser, 1280)
    browser.get_log("browser")  # what others left
    browser.get("about:blank")
    browser.get(made[0].as_uri())
    yield browser
    assert browser.get_log("browser") == []


def press(browser: Any, *keys: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser).send_keys(*(getattr(Keys, key, key) for key in keys)).perform()


def texts(browser: Any, selector: str) -> list[str]:
    found = browser.execute_script("return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector)
    return [str(text) for text in found]


METRICS: dict[str, Any] = {
    "instructions": lambda counts: counts["instructions"],
    "bytes": lambda counts: sum(side["bytes"] for both in counts["global"].values() for side in both.values()),
    "sectors": lambda counts: sum(side["sectors"] for both in counts["global"].values() for side in both.values()),
    "conflicts": lambda counts: sum(one["conflicts"] for one in counts["shared"]),
    "divergence": lambda counts: counts["divergent_branches"],
}


@pytest.mark.wide
def test_the_heat_is_the_json_s(opened: Any, made: tuple[Path, dict[str, Any]]) -> None:
    data = made[1]
    files = [file["file"] for file in told(made[0])["sources"]]
    for number, (name, of) in enumerate(METRICS.items(), 1):
        press(opened, str(number))
        assert texts(opened, "[aria-checked=true]") == texts(opened, f"#by-{name}")
        whole = of(data["total"])
        assert whole > 0
        for line in data["lines"]:
            row = f"#L{files.index(line['file'])}-{line['line']}"
            value = of(line)
            expected = [f"{value:,}", f"{100 * value / whole:.1f} %"] if value else ["", ""]
            assert texts(opened, f"{row} .value") + texts(opened, f"{row} .part") == expected
        assert f" of {whole:,} " in texts(opened, "#sources summary .sum")[0]


@pytest.mark.wide
def test_the_tables_are_the_text_s(opened: Any, made: tuple[Path, dict[str, Any]]) -> None:
    """Number by number, as the command prints them: the same digits, rounded alike."""
    (made[0].parent / "args.json").write_text(json.dumps(ARGS))
    spec = ("--grid", "2", "--block", "32,8", "--args", str(made[0].parent / "args.json"))
    printed = CliRunner().invoke(main, ["profile", str(made[0].parent / "k.cu"), *spec]).stdout
    sections = {part.splitlines()[0].split(" (")[0]: part.splitlines() for part in printed.split("\n\n")}
    for section, title in (("global", "Global memory"), ("shared", "Shared memory"), ("mix", "Instruction mix")):
        rows = opened.execute_script(
            f"return [...document.querySelector('#{section} table').rows].map(row => [...row.cells].map(cell => cell.textContent))"
        )
        lines = [line for line in sections[title][1:] if not line.startswith("Simulated")]
        assert [" ".join(" ".join(row).split()) for row in rows] == [" ".join(line.split()) for line in lines]
    summary = dict(zip(texts(opened, "#summary dt"), texts(opened, "#summary dd"), strict=True))
    flat = " ".join(printed.split())
    assert len(summary) == 9 and [item for item in summary.items() if " ".join(item) not in flat] == []


@pytest.mark.wide
def test_the_tensors_table_has_dram_s_bytes(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(KERNEL)
    (tmp_path / "scale.cuh").write_text(HEADER)
    launch = ("--grid", "2", "--block", "32,8", "--args", json.dumps(ARGS), "--l2", "--device", "T4")
    result = CliRunner().invoke(main, ["profile", str(tmp_path / "k.cu"), *launch, "--json", "--html", str(tmp_path / "out.html")])
    expected = json.loads(result.stdout)["l2"]
    browser.get((tmp_path / "out.html").as_uri())
    rows = browser.execute_script(
        "return [...document.querySelector('#global table').rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert rows[0][-2:] == ["DRAM", "reads hit"] and len(rows) == 5
    for about, side, *_, moved, hit in rows[1:]:
        row = expected["tensors"][about.split()[0]]
        assert moved == f"{row[f'dram_{side}_bytes']:,}"
        assert hit == (f"{100 * row['hit_rate']:.1f} %" if side == "read" else "")
    (said,) = texts(browser, "#l2")
    assert f"L2 of T4, by a model: {expected['l2_bytes']:,} bytes" in said and f"{expected['registers']} registers a thread" in said
    assert f"In all {expected['tensors']['total']['dram_read_bytes']:,} bytes from DRAM" in said
    assert browser.get_log("browser") == []


LINKED = """
const [here, other] = arguments;
const under = id => {
  const found = [];
  let at = document.getElementById(id);
  while ((at = at.nextElementSibling)?.classList.contains("finding")) found.push(at);
  return found;
};
const links = (id, to) => under(id).some(one => one.querySelector(`a[href="#${to}"]`));
return other === null ? under(here).length > 0 : links(here, other) && links(other, here);
"""


@pytest.mark.wide
def test_findings_stand_at_their_lines_and_link_both_sides(opened: Any, made: tuple[Path, dict[str, Any]]) -> None:
    assert {one["kind"] for one in made[1]["findings"]} == {"race", "uninitialised"}
    for finding in made[1]["findings"]:
        here, other = (f"L0-{place[1]}" if place else None for place in (finding["source"], finding["other"]))
        assert opened.execute_script(LINKED, here, other)
    opened.execute_script("document.querySelector('#findings a').click()")
    assert opened.execute_script("return document.querySelector('.row:target') !== null")
    press(opened, "n")


@pytest.mark.wide
def test_a_line_opens_with_its_banks(opened: Any) -> None:
    opened.execute_script("document.querySelector('#L0-9 .no').focus()")
    press(opened, "ENTER")
    assert texts(opened, "#L0-9 + .finding, #L0-9 + .detail") and "31 conflicts" in texts(opened, ".detail")[0]
    assert opened.execute_script("return document.querySelectorAll('.detail .banks rect.extra').length") == 31
    press(opened, "ENTER")
    assert texts(opened, ".detail") == []
    press(opened, "ARROW_DOWN")
    assert opened.execute_script("return document.activeElement.closest('.row').id") == "L0-10"
    for number, access in enumerate(opened.execute_script("return data.banks")):
        opened.execute_script("const s = document.getElementById('access'); s.value = arguments[0]; s.onchange()", number)
        assert f"{access['wavefronts']:,} wavefront" in texts(opened, "#drawn .banks p")[0]


@pytest.mark.wide
@pytest.mark.parametrize("width", [320, 360, 768, 1440])
def test_no_width_scrolls_sideways(opened: Any, width: int) -> None:
    browsers.screen(opened, width)
    opened.execute_script("document.querySelectorAll('.row.counted').forEach(row => row.click())")
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    reach = (
        "return Math.max(...[...document.querySelectorAll('.row, .finding, .wide')].map(one => one.getBoundingClientRect().right))"
    )
    assert opened.execute_script(reach) <= width


@pytest.mark.wide
def test_dark_and_light_follow_the_system_and_the_switch(opened: Any) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    browsers.screen(opened, 1280, prefers_color_scheme="dark")
    dark = opened.execute_script(paper)
    opened.execute_script("document.getElementById('theme').click()")
    assert opened.execute_script(paper) == "rgb(255, 255, 255)" != dark
