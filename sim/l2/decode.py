"""Decoding: splits of the keys are thread blocks, whose parts a second kernel merges. Caches may lie in pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupyflash.decode import for_all_heads
from cupyflash.schedules import DecodeSchedule, decode_tiles
from cupyflash.schedules.base import FLOAT32
from cupyflash.schedules.decode import LENGTH, RowTile, seen_keys
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Launch, Memory, Tensor, resident, unit_of
from cupyflash.sim.l2.reads import At, Given, Reading, Reads, Scores
from cupyflash.sim.l2.streamed import FEW_REGISTERS

# Within a turn
FIRST, OF_K, OF_SCORES, OF_V, ADDED, LAST = range(6)


@dataclass(frozen=True)
class Cached:
    """Its tensors; keys of K and V in `pages`, by sequence and place, one behind the other where the call has none."""

    Q: Tensor
    keys: tuple[Tensor, Tensor]
    new: tuple[Tensor, Tensor]
    results: tuple[Tensor, ...]
    parts: tuple[Tensor, ...]  # of all splits, one behind the other
    lengths: Tensor | None
    sinks: Tensor | None
    table: Tensor | None
    pages: np.ndarray
    tree: Reading | None
    reads: Reads

    @classmethod
    def of(cls, schedule: DecodeSchedule, memory: Memory, given: Given) -> Cached:
        p, cache = schedule.problem, schedule.cache
        rows, page, row = p.head_count * p.seqlen_q, cache.page_size or p.seqlen_k, (p.head_dim, p.head_dim_v)
        pages = np.asarray(given.get("block_table", np.arange(p.batch * (p.seqlen_k // max(1, page))).reshape(p.batch, -1)))
        if cache.page_size:
            pages = np.clip(pages, 0, None) % max(1, cache.pages)  # those of a cache that is shared come again
        keys = max(1, cache.pages if cache.page_size else p.batch) * p.kv_heads * page
        K, V = (memory.rows(name, keys, d * p.itemsize) for name, d in zip("KV", row, strict=True))
        new = p.batch * p.kv_heads * cache.appended
        K_new, V_new = (memory.rows(f"{name}_new", new, d * p.itemsize) for name, d in zip("KV", row, strict=True))
        results = [memory.rows("O", rows, p.head_dim_v * p.itemsize)]
        if schedule.lse:
            results.append(memory.rows("L", rows, FLOAT32))
        parts = {"O_part": decode_tiles.part_width(p) * FLOAT32, "m_part": FLOAT32, "l_part": FLOAT32}
        return cls(
            memory.rows("Q", rows, p.head_dim * p.itemsize),
            (K, V),
            (K_new, V_new),
            tuple(results),
            tuple(memory.rows(name, schedule.splits * rows, row) for name, row in parts.items()) if schedule.splits > 1 else (),
            memory.rows("cache_seqlens", p.batch, LENGTH) if p.options.padded else None,
            memory.rows("sinks", p.heads, FLOAT32) if p.options.sinks else None,
            memory.rows("block_table", pages.size, LENGTH) if cache.page_size else None,
            pages,
            _tree(schedule, memory, given) if cache.tree else None,
            Reads(schedule, memory, given, by_tiles=False),
        )

    def unit(self, schedule: DecodeSchedule) -> int:
        """What divides all requests: rows of heads that share a tile are apart."""
        page, cols = schedule.cache.page_size, schedule.block_cols
        piece = math.gcd(page, cols) if page else cols
        by_keys = {piece, schedule.problem.seqlen_k, schedule.cache.appended, *lengths_of(schedule)}
        sizes = [tensor.row for tensor in (self.Q, *self.results, *self.parts)]
        sizes += [tensor.row * keys for tensor in (*self.keys, *self.new) for keys in by_keys]
        sizes += [each.row for each in (self.lengths, self.sinks, self.table) if each]
        return unit_of([*sizes, self.reads.unit, 1 if self.tree else 0])


def _tree(schedule: DecodeSchedule, memory: Memory, given: Given) -> Reading:
    """The mask of the newest keys."""
    p, tree = schedule.problem, for_all_heads(given.get("tree_mask"))
    return Reading.of_scores("tree_mask", "mask", (p.batch, 1, p.seqlen_q, p.seqlen_q), 1, memory, tree)


def lengths_of(schedule: DecodeSchedule) -> tuple[int, ...]:
    """The keys that each sequence has cached."""
    p = schedule.problem
    return p.options.key_lengths or (p.seqlen_k - schedule.cache.appended,) * p.batch


class _OfSplits(Launch):
    """What both kernels know: which blocks of keys the row tiles of a sequence go through."""

    def __init__(self, schedule: DecodeSchedule, tensors: Cached) -> None:
        self.schedule, self.tensors, self.unit = schedule, tensors, tensors.unit(schedule)
        self.lengths = lengths_of(schedule)
        self.tiles = {
            (cached, tile): RowTile.of(schedule, cached, tile) for cached in set(self.lengths) for tile in range(schedule.row_tiles)
        }

    def tile(self, batch: int, tile: int) -> RowTile:
        """A row tile of a sequence."""
        return self.tiles[self.lengths[batch], tile]

    def splits(self, tile: RowTile) -> int:
        """Those that have keys."""
        return min(self.schedule.splits, tile.end - tile.first)

    def of_heads(self, turn: int, head: np.ndarray) -> Iterator[Requests]:
        """The sinks of rows' heads."""
        if self.tensors.sinks:
            at = self.tensors.sinks.first + head * FLOAT32
            yield Requests.of_elements(np.array(turn), LAST, at, np.ones_like(head), FLOAT32)


@dataclass(frozen=True)
class Rows:
    """Those of a tile: of which query, of which head, which of all rows."""

    query: np.ndarray
    head: np.ndarray
    row: np.ndarray

    @classmethod
    def of(cls, schedule: DecodeSchedule, pair: int, tile: int) -> Rows:
        """Its heads go before its queries."""
        s, p = schedule, schedule.problem
        r = np.arange(tile * s.block_rows, min((tile + 1) * s.block_rows, s.rows))
        head = pair * s.group + r % s.group
        return cls(r // s.group, head % p.heads, head * p.seqlen_q + r // s.group)


class Splits(_OfSplits):
    """A split of a row tile of a key head a thread block."""

    def __init__(self, schedule: DecodeSchedule, tensors: Cached) -> None:
        super().__init__(schedule, tensors)
        self.grid, self.slots = schedule.grid, schedule.device.sm_count * max(1, schedule.candidate.resident)
        self.visits = np.array([end - begin for *_, begin, end in map(self._place, range(self.grid))], np.int64)
        self.turns = np.maximum(self.visits, 1)
        self.heft = 1 + tensors.reads.heft(schedule.block_rows, schedule.block_cols)

    def _place(self, block: int) -> tuple[int, RowTile, int, int, int]:
        """The key head of all, the row tile, the split, its blocks of keys."""
        s = self.schedule
        rest, split = divmod(block, s.splits)
        pair, number = divmod(rest, s.row_tiles)
        tile = self.tile(pair // s.problem.kv_heads, number)
        splits, blocks = self.splits(tile), tile.end - tile.first
        if split >= splits:
            return pair, tile, split, 0, 0
        return pair, tile, split, tile.first + blocks * split // splits, tile.first + blocks * (split + 1) // splits

    def requests(self, block: int, first: int, end: int) -> Requests:
        return Requests.together(list(self._of_block(block, first, end)))

    def _of_block(self, block: int, lo: int, hi: int) -> Iterator[Requests]:
        s, p, tensors = self.schedule, self.schedule.problem, self.tensors
        pair, tile, split, begin, end = self._place(block)
        rows = Rows.of(s, pair, tile.tile)
        if lo == 0:
            yield from self._first(pair // p.kv_heads, tile, rows, begin, end)
        turn = np.arange(lo, min(hi, end - begin))
        if len(turn):
            yield from self._keys(pair, tile, turn, begin + turn)
            yield from self._scores(pair // p.kv_heads, tile, rows, turn, begin + turn)
        if hi == self.turns[block]:
            if s.splits == 1:
                yield from self.of_heads(hi - 1, rows.head)
            of_split = split * p.head_count * p.seqlen_q if s.splits > 1 else 0
            for tensor in tensors.results if s.splits == 1 else tensors.parts if begin < end else ():
                yield tensor.of(hi - 1, LAST, of_split + rows.row, 1, write=True)

    def _first(self, batch: int, tile: RowTile, rows: Rows, begin: int, end: int) -> Iterator[Requests]:
        """What is read before the keys."""
        s, tensors, page = self.schedule, self.tensors, self.schedule.cache.page_size
        if tensors.lengths:
            yield tensors.lengths.of(0, FIRST, batch, 1)
        if begin == end:
            return
        yield tensors.Q.of(0, FIRST, rows.row, 1)
        yield from tensors.reads.of_head(At(batch, rows.head, s.problem.seqlen_q, tile.all), 0, FIRST)
        if page and tensors.table:
            first, behind = begin * s.block_cols // page, -(-min(end * s.block_cols, tile.all) // page)
            yield tensors.table.of(0, FIRST, batch * self.tensors.pages.shape[1] + first, behind - first)

    def _keys(self, pair: int, tile: RowTile, turn: np.ndarray, block: np.ndarray) -> Iterator[Requests]:
        """Of blocks of keys: those that are cached, and the new ones, which the last row tile puts behind them."""
        s, tensors = self.schedule, self.tensors
        batch, kv_head = divmod(pair, s.problem.kv_heads)
        piece = math.gcd(s.cache.page_size or s.block_cols, s.block_cols)  # keys of one page, at least
        key = (block[:, None] * s.block_cols + np.arange(0, s.block_cols, piece)).ravel()
        every = np.repeat(turn, s.block_cols // piece)
        behind = np.minimum(key + piece, tile.all)
        first = block * s.block_cols
        new, new_behind = np.maximum(first, tile.cached), np.minimum(first + s.block_cols, tile.all)
        added = pair * s.cache.appended + new - tile.cached
        for move, tensor, of_new in zip((OF_K, OF_V), tensors.keys, tensors.new, strict=True):
            yield tensor.of(every, move, self._at(batch, kv_head, key), np.maximum(0, np.minimum(behind, tile.cached) - key))
            yield of_new.of(turn, move, added, np.maximum(0, new_behind - new))
            if tile.tile == s.row_tiles - 1:
                begin = np.maximum(key, tile.cached)
                put = np.maximum(0, behind - begin)
                yield tensor.of(every, ADDED, self._at(batch, kv_head, begin), put, write=True)

    def _at(self, batch: int, kv_head: int, key: np.ndarray) -> np.ndarray:
        """The rows of the cache that keys of a sequence are in."""
        p, page = self.schedule.problem, self.schedule.cache.page_size or max(1, self.schedule.problem.seqlen_k)
        pages = self.tensors.pages[batch]
        number, place = np.divmod(key, page)
        found: np.ndarray = (pages[np.minimum(number, len(pages) - 1)] * p.kv_heads + kv_head) * page + place
        return found

    def _scores(self, batch: int, tile: RowTile, rows: Rows, turn: np.ndarray, block: np.ndarray) -> Iterator[Requests]:
        """What the scores of blocks of keys read."""
        s, tensors, at = self.schedule, self.tensors, At(batch, rows.head, self.schedule.problem.seqlen_q, tile.all)
        first, end = seen_keys(s, tile.all, rows.query)
        col0 = block[:, None] * s.block_cols
        seen = np.maximum(first, col0), np.minimum(end, col0 + s.block_cols)
        scores = Scores(np.broadcast_to(rows.query, seen[0].shape), *seen)
        yield from tensors.reads.of_scores(at, OF_SCORES, turn[:, None], scores)
        if tensors.tree:
            newest = tile.all - s.problem.seqlen_q
            of_newest = Scores(scores.row, np.maximum(seen[0], newest) - newest, seen[1] - newest)
            yield tensors.reads.of_reading(tensors.tree, at._replace(head=0), OF_SCORES, turn[:, None], of_newest)


class Merge(_OfSplits):
    """A row a thread block: its parts of all splits, and its result."""

    def __init__(self, schedule: DecodeSchedule, tensors: Cached) -> None:
        super().__init__(schedule, tensors)
        kernel = schedule.kernels()[1]
        self.grid, self.slots = kernel.grid, resident(schedule.device, kernel.threads, 0, FEW_REGISTERS)
        self.turns = np.ones(self.grid, np.int64)

    def requests(self, block: int, first: int, end: int) -> Requests:
        s, p, tensors = self.schedule, self.schedule.problem, self.tensors
        pair, query = divmod(block, p.seqlen_q)
        batch, head = divmod(pair, p.heads)
        tile = self.tile(batch, (query * s.group + head % s.group) // s.block_rows)
        of_splits = np.arange(self.splits(tile)) * p.head_count * p.seqlen_q + block
        parts = [tensors.lengths.of(0, FIRST, batch, 1)] if tensors.lengths else []
        parts += [tensor.of(0, OF_K, of_splits, 1) for tensor in tensors.parts]
        parts += self.of_heads(0, np.array([head]))
        return Requests.together(parts + [tensor.of(0, LAST, block, 1, write=True) for tensor in tensors.results])


def decode(schedule: DecodeSchedule, memory: Memory, given: Given) -> list[Launch]:
    """The splits and, where there are several, what merges them."""
    tensors = Cached.of(schedule, memory, given)
    splits = Splits(schedule, tensors)
    return [splits, Merge(schedule, tensors)] if schedule.splits > 1 else [splits]
