"""The asynchronous proxy: what its readers may see of what ordinary instructions wrote.

PTX ISA, "Memory Consistency Model": wgmma, bulk copies and tensor copies go to memory by another way (proxy) than ld, st,
cp.async and atomics. What those wrote is there for the asynchronous proxy of a reader only if the write happens before the
read *and* a `fence.proxy.async` lies on the way: in the writer behind its write, in the reader before its read, or in any
thread between them. What the asynchronous proxy wrote needs no fence once its completion was seen, nor does a write of
the asynchronous proxy behind ordinary reads.

So there is a second clock beside that of `order.order`: for each warp and lane the moment until which the lane's writes
are behind a fence on their way to the warp. A fence raises it to what the warp knows at that moment; barriers and mbarriers
hand it on as they hand on what is known. Rows are made by the first fence: before it nothing is visible.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..state.lanes import WARP, Lanes, Wave
from ..text.syntax import Instruction
from ..text.types import Array

SPACES = ("shared", "global")


class Knowing(Protocol):
    """What is known besides (`order.heard`)."""

    per: int
    """Lanes that hear of each other by moments of their own: those of a block, or of a cluster."""

    def knows(self, lanes: Lanes) -> Array:
        """For each of the `per` lanes around these lanes the moment until which it is over for one of them."""


class Clock(Protocol):
    """The clock of `order.order`."""

    now: int
    wave: Wave
    blocks: int

    @property
    def heard(self) -> Knowing: ...


class Proxy:
    """Who fenced what. `rows[space][unit]` are (warps, lanes) moments of a unit: the `per` lanes that hear of each other."""

    def __init__(self, order: Clock):
        self.order = order
        self.per = order.heard.per
        self.rows: dict[str, dict[int, Array]] = {space: {} for space in SPACES}
        # For whom no moments are kept (other blocks): when each lane of the grid last fenced.
        self.fenced: dict[str, Array] = {}

    def fence(self, lanes: Lanes, i: Instruction) -> None:
        """These lanes run a fence.proxy.async, of both spaces or of the one that it names."""
        named = [space for space in SPACES if any(mod.endswith(space) or f"{space}::" in mod for mod in i.mods)]
        order = self.order
        for warp in lanes.warp_ids.tolist():
            some = lanes.subset(np.flatnonzero(lanes.warp == warp))
            unit, local = divmod(warp * WARP, self.per)
            known = order.heard.knows(some)
            known[some.index - unit * self.per] = order.now
            for space in named or SPACES:
                rows = self.rows[space].setdefault(unit, np.zeros((self.per // WARP, self.per), np.int64))
                np.maximum(rows[local // WARP], known, out=rows[local // WARP])
        for space in named or SPACES:
            if space not in self.fenced:
                self.fenced[space] = np.zeros(order.blocks * order.wave.lanes_per_block, np.int64)
            self.fenced[space][lanes.index + order.wave.first_block * order.wave.lanes_per_block] = order.now
        order.now += 1

    # -- handed on ----------------------------------------------------------------------------------------------------------

    def told(self, lanes: Lanes) -> Array:
        """What lanes of one unit hand on: both spaces, one behind the other."""
        unit = int(lanes.index[0]) // self.per
        warps = lanes.warp_ids % (self.per // WARP)
        out = np.zeros((len(SPACES), self.per), np.int64)
        for part, space in zip(out, SPACES, strict=True):
            if unit in self.rows[space]:
                self.rows[space][unit][warps].max(axis=0, out=part)
        return out.reshape(-1)

    def hear(self, lanes: Lanes, told: Array) -> None:
        """Lanes of one unit are told what others handed on."""
        if not told.any():
            return
        unit = int(lanes.index[0]) // self.per
        warps = lanes.warp_ids % (self.per // WARP)
        for part, space in zip(told.reshape(len(SPACES), self.per), SPACES, strict=True):
            if part.any():
                rows = self.rows[space].setdefault(unit, np.zeros((self.per // WARP, self.per), np.int64))
                rows[warps] = np.maximum(rows[warps], part)

    def meet(self, blocks: Array) -> None:
        """All threads of each of these blocks have met."""
        warps = self.order.wave.warps_per_block
        for space in SPACES:
            for block in blocks.tolist():
                unit, first = divmod(block * warps, self.per // WARP)
                rows = self.rows[space].get(unit)
                if rows is not None:
                    rows[first : first + warps] = rows[first : first + warps].max(axis=0)

    # -- asked --------------------------------------------------------------------------------------------------------------

    def unfenced(self, space: str, reader: Array, writer: Array, stamp: Array, collective: Array) -> Array:
        """Which writes have no fence on their way to the reader.

        reader, writer: lanes of the grid; stamp: when the write was; collective: the writer's whole warp made it.
        """
        per = self.per
        first = self.order.wave.first_block * self.order.wave.lanes_per_block
        unit, local = np.divmod(reader - first, per)
        same = unit == (writer - first) // per
        moment = np.zeros(len(reader), np.int64)
        for number, rows in self.rows[space].items():
            at = np.flatnonzero(same & (unit == number))
            if len(at):
                row = rows[local[at] // WARP]
                other = (writer[at] - first) % per
                every = row.reshape(len(at), -1, WARP).min(axis=2)[np.arange(len(at)), other // WARP]
                moment[at] = np.where(collective[at], every, row[np.arange(len(at)), other])
        fenced = self.fenced.get(space)
        if fenced is not None and not same.all():
            # Between blocks a fence of the writer behind its write, or of the reader at all since then, is believed.
            moment[~same] = np.maximum(fenced[writer[~same]], fenced[reader[~same]])
        return np.asarray((stamp > moment) & (stamp > 0))
