"""Races of writers that write the same value, for the race detector.

Every known chip leaves that value there, in whatever order they come, so such a race is a warning. Each of the writers stays in
the shadow, in `Shadow.agreeing`: who reads or writes there later, or read before, must be ordered with all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..state.lanes import WARP, Lanes
from ..text.syntax import Instruction
from ..text.types import Array
from .order import LANE, LEVEL, STAMP
from .shadow import Access, Shadow, Table, Touch

SAME = "are not ordered; both write the same bytes"
STORES = frozenset({"st", "stmatrix", "wmma", "mbarrier"})
"""Of mbarrier it is init: all else that it may be is strong."""


@dataclass(frozen=True)
class Stored:
    """What a store is about to write: of each lane one element of `values`. `earlier`: its parts that are in the shadow already."""

    lanes: Lanes
    values: Array
    earlier: list[Access] = field(default_factory=list)


class Contents(Protocol):
    """The memory that a kernel stores to."""

    storing: Stored | None

    def shared_view(self, size: int) -> Array:
        """Shared memory of all blocks of the wave as elements of `size` bytes."""


class Detector(Protocol):
    """The race detector of which this is a part."""

    warps: int
    shared_shift: int
    numbers: np.dtype
    instructions: list[Instruction]

    @property
    def contents(self) -> Contents | None: ...

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Which of the accesses `entries` did not happen before what the grid-wide lanes `mine` do now."""

    def relation(self, mine: Array, entries: Array) -> Array:
        """What one entry must say to stand for both."""


def written(races: Detector, access: Touch, where: Array) -> Array | None:
    """The bytes that an access is about to store at these of its granules, a row each; None where that is not known."""
    storing = None if races.contents is None else races.contents.storing
    if storing is None or not isinstance(access, Access) or access.instruction.opcode not in STORES:
        return None
    count = len(access.rows) // access.lanes.n
    row = access.who.position[where]
    if access.lanes is not storing.lanes:
        order = np.argsort(storing.lanes.index)
        row = order[np.searchsorted(storing.lanes.index, access.lanes.index[row], sorter=order)]
    bytes_ = storing.values.view(np.uint8).reshape(storing.lanes.n, count, -1)
    found: Array = bytes_[row, where % count]
    return found


def there(races: Detector, access: Access, where: Array, size: int) -> Array:
    """The bytes in memory at these granules, `size` of each, before the access."""
    assert races.contents is not None
    if access.segment is None:
        memory, starts = races.contents.shared_view(1), access.rows[where] << races.shared_shift
    else:
        count = len(access.rows) // access.lanes.n
        memory = access.segment.window(1)[0]
        starts = access.addresses[access.who.position[where]].astype(np.int64) - access.segment.start + where % count * size
    found: Array = memory[starts[:, None] + np.arange(size)]
    for one in races.contents.storing.earlier if races.contents.storing is not None else ():
        # Nothing of the store is in memory yet.
        if one.shadow is access.shadow:
            order = np.argsort(one.rows, kind="stable")
            last = order[np.searchsorted(one.rows, access.rows[where], sorter=order, side="right") - 1]
            hit = np.flatnonzero(one.rows[last] == access.rows[where])
            found[hit] = written(races, one, last[hit])
    return found


def same_as_before(races: Detector, access: Touch, where: Array, by: Array) -> Array:
    """At which of its granules an access is about to store what plain stores, the instructions `by`, have left there."""
    values = written(races, access, where)
    if values is None:
        return np.zeros(len(where), np.bool_)
    assert isinstance(access, Access)
    stores = np.array([one.opcode in STORES for one in races.instructions], np.bool_)[by]
    if access.shadow.mixed is not None:
        stores &= ~access.shadow.mixed[access.rows[where]]
    return np.asarray(stores & (values == there(races, access, where, values.shape[1])).all(axis=1))


def same_at_once(races: Detector, access: Touch, lost: Array, winners: Array) -> Array:
    """Of granules that several lanes of one access store to, at which `lost` ones it is what the lane `winners` stores."""
    mine = written(races, access, lost)
    if mine is None:
        return np.zeros(len(lost), np.bool_)
    # The winner's own entry of each granule.
    keys = access.rows << np.int64(STAMP) | access.who.lane
    order = np.argsort(keys, kind="stable")
    wanted = access.rows[lost] << np.int64(STAMP) | winners
    theirs = written(races, access, order[np.searchsorted(keys, wanted, sorter=order, side="right") - 1])
    return np.asarray((mine == theirs).all(axis=1))


def remember(races: Detector, access: Touch) -> None:
    """A part of a store is in the shadow; what it writes will be in memory with the other parts."""
    if races.contents is not None and races.contents.storing is not None and isinstance(access, Access):
        races.contents.storing.earlier.append(access)


def mix(shadow: Shadow, rows: Array) -> None:
    """Lanes of one warp have written several values to these granules at once."""
    if len(rows) and shadow.mixed is None:
        shadow.mixed = np.zeros(shadow.writes.rows, np.bool_)
    if shadow.mixed is not None:
        shadow.mixed[rows] = True


def join(races: Detector, access: Touch, where: Array, entries: Array, by: Array) -> None:
    """Writers (entries of the table of writers, or lanes of the access) stay in the shadow beside the one that has their place."""
    shadow = access.shadow
    if not len(where):
        return
    if shadow.agreeing is None:
        shadow.agreeing = Table(shadow.writes.rows, shadow.reads.columns, races.numbers)
    table = shadow.agreeing
    table.used = True
    rows, lane = access.rows[where], (entries & np.uint64(LANE)).astype(np.int64)
    at = rows
    if table.columns > 1:
        table.touched[rows] = True
        at = rows * table.columns + lane // WARP % races.warps
    flat, numbers = table.entries.reshape(-1), table.by.reshape(-1)
    before = flat[at]
    # Whoever this access is behind needs no place of its own: who is ordered behind the access is behind that one too.
    apart = np.flatnonzero(before)
    apart = apart[races.unordered(access.who.lane[where[apart]], before[apart], False)]
    flat[at], numbers[at] = entries, by
    newest = flat[at]
    levels = np.maximum(races.relation(lane, newest), entries & np.uint64(LEVEL))
    wider = np.maximum(races.relation(lane[apart], before[apart]), before[apart] & np.uint64(LEVEL))
    levels[apart] = np.maximum(levels[apart], wider)
    np.maximum.at(flat, at, (newest & ~np.uint64(LEVEL)) | levels)
