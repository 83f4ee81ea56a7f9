"""The calls of attention that a rank makes in a ring, and when K and V move: nothing here knows of arrays or of a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from cupyflash.basics import Array
from cupyflash.distributed.layout import Chunk, Part, arrivals, checked_ranks, parts, placed
from cupyflash.request.options import Options, Window, require_flag
from cupyflash.request.problem import checked_size


class Piece(NamedTuple):
    """One call of attention: a stretch of a rank's rows against a stretch of the keys of a step's source.

    `rows` and `keys` count within the rank's part and the source's (of gathered keys: positions of the sequence); `row` and `key`
    are the positions in the sequence of the first of each. `causal` and `window` are what that call is given, aligned bottom-right
    within the piece. Each row sees a key, each key is seen, and the last row sees the last key.

    The sequence has n_q rows and n_k keys; it is number `sequence` of packed ones, or the only one (None).
    """

    rows: range
    keys: range
    row: int
    key: int
    causal: bool
    window: Window | None
    sequence: int | None
    n_q: int
    n_k: int

    @property
    def scores(self) -> int:
        """The number of scores that are seen: the sum over rows of the keys of each."""
        rows, keys = len(self.rows), len(self.keys)
        left, right = self.window or (None, 0 if self.causal else None)
        behind = 0 if right is None else _corner(rows - 1 - right, keys)
        return rows * keys - behind - (0 if left is None else _corner(keys - 1 - left, rows))


def _corner(most: int, lines: int) -> int:
    """The scores of a corner beyond a limit: `most` in its first line, one fewer in each of the next, `lines` at most."""
    return _triangle(most) - _triangle(most - lines)


def _triangle(side: int) -> int:
    return max(0, side) * (side + 1) // 2


class PackedPiece(NamedTuple):
    """A call of packed attention: whole sequences one behind the other, from number `sequence` on, with their bounds."""

    rows: range
    keys: range
    sequence: int
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]


class RingStep(NamedTuple):
    """One step of the ring: `source` is the rank whose K and V are there, `pieces` what is computed with them, perhaps nothing."""

    source: int
    pieces: tuple[Any, ...]


@dataclass(frozen=True)
class PlanOverRanks(ABC):
    """The calls of each rank, step by step: what all plans have in common."""

    n_q: int
    n_k: int
    ranks: int
    layout: str
    causal: bool = False
    window: Window | None = None
    gather: bool = False

    @cached_property
    def q_parts(self) -> tuple[Part, ...]:
        """The rows that each rank holds."""
        return parts(self.n_q, self.ranks, self.layout)

    @cached_property
    def k_parts(self) -> tuple[Part, ...]:
        """The keys that each rank holds."""
        return parts(self.n_k, self.ranks, self.layout)

    @cached_property
    def reach(self) -> Window:
        """(left, right): row r sees keys from r + n_k - n_q - left to r + n_k - n_q + right; None for no limit."""
        return (self.window[0] if self.window else None), (0 if self.causal else self.window[1] if self.window else None)

    @property
    @abstractmethod
    def shifts(self) -> tuple[int, ...]:
        """The distance in ranks back to each step's source, rising from 0."""

    @abstractmethod
    def pieces(self, rows: Part, keys: Part) -> tuple[Any, ...]:
        """The calls for a part's rows against a part's keys."""

    def steps(self, rank: int) -> tuple[RingStep, ...]:
        """The steps of rank `rank`, in order."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be between 0 and {self.ranks - 1}, got {rank}")
        return _steps(self, rank)


@lru_cache(maxsize=256)
def _steps(plan: PlanOverRanks, rank: int) -> tuple[RingStep, ...]:
    found = arrivals(rank, plan.k_parts, plan.shifts, plan.gather)
    return tuple(RingStep(source, plan.pieces(plan.q_parts[rank], keys)) for source, keys in found)


@dataclass(frozen=True)
class RingPlan(PlanOverRanks):
    """Attention of n_q queries and n_k keys over `ranks` ranks that each hold their part by `layout`.

    Rows see the keys that they see in `attention` over the whole sequence: `causal` and `window` are aligned bottom-right, for row
    r to position r + n_k - n_q. Rank r computes at step i with K and V of rank r - `shifts[i]` (modulo the ranks), its own first.
    Between step i and the next each rank sends the K and V that it has to rank r + `shifts[i + 1]` - `shifts[i]`. A shift at which
    no rank sees anything is left out, so that a window ends the ring early; all ranks have the same number of steps.

    In the backward dK and dV, in float32, travel with K and V from the second step on, and after the last step to their owner, rank
    r - `shifts[-1]`; an owner keeps the results of its first step and adds them.

    `gather`: all ranks' K and V are there at once, in the order of positions. There is one step, whose source is the rank itself,
    and its pieces' `keys` are positions.

    `by_position`: scores depend on positions (score and mask functions, dropout), so the rows of a piece, and its keys, have
    consecutive positions. Without it a piece joins chunks if the masks of a call allow it.
    """

    by_position: bool = False

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        if self.gather:
            return (0,)
        sees = np.zeros((self.ranks, self.ranks), bool)
        for rows, keys in product(zip(*self.q_parts, strict=True), zip(*self.k_parts, strict=True)):
            sees |= self._sees(rows, keys)
        ranks, sources = np.nonzero(sees)
        return tuple(sorted({0, *np.unique((ranks - sources) % self.ranks).tolist()}))

    def _sees(self, rows: tuple[range, ...], keys: tuple[range, ...]) -> Array:
        """True for each chunk of rows and chunk of keys of which any row sees any key."""
        (row, row_end), (key, key_end) = (np.array([(each.start, each.stop) for each in cut], np.int64).T for cut in (rows, keys))
        own, (left, right) = self.n_k - self.n_q, self.reach
        sees = (row < row_end)[:, None] & (key < key_end)
        if left is not None:
            sees &= (row + own - left)[:, None] < key_end
        if right is not None:
            sees &= (row_end - 1 + own + right)[:, None] >= key
        return np.asarray(sees)

    def pieces(self, rows: Part, keys: Part) -> tuple[Piece, ...]:
        chunks = product(placed(rows), placed(keys))
        seen = (SeenBand.of(mine, there, (0, self.n_q), (0, self.n_k), self.reach) for mine, there in chunks)
        bands = _joined([band for band in seen if band is not None], self.by_position)
        return tuple(band.piece(None, self.n_q, self.n_k) for band in bands)


def plan_ring(
    n_q: int,
    n_k: int,
    ranks: int,
    layout: str = "zigzag",
    causal: bool = False,
    window: Window | None = None,
    gather: bool = False,
    by_position: bool = False,
) -> RingPlan:
    """The checked plan for these arguments. TypeError or ValueError that names the argument, its value and the allowed values."""
    n_q, n_k = checked_size("n_q", n_q), checked_size("n_k", n_k)
    parts(0, checked_ranks(ranks), layout)
    require_flag("gather", gather)
    require_flag("by_position", by_position)
    asked = Options(causal=causal, window=window)
    return _plan(n_q, n_k, ranks, layout, asked.causal, asked.window, bool(gather), bool(by_position))


_plan = lru_cache(maxsize=256)(RingPlan)

# Further than any sequence is long: no limit
FAR = 1 << 62


class SeenBand(NamedTuple):
    """The keys that some rows see, both counted within their parts: row i sees i + near <= j <= i + far.

    A row's position in the sequence is i + row, a key's is j + key (in a band that was joined: of the first ones).
    """

    rows: range
    keys: range
    near: int
    far: int
    row: int
    key: int

    @classmethod
    def of(cls, rows: Chunk, keys: Chunk, q: tuple[int, int], k: tuple[int, int], reach: Window) -> SeenBand | None:
        """The band of two chunks in the sequence whose rows and keys begin and end at q and k; None if nothing is seen."""
        mine, there = rows.within(*q), keys.within(*k)
        i, j = rows.local(mine), keys.local(there)
        row, key = mine.start - q[0] - i.start, there.start - k[0] - j.start  # from a place in a part to one in the sequence
        own = row - key + (k[1] - k[0]) - (q[1] - q[0])  # row i's own key is i + own
        left, right = (FAR if side is None else side for side in reach)
        return cls(i, j, own - left, own + right, row, key).trimmed()

    def trimmed(self) -> SeenBand | None:
        """Drop rows that see no key, keys that no row sees, and limits without effect; None if nothing is left."""
        i0, i1 = max(self.rows.start, self.keys.start - self.far), min(self.rows.stop, self.keys.stop - self.near)
        if i0 >= i1:
            return None
        j0, j1 = max(self.keys.start, i0 + self.near), min(self.keys.stop, i1 + self.far)
        near = -FAR if i1 - 1 + self.near <= j0 else self.near
        far = FAR if i0 + self.far >= j1 - 1 else self.far
        return self._replace(rows=range(i0, i1), keys=range(j0, j1), near=near, far=far)

    def seen(self, i: int) -> tuple[int, int]:
        """The keys from first to end that row i of `rows` sees."""
        return max(self.keys.start, i + self.near), min(self.keys.stop, i + self.far + 1)

    def turns(self) -> set[int]:
        """Rows between which what is seen is linear in i, some perhaps not of this band."""
        return {self.rows.start, self.rows.stop - 1, self.keys.start - self.near, self.keys.stop - 1 - self.far}

    def piece(self, sequence: int | None, n_q: int, n_k: int) -> Piece:
        """The call, in a sequence of these lengths; the last row's own key is the last one there."""
        last = self.keys.stop - self.rows.stop
        left = None if self.near == -FAR else last - self.near
        right = None if self.far == FAR else self.far - last
        causal = left is None and right == 0
        window = None if causal or (left is None and right is None) else (left, right)
        first = self.rows.start + self.row, self.keys.start + self.key
        return Piece(self.rows, self.keys, *first, causal, window, sequence, n_q, n_k)


def _joined(bands: list[SeenBand], by_position: bool) -> list[SeenBand]:
    """Join bands to fewer: neighbours along the keys first, then along the rows, as long as any two are one."""
    for a, b in ((a, b) for along in ("keys", "rows") for a, b in product(bands, bands) if _adjoin(a, b, along)):
        if by_position and (a.row, a.key) != (b.row, b.key):
            continue
        if (one := _as_one(a, b)) is not None:
            return _joined([one if each is a else each for each in bands if each is not b], by_position)
    return bands


def _adjoin(a: SeenBand, b: SeenBand, along: str) -> bool:
    """True if b's keys come right behind a's, for the same rows; or its rows."""
    return (a.rows == b.rows and a.keys.stop == b.keys.start) if along == "keys" else a.rows.stop == b.rows.start


def _as_one(a: SeenBand, b: SeenBand) -> SeenBand | None:
    """One band that sees what both see, if any does: what is seen is compared wherever it may turn."""
    rows, keys = (range(min(x.start, y.start), max(x.stop, y.stop)) for x, y in ((a.rows, b.rows), (a.keys, b.keys)))
    key = min(a, b, key=lambda band: band.keys.start).key
    for near, far in product((-FAR, a.near, b.near), (FAR, a.far, b.far)):
        one = SeenBand(rows, keys, near, far, a.row, key)
        if all(_both(a, b, i) == one.seen(i) for i in _compared(rows, a, b, one)):
            return one
    return None


def _compared(rows: range, *bands: SeenBand) -> set[int]:
    turns = set().union(*(band.turns() for band in bands))
    return {i + near for i in turns for near in (-1, 0, 1) if i + near in rows}


def _both(a: SeenBand, b: SeenBand, i: int) -> tuple[int, int] | None:
    """The keys that row i sees in either; None where they are not one behind the other."""
    seen = [band.seen(i) for band in (a, b) if i in band.rows]
    return None if any(left[1] != right[0] for left, right in pairwise(seen)) else (seen[0][0], seen[-1][1])
