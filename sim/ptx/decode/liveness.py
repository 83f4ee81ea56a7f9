"""The registers that are alive at each place of a kernel, that may be read unwritten, or that products of wgmma have in flight.

A register is in flight between a product's issue and its wait, and between an access and a fence. The analysis of a kernel is made
once. At run time only the instructions that it names are checked: of a correct kernel, moves between registers, as compilers make
them for loops. The target of a move takes over the state of its source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..text.syntax import SINK, PtxProgram, Reg
from .flow import ControlFlow
from .registry import Arg, Multiply, MultiplyWait, Plan

PER_LANE = {
    *(f"%{name}.{axis}" for name in ("tid", "ctaid", "clusterid", "cluster_ctaid") for axis in "xyz"),
    "%cluster_ctarank",
    "%laneid",
    "%warpid",
    *(f"%lanemask_{name}" for name in ("eq", "le", "lt", "ge", "gt")),
}
"""Special registers that differ between lanes: they live in register slots that are filled at the start of a wave."""

CONSTANT_REGISTERS = {
    *(f"%{name}.{axis}" for name in ("ntid", "nctaid", "nclusterid", "cluster_nctaid") for axis in "xyz"),
    *(f"%reserved_smem_offset_{name}" for name in ("begin", "end", "cap", "0", "1")),
    *(f"%{name}_smem_size" for name in ("dynamic", "total", "aggr")),
    *("%cluster_nctarank", "%is_explicit_cluster", "%current_graph_exec", "%nwarpid", "%smid", "%nsmid", "%gridid"),
    *(f"%envreg{n}" for n in range(32)),
}
"""Special registers that are the same for every lane of a launch."""


def numbers(mask: int) -> Iterator[int]:
    """Yields the numbers of the bits that are set, the lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class LiveRegisters(ControlFlow):
    """Registers have numbers (`ids`; `types` by number); masks of them have bits by number.

    `reads` and `writes` are masks of each instruction, `mentions` the first and the last instruction that names each register;
    `block_in` and `block_out` are masks of the registers that are alive before and behind each basic block.
    """

    def __init__(self, program: PtxProgram, kernel: str, plans: dict[str, list[Plan]]):
        super().__init__(program, kernel, plans)
        self.ids: dict[str, int] = {}
        self.types: list[Reg] = []
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.mentions: list[list[int]] = []
        for pc, plan in enumerate(self.plans):
            read, written = registers_of(plan)
            for register in (*read, *written):
                if register.name not in self.ids:
                    self.ids[register.name] = len(self.types)
                    self.types.append(register)
                    self.mentions.append([pc, pc])
                self.mentions[self.ids[register.name]][1] = pc
            self.reads.append(self.mask(read))
            self.writes.append(self.mask(written))
        effects = {start: self.effects(block) for start, block in self.blocks.items()}
        self.block_in = dict.fromkeys(self.leaders, 0)
        self.block_out = dict.fromkeys(self.leaders, 0)
        changed = True
        while changed:
            changed = False
            for start in reversed(self.leaders):
                out = 0
                for following in self.after[start]:
                    out |= self.block_in[following]
                used, defined = effects[start]
                into = used | (out & ~defined)
                if out != self.block_out[start] or into != self.block_in[start]:
                    self.block_out[start], self.block_in[start] = out, into
                    changed = True

    def mask(self, registers: Iterable[Reg]) -> int:
        mask = 0
        for register in registers:
            mask |= 1 << self.ids[register.name]
        return mask

    def effects(self, pcs: Iterable[int]) -> tuple[int, int]:
        """Returns the registers that straight code reads before it writes them, and those that it writes."""
        used = defined = 0
        for pc in pcs:
            used |= self.reads[pc] & ~defined
            defined |= self.writes[pc]
        return used, defined

    def live_after(self, end: int) -> int:
        """Returns the registers alive before instruction `end`, the first behind a region."""
        if end >= len(self.plans):
            return 0
        stop = self.block_end(end)
        used, defined = self.effects(range(end, stop))
        return used | (self.block_out[self.leaders[int(self._next_leader[end]) - 1]] & ~defined)

    @cached_property
    def doubtful(self) -> Doubtful:
        alive = self.block_in[self.starts[self.kernel]]
        # Every step of a carry chain has the flag as an operand, also the first, which does not use it.
        known = {*PER_LANE, "%carry"}
        return Doubtful.of(self.plans, {self.types[n].name for n in numbers(alive)} - known)


def registers_of(plan: Plan) -> tuple[list[Reg], list[Reg]]:
    """Returns (read, written) registers. A predicated instruction also reads its results: some lanes keep their old values."""
    reads = [a.operand for a in plan.reads if isinstance(a.operand, Reg)]
    writes = [a.operand for a in plan.writes if isinstance(a.operand, Reg) and a.operand != SINK]
    if plan.instruction.predicate:
        reads += [plan.instruction.predicate[0], *writes]
    return [r for r in reads if r != SINK and r.name not in CONSTANT_REGISTERS], writes


COPIED = {
    **dict.fromkeys(("shfl", "not", "shl", "shr", "bfe"), (0,)),
    **dict.fromkeys(("selp", "prmt", "and", "or", "xor", "shf", "bfi"), (0, 1)),
    "lop3": (0, 1, 2),
}
"""Operands, by opcode, whose bits are moved as other operands' bits say."""


def copied(plan: Plan) -> Sequence[int]:
    """Returns the operands in `plan.reads` that the instruction only moves: as a whole, in parts or bit by bit."""
    i = plan.instruction
    if i.opcode == "mov":
        return range(len(plan.reads))
    if i.opcode == "cvt" and all(t.kind != "f" for t in i.types):
        return (0,)
    return COPIED.get(i.opcode, ())


def merged(plan: Plan) -> Sequence[int]:
    """Returns those of them that it mixes with others bit by bit, which uses a register of which nobody wrote any bit.

    Compilers clear unwritten bits with constants before they put bits in: not by `or`, `xor` and `lop3` of registers alone, nor do
    they insert unwritten bits (`bfi`) into written ones.
    """
    if plan.instruction.opcode in ("or", "xor", "lop3"):
        data = copied(plan)
        return data if all(isinstance(plan.reads[k].operand, Reg) for k in data) else ()
    return (0,) if plan.instruction.opcode == "bfi" else ()


def results(plan: Plan) -> tuple[Arg, ...]:
    """Returns the results that are copies: not the predicate of a shuffle."""
    return plan.writes[:1] if plan.instruction.opcode == "shfl" else plan.writes


def names(args: Iterable[Arg]) -> list[str]:
    return [a.operand.name for a in args if isinstance(a.operand, Reg) and a.operand != SINK]


def touched(plan: Plan) -> list[str]:
    """Returns the registers that an instruction names, its predicate among them."""
    predicate = plan.instruction.predicate
    return [*names((*plan.reads, *plan.writes)), *([predicate[0].name] if predicate else [])]


@dataclass(frozen=True)
class Doubtful:
    """Registers that may be read though nobody wrote them: `blank` are so from the start, `registers` are these and all that may
    get copies of them. `watched` are the instructions that read or write such a register.
    """

    blank: frozenset[str]
    registers: frozenset[str]
    watched: frozenset[int]

    @classmethod
    def of(cls, plans: list[Plan], blank: set[str]) -> Doubtful:
        every: set[str] = set()
        more = set(blank)
        while more - every:
            every |= more
            for plan in plans:
                if every.intersection(names(plan.reads[k] for k in copied(plan))):
                    more |= {*names(results(plan))}
        watched = frozenset(pc for pc, plan in enumerate(plans) if every.intersection(touched(plan)))
        return cls(frozenset(blank), frozenset(every), watched)


# -- registers in flight -----------------------------------------------------------------------------------------------------

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
