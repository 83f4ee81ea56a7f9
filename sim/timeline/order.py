"""The order in which a warp issues straight code, in the model of one thread block: a list scheduler's, which ptxas is, too.

PTX stands as the front end left it, a load just before its use; ptxas moves instructions so that a warp waits less. Here each piece
between two instructions that nothing passes (barriers, waits, branches, atomics, wgmma) is put in order: first what the longest way
to the end of the piece hangs on. Registers are taken to be enough.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

from cupyflash.multiprocessor import L2_LATENCY
from cupyflash.sim.ptx.report.classes import instruction_class
from cupyflash.sim.ptx.report.diary import Listing
from cupyflash.sim.ptx.text.syntax import Instruction
from cupyflash.sim.timeline.units import NONE, TENSOR, Step, copies_by_lanes

FIXED_CLASSES = frozenset({"control", "barrier, fence", "atomic", "other"})
STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "mmio"})


def stays(i: Instruction) -> bool:
    """Whether nothing passes an instruction."""
    if i.opcode == "cp":
        return not copies_by_lanes(i)
    return i.opcode == "wgmma" or instruction_class(i) in FIXED_CLASSES or not STRONG.isdisjoint(i.mods)


def touches(i: Instruction) -> tuple[frozenset[str], bool]:
    """The spaces of memory that an instruction accesses, and whether it writes there."""
    kind, _, space = instruction_class(i).partition(" ")
    if kind not in ("load", "store"):
        return (frozenset({"shared"}), True) if i.opcode == "cp" else (frozenset(), False)
    if space in ("param", "const"):
        return frozenset(), False
    return frozenset({"shared", "global", "local"} if space == "generic" else {space}), kind == "store"


class Orders:
    """The orders of a kernel's code; `step` says what an instruction takes."""

    def __init__(self, listing: Listing, step: Callable[[int], Step]):
        self.listing, self.step = listing, step
        self._found: dict[tuple[int, int], list[int]] = {}

    def of(self, first: int, end: int) -> list[int]:
        """The instructions from `first` to `end` in the order of their issue."""
        found = self._found.get((first, end))
        if found is None:
            found, start = [], first
            for pc in range(first, end):
                if stays(self.listing.instructions[pc]):
                    found += [*self.piece(start, pc), pc]
                    start = pc + 1
            found += self.piece(start, end)
            self._found[first, end] = found
        return found

    def piece(self, first: int, end: int) -> list[int]:
        """The same where all may be moved."""
        if end - first < 2:
            return list(range(first, end))
        followers = self.followers(first, end)
        heights: dict[int, float] = {}
        for pc in range(end - 1, first - 1, -1):
            heights[pc] = max((heights[after] + wait for after, wait in followers[pc].items()), default=0.0) + 1
        return schedule(range(first, end), followers, heights, self.step)

    def followers(self, first: int, end: int) -> dict[int, dict[int, float]]:
        """Of each instruction, those that must come behind it, and by how many clocks."""
        found: dict[int, dict[int, float]] = {pc: {} for pc in range(first, end)}
        writer: dict[int, int] = {}
        readers: defaultdict[int, list[int]] = defaultdict(list)
        stored: dict[str, int] = {}
        loaded: defaultdict[str, list[int]] = defaultdict(list)
        for pc in range(first, end):
            step = self.step(pc)
            for register in step.reads:
                if register in writer:
                    found[writer[register]][pc] = self.latency(writer[register])
                readers[register].append(pc)
            for register in step.writes:
                for before in (*readers.pop(register, ()), *([writer[register]] if register in writer else ())):
                    if before != pc:
                        found[before].setdefault(pc, 0.0)
                writer[register] = pc
            spaces, writes = touches(self.listing.instructions[pc])
            for space in spaces:
                if space in stored:
                    found[stored[space]].setdefault(pc, 0.0)
                if writes:
                    for before in loaded.pop(space, ()):
                        found[before].setdefault(pc, 0.0)
                    stored[space] = pc
                else:
                    loaded[space].append(pc)
        return found

    def latency(self, pc: int) -> float:
        """Until an instruction's result is there."""
        step = self.step(pc)
        return L2_LATENCY if step.kind == "global" else max(step.latency, 1.0)


def schedule(
    pcs: range, followers: dict[int, dict[int, float]], heights: dict[int, float], step: Callable[[int], Step]
) -> list[int]:
    """List scheduling, an instruction a clock: of those that could issue the one with most behind it, while its unit is free."""
    left = dict.fromkeys(pcs, 0)
    for those in followers.values():
        for after in those:
            left[after] += 1
    at = dict.fromkeys(pcs, 0.0)
    later = [(0.0, pc) for pc in pcs if not left[pc]]
    ready: list[tuple[float, int]] = []
    free: defaultdict[int, float] = defaultdict(float)
    found: list[int] = []
    now = 0.0
    while later or ready:
        while later and later[0][0] <= now:
            pc = heapq.heappop(later)[1]
            heapq.heappush(ready, (-heights[pc], pc))
        busy: list[tuple[float, int]] = []
        while ready and free[step(ready[0][1]).unit] > now:
            busy.append(heapq.heappop(ready))
        if ready:
            pc = heapq.heappop(ready)[1]
            one = step(pc)
            found.append(pc)
            if one.unit != NONE:
                free[one.unit] = now + (one.clocks if one.unit == TENSOR else 1)
            for after, wait in followers[pc].items():
                at[after] = max(at[after], now + wait)
                left[after] -= 1
                if not left[after]:
                    heapq.heappush(later, (at[after], after))
            now += 1
        else:
            now = min([*(free[step(pc).unit] for _, pc in busy), *([later[0][0]] if later else [])])
        for each in busy:
            heapq.heappush(ready, each)
    return found
