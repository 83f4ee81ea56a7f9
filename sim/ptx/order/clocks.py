"""The time of a launch, and the moments until which the warps of a wave know that accesses are over.

The order of execution is one legal interleaving, so a single clock `now` stamps every access, and ticks when threads synchronise.
A warp's knowledge consists of moments: `base` of its block (accesses of the block until then are over for all of it: the last
barrier), `synced` of the warp (bar.warp.sync), `known[w, v]` (warp w has heard of warp v's accesses until then: barriers with a
thread count, and of clusters). An access is ordered behind an earlier one whose stamp is not above such a moment. Blocks of one
cluster share memory: warps are numbered in the cluster, which is mostly one block.

An entry stands for accesses: stamp << 32 | who << 29 | lane (who: one lane, LANES of a warp, WARPS of a block, BLOCKS of a
cluster, or several CLUSTERS).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..state.lanes import WARP, Lanes, Wave
from ..text.syntax import Array

STAMP = 32
ONE, LANES, WARPS, BLOCKS, CLUSTERS = (k << 29 for k in range(5))
LEVEL = 7 << 29
LANE = (1 << 29) - 1
LOW = np.uint64((1 << STAMP) - 1)

CROWD = ("", " and other lanes", " and other warps", " and other blocks", " and other blocks")
"""The end of a message's subject, by level."""


def stamps_of(entries: Array) -> Array:
    """Returns the moments of entries (int64)."""
    return np.asarray((entries >> np.uint64(STAMP)).astype(np.int64))


def lanes_of(entries: Array) -> Array:
    """Returns the lanes of the grid of entries (int64)."""
    return np.asarray((entries & np.uint64(LANE)).astype(np.int64))


def levels_of(entries: Array) -> Array:
    """Returns the levels of entries (uint64)."""
    return np.asarray(entries & np.uint64(LEVEL))


def raised(entries: Array, levels: Array) -> Array:
    """Returns entries with other levels."""
    return np.asarray((entries & ~np.uint64(LEVEL)) | levels)


def highest(arrays: Sequence[Array | None]) -> Array:
    highest: Array = np.maximum.reduce([a for a in arrays if a is not None])
    return highest


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
        self._floors: dict[Lanes, tuple[int, int]] = {}
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
        self.first = np.flatnonzero(np.diff(self.owner, prepend=-1))

    def highest(self, rows: Array) -> Array:
        """Returns the maximum over the warps of each group of `rows` (warps, any)."""
        count = len(self.first)
        if len(rows) == count:
            return rows
        if len(rows) % count == 0 and (self.first == np.arange(0, len(rows), len(rows) // count)).all():
            return np.asarray(rows.reshape(count, -1, rows.shape[1]).max(axis=1))
        return np.asarray(np.maximum.reduceat(rows, self.first, axis=0))

    @cached_property
    def apart(self) -> bool:
        """True if no two groups have a warp in common."""
        return len(np.unique(self.warps)) == len(self.warps)

    @cached_property
    def whole(self) -> Array:
        """Positions in `warps` of the groups that have all lanes of their warps."""
        return np.flatnonzero(self._whole[self.owner])

    @cached_property
    def alone(self) -> Array:
        """Positions in `index` of the lanes of all other groups."""
        return np.flatnonzero(~self._whole[self.number])

    @cached_property
    def _whole(self) -> Array:
        return np.asarray(np.bincount(self.number) == WARP * np.bincount(self.owner))
