"""cp.async: copies from global to shared memory that land between their issue and their wait.

PTX ISA, "Data Movement: Non-bulk asynchronous copy". A copy is checked and counted at its issue. Its bytes are read
and written when it lands: without a seed at its wait, as late as allowed, so that a missing wait shows; with a seed at
a random moment before. Until its thread waits, the destination counts as in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..order.accesses import Touch
from ..state.lanes import LaneSet, Wave
from ..state.segments import IN_FLIGHT, WRITTEN
from ..text.syntax import ELEMENT, Array
from .ports import Part, element
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


class Copies(MemoryUnit):
    """The asynchronous copies of a wave."""

    def __init__(self, wave: Wave, memory: LaunchMemory, random: np.random.Generator | None):
        super().__init__(memory)
        self.random = random
        self.committed = np.zeros(wave.size, np.int64)
        self.pending: list[PendingCopy] = []
        self.serial = 0
        self._member = np.zeros(wave.size, bool)

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

    def commit(self, lanes: LaneSet) -> None:
        self.committed[lanes.index] += 1

    def wait(self, lanes: LaneSet, newest: int | None) -> None:
        """Waits until at most `newest` of the threads' newest groups are pending (None: they close one, and wait for all)."""
        if newest is None:
            self.commit(lanes)
        limit = self.committed - (newest or 0)
        if self.pending:
            self._finish(lanes, limit, True)

    def land_before(self, lanes: LaneSet, serial: int) -> None:
        """Lands the copies that the threads issued before number `serial`, for an mbarrier."""
        later = [copy for copy in self.pending if copy.serial >= serial]
        self.pending = [copy for copy in self.pending if copy.serial < serial]
        if self.pending:
            self._finish(lanes, self.committed + 1, True)
        self.pending += later
        self.memory.flying = len(self.pending)

    def leave(self, lanes: LaneSet) -> None:
        """Ends the threads: their copies land, but nobody has waited for them."""
        if self.pending:
            self._finish(lanes, self.committed + 1, False)

    def _finish(self, lanes: LaneSet, limit: Array, waited: bool) -> None:
        self._member[lanes.index] = True
        kept = []
        for copy in self.pending:
            due = ~copy.over & (copy.group < limit[copy.lanes.index])
            if copy.lanes is not lanes:
                due &= self._member[copy.lanes.index]
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
        self._member[lanes.index] = False

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
