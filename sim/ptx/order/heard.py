"""What lanes of a cluster (mostly: of a block) have heard of each other through mbarriers, for the race detector.

A moment for each (listening lane, lane it heard of), for each cluster that uses them: what the second did until that moment
is over for the first. A barrier of the block says more, and where the block is all of its cluster, clears it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..state.lanes import WARP, Lanes, Wave
from ..text.types import Array
from .proxy import SPACES, Proxy


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


class Heard:
    """`rows[cluster]` has (lanes of a cluster, lanes of a cluster) moments."""

    def __init__(self, order: Clocks):
        self.order = order
        self.per = order.per
        self.rows: dict[int, Array] = {}

    def knows(self, lanes: Lanes) -> Array:
        """For each lane of the cluster of these lanes the moment until which it is over for one of them."""
        order, cluster, local = self.order, int(lanes.index[0]) // self.per, lanes.index % self.per
        warps = lanes.warp_ids % (self.per // WARP)
        out: Array = np.repeat(order.known[cluster, warps].max(axis=0), WARP)
        for warp, here in zip(lanes.warp_ids.tolist(), warps.tolist(), strict=True):
            part = out[here * WARP : (here + 1) * WARP]
            np.maximum(part, order.synced[warp], out=part)
            if warp in order.partial:
                np.maximum(part, order.partial[warp][lanes.lane[lanes.warp == warp]].max(axis=0), out=part)
        if cluster in self.rows:
            np.maximum(out, self.rows[cluster][local].max(axis=0), out=out)
        return out

    def released(self, lanes: Lanes) -> Array:
        """What lanes of one cluster hand on now: what they know, their own past, and what they fenced for the other proxy."""
        order = self.order
        out = self.knows(lanes)
        out[lanes.index % self.per] = order.now
        order.now += 1
        return out if order.proxy is None else np.concatenate((out, order.proxy.told(lanes)))

    def copied(self, lane: int, told: Array | None) -> Array:
        """A copy that a lane of the wave issued is over: `told`, what is handed on, and the lane's own past."""
        if told is None:
            told = np.zeros(self.per if self.order.proxy is None else (1 + len(SPACES)) * self.per, np.int64)
        told[lane % self.per] = self.order.now
        self.order.now += 1
        return told

    def hear(self, lanes: Lanes, told: Array) -> None:
        if self.order.proxy is not None:
            self.order.proxy.hear(lanes, told[self.per :])
            told = told[: self.per]
        cluster, local = int(lanes.index[0]) // self.per, lanes.index % self.per
        rows = self.rows.setdefault(cluster, np.zeros((self.per, self.per), np.int64))
        if lanes.slice is None:
            rows[local] = np.maximum(rows[local], told)
        else:
            part = rows[lanes.slice.start - cluster * self.per : lanes.slice.stop - cluster * self.per]
            np.maximum(part, told, out=part)

    def share(self, warp: int, members: Array) -> None:
        """Lanes `members` of a warp of the wave have met: each knows what any of them knew."""
        cluster, first = divmod(warp * WARP, self.per)
        rows = self.rows.get(cluster)
        if rows is not None:
            rows[members + first] = rows[members + first].max(axis=0)

    def meet(self, block: int) -> None:
        """All lanes of a block have met: each knows of the rest of the cluster what any of them knew."""
        per = self.order.wave.lanes_per_block
        cluster, first = divmod(block * per, self.per)
        rows = self.rows.get(cluster)
        if rows is not None:
            rows[first : first + per] = rows[first : first + per].max(axis=0)

    def moments(self, mine: Array, other: Array, several: Array, many: Array) -> Array:
        """Until when lanes `mine` of the grid have heard of `other`; of `several` lanes or warps of whom it heard most.

        `many` are warps of the block of `other`.
        """
        out = np.zeros(len(mine), np.int64)
        per = self.order.wave.lanes_per_block
        clusters = (mine - self.order.wave.first_block * per) // self.per
        clusters[other // self.per != mine // self.per] = -1
        mine, other = mine % self.per, other % self.per
        for cluster, rows in self.rows.items():
            at = np.flatnonzero(clusters == cluster)
            row, column = mine[at], other[at]
            found = rows[row, column]
            for chosen, size in ((several[at] & ~many[at], WARP), (many[at], per)):
                some = np.flatnonzero(chosen)
                if len(some):
                    found[some] = rows.reshape(self.per, -1, size)[row[some], column[some] // size].max(axis=1)
            out[at] = found
        return out
