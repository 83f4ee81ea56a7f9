"""The kernel that makes the queue of FlashAttention-3's row blocks: a thread an item, which looks at itself, then at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupyflash.basics import Array
from cupyflash.schedules.fa3 import LENGTH, Fa3Schedule
from cupyflash.schedules.fa3_queue import THREADS
from cupyflash.sim.l2.bounds import Bounds
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import FEW_REGISTERS, DeviceMemory, PlacedTensor, PlayedLaunch, resident


class PlayedQueue(PlayedLaunch):
    """A turn is a tile of as many items as there are threads; the first has the thread block's own besides. All run at a time."""

    def __init__(self, schedule: Fa3Schedule, memory: DeviceMemory) -> None:
        self.schedule, p = schedule, schedule.problem
        self.grid, self.slots = schedule.queue_kernel.grid, resident(schedule.device, THREADS, 0, FEW_REGISTERS)
        self.turns = np.full(self.grid, self.grid)
        self.queue, self.taken = memory.words("queue", schedule.works), memory.words("taken", 1)
        self.lengths = memory.rows("key_lengths", p.batch, LENGTH) if p.options.padded else None
        self.bounds = None
        if schedule.together is not None:
            self.bounds = Bounds.of(schedule.together, "q", schedule.block_rows, schedule.parts, memory)
        self.unit = LENGTH if self.lengths or self.bounds else 0
        item, _ = schedule.order()
        self.places = np.argsort(item, kind="stable").reshape(-1, schedule.items.heads)  # of each item, all heads'

    def played(self) -> Iterator[tuple[float, Requests]]:
        items = np.arange(len(self.places))
        looks = [self._look(turn, items[items // THREADS == turn], self.grid) for turn in range(self.grid)]
        looks.append(self._look(0, items, 1))
        at, turn = self.queue.first + self.places * LENGTH, np.full((len(items), 1), self.grid - 1)
        made = self.taken.of(0, 0, 1), Requests.of_elements(turn, at, np.array(1), LENGTH, whose=items // THREADS)
        yield 1.0, Requests.together([*looks, *(each.of_move(1, write=True) for each in made)])

    def _look(self, turn: int, items: Array, times: int) -> Requests:
        """At some items, by so many thread blocks."""
        asked: list[tuple[PlacedTensor, Array]] = []
        if self.lengths:
            asked.append((self.lengths, items // self.schedule.row_blocks))
        if self.bounds:
            asked += zip((self.bounds.own, self.bounds.other), self.bounds.halvings(items), strict=True)
        places = [(tensor.first + at * LENGTH)[None] for tensor, at in asked]
        return Requests.together([Requests.of_elements(np.array(turn), at, np.array(times), LENGTH) for at in places])
