"""Arithmetic in float16, bfloat16 and their packed pairs (PTX ISA, "Half Precision Floating Point Instructions").

Values are widened to float32, where sums, products and quotients of halves round correctly twice (24 >= 2 * 11 + 2),
or for fused operations to float64 with rounding to odd. A packed register is an array of two elements a lane.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...state import fpenv
from ...text.types import Array, PtxType
from ..registry import Instruction, Mods, Plan, Thunk, arg, pure
from .rounding import bfloat_bits, bfloat_value, fused_odd, half_bits, odd_float32

HALVES = ("f16", "f16x2", "bf16", "bf16x2")


def wide(x: Array, type_: PtxType) -> Array:
    """Half values (float16, or bfloat16 bits) as float32."""
    return bfloat_value(x) if type_.name.startswith("b") else x.astype(np.float32)


def narrow(value: Array, type_: PtxType) -> Array:
    """float32 (or odd-rounded float64) to the array that stores the half type."""
    if type_.name.startswith("b"):
        return bfloat_bits(odd_float32(value) if value.dtype == np.float64 else np.asarray(value))
    return half_bits(np.asarray(value)).view(np.float16)


def flush(x: Array, type_: PtxType) -> Array:
    """.ftz of float16: subnormals become zeros of their sign."""
    tiny = np.float32(2.0**-14) if not type_.name.startswith("b") else np.float32(2.0**-126)
    return np.where(np.abs(x) < tiny, np.copysign(x.dtype.type(0), x), x)


def plan(i: Instruction, fn: Callable[..., Array], *, ftz: bool = False, sat: bool = False, relu: bool = False) -> Plan:
    """A plan that widens the operands, applies `fn`, post-processes and narrows."""
    type_ = i.type

    def make(d: Array, *inputs: Array) -> Thunk:
        def run() -> None:
            values = [wide(x, type_) for x in inputs]
            if ftz:
                values = [flush(x, type_) for x in values]
            result = fn(*values)
            if sat:
                result = np.where(np.isnan(result), result.dtype.type(0), np.clip(result, 0, 1))
            if relu:
                result = np.where(np.isnan(result), result, np.maximum(result, 0))
            d[...] = narrow(flush(result, type_) if ftz else result, type_)

        return run

    d, *inputs = (arg(o, type_) for o in i.operands)
    return pure(make, [d], inputs, fpenv.KEEP)


def arithmetic(i: Instruction) -> Plan:
    mods = Mods(i, "rn")
    ftz, sat = mods.flag("ftz"), mods.flag("sat")
    mods.type(*HALVES)
    mods.done()
    return plan(i, {"add": np.add, "sub": np.subtract, "mul": np.multiply}[i.opcode], ftz=ftz, sat=sat)


def fused(i: Instruction) -> Plan:
    mods = Mods(i, "rn")
    ftz, sat, relu = mods.flag("ftz"), mods.flag("sat"), mods.flag("relu")
    mods.type(*HALVES)
    mods.done()
    return plan(i, fused_odd, ftz=ftz, sat=sat, relu=relu)


def approximated(
    type_: PtxType,
    result: Callable[..., Array],
    move: Callable[..., Array],
    ftz: bool,
    approximate: bool,
    _: object,
    d: Array,
    a: Array,
) -> Thunk:
    """The thunk of an approximate function: `result(move, inputs)` is its value as float64, exact without a move."""

    def run() -> None:
        value = wide(a, type_).astype(np.float64)
        found = result(move if approximate else None, [flush(value, type_) if ftz else value])
        d[...] = narrow(flush(found, type_) if ftz else found, type_)

    return run


def sign(i: Instruction) -> Plan:
    mods = Mods(i)
    ftz = mods.flag("ftz")
    mods.type(*HALVES)
    mods.done()
    return plan(i, np.absolute if i.opcode == "abs" else np.negative, ftz=ftz)


def extreme(i: Instruction) -> Plan:
    mods = Mods(i)
    ftz, nan, magnitude = mods.flag("ftz"), mods.flag("NaN"), mods.flag("xorsign")
    magnitude = mods.flag("abs") or magnitude
    mods.type(*HALVES)
    mods.done()
    maximum = i.opcode == "max"
    table = {(True, True): np.maximum, (True, False): np.fmax, (False, True): np.minimum, (False, False): np.fmin}
    fn = table[maximum, nan]

    def choose(*values: Array) -> Array:
        signs = np.signbit(values[0])
        for value in values[1:]:
            signs = signs ^ np.signbit(value)
        total = values[0]
        for value in values[1:]:
            a, b = (np.abs(total), np.abs(value)) if magnitude else (total, value)
            zero = (a == 0) & (b == 0)
            negative = np.signbit(a) & np.signbit(b) if maximum else np.signbit(a) | np.signbit(b)
            total = np.where(zero, np.where(negative, np.float32(-0.0), np.float32(0)), fn(a, b))
        return np.where(signs, -total, total) if magnitude else total

    return plan(i, choose, ftz=ftz)
