"""Races of a launch with earlier ones of its history, for the race detector.

What an earlier launch touched happens before all of this one where a stream or an event orders them. A programmatic dependent
launch may begin before the launch in front of it in its stream is over (PTX ISA, "griddepcontrol"): as soon as each block of that
one has let dependents go or has exited. What the launch in front did happens before an access only where a `griddepcontrol.wait`
does, or where its thread fenced for the device before it let dependents go. So the wait is one more thing that threads hear of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..report.findings import Findings, place_of, source_and_call
from ..state.lanes import WARP, Lanes, Wave
from ..state.segments import Segment
from ..text.syntax import Instruction
from ..text.types import Array
from .history import Clock, Part, Past, Region, Run, Site
from .order import DEVICE, LANE, LANES, LEVEL, ONE, STAMP, scope_of
from .shadow import Access, Area

CROWD = ("", " and other lanes", " and other warps", " and other blocks", " and other blocks")


class Detector(Protocol):
    """The race detector of which this is a part."""

    now: int
    first: int
    per: int
    """Lanes of a cluster."""
    wave: Wave
    blocks: int
    findings: Findings
    instructions: list[Instruction]
    segments: list[Segment]

    @property
    def learns(self) -> bool:
        """Whether any lane has learnt of other clusters."""

    def area(self, segment: Segment) -> Area | None:
        """The shadow of a tensor."""

    def touched(self) -> list[tuple[Segment, Area]]:
        """The shadows of tensors that anybody has accessed, each with a segment that it is of."""

    def messages(self) -> Iterator[tuple[int, int, Array]]:
        """What was released to the whole device: an area, where in it, and until when that is so of each lane of the grid."""

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Which of the accesses `entries` did not happen before what the grid-wide lanes `mine` do now."""

    def handed_on(self, lanes: Array) -> Array | None:
        """Until when the accesses of each lane of its block are behind the last fences of lanes of one warp; None: none is."""


class Known:
    """Which of the past's entries are over by a clock."""

    def __init__(self, past: Past, clock: Clock):
        self.open = past.open(clock)
        self.parts = [(part, past.own(part.run)) for part in clock.parts]

    def covers(self, entries: Array, sites: Array) -> Array:
        out: Array = ~self.open[sites]
        for part, own in self.parts:
            out |= part.covers(entries, own[sites])
        return out


@dataclass(eq=False)
class Heard:
    """What another launch released, the lanes of this one that acquired it, and entries of when they did."""

    clock: Clock
    known: Known
    lanes: set[int] = field(default_factory=set)
    entries: Array = field(default_factory=lambda: np.zeros(0, np.uint64))


class Launches:
    """One launch `run` among those of a history, whose memory is `past`."""

    def __init__(self, races: Detector, past: Past, run: Run):
        self.races, self.past, self.run = races, past, run
        self.at_start, self.behind_wait = Known(past, run.start), Known(past, run.wait)
        self.anything = bool(self.at_start.open.any())
        self._regions: dict[int, list[Region]] = {}
        # Of each lane of the grid whether it has waited, or heard of one that has; the waits as entries.
        self._waited = np.zeros(0, np.bool_)
        self._waits = np.zeros(0, np.uint64)
        # By address what lanes acquired of launches that are not over; what lanes will with their next fence.
        self._heard: dict[int, Heard] = {}
        self._pending: dict[int, set[int]] = {}
        # Of each block of the grid, once it let dependents go: whether its threads had waited by then, what they released.
        self._told: dict[int, bool] = {}
        self._released: dict[int, Array | None] = {}

    # -- griddepcontrol -----------------------------------------------------------------------------------------------------

    def wait(self, lanes: Lanes) -> None:
        """The launch in front is over for these lanes."""
        if self.run.behind is None:
            return
        races = self.races
        if not len(self._waited):
            self._waited = np.zeros(races.blocks * races.wave.lanes_per_block, np.bool_)
        mine = lanes.index + races.first
        if self._waited[mine].all():
            return
        self._waited[mine] = True
        heads = np.flatnonzero(np.diff(lanes.warp, prepend=-1))
        several = np.where(np.diff(heads, append=lanes.n) > 1, LANES, ONE)
        self._waits = np.concatenate((self._waits, (mine[heads] | (races.now << STAMP | several)).view(np.uint64)))
        races.now += 1

    def let_go(self, lanes: Lanes) -> None:
        """These lanes let dependents begin (griddepcontrol.launch_dependents). Only the first of a block to do so counts: what all
        warps that do have in common is believed."""
        races = self.races
        behind = self.have_waited(lanes.index + races.first)
        heads = np.flatnonzero(np.diff(lanes.warp, prepend=-1))
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
        """Which of these lanes of the grid are behind a wait."""
        if not len(self._waits):
            return np.zeros(len(mine), np.bool_)
        out: Array = self._waited[mine]
        if not out.all():
            some = np.unique(mine[~out])
            self._waited[some[self.behind(some, self._waits)]] = True
            out = self._waited[mine]
        return out

    def behind(self, mine: Array, entries: Array) -> Array:
        """Which of these lanes of the grid are behind some of these entries, mostly of their own cluster."""
        out, per = np.zeros(len(mine), np.bool_), self.races.per
        cluster, theirs = mine // per, (entries & np.uint64(LANE)).astype(np.int64) // per
        for unit in np.unique(cluster).tolist():
            at = np.flatnonzero(cluster == unit)
            out[at] = self.behind_any(mine[at], entries[theirs == unit])
        if self.races.learns and not out.all():
            out[~out] = self.behind_any(mine[~out], entries)
        return out

    def behind_any(self, mine: Array, entries: Array) -> Array:
        """The same, pair by pair."""
        pairs = self.races.unordered(np.repeat(mine, len(entries)), np.tile(entries, len(mine)), False)
        return np.asarray(~pairs.reshape(len(mine), -1).all(axis=1))

    # -- atomics and fences ---------------------------------------------------------------------------------------------------

    def hear(self, access: Access, atomic: bool) -> None:
        """Lanes read with an atomic or strong access: they hear of it if a launch that is not over has released there."""
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
                    clock = found[1].join(Clock(parts=(found[0],)))
                    heard = self._heard[at] = Heard(clock, Known(self.past, clock))
                if lane not in heard.lanes:
                    self._pending.setdefault(lane, set()).add(at)
        if at_once and self._pending:
            self.acquire((access.lanes.index + self.races.first).tolist())

    def fence(self, lanes: Lanes) -> None:
        """A fence for the device: what these lanes have read until now they acquire."""
        if self._pending:
            self.acquire((lanes.index + self.races.first).tolist())

    def acquire(self, lanes: list[int]) -> None:
        """What is pending for these lanes of the grid, they know now."""
        for lane in lanes:
            for at in self._pending.pop(lane, ()):
                heard = self._heard[at]
                heard.lanes.add(lane)
                heard.entries = np.append(heard.entries, np.uint64(self.races.now << STAMP | lane))
        self.races.now += 1

    # -- accesses -------------------------------------------------------------------------------------------------------------

    def look(self, access: Access, writes: bool, strong: bool) -> None:
        """Report what earlier launches did to the same bytes and nothing orders this access behind."""
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

    def may_race(self, i: Instruction, sites: Array, writes: bool, strong: bool) -> Array:
        """Which atomics an access may race with: not a load with loads, nor atomics of the whole device with each other."""
        out: Array = sites != 0
        narrow = strong and scope_of(i.mods) != DEVICE
        for number in np.unique(sites[out]).tolist():
            site = self.site(number)
            out[sites == number] = (writes or not site.loads) and (not strong or narrow or site.narrow)
        return out

    def site(self, number: int) -> Site:
        found = self.past.sites[number]
        assert found is not None
        return found

    def judge(self, access: Access, entries: Array, sites: Array, position: Array, verbs: tuple[str, str]) -> None:
        """Report those of earlier accesses, one a granule of the access, that nothing orders it behind."""
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
        for number in np.unique(sites[at]).tolist():
            those = at[sites[at] == number]
            first = int(those[0])
            self.report(access, int(position[first]), int(entries[first]), self.site(number), verbs, len(those))

    def report(self, access: Access, at: int, entry: int, theirs: Site, verbs: tuple[str, str], count: int) -> None:
        """A finding of this launch, the later one; `at`: the granule of the access, `entry`: the other side."""
        assert access.segment is not None
        i, run, segment = access.instruction, theirs.run, access.segment
        position = int(access.who.position[at])
        address = int(access.addresses[position])
        block, thread = divmod(entry & LANE, run.lanes_per_block)
        message = (
            f"{verbs[0]} at offset {address - segment.start:#x} of {segment.name!r} and {verbs[1]} at "
            f"{source_and_call(theirs.instruction)} by an earlier launch, of {run.kernel}, block {run.number(block)}, warp "
            f"{thread // WARP}, lane {thread % WARP}{CROWD[(entry & LEVEL) >> 29]} are not ordered: {self.why(theirs)}"
        )
        key = ("race", place_of(i), place_of(theirs.instruction), run.kernel, segment.name)
        place = access.lanes.place(position)
        sides = i, theirs.instruction
        self.races.findings.record("race", message, sides, place, key, count=count, address=address, tensor=segment.name)

    def why(self, theirs: Site) -> str:
        run, behind = theirs.run, self.run.behind
        if run.launch[0] != self.run.launch[0]:
            return "it is in another stream, and no event is between them"
        if behind is run:
            return "this one is programmatic, it may begin before that one is over, and no griddepcontrol.wait is before the access"
        if behind is not None and not behind.done.knows(run.launch):
            return f"the launch between them, of {behind.kernel}, may be over before that one is: it has no griddepcontrol.wait"
        return "this one is programmatic, and may begin before that one is over"

    # -- the end ------------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The launch has been executed: what it did is in the past, and what it means for later ones is in `run`."""
        run, races = self.run, self.races
        run.lanes_per_block, run.number = races.wave.lanes_per_block, races.wave.number
        waited = set(np.unique(np.flatnonzero(self._waited) // run.lanes_per_block).tolist())
        if all(self._told.get(block, block in waited) for block in range(races.blocks)):
            run.told = run.wait
        before = (run.wait if waited else run.start).join(*(heard.clock for heard in self._heard.values() if heard.lanes))
        run.done = before.plus(run.launch)
        if any(one is not None for one in self._released.values()):
            until = np.zeros((races.blocks, run.lanes_per_block), np.int64)
            for block, one in self._released.items():
                until[block] = 0 if one is None else one
            run.told = run.told.join(Clock(parts=(Part(run, until.reshape(-1)),)))
        areas = races.touched()
        self.past.add(run, areas, races.instructions)
        places = {area.low: area.shift for _, area in areas}
        released = {area + (at << places[area]): Part(run, until) for area, at, until in races.messages()}
        self.past.messages |= {at: (part, before) for at, part in released.items()}
