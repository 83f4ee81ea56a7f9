"""The values of arrays, by kind: ordinary ones, and those at which kernels that look right go wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyflash.basics import Array, Shape

FLOATS: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "positive": lambda rng, shape: rng.uniform(0.5, 1.5, shape),
    "negative": lambda rng, shape: -rng.uniform(0.1, 10, shape),
    "wide": lambda rng, shape: rng.choice((-1.0, 1.0), shape) * 2 ** rng.uniform(-10, 10, shape),
    "large": lambda rng, shape: rng.standard_normal(shape) * 60,  # beyond the largest argument of a float32's exp
    "tiny": lambda rng, shape: rng.standard_normal(shape) * 2.0**-11,
    "rising": lambda rng, shape: np.linspace(-2, 2, int(np.prod(shape))).reshape(shape),
    "steep": lambda rng, shape: np.linspace(-300, 300, int(np.prod(shape))).reshape(shape),
    "offset": lambda rng, shape: rng.standard_normal(shape) + 12,
    "far": lambda rng, shape: rng.standard_normal(shape) + 1000,
    "extreme": lambda rng, shape: rng.choice((-1.0, 1.0), shape) * 2 ** rng.uniform(-70, 70, shape),
    "constant": lambda rng, shape: np.full(shape, rng.uniform(0.5, 1)),
    "zeros": lambda rng, shape: np.zeros(shape),
    "signed zeros": lambda rng, shape: np.where(
        rng.random(shape) < 0.8, rng.standard_normal(shape), rng.choice((0.0, -0.0), shape)
    ),
    "halves": lambda rng, shape: (rng.permutation(int(np.prod(shape))) - int(np.prod(shape)) // 2).reshape(shape) / 2,
    "high": lambda rng, shape: rng.uniform(30, 90, shape),  # the sum of a long row is beyond float16's largest number
    "NaN": lambda rng, shape: np.where(rng.random(shape) < 0.97, rng.standard_normal(shape), np.nan),
    "ties": lambda rng, shape: rng.integers(-2, 3, shape).astype(float),
    "subnormal": lambda rng, shape: rng.standard_normal(shape) * 2.0**-128,
}
"""Floating-point values by kind; `infinite` and `minus infinity` are normal ones with infinities among them."""


def drawn(kind: str, shape: Shape, dtype: np.dtype[Any], rng: Any, low: float | None, high: float | None) -> Array:
    """Returns an array of that kind of values, all from `low` to `high` if these are given."""
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        parts = np.stack([drawn(kind, shape, part, rng, low, high) for _ in range(2)], axis=-1)
        return np.asarray(parts.view(dtype)[..., 0])
    if dtype.kind in "biu":
        return _integers(kind, shape, dtype, rng, low, high)
    if low is not None and high is not None:
        return _between(kind, shape, rng, low, high).astype(dtype)
    if kind in ("infinite", "minus infinity"):
        values = rng.standard_normal(shape)
        where = rng.random(shape) < (0.02 if kind == "infinite" else 0.2)
        where = where if where.any() or not where.size else np.arange(where.size).reshape(shape) == rng.integers(where.size)
        signs = rng.choice((-1.0, 1.0), shape) if kind == "infinite" else -1.0
        return np.asarray(np.where(where, signs * np.inf, values), dtype)
    made: Any = FLOATS[kind](rng, shape)
    if kind == "subnormal" and dtype.itemsize != 4:
        made = made * 2.0**128 * float(limits(dtype).smallest_normal) / 4
    largest = float(limits(dtype).max)
    return np.asarray(np.clip(made, -largest, largest), dtype)


def is_half(kind: np.dtype[Any]) -> bool:
    return kind.itemsize <= 2 and kind.kind in "fV"


def limits(kind: np.dtype[Any]) -> Any:
    """Returns the `finfo` of a floating-point type, of ml_dtypes too; of a complex type that of its parts."""
    from ml_dtypes import finfo

    numbers: Any = finfo
    return numbers(np.dtype(f"f{kind.itemsize // 2}") if kind.kind == "c" else kind)


def _between(kind: str, shape: Shape, rng: Any, low: float, high: float) -> Array:
    if kind in ("constant", "zeros"):
        value = rng.uniform(low, high) if kind == "constant" or not low <= 0 <= high else 0.0
        return np.full(shape, value)
    if kind in FLOATS and kind != "normal":
        return np.asarray(np.clip(FLOATS[kind](rng, shape), low, high))
    found: Array = np.asarray(rng.uniform(low, high, shape))
    return found


def _integers(kind: str, shape: Shape, dtype: np.dtype[Any], rng: Any, low: float | None, high: float | None) -> Array:
    if dtype.kind == "b":
        flags = np.zeros(shape) if kind == "zeros" else np.ones(shape) if kind == "constant" else rng.integers(0, 2, shape)
        return np.asarray(flags).astype(bool)
    least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    given = low is not None and high is not None
    if given:
        least, most = max(least, int(low or 0)), min(most, int(high or 0))
    if most < least:
        if 0 in shape:
            return np.zeros(shape, dtype)
        raise ValueError(f"no integer of {dtype} is from {low} to {high}")
    if kind == "zeros":
        return np.full(shape, min(max(0, least), most), dtype)
    if kind == "constant":
        return np.full(shape, rng.integers(least, most, endpoint=True) if given else 3, dtype)
    spans = {"positive": (1, 100), "negative": (-100, -1 if least < 0 else 100), "ties": (0, 3), "wide": (least, most)}
    start, stop = spans.get(kind, (-100, 100))
    if given and kind not in ("ties", "negative"):
        start, stop = least, most
    start, stop = max(start, least), min(stop, most)
    if stop < start:
        start, stop = least, most
    return np.asarray(rng.integers(start, stop, shape, dtype=dtype, endpoint=True))
