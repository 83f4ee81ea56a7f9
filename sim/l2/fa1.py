"""FlashAttention's forward, Algorithm 1: a thread block a head, K and V outside, Q, O, l and m inside."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupyflash.schedules.base import FLOAT32, Kernel, Visited
from cupyflash.schedules.fa1 import Fa1Schedule
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, resident, unit_of
from cupyflash.sim.l2.rows import lengths

# Within a turn
ZEROS, KEYS, BROUGHT, TAKEN = range(4)


class Heads(Launch):
    """Algorithm 1: a thread block a head, K and V outside, Q, O, l and m inside."""

    def __init__(self, schedule: Fa1Schedule, kernel: Kernel, memory: Memory) -> None:
        self.schedule, p = schedule, schedule.problem
        self.grid, self.slots = kernel.grid, resident(schedule.device, kernel.threads, kernel.shared_bytes)
        self.heft = 2
        queries, keys = p.head_count * p.seqlen_q, p.batch * p.kv_heads * p.seqlen_k
        row, value_row = p.head_dim * p.itemsize, p.head_dim_v * p.itemsize
        self.Q, self.O = memory.rows("Q", queries, row), memory.rows("O", queries, value_row)
        self.K, self.V = memory.rows("K", keys, row), memory.rows("V", keys, value_row)
        self.sums = self.O if p.dtype == "float32" else memory.rows("O_acc", queries, p.head_dim_v * FLOAT32)
        self.state = tuple(memory.rows(name, queries, FLOAT32) for name in "lm")
        self.L = memory.rows("L", queries, FLOAT32) if schedule.lse else None
        self.lengths = lengths(p, memory)
        self.keys = p.options.key_lengths or (p.seqlen_k,) * p.batch
        self.visited = {keys: Visited.of(schedule, keys, None) for keys in self.keys}
        # Of the visits of a head, in order: the column block, the row block
        self.visits = {keys: visits_of(each) for keys, each in self.visited.items()}
        by_batch = [max(1, len(self.visits[keys][0])) for keys in self.keys]
        self.turns = np.repeat(np.array(by_batch, np.int64), p.heads)
        of_rows = (self.Q, self.O, self.sums, *self.state, *((self.L,) if self.L else ()))
        sizes = [tensor.row * rows for tensor in of_rows for rows in (schedule.block_rows, p.seqlen_q)]
        sizes += [tensor.row * rows for tensor in (self.K, self.V) for rows in (schedule.block_cols, p.seqlen_k, *self.keys)]
        self.unit = unit_of(sizes + ([self.lengths.row] if self.lengths else []))

    def requests(self, block: int, first: int, end: int) -> Requests:
        return Requests.together(list(self._of_head(block, first, end)))

    def _of_head(self, pair: int, lo: int, hi: int) -> Iterator[Requests]:
        s, p = self.schedule, self.schedule.problem
        batch, head = divmod(pair, p.heads)
        keys = self.keys[batch]
        last = self.visited[keys].last
        if lo == 0:
            yield from self._zeros(pair, batch, last)
        turn = np.arange(lo, min(hi, len(self.visits[keys][0])))
        j, i = (each[turn] for each in self.visits[keys])
        new = turn[(turn == 0) | (self.visits[keys][0][turn - 1] != j)]
        col0 = self.visits[keys][0][new] * s.block_cols
        key = (batch * p.kv_heads + head // (p.heads // p.kv_heads)) * p.seqlen_k + col0
        for tensor in (self.K, self.V):
            yield tensor.of(new, KEYS, key, np.minimum(s.block_cols, keys - col0))
        row0, rows = self._rows(pair, i)
        for tensor in (self.Q, self.sums, *self.state):
            yield tensor.of(turn, BROUGHT, row0, rows)
        ends = last[i] == j
        for some, tensors in (
            (~ends, (self.sums,)),
            (ends, (self.O, *((self.L,) if self.L else ()))),
            (np.ones_like(ends), self.state),
        ):
            for tensor in tensors:
                yield tensor.of(turn[some], TAKEN, row0[some], rows[some], write=True)

    def _zeros(self, pair: int, batch: int, last: np.ndarray) -> Iterator[Requests]:
        """Line 2: O = 0, l = 0, m = -inf; a row block that visits nothing has its O and L for good."""
        if self.lengths:
            yield self.lengths.of(0, ZEROS, batch, 1)
        row0, rows = self._rows(pair, np.arange(self.schedule.row_blocks))
        seen = last >= 0
        for some, tensors in (
            (seen, (self.sums,)),
            (~seen, (self.O, *((self.L,) if self.L else ()))),
            (np.ones_like(seen), self.state),
        ):
            for tensor in tensors:
                yield tensor.of(0, ZEROS, row0[some], rows[some], write=True)

    def _rows(self, pair: int, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first row of row blocks of a head, and how many there are."""
        p, row0 = self.schedule.problem, i * self.schedule.block_rows
        return pair * p.seqlen_q + row0, np.minimum(self.schedule.block_rows, p.seqlen_q - row0)


def visits_of(visited: Visited) -> tuple[np.ndarray, np.ndarray]:
    """All visits, column block by column block: the column block of each, and the row block."""
    by_column = [(j, visited.rows(j)) for j in visited.columns.tolist()]
    i = np.concatenate([rows for _, rows in by_column]) if by_column else np.zeros(0, np.int64)
    return np.repeat([j for j, _ in by_column], [len(rows) for _, rows in by_column]).astype(np.int64), i


def algorithm_1(schedule: Fa1Schedule, memory: Memory) -> list[Launch]:
    """Its one kernel."""
    (kernel,) = schedule.kernels()
    return [Heads(schedule, kernel, memory)]
