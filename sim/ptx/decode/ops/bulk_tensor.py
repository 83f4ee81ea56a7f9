"""cp.async.bulk.tensor: boxes of tensors by tensor maps (PTX ISA, "Data Movement: Bulk tensor copy"), in tile mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...memory.bulkcopy import Reduction
from ...memory.ends import Shape
from ...memory.maps import BAD
from ...memory.memory import PARAM_WINDOW
from ...memory.regions import Region
from ...state.lanes import Lanes
from ...text.types import TYPES, Array, PtxError
from ..registry import Arg, Frame, Instruction, Mem, Mods, Operand, Plan, Thunk, Unsupported, arg
from .access import address_arg
from .bulk import COMPLETES, INTEGER_OPS, SPACES, reduction, values_of

ALIGN = 128
"""Of tiles in shared memory, whatever the swizzle: that goes by the bits of the address, wherever in its pattern a tile begins."""

RANKS = {f"{rank}d": rank for rank in range(1, 6)}

ELEMENTS = {
    "uint32": ("u32", "b32"),
    "int32": ("s32", "b32"),
    "uint64": ("u64", "b64"),
    "int64": ("s64", "b64"),
    "float16": ("f16",),
    "bfloat16": ("bf16",),
    "float32": ("f32",),
    "float32_ftz": ("f32",),
}
"""The types as which reductions see the elements of a map."""

FLOAT_OPS = {"add": ("f32", "f16", "bf16"), "min": ("f16", "bf16"), "max": ("f16", "bf16")}


def tensor(i: Instruction) -> Plan:
    """cp.async.bulk.tensor, cp.reduce.async.bulk.tensor and cp.async.bulk.prefetch.tensor."""
    mods = Mods(i, "async", "bulk", "tensor")
    rank = RANKS[mods.choice(tuple(RANKS))]
    if any(m.startswith(("im2col", "tile::")) for m in mods.rest):
        raise Unsupported("only tile mode: no im2col, gather or scatter")
    mods.flag("tile")
    operands = list(i.operands)
    if mods.flag("L2::cache_hint"):
        operands.pop()
    if mods.flag("prefetch"):
        mods.flag("L2", "global")
        mods.done()
        return tensor_prefetch(i, rank, operands)
    spaces = tuple(m for m in i.mods if m in SPACES)
    mods.flag(*SPACES)
    reduces, arrives, grouped = mods.flag("reduce"), mods.flag(COMPLETES), mods.flag("bulk_group")
    name = mods.choice(("add", "min", "max", "inc", "dec", "and", "or", "xor")) if reduces else ""
    multicast = mods.flag("multicast::cluster")
    mods.done()
    if grouped and spaces == ("global", "shared::cta") and reduces == bool(name):
        return tensor_store(i, rank, operands, name)
    if not arrives or reduces or spaces not in (("shared::cluster", "global"), ("shared::cta", "global")):
        raise Unsupported("a bulk tensor copy between these spaces with this way to complete")
    return tensor_load(i, rank, operands, multicast)


def map_args(operand: Operand, rank: int) -> tuple[list[Arg], int]:
    """The map's address and the coordinates, and the offset of the address."""
    assert isinstance(operand, Mem)
    base, offset = address_arg(replace(operand, coordinates=()), "generic")
    if len(operand.coordinates) != rank:
        raise Unsupported(f"{len(operand.coordinates)} coordinates for {rank} dimensions")
    return [base, *(arg(each, TYPES["s32"]) for each in operand.coordinates)], offset


def boxes(frame: Frame, lanes: Lanes, operands: list[Array], i: Instruction) -> list[tuple[Array, Region]]:
    """The boxes that lanes name, by map: (positions of the lanes, region); `operands`: the map's address, the coordinates."""
    bulks = frame.machine.bulks
    address, *coordinates = operands
    found: list[tuple[Array, Region]] = []
    for at, box, segment, tensor in bulks.maps.find(lanes, address, len(coordinates), i):
        region = box.region(segment, tensor, np.stack([c[at] for c in coordinates], axis=1))
        found += bulks.ends.inside(lanes, at, region, i)
    return found


def shape_of(region: Region) -> Shape:
    assert region.description is not None
    return Shape(region.size, ALIGN, region.description.swizzle)


def tensor_load(i: Instruction, rank: int, operands: list[Operand], multicast: bool) -> Plan:
    """Into shared memory, with an mbarrier."""
    to, source, bar, *rest = operands
    target, target_offset = address_arg(to, "shared")
    barrier, barrier_offset = address_arg(bar, "shared")
    tensor_map, map_offset = map_args(source, rank)
    masks = [arg(operand, TYPES["u16"]) for operand in rest]
    if len(masks) != multicast:
        raise Unsupported("operands that do not fit the modifiers")

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            there, bars, address, *others = values_of(frame, ins)
            there, bars = there + target_offset, bars + barrier_offset
            mask, bulks = others[rank:], frame.machine.bulks
            for at, region in boxes(frame, frame.lanes, [address + map_offset, *others[:rank]], i):
                some = frame.lanes.subset(at)
                ends = there[at], bars[at], mask[0][at] if mask else None
                arrival = bulks.ends.arrival(some, ends, shape_of(region), i)
                if arrival is not None:
                    rows, to = arrival
                    bulks.load(some.subset(rows), region.take(rows), to, i)

        return run

    return Plan((), (target, barrier, *tensor_map, *masks), bind, pure=False)


def tensor_store(i: Instruction, rank: int, operands: list[Operand], name: str) -> Plan:
    """From the block's shared memory into a tensor, of a bulk group; `name` of a reduction, if it is one."""
    to, source = operands
    tensor_map, map_offset = map_args(to, rank)
    origin, origin_offset = address_arg(source, "shared")

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            here, address, *coordinates = values_of(frame, ins)
            bulks = frame.machine.bulks
            for at, region in boxes(frame, frame.lanes, [address + map_offset, *coordinates], i):
                some = frame.lanes.subset(at)
                assert region.description is not None
                try:
                    update = reduction_for(name, region.description.dtype) if name else None
                except PtxError as error:
                    frame.machine.memory.findings.report(BAD, str(error), i, some, 0, count=some.n)
                    continue
                found = bulks.ends.own(some, here[at] + origin_offset, shape_of(region), i)
                if found is not None and bulks.ends.writable(region.segment, some, i):
                    bulks.store(some.subset(found[0]), found[1], region.take(found[0]), i, update)

        return run

    return Plan((), (origin, *tensor_map), bind, pure=False)


def reduction_for(name: str, dtype: str) -> Reduction:
    """A reduction of a map's elements. PtxError where PTX ISA has none of that type."""
    allowed = (*INTEGER_OPS[name], *FLOAT_OPS.get(name, ()))
    for kind in ELEMENTS.get(dtype, ()):
        if kind in allowed:
            return reduction(name, TYPES[kind])
    raise PtxError(f"there is no reduction .{name} of a tensor map of {dtype}")


def tensor_prefetch(i: Instruction, rank: int, operands: list[Operand]) -> Plan:
    """Into the L2 cache: map and box are checked, nothing is counted."""
    (source,) = operands
    tensor_map, offset = map_args(source, rank)

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            address, *coordinates = values_of(frame, ins)
            boxes(frame, frame.lanes, [address + offset, *coordinates], i)

        return run

    return Plan((), tuple(tensor_map), bind, pure=False)


def map_prefetch(i: Instruction) -> Plan:
    """prefetch.tensormap: the map is checked; its address is one of .param if the instruction says so."""
    (memory,) = i.operands
    param = bool({"param", "param::entry"} & set(i.mods))
    base, offset = address_arg(memory, "param" if param else "generic")

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            (address,) = values_of(frame, ins)
            generic = address + offset | (PARAM_WINDOW if param else 0)
            frame.machine.bulks.maps.find(frame.lanes, generic, 0, i)

        return run

    return Plan((), (base,), bind, pure=False)
