"""The asynchronous proxy: which writes of ordinary instructions its readers may see.

PTX ISA, "Memory Consistency Model": wgmma, bulk copies and tensor copies access memory by another way (proxy) than ld, st,
cp.async and atomics. A write of those is visible to the asynchronous proxy of a reader only if the write happens before the
read *and* a `fence.proxy.async` lies between them: in the writer behind its write, in the reader before its read, or in any
thread between them. A write of the asynchronous proxy needs no fence once its completion was seen, nor does one that follows
ordinary reads.

So there is a second clock beside that of `order.clocks`: for each warp and lane the moment until which the lane's writes
are behind a fence on their way to the warp. A fence raises it to what the warp knows at that moment; barriers and mbarriers
hand it on with the first clock. Rows are made by the first fence: before it nothing is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..state.lanes import WARP, Lanes, Wave
from ..text.syntax import Array, Instruction

SPACES = ("shared", "global")


@dataclass
class Groups:
    """Lanes of a wave in groups, each of one cluster (or block) whose `per` lanes hear of each other.

    `number`: the group of each lane. `warps`: warps of the wave, group by group, each once in a group; `owner` the group of
    each, `first` where those of each group begin.
    """

    lanes: Lanes
    number: Array
    warps: Array
    owner: Array
    first: Array

    @classmethod
    def of(cls, lanes: Lanes, starts: Array, per: int) -> Groups:
        """Forms groups. `starts`: the position at which each group begins, the first one 0."""
        number = np.zeros(lanes.n, np.int64)
        number[starts[1:]] = 1
        number = np.cumsum(number)
        heads = np.flatnonzero((np.diff(number, prepend=-1) != 0) | (np.diff(lanes.warp, prepend=-1) != 0))
        owner = number[heads]
        return cls(lanes, number, lanes.warp[heads], owner, np.flatnonzero(np.diff(owner, prepend=-1)))

    def highest(self, rows: Array) -> Array:
        """Returns the maximum over the warps of each group of `rows` (warps, any)."""
        count = len(self.first)
        if len(rows) == count:
            return rows
        if len(rows) % count == 0 and (self.first == np.arange(0, len(rows), len(rows) // count)).all():
            return np.asarray(rows.reshape(count, -1, rows.shape[1]).max(axis=1))
        return np.asarray(np.maximum.reduceat(rows, self.first, axis=0))


class Knowing(Protocol):
    """The other clocks (`order.clocks`)."""

    per: int
    """Lanes that hear of each other by moments of their own: those of a block, or of a cluster."""

    def groups(self, lanes: Lanes, starts: Array) -> Groups:
        """Returns lanes in groups, the k-th of which begins at position starts[k]."""

    def knows(self, groups: Groups) -> Array:
        """Returns for each of the `per` lanes around each group the moment until which it is over for a lane of the group."""


class Clock(Protocol):
    """The clock of `order.clocks`."""

    now: int
    wave: Wave
    blocks: int

    @property
    def heard(self) -> Knowing: ...


class Proxy:
    """The fences of lanes. `rows[space]` are (warps, lanes) moments: of each warp of the wave about the `per` lanes around it."""

    def __init__(self, order: Clock):
        self.order = order
        self.per = order.heard.per
        self.rows: dict[str, Array] = {}
        # Time of the last fence of each lane of the grid, for other blocks, of which no moments are kept.
        self.fenced: dict[str, Array] = {}

    def made(self, space: str) -> Array:
        """Returns the rows of a space, and makes them at the first call."""
        if space not in self.rows:
            self.rows[space] = np.zeros((self.order.wave.size // WARP, self.per), np.int64)
        return self.rows[space]

    def fence(self, lanes: Lanes, i: Instruction) -> None:
        """Runs a fence.proxy.async of these lanes, for both spaces or for the one that it names."""
        named = [space for space in SPACES if any(mod.endswith(space) or f"{space}::" in mod for mod in i.mods)]
        order = self.order
        warps = order.heard.groups(lanes, np.flatnonzero(np.diff(lanes.warp, prepend=-1)))
        known = order.heard.knows(warps)
        known[warps.number, lanes.index % self.per] = order.now
        for space in named or SPACES:
            rows = self.made(space)
            rows[warps.warps] = np.maximum(rows[warps.warps], known)
            if space not in self.fenced:
                self.fenced[space] = np.zeros(order.blocks * order.wave.lanes_per_block, np.int64)
            self.fenced[space][lanes.index + order.wave.first_block * order.wave.lanes_per_block] = order.now
        order.now += 1

    # -- moments handed on --------------------------------------------------------------------------------------------------

    def told_by(self, groups: Groups) -> Array:
        """Returns the moments that each group hands on: both spaces, one behind the other."""
        out = np.zeros((len(groups.first), len(SPACES), self.per), np.int64)
        for k, space in enumerate(SPACES):
            if space in self.rows:
                out[:, k] = groups.highest(self.rows[space][groups.warps])
        return out.reshape(len(out), -1)

    def told(self, lanes: Lanes) -> Array:
        """Returns the moments that lanes of one unit hand on."""
        return np.asarray(self.told_by(self.order.heard.groups(lanes, np.zeros(1, np.int64)))[0])

    def hear(self, lanes: Lanes, told: Array) -> None:
        """Gives lanes of one unit the moments that others handed on."""
        self.hear_all([(lanes, told)])

    def hear_by(self, groups: Groups, told: Array) -> None:
        """Gives groups that have no warp in common the moments that others handed on, a row each."""
        every = told.reshape(len(told), len(SPACES), self.per)
        for k, space in enumerate(SPACES):
            if every[:, k].any():
                rows = self.made(space)
                rows[groups.warps] = np.maximum(rows[groups.warps], every[groups.owner, k])

    def hear_all(self, news: Sequence[tuple[Lanes, Array]]) -> None:
        """Gives disjoint sets of lanes, each of one unit, the moments that others handed on. A warp hears what its lanes hear."""
        some = [one for one in news if len(one[1])]
        if not some:
            return
        every = np.stack([told for _, told in some]).reshape(len(some), len(SPACES), self.per)
        warps = np.concatenate([lanes.warp_ids for lanes, _ in some])
        which = np.repeat(np.arange(len(some)), [lanes.warps for lanes, _ in some])
        for k, space in enumerate(SPACES):
            told = every[:, k]
            if not told.any():
                continue
            rows = self.made(space)
            if len(some) == 1:
                rows[warps] = np.maximum(rows[warps], told)
            elif all(lanes.whole_warps for lanes, _ in some):
                rows[warps] = np.maximum(rows[warps], told[which])
            else:
                np.maximum.at(rows, warps, told[which])

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
        per = self.per
        first = self.order.wave.first_block * self.order.wave.lanes_per_block
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
        return np.asarray((stamp > moment) & (stamp > 0))
