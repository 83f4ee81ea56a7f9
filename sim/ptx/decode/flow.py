"""The flow of control and of registers: the code of a kernel with the functions that it calls, basic blocks, loops, liveness.

Loops are found in two ways. One gives their bodies and the comparisons that decide their exits, for the machine's limits. The
other takes the code between a branch and its target behind it: of such loops it finds the loads that they spin on.

Of registers it finds those that are alive at each place, that may be read unwritten, or that products of wgmma have in flight:
between a product's issue and its wait, and between an access and a fence. The analysis of a kernel is made once. At run time only
the instructions that it names are checked: of a correct kernel, moves between registers, as compilers make them for loops. The
target of a move takes over the state of its source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..order.shadow import is_strong
from ..text.syntax import SINK, Imm, Mem, Operand, PtxError, PtxInstruction, PtxProgram, Reg, Sym
from .registry import Arg, Branch, Exit, FunctionCall, Multiply, MultiplyWait, Plan, Plans, Return

MOST_TESTS = 64
"""Most comparisons of a kernel that are followed, those of the largest loops first."""


def callees(control: FunctionCall) -> tuple[str, ...]:
    return () if control.builtin else (control.function,) if control.function else control.candidates


def reachable(kernel: str, plans: Plans) -> tuple[list[str], set[tuple[str, str]]]:
    """Returns the kernel and the functions it may call, and the (caller, callee) pairs of these that are part of a recursion."""
    order, calls = [kernel], dict[str, set[str]]()
    for name in order:
        calls[name] = {c for plan in plans[name] if isinstance(plan.control, FunctionCall) for c in callees(plan.control)}
        order += [callee for callee in sorted(calls[name]) if callee not in order]
    beyond = {name: set(direct) for name, direct in calls.items()}
    for middle in order:
        for name in order:
            if middle in beyond[name]:
                beyond[name] |= beyond[middle]
    return order, {(name, callee) for name in order for callee in calls[name] if name in beyond[callee]}


class ControlFlow:
    """The instructions of a kernel and of all functions that it may call, one function behind the other, and their successors.

    `leaders` are the first instructions of basic blocks: targets of branches, and instructions behind a control instruction.
    """

    def __init__(self, program: PtxProgram, kernel: str, plans: Plans):
        self.kernel = kernel
        self.instructions: list[PtxInstruction] = []
        self.plans: list[Plan] = []
        self.labels: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.function_at: list[str] = []
        names, self.cycles = reachable(kernel, plans)
        self.functions = [program.functions[name] for name in names]
        for function in self.functions:
            base = self.starts[function.name] = len(self.instructions)
            self.instructions += function.instructions
            self.plans += plans[function.name]
            self.function_at += [function.name] * len(function.instructions)
            self.labels |= {name: base + at for name, at in function.labels.items()}
            # A function may end without a ret: nothing runs behind its end.
        self.tables = {n: [self.target(t) for t in targets] for f in self.functions for n, targets in f.tables.items()}
        self.return_sites: dict[str, list[int]] = defaultdict(list)
        for pc, plan in enumerate(self.plans):
            for name in callees(plan.control) if isinstance(plan.control, FunctionCall) else ():
                self.return_sites[name].append(pc + 1)
        behind = (pc + 1 for pc, plan in enumerate(self.plans) if plan.control is not None)
        leaders = {0, *self.starts.values(), *self.labels.values(), *behind}
        self.leaders = sorted(pc for pc in leaders if pc < len(self.plans))
        self._next_leader = np.searchsorted(self.leaders, np.arange(len(self.plans)), side="right")

    def target(self, label: str) -> int:
        if label not in self.labels:
            raise PtxError(f"{self.kernel}: no label {label}")
        return self.labels[label]

    def successors(self, pc: int) -> list[int]:
        plan = self.plans[pc]
        control = plan.control
        after = [pc + 1] if pc + 1 < len(self.plans) else []
        stay = after if plan.instruction.predicate else []
        if isinstance(control, Branch):
            return (self.tables[control.table] if control.table else [self.target(control.target)]) + stay
        if isinstance(control, Exit):
            return stay
        if isinstance(control, FunctionCall):
            # A recursive call overwrites registers that the restored lanes will need: they are alive at the call.
            again = any((self.function_at[pc], name) in self.cycles for name in callees(control))
            return [self.starts[name] for name in callees(control)] + (after if control.builtin or again else stay)
        if isinstance(control, Return):
            return self.return_sites.get(self.function_at[pc], []) + stay
        return after

    def block_end(self, pc: int) -> int:
        """Returns the end (exclusive) of the basic block of an instruction."""
        at = int(self._next_leader[pc])
        return self.leaders[at] if at < len(self.leaders) else len(self.plans)

    @cached_property
    def blocks(self) -> dict[int, range]:
        """The instructions of each basic block, by the first one."""
        return {start: range(start, self.block_end(start)) for start in self.leaders}

    @cached_property
    def after(self) -> dict[int, list[int]]:
        """The successors of each basic block."""
        return {start: self.successors(block[-1]) for start, block in self.blocks.items()}

    @cached_property
    def loops(self) -> list[CodeLoop]:
        """The loops, the largest first."""
        before: dict[int, list[int]] = defaultdict(list)
        ends: dict[int, list[int]] = defaultdict(list)  # of each loop, by its head, the blocks that go back to it
        for start, nexts in self.after.items():
            branches = isinstance(self.plans[self.blocks[start][-1]].control, Branch)
            for head in nexts:
                before[head].append(start)
                if branches and head <= start:
                    ends[head].append(start)
        found = []
        for head, todo in ends.items():
            body = {head}
            while todo:
                block = todo.pop()
                if block not in body:
                    body.add(block)
                    todo += before[block]
            found.append(CodeLoop(head, frozenset(body)))
        return sorted(found, key=lambda loop: (-len(loop.body), loop.head))

    @cached_property
    def exit_tests(self) -> tuple[ExitTest, ...]:
        """The comparisons in each loop that decide its exits, through all predicates computed from them."""
        found: list[ExitTest] = []
        for loop in self.loops:
            inside = [self.plans[pc] for start in sorted(loop.body) for pc in self.blocks[start]]
            makers = [plan for plan in inside if any(arg.dtype.kind == "b" for arg in plan.writes)]
            leaving = (start for start in loop.body if not loop.body.issuperset(self.after[start]))
            names = computed_from(makers, predicates(self.plans[self.blocks[start][-1]] for start in leaving))
            for plan in makers:
                if plan.instruction.opcode == "setp" and not names.isdisjoint(plan.written) and not plan.reads[0].packed:
                    found.append(ExitTest(loop, *counted(inside, *plan.reads[:2])))
        return tuple(found[:MOST_TESTS])


@dataclass(frozen=True)
class CodeLoop:
    """Blocks, by their first instructions, that come to `head` again without leaving the others; what they call is among them."""

    head: int
    body: frozenset[int]


@dataclass(frozen=True)
class ExitTest:
    """A comparison of `left` and `right`, on which it depends whether a loop goes on."""

    loop: CodeLoop
    left: Arg
    right: Arg

    def encloses(self, other: ExitTest) -> bool:
        return other.loop.body < self.loop.body

    @property
    def registers(self) -> list[Reg]:
        return [arg.operand for arg in (self.left, self.right) if isinstance(arg.operand, Reg)]


def counted(inside: Sequence[Plan], left: Arg, right: Arg) -> tuple[Arg, Arg]:
    """Returns a comparison of the number that a loop counts, where it compares some of its bits: compilers make x & -1024 == 0 of
    x < 1024, whose left side does not change until the last turn.
    """
    makers = [plan for plan in inside if isinstance(left.operand, Reg) and left.operand.name in plan.written]
    if len(makers) != 1 or makers[0].instruction.opcode not in ("and", "shr") or not isinstance(right.operand, Imm):
        return left, right
    number, bits = makers[0].reads[:2]
    if not isinstance(number.operand, Reg) or not isinstance(bits.operand, Imm):
        return left, right
    if makers[0].instruction.opcode == "shr":
        end = right.operand.value << bits.operand.value
    else:
        end = bits.operand.value & -bits.operand.value  # the first number that has any of these bits
        if right.operand.value or (bits.operand.value + end) & bits.operand.value:
            return left, right
    return number, Arg(Imm(end), number.dtype)


def predicates(plans: Iterable[Plan]) -> set[str]:
    return {plan.instruction.predicate[0].name for plan in plans if plan.instruction.predicate}


def computed_from(plans: Sequence[Plan], names: set[str]) -> set[str]:
    """Returns registers with all those from which these instructions compute them."""
    found, before = set(names), -1
    while len(found) != before:
        before = len(found)
        for plan in plans:
            if not found.isdisjoint(plan.written):
                found |= plan.read
    return found


# -- loops as stretches of code -----------------------------------------------------------------------------------------


def stretches(flow: ControlFlow) -> Iterator[tuple[int, int, list[Plan], set[str]]]:
    """Yields the first and last instruction of each loop, its plans and the predicates of its exits, by the last instruction."""
    targets = [flow.target(c.target) if isinstance(c := p.control, Branch) and not c.table else None for p in flow.plans]
    for last, first in enumerate(targets):
        if first is not None and first <= last:
            inside = range(first, last + 1)
            exits = [pc for pc in inside if (to := targets[pc]) is not None and (pc == last or to not in inside)]
            yield first, last, flow.plans[first : last + 1], predicates(flow.plans[pc] for pc in exits)


FIXED = {"param", "param::entry", "const", "nc"}
"""Modifiers of loads from memory that no thread changes."""


def spins(flow: ControlFlow) -> frozenset[PtxInstruction]:
    """Returns the loads of a kernel whose values decide whether a loop around them goes on, if others may change these."""
    found: set[PtxInstruction] = set()
    for _, _, plans, exits in stretches(flow):
        loads = [plan for plan in plans if plan.instruction.opcode == "ld" and not FIXED & set(plan.instruction.mods)]
        names = computed_from([plan for plan in plans if plan.instruction.opcode != "ld"], exits)
        found.update(load.instruction for load in loads if not names.isdisjoint(load.written))
    return frozenset(found)


def looks(flow: ControlFlow) -> frozenset[int]:
    """Returns the branches back to loops that only look at memory, by strong loads: what they look for, others must do."""
    waiting, found = set(filter(is_strong, spins(flow))), set[int]()
    for _, last, plans, _ in stretches(flow):
        loads = {plan.instruction for plan in plans} & waiting
        others = [plan for plan in plans if plan.instruction not in loads and plan.instruction.opcode not in ORDERING]
        alone = all(plan.pure and plan.collective is None and isinstance(plan.control, Branch | None) for plan in others)
        if loads and alone:
            found.add(last)
    return frozenset(found)


ORDERING = {"fence", "membar", "nanosleep"}
"""Opcodes that change no register and no memory."""

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

    def __init__(self, program: PtxProgram, kernel: str, plans: Plans):
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
        return Doubtful.of(self.plans, {self.types[n].name for n in numbers(alive)} - known, self.blocks.values())


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
    they insert unwritten bits (`bfi`) into written ones. Conditions they compute early, and join with those that decide.
    """
    if plan.instruction.opcode in ("or", "xor", "lop3") and not conditions(plan.writes):
        data = copied(plan)
        return data if all(isinstance(plan.reads[k].operand, Reg) for k in data) else ()
    return (0,) if plan.instruction.opcode == "bfi" else ()


def results(plan: Plan) -> tuple[Arg, ...]:
    """Returns the results that are copies: not the predicate of a shuffle."""
    return plan.writes[:1] if plan.instruction.opcode == "shfl" else plan.writes


def calculated(plan: Plan) -> tuple[Arg, ...]:
    """Returns the registers that arithmetic combines, at least two, if the result is as blank as they are where nobody wrote any of
    them: compilers reduce over all lanes of a warp, of which only some have a value, and store the result of one of those. A
    comparison decides something.
    """
    if not plan.pure or plan.control is not None or plan.collective is not None or plan.flops or copied(plan):
        return ()
    if any(a.dtype == bool for a in plan.writes):
        return ()
    return plan.reads if len(plan.reads) > 1 and all(isinstance(a.operand, Reg) for a in plan.reads) else ()


def conditions(args: Iterable[Arg]) -> list[str]:
    """Returns the names of the predicates among operands."""
    return names(a for a in args if a.dtype == bool)


def early(plans: Sequence[Plan]) -> frozenset[int]:
    """Returns the comparisons whose results other instructions join: compilers compare before they know that a value counts, as
    in i < n && x > 0, where x has no value behind n.
    """
    joined = {name for plan in plans if plan.instruction.opcode in JOINING for name in conditions(plan.reads)}
    makers = {pc: plan for pc, plan in enumerate(plans) if plan.instruction.opcode == "setp"}
    return frozenset(pc for pc, plan in makers.items() if joined.intersection(conditions(plan.writes)))


JOINING = frozenset({"and", "or", "xor", "not"})
"""Opcodes that join predicates."""


def early_loads(plans: Sequence[Plan], blocks: Iterable[range]) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the loads that compilers make before they know that the value counts, and the arithmetic on such values: loads of
    one register from a fixed place in shared memory, for a selection behind them in the block, as of `if (32 < n) sum += part[1]`.
    """
    writers: dict[str, list[PtxInstruction]] = defaultdict(list)
    for plan in plans:
        for name in plan.written:
            writers[name].append(plan.instruction)

    def fixed(place: Operand) -> bool:
        base = place.base if isinstance(place, Mem) else None
        made = writers.get(base.name, []) if isinstance(base, Reg) else []
        return isinstance(base, Sym) or (len(made) == 1 and made[0].opcode == "mov" and isinstance(made[0].operands[1], Sym))

    loads, carrying, compared = set[int](), set[int](), early(plans)
    for block in blocks:
        if not any(plans[pc].instruction.opcode == "selp" for pc in block):
            continue
        for pc in block:
            if loads_alone(plans[pc]) and fixed(plans[pc].instruction.operands[1]):
                behind = slice_of(plans, range(pc + 1, block.stop), plans[pc].written, compared)
                if behind is not None:
                    loads.add(pc)
                    carrying |= behind
    return frozenset(loads), frozenset(carrying)


def slice_of(plans: Sequence[Plan], behind: range, loaded: Iterable[str], compared: frozenset[int]) -> set[int] | None:
    """Returns the arithmetic on a loaded value up to the selections for which it was loaded; None if it has another use there."""
    values, carrying, selected = set(loaded), set[int](), False
    for pc in behind:
        plan = plans[pc]
        if values.isdisjoint(plan.read):
            values.difference_update(plan.written)
        elif plan.instruction.opcode == "selp":
            selected |= not values.isdisjoint(names(plan.reads[:2]))
        elif pc in compared or plan.instruction.opcode in JOINING or carries(plan):
            values.update(plan.written)
            carrying.update([pc] if carries(plan) else [])
        else:
            return None
    return carrying if selected else None


def loads_alone(plan: Plan) -> bool:
    """Returns True for an ordinary load of one register from shared memory, without a predicate."""
    i = plan.instruction
    ordinary = i.opcode == "ld" and "shared" in i.mods and i.predicate is None and not is_strong(i)
    return ordinary and len(plan.writes) == 1


def carries(plan: Plan) -> bool:
    """Returns True for arithmetic, whose result has no value if an operand has none."""
    elementwise = plan.pure and plan.control is None and plan.collective is None and not plan.flops
    return elementwise and not copied(plan) and not any(a.dtype == bool for a in plan.writes)


def names(args: Iterable[Arg]) -> list[str]:
    return [a.operand.name for a in args if isinstance(a.operand, Reg) and a.operand != SINK]


def touched(plan: Plan) -> frozenset[str]:
    """Returns the registers that an instruction names, its predicate among them."""
    return plan.read.union(plan.written)


@dataclass(frozen=True)
class Doubtful:
    """Registers that may be read though nobody wrote them: `blank` are so from the start, `registers` are these and all that may
    get copies of them, or results of arithmetic with nothing else, or of an `early` comparison. `loads` are early loads, whose
    results may have no value either, nor what arithmetic on them, in `carrying`, gives. `watched` are the instructions that read
    or write one of `registers`.
    """

    blank: frozenset[str]
    registers: frozenset[str]
    watched: frozenset[int]
    early: frozenset[int]
    loads: frozenset[int]
    carrying: frozenset[int]

    @classmethod
    def of(cls, plans: list[Plan], blank: set[str], blocks: Iterable[range]) -> Doubtful:
        every: set[str] = set()
        loads, carrying = early_loads(plans, blocks)
        more, compared = blank.union(*(plans[pc].written for pc in loads)), early(plans)
        while more - every:
            every |= more
            for pc, plan in enumerate(plans):
                whole, moved = names(calculated(plan)), [plan.reads[k] for k in copied(plan)]
                given = plan.reads if pc in compared or pc in carrying else moved
                if every.intersection(names(given)) or (whole and every.issuperset(whole)):
                    more |= {*names(results(plan))}
        watched = frozenset(pc for pc, plan in enumerate(plans) if every.intersection(touched(plan)))
        return cls(frozenset(blank), frozenset(every), watched, compared, loads, carrying)


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


RegisterMoves = dict[int, tuple[str, str | None]]
"""The registers (to, from) of instructions that only move one, from None for a constant."""


@dataclass
class InFlight:
    """The results of the analysis.

    `rows`: numbers of the registers that products use, and of all that moves connect with them. `watched`: instructions that may
    access a register in flight. `touching`: those that access a register of `rows`, if some product may come without a fence behind
    them; else none. `waits`: registers that may be in flight at a wait. `spans`: the instructions between which a register (by
    number in `LiveRegisters.ids`) keeps its place.
    """

    rows: dict[str, int] = field(default_factory=dict)
    moves: RegisterMoves = field(default_factory=dict)
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


def register_moves(code: LiveRegisters) -> RegisterMoves:
    """Returns the instructions that move one register, or a constant, to another one."""
    found: RegisterMoves = {}
    for pc, plan in enumerate(code.plans):
        if plan.instruction.opcode != "mov" or len(plan.writes) != 1 or len(plan.reads) != 1:
            continue
        to, source = plan.writes[0].operand, plan.reads[0].operand
        if isinstance(to, Reg) and to.name in code.ids:
            found[pc] = to.name, source.name if isinstance(source, Reg) and source.name in code.ids else None
    return found
