"""Floating-point arithmetic in float32 and float64 (PTX ISA, "Floating Point Instructions").

`.ftz` and the rounding directions are bits of the host's floating-point environment (`decode.ops.rounding`), set by the run loop
as `Plan.mode` asks; the thunks here are written as if every operation rounded to nearest.

The approximate instructions (PTX ISA: .approx, and div.full) have an error of the documented size. The exact result is made in
float64 and moved by the ISA's bound less the last rounding. For a relative bound those bits are flipped whose weights add up to
it: up or down by the result's own bits, and never out of its power of two, so that no result changes its sign or overflows. An
absolute bound is added with a sign from the argument's bits. Every run has the same errors. Zeros, infinities and NaN keep the
results that the ISA lists. docs/ptx.md has the table; a launch with `approximate=False` gets the exact result, rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ...text.syntax import TYPES, Array, Instruction, Unsupported
from ..registry import Frame, Mods, Plan, Temp, Thunk, arg, opcode, pure
from . import integer, rounding
from .rounding import fused_f32, fused_f64, inverse_root

Move = Callable[..., Array]
"""Maps the exact results and the inputs, float64, to results with an error."""

SMALLEST = 2.0**-126
FINITE = np.array(1000, np.float32)
"""2 to this power is finite in float64."""

CIRCLES = tuple(float(np.float32(turns * np.pi)) for turns in (1, 2, 100))
"""pi, 2 pi and 100 pi, rounded to float32: all three are rounded up."""


def flip(exact: Array, mask: int | Array) -> Array:
    """Moves results by at most `mask` units in the last place of float64."""
    moved: Array = (exact.view(np.uint64) ^ np.asarray(mask, np.uint64)).view(np.float64)
    return moved


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
}
"""Errors by opcode and type. docs/ptx.md names the source of each bound."""

TYPES_BESIDE_F32 = {"ex2": rounding.HALF_TYPES, "tanh": rounding.HALF_TYPES, "rcp": ("f64",), "rsqrt": ("f64",)}


def quotient(a: Array, b: Array) -> Array:
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
    "div": quotient,
    "div.full": np.divide,
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


def exponential(approximate: bool, temp: Temp, d: Array, a: Array) -> Thunk:
    """ex2 in float32: off by one unit. It has its own thunk, with lent arrays, as softmax depends on it.

    Powers of two are exact, as CUDA's tanh of float64 relies on it, and zeros and infinities among them.
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
    """Returns a plan whose thunk is `make(approximate, temp, d, *inputs)`."""

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        return make(frame.machine.approximate, frame.temp, *out, *ins)

    d, *inputs = (arg(o, i.type) for o in i.operands)
    return Plan((d,), tuple(inputs), bind, mode)


def approximation(i: Instruction) -> Plan:
    """Returns the plan of an instruction whose result is approximate."""
    mods = Mods(i, "approx")
    flush, full = mods.flag("ftz"), mods.flag("full")
    type_ = mods.type("f32", *TYPES_BESIDE_F32.get(i.opcode, ()))
    mods.done()
    if type_.name == "f64":
        return double(i, flush)
    element = type_.name.removesuffix("x2")
    if (i.opcode, element) == ("ex2", "f32"):
        return plan(i, exponential, rounding.mode(rounding.NEAREST, flush))
    function, move = FUNCTIONS[i.opcode + ".full" * full], MOVES[i.opcode, element]
    if element != "f32":
        return plan(i, partial(rounding.approximated, type_, partial(result, function), move, flush), rounding.KEEP)

    def make(approximate: bool, _: Temp, d: Array, *inputs: Array) -> Thunk:
        def run() -> None:
            d[...] = result(function, move if approximate else None, [x.astype(np.float64) for x in inputs])

        return run

    return plan(i, make, rounding.mode(rounding.NEAREST, flush))


# -- float64 -------------------------------------------------------------------------------------------------------------

HIGH = np.uint64(0xFFFFFFFF00000000)
LOW = np.uint64(0xFFFFFFFF)
CANONICAL = np.uint64(0x7FFFFFFF00000000)


def double(i: Instruction, flush: bool) -> Plan:
    """Decodes rsqrt.approx.f64, and the gross rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64."""
    if flush:
        return plan(i, partial(gross, FUNCTIONS[i.opcode]), rounding.KEEP)
    if i.opcode == "rcp":
        raise Unsupported("rcp.approx.f64 is executed with .ftz only")

    def make(approximate: bool, _: Temp, d: Array, a: Array) -> Thunk:
        def run() -> None:
            d[...] = result(inverse_root, (lambda exact, a: flip(exact, 1)) if approximate else None, [a])

        return run

    return plan(i, make, rounding.KEEP)


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


ROUNDINGS = ("rn", "rz", "rm", "rp")
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def saturate(thunk: Thunk, d: Array) -> Thunk:
    """.sat: clamp to [0, 1]; NaN becomes +0."""
    zero, one = np.array(0, d.dtype), np.array(1, d.dtype)

    def run() -> None:
        thunk()
        np.fmax(d, zero, out=d)
        np.minimum(d, one, out=d)
        np.absolute(d, out=d)

    return run


def is_half(i: Instruction) -> bool:
    return i.type.name in HALVES


@opcode(
    "add",
    "sub",
    forms="{.sat}.u16-.s64 {.cc} .u16x2 .s16x2; {.rn .rz .rm .rp}{.ftz}{.sat}.f32 .f32x2, .f64; .f16 .f16x2 .bf16 .bf16x2",
)
def addition(i: Instruction) -> Plan:
    if {"u16x2", "s16x2"} & set(i.mods) or i.type.kind != "f":
        return integer.integer_addition(i)
    if is_half(i):
        return rounding.half_arithmetic(i)
    return arithmetic(i)


@opcode("mul", forms=".lo .hi .wide .u16-.s64; {.rn .rz .rm .rp}{.ftz}{.sat}.f32 .f32x2, .f64; halves")
def multiplication(i: Instruction) -> Plan:
    if i.type.kind != "f":
        return integer.integer_multiplication(i)
    if is_half(i):
        return rounding.half_arithmetic(i)
    return arithmetic(i)


def arithmetic(i: Instruction) -> Plan:
    mods = Mods(i)
    direction, flush, sat = mods.choice(ROUNDINGS, "rn"), mods.flag("ftz"), mods.flag("sat")
    type_ = mods.type("f32", "f64", "f32x2")
    mods.done()
    fn = ARITHMETIC[i.opcode]
    d, a, b = (arg(o, type_) for o in i.operands)
    code = rounding.mode(rounding.ROUNDING[direction], flush)

    def make(d: Array, a: Array, b: Array) -> Thunk:
        thunk = partial(fn, a, b, d)
        return saturate(thunk, d) if sat else thunk

    return pure(make, [d], [a, b], code)


def fused_thunk(directed: bool, flush: bool, sat: bool, temp: Temp, d: Array, a: Array, b: Array, c: Array) -> Thunk:
    if d.dtype == np.float64:
        if directed:
            raise Unsupported("fma.f64 with directed rounding")

        def run64() -> None:
            fused_f64(a, b, c, d)

        return run64
    first, second, third = (temp(f"fma {k}", d.shape, np.float64) for k in range(3))
    work = first, second, third, temp("fma flag", d.shape, np.bool_)

    def directed_run() -> None:
        # A sum rounded twice in one direction is the sum rounded once.
        np.copyto(work[0], a)
        np.copyto(work[1], b)
        np.multiply(work[0], work[1], work[0])
        np.add(work[0], c, work[2])
        np.copyto(d, work[2], casting="same_kind")

    thunk: Thunk = directed_run if directed else partial(fused_f32, a, b, c, d, work, not flush)
    return saturate(thunk, d) if sat else thunk


@opcode("fma", forms=".rn .rz .rm .rp {.ftz}{.sat}.f32 .f32x2, .rn.f64; .rn{.ftz}{.sat .relu} halves")
def fused(i: Instruction) -> Plan:
    if is_half(i):
        return rounding.half_fused(i)
    mods = Mods(i)
    direction, flush, sat = mods.choice(ROUNDINGS, "rn"), mods.flag("ftz"), mods.flag("sat")
    type_ = mods.type("f32", "f64", "f32x2")
    mods.done()
    if type_.name == "f64" and direction != "rn":
        raise Unsupported("directed rounding of fma.f64 is not executed")
    d, a, b, c = (arg(o, type_) for o in i.operands)
    fn = partial(fused_thunk, direction != "rn", flush, sat)
    return pure(fn, [d], [a, b, c], rounding.mode(rounding.ROUNDING[direction], flush), scratch=True)


@opcode("mad", "madc", forms=".lo .hi .wide .u16-.s64; .hi.sat.s32; {.cc}.u32 .s32 .u64 .s64")
def multiply_add(i: Instruction) -> Plan:
    return fused(i) if i.type.kind == "f" else integer.integer_multiply_add(i)


@opcode("div", forms=".u16-.s64; .approx .full .rn .rz .rm .rp {.ftz}.f32; .rn .rz .rm .rp .f64")
def division(i: Instruction) -> Plan:
    if i.type.kind != "f":
        return integer.integer_division(i)
    if {"approx", "full"} & set(i.mods):
        return approximation(i)
    mods = Mods(i)
    direction, flush, type_ = mods.choice(ROUNDINGS, "rn"), mods.flag("ftz"), mods.type("f32", "f64")
    mods.done()
    d, a, b = (arg(o, type_) for o in i.operands)
    return pure(lambda d, a, b: partial(np.divide, a, b, d), [d], [a, b], rounding.mode(rounding.ROUNDING[direction], flush))


def rounded(fn: Callable[[Array, Array], Thunk]) -> Callable[[Instruction], Plan]:
    """Returns a decoder of one-operand instructions with thunk `fn(d, a)` if they round, and which may be approximate."""

    def decoder(i: Instruction) -> Plan:
        if "approx" in i.mods:
            return approximation(i)
        mods = Mods(i)
        direction, flush, type_ = mods.choice(ROUNDINGS, "rn"), mods.flag("ftz"), mods.type("f32", "f64")
        mods.done()
        d, a = (arg(o, type_) for o in i.operands)
        return pure(fn, [d], [a], rounding.mode(rounding.ROUNDING[direction], flush))

    return decoder


def reciprocal(d: Array, a: Array) -> Thunk:
    return partial(np.divide, np.array(1, d.dtype), a, d)


def square_root(d: Array, a: Array) -> Thunk:
    return partial(np.sqrt, a, d)


opcode("rcp", forms=".approx{.ftz}.f32, .approx.ftz.f64; .rn .rz .rm .rp {.ftz}.f32 .f64")(rounded(reciprocal))
opcode("sqrt", forms=".approx{.ftz}.f32; .rn .rz .rm .rp {.ftz}.f32 .f64")(rounded(square_root))


@opcode("abs", "neg", forms=".s16 .s32 .s64; {.ftz}.f32 .f64; halves")
def sign(i: Instruction) -> Plan:
    if i.type.kind != "f":
        return integer.integer_unary(i)
    if is_half(i):
        return rounding.half_sign(i)
    mods = Mods(i)
    flush, type_ = mods.flag("ftz"), mods.type("f32", "f64")
    mods.done()
    fn = np.absolute if i.opcode == "abs" else np.negative

    def make(d: Array, a: Array) -> Thunk:
        thunk = partial(fn, a, d)
        return flushed(thunk, d) if flush else thunk

    d, a = (arg(o, type_) for o in i.operands)
    return pure(make, [d], [a], rounding.mode(rounding.NEAREST, flush))


def flushed(thunk: Thunk, d: Array) -> Thunk:
    """Flushes the result of operations that only move bits: under .ftz by a multiplication by one."""
    one = np.array(1, d.dtype)

    def run() -> None:
        thunk()
        np.multiply(d, one, d)

    return run


def extreme(maximum: bool, nan: bool, flush: bool, magnitude: bool, temp: Temp, d: Array, *inputs: Array) -> Thunk:
    """min/max: of two values the one that is a number (.NaN: NaN wins), with -0 < +0; NaN is canonical."""
    fn: np.ufunc = {(True, True): np.maximum, (True, False): np.fmax, (False, True): np.minimum, (False, False): np.fmin}[
        maximum, nan
    ]
    zero = np.array(0, d.dtype)
    merge = np.bitwise_and if maximum else np.bitwise_or
    bits = np.dtype(f"u{d.itemsize}")
    canonical = np.array({4: 0x7FFFFFFF, 8: 0x7FF8000000000000}[d.itemsize], bits).view(d.dtype)
    flag = temp("extreme flag", d.shape, np.bool_)
    first, second = temp("extreme 1", d.shape, d.dtype), temp("extreme 2", d.shape, d.dtype)

    def pair(a: Array, b: Array, out: Array) -> None:
        fn(a, b, out=out)
        np.equal(out, zero, flag)
        if np.count_nonzero(flag):
            # Equal values have equal bits except for the zeros; there the sign bits decide.
            a, b = np.broadcast_to(a, d.shape), np.broadcast_to(b, d.shape)
            both = flag & (a == b)
            merged = merge(np.ascontiguousarray(a).view(bits), np.ascontiguousarray(b).view(bits)).view(d.dtype)
            np.copyto(out, merged, where=both)

    def run() -> None:
        values = [np.abs(x) for x in inputs] if magnitude else inputs
        a, b = values[0], values[1]
        if len(values) == 3:
            pair(a, b, first)
            a, b = first, values[2]
        pair(a, b, second)
        np.not_equal(second, second, flag)
        if np.count_nonzero(flag):
            np.copyto(second, canonical, where=flag)
        np.copyto(d, second)

    return flushed(run, d) if flush else run


@opcode("min", "max", forms=".u16-.s64{.relu} .u16x2 .s16x2; {.ftz}{.NaN}{.xorsign.abs}.f32 .f64; halves")
def extremes(i: Instruction) -> Plan:
    if any(m.endswith("16x2") and m[0] in "us" for m in i.mods) or i.type.kind != "f":
        return integer.integer_extreme(i)
    if is_half(i):
        return rounding.half_extreme(i)
    mods = Mods(i)
    flush, nan, magnitude = mods.flag("ftz"), mods.flag("NaN"), mods.flag("abs")
    type_ = mods.type("f32", "f64")
    mods.done()
    d, *inputs = (arg(o, type_) for o in i.operands)
    fn = partial(extreme, i.opcode == "max", nan, flush, magnitude)
    return pure(fn, [d], inputs, rounding.mode(rounding.NEAREST, flush), scratch=True)


@opcode("copysign", forms=".f32 .f64")
def copysign(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type("f32", "f64")
    mods.done()
    d, a, b = (arg(o, type_) for o in i.operands)
    return pure(lambda d, a, b: partial(np.copysign, b, a, d), [d], [a, b])


def classify(kind: str, d: Array, a: Array) -> Thunk:
    tiny = np.finfo(a.dtype).smallest_normal

    def run() -> None:
        size = np.abs(a)
        if kind == "finite":
            d[...] = np.isfinite(a)
        elif kind == "infinite":
            d[...] = np.isinf(a)
        elif kind == "number":
            d[...] = ~np.isnan(a)
        elif kind == "notanumber":
            d[...] = np.isnan(a)
        elif kind == "normal":
            d[...] = np.isfinite(a) & (size >= tiny)
        else:
            d[...] = (size < tiny) & (size > 0)

    return run


@opcode("testp", forms=".finite .infinite .number .notanumber .normal .subnormal .f32 .f64")
def testp(i: Instruction) -> Plan:
    mods = Mods(i)
    kind = mods.choice(("finite", "infinite", "number", "notanumber", "normal", "subnormal"))
    type_ = mods.type("f32", "f64")
    mods.done()
    d, a = i.operands
    return pure(partial(classify, kind), [arg(d, TYPES["pred"])], [arg(a, type_)], rounding.KEEP)
