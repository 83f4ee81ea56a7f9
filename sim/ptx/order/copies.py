"""Asynchronous copies in the race detector: they read and write at a time of their own, between their issue and a wait for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from ..state.lanes import Lanes
from ..text.syntax import Instruction
from ..text.types import Array
from .order import LOW, ONE, STAMP
from .shadow import Shadow, Table, TileAccess, Touch, Who, windows
from .tiles import Tiles

LATEST = LOW << np.uint64(STAMP)
"""The stamp of an entry that nobody is ordered behind."""


class Detector(Protocol):
    """The race detector of which this is a part."""

    first: int
    shared_shift: int
    numbers: np.dtype
    shared: Shadow
    tiles: Tiles | None

    def number(self, instruction: Instruction) -> int:
        """What an instruction is called in the tables."""

    def who(self, lanes: Lanes, count: int) -> Who:
        """The lanes of `count` granules each."""

    def values(self, who: Who, level: int) -> Array:
        """The entries of accesses at this moment."""

    def note(self, access: Touch, table: Table) -> None:
        """The access is in a table from now on."""

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Which of the accesses `entries` did not happen before what the grid-wide lanes `mine` do now."""


class Copies:
    """What the copies of one launch that are under way read, and what becomes of it when threads have waited for them."""

    def __init__(self, races: Detector):
        self.races = races
        self._readings: list[Touch] = []

    def issue(self, access: Touch) -> None:
        """Copies read their sources at any time until their threads have waited: nobody can be ordered behind that yet."""
        shadow = access.shadow
        if shadow.copies is None:
            shadow.copies = Table(shadow.writes.rows, 1, self.races.numbers)
        self.pending(access, shadow.copies)
        self._readings.append(access)

    def pending(self, access: Touch, table: Table) -> None:
        """Entries that nobody is ordered behind."""
        table.used, number, boxes = True, self.races.number(access.instruction), access.boxes
        if boxes is None:
            table.entries[access.rows, 0] = access.who.lane.astype(np.uint64) | LATEST
            table.by[access.rows, 0] = number
        else:
            windows(table.entries, boxes.count)[boxes.starts] = (boxes.lane.astype(np.uint64) | LATEST)[:, None, None]
            windows(table.by, boxes.count)[boxes.starts] = number

    def issued(self) -> list[Touch]:
        """What the copies that have just been issued read."""
        readings, self._readings = self._readings, []
        return readings

    def copied(self, lanes: Lanes, readings: list[Touch]) -> None:
        """The lanes have waited for copies that read these: a read at this moment."""
        for reading in readings:
            if isinstance(reading, TileAccess):
                self.copied_tiles(reading, lanes)
                continue
            mine = np.isin(reading.who.lane, lanes.index + self.races.first)
            rows, lane = reading.rows[mine], reading.who.lane[mine]
            assert reading.shadow.copies is not None
            reading.shadow.copies.entries[rows] = 0
            columns = None if reading.columns is None else reading.columns[mine]
            self.races.note(
                replace(reading, lanes=lanes, rows=rows, columns=columns, who=Who(lane, lane, lane, lane)), reading.shadow.reads
            )

    def copied_tiles(self, reading: TileAccess, lanes: Lanes) -> None:
        """The tiles of these lanes have been read."""
        at = np.flatnonzero(np.isin(reading.lane, lanes.index + self.races.first))
        if not len(at):
            return
        some, copies = reading.take(at, lanes), reading.shadow.copies
        assert copies is not None
        if some.boxes is None:
            copies.entries[some.rows] = 0
        else:
            windows(copies.entries, some.boxes.count)[some.boxes.starts] = 0
        self.races.note(some, reading.shadow.reads)

    def landed(self, lanes: Lanes, size: int, elements: Array) -> None:
        """The lanes have waited for their copies into `elements` of `size` bytes: a write at this moment."""
        count = max(1, size >> self.races.shared_shift)
        rows = elements.astype(np.int64) * count
        who = self.races.who(lanes, count)
        if count > 1:
            rows = rows[who.position] + np.tile(np.arange(count), lanes.n)
        self.races.shared.writes.entries.reshape(-1)[rows] = self.races.values(who, ONE)
        if self.races.tiles is not None:
            self.races.tiles.wrote(rows)

    def issue_ordered(self, lanes: Lanes, size: int, elements: Array) -> Array:
        """Whether each lane is behind the issue of the copy that is in flight to its element."""
        count = max(1, size >> self.races.shared_shift)
        rows = elements.astype(np.int64) * count
        entries = self.races.shared.writes.entries.reshape(-1)
        race = np.zeros(lanes.n, np.bool_)
        for k in range(count):
            race |= self.races.unordered(lanes.index + self.races.first, entries[rows + k], False)
        return ~race
