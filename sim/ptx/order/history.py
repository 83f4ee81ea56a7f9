"""Streams and events, the launches of one history: which are over before which, and races between those that are not.

The order between launches is a partial one. A launch is known by its stream and its number there. A clock says which launches are
over for somebody: of each stream the first so many, some besides (a launch that began early may be over while one before it is
not), and some in part (as far as they released by fences or atomics what others acquired). `order.past` has the accesses.

Accesses of an earlier launch happen before all of this one if a stream or an event orders the launches. A programmatic dependent
launch may begin before the launch in front of it in its stream is over (PTX ISA, "griddepcontrol"): as soon as each block of that
one has let dependents go or has exited. Accesses of the launch in front then happen before an access only behind a
`griddepcontrol.wait`, or if their thread fenced for the device before it let dependents go. So threads hear of that wait, too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..state.findings import ERROR, Finding, Key, Verdict, place_of, source_and_call
from ..state.lane_sets import LaneSet, by_value, run_starts
from ..text.syntax import Array, Line, PtxInstruction, base_name
from .detector import Detector
from .moments import LANES, ONE, STAMP, GridClock, LaunchClock, LaunchPart, OrderedLaunch, lanes_of
from .past import ELSEWHERE, HOST, Known, Past, SharedRegion, Site, Touched, Transfer
from .shadow import DEVICE, Area, ShadowAccess, scope_of


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
        """Orders lanes that read with an atomic or strong access behind a release at that place by a launch that is not over."""
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
        verbs, other = (did, transfer.touched.verb), transfer.instruction
        self.report(access, (int(at[0]), len(at)), verbs, other, f"by {transfer.told}", ELSEWHERE, (transfer.told,))

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
            first, theirs = int(at[those[0]]), self.past.sites[number]
            run, other = theirs.run, theirs.instruction
            who = f"at {source_and_call(other)} by an earlier launch, {run.thread(int(entries[first]))}"
            where = int(position[first]), len(those)
            self.report(access, where, verbs, other, who, self.why(theirs), (place_of(other), run.kernel))

    def report(
        self,
        access: ShadowAccess,
        where: tuple[int, int],
        verbs: tuple[str, str],
        other: PtxInstruction,
        who: str,
        why: str,
        key: tuple[Hashable, ...],
    ) -> None:
        """Reports that nothing orders this access behind an earlier one, by the instruction `other`, of `who`, for a reason `why`.

        `where`: the first granule of the access, and the number of them; `key`: the other side, as findings are told apart.
        """
        segment, i = access.segment, access.instruction
        assert segment is not None
        position = int(access.who.position[where[0]])
        address = int(access.addresses[position])
        message = (
            f"{verbs[0]} at offset {address - segment.start:#x} of {segment.name!r} and {verbs[1]} {who} are not ordered: {why}"
        )
        verdict, place = Verdict("race", ERROR, f"{verbs[0]} after {verbs[1]}"), access.lanes.place(position)
        whole: Key = ("race", place_of(i), *key, segment.name)
        self.races.findings.record(verdict, message, (i, other), place, whole, count=where[1], address=address, tensor=segment.name)

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


class History:
    """The launches of one device: those of its streams, and those that the host has waited for.

    It keeps who touched which bytes (about 12 bytes for each 4 that were written, read or updated) until the array is freed, or
    the host has waited.
    """

    def __init__(self) -> None:
        self.past = Past()
        self.host = LaunchClock()
        """The launches that the host has waited for, and which therefore precede all that it issues from now on."""
        self.streams: list[Stream] = []

    def stream(self) -> Stream:
        """Returns another stream of this history."""
        return Stream(self)

    def synchronize(self) -> None:
        """Waits for all streams (cudaDeviceSynchronize)."""
        self.wait(*(stream.issued for stream in self.streams))

    def wait(self, *clocks: LaunchClock) -> None:
        """Records that the host has waited for these launches."""
        self.host = self.host.join(*clocks)
        self.past.drop(self.host)

    def touched(self, function: str, touched: Touched, line: Callable[[], Line | None]) -> list[Finding]:
        """Returns the races of an access of the host with what it has not waited for."""
        run = OrderedLaunch(function, (HOST, 0), self.host, self.host)
        return list(self.past.races(Transfer(run, touched, line)))

    def in_use(self, memory: Array, page: int) -> tuple[Array, Array]:
        """Returns masks of the pages of an allocation that are all written, or all read, by what the host has not waited for."""
        return self.past.in_use(*byte_bounds(memory), page, self.host)

    def forget(self, memory: Array) -> None:
        """Forgets accesses to memory that was freed."""
        self.past.forget(*byte_bounds(memory))


@dataclass(frozen=True)
class Event:
    """A moment of a stream: everything that was issued to it before is over."""

    history: History
    clock: LaunchClock

    def synchronize(self) -> None:
        """Waits for it (cudaEventSynchronize)."""
        self.history.wait(self.clock)


class Stream:
    """Launches that run in the order in which they are issued. Without a history it is the first stream of a new one."""

    def __init__(self, history: History | None = None):
        if history is not None and not isinstance(history, History):
            raise TypeError(f"history must be a History (of another stream: stream.history), got {type(history).__name__}")
        self.history = History() if history is None else history
        self.number = len(self.history.streams)
        self.history.streams.append(self)
        self._issued = self._joined = LaunchClock()
        self._count = 0
        self._last: OrderedLaunch | None = None

    @property
    def issued(self) -> LaunchClock:
        """The launches that are over once everything issued so far is over."""
        return self._issued if self._last is None else self._issued.join(self._last.done)

    def record(self) -> Event:
        """Returns an event that follows everything issued so far (cudaEventRecord)."""
        return Event(self.history, self.issued)

    def wait(self, event: Event) -> None:
        """Makes later launches wait for the event (cudaStreamWaitEvent). Raises ValueError for an event of another history."""
        if not isinstance(event, Event) or event.history is not self.history:
            raise ValueError("event must be one that a stream of the same history recorded")
        self._joined = self._joined.join(event.clock)
        self._issued = self._issued.join(event.clock)

    def synchronize(self) -> None:
        """Waits for everything that was issued so far (cudaStreamSynchronize)."""
        self.history.wait(self.issued)

    def begin(self, kernel: str, programmatic: bool) -> OrderedLaunch:
        """Begins the next launch. A programmatic launch may begin before the one in front of it is over."""
        self._count += 1
        behind = self._last if programmatic else None
        if behind is None:
            start = wait = self.issued.join(self.history.host)
        else:
            start = self._joined.join(self.history.host, behind.told)
            wait = start.join(behind.done)
        self._issued = self.issued.join(LaunchClock({self.number: self._count}))
        if self._last is not None and self._last.behind is not None:
            self._last.behind.forget()
        if self._last is not None and behind is None:
            self._last.forget()
        self._last = run = OrderedLaunch(base_name(kernel), (self.number, self._count), start, wait, behind)
        return run

    def transfer(self, function: str, touched: Sequence[Touched], line: Callable[[], Line | None]) -> list[Finding]:
        """Records that a copy, fill or free of this stream touches ranges of memory, and returns its races with what nothing orders
        before it. `function` is its name, `line` returns its place in the program.
        """
        self._count += 1
        start = self.issued.join(self.history.host)
        run = OrderedLaunch(function, (self.number, self._count), start, start)
        self._issued, last, self._last = self.issued.join(LaunchClock({self.number: self._count})), self._last, None
        for over in filter(None, (last, last and last.behind)):
            over.forget()
        return [found for one in touched for found in self.history.past.transfer(Transfer(run, one, line))]
