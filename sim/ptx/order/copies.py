"""Asynchronous copies in the race detector: cp.async, and bulk copies.

Bulk copies are accesses of many bytes each. A copy reads its source and writes its destination at any moment from its issue
until its wait. A granule belongs to the copy that has its first byte: rows of a tensor may begin and end anywhere.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..state.lanes import Lanes
from ..state.segments import Segment
from ..text.syntax import Array, Instruction
from .accesses import ShadowAccess, Table, TileAccess, Touch, Who, windows
from .clocks import LOW, ONE, STAMP, lanes_of
from .detector import Detector

LATEST = LOW << np.uint64(STAMP)
"""The stamp of an entry that no access is ordered behind."""


class CopyRaces(Detector):
    """The copies of a launch that are under way, which become ordinary accesses once threads have waited for them."""

    def tile_access(self, lanes: Lanes, row: Array, chunks: Array, offsets: Array, i: Instruction) -> TileAccess:
        """Returns tiles of shared memory, the k-th by lane row[k]: `chunks` (tiles, n), 16-byte elements of the wave; `offsets`."""
        addresses = np.zeros(lanes.n, np.int64)
        addresses[row] = offsets
        lane, column = lanes.index[row] + self.first, lanes.warp[row] % self.warps
        return TileAccess(i, lanes, addresses, self.shared, chunks, 4 - self.shared_shift, row, lane, column)

    def piece_access(
        self, lanes: Lanes, segment: Segment, starts: Array, lengths: Array, row: Array, i: Instruction
    ) -> ShadowAccess | None:
        """Returns ranges of bytes of a tensor, the k-th by lane row[k]; None if no store of the kernel reaches the tensor."""
        area = self.area(segment) if segment.space == "global" else None
        if area is None:
            return None
        up = (1 << area.shift) - 1
        begin = starts + (segment.address - segment.start - area.low)
        area.shadow.ragged |= bool(((begin | begin + lengths) & up).any())
        first = (begin + up) >> area.shift
        count = ((begin + lengths + up) >> area.shift) - first
        before = np.cumsum(count) - count
        rows = np.repeat(first - before, count) + np.arange(int(count.sum()))
        position = np.repeat(row, count)
        addresses = np.zeros(lanes.n, np.int64)
        addresses[row[::-1]] = starts[::-1]
        who = Who(lanes.index[position] + self.first, position, position, position)
        return ShadowAccess(i, lanes, addresses, segment, area.shadow, rows, None, who)

    # -- reads --------------------------------------------------------------------------------------------------------

    def issue(self, access: Touch, table: Table) -> None:
        """Enters copies that read or write until their threads have waited: no access can be ordered behind that yet, those of
        their own lanes included.
        """
        table.used, number, boxes = True, self.number(access.instruction), access.boxes
        if boxes is None:
            table.entries[access.rows, 0] = access.who.lane.astype(np.uint64) | LATEST
            table.by[access.rows, 0] = number
        else:
            windows(table.entries, boxes.count)[boxes.starts] = (boxes.lane.astype(np.uint64) | LATEST)[:, None, None]
            windows(table.by, boxes.count)[boxes.starts] = number

    def copied(self, lanes: Lanes, readings: list[Touch]) -> None:
        """Notes readings of copies, for which the lanes have waited, as reads at this moment."""
        for reading in readings:
            copies = reading.shadow.copies
            mine = np.isin(reading.lane if isinstance(reading, TileAccess) else reading.who.lane, lanes.index + self.first)
            if not mine.any():
                continue
            some: Touch
            if isinstance(reading, TileAccess):
                some = reading.take(np.flatnonzero(mine), lanes)
            else:
                columns, lane = None if reading.columns is None else reading.columns[mine], reading.who.lane[mine]
                some = replace(reading, lanes=lanes, rows=reading.rows[mine], columns=columns, who=Who(lane, lane, lane, lane))
            if some.boxes is None:
                copies.entries[some.rows] = 0
            else:
                windows(copies.entries, some.boxes.count)[some.boxes.starts] = 0
            self.note(some, reading.shadow.reads)

    # -- writes -------------------------------------------------------------------------------------------------------

    def landed(self, lanes: Lanes, size: int, elements: Array) -> None:
        """Notes copies into `elements` of `size` bytes, for which the lanes have waited, as writes at this moment."""
        count = max(1, size >> self.shared_shift)
        rows, who = elements.astype(np.int64) * count, self.who(lanes, count)
        rows = rows[who.position] + np.tile(np.arange(count), lanes.n)
        self.shared.writes.entries.reshape(-1)[rows] = self.entries(who.lane, ONE)

    def issue_ordered(self, lanes: Lanes, size: int, elements: Array) -> Array:
        """Returns a mask of the lanes that are ordered behind the issue of the copy in flight to their element."""
        count = max(1, size >> self.shared_shift)
        rows = elements.astype(np.int64)[:, None] * count + np.arange(count)
        entries = self.shared.writes.entries.reshape(-1)[rows.reshape(-1)]
        race = self.unordered(np.repeat(lanes.index + self.first, count), entries, False)
        return np.asarray(~race.reshape(lanes.n, count).any(axis=1))

    def stamp(self, access: TileAccess) -> None:
        """Makes the lanes of an access write now, each alone."""
        table, boxes = access.shadow.writes, access.boxes
        if boxes is None:
            table.entries.reshape(-1)[access.rows] = self.entries(access.who.lane, ONE)
        else:
            windows(table.entries, boxes.count)[boxes.starts] = self.entries(boxes.lane, ONE)[:, None, None]

    def written(self, access: ShadowAccess, lanes: Array) -> None:
        """Turns the parts of a copy to a tensor for which these lanes of the wave have waited into writes at this moment."""
        mine = np.isin(access.who.lane, lanes + self.first)
        rows = access.rows[mine]
        access.shadow.landing.entries[rows] = 0
        access.shadow.writes.entries.reshape(-1)[rows] = self.entries(access.who.lane[mine], ONE)

    def last_write(self, access: ShadowAccess) -> tuple[int, int]:
        """Returns (moment, block of the grid) of the last plain write to the bytes of an access; moment 0: nobody wrote there."""
        if not access.shadow.writes.used or not len(access.rows):
            return 0, 0
        entry = access.shadow.writes.entries[access.rows].max()
        return int(entry) >> STAMP, int(lanes_of(entry)) // self.wave.lanes_per_block
