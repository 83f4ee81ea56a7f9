"""Floating-point arithmetic in float32 and float64 (PTX ISA, "Floating Point Instructions"), and the opcodes that
integers, halves and floats share.

`.ftz` and the rounding directions are bits of the host's floating-point environment (`fpenv`), set by the run loop as
`Plan.mode` asks; the thunks here are written as if every operation rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...state import fpenv
from ...text.types import TYPES, Array
from ..registry import Instruction, Mods, Plan, Temp, Thunk, Unsupported, arg, opcode, pure
from . import half, integer
from .approximate import approximation
from .rounding import fused_f32, fused_f64

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
        return half.arithmetic(i)
    return arithmetic(i)


@opcode("mul", forms=".lo .hi .wide .u16-.s64; {.rn .rz .rm .rp}{.ftz}{.sat}.f32 .f32x2, .f64; halves")
def multiplication(i: Instruction) -> Plan:
    if i.type.kind != "f":
        return integer.integer_multiplication(i)
    if is_half(i):
        return half.arithmetic(i)
    return arithmetic(i)


def arithmetic(i: Instruction) -> Plan:
    mods = Mods(i)
    direction, flush, sat = mods.choice(ROUNDINGS, "rn"), mods.flag("ftz"), mods.flag("sat")
    type_ = mods.type("f32", "f64", "f32x2")
    mods.done()
    fn = ARITHMETIC[i.opcode]
    d, a, b = (arg(o, type_) for o in i.operands)
    code = fpenv.mode(fpenv.ROUNDING[direction], flush)

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
        return half.fused(i)
    mods = Mods(i)
    direction, flush, sat = mods.choice(ROUNDINGS, "rn"), mods.flag("ftz"), mods.flag("sat")
    type_ = mods.type("f32", "f64", "f32x2")
    mods.done()
    if type_.name == "f64" and direction != "rn":
        raise Unsupported("directed rounding of fma.f64 is not executed")
    d, a, b, c = (arg(o, type_) for o in i.operands)
    fn = partial(fused_thunk, direction != "rn", flush, sat)
    return pure(fn, [d], [a, b, c], fpenv.mode(fpenv.ROUNDING[direction], flush), scratch=True)


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
    return pure(lambda d, a, b: partial(np.divide, a, b, d), [d], [a, b], fpenv.mode(fpenv.ROUNDING[direction], flush))


def rounded(fn: Callable[[Array, Array], Thunk]) -> Callable[[Instruction], Plan]:
    """Decoder of one-operand instructions whose thunk is `fn(d, a)` where they round, and which may be approximate."""

    def decoder(i: Instruction) -> Plan:
        if "approx" in i.mods:
            return approximation(i)
        mods = Mods(i)
        direction, flush, type_ = mods.choice(ROUNDINGS, "rn"), mods.flag("ftz"), mods.type("f32", "f64")
        mods.done()
        d, a = (arg(o, type_) for o in i.operands)
        return pure(fn, [d], [a], fpenv.mode(fpenv.ROUNDING[direction], flush))

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
        return half.sign(i)
    mods = Mods(i)
    flush, type_ = mods.flag("ftz"), mods.type("f32", "f64")
    mods.done()
    fn = np.absolute if i.opcode == "abs" else np.negative

    def make(d: Array, a: Array) -> Thunk:
        thunk = partial(fn, a, d)
        return flushed(thunk, d) if flush else thunk

    d, a = (arg(o, type_) for o in i.operands)
    return pure(make, [d], [a], fpenv.mode(fpenv.NEAREST, flush))


def flushed(thunk: Thunk, d: Array) -> Thunk:
    """For operations that only move bits: a multiplication by one, under .ftz, flushes what they moved."""
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
        return half.extreme(i)
    mods = Mods(i)
    flush, nan, magnitude = mods.flag("ftz"), mods.flag("NaN"), mods.flag("abs")
    type_ = mods.type("f32", "f64")
    mods.done()
    d, *inputs = (arg(o, type_) for o in i.operands)
    fn = partial(extreme, i.opcode == "max", nan, flush, magnitude)
    return pure(fn, [d], inputs, fpenv.mode(fpenv.NEAREST, flush), scratch=True)


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
    return pure(partial(classify, kind), [arg(d, TYPES["pred"])], [arg(a, type_)], fpenv.KEEP)
