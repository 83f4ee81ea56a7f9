"""The past of a history: accesses of launches to the host's arrays, and copies, fills and frees.

The memory of the host's arrays has tables, as that of one launch has (`order.shadow`), which stay: the last writer of each
granule, its readers and its atomics, as far as no later one stands for them.

Copies, fills and frees touch ranges of bytes, by no thread of a kernel. They have their places in streams as launches have, so
that clocks of launches (`order.moments`) say what is over before them. Ranges are kept as they are, not by granules: a copy of
gigabytes is one entry. A later copy takes the place of those that are over for it and whose ranges it covers, unless it only reads
what they wrote: who does not know of those does not know of it, either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from cupyflash.sim.ranges import members

from ..state.findings import ERROR, Finding, at_line, source_and_call
from ..state.segments import Segment
from ..text.syntax import UNDECODED, Array, Line, PtxInstruction
from .moments import LaunchClock, LaunchPart, OrderedLaunch
from .shadow import DEVICE, Area, Table, scope_of, zeros

READ, WRITE, FREE = "read", "write", "free"

ELSEWHERE = "it is in another stream, and no event is between them"
"""The reason why nothing orders the work of two streams."""


class Touched(NamedTuple):
    """Memory, as a tensor with a name, of which a copy touches ranges: (first byte, behind the last one).

    `verb` is READ, WRITE or FREE.
    """

    tensor: str
    memory: Array
    verb: str
    ranges: tuple[tuple[int, int], ...]


UNAWAITED = "the host has not waited for it"
"""The reason why nothing orders the host's access."""

HOST = -2
"""The stream of the host."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """A copy, fill or free, as the launch `run` of no kernel but a function, or an access of the host; `line`: its line in the
    program, if it is known.
    """

    run: OrderedLaunch
    touched: Touched
    line: Callable[[], Line | None]

    @property
    def writes(self) -> bool:
        return self.touched.verb != READ

    @property
    def by_host(self) -> bool:
        return self.run.launch[0] == HOST

    @cached_property
    def base(self) -> int:
        """Host address of the tensor's first byte."""
        return byte_bounds(self.touched.memory)[0]

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """Host addresses: where ranges begin, in order, and where they end; those that meet are one."""
        starts, ends = np.array(sorted(self.touched.ranges), np.int64).reshape(-1, 2).T + self.base
        ends = np.maximum.accumulate(ends)
        heads = np.flatnonzero(np.concatenate(([True], starts[1:] > ends[:-1])))
        return starts[heads], ends[np.append(heads[1:], len(starts)) - 1]

    @property
    def low(self) -> int:
        return int(self.bounds[0][0])

    @property
    def high(self) -> int:
        return int(self.bounds[1][-1])

    def meets(self, low: Array, high: Array) -> Array:
        """Returns a mask of the ranges (low, high) of host addresses that overlap one of these."""
        starts, ends = self.bounds
        before = np.searchsorted(starts, high)
        return (before > 0) & (ends[before - 1] > low)

    def covers(self, other: Transfer) -> bool:
        """True if every byte of another is in this one."""
        (starts, ends), (low, high) = self.bounds, other.bounds
        before = np.searchsorted(starts, low, "right")
        return bool(((before > 0) & (ends[before - 1] >= high)).all())

    def stands_for(self, other: Transfer) -> bool:
        """True if nobody need know of another any more who knows of this."""
        return self.run.start.knows(other.run.launch) and (self.writes or not other.writes) and self.covers(other)

    @cached_property
    def instruction(self) -> PtxInstruction:
        """The call, as something that has a line."""
        return PtxInstruction(self.run.kernel, (), (), None, 0, self.line(), "")

    @property
    def told(self) -> str:
        """The call in words."""
        line = self.instruction.source
        return self.run.kernel + (f" at {at_line(line)}" if line else "")

    def race(self, verb: str, address: int, theirs: str, other: PtxInstruction) -> Finding:
        """Returns the finding that this comes later than an access, `verb`, which nothing orders before it."""
        own, call, why = self.touched, self.instruction, UNAWAITED if self.by_host else ELSEWHERE
        at = f"at offset {address - self.base:#x} of {own.tensor!r}"
        message = f"{own.verb} {at} and {verb} {theirs} are not ordered: {why}"
        place, hazard = (self.run.kernel, call.source, 0, -1, -1, -1), f"{own.verb} after {verb}"
        return Finding("race", message, *place, None, own.tensor, other=other.place, severity=ERROR, hazard=hazard)


ROWS = 1 << 20
"""Rows of a table that become part of a history at once."""
MANY_SITES = 1 << 12
"""Number of sites beyond those that were in use last, from which on unused ones are dropped."""


@dataclass(frozen=True)
class Site:
    """An instruction of a launch, to which entries refer."""

    run: OrderedLaunch
    instruction: PtxInstruction

    @property
    def narrow(self) -> bool:
        """True if, as an atomic, its scope excludes the threads of other launches."""
        return scope_of(self.instruction.mods) != DEVICE

    @property
    def loads(self) -> bool:
        return self.instruction.opcode == "ld"


NOBODYS = Site(OrderedLaunch("", (-1, 0), LaunchClock(), LaunchClock()), UNDECODED)
"""Site number 0, of a launch that is over for all."""


class Marks:
    """One entry a granule, as in a launch (`order.moments`), with the number of its site; 0: none."""

    def __init__(self, rows: int):
        self.entries, self.sites = (zeros((rows,), np.dtype(kind), True) for kind in (np.uint64, np.int32))

    def put(self, rows: Array, entries: Array, sites: Array) -> None:
        self.entries[rows], self.sites[rows] = entries, sites

    def renumber(self, numbers: Array) -> bool:
        """Renumbers sites; 0 drops a site's entries. Returns False if nothing is left."""
        at = np.flatnonzero(self.sites)
        self.sites[at] = numbers[self.sites[at]]
        return bool(self.sites[at].any())

    def finer(self, by: int) -> Marks:
        """Returns the same in granules of which `by` make one of these."""
        out = Marks(len(self.sites) * by)
        at = np.flatnonzero(self.sites)
        out.put(members(at, by), np.repeat(self.entries[at], by), np.repeat(self.sites[at], by))
        return out


@dataclass
class SharedRegion:
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
    """The owner of memory that is not an array's own: it is not reused meanwhile."""

    @property
    def kinds(self) -> tuple[list[Marks], ...]:
        return self.writes, self.reads, self.atomics

    def refine(self, shift: int) -> None:
        if shift < self.shift:
            for tables in self.kinds:
                tables[:] = [one.finer(1 << self.shift - shift) for one in tables]
            self.shift = shift

    def touched(self, transfer: Transfer) -> list[slice]:
        """Returns the granules that a copy touches, or parts of which it touches."""
        starts, ends, last = *transfer.bounds, (1 << self.shift) - 1
        first = (np.maximum(starts, self.low) - self.low) >> self.shift
        end = (np.minimum(ends, self.high) - self.low + last) >> self.shift
        return [slice(a, b) for a, b in zip(first.tolist(), end.tolist(), strict=True) if a < b]

    def rows(self, area: Area, rows: Array) -> tuple[Array, Array]:
        """Returns the granules of a launch's area that lie here, and their positions in `rows`."""
        start, width = area.low + (rows << area.shift), 1 << max(0, area.shift - self.shift)
        first = (start - self.low) >> self.shift
        out, position = first, np.arange(len(rows))
        if width > 1:
            out, position = (first[:, None] + np.arange(width)).reshape(-1), np.repeat(position, width)
        inside = (out >= 0) & (out < (self.high - self.low + (1 << self.shift) - 1) >> self.shift)
        return (out, position) if inside.all() else (out[inside], position[inside])


class Past:
    """The memory of a history: regions by address, and the sites of their entries."""

    def __init__(self) -> None:
        self.regions: dict[tuple[int, int], SharedRegion] = {}
        self.sites = [NOBODYS]
        self.messages: dict[int, tuple[LaunchPart, LaunchClock]] = {}
        """The last release to the whole device at each address: the releasing launch's part, and the launches over for it."""
        self.transfers: list[Transfer] = []
        """Copies and fills that are not over for all later launches, or which others stand for."""
        self._kept = 0

    # -- queries ------------------------------------------------------------------------------------------------------------

    def open(self, clock: LaunchClock) -> Array:
        """Returns a mask of the sites of launches that are not over by this clock."""
        over: dict[int, bool] = {}
        out = np.zeros(len(self.sites), bool)
        for number, site in enumerate(self.sites):
            known = over.get(id(site.run))
            if known is None:
                known = over[id(site.run)] = clock.knows(site.run.launch)
            out[number] = not known
        return out

    def meeting(self, low: int, high: int) -> list[SharedRegion]:
        """Returns the regions that have some of these addresses."""
        return [one for one in list(self.regions.values()) if one.low < high and low < one.high]

    def own(self, run: OrderedLaunch) -> Array:
        """Returns a mask of the sites of this launch."""
        return np.array([site.run is run for site in self.sites], bool)

    # -- copies, fills, frees -------------------------------------------------------------------------------------------------

    def transfer(self, one: Transfer) -> Iterator[Finding]:
        """Yields the races of a copy, fill or free; then adds it to the past."""
        yield from self.races(one)
        self.transfers = [each for each in self.transfers if not one.stands_for(each)]
        self.transfers.append(one)

    def races(self, one: Transfer) -> Iterator[Finding]:
        """Yields the races of a copy, or an access of the host, with what nothing orders before it. Atomics of kernels and what the
        host does in their place do not race.
        """
        start = one.run.start
        known, found = Known(self, start), set[int]()
        for region in self.meeting(one.low, one.high) if known.open.any() else ():
            atomics = [] if one.by_host else region.atomics
            kinds = (("write", region.writes), ("atomic access", atomics), ("read", region.reads if one.writes else []))
            for verb, table in ((verb, table) for verb, tables in kinds for table in tables):
                for rows in region.touched(one):
                    sites, entries = table.sites[rows], table.entries[rows]
                    at = np.flatnonzero(known.open[sites])
                    at = at[~known.covers(entries[at], sites[at])]
                    for number in set(np.flatnonzero(np.bincount(sites[at])).tolist()) - found:
                        first, site = int(at[np.argmax(sites[at] == number)]), self.sites[number]
                        address = max(one.low, region.low + (rows.start + first << region.shift))
                        who = f"by an earlier launch, {site.run.thread(int(entries[first]))},"
                        yield one.race(verb, address, f"at {source_and_call(site.instruction)} {who}", site.instruction)
                        found.add(number)
        for other in self.transfers:
            if (one.writes or other.writes) and not start.knows(other.run.launch):
                at = np.flatnonzero(one.meets(*other.bounds))
                if len(at):
                    address = max(one.low, int(other.bounds[0][at[0]]))
                    yield one.race(other.touched.verb, address, f"by {other.told}", other.instruction)

    def in_use(self, low: int, high: int, page: int, clock: LaunchClock) -> tuple[Array, Array]:
        """Returns masks of the pages from `low` to `high`: all written, and all read, by work that is not over at a clock."""
        open_, pages = self.open(clock), -(-(high - low) // page)
        wrote, read = (np.zeros(pages, bool) for _ in range(2))
        region = self.regions.get((low, high))
        if region is not None and open_.any():
            for out, tables in ((wrote, region.writes), (read, region.reads)):
                for table in tables:
                    out |= np.logical_and.reduceat(open_[table.sites], np.arange(0, len(table.sites), page >> region.shift))
        for one in self.transfers:
            if one.low < high and low < one.high and not clock.knows(one.run.launch):
                for start, end in zip(*(bound - low for bound in one.bounds), strict=True):
                    last = pages if end == high - low else end // page
                    (wrote if one.writes else read)[-(-max(start, 0) // page) : last] = True
        return wrote, read

    def forget(self, low: int, high: int) -> None:
        """Forgets memory that is freed, of which the host addresses low to high may be of other memory from now on."""
        for place in [place for place, one in self.regions.items() if one.low < high and low < one.high]:
            del self.regions[place]
        self.transfers = [one for one in self.transfers if one.high <= low or high <= one.low]
        self.messages = {at: one for at, one in self.messages.items() if not low <= at < high} if self.messages else {}

    # -- a launch is over -----------------------------------------------------------------------------------------------------

    def add(self, run: OrderedLaunch, areas: Iterable[tuple[Segment, Area]], instructions: list[PtxInstruction]) -> None:
        """Adds a launch that touched these areas, a segment of each; `instructions` as they are numbered in the areas' tables."""
        if len(self.sites) > 2 * self._kept + MANY_SITES:
            self.drop(LaunchClock())
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
                        for one in np.flatnonzero(np.bincount(by[numbers[by] == 0])).tolist():
                            numbers[one] = len(self.sites)
                            self.sites.append(Site(run, instructions[one]))
                        unknown = np.concatenate((unknown, np.zeros(len(self.sites) - len(unknown), bool)))
                        where, position = region.rows(area, rows)
                        self.put(region, tables, where, entries[position], numbers[by[position]], unknown)

    def put(self, region: SharedRegion, tables: list[Marks], rows: Array, entries: Array, sites: Array, unknown: Array) -> None:
        """Enters accesses in the first table where they stand for the present entry: that is over once they are. Writes always
        do, as those that do not are races already.
        """
        for table in tables:
            if tables is region.writes or not unknown[table.sites[rows]].any():
                break
        else:
            table = Marks((region.high - region.low + (1 << region.shift) - 1) >> region.shift)
            tables.append(table)
        table.put(rows, entries, sites)

    def region(self, segment: Segment, area: Area) -> SharedRegion:
        """Returns the region of an area, which forgets all once its memory is freed."""
        low, high = byte_bounds(segment.root)
        low = low & ~15
        found = self.regions.get((low, high))
        if found is None:
            found = self.regions[low, high] = SharedRegion(low, high, area.shift)
            if segment.root.flags.owndata:
                weakref.finalize(segment.root, forget, weakref.ref(self), (low, high)).atexit = False
            else:
                found.owner = segment.root.base
        found.refine(area.shift)
        return found

    # -- old launches and sites -------------------------------------------------------------------------------------------------

    def drop(self, over: LaunchClock) -> None:
        """Forgets launches that are over for all later ones, and sites to which no granule refers any more."""
        self.transfers = [one for one in self.transfers if not over.knows(one.run.launch)]
        kept = self.open(over)
        if kept.any():
            used = np.zeros(len(kept), bool)
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
        self.sites = [NOBODYS, *(site for site, keep in zip(self.sites, kept.tolist(), strict=True) if keep)]
        self._kept = len(self.sites)
        self.messages = {at: told for at, told in self.messages.items() if not over.knows(told[0].run.launch)}

    def tables(self) -> Iterator[Marks]:
        for region in self.regions.values():
            for tables in region.kinds:
                yield from tables


def forget(past: weakref.ref[Past], place: tuple[int, int]) -> None:
    """Forgets memory that was freed."""
    found = past()
    if found is not None:
        found.forget(*place)


def entries_of(table: Table | None) -> Iterator[tuple[Array, Array, Array]]:
    """Yields rows with an entry, the entries, and the numbers of their instructions; nothing for an unused table.

    The table comes in parts: all that is made of a row takes several times its own memory.
    """
    if table is None or not table.used:
        return
    entries, by = table.entries.reshape(-1), table.by.reshape(-1)
    for start in range(0, len(entries), ROWS):
        rows = start + np.flatnonzero(entries[start : start + ROWS])
        if len(rows):
            yield rows, entries[rows], by[rows].astype(np.int64)


class Known:
    """The past's entries that are over by a clock."""

    def __init__(self, past: Past, clock: LaunchClock):
        self.open = past.open(clock)
        self.parts = [(part, past.own(part.run)) for part in clock.parts]

    def covers(self, entries: Array, sites: Array) -> Array:
        out = ~self.open[sites]
        for part, own in self.parts:
            out |= part.covers(entries, own[sites])
        return out
