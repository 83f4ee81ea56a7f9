"""cp.async.bulk: whole ranges and boxes between global and shared memory, copied asynchronously.

PTX ISA, "Data Movement: Bulk copy", "Bulk tensor copy". A copy into shared memory tells an mbarrier how many bytes it brought; one
into global memory belongs to a bulk group of its thread. All copies that lanes issue together are checked, counted and ordered
together; the bytes move when somebody waits for them, or with a seed at any moment before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from cupyflash.words import plural

from ..order.accesses import ShadowAccess, TileAccess, Touch
from ..report.findings import ERROR, Verdict
from ..state.lanes import LaneSet, Wave
from ..state.segments import IN_FLIGHT, UNWRITTEN, WINDOW_BITS, WRITTEN, Access, Segment
from ..text.syntax import Array, PtxInstruction
from .mbarriers import MBarriers
from .ports import NOBODY, element, targets
from .regions import CHUNK, Maps, Region, Tile, byte_region, extent
from .spaces import LaunchMemory, MemoryUnit


@dataclass(frozen=True)
class Shape:
    """The shape of tiles in shared memory: bytes, the alignment of their addresses, and the swizzle."""

    size: int
    align: int = CHUNK
    swizzle: int = 0


@dataclass(frozen=True)
class Spot:
    """Addresses of tiles, one each: the lane (row) that copies, the block of the wave, the offset in its shared memory."""

    row: Array
    blocks: Array
    offsets: Array

    @classmethod
    def of(cls, lanes: LaneSet, addresses: Array) -> Spot:
        return cls(np.arange(lanes.n), *targets(lanes, addresses))

    def take(self, at: Array) -> Spot:
        return Spot(self.row[at], self.blocks[at], self.offsets[at])


@dataclass(frozen=True)
class Arrival:
    """Destinations of loads, one entry each: the copy (row) it belongs to, the tile, and its mbarrier's key."""

    row: Array
    tile: Tile
    keys: Array


class Ends(MemoryUnit):
    """The checks of both ends of a wave's bulk copies."""

    def __init__(self, wave: Wave, memory: LaunchMemory, mbarriers: MBarriers):
        super().__init__(memory)
        self.wave, self.mbarriers = wave, mbarriers
        self.room = memory.shared_size - memory.reserved
        """Bytes of shared memory that a block may use."""

    # -- tensors ------------------------------------------------------------------------------------------------------------

    def ranges(self, lanes: LaneSet, addresses: Array, sizes: Array, i: PtxInstruction) -> list[tuple[Array, Region]]:
        """Returns plain bytes of tensors, together where size and tensor are the same: (positions of their lanes, region)."""
        found: list[tuple[Array, Region]] = []
        crooked = (addresses | sizes) % CHUNK != 0
        if crooked.any():
            first = int(np.flatnonzero(crooked)[0])
            message = f"{i.name} of {plural(int(sizes[first]), 'byte')}: addresses and size are multiples of {CHUNK}"
            self.report("misaligned", message, lanes, np.flatnonzero(crooked), i)
        numbers = addresses >> WINDOW_BITS
        for number, size in sorted(set(zip(numbers[~crooked].tolist(), sizes[~crooked].tolist(), strict=True))):
            at = np.flatnonzero(~crooked & (numbers == number) & (sizes == size))
            segment = self.memory.segments.get(number)
            if segment is None:
                message = f"{i.name} of {plural(size, 'byte')} at {int(addresses[at[0]]):#x} of no tensor"
                self.report("out of bounds", message, lanes, at, i)
            elif size:
                region = byte_region(segment, addresses[at], size)
                found += self.inside(lanes, at, region, i)
        return found

    def own_ranges(self, lanes: LaneSet, addresses: Array, sizes: Array, i: PtxInstruction) -> list[tuple[Array, Tile]]:
        """Returns bytes of the lanes' own shared memory, together where sizes are the same: (positions of their lanes, tiles)."""
        found: list[tuple[Array, Tile]] = []
        for size in set(sizes.tolist()):
            at = np.flatnonzero(sizes == size)
            if size % CHUNK:
                message = f"{i.name} of {plural(size, 'byte')}: the size is a multiple of {CHUNK}"
                self.report("misaligned", message, lanes, at, i)
            elif size and (good := self.own(lanes.subset(at), addresses[at], Shape(size), i)):
                found.append((at[good[0]], good[1]))
        return found

    def inside(self, lanes: LaneSet, at: Array, region: Region, i: PtxInstruction) -> list[tuple[Array, Region]]:
        """Returns the copies by lanes `at` that stay within the bytes of their tensor."""
        segment, bad = region.segment, region.outside()
        if not len(bad):
            return [(at, region)]
        where = f"{segment.name!r}, which has {plural(segment.size, 'byte')}"
        first = int(region.starts[np.flatnonzero(region.row == bad[0])].max()) - segment.start
        message = f"{i.name} of {plural(region.size, 'byte')}, some at offset {first:#x} of {where}"
        self.report("out of bounds", message, lanes, at[bad], i, segment.name)
        good = np.setdiff1d(np.arange(len(at)), bad)
        return [(at[good], region.take(good))] if len(good) else []

    def writable(self, segment: Segment, lanes: LaneSet, i: PtxInstruction) -> bool:
        if not segment.writable:
            message = f"{i.name} to {segment.name!r}, which is read-only"
            self.findings.report("read-only", message, i, lanes)
        return segment.writable

    # -- shared memory ------------------------------------------------------------------------------------------------------

    def own(self, lanes: LaneSet, addresses: Array, shape: Shape, i: PtxInstruction) -> tuple[Array, Tile] | None:
        """Returns tiles of the lanes' own blocks: (positions of the lanes, tiles)."""
        spot = Spot.of(lanes, addresses)
        foreign = np.flatnonzero(spot.blocks != lanes.block)
        if len(foreign):
            message = f"{i.name} of another block's shared memory: the source is the own block's"
            self.report("out of bounds", message, lanes, foreign, i)
        good = np.flatnonzero(self.places(lanes, spot, shape, i) & (spot.blocks == lanes.block))
        if not len(good):
            return None
        return good, Tile.of(self.memory, spot.blocks[good], spot.offsets[good], shape.size, shape.swizzle)

    def arrival(
        self, lanes: LaneSet, ends: tuple[Array, Array, Array | None], shape: Shape, i: PtxInstruction
    ) -> tuple[Array, Arrival] | None:
        """Returns destinations of copies: (positions of the lanes, tiles and mbarriers). `ends`: addresses of the tiles, of the
        mbarriers, and masks of the ranks of a multicast.
        """
        to, bar, masks = ends
        spot, barrier = Spot.of(lanes, to), Spot.of(lanes, bar)
        if masks is not None:
            spot, barrier = self.spread(lanes, spot, barrier, masks, i)
        good = self.places(lanes, spot, shape, i) & self.barriers(lanes, spot, barrier, i)
        if not good.any():
            return None
        spot, barrier = spot.take(np.flatnonzero(good)), barrier.take(np.flatnonzero(good))
        keys = (barrier.blocks * self.memory.shared_stride + barrier.offsets) >> 3
        at, row = np.unique(spot.row, return_inverse=True)
        tile = Tile.of(self.memory, spot.blocks, spot.offsets, shape.size, shape.swizzle)
        self.mbarriers.used_by_copy(keys, lanes, spot.row, i)
        return at, Arrival(row, tile, keys)

    def spread(self, lanes: LaneSet, spot: Spot, barrier: Spot, masks: Array, i: PtxInstruction) -> tuple[Spot, Spot]:
        """Spreads a multicast: the same offsets in each block of the cluster whose bit is set."""
        cluster = self.wave.cluster
        beyond = np.flatnonzero(masks >> cluster)
        if len(beyond):
            message = f"multicast to the blocks of mask {int(masks[beyond[0]]):#x}: the cluster has {plural(cluster, 'block')}"
            self.report("out of bounds", message, lanes, beyond, i)
        row, rank = np.nonzero(masks[:, None] >> np.arange(cluster) & 1)
        blocks = lanes.block[row] // cluster * cluster + rank
        return Spot(row, blocks, spot.offsets[row]), Spot(row, blocks, barrier.offsets[row])

    def places(self, lanes: LaneSet, spot: Spot, shape: Shape, i: PtxInstruction) -> Array:
        """Returns a mask of the tiles in the shared memory of a living block; the others are findings."""
        blocks, offsets = spot.blocks, spot.offsets
        room = self.room - extent(shape.size, shape.swizzle)
        checks: Sequence[tuple[str, Array, str]] = (
            ("out of bounds", blocks == NOBODY, "the address names a block outside of the cluster"),
            ("misaligned", offsets % shape.align != 0, f"the address is no multiple of {shape.align}"),
            ("out of bounds", (offsets < 0) | (offsets > room), f"it has {plural(self.room, 'byte')}"),
            ("exited block", self.wave.alive_by_block[blocks] == 0, "the block that is to get it has exited"),
        )
        strays = (offsets >= 0) & (offsets <= room) & self.memory.strays(i, offsets, shape.size)
        if strays.any():
            why = self.memory.strayed(i, int(offsets[strays][0])).removeprefix(": ")
            checks = (*checks, ("out of bounds", strays, why))
        what = f"{i.name} of {plural(shape.size, 'byte')}"
        return self.judged(checks, lanes, spot, i, lambda at: f"{what} at {int(offsets[at]):#x} of shared memory: ")

    def barriers(self, lanes: LaneSet, spot: Spot, barrier: Spot, i: PtxInstruction) -> Array:
        """Returns a mask of the mbarriers in bounds and in their tile's block; the others are findings."""
        checks = (
            ("misaligned", barrier.offsets % 8 != 0, "is not aligned to 8 bytes"),
            ("out of bounds", (barrier.offsets < 0) | (barrier.offsets > self.room - 8), "is not in shared memory"),
            ("out of bounds", barrier.blocks != spot.blocks, "is not in the block that gets the bytes"),
        )
        return self.judged(checks, lanes, spot, i, lambda at: f"{i.name}: the mbarrier at {int(barrier.offsets[at]):#x} ")

    def judged(
        self, checks: Sequence[tuple[str, Array, str]], lanes: LaneSet, spot: Spot, i: PtxInstruction, subject: Callable[[int], str]
    ) -> Array:
        """Returns a mask of the ends that pass all checks (kind, wrong ends, message); `subject` names the first that does not."""
        good = np.ones(len(spot.row), bool)
        for kind, wrong, why in checks:
            bad = np.flatnonzero(good & wrong)
            if len(bad):
                self.report(kind, subject(int(bad[0])) + why, lanes, spot.row[bad], i)
                good[bad] = False
        return good

    def report(self, kind: str, message: str, lanes: LaneSet, at: Array, i: PtxInstruction, tensor: str | None = None) -> None:
        self.findings.report(kind, message, i, lanes, at, tensor=tensor)


Update = Callable[[Array, Array, Array], Array]
"""A reduction: old value, operand, and an unused third argument."""


READ, DONE = 1, 2
"""The states that a thread has waited for: its copy has read its source; it is over."""


@dataclass(frozen=True)
class Reduction:
    """A copy's operation in place of a store: `update` on elements of this dtype (of the raw bits)."""

    update: Update
    dtype: np.dtype[np.unsignedinteger]

    def __call__(self, old: Array, data: Array) -> Array:
        """Returns chunks (size // CHUNK) of the new values."""
        operand = np.ascontiguousarray(data).view(self.dtype)
        return self.update(np.ascontiguousarray(old).view(self.dtype), operand, operand).view(data.dtype)


@dataclass(eq=False)
class BulkLoad:
    """Copies into shared memory on their way, issued together by `lanes`, one each; a multicast has several destinations."""

    bulks: Bulks
    lanes: LaneSet
    source: Region | Tile
    to: Arrival
    instruction: PtxInstruction
    reduction: Reduction | None
    readings: list[Touch]
    target: TileAccess | None
    moved: bool = False

    def move(self) -> None:
        """Moves all bytes at once: later destinations are marked in flight, so that nobody may read them yet."""
        self.moved = True
        memory, tile = self.bulks.memory, self.to.tile
        data = self.bulks.fetch(self.source)
        if len(self.to.row) != len(data):
            data = data[self.to.row]  # a multicast
        shared = memory.shared[CHUNK]
        if self.reduction is None:
            shared[tile.chunks] = data
        else:
            for chunks, operand in zip(tile.chunks, data, strict=True):
                shared[chunks] = self.reduction(shared[chunks], operand)
        description = self.source.description if isinstance(self.source, Region) else None
        starts = tile.blocks * memory.shared_stride + tile.offsets
        if description is None:
            memory.swizzles.forget(starts, tile.size)
        else:
            memory.swizzles.landed(starts, tile.size, f"{tile.swizzle} bytes" if tile.swizzle else "none")
        if memory.races is not None and self.target is not None and self.reduction is None:
            memory.races.stamp(self.target)

    def land(self, at: int) -> None:
        """Marks destination `at` as written, and tells its mbarrier."""
        if not self.moved:
            self.move()
        memory, mbarriers = self.bulks.memory, self.bulks.mbarriers
        row, key = int(self.to.row[at]), int(self.to.keys[at])
        lane = self.lanes.subset(np.array([row]))
        races, found = memory.races, mbarriers.objects.get(key)
        if self.reduction is None and found is not None:
            found.unseen.append((found.phase, self.to.tile.chunks[at]))
        if races is not None and found is not None:
            # The copy is over for each lane that sees the phase complete.
            if self.readings:
                races.copied(lane, self.readings)
            found.told = races.copied_clock(int(lane.index[0]), found.told)
        mbarriers.brought(key, self.to.tile.size, lane, self.instruction)


@dataclass(eq=False)
class BulkStore:
    """Copies to a tensor on their way, issued together by `lanes`, one each; `group`: the commits that each had done before.

    read, written: events so far; known: the states that the threads have waited for, READ or DONE.
    """

    lanes: LaneSet
    group: Array
    source: Tile
    to: Region
    instruction: PtxInstruction
    reduction: Reduction | None
    readings: list[Touch]
    target: ShadowAccess | None
    data: Array = field(init=False)
    read: Array = field(init=False)
    written: Array = field(init=False)
    known: Array = field(init=False)

    def __post_init__(self) -> None:
        self.data = np.empty(self.source.chunks.shape, np.complex128)
        self.read, self.written = np.zeros(self.lanes.n, bool), np.zeros(self.lanes.n, bool)
        self.known = np.zeros(self.lanes.n, np.int8)

    def wait(self, memory: LaunchMemory, rows: Array, upto: int) -> None:
        """Records that the threads of these rows have waited for the sources, or for all."""
        races = memory.races
        self.fetch(memory, rows)
        fresh = rows[self.known[rows] < READ]
        if len(fresh) and races is not None:
            races.copied(self.lanes.subset(fresh), self.readings)
        if upto == DONE:
            self.put(memory, rows)
            if self.target is not None and races is not None:
                races.written(self.target, self.lanes.index[rows[self.known[rows] < DONE]])
        self.known[rows] = np.maximum(self.known[rows], upto)

    def fetch(self, memory: LaunchMemory, rows: Array) -> None:
        """Reads the sources of some rows, if that has not happened yet."""
        rows = rows[~self.read[rows]]
        if len(rows):
            self.data[rows] = memory.shared[CHUNK][self.source.chunks[rows]]
            self.read[rows] = True

    def put(self, memory: LaunchMemory, rows: Array) -> None:
        """Writes the bytes that rows have read, if that has not happened yet."""
        self.fetch(memory, rows)
        rows = rows[~self.written[rows]]
        if not len(rows):
            return
        self.written[rows] = True
        if self.reduction is None:
            self.to.put(self.data, rows)
            return
        for row in rows.tolist():  # they may meet at the same elements
            one = self.to.take(np.array([row]))
            view = one.segment.window(one.unit)[0]
            old = view.take(one.index, mode="clip").view(self.data.dtype)
            one.put(self.reduction(old[0], self.data[row])[None], np.array([0]))


class Bulks(MemoryUnit):
    """The bulk copies of a wave."""

    def __init__(self, wave: Wave, memory: LaunchMemory, mbarriers: MBarriers, maps: Maps):
        super().__init__(memory)
        self.wave, self.mbarriers = wave, mbarriers
        self.ends = Ends(wave, memory, mbarriers)
        self.maps = maps
        self.committed = np.zeros(wave.size, np.int64)
        self.stores: list[BulkStore] = []
        self._member = np.zeros(wave.size, bool)

    # -- issue ------------------------------------------------------------------------------------------------------------

    def load(
        self, lanes: LaneSet, source: Region | Tile, to: Arrival, i: PtxInstruction, reduction: Reduction | None = None
    ) -> None:
        """Issues checked copies into shared memory, one a lane."""
        memory, tile = self.memory, to.tile
        readings = self.reading(lanes, source, i)
        self.count(tile, i)
        target = None
        if memory.lifetimes is not None:
            remote = np.flatnonzero(tile.blocks != lanes.block[to.row])
            for block in np.unique(tile.blocks[remote]).tolist():
                rows = np.unique(to.row[remote[tile.blocks[remote] == block]])
                memory.lifetimes.touch(lanes.subset(rows), np.full(len(rows), block), i)
        if memory.races is not None:
            target = memory.races.tile_access(lanes, to.row, tile.chunks, tile.offsets, i)
            memory.races.judge(target, "cp.async" if reduction is None else "atom")
        if reduction is None:
            memory.states[CHUNK][tile.chunks] = element(IN_FLIGHT, CHUNK)
            memory.unsettle(tile.blocks * memory.shared_stride + tile.offsets, extent(tile.size, tile.swizzle))
            memory.landing += len(to.row)
        copy = BulkLoad(self, lanes, source, to, i, reduction, readings, target)
        for at, (row, key) in enumerate(zip(to.row.tolist(), to.keys.tolist(), strict=True)):
            self.mbarriers.defer(lanes.subset(np.array([row])), key, partial(copy.land, at), i)

    def store(self, lanes: LaneSet, source: Tile, to: Region, i: PtxInstruction, reduction: Reduction | None = None) -> None:
        """Issues checked copies into a tensor, one a lane."""
        memory, segment = self.memory, to.segment
        readings = self.reading(lanes, source, i, to)
        self.count(source, i)
        size = int(to.lengths.sum())
        memory.tally.traffic[i, segment].count_side(True, size, lanes.n, to.sectors(), size)
        self.show(lanes, to, True, i)
        target = None
        if memory.races is not None:
            target = memory.races.piece_access(lanes, segment, to.starts, to.lengths, to.row, i)
            if target is not None:
                memory.races.judge(target, "st" if reduction is None else "atom")
                if reduction is None:
                    memory.races.issue(target, target.shadow.landing)
        to.mark_written()
        target = target if reduction is None else None
        self.stores.append(BulkStore(lanes, self.committed[lanes.index], source, to, i, reduction, readings, target))

    # -- groups -----------------------------------------------------------------------------------------------------------

    def commit(self, lanes: LaneSet) -> None:
        self.committed[lanes.index] += 1

    def wait(self, lanes: LaneSet, newest: int | None, read: bool) -> None:
        """Waits until at most `newest` (None: 0) of the threads' newest groups are pending, or (`read`) have not yet read."""
        for store, due in self.due(lanes, self.committed - (newest or 0)):
            store.wait(self.memory, due, READ if read else DONE)
        self.stores = [store for store in self.stores if (store.known < DONE).any()]

    def due(self, lanes: LaneSet, limit: Array) -> list[tuple[BulkStore, Array]]:
        """Returns the stores of these threads in groups below the limit: (store, rows)."""
        if not self.stores:
            return []
        self._member[lanes.index] = True
        found = []
        for store in self.stores:
            mine = self._member[store.lanes.index] & (store.group < limit[store.lanes.index])
            if mine.any():
                found.append((store, np.flatnonzero(mine)))
        self._member[lanes.index] = False
        return found

    def leave(self, lanes: LaneSet) -> None:
        """Ends the threads; their copies must have read shared memory by now, for the block's may go to another."""
        for store, due in self.due(lanes, self.committed + 1):
            late = due[store.known[due] < READ]
            if len(late):
                name = store.instruction.name
                message = f"the thread exits before its {name} has read shared memory: a cp.async.bulk.wait_group.read is missing"
                verdict = Verdict("in flight", ERROR, mend="cp.async.bulk.wait_group.read 0 before the thread exits")
                self.findings.report(verdict, message, store.instruction, store.lanes, late)
            store.put(self.memory, due)
            store.known[due] = DONE
        self.stores = [store for store in self.stores if (store.known < DONE).any()]

    def stir(self, random: np.random.Generator) -> None:
        """Advances some copies: seeded runs call this between stretches."""
        for store in self.stores:
            if random.random() < 0.25:
                some = np.flatnonzero(random.random(store.lanes.n) < 0.5)
                store.fetch(self.memory, some)
                if random.random() < 0.5:
                    store.put(self.memory, some)

    # -- counts --------------------------------------------------------------------------------------------------

    def fetch(self, source: Region | Tile) -> Array:
        return source.fetch() if isinstance(source, Region) else self.memory.shared[CHUNK][source.chunks]

    def reading(self, lanes: LaneSet, source: Region | Tile, i: PtxInstruction, to: Region | None = None) -> list[Touch]:
        """Checks, counts and notes the reads of copies, which last until the copies are over.

        Bytes that a store leaves out, as they would go `to` outside of the tensor, may be anything.
        """
        memory, races = self.memory, self.races
        if isinstance(source, Region):
            fresh, name = source.unwritten(), source.segment.name
            what = f"{name!r}, which"
            size = int(source.lengths.sum())
            memory.tally.traffic[i, source.segment].count_side(False, size, lanes.n, source.sectors(), size)
            self.show(lanes, source, False, i)
        else:
            states = memory.states[CHUNK][source.chunks].view(np.uint8)
            if to is not None and to.inside is not None:
                states[~np.repeat(to.inside, to.unit, axis=1)] = WRITTEN
            fresh, what, name = np.flatnonzero((states == UNWRITTEN).any(axis=1)), "shared memory that", None
            flying = np.flatnonzero((states == IN_FLIGHT).any(axis=1))
            if len(flying):
                message = f"{i.name} reads shared memory: the asynchronous copy to it has not been waited for"
                memory.findings.report("in flight", message, i, lanes, flying)
        if len(fresh):
            message = f"{i.name} reads {what} nobody wrote"
            memory.findings.report("uninitialised", message, i, lanes, fresh, tensor=name)
        if races is None:
            return []
        access = (
            races.piece_access(lanes, source.segment, source.starts, source.lengths, source.row, i)
            if isinstance(source, Region)
            else races.tile_access(lanes, np.arange(lanes.n), source.chunks, source.offsets, i)
        )
        if access is None:
            return []
        races.judge(access, "ld")
        return races.issued()

    def show(self, lanes: LaneSet, region: Region, write: bool, i: PtxInstruction) -> None:
        """Shows the observer the bytes that each copy reads or writes of a tensor."""
        observer = self.memory.observer
        if observer is None:
            return
        for at in range(lanes.n):
            own, lane = region.row == at, lanes.subset(np.array([at]))
            observer(Access(lane, "global", region.segment, region.starts[own], region.lengths[own], "cp.async.bulk", write, i))

    def count(self, tile: Tile, i: PtxInstruction) -> None:
        """Counts accesses to shared memory, without conflicts: 128 bytes a wavefront."""
        n = len(tile.blocks)
        passes = -(-tile.size // 128) * n
        self.memory.tally.shared[i, "cp.async.bulk", tile.size].count(n, tile.size * n, passes, passes)
