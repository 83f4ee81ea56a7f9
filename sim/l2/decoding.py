"""Decoding's kernels: rows in which heads go before queries, parts of splits, keys that may lie in pages, and new ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from cupyflash.basics import Array
from cupyflash.schedules import DecodeSchedule, Move
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import PlacedTensor
from cupyflash.sim.l2.played import PlayedWalk
from cupyflash.sim.l2.works import MovedTiles


class PlayedDecoding(PlayedWalk):
    """A split of a row tile of a key head a thread block, or a row whose parts are merged."""

    schedule: DecodeSchedule

    def _placed(self, move: Move) -> Callable[[MovedTiles], Requests]:
        s, moved, p, cache = self.schedule, move.tensor, self.schedule.problem, self.schedule.cache
        cols, page = s.block_cols, cache.page_size or max(1, p.seqlen_k)
        rows = p.head_count * p.seqlen_q
        if moved.of in ("query", "part", "head"):
            self.units[-1] = moved.row_bytes
            count = p.heads if moved.of == "head" else rows * (s.splits if moved.of == "part" else 1)
            return partial(self._by_rows, move, self.memory.rows(moved.name, count, moved.row_bytes))
        if moved.of == "batch":
            return super()._placed(move)
        given = self.given.get("block_table", np.arange(p.batch * (p.seqlen_k // page)).reshape(p.batch, -1))
        # Those of a cache that is shared come again
        pages = np.clip(given, 0, None) % max(1, cache.pages) if cache.page_size else np.asarray(given)
        if moved.of == "pages":
            return partial(self._pages, move, self.memory.rows(moved.name, pages.size, moved.row_bytes), page)
        piece = math.gcd(page, cols) if cache.page_size else cols
        self.units[-1] = moved.row_bytes * math.gcd(piece, p.seqlen_k, cache.appended, *s.cached)
        if moved.of == "new":
            tensor = self.memory.rows(moved.name, p.batch * p.kv_heads * cache.appended, moved.row_bytes)
            return partial(self._new, move, tensor)
        keys = max(1, cache.pages if cache.page_size else p.batch) * p.kv_heads * page
        return partial(self._cached, move, self.memory.rows(moved.name, keys, moved.row_bytes), pages, piece)

    def _by_rows(self, move: Move, tensor: PlacedTensor, at: MovedTiles) -> Requests:
        """A tile's rows, one by one, or their heads."""
        s, p, of = self.schedule, self.schedule.problem, move.tensor.of
        at, head = self._by_heads(move, at)
        first, rows = self._extent(move, at, "i")
        at, n = at.repeated(rows)
        query, member = np.divmod(np.repeat(first, rows) + n, self.together)
        head = np.repeat(head, rows) + member
        if of == "head":
            often = np.ones_like(head)
            address = tensor.first + head * tensor.row
            return Requests.of_elements(at.turn, address, often, tensor.row, whose=at.work)
        split = 0 if of == "query" else at.j if self.walk.kernel == "merge_splits" else at.i % s.splits
        row = split * p.head_count * p.seqlen_q + self._row(move, at, head, query)
        return tensor.of(at.turn, row, 1)

    def _span(self, move: Move, at: MovedTiles) -> tuple[Array, Array]:
        """The keys of column blocks that are moved: of those that are cached, or of the new ones."""
        part, cols = self.works.part[at.work], self.walk.blocks[1]
        there, every = self.k.there[part], self.lengths[part, 1]
        first, end = at.j * cols, (at.j + 1) * cols
        return (first, np.minimum(end, there)) if move.tensor.of == "key" else (np.maximum(first, there), np.minimum(end, every))

    def _new(self, move: Move, tensor: PlacedTensor, at: MovedTiles) -> Requests:
        part, (first, end) = self.works.part[at.work], self._span(move, at)
        pair = self.k.plane[part] + self.works.k[at.work]
        row = pair * self.schedule.cache.appended + first - self.k.there[part]
        return tensor.of(at.turn, row, np.maximum(0, end - first))

    def _cached(self, move: Move, tensor: PlacedTensor, pages: Array, piece: int, at: MovedTiles) -> Requests:
        """Keys of the cache, in pieces that lie in one page."""
        s, p, (first, end) = self.schedule, self.schedule.problem, self._span(move, at)
        if move.tensor.of == "added":
            end = np.where(at.i // s.splits == s.row_tiles - 1, end, first)
        number_of = np.maximum(0, -(-end // piece) - first // piece)
        at, n = at.repeated(number_of)
        first, end = np.repeat(first, number_of), np.repeat(end, number_of)
        whole = (first // piece + n) * piece
        lo, hi = np.maximum(first, whole), np.minimum(end, whole + piece)
        page, place = np.divmod(lo, s.cache.page_size or max(1, p.seqlen_k))
        part = self.works.part[at.work]
        row = (pages[part, page] * p.kv_heads + self.works.k[at.work]) * (s.cache.page_size or p.seqlen_k) + place
        return tensor.of(at.turn, row, hi - lo)

    def _pages(self, move: Move, tensor: PlacedTensor, page: int, at: MovedTiles) -> Requests:
        """The places of the pages that a split goes through."""
        whose, n = self.works.part[at.work], np.zeros_like(at.i)
        first = np.zeros_like(at.i)
        for part in np.unique(whose).tolist():
            some, one = whose == part, self.walk.parts[part]
            n[some] = one.extents(self.walk.blocks, of="pages")[0][at.i[some]]
            first[some] = one.visited(0).first[at.i[some]] * self.walk.blocks[1] // page
        return tensor.of(at.turn, whose * (self.schedule.problem.seqlen_k // page) + first, n)
