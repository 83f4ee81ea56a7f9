"""FlashAttention-2's and 3's forward: a row block at a time, Q once, the column blocks that it sees, O at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from cupyflash.problem import Problem
from cupyflash.schedules.base import FLOAT32, TileSchedule, Visited
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3 import LENGTH, Fa3Schedule
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, unit_of

Order = Literal["rows", "batch", "heads"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""Which thread blocks are neighbours in a grid: "rows": row blocks of one head, then its heads, then the batch, as the kernels have
it. "batch": row blocks, then the batch, then heads, as in FlashAttention-2's own grid. "heads": the same row block of all heads."""

# Within a turn
FIRST, OF_K, OF_V, LAST = range(4)


@dataclass(frozen=True)
class Works:
    """Row blocks in the order in which a grid takes them up: each with its batch, its first query head, and its number i."""

    batch: np.ndarray
    head: np.ndarray
    i: np.ndarray

    @classmethod
    def of_rows(cls, schedule: TileSchedule, order: Order = "rows") -> Works:
        """The last row block of a head first: under a causal mask it takes longest."""
        p, Tr = schedule.problem, schedule.row_blocks
        n = np.arange(p.head_count * Tr)
        if order == "heads":
            block, pair = np.divmod(n, p.head_count)
        else:
            pair, block = np.divmod(n, Tr)
        head, batch = np.divmod(pair, p.batch) if order == "batch" else np.divmod(pair, p.heads)[::-1]
        return cls(batch, head, Tr - 1 - block)

    @classmethod
    def of_fa3(cls, schedule: Fa3Schedule) -> Works:
        """Heads by sections, whose row blocks come longest first (`Works` in fa3_forward.cu)."""
        Tr, pairs, n = schedule.row_blocks, schedule.problem.heads // schedule.pack, np.arange(schedule.works)
        section, rest = np.divmod(n, schedule.section * Tr)
        heads = np.minimum(schedule.section, schedule.repeats - section * schedule.section)
        pair = section * schedule.section + rest % heads
        return cls(pair // pairs, pair % pairs * schedule.pack, Tr - 1 - rest // heads)


@dataclass(frozen=True)
class Tensors:
    """What row blocks read first, a column block at a time, and write in the end; what else they read."""

    enter: tuple[Tensor, ...]
    keys: tuple[Tensor, Tensor]
    leave: tuple[Tensor, ...]
    lengths: Tensor | None = None
    sinks: Tensor | None = None


class RowBlocks(Launch):
    """A kernel of which each thread block is a row block: of FlashAttention-2's forward, and of dQ by itself."""

    pack = 1
    """Query heads whose rows share a row block"""
    length_reads = 1
    """How often a row block reads how many keys its batch has"""

    def __init__(self, schedule: TileSchedule, slots: int, works: Works, tensors: Tensors) -> None:
        self.schedule, self.slots, self.works, self.tensors = schedule, slots, works, tensors
        p = schedule.problem
        self.keys = np.array(p.options.key_lengths or [p.seqlen_k] * p.batch)
        visited = [Visited.of(schedule, int(keys), None) for keys in self.keys]
        first, end = (np.stack(each) for each in zip(*((v.first, v.end) for v in visited), strict=True))
        at = works.batch, works.i
        self.begin, self.visits = first[at], (end - first)[at]
        self.work_turns = np.maximum(self.visits, 1)
        self.turns = self.blocks_turns()
        self.grid = len(self.turns)
        self.unit = unit_of(self._sizes())

    def blocks_turns(self) -> np.ndarray:
        """Of each thread block."""
        turns: np.ndarray = self.work_turns
        return turns

    def _sizes(self) -> Iterator[int]:
        """What all requests are made of, in bytes."""
        s, p = self.schedule, self.schedule.problem
        for tensor in (*self.tensors.enter, *self.tensors.leave):
            yield from (tensor.row * s.block_rows, tensor.row * p.seqlen_q)
        for tensor in self.tensors.keys:
            yield from (tensor.row * rows for rows in (s.block_cols, p.seqlen_k, *(self.tail(int(keys)) for keys in self.keys)))
        yield from (tensor.row for tensor in (self.tensors.lengths, self.tensors.sinks) if tensor)

    def tail(self, keys: int) -> int:
        """Columns of the last column block of so many keys."""
        return keys - (-(-keys // self.schedule.block_cols) - 1) * self.schedule.block_cols if keys else 0

    def of_block(self, block: int) -> list[int]:
        """The works of a thread block."""
        return [block]

    def requests(self, block: int, first: int, end: int) -> Requests:
        parts, start = [], 0
        for work in self.of_block(block):
            turns = int(self.work_turns[work])
            lo, hi = max(first - start, 0), min(end - start, turns)
            if lo < hi:
                part = Requests.together(list(self._of_work(work, lo, hi)))
                part.turn[:] += start
                parts.append(part)
            start += turns
        return Requests.together(parts)

    def _of_work(self, work: int, lo: int, hi: int) -> Iterator[Requests]:
        """Of a row block's turns from lo to hi."""
        s, p, tensors = self.schedule, self.schedule.problem, self.tensors
        batch, head, i = (int(each[work]) for each in (self.works.batch, self.works.head, self.works.i))
        visits, last = int(self.visits[work]), int(self.work_turns[work]) - 1
        row0 = i * s.block_rows
        rows = min(s.block_rows, p.seqlen_q - row0)
        query = (batch * p.heads + head + np.arange(self.pack)) * p.seqlen_q + row0  # the first row of each head in the tile
        if lo == 0:
            if tensors.lengths:
                yield tensors.lengths.of(0, FIRST, batch, 1, times=self.length_reads)
            for tensor in tensors.enter if visits else ():
                yield tensor.of(0, FIRST, query, rows)
        turn, keys = np.arange(lo, min(hi, visits)), int(self.keys[batch])
        j = int(self.begin[work]) + visits - 1 - turn
        cols = np.where(j == -(-keys // s.block_cols) - 1, self.tail(keys), s.block_cols)
        key = (batch * p.kv_heads + head // (p.heads // p.kv_heads)) * p.seqlen_k + j * s.block_cols
        for move, tensor in zip((OF_K, OF_V), tensors.keys, strict=True):
            yield tensor.of(turn, move, key, cols)
        if hi == last + 1:
            if tensors.sinks:
                yield tensors.sinks.of(last, LAST, head + np.arange(self.pack), 1, times=rows)
            for tensor in tensors.leave:
                yield tensor.of(last, LAST, query, rows, write=True)


class Persistent(RowBlocks):
    """FlashAttention-3's forward: as many thread blocks as there are multiprocessors, each with one row block after the other."""

    schedule: Fa3Schedule

    def __init__(self, schedule: Fa3Schedule, tensors: Tensors) -> None:
        self.pack, self.length_reads = schedule.pack, schedule.warps
        super().__init__(schedule, schedule.device.sm_count, Works.of_fa3(schedule), tensors)

    def blocks_turns(self) -> np.ndarray:
        return np.array([self.work_turns[self.of_block(block)].sum() for block in range(self.schedule.grid)])

    def of_block(self, block: int) -> list[int]:
        """In turn from the front and from the back."""
        grid, rounds = self.schedule.grid, np.arange(-(-self.schedule.works // self.schedule.grid))
        taken = rounds * grid + np.where(rounds % 2, grid - 1 - block, block)
        found: list[int] = taken[taken < self.schedule.works].tolist()
        return found

    def tail(self, keys: int) -> int:
        """The block that the keys end in comes whole."""
        s = self.schedule
        return min(s.block_cols, s.room_k - (-(-keys // s.block_cols) - 1) * s.block_cols) if keys else 0


def forward(schedule: Fa2Schedule, order: Order, memory: Memory) -> list[Launch]:
    """The one kernel of FlashAttention-2's or 3's forward."""
    p = schedule.problem
    queries, keys = p.head_count * p.seqlen_q, p.batch * p.kv_heads * p.seqlen_k
    row, value_row = p.head_dim * p.itemsize, p.head_dim_v * p.itemsize
    Q, K, V = memory.rows("Q", queries, row), memory.rows("K", keys, row), memory.rows("V", keys, value_row)
    leave = [memory.rows("O", queries, value_row)]
    if schedule.lse:
        leave.append(memory.rows("L", queries, FLOAT32))
    sinks = memory.rows("sinks", p.heads, FLOAT32) if p.options.sinks else None
    tensors = Tensors((Q,), (K, V), tuple(leave), lengths(p, memory), sinks)
    if isinstance(schedule, Fa3Schedule):
        return [Persistent(schedule, tensors)]
    slots = schedule.device.sm_count * schedule.candidate.config.blocks  # what the planner lets share a multiprocessor
    return [RowBlocks(schedule, slots, Works.of_rows(schedule, order), tensors)]


def lengths(problem: Problem, memory: Memory) -> Tensor | None:
    """The keys that each batch has, where that is told."""
    return memory.rows("key_lengths", problem.batch, LENGTH) if problem.options.padded else None
