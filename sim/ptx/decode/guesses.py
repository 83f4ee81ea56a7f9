"""Guessed loads: loads of a word that an atomic compare-and-swap at the same address then compares with the loaded value.

    old = *p; do { assumed = old; old = atomicCAS(p, assumed, f(assumed)); } while (assumed != old);

This ordinary load races with other threads' atomics by the PTX ISA. It does no harm: a swap with a wrong guess does not happen.
That holds if all values computed from the guess go only into such a swap, until the swap's answer has been compared with the
guess: then the guess was right, or the values computed from it are not used again.
"""

from __future__ import annotations

from typing import NamedTuple

from ..order.sharing import is_strong
from ..text.syntax import Imm, Instruction, Mem, Operand, Reg, Sym
from .flow import ControlFlow
from .registry import Branch, Plan, named

RegisterNames = frozenset[str]
NOTHING: RegisterNames = frozenset()


class GuessState(NamedTuple):
    """Registers by what they may hold: the `raw` guess, values `derived` from it, values of a wrong guess (`stale`).

    `answers` hold the values that the swap found for sure. `differs` and `equals` are predicates that compare the guess with that.
    """

    raw: RegisterNames = NOTHING
    derived: RegisterNames = NOTHING
    stale: RegisterNames = NOTHING
    answers: RegisterNames = NOTHING
    differs: RegisterNames = NOTHING
    equals: RegisterNames = NOTHING

    @property
    def tainted(self) -> RegisterNames:
        return self.raw | self.derived | self.stale

    def less(self, names: RegisterNames) -> GuessState:
        return GuessState(*(each - names for each in self))

    def joined(self, other: GuessState) -> GuessState:
        may = [mine | theirs for mine, theirs in zip(self[:3], other[:3], strict=True)]
        return GuessState(*may, *(mine & theirs for mine, theirs in zip(self[3:], other[3:], strict=True)))


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
    for plan in flow.plans:
        for name in plan.written:
            found[name] = None if name in found or plan.instruction.predicate else plan.instruction
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


Word = tuple[int, tuple[str, int]]
"""The width and the address of a word."""


def only_guesses(flow: ControlFlow, start: int, register: str, place: Word, sole: dict[str, Instruction]) -> bool:
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
        plan = flow.plans[pc]
        if plan.control is not None:
            ways = branched(flow, pc, joined)
            if ways is None:
                return False
            waiting += ways
            continue
        after = passed(plan, joined, place, sole)
        if after is None:
            return False
        waiting += [(one, after) for one in flow.successors(pc)]
    return True


def branched(flow: ControlFlow, pc: int, state: GuessState) -> list[tuple[int, GuessState]] | None:
    """Returns the successors of a control instruction with their states; None: the guess decides its effect in another way."""
    plan = flow.plans[pc]
    if not plan.read & state.tainted:
        return [(one, state) for one in flow.successors(pc)]
    if not isinstance(plan.control, Branch) or plan.control.table or plan.instruction.predicate is None:
        return None
    register, negated = plan.instruction.predicate
    if register.name not in state.differs | state.equals:
        return None
    wrong = (register.name in state.differs) != negated
    target = flow.target(plan.control.target)
    # If the swap has happened, the guess was right, and nothing is a guess any more.
    stale = GuessState(stale=state.tainted)
    return [(target, stale)] if wrong else [(pc + 1, stale)]


def passed(plan: Plan, state: GuessState, place: Word, sole: dict[str, Instruction]) -> GuessState | None:
    """Returns the state behind an instruction; None if it uses the guess in another way than the swap."""
    i, out = plan.instruction, frozenset(plan.written)
    used = plan.read & state.tainted
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
