"""Asynchronous copies (PTX ISA, "Data Movement: Asynchronous copy"): cp.async, bulk copies of bytes and by tensor maps; maps
that kernels make in memory ("tensormap.replace", "tensormap.cp_fenceproxy"); and stores and reductions into the shared memory
of a cluster ("st.async", "red.async").

Address and mbarrier of a st.async are in one block. The access is checked, counted and ordered when it is issued; its bytes
move, and the mbarrier counts them, as late as they may, or with a seed at any moment. Who sees the phase complete is ordered
behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..memory.async_copies import Reduction
from ..memory.mbarriers import MBarriers
from ..memory.ports import GlobalPort, Part, SharedPort, element
from ..memory.regions import BAD, Region, Shape, Spot, Tile
from ..memory.spaces import PARAM_WINDOW
from ..memory.swizzles import MAP_BYTES, replaced
from ..state.lane_sets import LaneSet, run_starts
from ..state.segments import IN_FLIGHT
from ..text.syntax import (
    ELEMENT,
    SINK,
    TYPES,
    UNSIGNED,
    Array,
    Imm,
    Mem,
    Operand,
    PtxError,
    PtxInstruction,
    PtxType,
    Reg,
    Unsupported,
)
from .access import address_arg, address_thunk, make_port, rounds, spread, store, update
from .control import on_objects
from .registry import WHOLE_WARP, Arg, Arrays, Frame, Plan, Thunk, act, args, items, opcode, taken


@opcode(
    "cp",
    forms=".async.ca .cg 4 8 16 bytes with source size; .async.commit_group .wait_group .wait_all .mbarrier.arrive{.noinc}; "
    ".async.bulk{.tensor.1d-5d in tile mode} from .global to .shared::cta and .shared::cluster{.multicast::cluster} with an "
    "mbarrier, from .shared::cta to .global with .commit_group .wait_group{.read}, .prefetch to .L2; .async.bulk from "
    ".shared::cta to .shared::cluster; .reduce.async.bulk{.tensor}: .add .min .max .inc .dec .and .or .xor",
)
def cp(i: PtxInstruction) -> Plan:
    if {"commit_group", "wait_group", "wait_all"} & set(i.mods):
        return group(i)
    if "bulk" in i.mods:
        return bulk(i)
    if "mbarrier" in i.mods:
        taken(i, "!async", "mbarrier", "!arrive", "noinc", "shared shared::cta", "b64")
        return arrive_when_landed(i)
    taken(i, "!async", "ca cg", "!shared shared::cta", "!global", ignored=cache_hints(i))
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
    sizes = args("u32", *rest)

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        memory = frame.machine.memory
        to_address, from_address = address_thunk(frame, ins[0], target_offset), address_thunk(frame, ins[1], origin_offset)
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
                for view, index, inner in whole.search(frame.lanes.subset(at), addresses[at], width[at]):
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
def prefetch_line(i: PtxInstruction) -> Plan:
    return map_prefetch(i) if "tensormap" in i.mods else Plan((), (), lambda frame, out, ins: _nothing)


def _nothing() -> None:
    pass


def cache_hints(i: PtxInstruction) -> list[str]:
    return [m for m in i.mods if m.startswith("L2::")]


def group(i: PtxInstruction) -> Plan:
    """The groups of cp.async and of bulk copies: .commit_group, .wait_group, .wait_all."""
    taken(i, "!async", "bulk", "!commit_group wait_group wait_all", "read")
    newest = None
    if "wait_group" in i.mods:
        (operand,) = i.operands
        if not isinstance(operand, Imm):
            raise Unsupported("the number of groups must be constant")
        newest = operand.value

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        machine, lanes = frame.machine, frame.lanes
        if "commit_group" in i.mods:
            (machine.bulks if "bulk" in i.mods else machine.copies).commit(lanes)
        elif "bulk" in i.mods:
            machine.bulks.wait(lanes, newest, "read" in i.mods)
        else:
            machine.copies.wait(lanes, newest)

    return act(run)


def arrive_when_landed(i: PtxInstruction) -> Plan:
    """cp.async.mbarrier.arrive: arrives when the thread's earlier copies have landed; .noinc: it is among the expected arrivals."""
    (memory,) = i.operands

    def arrive(frame: Frame, lanes: LaneSet, keys: Array, _: Arrays) -> None:
        machine = frame.machine
        serial = machine.copies.serial
        for key, at in machine.mbarriers.each(keys):
            some = lanes.subset(at)
            barrier = machine.mbarriers.find(key, some, i)
            if barrier is None:
                continue
            if "noinc" not in i.mods:
                barrier.pending += some.n

            def land(some: LaneSet = some, key: int = key) -> None:
                machine.copies.land_before(some, serial)
                machine.mbarriers.arrive(some, np.full(some.n, key), np.ones(some.n, np.int64), False, i)

            machine.mbarriers.defer(some, key, land, i)

    return on_objects(i, memory, "atom", arrive)


SPACES = "shared::cluster shared::cta global"
ALIGN = 128
"""Alignment of tiles in shared memory, with any swizzle: that goes by the address's bits, wherever in its pattern a tile begins."""


def bulk(i: PtxInstruction) -> Plan:
    """cp.async.bulk, cp.async.bulk.tensor, their reductions and prefetches."""
    if any(m.startswith(("im2col", "tile::")) for m in i.mods):
        raise Unsupported("only tile mode: no im2col, gather or scatter")
    if "cp_mask" in i.mods:
        raise Unsupported("a byte mask (.cp_mask) is of sm_100 and later")
    tensor, reduces, hints = "tensor" in i.mods, "reduce" in i.mods, cache_hints(i)
    operands = list(i.operands[:-1] if "L2::cache_hint" in hints else i.operands)
    size = Imm(0) if tensor else operands.pop(1 if "prefetch" in i.mods else 2)

    def far(operand: Operand, space: str = "global") -> Bytes:
        return boxes(i, operand) if tensor else plain(i, operand, size, space)

    kind = ("!async", "!bulk", "tensor", "tile", f"!{' '.join(RANKS)}" if tensor else "")
    if "prefetch" in i.mods:
        taken(i, *kind, "prefetch", "L2", "!global", ignored=hints)
        (source,) = operands
        return prefetch(far(source))
    name = next((one for one in INTEGER_OPS if one in i.mods), "") if reduces else ""
    types = f"!{reduced_types(name, 'global' in i.mods)}" if name and not tensor else ""
    reduced = ("reduce", f"!{' '.join(INTEGER_OPS)}", types, "noftz") if reduces else ()
    to_space, space, way, multicast, *_ = taken(
        i, SPACES, SPACES, "!bulk_group mbarrier::complete_tx::bytes", "multicast::cluster", *kind, *reduced, ignored=hints
    )
    found = reduction(name, i.type) if types else None
    if (way, to_space, space) == ("bulk_group", "global", "shared::cta"):
        to, origin = operands
        return store_bulk(i, origin, far(to), lambda region: reduction_for(name, region) if reduces and tensor else found)
    to, source, bar, *masks = operands
    inward = space == "global" and not reduces and (to_space == "shared::cluster" or (to_space == "shared::cta" and not multicast))
    across = (to_space, space) == ("shared::cluster", "shared::cta") and not tensor and not multicast
    if way == "bulk_group" or not (inward or across):
        raise Unsupported(f"a bulk{' tensor' * tensor} copy between these spaces with this way to complete")
    return load(i, to, bar, masks, far(source, "global" if inward else "shared"), found)


RANKS = {f"{rank}d": rank for rank in range(1, 6)}
INTEGER_OPS = {
    **dict.fromkeys(("and", "or", "xor"), "b32 b64"),
    **dict.fromkeys(("min", "max"), "u32 s32 u64 s64"),
    **dict.fromkeys(("inc", "dec"), "u32"),
    "add": "u32 s32 u64",
}
FLOAT_OPS = {"add": "f32 f64 f16 bf16", "min": "f16 bf16", "max": "f16 bf16"}
"""Types that PTX ISA allows for a reduction."""


def reduced_types(name: str, in_tensor: bool) -> str:
    """Returns the types of a reduction in a tensor, or in shared memory: there of 32 bits, but for sums."""
    if in_tensor:
        return f"{INTEGER_OPS[name]} {FLOAT_OPS.get(name, '')}"
    return " ".join(kind for kind in INTEGER_OPS[name].split() if name == "add" or kind.endswith("32"))


def reduction(name: str, type_: PtxType) -> Reduction:
    """Returns a reduction on elements of a type."""
    return Reduction(update(name, type_), UNSIGNED[type_.bytes])


def values_of(frame: Frame, ins: Arrays) -> list[Array]:
    """Returns operands as int64, one a lane."""
    return [np.broadcast_to(v, frame.n).astype(np.int64) for v in ins]


@dataclass(frozen=True)
class Bytes:
    """The bytes that copies move, in a tensor or as a source in shared memory.

    `find(frame, lanes, values of args)` returns those without a fault as (positions of their lanes, region).
    """

    args: tuple[Arg, ...]
    find: Callable[[Frame, LaneSet, list[Array]], Sequence[tuple[Array, Region | Tile]]]


def plain(i: PtxInstruction, operand: Operand, size: Operand, space: str = "global") -> Bytes:
    """Returns bytes side by side: of a tensor, or of the block's own shared memory."""
    base, offset = address_arg(operand, space)

    def find(frame: Frame, lanes: LaneSet, values: list[Array]) -> Sequence[tuple[Array, Region | Tile]]:
        ends = frame.machine.bulks.ends
        return (ends.ranges if space == "global" else ends.own_ranges)(lanes, values[0] + offset, values[1], i)

    return Bytes((base, *args("u32", size)), find)


def boxes(i: PtxInstruction, operand: Operand) -> Bytes:
    """Returns the boxes of a tensor map."""
    assert isinstance(operand, Mem)
    rank = next(RANKS[m] for m in i.mods if m in RANKS)
    base, offset = address_arg(replace(operand, coordinates=()), "generic")
    if len(operand.coordinates) != rank:
        raise Unsupported(f"{len(operand.coordinates)} coordinates for {rank} dimensions")

    def find(frame: Frame, lanes: LaneSet, values: list[Array]) -> list[tuple[Array, Region | Tile]]:
        bulks, (address, *coordinates) = frame.machine.bulks, values
        found: list[tuple[Array, Region | Tile]] = []
        for at, box, segment, tensor in bulks.maps.find(lanes, address + offset, rank, i):
            region = box.region(segment, tensor, np.stack([c[at] for c in coordinates], axis=1))
            found += bulks.ends.inside(lanes, at, region, i)
        return found

    return Bytes((base, *args("s32", *operand.coordinates)), find)


def shape_of(region: Region | Tile) -> Shape:
    """Returns the tile of a region in shared memory: with its map's swizzle."""
    description = region.description if isinstance(region, Region) else None
    return Shape(region.size, ALIGN, description.swizzle) if description else Shape(region.size)


def load(
    i: PtxInstruction, to: Operand, bar: Operand, masks: Sequence[Operand], source: Bytes, reduction: Reduction | None = None
) -> Plan:
    """Decodes a copy into shared memory, with an mbarrier; `masks`: the ranks of a multicast."""
    target, target_offset = address_arg(to, "shared")
    barrier, barrier_offset = address_arg(bar, "shared")
    if len(masks) != ("multicast::cluster" in i.mods):
        raise Unsupported("operands that do not fit the modifiers")

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        there, bars, *others = values_of(frame, ins)
        values, mask = others[: len(source.args)], others[len(source.args) :]
        bulks, lanes = frame.machine.bulks, frame.lanes
        for at, region in source.find(frame, lanes, values):
            some = lanes.subset(at)
            ends = there[at] + target_offset, bars[at] + barrier_offset, mask[0][at] if mask else None
            arrival = bulks.ends.arrival(some, ends, shape_of(region), i)
            if arrival is not None:
                rows, to = arrival
                bulks.load(some.subset(rows), region.take(rows), to, i, reduction)

    return act(run, (), (target, barrier, *source.args, *args("u16", *masks)))


def store_bulk(i: PtxInstruction, origin: Operand, target: Bytes, reduction_of: Callable[[Region], Reduction | None]) -> Plan:
    """Decodes a copy from the block's shared memory into a tensor, in a bulk group."""
    base, offset = address_arg(origin, "shared")

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        here, *values = values_of(frame, ins)
        bulks, lanes = frame.machine.bulks, frame.lanes
        for at, region in target.find(frame, lanes, values):
            assert isinstance(region, Region)
            some = lanes.subset(at)
            try:
                reduction = reduction_of(region)
            except PtxError as error:
                frame.machine.memory.findings.report(BAD, str(error), i, some)
                continue
            found = bulks.ends.own(some, here[at] + offset, shape_of(region), i)
            if found is not None and bulks.ends.writable(region.segment, some, i):
                bulks.store(some.subset(found[0]), found[1], region.take(found[0]), i, reduction)

    return act(run, (), (base, *target.args))


def prefetch(source: Bytes) -> Plan:
    """Decodes a prefetch into the L2 cache: the bytes are checked, nothing is counted."""
    return act(lambda frame, out, ins: source.find(frame, frame.lanes, values_of(frame, ins)), (), source.args)


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


def reduction_for(name: str, region: Region) -> Reduction:
    """Returns a reduction of a map's elements. Raises PtxError if PTX ISA has none of that type."""
    assert region.description is not None
    dtype = region.description.dtype
    for kind in ELEMENTS.get(dtype, ()):
        if kind in reduced_types(name, True).split():
            return reduction(name, TYPES[kind])
    raise PtxError(f"there is no reduction .{name} of a tensor map of {dtype}")


def map_prefetch(i: PtxInstruction) -> Plan:
    """prefetch.tensormap: the map is checked; its address is one of .param if the instruction names that."""
    (memory,) = i.operands
    param = bool({"param", "param::entry"} & set(i.mods))
    base, offset = address_arg(memory, "param" if param else "generic")

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        (address,) = values_of(frame, ins)
        generic = address + offset | (PARAM_WINDOW if param else 0)
        frame.machine.bulks.maps.find(frame.lanes, generic, 0, i)

    return act(run, (), (base,))


# -- tensor maps in memory -------------------------------------------------------------------------------------------------

PIECE = 16
"""Bytes of a map that one access moves."""

NUMBERED = ("box_dim", "global_dim", "global_stride", "element_stride")
"""Fields with a value for each dimension."""

CHOSEN = {
    "elemtype": ("dtype", (*range(8), 10, 8, 9, 11, 12)),
    "interleave_layout": ("interleave", (0, 1, 2)),
    "swizzle_mode": ("swizzle", (0, 1, 2, 3)),
    "fill_mode": ("fill", (0, 1)),
}
"""Fields that take a constant, and the driver's numbers of what the instruction's numbers mean."""


@opcode(
    "tensormap",
    forms=".replace.tile of all fields but .swizzle_atomicity, .global .shared::cta, generic; .cp_fenceproxy from .shared::cta to "
    ".global",
)
def tensormap(i: PtxInstruction) -> Plan:
    return copy_map(i) if "cp_fenceproxy" in i.mods else replace_field(i)


def replace_field(i: PtxInstruction) -> Plan:
    """tensormap.replace: a map with another value of one field, which takes the place of the whole map."""
    _, _, field, space, _, kind = taken(
        i, "!replace", "!tile", f"!global_address rank {' '.join((*NUMBERED, *CHOSEN))}", "global shared::cta", "!b1024", "!b32 b64"
    )
    memory, *rest = i.operands
    ordinal = constant(rest.pop(0), range(5)) if field in NUMBERED else 0
    (value,) = rest
    name = field
    if field in CHOSEN:
        name, meant = CHOSEN[field]
        value = Imm(meant[constant(value, range(len(meant)))])
    where = {"": "generic", "shared::cta": "shared"}.get(space, space)
    base, offset = address_arg(memory, where)

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        lanes, (addresses, values) = frame.lanes, spread(frame, ins)
        addresses = addresses + addresses.dtype.type(offset)
        found = loaded(frame, i, where, lanes, addresses)
        for k, number in enumerate(values.tolist()):
            made = replaced(found[k].tobytes(), name, ordinal, number)
            if isinstance(made, str):
                one = lanes.subset(np.array([k]))
                frame.machine.memory.findings.report("bad tensor map", made, i, one, address=int(addresses[k]))
                continue
            found[k] = np.frombuffer(made, np.uint8)
        stored(frame, i, where, lanes, addresses, found)

    return act(run, (), (base, *args(kind, value)))


def copy_map(i: PtxInstruction) -> Plan:
    """tensormap.cp_fenceproxy: a warp copies a map from shared to global memory, and its stores are fenced for the map's use."""
    spaces = "!global", "!shared::cta", "!tensormap::generic"
    taken(i, "!cp_fenceproxy", *spaces, "!release", "!cta cluster gpu sys", "!sync", "!aligned")
    (to, to_offset), (source, offset) = address_arg(i.operands[0], "global"), address_arg(i.operands[1], "shared")
    constant(i.operands[2], range(MAP_BYTES, MAP_BYTES + 1))

    def run(frame: Frame, out: Arrays, ins: Arrays) -> None:
        there, here = spread(frame, ins)
        first = run_starts(frame.lanes.warp)
        lanes = frame.lanes.subset(first)
        found = loaded(frame, i, "shared", lanes, here[first] + here.dtype.type(offset))
        stored(frame, i, "global", lanes, there[first] + there.dtype.type(to_offset), found)
        frame.machine.bulks.maps.release(frame.lanes)

    return act(run, (), (to, source), collective=WHOLE_WARP)


def loaded(frame: Frame, i: PtxInstruction, space: str, lanes: LaneSet, addresses: Array) -> Array:
    """Returns the bytes of the lanes' maps, (lanes, bytes)."""
    found = np.zeros((lanes.n, MAP_BYTES), np.uint8)
    for at in range(0, MAP_BYTES, PIECE):
        port = make_port(frame, i, space, PIECE, "ld")
        pieces = np.zeros(lanes.n, ELEMENT[PIECE])
        for view, index, positions in port.resolve(lanes, addresses + addresses.dtype.type(at)):
            pieces[slice(None) if positions is None else positions] = view[index]
        found[:, at : at + PIECE] = pieces.view(np.uint8).reshape(lanes.n, PIECE)
    return found


def stored(frame: Frame, i: PtxInstruction, space: str, lanes: LaneSet, addresses: Array, maps: Array) -> None:
    """Stores the lanes' maps."""
    for at in range(0, MAP_BYTES, PIECE):
        pieces = np.ascontiguousarray(maps[:, at : at + PIECE]).view(ELEMENT[PIECE]).reshape(lanes.n)
        store(make_port(frame, i, space, PIECE, "st"), lanes, addresses + addresses.dtype.type(at), pieces)


def constant(operand: Operand, allowed: range) -> int:
    """Returns a constant operand. Raises Unsupported for another one."""
    if not isinstance(operand, Imm) or operand.value not in allowed:
        raise Unsupported(f"expected a constant from {allowed.start} to {allowed.stop - 1}")
    return int(operand.value)


# -- st.async, red.async -----------------------------------------------------------------------------------------------------

MODIFIERS = ("!async", "!shared::cluster", "!mbarrier::complete_tx::bytes")

Put = Callable[[Array, Array, Array], None]
"""Puts data (one a lane) into elements of shared memory: (memory, index, data)."""


@opcode(
    "st.async", forms="{.weak}.shared::cluster.mbarrier::complete_tx::bytes {.v2 .v4} .b32 .b64 .u32-.s64 .f32 .f64, up to 16 bytes"
)
def st_async(i: PtxInstruction) -> Plan:
    vector = taken(i, "v2 v4", *MODIFIERS, "weak", "!b32 b64 u32 u64 s32 s64 f32 f64")[0]
    registers = items(i.operands[1], int(vector[1:] or 1))
    return delivered(i, "cp.async", registers, np.ndarray.__setitem__)


@opcode("red.async", forms=".relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes .add .min .max .inc .dec .and .or .xor")
def red_async(i: PtxInstruction) -> Plan:
    name = taken(i, f"!{' '.join(INTEGER_OPS)}", *MODIFIERS, "!relaxed", "!cluster", "!b32 u32 s32 u64")[0]
    if i.type.name not in reduced_types(name, False).split():
        raise Unsupported(f"red.async.{name} of .{i.type.name}")
    fn = update(name, i.type)

    def put(memory: Array, index: Array, data: Array) -> None:
        for at in rounds(index):
            memory[index[at]] = fn(memory[index[at]], data[at], data[at])

    return delivered(i, "atom", items(i.operands[1], 1), put)


def delivered(i: PtxInstruction, kind: str, registers: tuple[Operand, ...], put: Put) -> Plan:
    """Returns the plan of accesses of this kind whose bytes an mbarrier counts."""
    bits = f"b{i.type.bits}"
    count, size = len(registers), len(registers) * i.type.bytes
    if size > 16:
        raise Unsupported(f"{i.name} of {size} bytes")
    if len(i.operands) != 3 or SINK in registers:
        raise Unsupported("operands that do not fit the modifiers")
    target, offset = address_arg(i.operands[0], "shared::cluster")
    barrier, barrier_offset = address_arg(i.operands[2], "shared::cluster")

    def bind(frame: Frame, out: Arrays, ins: Arrays) -> Thunk:
        address, bars = (address_thunk(frame, *each) for each in ((ins[0], offset), (ins[1], barrier_offset)))
        port = make_port(frame, i, "shared::cluster", size, kind)
        memory, mbarriers, ends = frame.machine.memory, frame.machine.mbarriers, frame.machine.bulks.ends

        def run() -> None:
            lanes, data, index = frame.lanes, np.empty(frame.n, ELEMENT[size]), np.full(frame.n, -1, np.int64)
            columns = data.view(TYPES[bits].dtype).reshape(frame.n, count)
            for column, value in zip(columns.T, ins[2:], strict=True):
                column[:] = value
            to = address()
            for _, elements, positions in port.resolve(lanes, to):
                index[slice(None) if positions is None else positions] = elements
            there = Spot.of(lanes, bars())
            rows = np.flatnonzero((index >= 0) & ends.barriers(lanes, Spot.of(lanes, to), there, i))
            keys = (there.blocks * memory.shared_stride + there.offsets) >> 3
            for key, at in mbarriers.each(keys[rows]) if len(rows) else ():
                some = rows[at]
                issue(mbarriers, lanes.subset(some), key, i, (index[some], data[some]), put)

        return run

    return Plan((), (target, barrier, *args(bits, *registers)), bind, pure=False)


def issue(mbarriers: MBarriers, lanes: LaneSet, key: int, i: PtxInstruction, what: tuple[Array, Array], put: Put) -> None:
    """Starts the accesses of lanes to elements of shared memory, (index, data), that one mbarrier counts."""
    barrier, memory, (index, data) = mbarriers.find(key, lanes, i), mbarriers.memory, what
    if barrier is None:
        return
    size, plain = data.itemsize, i.opcode == "st"
    if plain:
        memory.states[size][index] = element(IN_FLIGHT, size)
        memory.unsettle()
        memory.landing += 1

    def land() -> None:
        put(memory.shared[size], index, data)
        races = mbarriers.races
        if plain:
            barrier.unseen.append((barrier.phase, size, index))
        if races is not None:
            if plain:
                races.landed(lanes, size, index)
            for lane in lanes.index.tolist():
                barrier.told = races.copied_clock(lane, barrier.told)
        mbarriers.brought(key, size * lanes.n, lanes, i)

    mbarriers.defer(lanes, key, land, i)
