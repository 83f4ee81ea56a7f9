"""Data-flow analyses: loops and what they wait for, guessed loads, registers that may be unwritten or in flight.

A guess is a load of a word that an atomic compare-and-swap at the same address then compares with the loaded value:

    old = *p; do { assumed = old; old = atomicCAS(p, assumed, f(assumed)); } while (assumed != old);

This ordinary load races with other threads' atomics by the PTX ISA. It does no harm: a swap with a wrong guess does not happen.
That holds if all values computed from the guess go only into such a swap, until the swap's answer has been compared with the
guess: then the guess was right, or the values computed from it are not used again.

Registers of wgmma may be in flight between a product's issue and its wait, and between an access and a fence. The analysis of a
kernel is made once. At run time only the instructions that it names are checked: of a correct kernel, moves between registers, as
compilers make them for loops. The target of a move takes over the state of its source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..order.sharing import is_strong
from ..text.syntax import SINK, Imm, Instruction, Mem, Not, Operand, Reg, Sym, Vec
from .registry import Arg, Branch, Multiply, MultiplyWait, PhaseWait, Plan

MOST_TESTS = 64
"""Most comparisons of a kernel that are followed, those of the largest loops first."""


@dataclass(frozen=True)
class BasicBlocks:
    """The basic blocks of a kernel by their first instructions: `end` of each (exclusive), and `after`, its successors."""

    instructions: Sequence[Instruction]
    plans: Sequence[Plan]
    end: dict[int, int]
    after: dict[int, list[int]]

    @classmethod
    def of(
        cls,
        instructions: Sequence[Instruction],
        plans: Sequence[Plan],
        leaders: Sequence[int],
        successors: Callable[[int], list[int]],
    ) -> BasicBlocks:
        end = dict(zip(leaders, [*leaders[1:], len(plans)], strict=True))
        return cls(instructions, plans, end, {start: successors(end[start] - 1) for start in leaders})


@dataclass(frozen=True)
class Loop:
    """Blocks, by their first instructions, that come to `head` again without leaving the others; what they call is among them."""

    head: int
    body: frozenset[int]


@dataclass(frozen=True)
class ExitTest:
    """A comparison of `left` and `right`, on which it depends whether a loop goes on."""

    loop: Loop
    left: Arg
    right: Arg

    def encloses(self, other: ExitTest) -> bool:
        return other.loop.body < self.loop.body

    @property
    def registers(self) -> list[Reg]:
        return [arg.operand for arg in (self.left, self.right) if isinstance(arg.operand, Reg)]


def loops(blocks: BasicBlocks) -> list[Loop]:
    """Returns the loops, the largest first."""
    before: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)  # of each loop, by its head, the blocks that go back to it
    for start, nexts in blocks.after.items():
        control = blocks.plans[blocks.end[start] - 1].control
        for head in nexts:
            before[head].append(start)
            if isinstance(control, Branch) and head <= start:
                ends[head].append(start)
    found = []
    for head, backs in ends.items():
        body, todo = {head}, list(backs)
        while todo:
            block = todo.pop()
            if block not in body:
                body.add(block)
                todo += before[block]
        found.append(Loop(head, frozenset(body)))
    return sorted(found, key=lambda loop: (-len(loop.body), loop.head))


def exit_tests(blocks: BasicBlocks, loops: Sequence[Loop]) -> tuple[ExitTest, ...]:
    """Returns the comparisons in each loop that decide its exits, through all predicates computed from them."""
    makers = {pc for pc, plan in enumerate(blocks.plans) if any(arg.dtype.kind == "b" for arg in plan.writes)}
    found: list[ExitTest] = []
    for loop in loops:
        names, before = predicates_of_exits(blocks, loop), -1
        inside = [pc for start in loop.body for pc in range(start, blocks.end[start]) if pc in makers]
        while len(names) != before:
            before = len(names)
            for pc in inside:
                if not names.isdisjoint(written(blocks.plans[pc])):
                    names |= read(blocks.instructions[pc], blocks.plans[pc])
        for pc in sorted(inside):
            plan = blocks.plans[pc]
            if blocks.instructions[pc].opcode == "setp" and not names.isdisjoint(written(plan)) and not plan.reads[0].packed:
                found.append(ExitTest(loop, *plan.reads[:2]))
    return tuple(found[:MOST_TESTS])


def predicates_of_exits(blocks: BasicBlocks, loop: Loop) -> set[str]:
    """Returns the predicates of the branches that leave a loop, or stay in it."""
    leaving = (start for start in loop.body if not loop.body.issuperset(blocks.after[start]))
    last = (blocks.instructions[blocks.end[start] - 1] for start in leaving)
    return {i.predicate[0].name for i in last if i.predicate}


QUIET = frozenset({"nanosleep", "fence", "membar"})
"""Opcodes that a loop that only waits may have, besides arithmetic, its loads and its branches."""


def spins(flow: ControlFlow) -> frozenset[Instruction]:
    """Returns the loads of a kernel whose values decide whether a loop around them goes on."""
    found: set[Instruction] = set()
    for last, plan in enumerate(flow.plans):
        if isinstance(plan.control, Branch) and not plan.control.table and (first := flow.jump(plan.control.target)) <= last:
            found |= deciding(flow, first, last)
    return frozenset(found)


def deciding(flow: ControlFlow, first: int, last: int) -> set[Instruction]:
    """Returns the loads of the loop from `first` to `last` from which the predicates of its exits are computed."""
    names = exits(flow, first, last)
    loads: set[Instruction] = set()
    before = -1
    while len(names) != before:
        before = len(names)
        for pc in range(first, last + 1):
            i, plan = flow.instructions[pc], flow.plans[pc]
            if names.isdisjoint(written(plan)):
                continue
            if i.opcode == "ld":
                loads.add(i)
            else:
                names |= read(i, plan)
    return loads


def exits(flow: ControlFlow, first: int, last: int) -> set[str]:
    """Returns the predicates of the exits of a loop."""
    names: set[str] = set()
    for pc in range(first, last + 1):
        i, control = flow.instructions[pc], flow.plans[pc].control
        if not i.predicate or not isinstance(control, Branch) or control.table:
            continue
        if pc == last or not first <= flow.jump(control.target) <= last:
            names.add(i.predicate[0].name)
    return names


def waits(flow: ControlFlow) -> dict[int, int]:
    """Returns loops that only wait, as last instructions by head: memory or an mbarrier alone decides if they go on, and a turn has
    no other effect.
    """
    found = {}
    for last, plan in enumerate(flow.plans):
        if isinstance(plan.control, Branch) and not plan.control.table:
            first = flow.jump(plan.control.target)
            if first <= last and only_waits(flow, first, last):
                found[first] = last
    return found


def only_waits(flow: ControlFlow, first: int, last: int) -> bool:
    """True if the loop from `first` to `last` only waits."""
    reads, changed = set[str](), set[str]()
    for pc in range(first, last + 1):
        i, plan = flow.instructions[pc], flow.plans[pc]
        asks = i.opcode == "ld" or isinstance(plan.control, PhaseWait) or (i.opcode == "atom" and {"cas", "exch"} & set(i.mods))
        if asks:
            reads.update(written(plan))
        elif not (plan.pure or isinstance(plan.control, Branch) or i.opcode in QUIET):
            return False
        changed.update(written(plan))
    names = exits(flow, first, last)
    before = -1
    while len(names) != before:
        before = len(names)
        for pc in range(first, last + 1):
            i, plan = flow.instructions[pc], flow.plans[pc]
            if not names.isdisjoint(written(plan)):
                names |= read(i, plan)
    return not names.isdisjoint(reads) and names.isdisjoint(carried(flow, first, last) & changed)


def carried(flow: ControlFlow, first: int, last: int) -> set[str]:
    """Returns registers that a turn of the loop may read before it writes them."""
    found, done = set[str](), set[str]()
    for pc in range(first, last + 1):
        i, plan = flow.instructions[pc], flow.plans[pc]
        found |= read(i, plan) - done
        if not i.predicate:
            done.update(written(plan))
    return found


Names = frozenset[str]
NOTHING: Names = frozenset()


class GuessState(NamedTuple):
    """Registers by what they may hold: the `raw` guess, values `derived` from it, values of a wrong guess (`stale`).

    `answers` hold the values that the swap found for sure. `differs` and `equals` are predicates that compare the guess with that.
    """

    raw: Names = NOTHING
    derived: Names = NOTHING
    stale: Names = NOTHING
    answers: Names = NOTHING
    differs: Names = NOTHING
    equals: Names = NOTHING

    @property
    def tainted(self) -> Names:
        return self.raw | self.derived | self.stale

    def less(self, names: Names) -> GuessState:
        return GuessState(*(each - names for each in self))

    def joined(self, other: GuessState) -> GuessState:
        may = [mine | theirs for mine, theirs in zip(self[:3], other[:3], strict=True)]
        return GuessState(*may, *(mine & theirs for mine, theirs in zip(self[3:], other[3:], strict=True)))


@dataclass(frozen=True)
class ControlFlow:
    """The code of a kernel: instructions, plans, and the successors of each; `jump` returns the target of a branch."""

    instructions: Sequence[Instruction]
    plans: Sequence[Plan]
    successors: Callable[[int], list[int]]
    jump: Callable[[str], int]


def guesses(flow: ControlFlow) -> frozenset[Instruction]:
    """Returns the loads of a kernel that only guess."""
    swaps = [i for i in flow.instructions if i.opcode == "atom" and "cas" in i.mods]
    if not swaps:
        return frozenset()
    sole = sole_writers(flow)
    places = {(i.type.bytes, address(i.operands[1], sole)) for i in swaps}
    found = set()
    for pc, i in enumerate(flow.instructions):
        if i.opcode == "ld" and isinstance(i.operands[0], Reg) and not is_strong(i) and "param" not in i.mods:
            place = i.type.bytes, address(i.operands[1], sole)
            if place in places and only_guesses(flow, pc, i.operands[0].name, place, sole):
                found.add(i)
    return frozenset(found)


# -- addresses ----------------------------------------------------------------------------------------------------------


def sole_writers(flow: ControlFlow) -> dict[str, Instruction]:
    """Returns, for each register with a single writing instruction, that instruction."""
    found: dict[str, Instruction | None] = {}
    for i, plan in zip(flow.instructions, flow.plans, strict=True):
        for name in written(plan):
            found[name] = None if name in found or i.predicate else i
    return {name: i for name, i in found.items() if i is not None}


def address(operand: Operand, sole: dict[str, Instruction]) -> tuple[str, int]:
    """Returns the origin of an address: the first register or name that it can be followed back to, and an offset."""
    if not isinstance(operand, Mem):
        return "", 0
    base, offset = operand.base, operand.offset
    while isinstance(base, Reg) and base.name in sole:
        i = sole[base.name]
        if i.opcode in ("mov", "cvta") and isinstance(i.operands[1], Reg | Sym):
            base = i.operands[1]
        elif i.opcode == "add" and isinstance(i.operands[1], Reg) and isinstance(i.operands[2], Imm):
            base, offset = i.operands[1], offset + i.operands[2].value
        else:
            break
    if isinstance(base, Imm):
        return "", base.value + offset
    return base.name, offset + (base.offset if isinstance(base, Sym) else 0)


# -- uses of a guess ----------------------------------------------------------------------------------------------------


def written(plan: Plan) -> list[str]:
    return [a.operand.name for a in plan.writes if isinstance(a.operand, Reg)]


def named(operand: Operand) -> Names:
    """Returns the registers of an operand."""
    if isinstance(operand, Reg):
        return frozenset({operand.name})
    if isinstance(operand, Not):
        return frozenset({operand.reg.name})
    if isinstance(operand, Mem):
        return named(operand.base)
    return frozenset().union(*map(named, operand.items)) if isinstance(operand, Vec) else NOTHING


def read(i: Instruction, plan: Plan) -> Names:
    """Returns the registers that an instruction reads, its predicate among them."""
    operands = [a.operand for a in plan.reads] + ([i.predicate[0]] if i.predicate else [])
    return frozenset().union(*map(named, operands)) if operands else NOTHING


Place = tuple[int, tuple[str, int]]
"""The width and the address of a word."""


def only_guesses(flow: ControlFlow, start: int, register: str, place: Place, sole: dict[str, Instruction]) -> bool:
    """True if the value of the load at `start` goes nowhere but into swaps at its own place."""
    states: dict[int, GuessState] = {}
    waiting = [(pc, GuessState(raw=frozenset({register}))) for pc in flow.successors(start)]
    while waiting:
        pc, state = waiting.pop()
        if pc == start or not state.tainted:
            continue
        known = states.get(pc)
        joined = state if known is None else known.joined(state)
        if joined == known:
            continue
        states[pc] = joined
        i, plan = flow.instructions[pc], flow.plans[pc]
        if plan.control is not None:
            ways = branched(flow, pc, joined)
            if ways is None:
                return False
            waiting += ways
            continue
        after = passed(i, plan, joined, place, sole)
        if after is None:
            return False
        waiting += [(one, after) for one in flow.successors(pc)]
    return True


def branched(flow: ControlFlow, pc: int, state: GuessState) -> list[tuple[int, GuessState]] | None:
    """Returns the successors of a control instruction with their states; None: the guess decides its effect in another way."""
    i, plan = flow.instructions[pc], flow.plans[pc]
    if not read(i, plan) & state.tainted:
        return [(one, state) for one in flow.successors(pc)]
    if not isinstance(plan.control, Branch) or plan.control.table or i.predicate is None:
        return None
    register, negated = i.predicate
    if register.name not in state.differs | state.equals:
        return None
    wrong = (register.name in state.differs) != negated
    target = flow.jump(plan.control.target)
    # If the swap has happened, the guess was right, and nothing is a guess any more.
    stale = GuessState(stale=state.tainted)
    return [(target, stale)] if wrong else [(pc + 1, stale)]


def passed(i: Instruction, plan: Plan, state: GuessState, place: Place, sole: dict[str, Instruction]) -> GuessState | None:
    """Returns the state behind an instruction; None if it uses the guess in another way than the swap."""
    out = frozenset(written(plan))
    used = read(i, plan) & state.tainted
    rest = state if i.predicate else state.less(out)
    if i.opcode == "atom" and "cas" in i.mods and (i.type.bytes, address(i.operands[1], sole)) == place and not i.predicate:
        guess = named(i.operands[2])
        sure = guess <= state.raw and not guess & (state.derived | state.stale) and not used & state.stale
        if used and (not sure or used & named(i.operands[1])):
            return None
        return rest._replace(answers=rest.answers | out) if sure else rest
    if not used:
        copies = i.opcode == "mov" and not i.predicate and bool(named(i.operands[1]) & state.answers)
        return rest._replace(answers=rest.answers | out) if copies else rest
    if used & state.stale or not plan.pure or (i.predicate and i.predicate[0].name in used):
        return None
    if i.opcode == "mov" and used <= state.raw - state.derived and isinstance(i.operands[1], Reg) and not i.predicate:
        return rest._replace(raw=rest.raw | out)
    rest = rest._replace(derived=rest.derived | out)
    if i.opcode == "setp" and not i.predicate and len(out) == 1 and i.mods[0] in ("ne", "eq") and len(i.mods) == 2:
        first, second = (named(operand) for operand in i.operands[1:3])
        raw = state.raw - state.derived
        if (first <= raw and second <= state.answers) or (second <= raw and first <= state.answers):
            if i.mods[0] == "ne":
                return rest._replace(differs=rest.differs | out)
            return rest._replace(equals=rest.equals | out)
    return rest


COPIED = {
    "selp": (0, 1),
    "prmt": (0, 1),
    "shfl": (0,),
    "and": (0, 1),
    "or": (0, 1),
    "xor": (0, 1),
    "not": (0,),
    "lop3": (0, 1, 2),
    "shl": (0,),
    "shr": (0,),
    "shf": (0, 1),
    "bfe": (0,),
    "bfi": (0, 1),
}
"""Operands, by opcode, whose bits are moved as other operands' bits say."""


def copied(plan: Plan, instruction: Instruction) -> Sequence[int]:
    """Returns the operands in `plan.reads` that the instruction only moves: as a whole, in parts or bit by bit."""
    if instruction.opcode == "mov":
        return range(len(plan.reads))
    if instruction.opcode == "cvt" and all(t.kind != "f" for t in instruction.types):
        return (0,)
    return COPIED.get(instruction.opcode, ())


def merged(plan: Plan, instruction: Instruction) -> Sequence[int]:
    """Returns those of them that it mixes with others bit by bit, which uses a register of which nobody wrote any bit.

    Compilers clear unwritten bits with constants before they put bits in: not by `or`, `xor` and `lop3` of registers alone, nor do
    they insert unwritten bits (`bfi`) into written ones.
    """
    if instruction.opcode in ("or", "xor", "lop3"):
        data = copied(plan, instruction)
        return data if all(isinstance(plan.reads[k].operand, Reg) for k in data) else ()
    return (0,) if instruction.opcode == "bfi" else ()


def results(plan: Plan, instruction: Instruction) -> tuple[Arg, ...]:
    """Returns the results that are copies: not the predicate of a shuffle."""
    return plan.writes[:1] if instruction.opcode == "shfl" else plan.writes


def names(args: Iterable[Arg]) -> list[str]:
    return [a.operand.name for a in args if isinstance(a.operand, Reg) and a.operand != SINK]


@dataclass(frozen=True)
class Doubtful:
    """Registers that may be read though nobody wrote them: `blank` are so from the start, `registers` are these and all that may
    get copies of them. `watched` are the instructions that read or write such a register.
    """

    blank: frozenset[str]
    registers: frozenset[str]
    watched: frozenset[int]

    @classmethod
    def of(cls, plans: list[Plan], instructions: list[Instruction], blank: set[str]) -> Doubtful:
        every: set[str] = set()
        more = set(blank)
        while more - every:
            every |= more
            for plan, i in zip(plans, instructions, strict=True):
                if every.intersection(names(plan.reads[k] for k in copied(plan, i))):
                    more |= {*names(results(plan, i))}
        watched = set()
        for pc, (plan, i) in enumerate(zip(plans, instructions, strict=True)):
            touched = [*names(plan.reads), *names(plan.writes), *([i.predicate[0].name] if i.predicate else [])]
            if every.intersection(touched):
                watched.add(pc)
        return cls(frozenset(blank), frozenset(every), frozenset(watched))


GROUPS = 9
"""Committed groups are told apart up to this many; older ones count as these."""

Pending = tuple[int, ...]
"""Registers (bits) of products behind whose issue at most 0, 1, ... groups were committed; the last: of all."""


class FlightFlow(Protocol):
    """The code of a kernel (`decode.code`), as this analysis uses it."""

    instructions: list[Instruction]
    plans: list[Plan]
    ids: dict[str, int]
    reads: list[int]
    writes: list[int]
    leaders: list[int]

    def block_end(self, pc: int) -> int: ...

    def successors(self, pc: int) -> list[int]: ...


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
    `FlightFlow.ids`) keeps its place.
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


def in_flight(code: FlightFlow) -> InFlight | None:
    """Returns the analysis of a kernel; None if it has no wgmma."""
    if not any(isinstance(plan.control, Multiply) for plan in code.plans):
        return None
    return Analysis(code).run()


class Analysis:
    def __init__(self, code: FlightFlow):
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
        """Returns the registers of D and A of a product."""
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

    def step(self, pc: int, state: FlightState) -> FlightState:
        i, control = self.code.instructions[pc], self.code.plans[pc].control
        pending, touched = state.pending, state.touched
        if isinstance(control, Multiply):
            own = self.operands(pc)
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
            return FlightState(pending, touched | ((self.code.reads[pc] | self.code.writes[pc]) & self.mask))
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

    def conclude(self, start: int, state: FlightState) -> bool:
        """Records the state in a block; returns True if a product of it may lack a fence."""
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


def register_moves(code: FlightFlow) -> dict[int, tuple[str, str | None]]:
    """Returns the instructions that move one register, or a constant, to another one."""
    found: dict[int, tuple[str, str | None]] = {}
    for pc, (i, plan) in enumerate(zip(code.instructions, code.plans, strict=True)):
        if i.opcode != "mov" or len(plan.writes) != 1 or len(plan.reads) != 1:
            continue
        to, source = plan.writes[0].operand, plan.reads[0].operand
        if isinstance(to, Reg) and to.name in code.ids:
            known = isinstance(source, Reg) and source.name in code.ids
            found[pc] = to.name, source.name if known and isinstance(source, Reg) else None
    return found
