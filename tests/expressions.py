"""Random score functions, as texts, with all that they may name: captured arrays of every type, positions, scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

from cupyflash.arrays import numpy_dtype
from cupyflash.expressions.evaluate import positions
from cupyflash.request.score import Score

SIZES = {"b": 2, "h": 4, "kv_h": 2, "row": 3, "k": 5}
SHAPE = (2, 4, 3, 5)
COUNT = math.prod(SHAPE)


# That do not depend on the score, so that they may choose an index.
CONDITIONS = ("seen[row, k]", "yes", "k <= q", "document[q] == document[k]", "0 <= q - k < few")


def captured(sizes: Mapping[str, int] = SIZES) -> dict[str, Any]:
    """Arrays of each dtype, of zero to four axes, some of them with odd strides, and numbers. Floats are quarters.

    For problems of these sizes, whose b, h and kv_h are those of SIZES.
    """
    n_q, n_k = sizes["row"], sizes["k"]
    random = np.random.default_rng(18)

    def floats(*shape: int) -> np.ndarray:
        return random.integers(-8, 9, shape) / 4

    def ints(*shape: int) -> np.ndarray:
        return random.integers(-3, 6, shape)

    return {
        "slope": floats(8).astype(np.float32)[::-2],
        "pair": floats(n_k, 2).astype(np.float16).T,
        "table": floats(7).astype(numpy_dtype("bfloat16")),
        "document": np.abs(ints(n_k)).astype(np.int64),
        "length": ints(2).astype(np.int32),
        "tiny": ints(4, n_q).astype(np.int8)[::2],
        "deep": np.broadcast_to(ints(4, 1, n_k).astype(np.int16), (2, 4, n_q, n_k)),
        "seen": random.random((n_q, n_k)) < 0.5,
        "single": np.array(3, np.uint8),
        "cap": 2.5,
        "few": np.int64(3),
        "yes": True,
    }


CAPTURED = captured()
# Odd eighths, beside which no quarter is: comparisons of what is computed exactly come out alike in any precision.
SCORES = ((2 * np.random.default_rng(5).integers(-15, 16, SHAPE) + 1) / 8).astype(np.float32)
VALUES = positions(SIZES) | {"s": SCORES} | CAPTURED


def score(text: str, values: Mapping[str, Any] = CAPTURED) -> Score:
    """A score function with those of the captured values that its text names."""
    return Score(text, **named(text, values))


def named(text: str, values: Mapping[str, Any] = CAPTURED) -> dict[str, Any]:
    """The captured values that a text names."""
    names = {node.strip() for node in "".join(c if c.isalnum() or c == "_" else " " for c in text).split()}
    return {name: value for name, value in values.items() if name in names}


def texts(seed: int, count: int) -> list[str]:
    """Random expressions that are defined for every score, and, for the most part, depend on it."""
    write = _Writer(Random(seed))
    return [write.number(3) for _ in range(count)]


def conditions(seed: int, count: int) -> list[str]:
    """Random conditions without a score, which say the same in any precision."""
    write = _Writer(Random(seed), scores=("slope[h]", "pair[b, k]"))
    return [write.condition(2) for _ in range(count)]


class _Writer:
    """Texts of each type, nested to a depth, of some `scores`. What steps is applied to what floats hold exactly."""

    def __init__(self, random: Random, scores: tuple[str, ...] = ("s",)):
        self.random, self.scores = random, scores

    def one(self, *texts: str) -> str:
        return self.random.choice(texts)

    def integer(self, depth: int) -> str:
        if depth == 0:
            index = self.one("q", "k - q", "row + 3", "h * k", "k", "document[q]")
            loads = "document[k]", "length[b]", "tiny[kv_h, row]", "deep[b, h, row, k]", f"document[{index}]", "single", "few"
            return self.one("b", "h", "kv_h", "row", "q", "k", "n_q", "n_k", str(self.random.randrange(6)), *loads)
        a, b, c = self.integer(depth - 1), self.integer(depth - 1), self.one(*CONDITIONS)
        divided = f"({a} {self.one('%', '//')} {self.one('3', '(-4)', '7')})"
        steps = divided, f"(-{a})", f"abs({a})", f"min({a}, {b})", f"max({a}, {b}, 2)"
        return self.one(f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", *steps, f"where({c}, {a}, {b})")

    def exact(self, depth: int) -> str:
        if depth == 0:
            loads = "slope[h]", "pair[b, k]", f"table[h + {self.integer(1)}]"
            return self.one(*(3 * self.scores)[:3], "cap", str(self.random.randrange(12) / 4), self.integer(1), *loads)
        a, b, c = self.exact(depth - 1), self.exact(depth - 1), self.condition(depth - 1)
        joined = f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"min({a}, {b})", f"max({a}, {b})", f"({a} if {c} else {b})"
        divided = f"({a} {self.one('%', '//')} {self.one('1.5', '(-0.75)', '2')})"
        return self.one(*joined, f"({a} / 2)", f"(-{a})", f"abs({a})", f"floor({a})", divided)

    def condition(self, depth: int) -> str:
        if depth == 0:
            return self.one(*CONDITIONS, f"{self.one(*self.scores)} > 0.25")
        a, b, c = self.exact(depth - 1), self.exact(depth - 1), self.condition(depth - 1)
        compared = f"{a} {self.one('<', '<=', '>', '>=', '==', '!=')} {b}"
        return self.one(f"({compared})", f"({compared} and {c})", f"({c} or not {compared})", f"({a} < {b} <= {self.exact(0)})")

    def number(self, depth: int) -> str:
        if depth == 0:
            return self.exact(1)
        a, b, c = self.number(depth - 1), self.number(depth - 1), self.condition(1)
        joined = f"({a} + {b})", f"({a} - {b})", f"({a} * tanh({b}))", f"({a} / (abs({b}) + 1))", f"where({c}, {a}, {b})"
        called = f"exp(min({a}, 1.5))", f"log(abs({a}) + 1)", f"sqrt(abs({a}) + 0.5)", f"sin({a})", f"cos({a})", f"tanh({a})"
        return self.one(*joined, *called, f"max({a}, {b})", f"({c}) * {a}")


class Clamped:
    """A captured array as Python indexes it, of Python's numbers."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __getitem__(self, index: Any) -> Any:
        places = index if isinstance(index, tuple) else (index,)
        clamped = tuple(min(max(place, 0), length - 1) for place, length in zip(places, self.array.shape, strict=True))
        found = self.array[clamped]
        return bool(found) if found.dtype == bool else int(found) if found.dtype.kind in "iu" else float(found)


def by_python(text: str, places: list[tuple[int, ...]]) -> list[float]:
    """The value of a text by Python's own eval, at some of the scores."""
    code = compile(text, "score", "eval")
    shared: dict[str, Any] = {name: getattr(math, name) for name in ("floor", "exp", "log", "sqrt", "sin", "cos", "tanh")}
    shared["where"] = lambda condition, a, b: a if condition else b
    for name, value in CAPTURED.items():
        shared[name] = Clamped(value) if np.ndim(value) else value.item() if isinstance(value, np.ndarray | np.generic) else value
    found = []
    at = {name: np.broadcast_to(value, SHAPE) for name, value in positions(SIZES).items()}
    for place in places:
        here = {name: int(value[place]) for name, value in at.items()} | {"s": float(SCORES[place])}
        found.append(float(eval(code, shared, here)))
    return found
