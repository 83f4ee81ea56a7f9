"""FlashAttention-2's and 3's forward: a row block at a time, Q once, the column blocks that it visits, O at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from cupyflash.problem import Problem
from cupyflash.schedules import VarlenSchedule
from cupyflash.schedules.balance import taken
from cupyflash.schedules.base import FLOAT32, TileSchedule
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3 import LENGTH, Fa3Schedule
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, unit_of
from cupyflash.sim.l2.parts import Bounds, Part, key_count, parts_of, row_count
from cupyflash.sim.l2.queue import Queue
from cupyflash.sim.l2.reads import At, Given, Known, Reads
from cupyflash.sim.l2.tiles import states_found

Order = Literal["rows", "batch", "heads"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""Which thread blocks are neighbours in a grid: "rows": row blocks of one head, then its heads, then the batch, as the kernels have
it. "batch": row blocks, then the batch, then heads, as in FlashAttention-2's own grid. "heads": the same row block of all heads."""

# Within a turn
FIRST, OF_K, OF_SCORES, OF_V, LAST = range(5)


@dataclass(frozen=True)
class Works:
    """Row blocks in the order in which a grid takes them up: each with its batch or sequence, its first query head, and its number
    i, -1 where a sequence has one too few."""

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
        """As they are taken."""
        item, head = schedule.order()
        batch, i = np.divmod(item, schedule.row_blocks)
        return cls(batch, head * schedule.pack, i)

    @classmethod
    def of_packed(cls, schedule: TileSchedule, parts: list[Part], bounds: Bounds) -> Works:
        """A head's sequences one behind the other, of each the last row block first; fa3's as they are taken."""
        if isinstance(schedule, Fa3Schedule):
            block, head = schedule.order()
        else:
            head, block = np.divmod(np.arange(schedule.problem.heads * bounds.blocks), max(1, bounds.blocks))
        sequence, i = (each[block] for each in bounds.found())
        last = np.array([part.schedule.row_blocks - 1 for part in parts])[sequence]
        return cls(sequence, head, np.where(i > last, -1, i) if isinstance(schedule, Fa3Schedule) else np.maximum(last - i, -1))


@dataclass(frozen=True)
class Tensors:
    """What row blocks read first, a column block at a time (of K, or of K and V), and write in the end; what else they read."""

    enter: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    leave: tuple[Tensor, ...]
    reads: Reads
    known: Known
    lengths: Tensor | None = None
    sinks: Tensor | None = None
    bounds: Bounds | None = None
    closing: tuple[Tensor, ...] = ()
    """Read in the end, of each row"""


class RowBlocks(Launch):
    """A kernel of which each thread block is a row block: of FlashAttention-2's forward, and of dQ by itself."""

    pack = 1
    """Query heads whose rows share a row block"""
    looks = 1
    """How often a row block looks for what it has to do: how many keys its batch has, which sequence it is of"""

    def __init__(self, schedule: TileSchedule, slots: int, works: Works, parts: list[Part], tensors: Tensors) -> None:
        self.schedule, self.slots, self.works, self.parts, self.tensors = schedule, slots, works, parts, tensors
        visits = {}
        for part in parts:
            for head in range(0, schedule.problem.heads, self.pack) if part.kept is not None else [0]:
                visits[part.number, head] = np.append(part.visited(head).count(0, part.schedule.col_blocks), 0)  # of i = -1 none
        places = zip(works.batch.tolist(), works.head.tolist(), works.i.tolist(), strict=True)
        several = {part.number for part in parts if part.kept is not None}
        counted = (visits[batch, head if batch in several else 0][i] for batch, head, i in places)
        self.visits = np.fromiter(counted, np.int64, len(works.i))
        self.work_turns = np.maximum(self.visits, 1)
        self.turns = self.blocks_turns()
        self.grid = len(self.turns)
        self.unit = unit_of(self._sizes())
        self.heft = 1 + tensors.reads.heft(schedule.block_rows, schedule.block_cols)

    def blocks_turns(self) -> np.ndarray:
        """Of each thread block."""
        turns: np.ndarray = self.work_turns
        return turns

    def _sizes(self) -> Iterator[int]:
        """What all requests are made of, in bytes."""
        s, tensors = self.schedule, self.tensors
        rows = {n for part in self.parts for n in (part.query(0), part.query(1), part.problem.seqlen_q)}
        keys = {n for part in self.parts for n in (part.key(0), part.key(1), part.keys, self.tail(part))}
        for tensor in (*tensors.enter, *tensors.closing, *tensors.leave):
            yield from (tensor.row * n for n in {s.block_rows, *rows, *map(self.copied, self.parts)})
        for tensor in tensors.keys:
            yield from (tensor.row * n for n in {s.block_cols, *keys})
        yield from (tensor.row for tensor in (tensors.lengths, tensors.sinks) if tensor)
        yield from (tensors.reads.unit, tensors.known.unit, tensors.bounds.own.row if tensors.bounds else 0)

    def tail(self, part: Part) -> int:
        """Columns of the last column block that are copied."""
        tail = -(-part.keys // part.schedule.block_cols) - 1
        one = part.schedule
        if not part.keys:
            return 0
        return one.tail_cols(tail, part.keys) if isinstance(one, Fa2Schedule) else part.keys - tail * one.block_cols

    def copied(self, part: Part) -> int:
        """Rows of the last row block that are copied."""
        one = part.schedule
        rows = part.problem.seqlen_q - (one.row_blocks - 1) * one.block_rows
        return one.copied_rows(rows) if isinstance(one, Fa2Schedule) else rows

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
        s, tensors = self.schedule, self.tensors
        batch, head, i = (int(each[work]) for each in (self.works.batch, self.works.head, self.works.i))
        part, visits, last = self.parts[batch], int(self.visits[work]), int(self.work_turns[work]) - 1
        row0 = i * s.block_rows
        rows = min(s.block_rows, part.problem.seqlen_q - row0)
        query = part.query(head + np.arange(self.pack)) + row0  # the first row of each head in the tile
        if lo == 0:
            if tensors.bounds:
                yield from tensors.bounds.search(FIRST, batch, self.looks if i >= 0 else 1)
            if i < 0:
                return
            yield from self._first(part, head, i, rows if visits else 0)
            copied = self.copied(part) if i == part.schedule.row_blocks - 1 else rows
            for tensor in tensors.enter if visits else ():
                yield tensor.of(0, FIRST, query, copied)
        turn = np.arange(lo, min(hi, visits))
        if len(turn):
            yield from self._visits(part, head, (row0, rows), turn)
        if hi == last + 1:
            if tensors.sinks:
                yield tensors.sinks.of(last, LAST, head + np.arange(self.pack), 1, times=rows)
            for tensor in tensors.closing:
                yield tensor.of(last, LAST, query, rows)
            for tensor in tensors.leave:
                yield tensor.of(last, LAST, query, rows, write=True)

    def _first(self, part: Part, head: int, i: int, rows: int) -> Iterator[Requests]:
        """What is read to know what to do, and for `rows` rows."""
        tensors, visited = self.tensors, part.visited(head)
        if tensors.lengths:
            yield tensors.lengths.of(0, FIRST, part.number, 1, times=self.looks)
        yield from tensors.known.of(part, head, FIRST, i, np.arange(visited.first[i], visited.end[i]))
        for each in range(head, head + self.pack):
            yield from tensors.reads.of_head(At.of(part, each), 0, FIRST, max(1, self.looks - 1))  # the producer warp has no scores
        yield from tensors.reads.of_rows(At.of(part, head), FIRST, 0, i * self.schedule.block_rows, rows)

    def _visits(self, part: Part, head: int, rows: tuple[int, int], turn: np.ndarray) -> Iterator[Requests]:
        """Of some turns of a row block, from the last column block on."""
        s, tensors, visited, i = self.schedule, self.tensors, part.visited(head), rows[0] // self.schedule.block_rows
        end = int(visited.end[i])
        j = end - 1 - turn if visited.kept is None else np.flatnonzero(visited.kept[i])[::-1][turn]
        asked = np.ones(len(j), bool) if visited.mixed is None else visited.mixed[i, j]
        at_tail = j == -(-part.keys // s.block_cols) - 1
        col0, there = j * s.block_cols, np.minimum(s.block_cols, part.keys - j * s.block_cols)
        key = part.key(part.kv_head(head)) + col0
        for move, tensor in zip((OF_K, OF_V), tensors.keys, strict=False):
            yield tensor.of(turn, move, key, np.where(at_tail, self.tail(part), s.block_cols))
        yield from tensors.reads.of_keys(At.of(part, head), OF_SCORES, turn, col0, there, asked)
        for each in range(head, head + self.pack):
            every = tuple(np.full(len(turn), n) for n in rows)
            yield from tensors.reads.of_tiles(part, each, OF_SCORES, turn, (every[0], every[1]), (col0, there), asked)


class Persistent(RowBlocks):
    """FlashAttention-3's forward: as many thread blocks as there are multiprocessors, each with one row block after the other."""

    schedule: Fa3Schedule

    def __init__(self, schedule: Fa3Schedule, works: Works, parts: list[Part], tensors: Tensors, memory: Memory) -> None:
        self.pack, self.looks = schedule.pack, schedule.warps
        self.queue = (memory.words("queue", schedule.works), memory.words("taken", 1)) if schedule.queued else None
        super().__init__(schedule, schedule.device.sm_count, works, parts, tensors)

    def blocks_turns(self) -> np.ndarray:
        """Who is free first takes the next; at the end each asks once more, as far as there are numbers."""
        s = self.schedule
        whose, _ = taken(self.work_turns[: s.blocks_there] if s.queued else np.ones(s.asked_for), s.grid)
        whose = np.append(whose, np.arange(s.asked_for - len(whose)))
        self._of_block = np.split(np.argsort(whose, kind="stable"), np.cumsum(np.bincount(whose, minlength=s.grid))[:-1])
        return np.array([self.work_turns[works].sum() for works in self._of_block])

    def of_block(self, block: int) -> list[int]:
        works: list[int] = self._of_block[block].tolist()
        return works

    def _of_work(self, work: int, lo: int, hi: int) -> Iterator[Requests]:
        yield from super()._of_work(work, lo, hi)
        if self.queue:
            queue, count = self.queue
            last = int(self.work_turns[work])
            if lo == 0:
                yield queue.of(0, FIRST, work, 1)
            if hi == last and work < self.schedule.blocks_there:
                for write in (False, True):
                    yield count.of(last - 1, LAST, 0, 1, write=write)


def forward(schedule: Fa2Schedule, order: Order, memory: Memory, given: Given) -> list[Launch]:
    """The kernel of FlashAttention-2's or 3's forward, behind what finds the states of a mask's tiles."""
    p, parts, queries, keys = schedule.problem, parts_of(schedule), row_count(schedule), key_count(schedule)
    row, value_row = p.head_dim * p.itemsize, p.head_dim_v * p.itemsize
    Q, K, V = memory.rows("Q", queries, row), memory.rows("K", keys, row), memory.rows("V", keys, value_row)
    leave = [memory.rows("O", queries, value_row)]
    if schedule.lse:
        leave.append(memory.rows("L", queries, FLOAT32))
    sinks = memory.rows("sinks", p.heads, FLOAT32) if p.options.sinks else None
    reads, known = Reads(schedule, memory, given, by_tiles=schedule.by_tiles), Known(schedule, memory)
    tensors = Tensors((Q,), (K, V), tuple(leave), reads, known, lengths(p, memory), sinks)
    if isinstance(schedule, VarlenSchedule):
        bounds = Bounds.of(schedule.packed, "q", schedule.block_rows, parts, memory)
        tensors, works = replace(tensors, bounds=bounds), Works.of_packed(schedule, parts, bounds)
    elif isinstance(schedule, Fa3Schedule):
        works = Works.of_fa3(schedule)
    else:
        works = Works.of_rows(schedule, order)
    made = list(states_found(schedule, parts, memory, given))
    if isinstance(schedule, Fa3Schedule):
        if schedule.queued:
            made.append(Queue(schedule, memory, tensors.lengths, tensors.bounds))
        return [*made, Persistent(schedule, works, parts, tensors, memory)]
    slots = schedule.device.sm_count * schedule.candidate.config.blocks  # what the planner lets share a multiprocessor
    return [*made, RowBlocks(schedule, slots, works, parts, tensors)]


def lengths(problem: Problem, memory: Memory) -> Tensor | None:
    """The keys that each batch has, where that is told."""
    return memory.rows("key_lengths", problem.batch, LENGTH) if problem.options.padded else None
