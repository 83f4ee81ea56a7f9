"""The page of `cupyflash learn` in Chromium: its functions are Python's, and what a person does on it has the theory's numbers."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import browsers
from cupyflash import Device, Problem, plan
from cupyflash.schedules import plan_backward
from cupyflash.sim import learn, theory
from cupyflash.sim.cli import main
from cupyflash.sim.learn import models, starts
from cupyflash.tiling import TileSize

pytestmark = pytest.mark.wide

SCREENS = {"desk": (1280, 800), "phone": (390, 844)}
POINTS = 1000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("learn") / "out.html"
    result = CliRunner().invoke(main, ["learn", "--html", str(file), "--language", "en"])
    assert result.exit_code == 0, result.output
    return file


@pytest.fixture(params=SCREENS)
def opened(request: pytest.FixtureRequest, browser: Any, page: Path) -> Iterator[Any]:
    """The page, loaded anew, on both screens; nothing may be on its console afterwards, nor be cut off at its side."""
    browsers.screen(browser, *SCREENS[request.param])
    browser.get_log("browser")  # what others left
    browser.get(page.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")


# -- the numbers are Python's

DRAWS: dict[str, Callable[[random.Random], list[Any]]] = {
    "tiles": lambda draw: [draw.randint(1, 1 << 19), draw.randint(1, 256)],
    "forward": lambda draw: [
        draw.choice(("fa1", "fa2", "standard")),
        *(draw.randint(1, 1 << draw.randint(1, most)) for most in (16, 8, 9, 9)),
        draw.random() < 0.5,
        draw.choice((2, 4)),
    ],
    "online": lambda draw: [
        *([draw.uniform(-20, 20) for _ in range(8)] for _ in range(2)),
        draw.randint(1, 8),
        draw.choice((0, draw.uniform(0, 8))),
    ],
    "visits": lambda draw: [draw.choice(("fa1", "fa2")), *(draw.randint(1, 9) for _ in range(4)), draw.random() < 0.5],
    "walk": lambda draw: [
        draw.choice(("fa1", "fa2")),
        *(draw.randint(1, most) for most in (400, 128, 128, 128)),
        draw.random() < 0.5,
        draw.randint(0, 60),
    ],
    "warps": lambda draw: [draw.randint(1, most) for most in (256, 256, 256, 8)],
    "decoding": lambda draw: [draw.randint(1, most) for most in (2048, 8, 1 << 17, 256, 128, 148, 256)],
    "backward": lambda draw: [
        draw.choice(("fa1", "standard")),
        *(draw.randint(1, most) for most in (1 << 17, 256, 256, 512)),
        draw.random() < 0.5,
    ],
    "kept": lambda draw: [draw.randint(1, most) for most in (1 << 18, 32, 128)],
    "roles": lambda draw: [
        *(draw.randint(1, most) for most in (4, 4, 3)),
        draw.random() < 0.5,
        *(draw.uniform(1, 3000) for _ in range(3)),
    ],
    "busy": lambda draw: [models.roles(3, draw.randint(1, 4), 2, False, *(draw.randint(1, 900) for _ in range(3)))],
}


def alike(one: Any, other: Any) -> bool:
    """Equal, whole numbers exactly; others but for the last bits of an exponential."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-12, abs_tol=1e-12)
    return bool(one == other)


def test_a_thousand_drawn_points_have_python_s_numbers(browser: Any, page: Path) -> None:
    draw = random.Random(37)
    functions = {function.__name__: function for function in learn.FORMS}
    assert functions.keys() == DRAWS.keys()
    calls = [(name, DRAWS[name](draw)) for name in functions for _ in range(POINTS)]
    browser.get(page.as_uri())
    found = browser.execute_script("return arguments[0].map(([name, given]) => forms[name](...given))", calls)
    for (name, given), answer in zip(calls, found, strict=True):
        assert alike(functions[name](*given), answer), (name, given, answer)


# -- what a person does


def text(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def number_at(browser: Any, selector: str) -> float:
    return float(text(browser, selector).replace(",", "").replace("−", "-").split()[0])


def press(browser: Any, selector: str, *keys: str) -> None:
    """Press keys with the element of a selector focused."""
    press_on(browser, browser.find_element("css selector", selector), *keys)


def press_on(browser: Any, element: Any, *keys: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.execute_script("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' }); arguments[0].focus()", element)
    element.send_keys(*(getattr(Keys, key, key) for key in keys))


def type_over(browser: Any, selector: str, typed: str) -> None:
    from selenium.webdriver.common.keys import Keys

    press(browser, selector, Keys.CONTROL + "a" + Keys.NULL, typed)


def click(browser: Any, selector: str) -> None:
    found = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", found)
    found.click()


def spoken(browser: Any) -> str:
    """The text for a screen reader once nothing has moved for a while."""
    from selenium.webdriver.support.wait import WebDriverWait

    said = "return document.getElementById('spoken').textContent"
    WebDriverWait(browser, 5, poll_frequency=0.05).until(lambda _: browser.execute_script(said))
    return str(browser.execute_script(said))


def memory_total(browser: Any) -> tuple[int, ...]:
    """Standard attention's reads and writes, FlashAttention's, as the table says."""
    return tuple(last_row(browser, "memory"))


def memory_expected(browser: Any) -> tuple[int, int, int, int]:
    """The same by the theory, of what the controls say."""
    state = browser.execute_script("return lessons[0].state")
    seqlen, heads = state["seqlen"], state["heads"]
    problem = Problem(1, heads, heads, seqlen, seqlen, state["head_dim"], "float32", causal=state["causal"])
    tile = TileSize(state["block_rows"], state["block_cols"], "the page's")
    flash = theory.traffic(plan(problem, Device.named("A100-40GB"), "fa1", tiling=tile))
    standard = theory.standard_ideal(problem)
    return standard.read_bytes, standard.write_bytes, flash.read_bytes, flash.write_bytes


def test_the_first_screen_shows_the_point(opened: Any) -> None:
    """M, both bars, the verdict, the tiles and the curve are in view without scrolling."""
    for selector in (
        "h1",
        "#memory-sram",
        "#memory .bars",
        "#memory .verdict",
        "#memory figure svg",
        "#memory figure + figure svg",
    ):
        room = "return innerHeight - document.querySelector(arguments[0]).getBoundingClientRect().bottom"
        assert opened.execute_script(room, selector) >= 0, selector
    assert opened.execute_script("return [...document.querySelectorAll('#memory svg')].every(one => one.childElementCount > 5)")


def test_dragging_the_point_changes_the_bytes_to_the_theory_s(opened: Any) -> None:
    from selenium.webdriver import ActionChains

    chart = opened.find_element("css selector", "#memory-drag")
    assert memory_total(opened) == memory_expected(opened)
    before = opened.execute_script("return lessons[0].state.sram")
    ActionChains(opened).move_to_element(chart).click_and_hold().move_by_offset(-30, 0).release().perform()
    state = opened.execute_script("return lessons[0].state")
    assert state["sram"] < before and memory_total(opened) == memory_expected(opened)
    assert state["block_cols"] == -(-state["sram"] // 4 // (4 * state["head_dim"]))
    assert str(state["block_cols"]) in text(opened, "#memory [data-value=block_cols]") and "M " in spoken(opened)


def test_the_crossing_is_found_with_the_keyboard(opened: Any) -> None:
    assert not found(opened, "memory")
    press(opened, "#memory-head_dim", "ARROW_RIGHT", "ARROW_RIGHT")
    assert text(opened, "output[for=memory-head_dim]") == "128"
    press(opened, "#memory-sram", *["ARROW_RIGHT"] * 3)
    assert number_at(opened, "output[for=memory-sram]") == 192
    assert "192 KB" in opened.find_element("css selector", "#memory-sram").get_attribute("aria-valuetext")
    read, written, *flash = memory_total(opened)
    assert sum(flash) == pytest.approx(read + written, rel=0.05)
    assert found(opened, "memory")
    assert "192 KB" in text(opened, "#memory .answer") and spoken(opened).startswith("Found")


def test_other_controls_have_the_theory_s_bytes_too(opened: Any) -> None:
    for name, key, times in (
        ("seqlen", "ARROW_LEFT", 1),
        ("heads", "HOME", 1),
        ("block_rows", "ARROW_LEFT", 9),
        ("block_cols", "ARROW_LEFT", 30),
    ):
        press(opened, f"#memory-{name}", *[key] * times)
        assert memory_total(opened) == memory_expected(opened)
    click(opened, "#memory-causal")
    assert opened.execute_script("return lessons[0].state.causal") and memory_total(opened) == memory_expected(opened)
    press(opened, "#memory-block_cols", "END")
    assert "do not fit" in text(opened, "#memory .verdict")


def test_softmax_is_stepped_and_typed(opened: Any) -> None:
    scores, values = [1.0, 3, 2, 0, 5, 4, 1, 2], [2.0, -1, 4, 0, 1, 3, -2, 5]

    def expected(seen: int) -> tuple[float, float, float]:
        m = max(scores[:seen])
        weights = [math.exp(score - m) for score in scores[:seen]]
        return m, sum(weights), sum(weight * value for weight, value in zip(weights, values, strict=False))

    def shown() -> list[float]:
        return [number_at(opened, f"#softmax [data-sum={name}]") for name in ("m", "l", "O")]

    for seen in (2, 4, 6, 8):
        assert shown() == pytest.approx(expected(seen), abs=6e-4)
        click(opened, "#softmax-step") if seen < 8 else None
    assert not opened.find_element("css selector", "#softmax-step").is_enabled()
    field = "#softmax input[aria-label='score 8']"
    type_over(opened, field, "6.5")
    scores[7] = 6.5
    assert shown() == pytest.approx(expected(8), abs=6e-4)
    weights = [math.exp(score) for score in scores]
    result = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    for name in ("result", "whole"):
        assert number_at(opened, f"#softmax [data-value={name}]") == pytest.approx(result, abs=6e-5)
    click(opened, "#softmax-back")
    assert shown() == pytest.approx(expected(6), abs=6e-4)


def test_no_rescaling_is_found_where_the_largest_comes_first(opened: Any) -> None:
    field = "#softmax input[aria-label='score 1']"
    for typed, expected in (("4.5", False), ("9", True)):
        type_over(opened, field, typed)
        assert found(opened, "softmax") is expected
    assert number_at(opened, "#softmax [data-value=rescaled]") == 0


def found(browser: Any, section: str) -> bool:
    return "found" in str(browser.find_element("css selector", f"#{section} .ask").get_attribute("class"))


def cells(browser: Any, section: str) -> list[list[str]]:
    rows = "return [...document.querySelectorAll(arguments[0])].map(row => [...row.cells].map(cell => cell.textContent))"
    return [list(row) for row in browser.execute_script(rows, f"#{section} tbody tr")]


def last_row(browser: Any, section: str) -> list[int]:
    """The sums in the last row of a section's table."""
    return [int(cell.replace(",", "")) for cell in cells(browser, section)[-1][1:]]


def steps_of(browser: Any) -> tuple[int, int]:
    """The tiles computed so far in section 3, and all."""
    at, every = text(browser, "output[for=loops-at]").split(" / ")
    return int(at), int(every)


def test_both_orders_of_loops_are_stepped_to_the_theory_s_bytes(opened: Any) -> None:
    at, every = steps_of(opened)
    before = cells(opened, "loops")
    click(opened, "#loops-step")
    assert steps_of(opened) == (at + 1, every) and cells(opened, "loops") != before
    click(opened, "#loops-back")
    assert cells(opened, "loops") == before
    click(opened, "#loops-causal")
    click(opened, "#loops-end")
    problem = Problem(1, 16, 16, 1024, 1024, 64, "float32", causal=True)
    schedules = [plan(problem, Device.named("A100-40GB"), name, tiling=TileSize(128, 128, "the page's")) for name in ("fa1", "fa2")]
    assert last_row(opened, "loops") == [theory.traffic(schedule).total_bytes for schedule in schedules]
    assert steps_of(opened) == (36, 36) and not found(opened, "loops")
    press(opened, "#loops-block_rows", "HOME")
    assert found(opened, "loops") and "times as many" in text(opened, "#loops .verdict")


def test_keys_for_warps_are_right_for_few_rows(opened: Any) -> None:
    assert last_row(opened, "warps") == [81920, 354304] and not found(opened, "warps")  # as docs/performance.md has it
    press(opened, "#warps-rows", "HOME")
    assert found(opened, "warps") and "Found" in spoken(opened)


def test_decoding_is_split_until_the_chip_is_full(opened: Any) -> None:
    for _ in range(15):
        assert not found(opened, "decoding")
        press(opened, "#decoding-splits", "ARROW_RIGHT")
    assert found(opened, "decoding") and text(opened, "output[for=decoding-splits]") == "16"
    assert text(opened, "#decoding [data-bar=longest]") == "512" and text(opened, "#decoding [data-value=busy]") == "128"
    press(opened, "#decoding-splits", "ARROW_RIGHT")
    assert text(opened, "#decoding [data-bar=longest]") == "1,024" and text(opened, "#decoding [data-value=rounds]") == "2"


def test_p_outgrows_the_memory(opened: Any) -> None:
    press(opened, "#backward-seqlen", *["ARROW_RIGHT"] * 4)
    assert text(opened, "output[for=backward-seqlen]") == "32,768"
    assert text(opened, "#backward [data-bar=P]") == "68.7 GB" and not found(opened, "backward")
    press(opened, "#backward-seqlen", "ARROW_RIGHT")
    assert text(opened, "#backward [data-bar=P]") == "107 GB" and found(opened, "backward")
    tile = models.tiles(starts.BACKWARD_SRAM, 128)
    problem = Problem(1, 32, 32, 40960, 40960, 128, "float16")
    size = TileSize(tile["block_rows"], tile["block_cols"], "the page's")
    algorithm4 = theory.traffic(plan_backward(problem, Device.named("A100-40GB"), "fa1", tiling=size)).total_bytes
    for name, nbytes in (("standard", theory.standard_backward_ideal(problem).total_bytes), ("fa1", algorithm4)):
        assert number_at(opened, f"#backward [data-bar={name}]") == pytest.approx(nbytes / 1e9, rel=5e-3)


@pytest.mark.parametrize("way", ["two consumers", "ahead"])
def test_a_hopper_s_tensor_cores_are_kept_busy(opened: Any, way: str) -> None:
    doing = text(opened, "#hopper .doing")
    clock = number_at(opened, "output[for=hopper-clock]")
    click(opened, "#hopper-step")
    assert number_at(opened, "output[for=hopper-clock]") > clock and text(opened, "#hopper .doing") != doing
    assert text(opened, "#hopper [data-bar=busy]") == "68 %"
    if way == "ahead":
        click(opened, "#hopper-ahead")
        assert not found(opened, "hopper")
    press(opened, "#hopper-stages" if way == "ahead" else "#hopper-groups", "ARROW_RIGHT")
    assert found(opened, "hopper") and number_at(opened, "#hopper [data-bar=busy]") > 90


def test_the_first_numbers_are_those_of_the_command(opened: Any) -> None:
    numbers = starts.numbers()
    assert sum(memory_total(opened)[2:]) == numbers["memory"]["bytes"]["fa1"]
    assert number_at(opened, "#hopper [data-value=busy]") == round(100 * numbers["hopper"]["busy"])
    assert number_at(opened, "#softmax [data-value=result]") == pytest.approx(numbers["softmax"]["result"], abs=6e-5)
    assert last_row(opened, "warps") == [*numbers["warps"].values()]
    click(opened, "#loops-end")
    assert last_row(opened, "loops") == [*numbers["loops"].values()]


def test_languages_and_colours_change(opened: Any) -> None:
    shown = lambda: text(opened, "#memory h2")  # noqa: E731
    before, dark = shown(), opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    press(opened, "#language", "ARROW_DOWN")
    assert opened.execute_script("return document.documentElement.lang") == "zh-CN"
    assert not re.search(r"\{\w+\}|undefined|NaN", text(opened, "body > .page"))
    click(opened, "#theme")
    assert opened.execute_script("return getComputedStyle(document.body).backgroundColor") != dark
    assert before == learn.texts("en")["memory"]["title"] and shown() == learn.texts("zh")["memory"]["title"]


def test_an_answer_that_is_shown_was_not_found(opened: Any) -> None:
    link = "#contents a[href='#warps']"
    click(opened, "#warps-show")
    assert opened.find_element("css selector", "#warps .answer").is_displayed() and spoken(opened) == text(opened, "#warps .answer")
    assert not found(opened, "warps") and opened.find_element("css selector", link).get_attribute("class") == ""
    press(opened, "#warps-rows", "HOME")
    assert found(opened, "warps") and opened.find_element("css selector", link).get_attribute("class") == "found"


def test_the_text_s_own_buttons_move_the_controls(opened: Any) -> None:
    """Each does something that shows, names a control, and keeps its focus."""
    for number, section in enumerate(learn.SECTIONS):
        places = opened.find_elements("css selector", f"#{section} .prose .try")
        assert places
        for place in places:
            before = opened.execute_script("return JSON.stringify(lessons[arguments[0]].state)", number)
            press_on(opened, place, "SPACE")
            assert opened.execute_script("return JSON.stringify(lessons[arguments[0]].state)", number) != before
            assert opened.execute_script("return document.activeElement === arguments[0]", place)
    assert text(opened, "output[for=memory-sram]") == "128 KB" and memory_total(opened) == memory_expected(opened)
    assert text(opened, "output[for=hopper-copy]") == str(starts.STARTS["hopper"]["copy"])


def test_the_system_s_wishes_are_followed(browser: Any, page: Path) -> None:
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    shown = []
    for wishes in ({}, {"prefers_color_scheme": "dark", "prefers_reduced_motion": "reduce"}):
        browsers.screen(browser, *SCREENS["phone"], **wishes)
        browser.get(page.as_uri())
        shown.append(
            [browser.execute_script(style, *asked) for asked in (("body", "backgroundColor"), (".eight i", "transitionDuration"))]
        )
    (light, moves), (dark, still) = shown
    assert light == "rgb(255, 255, 255)" != dark and moves != "0s" == still


def test_everything_that_can_be_moved_has_a_name(opened: Any) -> None:
    named = "one.labels?.length && one.labels[0].textContent.trim() || one.getAttribute('aria-label') || one.textContent.trim()"
    every = "[...document.querySelectorAll('input, select, button, a')]"
    assert opened.execute_script(f"return {every}.filter(one => !({named})).map(one => one.outerHTML)") == []
    pictures = "[...document.querySelectorAll('main svg')]"
    assert opened.execute_script(f"return {pictures}.every(one => one.getAttribute('aria-hidden') === 'true')")
