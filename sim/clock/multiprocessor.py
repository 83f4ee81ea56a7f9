"""A multiprocessor clock by clock: four sub-cores issue their warps' traces, an instruction a clock each.

An instruction issues when the stall count of the one before has passed, the scoreboards that it waits for are clear, its unit or
queue takes it, and the register banks can give its operands in time. The last warp goes on as long as it can, then the youngest
that is ready (Huerta et al., arXiv 2503.20481); a warp that yields leaves the next clock to others.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from .engines import GROUP_WARPS, Meetings, Place, Products, QueuedProduct
from .rates import ChipRates
from .sass import SCOREBOARDS
from .steps import WARP, Act, TraceStep, Unit
from .waits import Key


class Cost(NamedTuple):
    """An access of a warp: clocks of the pipe to shared memory and L1; bytes that go to the L2, and of those to DRAM.

    `asked`: of a copy, the bytes that its lanes ask for, and `tensor` the number of their tensor. `merged`: the share of the L2's
    bytes that it gives once to several multiprocessors.
    """

    pipe: float
    l2_bytes: float = 0.0
    dram_bytes: float = 0.0
    asked: int = 0
    tensor: int = -1
    merged: float = 0.0

    @property
    def given(self) -> float:
        """Bytes that the L2 gives for this multiprocessor alone."""
        return self.l2_bytes * (1 - self.merged)


Meets = tuple[tuple[Key, bool, bool], ...]
"""Meetings: whether a warp counts for it, and waits for it."""


class Issue(NamedTuple):
    """An instruction of a trace: its step's number, its access, and True for a branch that was taken."""

    at: int
    cost: Cost | None = None
    taken: bool = False
    mark: bool = False  # a turn of the loop begins here
    signals: Meets = ()


@dataclass(frozen=True)
class Outside:
    """The L2 and DRAM as a multiprocessor finds them: its port and its share of each in bytes a clock, latencies in clocks.

    `atomic_bytes`: its share of the sectors that the L2 updates, `added_bytes`: of the bytes that bulk reductions add.
    """

    port: float
    l2_bytes: float
    atomic_bytes: float
    added_bytes: float
    dram_bytes: float
    l2_latency: float
    dram_latency: float

    def rate(self, step: TraceStep) -> float:
        """Bytes a clock of the L2 for an instruction."""
        if not step.updates:
            return self.l2_bytes
        return self.added_bytes if step.act == Act.BULK else self.atomic_bytes


@dataclass(slots=True, eq=False)
class ClockedWarp:
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
    group: int = 0  # the warpgroup in its block
    products: int = 0  # those it issued
    groups: list[QueuedProduct] = field(default_factory=list)  # the last product of each group that was not waited for
    awaits: tuple[Place, ...] = ()


@dataclass(slots=True)
class SubCore:
    """The warps and units of a sub-core; `free`: the time at which each unit takes its next instruction."""

    warps: list[ClockedWarp] = field(default_factory=list)
    last: ClockedWarp | None = None
    free: list[float] = field(default_factory=lambda: [0.0 for _ in range(len(Unit) + 1)])
    banks: list[float] = field(default_factory=lambda: [0.0, 0.0])
    kept: dict[int, tuple[ClockedWarp, int]] = field(default_factory=dict)
    leaves: deque[float] = field(default_factory=deque)
    returned: list[float] = field(default_factory=lambda: [0.0, 0.0])  # the last result of shared memory and L1, and of the L2
    free_at: float = 0.0  # the clock from which it may issue
    next: float = inf  # the clock at which it looks for a warp again


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


class ClockedMultiprocessor:
    """Runs blocks, of which so many are resident; each block is a trace for each of its warps."""

    def __init__(self, steps: Sequence[TraceStep], rates: ChipRates, outside: Outside, residents: int) -> None:
        self.steps, self.outside, self.residents = steps, outside, residents
        self.cores = [SubCore() for _ in range(int(rates["issue.sub_cores"]))]
        self.halves = 2 if rates["lanes.fp32"] > 16 else 1
        self.bank_reads, self.window = rates["registers.reads"], rates["registers.read_window"]
        self.late = rates["registers.late_reads"]
        self.room, self.special_room = int(rates["queues.memory"]), rates["queues.special"]
        self.downstream, self.grant_clocks = rates["queues.downstream"], 1 / rates["shared.requests"]
        self.return_bytes = rates["shared.return_bytes"]
        self.branch = rates["latency.branch"]
        self.meetings = Meetings(rates)
        self.products = Products(rates) if "wgmma.queue" in rates.constants else None
        if self.products is not None:
            self.apart, self.fence = rates["wgmma.issue"], rates["wgmma.fence"]
        if "copies.tma_issue" in rates.constants:
            self.bulk_apart, self.bulk_extra, self.bulk_rate = (rates[f"copies.tma_{n}"] for n in ("issue", "extra", "rate"))
            self.added_apart = rates["copies.reduce_issue"]
            self.woken = rates["copies.mbarrier_wait"]
        self.bulk = self.written = 0.0
        self.pending_clocks = rates["l1.pending"] * rates["l1.sector"] / outside.port
        self.leave, self.lead = rates["queues.leave"], rates["l2.window"]
        self.start, self.spread = rates["launch.start"], rates["launch.spread"]
        self.one_double = bool(rates["lanes.fp64_shared"])
        self.youngest = bool(rates["issue.youngest_first"])
        self.granted = self.pipe = self.port = self.l2 = self.updated = self.dram = self.double = 0.0
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
            if now != core.next:  # it was woken earlier
                continue
            core.next = inf
            warp, soonest = self.choose(core, now)
            if warp is None:
                if soonest < inf:
                    self.wake(number, soonest)
                continue
            core.free_at = now + 1
            core.free_at += self.issue(core, warp, now)
            if warp.at == len(warp.trace):
                core.warps.remove(warp)
                self.left[warp.block] -= 1
                if not self.left[warp.block]:
                    self.result.ends.append(now)
                    if queue:
                        self.begin(*queue.popleft(), now + self.start)
            self.wake(number, core.free_at)
        if any(core.warps for core in self.cores):
            raise ValueError("the model's warps wait for each other for ever")
        self.result.drained = max(self.port, self.l2, self.updated, self.dram)
        return self.result

    def begin(self, block: int, traces: Sequence[Sequence[Issue]], at: float) -> None:
        self.meetings.begin(block, traces)
        self.left[block] = len(traces)
        for number, trace in enumerate(traces):
            place = self.age % len(self.cores)
            self.cores[place].warps.append(
                ClockedWarp(block, self.age, trace, at + self.spread * number, group=number // GROUP_WARPS)
            )
            self.age += 1
            self.wake(place, at)

    def wake(self, number: int, at: float) -> None:
        """Has a sub-core look for a warp at a time, but not before it may issue again."""
        core = self.cores[number]
        at = max(at, core.free_at)
        if at < core.next:
            core.next = at
            heapq.heappush(self.events, (at, number))

    def choose(self, core: SubCore, now: float) -> tuple[ClockedWarp | None, float]:
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

    def earliest(self, core: SubCore, warp: ClockedWarp, now: float) -> float:
        """The earliest time at which a warp's next instruction could issue."""
        if warp.ready > now:
            return warp.ready
        step = self.steps[warp.trace[warp.at].at]
        unit, free = step.unit, core.free
        if unit == Unit.FMA:
            return min(free[Unit.HEAVY], free[LITE]) if self.halves == 2 else free[Unit.HEAVY]
        if unit == Unit.MEMORY:
            return core.leaves[0] if len(core.leaves) >= self.room else now
        if unit == Unit.SPECIAL:
            return free[unit] - self.special_room * step.clocks
        if unit == Unit.DOUBLE:
            return max(free[unit], self.double if self.one_double else 0.0)
        if unit == Unit.PRODUCT:
            assert self.products is not None
            return self.products.earliest((warp.block, warp.group, warp.products), now)
        return free[unit] if unit != Unit.NONE else now

    def issue(self, core: SubCore, warp: ClockedWarp, now: float) -> float:
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
        if step.result and self.products is not None:
            delay += self.products.collide(now, len(self.cores))
        if unit == Unit.MEMORY:
            done, read = self.memory(core, step, issue.cost or SHUFFLED, now)
        elif unit == Unit.FMA:
            place = Unit.HEAVY if self.halves == 1 or core.free[LITE] > core.free[Unit.HEAVY] else LITE
            core.free[place] = now + delay + step.clocks
        elif unit not in (Unit.NONE, Unit.PRODUCT):
            begins = max(core.free[unit], now + delay)
            core.free[unit] = begins + step.clocks
            done += begins - now
            if unit == Unit.DOUBLE:
                self.double = core.free[unit]
        self.result.issued += 1
        if step.act:
            done = self.act(warp, issue, step, now, done)
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

    def operands(self, core: SubCore, warp: ClockedWarp, step: TraceStep, now: float) -> float:
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

    def memory(self, core: SubCore, step: TraceStep, cost: Cost, now: float) -> tuple[float, float]:
        """Takes an access through the sub-core's queue, shared memory or L1, the L2 and DRAM.

        Returns the times at which the result is there and at which the operands are read.
        """
        leaves = core.leaves
        while leaves and leaves[0] <= now:
            leaves.popleft()
        interval = max(2.0, step.late / self.late) if cost is not IDLE else 2.0
        leave = max(now + self.leave, self.granted + self.grant_clocks, self.pipe - self.downstream)
        leave = max(
            leave, leaves[-1] + interval if leaves else 0.0, self.port - self.pending_clocks, max(self.l2, self.updated) - self.lead
        )
        self.granted = leave
        leaves.append(leave)
        read = leave - self.leave + step.release
        self.pipe = self.served(max(self.pipe, leave), cost.pipe)
        done = max(now + step.latency, self.pipe + step.latency - self.leave - step.bytes / 4)
        if cost.l2_bytes:
            self.port = max(self.port, self.pipe) + cost.l2_bytes / self.outside.port
            arrives, latency = self.beyond(step, cost, self.pipe)
            done = max(now + latency, arrives + latency - self.leave)
        if step.writes is not None and not step.act and cost is not IDLE:
            behind = cost.l2_bytes > 0
            done = core.returned[behind] = max(core.returned[behind] + WARP * step.bytes / self.return_bytes, done)
        return done, read

    def beyond(self, step: TraceStep, cost: Cost, begins: float) -> tuple[float, float]:
        """Takes what has passed the port to the L2 through it and DRAM; returns when its last bytes come, less their latency, and
        that."""
        outside, given = self.outside, self.given(step, cost, begins)
        self.dram = max(self.dram, begins) + cost.dram_bytes / outside.dram_bytes
        far = cost.dram_bytes / cost.l2_bytes if cost.l2_bytes else 0.0
        latency = outside.l2_latency + far * (outside.dram_latency - outside.l2_latency)
        return max(self.port, given - self.lead, self.dram - self.lead), latency

    def given(self, step: TraceStep, cost: Cost, begins: float) -> float:
        """Returns the time at which the L2 has given an access's bytes; what it adds waits for no loads, nor they for that."""
        clocks = cost.given / self.outside.rate(step)
        if step.updates:
            self.updated = max(self.updated, begins) + clocks
            return self.updated
        self.l2 = max(self.l2, begins) + clocks
        return self.l2

    def served(self, begins: float, wavefronts: float) -> float:
        """Returns the end of an access to shared memory or the L1; the factors of products go first."""
        if self.products is None or not self.products.fetches:
            return begins + wavefronts
        return self.products.beside(begins, wavefronts)

    def act(self, warp: ClockedWarp, issue: Issue, step: TraceStep, now: float, done: float) -> float:
        """Makes what an instruction does beside keeping a unit busy; returns when its result is there."""
        act = step.act
        if act == Act.COPY:
            warp.copies = max(warp.copies, done)
        elif act == Act.GROUP:
            warp.copies = max(warp.copies, now)
            if step.board < SCOREBOARDS:
                pending = warp.pending.setdefault(step.board, [])
                pending[:] = [each for each in pending if each > now] + [warp.copies]
        elif act in (Act.BARRIER, Act.ARRIVE):
            self.come(warp, issue, now)
            self.wait(warp, tuple((warp.block, key) for key, _, waits in issue.signals if waits))
        elif act == Act.PHASE:
            done = max(done, self.wait(warp, tuple((warp.block, key) for key, _, _ in issue.signals), behind=False))
        elif act == Act.BULK:
            self.copy(warp, issue, step, now)
        elif act == Act.PRODUCT:
            self.multiply(warp, step, now)
        elif act == Act.FENCE:
            warp.ready = max(warp.ready, now + self.fence)
        elif act == Act.WAIT_PRODUCTS and len(warp.groups) > step.count:
            last = warp.groups[len(warp.groups) - step.count - 1]
            warp.groups = warp.groups[len(warp.groups) - step.count :]
            if last.done == inf:
                warp.held = True
                last.waiting.append(warp)
            else:
                warp.ready = max(warp.ready, last.done)
        return done

    def come(self, warp: ClockedWarp, issue: Issue, at: float) -> None:
        """A warp, or its copy, comes to meetings at a time."""
        for key, comes, _ in issue.signals:
            if comes:
                for other in self.meetings.come((warp.block, key), at):
                    self.wait(other, other.awaits)

    def wait(self, warp: ClockedWarp, places: tuple[Place, ...], behind: bool = True) -> float:
        """Holds a warp until meetings are over, or tells when they will be: `behind` that its next instruction issues."""
        over = 0.0
        for place in places:
            at = self.meetings.over(place)
            if at == inf:
                warp.held, warp.awaits = True, places
                self.meetings.waiting.setdefault(place, []).append(warp)
                return 0.0
            over = max(over, at)
        if warp.held:
            self.resume(warp, over)
        elif behind:
            warp.ready = max(warp.ready, over)
        return over

    def resume(self, warp: ClockedWarp, at: float) -> None:
        warp.held = False
        warp.ready = max(warp.ready, at)
        self.wake(warp.age % len(self.cores), at)

    def multiply(self, warp: ClockedWarp, step: TraceStep, now: float) -> None:
        assert self.products is not None
        product = self.products.issue((warp.block, warp.group, warp.products), step, now)
        warp.products += 1
        warp.ready = max(warp.ready, now + self.apart)
        if step.closes:
            warp.groups.append(product)
        if product.done < inf:
            for other in product.waiting:
                self.resume(other, product.done)

    def copy(self, warp: ClockedWarp, issue: Issue, step: TraceStep, now: float) -> None:
        """Takes a bulk copy through the engine, the L2 and DRAM; its cost's wavefronts are those of all that comes or goes."""
        cost = issue.cost or IDLE
        begins = max(self.bulk, now)
        self.bulk = begins + (self.added_apart if step.updates else self.bulk_apart)
        self.port = max(self.port, begins) + cost.pipe * WAVEFRONT / self.bulk_rate
        arrives, latency = self.beyond(step, cost, begins)
        if not issue.signals:  # a store: its source is free when it was read
            self.written = self.served(max(self.written, begins + self.leave), cost.pipe)
            warp.copies = max(warp.copies, self.written)
            return
        comes = arrives + latency + self.bulk_extra
        self.written = self.served(max(self.written, comes - cost.pipe), cost.pipe)
        self.come(warp, issue, max(self.written, comes) - self.woken)


WAVEFRONT = 128
"""Bytes of shared memory in a wavefront."""
SHUFFLED = Cost(1.0)
"""A wavefront that stays inside of the multiprocessor: a shuffle."""
IDLE = Cost(0.0)
"""The cost of an instruction that no lane of the warp makes: it issues, and goes no further. Assumed."""
