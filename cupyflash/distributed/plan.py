"""The calls of attention that a rank makes in a ring, and the times at which K and V move. Nothing here knows arrays or a
transport."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from cupyflash.distributed.layout import Part, arrivals, checked_ranks, parts, placed
from cupyflash.request.options import Options, Window, require_flag
from cupyflash.request.problem import checked_size


class Piece(NamedTuple):
    """One call of attention: a stretch of a rank's rows against a stretch of the keys of a step's source.

    `rows` and `keys` count within the rank's part and the source's (of gathered keys: positions of the sequence); `row` and `key`
    are the positions in the sequence of the first of each. `causal` and `window` are the arguments of that call, aligned
    bottom-right within the piece. Each row sees a key, each key is seen, and the last row sees the last key.
    """

    rows: range
    keys: range
    row: int
    key: int
    causal: bool
    window: Window | None

    @property
    def scores(self) -> int:
        """The number of visible scores: the sum over rows of the keys of each."""
        rows, keys = len(self.rows), len(self.keys)
        left, right = self.window or (None, 0 if self.causal else None)
        behind = 0 if right is None else _behind(rows, keys, right)
        return rows * keys - behind - (0 if left is None else _before(rows, keys, left))


def _behind(rows: int, keys: int, right: int) -> int:
    """The number of scores beyond the `right` limit: row i from the bottom lacks i - right of them, at most `keys`."""
    most = rows - 1 - right  # of the first row
    return 0 if most <= 0 else most * (most + 1) // 2 - (0 if most <= keys else (most - keys) * (most - keys + 1) // 2)


def _before(rows: int, keys: int, left: int) -> int:
    """The number of scores before the `left` limit: row i from the bottom lacks keys - 1 - left - i of them."""
    most = keys - 1 - left  # of the last row
    return 0 if most <= 0 else most * (most + 1) // 2 - (0 if most <= rows else (most - rows) * (most - rows + 1) // 2)


class Step(NamedTuple):
    """One step of the ring: `source` is the rank whose K and V are there, `pieces` the calls with them, perhaps none."""

    source: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class RingPlan:
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

    n_q: int
    n_k: int
    ranks: int
    layout: str
    causal: bool = False
    window: Window | None = None
    gather: bool = False
    by_position: bool = False

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

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """The distance of each step's source before the rank itself, rising from 0."""
        if self.gather:
            return (0,)
        sees = np.zeros((self.ranks, self.ranks), bool)
        for rows, keys in product(zip(*self.q_parts, strict=True), zip(*self.k_parts, strict=True)):
            sees |= self._sees(rows, keys)
        ranks, sources = np.nonzero(sees)
        return tuple(sorted({0, *np.unique((ranks - sources) % self.ranks).tolist()}))

    def _sees(self, rows: tuple[range, ...], keys: tuple[range, ...]) -> np.ndarray:
        """True if any row of each chunk of rows sees any key of each chunk of keys."""
        (row, row_end), (key, key_end) = (np.array([(each.start, each.stop) for each in cut], np.int64).T for cut in (rows, keys))
        own, (left, right) = self.n_k - self.n_q, self.reach
        sees = (row < row_end)[:, None] & (key < key_end)
        if left is not None:
            sees &= (row + own - left)[:, None] < key_end
        if right is not None:
            sees &= (row_end - 1 + own + right)[:, None] >= key
        return np.asarray(sees)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """The steps of rank `rank`, in order."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be between 0 and {self.ranks - 1}, got {rank}")
        return _steps(self, rank)

    def pieces(self, rows: Part, keys: Part) -> tuple[Piece, ...]:
        """The calls for a part's rows against a part's keys."""
        (left, right), own = self.reach, self.n_k - self.n_q
        bands = []
        for (chunk, i), (against, j) in product(placed(rows), placed(keys)):
            row, key = chunk.start - i, against.start - j
            at = own + row - key  # row i's own key is i + at
            near, far = (None if left is None else at - left), (None if right is None else at + right)
            seen = _trimmed(range(i, i + len(chunk)), range(j, j + len(against)), near, far)
            bands += [] if seen is None else [_Band(*seen, row, key)]
        return tuple(band.piece() for band in _joined(bands, self.by_position))


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


@lru_cache(maxsize=256)
def _plan(
    n_q: int, n_k: int, ranks: int, layout: str, causal: bool, window: Window | None, gather: bool, by_position: bool
) -> RingPlan:
    return RingPlan(n_q, n_k, ranks, layout, causal, window, gather, by_position)


@lru_cache(maxsize=256)
def _steps(plan: RingPlan, rank: int) -> tuple[Step, ...]:
    rows = plan.q_parts[rank]
    found = arrivals(rank, plan.k_parts, plan.shifts, plan.gather)
    return tuple(Step(source, plan.pieces(rows, keys)) for source, keys in found)


class _Band(NamedTuple):
    """The keys that some rows see, both counted within their parts: row i sees i + near <= j <= i + far, None for no limit.

    A row's position in the sequence is i + row, a key's is j + key (in a band that was joined: of the first ones).
    """

    rows: range
    keys: range
    near: int | None
    far: int | None
    row: int
    key: int

    def seen(self, i: int) -> tuple[int, int]:
        """The keys from first to end that row i of `rows` sees."""
        first = self.keys.start if self.near is None else max(self.keys.start, i + self.near)
        return first, (self.keys.stop if self.far is None else min(self.keys.stop, i + self.far + 1))

    def turns(self) -> set[int]:
        """Rows between which the visible keys are linear in i."""
        at = {self.rows.start, self.rows.stop - 1}
        at |= set() if self.near is None else {self.keys.start - self.near}
        return at | (set() if self.far is None else {self.keys.stop - 1 - self.far})

    def piece(self) -> Piece:
        """The call; the last row's own key is the last one there."""
        last = self.keys.stop - self.rows.stop
        left, right = (None if self.near is None else last - self.near), (None if self.far is None else self.far - last)
        causal = left is None and right == 0
        window = None if causal or (left is None and right is None) else (left, right)
        return Piece(self.rows, self.keys, self.rows.start + self.row, self.keys.start + self.key, causal, window)


def _trimmed(rows: range, keys: range, near: int | None, far: int | None) -> tuple[range, range, int | None, int | None] | None:
    """Rows and keys without those that see nothing and are seen by none, and the effective limits; None if nothing is seen."""
    i0, i1, j0, j1 = rows.start, rows.stop, keys.start, keys.stop
    i0 = i0 if far is None else max(i0, j0 - far)
    i1 = i1 if near is None else min(i1, j1 - near)
    if i0 >= i1:
        return None
    j0 = j0 if near is None else max(j0, i0 + near)
    j1 = j1 if far is None else min(j1, i1 + far)
    near = None if near is None or i1 - 1 + near <= j0 else near
    far = None if far is None or i0 + far >= j1 - 1 else far
    return range(i0, i1), range(j0, j1), near, far


def _joined(bands: list[_Band], by_position: bool) -> list[_Band]:
    """The same in fewer calls: neighbours along the keys first, then along the rows, as long as any two are one."""
    for a, b in ((a, b) for along in ("keys", "rows") for a, b in product(bands, bands) if _adjoin(a, b, along)):
        if by_position and (a.row, a.key) != (b.row, b.key):
            continue
        if (one := _as_one(a, b)) is not None:
            return _joined([one if each is a else each for each in bands if each is not b], by_position)
    return bands


def _adjoin(a: _Band, b: _Band, along: str) -> bool:
    """True if b's keys follow directly on a's, for the same rows; or its rows, for the same keys."""
    return (a.rows == b.rows and a.keys.stop == b.keys.start) if along == "keys" else a.rows.stop == b.rows.start


def _as_one(a: _Band, b: _Band) -> _Band | None:
    """One band that sees what both see, if there is one: the visible keys are compared wherever they may change."""
    rows, keys = (range(min(x.start, y.start), max(x.stop, y.stop)) for x, y in ((a.rows, b.rows), (a.keys, b.keys)))
    key = min(a, b, key=lambda band: band.keys.start).key
    for near, far in product((None, a.near, b.near), (None, a.far, b.far)):
        one = _Band(rows, keys, near, far, a.row, key)
        if all(_both(a, b, i) == one.seen(i) for i in _compared(rows, a, b, one)):
            return one
    return None


def _compared(rows: range, *bands: _Band) -> set[int]:
    turns = set().union(*(band.turns() for band in bands))
    return {i + near for i in turns for near in (-1, 0, 1) if i + near in rows}


def _both(a: _Band, b: _Band, i: int) -> tuple[int, int] | None:
    """The keys that row i sees in either band; None if they are not consecutive."""
    seen = [band.seen(i) for band in (a, b) if i in band.rows]
    return None if any(left[1] != right[0] for left, right in pairwise(seen)) else (seen[0][0], seen[-1][1])


def piece_of(rows: range, keys: range, position: tuple[int, int], at: int, reach: Window) -> Piece | None:
    """The call for a stretch of rows and one of keys, if row i's own key is i + `at`; None if no row sees a key.

    `position`: the offsets from row and key numbers to positions in the sequence.
    """
    near, far = (None if reach[0] is None else at - reach[0]), (None if reach[1] is None else at + reach[1])
    seen = _trimmed(rows, keys, near, far)
    return None if seen is None or not rows or not keys else _Band(*seen, *position).piece()
