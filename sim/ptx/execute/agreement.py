"""What the four warps of a warpgroup must all run: wgmma.fence, .mma_async, .commit_group, .wait_group and setmaxnreg.

PTX ISA: `.aligned` of these asks that all threads of the warpgroup run the same instruction. The warps may come to it at any
times, so what one of them runs is kept until the other three have run something too; then they are compared. And between two
setmaxnreg the warps of a warpgroup must synchronise.
"""

from __future__ import annotations

import numpy as np

from ..report.findings import source_and_call
from ..state.lanes import GROUP, WARP, Lanes
from ..text.syntax import Instruction
from ..text.types import Array
from .host import Host


class Agreement:
    """The warpgroups of a wave, by their first warp: `ahead`, what each warp has run that not all have; `broken`, who disagreed."""

    def __init__(self, machine: Host):
        self.machine = machine
        self.per_block = machine.wave.warps_per_block
        self.ahead: dict[int, list[list[Instruction]]] = {}
        self.broken: set[int] = set()
        self.resized: dict[int, list[tuple[int, Instruction]]] = {}
        """By warp: when it ran each setmaxnreg so far, and which."""
        self._whole: dict[Lanes, Array | None] = {}

    def whole(self, lanes: Lanes) -> Array | None:
        """The first warps of the warpgroups that these lanes are, if they are whole ones."""
        if lanes not in self._whole:
            found = None
            if lanes.whole_warps and lanes.warps % GROUP == 0:
                warps = lanes.warp_ids.reshape(-1, GROUP)
                if (self.first_of(warps) == warps[:, :1]).all() and (warps - warps[:, :1] == np.arange(GROUP)).all():
                    found = warps[:, 0].copy()
            self._whole[lanes] = found
        return self._whole[lanes]

    def first_of(self, warps: Array) -> Array:
        """The first warps of the warpgroups that these warps belong to."""
        found: Array = warps - warps % self.per_block % GROUP
        return found

    def size(self, first: int) -> int:
        """Warps of a warpgroup: the last one of a block may have less than four."""
        return min(GROUP, self.per_block - first % self.per_block)

    # -- the same instructions ------------------------------------------------------------------------------------------------

    def come(self, i: Instruction, lanes: Lanes) -> None:
        """Lanes run such an instruction."""
        if not self.ahead and self.whole(lanes) is not None:
            return
        if not lanes.converged:
            self.partial(i, lanes)
            return
        warps = lanes.warp_ids
        for warp, first in zip(warps.tolist(), self.first_of(warps).tolist(), strict=True):
            if first not in self.broken:
                self.ahead.setdefault(first, [[] for _ in range(self.size(first))])[warp - first].append(i)
        for first in np.unique(self.first_of(warps)).tolist():
            if first in self.ahead:
                self.compare(first)

    def compare(self, first: int) -> None:
        """Drop what all warps have run; report the first thing in which they differ."""
        logs, alive = self.ahead[first], self.machine.wave.alive_by_warp
        while any(logs) and all(log or not alive[first + k] for k, log in enumerate(logs)):
            # None: exited, without having run what another warp has.
            heads = [log[0] if log else None for log in logs]
            if any(head is not heads[0] for head in heads):
                self.report(first, heads)
                self.broken.add(first)
                break
            for log in logs:
                del log[0]
        if first in self.broken or not any(logs):
            del self.ahead[first]

    def report(self, first: int, heads: list[Instruction | None]) -> None:
        """Stands at the first of the instructions in the text: who runs a later one has passed it by."""
        machine = self.machine
        i = next(one for one in machine.code.instructions if any(one is head for head in heads))
        here = [k for k, head in enumerate(heads) if head is i]
        other, instead = next((k, head) for k, head in enumerate(heads) if head is not i)
        start = first % self.per_block
        does = "has exited" if instead is None else f"runs {name(instead)} at {source_and_call(instead)} instead"
        message = (
            f"{name(i)} must be run by all warps of a warpgroup: of warps {start} to {start + len(heads) - 1} "
            f"warp {start + other} {does}"
        )
        lanes = machine.wave.lanes(np.arange((first + here[0]) * WARP, (first + here[0] + 1) * WARP))
        machine.memory.findings.report("disagreement", message, i, lanes, 0, count=WARP * len(here))

    def partial(self, i: Instruction, lanes: Lanes) -> None:
        """Its predicate holds for some threads of a warp only."""
        few = np.flatnonzero(np.bincount(lanes.warp)[lanes.warp] < self.machine.wave.alive_by_warp[lanes.warp])
        message = f"{name(i)} must be run by all threads of a warpgroup, but its predicate holds for some threads of a warp only"
        self.machine.memory.findings.report("disagreement", message, i, lanes, int(few[0]), count=len(few))

    def leave(self) -> None:
        """Threads have exited: what they have not run they never will."""
        for first in list(self.ahead):
            self.compare(first)

    # -- two setmaxnreg -------------------------------------------------------------------------------------------------------

    def resize(self, i: Instruction, lanes: Lanes) -> None:
        """Warps run a setmaxnreg: for a second one they must be behind the first one of all warps of their warpgroup."""
        self.come(i, lanes)
        races = self.machine.memory.races
        if races is None:
            return
        for warp in lanes.warp_ids.tolist():
            before = self.resized.get(warp)
            if before:
                self.look(i, lanes.subset(np.flatnonzero(lanes.warp == warp)), warp, before[-1][1], len(before) - 1)
        for warp in lanes.warp_ids.tolist():
            self.resized.setdefault(warp, []).append((races.now, i))
        races.now += 1

    def look(self, i: Instruction, lanes: Lanes, warp: int, previous: Instruction, last: int) -> None:
        """Lanes of one warp run a setmaxnreg behind their `last` one: who of the warpgroup may not have run that yet."""
        machine, races = self.machine, self.machine.memory.races
        assert races is not None
        known = races.heard.knows(races.heard.groups(lanes, np.zeros(1, np.int64)))[0].reshape(-1, WARP).max(axis=1)
        first = int(self.first_of(np.array([warp]))[0])
        for other in range(first, first + self.size(first)):
            ran = self.resized.get(other, [])
            behind = last < len(ran) and known[other % len(known)] >= ran[last][0]
            if behind or other == warp or not machine.wave.alive_by_warp[other]:
                continue
            message = (
                f"{name(i)} while warp {other % self.per_block} of the warpgroup may not have run the one at "
                f"{source_and_call(previous)}: its warps must synchronise between the two"
            )
            machine.memory.findings.report("register budget", message, i, lanes, 0, count=lanes.n)
            return


def name(i: Instruction) -> str:
    """wgmma.fence and the like."""
    return f"{i.opcode}.{i.mods[0]}"
