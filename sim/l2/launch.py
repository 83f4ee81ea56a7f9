"""Launches on a device: which thread blocks run in which of the lockstep turns, and the requests of a turn."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cupyflash.basics import Array
from cupyflash.device import Device
from cupyflash.multiprocessor import occupancy
from cupyflash.schedules.balance import taken
from cupyflash.sim.l2.cache import LINE, ROTATED, Many, Requests

# Requests of thread blocks that are looked at together, about
TOGETHER = 1 << 18
MOST_REGISTERS = 255
# What kernels that only pass over rows are taken to need a thread
FEW_REGISTERS = 32
WORD = 4


@dataclass(frozen=True)
class PlacedTensor:
    """Rows of so many bytes each, one behind the other from an address on."""

    first: int
    row: int

    def of(self, turn: Many, first: Many, rows: Many, *, times: Many = 1, asked: Many | None = None) -> Requests:
        """A request for `rows` rows from one on; `asked` is in rows."""
        of_lanes = None if asked is None else asked * self.row
        return Requests.of(turn, self.first + first * self.row, rows * self.row, times=times, asked=of_lanes)


@dataclass
class DeviceMemory:
    """HBM: tensors one behind the other, each at its own address."""

    bases: dict[str, int] = field(default_factory=dict)
    of_words: set[str] = field(default_factory=set)
    _end: int = 0

    def rows(self, name: str, rows: int, row: int) -> PlacedTensor:
        """A tensor of so many rows of `row` bytes; the same place for a name that was asked for before."""
        if name not in self.bases:
            self.bases[name] = self._end
            self._end += -(-max(rows * row, 1) // (ROTATED * LINE)) * ROTATED * LINE
        return PlacedTensor(self.bases[name], row)

    def words(self, name: str, count: int) -> PlacedTensor:
        """A tensor of words that are asked for one by one beside whole tiles."""
        self.of_words.add(name)
        return self.rows(name, count, WORD)


class LaunchedBlocks:
    """One kernel's `grid`. `slots` thread blocks run at a time on the device; each takes `turns`, in launch order.

    The blocks of a `cluster` start together.
    """

    grid: int
    slots: int
    turns: Array
    cluster = 1

    def starts(self) -> Array:
        """The turn in which each thread block starts: the next in launch order takes the place of one that ends."""
        clusters = self.turns.reshape(-1, self.cluster).max(axis=1)
        _, found = taken(clusters, max(1, self.slots // self.cluster))
        return np.repeat(found, self.cluster)

    @property
    def balance(self) -> float:
        """The turns of the busiest of the `slots` over their mean, idle ones counted; 1 if none has any."""
        mean = int(self.turns.sum()) / self.slots
        return int((self.starts() + self.turns).max()) / mean if mean else 1.0


class PlayedLaunch(LaunchedBlocks, ABC):
    """A kernel of a schedule, of which it is known what a thread block asks for in a turn.

    `unit` divides, in bytes, the begin and the size of each request, except for those of words. `heft`: the work of modelling a
    turn, over that of one with a few tiles.
    """

    heft = 1
    unit: int

    @property
    def resident(self) -> int:
        """Thread blocks of the kernel that run at a time; `slots` may be those of several kernels."""
        return self.slots

    @abstractmethod
    def played(self) -> Iterator[tuple[float, Requests]]:
        """The requests of all thread blocks, some turns at a time, and how much of the launch is then played, of 1."""


def resident(device: Device, threads: int, shared_bytes: int, registers: int = MOST_REGISTERS) -> int:
    """Thread blocks that a device holds at a time, of a kernel with `registers` registers a thread, by default as many as a thread
    can have."""
    return device.sm_count * max(1, occupancy(device, threads, registers, shared_bytes, estimate=True).blocks)


def unit_of(sizes: Iterable[int]) -> int:
    """The greatest common divisor of sizes in bytes."""
    return math.gcd(*sizes)
