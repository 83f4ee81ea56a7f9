"""Registers that may be read before anybody wrote them, as liveness and the copies between registers say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..text.syntax import SINK, Instruction, Reg
from .registry import Arg, Plan

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
"""By opcode, the operands whose bits go where other bits say."""


def copied(plan: Plan, instruction: Instruction) -> Sequence[int]:
    """Which of the operands in `plan.reads` the instruction only moves about: as a whole, in parts or bit by bit."""
    if instruction.opcode == "mov":
        return range(len(plan.reads))
    if instruction.opcode == "cvt" and all(t.kind != "f" for t in instruction.types):
        return (0,)
    return COPIED.get(instruction.opcode, ())


def merged(plan: Plan, instruction: Instruction) -> Sequence[int]:
    """Which of those it mixes with others bit by bit, so that a register of which nobody wrote any bit is used there.

    Compilers clear with constants what nobody wrote before they put bits in: `or`, `xor` and `lop3` of registers alone do not, nor
    do they insert (`bfi`) it into what is written.
    """
    if instruction.opcode in ("or", "xor", "lop3"):
        data = copied(plan, instruction)
        return data if all(isinstance(plan.reads[k].operand, Reg) for k in data) else ()
    return (0,) if instruction.opcode == "bfi" else ()


def results(plan: Plan, instruction: Instruction) -> tuple[Arg, ...]:
    """What a copying instruction writes its copies to: not the predicate of a shuffle."""
    return plan.writes[:1] if instruction.opcode == "shfl" else plan.writes


def names(args: Iterable[Arg]) -> list[str]:
    return [a.operand.name for a in args if isinstance(a.operand, Reg) and a.operand != SINK]


@dataclass(frozen=True)
class Doubtful:
    """Registers that somebody may read though nobody wrote them: `blank` are so from the start, `registers` are these and
    all that may get copies of them. `watched` are the instructions that read or write such a register."""

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
