"""The approximate instructions (PTX ISA: .approx, and div.full), with an error of the documented size.

The exact result is made in float64 and moved by what the ISA allows less the last rounding. Of a relative bound those bits are
flipped whose weights add up to it: up or down by the result's own bits, and never out of its power of two, so that no result
changes its sign or overflows. An absolute bound is added with a sign from the argument's bits. Every run has the same errors.
Zeros, infinities and NaN keep the results that the ISA lists. docs/ptx.md has the table; a launch with `approximate=False`
gets the exact result, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ...state import fpenv
from ...text.types import Array
from ..registry import Frame, Instruction, Mods, Plan, Temp, Thunk, Unsupported, arg, opcode
from . import half
from .rounding import inverse_root

Move = Callable[..., Array]
"""From the exact results and the inputs, float64, to results that are off."""

SMALLEST = 2.0**-126
FINITE = np.array(1000, np.float32)
"""2 to this is no infinity in float64."""

CIRCLES = tuple(float(np.float32(turns * np.pi)) for turns in (1, 2, 100))
"""pi, 2 pi and 100 pi as float32 has them: all three are beyond."""


def flip(exact: Array, mask: int | Array) -> Array:
    """Moved by at most `mask` units in the last place of float64."""
    moved: Array = (exact.view(np.uint64) ^ np.asarray(mask, np.uint64)).view(np.float64)
    return moved


def ulps(count: int, precision: int) -> Move:
    """Off by at most `count` units in the last place of the format. The last bit of the mask decides ties."""
    mask = int((count - 0.5) * 2.0 ** (53 - precision)) | 1
    return lambda exact, *_: flip(exact, mask)


def relative(bound: float, precision: int) -> Move:
    """Off by at most `bound` of the result: as much of it as a power of two allows."""
    mask = int((bound - 2.0**-precision) * 2.0**52)
    return lambda exact, *_: flip(exact, mask)


def signs(a: Array) -> Array:
    """1 or -1 for each argument, by a hash of its bits."""
    return np.where((a.view(np.uint64) >> np.uint64(29)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(63), 1.0, -1.0)


def absolute(bound: float | Array, precision: int) -> Move:
    """Off by `bound` less the last rounding, of results in [-1, 1], which they do not leave."""
    move = np.asarray(bound) - 2.0 ** (-precision - 1)
    return lambda exact, a: np.clip(exact + signs(a) * move, -1, 1)


def circular(nearest: float) -> Move:
    """sin and cos: off by `nearest` up to pi (CUDA's __sinf and __cosf), 2**-20.5 up to 2 pi, 2**-14.7 up to 100 pi.

    Beyond, where nothing is promised, by as much for each unit of the argument as there.
    """

    def move(exact: Array, a: Array) -> Array:
        size = np.abs(a)
        near, middle, far = (size <= limit for limit in CIRCLES)
        bound = np.select([near, middle, far], [nearest, 2.0**-20.5, 2.0**-14.7], size * (2.0**-14.7 / CIRCLES[-1]))
        return absolute(bound, 24)(exact, a)

    return move


def logarithmic(exact: Array, a: Array) -> Array:
    """lg2: off by at most 2**-22.9 between 1/2 and 2, elsewhere by one unit."""
    between = (a > 0.5) & (a < 2)
    return np.where(between, absolute(2.0**-22.9, 24)(exact, a), ulps(1, 24)(exact))


def hyperbolic(exact: Array, a: Array) -> Array:
    """tanh in float32: 2**-11 of the result, in [-1, 1]; subnormal numbers pass through."""
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
}
"""By opcode and type. docs/ptx.md says where each bound stands."""

TYPES_BESIDE_F32 = {"ex2": half.HALVES, "tanh": half.HALVES, "rcp": ("f64",), "rsqrt": ("f64",)}


def quotient(a: Array, b: Array) -> Array:
    """div.approx is a times an approximate float32 1/b: beyond 2**126 that is 0, and an infinity where b is tiny."""
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
    "div": quotient,
    "div.full": np.divide,
}


def result(function: Callable[..., Array], move: Move | None, values: Sequence[Array]) -> Array:
    """The function of float64 `values`, moved where it is not special: float64, to be rounded."""
    exact = np.asarray(function(*values))
    if move is None:
        return exact
    ordinary = np.isfinite(exact)
    for value in values:
        ordinary &= np.isfinite(value) & (value != 0)
    return np.where(ordinary, move(exact, *values), exact)


def exponential(approximate: bool, temp: Temp, d: Array, a: Array) -> Thunk:
    """ex2 in float32: off by one unit. Apart from the others, in lent arrays, as softmax is made of it.

    Powers of two are exact, as CUDA's tanh of float64 takes them to be, and zeros and infinities among them.
    """
    exact, whole = temp("ex2 exact", d.shape, np.float64), temp("ex2 whole", d.shape, np.float32)
    moved, small = temp("ex2 moved", d.shape, np.bool_), temp("ex2 small", d.shape, np.bool_)
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


def plan(i: Instruction, make: Callable[..., Thunk], mode: int) -> Plan:
    """A plan whose thunk is `make(approximate, temp, d, *inputs)`."""

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        return make(frame.machine.approximate, frame.temp, *out, *ins)

    d, *inputs = (arg(o, i.type) for o in i.operands)
    return Plan((d,), tuple(inputs), bind, mode)


def approximation(i: Instruction) -> Plan:
    """The plan of an instruction whose result is approximate."""
    mods = Mods(i, "approx")
    flush, full = mods.flag("ftz"), mods.flag("full")
    type_ = mods.type("f32", *TYPES_BESIDE_F32.get(i.opcode, ()))
    mods.done()
    if type_.name == "f64":
        return double(i, flush)
    element = type_.name.removesuffix("x2")
    if (i.opcode, element) == ("ex2", "f32"):
        return plan(i, exponential, fpenv.mode(fpenv.NEAREST, flush))
    function, move = FUNCTIONS[i.opcode + ".full" * full], MOVES[i.opcode, element]
    if element != "f32":
        return plan(i, partial(half.approximated, type_, partial(result, function), move, flush), fpenv.KEEP)

    def make(approximate: bool, _: Temp, d: Array, *inputs: Array) -> Thunk:
        def run() -> None:
            d[...] = result(function, move if approximate else None, [x.astype(np.float64) for x in inputs])

        return run

    return plan(i, make, fpenv.mode(fpenv.NEAREST, flush))


# -- float64 -------------------------------------------------------------------------------------------------------------

HIGH = np.uint64(0xFFFFFFFF00000000)
LOW = np.uint64(0xFFFFFFFF)
CANONICAL = np.uint64(0x7FFFFFFF00000000)


def double(i: Instruction, flush: bool) -> Plan:
    """rsqrt.approx.f64, and the gross rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64."""
    if flush:
        return plan(i, partial(gross, FUNCTIONS[i.opcode]), fpenv.KEEP)
    if i.opcode == "rcp":
        raise Unsupported("rcp.approx.f64 is executed with .ftz only")

    def make(approximate: bool, _: Temp, d: Array, a: Array) -> Thunk:
        def run() -> None:
            d[...] = result(inverse_root, (lambda exact, a: flip(exact, 1)) if approximate else None, [a])

        return run

    return plan(i, make, fpenv.KEEP)


def gross(function: Callable[..., Array], approximate: bool, _: Temp, d: Array, a: Array) -> Thunk:
    """Works on the upper halves: 20 bits behind the point of the operand and of the result, which is off by one of the last."""

    def flushed(x: Array) -> Array:
        return np.where(np.abs(x) < 2.0**-1022, np.copysign(0.0, x), x)

    def run() -> None:
        upper = flushed((a.view(np.uint64) & HIGH).view(np.float64))
        found = flushed(result(function, ulps(1, 21) if approximate else None, [upper]))
        bits = found.view(np.uint64)
        bits = (bits + (LOW >> np.uint64(1)) + ((bits >> np.uint64(32)) & np.uint64(1))) & HIGH
        d[...] = np.where(np.isnan(found), CANONICAL, bits).view(np.float64)

    return run


opcode("ex2", "tanh", forms=".approx{.ftz}.f32 .f16 .f16x2 .bf16 .bf16x2")(approximation)
opcode("lg2", forms=".approx{.ftz}.f32")(approximation)
opcode("sin", "cos", forms=".approx{.ftz}.f32")(approximation)
opcode("rsqrt", forms=".approx{.ftz}.f32 .f64")(approximation)
