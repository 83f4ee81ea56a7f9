"""The clocks that warps spend at each instruction, by reason, as a profiler's source page has them (Nsight Compute, "Warp Stall
Reasons"): from the issue of a warp's last instruction to that of this one.

An instruction's clocks are those until it is issued, and the one in which it is: "selected". So the clocks of all instructions are
those of all warps from their first clock to their last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from .memory import SPACES
from .multiprocessor import IDLE, ClockedMultiprocessor, ClockedWarp, Issue, Outside, SubCore
from .rates import ChipRates
from .sass import SCOREBOARDS, Instruction
from .steps import Act, TraceStep, Unit
from .traces import TURNS_BEFORE, WARM

if TYPE_CHECKING:
    from .whole import Clock

REASONS: Mapping[str, str] = {
    "selected": "the instruction was issued",
    "wait": "the stall count of the instruction before",
    "branch resolving": "a branch that was taken",
    "long scoreboard": "a result from the L1, the L2, DRAM or local memory",
    "short scoreboard": "a result from shared memory, of a shuffle, MUFU or a special register",
    "barrier": "other warps at a barrier",
    "gmma": "products of its warpgroup, or room in their queue",
    "math pipe throttle": "the unit was busy",
    "MIO throttle": "the queue to shared memory was full",
    "LG throttle": "the queue to the L1 was full",
    "dispatch stall": "operands of one register bank, or a warp that yielded",
    "not selected": "another warp was issued",
}
"""The reasons, by the names of Nsight Compute, and what a warp waits for."""
BEHIND = {
    Act.BARRIER: "barrier",
    Act.WAIT_COUNT: "long scoreboard",
    Act.PHASE: "long scoreboard",
    Act.WAIT_PRODUCTS: "gmma",
    Act.FENCE: "gmma",
    Act.PRODUCT: "gmma",
}
"""The reason for a wait behind an instruction that makes a warp wait by itself."""


Spent = defaultdict[str, float]
"""Clocks by reason."""
NOBODY = -1


class Stretch(NamedTuple):
    """Clocks of a warp: from, to, their reason, and the instruction that it waited for or that was issued (NOBODY: none)."""

    begin: float
    end: float
    reason: str
    cause: int


@dataclass(slots=True)
class IssuePast:
    """A warp's last issue: the clock, and until when registers, the stall count and a branch held the next one back; the
    instruction, and the last one that set each scoreboard."""

    issued: float
    dispatched: float
    counted: float
    resolved: float
    boards: list[int] = field(default_factory=lambda: [NOBODY] * SCOREBOARDS)
    at: int = NOBODY


class Watched(ClockedMultiprocessor):
    """A multiprocessor that keeps the clocks of each instruction by reason; `steady`: those in turns that stand for others."""

    def __init__(
        self, code: Sequence[Instruction], steps: Sequence[TraceStep], rates: ChipRates, outside: Outside, residents: int
    ) -> None:
        super().__init__(steps, rates, outside, residents)
        self.code = code
        self.clocks: defaultdict[int, Spent] = defaultdict(_nothing)
        self.steady: defaultdict[int, Spent] = defaultdict(_nothing)
        self.past: dict[int, IssuePast] = {}
        self.lives: dict[int, tuple[float, float]] = {}  # a warp's first clock, and the one behind its last

    def issue(self, core: SubCore, warp: ClockedWarp, now: float) -> float:
        """Issues as a multiprocessor does, and accounts for the clocks since the warp's last issue."""
        issue = warp.trace[warp.at]
        step, past = self.steps[issue.at], self.past.get(warp.age)
        if past is None:
            past = self.past[warp.age] = IssuePast(warp.ready - 1, warp.ready, warp.ready, warp.ready)
            self.lives[warp.age] = warp.ready, inf
        self.account(warp, issue, self.waited(core, warp, issue, step, past, now), past)
        self.lives[warp.age] = self.lives[warp.age][0], now + 1
        delay = super().issue(core, warp, now)
        past.issued, past.dispatched = now, now + delay + 1
        past.counted = now + delay + step.stall
        past.resolved = past.counted + (self.branch if issue.taken else 0)
        past.at = issue.at
        if step.writes is not None:
            past.boards[step.writes] = issue.at
        if step.frees is not None:
            past.boards[step.frees] = issue.at
        return delay

    def account(self, warp: ClockedWarp, issue: Issue, stretches: Sequence[Stretch], past: IssuePast) -> None:
        """Takes the clocks of a warp up to an issue; `past` is the issue before."""
        turn = warp.turn - (not issue.mark)
        for table in [self.clocks] + [self.steady] * (WARM <= turn < TURNS_BEFORE - 1):
            for begin, end, reason, _ in stretches:
                table[issue.at][reason] += end - begin

    def waited(self, core: SubCore, warp: ClockedWarp, issue: Issue, step: TraceStep, past: IssuePast, now: float) -> list[Stretch]:
        """Returns the clocks since a warp's last issue, each up to the time at which its reason no longer held the warp back."""
        found: list[Stretch] = []
        reached = past.issued + 1
        board = max(step.waits, key=lambda each: warp.boards[each], default=None)
        held = [(past.dispatched, "dispatch stall", NOBODY), (past.counted, "wait", past.at)]
        held.append((past.resolved, "branch resolving", past.at))
        if board is not None:
            held.append((warp.boards[board], self.board(past.boards[board]), past.boards[board]))
        behind = "wait" if past.at == NOBODY else BEHIND.get(Act(self.steps[past.at].act), "wait")
        held += [(warp.ready, behind, past.at), (*self.throttled(core, warp, step, now), NOBODY)]
        held.append((now, "not selected", NOBODY))
        for until, reason, cause in held:
            if min(until, now) > reached:
                found.append(Stretch(reached, min(until, now), reason, cause))
                reached = min(until, now)
        found.append(Stretch(now, now + 1, "selected", issue.at))
        return found

    def throttled(self, core: SubCore, warp: ClockedWarp, step: TraceStep, now: float) -> tuple[float, str]:
        """Returns the time at which an instruction's unit or queue had room again, and the reason for waiting for it."""
        unit, issue = step.unit, warp.trace[warp.at]
        if unit == Unit.MEMORY:
            opcode = self.code[issue.at].opcode
            full = issue.cost is not IDLE and len(core.leaves) >= self.room
            return core.leaves[-self.room] if full else 0.0, "LG throttle" if far(opcode) else "MIO throttle"
        if unit == Unit.PRODUCT:  # the queue of products has room now
            return now, "gmma"
        return (0.0 if unit == Unit.NONE else self.earliest(core, warp, now)), "math pipe throttle"

    def board(self, at: int) -> str:
        """Returns the reason for waiting for a scoreboard that an instruction sets."""
        if at == NOBODY:
            return "wait"
        return "long scoreboard" if far(self.code[at].opcode) else "short scoreboard"


def _nothing() -> Spent:
    return defaultdict(float)


def far(opcode: str) -> bool:
    """True for an instruction whose result comes through the L1."""
    return opcode == "LDGDEPBAR" or SPACES.get(opcode, "shared") != "shared"


def stalls(clock: Clock) -> Mapping[int, Mapping[str, float]]:
    """Returns the clocks by reason of each instruction (its number), of all warps that a multiprocessor has at once.

    A turn of their loop that the clock leaves out counts as one of the last before it.
    """
    count = min(-(-clock.blocks // clock.device.sm_count), clock.residents)
    watched = Watched(clock.launch.kernel.instructions, clock.steps, clock.rates, clock.outside, count)
    watched.run(clock.traces[:count])
    loop = clock.tracer.loop
    times = len(loop.left_out) / (TURNS_BEFORE - 1 - WARM) if loop else 0
    found: dict[int, Mapping[str, float]] = {}
    for at, spent in watched.clocks.items():
        steady = watched.steady.get(at, _nothing())
        found[at] = {reason: spent[reason] + times * steady[reason] for reason in REASONS if spent[reason]}
    return found
