"""Comparison and selection (PTX ISA, "Comparison and Selection Instructions")."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ...state import fpenv
from ...text.types import TYPES, Array, PtxType
from ..registry import SINK, Arg, Instruction, Mods, Not, Operand, Pair, Plan, Thunk, Unsupported, arg, opcode, pure
from .half import wide

ORDERED: dict[str, np.ufunc] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
COMPARED = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2")


def comparison(name: str, type_: PtxType) -> Callable[[Array, Array, Array], Thunk]:
    """Maker of the thunk d = a <name> b. An ordered float comparison with NaN is false, an unordered one is true."""
    floating = type_.kind == "f"
    halves = type_.bits == 16 or type_.name.endswith("x2")

    def make(d: Array, a: Array, b: Array) -> Thunk:
        if not floating:
            return partial(ORDERED[name], a, b, d)
        if name in ORDERED and name != "ne" and not halves:
            return partial(ORDERED[name], a, b, d)
        if name == "neu" and not halves:
            return partial(np.not_equal, a, b, d)

        def run() -> None:
            x, y = (wide(a, type_), wide(b, type_)) if halves else (a, b)
            unordered = np.isnan(x) | np.isnan(y)
            if name == "nan":
                d[...] = unordered
            elif name == "num":
                d[...] = ~unordered
            elif name in ORDERED:
                d[...] = ORDERED[name](x, y) & ~unordered
            else:
                d[...] = ORDERED[name[:-1]](x, y) | unordered

        return run

    return make


def _condition(i: Instruction) -> tuple[str, str, bool, Mods]:
    mods = Mods(i)
    name = mods.choice((*ORDERED, *UNORDERED))
    combine = mods.choice(tuple(COMBINE))
    flush = mods.flag("ftz")
    if not name:
        raise Unsupported("no comparison")
    return name, combine, flush, mods


@opcode("setp", forms="all comparisons, ordered and unordered, {.and .or .xor}{.ftz}, p|q; integers, floats, halves")
def setp(i: Instruction) -> Plan:
    name, combine, flush, mods = _condition(i)
    type_ = mods.type(*COMPARED)
    mods.done()
    target, a, b, *rest = i.operands
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, SINK)
    compare, predicate = comparison(name, type_), TYPES["pred"]
    packed = type_.name.endswith("x2")
    code = fpenv.mode(fpenv.NEAREST, flush) if type_.kind == "f" else None
    if not combine and not packed and second == SINK:
        return pure(compare, [arg(first, predicate)], [arg(a, type_), arg(b, type_)], code)

    def make(p: Array, q: Array, a: Array, b: Array, *c: Array) -> Thunk:
        result = np.empty((*p.shape, 2) if packed else p.shape, np.bool_)
        thunk = compare(result.reshape(-1), a, b)
        negated = bool(rest) and isinstance(rest[0], Not)

        def run() -> None:
            thunk()
            other = (~c[0] if negated else c[0]) if c else None
            low, high = (result[..., 0], result[..., 1]) if packed else (result, ~result)
            if other is not None:
                low, high = COMBINE[combine](low, other), COMBINE[combine](high, other)
            p[...] = low
            q[...] = high

        return run

    extra = [Arg(strip(o), predicate.dtype) for o in rest]
    return pure(make, [arg(first, predicate), arg(second, predicate)], [arg(a, type_), arg(b, type_), *extra], code)


def strip(operand: Operand) -> Operand:
    return operand.reg if isinstance(operand, Not) else operand


@opcode("set", forms="all comparisons, {.and .or .xor}{.ftz} to .u32 .s32 .f32 .f16 .bf16 .f16x2")
def set_(i: Instruction) -> Plan:
    name, combine, flush, mods = _condition(i)
    types = mods.types()
    mods.done()
    if len(types) != 2:
        raise Unsupported("expected two types")
    result, type_ = types
    d, a, b, *rest = i.operands
    compare = comparison(name, type_)
    # True is all ones for integers and 1.0 for floating point.
    if result.kind == "f":
        true = np.uint16(0x3F80) if result.name.startswith("bf") else np.dtype(arg(d, result).dtype).type(1)
    else:
        true = np.array(-1, f"i{result.bytes}").view(result.dtype)[()]

    def make(d: Array, a: Array, b: Array, *c: Array) -> Thunk:
        flag = np.empty(d.shape, np.bool_)
        thunk = compare(flag, a, b)
        negated = bool(rest) and isinstance(rest[0], Not)

        def run() -> None:
            thunk()
            other = (~c[0] if negated else c[0]) if c else None
            value = flag if other is None else COMBINE[combine](flag, other)
            d[...] = np.where(value, true, d.dtype.type(0))

        return run

    extra = [Arg(strip(o), TYPES["pred"].dtype) for o in rest]
    code = fpenv.mode(fpenv.NEAREST, flush) if type_.kind == "f" else None
    return pure(make, [arg(d, result)], [arg(a, type_), arg(b, type_), *extra], code)


def select(d: Array, a: Array, b: Array, p: Array) -> Thunk:
    if not (a.ndim or b.ndim):
        # Two constants: pick from a table of both.
        table = np.array([b, a], d.dtype)
        return lambda: table.take(p.view(np.uint8), 0, d, "clip")
    chosen = np.empty_like(d)

    def run() -> None:
        np.copyto(chosen, b)
        np.copyto(chosen, a, where=p)
        np.copyto(d, chosen)

    return run


@opcode("selp", forms=".b16-.b64 .u16-.s64 .f32 .f64")
def selp(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type()
    mods.done()
    d, a, b, p = i.operands
    if isinstance(p, Not):
        a, b, p = b, a, p.reg
    # Values are moved as bits: a NaN must not be quieted on its way.
    bits = TYPES[f"b{type_.bits}"]
    return pure(select, [arg(d, bits)], [arg(a, bits), arg(b, bits), arg(p, TYPES["pred"])])


@opcode("slct", forms="{.ftz} any type, by the sign of .s32 or .f32")
def slct(i: Instruction) -> Plan:
    mods = Mods(i)
    flush = mods.flag("ftz")
    types = mods.types()
    mods.done()
    d, a, b, c = i.operands
    value, by = types

    def make(d: Array, a: Array, b: Array, c: Array) -> Thunk:
        def run() -> None:
            d[...] = np.where(c >= 0, a, b)

        return run

    bits = TYPES[f"b{value.bits}"]
    code = fpenv.mode(fpenv.NEAREST, flush) if by.kind == "f" else None
    return pure(make, [arg(d, bits)], [arg(a, bits), arg(b, bits), arg(c, by)], code)
