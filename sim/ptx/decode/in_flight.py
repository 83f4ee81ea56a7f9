"""Registers of wgmma that may be in flight: between a product's issue and its wait, and between an access and a fence.

The analysis of a kernel is made once. At run time only the instructions that it names are checked: of a correct kernel, moves
between registers, as compilers make them for loops. The target of a move takes over the state of its source.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..text.syntax import SINK, Reg
from .liveness import LiveRegisters, numbers
from .registry import Multiply, MultiplyWait, Plan

GROUPS = 9
"""Committed groups are told apart up to this many; older ones count as these."""

Pending = tuple[int, ...]
"""Registers (bits) of products behind whose issue at most 0, 1, ... groups were committed; the last: of all."""


@dataclass
class FlightState:
    """The possible state before an instruction; `touched`: registers that were accessed since the last fence."""

    pending: Pending = (0,) * (GROUPS + 1)
    touched: int = 0

    def join(self, other: FlightState) -> FlightState:
        return FlightState(tuple(a | b for a, b in zip(self.pending, other.pending, strict=True)), self.touched | other.touched)


@dataclass
class InFlight:
    """The results of the analysis.

    `rows`: numbers of the registers that products use, and of all that moves connect with them. `moves`: (to, from) of an
    instruction that only moves one register, from None for a constant. `watched`: instructions that may access a register in
    flight. `touching`: those that access a register of `rows`, if some product may come without a fence behind them; else none.
    `waits`: registers that may be in flight at a wait. `spans`: the instructions between which a register (by number in
    `LiveRegisters.ids`) keeps its place.
    """

    rows: dict[str, int] = field(default_factory=dict)
    moves: dict[int, tuple[str, str | None]] = field(default_factory=dict)
    watched: set[int] = field(default_factory=set)
    touching: set[int] = field(default_factory=set)
    waits: dict[int, list[str]] = field(default_factory=dict)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)

    def keep(self, registers: int, first: int, last: int) -> None:
        for number in numbers(registers):
            start, end = self.spans.get(number, (first, last))
            self.spans[number] = min(start, first), max(end, last)


def in_flight(code: LiveRegisters) -> InFlight | None:
    """Returns the analysis of a kernel; None if it has no wgmma."""
    if not any(isinstance(plan.control, Multiply) for plan in code.plans):
        return None
    return FlightAnalysis(code).run()


class FlightAnalysis:
    def __init__(self, code: LiveRegisters):
        self.code = code
        self.found = InFlight(moves=register_moves(code))
        self.names = {number: name for name, number in code.ids.items()}
        self.mask = 0
        for plan in code.plans:
            if isinstance(plan.control, Multiply):
                self.mask |= self.operands(plan.control, plan)
        self.connect()
        self.found.rows = {name: row for row, name in enumerate(self.of(self.mask))}
        self.events = {start: list(filter(self.is_event, block)) for start, block in code.blocks.items()}

    def of(self, mask: int) -> list[str]:
        return [self.names[n] for n in numbers(mask)]

    def operands(self, control: Multiply, plan: Plan) -> int:
        """Returns the registers of D and A of a product."""
        args = plan.reads[: control.registers + (4 if control.a_in_registers else 0)]
        return self.code.mask(a.operand for a in args if isinstance(a.operand, Reg) and a.operand != SINK)

    def connect(self) -> None:
        """Adds the registers that moves connect with those of `mask`."""
        pairs = [1 << self.code.ids[a] | 1 << self.code.ids[b] for a, b in self.found.moves.values() if b is not None]
        before = 0
        while before != self.mask:
            before = self.mask
            for pair in pairs:
                self.mask |= pair if self.mask & pair else 0

    def is_event(self, pc: int) -> bool:
        return self.code.instructions[pc].opcode == "wgmma" or bool(self.touched(pc))

    def touched(self, pc: int) -> int:
        """Returns the registers of products, and those connected with them, that an instruction accesses."""
        return (self.code.reads[pc] | self.code.writes[pc]) & self.mask

    def step(self, pc: int, state: FlightState) -> FlightState:
        plan = self.code.plans[pc]
        i, control = plan.instruction, plan.control
        pending, touched = state.pending, state.touched
        if isinstance(control, Multiply):
            own = self.operands(control, plan)
            return FlightState(tuple(level | own for level in pending), touched)
        if isinstance(control, MultiplyWait):
            if control.newest >= GROUPS or i.predicate:
                return state
            left = pending[control.newest]
            return FlightState(tuple(level & left for level in pending), touched)
        if i.opcode == "wgmma" and "commit_group" in i.mods:
            return FlightState((0, *pending[: GROUPS - 1], pending[GROUPS]), touched)
        if i.opcode == "wgmma" and "fence" in i.mods:
            return FlightState(pending, touched if i.predicate else 0)
        if pc not in self.found.moves:
            return FlightState(pending, touched | self.touched(pc))
        to, source = self.found.moves[pc]
        bit = 1 << self.code.ids[to]
        origin = 0 if source is None else 1 << self.code.ids[source]

        def moved(level: int) -> int:
            return level | bit if level & origin else level if i.predicate else level & ~bit

        return FlightState(tuple(moved(level) for level in pending), moved(touched))

    def run(self) -> InFlight:
        code = self.code
        before = {start: FlightState() for start in code.leaders}
        after: dict[int, FlightState] = {}
        waiting = list(reversed(code.leaders))
        while waiting:
            start = waiting.pop()
            state = before[start]
            for pc in self.events[start]:
                state = self.step(pc, state)
            if after.get(start) == state:
                continue
            after[start] = state
            for nxt in code.after[start]:
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

    def conclude(self, start: int, state: FlightState) -> bool:
        """Records the state in a block; returns True if a product of it may lack a fence."""
        code, found = self.code, self.found
        found.keep(state.pending[-1], start, start)
        suspicious = False
        for pc in self.events[start]:
            plan, pending = code.plans[pc], state.pending[-1]
            control = plan.control
            found.keep(pending, pc, pc)
            if isinstance(control, Multiply):
                suspicious |= bool(self.operands(control, plan) & state.touched)
            elif isinstance(control, MultiplyWait):
                found.waits[pc] = self.of(pending)
            elif (code.reads[pc] | code.writes[pc]) & pending:
                found.watched.add(pc)
            state = self.step(pc, state)
        last = code.blocks[start][-1]
        found.keep(state.pending[-1], last, last)
        return suspicious


def register_moves(code: LiveRegisters) -> dict[int, tuple[str, str | None]]:
    """Returns the instructions that move one register, or a constant, to another one."""
    found: dict[int, tuple[str, str | None]] = {}
    for pc, plan in enumerate(code.plans):
        if plan.instruction.opcode != "mov" or len(plan.writes) != 1 or len(plan.reads) != 1:
            continue
        to, source = plan.writes[0].operand, plan.reads[0].operand
        if isinstance(to, Reg) and to.name in code.ids:
            found[pc] = to.name, source.name if isinstance(source, Reg) and source.name in code.ids else None
    return found
