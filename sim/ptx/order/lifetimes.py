"""The lifetimes of blocks in clusters.

Other blocks of a cluster may access a block's shared memory only after it has begun, and it may not exit before they are done
(CUDA C++ Programming Guide, "Distributed Shared Memory"). Both must follow from the order of the threads, whatever the machine
ran first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..report.findings import Findings
from ..state.lanes import Lanes, Wave
from ..text.syntax import Array, Instruction
from .clocks import highest
from .detector import Detector
from .sharing import is_phase


@dataclass
class Touches:
    """The last access of each lane of the cluster to a block's shared memory from another block, and its instruction."""

    stamps: Array
    by: Array


class Lifetimes:
    """The lifetimes of a wave's blocks in clusters."""

    def __init__(self, races: Detector, wave: Wave, findings: Findings):
        self.races, self.wave, self.findings = races, wave, findings
        self.touched: dict[int, Touches] = {}
        self.over: dict[int, Array] = {}
        """Moments, for each lane of the cluster, until which its accesses were over for a thread of the block that has exited."""

    def touch(self, lanes: Lanes, blocks: Array, i: Instruction) -> None:
        """Notes that the lanes access the shared memory of these blocks of the wave, one a lane, none its own."""
        races, place = self.races, lanes.index % self.races.per
        early = ~races.begun(lanes, blocks)
        if early.any():
            block = self.number(int(blocks[early][0]))
            message = f"access to the shared memory of block {block}, which may not have begun: no cluster barrier is before it"
            self.findings.report("not begun", message, i, lanes, np.flatnonzero(early))
        if is_phase(i) and "arrive" not in i.mods:
            return  # a phase is not complete without the bytes that are expected: who waits for it waits for this
        for block in np.unique(blocks).tolist():
            found = self.touched.get(block)
            if found is None:
                found = self.touched[block] = Touches(np.zeros(races.per, np.int64), np.zeros(races.per, np.int64))
            at = place[blocks == block]
            found.stamps[at], found.by[at] = races.now, races.number(i)

    def leave(self, lanes: Lanes) -> None:
        """Checks blocks whose last thread is among these, which have exited: every access to their memory must be over."""
        races, per = self.races, self.races.per
        for block in lanes.block_ids.tolist():
            part = lanes.subset(np.flatnonzero(lanes.block == block))
            start = int(part.index[0]) // per * per + races.first
            learnt = [races.learnt(lane) for lane in (part.index + races.first).tolist()]
            known = [one[start : start + per] for one in learnt if one is not None]
            self.over[block] = highest([races.released(races.groups(part))[0, :per], *known, self.over.get(block)])
            if block in self.touched and not self.wave.alive_by_block[block]:
                self.check(block)

    def check(self, block: int) -> None:
        touched = self.touched[block]
        late = np.flatnonzero(touched.stamps > self.over[block])
        for number in np.unique(touched.by[late]).tolist():
            lanes = late[touched.by[late] == number]
            i = self.races.instructions[number]
            place = self.wave.place(block // self.wave.cluster * self.races.per + int(lanes[0]))
            message = (
                f"access to the shared memory of block {self.number(block)}, which may have exited: nothing makes its threads "
                "wait for this"
            )
            key = ("exited block", i.line, i.text, None)
            self.findings.record("exited block", message, (i,), place, key, count=len(lanes), address=None, tensor=None)

    def number(self, block: int) -> int:
        return self.wave.number(self.wave.first_block + block)
