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

    # What an instruction writes, and where the names that its results carry come from: registers, and names that stand in it
    steps: list[tuple[list[str], list[str], frozenset[str]]] = []
    for i, plan in zip(instructions, plans, strict=True):
        results = [a.operand for a in plan.writes if isinstance(a.operand, Reg)]
        loads = i.opcode in ("ld", "ldu", "atom")
        if loads and not any(result.type.bits == 64 for result in results):
            continue  # no pointer
        written = [result.name for result in results]
        if loads and "param" not in i.mods:
            steps.append((written, [], ANYWHERE))
        elif written:
            parts = [part for operand in i.operands for part in address_parts(operand)]
            named = frozenset(part.name for part in parts if isinstance(part, Sym))
            steps.append((written, [part.name for part in parts if isinstance(part, Reg)], named))
    changed = True
    while changed:
        changed = False
        for written, sources, names in steps:
            for source in sources:
                if source in carried:
                    names |= carried[source]
            for name in written if names else ():
                before = carried.get(name, frozenset())
                if not names <= before:
                    carried[name] = before | names
                    changed = True

    def of(address: Mem | None) -> frozenset[str]:
        (base,) = address_parts(address) or (None,)
        if isinstance(base, Reg):
            return carried.get(base.name, frozenset())
        return frozenset({base.name}) if base is not None else frozenset()

    return [of(global_address(i)) for i in instructions]


def address_parts(operand: object) -> tuple[Reg | Sym, ...]:
    """The registers and names that an address, or anything computed from the operand, may be made of."""
    if isinstance(operand, Reg | Sym):
        return (operand,)
    if isinstance(operand, Mem):
        return address_parts(operand.base)
    if isinstance(operand, Vec):
        return tuple(part for item in operand.items for part in address_parts(item))
    return ()


def global_address(i: Instruction) -> Mem | None:
    """The address in global memory that an instruction accesses, if any: of a copy into shared memory the second one."""
    found = [o for o in i.operands if isinstance(o, Mem)]
    inward = i.opcode == "cp" and "bulk_group" not in i.mods
    return found[1] if inward and len(found) > 1 else found[0] if found else None
