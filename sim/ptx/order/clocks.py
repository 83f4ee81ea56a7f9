"""The vector clocks of happens-before, made by barriers, fences and atomics (`Order`), and by mbarriers (`Heard`).

Order comes from: program order within a lane; barriers, for their threads; bar.warp.sync, for its members; a fence and then an
atomic (or a store that is volatile, relaxed or release) with a later atomic (or such a load, and then a fence) on the same
address. Shuffles, mma and ldmatrix order nothing.

The order of execution is one legal interleaving, so a single clock `now` stamps every access, and ticks when threads synchronise.
A warp's knowledge consists of moments: `base` of its block (accesses of the block until then are over for all of it: the last
barrier), `synced` of the warp (bar.warp.sync), `known[w, v]` (warp w has heard of warp v's accesses until then: barriers with a
thread count, and of clusters). An access is ordered behind an earlier one whose stamp is not above such a moment. Blocks of one
cluster share memory: warps are numbered in the cluster, which is mostly one block.

An entry stands for accesses: stamp << 32 | who << 29 | lane (who: one lane, LANES of a warp, WARPS of a block, BLOCKS of a
cluster, or several CLUSTERS).

Through mbarriers, lanes of a cluster (mostly: of a block) hear of each other: for each cluster that uses them, a moment for each
(listening lane, lane it heard of), until which accesses of the second are over for the first. A barrier of the block says more,
and where the block is all of its cluster, clears it. Mostly all lanes of a warp hear the same, and many blocks hear at once: each
warp has a row, and a lane has one only if it heard something alone. Groups of lanes (one a block, say) are handled together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ..state.lanes import WARP, Lanes, Wave
from ..text.syntax import Array
from .proxy import SPACES, Groups, Proxy

REMEMBERED = 1 << 10
"""Most remembered sets of lanes in groups."""


class Clocks(Protocol):
    """The other clocks (of `Order`): the time, and until when warps, and lanes of a warp, have heard of each other."""

    now: int
    wave: Wave
    per: int
    """Lanes of a cluster."""
    known: Array
    synced: Array
    partial: dict[int, Array]
    proxy: Proxy | None


@dataclass
class ClockRows:
    """Moments of listeners, a row each: `warps` for whole warps of the wave, `lanes[slots[lane]]` for one lane (slot 0: none)."""

    warps: Array
    lanes: Array
    slots: Array
    free: list[int]


class Heard:
    """The clocks that lanes have heard through mbarriers; true once any lane has heard something."""

    def __init__(self, order: Clocks):
        self.order = order
        self.per = order.per
        self.rows: ClockRows | None = None
        self._groups: dict[tuple[Lanes, bytes], Groups] = {}

    def __bool__(self) -> bool:
        return self.rows is not None

    def groups(self, lanes: Lanes, starts: Array) -> Groups:
        """Returns lanes in groups, the k-th of which begins at position starts[k] and is of one cluster."""
        key = lanes, starts.tobytes()
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) > REMEMBERED:
                self._groups.clear()
            found = self._groups[key] = Groups.of(lanes, starts, self.per)
        return found

    def made(self) -> ClockRows:
        """Returns the rows, and makes them at the first call."""
        if self.rows is None:
            size = self.order.wave.size
            self.rows = ClockRows(
                np.zeros((size // WARP, self.per), np.int64), np.zeros((1, self.per), np.int64), np.zeros(size, np.int64), []
            )
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
        if self.rows is None:
            return
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

    def by_warps(self, lanes: Lanes) -> bool:
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
        slots = rows.slots[groups.lanes.index]
        at = np.flatnonzero(slots)
        if len(at):
            number = groups.number[at]
            starts = np.flatnonzero(np.diff(number, prepend=-1))
            highest = np.maximum.reduceat(rows.lanes[slots[at]], starts, axis=0)
            out[number[starts]] = np.maximum(out[number[starts]], highest)
        return out

    def of_all(self, lanes: Lanes) -> Array | None:
        """Returns the moments that lanes of one cluster have heard together."""
        found = self.of(self.groups(lanes, np.zeros(1, np.int64)))
        return None if found is None else np.asarray(found[0])

    def knows(self, groups: Groups) -> Array:
        """Returns for each group the moments until which each lane of its cluster is over for a lane of the group."""
        order, warps = self.order, groups.warps
        per = self.per // WARP
        here = warps % per
        known = groups.highest(order.known[warps // per, here])
        known[groups.owner, here] = np.maximum(known[groups.owner, here], order.synced[warps])
        out = np.repeat(known, WARP, axis=1)
        if order.partial:
            self.partially(groups, out)
        heard = self.of(groups)
        return out if heard is None else np.maximum(out, heard, out=out)

    def partially(self, groups: Groups, out: Array) -> None:
        """Adds moments that lanes of a warp have of each other by bar.warp.sync of some of them."""
        lanes, per = groups.lanes, self.per // WARP
        for group, warp in zip(groups.owner.tolist(), groups.warps.tolist(), strict=True):
            moments = self.order.partial.get(warp)
            if moments is not None:
                mine = lanes.lane[(lanes.warp == warp) & (groups.number == group)]
                part = out[group, warp % per * WARP : (warp % per + 1) * WARP]
                np.maximum(part, moments[mine].max(axis=0), out=part)

    def released_by(self, groups: Groups) -> Array:
        """Returns the moments that each group hands on now: its own past, all that it knows, and its fences for the other proxy."""
        order = self.order
        out = self.knows(groups)
        out[groups.number, groups.lanes.index % self.per] = order.now
        order.now += 1
        return out if order.proxy is None else np.concatenate((out, order.proxy.told_by(groups)), axis=1)

    def released(self, lanes: Lanes) -> Array:
        """Returns the moments that lanes of one cluster hand on now."""
        return np.asarray(self.released_by(self.groups(lanes, np.zeros(1, np.int64)))[0])

    def copied(self, lane: int, told: Array | None) -> Array:
        """Ends a copy that a lane of the wave issued; returns `told`, the moments to hand on, with the lane's own past."""
        if told is None:
            told = np.zeros(self.per if self.order.proxy is None else (1 + len(SPACES)) * self.per, np.int64)
        told[lane % self.per] = self.order.now
        self.order.now += 1
        return told

    def hear(self, lanes: Lanes, told: Array) -> None:
        """Gives lanes of one cluster the moments that others handed on."""
        self.hear_all([(lanes, told)])

    def hear_by(self, groups: Groups, told: Array) -> None:
        """Gives groups that have no warp in common the moments that others handed on, a row each."""
        rows, lanes = self.made(), groups.lanes
        whole = np.bincount(groups.number) == WARP * np.bincount(groups.owner)
        mine = whole[groups.owner]
        warps = groups.warps[mine]
        rows.warps[warps] = np.maximum(rows.warps[warps], told[groups.owner[mine]])
        alone = np.flatnonzero(~whole[groups.number])
        if len(alone):
            slots = self.slots(lanes.index[alone])
            rows.lanes[slots] = np.maximum(rows.lanes[slots], told[groups.number[alone]])

    def hear_all(self, news: Sequence[tuple[Lanes, Array]]) -> None:
        """Gives disjoint sets of lanes, each of one cluster, the moments that others handed on."""
        if self.order.proxy is not None:
            self.order.proxy.hear_all([(lanes, told[self.per :]) for lanes, told in news])
        whole = [one for one in news if one[0].whole_warps]
        alone = [one for one in news if not one[0].whole_warps]
        rows = self.made()
        if whole:
            raise_rows(rows.warps, [lanes.warp_ids for lanes, _ in whole], [told[: self.per] for _, told in whole])
        if alone:
            slots = [self.slots(lanes.index) for lanes, _ in alone]
            raise_rows(rows.lanes, slots, [told[: self.per] for _, told in alone])

    def share(self, warp: int, members: Array) -> None:
        """Joins the clocks of lanes `members` of a warp of the wave, which have met."""
        rows = self.rows
        if rows is None:
            return
        index = members + warp * WARP
        if not rows.slots[index].any():
            return
        together = rows.lanes[rows.slots[index]].max(axis=0)
        if len(members) == WARP:
            np.maximum(rows.warps[warp], together, out=rows.warps[warp])
            self.unslot(index)
        else:
            rows.lanes[self.slots(index)] = together

    def meet(self, block: int) -> None:
        """Joins the clocks of all lanes of a block, which have met, about the rest of the cluster."""
        rows = self.rows
        if rows is None:
            return
        wave = self.order.wave
        index = np.arange(block * wave.lanes_per_block, (block + 1) * wave.lanes_per_block)
        mine = rows.warps[block * wave.warps_per_block : (block + 1) * wave.warps_per_block]
        mine[:] = np.maximum(mine.max(axis=0), rows.lanes[rows.slots[index]].max(axis=0))
        self.unslot(index)

    def moments(self, mine: Array, other: Array, several: Array, many: Array) -> Array:
        """Returns until when lanes `mine` of the grid have heard of `other`; of `several` lanes or warps, the latest such moment.

        `many` are warps of the block of `other`.
        """
        rows = self.made()
        per = self.order.wave.lanes_per_block
        place = mine - self.order.wave.first_block * per
        near = other // self.per == mine // self.per
        other = np.where(near, other % self.per, 0)
        warp, slot = place >> 5, rows.slots[place]
        out: Array = np.maximum(rows.warps[warp, other], rows.lanes[slot, other])
        for chosen, size in ((several & ~many, WARP), (many, per)):
            some = np.flatnonzero(chosen & near)
            if len(some):
                shape, column = (-1, self.per // size, size), other[some] // size
                found = rows.warps.reshape(shape)[warp[some], column].max(axis=1)
                out[some] = np.maximum(found, rows.lanes.reshape(shape)[slot[some], column].max(axis=1))
        out[~near] = 0
        return out


def raise_rows(rows: Array, numbers: list[Array], told: list[Array]) -> None:
    """Raises rows `numbers[k]`, all different, to told[k]."""
    if len(numbers) == 1:
        rows[numbers[0]] = np.maximum(rows[numbers[0]], told[0])
        return
    every = np.concatenate(numbers)
    news = np.repeat(np.stack(told), [len(some) for some in numbers], axis=0)
    rows[every] = np.maximum(rows[every], news)


STAMP = 32
ONE, LANES, WARPS, BLOCKS, CLUSTERS = (k << 29 for k in range(5))
LEVEL = 7 << 29
LANE = (1 << 29) - 1
LOW = np.uint64((1 << STAMP) - 1)

MANY = 64
"""Number of pairs from which on it pays to look for repeated ones."""

DEVICE, CLUSTER, BLOCK = range(3)
"""Scopes of fences, atomics and strong accesses, the widest first."""


def scope_of(mods: Sequence[str]) -> int:
    """Returns the scope that modifiers name; the device's if they name none (PTX ISA, "atom", "membar/fence")."""
    return BLOCK if "cta" in mods else CLUSTER if "cluster" in mods else DEVICE


class Released(NamedTuple):
    """The clocks that arrivals at barriers release, a row for each group of lanes: moments until which all of each warp of the
    cluster is over, moments that its lanes heard of lanes, its fences for the asynchronous proxy, and (by group) moments of other
    blocks learnt through atomics.
    """

    moments: Array
    rows: Array | None
    fenced: Array | None = None
    learnt: tuple[Array | None, ...] = ()

    def of(self, groups: Array) -> Released:
        """Returns only these groups."""
        rows, fenced = (None if each is None else each[groups] for each in (self.rows, self.fenced))
        return Released(self.moments[groups], rows, fenced, tuple(self.learnt[k] for k in groups) if self.learnt else ())


class Order:
    """The happens-before order of one launch of `blocks` blocks; `proxies`: the kernel uses the asynchronous proxy."""

    def __init__(self, blocks: int, proxies: bool = False):
        self.blocks = blocks
        self.proxies = proxies
        self.proxy: Proxy | None = None
        self.now = 1
        # Stamps that lanes have learnt of the lanes of the grid through atomics.
        self._lane_knows: dict[int, Array] = {}
        self._block_knows: dict[int, Array] = {}
        # Messages that lanes have read and will acquire with their next fence, by scope of the message.
        self._heard: tuple[dict[int, Array], ...] = ({}, {}, {})
        self._messages: dict[tuple[int, int, int, int], Array] = {}
        # Time of the last fence of each lane of the grid, by scope: the whole device, its cluster, its block.
        self._fenced: tuple[Array, Array, Array] | None = None
        self._inits: dict[int, int] = {}

    def begin_wave(self, wave: Wave) -> None:
        self.wave = wave
        self.per = wave.cluster * wave.lanes_per_block
        warps = self.warps = wave.cluster * wave.warps_per_block
        self.first = wave.first_block * wave.lanes_per_block
        self.now += 1
        start = self.start = self.now - 1
        self.base = np.full(wave.blocks, start, np.int64)
        self._floors: dict[Lanes, tuple[int, int]] = {}
        self.synced = np.full(wave.blocks * wave.warps_per_block, start, np.int64)
        self.known = np.full((wave.blocks // wave.cluster, warps, warps), start, np.int64)
        if wave.cluster > 1:
            # No lane knows yet that other blocks of its cluster have begun.
            block = np.arange(warps) // wave.warps_per_block
            self.known[:, block[:, None] != block] = start - 1
        self.heard = Heard(self)
        if self.proxies:
            self.proxy = Proxy(self)
        # True if threads did something between arriving at a barrier of a cluster and waiting there.
        self.split = False
        # Only after bar.warp.sync of some lanes: moments between the lanes of a warp.
        self.partial: dict[int, Array] = {}

    # -- barriers ------------------------------------------------------------------------------------------------------

    def block_barrier(self, blocks: Array) -> None:
        """Joins the clocks of all threads of these blocks, which have met."""
        moment = self.now
        self.base[blocks] = moment
        self.synced.reshape(self.wave.blocks, -1)[blocks] = moment
        if self.wave.cluster == 1:
            self.known[blocks] = moment
            self.heard.forget(blocks * self.per, self.per)
        else:
            for block in blocks.tolist():
                self.heard.meet(block)
                cluster, mine = self.warps_of(block)
                self.known[cluster, mine] = self.known[cluster, mine].max(axis=0)
                self.known[cluster, mine, mine] = moment
        self._floors.clear()
        self.now += 1
        if self.proxy is not None:
            self.proxy.meet(blocks)
        if self._lane_knows:
            per = self.wave.lanes_per_block
            for block in blocks.tolist():
                number = block + self.wave.first_block
                lanes = [lane for lane in self._lane_knows if lane // per == number]
                if lanes:
                    learnt = [self._lane_knows.pop(lane) for lane in lanes]
                    self._block_knows[number] = highest([*learnt, self._block_knows.get(number)])

    def warps_of(self, block: int) -> tuple[int, slice]:
        """Returns the cluster of a block of the wave, and the block's warps in it."""
        cluster, rank = divmod(block, self.wave.cluster)
        return cluster, slice(rank * self.wave.warps_per_block, (rank + 1) * self.wave.warps_per_block)

    def floors(self, lanes: Lanes) -> tuple[int, int]:
        """Returns until when everything in the clusters of these lanes is over for each of them, and everything in their warps."""
        found = self._floors.get(lanes)
        if found is None:
            if self.wave.cluster == 1:
                floor = int(self.base[lanes.block_ids].min())
            else:
                floor = int(self.known[lanes.warp_ids // self.warps, lanes.warp_ids % self.warps].min())
            found = self._floors[lanes] = floor, max(floor, int(self.synced[lanes.warp_ids].min()))
        return found

    def arrive(self, groups: Groups) -> Released:
        """Groups of lanes, each of one cluster, arrive at a barrier of it, or of a part of it. Returns what they release now."""
        warps = groups.warps % self.warps
        released = groups.highest(self.known[groups.warps // self.warps, warps])
        released[groups.owner, warps] = self.now
        self.now += 1
        learnt: list[list[Array | None]] = []
        if self._lane_knows:
            learnt = [[] for _ in groups.first]
            for lane, group in zip((groups.lanes.index + self.first).tolist(), groups.number.tolist(), strict=True):
                if lane in self._lane_knows:
                    learnt[group].append(self._lane_knows[lane])
        fenced = None if self.proxy is None else self.proxy.told_by(groups)
        together = tuple(highest(some) if some else None for some in learnt)
        return Released(released, self.heard.of(groups), fenced, together)

    def depart(self, groups: Groups, released: list[Released]) -> None:
        """Groups of lanes have waited for arrivals that released these clocks, as many for each group."""
        heard = np.maximum.reduce([each.moments for each in released])
        for each in released:
            if self.proxy is not None and each.fenced is not None:
                self.proxy.hear_by(groups, each.fenced)
        cluster, warps = groups.warps // self.warps, groups.warps % self.warps
        self.known[cluster, warps] = np.maximum(self.known[cluster, warps], heard[groups.owner])
        self.synced[groups.warps] = np.maximum(self.synced[groups.warps], heard[groups.owner, warps])
        if told := [each.rows for each in released if each.rows is not None]:
            self.heard.hear_by(groups, highest(told))
        if any(each.learnt for each in released):
            for group in range(len(groups.first)):
                news = [one for each in released if each.learnt and (one := each.learnt[group]) is not None]
                if news:
                    self._learn(groups.lanes.subset(np.flatnonzero(groups.number == group)), highest(news))
        self._floors.clear()

    def _learn(self, lanes: Lanes, news: Array) -> None:
        """Gives lanes what others learnt through atomics; those that knew the same before share their new clock."""
        together: dict[int, Array] = {}
        for lane in (lanes.index + self.first).tolist():
            known = self._lane_knows.get(lane)
            if known is not None and id(known) not in together:
                together[id(known)] = highest([known, news])
            self._lane_knows[lane] = news if known is None else together[id(known)]

    def cluster_barrier(self, cluster: int, relaxed: bool, split: bool) -> None:
        """Joins the clocks of a cluster's threads, which have met; `relaxed` or `split` arrivals hand on their own."""
        self.split |= split
        if relaxed:
            return
        if not split:
            self.known[cluster] = self.now
            self.synced[cluster * self.warps : (cluster + 1) * self.warps] = self.now
            self.heard.forget(np.array([cluster * self.per]), self.per)
            self._floors.clear()
            self.now += 1
        # All lanes now know what some learnt of other clusters through atomics.
        first = cluster * self.wave.cluster + self.wave.first_block
        blocks, per = range(first, first + self.wave.cluster), self.wave.lanes_per_block
        lanes = [lane for lane in self._lane_knows if lane // per in blocks]
        learnt = [*(self._lane_knows[lane] for lane in lanes), *(self._block_knows[b] for b in blocks if b in self._block_knows)]
        if learnt:
            self._block_knows |= dict.fromkeys(blocks, highest(learnt))

    def begun(self, lanes: Lanes, blocks: Array) -> Array:
        """Returns a mask of the lanes behind the begin of a block of their cluster: they have heard of one of its threads."""
        cluster, index = self.wave.cluster, np.arange(lanes.n)
        known = self.known[lanes.warp // self.warps, lanes.warp % self.warps].reshape(lanes.n, cluster, -1).max(axis=2)
        found: Array = known[index, blocks % cluster] >= self.start
        for at in np.flatnonzero(~found).tolist():
            place = int(lanes.index[at])
            row, learnt = self.heard.row(place), self.learnt(place + self.first)
            per, block = self.wave.lanes_per_block, int(blocks[at])
            mine = slice(block % cluster * per, (block % cluster + 1) * per)
            there = slice(self.first + block * per, self.first + (block + 1) * per)
            found[at] = (row is not None and row[mine].max() >= self.start) or (
                learnt is not None and learnt[there].max() >= self.start
            )
        return found

    def warp_sync(self, warps: Array) -> None:
        """Joins the clocks of all lanes of these warps of the wave, which have met."""
        self.synced[warps] = self.now
        self._floors.clear()
        self.now += 1
        if self.heard:
            for warp in warps.tolist():
                self.heard.share(warp, np.arange(WARP))
        if self._lane_knows:
            for warp in warps.tolist():
                self._share(range(self.first + warp * WARP, self.first + (warp + 1) * WARP))

    def lanes_sync(self, warp: int, mask: int) -> None:
        """Joins the clocks of some lanes of a warp, which have met."""
        members = np.array([lane for lane in range(WARP) if mask >> lane & 1])
        moments = self.partial.setdefault(warp, np.zeros((WARP, WARP), np.int64))
        heard = moments[members].max(axis=0)
        heard[members] = self.now
        moments[members] = heard
        self.heard.share(warp, members)
        self.now += 1
        if self._lane_knows:
            self._share((members + self.first + warp * WARP).tolist())

    def _share(self, lanes: list[int] | range) -> None:
        learnt = [self._lane_knows[lane] for lane in lanes if lane in self._lane_knows]
        if learnt:
            together = highest(learnt)
            self._lane_knows |= dict.fromkeys(lanes, together)

    def alike(self, lanes: Lanes) -> bool:
        """True if all lanes of a warp know the same, for the warps of these lanes."""
        return not (self.partial or self._lane_knows) and self.heard.by_warps(lanes)

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Returns a mask of the accesses `entries` that did not happen before the current ones of the grid-wide lanes `mine`."""
        if len(mine) > MANY:
            # Tiles that one lane copies, mostly: the same question for all of their granules.
            heads = np.flatnonzero((mine[1:] != mine[:-1]) | (entries[1:] != entries[:-1])) + 1
            if 2 * len(heads) < len(mine):
                heads = np.concatenate(([0], heads))
                return np.repeat(self.judged(mine[heads], entries[heads], collective), np.diff(heads, append=len(mine)))
        return self.judged(mine, entries, collective)

    def judged(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Returns `unordered`, pair by pair."""
        stamp = (entries >> np.uint64(STAMP)).astype(np.int64)
        low = (entries & LOW).astype(np.int64)
        other, who = low & LANE, low & ~LANE
        per = self.per
        near = (other // per == mine // per) & (who != CLUSTERS)
        ours = near & (other >> 5 == mine >> 5) & (who <= LANES)
        place = np.where(near, mine - self.first, 0)
        cluster, warp = place // per, place % per >> 5
        moment = self.known[cluster, warp, np.where(near, other % per >> 5, 0)]
        # An entry has the stamp of its latest reader, before which others may have arrived: if `split`, only that one counts.
        if not self.split and (who >= WARPS).any():
            least = self.known.min(axis=2)[cluster, warp]
            if self.wave.cluster > 1:
                blocks = self.known.reshape(*self.known.shape[:2], self.wave.cluster, -1).min(axis=3)
                least = np.where(who == WARPS, blocks[cluster, warp, other % per // self.wave.lanes_per_block], least)
            moment = np.where(who >= WARPS, least, moment)
        moment = np.where(ours, self.synced[place >> 5], moment)
        race = (stamp > 0) & ~(near & (stamp <= moment))
        if not collective:
            race &= ~((other == mine) & (who == ONE))
        if self.partial:
            for at in np.flatnonzero(race & ours & (who == ONE)):
                moments = self.partial.get(int(mine[at] - self.first) >> 5)
                race[at] &= moments is None or stamp[at] > moments[mine[at] & 31, other[at] & 31]
        if self.heard and race.any():
            race &= stamp > self.heard.moments(mine, other, (who == LANES) | (who == WARPS), who == WARPS)
        if self.learns and race.any():
            for lane in np.unique(mine[race]):
                learnt = self.learnt(int(lane))
                if learnt is None:
                    continue
                heard = race & (mine == lane)
                found = learnt[other]
                found[who == LANES] = learnt.reshape(-1, WARP).min(axis=1)[other[who == LANES] // WARP]
                block = self.wave.lanes_per_block
                found[who == WARPS] = learnt.reshape(-1, block).min(axis=1)[other[who == WARPS] // block]
                # Readers in many blocks share an entry: a lane that has heard of other blocks counts as ordered behind all.
                found[who >= BLOCKS] = self.now
                race &= ~(heard & (stamp <= found))
        return np.asarray(race)

    # -- atomics and fences ------------------------------------------------------------------------------------------------

    def learnt(self, lane: int) -> Array | None:
        """Returns for each lane of the grid until when this one has heard of it through atomics; None: of nobody."""
        mine, block = self._lane_knows.get(lane), self._block_knows.get(lane // self.wave.lanes_per_block)
        return highest([mine, block]) if mine is not None or block is not None else None

    @property
    def learns(self) -> bool:
        """True if any lane has learnt of others through atomics."""
        return bool(self._lane_knows or self._block_knows)

    def fence(self, lanes: Lanes, scope: int) -> None:
        if self._fenced is None:
            size = self.blocks * self.wave.lanes_per_block
            self._fenced = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
        for moments in self._fenced[scope:]:
            moments[lanes.index + self.first] = self.now
        self.now += 1
        for heard in self._heard[scope:]:
            for lane in (lanes.index + self.first).tolist() if heard else ():
                news = heard.pop(lane, None)
                if news is not None:
                    self._lane_knows[lane] = highest([news, self._lane_knows.get(lane)])

    def fence_inits(self, lanes: Lanes) -> None:
        """Notes fence.mbarrier_init: a relaxed arrival at the barrier of the cluster then hands on what these lanes did before."""
        self._inits |= dict.fromkeys((lanes.index + self.first).tolist(), self.now)
        self.now += 1

    def fenced(self, lanes: Lanes, scope: int = CLUSTER) -> Array:
        """Returns the moments that lanes of one cluster hand on by an arrival without a release, by fences for `scope` or wider:
        until when each lane of the cluster is over.
        """
        start = int(lanes.index[0]) // self.per * self.per + self.first
        out = np.zeros(self.per, np.int64)
        for lane in (lanes.index + self.first).tolist():
            fences = None if self._fenced is None else self._fenced[scope]
            moment = max(self._inits.get(lane, 0), 0 if fences is None else int(fences[lane]))
            if moment > self.start:
                np.maximum(out, self._release(lane, moment, fences)[start : start + self.per], out=out)
        return out if self.proxy is None else np.concatenate((out, self.proxy.told(lanes)))

    def strong(self, lanes: Lanes, where: Array, area: int, reads: bool, writes: bool, mods: frozenset[str]) -> None:
        """Atomics and strong accesses at `where`, one a lane: they carry the clocks that their lanes had at their last fence."""
        releases, acquires = bool(mods & {"release", "acq_rel"}), bool(mods & {"acquire", "acq_rel"})
        # A fence, write or read of the scope of a block or cluster is heard in it only; shared memory is theirs anyway.
        areas = {DEVICE: 0, CLUSTER: self.per, BLOCK: self.wave.lanes_per_block}
        scopes = [s for s in areas if (s != DEVICE or area >= 0) and (s != CLUSTER or self.wave.cluster > 1)]
        own = scope_of(tuple(mods))
        scopes = [s for s in scopes if s >= own]
        for lane, at in zip((lanes.index + self.first).tolist(), where.tolist(), strict=True):
            for scope in scopes:
                key = (area, scope, 1 + lane // areas[scope] if scope else 0, at)
                message = self._messages.get(key)
                if reads and message is not None:
                    # An atomic acquires at once, as code that counts finished blocks relies on.
                    into = self._lane_knows if acquires or writes else self._heard[scope]
                    into[lane] = highest([message, into.get(lane)])
                fences = None if self._fenced is None else self._fenced[scope]
                moment = self.now if releases else 0 if fences is None else int(fences[lane])
                if writes and moment:
                    self._messages[key] = highest([self._release(lane, moment, fences), message])
        self.now += 1

    def messages(self) -> Iterator[tuple[int, int, Array]]:
        """Yields releases to the whole device: an area, the place in it, and the released moments, one a lane of the grid."""
        for (area, scope, _, at), message in self._messages.items():
            if scope == DEVICE and area >= 0:
                yield area, at, message

    def _release(self, lane: int, moment: int, fences: Array | None) -> Array:
        """Returns the clock that a lane hands on which fenced at `moment`: its past, what it heard, its cluster's fenced part."""
        out = np.zeros(self.blocks * self.wave.lanes_per_block, np.int64)
        start = lane - lane % self.per
        out[start : start + self.per] = self._own_release(lane, moment, fences)
        return highest([out, self.learnt(lane)])

    def handed_on(self, lanes: Array) -> Array | None:
        """Returns until when accesses of each lane of the block are behind the last fences, for the device, of lanes of one warp;
        None: none of them has fenced.
        """
        fences = None if self._fenced is None else self._fenced[DEVICE]
        if fences is None or not (fenced := lanes[fences[lanes] > 0]).size:
            return None
        lane, block = int(fenced[0]), self.wave.lanes_per_block
        out = self._own_release(lane, int(fences[lane]), fences)[lane % self.per // block * block :][:block].copy()
        out[fenced % block] = fences[fenced]
        return out

    def _own_release(self, lane: int, moment: int, fences: Array | None) -> Array:
        """Returns the part of the clock that a lane hands on which is of its cluster."""
        per = self.per
        local, mine = (lane - self.first) // per, lane % per >> 5
        moments = np.repeat(self.known[local, mine], WARP)
        moments[mine * WARP : (mine + 1) * WARP] = self.synced[lane - self.first >> 5]
        heard = self.heard.row(lane - self.first)
        if heard is not None:
            moments = np.maximum(moments, heard)
        limit = np.full(per, moment)
        start = lane - lane % per
        if fences is not None:
            limit = np.maximum(limit, fences[start : start + per])
        out: Array = np.minimum(moments, limit)
        out[lane - start] = moment
        return out


def highest(arrays: Sequence[Array | None]) -> Array:
    highest: Array = np.maximum.reduce([a for a in arrays if a is not None])
    return highest
