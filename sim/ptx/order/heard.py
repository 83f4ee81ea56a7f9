"""What lanes of a block have heard of each other through mbarriers, for the race detector.

A moment for each (listening lane, lane it heard of), for each block that uses them: what the second did until that moment
is over for the first. A barrier of the block says more, and clears it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..state.lanes import WARP, Lanes, Wave
from ..text.types import Array
from .proxy import Proxy


class Clocks(Protocol):
    """What is known besides (`order.order`): the clock, and until when warps, and lanes of a warp, have heard of each other."""

    now: int
    wave: Wave
    known: Array
    synced: Array
    partial: dict[int, Array]
    proxy: Proxy | None


class Heard:
    """`rows[block]` has (lanes of a block, lanes of a block) moments."""

    def __init__(self, order: Clocks):
        self.order = order
        self.per = order.wave.lanes_per_block
        self.rows: dict[int, Array] = {}

    def knows(self, lanes: Lanes) -> Array:
        """For each lane of the block of these lanes the moment until which it is over for one of them."""
        order, block, local = self.order, int(lanes.block[0]), lanes.index % self.per
        warps = lanes.warp_ids % order.wave.warps_per_block
        out: Array = np.repeat(order.known[block, warps].max(axis=0), WARP)
        for warp, here in zip(lanes.warp_ids.tolist(), warps.tolist(), strict=True):
            part = out[here * WARP : (here + 1) * WARP]
            np.maximum(part, order.synced[warp], out=part)
            if warp in order.partial:
                np.maximum(part, order.partial[warp][lanes.lane[lanes.warp == warp]].max(axis=0), out=part)
        if block in self.rows:
            np.maximum(out, self.rows[block][local].max(axis=0), out=out)
        return out

    def released(self, lanes: Lanes) -> Array:
        """What lanes of one block hand on now: what they know, their own past, and what they fenced for the other proxy."""
        order = self.order
        out = self.knows(lanes)
        out[lanes.index % self.per] = order.now
        order.now += 1
        return out if order.proxy is None else np.concatenate((out, order.proxy.told(lanes)))

    def hear(self, lanes: Lanes, told: Array) -> None:
        if self.order.proxy is not None:
            self.order.proxy.hear(lanes, told[self.per :])
            told = told[: self.per]
        block, local = int(lanes.block[0]), lanes.index % self.per
        rows = self.rows.setdefault(block, np.zeros((self.per, self.per), np.int64))
        rows[local] = np.maximum(rows[local], told)

    def share(self, warp: int, members: Array) -> None:
        """Lanes `members` of a warp of the wave have met: each knows what any of them knew."""
        block, first = divmod(warp * WARP, self.per)
        rows = self.rows.get(block)
        if rows is not None:
            rows[members + first] = rows[members + first].max(axis=0)

    def moments(self, mine: Array, other: Array, several: Array, whole_block: Array) -> Array:
        """Until when lanes `mine` of the grid have heard of `other`; of `several` lanes (or warps) of whom it heard most."""
        out = np.zeros(len(mine), np.int64)
        blocks = mine // self.per - self.order.wave.first_block
        for block, rows in self.rows.items():
            at = np.flatnonzero((blocks == block) & (other // self.per == mine // self.per))
            if len(at):
                row, column = rows[mine[at] % self.per], other[at] % self.per
                by_warp = row.reshape(len(at), -1, WARP).max(axis=2)
                index = np.arange(len(at))
                found = np.where(several[at], by_warp[index, column // WARP], row[index, column])
                out[at] = np.where(whole_block[at], row.max(axis=1), found)
        return out
