"""Registers of wgmma that may be on their way: between a product's issue and its wait, and between an access and a fence.

A flow analysis over the kernel, made once. Nothing is looked at when the kernel runs but the instructions that it names: of a
kernel in order, moves between registers, as compilers make them for loops. A move hands on what its source is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..text.syntax import SINK, Instruction, Reg
from .registry import Multiply, MultiplyWait, Plan

GROUPS = 9
"""Committed groups are told apart up to this many; older ones count as these."""

Pending = tuple[int, ...]
"""Registers (bits) of products behind whose issue at most 0, 1, ... groups were committed; the last: of all."""


class Flow(Protocol):
    """What is asked of a kernel (`decode.code`)."""

    instructions: list[Instruction]
    plans: list[Plan]
    ids: dict[str, int]
    reads: list[int]
    writes: list[int]
    leaders: list[int]

    def block_end(self, pc: int) -> int: ...

    def successors(self, pc: int) -> list[int]: ...


@dataclass
class State:
    """What may hold before an instruction; `touched`: registers that were accessed since the last fence."""

    pending: Pending = (0,) * (GROUPS + 1)
    touched: int = 0

    def join(self, other: State) -> State:
        return State(tuple(a | b for a, b in zip(self.pending, other.pending, strict=True)), self.touched | other.touched)


@dataclass
class InFlight:
    """What the analysis found.

    `rows`: numbers of the registers that products use, and of all that moves connect with them. `moves`: (to, from) of an
    instruction that only moves one register, from None for a constant. `watched`: instructions that may access a register on
    its way. `touching`: those that access a register of `rows`, if some product may come without a fence behind them; else none.
    `waits`: registers that may be on their way at a wait. `spans`: between which instructions a register (by number in
    `Flow.ids`) keeps its place.
    """

    rows: dict[str, int] = field(default_factory=dict)
    moves: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    watched: set[int] = field(default_factory=set)
    touching: set[int] = field(default_factory=set)
    waits: dict[int, list[str]] = field(default_factory=dict)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)

    def keep(self, registers: int, first: int, last: int) -> None:
        while registers:
            low = registers & -registers
            number = low.bit_length() - 1
            start, end = self.spans.get(number, (first, last))
            self.spans[number] = min(start, first), max(end, last)
            registers ^= low


def in_flight(code: Flow) -> InFlight | None:
    """The analysis of a kernel; None where it has no wgmma."""
    if not any(isinstance(plan.control, Multiply) for plan in code.plans):
        return None
    return Analysis(code).run()


class Analysis:
    def __init__(self, code: Flow):
        self.code = code
        self.found = InFlight(moves=register_moves(code))
        self.names = {number: name for name, number in code.ids.items()}
        mask = 0
        for pc, plan in enumerate(code.plans):
            if isinstance(plan.control, Multiply):
                mask |= self.operands(pc)
        self.mask = self.connected(mask)
        self.found.rows = {name: row for row, name in enumerate(self.of(self.mask))}
        self.events = {start: [pc for pc in range(start, code.block_end(start)) if self.is_event(pc)] for start in code.leaders}

    def of(self, mask: int) -> list[str]:
        return [self.names[n] for n in range(mask.bit_length()) if mask >> n & 1]

    def operands(self, pc: int) -> int:
        """The registers of D and A of a product."""
        plan = self.code.plans[pc]
        control = plan.control
        assert isinstance(control, Multiply)
        count = control.registers + (4 if control.a_in_registers else 0)
        mask = 0
        for one in plan.reads[:count]:
            if isinstance(one.operand, Reg) and one.operand != SINK:
                mask |= 1 << self.code.ids[one.operand.name]
        return mask

    def connected(self, mask: int) -> int:
        pairs = [(1 << self.code.ids[a], 1 << self.code.ids[b]) for a, b in self.found.moves.values() if b is not None]
        before = 0
        while before != mask:
            before = mask
            for a, b in pairs:
                if mask & (a | b):
                    mask |= a | b
        return mask

    def is_event(self, pc: int) -> bool:
        i, control = self.code.instructions[pc], self.code.plans[pc].control
        if i.opcode == "wgmma" or isinstance(control, Multiply | MultiplyWait):
            return True
        return bool((self.code.reads[pc] | self.code.writes[pc]) & self.mask)

    def step(self, pc: int, state: State) -> State:
        i, control = self.code.instructions[pc], self.code.plans[pc].control
        pending, touched = state.pending, state.touched
        if isinstance(control, Multiply):
            own = self.operands(pc)
            return State(tuple(level | own for level in pending), touched)
        if isinstance(control, MultiplyWait):
            if control.newest >= GROUPS or i.predicate:
                return state
            left = pending[control.newest]
            return State(tuple(level & left for level in pending), touched)
        if i.opcode == "wgmma" and "commit_group" in i.mods:
            return State((0, *pending[: GROUPS - 1], pending[GROUPS]), touched)
        if i.opcode == "wgmma" and "fence" in i.mods:
            return State(pending, touched if i.predicate else 0)
        if pc not in self.found.moves:
            return State(pending, touched | ((self.code.reads[pc] | self.code.writes[pc]) & self.mask))
        to, source = self.found.moves[pc]
        bit = 1 << self.code.ids[to]
        origin = 0 if source is None else 1 << self.code.ids[source]

        def moved(level: int) -> int:
            return level | bit if level & origin else level if i.predicate else level & ~bit

        return State(tuple(moved(level) for level in pending), moved(touched))

    def run(self) -> InFlight:
        code = self.code
        before = {start: State() for start in code.leaders}
        after: dict[int, State] = {}
        waiting = list(reversed(code.leaders))
        while waiting:
            start = waiting.pop()
            state = before[start]
            for pc in self.events[start]:
                state = self.step(pc, state)
            if after.get(start) == state:
                continue
            after[start] = state
            for nxt in code.successors(code.block_end(start) - 1):
                joined = before[nxt].join(state)
                if joined != before[nxt] or nxt not in after:
                    before[nxt] = joined
                    if nxt not in waiting:
                        waiting.append(nxt)
        suspicious = False
        for start in code.leaders:
            suspicious |= self.conclude(start, before[start])
        if suspicious:
            self.found.touching = {pc for pcs in self.events.values() for pc in pcs if self.code.instructions[pc].opcode != "wgmma"}
        return self.found

    def conclude(self, start: int, state: State) -> bool:
        """Note what holds in a block; whether a product of it may lack a fence."""
        code, found = self.code, self.found
        found.keep(state.pending[-1], start, start)
        suspicious = False
        for pc in self.events[start]:
            control, pending = code.plans[pc].control, state.pending[-1]
            found.keep(pending, pc, pc)
            if isinstance(control, Multiply):
                suspicious |= bool(self.operands(pc) & state.touched)
            elif isinstance(control, MultiplyWait):
                found.waits[pc] = self.of(pending)
            elif (code.reads[pc] | code.writes[pc]) & pending:
                found.watched.add(pc)
            state = self.step(pc, state)
        end = code.block_end(start)
        found.keep(state.pending[-1], end - 1, end - 1)
        return suspicious


def register_moves(code: Flow) -> dict[int, tuple[str, str | None]]:
    """The instructions that move one register, or a constant, to another one."""
    found: dict[int, tuple[str, str | None]] = {}
    for pc, (i, plan) in enumerate(zip(code.instructions, code.plans, strict=True)):
        if i.opcode != "mov" or len(plan.writes) != 1 or len(plan.reads) != 1:
            continue
        to, source = plan.writes[0].operand, plan.reads[0].operand
        if isinstance(to, Reg) and to.name in code.ids:
            known = isinstance(source, Reg) and source.name in code.ids
            found[pc] = to.name, source.name if known and isinstance(source, Reg) else None
    return found
