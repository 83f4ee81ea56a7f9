"""The clock model: one multiprocessor whose four sub-cores issue their warps' traces, an instruction a clock each.

An instruction issues when the stall count of the one before has passed, the scoreboards that it waits for are clear, and its
unit takes it. Units of a sub-core: tensor core, MUFU, FMA, ALU; the pipe to shared memory is the multiprocessor's. MUFU and
shared memory have a queue before them. Barriers hold a block's warps, DEPBAR those whose copies are under way.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from cupyflash.multiprocessor import FIXED_LATENCY, PARTITIONS, WARP
from cupyflash.sim.clock.sass import SCOREBOARDS, Instruction
from machine_code.rates import Rates, Unit, unit

WAY_TO_SHARED = 2  # clocks from issue to the pipe of shared memory
APART = 3  # clocks between a block's warps at its start


# What an instruction does beside keeping a unit busy. Plain numbers here, as units are: enumerations take twice the time.
NOTHING, COPY, GROUP, WAIT_GROUPS, BARRIER, LOAD = range(6)
TENSOR, EXP, MEMORY = int(Unit.TENSOR), int(Unit.EXP), int(Unit.MEMORY)


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction of a trace as the model needs it."""

    unit: int
    clocks: float
    stall: float
    waits: tuple[int, ...]
    writes: int | None
    reads: int | None
    act: int
    groups: int  # that may be under way behind a DEPBAR
    warps: int | None  # that meet at a barrier, where it says so
    barrier: str


def steps(trace: Sequence[Instruction], rates: Rates) -> list[Step]:
    """A trace's instructions; a branch that is not followed by its neighbour is taken. The last one is not looked at."""
    found = []
    for at, each in enumerate(trace):
        kind = unit(each)
        act, groups, warps, barrier = NOTHING, 0, None, ""
        if each.opcode == "LDGSTS":
            act = COPY
        elif each.opcode == "LDGDEPBAR":
            act = GROUP
        elif each.opcode in ("LDG", "LD", "ATOM", "ATOMG"):
            act = LOAD
        elif each.opcode == "DEPBAR":
            act, groups = WAIT_GROUPS, int(each.operands[1], 16) if len(each.operands) > 1 else 0
        elif each.opcode == "BAR":
            act, barrier = BARRIER, each.operands[0] if each.operands else "0x0"
            threads = each.operands[1] if len(each.operands) > 1 else ""
            warps = int(threads, 16) // WARP if threads.startswith("0x") else None
        clocks = rates.shared_clocks(each) if kind == Unit.MEMORY else rates.sub_core_clocks(each)
        turns = each.opcode in ("BRA", "JMP") and at + 1 < len(trace) and trace[at + 1].address != each.address + 16
        stall = max(each.control.stall, 1) + (rates.branch if turns else 0)
        control = each.control
        found.append(Step(int(kind), clocks, stall, control.waits, control.writes, control.reads, act, groups, warps, barrier))
    return found


@dataclass(slots=True)
class Warp:
    """The state of a warp. `boards`: the time at which each scoreboard is clear; `groups`: the time at which each group of copies
    has arrived."""

    block: int
    ready: float
    at: int = 0
    boards: list[float] = field(default_factory=lambda: [0.0] * SCOREBOARDS)
    groups: list[float] = field(default_factory=list)
    copies: float = 0.0
    held: bool = False


@dataclass
class Run:
    """A run: by number of steps, the time at which the first warp had issued them, and how many all had issued by then; the end of
    each block."""

    marks: dict[int, tuple[float, int]] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)

    @property
    def clocks(self) -> float:
        """Until the last block was done."""
        return max(self.ends)


@dataclass(frozen=True)
class Residents:
    """Blocks that share a multiprocessor, of so many warps each. `queued`: blocks that come after them, in all."""

    warps: int
    blocks: int
    queued: int = 0


class Multiprocessor:
    """Runs one program on all warps of the resident blocks, and of the blocks that come after them."""

    def __init__(self, program: Sequence[Step], rates: Rates, residents: Residents, chance: random.Random | None = None) -> None:
        self.program, self.rates, self.residents, self.chance = program, rates, residents, chance
        self.free = [[0.0] * 4 for _ in range(PARTITIONS)]
        self.shared = 0.0
        self.issued = 0
        self.queued = residents.queued
        self.left = [residents.warps] * residents.blocks
        self.waiting: dict[tuple[int, str], list[Warp]] = {}
        self.warps: list[list[Warp]] = [[] for _ in range(PARTITIONS)]
        self.last: list[Warp | None] = [None] * PARTITIONS
        self.asleep: set[int] = set()
        self.times: list[tuple[float, int]] = [(0.0, core) for core in range(PARTITIONS)]

    def begin(self, block: int, at: float) -> None:
        """A block's warps start, spread over the sub-cores."""
        for number in range(self.residents.warps):
            core = (block * self.residents.warps + number) % PARTITIONS
            self.warps[core].append(Warp(block, at + APART * number))
            self.wake(core, at)

    def wake(self, core: int, at: float) -> None:
        if core in self.asleep:
            self.asleep.discard(core)
            heapq.heappush(self.times, (at, core))

    def run(self, starts: Sequence[float], marks: Collection[int] = ()) -> Run:
        """Until all blocks are done or, with `marks`, until a warp has issued so many steps as the last of them says.

        `starts`: when each resident block begins.
        """
        for block, at in enumerate(starts):
            self.begin(block, at)
        found = Run()
        while self.times:
            now, core = heapq.heappop(self.times)
            warp, soonest = self.choose(core, now)
            if warp is None:
                if soonest < inf:
                    heapq.heappush(self.times, (soonest, core))
                else:
                    self.asleep.add(core)
                continue
            self.issue(core, warp, now)
            if warp.at in marks and warp.at not in found.marks:
                found.marks[warp.at] = now, self.issued
                if len(found.marks) == len(marks):
                    return found
            if warp.at == len(self.program):
                self.finish(core, warp, now, found)
            heapq.heappush(self.times, (now + 1, core))
        if any(self.warps):
            raise ValueError("the model's warps wait for each other: the trace has a barrier that not all of them reach")
        return found

    def finish(self, core: int, warp: Warp, now: float, found: Run) -> None:
        """A warp is done; behind a block's last one the next block takes its place."""
        self.warps[core].remove(warp)
        self.left[warp.block] -= 1
        if not self.left[warp.block]:
            found.ends.append(now)
            if self.queued:
                self.queued -= 1
                self.left[warp.block] = self.residents.warps
                self.begin(warp.block, now + self.rates.start)

    def choose(self, core: int, now: float) -> tuple[Warp | None, float]:
        """The warp that issues: the last one again if it can, else the first in order that can; or when one could."""
        soonest, last = inf, self.last[core]
        order = self.warps[core][::-1] if self.rates.youngest_first else self.warps[core]
        if last is not None and not last.held and last.at < len(self.program):
            soonest = self.earliest(core, last)
            if soonest <= now:
                return last, soonest
        for warp in order:
            if warp is last or warp.held:
                continue
            at = self.earliest(core, warp)
            if at <= now:
                return warp, at
            soonest = min(soonest, at)
        return None, soonest

    def earliest(self, core: int, warp: Warp) -> float:
        """The earliest time at which a warp could issue its next step."""
        step, at = self.program[warp.at], warp.ready
        for board in step.waits:
            at = max(at, warp.boards[board])
        if step.unit == MEMORY:
            if step.clocks:
                at = max(at, self.shared - self.rates.shared_queue)
        elif step.unit == EXP:
            at = max(at, self.free[core][EXP] - self.rates.exp_queue)
        elif step.unit < MEMORY:
            at = max(at, self.free[core][step.unit])
        elif step.act == WAIT_GROUPS and len(warp.groups) > step.groups:
            at = max(at, *warp.groups[: len(warp.groups) - step.groups])
        return at

    def issue(self, core: int, warp: Warp, now: float) -> None:
        step, rates = self.program[warp.at], self.rates
        done, read = now + FIXED_LATENCY, now
        if step.unit < MEMORY:
            begins = max(self.free[core][step.unit], now)
            self.free[core][step.unit] = begins + step.clocks
            if step.unit == TENSOR:
                done = begins + rates.tensor_latency
            elif step.unit == EXP:
                done = begins + rates.exp_latency
        elif step.unit == MEMORY:
            if step.clocks:
                self.shared = read = max(self.shared, now + WAY_TO_SHARED) + step.clocks
                done = self.shared + (rates.l2_latency if step.act == LOAD else rates.shared_latency)
            if step.act == COPY:
                drawn = self.chance.uniform(0.7, 1.3) if self.chance else 1.0
                warp.copies = max(warp.copies, now + rates.l2_latency * drawn)
            elif step.act == GROUP:
                warp.groups = [each for each in warp.groups if each > now] + [max(warp.copies, now)]
        if step.writes is not None:
            warp.boards[step.writes] = max(warp.boards[step.writes], done)
        if step.reads is not None:
            warp.boards[step.reads] = max(warp.boards[step.reads], read + rates.read_latency)
        warp.ready = now + step.stall
        warp.at += 1
        self.issued += 1
        self.last[core] = warp
        if step.act == BARRIER:
            self.arrive(warp, step, now)

    def arrive(self, warp: Warp, step: Step, now: float) -> None:
        """Let a warp arrive at a barrier; the last warp releases all."""
        met = self.waiting.setdefault((warp.block, step.barrier), [])
        warp.held = True
        met.append(warp)
        if len(met) == (step.warps or self.residents.warps):
            for each in met:
                each.held, each.ready = False, max(each.ready, now + self.rates.barrier)
            met.clear()
            for core in sorted(self.asleep):
                self.wake(core, now + 1)


@dataclass(frozen=True)
class Share:
    """A loop's clocks a turn of all resident warps, and what fraction of them each unit is busy; `low` and `high`: over seeds."""

    clocks: float
    low: float
    high: float
    busy: dict[str, float]

    @property
    def tensor(self) -> float:
        """The share of mma.sync's peak."""
        return self.busy["tensor"]


@dataclass(frozen=True)
class Effort:
    """Runs with other random starts, turns of the loop in each, and those at the beginning that are not counted."""

    seeds: int = 16
    turns: int = 12
    warm: int = 3


def steady(trace: Sequence[Instruction], rates: Rates, residents: Residents, effort: Effort | None = None) -> Share:
    """A loop's turn: blocks begin at random distances, copies take 0.7 to 1.3 of their latency.

    What is counted is what all warps issue while the first of them makes its turns behind the warm ones: warps need not keep up
    with each other. Without `effort` there is no chance in it, and all blocks begin at once.
    """
    program, effort, exact = steps(trace, rates), effort or Effort(seeds=1), effort is None
    length = sum(max(each.control.stall, 1) for each in trace)
    warps = residents.warps * residents.blocks
    counted: list[float] = []
    for seed in range(effort.seeds):
        chance = random.Random(seed)
        starts = [0.0 if exact else chance.uniform(0, 1.5 * length) for _ in range(residents.blocks)]
        begin, end = effort.warm * len(program), effort.turns * len(program)
        made = Multiprocessor(program * effort.turns, rates, residents, None if exact else chance).run(starts, (begin, end))
        (first, few), (last, many) = made.marks[begin], made.marks[end]
        counted.append((last - first) * warps * len(program) / (many - few))
    clocks = sum(counted) / len(counted)
    a_core = warps / PARTITIONS
    busy = {
        kind.name.lower(): a_core * sum(step.clocks for step in program if step.unit == kind) / clocks
        for kind in Unit
        if kind < Unit.MEMORY
    }
    busy["shared"] = warps * sum(step.clocks for step in program if step.unit == Unit.MEMORY) / clocks
    busy["issue"] = a_core * len(program) / clocks
    return Share(clocks, min(counted), max(counted), busy)
