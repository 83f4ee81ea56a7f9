"""Approximate functions: their exact results, and the errors that the PTX ISA allows.

Approximate instructions (.approx, and div.full) have an error of the documented size. The exact result is made in float64 and
moved by the ISA's bound less the last rounding. For a relative bound those bits are flipped whose weights add up to it: up or
down by the result's own bits, and never out of its power of two, so that no result changes its sign or overflows. An absolute
bound is added with a sign from the argument's bits. Every run has the same errors. Zeros, infinities and NaN keep the results
that the ISA lists. docs/ptx.md has the table; a launch with `approximate=False` gets the exact result, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..text.syntax import Array
from .primitives import inverse_root, lent
from .registry import Frame, Thunk
from .table_rows import primitive, writer

Move = Callable[..., Array]
"""Maps the exact results and the inputs, float64, to results with an error."""

SMALLEST = 2.0**-126
FINITE = np.array(1000, np.float32)
"""2 to this power is finite in float64."""

CIRCLES = tuple(float(np.float32(turns * np.pi)) for turns in (1, 2, 100))
"""pi, 2 pi and 100 pi, rounded to float32: all three are rounded up."""


def flip(exact: Array, mask: int | Array) -> Array:
    """Moves results by at most `mask` units in the last place of float64."""
    return (exact.view(np.uint64) ^ np.asarray(mask, np.uint64)).view(np.float64)


def ulps(count: int, precision: int) -> Move:
    """Moves results by at most `count` units in the last place of the format. The last bit of the mask decides ties."""
    mask = int((count - 0.5) * 2.0 ** (53 - precision)) | 1
    return lambda exact, *_: flip(exact, mask)


def relative(bound: float, precision: int) -> Move:
    """Moves results by at most `bound` of the result: as much of it as a power of two allows."""
    mask = int((bound - 2.0**-precision) * 2.0**52)
    return lambda exact, *_: flip(exact, mask)


def signs(a: Array) -> Array:
    """Returns 1 or -1 for each argument, by a hash of its bits."""
    return np.where((a.view(np.uint64) >> np.uint64(29)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(63), 1.0, -1.0)


def absolute(bound: float | Array, precision: int) -> Move:
    """Moves results in [-1, 1], which they do not leave, by `bound` less the last rounding."""
    move = np.asarray(bound) - 2.0 ** (-precision - 1)
    return lambda exact, a: np.clip(exact + signs(a) * move, -1, 1)


def circular(nearest: float) -> Move:
    """Moves sin and cos: by `nearest` up to pi (CUDA's __sinf and __cosf), 2**-20.5 up to 2 pi, 2**-14.7 up to 100 pi.

    Beyond, where the ISA gives no bound, by as much for each unit of the argument as there.
    """

    def move(exact: Array, a: Array) -> Array:
        size = np.abs(a)
        near, middle, far = (size <= limit for limit in CIRCLES)
        bound = np.select([near, middle, far], [nearest, 2.0**-20.5, 2.0**-14.7], size * (2.0**-14.7 / CIRCLES[-1]))
        return absolute(bound, 24)(exact, a)

    return move


def logarithmic(exact: Array, a: Array) -> Array:
    """Moves lg2: by at most 2**-22.9 between 1/2 and 2, elsewhere by one unit."""
    between = (a > 0.5) & (a < 2)
    return np.where(between, absolute(2.0**-22.9, 24)(exact, a), ulps(1, 24)(exact))


def hyperbolic(exact: Array, a: Array) -> Array:
    """Moves tanh in float32: by 2**-11 of the result, in [-1, 1]; subnormal numbers pass through."""
    return np.where(np.abs(a) < SMALLEST, a, np.clip(relative(2.0**-11, 24)(exact), -1, 1))


MOVES: dict[tuple[str, str], Move] = {
    ("ex2", "f16"): relative(2.0**-9.9, 11),
    ("ex2", "bf16"): ulps(1, 8),
    ("lg2", "f32"): logarithmic,
    ("sin", "f32"): circular(2.0**-21.41),
    ("cos", "f32"): circular(2.0**-21.19),
    ("tanh", "f32"): hyperbolic,
    ("tanh", "f16"): absolute(2.0**-10.987, 11),
    ("tanh", "bf16"): absolute(2.0**-8, 8),
    ("rcp", "f32"): ulps(1, 24),
    ("sqrt", "f32"): ulps(1, 24),
    ("rsqrt", "f32"): relative(2.0**-22.9, 24),
    ("div", "f32"): ulps(2, 24),
    ("rsqrt", "f64"): lambda exact, _: flip(exact, 1),
}
"""Errors by opcode and type. docs/ptx.md names the source of each bound."""


def division(a: Array, b: Array) -> Array:
    """div.approx computes a times an approximate float32 1/b: beyond 2**126 that is 0, and an infinity where b is tiny."""
    inverse = np.where((np.abs(b) > 2.0**126) & np.isfinite(b), np.copysign(0, b), 1 / b)
    lost = (inverse == 0) | (np.abs(inverse) >= 2.0**128)
    return np.where(lost, a * np.where(inverse == 0, inverse, np.copysign(np.inf, b)), a / b)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "div": division,
    "div.full": np.divide,
    "rsqrt.f64": inverse_root,
}


def result(function: Callable[..., Array], move: Move | None, values: Sequence[Array]) -> Array:
    """Returns the function of float64 `values`, moved where it is not special: float64, to be rounded."""
    exact = np.asarray(function(*values))
    if move is None:
        return exact
    ordinary = np.isfinite(exact)
    for value in values:
        ordinary &= np.isfinite(value) & (value != 0)
    return np.where(ordinary, move(exact, *values), exact)


@primitive
def approximated(approximate: bool, function: str, kind: str, *values: Array) -> Array:
    """Returns a function of float64 values for results of type `kind`; as float64, to be rounded."""
    move = MOVES[function.removesuffix(".full"), kind] if approximate else None
    return result(FUNCTIONS.get(f"{function}.{kind}") or FUNCTIONS[function], move, values)


@writer
def exponential(frame: Frame, d: Array, a: Array) -> Thunk:
    """ex2 in float32: off by one unit. It has its own thunk, with lent arrays, as softmax depends on it.

    Powers of two are exact, as CUDA's tanh of float64 relies on it, and zeros and infinities among them.
    """
    approximate = frame.machine.approximate
    exact, whole, moved, small = lent(frame, "ex2", d.shape, np.float64, np.float32, bool, bool)
    bits, mask = exact.view(np.uint64), np.array(1 << 28 | 1, np.uint64)

    def run() -> None:
        if approximate:
            np.rint(a, whole)
            np.not_equal(a, whole, moved)
            np.less(a, FINITE, small)  # an infinity has no bit to flip
            np.logical_and(moved, small, moved)
        np.copyto(exact, a)
        np.exp2(exact, exact)
        if approximate:
            np.bitwise_xor(bits, mask, bits, where=moved)
        np.copyto(d, exact, casting="same_kind")

    return run


HIGH = np.uint64(0xFFFFFFFF00000000)
LOW = np.uint64(0xFFFFFFFF)
CANONICAL = np.uint64(0x7FFFFFFF00000000)


@primitive
def gross(approximate: bool, function: str, a: Array) -> Array:
    """rcp and rsqrt.approx.ftz.f64, on the upper halves: 20 bits behind the point of the operand and of the result.

    The result is off by one of its last bits.
    """

    def flushed(x: Array) -> Array:
        return np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)

    upper = flushed((a.view(np.uint64) & HIGH).view(np.float64))
    found = flushed(result(FUNCTIONS[function], ulps(1, 21) if approximate else None, [upper]))
    bits = found.view(np.uint64)
    bits = (bits + (LOW >> np.uint64(1)) + ((bits >> np.uint64(32)) & np.uint64(1))) & HIGH
    return np.where(np.isnan(found), CANONICAL, bits).view(np.float64)
