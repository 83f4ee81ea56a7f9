"""What a kernel's code says about what its threads may share: widths of access, atomics, which tensors are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .syntax import Imm, Instruction, Mem, Reg, Sym, Vec
from .types import TYPES

if TYPE_CHECKING:
    from .ops.registry import Plan

STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"})
"""Modifiers of loads and stores that, like atomics, do not race with each other."""


def is_phase(i: Instruction) -> bool:
    """Instructions on an mbarrier object, whose orders `heard` keeps."""
    return i.opcode == "mbarrier" or (i.opcode == "cp" and "mbarrier" in i.mods)


def is_strong(i: Instruction) -> bool:
    """Atomics, and loads and stores that other threads may make at the same time."""
    if is_phase(i):
        return "init" not in i.mods
    return i.opcode in ("atom", "red") or (i.opcode in ("ld", "st") and bool(STRONG & set(i.mods)))


@dataclass(frozen=True)
class Sharing:
    """Facts about a kernel that the race detector works from.

    `*_granule`: the smallest width of an access. `atomics`: there are atomics or strong loads and stores; `releases`:
    and fences or releases. `written`: parameters and variables that stores may reach, None where that cannot be told.
    """

    shared_granule: int
    global_granule: int
    atomics: bool
    releases: bool
    written: frozenset[str] | None

    @classmethod
    def of(cls, instructions: list[Instruction], plans: list[Plan]) -> Sharing:
        return cls(
            granule(instructions, {"shared", "shared::cta"}),
            granule(instructions, {"global"}),
            any(is_strong(i) for i in instructions),
            any(i.opcode in ("fence", "membar") or {"release", "acq_rel"} & set(i.mods) for i in instructions),
            written_parameters(instructions, plans),
        )


def granule(instructions: list[Instruction], spaces: set[str]) -> int:
    """The smallest width in bytes of an access to these spaces, or to generic addresses."""
    least = 16
    for i in instructions:
        if i.opcode in ("ld", "ldu", "st", "atom", "red", "wmma") and "mma" not in i.mods:
            named = {"global", "shared", "shared::cta", "local", "const", "param"} & set(i.mods)
            if named and not named & spaces:
                continue
            count = max(vector * (f"v{vector}" in i.mods) for vector in (1, 2, 4, 8)) or 1
            types = [TYPES[m] for m in i.mods if m in TYPES]
            # The elements that wmma names beside these have two bytes or four.
            least = min(least, count * types[-1].bytes if types else 1)
        elif is_phase(i):
            least = min(least, 8)
        elif i.opcode == "cp" and len(i.operands) > 2:
            size = i.operands[2]
            # A source size may be any number of bytes up to the width; such sources are rounded up to granules.
            least = min(least, size.value if isinstance(size, Imm) and isinstance(size.value, int) else 16)
    return least


def written_parameters(instructions: list[Instruction], plans: list[Plan]) -> frozenset[str] | None:
    """Names of parameters and variables whose value may reach the address of a store; None: it cannot be told.

    A register carries the names of all that it may be computed from. A pointer that comes out of memory is of anywhere.
    """
    workspace = frozenset({"grid workspace"})
    carried = {"%envreg1": workspace, "%envreg2": workspace}
    changed = True
    stores: frozenset[str] = frozenset()
    anywhere = frozenset({"*"})

    def of(operand: object) -> frozenset[str]:
        if isinstance(operand, Reg):
            return carried.get(operand.name, frozenset())
        if isinstance(operand, Sym):
            return frozenset({operand.name})
        if isinstance(operand, Mem):
            return of(operand.base)
        if isinstance(operand, Vec):
            return frozenset().union(*(of(item) for item in operand.items))
        return frozenset()

    if any(i.opcode == "call" for i in instructions):
        return None
    while changed:
        changed = False
        for i, plan in zip(instructions, plans, strict=True):
            names = frozenset().union(*(of(o) for o in i.operands))
            if i.opcode in ("ld", "ldu", "atom"):
                wide = any(isinstance(a.operand, Reg) and a.operand.type.bits == 64 for a in plan.writes)
                names = (names if "param" in i.mods else anywhere) if wide else frozenset()
            if i.opcode in ("st", "atom", "red") or {"bulk_group", "store"} & set(i.mods):
                memory = next((o for o in i.operands if isinstance(o, Mem)), None)
                stores |= of(memory)
            for written in plan.writes:
                if isinstance(written.operand, Reg) and not names <= carried.get(written.operand.name, frozenset()):
                    carried[written.operand.name] = carried.get(written.operand.name, frozenset()) | names
                    changed = True
    return None if "*" in stores else stores
