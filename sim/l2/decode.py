"""Decoding from a cache whose sequences lie together: splits of the keys are thread blocks, whose parts a second kernel merges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupyflash.schedules import DecodeSchedule, decode_tiles
from cupyflash.schedules.base import FLOAT32
from cupyflash.schedules.decode import LENGTH, queries, schedule_keys
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, resident, unit_of
from cupyflash.sim.l2.streamed import FEW_REGISTERS

# Within a turn
FIRST, OF_K, OF_V, LAST = range(4)


@dataclass(frozen=True)
class Cached:
    """Its tensors."""

    Q: Tensor
    keys: tuple[Tensor, Tensor]
    results: tuple[Tensor, ...]
    parts: tuple[Tensor, ...]  # of all splits, one behind the other
    lengths: Tensor | None

    @classmethod
    def of(cls, schedule: DecodeSchedule, memory: Memory) -> Cached:
        p = schedule.problem
        rows, keys = p.head_count * p.seqlen_q, p.batch * p.kv_heads * p.seqlen_k
        results = [memory.rows("O", rows, p.head_dim_v * p.itemsize)]
        if schedule.lse:
            results.append(memory.rows("L", rows, FLOAT32))
        parts = {"O_part": decode_tiles.part_width(p) * FLOAT32, "m_part": FLOAT32, "l_part": FLOAT32}
        return cls(
            memory.rows("Q", rows, p.head_dim * p.itemsize),
            (memory.rows("K", keys, p.head_dim * p.itemsize), memory.rows("V", keys, p.head_dim_v * p.itemsize)),
            tuple(results),
            tuple(memory.rows(name, schedule.splits * rows, row) for name, row in parts.items()) if schedule.splits > 1 else (),
            memory.rows("cache_seqlens", p.batch, LENGTH) if p.options.padded else None,
        )

    def unit(self, schedule: DecodeSchedule) -> int:
        """What divides all requests: rows of heads that share a tile are apart."""
        by_keys = {schedule.block_cols, schedule.problem.seqlen_k, *lengths_of(schedule)}
        sizes = [tensor.row for tensor in (self.Q, *self.results, *self.parts)]
        sizes += [tensor.row * keys for tensor in self.keys for keys in by_keys]
        return unit_of(sizes + ([self.lengths.row] if self.lengths else []))


def lengths_of(schedule: DecodeSchedule) -> tuple[int, ...]:
    """The keys of each sequence."""
    p = schedule.problem
    return p.options.key_lengths or (p.seqlen_k,) * p.batch


class _OfSplits(Launch):
    """What both kernels know: which blocks of keys the row tiles of a sequence go through."""

    def __init__(self, schedule: DecodeSchedule, tensors: Cached) -> None:
        self.schedule, self.tensors, self.unit = schedule, tensors, tensors.unit(schedule)
        self.lengths = lengths_of(schedule)
        self.blocks = {(keys, tile): self._blocks(keys, tile) for keys in set(self.lengths) for tile in range(schedule.row_tiles)}

    def _blocks(self, keys: int, tile: int) -> tuple[int, int]:
        """First and end."""
        s = self.schedule
        begin, end = schedule_keys(s, keys, *queries(s, tile))
        return (begin // s.block_cols, -(-end // s.block_cols)) if begin < end else (0, 0)

    def splits(self, batch: int, tile: int) -> int:
        """Those that have keys."""
        first, end = self.blocks[self.lengths[batch], tile]
        return min(self.schedule.splits, end - first)

    def row(self, pair: int, r: np.ndarray) -> np.ndarray:
        """Among the rows of all query heads, row r of those that read a key head: its heads go before its queries."""
        s, p = self.schedule, self.schedule.problem
        found: np.ndarray = (pair * s.group + r % s.group) * p.seqlen_q + r // s.group
        return found


class Splits(_OfSplits):
    """A split of a row tile of a key head a thread block."""

    def __init__(self, schedule: DecodeSchedule, tensors: Cached) -> None:
        super().__init__(schedule, tensors)
        self.grid, self.slots = schedule.grid, schedule.device.sm_count * max(1, schedule.candidate.resident)
        self.visits = np.array([end - begin for _, _, _, begin, end in map(self._place, range(self.grid))], np.int64)
        self.turns = np.maximum(self.visits, 1)

    def _place(self, block: int) -> tuple[int, int, int, int, int]:
        """The key head of all, the row tile, the split, its blocks of keys."""
        s = self.schedule
        rest, split = divmod(block, s.splits)
        pair, tile = divmod(rest, s.row_tiles)
        batch = pair // s.problem.kv_heads
        first, end = self.blocks[self.lengths[batch], tile]
        number, all_ = self.splits(batch, tile), end - first
        if split >= number:
            return pair, tile, split, 0, 0
        return pair, tile, split, first + all_ * split // number, first + all_ * (split + 1) // number

    def requests(self, block: int, first: int, end: int) -> Requests:
        return Requests.together(list(self._of_block(block, first, end)))

    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        s, p, tensors = self.schedule, self.schedule.problem, self.tensors
        pair, tile, split, begin, end = self._place(block)
        batch = pair // p.kv_heads
        r = np.arange(tile * s.block_rows, min((tile + 1) * s.block_rows, s.rows))
        row = self.row(pair, r)
        if lo == 0:
            if tensors.lengths:
                yield tensors.lengths.of(0, FIRST, batch, 1)
            if begin < end:
                yield tensors.Q.of(0, FIRST, row, 1)
        turn = np.arange(lo, min(hi, end - begin))
        key0 = (begin + turn) * s.block_cols
        keys = np.minimum(s.block_cols, self.lengths[batch] - key0)
        for move, tensor in zip((OF_K, OF_V), tensors.keys, strict=True):
            yield tensor.of(turn, move, pair * p.seqlen_k + key0, keys)
        if hi == self.turns[block]:
            if s.splits == 1:
                for tensor in tensors.results:
                    yield tensor.of(hi - 1, LAST, row, 1, write=True)
            elif begin < end:
                for tensor in tensors.parts:
                    yield tensor.of(hi - 1, LAST, split * p.head_count * p.seqlen_q + row, 1, write=True)


class Merge(_OfSplits):
    """A row a thread block: its parts of all splits, and its result."""

    def __init__(self, schedule: DecodeSchedule, tensors: Cached) -> None:
        super().__init__(schedule, tensors)
        kernel = schedule.kernels()[1]
        self.grid, self.slots = kernel.grid, resident(schedule.device, kernel.threads, 0, FEW_REGISTERS)
        self.turns = np.ones(self.grid, np.int64)

    def requests(self, block: int, first: int, end: int) -> Requests:
        s, p, tensors = self.schedule, self.schedule.problem, self.tensors
        head, query = divmod(block, p.seqlen_q)
        batch = head // p.heads
        tile = (query * s.group + head % p.heads % s.group) // s.block_rows
        of_splits = np.arange(self.splits(batch, tile)) * p.head_count * p.seqlen_q + block
        parts = [tensors.lengths.of(0, FIRST, batch, 1)] if tensors.lengths else []
        parts += [tensor.of(0, OF_K, of_splits, 1) for tensor in tensors.parts]
        return Requests.together(parts + [tensor.of(0, LAST, block, 1, write=True) for tensor in tensors.results])


def decode(schedule: DecodeSchedule, memory: Memory) -> list[Launch]:
    """The splits and, where there are several, what merges them."""
    tensors = Cached.of(schedule, memory)
    splits = Splits(schedule, tensors)
    return [splits, Merge(schedule, tensors)] if schedule.splits > 1 else [splits]
