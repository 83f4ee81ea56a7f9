"""m and log(l) of each row, before a backward: the forward's S once more, or a look at L."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupyflash.schedules import BackwardSchedule, VarlenBackwardSchedule
from cupyflash.schedules.base import FLOAT32
from cupyflash.schedules.row_bases import RowBasesSchedule, given_floats, has_bases
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, resident
from cupyflash.sim.l2.parts import Bounds, Part, key_count, parts_of, row_count
from cupyflash.sim.l2.reads import Given, Known, Reads
from cupyflash.sim.l2.rows import RowBlocks, Tensors, Works, lengths
from cupyflash.sim.l2.streamed import FEW_REGISTERS, Passed, Streamed
from cupyflash.sim.l2.tiles import states_found


class Searched(Launch):
    """Of packed sequences, the kernel that looks for rows with a large L, and finds none: a row block a thread block."""

    def __init__(self, slots: int, works: Works, parts: list[Part], bounds: Bounds, L: Tensor) -> None:
        self.slots, self.works, self.parts, self.bounds, self.L = slots, works, parts, bounds, L
        self.grid, self.turns, self.unit = len(works.i), np.ones(len(works.i), np.int64), FLOAT32

    def requests(self, block: int, first: int, end: int) -> Requests:
        batch, head, i = (int(each[block]) for each in (self.works.batch, self.works.head, self.works.i))
        part, row0 = self.parts[batch], i * self.bounds.size
        rows = min(self.bounds.size, part.problem.seqlen_q - row0) if i >= 0 else 0
        return Requests.together([*self.bounds.search(0, batch), self.L.of(0, 1, part.query(head) + row0, rows)])


def given_rows(schedule: BackwardSchedule, memory: Memory) -> Tensor:
    """What the weights of each row are relative to: m and log(l), or L."""
    bases = has_bases(schedule.problem)
    return memory.rows("bases" if bases else "L", row_count(schedule), given_floats(schedule.problem) * FLOAT32)


def row_bases(before: BackwardSchedule, schedule: RowBasesSchedule, memory: Memory, given: Given) -> Iterator[Launch]:
    """The launches of what comes `before` a backward of this schedule; in half types no row's L is large."""
    p, rows = before.problem, row_count(before)
    kernel = schedule.kernels()[-1]
    slots = resident(before.device, kernel.threads, kernel.shared_bytes, FEW_REGISTERS)
    L, bounds, parts = memory.rows("L", rows, FLOAT32), None, parts_of(schedule)
    if isinstance(before, VarlenBackwardSchedule):
        parts = parts_of(before, lambda one: one.bases)
        bounds = Bounds.of(before.packed, "q", schedule.block_rows, parts, memory)
    works = Works.of_rows(schedule) if bounds is None else Works.of_packed(schedule, parts, bounds)
    if has_bases(p):
        row = p.head_dim * p.itemsize
        tensors = Tensors(
            (memory.rows("Q", rows, row),),
            (memory.rows("K", key_count(before), row),),
            (given_rows(before, memory),),
            Reads(schedule, memory, given, by_tiles=False),
            Known(schedule, memory),
            lengths(p, memory),
            memory.rows("sinks", p.heads, FLOAT32) if p.options.sinks else None,
            bounds,
            closing=(L,),
        )
        yield from states_found(schedule, parts, memory, given)
        slots = resident(before.device, kernel.threads, kernel.shared_bytes)
        yield RowBlocks(schedule, slots, works, parts, tensors)
    elif bounds is not None:
        yield Searched(slots, works, parts, bounds, L)
    else:
        heads, length = p.head_count, p.seqlen_q
        yield Streamed(before.device, kernel, heads, length, schedule.block_rows, (Passed(L),))
