"""FlashAttention-2's backward: column blocks are thread blocks, which the row blocks that see them visit from the last one on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupyflash.schedules.base import FLOAT32, GRANULE, Visited, padded_dim
from cupyflash.schedules.fa2_backward import ROW_THREADS, SUMMED_ROWS, Fa2BackwardSchedule
from cupyflash.schedules.fa2_backward_tiles import launches as main_launches
from cupyflash.schedules.fa2_backward_tiles import row_lanes
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, resident, unit_of
from cupyflash.sim.l2.rows import RowBlocks, Tensors, Works, lengths
from cupyflash.sim.l2.streamed import Passed, Streamed

# Within a turn
FIRST, OF_Q, OF_DO, OF_ROWS, SUMS, ADDED, LAST = range(7)


@dataclass(frozen=True)
class Gradients:
    """What a column block reads of its keys and of the rows that visit it, adds to, and writes."""

    keys: tuple[Tensor, ...]
    rows: tuple[tuple[int, Tensor], ...]  # with their moves
    sums: Tensor | None
    leave: tuple[Tensor, ...]
    lengths: Tensor | None


class ColumnBlocks(Launch):
    """The main kernel: K and V once, Q, dO and sums of dQ at each visit, of every query head of the group, dK and dV in the end."""

    def __init__(self, schedule: Fa2BackwardSchedule, slots: int, tensors: Gradients) -> None:
        self.schedule, self.slots, self.tensors = schedule, slots, tensors
        p = schedule.problem
        self.keys = np.array(p.options.key_lengths or [p.seqlen_k] * p.batch)
        self.visited = {int(keys): self._by_column(int(keys)) for keys in self.keys}
        visits = np.array([[len(rows) for rows in self.visited[int(keys)]] for keys in self.keys])  # by batch and column block
        self.turns = np.maximum(schedule.group * np.repeat(visits, p.kv_heads, axis=0), 1).ravel()
        self.grid = len(self.turns)
        self.unit = unit_of(self._sizes())

    def _by_column(self, keys: int) -> list[np.ndarray]:
        """The row blocks that visit each column block, in order."""
        visited = Visited.of(self.schedule, keys, None)
        return [visited.rows(j)[::-1] for j in range(self.schedule.col_blocks)]

    def _sizes(self) -> Iterator[int]:
        """What all requests are made of, in bytes."""
        s, p = self.schedule, self.schedule.problem
        for tensor in (*self.tensors.keys, *self.tensors.leave):
            yield from (tensor.row * rows for rows in (s.block_cols, p.seqlen_k, *self.keys.tolist()))
        for tensor in (*(each for _, each in self.tensors.rows), *((self.tensors.sums,) if self.tensors.sums else ())):
            yield from (tensor.row * s.block_rows, tensor.row * p.seqlen_q)
        if self.tensors.sums:
            yield self.tensors.sums.row * whole(p.seqlen_q)
        if self.tensors.lengths:
            yield self.tensors.lengths.row

    def requests(self, block: int, first: int, end: int) -> Requests:
        return Requests.together(list(self._of_block(block, first, end)))

    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        s, p, tensors = self.schedule, self.schedule.problem, self.tensors
        pair, j = divmod(block, s.col_blocks)
        batch, kv_head = divmod(pair, p.kv_heads)
        keys = int(self.keys[batch])
        visited = self.visited[keys][j]
        key, cols = pair * p.seqlen_k + j * s.block_cols, min(s.block_cols, keys - j * s.block_cols)
        last = max(1, len(visited) * s.group) - 1
        if lo == 0:
            if tensors.lengths:
                yield tensors.lengths.of(0, FIRST, batch, 1)
            for tensor in tensors.keys if len(visited) else ():
                yield tensor.of(0, FIRST, key, cols)
        if len(visited):
            turn = np.arange(lo, hi)
            head, i = batch * p.heads + kv_head * s.group + turn // len(visited), visited[turn % len(visited)]
            row0 = i * s.block_rows
            rows = np.minimum(s.block_rows, p.seqlen_q - row0)
            for move, tensor in tensors.rows:
                yield tensor.of(turn, move, head * p.seqlen_q + row0, rows)
            if tensors.sums:  # an atomic reads and writes
                for move in (SUMS, ADDED):
                    yield tensors.sums.of(turn, move, head * whole(p.seqlen_q) + row0, rows, write=move == ADDED)
        if hi == last + 1:
            for tensor in tensors.leave:
                yield tensor.of(last, LAST, key, min(s.block_cols, p.seqlen_k - j * s.block_cols), write=True)


def whole(rows: int) -> int:
    """Rows that a head has in the sum of dQ."""
    return -(-rows // SUMMED_ROWS) * SUMMED_ROWS


def backward(schedule: Fa2BackwardSchedule, memory: Memory) -> list[Launch]:
    """All of FlashAttention-2's backward, where no row's L is large. Of sums of dQ that end within 8 rows, the first ones."""
    p, device = schedule.problem, schedule.device
    queries, keys, N = p.head_count * p.seqlen_q, p.batch * p.kv_heads * p.seqlen_k, p.seqlen_q
    row, value_row, sums_row = p.head_dim * p.itemsize, p.head_dim_v * p.itemsize, padded_dim(p.head_dim) * FLOAT32
    Q, dQ = (memory.rows(name, queries, row) for name in ("Q", "dQ"))
    O, dO = (memory.rows(name, queries, value_row) for name in ("O", "dO"))  # noqa: E741
    L, D = (memory.rows(name, queries, FLOAT32) for name in ("L", "D"))
    K, dK = (memory.rows(name, keys, row) for name in ("K", "dK"))
    V, dV = (memory.rows(name, keys, value_row) for name in ("V", "dV"))
    sums = None if schedule.deterministic else memory.rows("dQ_acc", p.head_count * whole(N), sums_row)
    of_lengths = lengths(p, memory)
    kernels = schedule.kernels()
    by_name = {kernel.name: kernel for kernel in kernels}

    def streamed(name: str, rows: int, *passed: Passed) -> Streamed:
        return Streamed(device, by_name[name], p.head_count, N, rows, passed)

    zero = (Passed(sums, write=True, length=whole(N)),) if sums else ()
    made: list[Launch] = [
        streamed("fa2_backward_rows", ROW_THREADS // row_lanes(p), Passed(O), Passed(dO), Passed(D, write=True), *zero),
        streamed("large_rows", schedule.by_rows.block_rows, Passed(L)),
    ]
    main = (kernel for kernel in kernels if kernel.name == "fa2_backward")
    for launch, each in zip(main_launches(p), main, strict=True):
        slots = resident(device, each.threads, each.shared_bytes)
        rows = ((OF_Q, Q), (OF_DO, dO), (OF_ROWS, L), *(((OF_ROWS, D),) if launch.dk else ()))
        leave = (*((dK,) if launch.dk else ()), *((dV,) if launch.dv else ()))
        tensors = Gradients((K, V) if launch.dk else (K,), rows, sums if launch.dk else None, leave, of_lengths)
        made.append(ColumnBlocks(schedule, slots, tensors))
    if schedule.queries is not None:
        kernel = by_name["fa2_backward_queries"]
        tensors_of_rows = Tensors((Q, dO, L, D), (K, V), (dQ,), of_lengths)
        slots = resident(device, kernel.threads, kernel.shared_bytes)
        made.append(RowBlocks(schedule.queries, slots, Works.of_rows(schedule.queries), tensors_of_rows))
    elif sums:
        rows_of = by_name["fa2_backward_finish"].threads // SUMMED_ROWS // (padded_dim(p.head_dim) // GRANULE) * SUMMED_ROWS
        made.append(streamed("fa2_backward_finish", rows_of, Passed(sums, length=whole(N)), Passed(dQ, write=True)))
    return made
