"""The page of `cupyflash learn` without a browser: its texts, its numbers in Python, what is translated to JavaScript."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import Device, Problem, plan
from cupyflash.schedules import Cache, plan_backward, plan_decode
from cupyflash.sim import learn, theory
from cupyflash.sim.cli import main
from cupyflash.sim.learn import models
from cupyflash.sim.learn.javascript import Untranslatable, translated
from cupyflash.sim.learn.starts import STARTS, numbers, total
from cupyflash.tiling import TileSize

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 400_000


def leaves(texts: Any, path: str = "") -> dict[str, str]:
    """The texts by their path; a list's items by their number."""
    if isinstance(texts, str):
        return {path: texts}
    parts = texts.items() if isinstance(texts, dict) else enumerate(texts)
    return {key: value for name, part in parts for key, value in leaves(part, f"{path}.{name}".lstrip(".")).items()}


def test_one_file_without_a_network(tmp_path: Path) -> None:
    file = tmp_path / "out.html"
    result = CliRunner().invoke(main, ["learn", "--html", str(file), "--language", "zh"])
    assert result.exit_code == 0 and result.stdout == ""
    page = file.read_text(encoding="utf-8")
    assert page == learn.page("zh") and len(page.encode()) <= MOST_BYTES
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)|url\(|@import|fetch\(|XMLHttpRequest""", page)


def test_what_is_asked_for_is_printed() -> None:
    result = CliRunner().invoke(main, ["learn", "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout) == json.loads(json.dumps(numbers()))
    assert numbers().keys() == STARTS.keys() == {*learn.SECTIONS}
    refused = CliRunner().invoke(main, ["learn"])
    assert refused.exit_code == 2 and "--html FILE" in refused.stderr


def test_languages_have_the_same_texts_and_numbers() -> None:
    english, *others = (leaves(learn.texts(language)) for language in learn.LANGUAGES)
    for other in others:
        assert english.keys() == other.keys()
        for key, text in english.items():
            for marks in (r"\{\w+\}", r"\]\(\w+=.+?\)"):  # numbers, and buttons
                assert set(re.findall(marks, text)) == set(re.findall(marks, other[key])), key


def test_every_section_has_what_a_section_has() -> None:
    for language in learn.LANGUAGES:
        texts = learn.texts(language)
        assert list(texts) == ["page", *learn.SECTIONS]
        for name in learn.SECTIONS:
            assert {"short", "title", "lead", "prose", "question", "answer", "told"} <= texts[name].keys()
            assert (learn.HERE / f"{name}.js").exists()


@given(st.integers(1, 700), st.integers(1, 130), st.integers(1, 90), st.integers(1, 90), st.booleans(), st.sampled_from([2, 4]))
def test_forward_is_the_theory_s_traffic(seqlen: int, d: int, rows: int, cols: int, causal: bool, itemsize: int) -> None:
    problem = Problem(1, 1, 1, seqlen, seqlen, d, {2: "float16", 4: "float32"}[itemsize], causal=causal)
    for algorithm in ("fa1", "fa2", "standard"):
        schedule = plan(problem, Device.named("A100-40GB"), algorithm, tiling=TileSize(rows, cols, "drawn"))
        traffic = theory.standard_ideal(problem) if algorithm == "standard" else theory.traffic(schedule)
        moved = models.forward(algorithm, seqlen, d, rows, cols, causal, itemsize)
        assert (sum(moved["read"].values()), sum(moved["written"].values())) == (traffic.read_bytes, traffic.write_bytes)
        for tensor, (read, written) in traffic.items():
            names = ("O", "O_acc") if tensor == "O" and itemsize == 4 else (tensor,)
            assert [sum(moved[side].get(name, 0) for name in names) for side in ("read", "written")] == [read, written]


@given(st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=1, max_size=9), st.integers(1, 9), st.floats(0, 8))
def test_online_softmax_is_softmax_whatever_the_blocks(pairs: list[tuple[float, float]], block: int, growth: float) -> None:
    scores, values = (list(side) for side in zip(*pairs, strict=True))
    (whole,), steps = models.online(scores, values, len(scores), 0.0), models.online(scores, values, block, growth)
    assert steps[-1]["O"] / steps[-1]["l"] == pytest.approx(whole["O"] / whole["l"], rel=1e-9, abs=1e-9)
    for before, step in pairwise(steps):
        assert step["m"] == (step["top"] if step["top"] > before["m"] + growth else before["m"])
        assert step["scale"] == math.exp(before["m"] - step["m"])


@given(st.integers(1, 260), *[st.integers(1, 70)] * 3, st.booleans())
def test_a_walk_over_all_tiles_moves_the_forward_s_bytes(seqlen: int, d: int, rows: int, cols: int, causal: bool) -> None:
    """And never fewer after one more tile; both orders visit the same tiles."""
    found = []
    for algorithm in ("fa1", "fa2"):
        order = models.visits(algorithm, -(-seqlen // rows), -(-seqlen // cols), rows, cols, causal)
        walked = [models.walk(algorithm, seqlen, d, rows, cols, causal, steps) for steps in (len(order) // 2, len(order))]
        assert walked[1] == models.forward(algorithm, seqlen, d, rows, cols, causal, 4)
        assert total(walked[0]) <= total(walked[1])
        found.append(sorted(order))
    assert found[0] == found[1]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3000), st.integers(1, 40))
def test_decoding_is_the_theory_s(batch: int, kv_heads: int, group: int, keys: int, splits: int) -> None:
    problem = Problem(batch, kv_heads * group, kv_heads, 1, keys, 64, "float16")
    schedule = plan_decode(problem, Device.named("H100-SXM"), Cache(), num_splits=splits)
    found = models.decoding(batch * kv_heads, group, keys, 64, schedule.splits, 132, schedule.block_cols)
    traffic = theory.traffic(schedule)
    assert found["bytes"] == traffic.total_bytes
    assert found["partial"] == sum(traffic[name].total_bytes for name in ("O_part", "m_part", "l_part") if name in traffic)
    assert found["longest"] * found["busy"] >= batch * kv_heads * keys > 0


@given(st.integers(1, 500), st.sampled_from([32, 64, 128]), st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_the_backward_is_the_theory_s(seqlen: int, d: int, rows: int, cols: int, causal: bool) -> None:
    problem = Problem(1, 1, 1, seqlen, seqlen, d, "float16", causal=causal)
    assert total(models.backward("standard", seqlen, d, rows, cols, causal)) == theory.standard_backward_ideal(problem).total_bytes
    schedule = plan_backward(problem, Device.named("A100-40GB"), "fa1", tiling=TileSize(rows, cols, "drawn"))
    traffic = theory.traffic(schedule)
    again = traffic["L"].total_bytes - models.backward("fa1", seqlen, d, rows, cols, causal)["read"]["L"]  # of a kernel before it
    assert total(models.backward("fa1", seqlen, d, rows, cols, causal)) + again == traffic.total_bytes and again in (0, 4 * seqlen)


SIZES = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), st.booleans(), *[st.floats(1, 900)] * 3)


@given(SIZES)
def test_roles_keep_to_the_rules(sizes: tuple[int, int, int, bool, float, float, float]) -> None:
    """Each task runs once; a unit does one thing at a time; nothing is used before it is there, no slot before it is free."""
    turns, stages, groups, *_ = sizes
    spans = models.roles(*sizes)
    at = {(row, kind, j): (begin, end) for row, kind, j, begin, end in spans}
    assert len(at) == len(spans) == turns * (2 + 3 * groups)
    for unit in range(3):
        own = sorted((begin, end) for _, kind, _, begin, end in spans if models.unit_of(kind) == unit)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    for row in range(1, groups + 1):
        for j in range(turns):
            scores, softmax, output = (at[row, kind, j] for kind in (2, 3, 4))
            assert at[0, 0, j][1] <= scores[0] and scores[1] <= softmax[0] and softmax[1] <= output[0] >= at[0, 1, j][1]
            for kind in range(2):
                assert j < stages or at[row, 2 + 2 * kind, j - stages][1] <= at[0, kind, j][0]
    assert 0 < models.busy(spans) <= 1 + 1e-9


def test_the_notebook_s_ten_cells_have_the_page_s_numbers() -> None:
    """Each cell runs, after those before it, and its last line is what the notebook says; all that it compares is equal."""
    book = json.loads((ROOT / "docs" / "learn.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 10
    space: dict[str, Any] = {}
    for cell in cells:
        body = ast.parse("".join(cell["source"]))
        last = body.body.pop()
        assert isinstance(last, ast.Expr)
        exec(compile(body, "a cell", "exec"), space)
        value = eval(compile(ast.Expression(last.value), "a cell", "eval"), space)
        ((shown,),) = ([output["data"]["text/plain"] for output in cell["outputs"]],)
        assert repr(value) == "".join(shown)
        assert not isinstance(value, tuple) or False not in value


def test_the_screenshot_is_of_today_s_numbers() -> None:
    spec = importlib.util.spec_from_file_location("screenshot", ROOT / "docs" / "screenshot.py")
    assert spec is not None and spec.loader is not None
    screenshot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(screenshot)
    drawn = (ROOT / "docs" / "learn.png").read_bytes().split(b"tEXt" + screenshot.KEY.encode() + b"\0")[1][:64].decode()
    assert drawn == screenshot.learn_digest(json.loads(json.dumps(numbers()))), "python docs/screenshot.py learn draws it anew"


def takes_a_set(n: int) -> Any:
    return {n, 2}


def keeps_a_word(n: int) -> int:
    new = n
    return new


def filters(n: int) -> list[int]:
    return [each for each in range(n) if each]


def calls_the_unknown(n: int) -> str:
    return repr(n)


@pytest.mark.parametrize("function", [takes_a_set, keeps_a_word, filters, calls_the_unknown])
def test_what_has_no_javascript_is_refused(function: Any) -> None:
    with pytest.raises(Untranslatable, match=function.__name__):
        translated("forms", function)
