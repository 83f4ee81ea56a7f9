"""Races of a launch with earlier ones of its history, for the race detector.

What an earlier launch touched happens before all of this one where a stream or an event orders them. A programmatic dependent
launch may begin before the launch in front of it in its stream is over (PTX ISA, "griddepcontrol"): as soon as each block of that
one has let dependents go or has exited. What the launch in front did happens before an access only where a `griddepcontrol.wait`
does, or where its thread fenced for the device before it let dependents go. So the wait is one more thing that threads hear of.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..report.findings import Findings, place_of, source_and_call
from ..state.lanes import WARP, Lanes, Wave
from ..state.segments import Segment
from ..text.syntax import Instruction
from ..text.types import Array
from .history import Past, Region, Run, Site
from .order import BLOCKS, DEVICE, LANE, LANES, LEVEL, LOW, ONE, STAMP, WARPS, scope_of
from .shadow import Access, Area

CROWD = ("", " and other lanes", " and other warps", " and other blocks", " and other blocks")


class Detector(Protocol):
    """The race detector of which this is a part."""

    now: int
    first: int
    wave: Wave
    blocks: int
    findings: Findings
    instructions: list[Instruction]
    segments: list[Segment]

    def area(self, segment: Segment) -> Area | None:
        """The shadow of a tensor."""

    def touched(self) -> list[tuple[Segment, Area]]:
        """The shadows of tensors that anybody has accessed, each with a segment that it is of."""

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Which of the accesses `entries` did not happen before what the grid-wide lanes `mine` do now."""

    def handed_on(self, lane: int) -> Array | None:
        """Until when the accesses of each lane of its cluster are behind the last fence of a lane for the device; None: none is."""


class Launches:
    """One launch `run` among those of a history, whose memory is `past`."""

    def __init__(self, races: Detector, past: Past, run: Run):
        self.races, self.past, self.run = races, past, run
        self.open_at_start, self.open_behind = past.open(run.start), past.open(run.wait)
        self.anything = bool(self.open_at_start.any())
        self._regions: dict[int, list[Region]] = {}
        self.dependent = run.behind is not None
        # Of each lane of the grid whether it has waited, or heard of one that has; the waits as entries.
        self._waited = np.zeros(0, np.bool_)
        self._waits = np.zeros(0, np.uint64)
        # Of each block of the grid, once it let dependents go: whether its threads had waited by then, what they released.
        self._told: dict[int, bool] = {}
        self._released: dict[int, Array | None] = {}

    # -- griddepcontrol -----------------------------------------------------------------------------------------------------

    def wait(self, lanes: Lanes) -> None:
        """The launch in front is over for these lanes."""
        if not self.dependent:
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
        behind = self.behind_wait(lanes.index + races.first)
        heads = np.flatnonzero(np.diff(lanes.warp, prepend=-1))
        for at, end in zip(heads.tolist(), [*heads[1:].tolist(), lanes.n], strict=True):
            block = int(lanes.block[at]) + races.wave.first_block
            released = self.released_by((lanes.index[at:end] + races.first).tolist())
            if block not in self._told:
                self._told[block], self._released[block] = bool(behind[at:end].all()), released
                continue
            self._told[block] &= bool(behind[at:end].all())
            before = self._released[block]
            self._released[block] = None if before is None or released is None else np.minimum(before, released)

    def released_by(self, lanes: list[int]) -> Array | None:
        """What lanes of one warp have fenced for the device: until when it is over for each lane of the block."""
        per = self.races.wave.lanes_per_block
        handed = [(lane, one) for lane in lanes if (one := self.races.handed_on(lane)) is not None]
        if not handed:
            return None
        start = lanes[0] // per * per
        around = handed[0][1][start - self.around(lanes[0]) :][:per].copy()
        for lane, one in handed:
            around[lane - start] = one[lane - self.around(lane)]
        return around

    def around(self, lane: int) -> int:
        """The first lane of the cluster of a lane of the grid."""
        per = self.races.wave.cluster * self.races.wave.lanes_per_block
        return lane // per * per

    def behind_wait(self, mine: Array) -> Array:
        """Which of these lanes of the grid are behind a wait."""
        if not len(self._waits):
            return np.zeros(len(mine), np.bool_)
        out: Array = self._waited[mine]
        some = np.unique(mine[~out])
        if len(some):
            count = len(self._waits)
            pairs = self.races.unordered(np.repeat(some, count), np.tile(self._waits, len(some)), False)
            self._waited[some[~pairs.reshape(-1, count).all(axis=1)]] = True
            out = self._waited[mine]
        return out

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
        at = np.flatnonzero(self.open_at_start[sites])
        if not len(at):
            return
        mine = access.who.lane[position[at]]
        if self.dependent:
            race = self.open_behind[sites[at]] | ~self.behind_wait(mine)
            race &= ~self.let(entries[at], sites[at])
            at = at[race]
        for number in np.unique(sites[at]).tolist():
            those = at[sites[at] == number]
            first = int(those[0])
            self.report(access, int(position[first]), int(entries[first]), self.site(number), verbs, len(those))

    def let(self, entries: Array, sites: Array) -> Array:
        """Which accesses the launch in front released to this one when it let it go."""
        released = None if self.run.behind is None else self.run.behind.released
        out = np.zeros(len(entries), np.bool_)
        if released is None:
            return out
        per = self.run.behind.lanes_per_block if self.run.behind is not None else 1
        low = (entries & LOW).astype(np.int64)
        lane, level, stamp = low & LANE, low & LEVEL, (entries >> np.uint64(STAMP)).astype(np.int64)
        until = released[lane]
        for size, levels in ((WARP, level == LANES), (per, level == WARPS)):
            until = np.where(levels, released.reshape(-1, size).min(axis=1)[lane // size], until)
        until = np.where(level >= BLOCKS, released.min(), until)
        for number in np.unique(sites).tolist():
            out[sites == number] = self.site(number).run is self.run.behind
        return np.asarray(out & (stamp <= until))

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
        if self.dependent:
            waited = set(np.unique(np.flatnonzero(self._waited) // run.lanes_per_block).tolist())
            if all(self._told.get(block, block in waited) for block in range(races.blocks)):
                run.told = run.wait
            if not waited:
                run.done = run.start.plus(run.launch)
        if any(one is not None for one in self._released.values()):
            run.released = np.zeros(races.blocks * run.lanes_per_block, np.int64)
            for block, one in self._released.items():
                if one is not None:
                    run.released[block * run.lanes_per_block :][: run.lanes_per_block] = one
        self.past.add(run, races.touched(), races.instructions)
