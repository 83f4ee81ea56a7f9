"""Loads that only guess: of a word that an atomic compare-and-swap at the same address then compares with the guess.

    old = *p; do { assumed = old; old = atomicCAS(p, assumed, f(assumed)); } while (assumed != old);

The first read is an ordinary one, which by the letter races with other threads' atomics. It does no harm: a swap with a wrong
guess does not happen. That is so where whatever is computed from the guess goes nowhere but into such a swap, until the swap's
answer has been compared with the guess: then the guess was right, or what came of it is not used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..order.sharing import is_strong
from ..text.syntax import Imm, Instruction, Mem, Not, Operand, Reg, Sym, Vec
from .registry import Branch, Plan

Names = frozenset[str]
NOTHING: Names = frozenset()


class State(NamedTuple):
    """Registers by what they may hold: the `raw` guess, what was `derived` from it, what is left of a wrong one (`stale`).

    `answers` hold what the swap found for sure. `differs` and `equals` are predicates that compare the guess with that.
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

    def less(self, names: Names) -> State:
        return State(*(each - names for each in self))

    def joined(self, other: State) -> State:
        may = [mine | theirs for mine, theirs in zip(self[:3], other[:3], strict=True)]
        return State(*may, *(mine & theirs for mine, theirs in zip(self[3:], other[3:], strict=True)))


@dataclass(frozen=True)
class Flow:
    """The code of a kernel: instructions, plans, and where each may go on; `jump` is the target of a branch."""

    instructions: Sequence[Instruction]
    plans: Sequence[Plan]
    successors: Callable[[int], list[int]]
    jump: Callable[[str], int]


def guesses(flow: Flow) -> frozenset[Instruction]:
    """The loads of a kernel that only guess."""
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


def sole_writers(flow: Flow) -> dict[str, Instruction]:
    """For each register that one instruction writes, that instruction."""
    found: dict[str, Instruction | None] = {}
    for i, plan in zip(flow.instructions, flow.plans, strict=True):
        for name in written(plan):
            found[name] = None if name in found or i.predicate else i
    return {name: i for name, i in found.items() if i is not None}


def address(operand: Operand, sole: dict[str, Instruction]) -> tuple[str, int]:
    """What an address is made of: the first register or name that it can be followed back to, and an offset."""
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


# -- where a guess goes -------------------------------------------------------------------------------------------------


def written(plan: Plan) -> list[str]:
    return [a.operand.name for a in plan.writes if isinstance(a.operand, Reg)]


def named(operand: Operand) -> Names:
    """The registers of an operand."""
    if isinstance(operand, Reg):
        return frozenset({operand.name})
    if isinstance(operand, Not):
        return frozenset({operand.reg.name})
    if isinstance(operand, Mem):
        return named(operand.base)
    return frozenset().union(*map(named, operand.items)) if isinstance(operand, Vec) else NOTHING


def read(i: Instruction, plan: Plan) -> Names:
    """The registers that an instruction reads, its predicate among them."""
    operands = [a.operand for a in plan.reads] + ([i.predicate[0]] if i.predicate else [])
    return frozenset().union(*map(named, operands)) if operands else NOTHING


Place = tuple[int, tuple[str, int]]
"""The width and the address of a word."""


def only_guesses(flow: Flow, start: int, register: str, place: Place, sole: dict[str, Instruction]) -> bool:
    """Whether what the load at `start` gives goes nowhere but into swaps at its own place."""
    states: dict[int, State] = {}
    waiting = [(pc, State(raw=frozenset({register}))) for pc in flow.successors(start)]
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


def branched(flow: Flow, pc: int, state: State) -> list[tuple[int, State]] | None:
    """Where a control instruction leads, and with what; None: what it does depends on the guess otherwise."""
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
    # Where the swap has happened the guess was right, and nothing is a guess any more.
    stale = State(stale=state.tainted)
    return [(target, stale)] if wrong else [(pc + 1, stale)]


def passed(i: Instruction, plan: Plan, state: State, place: Place, sole: dict[str, Instruction]) -> State | None:
    """What registers hold behind an instruction; None where something of the guess goes where it matters."""
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
