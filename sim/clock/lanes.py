"""The state of threads that run machine code: registers and predicates, a lane a thread.

A register's lane is a known whole number of 32 bits, or unknown: floating-point numbers are, since they decide neither an address
nor, but for votes on them, which way a warp goes. Whatever an unknown number goes into is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Mask = Array | None
"""Lanes for which an instruction counts; None: all."""

ALWAYS = ("PT", "UPT")
ZERO = ("RZ", "URZ", "SRZ")
VOTES, VOTED = "R256", "P8"
"""Names for a register and a predicate that no code has: the last result of a barrier that reduces."""


class Lanes:
    """Registers by name ("R12", "UR4"), predicates by name ("P0", "UP1") and special registers of so many threads.

    An array here is never written to: a result is a new array, so that registers may share one.
    """

    def __init__(self, threads: int, special: Mapping[str, Array]) -> None:
        self.threads, self.special = threads, special
        self.zero = np.zeros(threads, np.uint32)
        self.no, self.everyone = np.zeros(threads, np.bool_), np.ones(threads, np.bool_)
        self.registers: dict[str, Array] = dict.fromkeys(ZERO, self.zero)
        self.predicates: dict[str, Array] = dict.fromkeys(ALWAYS, self.everyone)
        self.unknown: dict[str, Array] = {}  # by name, where it has unknown lanes: which
        self.constants: dict[tuple[int, int], Array] = {}

    def register(self, name: str) -> Array:
        """Returns the lanes of a register; one that nobody wrote holds zeros."""
        return self.registers.get(name, self.zero)

    def predicate(self, name: str) -> Array:
        return self.predicates.get(name, self.no)

    def condition(self, text: str) -> Array:
        """Returns the lanes of a predicate, negated behind "!"."""
        value = self.predicate(text.lstrip("!"))
        return ~value if text.startswith("!") else value

    def constant(self, value: int, size: int) -> Array:
        """Returns a number of 4 or 8 bytes in every lane."""
        found = self.constants.get((value, size))
        if found is None:
            found = self.constants[value, size] = np.full(self.threads, value, f"u{size}")
        return found

    def write(self, name: str, value: Array, mask: Mask) -> None:
        """Writes known lanes of a register or predicate."""
        if name in ZERO or name in ALWAYS:
            return
        bank, kind = (self.predicates, np.bool_) if "P" in name else (self.registers, np.uint32)
        if value.dtype != kind:
            value = value.astype(kind)
        if mask is None:
            bank[name] = value
            self.unknown.pop(name, None)
            return
        bank[name] = np.where(mask, value, bank.get(name, self.no if kind is np.bool_ else self.zero))
        if name in self.unknown:
            self.unknown[name] = self.unknown[name] & ~mask

    def forget(self, name: str, mask: Mask) -> None:
        """Makes lanes of a register or predicate unknown."""
        before = self.unknown.get(name)
        if before is self.everyone or name in ZERO or name in ALWAYS:
            return
        if mask is None:
            self.unknown[name] = self.everyone
        else:
            self.unknown[name] = mask if before is None else before | mask

    def lacking(self, names: Iterable[str], mask: Mask) -> Array | None:
        """Returns the lanes, of those that run, that have one of these registers unknown; None if there are none."""
        lost: Array | None = None
        for name in names:
            found = self.unknown.get(name)
            if found is not None:
                lost = found if lost is None else lost | found
        if lost is None:
            return None
        if mask is not None:
            lost = lost & mask
        return lost if lost.any() else None


Read = Callable[[Lanes], Array]


def neighbour(name: str, by: int = 1) -> str:
    """Returns the register behind another: R13 behind R12."""
    if name in ZERO:
        return name
    stem = name.rstrip("0123456789")
    return f"{stem}{int(name[len(stem) :]) + by}"


def pair(lanes: Lanes, name: str) -> Array:
    """Returns a register and the one behind it as one number of 64 bits."""
    return lanes.register(name).astype(np.uint64) | lanes.register(neighbour(name)).astype(np.uint64) << np.uint64(32)
