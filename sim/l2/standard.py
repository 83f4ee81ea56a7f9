"""Standard attention, Algorithms 0 and 3: tiled products and passes over rows, with S and P, or P, dP and dS, in HBM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash.schedules.base import FLOAT32, Kernel
from cupyflash.schedules.standard import SOFTMAX_WARPS, StandardSchedule
from cupyflash.schedules.standard_backward import StandardBackwardSchedule
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, resident, unit_of
from cupyflash.sim.l2.parts import Part, key_count, parts_of, row_count
from cupyflash.sim.l2.reads import At, Given, Reads
from cupyflash.sim.l2.row_bases import given_rows, row_bases
from cupyflash.sim.l2.rows import lengths
from cupyflash.sim.l2.streamed import Passed, Streamed

# Within a turn
FIRST, LEFT, RIGHT, OF_SCORES, LAST = range(5)


@dataclass(frozen=True)
class Product:
    """What a product is of, and where it goes. One of Q and K `reads` masks and the like; where it makes P again it reads of
    each row what its weights are relative to, and writes the `slopes` of a score function."""

    left: Tensor
    right: Tensor
    out: Tensor
    reads: Reads | None = None
    slopes: Tensor | None = None
    of_rows: Tensor | None = None


class Products(Launch):
    """What the products have in common."""

    def __init__(self, schedule: Any, kernel: Kernel, product: Product, of_lengths: Tensor | None) -> None:
        self.schedule, self.product, self.lengths, p = schedule, product, of_lengths, schedule.problem
        self.grid, self.slots = kernel.grid, resident(schedule.device, kernel.threads, kernel.shared_bytes)
        self.parts, self.group = parts_of(schedule), p.heads // p.kv_heads
        # Rows of a tile of S are apart, and no two thread blocks ask for the same
        self.heft = max(1, schedule.block_rows // 2)
        self.heft += product.reads.heft(schedule.block_rows, schedule.block_cols) if product.reads else 0
        each = (product.left, product.right, product.out, product.slopes, product.of_rows)
        of_rows = {schedule.block_rows, schedule.block_cols, p.seqlen_q, p.seqlen_k, *(part.keys for part in self.parts)}
        sizes = [tensor.row * rows for tensor in each if tensor for rows in of_rows]
        self.unit = unit_of([*sizes, of_lengths.row if of_lengths else 0, product.reads.unit if product.reads else 0])

    def requests(self, block: int, first: int, end: int) -> Requests:
        return Requests.together(list(self._of_block(block, first, end)))

    @abstractmethod
    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        """The requests of a thread block's turns from lo to hi."""

    def row_block(self, pair: int, i: int) -> tuple[Part, int, int, int]:
        """Of row block i: its batch, its head, the first row and how many."""
        batch, head = divmod(pair, self.schedule.problem.heads)
        row0 = i * self.schedule.block_rows
        return self.parts[batch], head, row0, min(self.schedule.block_rows, self.schedule.problem.seqlen_q - row0)

    def of_scores(self, tensor: Tensor, pair: Any, row: Any, column: Any, columns: Any, turn: Any, move: int) -> Requests:
        """Of S or what is like it, some columns of rows."""
        p = self.schedule.problem
        return tensor.of(turn, move, (pair * p.seqlen_q + row) * p.seqlen_k + column, columns, write=move == LAST)


class Scores(Products):
    """S = scale Q K^T, or dP = dO V^T: a tile a thread block, neighbours along the keys."""

    def __init__(self, schedule: Any, kernel: Kernel, product: Product, of_lengths: Tensor | None) -> None:
        super().__init__(schedule, kernel, product, of_lengths)
        self.turns = np.ones(self.grid, np.int64)

    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        s, p, product = self.schedule, self.schedule.problem, self.product
        rest, j = divmod(block, s.col_blocks)
        pair, i = divmod(rest, s.row_blocks)
        part, head, row0, rows = self.row_block(pair, i)
        col0 = j * s.block_cols
        keys, cols = (max(0, min(s.block_cols, n - col0)) for n in (part.keys, p.seqlen_k))
        if self.lengths:
            yield self.lengths.of(0, FIRST, part.number, 1)
        yield product.left.of(0, LEFT, part.query(head) + row0, rows)
        yield product.right.of(0, RIGHT, part.key(part.kv_head(head)) + col0, keys)
        if product.of_rows:
            yield product.of_rows.of(0, LEFT, part.query(head) + row0, rows)
        if product.reads:
            yield from product.reads.of_head(At.of(part, head), 0, FIRST)
            yield from product.reads.of_tiles(part, head, OF_SCORES, 0, (row0, rows), (col0, keys))
        for tensor in (product.out, product.slopes):
            if tensor:
                yield self.of_scores(tensor, pair, row0 + np.arange(rows), col0, cols, 0, LAST)


class Values(Products):
    """O = P V, or dQ = dS K: a row block a thread block, along the keys."""

    def __init__(self, schedule: Any, kernel: Kernel, product: Product, of_lengths: Tensor | None) -> None:
        super().__init__(schedule, kernel, product, of_lengths)
        self.turns = np.full(self.grid, max(1, schedule.col_blocks))

    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        s, p = self.schedule, self.schedule.problem
        pair, i = divmod(block, s.row_blocks)
        part, head, row0, rows = self.row_block(pair, i)
        if lo == 0 and self.lengths:
            yield self.lengths.of(0, FIRST, part.number, 1)
        turn = np.arange(lo, min(hi, s.col_blocks))
        col0 = turn * s.block_cols
        keys, cols = (np.clip(n - col0, 0, s.block_cols) for n in (part.keys, p.seqlen_k))
        every, row = np.repeat(turn, rows), np.tile(row0 + np.arange(rows), len(turn))
        yield self.of_scores(self.product.left, pair, row, np.repeat(col0, rows), np.repeat(cols, rows), every, LEFT)
        yield self.product.right.of(turn, RIGHT, part.key(part.kv_head(head)) + col0, keys)
        if hi == self.turns[block]:
            yield self.product.out.of(hi - 1, LAST, part.query(head) + row0, rows, write=True)


class Transposed(Products):
    """dV = P^T dO, or dK = dS^T Q: a column block of a key head a thread block, along the rows of all query heads of its group."""

    def __init__(self, schedule: Any, kernel: Kernel, product: Product, of_lengths: Tensor | None) -> None:
        super().__init__(schedule, kernel, product, of_lengths)
        self.turns = np.full(self.grid, max(1, self.group * schedule.row_blocks))

    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        s, p = self.schedule, self.schedule.problem
        kv_pair, j = divmod(block, s.col_blocks)
        batch, kv_head = divmod(kv_pair, p.kv_heads)
        part, col0 = self.parts[batch], j * s.block_cols
        cols = min(s.block_cols, p.seqlen_k - col0)
        turn = np.arange(lo, min(hi, self.group * s.row_blocks))
        member, i = np.divmod(turn, s.row_blocks)
        head, row0 = kv_head * self.group + member, i * s.block_rows
        rows = np.minimum(s.block_rows, p.seqlen_q - row0)
        n = np.arange(s.block_rows)
        there = (n < rows[:, None]).ravel()
        every, row = np.repeat(turn, s.block_rows)[there], (row0[:, None] + n).ravel()[there]
        pair = batch * p.heads + np.repeat(head, s.block_rows)[there]
        yield self.of_scores(self.product.left, pair, row, col0, cols, every, LEFT)
        yield self.product.right.of(turn, RIGHT, part.query(head) + row0, rows)
        if hi == self.turns[block]:
            yield self.product.out.of(hi - 1, LAST, part.key(kv_head) + col0, cols, write=True)


class Standard:
    """The kernels of one schedule, by their names."""

    def __init__(self, schedule: StandardSchedule | StandardBackwardSchedule, memory: Memory, given: Given) -> None:
        self.schedule, self.memory, self.given, self.p = schedule, memory, given, schedule.problem
        self.kernels = {kernel.name: kernel for kernel in schedule.kernels()}
        self.reads, self.lengths = Reads(schedule, memory, given, by_tiles=False), lengths(self.p, memory)

    def rows(self, name: str) -> Tensor:
        """A tensor of a row for each query, or for each key."""
        wide = self.p.head_dim_v if name[-1] in "OV" else self.p.head_dim
        count = key_count(self.schedule) if name[-1] in "KV" else row_count(self.schedule)
        return self.memory.rows(name, count, FLOAT32 if name == "L" else wide * self.p.itemsize)

    def scores(self, name: str) -> Tensor:
        """S or what is like it, by its elements."""
        size = self.p.score_itemsize if name == "S" else self.p.itemsize
        return self.memory.rows(name, row_count(self.schedule) * self.p.seqlen_k, size)

    def passed(self, name: str, *, write: bool = False, times: int = 1) -> Passed:
        """The same by its rows."""
        of_elements = self.scores(name)
        return Passed(Tensor(of_elements.first, of_elements.row * self.p.seqlen_k), write=write, times=times)

    def streamed(self, kernel: str, *passed: Passed) -> Streamed:
        """What a kernel does a row at a time."""
        return Streamed(self.schedule.device, self.kernels[kernel], 1, row_count(self.schedule), SOFTMAX_WARPS, passed)

    def forward(self, schedule: StandardSchedule) -> list[Launch]:
        """Algorithm 0's three, or two where there is no key."""
        made: list[Launch] = []
        if "standard_scores" in self.kernels:
            product = Product(self.rows("Q"), self.rows("K"), self.scores("S"), self.reads)
            made.append(Scores(schedule, self.kernels["standard_scores"], product, self.lengths))
        passed = [self.passed("S", times=schedule.softmax_passes), self.passed("P", write=True)]
        if schedule.lse:
            passed.append(Passed(self.rows("L"), write=True))
        if self.p.options.sinks:
            passed.append(Passed(self.memory.rows("sinks", self.p.heads, FLOAT32), shared=self.p.seqlen_q))
        product = Product(self.scores("P"), self.rows("V"), self.rows("O"))
        values = Values(schedule, self.kernels["standard_values"], product, self.lengths)
        return [*made, self.streamed("standard_softmax", *passed), values]

    def backward(self, schedule: StandardBackwardSchedule) -> list[Launch]:
        """P made again, and Algorithm 3's five."""
        slopes = self.scores("dS") if self.p.options.score else None  # they lie where dS will
        weights = Product(self.rows("Q"), self.rows("K"), self.scores("P"), self.reads, slopes, given_rows(schedule, self.memory))
        values = Product(self.scores("P"), self.rows("dO"), self.rows("dV"))
        of_weights = Product(self.rows("dO"), self.rows("V"), self.scores("dP"))
        queries = Product(self.scores("dS"), self.rows("K"), self.rows("dQ"))
        keys = Product(self.scores("dS"), self.rows("Q"), self.rows("dK"))
        passed = [self.passed("P", times=2), self.passed("dP", times=2), *([self.passed("dS")] if slopes else [])]

        def made(kind: type[Products], step: str, product: Product) -> Launch:
            return kind(schedule, self.kernels[f"standard_backward_{step}"], product, self.lengths)

        before = row_bases(schedule, schedule.bases, self.memory, self.given) if schedule.bases else ()
        return [
            *before,
            made(Scores, "weights", weights),
            made(Transposed, "values", values),
            made(Scores, "weight_gradients", of_weights),
            self.streamed("standard_backward_softmax", *passed, self.passed("dS", write=True)),
            made(Values, "queries", queries),
            made(Transposed, "keys", keys),
        ]
