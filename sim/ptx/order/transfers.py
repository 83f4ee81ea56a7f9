"""Bulk copies for the race detector: accesses of many bytes each, which last from the issue until somebody has waited.

A copy reads its source and writes its destination at any moment until its wait. A granule belongs to the copy that has its
first byte: rows of a tensor may begin and end anywhere.
"""

from __future__ import annotations

import numpy as np

from ..state.lanes import Lanes
from ..state.segments import Segment
from ..text.syntax import Instruction
from ..text.types import Array
from .order import LANE, ONE, STAMP
from .races import Races
from .shadow import Access, Table, TileAccess, Who


def tile_access(races: Races, lanes: Lanes, row: Array, chunks: Array, offsets: Array, i: Instruction) -> TileAccess:
    """Tiles of shared memory, the k-th by lane row[k]: (tiles, chunks) 16-byte elements of the wave's, `offsets` of each tile."""
    addresses = np.zeros(lanes.n, np.int64)
    addresses[row] = offsets
    lane, column = lanes.index[row] + races.first, lanes.warp[row] % races.warps
    return TileAccess(i, lanes, addresses, races.shared, chunks, 4 - races.shared_shift, row, lane, column)


def piece_access(
    races: Races, lanes: Lanes, segment: Segment, starts: Array, lengths: Array, row: Array, i: Instruction
) -> Access | None:
    """Ranges of bytes of a tensor, the k-th by lane row[k]; None where no store of the kernel reaches the tensor."""
    area = races.area(segment) if segment.space == "global" else None
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
    who = Who(lanes.index[position] + races.first, position, position, position)
    return Access(i, lanes, addresses, segment, area.shadow, rows, None, who)


def bulk_read(races: Races, access: Access) -> None:
    """A tensor map is read: by a proxy of its own, at once."""
    if races.launches is not None:
        races.launches.look(access, False, False)
    races.look_at_writers(access, "read")
    if races.has_atomics:
        races.look(access, access.shadow.atomics, "read", "atomic access")
    races.note(access, access.shadow.reads)


def bulk_writing(races: Races, access: Access) -> None:
    """A copy to a tensor writes at any time until its thread has waited: nobody is ordered behind that, the thread included."""
    shadow = access.shadow
    if shadow.landing is None:
        shadow.landing = Table(shadow.writes.rows, 1, races.numbers)
    races.copies.pending(access, shadow.landing)


def bulk_written(races: Races, access: Access, lanes: Array) -> None:
    """These lanes of the wave have waited for their part of such a copy: they wrote now."""
    assert access.shadow.landing is not None
    mine = np.isin(access.who.lane, lanes + races.first)
    rows = access.rows[mine]
    access.shadow.landing.entries[rows] = 0
    who = access.who
    values = races.values(Who(who.lane[mine], who.position, who.row, who.column), ONE)
    access.shadow.writes.entries.reshape(-1)[rows] = values


def last_write(races: Races, access: Access) -> tuple[int, int]:
    """(moment, block of the grid) of the last plain write to the bytes of an access; moment 0: nobody wrote there."""
    if not access.shadow.writes.used or not len(access.rows):
        return 0, 0
    entry = int(access.shadow.writes.entries[access.rows].max())
    return entry >> STAMP, (entry & LANE) // races.wave.lanes_per_block
