"""The page of `cupyflash learn` without a browser: its texts, its numbers in Python, what is translated to JavaScript."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import Device, Problem, plan
from cupyflash.sim import learn, theory
from cupyflash.sim.cli import main
from cupyflash.sim.learn import models
from cupyflash.sim.learn.javascript import Untranslatable, translated
from cupyflash.sim.learn.starts import STARTS, numbers
from cupyflash.tiling import TileSize

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
            assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", other[key])), key


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
        assert (step["scale"] == 1) == (step["m"] == before["m"])


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
