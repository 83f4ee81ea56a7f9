"""From its begin to its exit: when other blocks of a cluster may reach a block's shared memory.

CUDA C++ Programming Guide, "Distributed Shared Memory": a block must have begun before others access its memory, and may not
exit before they are done. Both must follow from what orders the threads, whatever the machine did first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..report.findings import Findings
from ..state.lanes import WARP, Lanes, Wave
from ..text.syntax import Instruction
from ..text.types import Array
from .order import highest
from .races import Races
from .sharing import is_phase


@dataclass
class Touches:
    """Of each lane of the cluster when it last reached a block's shared memory from another one, and with which instruction."""

    stamps: Array
    by: Array


class Lifetimes:
    """The blocks of a wave of clusters."""

    def __init__(self, races: Races, wave: Wave, findings: Findings):
        self.races, self.wave, self.findings = races, wave, findings
        self.touched: dict[int, Touches] = {}
        self.over: dict[int, Array] = {}
        """Of each lane of the cluster until when its accesses were over for some thread of the block that has exited."""

    def touch(self, lanes: Lanes, blocks: Array, i: Instruction) -> None:
        """The lanes reach the shared memory of these blocks of the wave, one a lane, none its own."""
        races, place = self.races, lanes.index % self.races.per
        early = ~races.begun(lanes, blocks)
        if early.any():
            first = int(np.flatnonzero(early)[0])
            block = self.number(int(blocks[first]))
            message = f"access to the shared memory of block {block}, which may not have begun: no cluster barrier is before it"
            self.findings.report("not begun", message, i, lanes, first, count=int(early.sum()))
        if is_phase(i) and "arrive" not in i.mods:
            return  # a phase is not complete without the bytes that are expected: who waits for it waits for this
        for block in np.unique(blocks).tolist():
            found = self.touched.get(block)
            if found is None:
                found = self.touched[block] = Touches(np.zeros(races.per, np.int64), np.zeros(races.per, np.int64))
            at = place[blocks == block]
            found.stamps[at], found.by[at] = races.now, races.number(i)

    def leave(self, lanes: Lanes) -> None:
        """These threads have exited (`wave.alive` knows): if a block has none left, everything that reached it must be over."""
        races, per = self.races, self.races.per
        for block in lanes.block_ids.tolist():
            part = lanes.subset(np.flatnonzero(lanes.block == block))
            start = int(part.index[0]) // per * per + races.first
            learnt = [races.learnt(lane) for lane in (part.index + races.first).tolist()]
            known = [one[start : start + per] for one in learnt if one is not None]
            self.over[block] = highest([races.heard.released(part)[:per], *known, self.over.get(block)])
            if block in self.touched and not self.wave.alive_by_block[block]:
                self.check(block)

    def check(self, block: int) -> None:
        touched, per = self.touched[block], self.wave.lanes_per_block
        late = np.flatnonzero(touched.stamps > self.over[block])
        for number in np.unique(touched.by[late]).tolist():
            lanes = late[touched.by[late] == number]
            i = self.races.instructions[number]
            other, thread = divmod(block // self.wave.cluster * self.races.per + int(lanes[0]), per)
            key = ("exited block", i.line, i.text, None)
            place = self.number(other), thread // WARP, thread % WARP
            count = len(lanes)
            self.findings.record("exited block", self.message(block), (i,), place, key, count=count, address=None, tensor=None)

    def message(self, block: int) -> str:
        number = self.number(block)
        return f"access to the shared memory of block {number}, which may have exited: nothing makes its threads wait for this"

    def number(self, block: int) -> int:
        return self.wave.number(self.wave.first_block + block)
