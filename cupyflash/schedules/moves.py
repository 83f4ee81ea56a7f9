"""What thread blocks read of masks, biases, lengths, and of what score and mask functions have captured."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from cupyflash import score
from cupyflash.expressions.tree import Load
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
    """What `scores` scores read of the bias and of a score function's arrays: not what is one for a row or a key, where that is
    read `by_tiles`; and those for which a mask is asked, all where `asked` is None, of that."""
    asked = scores if asked is None else asked
    mask: tuple[Move, ...] = (Move("mask", asked, 1),) if problem.options.mask else ()
    function = problem.options.mask_function
    if function is not None:
        mask = tuple(Move(score.field(load.name, "mask"), asked, score.itemsize(function, load)) for load in function.loads)
    bias = (Move("bias", scores, problem.itemsize),) if problem.options.bias else ()
    form = problem.options.score
    return mask + bias + (_loads(form, score.parts(form, by_tiles).score, scores) if form else ())


def head_moves(problem: Problem, heads: int = 1) -> tuple[Move, ...]:
    """What a thread block reads of a score function's arrays that is one for each of its heads."""
    form = problem.options.score
    return _loads(form, score.of_head(form), heads) if form else ()


def row_moves(problem: Problem, rows: int) -> tuple[Move, ...]:
    """What is read of them, by tiles, for so many rows."""
    form = problem.options.score
    return _loads(form, score.parts(form).row, rows) if form else ()


def key_moves(problem: Problem, keys: int) -> tuple[Move, ...]:
    """And for so many keys."""
    form = problem.options.score
    return _loads(form, score.parts(form).key, keys) if form else ()


def _loads(form: score.Form, loads: tuple[Load, ...], times: int) -> tuple[Move, ...]:
    return tuple(Move(score.field(load.name), times, score.itemsize(form, load)) for load in loads)


def score_bytes(problem: Problem, rows: int, keys: int) -> int:
    """Bytes of shared memory for what a score function reads by tiles, for so many rows and keys."""
    form = problem.options.score
    return FLOAT32 * (rows * len(score.parts(form).row) + keys * len(score.parts(form).key)) if form else 0


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
