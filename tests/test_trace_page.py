"""The page of `cupyflash trace` in a real browser: it loads without an error and plays to the end, with the theory's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_trace import SCHEDULES
from test_trace_decode import CALLS, call

import browsers
from cupyflash import Device, Problem, plan
from cupyflash.schedules import Cache
from cupyflash.sim import theory
from cupyflash.sim.cli import main
from cupyflash.sim.trace import trace
from cupyflash.sim.trace.choices import choices
from cupyflash.sim.trace.page import page as page_of
from cupyflash.sim.trace.page import report

pytest.importorskip("cupy")
pytestmark = pytest.mark.wide

ALGORITHMS = "standard", "fa1", "fa2"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "out.html"
    sizes = ("--seqlen", "64", "--head-dim", "32", "--heads", "2", "--causal", "--sram", "8KB", "--lse")
    result = CliRunner().invoke(main, ["trace", *sizes, "--algorithms", ",".join(ALGORITHMS), "--html", str(file)])
    assert result.exit_code == 0, result.output
    return file


@pytest.fixture
def opened(browser: Any, page: Path) -> Iterator[Any]:
    """The page, loaded anew, at its beginning; nothing may be on its console afterwards."""
    browsers.screen(browser, 1280)
    browser.get_log("browser")  # what others left
    browser.get(page.as_uri())
    browser.execute_script("jump(0)")
    yield browser
    assert browser.get_log("browser") == []


def press(browser: Any, key: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    ActionChains(browser).send_keys(getattr(Keys, key, key)).perform()


def clock(browser: Any) -> int:
    return int(text(browser, "#clock").split(" of ")[0].replace(",", ""))


def text(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def until(browser: Any, met: Callable[[], bool]) -> None:
    """Selenium's own wait, which ends with an error where it never comes."""
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda _: met())


def counters(browser: Any) -> list[dict[str, list[str]]]:
    """The tables: by tensor, the bytes read and written as they stand there."""
    rows = browser.execute_script(
        "return [...document.querySelectorAll('.panel')].map(panel => [...panel.querySelectorAll('tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent)))"
    )
    return [{name: sides for name, *sides in panel} for panel in rows]


def test_it_plays_to_the_end_where_the_counters_are_the_theory_s(opened: Any) -> None:
    assert clock(opened) == 0 and "0 / " in str(counters(opened))
    opened.execute_script("document.getElementById('speed').value = '16'")
    opened.execute_script("document.getElementById('play').click()")
    until(opened, lambda: clock(opened) > 0)
    until(opened, lambda: text(opened, "#play") == "Play")
    problem = Problem(1, 2, 2, 64, 64, 32, "float16", causal=True)
    for number, (algorithm, shown) in enumerate(zip(ALGORITHMS, counters(opened), strict=True)):
        form = theory.traffic(plan(problem, Device.named("A100-40GB", sram="8KB"), algorithm, lse=True))
        expected = {
            tensor: [f"{n:,} / {n:,}" if n else "–" for n in (moved.read_bytes, moved.write_bytes)]
            for tensor, moved in form.items()
        }
        expected["all"] = [f"{n:,} / {n:,}" for n in (form.read_bytes, form.write_bytes)]
        assert {name.replace("O_acc", "Oacc"): sides for name, sides in expected.items()} == shown
        assert text(opened, f"#panel-{number} .now") == f"Done: {form.total_bytes:,} bytes, as the closed form says."
    assert text(opened, "#spoken").count("as the closed form says") == 3


SEEN = """
const top = document.querySelector('.controls').getBoundingClientRect().top, player = players[arguments[0]];
view(arguments[0]);
jump(player.opening);
const parts = [player.rooms, player.scores.picture, player.root.querySelector('ol'), player.now];
const boxes = parts.map(each => each.getBoundingClientRect());
return [boxes.map(each => each.width > 0 && each.top >= 0 && each.bottom <= top), player.scores.count, player.t === player.opening];
"""


@pytest.mark.parametrize("screen", [(1280, 800), (390, 844)])
def test_it_opens_on_its_first_tile_with_all_of_it_in_view(browser: Any, page: Path, screen: tuple[int, int]) -> None:
    browsers.screen(browser, *screen)
    browser.get(page.as_uri())
    assert clock(browser) == browser.execute_script("return players[1].opening") > 0
    shown = "return players.map(player => player.root.checkVisibility())"
    assert browser.execute_script(shown) == [False, True, False]  # FlashAttention; standard attention is beside it in the bars
    assert browser.execute_script("return [players[1].scores.count, players[1].work.cell.className.baseVal]") == [1, "cell on at"]
    for number in range(3):
        in_view, tiles, there = browser.execute_script(SEEN, number)
        assert tiles == 1 and there
        assert all(in_view), (number, in_view)


def test_one_algorithm_is_shown_or_all_side_by_side(opened: Any) -> None:
    shown = "return players.map(player => player.root.checkVisibility())"
    opened.execute_script("players[2].choice.click()")
    assert opened.execute_script(shown) == [False, False, True]
    assert opened.execute_script("return players.map(player => player.choice.ariaPressed)") == ["false", "false", "true"]
    opened.execute_script("together.click()")
    assert opened.execute_script(shown) == [True, True, True] and opened.execute_script("return together.ariaPressed") == "true"
    opened.execute_script("together.click()")
    assert opened.execute_script(shown) == [False, True, False]


SENTENCES = """
return players.map(player => player.moves.map((move, at) => {
  jump(player.ends[at]);
  const said = player.now.children[0].textContent, tile = player.tile(move).replaceAll("_", "");
  return [said, tile, move[WRITE], move[MADE].length, comma(move[BYTES])];
}).slice(0, -1));
"""


def test_each_move_is_told_in_one_sentence(opened: Any) -> None:
    for player in opened.execute_script(SENTENCES):
        for said, tile, write, made, size in player:
            assert said.endswith(".") and said.count(".") == 1 and said.startswith(f"{tile} ({size} bytes) is ")
            assert ("is written from" in said) == bool(write) and (" can be made on chip" in said) == bool(made)
            assert ", " in said.partition(") is ")[2]  # the reason


def test_keys_step_play_and_jump(opened: Any) -> None:
    press(opened, "ARROW_RIGHT")
    until(opened, lambda: clock(opened) > 0)
    until(opened, lambda: opened.execute_script("return goal === null"))
    first = clock(opened)
    ends = opened.execute_script("return Math.min(...players.map(player => player.ends[0]))")
    assert first == ends and "bytes" in text(opened, "#spoken")
    assert opened.execute_script("return document.querySelectorAll('li[aria-current=step]').length") >= 1
    press(opened, "ARROW_RIGHT")
    until(opened, lambda: clock(opened) > first and opened.execute_script("return goal === null"))
    press(opened, "ARROW_LEFT")
    assert clock(opened) == first
    press(opened, "END")
    assert clock(opened) == opened.execute_script("return most")
    press(opened, "HOME")
    assert clock(opened) == 0
    press(opened, "SPACE")
    until(opened, lambda: clock(opened) > 0)
    assert text(opened, "#play") == "Pause"
    press(opened, "SPACE")
    assert text(opened, "#play") == "Play"


def test_any_place_shows_what_playing_up_to_it_shows(opened: Any) -> None:
    """Forward in steps, and straight to the same place backwards from the end; in the middle of moves, and at their ends."""
    look = "return [...document.querySelectorAll('.panel')].map(one => one.innerText + one.querySelectorAll('.cell.on').length)"
    ends = opened.execute_script("return players.flatMap(player => player.ends)")
    places = sorted({*ends[::9], *(end + 100 for end in ends[::9])})
    seen = []
    for place in places:
        opened.execute_script("jump(arguments[0])", place)
        seen.append(opened.execute_script(look))
    for place, before in list(zip(places, seen, strict=True))[::-1]:
        opened.execute_script("jump(arguments[0])", place)
        assert opened.execute_script(look) == before
    opened.execute_script("jump(most); jump(arguments[0])", places[3])
    assert opened.execute_script(look) == seen[3]


ROOMS = """
const over = [];
for (const player of players) {
  player.reset();
  for (const move of player.moves) {
    player.apply(move);
    for (const [name, bytes] of player.told.launches[move[LAUNCH]].rooms) {
      const held = player.slots[name] ?? [], sum = held.reduce((sum, each) => sum + (each.gone ? 0 : each.bytes), 0);
      if (sum > bytes || held.length > player.slotCount(name)) over.push([name, held]);
    }
  }
}
return over;
"""


def test_no_room_holds_more_than_it_has_bytes_for(opened: Any) -> None:
    assert opened.execute_script(ROOMS) == []


OTHERS = "fa3", "decode", "lengths", "standard backward", "fa1 backward", "fa2 backward, deterministic", *CALLS


@pytest.mark.parametrize("name", OTHERS)
def test_every_algorithm_has_its_page(name: str, browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    told = report([trace((SCHEDULES | CALLS)[name]())], [name], "a problem")
    file.write_text(page_of(told), encoding="utf-8")
    browsers.screen(browser, 360)
    browser.get_log("browser")
    browser.get(file.as_uri())
    assert browser.execute_script(ROOMS) == []
    for part in (0.3, 0.7, 1):
        browser.execute_script("jump(most * arguments[0])", part)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert text(browser, ".now") == f"Done: {told['players'][0]['total_bytes']:,} bytes, as the closed form says."
    assert browser.get_log("browser") == []


SIDE_BY_SIDE = {
    "to compute softmax(Q Kᵀ / √d) V and its gradients": ("--seqlen", "16", "--head-dim", "16", "--algorithms", "fa2,fa2-backward"),
    "to compute softmax(Q Kᵀ / √d) V": ("--decode", "--head-dim", "16", "--cache-seqlens", "70,41", "--algorithms", "decode,fa2"),
}


@pytest.mark.parametrize("purpose", SIDE_BY_SIDE)
def test_others_side_by_side_end_at_the_theory_s_bytes_too(purpose: str, browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    result = CliRunner().invoke(main, ["trace", *SIDE_BY_SIDE[purpose], "--html", str(file)])
    assert result.exit_code == 0, result.output
    browsers.screen(browser, 360)
    browser.get(file.as_uri())
    assert text(browser, "#what").endswith(f"move between HBM and the SRAM of a thread block {purpose}")
    press(browser, "END")
    for number in (0, 1):
        assert text(browser, f"#panel-{number} .now").endswith("as the closed form says.")
        read, written = counters(browser)[number]["all"]
        assert all(side.split(" / ")[0] == side.split(" / ")[1] for side in (read, written))
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


BACK_WHILE_MOVING = """
const place = Math.floor(players[0].ends.length / 2), found = [];
jump(players[0].ends[place]);
const before = t;
step();
const moving = goal !== null && t < goal.to;
back();
return [moving, before, t];
"""


def test_back_from_a_step_that_still_moves_is_where_it_began(opened: Any) -> None:
    moving, before, after = opened.execute_script(BACK_WHILE_MOVING)
    assert moving and before == after


LOOK_OF_DECODING = """
const player = players[0], found = [];
for (const [at, move] of player.moves.entries()) {
  jump(player.ends[at]);
  const name = player.told.tensors[move[TENSOR]].name, held = Object.values(player.slots).flat().filter(each => each && !each.gone);
  found.push([name, move[WRITE], player.now.children[1].textContent, held.map(each => each.tile), player.block]);
}
return found;
"""


def test_pages_and_new_keys_are_pieces_of_their_block(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    made = trace(CALLS["pages, new keys, a tree"]())
    file.write_text(page_of(report([made], ["decoding"], "a problem")), encoding="utf-8")
    browsers.screen(browser, 1280)
    browser.get(file.as_uri())
    moves, places = made.moves, browser.execute_script(LOOK_OF_DECODING)
    assert made.decoding is not None
    table, split = made.decoding.arrays["block_table"], 2
    for move, (name, write, says, held, block) in list(zip(moves, places, strict=True))[:-1]:  # the last says that it is done
        assert (name, bool(write), block) == (move.tensor, move.write, move.block)
        if name in ("K", "V", "K_new", "V_new"):
            keys, sequence = made.tensors[name].keys_of(move), move.block // split // 2
            page = "" if name.endswith("_new") else f"page {table[sequence, keys.first // 16] + 1} of the cache: "
            assert says.startswith(f"{page}keys {keys.first + 1} to {keys.end} of sequence {sequence + 1}"), says
            assert f"{name[0]}_{keys.first // made.schedule.block_cols + 1}" in held
        assert len(set(held)) == len(held)  # whatever its pieces, a tile is there once
    assert text(browser, ".now") == f"Done: {made.traffic.total_bytes:,} bytes, as the closed form says."


PAGES = """
const figure = players[0].figures[players[0].told.tensors.findIndex(each => each.name === "K")];
const shown = [...figure.groups.get(1).querySelectorAll(".page")];
const fill = each => getComputedStyle(each).fill;
return [shown.map(each => Number(each.getAttribute("y"))), fill(shown[0]), fill(figure.root.querySelector(".back"))];
"""


def test_a_sequence_s_pages_are_grey_read_or_not(browser: Any, tmp_path: Path) -> None:
    """Behind a window of few keys some pages are not read; others of the cache are nobody's, and white."""
    file = tmp_path / "out.html"
    made = trace(call(Cache(0, 16, 12), (90, 41), causal=False, window=(5, 0)))
    file.write_text(page_of(report([made], ["decoding"], "a problem")), encoding="utf-8")
    browser.get(file.as_uri())
    rows, grey, white = browser.execute_script(PAGES)
    assert made.decoding is not None
    table = made.decoding.arrays["block_table"]
    assert rows == sorted(16 * page for page in table[table >= 0].tolist()) and 0 < len(rows) < 12
    assert len({move.rows.first // 16 for move in made.moves if move.tensor == "K"}) < len(rows) and grey != white


@pytest.mark.parametrize("width", [320, 360, 768, 1440])
def test_no_width_scrolls_sideways(opened: Any, width: int) -> None:
    browsers.screen(opened, width)
    for part in (0, 0.4, 1):
        opened.execute_script("jump(most * arguments[0])", part)
        assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        reach = "return Math.max(...[...document.querySelectorAll('.panel *')].map(each => each.getBoundingClientRect().right))"
        assert opened.execute_script(reach) <= width


def test_dark_and_light_follow_the_system_and_the_switch(opened: Any) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    browsers.screen(opened, 1280, prefers_color_scheme="light")
    light = opened.execute_script(paper)
    browsers.screen(opened, 1280, prefers_color_scheme="dark")
    dark = opened.execute_script(paper)
    assert light == "rgb(255, 255, 255)" != dark
    until(opened, lambda: text(opened, "#theme") == "Light")
    opened.execute_script("document.getElementById('theme').click()")
    assert opened.execute_script(paper) == light and text(opened, "#theme") == "Dark"


def test_who_wants_no_motion_sees_none(opened: Any) -> None:
    browsers.screen(opened, 1280, prefers_reduced_motion="reduce")
    press(opened, "ARROW_RIGHT")
    assert clock(opened) == opened.execute_script("return Math.min(...players.map(player => player.ends[0]))")
    assert opened.execute_script("return [...document.querySelectorAll('.ghost')].every(each => each.style.display === 'none')")


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that has other sizes."""
    file = tmp_path_factory.mktemp("page") / "sized.html"
    problem, device = Problem(1, 1, 1, 32, 32, 16, "float16", causal=True), Device.named("A100-40GB", sram="8KB")
    told = report([trace(plan(problem, device, name)) for name in SIZED], SIZED, "traced")
    others = choices(problem, device, SIZED, lambda number, *asked: plan(*asked, SIZED[number]), lambda p: f"N {p.seqlen_q}")
    file.write_text(page_of(told, others), encoding="utf-8")
    return file


SIZED = ("standard", "fa1")
CHOOSE = """
const [axis, value, done] = arguments, select = document.getElementById(`size-${axis}`);
select.value = value;
select.onchange().then(() => done(select.value));
"""


def test_a_reader_chooses_other_sizes(browser: Any, sized: Path) -> None:
    browsers.screen(browser, 1280)
    browser.get_log("browser")
    browser.get(sized.as_uri())
    sizes = {"N": 32, "d": 16, "M": 8192}
    for axis, value in (("N", 64), ("d", 32), ("M", 4096), ("M", 16384), ("N", 32), ("d", 16), ("M", 8192)):
        assert browser.execute_async_script(CHOOSE, axis, str(value)) == str(value)
        sizes[axis] = value
        n, d, sram = sizes.values()
        if text(browser, "#sizes-said").startswith("Not with these sizes: "):
            with pytest.raises(ValueError, match="SRAM"):
                plan(Problem(1, 1, 1, n, n, d, "float16"), Device.named("A100-40GB", sram=sram), "standard")
            continue
        traced = sizes == {"N": 32, "d": 16, "M": 8192}
        assert text(browser, "#title") == ("traced" if traced else f"N {n}")
        assert bool(text(browser, "#sizes-said")) is not traced
        assert clock(browser) == browser.execute_script("return players[1].opening") > 0
        press(browser, "END")
        for number, name in enumerate(SIZED):
            device = Device.named("A100-40GB", sram=sram)
            form = theory.traffic(plan(Problem(1, 1, 1, n, n, d, "float16", causal=True), device, name))
            assert text(browser, f"#panel-{number} .now") == f"Done: {form.total_bytes:,} bytes, as the closed form says."
    assert browser.get_log("browser") == []
