"""The check that the arrays and numbers given to a run are those that a call of the schedule could have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyflash.arrays import check_scores_like
from cupyflash.request import score
from cupyflash.request.decode import check_pages, check_table, check_tree_mask, for_all_heads
from cupyflash.schedules import BackwardSchedule, DecodeSchedule, TileSchedule
from cupyflash.schedules.moves import functions
from cupyflash.sim.l2.reads import Given


def require_given(schedule: TileSchedule, given: Given) -> None:
    """TypeError or ValueError for arrays and numbers that a schedule's kernels do not read, or that no call of it has."""
    if not isinstance(given, Mapping):
        raise TypeError(f"given must be arrays and numbers by name, in a dict, or None, got {given!r}")
    p = schedule.problem
    captured = {score.field(one.name, form.kind): one for form in functions(p) for one in form.captured}
    scores = {name: dtype for name, there, dtype in _of_scores(schedule) if there}
    decoding = [name for name, there in _of_decoding(schedule) if there]
    read = sorted([*captured, *scores, *decoding])
    for name, value in given.items():
        if name not in read:
            raise ValueError(f"given has {name!r}, which this schedule does not read: it reads {', '.join(read) or 'none'}")
        if name in captured:
            score.check_value(captured[name], name, value)
        elif name in scores:
            check_scores_like(name, value, (p.batch, p.heads, p.seqlen_q, p.seqlen_k), (scores[name],))
        elif name == "tree_mask":
            check_tree_mask(p.batch, p.seqlen_q, for_all_heads(value))
        elif isinstance(schedule, DecodeSchedule):
            _check_table(schedule, value)
    score.check_captured(p, {name: given[name] for name, one in captured.items() if name in given and one.axes is not None})


def _of_scores(schedule: TileSchedule) -> tuple[tuple[str, bool, str], ...]:
    """The arrays that broadcast to S: the name, True if the call has it, and its dtype."""
    p = schedule.problem
    gradient = isinstance(schedule, BackwardSchedule) and schedule.dbias
    return ("mask", p.options.mask, "bool"), ("bias", p.options.bias, p.bias_dtype), ("dbias", gradient, "float32")


def _of_decoding(schedule: TileSchedule) -> tuple[tuple[str, bool], ...]:
    if not isinstance(schedule, DecodeSchedule):
        return ()
    return ("block_table", bool(schedule.cache.page_size)), ("tree_mask", schedule.cache.tree)


def _check_table(schedule: DecodeSchedule, table: Any) -> None:
    p, cache = schedule.problem, schedule.cache
    if not isinstance(table, np.ndarray):
        raise TypeError(f"block_table must be a NumPy array, whose pages can be looked at, got {type(table).__name__}")
    check_table(p.batch, table)
    assert cache.page_size is not None
    if table.shape[1] * cache.page_size != p.seqlen_k:
        shape = p.batch, p.seqlen_k // cache.page_size
        raise ValueError(f"block_table must be (b, pages of a sequence) = {shape}, room for {p.seqlen_k:,} keys, got {table.shape}")
    check_pages(table, schedule.cached, cache.appended, cache.page_size, max(1, cache.pages))
