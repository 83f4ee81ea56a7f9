"""Which variable of shared memory an access is of: the one from whose address its own was computed, where that is sure.

A compiler keeps `__shared__` arrays apart as variables and does not know which lies behind which: no address that it makes from
one is meant for another. Addresses that may come of several variables, or of none, say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..text.syntax import Imm, Instruction, Mem, Operand, Reg, Sym
from .registry import Plan

NUMBER, UNSURE = "", "*"
"""What a register holds that is no address in a variable: a number (or an address of elsewhere), and what may be anything."""


class Home(NamedTuple):
    """A variable of shared memory and where it lies, in bytes; `end` None: to the end of all."""

    name: str
    start: int
    end: int | None


def homes(instructions: Sequence[Instruction], plans: Sequence[Plan], variables: Mapping[str, Home]) -> dict[Instruction, Home]:
    """The accesses that may only be of one of these variables, each with that."""
    if len({home.start for home in variables.values()}) < 2:
        return {}
    held = provenance(instructions, plans, frozenset(variables))
    found = {}
    for i in instructions:
        address = own_address(i)
        if address is not None:
            home = variables.get(of(address.base, held, frozenset(variables)) or UNSURE)
            if home is not None:
                found[i] = home
    return found


def own_address(i: Instruction) -> Mem | None:
    """The address in shared memory, or the generic one, that an instruction accesses; None: there are two, or none."""
    if i.opcode == "cp" and {"shared::cluster", "shared::cta"} <= set(i.mods):
        return None
    found = [operand for operand in i.operands if isinstance(operand, Mem)]
    outward = i.opcode == "cp" and "bulk_group" in i.mods
    return None if not found else found[1] if outward and len(found) > 1 else found[0]


def of(operand: Operand, held: Mapping[str, str], names: frozenset[str]) -> str | None:
    """What an operand holds: the name of a variable, NUMBER or UNSURE; None: nothing is known yet."""
    if isinstance(operand, Sym):
        return operand.name if operand.name in names else NUMBER
    if isinstance(operand, Reg):
        return held.get(operand.name)
    return NUMBER if isinstance(operand, Imm) else UNSURE


def provenance(instructions: Sequence[Instruction], plans: Sequence[Plan], names: frozenset[str]) -> dict[str, str]:
    """What each register holds wherever it is written."""
    written = [[a.operand.name for a in plan.writes if isinstance(a.operand, Reg)] for plan in plans]
    some = {name for each in written for name in each}
    read = {a.operand.name for plan in plans for a in plan.reads if isinstance(a.operand, Reg)}
    held = dict.fromkeys(read - some, NUMBER)  # special registers
    steps = [(i, plan, targets) for i, plan, targets in zip(instructions, plans, written, strict=True) if targets]
    changed = True
    while changed:
        changed = False
        for i, plan, targets in steps:
            found = result(i, [of(a.operand, held, names) for a in plan.reads])
            for name in targets if found is not None else ():
                assert found is not None
                joined = found if held.get(name, found) == found else UNSURE
                if held.get(name) != joined:
                    held[name] = joined
                    changed = True
    return held


def result(i: Instruction, read: Sequence[str | None]) -> str | None:
    """What an instruction writes that reads this; None: not known yet."""
    if i.opcode in ("ld", "ldu", "atom"):
        return NUMBER
    if None in read:
        return None
    sure = [one or NUMBER for one in read]
    if all(one == NUMBER for one in sure):
        return NUMBER
    if i.opcode in ("mov", "cvt") and len(sure) > 1:
        return UNSURE  # halves put together
    if i.opcode in ("mov", "cvt", "cvta", "mapa", "shfl"):
        return only(sure[:1], sure[1:])
    if i.opcode == "selp":
        return sure[0] if sure[0] == sure[1] else UNSURE
    if i.opcode == "sub":
        return only(sure[:1], sure[1:])
    if i.opcode in ("add", "or", "xor"):
        return only(sure[:1], sure[1:]) if sure[1] == NUMBER else only(sure[1:], sure[:1])
    if i.opcode in ("mad", "mad24"):
        return only(sure[2:], sure[:2])
    if i.opcode == "and":
        # Rounded down, it is an address still; less than the low bits of it are a number of no use.
        return only(sure[:1], sure[1:]) if aligns(i.operands[2]) else UNSURE
    return UNSURE


def only(address: Sequence[str], numbers: Sequence[str]) -> str:
    """An address and numbers that are added to it."""
    return address[0] if all(one == NUMBER for one in numbers) else UNSURE


def aligns(operand: Operand) -> bool:
    """Whether a mask clears low bits only."""
    return isinstance(operand, Imm) and -(1 << 16) <= signed(operand.value) < 0


def signed(value: int) -> int:
    """A 32-bit constant, which may be written without its sign."""
    return value - (1 << 32) if 1 << 31 <= value < 1 << 32 else value
