"""Standard attention's forward, Algorithm 0: two tiled products and a softmax, with S and P in HBM."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupyflash.schedules.base import FLOAT32, Kernel
from cupyflash.schedules.standard import SOFTMAX_WARPS, StandardSchedule
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, resident, unit_of
from cupyflash.sim.l2.rows import lengths
from cupyflash.sim.l2.streamed import Passed, Streamed

# Within a turn
FIRST, LEFT, RIGHT, LAST = range(4)


class Products(Launch):
    """What standard attention's two products have in common."""

    def __init__(self, schedule: StandardSchedule, kernel: Kernel, memory: Memory) -> None:
        self.schedule, p = schedule, schedule.problem
        self.grid, self.slots = kernel.grid, resident(schedule.device, kernel.threads, kernel.shared_bytes)
        self.heft = max(1, schedule.block_rows // 2)  # rows of a tile of S are apart, and no two thread blocks ask for the same
        self.keys = p.options.key_lengths or (p.seqlen_k,) * p.batch
        queries, keys = p.head_count * p.seqlen_q, p.batch * p.kv_heads * p.seqlen_k
        self.Q, self.O = (memory.rows(name, queries, d * p.itemsize) for name, d in (("Q", p.head_dim), ("O", p.head_dim_v)))
        self.K, self.V = (memory.rows(name, keys, d * p.itemsize) for name, d in (("K", p.head_dim), ("V", p.head_dim_v)))
        self.S, self.P = (scores(schedule, memory, name) for name in "SP")
        self.lengths = lengths(p, memory)
        of_keys = {schedule.block_cols, p.seqlen_k, *self.keys}
        sizes = [tensor.row * rows for tensor in (self.Q, self.O) for rows in (schedule.block_rows, p.seqlen_q)]
        sizes += [tensor.row * rows for tensor in (self.K, self.V, self.S, self.P) for rows in of_keys]
        self.unit = unit_of(sizes + ([self.lengths.row] if self.lengths else []))

    def place(self, pair: int, i: int) -> tuple[int, int, int, int]:
        """Of row block i: the batch, the first row, how many, and the first key row."""
        p = self.schedule.problem
        batch, head = divmod(pair, p.heads)
        first = i * self.schedule.block_rows
        kv = batch * p.kv_heads + head // (p.heads // p.kv_heads)
        return batch, pair * p.seqlen_q + first, min(self.schedule.block_rows, p.seqlen_q - first), kv * p.seqlen_k


def scores(schedule: StandardSchedule, memory: Memory, name: str) -> Tensor:
    """S or P by its elements."""
    p = schedule.problem
    size = p.score_itemsize if name == "S" else p.itemsize
    return memory.rows(name, p.head_count * p.seqlen_q * p.seqlen_k, size)


class Scores(Products):
    """S = scale Q K^T, a tile a thread block, neighbours along the keys."""

    def __init__(self, schedule: StandardSchedule, kernel: Kernel, memory: Memory) -> None:
        super().__init__(schedule, kernel, memory)
        self.turns = np.ones(self.grid, np.int64)

    def requests(self, block: int, first: int, end: int) -> Requests:
        s, p = self.schedule, self.schedule.problem
        rest, j = divmod(block, s.col_blocks)
        batch, row0, rows, key0 = self.place(*divmod(rest, s.row_blocks))
        col0 = j * s.block_cols
        keys, cols = (max(0, min(s.block_cols, n - col0)) for n in (self.keys[batch], p.seqlen_k))
        parts = [
            self.Q.of(0, LEFT, row0, rows),
            self.K.of(0, RIGHT, key0 + col0, keys),
            self.S.of(0, LAST, (row0 + np.arange(rows)) * p.seqlen_k + col0, cols, write=True),
        ]
        return Requests.together(parts + ([self.lengths.of(0, FIRST, batch, 1)] if self.lengths else []))


class Values(Products):
    """O = P V, a row block a thread block, along the keys."""

    def __init__(self, schedule: StandardSchedule, kernel: Kernel, memory: Memory) -> None:
        super().__init__(schedule, kernel, memory)
        self.turns = np.full(self.grid, max(1, schedule.col_blocks))

    def requests(self, block: int, first: int, end: int) -> Requests:
        return Requests.together(list(self._of_block(block, first, end)))

    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        s, p = self.schedule, self.schedule.problem
        batch, row0, rows, key0 = self.place(*divmod(block, s.row_blocks))
        if lo == 0 and self.lengths:
            yield self.lengths.of(0, FIRST, batch, 1)
        turn = np.arange(lo, min(hi, s.col_blocks))
        col0 = turn * s.block_cols
        keys, cols = (np.clip(n - col0, 0, s.block_cols) for n in (self.keys[batch], p.seqlen_k))
        row = row0 + np.arange(rows)
        every, of_row = np.repeat(turn, rows), np.tile(row, len(turn))
        yield self.P.of(every, LEFT, of_row * p.seqlen_k + np.repeat(col0, rows), np.repeat(cols, rows))
        yield self.V.of(turn, RIGHT, key0 + col0, keys)
        if hi == self.turns[block]:
            yield self.O.of(hi - 1, LAST, row0, rows, write=True)


def standard(schedule: StandardSchedule, memory: Memory) -> list[Launch]:
    """Its three kernels, or two where there is no key."""
    p, kernels = schedule.problem, schedule.kernels()
    by_name = {kernel.name: kernel for kernel in kernels}
    made: list[Launch] = []
    if "standard_scores" in by_name:
        made.append(Scores(schedule, by_name["standard_scores"], memory))
    S, P = (scores(schedule, memory, name) for name in "SP")
    passed = [Passed(Tensor(S.first, S.row * p.seqlen_k), times=schedule.softmax_passes)]
    passed.append(Passed(Tensor(P.first, P.row * p.seqlen_k), write=True))
    if schedule.lse:
        passed.append(Passed(memory.rows("L", p.head_count * p.seqlen_q, FLOAT32), write=True))
    rows = p.head_count * p.seqlen_q
    made.append(Streamed(schedule.device, by_name["standard_softmax"], 1, rows, SOFTMAX_WARPS, tuple(passed)))
    return [*made, Values(schedule, by_name["standard_values"], memory)]
