"""FlashAttention-2's backward: column blocks are thread blocks, which the row blocks that see them visit from the last one on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupyflash.schedules import VarlenBackwardSchedule
from cupyflash.schedules.base import FLOAT32, GRANULE, Kernel, padded_dim
from cupyflash.schedules.fa2_backward import ROW_THREADS, SUMMED_ROWS, Fa2BackwardSchedule
from cupyflash.schedules.fa2_backward_tiles import launches as main_launches
from cupyflash.schedules.fa2_backward_tiles import row_lanes
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, resident, unit_of
from cupyflash.sim.l2.parts import Bounds, Part, key_count, parts_of, row_count
from cupyflash.sim.l2.reads import At, Given, Known, Reads
from cupyflash.sim.l2.row_bases import given_rows, row_bases
from cupyflash.sim.l2.rows import RowBlocks, Tensors, Works, lengths
from cupyflash.sim.l2.streamed import Passed, Streamed
from cupyflash.sim.l2.tiles import states_found

# Within a turn
FIRST, OF_Q, OF_DO, OF_ROWS, OF_SCORES, SUMS, ADDED, LAST = range(8)


@dataclass(frozen=True)
class Gradients:
    """What a column block reads of its keys and of the rows that visit it, adds to, and writes; what else it reads."""

    keys: tuple[Tensor, ...]
    rows: tuple[tuple[int, Tensor], ...]  # with their moves
    sums: Tensor | None
    leave: tuple[Tensor, ...]
    reads: Reads
    known: Known
    lengths: Tensor | None
    bounds: Bounds | None


class ColumnBlocks(Launch):
    """The main kernel: K and V once, Q, dO and sums of dQ at each visit, of every query head of the group, dK and dV in the end."""

    def __init__(self, schedule: Fa2BackwardSchedule, slots: int, parts: list[Part], tensors: Gradients) -> None:
        self.schedule, self.slots, self.parts, self.tensors = schedule, slots, parts, tensors
        p, group = schedule.problem, schedule.group
        if tensors.bounds is None:
            pair, self.j = np.divmod(np.arange(schedule.grid), schedule.col_blocks or 1)
            self.batch, self.kv_head = np.divmod(pair, p.kv_heads)
        else:
            self.kv_head, block = np.divmod(np.arange(schedule.grid), tensors.bounds.blocks or 1)
            self.batch, self.j = (each[block] for each in tensors.bounds.found())
        self.visiting: dict[tuple[int, int, int], list[np.ndarray]] = {}
        members = (self.of_block(block) for block in range(schedule.grid))
        self.visits = np.array([sum(len(rows) for rows in each) * (1 if len(each) > 1 else group) for each in members], np.int64)
        self.turns = np.maximum(self.visits, 1)
        self.grid = len(self.turns)
        self.unit = unit_of(self._sizes())
        self.heft = 1 + tensors.reads.heft(schedule.block_rows, schedule.block_cols)

    def of_block(self, block: int) -> list[np.ndarray]:
        """The row blocks that visit a column block, in order: of each query head of its group, or of one for all."""
        batch, kv_head, j = int(self.batch[block]), int(self.kv_head[block]), int(self.j[block])
        part = self.parts[batch]
        heads = [kv_head * self.schedule.group + member for member in range(self.schedule.group if part.kept is not None else 1)]
        key = batch, kv_head if part.kept is not None else 0, j
        if key not in self.visiting:
            there = j < part.schedule.col_blocks
            self.visiting[key] = [part.visited(head).rows(j)[::-1] if there else np.zeros(0, np.int64) for head in heads]
        return self.visiting[key]

    def _sizes(self) -> Iterator[int]:
        """What all requests are made of, in bytes."""
        s, tensors = self.schedule, self.tensors
        keys = {n for part in self.parts for n in (part.key(0), part.key(1), part.keys, part.problem.seqlen_k)}
        rows = {n for part in self.parts for n in (part.query(0), part.query(1), part.problem.seqlen_q)}
        for tensor in (*tensors.keys, *tensors.leave):
            yield from (tensor.row * n for n in {s.block_cols, *keys})
        for tensor in (*(each for _, each in tensors.rows), *((tensors.sums,) if tensors.sums else ())):
            yield from (tensor.row * n for n in {s.block_rows, *rows})
        if tensors.sums:
            yield tensors.sums.row * whole(s.query_shape[1])
        yield tensors.lengths.row if tensors.lengths else 0
        yield from (tensors.reads.unit, tensors.known.unit, tensors.bounds.own.row if tensors.bounds else 0)

    def requests(self, block: int, first: int, end: int) -> Requests:
        return Requests.together(list(self._of_block(block, first, end)))

    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        s, tensors = self.schedule, self.tensors
        part, kv_head, j = self.parts[int(self.batch[block])], int(self.kv_head[block]), int(self.j[block])
        p, rows_of = part.problem, self.of_block(block)
        visiting = rows_of * (s.group if len(rows_of) == 1 else 1)  # of each query head of the group
        key, cols = part.key(kv_head) + j * s.block_cols, max(0, min(s.block_cols, part.keys - j * s.block_cols))
        last = int(self.turns[block]) - 1
        if lo == 0:
            if tensors.bounds:
                yield from tensors.bounds.search(FIRST, part.number)
            if j >= part.schedule.col_blocks:
                return
            yield from self._first(part, kv_head, j)
            for tensor in tensors.keys if any(map(len, visiting)) else ():
                yield tensor.of(0, FIRST, key, cols)
        start = 0
        for member, every in enumerate(visiting):
            head, turn = kv_head * s.group + member, np.arange(max(lo, start), min(hi, start + len(every)))
            if len(turn):
                if turn[0] == start:
                    yield from tensors.reads.of_keys(At.of(part, head), FIRST, start, j * s.block_cols, cols)
                yield from self._visits(part, head, turn, every[turn - start], (j * s.block_cols, cols))
            start += len(every)
        if hi == last + 1:
            for tensor in tensors.leave:
                yield tensor.of(last, LAST, key, min(s.block_cols, p.seqlen_k - j * s.block_cols), write=True)

    def _first(self, part: Part, kv_head: int, j: int) -> Iterator[Requests]:
        """What is read to know what to do."""
        tensors = self.tensors
        if tensors.lengths:
            yield tensors.lengths.of(0, FIRST, part.number, 1)
        for head in range(kv_head * self.schedule.group, (kv_head + 1) * self.schedule.group):
            yield from tensors.reads.of_head(At.of(part, head), 0, FIRST)
            visited = part.visited(head)
            i = np.flatnonzero((visited.first <= j) & (j < visited.end))
            yield from tensors.known.of(part, head, FIRST, i, np.full_like(i, j))

    def _visits(self, part: Part, head: int, turn: np.ndarray, i: np.ndarray, columns: tuple[int, int]) -> Iterator[Requests]:
        """Of row blocks of a query head, one a turn."""
        s, tensors, mixed = self.schedule, self.tensors, part.visited(head).mixed
        row0 = i * s.block_rows
        rows = np.minimum(s.block_rows, part.problem.seqlen_q - row0)
        asked = np.ones(len(i), bool) if mixed is None else mixed[i, columns[0] // s.block_cols]
        for move, tensor in tensors.rows:
            yield tensor.of(turn, move, part.query(head) + row0, rows)
        yield from tensors.reads.of_rows(At.of(part, head), OF_ROWS, turn, row0, rows, asked)
        cols = np.full(len(turn), columns[0]), np.full(len(turn), columns[1])
        yield from tensors.reads.of_tiles(part, head, OF_SCORES, turn, (row0, rows), cols, asked)
        if tensors.sums:  # an atomic reads and writes
            length = s.query_shape[1]
            of_head = part.query(head) + (part.query(head) // length) * (whole(length) - length)
            for move in (SUMS, ADDED):
                yield tensors.sums.of(turn, move, of_head + row0, rows, write=move == ADDED)


def whole(rows: int) -> int:
    """Rows that a head has in the sum of dQ."""
    return -(-rows // SUMMED_ROWS) * SUMMED_ROWS


class Backward:
    """All of FlashAttention-2's backward, where no row's L is large. Of sums of dQ that end within 8 rows, the first ones."""

    def __init__(self, schedule: Fa2BackwardSchedule, memory: Memory, given: Given) -> None:
        self.schedule, self.memory, self.given = schedule, memory, given
        p, queries, keys = schedule.problem, row_count(schedule), key_count(schedule)
        row, value_row, sums_row = p.head_dim * p.itemsize, p.head_dim_v * p.itemsize, padded_dim(p.head_dim) * FLOAT32
        self.Q, self.dQ = (memory.rows(name, queries, row) for name in ("Q", "dQ"))
        self.O, self.dO = (memory.rows(name, queries, value_row) for name in ("O", "dO"))
        self.of_rows, self.D = given_rows(schedule, memory), memory.rows("D", queries, FLOAT32)
        self.K, self.dK = (memory.rows(name, keys, row) for name in ("K", "dK"))
        self.V, self.dV = (memory.rows(name, keys, value_row) for name in ("V", "dV"))
        heads, length = schedule.query_shape
        self.sums = None if schedule.deterministic else memory.rows("dQ_acc", heads * whole(length), sums_row)
        of_sinks = {"sinks": p.heads, "dsinks": queries} if p.options.sinks else {}
        self.sinks = [memory.rows(name, rows, FLOAT32) for name, rows in of_sinks.items()]
        self.lengths, self.parts = lengths(p, memory), parts_of(schedule)
        self.kernels = schedule.kernels()
        self.by_name = {kernel.name: kernel for kernel in self.kernels}

    def launches(self) -> list[Launch]:
        """In order."""
        found = states_found(self.schedule, self.parts, self.memory, self.given)
        bases = row_bases(self.schedule, self.schedule.bases, self.memory, self.given)
        made = [*found, *bases, self._rows(), *self._main()]
        if self.schedule.queries is not None:
            return made + self._queries()
        assert self.sums is not None
        kernel, (_, length) = self.by_name["fa2_backward_finish"], self.schedule.query_shape
        rows = kernel.threads // SUMMED_ROWS // (padded_dim(self.schedule.problem.head_dim) // GRANULE) * SUMMED_ROWS
        return [*made, self._streamed(kernel, rows, Passed(self.sums, length=whole(length)), Passed(self.dQ, write=True))]

    def _streamed(self, kernel: Kernel, rows: int, *passed: Passed) -> Streamed:
        return Streamed(self.schedule.device, kernel, *self.schedule.query_shape, rows, passed)

    def _rows(self) -> Launch:
        passed, length = [Passed(self.O), Passed(self.dO), Passed(self.D, write=True)], self.schedule.query_shape[1]
        if self.sums:
            passed.append(Passed(self.sums, write=True, length=whole(length)))
        if self.sinks:
            passed += [Passed(self.sinks[0], shared=length), Passed(self.of_rows), Passed(self.sinks[1], write=True)]
        return self._streamed(self.by_name["fa2_backward_rows"], ROW_THREADS // row_lanes(self.schedule.problem), *passed)

    def _bounds(self, axis: str, size: int) -> Bounds | None:
        s = self.schedule
        return Bounds.of(s.packed, axis, size, self.parts, self.memory) if isinstance(s, VarlenBackwardSchedule) else None

    def _main(self) -> Iterator[Launch]:
        s = self.schedule
        main = (kernel for kernel in self.kernels if kernel.name == "fa2_backward")
        for launch, each in zip(main_launches(s.problem), main, strict=True):
            tensors = Gradients(
                (self.K, self.V) if launch.dk else (self.K,),
                ((OF_Q, self.Q), (OF_DO, self.dO), (OF_ROWS, self.of_rows), *(((OF_ROWS, self.D),) if launch.dk else ())),
                self.sums if launch.dk else None,
                (*((self.dK,) if launch.dk else ()), *((self.dV,) if launch.dv else ())),
                Reads(s, self.memory, self.given, by_tiles=True, dbias=s.dbias and launch.dk),
                Known(s, self.memory),
                self.lengths,
                self._bounds("k", s.block_cols),
            )
            yield ColumnBlocks(s, resident(s.device, each.threads, each.shared_bytes), self.parts, tensors)

    def _queries(self) -> list[Launch]:
        schedule, kernel = self.schedule.by_rows, self.by_name["fa2_backward_queries"]
        packed = isinstance(self.schedule, VarlenBackwardSchedule)
        parts = parts_of(self.schedule, lambda one: one.by_rows) if packed else parts_of(schedule)
        bounds = self._bounds("q", schedule.block_rows)
        works = Works.of_rows(schedule) if bounds is None else Works.of_packed(schedule, parts, bounds)
        reads, known = Reads(schedule, self.memory, self.given, by_tiles=True), Known(schedule, self.memory)
        enter = self.Q, self.dO, self.of_rows, self.D
        tensors = Tensors(enter, (self.K, self.V), (self.dQ,), reads, known, self.lengths, bounds=bounds)
        slots = resident(self.schedule.device, kernel.threads, kernel.shared_bytes)
        found = states_found(schedule, parts, self.memory, self.given)
        return [*found, RowBlocks(schedule, slots, works, parts, tensors)]
