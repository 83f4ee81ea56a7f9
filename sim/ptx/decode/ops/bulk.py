"""cp.async.bulk of plain bytes, and the arrival of cp.async at an mbarrier (PTX ISA, "Data Movement: Bulk copy")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...memory.bulkcopy import Reduction, Update
from ...memory.ends import Shape
from ...memory.regions import Region, Tile
from ...state.lanes import Lanes
from ...text.types import TYPES, UNSIGNED, Array, PtxType
from ..registry import Frame, Imm, Instruction, Mem, Mods, Operand, Plan, Thunk, Unsupported, arg
from .access import address_arg, update
from .half import narrow, wide
from .mbarrier import on_objects


def arrive_when_landed(i: Instruction, memory: Mem, counted: bool) -> Plan:
    """cp.async.mbarrier.arrive: arrives when the thread's earlier copies have landed; `counted`: .noinc."""

    def act(frame: Frame, lanes: Lanes, keys: Array, _: Sequence[Array]) -> None:
        machine = frame.machine
        serial, diary = machine.copies.serial, machine.memory.diary
        for key, at in machine.mbarriers.each(keys):
            some = lanes.subset(at)
            barrier = machine.mbarriers.find(key, some, i)
            if barrier is None:
                continue
            if not counted:
                barrier.pending += some.n
            promise = None if diary is None else diary.promised(some, i)

            def land(some: Lanes = some, key: int = key, promise: dict[int, int] | None = promise) -> None:
                machine.copies.land_before(some, serial)
                if diary is not None:
                    diary.keep(promise)
                machine.mbarriers.arrive(some, np.full(some.n, key), np.ones(some.n, np.int64), False, i)
                if diary is not None:
                    diary.keep(None)

            machine.mbarriers.defer(some, key, land, i)

    return on_objects(i, memory, "atom", act, None, [])


SPACES = ("shared::cluster", "shared::cta", "global")
COMPLETES = "mbarrier::complete_tx::bytes"


def bulk(i: Instruction) -> Plan:
    """cp.async.bulk and cp.reduce.async.bulk of plain bytes, and their groups."""
    mods = Mods(i, "async", "bulk", *(m for m in i.mods if m.startswith("L2::") and m != "L2::cache_hint"))
    if action := mods.choice(("commit_group", "wait_group")):
        read = mods.flag("read")
        mods.done()
        return bulk_group(i, action, read)
    operands = list(i.operands)
    if mods.flag("L2::cache_hint"):
        operands.pop()
    if mods.flag("prefetch"):
        return prefetch(i, mods, operands)
    spaces = tuple(m for m in i.mods if m in SPACES)
    mods.flag(*SPACES)
    reduces, arrives, grouped = mods.flag("reduce"), mods.flag(COMPLETES), mods.flag("bulk_group")
    multicast = mods.flag("multicast::cluster")
    if mods.flag("cp_mask"):
        raise Unsupported("a byte mask (.cp_mask) is of sm_100 and later")
    reduction = reduction_of(mods, spaces[0]) if reduces else None
    mods.done()
    if grouped and spaces == ("global", "shared::cta"):
        return bulk_store(i, operands, reduction)
    inward = [("shared::cluster", "global")] + [("shared::cta", "global")] * (not multicast)
    across = [("shared::cluster", "shared::cta")] * (not multicast)
    if not arrives or spaces not in [*across, *([] if reduces else inward)]:
        raise Unsupported("a bulk copy between these spaces with this way to complete")
    return bulk_load(i, operands, spaces[1], multicast, reduction)


def bulk_group(i: Instruction, action: str, read: bool) -> Plan:
    newest = i.operands[0].value if i.operands and isinstance(i.operands[0], Imm) else 0

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        if action == "commit_group":
            return lambda: frame.machine.bulks.commit(frame.lanes)
        return lambda: frame.machine.bulks.wait(frame.lanes, newest, read, i)

    return Plan((), (), bind, pure=False)


INTEGER_OPS = {
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    "add": ("u32", "s32", "u64"),
}
HALVES = ("f16", "bf16")
GLOBAL_OPS = {
    **INTEGER_OPS,
    **dict.fromkeys(("min", "max"), (*INTEGER_OPS["min"], *HALVES)),
    "add": (*INTEGER_OPS["add"], "f32", "f64", *HALVES),
}
CLUSTER_OPS = {
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    "add": ("u32", "s32", "u64"),
}
"""Types that PTX ISA allows a reduction, in a tensor and in shared memory."""


def reduction_of(mods: Mods, space: str) -> Reduction:
    mods.flag("noftz")
    table = GLOBAL_OPS if space == "global" else CLUSTER_OPS
    name = mods.choice(tuple(table))
    if not name:
        raise Unsupported("this reduction")
    return reduction(name, mods.type(*table[name]))


def reduction(name: str, type_: PtxType) -> Reduction:
    """A reduction on elements of a type."""
    if name in ("min", "max") and type_.kind == "f":
        return Reduction(half_extreme(np.fmin if name == "min" else np.fmax, type_), UNSIGNED[type_.bytes])
    return Reduction(update(name, type_), UNSIGNED[type_.bytes])


def half_extreme(fn: np.ufunc, type_: PtxType) -> Update:
    def extreme(old: Array, value: Array, _: Array) -> Array:
        found = fn(wide(old.view(type_.dtype), type_), wide(value.view(type_.dtype), type_))
        return narrow(found, type_).view(old.dtype)

    return extreme


def values_of(frame: Frame, ins: Sequence[Array]) -> list[Array]:
    """Operands as int64, one a lane."""
    return [np.broadcast_to(v, frame.n).astype(np.int64) for v in ins]


def bulk_load(i: Instruction, operands: list[Operand], space: str, multicast: bool, reduction: Reduction | None) -> Plan:
    """Into shared memory, with an mbarrier; from global memory or from the block's own."""
    to, source, size, bar, *rest = operands
    target, target_offset = address_arg(to, "shared")
    origin, origin_offset = address_arg(source, "global" if space == "global" else "shared")
    barrier, barrier_offset = address_arg(bar, "shared")
    masks = [arg(operand, TYPES["u16"]) for operand in rest]
    if len(masks) != multicast:
        raise Unsupported("operands that do not fit the modifiers")

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            there, here, sizes, bars, *mask = values_of(frame, ins)
            there, here, bars = there + target_offset, here + origin_offset, bars + barrier_offset
            bulks, lanes = frame.machine.bulks, frame.lanes
            found: list[tuple[Array, Region | Tile]] = []
            if space == "global":
                found += bulks.ends.ranges(lanes, here, sizes, i)
            else:
                found += bulks.ends.own_ranges(lanes, here, sizes, i)
            for at, region in found:
                some = lanes.subset(at)
                ends = there[at], bars[at], mask[0][at] if mask else None
                arrival = bulks.ends.arrival(some, ends, Shape(region.size), i)
                if arrival is not None:
                    rows, to = arrival
                    bulks.load(some.subset(rows), region.take(rows), to, i, reduction)

        return run

    return Plan((), (target, origin, arg(size, TYPES["u32"]), barrier, *masks), bind, pure=False)


def bulk_store(i: Instruction, operands: list[Operand], reduction: Reduction | None) -> Plan:
    """From the block's shared memory into global memory, of a bulk group."""
    to, source, size = operands
    target, target_offset = address_arg(to, "global")
    origin, origin_offset = address_arg(source, "shared")

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            there, here, sizes = values_of(frame, ins)
            bulks, lanes = frame.machine.bulks, frame.lanes
            for at, region in bulks.ends.ranges(lanes, there + target_offset, sizes, i):
                some = lanes.subset(at)
                found = bulks.ends.own(some, here[at] + origin_offset, Shape(region.size), i)
                if found is not None and bulks.ends.writable(region.segment, some, i):
                    bulks.store(some.subset(found[0]), found[1], region.take(found[0]), i, reduction)

        return run

    return Plan((), (target, origin, arg(size, TYPES["u32"])), bind, pure=False)


def prefetch(i: Instruction, mods: Mods, operands: list[Operand]) -> Plan:
    """cp.async.bulk.prefetch: addresses are checked, nothing is counted."""
    mods.flag("L2")
    if not mods.flag("global"):
        raise Unsupported("a prefetch of another space")
    mods.done()
    source, size = operands
    origin, offset = address_arg(source, "global")

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            here, sizes = values_of(frame, ins)
            frame.machine.bulks.ends.ranges(frame.lanes, here + offset, sizes, i)

        return run

    return Plan((), (origin, arg(size, TYPES["u32"])), bind, pure=False)
