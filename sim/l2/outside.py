"""FlashAttention's Algorithms 1 and 4: a thread block a head (of keys, in the backward), K and V outside, row blocks inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cupyflash.schedules.base import FLOAT32
from cupyflash.schedules.columns_outside import ColumnsOutside
from cupyflash.schedules.fa1 import Fa1Schedule
from cupyflash.schedules.fa1_backward import Fa1BackwardSchedule
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, resident, unit_of
from cupyflash.sim.l2.parts import Part, key_count, parts_of, row_count
from cupyflash.sim.l2.reads import At, Given, Known, Reads
from cupyflash.sim.l2.row_bases import given_rows, row_bases
from cupyflash.sim.l2.rows import lengths

# Within a turn
ZEROS, KEYS, BROUGHT, OF_SCORES, TAKEN, LAST = range(6)


@dataclass(frozen=True)
class Tensors:
    """What a visit of a row block reads, and writes beside the `sums`, which its last visit writes as the `results`."""

    brought: tuple[Tensor, ...]
    state: tuple[Tensor, ...]
    sums: Tensor
    results: tuple[Tensor, ...]
    keys: tuple[Tensor, Tensor]
    gradients: tuple[Tensor, ...]  # of the keys

    @classmethod
    def forward(cls, schedule: Fa1Schedule, memory: Memory) -> Tensors:
        """Of Algorithm 1."""
        p, rows, keys = schedule.problem, row_count(schedule), key_count(schedule)
        Q, O = memory.rows("Q", rows, p.head_dim * p.itemsize), memory.rows("O", rows, p.head_dim_v * p.itemsize)  # noqa: E741
        K, V = memory.rows("K", keys, p.head_dim * p.itemsize), memory.rows("V", keys, p.head_dim_v * p.itemsize)
        sums = O if p.dtype == "float32" else memory.rows("O_acc", rows, p.head_dim_v * FLOAT32)
        state = tuple(memory.rows(name, rows, FLOAT32) for name in "lm")
        results = (O, memory.rows("L", rows, FLOAT32)) if schedule.lse else (O,)
        return cls((Q, sums, *state), state, sums, results, (K, V), ())

    @classmethod
    def backward(cls, schedule: Fa1BackwardSchedule, memory: Memory) -> Tensors:
        """Of Algorithm 4."""
        p, rows, keys = schedule.problem, row_count(schedule), key_count(schedule)
        row, value_row = p.head_dim * p.itemsize, p.head_dim_v * p.itemsize
        Q, dQ = (memory.rows(name, rows, row) for name in ("Q", "dQ"))
        dO, O = (memory.rows(name, rows, value_row) for name in ("dO", "O"))  # noqa: E741
        K, dK = (memory.rows(name, keys, row) for name in ("K", "dK"))
        V, dV = (memory.rows(name, keys, value_row) for name in ("V", "dV"))
        sums = dQ if p.dtype == "float32" else memory.rows("dQ_acc", rows, p.head_dim * FLOAT32)
        return cls((Q, dO, O, given_rows(schedule, memory), sums), (), sums, (dQ,), (K, V), (dK, dV))


class Steps(NamedTuple):
    """The visits of a thread block, in order: the column block, which of its query heads, the row block."""

    j: np.ndarray
    member: np.ndarray
    i: np.ndarray


class Heads(Launch):
    """The kernel of the algorithm, the last one."""

    def __init__(self, schedule: ColumnsOutside, tensors: Tensors, memory: Memory, given: Given) -> None:
        self.schedule, self.tensors, p = schedule, tensors, schedule.problem
        kernel = schedule.kernels()[-1]
        self.grid, self.slots = kernel.grid, resident(schedule.device, kernel.threads, kernel.shared_bytes)
        self.group = p.head_count // schedule.repeats
        self.backward = isinstance(schedule, Fa1BackwardSchedule)
        self.reads, self.known = Reads(schedule, memory, given, by_tiles=False), Known(schedule, memory)
        self.heft = 2 + self.reads.heft(schedule.block_rows, schedule.block_cols)
        self.lengths = lengths(p, memory)
        self.sinks = memory.rows("sinks", p.heads, FLOAT32) if p.options.sinks else None
        self.parts = parts_of(schedule)
        self.steps: dict[tuple[int, int], Steps] = {}
        self.turns = np.array([max(1, len(self.of_block(block).i)) for block in range(self.grid)], np.int64)
        of_rows = (*tensors.brought, tensors.sums, *tensors.results)
        sizes = [tensor.row * rows for tensor in of_rows for rows in (schedule.block_rows, p.seqlen_q)]
        of_keys = {schedule.block_cols, p.seqlen_k, *(part.keys for part in self.parts)}
        sizes += [tensor.row * keys for tensor in (*tensors.keys, *tensors.gradients) for keys in of_keys]
        sizes += [each.row for each in (self.lengths, self.sinks) if each]
        self.unit = unit_of([*sizes, self.reads.unit, self.known.unit])

    def place(self, block: int) -> tuple[Part, int]:
        """Its batch, and the first of its query heads."""
        batch, first = divmod(block * self.group, self.schedule.problem.heads)
        return self.parts[batch], first

    def of_block(self, block: int) -> Steps:
        """Its visits."""
        part, first = self.place(block)
        key = (part.number, first) if part.kept is not None else (-1, part.keys)
        if key not in self.steps:
            visited = [part.visited(first + member) for member in range(self.group)]
            columns = np.unique(np.concatenate([each.columns for each in visited])).tolist()
            found = [(j, member, each.rows(j)) for j in columns for member, each in enumerate(visited)]
            often = [len(rows) for _, _, rows in found]
            j, member = (np.repeat(np.array([one[axis] for one in found], np.int64), often) for axis in range(2))
            self.steps[key] = Steps(j, member, np.concatenate([np.zeros(0, np.int64), *(rows for _, _, rows in found)]))
        return self.steps[key]

    def requests(self, block: int, first: int, end: int) -> Requests:
        return Requests.together(list(self._of_block(block, first, end)))

    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        part, first = self.place(block)
        steps, tensors = self.of_block(block), self.tensors
        if lo == 0:
            yield from self._zeros(part, first)
        turn = np.arange(lo, min(hi, len(steps.i)))
        j, member, i = (each[turn] for each in steps)
        begins = turn[(turn == 0) | (steps.j[turn - 1] != j)]
        ends = turn[(turn == len(steps.j) - 1) | (steps.j[np.minimum(turn + 1, len(steps.j) - 1)] != j)]
        yield from self._of_keys(part, first, begins, steps.j, tensors.keys, False)
        yield from self._of_keys(part, first, ends, steps.j, tensors.gradients, True)
        if self.backward:
            for start in begins.tolist():
                for head in range(first, first + self.group):
                    yield from self.reads.of_head(At.of(part, head), start, KEYS)
        for head in range(first, first + self.group):
            of_head = member == head - first
            yield from self._visits(part, head, turn[of_head], j[of_head], i[of_head])

    def _of_keys(
        self, part: Part, head: int, turn: np.ndarray, of_turn: np.ndarray, tensors: tuple[Tensor, ...], write: bool
    ) -> Iterator[Requests]:
        """Of column blocks that begin, or end, in some turns."""
        col0 = of_turn[turn] * self.schedule.block_cols
        key, cols = part.key(part.kv_head(head)) + col0, np.minimum(self.schedule.block_cols, part.keys - col0)
        for tensor in tensors:
            yield tensor.of(turn, LAST if write else KEYS, key, cols, write=write)

    def _visits(self, part: Part, head: int, turn: np.ndarray, j: np.ndarray, i: np.ndarray) -> Iterator[Requests]:
        """Of one query head."""
        s, tensors, last = self.schedule, self.tensors, part.visited(head).last
        row0, rows = self._rows(part, i)
        query, ends = part.query(head) + row0, last[i] == j
        for tensor in tensors.brought:
            yield tensor.of(turn, BROUGHT, query, rows)
        cols = np.minimum(s.block_cols, part.keys - j * s.block_cols)
        yield from self.reads.of_tiles(part, head, OF_SCORES, turn, (row0, rows), (j * s.block_cols, cols))
        if self.sinks:
            yield self.sinks.of(turn[ends], TAKEN, np.full(int(ends.sum()), head), 1, asked=rows[ends])
        yield from self._written(turn, TAKEN, query, rows, ends)

    def _written(self, turn: np.ndarray, move: int, query: np.ndarray, rows: np.ndarray, ends: np.ndarray) -> Iterator[Requests]:
        """What is written of rows: the sums, or of those that are done the results."""
        tensors, every = self.tensors, np.ones_like(ends)
        for some, written in ((~ends, (tensors.sums,)), (ends, tensors.results), (every, tensors.state)):
            for tensor in written:
                yield tensor.of(turn[some], move, query[some], rows[some], write=True)

    def _zeros(self, part: Part, first: int) -> Iterator[Requests]:
        """Lines 2 and 5: sums and states begin; a row block that visits nothing has its results for good."""
        if self.lengths:
            yield self.lengths.of(0, ZEROS, part.number, 1)
        for head in range(first, first + self.group):
            visited = part.visited(head)
            for i, (begin, end) in enumerate(zip(visited.first.tolist(), visited.end.tolist(), strict=True)):
                yield from self.known.of(part, head, ZEROS, i, np.arange(begin, end))
            if not self.backward:
                yield from self.reads.of_head(At.of(part, head), 0, ZEROS)
            row0, rows = self._rows(part, np.arange(self.schedule.row_blocks))
            unseen = visited.last < 0
            if self.sinks:
                yield self.sinks.of(0, ZEROS, head, 1, asked=int(rows[unseen].sum()))
            yield from self._written(np.zeros_like(row0), ZEROS, part.query(head) + row0, rows, unseen)
        for tensor in self.tensors.gradients:
            yield tensor.of(0, ZEROS, part.key(part.kv_head(first)), part.problem.seqlen_k, write=True)

    def _rows(self, part: Part, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first row of row blocks of a head, and how many they have."""
        row0 = i * self.schedule.block_rows
        return row0, np.minimum(self.schedule.block_rows, part.problem.seqlen_q - row0)


def columns_outside(schedule: Fa1Schedule | Fa1BackwardSchedule, memory: Memory, given: Given) -> list[Launch]:
    """Algorithm 1's kernel, or Algorithm 4's."""
    if isinstance(schedule, Fa1BackwardSchedule):
        before = row_bases(schedule, schedule.bases, memory, given) if schedule.bases else ()
        return [*before, Heads(schedule, Tensors.backward(schedule, memory), memory, given)]
    return [Heads(schedule, Tensors.forward(schedule, memory), memory, given)]
