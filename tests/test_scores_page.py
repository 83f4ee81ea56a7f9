"""docs/scores.md: its lines are score functions, its table beside PyTorch is what both compute."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import Score
from cupyflash.expressions.evaluate import evaluate, positions

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "scores.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CLAIM = re.compile(r"^(\S.*?)  # (True|False)$", re.MULTILINE)


def test_the_snippets_lines_are_score_functions() -> None:
    """All that the page writes as a Score parses with its captured values; the wide suite runs the kernels."""
    names: dict[str, Any] = {"quietly": lambda *_, **__: np.zeros((2, 4, 40, 32))}
    for block in BLOCKS:
        forward = block.split("out, pullback")[0]
        quiet = re.sub(r"cupyflash\.attention\w*\(", "quietly(", CLAIM.sub("", forward))
        exec(compile(quiet, "scores.md", "exec"), names)


def rows() -> list[tuple[str, str]]:
    table = PAGE.split("| here |\n| --- | --- | --- |\n")[1].split("\n\n")[0].replace("\\|", "|")
    cells = [[part.strip() for part in re.split(r" \| (?=`|no)", line.strip("| "))] for line in table.splitlines()]
    return [(theirs.strip("`"), here) for _, theirs, here in cells if re.match(r"`s[ *]|`cap", here)]


@pytest.mark.parametrize(("theirs", "ours"), rows())
def test_the_table_beside_pytorch(theirs: str, ours: str) -> None:
    """Both sides of a row are one function: PyTorch's of its positions, with NumPy in torch's place."""
    rng = np.random.default_rng(0)
    n_q, n_k = 5, 5
    values: dict[str, Any] = {"cap": 2.0, "w": 2, "n": 4, "slope": rng.random(2), "bias": rng.random((3, 2, n_q, n_k))}
    values |= {"table": rng.random(9), "prefix": rng.integers(0, 5, 3), "doc": rng.integers(0, 2, n_k), "far": np.inf}
    at = positions({"b": 3, "h": 2, "kv_h": 2, "row": n_q, "k": n_k})
    score = rng.standard_normal((3, 2, n_q, n_k))
    indices = {"score": score, "b": at["b"], "h": at["h"], "q_idx": at["row"], "kv_idx": at["k"]}
    expected = eval(theirs, {"torch": np, "inf": np.inf, "float": float} | values | indices)
    text = re.findall(r"`([^`]*)`", ours)[0]
    named = set(re.findall(r"\w+", text)) & values.keys()
    single = {name: np.asarray(values[name]) for name in named if np.ndim(values[name])}
    typed = {name: array.astype(np.float32 if array.dtype.kind == "f" else np.int32) for name, array in single.items()}
    made = Score(text, **{name: typed.get(name, values[name]) for name in named})
    found = evaluate(made.form.tree, at | {"s": score} | values)
    np.testing.assert_allclose(np.broadcast_to(found, score.shape), np.broadcast_to(expected, score.shape), rtol=1e-6)
