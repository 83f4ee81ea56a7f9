"""mov in all its forms: copies, addresses, special registers, packing and unpacking (PTX ISA, "mov")."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ...text.types import TYPES, Array
from ..registry import SINK, Arg, Frame, Instruction, Mods, Plan, Reg, Thunk, Unsupported, Vec, arg, opcode, pure

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
