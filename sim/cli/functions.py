"""Score and mask functions from --softcap, --alibi, --score and --mask-function with their captured values."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np

from cupyflash.basics import Array, Report, Values
from cupyflash.expressions.c import ELEMENTS
from cupyflash.expressions.tree import depends_on
from cupyflash.request.keywords import SCORE_NUMBERS
from cupyflash.request.named_scores import one_score
from cupyflash.request.options import Pattern
from cupyflash.request.problem import Problem
from cupyflash.request.score import MAX_AXES, Mask, Score, seen_by, sizes_of
from cupyflash.request.score import field as field_of
from cupyflash.sim.numbers.yardstick import DTYPES

# Of a mask that is looked through for its tiles
MOST_SCORES = 1 << 28


@dataclass(frozen=True)
class ScoreFunctions:
    """A command's functions; `given` are the captured values that were said, by name: the other arrays have one element."""

    score: Score | None = None
    mask: Mask | None = None
    given: Values = field(default_factory=dict)

    @classmethod
    def of(cls, options: Values) -> ScoreFunctions:
        """The functions of the options' values, by name. Raises as `Score`, `Mask` and `one_score` do, or click.UsageError."""
        texts = {name: options[name] for name in ("score", "mask_function") if options[name] is not None}
        if options["capture"] and not texts:
            raise click.UsageError("--capture is for --score and --mask-function")
        if options.get("mask") and "mask_function" in texts:
            raise click.UsageError("--mask cannot go with --mask-function, which is the mask")
        values = _captured([*texts.values()], options["capture"])
        used = {name: _words(text) for name, text in texts.items()}
        made: Report = {}
        for name, text in texts.items():
            others = set().union(*(words for other, words in used.items() if other != name)) - used[name]
            made[name] = (Score if name == "score" else Mask)(text, **{one: values[one] for one in values.keys() - others})
        score = made.get("score")
        if score is not None and options["alibi"]:
            raise click.UsageError("--alibi cannot go with --score, which is the whole function of a score")
        slopes = np.ones(1, np.float32) if options["alibi"] else None
        score = one_score({"score": score, "alibi_slopes": slopes} | {name: options[name] for name in SCORE_NUMBERS})
        numbers = {} if score is None else score.numbers
        return cls(score, made.get("mask_function"), {**numbers, **{one: it for one, it in values.items() if not _is_drawn(it)}})

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers among the given values."""
        return {name: value for name, value in self.given.items() if not isinstance(value, np.ndarray)}

    @property
    def forms(self) -> Report:
        """Theirs, or None, by the names of `Options`."""
        return {
            "score": None if self.score is None else self.score.form,
            "mask_function": None if self.mask is None else self.mask.form,
        }

    @property
    def fields(self) -> Report:
        """The given values, by the names of the kernels' struct."""
        forms = [form for form in self.forms.values() if form is not None]
        return {
            field_of(one.name, form.kind): self.given[one.name] for form in forms for one in form.captured if one.name in self.given
        }

    def check(self, problem: Problem) -> None:
        """ValueError unless the given arrays fit a problem."""
        shapes = {name: value.shape for name, value in self.given.items() if isinstance(value, np.ndarray)}
        for form in filter(None, self.forms.values()):
            form.check(shapes, sizes_of(problem))

    def pattern(self, problem: Problem) -> Pattern | None:
        """The mask's value for each score; None where its arrays are not given, or there are too many scores to look through."""
        form = problem.options.mask_function
        if form is None or not all(one.name in self.given for one in form.captured):
            return None
        along = depends_on(form.tree)
        sizes = {"batch": problem.batch, "head": problem.heads, "row": problem.seqlen_q, "column": problem.seqlen_k}
        if math.prod(size for axis, size in sizes.items() if axis in along) > MOST_SCORES:
            return None
        return Pattern.of(seen_by(form, problem, {one.name: self.given[one.name] for one in form.captured}))


class _Drawn(np.ndarray):
    """The placeholder for an array that will be drawn."""


def _is_drawn(value: Any) -> bool:
    return isinstance(value, _Drawn)


def _captured(texts: Sequence[str], captures: Sequence[str]) -> Report:
    """Values by name."""
    found: Report = {}
    for capture in captures:
        name, equals, what = (part.strip() for part in capture.partition("="))
        if not (name.isidentifier() and equals) or name in found:
            raise click.BadParameter(f"NAME=WHAT, each name once, such as slope=float32; got {capture!r}", param_hint="--capture")
        if what in ELEMENTS:
            axes = max((_axes(each, name) for each in texts), default=0)
            found[name] = np.ones((1,) * axes, DTYPES[what] if what == "bfloat16" else what).view(_Drawn)
        elif what.endswith(".npy"):
            found[name] = _loaded(name, what)
        elif re.fullmatch(r"[-+]?\d+", what):
            found[name] = int(what)
        else:
            try:
                found[name] = float(what)
            except ValueError:
                allowed = f"a number, a .npy file, or one of {', '.join(ELEMENTS)}"
                raise click.BadParameter(f"{name} must be {allowed}, got {what!r}", param_hint="--capture") from None
    return found


def _loaded(name: str, path: str) -> Array:
    """A file's array."""
    try:
        loaded: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it holds no array that NumPy loads"
        raise click.BadParameter(f"{name}: {path}: {reason}", param_hint="--capture") from error
    return loaded


def _tree(text: str) -> list[ast.AST]:
    """All nodes of a text; none for a wrong one, which `Score` and `Mask` refuse with a better message."""
    try:
        return [*ast.walk(ast.parse(text.strip(), mode="eval"))]
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return []


def _words(text: str) -> set[str]:
    """The names in a text."""
    return {node.id for node in _tree(text) if isinstance(node, ast.Name)}


def _axes(text: str, name: str) -> int:
    """The number of axes of an array that a text indexes."""
    indices = (node.slice for node in _tree(text) if isinstance(node, ast.Subscript) and getattr(node.value, "id", None) == name)
    counts = [len(index.elts) if isinstance(index, ast.Tuple) else 1 for index in indices]
    return min(max(counts, default=0), MAX_AXES)
