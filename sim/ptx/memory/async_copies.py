"""Asynchronous copies in flight: cp.async and cp.async.bulk.

cp.async copies a few bytes a lane from global to shared memory (PTX ISA, "Data Movement: Non-bulk asynchronous copy"). A copy is
checked and counted at its issue. Its bytes are read and written when it lands: without a seed at its wait, as late as allowed, so
that a missing wait shows; with a seed at a random moment before. Until its thread waits, the destination counts as in flight.

cp.async.bulk copies whole ranges and boxes between global and shared memory (PTX ISA, "Data Movement: Bulk copy", "Bulk tensor
copy"). A copy into shared memory tells an mbarrier how many bytes it brought; one into global memory belongs to a bulk group of its
thread. All copies that lanes issue together are checked, counted and ordered together; the bytes move when somebody waits for them,
or with a seed at any moment before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from ..order.shadow import ShadowAccess, TileAccess, Touch
from ..state.findings import ERROR, Verdict
from ..state.lane_sets import LaneSet, Wave
from ..state.segments import IN_FLIGHT, UNWRITTEN, WRITTEN, Access
from ..text.syntax import ELEMENT, Array, PtxInstruction
from .mbarriers import MBarriers
from .ports import Part, element
from .regions import CHUNK, Arrival, Ends, Maps, Region, Tile, extent
from .spaces import LaunchMemory, MemoryUnit


@dataclass
class PendingCopy:
    """One executed cp.async. Arrays have one entry a lane: `group` is the number of commits its thread had done; `landed`, `over`:
    masks of the lanes whose bytes have moved, and that have waited. `readings`: the race detector's record of its sources.
    """

    lanes: LaneSet
    size: int
    destination: Array
    whole: list[Part]
    pieces: list[Part]
    sizes: Array | None
    group: Array
    landed: Array
    over: Array
    readings: list[Touch]
    serial: int

    def data(self) -> Array:
        """Returns the bytes of every lane: whole copies, pieces with zeros behind them, zeros."""
        if len(self.whole) == 1 and self.whole[0][2] is None:
            return self.whole[0][0][self.whole[0][1]]
        out = np.zeros((self.lanes.n, self.size), np.uint8)
        for view, index, positions in self.whole:
            rows = positions if positions is not None else slice(None)
            out[rows] = view[index].view(np.uint8).reshape(-1, self.size)
        for view, index, positions in self.pieces:
            assert self.sizes is not None and positions is not None
            for row, start in zip(positions.tolist(), index.tolist(), strict=True):
                count = int(self.sizes[row])
                out[row, :count] = view[start : start + count]
        return out.reshape(-1)


C = TypeVar("C", "PendingCopy", "BulkStore")


class CopyGroups(MemoryUnit):
    """Copies in groups: `committed` has the number of groups that each thread of the wave has closed."""

    def __init__(self, wave: Wave, memory: LaunchMemory):
        super().__init__(memory)
        self.committed = np.zeros(wave.size, np.int64)
        self._member = np.zeros(wave.size, bool)

    def commit(self, lanes: LaneSet) -> None:
        self.committed[lanes.index] += 1

    def due(self, copies: list[C], lanes: LaneSet, limit: Array) -> list[tuple[C, Array]]:
        """Returns each of the copies with a mask of its lanes that are among these, in a group below their limit."""
        if not copies:
            return []
        self._member[lanes.index] = True
        found = []
        for copy in copies:
            due = copy.group < limit[copy.lanes.index]
            if copy.lanes is not lanes:
                due &= self._member[copy.lanes.index]
            found.append((copy, due))
        self._member[lanes.index] = False
        return found


class Copies(CopyGroups):
    """The copies of a wave by cp.async."""

    def __init__(self, wave: Wave, memory: LaunchMemory, random: np.random.Generator | None):
        super().__init__(wave, memory)
        self.random = random
        self.pending: list[PendingCopy] = []
        self.serial = 0

    def issue(
        self, lanes: LaneSet, size: int, destination: Array, whole: list[Part], pieces: list[Part], sizes: Array | None
    ) -> None:
        group, (landed, over) = self.committed[lanes.index], np.zeros((2, lanes.n), bool)
        readings = self.races.issued() if self.races is not None else []
        copy = PendingCopy(lanes, size, destination, whole, pieces, sizes, group, landed, over, readings, self.serial)
        self.serial += 1
        self.memory.states[size][destination] = element(IN_FLIGHT, size)
        self.memory.unsettle()
        self.pending.append(copy)
        self.memory.flying = len(self.pending)

    def wait(self, lanes: LaneSet, newest: int | None) -> None:
        """Waits until at most `newest` of the threads' newest groups are pending (None: they close one, and wait for all)."""
        if newest is None:
            self.commit(lanes)
        self._finish(lanes, self.committed - (newest or 0), True)

    def land_before(self, lanes: LaneSet, serial: int) -> None:
        """Lands the copies that the threads issued before number `serial`, for an mbarrier."""
        later = [copy for copy in self.pending if copy.serial >= serial]
        self.pending = [copy for copy in self.pending if copy.serial < serial]
        self._finish(lanes, self.committed + 1, True)
        self.pending += later
        self.memory.flying = len(self.pending)

    def leave(self, lanes: LaneSet) -> None:
        """Ends the threads: their copies land, but nobody has waited for them."""
        self._finish(lanes, self.committed + 1, False)

    def _finish(self, lanes: LaneSet, limit: Array, waited: bool) -> None:
        kept = []
        for copy, due in self.due(self.pending, lanes, limit):
            due &= ~copy.over
            count = np.count_nonzero(due)
            if count == copy.lanes.n and not copy.landed.any():
                self.memory.shared[copy.size][copy.destination] = copy.data().view(ELEMENT[copy.size])
                if waited:
                    self._waited(copy, copy.lanes, copy.destination)
                continue
            if count:
                self._land(copy, due)
                if waited:
                    self._waited(copy, copy.lanes.subset(np.flatnonzero(due)), copy.destination[due])
                copy.over |= due
            if not copy.over.all():
                kept.append(copy)
        self.pending = kept
        self.memory.flying = len(kept)

    def _waited(self, copy: PendingCopy, lanes: LaneSet, destination: Array) -> None:
        self.memory.states[copy.size][destination] = element(WRITTEN, copy.size)
        if self.races is not None:
            self.races.landed(lanes, copy.size, destination)
            self.races.copied(lanes, copy.readings)

    def _land(self, copy: PendingCopy, due: Array) -> None:
        now = due & ~copy.landed
        if np.count_nonzero(now):
            target = self.memory.shared[copy.size]
            values = copy.data().view(target.dtype)
            target[copy.destination[now]] = values[now]
            copy.landed |= now

    def stir(self) -> None:
        """Lands some pending copies, wholly or in part: seeded runs call this between stretches."""
        assert self.random is not None
        for copy in self.pending:
            if self.random.random() < 0.25:
                self._land(copy, self.random.random(copy.lanes.n) < self.random.choice([0.5, 1.0]))


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
            found.unseen.append((found.phase, CHUNK, self.to.tile.chunks[at]))
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


class Bulks(CopyGroups):
    """The bulk copies of a wave."""

    def __init__(self, wave: Wave, memory: LaunchMemory, mbarriers: MBarriers, maps: Maps):
        super().__init__(wave, memory)
        self.wave, self.mbarriers = wave, mbarriers
        self.ends = Ends(wave, memory, mbarriers)
        self.maps = maps
        self.stores: list[BulkStore] = []

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
        for written in (True,) if reduction is None else (False, True):  # a reduction reads what it adds to, as an atomic does
            memory.tally.traffic[i, segment].count_side(written, size, lanes.n, to.sectors(), size)
            self.show(lanes, to, written, i)
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

    def wait(self, lanes: LaneSet, newest: int | None, read: bool) -> None:
        """Waits until at most `newest` (None: 0) of the threads' newest groups are pending, or (`read`) have not yet read."""
        for store, due in self.due(self.stores, lanes, self.committed - (newest or 0)):
            if due.any():
                store.wait(self.memory, np.flatnonzero(due), READ if read else DONE)
        self.stores = [store for store in self.stores if (store.known < DONE).any()]

    def leave(self, lanes: LaneSet) -> None:
        """Ends the threads; their copies must have read shared memory by now, for the block's may go to another."""
        for store, mask in self.due(self.stores, lanes, self.committed + 1):
            due = np.flatnonzero(mask)
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
