"""What thread blocks read of masks, biases, lengths, and of what score and mask functions have captured."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cupyflash import score
from cupyflash.problem import Problem
from cupyflash.schedules import mask_tiles
from cupyflash.schedules.base import FLOAT32, Move, TileSchedule, Visited


def scores_seen(problem: Problem, rows: range, cols: range) -> int:
    """How many scores of these rows and columns are seen for their position: each reads its own mask and bias element."""
    first, end = problem.keys_seen(np.arange(rows.start, rows.stop), problem.seqlen_k)
    return int(np.maximum(0, np.minimum(end, cols.stop) - np.maximum(first, cols.start)).sum())


def visited_scores(schedule: TileSchedule, visited: Visited, keys: int, mixed: bool = False) -> int:
    """How many scores are seen for their position, in blocks that are visited; `mixed`: in those where a mask is asked."""
    p, kept = schedule.problem, visited.mixed if mixed else visited.kept
    if kept is None or not p.options.of_scores:
        return scores_seen(p, range(p.seqlen_q), range(keys))
    rows, cols = np.arange(p.seqlen_q), np.arange(schedule.col_blocks) * schedule.block_cols
    first, end = p.keys_seen(rows, keys)
    each = np.minimum(end[:, None], cols + schedule.block_cols) - np.maximum(first[:, None], cols)
    return int((np.maximum(0, each) * kept[rows // schedule.block_rows]).sum())


def score_moves(schedule: TileSchedule, visited: Iterable[Visited], keys: int, by_tiles: bool = False) -> tuple[Move, ...]:
    """What the scores of the visited blocks read, as `mask_moves`."""
    heads = list(visited)
    scores, asked = (sum(visited_scores(schedule, each, keys, mixed) for each in heads) for mixed in (False, True))
    return mask_moves(schedule.problem, scores, asked, by_tiles)


def mask_moves(problem: Problem, scores: int, asked: int | None = None, by_tiles: bool = False) -> tuple[Move, ...]:
    """What `scores` scores read of the bias and of a score function's arrays, and those for which a mask is asked (all where
    `asked` is None) of that: not what is one for a row or a key, where that is read `by_tiles`."""
    asked = scores if asked is None else asked
    mask = (Move("mask", asked, 1),) if problem.options.mask else ()
    bias = (Move("bias", scores, problem.itemsize),) if problem.options.bias else ()
    return (*mask, *bias, *_parts(problem, "score", scores, asked, by_tiles))


def head_moves(problem: Problem, heads: int = 1) -> tuple[Move, ...]:
    """What a thread block reads of the arrays of score and mask functions that is one for each of its heads."""
    return _parts(problem, "head", heads)


def row_moves(problem: Problem, rows: int, asked: int | None = None) -> tuple[Move, ...]:
    """What is read of them, by tiles, for so many rows; for those of tiles in which a mask is asked (None: all) of that."""
    return _parts(problem, "row", rows, asked)


def key_moves(problem: Problem, keys: int, asked: int | None = None) -> tuple[Move, ...]:
    """And for so many keys."""
    return _parts(problem, "key", keys, asked)


def _parts(problem: Problem, place: str, times: int, asked: int | None = None, by_tiles: bool = True) -> tuple[Move, ...]:
    """The loads of both functions at a place (`score.Parts`), so often each."""
    often = {"score": times, "mask": times if asked is None else asked}
    return tuple(
        Move(score.field(load.name, form.kind), often[form.kind], score.itemsize(form, load))
        for form in functions(problem)
        for load in getattr(score.parts(form, by_tiles), place)
    )


def functions(problem: Problem) -> tuple[score.Form, ...]:
    """Its score and mask function, as far as it has them."""
    return tuple(form for form in (problem.options.score, problem.options.mask_function) if form is not None)


def part_bytes(problem: Problem, rows: int, keys: int) -> int:
    """Bytes of shared memory for what score and mask functions read by tiles, for so many rows and keys."""
    found = [score.parts(form) for form in functions(problem)]
    return FLOAT32 * sum(rows * len(each.row) + keys * len(each.key) for each in found)


def keys_read(schedule: TileSchedule, visited: Visited, keys: int) -> int:
    """Keys of the column blocks that each row block visits, together."""
    tail = (keys - 1) // schedule.block_cols  # of the column blocks, the one that may be short
    whole, short = (int(visited.count(*span).sum()) for span in ((0, tail), (tail, tail + 1)))
    return whole * schedule.block_cols + short * (keys - tail * schedule.block_cols)


def block_mask_moves(schedule: TileSchedule, blocks: int) -> tuple[Move, ...]:
    """What `blocks` blocks read of the block mask and of the states of tiles, a byte each."""
    names = ["block_mask"] if schedule.problem.options.block_mask is not None else []
    return tuple(Move(name, blocks, 1) for name in (*names, *(each.field for each in schedule.mask_tiles[:1])))


def block_mask_bytes(problem: Problem, row_blocks: int, block_cols: int) -> int:
    """Bytes of shared memory for the block masks of `row_blocks` row blocks, a bit a block in words of 32."""
    return 4 * row_blocks * mask_tiles.words(problem.seqlen_k, block_cols) if problem.options.block_mask is not None else 0


def length_moves(problem: Problem) -> tuple[Move, ...]:
    """A thread block's reading of its batch's key length, an int32."""
    return (Move("key_lengths", 1, 4),) if problem.options.padded else ()
