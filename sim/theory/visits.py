"""What row blocks visit, from the rows' point of view: shared by the closed forms, and with nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from cupyflash.problem import Problem
from cupyflash.schedules import TileSchedule

FLOAT32 = 4


def lengths(p: Problem) -> Mapping[int, int]:
    """How many batches have how many keys."""
    return {p.seqlen_k: p.batch} if p.key_lengths is None else Counter(p.key_lengths)


def rows_and_visits(schedule: TileSchedule, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """r_i, the rows of row block i, and the columns from a_i to b_i, in whole column blocks, that its rows see of `keys`.

    c_i = (b_i - a_i) / Bc column blocks; a_i = b_i where the rows see none.
    """
    p, br, bc = schedule.problem, schedule.block_rows, schedule.block_cols
    first = np.arange(0, p.seqlen_q, br)
    end = np.minimum(first + br, p.seqlen_q)
    shift = p.seqlen_k - p.seqlen_q
    b = np.full_like(end, keys) if p.right is None else np.clip(end + shift + p.right, 0, keys)
    a = np.zeros_like(first) if p.left is None else np.maximum(first + shift - p.left, 0)
    seen = a < b
    return end - first, np.where(seen, a // bc * bc, 0), np.where(seen, -(-b // bc) * bc, 0)


def visits_of(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """r_i, c_i, the keys of the column blocks that row block i visits, and its blocks that a block mask speaks of.

    The last but one is summed for row block i alone; see `columns_of` for the keys that any of them visits.
    """
    rows, a, b = rows_and_visits(schedule, keys)
    bc = schedule.block_cols
    if kept is None:
        return rows, (b - a) // bc, np.minimum(b, keys) - a, (b - a) // bc
    starts = np.arange(kept.shape[1]) * bc
    widths = np.clip(keys - starts, 0, bc)
    visited = kept & (a[:, None] <= starts) & (starts < b[:, None])
    return rows, visited.sum(axis=1), visited @ widths, (b - a) // bc


def columns_of(schedule: TileSchedule, keys: int, kept: np.ndarray | None) -> int:
    """The keys of the column blocks that any row block visits."""
    _, a, b = rows_and_visits(schedule, keys)
    if kept is None:
        return max(0, min(int(b.max(initial=0)), keys) - int(a[a < b].min(initial=keys)))
    starts = np.arange(kept.shape[1]) * schedule.block_cols
    visited = (kept & (a[:, None] <= starts) & (starts < b[:, None])).any(axis=0)
    return int(visited @ np.clip(keys - starts, 0, schedule.block_cols))


def mask_bytes(
    p: Problem, keys: int, kept: np.ndarray | None = None, blocks: tuple[int, int] = (1, 1)
) -> dict[str, tuple[int, int]]:
    """Mask and bias: each score of the visited blocks that causal mask and window leave reads its own element."""
    if not (p.mask or p.bias):
        return {}
    own = np.arange(p.seqlen_q) + (p.seqlen_k - p.seqlen_q)
    end = np.clip(own + p.right + 1, 0, keys) if p.right is not None else np.full_like(own, keys)
    begin = np.clip(own - p.left, 0, end) if p.left is not None else np.zeros_like(own)
    if kept is None:
        scores = int((end - begin).sum())
    else:
        cols = np.arange(keys)
        seen = (begin[:, None] <= cols) & (cols < end[:, None])
        rows = np.arange(p.seqlen_q)[:, None] // blocks[0]
        scores = int((seen & kept[rows, cols // blocks[1]]).sum())
    return {"mask": (scores if p.mask else 0, 0), "bias": (scores * p.itemsize if p.bias else 0, 0)}
