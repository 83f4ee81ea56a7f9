"""The options of a score function: --softcap, --alibi, or --score with what it captures."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
import numpy as np

from cupyflash.expressions.c import ELEMENTS
from cupyflash.named_scores import one_score
from cupyflash.score import MAX_AXES, Score
from cupyflash.sim.yardstick import DTYPES

SCORES = (
    click.option("--softcap", metavar="X", type=float, help="Scores become X tanh(score / X)."),
    click.option("--alibi", is_flag=True, help="ALiBi: scores less a slope, one a head, times how far row and key are apart."),
    click.option("--score", metavar="TEXT", help="What becomes of each score: 's + slope[h] * (k - q)', say."),
    click.option(
        "--capture",
        metavar="NAME=WHAT",
        multiple=True,
        help="What a name in --score is: a number, or the dtype of an array, whose elements are drawn; once for each.",
    ),
)


def score_of(given: Mapping[str, Any]) -> Score | None:
    """From the options' values, by name; arrays are of one element. Raises as `Score` and `one_score` do, or click.UsageError."""
    text, captures = given["score"], given["capture"]
    if captures and text is None:
        raise click.UsageError("--capture is for --score")
    score = None if text is None else Score(text, **_captured(text, captures))
    if score is not None and given["alibi"]:
        raise click.UsageError("--alibi cannot go with --score, which says all that becomes of a score")
    return one_score(score, given["softcap"], np.ones(1, np.float32) if given["alibi"] else None)


def _captured(text: str, captures: Sequence[str]) -> dict[str, Any]:
    """Values by name."""
    found: dict[str, Any] = {}
    for capture in captures:
        name, equals, what = (part.strip() for part in capture.partition("="))
        if not (name.isidentifier() and equals) or name in found:
            raise click.BadParameter(f"a name once, and what it is: slope=float32, say; got {capture!r}", param_hint="--capture")
        if what in ELEMENTS:
            found[name] = np.ones((1,) * _axes(text, name), DTYPES[what] if what == "bfloat16" else what)
        elif re.fullmatch(r"[-+]?\d+", what):
            found[name] = int(what)
        else:
            try:
                found[name] = float(what)
            except ValueError:
                allowed = f"a number or one of {', '.join(ELEMENTS)}"
                raise click.BadParameter(f"{name} must be {allowed}, got {what!r}", param_hint="--capture") from None
    return found


def _axes(text: str, name: str) -> int:
    """How many axes an array has that a text indexes; of a text that is none, `Score` has more to say."""
    try:
        nodes = [*ast.walk(ast.parse(text.strip(), mode="eval"))]
    except (SyntaxError, RecursionError, MemoryError):
        return 1
    indices = (node.slice for node in nodes if isinstance(node, ast.Subscript) and getattr(node.value, "id", None) == name)
    counts = [len(index.elts) if isinstance(index, ast.Tuple) else 1 for index in indices]
    return min(max(counts, default=0), MAX_AXES)
