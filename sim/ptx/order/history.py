"""Launches of one history: which are over before which, and races between those that are not.

The order between launches is a partial one. A launch is known by its stream and its number there. A clock says which launches are
over for somebody: of each stream the first so many, some besides (a launch that began early may be over while one before it is
not), and some in part (as far as they released by fences or atomics what others acquired). The memory of the host's arrays has
tables, as that of one launch has (`order.accesses`), which stay: the last writer of each granule, its readers and its atomics,
as far as no later one stands for them.

Accesses of an earlier launch happen before all of this one if a stream or an event orders the launches. A programmatic dependent
launch may begin before the launch in front of it in its stream is over (PTX ISA, "griddepcontrol"): as soon as each block of that
one has let dependents go or has exited. Accesses of the launch in front then happen before an access only behind a
`griddepcontrol.wait`, or if their thread fenced for the device before it let dependents go. So threads hear of that wait, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..report.findings import ERROR, Finding, Key, Verdict, place_of, source_and_call
from ..state.lanes import LaneSet, by_value, run_starts
from ..state.segments import Segment
from ..text.syntax import UNDECODED, Array, PtxInstruction
from .accesses import DEVICE, Area, ShadowAccess, Table, scope_of, zeros
from .clocks import LANES, ONE, STAMP, GridClock, lanes_of
from .detector import Detector
from .launch_clocks import LaunchClock, LaunchPart, OrderedLaunch
from .transfers import ELSEWHERE, Transfer

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
    """One entry a granule, as in a launch (`order.clocks`), with the number of its site; 0: none."""

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
        out.put((at[:, None] * by + np.arange(by)).reshape(-1), np.repeat(self.entries[at], by), np.repeat(self.sites[at], by))
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
        """Returns masks of the pages from `low` to `high` that are all written, or all read, by what is not over by a clock."""
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


@dataclass(eq=False)
class AcquiredRelease:
    """A release of another launch, the lanes of this one that acquired it, and entries of the moments when they did."""

    clock: LaunchClock
    known: Known
    lanes: set[int] = field(default_factory=set)
    entries: Array = field(default_factory=lambda: np.zeros(0, np.uint64))


class Launches:
    """One launch `run` among those of a history, whose memory is `past`."""

    def __init__(self, races: Detector, past: Past, run: OrderedLaunch):
        self.races, self.past, self.run = races, past, run
        self.at_start, self.behind_wait = Known(past, run.start), Known(past, run.wait)
        self.transfers = [one for one in past.transfers if not run.start.knows(one.run.launch)]
        self.anything = bool(self.at_start.open.any() or self.transfers)
        self._regions: dict[int, list[SharedRegion]] = {}
        # Mask of the lanes of the grid that have waited, or heard of one that has; the waits as entries.
        self._waited = np.zeros(0, bool)
        self._waits = np.zeros(0, np.uint64)
        # By address, acquired releases of launches that are not over; by lane, those that its next fence acquires.
        self._heard: dict[int, AcquiredRelease] = {}
        self._pending: dict[int, set[int]] = {}
        # For each block of the grid that has let dependents go: True if its threads had waited by then; their released clocks.
        self._told: dict[int, bool] = {}
        self._released: dict[int, Array | None] = {}

    # -- griddepcontrol -----------------------------------------------------------------------------------------------------

    def wait(self, lanes: LaneSet) -> None:
        """Records that the launch in front is over for these lanes."""
        if self.run.behind is None:
            return
        races = self.races
        if not len(self._waited):
            self._waited = np.zeros(races.blocks * races.wave.lanes_per_block, bool)
        mine = lanes.index + races.first
        if self._waited[mine].all():
            return
        self._waited[mine] = True
        heads = run_starts(lanes.warp)
        several = np.where(np.diff(heads, append=lanes.n) > 1, LANES, ONE)
        self._waits = np.concatenate((self._waits, (mine[heads] | (races.now << STAMP | several)).view(np.uint64)))
        races.now += 1

    def let_go(self, lanes: LaneSet) -> None:
        """Lets dependents of these lanes begin (griddepcontrol.launch_dependents). Only the first of a block counts, which
        may be any of them: so the detector keeps what all warps that do so have in common.
        """
        races = self.races
        behind = self.have_waited(lanes.index + races.first)
        heads = run_starts(lanes.warp)
        for at, end in zip(heads.tolist(), [*heads[1:].tolist(), lanes.n], strict=True):
            block = int(lanes.block[at]) + races.wave.first_block
            released = races.handed_on(lanes.index[at:end] + races.first)
            if block not in self._told:
                self._told[block], self._released[block] = bool(behind[at:end].all()), released
                continue
            self._told[block] &= bool(behind[at:end].all())
            before = self._released[block]
            self._released[block] = None if before is None or released is None else np.minimum(before, released)

    def have_waited(self, mine: Array) -> Array:
        """Returns a mask of these lanes of the grid that are behind a wait."""
        if not len(self._waits):
            return np.zeros(len(mine), bool)
        out = self._waited[mine]
        if not out.all():
            some = np.unique(mine[~out])
            self._waited[some[self.behind(some, self._waits)]] = True
            out = self._waited[mine]
        return out

    def behind(self, mine: Array, entries: Array) -> Array:
        """Returns a mask of these lanes of the grid that are behind some of these entries, mostly of their own cluster."""
        out, per = np.zeros(len(mine), bool), self.races.per
        cluster, theirs = mine // per, lanes_of(entries) // per
        for unit, at in by_value(cluster):
            out[at] = self.behind_any(mine[at], entries[theirs == unit])
        if self.races.learns and not out.all():
            out[~out] = self.behind_any(mine[~out], entries)
        return out

    def behind_any(self, mine: Array, entries: Array) -> Array:
        """Returns the same, pair by pair."""
        pairs = self.races.unordered(np.repeat(mine, len(entries)), np.tile(entries, len(mine)), False)
        return np.asarray(~pairs.reshape(len(mine), -1).all(axis=1))

    # -- atomics and fences ---------------------------------------------------------------------------------------------------

    def hear(self, access: ShadowAccess, atomic: bool) -> None:
        """Makes lanes, which read with an atomic or strong access, hear of a release there by a launch that is not over."""
        i, segment, messages = access.instruction, access.segment, self.past.messages
        if not messages or segment is None or scope_of(i.mods) != DEVICE:
            return
        at_once = atomic or bool({"acquire", "acq_rel"} & set(i.mods))
        places = access.addresses.astype(np.int64) + (segment.address - segment.start)
        for lane, at in zip((access.lanes.index + self.races.first).tolist(), places.tolist(), strict=True):
            found = messages.get(at)
            if found is not None and not self.run.start.knows(found[0].run.launch):
                heard = self._heard.get(at)
                if heard is None:
                    clock = found[1].join(LaunchClock(parts=(found[0],)))
                    heard = self._heard[at] = AcquiredRelease(clock, Known(self.past, clock))
                if lane not in heard.lanes:
                    self._pending.setdefault(lane, set()).add(at)
        if at_once and self._pending:
            self.acquire((access.lanes.index + self.races.first).tolist())

    def launched(self, lanes: LaneSet) -> LaunchClock:
        """Returns what is over for a launch by this one lane: launches before this one, and of it what happened before."""
        part = LaunchPart(self.run, self.races.launched(lanes))
        return self.run.start.join(LaunchClock(parts=(part,)))

    def fence(self, lanes: LaneSet) -> None:
        """Makes lanes, which fence for the device, acquire what they have read until now."""
        if self._pending:
            self.acquire((lanes.index + self.races.first).tolist())

    def acquire(self, lanes: list[int]) -> None:
        """Makes these lanes of the grid acquire their pending releases."""
        for lane in lanes:
            for at in self._pending.pop(lane, ()):
                heard = self._heard[at]
                heard.lanes.add(lane)
                heard.entries = np.append(heard.entries, np.uint64(self.races.now << STAMP | lane))
        self.races.now += 1

    # -- accesses -------------------------------------------------------------------------------------------------------------

    def look(self, access: ShadowAccess, writes: bool, strong: bool) -> None:
        """Reports accesses of earlier launches to the same bytes that nothing orders before this access."""
        if not self.anything:
            return
        assert access.segment is not None
        area = self.races.area(access.segment)
        assert area is not None
        regions = self._regions.get(id(area))
        if regions is None:
            high = area.low + (area.shadow.writes.rows << area.shift)
            regions = self._regions[id(area)] = self.past.meeting(area.low, high)
        did = "atomic access" if strong else "write" if writes else "read"
        for transfer in self.transfers:
            if writes or transfer.writes:
                self.look_at(transfer, access, area, did)
        for region in regions:
            rows, position = region.rows(area, access.rows)
            for table in region.writes:
                self.judge(access, table.entries[rows], table.sites[rows], position, (did, "write"))
            for table in region.atomics:
                entries, sites = table.entries[rows], table.sites[rows]
                at = np.flatnonzero(self.may_race(access.instruction, sites, writes, strong))
                self.judge(access, entries[at], sites[at], position[at], (did, "atomic access"))
            for table in region.reads if writes else ():
                self.judge(access, table.entries[rows], table.sites[rows], position, (did, "read"))

    def look_at(self, transfer: Transfer, access: ShadowAccess, area: Area, did: str) -> None:
        """Reports an earlier copy or fill of the same bytes that nothing orders before this access."""
        low = area.low + (access.rows << area.shift)
        at = np.flatnonzero(transfer.meets(low, low + (1 << area.shift)))
        launch, mine = transfer.run.launch, access.who.lane
        if len(at) and self.run.behind is not None and self.run.wait.knows(launch):
            at = at[~self.have_waited(mine[at])]
        for heard in self._heard.values():
            if len(at) and heard.clock.knows(launch):
                some, which = np.unique(mine[at], return_inverse=True)
                at = at[~self.behind(some, heard.entries)[which]]
        if not len(at):
            return
        segment, i = access.segment, access.instruction
        assert segment is not None
        position = int(access.who.position[at[0]])
        address = int(access.addresses[position])
        message = (
            f"{did} at offset {address - segment.start:#x} of {segment.name!r} and {transfer.touched.verb} by {transfer.told} "
            f"are not ordered: {ELSEWHERE}"
        )
        key: Key = ("race", place_of(i), transfer.told, segment.name)
        verdict = Verdict("race", ERROR, f"{did} after {transfer.touched.verb}")
        sides, place = (i, transfer.instruction), access.lanes.place(position)
        self.races.findings.record(verdict, message, sides, place, key, count=len(at), address=address, tensor=segment.name)

    def alone(self, area: Area) -> bool:
        """True if this launch touches no granule of an area, one of them writing, that a launch has touched which is not over."""
        shadow = area.shadow
        wrote = shadow.writes.marked() | shadow.atomics.marked()
        both = np.flatnonzero(wrote), np.flatnonzero(wrote | shadow.reads.marked())
        for transfer in self.transfers:
            low = area.low + (both[int(transfer.writes)] << area.shift)
            if transfer.meets(low, low + (1 << area.shift)).any():
                return False
        for region in self.past.meeting(area.low, area.low + (shadow.writes.rows << area.shift)):
            for rows, tables in zip(both, ((*region.reads,), (*region.writes, *region.atomics)), strict=True):
                there, _ = region.rows(area, rows)
                if any(self.at_start.open[table.sites[there]].any() for table in tables):
                    return False
        return True

    def may_race(self, i: PtxInstruction, sites: Array, writes: bool, strong: bool) -> Array:
        """Returns a mask of the atomics an access may race with: loads do not with loads, nor atomics of device scope with such."""
        out = sites != 0
        narrow = strong and scope_of(i.mods) != DEVICE
        for number in np.unique(sites[out]).tolist():
            site = self.past.sites[number]
            out[sites == number] = (writes or not site.loads) and (not strong or narrow or site.narrow)
        return out

    def judge(self, access: ShadowAccess, entries: Array, sites: Array, position: Array, verbs: tuple[str, str]) -> None:
        """Reports earlier accesses, one a granule of the access, that nothing orders before it."""
        at = np.flatnonzero(self.at_start.open[sites])
        if not len(at):
            return
        at = at[~self.at_start.covers(entries[at], sites[at])]
        mine = access.who.lane[position[at]]
        if self.run.behind is not None:
            race = ~(self.behind_wait.covers(entries[at], sites[at]) & self.have_waited(mine))
            at, mine = at[race], mine[race]
        for heard in self._heard.values():
            over = heard.known.covers(entries[at], sites[at])
            if over.any():
                some, which = np.unique(mine[over], return_inverse=True)
                over[over] = self.behind(some, heard.entries)[which]
                at, mine = at[~over], mine[~over]
        for number, those in by_value(sites[at]):
            first = int(at[those[0]])
            self.report(access, int(position[first]), int(entries[first]), self.past.sites[number], verbs, len(those))

    def report(self, access: ShadowAccess, at: int, entry: int, theirs: Site, verbs: tuple[str, str], count: int) -> None:
        """Reports a finding of this launch, the later one; `at`: the granule of the access, `entry`: the other side."""
        assert access.segment is not None
        i, run, segment = access.instruction, theirs.run, access.segment
        position = int(access.who.position[at])
        address = int(access.addresses[position])
        message = (
            f"{verbs[0]} at offset {address - segment.start:#x} of {segment.name!r} and {verbs[1]} at "
            f"{source_and_call(theirs.instruction)} by an earlier launch, {run.thread(entry)} are not ordered: {self.why(theirs)}"
        )
        key: Key = ("race", place_of(i), place_of(theirs.instruction), run.kernel, segment.name)
        place = access.lanes.place(position)
        sides = i, theirs.instruction
        verdict = Verdict("race", ERROR, f"{verbs[0]} after {verbs[1]}")
        self.races.findings.record(verdict, message, sides, place, key, count=count, address=address, tensor=segment.name)

    def why(self, theirs: Site) -> str:
        run, behind = theirs.run, self.run.behind
        if any(part.run is run for part in self.run.start.parts):
            return "that one launched this one, and nothing orders the access before it did"
        if run.launch[0] != self.run.launch[0]:
            return ELSEWHERE
        if behind is run:
            return "this one is programmatic, it may begin before that one is over, and no griddepcontrol.wait is before the access"
        if behind is not None and not behind.done.knows(run.launch):
            return f"the launch between them, of {behind.kernel}, may be over before that one is: it has no griddepcontrol.wait"
        return "this one is programmatic, and may begin before that one is over"

    # -- the end ------------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Adds the accesses of this launch, which has been executed, to the past, and its effect on later ones to `run`."""
        run, races = self.run, self.races
        wave = races.wave
        run.lanes_per_block, run.lanes_per_cluster, run.number = (
            wave.lanes_per_block,
            wave.cluster * wave.lanes_per_block,
            wave.number,
        )
        waited = set(np.unique(np.flatnonzero(self._waited) // run.lanes_per_block).tolist())
        if all(self._told.get(block, block in waited) for block in range(races.blocks)):
            run.told = run.wait
        before = (run.wait if waited else run.start).join(*(heard.clock for heard in self._heard.values() if heard.lanes))
        run.done = before.plus(run.launch)
        if any(one is not None for one in self._released.values()):
            until = np.zeros((races.blocks, run.lanes_per_block), np.int64)
            for block, one in self._released.items():
                until[block] = 0 if one is None else one
            clock = GridClock(len(until) // wave.cluster, dict(enumerate(until.reshape(-1, run.lanes_per_cluster))))
            run.told = run.told.join(LaunchClock(parts=(LaunchPart(run, clock),)))
        areas = races.touched()
        self.past.add(run, areas, races.instructions)
        places = {area.low: area.shift for _, area in areas}
        released = {area + (at << places[area]): LaunchPart(run, until) for area, at, until in races.messages()}
        self.past.messages |= {at: (part, before) for at, part in released.items()}
