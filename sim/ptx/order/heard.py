"""What lanes of a cluster (mostly: of a block) have heard of each other through mbarriers, for the race detector.

A moment for each (listening lane, lane it heard of), for each cluster that uses them: what the second did until that moment
is over for the first. A barrier of the block says more, and where the block is all of its cluster, clears it.

Mostly all lanes of a warp hear the same, and many blocks hear at once: there is a row for each warp, and one for a lane only
where it heard something alone. What groups of lanes do together (a group for each block, say) is done in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..state.lanes import WARP, Lanes, Wave
from ..text.types import Array
from .proxy import SPACES, Groups, Proxy

REMEMBERED = 1 << 10
"""Sets of lanes in groups that are remembered."""


class Clocks(Protocol):
    """What is known besides (`order.order`): the clock, and until when warps, and lanes of a warp, have heard of each other."""

    now: int
    wave: Wave
    per: int
    """Lanes of a cluster."""
    known: Array
    synced: Array
    partial: dict[int, Array]
    proxy: Proxy | None


@dataclass
class Rows:
    """Moments of listeners, a row each: `warps` for whole warps of the wave, `lanes[slots[lane]]` for one lane (slot 0: none)."""

    warps: Array
    lanes: Array
    slots: Array
    free: list[int]


class Heard:
    """True once anybody has heard anything."""

    def __init__(self, order: Clocks):
        self.order = order
        self.per = order.per
        self.rows: Rows | None = None
        self._groups: dict[tuple[Lanes, bytes], Groups] = {}

    def __bool__(self) -> bool:
        return self.rows is not None

    def groups(self, lanes: Lanes, starts: Array) -> Groups:
        """Lanes in groups, the k-th of which begins at position starts[k] and is of one cluster."""
        key = lanes, starts.tobytes()
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) > REMEMBERED:
                self._groups.clear()
            found = self._groups[key] = Groups.of(lanes, starts, self.per)
        return found

    def made(self) -> Rows:
        """The rows; from now on there are some."""
        if self.rows is None:
            size = self.order.wave.size
            self.rows = Rows(
                np.zeros((size // WARP, self.per), np.int64), np.zeros((1, self.per), np.int64), np.zeros(size, np.int64), []
            )
        return self.rows

    def slots(self, index: Array) -> Array:
        """Rows of their own for these lanes of the wave."""
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
        """What these lanes heard, `count` from each of `first` on (a multiple of whole warps), is known otherwise."""
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
        """Whether none of these lanes has heard something alone."""
        return self.rows is None or not self.rows.slots[lanes.index].any()

    def row(self, lane: int) -> Array | None:
        """What a lane of the wave has heard of its cluster; None: nothing."""
        rows = self.rows
        return None if rows is None else np.maximum(rows.warps[lane >> 5], rows.lanes[rows.slots[lane]])

    def of(self, groups: Groups) -> Array | None:
        """What the lanes of each group have heard together; None: nothing."""
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
        """What lanes of one cluster have heard together."""
        found = self.of(self.groups(lanes, np.zeros(1, np.int64)))
        return None if found is None else np.asarray(found[0])

    def knows(self, groups: Groups) -> Array:
        """For each lane of the cluster of each group the moment until which it is over for a lane of the group."""
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
        """Add what lanes of a warp have heard of each other by bar.warp.sync of some of them."""
        lanes, per = groups.lanes, self.per // WARP
        for group, warp in zip(groups.owner.tolist(), groups.warps.tolist(), strict=True):
            moments = self.order.partial.get(warp)
            if moments is not None:
                mine = lanes.lane[(lanes.warp == warp) & (groups.number == group)]
                part = out[group, warp % per * WARP : (warp % per + 1) * WARP]
                np.maximum(part, moments[mine].max(axis=0), out=part)

    def released_by(self, groups: Groups) -> Array:
        """What each group hands on now: what it knows, its own past, and what it fenced for the other proxy."""
        order = self.order
        out = self.knows(groups)
        out[groups.number, groups.lanes.index % self.per] = order.now
        order.now += 1
        return out if order.proxy is None else np.concatenate((out, order.proxy.told_by(groups)), axis=1)

    def released(self, lanes: Lanes) -> Array:
        """What lanes of one cluster hand on now."""
        return np.asarray(self.released_by(self.groups(lanes, np.zeros(1, np.int64)))[0])

    def copied(self, lane: int, told: Array | None) -> Array:
        """A copy that a lane of the wave issued is over: `told`, what is handed on, and the lane's own past."""
        if told is None:
            told = np.zeros(self.per if self.order.proxy is None else (1 + len(SPACES)) * self.per, np.int64)
        told[lane % self.per] = self.order.now
        self.order.now += 1
        return told

    def hear(self, lanes: Lanes, told: Array) -> None:
        """Lanes of one cluster are told what others handed on."""
        self.hear_all([(lanes, told)])

    def hear_by(self, groups: Groups, told: Array) -> None:
        """Groups that have no warp in common are told what others heard, a row each."""
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
        """Disjoint sets of lanes, each of one cluster, are told what others handed on."""
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
        """Lanes `members` of a warp of the wave have met: each knows what any of them knew."""
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
        """All lanes of a block have met: each knows of the rest of the cluster what any of them knew."""
        rows = self.rows
        if rows is None:
            return
        wave = self.order.wave
        index = np.arange(block * wave.lanes_per_block, (block + 1) * wave.lanes_per_block)
        mine = rows.warps[block * wave.warps_per_block : (block + 1) * wave.warps_per_block]
        mine[:] = np.maximum(mine.max(axis=0), rows.lanes[rows.slots[index]].max(axis=0))
        self.unslot(index)

    def moments(self, mine: Array, other: Array, several: Array, many: Array) -> Array:
        """Until when lanes `mine` of the grid have heard of `other`; of `several` lanes or warps of whom it heard most.

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
    """Rows `numbers[k]`, all different, have heard told[k]."""
    if len(numbers) == 1:
        rows[numbers[0]] = np.maximum(rows[numbers[0]], told[0])
        return
    every = np.concatenate(numbers)
    news = np.repeat(np.stack(told), [len(some) for some in numbers], axis=0)
    rows[every] = np.maximum(rows[every], news)
