"""The happens-before order of a launch, made by barriers, fences, atomics and mbarriers.

Order comes from: program order within a lane; barriers, for their threads; bar.warp.sync, for its members; a fence and then an
atomic (or a store that is volatile, relaxed or release) with a later atomic (or such a load, and then a fence) on the same
address; mbarriers. Shuffles, mma and ldmatrix order nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..state.lane_sets import WARP, LaneSet, Wave, run_starts
from ..text.syntax import Array, PtxInstruction
from .moments import (
    BLOCKS,
    CLUSTERS,
    LANES,
    ONE,
    SPACES,
    WARPS,
    GridClock,
    Groups,
    LaneClocks,
    Proxy,
    WaveClocks,
    highest,
    lanes_of,
    levels_of,
    stamps_of,
)
from .shadow import BLOCK, CLUSTER, DEVICE, scope_of

REMEMBERED = 1 << 10
"""Most remembered sets of lanes in groups."""

TOGETHER = np.zeros(1, np.int64)
"""Start of the only group, for lanes as one group."""


def joined(clock: GridClock, *others: GridClock | None) -> GridClock:
    """Returns the latest moments of these clocks."""
    return GridClock.joined((clock, *others)) or clock


class Released(NamedTuple):
    """The clocks that arrivals at barriers release, a row for each group of lanes: moments until which all of each warp of the
    cluster is over, moments that its lanes heard of lanes, its fences for the asynchronous proxy, and (by group) moments of other
    blocks learnt through atomics.
    """

    moments: Array
    rows: Array | None
    fenced: Array | None = None
    learnt: tuple[GridClock | None, ...] = ()

    def of(self, groups: Array) -> Released:
        """Returns only these groups."""
        rows, fenced = (None if each is None else each[groups] for each in (self.rows, self.fenced))
        return Released(self.moments[groups], rows, fenced, tuple(self.learnt[k] for k in groups) if self.learnt else ())


class Order(WaveClocks):
    """The happens-before order of one launch of `blocks` blocks; `proxies`: the kernel uses the asynchronous proxy."""

    def __init__(self, blocks: int, proxies: bool = False):
        super().__init__(blocks)
        self.proxies = proxies
        self.proxy: Proxy | None = None
        # Stamps that lanes have learnt of the lanes of the grid through atomics.
        self._lane_knows: dict[int, GridClock] = {}
        self._block_knows: dict[int, GridClock] = {}
        # Messages that lanes have read and will acquire with their next fence, by scope of the message.
        self._heard: tuple[dict[int, GridClock], ...] = ({}, {}, {})
        self._messages: dict[tuple[int, int, int, int], GridClock] = {}
        # Time of the last fence of each lane of the grid, by scope: the whole device, its cluster, its block.
        self._fenced: tuple[Array, Array, Array] | None = None
        self._inits: dict[int, int] = {}

    def begin_wave(self, wave: Wave) -> None:
        super().begin_wave(wave)
        self.heard = LaneClocks(self)
        if self.proxies:
            self.proxy = Proxy(self)
        # True if threads did something between arriving at a barrier of a cluster and waiting there.
        self.split = False
        self._groups: dict[tuple[object, ...], Groups] = {}

    # -- clocks handed on ----------------------------------------------------------------------------------------------

    def groups(self, lanes: LaneSet, starts: Array = TOGETHER) -> Groups:
        """Returns lanes in groups, the k-th of which begins at position starts[k] and is of one cluster."""
        key = lanes, starts.tobytes()
        return self._groups.get(key) or self._remember(key, Groups(lanes.index, starts))

    def joined(self, sets: tuple[LaneSet, ...]) -> Groups:
        """Returns disjoint sets of lanes, each of one cluster, as groups."""
        if len(sets) == 1:
            return self.groups(sets[0])
        starts = np.cumsum([0, *(lanes.n for lanes in sets[:-1])])
        return self._groups.get(sets) or self._remember(sets, Groups(np.concatenate([lanes.index for lanes in sets]), starts))

    def _remember(self, key: tuple[object, ...], found: Groups) -> Groups:
        if len(self._groups) > REMEMBERED:
            self._groups.clear()
        self._groups[key] = found
        return found

    def released(self, groups: Groups) -> Array:
        """Returns the moments that each group hands on now: its own past, all that it knows, and its fences for the other proxy."""
        out = self.heard.knows(groups)
        out[groups.number, groups.index % self.per] = self.now
        self.now += 1
        return out if self.proxy is None else np.concatenate((out, self.proxy.released(groups)), axis=1)

    def copied_clock(self, lane: int, told: Array | None) -> Array:
        """Ends a copy that a lane of the wave issued; returns `told`, the moments to hand on, with the lane's own past."""
        if told is None:
            told = np.zeros(self.per if self.proxy is None else (1 + len(SPACES)) * self.per, np.int64)
        told[lane % self.per] = self.now
        self.now += 1
        return told

    def hear(self, groups: Groups, told: Array) -> None:
        """Gives groups the moments that others handed on, a row each."""
        self.heard.hear(groups, told[:, : self.per])
        if self.proxy is not None and told.shape[1] > self.per:
            self.proxy.hear(groups, told[:, self.per :])

    def fence_proxy(self, lanes: LaneSet, i: PtxInstruction) -> None:
        """Runs a fence.proxy.async of these lanes."""
        if self.proxy is not None:
            warps = self.groups(lanes, run_starts(lanes.warp))
            self.proxy.fence(warps, self.heard.knows(warps), i)

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
            for number in (blocks + self.wave.first_block).tolist():
                lanes = range(number * per, (number + 1) * per)
                learnt = self._together(lanes)
                if learnt is not None:
                    self._block_knows[number] = joined(learnt, self._block_knows.get(number))
                    self._lane_knows = {lane: one for lane, one in self._lane_knows.items() if lane not in lanes}

    def arrive(self, groups: Groups) -> Released:
        """Groups of lanes, each of one cluster, arrive at a barrier of it, or of a part of it. Returns what they release now."""
        warps = groups.warps % self.warps
        released = groups.highest(self.known[groups.warps // self.warps, warps])
        released[groups.owner, warps] = self.now
        self.now += 1
        lanes = groups.index + self.first
        numbers = range(len(groups.first) if self._lane_knows else 0)
        learnt = tuple(self._together(lanes[groups.number == group].tolist()) for group in numbers)
        fenced = None if self.proxy is None else self.proxy.released(groups)
        return Released(released, self.heard.of(groups), fenced, learnt)

    def depart(self, groups: Groups, released: list[Released]) -> None:
        """Groups of lanes have waited for arrivals that released these clocks, as many for each group."""
        heard = np.maximum.reduce([each.moments for each in released])
        for each in released:
            if self.proxy is not None and each.fenced is not None:
                self.proxy.hear(groups, each.fenced)
        cluster, warps = groups.warps // self.warps, groups.warps % self.warps
        self.known[cluster, warps] = np.maximum(self.known[cluster, warps], heard[groups.owner])
        self.synced[groups.warps] = np.maximum(self.synced[groups.warps], heard[groups.owner, warps])
        if told := [each.rows for each in released if each.rows is not None]:
            self.heard.hear(groups, highest(told))
        if any(each.learnt for each in released):
            for group in range(len(groups.first)):
                news = [one for each in released if each.learnt and (one := each.learnt[group]) is not None]
                if news:
                    self._learn(groups.index[groups.number == group], joined(*news))
        self._floors.clear()

    def _learn(self, index: Array, news: GridClock) -> None:
        """Gives lanes of the wave what others learnt through atomics; those that knew the same before share their new clock."""
        together: dict[int, GridClock] = {}
        for lane in (index + self.first).tolist():
            known = self._lane_knows.get(lane)
            if known is not None and id(known) not in together:
                together[id(known)] = joined(known, news)
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
        lanes = self._together(range(blocks.start * per, blocks.stop * per))
        learnt = [one for one in (lanes, *map(self._block_knows.get, blocks)) if one is not None]
        if learnt:
            self._block_knows |= dict.fromkeys(blocks, joined(*learnt))

    def begun(self, lanes: LaneSet, blocks: Array) -> Array:
        """Returns a mask of the lanes behind the begin of a block of their cluster: they have heard of one of its threads."""
        cluster, index = self.wave.cluster, np.arange(lanes.n)
        known = self.known[lanes.warp // self.warps, lanes.warp % self.warps].reshape(lanes.n, cluster, -1).max(axis=2)
        found = known[index, blocks % cluster] >= self.start
        for at in np.flatnonzero(~found).tolist():
            place = int(lanes.index[at])
            row, learnt = self.heard.row(place), self.learnt(place + self.first)
            per, block = self.wave.lanes_per_block, int(blocks[at])
            mine = slice(block % cluster * per, (block % cluster + 1) * per)
            rows = [row] if learnt is None else [row, learnt.row((self.first + block * per) // self.per, self.per)]
            found[at] = any(each is not None and each[mine].max() >= self.start for each in rows)
        return found

    def warp_sync(self, warps: Array) -> None:
        """Joins the clocks of all lanes of these warps of the wave, which have met."""
        self.synced[warps] = self.now
        self._floors.clear()
        self.now += 1
        for warp in warps.tolist() if self.heard or self._lane_knows else ():
            self.heard.share(warp, np.arange(WARP))
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
        self._share((members + self.first + warp * WARP).tolist())

    def _share(self, lanes: Sequence[int]) -> None:
        learnt = self._together(lanes)
        if learnt is not None:
            self._lane_knows |= dict.fromkeys(lanes, learnt)

    def _together(self, lanes: Iterable[int]) -> GridClock | None:
        """Returns all that any of these lanes of the grid has learnt through atomics; None: nothing."""
        return GridClock.joined(map(self._lane_knows.get, lanes))

    def alike(self, lanes: LaneSet) -> bool:
        """True if all lanes of a warp know the same, for the warps of these lanes."""
        return not (self.partial or self._lane_knows) and self.heard.by_warps(lanes)

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Returns a mask of the accesses `entries` that did not happen before the current ones of the grid-wide lanes `mine`."""
        stamp, other, who, per = stamps_of(entries), lanes_of(entries), levels_of(entries).astype(np.int64), self.per
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
            left = np.flatnonzero(race)
            for learnt, some in self.by_learnt(mine[left]):
                here = left[some]
                theirs, level = other[here], who[here]
                found = learnt.at(theirs, self.per)
                for size, several in ((WARP, level == LANES), (self.wave.lanes_per_block, level == WARPS)):
                    if several.any():
                        found[several] = learnt.at(theirs[several], self.per, size)
                # Readers in many blocks share an entry: a lane that has heard of other blocks counts as ordered behind all.
                found[level >= BLOCKS] = self.now
                race[here] = stamp[here] > found
        return race

    def by_learnt(self, lanes: Array) -> Iterator[tuple[GridClock, Array]]:
        """Yields all that lanes of the grid have learnt through atomics, with the positions of the lanes that have learnt it."""
        each, position = np.unique(lanes, return_inverse=True)
        per, same = self.wave.lanes_per_block, dict[tuple[int, int], int]()
        keys = [(id(self._lane_knows.get(lane)), id(self._block_knows.get(lane // per))) for lane in each.tolist()]
        groups = np.array([same.setdefault(key, len(same)) for key in keys])[position]
        for number in range(len(same)):
            some = np.flatnonzero(groups == number)
            learnt = self.learnt(int(lanes[some[0]]))
            if learnt is not None:
                yield learnt, some

    # -- atomics and fences ------------------------------------------------------------------------------------------------

    def learnt(self, lane: int) -> GridClock | None:
        """Returns for each lane of the grid until when this one has heard of it through atomics; None: of nobody."""
        return GridClock.joined((self._lane_knows.get(lane), self._block_knows.get(lane // self.wave.lanes_per_block)))

    @property
    def learns(self) -> bool:
        """True if any lane has learnt of others through atomics."""
        return bool(self._lane_knows or self._block_knows)

    def fence(self, lanes: LaneSet, scope: int) -> None:
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
                    self._lane_knows[lane] = joined(news, self._lane_knows.get(lane))

    def fence_inits(self, lanes: LaneSet) -> None:
        """Notes fence.mbarrier_init: a relaxed arrival at the barrier of the cluster then hands on what these lanes did before."""
        self._inits |= dict.fromkeys((lanes.index + self.first).tolist(), self.now)
        self.now += 1

    def fenced(self, lanes: LaneSet, scope: int = CLUSTER) -> Array:
        """Returns the moments that lanes of one cluster hand on by an arrival without a release, by fences for `scope` or wider:
        until when each lane of the cluster is over.
        """
        cluster = (int(lanes.index[0]) + self.first) // self.per
        out = np.zeros(self.per, np.int64)
        for lane in (lanes.index + self.first).tolist():
            fences = None if self._fenced is None else self._fenced[scope]
            moment = max(self._inits.get(lane, 0), 0 if fences is None else int(fences[lane]))
            if moment > self.start:
                np.maximum(out, self._release(lane, moment, fences).row(cluster, self.per), out=out)
        return out if self.proxy is None else np.concatenate((out, self.proxy.released(self.groups(lanes))[0]))

    def strong(self, lanes: LaneSet, where: Array, area: int, reads: bool, writes: bool, mods: frozenset[str]) -> None:
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
                    into[lane] = joined(message, into.get(lane))
                fences = None if self._fenced is None else self._fenced[scope]
                moment = self.now if releases else 0 if fences is None else int(fences[lane])
                if writes and moment:
                    self._messages[key] = joined(self._release(lane, moment, fences), message)
        self.now += 1

    def messages(self) -> Iterator[tuple[int, int, GridClock]]:
        """Yields releases to the whole device: an area, the place in it, and the released moments, one a lane of the grid."""
        for (area, scope, _, at), message in self._messages.items():
            if scope == DEVICE and area >= 0:
                yield area, at, message

    def _release(self, lane: int, moment: int, fences: Array | None) -> GridClock:
        """Returns the clock that a lane hands on which fenced at `moment`: its past, what it heard, its cluster's fenced part."""
        own = GridClock(self.blocks // self.wave.cluster, {lane // self.per: self._own_release(lane, moment, fences)})
        return joined(own, self.learnt(lane))

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

    def launched(self, lanes: LaneSet) -> GridClock:
        """Returns until when accesses of each lane of the grid are behind the end of what this one lane does now, by a fence."""
        self.fence(lanes, DEVICE)
        assert self._fenced is not None
        lane = int(lanes.index[0]) + self.first
        return self._release(lane, int(self._fenced[DEVICE][lane]), self._fenced[DEVICE])

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
        out = np.minimum(moments, limit)
        out[lane - start] = moment
        return out
