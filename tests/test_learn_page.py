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
from cupyflash.sim import learn, theory
from cupyflash.sim.cli import main
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
    """Press keys with the element focused."""
    from selenium.webdriver.common.keys import Keys

    found = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' }); arguments[0].focus()", found)
    found.send_keys(*(getattr(Keys, key, key) for key in keys))


def type_over(browser: Any, selector: str, typed: str) -> None:
    from selenium.webdriver.common.keys import Keys

    press(browser, selector, Keys.CONTROL + "a" + Keys.NULL, typed)


def click(browser: Any, selector: str) -> None:
    found = browser.find_element("css selector", selector)
    browser.execute_script("arguments[0].scrollIntoView({ block: 'center', behavior: 'instant' })", found)
    found.click()


def spoken(browser: Any) -> str:
    """What a screen reader is told once nothing has moved for a while."""
    from selenium.webdriver.support.wait import WebDriverWait

    said = "return document.getElementById('spoken').textContent"
    WebDriverWait(browser, 5, poll_frequency=0.05).until(lambda _: browser.execute_script(said))
    return str(browser.execute_script(said))


def memory_total(browser: Any) -> tuple[int, int, int, int]:
    """The last row of the table of bytes: standard attention's reads and writes, FlashAttention's."""
    row = "return [...document.querySelectorAll('#memory tbody tr:last-child td')].map(one => one.textContent)"
    cells = browser.execute_script(row)
    read, written, flash_read, flash_written = (int(cell.replace(",", "")) for cell in cells[1:])
    return read, written, flash_read, flash_written


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
    assert "found" not in opened.find_element("css selector", "#memory .ask").get_attribute("class")
    press(opened, "#memory-head_dim", "ARROW_RIGHT", "ARROW_RIGHT")
    assert text(opened, "output[for=memory-head_dim]") == "128"
    while number_at(opened, "output[for=memory-sram]") != 192:
        press(opened, "#memory-sram", "ARROW_RIGHT")
    assert "192 KB" in opened.find_element("css selector", "#memory-sram").get_attribute("aria-valuetext")
    read, written, *flash = memory_total(opened)
    assert sum(flash) == pytest.approx(read + written, rel=0.05)
    assert "found" in opened.find_element("css selector", "#memory .ask").get_attribute("class")
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
    for typed, found in (("4.5", False), ("9", True)):
        type_over(opened, field, typed)
        assert ("found" in opened.find_element("css selector", "#softmax .ask").get_attribute("class")) is found
    assert number_at(opened, "#softmax [data-value=rescaled]") == 0


def test_languages_and_colours_change(opened: Any) -> None:
    shown = lambda: text(opened, "#memory h2")  # noqa: E731
    before, dark = shown(), opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    press(opened, "#language", "ARROW_DOWN")
    assert opened.execute_script("return document.documentElement.lang") == "zh-CN"
    assert not re.search(r"\{\w+\}|undefined|NaN", text(opened, "body > .page"))
    click(opened, "#theme")
    assert opened.execute_script("return getComputedStyle(document.body).backgroundColor") != dark
    assert before == learn.texts("en")["memory"]["title"] and shown() == learn.texts("zh")["memory"]["title"]


def test_everything_that_can_be_moved_has_a_name(opened: Any) -> None:
    named = "one.labels?.length && one.labels[0].textContent.trim() || one.getAttribute('aria-label') || one.textContent.trim()"
    every = "[...document.querySelectorAll('input, select, button, a')]"
    assert opened.execute_script(f"return {every}.filter(one => !({named})).map(one => one.outerHTML)") == []
    pictures = "[...document.querySelectorAll('main svg')]"
    assert opened.execute_script(f"return {pictures}.every(one => one.getAttribute('aria-hidden') === 'true')")
