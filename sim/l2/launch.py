"""Launches on a device: which thread blocks run when, in lockstep turns, and what all of them ask for in a turn."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from cupyflash.sim.l2.cache import LINE, ROTATED, Requests

# Requests of thread blocks that are looked at together, about
TOGETHER = 1 << 18


@dataclass
class Memory:
    """HBM: tensors one behind the other, each at its own address."""

    bases: dict[str, int] = field(default_factory=dict)
    _end: int = 0

    def place(self, name: str, nbytes: int) -> int:
        """Where a tensor of so many bytes begins; the same for a name that was asked for before."""
        if name not in self.bases:
            self.bases[name] = self._end
            self._end += -(-max(nbytes, 1) // (ROTATED * LINE)) * ROTATED * LINE
        return self.bases[name]


class Launch(ABC):
    """One kernel's grid. `slots` thread blocks run at a time on the device; each takes `turns`, in launch order.

    `unit` divides, in bytes, where each request begins and its size.
    """

    slots: int
    turns: np.ndarray
    unit: int

    @abstractmethod
    def requests(self, block: int, first: int, end: int) -> Requests:
        """What a thread block asks for in its turns from `first` to `end`, which are numbered from its own start."""

    @property
    def waves(self) -> float:
        """How often its thread blocks fill the device."""
        return len(self.turns) / self.slots

    def starts(self) -> np.ndarray:
        """The turn in which each thread block starts: the next in launch order takes the place of one that ends."""
        found, free = np.zeros(len(self.turns), np.int64), [0] * self.slots
        for block, turns in enumerate(self.turns.tolist()):
            found[block] = free[0]
            heapq.heapreplace(free, free[0] + turns)
        return found

    def played(self) -> Iterator[Requests]:
        """The requests of all thread blocks, some turns at a time."""
        starts = self.starts()
        ends, step = starts + self.turns, max(1, TOGETHER // self.slots)
        launched = 0
        running: list[int] = []
        for now in range(0, int(ends.max(initial=0)), step):
            upto = int(np.searchsorted(starts, now + step))
            running = [*(block for block in running if ends[block] > now), *range(launched, upto)]
            launched = upto
            parts = []
            for block in running:
                start = int(starts[block])
                part = self.requests(block, max(0, now - start), min(now + step, int(ends[block])) - start)
                part.turn[:] += start
                parts.append(part)
            yield Requests.together(parts)


def unit_of(sizes: Iterable[int]) -> int:
    """What divides all of some sizes in bytes."""
    return math.gcd(*sizes)
