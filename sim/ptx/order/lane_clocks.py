"""The moments that lanes of a cluster hear of each other through mbarriers.

For each cluster (mostly: block) that uses mbarriers there is a moment for each (listening lane, lane it heard of), until which
accesses of the second are over for the first. A barrier of the block says more, and where the block is all of its cluster, clears
it. Mostly all lanes of a warp hear the same, and many blocks hear at once: each warp has a row, and a lane has one only if it
heard something alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..state.lanes import WARP, Lanes
from ..text.syntax import Array
from .clocks import Groups, WaveClocks


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
        slots = rows.slots[groups.index]
        at = np.flatnonzero(slots)
        if len(at):
            number = groups.number[at]
            starts = np.flatnonzero(np.diff(number, prepend=-1))
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
        out: Array = np.maximum(rows.warps[warp, other], rows.lanes[slot, other])
        for chosen, size in ((several & ~many, WARP), (many, per)):
            some = np.flatnonzero(chosen & near)
            if len(some):
                shape, column = (-1, self.per // size, size), other[some] // size
                found = rows.warps.reshape(shape)[warp[some], column].max(axis=1)
                out[some] = np.maximum(found, rows.lanes.reshape(shape)[slot[some], column].max(axis=1))
        out[~near] = 0
        return out
