"""mov and cvt (PTX ISA, "Data Movement and Conversion Instructions"): special registers, packing, conversions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...text.syntax import SINK, TYPES, Array, Instruction, Reg, Unsupported, Vec
from ..registry import Arg, Frame, Mods, Plan, Thunk, arg, opcode, pure
from .expressions import primitive, writer
from .rounding import ROUNDING
from .rows import Case, decode

CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")


@opcode("mov", forms=".pred .b16-.b64 .u16-.s64 .f32 .f64; vectors to and from one register; addresses; special registers")
def mov(i: Instruction) -> Plan:
    d, a = i.operands
    if isinstance(a, Reg) and a.name in CLOCKS:
        return clock(d, a)
    if not isinstance(d, Vec) and not isinstance(a, Vec):
        return decode(i)
    mods = Mods(i)
    bits = mods.type().bits
    mods.done()
    if isinstance(d, Vec):
        return unpack(bits, d, a)
    assert isinstance(a, Vec)
    return pack(bits, d, a)


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


INTEGER_ROUNDING = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def conversion(case: Case) -> str:
    """Returns the expression of cvt."""
    target, source = case.types
    to, of = target.name, source.name
    direction = case.one_of((*ROUNDING, *INTEGER_ROUNDING))
    relu = "relu" in case.mods
    if to in ("f16x2", "bf16x2") and of == "f32" and direction in ("rn", "rz"):
        return "f16(interleave(b, a))" if (to, direction, relu) == ("f16x2", "rn", False) else "interleave(b, a)"
    if to == "tf32" and of == "f32" and not relu:
        return f"d.b32 = to_tf32(a, '{direction}')"
    if not {to, of} <= SCALARS:
        raise Unsupported(f"cvt .{to}.{of}")
    if target.kind == "f":
        value = f"{INTEGER_ROUNDING[direction]}(a)" if direction in INTEGER_ROUNDING else "a"
        if target.bits == 16:
            return value if source.kind == "f" else f"f64({value})"
        return f"{value} * 1" if to == of else f"{to}({value})"  # under .ftz this flushes; else it changes nothing
    if source.kind == "f":
        return f"d.extended = limited({INTEGER_ROUNDING.get(direction, 'trunc')}(f64(a)), '{to}')"
    if "sat" in case.mods:
        limits, own = np.iinfo(target.dtype), np.iinfo(source.dtype)
        return f"d.extended = {to}(clip(a, {max(limits.min, own.min)}, {min(limits.max, own.max)}))"
    return f"d.extended = {to}(a)"


def conversion_of_eights(case: Case) -> str:
    """Returns the expression of cvt between pairs of 8-bit floats and .f16x2 or two .f32."""
    to, of = (type_.name for type_ in case.types)
    relu, finite = int("relu" in case.mods), "satfinite" in case.mods
    if to in EIGHTS and finite and of in ("f32", "f16x2"):
        high, low = ("a", "b") if of == "f32" else ("high(a)", "low(a)")
        return f"u16(eight({high}, '{to}', {relu})) << 8 | u16(eight({low}, '{to}', {relu}))"
    if of in EIGHTS and to == "f16x2" and not finite:
        return f"f16(interleave(from_eight(a & 255, '{of}', {relu}), from_eight(a >> 8, '{of}', {relu})))"
    raise Unsupported(f"cvt .{to}.{of}")


SCALARS = {"u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"}


@primitive
def limited(x: Array, to: str) -> Array:
    """Converts whole float64 numbers to integers: out of range clamps, NaN is 0 (PTX ISA, cvt, notes)."""
    dtype = TYPES[to].dtype
    info = np.iinfo(dtype)
    # The largest float64 that fits: for 64-bit targets the limit itself is not representable.
    top = float(np.nextafter(2.0 ** (info.bits - (info.min < 0)), 0)) if info.bits == 64 else float(info.max)
    value = np.clip(np.where(np.isnan(x), 0.0, x), float(info.min), top).astype(dtype)
    return np.where(x > top, dtype.type(info.max), value) if info.bits == 64 else value


@partial(writer, width=2)
def interleave(_: Frame, d: Array, low: Array, high: Array) -> Thunk:
    """Returns the thunk that makes pairs."""
    pairs = d.reshape(-1, 2)

    def run() -> None:
        pairs[:, 0] = low
        pairs[:, 1] = high

    return run


@primitive
def to_tf32(a: Array, direction: str) -> Array:
    """Rounds float32 to 10 bits of fraction: rna rounds ties away from zero, rn to even."""
    bits = a.view(np.uint32)
    if direction == "rz":
        rounded = bits
    elif direction == "rn":
        rounded = bits + (np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)))
    else:
        rounded = bits + np.uint32(0x1000)
    return np.where(np.isfinite(a), rounded & np.uint32(0xFFFFE000), np.where(np.isnan(a), np.uint32(0x7FFFFFFF), bits))


EIGHTS = {"e4m3x2": ("float8_e4m3fn", 448.0), "e5m2x2": ("float8_e5m2", 57344.0)}
"""Pairs of 8-bit floats: their name in ml_dtypes, largest number."""


def eight_dtype(name: str) -> Any:
    """Returns the dtype of one of a pair. ml_dtypes is imported here, since nothing else of the machine needs it."""
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"8-bit floats need ml_dtypes ({error}): pip install ml_dtypes", name="ml_dtypes") from error
    return getattr(ml_dtypes, EIGHTS[name][0])


@primitive
def eight(x: Array, name: str, relu: int) -> Array:
    """cvt.rn.satfinite to 8-bit floats: too large values become the largest number, NaN 0x7f."""
    top = EIGHTS[name][1]
    value = np.clip(x.astype(np.float32), 0 if relu else -top, top)
    bits = value.astype(eight_dtype(name)).view(np.uint8)
    return np.where(np.isnan(value), np.uint8(0x7F), bits & np.uint8(0x7F) if relu else bits)


@primitive
def from_eight(bits: Array, name: str, relu: int) -> Array:
    """Converts 8-bit floats to float16, which is exact."""
    table = np.arange(256, dtype=np.uint8).view(eight_dtype(name)).astype(np.float16)
    table[np.isnan(table)] = np.uint16(0x7FFF).view(np.float16)
    return np.where(table < 0, np.float16(0), table)[bits] if relu else table[bits]
