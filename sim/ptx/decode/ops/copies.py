"""Asynchronous copies (PTX ISA, "Data Movement: Asynchronous copy"): cp.async, bulk copies of bytes and by tensor maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...memory.bulkcopy import Reduction, Shape, Update
from ...memory.memory import PARAM_WINDOW
from ...memory.ports import GlobalPort, Part, SharedPort
from ...memory.regions import BAD, Region, Tile
from ...state.lanes import Lanes
from ...text.syntax import TYPES, UNSIGNED, Array, Imm, Instruction, Mem, Operand, PtxError, PtxType, Reg, Unsupported
from ..registry import Arg, Frame, Mods, Plan, Thunk, arg, opcode
from .access import address_arg, address_thunk, update
from .control import on_objects
from .floats import narrow, wide


@opcode(
    "cp",
    forms=".async.ca .cg 4 8 16 bytes with source size; .async.commit_group .wait_group .wait_all .mbarrier.arrive{.noinc}; "
    ".async.bulk{.tensor.1d-5d in tile mode} from .global to .shared::cta and .shared::cluster{.multicast::cluster} with an "
    "mbarrier, from .shared::cta to .global with .commit_group .wait_group{.read}, .prefetch to .L2; .async.bulk from "
    ".shared::cta to .shared::cluster; .reduce.async.bulk{.tensor}: .add .min .max .inc .dec .and .or .xor",
)
def cp(i: Instruction) -> Plan:
    if "bulk" in i.mods:
        return tensor(i) if "tensor" in i.mods else bulk(i)
    mods = Mods(i, *(m for m in i.mods if m.startswith("L2::")))
    if not mods.flag("async"):
        raise Unsupported("only cp.async")
    if mods.flag("mbarrier"):
        counted = mods.flag("noinc")
        mods.flag("arrive", "shared", "shared::cta", "b64")
        mods.done()
        (memory,) = i.operands
        assert isinstance(memory, Mem)
        return arrive_when_landed(i, memory, counted)
    action = mods.choice(("commit_group", "wait_group", "wait_all"))
    if action:
        mods.done()
        return group(i, action)
    mods.choice(("ca", "cg"))
    if not mods.flag("shared", "shared::cta") or not mods.flag("global"):
        raise Unsupported("only from global to the block's shared memory")
    mods.done()
    to, source, size_operand, *rest = i.operands
    if "L2::cache_hint" in i.mods:
        rest = rest[:-1]
    if not isinstance(size_operand, Imm) or size_operand.value not in (4, 8, 16):
        raise Unsupported("the size must be 4, 8 or 16")
    size = size_operand.value
    target, target_offset = address_arg(to, "shared")
    origin, origin_offset = address_arg(source, "global")
    if len(rest) > 1 or (rest and isinstance(rest[0], Reg) and rest[0].type.name == "pred"):
        raise Unsupported("an ignore-src predicate")
    sizes = [arg(o, TYPES["u32"]) for o in rest]

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        memory = frame.machine.memory
        to_address = address_thunk(frame, ins[0], target_offset)
        from_address = address_thunk(frame, ins[1], origin_offset)
        shared = SharedPort(memory, i, frame.n, size, "cp.async")
        whole = GlobalPort(memory, i, frame.n, size, "ld")
        ports: dict[int, GlobalPort] = {frame.n: whole}

        def sources(width: Array, addresses: Array) -> tuple[list[Part], list[Part], Array | None]:
            if width.ndim == 0:
                width = np.full(frame.n, width)
            complete = width >= size
            if complete.all():
                return whole.resolve(frame.lanes, addresses), [], None
            parts: list[Part] = []
            at = np.flatnonzero(complete)
            if len(at):
                port = ports.setdefault(len(at), GlobalPort(memory, i, len(at), size, "ld"))
                for view, index, inner in port.resolve(frame.lanes.subset(at), addresses[at]):
                    parts.append((view, index, at if inner is None else at[inner]))
            pieces: list[Part] = []
            at = np.flatnonzero(~complete & (width > 0))
            if len(at):
                for view, index, inner in whole.resolve_sizes(frame.lanes.subset(at), addresses[at], width[at]):
                    assert inner is not None
                    pieces.append((view, index, at[inner]))
            return parts, pieces, width

        def run() -> None:
            lanes = frame.lanes
            found = shared.resolve(lanes, to_address())
            parts, pieces, width = sources(ins[2], from_address()) if sizes else (whole.resolve(lanes, from_address()), [], None)
            # The ports' index arrays are scratch: the copy outlives this instruction.
            parts = [(view, index.copy(), where) for view, index, where in parts]
            if len(found) == 1 and found[0][2] is None:
                frame.machine.copies.issue(lanes, size, found[0][1], parts, pieces, width)

        return run

    return Plan((), (target, origin, *sizes), bind, pure=False)


@opcode("prefetch", "prefetchu", "discard", "applypriority", forms="no effect; of .prefetch.tensormap the map is checked")
def prefetch_line(i: Instruction) -> Plan:
    return map_prefetch(i) if "tensormap" in i.mods else Plan((), (), lambda frame, out, ins: _nothing)


def _nothing() -> None:
    pass


def group(i: Instruction, action: str) -> Plan:
    newest = None
    if action == "wait_group":
        (operand,) = i.operands
        if not isinstance(operand, Imm):
            raise Unsupported("the number of groups must be constant")
        newest = operand.value

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        if action == "commit_group":
            return lambda: frame.machine.copies.commit(frame.lanes)
        return lambda: frame.machine.copies.wait(frame.lanes, newest, i)

    return Plan((), (), bind, pure=False)


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
"""Types that PTX ISA allows for a reduction, in a tensor and in shared memory."""


def reduction_of(mods: Mods, space: str) -> Reduction:
    mods.flag("noftz")
    table = GLOBAL_OPS if space == "global" else CLUSTER_OPS
    name = mods.choice(tuple(table))
    if not name:
        raise Unsupported("this reduction")
    return reduction(name, mods.type(*table[name]))


def reduction(name: str, type_: PtxType) -> Reduction:
    """Returns a reduction on elements of a type."""
    if name in ("min", "max") and type_.kind == "f":
        return Reduction(half_extreme(np.fmin if name == "min" else np.fmax, type_), UNSIGNED[type_.bytes])
    return Reduction(update(name, type_), UNSIGNED[type_.bytes])


def half_extreme(fn: np.ufunc, type_: PtxType) -> Update:
    def extreme(old: Array, value: Array, _: Array) -> Array:
        found = fn(wide(old.view(type_.dtype), type_), wide(value.view(type_.dtype), type_))
        return narrow(found, type_).view(old.dtype)

    return extreme


def values_of(frame: Frame, ins: Sequence[Array]) -> list[Array]:
    """Returns operands as int64, one a lane."""
    return [np.broadcast_to(v, frame.n).astype(np.int64) for v in ins]


def bulk_load(i: Instruction, operands: list[Operand], space: str, multicast: bool, reduction: Reduction | None) -> Plan:
    """Decodes a bulk copy into shared memory, with an mbarrier; from global memory or from the block's own."""
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
    """Decodes a bulk copy from the block's shared memory into global memory, in a bulk group."""
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


ALIGN = 128
"""Alignment of tiles in shared memory, with any swizzle: that goes by the address's bits, wherever in its pattern a tile begins."""

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
"""Types of a map's elements in reductions."""

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
    """Returns the map's address and the coordinates, and the offset of the address."""
    assert isinstance(operand, Mem)
    base, offset = address_arg(replace(operand, coordinates=()), "generic")
    if len(operand.coordinates) != rank:
        raise Unsupported(f"{len(operand.coordinates)} coordinates for {rank} dimensions")
    return [base, *(arg(each, TYPES["s32"]) for each in operand.coordinates)], offset


def boxes(frame: Frame, lanes: Lanes, operands: list[Array], i: Instruction) -> list[tuple[Array, Region]]:
    """Returns the lanes' boxes, by map: (positions of the lanes, region); `operands`: the map's address, the coordinates."""
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
    """Decodes a tensor copy into shared memory, with an mbarrier."""
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
    """Decodes a tensor copy from the block's shared memory into a tensor, in a bulk group; `name`: its reduction, if any."""
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
    """Returns a reduction of a map's elements. Raises PtxError if PTX ISA has none of that type."""
    allowed = (*INTEGER_OPS[name], *FLOAT_OPS.get(name, ()))
    for kind in ELEMENTS.get(dtype, ()):
        if kind in allowed:
            return reduction(name, TYPES[kind])
    raise PtxError(f"there is no reduction .{name} of a tensor map of {dtype}")


def tensor_prefetch(i: Instruction, rank: int, operands: list[Operand]) -> Plan:
    """Decodes a prefetch into the L2 cache: map and box are checked, nothing is counted."""
    (source,) = operands
    tensor_map, offset = map_args(source, rank)

    def bind(frame: Frame, out: Sequence[Array], ins: Sequence[Array]) -> Thunk:
        def run() -> None:
            address, *coordinates = values_of(frame, ins)
            boxes(frame, frame.lanes, [address + offset, *coordinates], i)

        return run

    return Plan((), tuple(tensor_map), bind, pure=False)


def map_prefetch(i: Instruction) -> Plan:
    """prefetch.tensormap: the map is checked; its address is one of .param if the instruction names that."""
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
