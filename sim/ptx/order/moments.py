"""The time of a launch, and the moments until which the warps of a wave know that accesses are over.

The order of execution is one legal interleaving, so a single clock `now` stamps every access, and ticks when threads synchronise.
A warp's knowledge consists of moments: `base` of its block (accesses of the block until then are over for all of it: the last
barrier), `synced` of the warp (bar.warp.sync), `known[w, v]` (warp w has heard of warp v's accesses until then: barriers with a
thread count, and of clusters). An access is ordered behind an earlier one whose stamp is not above such a moment. Blocks of one
cluster share memory: warps are numbered in the cluster, which is mostly one block.

An entry stands for accesses: stamp << 32 | who << 29 | lane (who: one lane, LANES of a warp, WARPS of a block, BLOCKS of a
cluster, or several CLUSTERS).

Through mbarriers single lanes hear of each other. For each cluster (mostly: block) that uses them there is a moment for each
(listening lane, lane it heard of), until which accesses of the second are over for the first. A barrier of the block says more,
and where the block is all of its cluster, clears it. Mostly all lanes of a warp hear the same, and many blocks hear at once: each
warp has a row, and a lane has one only if it heard something alone.

The asynchronous proxy: wgmma, bulk copies and tensor copies access memory by another way (proxy) than ld, st, cp.async and atomics
(PTX ISA, "Memory Consistency Model"). A write of those is visible to the asynchronous proxy of a reader only if the write happens
before the read *and* a `fence.proxy.async` lies between them: in the writer behind its write, in the reader before its read, or in
any thread between them. A write of the asynchronous proxy needs no fence once its completion was seen, nor does one that follows
ordinary reads. So there is a second clock: for each warp and lane the moment until which the lane's writes are behind a fence on
their way to the warp. A fence raises it to what the warp knows at that moment; barriers and mbarriers hand it on with the first
clock. Rows are made by the first fence: before it nothing is visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..state.findings import thread_name
from ..state.lane_sets import WARP, LaneSet, Wave, by_value, run_starts
from ..text.syntax import Array, PtxInstruction

STAMP = 32
ONE, LANES, WARPS, BLOCKS, CLUSTERS = (k << 29 for k in range(5))
LEVEL = 7 << 29
LANE = (1 << 29) - 1
LOW = np.uint64((1 << STAMP) - 1)

CROWD = ("", " and other lanes", " and other warps", " and other blocks", " and other blocks")
"""The end of a message's subject, by level."""


def stamps_of(entries: Array) -> Array:
    """Returns the moments of entries (int64)."""
    return (entries >> np.uint64(STAMP)).astype(np.int64)


def lanes_of(entries: Array) -> Array:
    """Returns the lanes of the grid of entries (int64)."""
    return (entries & np.uint64(LANE)).astype(np.int64)


def levels_of(entries: Array) -> Array:
    """Returns the levels of entries (uint64)."""
    return entries & np.uint64(LEVEL)


def raised(entries: Array, levels: Array) -> Array:
    """Returns the entries with these levels in place of their own."""
    return (entries & ~np.uint64(LEVEL)) | levels


def highest(arrays: Sequence[Array | None]) -> Array:
    return np.maximum.reduce([a for a in arrays if a is not None])


@dataclass(frozen=True, eq=False)
class GridClock:
    """Moments of all lanes of a grid of `clusters` clusters: a row for each cluster that has some, the others' are 0.

    Clocks share rows, which nobody writes to: a block that hears of many others, each of which had heard of those before, takes
    a reference for each.
    """

    clusters: int
    rows: dict[int, Array]

    @staticmethod
    def joined(clocks: Iterable[GridClock | None]) -> GridClock | None:
        """Returns the latest moments of these clocks; None if there is none."""
        found = sorted({id(one): one for one in clocks if one}.values(), key=lambda one: -len(one.rows))
        if len(found) < 2:
            return found[0] if found else None
        first, *others = found
        rows = dict(first.rows)
        for other in others:
            for cluster, row in other.rows.items():
                mine = rows.get(cluster)
                if mine is None:
                    rows[cluster] = row
                elif mine is not row and (row > mine).any():
                    rows[cluster] = np.maximum(mine, row)
        return GridClock(first.clusters, rows)

    def row(self, cluster: int, per: int) -> Array:
        """Returns the moments of the `per` lanes of a cluster."""
        found = self.rows.get(cluster)
        return np.zeros(per, np.int64) if found is None else found

    def at(self, lanes: Array, per: int, size: int = 1) -> Array:
        """Returns the moments of these lanes of the grid, each the least of those `size` that it is one of; `per`: of a cluster."""
        out = np.zeros(len(lanes), np.int64)
        for cluster, where in by_value(lanes // per):
            row = self.rows.get(cluster)
            if row is not None:
                out[where] = (row.reshape(-1, size).min(axis=1) if size > 1 else row)[lanes[where] % per // size]
        return out

    def least(self) -> int:
        """Returns the least moment of all lanes."""
        return min(int(row.min()) for row in self.rows.values()) if len(self.rows) == self.clusters else 0


class WaveClocks:
    """The time of a launch of `blocks` blocks, and the moments of the wave's warps."""

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.now = 1

    def begin_wave(self, wave: Wave) -> None:
        self.wave = wave
        self.per = wave.cluster * wave.lanes_per_block
        """Lanes of a cluster."""
        warps = self.warps = wave.cluster * wave.warps_per_block
        self.first = wave.first_block * wave.lanes_per_block
        self.now += 1
        start = self.start = self.now - 1
        self.base = np.full(wave.blocks, start, np.int64)
        self._floors: dict[LaneSet, tuple[int, int]] = {}
        self.synced = np.full(wave.blocks * wave.warps_per_block, start, np.int64)
        self.known = np.full((wave.blocks // wave.cluster, warps, warps), start, np.int64)
        if wave.cluster > 1:
            # No lane knows yet that other blocks of its cluster have begun.
            block = np.arange(warps) // wave.warps_per_block
            self.known[:, block[:, None] != block] = start - 1
        self.partial: dict[int, Array] = {}
        """Only after bar.warp.sync of some lanes: moments between the lanes of a warp."""

    def warps_of(self, block: int) -> tuple[int, slice]:
        """Returns the cluster of a block of the wave, and the block's warps in it."""
        cluster, rank = divmod(block, self.wave.cluster)
        return cluster, slice(rank * self.wave.warps_per_block, (rank + 1) * self.wave.warps_per_block)

    def floors(self, lanes: LaneSet) -> tuple[int, int]:
        """Returns until when everything in the clusters of these lanes is over for each of them, and everything in their warps."""
        found = self._floors.get(lanes)
        if found is None:
            if self.wave.cluster == 1:
                floor = int(self.base[lanes.block_ids].min())
            else:
                floor = int(self.known[lanes.warp_ids // self.warps, lanes.warp_ids % self.warps].min())
            found = self._floors[lanes] = floor, max(floor, int(self.synced[lanes.warp_ids].min()))
        return found


class Groups:
    """Lanes `index` of a wave in groups, each of one cluster (or block), whose lanes hear of each other.

    `number`: the group of each lane. `warps`: warps of the wave, group by group, each once in a group; `owner` the group of
    each, `first` where those of each group begin.
    """

    def __init__(self, index: Array, starts: Array):
        """`starts`: the position at which each group begins, the first one 0."""
        self.index = index
        self.number = np.zeros(len(index), np.int64)
        self.number[starts[1:]] = 1
        self.number = np.cumsum(self.number)
        warp = index // WARP
        heads = np.flatnonzero((np.diff(self.number, prepend=-1) != 0) | (np.diff(warp, prepend=-1) != 0))
        self.warps, self.owner = warp[heads], self.number[heads]
        self.first = run_starts(self.owner)
        self._lanes = np.diff(heads, append=len(index))

    def highest(self, rows: Array) -> Array:
        """Returns the maximum over the warps of each group of `rows` (warps, any)."""
        count = len(self.first)
        if len(rows) == count:
            return rows
        if len(rows) % count == 0 and (self.first == np.arange(0, len(rows), len(rows) // count)).all():
            return rows.reshape(count, -1, rows.shape[1]).max(axis=1)
        return np.maximum.reduceat(rows, self.first, axis=0)

    @cached_property
    def apart(self) -> bool:
        """True if no two groups have a warp in common."""
        return len(np.unique(self.warps)) == len(self.warps)

    @cached_property
    def whole(self) -> Array:
        """The positions in `warps` of the warps that the group has whole."""
        return np.flatnonzero(self._lanes == WARP)

    @cached_property
    def alone(self) -> Array:
        """Positions in `index` of the lanes of all other warps."""
        return np.flatnonzero(np.repeat(self._lanes != WARP, self._lanes))


# -- mbarriers ---------------------------------------------------------------------------------------------------------------


@dataclass
class ClockRows:
    """Moments of listeners, a row each: `warps` for whole warps of the wave, `lanes[slots[lane]]` for one lane (slot 0: none)."""

    warps: Array
    lanes: Array
    slots: Array
    free: list[int]


class LaneClocks:
    """The clocks that lanes have heard through mbarriers; true once any lane has heard something."""

    def __init__(self, order: WaveClocks):
        self.order = order
        self.per = order.per
        self.rows: ClockRows | None = None

    def __bool__(self) -> bool:
        return self.rows is not None

    def made(self) -> ClockRows:
        """Returns the rows, and makes them at the first call."""
        if self.rows is None:
            size = self.order.wave.size
            warps, lanes = (np.zeros((count, self.per), np.int64) for count in (size // WARP, 1))
            self.rows = ClockRows(warps, lanes, np.zeros(size, np.int64), [])
        return self.rows

    def slots(self, index: Array) -> Array:
        """Returns rows of their own for these lanes of the wave."""
        rows = self.made()
        new = index[rows.slots[index] == 0]
        if len(new):
            if len(rows.free) < len(new):
                count = len(rows.lanes)
                rows.lanes = np.concatenate((rows.lanes, np.zeros((max(count, len(new)), self.per), np.int64)))
                rows.free += range(count, len(rows.lanes))
            rows.slots[new] = [rows.free.pop() for _ in range(len(new))]
        return rows.slots[index]

    def forget(self, first: Array, count: int) -> None:
        """Clears what these lanes heard, `count` from each of `first` on (whole warps), since other clocks now include it."""
        if self.rows is not None:
            self.rows.warps.reshape(-1, count // WARP, self.per)[first // count] = 0
            self.unslot(first[:, None] + np.arange(count))

    def unslot(self, index: Array) -> None:
        rows = self.made()
        used = rows.slots[index]
        used = used[used > 0]
        if len(used):
            rows.lanes[used] = 0
            rows.free += used.tolist()
            rows.slots[index] = 0

    def by_warps(self, lanes: LaneSet) -> bool:
        """True if none of these lanes has heard something alone."""
        return self.rows is None or not self.rows.slots[lanes.index].any()

    def row(self, lane: int) -> Array | None:
        """Returns the moments that a lane of the wave has heard of its cluster; None: it has heard nothing."""
        rows = self.rows
        return None if rows is None else np.maximum(rows.warps[lane >> 5], rows.lanes[rows.slots[lane]])

    def of(self, groups: Groups) -> Array | None:
        """Returns the moments that the lanes of each group have heard together; None: they have heard nothing."""
        rows = self.rows
        if rows is None:
            return None
        out = groups.highest(rows.warps[groups.warps])
        slots = rows.slots[groups.index]
        at = np.flatnonzero(slots)
        if len(at):
            number = groups.number[at]
            starts = run_starts(number)
            highest = np.maximum.reduceat(rows.lanes[slots[at]], starts, axis=0)
            out[number[starts]] = np.maximum(out[number[starts]], highest)
        return out

    def knows(self, groups: Groups) -> Array:
        """Returns for each group the moments until which each lane of its cluster is over for a lane of the group."""
        order, warps = self.order, groups.warps
        cluster, here = np.divmod(warps, order.warps)
        known = groups.highest(order.known[cluster, here])
        known[groups.owner, here] = np.maximum(known[groups.owner, here], order.synced[warps])
        out = np.repeat(known, WARP, axis=1)
        if order.partial:
            self.partially(groups, out)
        heard = self.of(groups)
        return out if heard is None else np.maximum(out, heard, out=out)

    def partially(self, groups: Groups, out: Array) -> None:
        """Adds moments that lanes of a warp have of each other by bar.warp.sync of some of them."""
        for group, warp in zip(groups.owner.tolist(), groups.warps.tolist(), strict=True):
            moments = self.order.partial.get(warp)
            if moments is not None:
                mine = groups.index[(groups.index // WARP == warp) & (groups.number == group)] % WARP
                part = out[group].reshape(-1, WARP)[warp % self.order.warps]
                np.maximum(part, moments[mine].max(axis=0), out=part)

    def hear(self, groups: Groups, told: Array) -> None:
        """Gives groups the moments that others handed on, a row each."""
        rows = self.made()
        if len(groups.whole):
            warps = groups.warps[groups.whole]
            rows.warps[warps] = np.maximum(rows.warps[warps], told[groups.owner[groups.whole]])
        if len(groups.alone):
            slots = self.slots(groups.index[groups.alone])
            rows.lanes[slots] = np.maximum(rows.lanes[slots], told[groups.number[groups.alone]])

    def share(self, warp: int, members: Array) -> None:
        """Joins the clocks of lanes `members` of a warp of the wave, which have met."""
        rows, index = self.rows, members + warp * WARP
        if rows is None or not rows.slots[index].any():
            return
        together = rows.lanes[rows.slots[index]].max(axis=0)
        if len(members) == WARP:
            np.maximum(rows.warps[warp], together, out=rows.warps[warp])
            self.unslot(index)
        else:
            rows.lanes[self.slots(index)] = together

    def meet(self, block: int) -> None:
        """Joins the clocks of all lanes of a block, which have met, about the rest of the cluster."""
        rows, wave = self.rows, self.order.wave
        if rows is None:
            return
        index = np.arange(block * wave.lanes_per_block, (block + 1) * wave.lanes_per_block)
        mine = rows.warps[block * wave.warps_per_block : (block + 1) * wave.warps_per_block]
        mine[:] = np.maximum(mine.max(axis=0), rows.lanes[rows.slots[index]].max(axis=0))
        self.unslot(index)

    def moments(self, mine: Array, other: Array, several: Array, many: Array) -> Array:
        """Returns until when lanes `mine` of the grid have heard of `other`; of `several` lanes or warps, the latest such moment.

        `many` are warps of the block of `other`.
        """
        rows, per = self.made(), self.order.wave.lanes_per_block
        place = mine - self.order.first
        near = other // self.per == mine // self.per
        other = np.where(near, other % self.per, 0)
        warp, slot = place >> 5, rows.slots[place]
        out = np.maximum(rows.warps[warp, other], rows.lanes[slot, other])
        for chosen, size in ((several & ~many, WARP), (many, per)):
            some = np.flatnonzero(chosen & near)
            if len(some):
                shape, column = (-1, self.per // size, size), other[some] // size
                found = rows.warps.reshape(shape)[warp[some], column].max(axis=1)
                out[some] = np.maximum(found, rows.lanes.reshape(shape)[slot[some], column].max(axis=1))
        out[~near] = 0
        return out


# -- the asynchronous proxy -----------------------------------------------------------------------------------------------

SPACES = ("shared", "global")


class Proxy:
    """The fences of lanes. `rows[space]` are (warps, lanes) moments: of each warp of the wave about the lanes of its cluster."""

    def __init__(self, order: WaveClocks):
        self.order = order
        self.per = order.per
        self.rows: dict[str, Array] = {}
        # Time of the last fence of each lane of the grid, for other blocks, of which no moments are kept.
        self.fenced: dict[str, Array] = {}

    def made(self, space: str) -> Array:
        """Returns the rows of a space, and makes them at the first call."""
        if space not in self.rows:
            self.rows[space] = np.zeros((self.order.wave.size // WARP, self.per), np.int64)
        return self.rows[space]

    def fence(self, warps: Groups, known: Array, i: PtxInstruction) -> None:
        """Runs a fence.proxy.async of lanes, a group a warp, for both spaces or for the one that it names. `known`: the moments
        that each warp knows.
        """
        named = [space for space in SPACES if any(mod.endswith(space) or f"{space}::" in mod for mod in i.mods)]
        order = self.order
        known[warps.number, warps.index % self.per] = order.now
        for space in named or SPACES:
            rows = self.made(space)
            rows[warps.warps] = np.maximum(rows[warps.warps], known)
            if space not in self.fenced:
                self.fenced[space] = np.zeros(order.blocks * order.wave.lanes_per_block, np.int64)
            self.fenced[space][warps.index + order.first] = order.now
        order.now += 1

    # -- moments handed on --------------------------------------------------------------------------------------------------

    def released(self, groups: Groups) -> Array:
        """Returns the moments that each group hands on: both spaces, one behind the other."""
        out = np.zeros((len(groups.first), len(SPACES), self.per), np.int64)
        for k, space in enumerate(SPACES):
            if space in self.rows:
                out[:, k] = groups.highest(self.rows[space][groups.warps])
        return out.reshape(len(out), -1)

    def hear(self, groups: Groups, told: Array) -> None:
        """Gives groups the moments that others handed on, a row each. A warp hears what its lanes hear."""
        every = told.reshape(len(told), len(SPACES), self.per)
        for k, space in enumerate(SPACES):
            if every[:, k].any():
                rows, news = self.made(space), every[groups.owner, k]
                if groups.apart:
                    rows[groups.warps] = np.maximum(rows[groups.warps], news)
                else:
                    np.maximum.at(rows, groups.warps, news)

    def meet(self, blocks: Array) -> None:
        """Joins the fences of all threads of each of these blocks, which have met."""
        for rows in self.rows.values():
            mine = rows.reshape(self.order.wave.blocks, -1, self.per)
            mine[blocks] = mine[blocks].max(axis=1, keepdims=True)

    # -- queries ------------------------------------------------------------------------------------------------------------

    def unfenced(self, space: str, reader: Array, writer: Array, stamp: Array, collective: Array) -> Array:
        """Returns a mask of the writes without a fence on their way to the reader.

        reader, writer: lanes of the grid; stamp: when the write was; collective: the writer's whole warp made it.
        """
        per, first = self.per, self.order.first
        same = (reader - first) // per == (writer - first) // per
        moment = np.zeros(len(reader), np.int64)
        rows = self.rows.get(space)
        if rows is not None:
            warp, other = (reader - first) // WARP, (writer - first) % per
            moment = np.where(same, rows[warp, other], 0)
            at = np.flatnonzero(same & collective)
            if len(at):
                moment[at] = rows.reshape(len(rows), -1, WARP).min(axis=2)[warp[at], other[at] // WARP]
        fenced = self.fenced.get(space)
        if fenced is not None and not same.all():
            # Between blocks a fence of the writer behind its write suffices, or any fence of the reader since then.
            moment[~same] = np.maximum(fenced[writer[~same]], fenced[reader[~same]])
        return (stamp > moment) & (stamp > 0)


class LaunchPart(NamedTuple):
    """A launch that is over `until` these moments, by lane of its grid."""

    run: OrderedLaunch
    until: GridClock

    def covers(self, entries: Array, own: Array) -> Array:
        """Returns a mask of the entries, among those that are its `own`, that are not later."""
        out = own.copy()
        lane, level = lanes_of(entries[out]), levels_of(entries[out])
        per = self.run.lanes_per_cluster
        until = self.until.at(lane, per)
        for size, several in ((WARP, level == LANES), (self.run.lanes_per_block, level == WARPS)):
            until[several] = self.until.at(lane[several], per, size)
        out[out] = stamps_of(entries[out]) <= np.where(level >= BLOCKS, self.until.least(), until)
        return out


@dataclass(frozen=True)
class LaunchClock:
    """Launches that are over: of each stream the `first` so many, and those `besides`, each a (stream, number); some in `parts`."""

    first: dict[int, int] = field(default_factory=dict)
    besides: frozenset[tuple[int, int]] = frozenset()
    parts: tuple[LaunchPart, ...] = ()

    def knows(self, launch: tuple[int, int]) -> bool:
        return launch[1] <= self.first.get(launch[0], 0) or launch in self.besides

    def join(self, *others: LaunchClock) -> LaunchClock:
        first, besides, parts = dict(self.first), self.besides, {id(part.until): part for part in self.parts}
        for other in others:
            besides |= other.besides
            parts |= {id(part.until): part for part in other.parts}
            for stream, count in other.first.items():
                first[stream] = max(count, first.get(stream, 0))
        over = LaunchClock(first, frozenset(one for one in besides if one[1] > first.get(one[0], 0)))
        return replace(over, parts=tuple(part for part in parts.values() if not over.knows(part.run.launch)))

    def plus(self, launch: tuple[int, int]) -> LaunchClock:
        """Returns the clock after which this launch is over, too."""
        stream, number = launch
        if number == self.first.get(stream, 0) + 1:
            return replace(self, first=self.first | {stream: number})
        return replace(self, besides=self.besides | {launch})


@dataclass(eq=False)
class OrderedLaunch:
    """One launch, with the clocks of launches that are over at its begin, and after its wait (griddepcontrol.wait).

    `behind`: the launch before whose end it may begin. `told` is over for a launch that begins once all its blocks have let
    dependents go, `done` once it is over itself.
    """

    kernel: str
    launch: tuple[int, int]
    start: LaunchClock
    wait: LaunchClock
    behind: OrderedLaunch | None = None
    told: LaunchClock = field(init=False)
    done: LaunchClock = field(init=False)
    lanes_per_block: int = 1
    lanes_per_cluster: int = 1
    number: Callable[[int], int] = int
    """The linear index in the grid of the n-th block that ran."""

    def __post_init__(self) -> None:
        self.told, self.done = self.start, self.wait.plus(self.launch)

    def thread(self, entry: int) -> str:
        """Returns the kernel and the thread, or threads, of an entry in words."""
        block, thread = divmod(entry & LANE, self.lanes_per_block)
        place = self.number(block), thread // WARP, thread % WARP
        return f"of {self.kernel}, {thread_name(place)}{CROWD[(entry & LEVEL) >> 29]}"

    def forget(self) -> None:
        """Forgets its clocks, once nobody needs them."""
        self.behind, self.start, self.wait, self.told, self.done = None, LaunchClock(), LaunchClock(), LaunchClock(), LaunchClock()
