"""FlashAttention-2's and 3's forward: a row block at a time, Q once, the column blocks that it sees, O at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from cupyflash.schedules.base import FLOAT32, Visited
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3 import LENGTH, Fa3Schedule
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, unit_of

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
    def of_fa2(cls, schedule: Fa2Schedule, order: Order) -> Works:
        """The last row block of a head first: under a causal mask it takes longest."""
        p, Tr = schedule.problem, schedule.row_blocks
        n = np.arange(schedule.works)
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


class RowBlocks(Launch):
    """The one kernel of FlashAttention-2's or 3's forward."""

    def __init__(self, schedule: Fa2Schedule, order: Order, memory: Memory) -> None:
        self.schedule, p = schedule, schedule.problem
        self.slots = slots(schedule)
        fa3 = isinstance(schedule, Fa3Schedule)
        self.works = Works.of_fa3(schedule) if isinstance(schedule, Fa3Schedule) else Works.of_fa2(schedule, order)
        self.length_reads = (schedule.warps if isinstance(schedule, Fa3Schedule) else 1) if p.options.padded else 0
        self.keys = np.array(p.options.key_lengths or [p.seqlen_k] * p.batch)
        visited = [Visited.of(schedule, int(keys), None) for keys in self.keys]
        first, end = (np.stack(each) for each in zip(*((v.first, v.end) for v in visited), strict=True))
        at = self.works.batch, self.works.i
        self.begin, self.visits = first[at], (end - first)[at]
        self.work_turns = np.maximum(self.visits, 1)
        self.grid = schedule.grid
        self.turns = self.work_turns if not fa3 else np.array([self.work_turns[self.of_block(b)].sum() for b in range(self.grid)])
        self._place(memory)

    def _place(self, memory: Memory) -> None:
        """The tensors, contiguous, and what divides all requests."""
        s, p = self.schedule, self.schedule.problem
        self.row, self.value_row = p.head_dim * p.itemsize, p.head_dim_v * p.itemsize
        queries, keys = p.head_count * p.seqlen_q, p.batch * p.kv_heads * p.seqlen_k
        self.at = {
            "Q": memory.place("Q", queries * self.row),
            "K": memory.place("K", keys * self.row),
            "V": memory.place("V", keys * self.value_row),
            "O": memory.place("O", queries * self.value_row),
        }
        by_keys = {s.block_cols, p.seqlen_k, *(self._tail(int(keys)) for keys in self.keys)}
        sizes = [size * rows for size in (self.row, self.value_row) for rows in (s.block_rows, p.seqlen_q, *by_keys)]
        for name, wanted, nbytes in (
            ("L", s.lse, FLOAT32 * queries),
            ("key_lengths", p.options.padded, LENGTH * p.batch),
            ("sinks", p.options.sinks, FLOAT32 * p.heads),
        ):
            if wanted:
                self.at[name] = memory.place(name, nbytes)
                sizes += [FLOAT32 * s.block_rows, FLOAT32 * p.seqlen_q] if name == "L" else [FLOAT32]
        self.unit = unit_of(sizes)

    def _tail(self, keys: int) -> int:
        """Columns of the last column block of so many keys."""
        s = self.schedule
        last = -(-keys // s.block_cols) - 1
        return s._tail_cols(last, keys) if keys else 0

    def of_block(self, block: int) -> np.ndarray:
        """The works of a thread block."""
        if not isinstance(self.schedule, Fa3Schedule):
            return np.array([block])
        rounds = np.arange(-(-self.schedule.works // self.grid))
        taken = rounds * self.grid + np.where(rounds % 2, self.grid - 1 - block, block)
        found: np.ndarray = taken[taken < self.schedule.works]
        return found

    def requests(self, block: int, first: int, end: int) -> Requests:
        parts, start = [], 0
        for work in self.of_block(block).tolist():
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
        s, p = self.schedule, self.schedule.problem
        batch, head, i = (int(each[work]) for each in (self.works.batch, self.works.head, self.works.i))
        keys, begin, visits = int(self.keys[batch]), int(self.begin[work]), int(self.visits[work])
        row0 = i * s.block_rows
        rows = min(s.block_rows, p.seqlen_q - row0)
        query = (batch * p.heads + head + np.arange(s.pack)) * p.seqlen_q + row0  # the first row of each head in the tile
        if lo == 0:
            if self.length_reads:
                yield Requests.of(0, FIRST, self.at["key_lengths"] + LENGTH * batch, LENGTH, times=self.length_reads)
            if visits:
                yield Requests.of(0, FIRST, self.at["Q"] + query * self.row, s._copied_rows(rows) * self.row)
        turn = np.arange(lo, min(hi, visits))
        j, tail = begin + visits - 1 - turn, -(-keys // s.block_cols) - 1
        cols = np.where(j == tail, self._tail(keys), s.block_cols)
        key = (batch * p.kv_heads + head // (p.heads // p.kv_heads)) * p.seqlen_k + j * s.block_cols
        yield Requests.of(turn, OF_K, self.at["K"] + key * self.row, cols * self.row)
        yield Requests.of(turn, OF_V, self.at["V"] + key * self.value_row, cols * self.value_row)
        last = max(visits, 1) - 1
        if hi == last + 1:
            if p.options.sinks:
                yield Requests.of(last, LAST, self.at["sinks"] + FLOAT32 * (head + np.arange(s.pack)), FLOAT32, times=rows)
            yield Requests.of(last, LAST, self.at["O"] + query * self.value_row, rows * self.value_row, write=True)
            if s.lse:
                yield Requests.of(last, LAST, self.at["L"] + FLOAT32 * query, FLOAT32 * rows, write=True)


def slots(schedule: Fa2Schedule) -> int:
    """Thread blocks that run at a time: what the planner lets share a multiprocessor, on all of them."""
    device = schedule.device
    return device.sm_count * (1 if isinstance(schedule, Fa3Schedule) else schedule.candidate.config.blocks)
