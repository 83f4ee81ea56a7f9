"""A multiprocessor clock by clock: four sub-cores issue their warps' traces, an instruction a clock each.

An instruction issues when the stall count of the one before has passed, the scoreboards that it waits for are clear, its unit or
queue takes it, and the register banks can give its operands in time. The last warp goes on as long as it can, then the youngest
that is ready (Huerta et al., arXiv 2503.20481).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from .rates import Rates
from .sass import SCOREBOARDS
from .steps import WARP, Act, Step, Unit


class Cost(NamedTuple):
    """An access of a warp: clocks of the pipe to shared memory and L1; bytes that go to the L2, and of those to DRAM."""

    pipe: float
    l2_bytes: float = 0.0
    dram_bytes: float = 0.0


class Issue(NamedTuple):
    """An instruction of a trace: its step's number, its access, and True for a branch that was taken."""

    at: int
    cost: Cost | None = None
    taken: bool = False
    mark: bool = False  # a turn of the loop begins here


@dataclass(frozen=True)
class Outside:
    """The L2 and DRAM as a multiprocessor finds them: its port and its share of each in bytes a clock, latencies in clocks."""

    port: float
    l2_bytes: float
    dram_bytes: float
    l2_latency: float
    dram_latency: float


@dataclass(slots=True, eq=False)
class Warp:
    """The state of a warp; `boards`: the time at which each scoreboard is clear, `pending`: the times of its copies' groups."""

    block: int
    age: int
    trace: Sequence[Issue]
    ready: float
    at: int = 0
    boards: list[float] = field(default_factory=lambda: [0.0] * SCOREBOARDS)
    pending: dict[int, list[float]] = field(default_factory=dict)
    copies: float = 0.0
    held: bool = False
    turn: int = 0


@dataclass(slots=True)
class SubCore:
    """The warps and units of a sub-core; `free`: the time at which each unit takes its next instruction."""

    warps: list[Warp] = field(default_factory=list)
    last: Warp | None = None
    free: list[float] = field(default_factory=lambda: [0.0 for _ in range(len(Unit) + 1)])
    banks: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kept: dict[int, tuple[Warp, int]] = field(default_factory=dict)
    leaves: deque[float] = field(default_factory=deque)
    returned: float = 0.0
    asleep: bool = True


@dataclass
class Run:
    """A run: the end of each block, the instructions of all warps, and for each turn of the loop the time at which a warp was the
    first to begin it, with the instructions that all had issued by then."""

    ends: list[float] = field(default_factory=list)
    drained: float = 0.0
    turns: list[tuple[float, int]] = field(default_factory=list)
    issued: int = 0

    @property
    def clocks(self) -> float:
        """Until the last block was done, and the L2 and DRAM had given and taken this multiprocessor's bytes."""
        return max(*self.ends, self.drained)


LITE = len(Unit)
"""The place among a sub-core's units of the second half of its FMA unit."""


class Multiprocessor:
    """Runs blocks, of which so many are resident; each block is a trace for each of its warps."""

    def __init__(self, steps: Sequence[Step], rates: Rates, outside: Outside, residents: int) -> None:
        self.steps, self.outside, self.residents = steps, outside, residents
        self.cores = [SubCore() for _ in range(int(rates["issue.sub_cores"]))]
        self.halves = 2 if rates["lanes.fp32"] > 16 else 1
        self.bank_reads, self.window = rates["registers.reads"], rates["registers.read_window"]
        self.late = rates["registers.late_reads"]
        self.room, self.special_room = int(rates["queues.memory"]), rates["queues.special"]
        self.downstream, self.grant_clocks = rates["queues.downstream"], 1 / rates["shared.requests"]
        self.return_bytes = rates["shared.return_bytes"]
        self.barrier, self.barrier_warp, self.branch = (rates[f"latency.{n}"] for n in ("barrier", "barrier_warp", "branch"))
        self.pending_clocks = rates["l1.pending"] * rates["l1.sector"] / outside.port
        self.leave, self.lead = rates["queues.leave"], rates["l2.window"]
        self.start, self.spread = rates["launch.start"], rates["launch.spread"]
        self.one_double = bool(rates["lanes.fp64_shared"])
        self.youngest = bool(rates["issue.youngest_first"])
        self.granted = self.pipe = self.port = self.l2 = self.dram = self.double = 0.0
        self.waiting: dict[tuple[int, str], list[Warp]] = {}
        self.left: dict[int, int] = {}
        self.events: list[tuple[float, int]] = []
        self.age = 0
        self.result = Run()

    def run(self, blocks: Sequence[Sequence[Sequence[Issue]]], apart: float = 0.0) -> Run:
        """Runs blocks in their order: the first ones begin so many clocks apart, the next one when a resident one is done."""
        queue = deque(enumerate(blocks))
        for number in range(min(self.residents, len(queue))):
            self.begin(*queue.popleft(), number * apart)
        while self.events:
            now, number = heapq.heappop(self.events)
            core = self.cores[number]
            warp, soonest = self.choose(core, now)
            if warp is None:
                if soonest < inf:
                    heapq.heappush(self.events, (soonest, number))
                else:
                    core.asleep = True
                continue
            delay = self.issue(core, warp, now)
            if warp.at == len(warp.trace):
                core.warps.remove(warp)
                self.left[warp.block] -= 1
                if not self.left[warp.block]:
                    self.result.ends.append(now)
                    if queue:
                        self.begin(*queue.popleft(), now + self.start)
                elif self.waiting:
                    self.meet(warp.block, now)
            heapq.heappush(self.events, (now + 1 + delay, number))
        if any(core.warps for core in self.cores):
            raise ValueError("the model's warps wait for each other: the trace has a barrier that not all of them reach")
        self.result.drained = max(self.port, self.l2, self.dram)
        return self.result

    def begin(self, block: int, traces: Sequence[Sequence[Issue]], at: float) -> None:
        self.left[block] = len(traces)
        for number, trace in enumerate(traces):
            place = self.age % len(self.cores)
            self.cores[place].warps.append(Warp(block, self.age, trace, at + self.spread * number))
            self.age += 1
            self.wake(place, at)

    def wake(self, number: int, at: float) -> None:
        if self.cores[number].asleep:
            self.cores[number].asleep = False
            heapq.heappush(self.events, (at, number))

    def choose(self, core: SubCore, now: float) -> tuple[Warp | None, float]:
        """The warp that issues, or the time at which one could."""
        soonest, last = inf, core.last
        if last is not None and not last.held and last.at < len(last.trace):
            soonest = self.earliest(core, last, now)
            if soonest <= now:
                return last, now
        for warp in reversed(core.warps) if self.youngest else core.warps:
            if warp is last or warp.held:
                continue
            if warp.ready > now:
                soonest = min(soonest, warp.ready)
                continue
            at = self.earliest(core, warp, now)
            if at <= now:
                return warp, now
            soonest = min(soonest, at)
        return None, soonest

    def earliest(self, core: SubCore, warp: Warp, now: float) -> float:
        """The earliest time at which a warp's next instruction could issue."""
        if warp.ready > now:
            return warp.ready
        step = self.steps[warp.trace[warp.at].at]
        unit, free = step.unit, core.free
        if unit == Unit.FMA:
            return min(free[Unit.HEAVY], free[LITE]) if self.halves == 2 else free[Unit.HEAVY]
        if unit == Unit.MEMORY:
            full = len(core.leaves) >= self.room and warp.trace[warp.at].cost is not IDLE
            return core.leaves[0] if full else now
        if unit == Unit.SPECIAL:
            return free[unit] - self.special_room * step.clocks
        if unit == Unit.DOUBLE:
            return max(free[unit], self.double if self.one_double else 0.0)
        return free[unit] if unit != Unit.NONE else now

    def issue(self, core: SubCore, warp: Warp, now: float) -> float:
        """Issues a warp's next instruction; returns the clocks for which the register banks hold the sub-core back."""
        issue = warp.trace[warp.at]
        step, boards = self.steps[issue.at], warp.boards
        if issue.mark:
            if warp.turn == len(self.result.turns):
                self.result.turns.append((now, self.result.issued))
            warp.turn += 1
        unit, delay = step.unit, 0.0
        done, read = now + step.latency, now + step.release
        if step.reads:
            delay = self.operands(core, warp, step, now)
        if unit == Unit.MEMORY:
            if issue.cost is not IDLE:
                done, read = self.memory(core, step, issue.cost or SHUFFLED, now)
        elif unit == Unit.FMA:
            place = Unit.HEAVY if self.halves == 1 or core.free[LITE] > core.free[Unit.HEAVY] else LITE
            core.free[place] = now + delay + step.clocks
        elif unit != Unit.NONE:
            begins = max(core.free[unit], now + delay)
            core.free[unit] = begins + step.clocks
            done += begins - now
            if unit == Unit.DOUBLE:
                self.double = core.free[unit]
        self.result.issued += 1
        if step.act:
            self.act(warp, step, now, done)
        if step.writes is not None:
            boards[step.writes] = max(boards[step.writes], warp.copies if step.act == Act.GROUP else done)
        if step.frees is not None:
            boards[step.frees] = max(boards[step.frees], read)
        warp.at += 1
        ready = now + delay + step.stall + (self.branch if issue.taken else 0)
        if step.act == Act.WAIT_COUNT:
            pending = warp.pending.get(step.board, [])
            if len(pending) > step.count:
                ready = max(ready, pending[len(pending) - step.count - 1])
        if warp.at < len(warp.trace):
            for board in self.steps[warp.trace[warp.at].at].waits:
                ready = max(ready, boards[board])
        warp.ready = max(ready, warp.ready)
        core.last = None if step.yields else warp
        return delay

    def operands(self, core: SubCore, warp: Warp, step: Step, now: float) -> float:
        """Reads operands from the banks, but for those that were kept for it; returns the clocks that they come too late."""
        banks, kept, delay = core.banks, core.kept, 0.0
        wanted = [0, 0]
        for place, register, reuse in step.reads:
            if kept.get(place) != (warp, register):
                wanted[register & 1] += 1
            if reuse:
                kept[place] = warp, register
            else:
                kept.pop(place, None)
        for bank in (0, 1):
            if wanted[bank]:
                clocks = wanted[bank] / self.bank_reads
                delay = max(delay, max(banks[bank], now) + clocks - now - self.window)
                banks[bank] = max(banks[bank], now) + clocks
        return delay

    def memory(self, core: SubCore, step: Step, cost: Cost, now: float) -> tuple[float, float]:
        """Takes an access through the sub-core's queue, shared memory or L1, the L2 and DRAM.

        Returns the times at which the result is there and at which the operands are read.
        """
        leaves, outside = core.leaves, self.outside
        while leaves and leaves[0] <= now:
            leaves.popleft()
        interval = max(2.0, step.late / self.late)
        leave = max(now + self.leave, self.granted + self.grant_clocks, self.pipe - self.downstream)
        leave = max(leave, leaves[-1] + interval if leaves else 0.0, self.port - self.pending_clocks, self.l2 - self.lead)
        self.granted = leave
        leaves.append(leave)
        read = leave - self.leave + step.release
        self.pipe = max(self.pipe, leave) + cost.pipe
        done = max(now + step.latency, self.pipe + step.latency - self.leave - step.bytes / 4)
        if cost.l2_bytes:
            self.port = max(self.port, self.pipe) + cost.l2_bytes / outside.port
            self.l2 = max(self.l2, self.pipe) + cost.l2_bytes / outside.l2_bytes
            self.dram = max(self.dram, self.pipe) + cost.dram_bytes / outside.dram_bytes
            arrives = max(self.port, self.l2 - self.lead, self.dram - self.lead)
            far = cost.dram_bytes / cost.l2_bytes
            latency = outside.l2_latency + far * (outside.dram_latency - outside.l2_latency)
            done = max(now + latency, arrives + latency - self.leave)
        if step.writes is not None and not step.act:
            core.returned = max(core.returned + WARP * step.bytes / self.return_bytes, done)
            done = core.returned
        return done, read

    def act(self, warp: Warp, step: Step, now: float, done: float) -> None:
        if step.act == Act.COPY:
            warp.copies = max(warp.copies, done)
        elif step.act == Act.GROUP:
            warp.copies = max(warp.copies, now)
            if step.writes is not None:
                pending = warp.pending.setdefault(step.writes, [])
                pending[:] = [each for each in pending if each > now] + [warp.copies]
        elif step.act == Act.BARRIER:
            warp.held = True
            self.waiting.setdefault((warp.block, step.barrier), []).append(warp)
            self.meet(warp.block, now, step.count)

    def meet(self, block: int, now: float, count: int = 0) -> None:
        """Releases the warps of a block whose barrier is complete: all that are left wait at it, or as many as it says."""
        for key in [key for key in self.waiting if key[0] == block]:
            met = self.waiting[key]
            needed = count or self.left[block]
            if len(met) < needed:
                continue
            del self.waiting[key]
            for each in met:
                each.held = False
                each.ready = max(each.ready, now + self.barrier + self.barrier_warp * len(met))
                self.wake(each.age % len(self.cores), now + 1)


SHUFFLED = Cost(1.0)
"""A wavefront that stays inside of the multiprocessor: a shuffle."""
IDLE = Cost(0.0)
"""The cost of an instruction that no lane of the warp makes: it issues, and goes no further. Assumed."""
