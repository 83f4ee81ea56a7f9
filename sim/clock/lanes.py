"""The state of a thread block that runs machine code: registers and predicates of all its threads, a lane a thread.

A register's lane is a known whole number of 32 bits, or unknown: floating-point numbers are, since they decide neither an address
nor, but for votes on them, which way a warp goes. Whatever an unknown number goes into is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Mask = Array | None
"""Lanes for which an instruction counts; None: all."""

ALWAYS = ("PT", "UPT")
ZERO = ("RZ", "URZ", "SRZ")


class Lanes:
    """Registers by name ("R12", "UR4"), predicates by name ("P0", "UP1"), of so many threads."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.zero = np.zeros(threads, np.uint32)
        self.registers: dict[str, Array] = {}
        self.predicates: dict[str, Array] = {name: np.ones(threads, np.bool_) for name in ALWAYS}
        self.unknown: dict[str, Array] = {}  # by name, where it has unknown lanes: which

    def register(self, name: str) -> Array:
        """Returns the lanes of a register; one that nobody wrote holds zeros."""
        if name in ZERO:
            return self.zero
        found = self.registers.get(name)
        if found is None:
            found = self.registers[name] = np.zeros(self.threads, np.uint32)
        return found

    def predicate(self, name: str) -> Array:
        found = self.predicates.get(name)
        if found is None:
            found = self.predicates[name] = np.zeros(self.threads, np.bool_)
        return found

    def write(self, name: str, value: Array, mask: Mask) -> None:
        """Writes known lanes of a register or predicate."""
        if name in ZERO or name in ALWAYS:
            return
        target = self.predicate(name) if "P" in name else self.register(name)
        if mask is None:
            np.copyto(target, value, casting="unsafe")
            self.unknown.pop(name, None)
            return
        np.copyto(target, value, casting="unsafe", where=mask)
        if name in self.unknown:
            self.unknown[name] = self.unknown[name] & ~mask

    def forget(self, name: str, mask: Mask) -> None:
        """Makes lanes of a register or predicate unknown."""
        if name in ZERO or name in ALWAYS:
            return
        lost = np.ones(self.threads, np.bool_) if mask is None else mask
        self.unknown[name] = self.unknown[name] | lost if name in self.unknown else lost

    def lacking(self, names: Iterable[str], mask: Mask) -> Array | None:
        """Returns the lanes, of those that run, that have one of these registers unknown; None if there are none."""
        found = [self.unknown[name] for name in names if name in self.unknown]
        if not found:
            return None
        lost = np.logical_or.reduce(found)
        if mask is not None:
            lost = lost & mask
        return lost if lost.any() else None


Read = Callable[[Lanes], Array]


def neighbour(name: str, by: int = 1) -> str:
    """Returns the register behind another: R13 behind R12."""
    if name in ZERO:
        return name
    stem = name.rstrip("0123456789")
    return f"{stem}{int(name[len(stem):]) + by}"


def pair(lanes: Lanes, name: str) -> Array:
    """Returns a register and the one behind it as one number of 64 bits."""
    return lanes.register(name).astype(np.uint64) | lanes.register(neighbour(name)).astype(np.uint64) << np.uint64(32)


def write_pair(lanes: Lanes, name: str, value: Array, mask: Mask) -> None:
    wide = np.asarray(value).astype(np.uint64)
    lanes.write(name, wide & np.uint64(0xFFFFFFFF), mask)
    lanes.write(neighbour(name), wide >> np.uint64(32), mask)
