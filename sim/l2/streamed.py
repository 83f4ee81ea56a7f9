"""Kernels that pass over rows once, each row by itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash.device import Device
from cupyflash.schedules.base import Kernel
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Tensor, resident, unit_of

# What kernels that only pass over rows are taken to need a thread
FEW_REGISTERS = 32


@dataclass(frozen=True)
class Passed:
    """A tensor that a kernel passes over, so many `times`; each head has `length` rows of it, or as many as there are, and each of
    its rows is that of `shared` rows."""

    tensor: Tensor
    write: bool = False
    times: int = 1
    length: int | None = None
    shared: int = 1


class Streamed(Launch):
    """A kernel that passes over the rows of some heads, so many a thread block. A turn is what those of a multiprocessor have at a
    time, which are one here: their requests are too small to follow one by one."""

    def __init__(self, device: Device, kernel: Kernel, heads: int, length: int, rows: int, passed: tuple[Passed, ...]) -> None:
        self.length, self.passed, self.grid = length, passed, kernel.grid
        self.slots = device.sm_count
        self._resident = resident(device, kernel.threads, kernel.shared_bytes, FEW_REGISTERS)
        self.rows = rows * (self._resident // device.sm_count)
        self.blocks = -(-length // self.rows)  # of a head
        self.turns = np.ones(heads * self.blocks, np.int64)
        strides = {length, *(each.length for each in passed if each.length)}
        sizes = [each.tensor.row * size for each in passed for size in (self.rows, *strides)]
        self.unit = unit_of(sizes + [each.tensor.row for each in passed if each.shared > 1])

    @property
    def resident(self) -> int:
        return self._resident

    def requests(self, block: int, first: int, end: int) -> Requests:
        head, place = divmod(block, self.blocks)
        row0 = place * self.rows
        rows = min(self.rows, self.length - row0)
        parts, moves = [], [each for each in self.passed for _ in range(each.times)]
        for move, each in enumerate(moves):
            row = head * (each.length or self.length) + row0
            begin, end = row // each.shared, (row + rows - 1) // each.shared + 1
            parts.append(each.tensor.of(0, move, begin, end - begin, write=each.write, asked=rows))
        return Requests.together(parts)
