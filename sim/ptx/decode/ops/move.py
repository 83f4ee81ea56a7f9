"""mov and cvt (PTX ISA, "Data Movement and Conversion Instructions"): copies, special registers, packing, conversions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...text.syntax import SINK, TYPES, Array, Instruction, Operand, PtxType, Reg, Unsupported, Vec
from ..registry import Arg, Frame, Mods, Plan, Thunk, arg, opcode, pure
from . import rounding
from .floating import ROUNDINGS
from .rounding import bfloat_bits, bfloat_value, directed, half_bits, odd_float32, wide

CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")


def copy(d: Array, a: Array) -> Thunk:
    return partial(np.copyto, d, a)


@opcode("mov", forms=".pred .b16-.b64 .u16-.s64 .f32 .f64; vectors to and from one register; addresses; special registers")
def mov(i: Instruction) -> Plan:
    mods = Mods(i)
    type_ = mods.type()
    mods.done()
    d, a = i.operands
    if isinstance(d, Vec):
        return unpack(type_.bits, d, a)
    if isinstance(a, Vec):
        return pack(type_.bits, d, a)
    if isinstance(a, Reg) and a.name in CLOCKS:
        return clock(d, a)
    bits = TYPES["pred"] if type_.name == "pred" else TYPES[f"b{type_.bits}"]
    return pure(copy, [arg(d, bits)], [arg(a, bits)])


def unpack(bits: int, d: Vec, a: object) -> Plan:
    part = TYPES[f"b{bits // len(d.items)}"]
    count = len(d.items)

    def make(*arrays: Array) -> Thunk:
        *out, source = arrays
        parts = [(o, k) for k, (o, item) in enumerate(zip(out, d.items, strict=True)) if item != SINK]
        if source.ndim == 0:
            raise Unsupported("unpacking a constant")
        columns = [(o, source.view(part.dtype)[k::count]) for o, k in parts]

        def run() -> None:
            values = [column.copy() for _, column in columns] if overlapping else [column for _, column in columns]
            for (target, _), value in zip(columns, values, strict=True):
                target[...] = value

        overlapping = any(np.shares_memory(o, source) for o, _ in parts)
        return run

    if not isinstance(a, Reg):
        raise Unsupported("unpacking something that is no register")
    return pure(make, [arg(o, part) for o in d.items], [arg(a, TYPES[f"b{bits}"])])


def pack(bits: int, d: object, a: Vec) -> Plan:
    if len(a.items) not in (2, 4, 8):
        raise Unsupported(f"packing {len(a.items)} registers")
    part = TYPES[f"b{bits // len(a.items)}"]
    count = len(a.items)
    if not isinstance(d, Reg):
        raise Unsupported("packing into something that is no register")

    def make(target: Array, *sources: Array) -> Thunk:
        columns = target.view(part.dtype)
        own = any(np.shares_memory(target, s) for s in sources)

        def run() -> None:
            values = [s.copy() for s in sources] if own else sources
            for k, value in enumerate(values):
                columns[k::count] = value

        return run

    return pure(make, [arg(d, TYPES[f"b{bits}"])], [arg(o, part) for o in a.items])


def clock(d: object, a: Reg) -> Plan:
    """Clocks count instructions that the machine has run: they only grow."""
    high = a.name.endswith("_hi")
    assert isinstance(d, Reg)

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            now = frame.machine.clock()
            np.copyto(out[0], np.array(now >> 32 if high else now, np.uint64), casting="unsafe")

        return run

    return Plan((Arg(d, TYPES[f"u{d.type.bits}"].dtype),), (), bind, pure=False)


INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")


def register_arg(operand: Operand, type_: PtxType) -> Arg:
    """Returns a destination that may be wider than the type: it is then seen whole, to be sign- or zero-extended."""
    if isinstance(operand, Reg) and operand.type.bits > type_.bits:
        return Arg(operand, TYPES[f"{'s' if type_.kind == 's' else 'u'}{operand.type.bits}"].dtype)
    return arg(operand, type_)


def integer_to_integer(source: PtxType, target: PtxType, sat: bool, d: Array, a: Array) -> Thunk:
    narrow = target.dtype
    if not sat and d.dtype == narrow:
        return partial(np.copyto, d, a, casting="unsafe")

    def run() -> None:
        value = a
        if sat:
            low, high = np.iinfo(narrow).min, np.iinfo(narrow).max
            own = np.iinfo(source.dtype)
            value = np.clip(a, max(low, own.min), min(high, own.max))
        np.copyto(d, np.asarray(value).astype(narrow), casting="unsafe")

    return run


def float_to_integer(source: PtxType, target: PtxType, direction: str, d: Array, a: Array) -> Thunk:
    """Converts floats to integers: out of range clamps, NaN is 0 (PTX ISA, cvt, notes)."""
    info = np.iinfo(target.dtype)
    fn = INTEGER_ROUNDING[direction]
    # The largest float64 that fits: for 64-bit targets the limit itself is not representable.
    top = float(np.nextafter(2.0 ** (info.bits - (info.min < 0)), 0)) if info.bits == 64 else float(info.max)

    def run() -> None:
        x = fn((wide(a, source) if source.bits == 16 else a).astype(np.float64))
        clipped = np.clip(np.where(np.isnan(x), 0.0, x), float(info.min), top)
        value = clipped.astype(target.dtype)
        if info.bits == 64:
            value = np.where(x > top, target.dtype.type(info.max), value)
        np.copyto(d, value, casting="unsafe")

    return run


def finish(value: Array, target: PtxType, direction: str, sat: bool, relu: bool) -> Array:
    """Converts a float32/float64 array to the storage of a half type (or itself), with .sat, .relu and the rounding of halves."""
    if sat:
        value = np.where(np.isnan(value), value.dtype.type(0), np.abs(np.clip(value, 0, 1)))
    if relu:
        value = np.where(np.isnan(value), value, np.maximum(value, 0))
    if target.name == "f16":
        bits = half_bits(value)
        if direction not in ("rn", ""):
            bits = directed(value, bits, bits.view(np.float16).astype(np.float64), direction)
        return bits.view(np.float16)
    if target.name == "bf16":
        bits = bfloat_bits(odd_float32(value) if value.dtype == np.float64 else np.asarray(value))
        if direction not in ("rn", ""):
            bits = directed(value, bits, bfloat_value(bits).astype(np.float64), direction)
        return bits
    return value


def float_to_float(source: PtxType, target: PtxType, direction: str, sat: bool, relu: bool, d: Array, a: Array) -> Thunk:
    if not (sat or relu or source.bits == 16 or target.bits == 16 or direction in INTEGER_ROUNDING):
        if d.dtype == a.dtype:
            return partial(np.multiply, a, np.array(1, d.dtype), d)  # under .ftz this flushes; else it changes nothing
        return partial(np.copyto, d, a, casting="same_kind")

    def run() -> None:
        value = wide(a, source) if source.bits == 16 else a
        if direction in INTEGER_ROUNDING:
            value = INTEGER_ROUNDING[direction](value)
        out = finish(np.asarray(value), target, direction, sat, relu)
        np.copyto(d, out.view(d.dtype) if out.itemsize == d.itemsize else out, casting="same_kind")

    return run


def integer_to_float(target: PtxType, direction: str, d: Array, a: Array) -> Thunk:
    if target.bits > 16:
        return partial(np.copyto, d, a, casting="unsafe")

    def run() -> None:
        d[...] = finish(a.astype(np.float64), target, direction, False, False)

    return run


def pack_converted(type_: PtxType, direction: str, relu: bool, d: Array, high: Array, low: Array) -> Thunk:
    """cvt.f16x2.f32 and cvt.bf16x2.f32: the first source goes to the upper half."""
    halves = d.reshape(-1, 2)
    target = TYPES["f16" if type_.name == "f16x2" else "bf16"]
    if target.name == "f16" and direction == "rn" and not relu:
        both = np.empty(halves.shape, np.float32)

        def fast() -> None:
            both[:, 0] = low
            both[:, 1] = high
            np.copyto(halves, both, casting="same_kind")

        return fast

    def run() -> None:
        upper, lower = finish(high, target, direction, False, relu), finish(low, target, direction, False, relu)
        halves[:, 1] = upper
        halves[:, 0] = lower

    return run


def to_tf32(direction: str, d: Array, a: Array) -> Thunk:
    """Rounds float32 to 10 bits of fraction: rna rounds ties away from zero, rn to even."""

    def run() -> None:
        bits = a.view(np.uint32)
        if direction == "rz":
            rounded = bits
        elif direction == "rn":
            rounded = bits + (np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)))
        else:
            rounded = bits + np.uint32(0x1000)
        d[...] = np.where(np.isfinite(a), rounded & np.uint32(0xFFFFE000), np.where(np.isnan(a), 0x7FFFFFFF, bits))

    return run


EIGHTS = {"e4m3x2": ("float8_e4m3fn", 448.0), "e5m2x2": ("float8_e5m2", 57344.0)}
"""Pairs of 8-bit floats: their name in ml_dtypes, largest number."""


def eight_dtype(name: str) -> Any:
    """Returns the dtype of one of a pair. ml_dtypes is imported here, since nothing else of the machine needs it."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"8-bit floats need ml_dtypes ({error}): pip install ml_dtypes", name="ml_dtypes") from error
    return getattr(ml_dtypes, EIGHTS[name][0])


def to_eights(name: str, relu: bool, d: Array, high: Array, low: Array) -> Thunk:
    """cvt.rn.satfinite to a pair of 8-bit floats: too large values become the largest number, NaN 0x7f."""
    dtype, top = eight_dtype(name), EIGHTS[name][1]

    def one(x: Array) -> Array:
        value = np.clip(x.astype(np.float32), 0 if relu else -top, top)
        bits = value.astype(dtype).view(np.uint8)
        if relu:
            bits = bits & np.uint8(0x7F)
        return np.where(np.isnan(value), np.uint8(0x7F), bits)

    def run() -> None:
        upper, lower = one(high), one(low)
        d[...] = upper.astype(np.uint16) << np.uint16(8) | lower

    return run


def from_eights(name: str, relu: bool, d: Array, a: Array) -> Thunk:
    """cvt.rn.f16x2 of a pair of 8-bit floats, which is exact."""
    table = np.arange(256, dtype=np.uint8).view(eight_dtype(name)).astype(np.float16)
    table[np.isnan(table)] = np.uint16(0x7FFF).view(np.float16)
    if relu:
        table = np.where(table < 0, np.float16(0), table)

    def run() -> None:
        d.reshape(-1, 2)[...] = table[np.broadcast_to(a, len(d) // 2).copy().view(np.uint8).reshape(-1, 2)]

    return run


def eights(i: Instruction) -> Plan:
    """cvt between pairs of 8-bit floats and .f16x2 or two .f32."""
    mods = Mods(i)
    known = mods.flag("rn")
    finite, relu = mods.flag("satfinite"), mods.flag("relu")
    pair, word = TYPES["b16"], TYPES["f16x2"]
    if len(mods.rest) != 2 or not known:
        raise Unsupported("cvt of 8-bit floats")
    target, source = mods.rest
    if target in EIGHTS and finite and source == "f32":
        d, high, low = i.operands
        single = TYPES["f32"]
        return pure(partial(to_eights, target, relu), [arg(d, pair)], [arg(high, single), arg(low, single)], rounding.KEEP)
    if target in EIGHTS and finite and source == "f16x2":
        d, a = i.operands

        def halves(d: Array, a: Array) -> Thunk:
            return to_eights(target, relu, d, a[1::2], a[::2])

        return pure(halves, [arg(d, pair)], [arg(a, word)], rounding.KEEP)
    if source in EIGHTS and not finite and target == "f16x2":
        d, a = i.operands
        return pure(partial(from_eights, source, relu), [arg(d, word)], [arg(a, pair)], rounding.KEEP)
    raise Unsupported(f"cvt .{target}.{source}")


@opcode(
    "cvt",
    forms="all integers, .f16 .bf16 .f32 .f64 with .rn .rz .rm .rp .rni .rzi .rmi .rpi .sat .ftz .relu; "
    ".f16x2.f32 .bf16x2.f32 .tf32.f32; .rn{.satfinite}{.relu} .e4m3x2 .e5m2x2 from .f32 .f16x2 and to .f16x2",
)
def cvt(i: Instruction) -> Plan:
    if set(EIGHTS) & set(i.mods):
        return eights(i)
    mods = Mods(i)
    direction = mods.choice((*ROUNDINGS, "rna", *INTEGER_ROUNDING))
    flush, sat, relu = mods.flag("ftz"), mods.flag("sat"), mods.flag("relu")
    types = mods.types()
    mods.done()
    if len(types) != 2:
        raise Unsupported("expected two types")
    target, source = types
    code = rounding.mode(rounding.ROUNDING.get(direction, rounding.NEAREST), flush)
    # Narrowing to halves rounds in integer arithmetic; the host's rounding direction must not touch the steps before.
    half_code = rounding.mode(rounding.NEAREST, flush)
    if target.name in ("f16x2", "bf16x2"):
        if source.name != "f32" or direction not in ("rn", "rz"):
            raise Unsupported(f"cvt to .{target.name}")
        d, high, low = i.operands
        fn = partial(pack_converted, target, direction, relu)
        return pure(fn, [arg(d, target)], [arg(high, source), arg(low, source)], half_code)
    d, a = i.operands
    if target.name == "tf32":
        if source.name != "f32" or relu:
            raise Unsupported("cvt to .tf32")
        return pure(partial(to_tf32, direction), [arg(d, TYPES["b32"])], [arg(a, source)], rounding.KEEP)
    known = (*INTEGERS, *FLOATS)
    if source.name not in known or target.name not in known:
        raise Unsupported(f"cvt .{target.name}.{source.name}")
    out, value = register_arg(d, target), arg(a, source)
    if source.kind != "f" and target.kind != "f":
        return pure(partial(integer_to_integer, source, target, sat), [out], [value])
    if target.kind != "f":
        return pure(partial(float_to_integer, source, target, direction or "rzi"), [out], [value], half_code)
    if source.kind != "f":
        return pure(partial(integer_to_float, target, direction), [arg(d, target)], [value], code)
    exact = half_code if target.bits == 16 else code
    return pure(partial(float_to_float, source, target, direction, sat, relu), [arg(d, target)], [value], exact)
