"""The gradients of the arrays that a score function has captured: sums over scores, to which each adds by its own indices.

A score adds its gradient times the derivative of the function's value by the element that it has loaded. Elements that are one for
a head have a sum in each thread, others are added to by each score.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cupyflash.basics import Report, Shape, Values
from cupyflash.expressions.c import Statements
from cupyflash.expressions.derivative import derivative
from cupyflash.expressions.tree import Load, Node, loads
from cupyflash.request.score import Constants, Form, named, parts, parts_in_c

PREFIX = "dscore_"
# The most sums that a thread keeps for a head; further elements are added to by each score.
MOST_OF_HEAD = 16
# The bits of the largest term of each array, as integers of 32 bits, for sums that are the same bits each time.
LARGEST = f"{PREFIX}largest"


def sum_field(name: str) -> str:
    """The name in the kernels' struct of the sums of a captured array's gradient."""
    return PREFIX + name


def asked_sums(form: Form | None, asked: Any, argument: str = "return_dscore") -> tuple[str, ...]:
    """The names of the captured arrays whose gradients a call asks for: all of floats if `asked` is True.

    TypeError or ValueError for anything but True, False or a tuple of names of captured arrays of floats.
    """
    named = isinstance(asked, tuple) and all(isinstance(name, str) for name in asked)
    if not (named or type(asked).__name__ in ("bool", "bool_")):
        raise TypeError(f"{argument} must be True, False or a tuple of names of captured arrays, got {asked!r}")
    if not asked:
        return ()
    captured = [one.name for one in form.captured if one.axes is not None and one.type == "float"] if form else []
    if not captured:
        raise ValueError(f"{argument} is for a score function that has captured arrays of floats, and there is none")
    for name in asked if named else ():
        if name not in captured:
            raise ValueError(f"{argument} must name captured arrays of floats, {', '.join(captured)}, got {name!r}")
    return tuple(name for name in captured if not named or name in asked)


class CapturedSums(NamedTuple):
    """A form's loads whose gradients are summed, each with the derivative by it: those that are one for a head, and others; and the
    loads that a score makes once more for that."""

    head: tuple[tuple[Load, Node], ...]
    score: tuple[tuple[Load, Node], ...]
    again: tuple[Load, ...]


@lru_cache(maxsize=256)
def summed(form: Form, names: tuple[str, ...]) -> CapturedSums:
    """The loads of the arrays of these names on which the value depends, but in steps."""
    of_head, at_score = parts(form).head[:MOST_OF_HEAD], parts(form).score
    pairs = [(load, derivative(form.tree, load)) for load in form.loads if load.name in names]
    made = [(load, slope) for load, slope in pairs if slope is not None]
    each = tuple(pair for pair in made if pair[0] not in of_head)
    needed = loads(*(slope for _, slope in made), *(index for load, _ in each for index in load.indices))
    return CapturedSums(tuple(pair for pair in made if pair not in each), each, tuple(load for load in needed if load in at_score))


@lru_cache(maxsize=256)
def sum_constants(form: Form, names: tuple[str, ...], sums: int) -> Constants:
    """The compile-time constants of score_sums.cuh for `sums` (SCORE_SUMS); a kernel takes them beside the form's own
    `score.constants`."""
    fields, _, known = parts_in_c(form, by_tiles=True)
    of_head, of_score, _ = summed(form, names)
    written = Statements(fields, "sum_", known)

    def added(to: Statements, load: Load, term: str) -> str:
        array = f"p.{sum_field(load.name)}"
        return f"add_captured(sums, {names.index(load.name)}, {array}.at, {to.place(load, array)}, {term});"

    adds = [added(written, load, _term(written, slope)) for load, slope in of_score]
    adds += [f"sums.of_head.sum_{number} += {_term(written, slope)};" for number, (_, slope) in enumerate(of_head)]
    ends = Statements(fields, "end_", known)
    last = [added(ends, load, f"sums.of_head.sum_{number}") for number, (load, _) in enumerate(of_head)]
    return named(
        SCORE_SUMS=sums,
        SCORE_SUM_ARRAYS=len(names),
        SCORE_SUM_TERMS=most_terms(form),
        SCORE_SUMS_OF_HEAD=" ".join(f"float sum_{number};" for number in range(len(of_head))),
        SCORE_SUM_LINES=" ".join([*written.lines, *adds]),
        SCORE_HEAD_SUM_LINES=" ".join([*ends.lines, *last]),
    )


def _term(written: Statements, slope: Node) -> str:
    return f"of_given_score(gradient, {written.value(slope)})"


def most_terms(form: Form) -> int:
    """The most terms that a score adds to an element: one for each load."""
    return max(1, len(form.loads))


def zeros_of(names: Sequence[str], shapes: Mapping[str, Shape], deterministic: bool) -> dict[str, tuple[tuple[int, ...], Any]]:
    """(Shape, dtype) of the arrays of zeros with which sums begin, by the struct's names; `shapes` are the captured arrays'."""
    if not (names and deterministic):
        return {sum_field(name): (shapes[name], np.float32) for name in names}
    return {sum_field(name): (shapes[name], np.int64) for name in names} | {LARGEST: ((len(names),), np.uint32)}


def finished(arrays: Values, names: Sequence[str], terms: int) -> Report:
    """The gradients in float32 by the names of captured arrays, from sums by the struct's names; `terms` is the number of terms for
    which integers had room. An infinite term makes its whole array NaN."""
    largest = arrays.get(LARGEST)
    if largest is None:
        return {name: arrays[sum_field(name)] for name in names}
    made, where = {}, np.where if isinstance(largest, np.ndarray) else sys.modules["cupy"].where
    for number, name in enumerate(names):
        exponent = (largest[number] >> 23).astype(np.float64)
        unit = 2.0 ** (exponent - 126 - 62 + terms.bit_length())
        made[name] = where(exponent == 255, np.nan, arrays[sum_field(name)] * unit).astype(np.float32)
    return made
