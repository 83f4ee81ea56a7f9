"""The run of one thread block in spans of clocks: the work and waits of its warps, its copies in flight, its tensor cores.

A wait's note says what it waited for: the instruction whose result was missing, or who was the last to come to a meeting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from .engines import GROUP_WARPS, Place
from .memory import SPACES, STORES
from .multiprocessor import IDLE, ClockedWarp, Issue, SubCore
from .stalls import NOBODY, IssuePast, Stretch, Watched
from .steps import Act, TraceStep, Unit
from .waits import CLUSTER, NAMED, PHASE, Key
from .whole import Clock

SHORT = 16
"""Clocks: what is shorter is part of what is around it."""
WORK = {Unit.TENSOR: "products", Unit.PRODUCT: "products", Unit.SPECIAL: "special"}
"""Kinds of work by unit; of memory by the memory."""
WAITS = {
    "wait": "waits_fixed",
    "branch resolving": "waits_fixed",
    "dispatch stall": "waits_unit",
    "math pipe throttle": "waits_unit",
    "MIO throttle": "waits_unit",
    "LG throttle": "waits_unit",
    "not selected": "waits_turn",
}
"""Kinds of waits by the reasons that need no instruction."""
BY_ACT = {
    Act.BARRIER: "waits_barrier",
    Act.PHASE: "waits_phase",
    Act.GROUP: "waits_copies",
    Act.WAIT_COUNT: "waits_copies",
    Act.PRODUCT: "waits_products",
    Act.FENCE: "waits_products",
    Act.WAIT_PRODUCTS: "waits_products",
}
"""Kinds of waits by the act of the instruction that is waited for."""


class WarpSpan(NamedTuple):
    """From, to, kind, instruction (NOBODY: none), note."""

    begin: float
    end: float
    kind: str
    at: int
    note: str = ""


@dataclass
class Flight:
    """A copy of one instruction of a warp: when it began and had come, and when somebody had waited for it.

    `group`: groups that its warp had closed before; none for what an mbarrier counts.
    """

    warp: int
    at: int
    begin: float
    nbytes: int
    tensor: int
    inward: bool
    group: int | None
    landed: float = 0.0
    seen: float = inf


@dataclass
class WarpCopies:
    """A warp's copies: those of no group yet, and by scoreboard the groups that nobody has waited for."""

    open: list[Flight] = field(default_factory=list)
    groups: defaultdict[int, list[list[Flight]]] = field(default_factory=lambda: defaultdict(list))
    closed: int = 0


class BlockSpans(Watched):
    """A multiprocessor that keeps the spans of the first of its blocks. `place` names an instruction's line in words."""

    def __init__(self, clock: Clock, place: Callable[[int], str]) -> None:
        super().__init__(clock.launch.kernel.instructions, clock.steps, clock.rates, clock.outside, len(clock.traces))
        self.place = place
        self.rows: list[list[WarpSpan]] = [[] for _ in clock.traces[0]]
        self.flights: list[Flight] = []
        self.tensor: defaultdict[str, list[WarpSpan]] = defaultdict(list)
        self.came: dict[Place, tuple[float, int, Flight | None]] = {}  # the last to come to a meeting: when, warp, copy
        self.waiters: defaultdict[Place, set[int]] = defaultdict(set)
        self.awaited: dict[tuple[int, int], tuple[Place, ...]] = {}  # by warp and instruction
        self.brought: defaultdict[Place, list[Flight]] = defaultdict(list)
        self.copies: defaultdict[int, WarpCopies] = defaultdict(WarpCopies)
        self.flying: Flight | None = None
        # Boards of groups of bulk stores; other groups are cp.async's.
        self.outward = {s.board for s, i in zip(self.steps, self.code, strict=True) if i.opcode == "UTMACMDFLUSH"}

    @property
    def end(self) -> float:
        """The end of the block."""
        return max(end for age, (_, end) in self.lives.items() if age < len(self.rows))

    # -- warps

    def account(self, warp: ClockedWarp, issue: Issue, stretches: Sequence[Stretch], past: IssuePast) -> None:
        if warp.block:
            return
        *waits, selected = stretches
        if past.at != NOBODY:
            self.saw(warp, past.at, selected.begin)
        row, begin = self.rows[warp.age], stretches[0].begin
        if selected.begin - begin >= SHORT:
            for wait in joined(waits):
                row.append(WarpSpan(wait.begin, wait.end, self.wait_kind(wait), issue.at, self.note(warp, wait)))
            begin = selected.begin
        row.append(WarpSpan(begin, selected.end, self.work_kind(issue.at), issue.at))
        if places := tuple((warp.block, key) for key, _, waits_for in issue.signals if waits_for):
            self.awaited[warp.age, issue.at] = places
            for place in places:
                self.waiters[place].add(warp.age)

    def work_kind(self, at: int) -> str:
        step, opcode = self.steps[at], self.code[at].opcode
        if step.act in (Act.COPY, Act.BULK):
            return "copies"
        if opcode in SPACES:
            return "global" if SPACES[opcode] == "global" else "shared"
        return "works" if step.unit == Unit.SPECIAL and opcode != "MUFU" else WORK.get(Unit(step.unit), "works")

    def wait_kind(self, wait: Stretch) -> str:
        if wait.reason in WAITS or wait.cause == NOBODY:
            return WAITS.get(wait.reason, "waits_unit")
        step, opcode = self.steps[wait.cause], self.code[wait.cause].opcode
        if opcode == "UCGABAR_WAIT":
            return "waits_cluster"
        if found := BY_ACT.get(Act(step.act)):
            return "waits_stores" if found == "waits_copies" and step.board in self.outward else found
        if opcode not in SPACES:
            return "waits_operand"
        # A store, or a copy, holds its registers until it has read them.
        if opcode in STORES or step.act == Act.COPY:
            return "waits_unit"
        return "waits_shared" if SPACES[opcode] == "shared" else "waits_load"

    def note(self, warp: ClockedWarp, wait: Stretch) -> str:
        """Returns the reason of a wait, in words."""
        if wait.reason in WAITS or wait.cause == NOBODY:
            return ""
        places = self.awaited.get((warp.age, wait.cause), ())
        if self.steps[wait.cause].act not in (Act.BARRIER, Act.PHASE):
            return f"for {self.code[wait.cause].opcode}{self.place(wait.cause)}"
        parts = [named(place[1]) for place in places[:1]]
        came = [self.came[place] for place in places if place in self.came]
        if came:
            _, last, flight = max(came, key=lambda each: each[0])
            if flight is not None:
                parts.append(f"last came a copy of warp {last}")
            elif last != warp.age:
                parts.append(f"last came warp {last}")
        return ", ".join(parts)

    # -- meetings and copies

    def come(self, warp: ClockedWarp, issue: Issue, at: float) -> None:
        flight = self.flying
        for key, comes, _ in issue.signals:
            place = warp.block, key
            if comes and at >= self.came.get(place, (0.0, 0, None))[0]:
                self.came[place] = at, warp.age, flight
            if flight is not None and not warp.block:
                self.brought[place].append(flight)
        if flight is not None:
            flight.landed = at + self.woken
        super().come(warp, issue, at)

    def flight(self, warp: ClockedWarp, issue: Issue, begin: float, inward: bool, grouped: bool) -> Flight:
        """Begins a copy."""
        copies, cost = self.copies[warp.age], issue.cost or IDLE
        found = Flight(warp.age, issue.at, begin, cost.asked, cost.tensor, inward, copies.closed if grouped else None)
        if not warp.block:
            self.flights.append(found)
            if grouped:
                copies.open.append(found)
        return found

    def copy(self, warp: ClockedWarp, issue: Issue, step: TraceStep, now: float) -> None:
        flight = self.flight(warp, issue, max(self.bulk, now), bool(issue.signals), not issue.signals)
        self.flying = flight if issue.signals else None
        super().copy(warp, issue, step, now)
        self.flying = None
        if not issue.signals:
            flight.landed = self.written

    def act(self, warp: ClockedWarp, issue: Issue, step: TraceStep, now: float, done: float) -> float:
        done = super().act(warp, issue, step, now, done)
        copies = self.copies[warp.age]
        if step.act == Act.COPY and issue.cost is not IDLE:
            self.flight(warp, issue, now, True, True).landed = done
        elif step.act == Act.GROUP:
            out = self.code[issue.at].opcode == "UTMACMDFLUSH"
            copies.groups[step.board].append([each for each in copies.open if each.inward != out])
            copies.open = [each for each in copies.open if each.inward == out]
            copies.closed += 1
        return done

    def saw(self, warp: ClockedWarp, at: int, now: float) -> None:
        """A warp goes on behind an instruction: it has waited for copies, if that was what the instruction does."""
        step, groups = self.steps[at], self.copies[warp.age].groups
        done: list[Flight] = []
        if step.act == Act.WAIT_COUNT:
            left = len(groups[step.board]) - step.count
            done = [flight for group in groups[step.board][: max(left, 0)] for flight in group]
            del groups[step.board][: max(left, 0)]
        elif step.act == Act.PHASE:
            done = [flight for place in self.awaited.get((warp.age, at), ()) for flight in self.brought[place]]
        for flight in done:
            flight.seen = min(flight.seen, now)

    # -- tensor cores

    def issue(self, core: SubCore, warp: ClockedWarp, now: float) -> float:
        at = warp.trace[warp.at].at
        delay = super().issue(core, warp, now)
        if not warp.block and self.steps[at].unit == Unit.TENSOR:
            end = core.free[Unit.TENSOR]
            number = warp.age % len(self.cores)
            self.tensor[f"tensor core {number}"].append(WarpSpan(end - self.steps[at].clocks, end, "product", at))
        return delay

    def multiply(self, warp: ClockedWarp, step: TraceStep, now: float) -> None:
        assert self.products is not None
        before, at = len(self.products.ends), warp.trace[warp.at].at
        super().multiply(warp, step, now)
        if not warp.block and len(self.products.ends) > before:
            first = warp.group * GROUP_WARPS
            name, end = f"wgmma, warps {first} to {first + GROUP_WARPS - 1}", self.products.free
            self.tensor[name].append(WarpSpan(end - max(step.clocks, step.fetched), end, "product", at))

    def met(self) -> list[tuple[float, int, list[int]]]:
        """Returns the meetings of two or more of the block's warps at barriers: clock, number (-1: the cluster's), warps."""
        found = []
        for place, warps in self.waiters.items():
            kind, _, number, _ = place[1]
            if kind in (NAMED, CLUSTER) and len(warps) > 1:
                found.append((self.meetings.over(place), number if kind == NAMED else -1, sorted(warps)))
        return sorted(found)


def named(key: Key) -> str:
    """A meeting in words."""
    if key.kind == PHASE:
        return f"phase {key.generation} of the mbarrier at {key.number:,} bytes of shared memory"
    return f"barrier {key.number}" if key.kind == NAMED else "the cluster's barrier"


def joined(waits: Sequence[Stretch]) -> list[Stretch]:
    """Returns waits without those of less than SHORT clocks, each of which joins the one before it, or the first behind it; all are
    one, of the longest one's reason, if all are short."""
    if all(each.end - each.begin < SHORT for each in waits):
        return [max(waits, key=lambda each: each.end - each.begin)._replace(begin=waits[0].begin, end=waits[-1].end)]
    found: list[Stretch] = []
    begin = waits[0].begin
    for each in waits:
        if each.end - each.begin >= SHORT:
            found.append(each._replace(begin=begin))
        elif found:
            found[-1] = found[-1]._replace(end=each.end)
        else:
            continue
        begin = each.end
    return found
