"""Launches of one history: which are over before which, and who touched what of the memory that they share.

The order between launches is a partial one. A launch is known by its stream and its number there; a clock says which launches
are over for somebody: of each stream the first so many, some besides (a launch that began early may be over while one before it
is not), and some in part (as far as they released by fences or atomics what others acquired). The memory of the host's arrays has
tables beside it, as that of one launch has (`order.shadow`), which stay: the last writer of each granule, its readers and its
atomics, as far as no later one stands for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..state.lanes import WARP
from ..state.segments import Segment
from ..text.syntax import Instruction
from ..text.types import Array
from .order import BLOCKS, DEVICE, LANE, LANES, LEVEL, LOW, STAMP, WARPS, scope_of
from .shadow import Area, Table, zeros

MANY_SITES = 1 << 12
"""Number of sites beyond those that were in use last, from which on unused ones are dropped."""


class Part(NamedTuple):
    """A launch that is over `until` these moments, by lane of its grid."""

    run: Run
    until: Array

    def covers(self, entries: Array, own: Array) -> Array:
        """Which entries, of those that are its `own`, are not later."""
        out = own.copy()
        low, stamp = (entries[out] & LOW).astype(np.int64), (entries[out] >> np.uint64(STAMP)).astype(np.int64)
        lane, level = low & LANE, low & LEVEL
        until = self.until[lane]
        for size, several in ((WARP, level == LANES), (self.run.lanes_per_block, level == WARPS)):
            until = np.where(several, self.until.reshape(-1, size).min(axis=1)[lane // size], until)
        out[out] = stamp <= np.where(level >= BLOCKS, self.until.min(), until)
        return out


@dataclass(frozen=True)
class Clock:
    """Launches that are over: of each stream the `first` so many, and those `besides`, each a (stream, number); some in `parts`."""

    first: dict[int, int] = field(default_factory=dict)
    besides: frozenset[tuple[int, int]] = frozenset()
    parts: tuple[Part, ...] = ()

    def knows(self, launch: tuple[int, int]) -> bool:
        return launch[1] <= self.first.get(launch[0], 0) or launch in self.besides

    def join(self, *others: Clock) -> Clock:
        first, besides, parts = dict(self.first), self.besides, {id(part.until): part for part in self.parts}
        for other in others:
            besides |= other.besides
            parts |= {id(part.until): part for part in other.parts}
            for stream, count in other.first.items():
                first[stream] = max(count, first.get(stream, 0))
        over = Clock(first, frozenset(one for one in besides if one[1] > first.get(one[0], 0)))
        return replace(over, parts=tuple(part for part in parts.values() if not over.knows(part.run.launch)))

    def plus(self, launch: tuple[int, int]) -> Clock:
        """This one launch is over, too."""
        stream, number = launch
        if number == self.first.get(stream, 0) + 1:
            return replace(self, first=self.first | {stream: number})
        return replace(self, besides=self.besides | {launch})


@dataclass(eq=False)
class Run:
    """One launch: what is over when it begins, and what is when it has waited (griddepcontrol.wait).

    `behind`: the launch that it may begin before the end of. `told` is over for whoever begins once all its blocks have let
    dependents go, `done` once it is over itself.
    """

    kernel: str
    launch: tuple[int, int]
    start: Clock
    wait: Clock
    behind: Run | None = None
    told: Clock = field(init=False)
    done: Clock = field(init=False)
    lanes_per_block: int = 1
    number: Callable[[int], int] = int
    """The linear index in the grid of the n-th block that ran."""

    def __post_init__(self) -> None:
        self.told, self.done = self.start, self.wait.plus(self.launch)

    def forget(self) -> None:
        """Nobody asks any more what was over."""
        self.behind, self.start, self.wait, self.told, self.done = None, Clock(), Clock(), Clock(), Clock()


@dataclass(frozen=True)
class Site:
    """An instruction of a launch: what entries are of."""

    run: Run
    instruction: Instruction

    @property
    def narrow(self) -> bool:
        """Whether, as an atomic, it leaves out the threads of other launches."""
        return scope_of(self.instruction.mods) != DEVICE

    @property
    def loads(self) -> bool:
        return self.instruction.opcode == "ld"


class Marks:
    """One entry a granule, as in a launch (`order.order`), with the number of its site; 0: none."""

    def __init__(self, rows: int):
        self.entries = zeros((rows, 1), np.dtype(np.uint64), True).reshape(-1)
        self.sites = zeros((rows, 1), np.dtype(np.int32), True).reshape(-1)

    def put(self, rows: Array, entries: Array, sites: Array) -> None:
        self.entries[rows], self.sites[rows] = entries, sites

    def renumber(self, numbers: Array) -> bool:
        """Sites get other numbers, 0: they are no more. False if nothing is left."""
        at = np.flatnonzero(self.sites)
        self.sites[at] = numbers[self.sites[at]]
        return bool(self.sites[at].any())

    def finer(self, by: int) -> Marks:
        """The same in granules of which `by` make one of these."""
        out = Marks(len(self.sites) * by)
        at = np.flatnonzero(self.sites)
        out.put((at[:, None] * by + np.arange(by)).reshape(-1), np.repeat(self.entries[at], by), np.repeat(self.sites[at], by))
        return out


@dataclass
class Region:
    """The memory of one host allocation, in granules of 1 << shift bytes from `low` on.

    `writes` has one table; `reads` and `atomics` as many as needed for accesses that do not stand for each other.
    """

    low: int
    high: int
    shift: int
    writes: list[Marks] = field(default_factory=list)
    reads: list[Marks] = field(default_factory=list)
    atomics: list[Marks] = field(default_factory=list)
    owner: Any = None
    """Of memory that is not an array's own: it is not given to others meanwhile."""

    @property
    def kinds(self) -> tuple[list[Marks], ...]:
        return self.writes, self.reads, self.atomics

    def refine(self, shift: int) -> None:
        if shift < self.shift:
            for tables in self.kinds:
                tables[:] = [one.finer(1 << self.shift - shift) for one in tables]
            self.shift = shift

    def rows(self, area: Area, rows: Array) -> tuple[Array, Array]:
        """The granules of a launch's area here, those that lie here; and which of `rows` each is of."""
        start, width = area.low + (rows << area.shift), 1 << max(0, area.shift - self.shift)
        first = (start - self.low) >> self.shift
        out, position = first, np.arange(len(rows))
        if width > 1:
            out, position = (first[:, None] + np.arange(width)).reshape(-1), np.repeat(position, width)
        inside = (out >= 0) & (out < (self.high - self.low + (1 << self.shift) - 1) >> self.shift)
        return (out, position) if inside.all() else (out[inside], position[inside])


class Past:
    """The memory of a history: regions by where they are, and the sites of their entries."""

    def __init__(self) -> None:
        self.regions: dict[tuple[int, int], Region] = {}
        self.sites: list[Site | None] = [None]
        self.messages: dict[int, tuple[Part, Clock]] = {}
        """By address, what the last launch to do so released there for the whole device: of its own, and what was over for it."""
        self._kept = 0

    # -- asked --------------------------------------------------------------------------------------------------------------

    def open(self, clock: Clock) -> Array:
        """Which sites are of launches that are not over by this clock."""
        over: dict[int, bool] = {}
        out = np.zeros(len(self.sites), np.bool_)
        for number, site in enumerate(self.sites):
            if site is not None:
                known = over.get(id(site.run))
                if known is None:
                    known = over[id(site.run)] = clock.knows(site.run.launch)
                out[number] = not known
        return out

    def meeting(self, low: int, high: int) -> list[Region]:
        """The regions that have some of these addresses."""
        return [one for one in list(self.regions.values()) if one.low < high and low < one.high]

    def own(self, run: Run) -> Array:
        """Which sites are of this launch."""
        return np.array([site is not None and site.run is run for site in self.sites], np.bool_)

    # -- a launch is over -----------------------------------------------------------------------------------------------------

    def add(self, run: Run, areas: Iterable[tuple[Segment, Area]], instructions: list[Instruction]) -> None:
        """A launch has touched these areas, a segment of each; `instructions` as they are numbered in the areas' tables."""
        if len(self.sites) > 2 * self._kept + MANY_SITES:
            self.drop(Clock())
        unknown = self.open(run.done)
        numbers = np.zeros(len(instructions), np.int32)
        for segment, area in areas:
            region = self.region(segment, area)
            shadow = area.shadow
            for tables, noted in (
                (region.writes, (shadow.writes, shadow.landing)),
                (region.reads, (shadow.reads, shadow.copies)),
                (region.atomics, (shadow.atomics,)),
            ):
                for table in noted:
                    for rows, entries, by in entries_of(table):
                        for one in np.unique(by[numbers[by] == 0]).tolist():
                            numbers[one] = len(self.sites)
                            self.sites.append(Site(run, instructions[one]))
                        unknown = np.concatenate((unknown, np.zeros(len(self.sites) - len(unknown), np.bool_)))
                        where, position = region.rows(area, rows)
                        self.put(region, tables, where, entries[position], numbers[by[position]], unknown)

    def put(self, region: Region, tables: list[Marks], rows: Array, entries: Array, sites: Array, unknown: Array) -> None:
        """Enter accesses in the first table where they stand for what is there: that is over once they are. Writes always do, as
        those that do not are races already."""
        for table in tables:
            if tables is region.writes or not unknown[table.sites[rows]].any():
                break
        else:
            table = Marks((region.high - region.low + (1 << region.shift) - 1) >> region.shift)
            tables.append(table)
        table.put(rows, entries, sites)

    def region(self, segment: Segment, area: Area) -> Region:
        """The region of an area, which forgets all once its memory is freed."""
        low, high = byte_bounds(segment.root)
        low = low & ~15
        found = self.regions.get((low, high))
        if found is None:
            found = self.regions[low, high] = Region(low, high, area.shift)
            if segment.root.flags.owndata:
                weakref.finalize(segment.root, forget, weakref.ref(self), (low, high)).atexit = False
            else:
                found.owner = segment.root.base
        found.refine(area.shift)
        return found

    # -- what nobody asks for any more ------------------------------------------------------------------------------------------

    def drop(self, over: Clock) -> None:
        """Forget launches that are over for all that come, and sites that no granule has any more."""
        kept = self.open(over)
        if kept.any():
            used = np.zeros(len(kept), np.bool_)
            for table in self.tables():
                used[table.sites] = True
            kept &= used
        else:
            self.regions.clear()
        numbers = np.cumsum(kept, dtype=np.int32)
        numbers[~kept] = 0
        for region in self.regions.values():
            for tables in region.kinds:
                tables[:] = [one for one in tables if one.renumber(numbers)]
        self.regions = {place: one for place, one in self.regions.items() if any(one.kinds)}
        self.sites = [None, *(site for site, keep in zip(self.sites, kept.tolist(), strict=True) if keep)]
        self._kept = len(self.sites)
        self.messages = {at: told for at, told in self.messages.items() if not over.knows(told[0].run.launch)}

    def tables(self) -> Iterator[Marks]:
        for region in self.regions.values():
            for tables in region.kinds:
                yield from tables


def forget(past: weakref.ref[Past], place: tuple[int, int]) -> None:
    """Memory was freed."""
    found = past()
    if found is not None:
        found.regions.pop(place, None)
        low, high = place
        found.messages = {at: one for at, one in found.messages.items() if not low <= at < high} if found.messages else {}


def entries_of(table: Table | None) -> Iterator[tuple[Array, Array, Array]]:
    """Rows with an entry, the entries, and the numbers of their instructions; nothing of a table that nobody used."""
    if table is None or not table.used:
        return
    entries = table.entries.reshape(-1)
    rows = np.flatnonzero(entries)
    if len(rows):
        yield rows, entries[rows], table.by.reshape(-1)[rows].astype(np.int64)
