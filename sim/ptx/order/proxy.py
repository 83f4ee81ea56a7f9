"""The asynchronous proxy: which writes of ordinary instructions its readers may see.

PTX ISA, "Memory Consistency Model": wgmma, bulk copies and tensor copies access memory by another way (proxy) than ld, st,
cp.async and atomics. A write of those is visible to the asynchronous proxy of a reader only if the write happens before the
read *and* a `fence.proxy.async` lies between them: in the writer behind its write, in the reader before its read, or in any
thread between them. A write of the asynchronous proxy needs no fence once its completion was seen, nor does one that follows
ordinary reads.

So there is a second clock beside that of `order.happens_before`: for each warp and lane the moment until which the lane's writes
are behind a fence on their way to the warp. A fence raises it to what the warp knows at that moment; barriers and mbarriers
hand it on with the first clock. Rows are made by the first fence: before it nothing is visible.
"""

from __future__ import annotations

import numpy as np

from ..state.lanes import WARP
from ..text.syntax import Array, Instruction
from .clocks import Groups, WaveClocks

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

    def fence(self, warps: Groups, known: Array, i: Instruction) -> None:
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
