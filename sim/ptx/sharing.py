"""What a kernel's code says about what its threads may share: widths of access, atomics, which tensors are written."""

from __future__ import annotations

from collections.abc import Iterable
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

    `shared_granule`: the smallest width of an access; `global_granules` by parameter or variable whose memory it may reach,
    under "*" that of accesses to anywhere. `atomics`: there are atomics or strong loads and stores; `releases`: and fences
    or releases. `written`: parameters and variables that stores may reach, None where that cannot be told.
    """

    shared_granule: int
    global_granules: dict[str, int]
    atomics: bool
    releases: bool
    written: frozenset[str] | None

    @classmethod
    def of(cls, instructions: list[Instruction], plans: list[Plan]) -> Sharing:
        reach = reached(instructions, plans)
        stores = [r for i, r in zip(instructions, reach, strict=True) if may_write(i)]
        written = frozenset[str]().union(*stores)
        return cls(
            min((width(i) for i in instructions if touches(i, {"shared", "shared::cta"})), default=WIDEST),
            global_granules(instructions, reach),
            any(is_strong(i) for i in instructions),
            any(i.opcode in ("fence", "membar") or {"release", "acq_rel"} & set(i.mods) for i in instructions),
            None if "*" in written else written,
        )

    def global_granule(self, names: Iterable[str]) -> int:
        """The smallest width of an access to memory that these parameters and variables point to."""
        return min(self.global_granules.get(name, WIDEST) for name in ("*", *names))


WIDEST = 16
"""Bytes of the widest granule: an access of more has several."""


def may_write(i: Instruction) -> bool:
    """Whether an instruction may write global memory."""
    return i.opcode in ("st", "atom", "red") or bool({"bulk_group", "store"} & set(i.mods))


def touches(i: Instruction, spaces: set[str]) -> bool:
    """Whether an instruction accesses one of these spaces, or generic addresses."""
    if i.opcode == "cp" and not is_phase(i):
        return len(i.operands) > 2
    named = {"global", "shared", "shared::cta", "local", "const", "param"} & set(i.mods)
    accesses = i.opcode in ("ld", "ldu", "st", "atom", "red") or is_phase(i) or (i.opcode == "wmma" and "mma" not in i.mods)
    return accesses and (not named or bool(named & spaces))


def width(i: Instruction) -> int:
    """Bytes that a lane accesses, WIDEST at most."""
    if is_phase(i):
        return 8
    if i.opcode == "cp":
        # A source size may be any number of bytes up to the width; such sources are rounded up to granules.
        size = i.operands[2]
        return min(WIDEST, size.value) if isinstance(size, Imm) and isinstance(size.value, int) else WIDEST
    count = max(vector * (f"v{vector}" in i.mods) for vector in (1, 2, 4, 8)) or 1
    return min(WIDEST, count * [TYPES[m] for m in i.mods if m in TYPES][-1].bytes)


def global_granules(instructions: list[Instruction], reach: list[frozenset[str]]) -> dict[str, int]:
    """See `Sharing`."""
    found: dict[str, int] = {}
    for i, names in zip(instructions, reach, strict=True):
        if touches(i, {"global"}):
            for name in names or ANYWHERE:
                found[name] = min(found.get(name, WIDEST), width(i))
    return found


ANYWHERE = frozenset({"*"})


def reached(instructions: list[Instruction], plans: list[Plan]) -> list[frozenset[str]]:
    """For each instruction the parameters and variables that the global address it accesses may be computed from.

    A register carries the names of all that it may be computed from. A pointer that comes out of memory is of anywhere ("*").
    """
    if any(i.opcode == "call" for i in instructions):
        return [ANYWHERE] * len(instructions)
    workspace = frozenset({"grid workspace"})
    carried = {"%envreg1": workspace, "%envreg2": workspace}

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

    changed = True
    while changed:
        changed = False
        for i, plan in zip(instructions, plans, strict=True):
            names = frozenset[str]().union(*(of(o) for o in i.operands))
            if i.opcode in ("ld", "ldu", "atom"):
                wide = any(isinstance(a.operand, Reg) and a.operand.type.bits == 64 for a in plan.writes)
                names = (names if "param" in i.mods else ANYWHERE) if wide else frozenset()
            for written in plan.writes:
                if isinstance(written.operand, Reg) and not names <= carried.get(written.operand.name, frozenset()):
                    carried[written.operand.name] = carried.get(written.operand.name, frozenset()) | names
                    changed = True
    return [of(global_address(i)) for i in instructions]


def global_address(i: Instruction) -> Mem | None:
    """The address in global memory that an instruction accesses, if any: of a copy into shared memory the second one."""
    found = [o for o in i.operands if isinstance(o, Mem)]
    inward = i.opcode == "cp" and "bulk_group" not in i.mods
    return found[1] if inward and len(found) > 1 else found[0] if found else None
