"""The kernel that makes the queue of FlashAttention-3's row blocks: a thread an item, which looks at itself, then at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupyflash.schedules.fa3 import LENGTH, Fa3Schedule
from cupyflash.schedules.fa3_queue import THREADS
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, resident
from cupyflash.sim.l2.parts import Bounds
from cupyflash.sim.l2.streamed import FEW_REGISTERS

# Within a turn
LOOK, LAST = range(2)


class Queue(Launch):
    """A turn is a tile of as many items as there are threads; the first has the thread block's own besides."""

    def __init__(self, schedule: Fa3Schedule, memory: Memory, lengths: Tensor | None, bounds: Bounds | None) -> None:
        self.schedule, self.lengths, self.bounds = schedule, lengths, bounds
        self.grid, self.slots = schedule.queue_kernel.grid, resident(schedule.device, THREADS, 0, FEW_REGISTERS)
        self.turns = np.full(self.grid, self.grid)
        self.queue, self.taken = memory.words("queue", schedule.works), memory.words("taken", 1)
        self.unit = LENGTH if lengths or bounds else 0
        item, _ = schedule.order()
        self.places = np.argsort(item, kind="stable").reshape(-1, schedule.items.heads)  # of each item, all heads'

    def requests(self, block: int, first: int, end: int) -> Requests:
        parts = [each for turn in range(first, end) for each in self._look(turn, turn)]
        own = self._of_tile(block)
        if first == 0:
            parts += self._look(0, block)
            if block == 0:
                parts.append(self.taken.of(0, LAST, 0, 1, write=True))
        if end == self.grid:
            at = self.queue.first + self.places[own] * LENGTH
            parts.append(Requests.of_elements(np.full(at.shape, end - 1), LAST, at, np.array(1), LENGTH, write=True))
        return Requests.together(parts)

    def _of_tile(self, tile: int) -> np.ndarray:
        return np.arange(tile * THREADS, min((tile + 1) * THREADS, len(self.places)))

    def _look(self, turn: int, tile: int) -> Iterator[Requests]:
        """At the items of a tile."""
        items = self._of_tile(tile)
        if self.lengths:
            at = self.lengths.first + items // self.schedule.row_blocks * LENGTH
            yield Requests.of_elements(np.full(len(at), turn), LOOK, at, np.array(1), LENGTH)
        if self.bounds:
            own, other = self.bounds.halvings(items)
            for tensor, indices in ((self.bounds.own, own), (self.bounds.other, other)):
                at = tensor.first + indices * LENGTH
                yield Requests.of_elements(np.full(len(at), turn), LOOK, at, np.array(1), LENGTH)
