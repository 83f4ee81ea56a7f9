"""Facts about a kernel that the race detector works from: kinds of instructions, scopes, widths and targets of accesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..state.segments import Place, meets
from ..text.syntax import Instruction

DEVICE, CLUSTER, BLOCK = range(3)
"""Scopes of fences, atomics and strong accesses, the widest first."""


def scope_of(mods: Sequence[str]) -> int:
    """Returns the scope that modifiers name; the device's if they name none (PTX ISA, "atom", "membar/fence")."""
    return BLOCK if "cta" in mods else CLUSTER if "cluster" in mods else DEVICE


STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"})
"""Modifiers of loads and stores that, like atomics, do not race with each other."""


def is_phase(i: Instruction) -> bool:
    """True for instructions on an mbarrier object, whose orders `order.clocks` keeps."""
    return i.opcode == "mbarrier" or (i.opcode == "cp" and "mbarrier" in i.mods)


def is_async(i: Instruction) -> bool:
    """True for instructions that access memory through the asynchronous proxy (PTX ISA, "Async proxy")."""
    if i.opcode == "cp":
        return "bulk" in i.mods and len(i.operands) > 1
    return i.opcode == "wgmma" and "mma_async" in i.mods


def is_strong(i: Instruction) -> bool:
    """True for atomics, and for loads and stores that other threads may make at the same time."""
    if is_phase(i):
        return "init" not in i.mods
    return i.opcode in ("atom", "red") or (i.opcode in ("ld", "st") and bool(STRONG & set(i.mods)))


def is_narrow(i: Instruction) -> bool:
    """True for atomics and strong accesses whose scope excludes threads of other blocks or clusters."""
    return is_strong(i) and not is_phase(i) and scope_of(i.mods) != DEVICE


WIDEST = 16
"""Bytes of the widest granule: an access of more has several."""


@dataclass(frozen=True)
class Sharing:
    """Facts about a kernel that the race detector works from.

    `shared_granule`: the smallest width of an access; `global_granules`: the same by the place of the pointer that it may have come
    from, under "*" for accesses to anywhere. `atomics`: the kernel has atomics or strong loads and stores; `releases`: and fences
    or releases. `written`: places of the pointers that stores may have come from, None if unknown. `proxies`: something accesses
    memory through the asynchronous proxy, `products`: wgmma does. `narrow`: it has atomics or strong accesses whose scope is less
    than the device, to memory that other blocks may reach. `guesses`: plain loads whose values only a compare-and-swap uses, so
    that atomics do not race with them. `lockstep`: volatile loads and stores, except loads on which a loop waits: between lanes of
    a warp they need an order, too.
    """

    shared_granule: int
    global_granules: dict[Place, int]
    atomics: bool
    releases: bool
    written: frozenset[Place] | None
    proxies: bool = False
    products: bool = False
    narrow: bool = False
    guesses: frozenset[Instruction] = frozenset()
    lockstep: frozenset[Instruction] = frozenset()

    def global_granule(self, places: list[Place]) -> int:
        """Returns the smallest width of an access to memory that the pointers at these places point to."""
        widths = (width for found, width in self.global_granules.items() if any(meets(found, place) for place in places))
        return min([WIDEST, self.global_granules.get("*", WIDEST), *widths])

    def writes(self, place: Place) -> bool:
        """True if a store may reach the memory that the pointer at this place points to."""
        return self.written is None or any(meets(found, place) for found in self.written)
