"""Clocks for a diary: one thread block alone on one multiprocessor, by a model. The order, and who waits for what, are the diary's.

Four sub-cores issue an instruction a clock each, a warp's in the order of a list scheduler (`order`). A warp goes on until it needs
a register that is not ready, or a unit whose queue is full. Tensor cores, exponential units, arithmetic and shared memory have
rates, copies and loads have a latency after the way to the L2. A wait ends when everything that it waited for in the diary has
arrived; in the diary's order that always happens, so nothing deadlocks.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from cupyflash.device import Device
from cupyflash.multiprocessor import (
    BARRIER_LATENCY,
    BRANCH_LATENCY,
    EXP_QUEUE,
    L2_BYTES,
    L2_LATENCY,
    PARTITIONS,
    SHARED_BYTES,
    SHARED_QUEUE,
)
from cupyflash.sim.ptx.report.diary import Act, CopySpan, Diary, Global, MultiplyIssue, Promise, Row, Shared, Sign, Start, WaitSpan
from cupyflash.sim.ptx.state.lanes import GROUP, SECTOR
from cupyflash.sim.ptx.text.syntax import Line, PtxInstruction
from cupyflash.sim.timeline.order import Orders
from cupyflash.sim.timeline.units import EXP, FREE, PIPES, SHARED, TENSOR, TimelineStep, UnitRates

SHORT = 16
"""Clocks: a pause below it is part of the work around it."""
MEMORY = frozenset({"shared", "global"})
"""Kinds of work that access memory; which one is as executed."""
MORE = 0.1
"""The share of the clocks for which a span that never ends is drawn."""
SIGNALS = frozenset({"barrier", "cluster", "phase", "registers"})
"""Waits for other warps: they end this much after the event."""
WAIT_KINDS = {
    "barrier": "waits_barrier",
    "cluster": "waits_cluster",
    "phase": "waits_phase",
    "memory": "waits_memory",
    "copies": "waits_copies",
    "stores": "waits_stores",
    "products": "waits_products",
    "registers": "waits_registers",
}
"""Kinds of spans by kinds of waits."""

Span = tuple[float, float, str, int, str]
"""From, to, kind, instruction (-1: none), note."""


class Item(NamedTuple):
    """A warp's next step: an instruction (-1: none) with its acts; `turns`: the instruction after it is elsewhere; `of`: the acts'
    instruction, which was issued before if there is none now."""

    pc: int
    acts: list[Act]
    turns: bool
    of: int


OUTSIDE = ", another thread block's part in it is taken to be there"


def items(row: Row, orders: Orders) -> Iterator[Item]:
    """A warp's instructions in the order of their issue."""
    for number, stretch in enumerate(row.stretches):
        acts: dict[int, list[Act]] = {}
        for pc, act in stretch.acts:
            acts.setdefault(pc, []).append(act)
        for pc in acts:
            if pc < stretch.first:
                yield Item(-1, acts[pc], False, pc)
        later, last = number + 1 < len(row.stretches) and row.stretches[number + 1].first != stretch.end, stretch.end - 1
        for pc in orders.of(stretch.first, stretch.end):
            yield Item(pc, acts.get(pc, []), later and pc == last, pc)


def space(acts: Sequence[Act]) -> str:
    """The memory that an instruction has accessed, by the slowest of its accesses; "" for none."""
    if any(isinstance(act, Global) for act in acts):
        return "global"
    return "shared" if any(isinstance(act, Shared) for act in acts) else ""


def spaces(diary: Diary) -> dict[int, str]:
    """The same of all instructions that do: generic addresses and atomics may be of either."""
    found: dict[int, str] = {}
    for row in diary.rows:
        for stretch in row.stretches:
            for pc, act in stretch.acts:
                if isinstance(act, Global | Shared) and found.get(pc) != "global":
                    found[pc] = space((act,))
    return found


def own_line(i: PtxInstruction) -> tuple[Line, int]:
    """An instruction's line of source; of code in inlined functions the innermost in the kernel's own file, and the number of the
    kernel's line that called it (-1: it is that line)."""
    *inner, last = i.place, *i.inlined_at
    own = next((line for line in inner if line[0] == last[0]), last)
    return own, -1 if own == last else last[1]


@dataclass
class TimelineWarp:
    """The state of a warp. `since`: the end of its last span; `boards`: for each register the time at which it is ready, whether it
    comes from global memory, and from which instruction; `slow`: the board of the register that it waits for."""

    row: int
    core: int
    todo: Iterator[Item]
    item: Item | None
    ready: float = 0.0
    slow: tuple[float, bool, int] | None = None
    since: float = 0.0
    held: tuple[WaitSpan, int, int, list[Act]] | None = None
    """A wait, its instruction, the number of its events whose time is not known yet, and the acts after it."""
    boards: dict[int, tuple[float, bool, int]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def span(self, end: float, kind: str, pc: int, note: str = "") -> None:
        """Add a span from the last one's end to `end`; join it with the last one if they are alike."""
        if end <= self.since:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and last[2:] == (kind, pc, note):
            self.spans[-1] = last[0], end, kind, pc, note
        else:
            self.spans.append((self.since, end, kind, pc, note))
        self.since = end


@dataclass
class Flight:
    """A copy in the model: from its issue until it has landed; `read`: its source has been; `seen`: somebody had waited for it."""

    number: int
    begin: float
    read: float
    landed: float
    seen: float = inf


@dataclass
class Played:
    """A diary with clocks. `rows`: spans of each warp, in order, from 0 to `clocks`; `cores`: mma.sync of each sub-core.

    whole: whether it was played to its end. products: (from, to, number in the diary) of wgmma. waits: (row, wait, when it was
    over). busy: clocks of each unit, of those of sub-cores the busiest. signs: when each number of the diary came. takes: for how
    long an instruction takes its unit.
    """

    clocks: float
    whole: bool
    rows: list[list[Span]]
    cores: list[list[Span]]
    copies: list[Flight]
    products: list[tuple[float, float, int]]
    waits: list[tuple[int, WaitSpan, float]]
    busy: dict[str, float]
    signs: dict[int, float]
    takes: dict[int, float]


class ReplayedTurns:
    """A running model."""

    def __init__(self, diary: Diary, device: Device):
        self.diary, self.rates = diary, UnitRates.of(device)
        self.steps: dict[int, TimelineStep] = {}
        self.spaces = spaces(diary)
        self.free = [[0.0] * PIPES for _ in range(PARTITIONS)]
        self.shared = self.way = self.across = 0.0
        self.busy: defaultdict[tuple[str, int], float] = defaultdict(float)
        """By unit and sub-core; units that the sub-cores share have core 0."""
        self.signs: dict[int, float] = {}
        self.waiting: defaultdict[int, list[TimelineWarp]] = defaultdict(list)
        self.flights: dict[int, Flight] = {}
        self.coming: defaultdict[int, int] = defaultdict(int)
        self.products: list[tuple[float, float, int]] = []
        self.cores: list[list[Span]] = [[] for _ in range(PARTITIONS)]
        self.waits: list[tuple[int, WaitSpan, float]] = []
        self.warps: list[list[TimelineWarp]] = [[] for _ in range(PARTITIONS)]
        self.last: list[TimelineWarp | None] = [None] * PARTITIONS
        self.times: list[tuple[float, int]] = []
        self.due, self.next = [inf] * PARTITIONS, [0.0] * PARTITIONS
        """Of each sub-core, when it looks for a warp to issue, and when it may issue again."""
        self.every: list[TimelineWarp] = []
        self.outside: set[tuple[int, int]] = set()
        """Warps and instructions that read values of other thread blocks."""
        self.promises: dict[int, tuple[int, ...]] = {}

    def run(self, until: float = inf, most: float = inf) -> Played:
        """Run up to a clock, or until `most` instructions are issued."""
        orders = Orders(self.diary.listing, self.step)
        for number, row in enumerate(self.diary.rows):
            todo = items(row, orders)
            warp = TimelineWarp(number, number % PARTITIONS, todo, next(todo, None))
            self.every.append(warp)
            self.come(warp, 0.0)
            if warp.item is not None:
                self.warps[warp.core].append(warp)
        for core in range(PARTITIONS):
            self.wake(core, 0.0)
        issued = 0
        while self.times:
            now, core = heapq.heappop(self.times)
            if now >= until or issued >= most:
                return self.part(now if now < until else until)
            if now != self.due[core]:
                continue  # it was woken before
            self.due[core] = inf
            chosen, soonest = self.choose(core, now)
            if chosen is not None:
                issued += 1
                self.next[core] = now + 1
                self.issue(chosen, now)
            self.wake(core, now + 1 if chosen is not None else soonest)
        assert not any(self.warps), "the diary's order is a legal one"
        ends = *map(max, self.free), *(warp.since for warp in self.every)
        return self.played(max(self.shared, self.way, self.across, *ends), True)

    def part(self, clocks: float) -> Played:
        """The result up to `clocks`, before the block ends: each warp's current span is cut there."""
        for warp in self.every:
            if warp.held is not None:
                wait, pc, *_ = warp.held
                warp.span(clocks, WAIT_KINDS[wait.kind], pc, self.note(warp, wait, -1))
            elif warp.item is not None:
                self.until_issue(warp, self.step(warp.item.pc), clocks)
                warp.span(clocks, self.step(warp.item.pc).kind, warp.item.pc)
            while warp.spans and warp.spans[-1][0] >= clocks:
                warp.spans.pop()
            if warp.spans:
                begin, end, kind, pc, note = warp.spans[-1]
                warp.spans[-1] = begin, min(end, clocks), kind, pc, note
        self.cores = [[(span[0], min(span[1], clocks), *span[2:]) for span in each if span[0] < clocks] for each in self.cores]
        self.products = [(begin, min(end, clocks), number) for begin, end, number in self.products if begin < clocks]
        self.waits = [each for each in self.waits if each[2] <= clocks]
        return self.played(clocks, False)

    def played(self, clocks: float, whole: bool) -> Played:
        never = {row: here.stuck for row, here in enumerate(self.diary.rows) if here.stuck}
        clocks += max(SHORT, clocks * MORE) if never and whole else 0.0
        for warp in self.every:
            if warp.row in never:
                note = "; ".join(dict.fromkeys(what for _, what in never[warp.row]))
                warp.span(clocks, "stuck", never[warp.row][0][0], note)
            warp.span(clocks, "done", -1)
        busy: dict[str, float] = {}
        for (name, _), taken in self.busy.items():
            busy[name] = min(max(busy.get(name, 0.0), taken), clocks)
        return Played(
            clocks,
            whole,
            [warp.spans for warp in self.every],
            self.cores,
            list(self.flights.values()),
            self.products,
            self.waits,
            busy,
            self.signs,
            {pc: step.clocks for pc, step in self.steps.items()},
        )

    def wake(self, core: int, at: float) -> None:
        """A sub-core looks for a warp at some time, if it does not before."""
        at = max(at, self.next[core])
        if at < self.due[core]:
            self.due[core] = at
            heapq.heappush(self.times, (at, core))

    # -- who issues -------------------------------------------------------------------------------------------------------

    def choose(self, core: int, now: float) -> tuple[TimelineWarp | None, float]:
        """The warp that issues: the last one again if it can, else the first in order that can; or when one could."""
        soonest, last = inf, self.last[core]
        if last is not None and last.item is not None and last.held is None:
            soonest = self.earliest(last)
            if soonest <= now:
                return last, soonest
        for warp in self.warps[core]:
            if warp is last or warp.held is not None:
                continue
            at = self.earliest(warp)
            if at <= now:
                return warp, at
            soonest = min(soonest, at)
        return None, soonest

    def earliest(self, warp: TimelineWarp) -> float:
        """The earliest time at which a warp could issue its next instruction."""
        assert warp.item is not None
        at, unit = warp.ready, self.step(warp.item.pc).unit
        if unit == SHARED:
            return max(at, self.shared - SHARED_QUEUE)
        if unit < 0:
            return at
        free = self.free[warp.core][unit]
        return max(at, free - EXP_QUEUE if unit == EXP else free)

    def step(self, pc: int) -> TimelineStep:
        """An instruction as the model has it."""
        found = self.steps.get(pc)
        if found is None:
            found = self.rates.step(self.diary.listing, pc)
            if found.kind in MEMORY:
                found = replace(found, kind=self.spaces.get(pc, found.kind))
            self.steps[pc] = found
        return found

    def come(self, warp: TimelineWarp, at: float) -> None:
        """Let a warp reach its next instruction that takes time: it can issue when its registers are ready."""
        warp.ready = at
        while warp.item is not None:
            step, warp.slow = self.step(warp.item.pc), None
            for register in step.reads:
                board = warp.boards.get(register)
                if board is not None and board[0] > (at if warp.slow is None else warp.slow[0]):
                    warp.slow = board
            if step.unit != FREE or warp.item.acts:
                warp.ready = at if warp.slow is None else warp.slow[0]
                return
            for register in step.writes:
                warp.boards.pop(register, None)
                if warp.slow is not None:
                    warp.boards[register] = warp.slow
            warp.item = next(warp.todo, None)

    # -- what an instruction does ---------------------------------------------------------------------------------------------

    def issue(self, warp: TimelineWarp, now: float) -> None:
        assert warp.item is not None
        pc, acts, turns, of = warp.item
        step = self.step(pc)
        self.last[warp.core] = warp
        if pc >= 0:
            self.until_issue(warp, step, now)
            warp.span(now + 1, space(acts) or step.kind if step.kind in MEMORY else step.kind, pc)
            self.busy["issue", warp.core] += 1
            done = self.use(warp, step, acts, now)
            for register in step.writes:
                warp.boards[register] = *done, pc
            warp.ready = now + 1 + (BRANCH_LATENCY if turns else 0)
        else:
            warp.ready = now
        self.go_on(warp, now, of, acts)

    def until_issue(self, warp: TimelineWarp, step: TimelineStep, now: float) -> None:
        """Add the spans of an issuing warp's waits: first for a register, then for a unit, or other warps of its sub-core. A short
        wait counts with the rest."""
        if now - warp.since < SHORT:
            return
        there = warp.since if warp.slow is None else min(warp.ready, now)
        there = now if now - there < SHORT else there
        if warp.slow is not None and there - warp.since >= SHORT:
            i = self.diary.listing.instructions[warp.slow[2]]
            (_, line), call = own_line(i)
            where = f"line {line}" if call < 0 else f"line {line} (called at line {call})"
            taken = OUTSIDE if (warp.row, warp.slow[2]) in self.outside else ""
            kind = "waits_load" if warp.slow[1] else "waits_operand"
            warp.span(there, kind, step.pc, f"for what {i.opcode} of {where} gives{taken}")
        if warp.since == now:
            return
        queue = {SHARED: SHARED_QUEUE, EXP: EXP_QUEUE}.get(step.unit, 0)
        free = self.shared if step.unit == SHARED else self.free[warp.core][step.unit] if step.unit >= 0 else 0.0
        what = step.name if free - queue > now - 1 else f"other warps of sub-core {warp.core}"
        warp.span(now, "waits_unit", step.pc, f"for {what}")

    def use(self, warp: TimelineWarp, step: TimelineStep, acts: list[Act], now: float) -> tuple[float, bool]:
        """The units of an instruction; when its result is there, and whether from global memory."""
        if step.unit == SHARED:
            passes, far = float(step.clocks), False
            for act in acts:
                if isinstance(act, Shared):
                    passes += act.passes
                elif isinstance(act, Global):
                    passes += -(-act.sectors * SECTOR // SHARED_BYTES)
                    far = True
                    self.move(SECTOR * act.sectors, now)
            self.shared = max(self.shared, now) + passes
            self.busy["shared memory", 0] += passes
            return (self.way + L2_LATENCY, True) if far else (self.shared + step.latency, False)
        begin = now
        if step.unit >= 0:
            units = self.free[warp.core]
            begin = max(units[step.unit], now)
            units[step.unit] = begin + step.clocks
            self.busy[step.name, warp.core] += step.clocks
            if step.unit == TENSOR:
                self.draw(warp, step, begin)
        return begin + max(step.latency, step.clocks), False

    def draw(self, warp: TimelineWarp, step: TimelineStep, begin: float) -> None:
        """mma.sync, on its sub-core's tensor core."""
        self.cores[warp.core].append((begin, begin + step.clocks, "product", step.pc, f"warp {warp.row}"))

    def move(self, nbytes: int, now: float) -> float:
        """Bytes on the way from or to the L2: when the last of them is on it."""
        self.way = max(self.way, now) + nbytes / L2_BYTES
        self.busy["L2", 0] += nbytes / L2_BYTES
        return self.way

    def hand(self, nbytes: int, now: float) -> float:
        """Bytes on the way from shared memory to shared memory, taken to be as fast as that from the L2: when the last is on it."""
        self.across = max(self.across, now) + nbytes / L2_BYTES
        return self.across

    def go_on(self, warp: TimelineWarp, now: float, pc: int, acts: list[Act]) -> None:
        """The acts of an instruction, up to a wait that is not over; then the next instruction."""
        for at, act in enumerate(acts):
            if isinstance(act, WaitSpan):
                left = [number for number in act.on if number not in self.signs]
                warp.held = act, pc, len(left), acts[at + 1 :]
                for number in left:
                    self.waiting[number].append(warp)
                if left:
                    return
                self.over(warp, act, pc)
                now = warp.ready
            else:
                self.act(warp, act, now)
        warp.item = next(warp.todo, None)
        self.come(warp, warp.ready)
        if warp.item is None:
            self.warps[warp.core].remove(warp)
            warp.span(max(warp.ready, warp.since), "works", pc)

    def act(self, warp: TimelineWarp, act: Act, now: float) -> None:
        if isinstance(act, Sign):
            self.came(act.number, now)
        elif isinstance(act, Promise):
            self.promises[act.number] = act.after
            self.came(act.number, max([now, *(self.signs[number] for number in act.after)]))
        elif isinstance(act, Start):
            copy = self.diary.copies[act.number]
            read = self.hand(copy.nbytes, now) if copy.how == "DSMEM" else self.move(copy.nbytes, now)
            self.flights[act.number] = Flight(act.number, now, read, read + L2_LATENCY)
            self.came(act.number, read + L2_LATENCY)
        elif isinstance(act, MultiplyIssue):
            self.coming[act.number] += 1
            if self.coming[act.number] == GROUP:
                self.multiply(act.number, now)

    def multiply(self, number: int, now: float) -> None:
        """A warpgroup's product: on all four tensor cores, when they are free."""
        product = self.diary.products[number]
        begin = max(now, *(units[TENSOR] for units in self.free))
        end = begin + self.rates.product_clocks(product)
        for core, units in enumerate(self.free):
            units[TENSOR] = end
            self.busy["tensor cores", core] += end - begin
        self.products.append((begin, end, number))
        self.came(number, end)

    # -- waits ----------------------------------------------------------------------------------------------------------------

    def came(self, number: int, at: float) -> None:
        """Set the time of a sign that warps may wait for; a warp that knows all times of its wait goes on."""
        self.signs[number] = at
        for warp in self.waiting.pop(number, ()):
            assert warp.held is not None
            wait, pc, left, rest = warp.held
            warp.held = wait, pc, left - 1, rest
            if left == 1:
                self.over(warp, wait, pc)
                self.go_on(warp, warp.ready, pc, rest)
                self.wake(warp.core, warp.ready)

    def over(self, warp: TimelineWarp, wait: WaitSpan, pc: int) -> None:
        """End a wait whose times are all known: the warp goes on at the last of them."""
        end, last = warp.ready, -1
        for number in wait.on:
            at = self.flights[number].read if wait.read else self.signs[number] + (BARRIER_LATENCY if wait.kind in SIGNALS else 0)
            if at > end:
                end, last = at, number
        if wait.kind == "memory":  # what is asked for is there so much later
            for register in self.step(pc).writes:
                at, far, of = warp.boards.get(register, (0.0, False, pc))
                warp.boards[register] = at + end - warp.ready, far, of
            self.outside |= {(warp.row, pc)} if wait.outside else set()
        warp.held, warp.ready = None, end
        warp.span(end, WAIT_KINDS[wait.kind], pc, self.note(warp, wait, last))
        for number in wait.on:
            self.see(number, end)
        self.waits.append((warp.row, wait, end))

    def see(self, number: int, at: float) -> None:
        """Somebody has waited for a copy, or for the promise of copies."""
        todo = [number]
        while todo:
            number = todo.pop()
            if number in self.flights:
                self.flights[number].seen = min(self.flights[number].seen, at)
            todo += self.promises.pop(number, ())

    def note(self, warp: TimelineWarp, wait: WaitSpan, last: int) -> str:
        """A note on a warp's wait: its object, and the last arrival, if it is not the warp's own (-1: all was there)."""
        diary, parts = self.diary, [wait.what] if wait.what else []
        if last in diary.copies:
            parts.append(f"last came {copy_text(diary.copies[last])}")
        elif diary.signs.get(last, warp.row) != warp.row:
            parts.append(f"last came warp {diary.signs[last]}")
        return ", ".join(parts) + (OUTSIDE if wait.outside else "")


def copy_text(copy: CopySpan) -> str:
    """A copy in words."""
    way = f"{'to' if copy.inward else 'from'} {copy.where}"
    way = f"to another block's shared memory at {copy.where}" if copy.across else way
    return f"{copy.tensor or 'shared memory'}, {copy.nbytes:,} bytes {way} ({copy.how}, warp {copy.row})"


def play(diary: Diary, device: Device, until: float = inf, most: float = inf) -> Played:
    """Clocks for a diary on one multiprocessor of a device, up to the clock `until` or until `most` instructions are issued.

    ValueError for a diary that was given up, or of no launch.
    """
    if not diary.rows or diary.too_long:
        raise ValueError(f"diary {'is too long' if diary.too_long else 'is of no launch'}")
    return ReplayedTurns(diary, device).run(until, most)
