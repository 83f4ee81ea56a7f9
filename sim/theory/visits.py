"""The visits of row blocks, from the rows' point of view: shared by the closed forms and used by nothing else.

Position (causal mask, window, key lengths) leaves row block i the columns from a_i to b_i, both linear in i except for clipping
and rounding to whole column blocks. Their sums have closed forms, so that a count costs the same at any length; only block masks
and known masks are scanned, in time and memory of their own size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np

from cupyflash.basics import Array
from cupyflash.expressions.tree import Load, depends_on
from cupyflash.request import score
from cupyflash.request.options import EMPTY, MIXED
from cupyflash.request.problem import Problem
from cupyflash.request.score import Form
from cupyflash.schedules import BackwardSchedule, TileSchedule
from cupyflash.sim.theory import forms
from cupyflash.sim.theory.forms import blocks_in
from cupyflash.sim.theory.sums import clipped_sum
from cupyflash.sim.traffic import Traffic

INT32 = 4
Bytes = Counter[str]
"""Bytes that are read, by tensor."""
# Lengths up to which a few times the product of two of them is exact in 64 bits.
SAFE_IN_INT64 = 1 << 29


@dataclass(frozen=True)
class Visits:
    """The visits of one query head, summed over its row blocks.

    row_visits: R = sum of r_i c_i, with r_i the rows of row block i and c_i the column blocks that it visits. rows: r_i where
    c_i > 0. keys: those in the c_i column blocks. blocks: the column blocks that position leaves, to which a block mask applies.
    ends: row blocks that visit the last column block, where the keys end. visits: the c_i.
    """

    row_visits: int
    rows: int
    keys: int
    blocks: int
    ends: int
    visits: int

    @classmethod
    def of_heads(cls, counted: Iterable[tuple[int, Visits]]) -> Visits:
        """The sum of (number of query heads, their visits)."""
        parts = [[times * number for number in astuple(visits)] for times, visits in counted]
        return cls(*map(sum, zip(*parts, strict=True)))


def lengths(p: Problem) -> Mapping[int, int]:
    """The number of batches that have each number of keys, by that number."""
    return {p.seqlen_k: p.batch} if p.options.key_lengths is None else Counter(p.options.key_lengths)


class KeptTiles(NamedTuple):
    """The tiles of one query head, (Tr, Tc), under its masks: those visited, and those where a mask is evaluated for each score."""

    visited: Array
    asked: Array


def masks_and_lengths(schedule: TileSchedule) -> Iterator[tuple[int, int, list[KeptTiles] | None]]:
    """Yield (number of batches, their keys, the tiles that masks keep by head, or once for all heads; None for all tiles)."""
    p, kept = schedule.problem, _kept(schedule)
    if kept is None or len(kept.visited) == 1:
        for keys, batches in lengths(p).items():
            yield batches, keys, None if kept is None else _of_heads(kept, 0)
        return
    for batch in range(p.batch):
        yield 1, p.options.key_lengths[batch] if p.options.key_lengths else p.seqlen_k, _of_heads(kept, batch)


def _of_heads(kept: KeptTiles, batch: int) -> list[KeptTiles]:
    return [KeptTiles(kept.visited[batch, head], kept.asked[batch, head]) for head in range(kept.visited.shape[1])]


def _kept(schedule: TileSchedule) -> KeptTiles | None:
    """The kept tiles by the schedule's tiles: of all batches and heads, or of one where all are alike."""
    p, asked = schedule.problem, schedule.problem.options
    known = bool(schedule.mask_tiles) and asked.pattern is not None and asked.pattern.bits is not None
    if asked.block_mask is None and not known:
        return None
    visited = np.ones((1, 1, 1, 1), bool) if asked.block_mask is None else own_blocks(schedule, asked.block_mask.kept)
    if not known:
        return KeptTiles(visited, visited)
    assert asked.pattern is not None
    states = asked.pattern.states((p.seqlen_q, p.seqlen_k), schedule.blocks)
    made = np.broadcast_arrays(visited & (states != EMPTY), visited & (states == MIXED))
    return KeptTiles(made[0], made[1])


def own_blocks(schedule: TileSchedule, mask: Array) -> Array:
    """A block mask (..., Tr, Tc) for the schedule's blocks, which may be parts of the mask's blocks."""
    p, (br, bc) = schedule.problem, schedule.blocks
    rows, cols = (schedule.mask_blocks if isinstance(schedule, BackwardSchedule) else None) or (br, bc)
    i, j = np.arange(blocks_in(p.seqlen_q, br)) * br // rows, np.arange(blocks_in(p.seqlen_k, bc)) * bc // cols
    return mask[..., i[:, None], j]


def in_bytes(p: Problem, rows: Mapping[str, int]) -> Bytes:
    """The bytes of so many rows of each tensor; of S, P, dP and dS of so many elements."""
    return Counter(forms.bytes_of(rows, forms.row_bytes(p.head_dim, p.head_dim_v, p.itemsize, p.score_itemsize)))


def position_bytes(schedule: TileSchedule, looks: int, blocks: int) -> Bytes:
    """The bytes read for the tiles to visit: of the key lengths at `looks`; of a block mask and of a mask's states one for each of
    `blocks`."""
    o = schedule.problem.options
    found = {"key_lengths": INT32 * looks * o.padded, "block_mask": blocks * (o.block_mask is not None)}
    return Counter(found | {each.field: blocks for each in schedule.mask_tiles[:1]})


def states_made(schedule: TileSchedule) -> Traffic:
    """The bytes of finding the states of a mask's tiles. For each (batch, head) with a mask of its own, the mask is evaluated once
    a score; a function's loads by head are made once a tile, by row once a tile's row, by column once a tile's column."""
    p, Nq, Nk = schedule.problem, schedule.problem.seqlen_q, schedule.problem.seqlen_k
    read: Counter[str] = Counter()
    written: Counter[str] = Counter()
    for tiles in schedule.found_tiles:
        Tr, Tc = blocks_in(Nq, tiles.blocks[0]), blocks_in(Nk, tiles.blocks[1])
        planes = math.prod(tiles.planes)
        written[tiles.field] += planes * Tr * Tc
        form = p.options.mask_function
        if form is None:
            read["mask"] += planes * Nq * Nk
            continue
        for load, times in _times_loaded(form, Tr * Tc, Nq * Tc, Nk * Tr, Nq * Nk):
            read[score.field(load.name, "mask")] += planes * times * score.itemsize(form, load)
    return Traffic.of(read, written)


def _times_loaded(form: Form, of_tiles: int, of_rows: int, of_columns: int, of_scores: int) -> Iterator[tuple[Load, int]]:
    """Yield each load of a mask and how often it is made: up to MOST_PARTS loads that change along rows once a row, as many along
    columns once a column, further ones once a score; loads that change along neither once a tile."""
    room = [score.MOST_PARTS] * 2
    for load in form.loads:
        changes = depends_on(load) & {"row", "column"}
        along = "column" in changes
        if not changes:
            yield load, of_tiles
        elif len(changes) == 2 or not room[along]:
            yield load, of_scores
        else:
            room[along] -= 1
            yield load, of_columns if along else of_rows


def sides(p: Problem) -> tuple[int, int]:
    """(left, right): row r sees the columns from r - left to r + right; "no limit" is a number beyond all columns."""
    shift, far = p.seqlen_k - p.seqlen_q, p.seqlen_q + p.seqlen_k
    left, right = (far if side is None else side for side in (p.options.left, p.options.right))
    return left - shift, right + shift


def seen_blocks(schedule: TileSchedule, keys: int) -> range:
    """The row blocks whose rows see any of `keys`: a_i < b_i. They follow one another, since a_i and b_i only grow."""
    return range(*forms.seen_range(schedule.problem.seqlen_q, keys, schedule.block_rows, *sides(schedule.problem)))


def span(schedule: TileSchedule, keys: int, block: int) -> tuple[int, int]:
    """The column blocks begin <= j < end that row block `block`, one of `seen_blocks`, sees of `keys`."""
    return forms.col_range(schedule.problem.seqlen_q, keys, *schedule.blocks, *sides(schedule.problem), block)


def visits_of(schedule: TileSchedule, keys: int, kept: Array | None = None) -> Visits:
    """The sums for a head with `keys` keys that visits the tiles `kept` (Tr, Tc), or all."""
    if kept is not None:
        return _kept_visits(schedule, keys, kept)
    found = forms.visited(schedule.problem.seqlen_q, keys, *schedule.blocks, *sides(schedule.problem))
    return Visits(*found, visits=found[3])


def columns_of(schedule: TileSchedule, keys: int, kept: Array | None = None, room: int | None = None) -> int:
    """The keys of the column blocks that any row block visits; with those that only have `room` there, up to so many in all."""
    bc, room = schedule.block_cols, keys if room is None else room
    if kept is None:
        return forms.loaded_keys(schedule.problem.seqlen_q, keys, *schedule.blocks, *sides(schedule.problem), room)
    begin, end = _spans(schedule, keys)
    j = np.arange(kept.shape[1])
    visited = (kept & (begin[:, None] <= j) & (j < end[:, None])).any(axis=0)
    return int(visited @ np.clip(room - j * bc, 0, bc))


def _spans(schedule: TileSchedule, keys: int) -> tuple[Array, Array]:
    """`span` of every row block, for a block mask; 0, 0 where its rows see nothing."""
    begin, end = np.zeros((2, blocks_in(schedule.problem.seqlen_q, schedule.block_rows)), np.int64)
    for block in seen_blocks(schedule, keys):
        begin[block], end[block] = span(schedule, keys, block)
    return begin, end


def _kept_visits(schedule: TileSchedule, keys: int, kept: Array) -> Visits:
    br, bc = schedule.blocks
    begin, end = _spans(schedule, keys)
    starts, j = np.arange(len(begin)) * br, np.arange(kept.shape[1])
    rows = np.minimum(schedule.problem.seqlen_q - starts, br)
    visited = kept & (begin[:, None] <= j) & (j < end[:, None])
    visits, widths = visited.sum(axis=1), np.clip(keys - j * bc, 0, bc)
    ends = int(visited[:, blocks_in(keys, bc) - 1].sum()) if keys else 0
    left, keys_of_all = int((end - begin).sum()), int((visited @ widths).sum())
    return Visits(int(rows @ visits), int(rows[visits > 0].sum()), keys_of_all, left, ends, int(visits.sum()))


def scores_of(p: Problem, keys: int, kept: Array | None = None, blocks: tuple[int, int] = (1, 1)) -> int:
    """The number of scores of one head that position leaves, in the kept blocks of (Br, Bc) if there is a block mask."""
    left, right = sides(p)
    if kept is None:
        return clipped_sum(p.seqlen_q, 1, right + 1, keys) - clipped_sum(p.seqlen_q, 1, -left, keys)
    # For each corner of the blocks, the scores above and left of it that are within the bounds; differences count a block.
    number = np.int64 if p.seqlen_q + p.seqlen_k < SAFE_IN_INT64 else object
    rows, cols = (
        np.array([min(block * size, length) for block in range(count + 1)], number)
        for count, size, length in zip(kept.shape, blocks, (p.seqlen_q, keys), strict=True)
    )
    far = p.seqlen_q + p.seqlen_k
    bounds = (min(right + 1, far), max(-left, -far))  # beyond which nothing changes
    ends, begins = (_area(rows[:, None] + bound, cols) for bound in bounds)
    return int(np.diff(np.diff(ends - begins, axis=0), axis=1)[kept].sum())


def _area(x: Array, most: Array) -> Array:
    """The sum of clip(y, 0, most) over all y < x."""
    below = np.maximum(np.minimum(x, most), 0)
    area: Array = below * (below - 1) // 2 + np.maximum(x - most, 0) * most
    return area


def mask_bytes(
    p: Problem, keys: int, kept: KeptTiles | None = None, blocks: tuple[int, int] = (1, 1), by_tiles: bool = False
) -> Bytes:
    """The bytes read of mask, bias and score function: each score that causal mask and window leave in the visited blocks reads its
    own elements, and its row's and key's unless they are read `by_tiles`; a mask's only where it is evaluated."""
    if not p.options.of_scores:
        return Counter()
    scores = scores_of(p, keys, None if kept is None else kept.visited, blocks)
    asked = scores_of(p, keys, kept.asked, blocks) if kept is not None and p.options.masked else scores
    found = Counter(mask=asked * p.options.mask, bias=scores * p.bias_itemsize * p.options.bias)
    return found + _loaded(p, "score", scores, asked, by_tiles)


def score_bytes(p: Problem, scores: int) -> Bytes:
    """The bytes that `scores` scores read of the arrays of score and mask functions if nothing is read by tiles."""
    return _loaded(p, "score", scores, scores, by_tiles=False)


def head_bytes(p: Problem, blocks: int) -> Bytes:
    """The bytes that `blocks` thread blocks read, once each, of the per-head values of score and mask functions."""
    return _loaded(p, "head", blocks, blocks)


def tile_bytes(p: Problem, rows: int, keys: int, asked_rows: int, asked_keys: int) -> Bytes:
    """The bytes that tiles with `rows` and `keys` in all read of them; a mask's only in tiles where it is evaluated."""
    return _loaded(p, "row", rows, asked_rows) + _loaded(p, "key", keys, asked_keys)


def _loaded(p: Problem, place: str, times: int, asked: int, by_tiles: bool = True) -> Bytes:
    """Bytes by array of the loads at one place (`score.Parts`): a score function's `times` each, a mask's `asked` each."""
    read: Bytes = Counter()
    for form, often in ((p.options.score, times), (p.options.mask_function, asked)):
        if form is not None:
            for load in getattr(score.parts(form, by_tiles), place):
                read[score.field(load.name, form.kind)] += often * score.itemsize(form, load)
    return read


def searched_tiles(schedule: TileSchedule) -> Bytes:
    """The bytes of the bounds read to find the states of packed sequences' tiles: a column of tiles searches for its sequences as a
    head does."""
    found: Bytes = Counter()
    for tiles in schedule.found_tiles:
        assert tiles.packed is not None
        columns = math.prod(tiles.planes) * blocks_in(schedule.problem.seqlen_k, tiles.blocks[1])
        q, k = searched_bytes(columns, tiles.packed.sequences, tiles.packed.total_q, tiles.blocks[0])
        found += Counter(cu_seqlens_q=q, cu_seqlens_k=k)
    return found


def searched_bytes(heads: int, sequences: int, total: int, block: int) -> tuple[int, int]:
    """The bytes that thread blocks read to find their sequences: bounds of the tensor that they divide, and of the other one.

    A head has total // block + sequences thread blocks. Each searches its tensor's bounds 32 at a time, once for each digit of
    sequences - 1 to the base 32, and then reads the two bounds of its sequence from both tensors, in int32.
    """
    if not sequences:
        return 0, 0
    blocks, digits = heads * (total // block + sequences), max(1, -(-(sequences - 1).bit_length() // 5))
    return 4 * blocks * (32 * digits + 2), 4 * blocks * 2
