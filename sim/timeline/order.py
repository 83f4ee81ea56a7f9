"""The order in which a warp issues straight code, in the model of one thread block: a list scheduler's, as ptxas has one.

PTX has the front end's order, with a load just before its use; ptxas moves instructions so that a warp waits less. Here each piece
between two branches or instructions of wgmma is sorted: first the instruction with the longest way to the end of the piece, if its
unit is free. Accesses to memory do not pass barriers, fences, atomics and waits for copies; arithmetic does. Registers are assumed
to suffice.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

from cupyflash.multiprocessor import L2_LATENCY, PARTITIONS
from cupyflash.sim.ptx.report.counters import copies_by_lanes, instruction_class
from cupyflash.sim.ptx.report.diary import Listing
from cupyflash.sim.ptx.text.syntax import TYPES, PtxInstruction
from cupyflash.sim.timeline.units import FREE, SHARED, TimelineStep

FIXED_CLASSES = frozenset({"control", "other"})
ORDERED_CLASSES = frozenset({"barrier, fence", "atomic"})
STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "mmio"})
SPACES = frozenset({"shared", "global", "local"})


def stays(i: PtxInstruction) -> bool:
    """True if no instruction may move past this one."""
    return i.opcode == "wgmma" or instruction_class(i) in FIXED_CLASSES


def touches(i: PtxInstruction) -> tuple[frozenset[str], bool]:
    """The spaces of memory that an instruction accesses, and True if it writes there; an instruction that orders accesses touches
    all spaces."""
    kind, _, space = instruction_class(i).partition(" ")
    if f"{kind} {space}" in ORDERED_CLASSES or kind in ORDERED_CLASSES or not STRONG.isdisjoint(i.mods):
        return SPACES, True
    if i.opcode == "cp":
        return (frozenset({"shared"}) if copies_by_lanes(i) else SPACES), True
    if kind not in ("load", "store") or space in ("param", "const"):
        return frozenset(), False
    return (SPACES if space == "generic" else frozenset({space})), kind == "store"


def passes(i: PtxInstruction) -> int:
    """Wavefronts of a warp's access without conflicts."""
    if i.opcode == "cp":
        return 4  # of 16 bytes a lane
    matrices = next((int(mod[1:]) for mod in i.mods if mod in ("x1", "x2", "x4")), 0)
    elements = next((int(mod[1:]) for mod in i.mods if mod in ("v2", "v4", "v8")), 1)
    bits = next((TYPES[mod].bits for mod in reversed(i.mods) if mod in TYPES), 32)
    return matrices or max(1, elements * bits // 32)


class Orders:
    """The orders of a kernel's code; `step` gives the cost of an instruction."""

    def __init__(self, listing: Listing, step: Callable[[int], TimelineStep]):
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
        """The same for a piece in which all instructions may be moved."""
        if end - first < 2:
            return list(range(first, end))
        followers = self.followers(first, end)
        heights: dict[int, float] = {}
        for pc in range(end - 1, first - 1, -1):
            heights[pc] = max((heights[after] + wait for after, wait in followers[pc].items()), default=0.0) + 1
        return self.schedule(range(first, end), followers, heights)

    def followers(self, first: int, end: int) -> dict[int, dict[int, float]]:
        """The instructions that must follow each instruction, and by how many clocks."""
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
        """Until an instruction's result is there; of memory as it was executed."""
        step = self.step(pc)
        return L2_LATENCY if step.kind == "global" else 0.0 if step.unit == FREE else max(step.latency, 1.0)

    def takes(self, pc: int) -> float:
        """Clocks until its unit takes the next one; for shared memory, if the sub-cores do the same at the same time."""
        step = self.step(pc)
        return PARTITIONS * passes(self.listing.instructions[pc]) if step.unit == SHARED else max(step.clocks, 1.0)

    def schedule(self, pcs: range, followers: dict[int, dict[int, float]], heights: dict[int, float]) -> list[int]:
        """List scheduling, an instruction a clock: of those whose operands are ready and whose unit is free, the one with the
        longest way after it."""
        left = dict.fromkeys(pcs, 0)
        for those in followers.values():
            for after in those:
                left[after] += 1
        at = dict.fromkeys(pcs, 0.0)
        later = [(0.0, pc) for pc in pcs if not left[pc]]
        ready: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        free: defaultdict[int, float] = defaultdict(float)
        found: list[int] = []
        now = 0.0
        while len(found) < len(pcs):
            while later and later[0][0] <= now:
                pc = heapq.heappop(later)[1]
                heapq.heappush(ready[self.step(pc).unit], (-heights[pc], pc))
            able = [unit for unit, those in ready.items() if those and free[unit] <= now]
            if not able:
                now = min([*(free[unit] for unit, those in ready.items() if those), *(each[0] for each in later[:1])])
                continue
            unit = min(able, key=lambda unit: ready[unit][0])
            pc = heapq.heappop(ready[unit])[1]
            found.append(pc)
            if unit >= 0:
                free[unit] = now + self.takes(pc)
            for after, wait in followers[pc].items():
                at[after] = max(at[after], now + wait)
                left[after] -= 1
                if not left[after]:
                    heapq.heappush(later, (at[after], after))
            now += unit != FREE
        return found
