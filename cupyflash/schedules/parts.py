"""Batches and packed sequences: the place of their rows and keys, and the tiles that their heads visit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyflash.basics import Array
from cupyflash.request.problem import Problem

if TYPE_CHECKING:
    from cupyflash.schedules.base import TileSchedule
    from cupyflash.schedules.moves import Of
    from cupyflash.schedules.packed import Packed


class Tiles(NamedTuple):
    """The tiles that masks keep, (Tr, Tc), or as many of these as heads: `kept` are visited; `mixed` are those of them whose scores
    need the mask one by one."""

    kept: Array
    mixed: Array

    def at(self, *place: Any) -> Tiles:
        """The tiles of some heads."""
        return Tiles(self.kept[place], self.mixed[place])


@dataclass(frozen=True)
class Visited:
    """The column blocks that each row block visits: first <= j < end and, if masks leave out others, those in `kept`."""

    first: Array
    end: Array
    kept: Array | None = None  # (Tr, Tc), within first and end
    mixed: Array | None = None  # of those, the ones whose scores a mask is asked for; None for all

    @classmethod
    def of(cls, schedule: TileSchedule, keys: int, tiles: Tiles | None) -> Visited:
        """Return the visits of a schedule; `tiles` are those that masks keep of one (batch, head), None for all."""
        p = schedule.problem
        starts = np.arange(schedule.row_blocks) * schedule.block_rows
        first, _ = p.keys_seen(starts, keys)
        _, end = p.keys_seen(np.minimum(starts + schedule.block_rows, p.seqlen_q) - 1, keys)
        none = first >= end
        first = np.where(none, 0, first // schedule.block_cols)
        end = np.where(none, 0, -(-end // schedule.block_cols))
        if tiles is None:
            return cls(first, end)
        j = np.arange(tiles.kept.shape[1])
        inside = (first[:, None] <= j) & (j < end[:, None])
        return cls(first, end, tiles.kept & inside, tiles.mixed & inside)

    @classmethod
    def every(cls, row_blocks: int, col_blocks: int) -> Visited:
        """All tiles."""
        return cls(np.zeros(row_blocks, np.int64), np.full(row_blocks, col_blocks))

    @classmethod
    def by_any(cls, heads: Sequence[Visited]) -> Visited:
        """The tiles that any of some heads visits."""
        first, end = heads[0].first, heads[0].end
        kept = [each.kept for each in heads if each.kept is not None]
        return cls(first, end, np.any(kept, axis=0) if kept else None)

    @property
    def asked(self) -> Visited:
        """The tiles whose scores need a mask."""
        return self if self.mixed is None else Visited(self.first, self.end, self.mixed)

    @property
    def spanned(self) -> Visited:
        """The tiles that position lets be seen."""
        return Visited(self.first, self.end)

    @property
    def counts(self) -> Array:
        """The number of column blocks that each row block visits."""
        counted: Array = self.end - self.first if self.kept is None else self.kept.sum(axis=1)
        return counted

    def column_counts(self, col_blocks: int) -> Array:
        """The number of row blocks that visit each column block."""
        if self.kept is not None:
            return np.asarray(self.kept.sum(axis=0))
        begin, behind = (np.bincount(each, minlength=col_blocks + 1)[: col_blocks + 1] for each in (self.first, self.end))
        return np.cumsum(begin - behind)[:col_blocks]

    @property
    def columns(self) -> Array:
        """The column blocks that any row block visits."""
        if self.kept is not None:
            return np.flatnonzero(self.kept.any(axis=0))
        seen = self.first < self.end
        return np.arange(self.first[seen].min(), self.end.max()) if seen.any() else np.arange(0)

    @property
    def pairs(self) -> tuple[Array, Array]:
        """i and j of all that are visited, in 32 bits, for they may be many."""
        if self.kept is not None:
            rows, cols = np.nonzero(self.kept)
            return rows.astype(np.int32), cols.astype(np.int32)
        counts = self.counts
        i: Array = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        before = (np.cumsum(counts) - counts - self.first).astype(np.int32)
        return i, np.arange(len(i), dtype=np.int32) - before[i]

    def sum(self, rows: Array, cols: Array) -> int:
        """The sum of rows[i] * cols[j] over the tiles (i, j) that are visited."""
        if self.kept is not None:
            return int(rows @ self.kept @ cols)
        upto = np.concatenate([np.zeros(1, np.int64), np.cumsum(cols)])
        return int(rows @ (upto[self.end] - upto[self.first]))


class Axis(NamedTuple):
    """The place of a batch's or sequence's rows, or keys, in a tensor that has a plane of `length` rows for each head.

    Head 0 has plane `plane`, in which its rows begin at `begin`. `there` is the number of its rows, `room` the number for which
    there is room: within a tensor map's boxes, or keys beyond a batch's length. Numbers, or arrays for several parts.
    """

    plane: Any
    length: Any
    begin: Any
    there: Any
    room: Any

    def tiles(self, size: int, room: bool = False) -> Array:
        """The rows of each tile of `size`."""
        every = np.arange(-(-self.room // size)) * size
        found: Array = np.clip((self.room if room else self.there) - every, 0, size)
        return found


NOWHERE = Axis(0, 0, 0, 0, 0)


@dataclass(frozen=True, eq=False)
class Part:
    """Batch `number`, or the packed sequence of that number by a `schedule` of its own."""

    number: int
    schedule: TileSchedule
    q: Axis
    k: Axis
    kept: Tiles | None = None
    """The tiles that masks keep of each query head, (heads, Tr, Tc)"""

    @property
    def problem(self) -> Problem:
        return self.schedule.problem

    @cached_property
    def _visited(self) -> list[Visited]:
        """The visited tiles of each query head, or once for all."""
        kept = [None] if self.kept is None else [self.kept.at(head) for head in range(len(self.kept.kept))]
        return [Visited.of(self.schedule, self.k.there, each) for each in kept]

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that parts share which visit the same tiles, of the same sizes."""
        return id(self.schedule), self.q[3:], self.k[3:], id(self.kept)

    @property
    def sizes(self) -> tuple[int, int]:
        """Queries and keys, as score and mask functions know them."""
        return self.problem.seqlen_q, self.problem.seqlen_k

    @property
    def heads_together(self) -> int:
        """Query heads that go before the queries in the rows."""
        return 1

    @property
    def alike(self) -> bool:
        """True where all heads visit the same tiles."""
        return self.kept is None

    def visited(self, head: int) -> Visited:
        """The column blocks that the row blocks of a query head visit."""
        return self._visited[head if self.kept is not None else 0]

    def extents(self, blocks: tuple[int, int], room: bool = False, of: Of = "scores") -> tuple[Array, Array]:
        """Rows of each row block, and columns of each column block; with those that only have `room` there."""
        return self.q.tiles(blocks[0], room), self.k.tiles(blocks[1], room)

    def rows(self, i: Array, size: int) -> Array:
        """The first rows of row blocks."""
        return i * size

    def keys_seen(self, rows: Array, of: Of = "seen") -> tuple[Array, Array]:
        """The keys first <= k < end that rows see for their position."""
        return self.problem.keys_seen(rows, self.k.there)


def batches(schedule: TileSchedule) -> tuple[Part, ...]:
    """The batches of a schedule, with the keys that each has."""
    p, tiles, rooms = schedule.problem, schedule.kept_tiles(), schedule.rooms_beyond
    return tuple(
        Part(
            batch,
            schedule,
            Axis(batch * p.heads, p.seqlen_q, 0, p.seqlen_q, rooms[0]),
            Axis(batch * p.kv_heads, p.seqlen_k, 0, keys, rooms[1]),
            None if tiles is None else tiles.at(batch),
        )
        for batch, keys in enumerate(p.keys_of_each)
    )


def packed_parts(packed: Packed, each: Iterable[TileSchedule]) -> tuple[Part, ...]:
    """The parts of packed sequences, each from its own schedule."""
    found, query, key = [], 0, 0
    kept: dict[int, Tiles | None] = {}
    for number, one in enumerate(each):
        p, rooms = one.problem, one.rooms_beyond
        if id(one) not in kept:
            tiles = one.kept_tiles()
            kept[id(one)] = None if tiles is None else tiles.at(0)
        q, k = Axis(0, packed.total_q, query, p.seqlen_q, rooms[0]), Axis(0, packed.total_k, key, p.seqlen_k, rooms[1])
        found.append(Part(number, one, q, k, kept[id(one)]))
        query, key = query + p.seqlen_q, key + p.seqlen_k
    return tuple(found)
