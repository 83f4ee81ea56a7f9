"""Traces of a multiprocessor's blocks: each warp's instructions and its accesses' costs, without the middle of a long loop."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .accesses import L1, SharedMemory, sectors_of
from .execution import CodeLaunch, Index, IssueEvent
from .lanes import Array
from .memory import ATOMICS, SPACES, STORES, tensor_of
from .multiprocessor import IDLE, Cost, Issue, Meets
from .rates import ChipRates
from .sass import Instruction

BRANCHES = ("BRA", "JMP", "CALL", "RET")
TURNS_BEFORE, TURNS_BEHIND = 8, 2
"""Turns of a loop that are run at its begin and at its end; those between take as long as the last ones before them."""
WARM = 3
"""Turns at a loop's begin from which its time a turn is not taken."""
ALIKE_TURNS = 1.25
"""The most instructions that the mean turn left out may have, as a factor of those of the last turn before, or the inverse."""


def keeps(i: Instruction) -> bool:
    """True for a load whose sectors stay in the L1: a copy to shared memory too, unless it bypasses the L1."""
    return i.opcode in ("LDG", "LD") or (i.opcode == "LDGSTS" and "BYPASS" not in i.modifiers)


LINE, COPIES = 128, 48
"""Bytes of a line of the L2, and bulk copies of the first block behind which a wave is not run further."""


@dataclass(frozen=True)
class Loop:
    """The loop of a block's first warp that is shortened: the instruction at its head, its turns, and those that are left out."""

    head: int
    turns: int

    @property
    def left_out(self) -> range:
        return range(TURNS_BEFORE, self.turns - TURNS_BEHIND)


def longest_loop(path: Sequence[int]) -> Loop | None:
    """Returns the outermost loop on a warp's way through the code that has turns to leave out, most of the way, and alike: those of
    an inner loop are not, where the rest of an outer turn comes after some of them."""
    heads = {to for at, to in pairwise(path) if to < at}
    best: Loop | None = None
    for head in heads:
        visits = [k for k, at in enumerate(path) if at == head]
        if len(visits) <= TURNS_BEFORE + TURNS_BEHIND or (best is not None and len(visits) >= best.turns):
            continue
        left, last = visits[-TURNS_BEHIND] - visits[TURNS_BEFORE], visits[TURNS_BEFORE - 1] - visits[TURNS_BEFORE - 2]
        ratio = left / (len(visits) - TURNS_BEHIND - TURNS_BEFORE) / last
        if 2 * left > len(path) and 1 / ALIKE_TURNS < ratio < ALIKE_TURNS:
            best = Loop(head, len(visits))
    return best


class WaveFetches(NamedTuple):
    """By instruction the share of its bytes that no block has asked for before, and the number of the tensor that it reaches."""

    news: Mapping[int, float]
    tensors: Mapping[int, int]


def wave(launch: CodeLaunch, blocks: Sequence[Index], loop: Loop | None, sector: int) -> WaveFetches:
    """Runs the blocks that the chip has at once through the loop's first turns, and asks which sectors the L2 gets twice."""
    seen: set[int] = set()
    lines: set[int] = set()  # of bulk copies, which take whole lines
    copies = 0
    loaded = defaultdict[int, set[int]](set)
    tensors: dict[int, int] = {}
    asked, fetched = Counter[int](), Counter[int]()
    visits = 0

    def count(at: int, found: Sequence[int], known: set[int]) -> None:
        new = set(found) - known
        known |= new
        asked[at] += len(found)
        fetched[at] += len(new)

    for event in launch.run(*blocks):
        if loop is not None and event.at == loop.head:
            visits += 1
            if visits > TURNS_BEFORE:
                break
        for bulk in event.bulk:
            copies += bulk.warp < launch.warps
            found = bulk.sectors(LINE).tolist()
            if found:
                tensors[event.at] = tensor_of(bulk.rows[0])
            count(event.at, found, lines)
        if copies >= COPIES:
            break
        access = event.access
        if access is None or access.space != "global":
            continue
        load = keeps(launch.kernel.instructions[event.at])
        for warp in event.warps:
            lanes = access.lanes[warp]
            found = sectors_of(access.addresses[warp][lanes], access.size, sector).tolist() if lanes.any() else []
            if found:
                tensors[event.at] = tensor_of(access.addresses[warp][lanes][0])
            if load:  # the L1 has what the block loaded before
                before = loaded[warp // launch.warps]
                found = [each for each in found if each not in before]
                before.update(found)
            count(event.at, found, seen)
    return WaveFetches({at: fetched[at] / max(asked[at], 1) for at in asked}, tensors)


class Tracer:
    """Makes the traces of blocks that share a multiprocessor.

    `reach`: the share of an instruction's bytes that come from DRAM; `news`: those that no block has asked for before.
    """

    def __init__(
        self,
        launch: CodeLaunch,
        rates: ChipRates,
        loop: Loop | None,
        reach: Mapping[int, float],
        news: Mapping[int, float],
        residents: int,
    ) -> None:
        self.launch, self.rates, self.loop, self.reach, self.news = launch, rates, loop, reach, news
        self.shared = SharedMemory(rates)
        self.l1 = L1(rates, residents * launch.shared_bytes)
        self.rate, self.sector = rates["l1.rate"], int(rates["l1.sector"])
        self.merging = rates["l2.merged"] if "l2.merged" in rates.constants else 0.0

    def merged(self, at: int) -> float:
        """Returns the share of a load's bytes that the L2 gives to several multiprocessors at once: all that ask for them are taken
        to be in step."""
        asking = 1 / max(self.news.get(at, 1.0), 1 / self.rates.device.sm_count)
        return min(self.merging * (asking - 1), 1 - 1 / asking)

    def traces(self, blocks: Sequence[Index]) -> list[list[list[Issue]]]:
        """Runs blocks together; returns each one's traces, a warp each."""
        warps, code = self.launch.warps, self.launch.kernel.instructions
        traces: list[list[Issue]] = [[] for _ in range(warps * len(blocks))]
        turns = defaultdict[int, int](int)
        head = self.loop.head if self.loop else -1
        left_out = self.loop.left_out if self.loop else range(0)
        for event in self.launch.run(*blocks):
            i, mark = code[event.at], event.at == head
            if mark:
                for warp in event.warps:
                    turns[warp] += 1
            kept = [warp for warp in event.warps if turns[warp] - 1 not in left_out]
            if not kept:
                continue
            costs = self.costs(event) if event.access is not None else {}
            nothing = IDLE if i.opcode in SPACES else None
            plain = Issue(event.at, nothing, mark=mark)
            met: dict[int, Meets] = {}
            for signal in event.signals:
                met[signal.warp] = (*met.get(signal.warp, ()), (signal.key, signal.counts, signal.waits))
            for warp in kept:
                trace = traces[warp]
                if trace and code[trace[-1].at].opcode in BRANCHES and trace[-1].at + 1 != event.at:
                    trace[-1] = trace[-1]._replace(taken=True)
                if warp in met:
                    trace.append(plain._replace(signals=met[warp]))
                else:
                    trace.append(Issue(event.at, costs[warp], mark=mark) if costs else plain)
        return [traces[k : k + warps] for k in range(0, len(traces), warps)]

    def costs(self, event: IssueEvent) -> Mapping[int, Cost]:
        """Returns each warp's cost of an access."""
        assert event.access is not None
        access, warps = event.access.of(event.warps), event.warps
        i = self.launch.kernel.instructions[event.at]
        clocks: list[float]
        if access.space == "local":
            clocks = [access.size / 4] * len(warps)
        else:
            clocks = self.shared.wavefronts(access, i.opcode in ("LDSM", "STSM")).tolist()
        made: Array = np.logical_or.reduce((access.to or access).lanes, axis=1)
        if access.space != "global":
            return {warp: Cost(float(clocks[row])) if made[row] else IDLE for row, warp in enumerate(warps)}
        copied = [0] * len(warps) if access.to is None else self.shared.wavefronts(access.to).tolist()
        reach = self.reach.get(event.at, 1.0)
        merged = 0.0 if i.opcode in (*STORES, *ATOMICS) else self.merged(event.at)
        found = {}
        for row, warp in enumerate(warps):
            if not made[row]:
                found[warp] = IDLE
                continue
            lanes = access.lanes[row]
            sectors = sectors_of(access.addresses[row][lanes], access.size, self.sector)
            tags, missed = self.l1.look_up(sectors, keeps(i))
            pipe = max(clocks[row], tags, copied[row], len(sectors) * self.sector / self.rate)
            asked = missed * self.sector
            found[warp] = Cost(pipe, asked, asked * reach, merged=merged)
            if access.to is not None and lanes.any():
                tensor = tensor_of(access.addresses[row][lanes][0])
                found[warp] = found[warp]._replace(asked=int(lanes.sum()) * access.size, tensor=tensor)
        return found
