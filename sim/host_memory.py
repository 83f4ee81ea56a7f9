"""An estimate of the memory of a simulated call: a call that needs more than this computer has free is refused before any work.

Estimates are a little high: only calls that are far too large matter.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from cupyflash.arrays import numpy_dtype
from cupyflash.expressions.tree import Apply, Node, walk
from cupyflash.request.problem import Problem
from cupyflash.schedules import BackwardSchedule, DecodeSchedule, SoftmaxSchedule, TileSchedule, VarlenSchedule
from cupyflash.schedules.dropout_mask import DropoutMaskSchedule

VARIABLE = "CUPYFLASH_MAX_MEMORY"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

# Of each byte that kernels write, for who wrote and read it last, the byte itself among them. Fitted: tracemalloc's peak grows by 7
# (standard, forward) to 16 (fa2, backward); what it has besides, up to 90 MB for modules and a wave's registers, every call has.
WRITTEN = 16
# Of each element of q, k and v that is drawn, and of K and V for each head of Q; and of each score that NumPy's reference holds, in
# float64 and plainly; with dropout and with a bias's gradient; and of each operation of a score function. Measured by tracemalloc
# at 1,024 x 1,024: 49 and 90 to 95 a score, 121 and 125 with dropout, 110 with dbias; an operation 7, one of value and slope 5.
DRAWN, EACH_HEAD, SCORE, SCORE_BACKWARD, DROPOUT, DBIAS, OPERATION, SLOPED = 48, 16, 50, 96, 72, 20, 7, 5

Planned = TileSchedule | SoftmaxSchedule | DropoutMaskSchedule


def launched(schedule: Planned) -> int:
    """Bytes that a simulated run takes, beside the arrays that it is given."""
    return WRITTEN * written(schedule)


def written(schedule: Planned) -> int:
    """Bytes of what the kernels write: results and workspaces."""
    if isinstance(schedule, SoftmaxSchedule):
        return schedule.rows * schedule.cols * numpy_dtype(schedule.dtype).itemsize
    if isinstance(schedule, DropoutMaskSchedule):
        return math.prod(schedule.shape)
    spaces = sum(math.prod(space.shape) * numpy_dtype(space.dtype).itemsize for space in schedule.workspaces().values())
    parts = schedule.sequences() if isinstance(schedule, VarlenSchedule) else {schedule: 1}
    return spaces + sum(count * _results(schedule, one.problem) for one, count in parts.items())


def _results(schedule: TileSchedule, p: Problem) -> int:
    rows, keys = p.head_count * p.seqlen_q, p.batch * p.kv_heads * p.seqlen_k
    if isinstance(schedule, BackwardSchedule):
        scores = rows * p.seqlen_k * 4 if schedule.dbias else 0
        return (rows * p.head_dim + keys * (p.head_dim + p.head_dim_v)) * p.itemsize + scores
    appended = isinstance(schedule, DecodeSchedule) and schedule.cache.appended
    return rows * (p.head_dim_v * p.itemsize + 4) + (keys * (p.head_dim + p.head_dim_v) * p.itemsize if appended else 0)


def verified(schedule: TileSchedule) -> int:
    """Bytes that it takes to draw a schedule's arrays, run it and compute the same by NumPy, which holds all scores of a call; of a
    cache, those of one sequence."""
    backward, decode = isinstance(schedule, BackwardSchedule), isinstance(schedule, DecodeSchedule)
    return launched(schedule) + referred(schedule.problem, backward, decode)


def referred(p: Problem, backward: bool, by_sequence: bool = False) -> int:
    """Bytes of what is drawn for a problem and of NumPy's reference."""
    rows, width = p.head_count * p.seqlen_q, p.head_dim + p.head_dim_v
    elements, heads = (rows + p.batch * p.kv_heads * p.seqlen_k) * width, p.heads if by_sequence else p.head_count
    score, o = SCORE_BACKWARD if backward else SCORE, p.options
    if o.dropout:
        score += DROPOUT
    if backward and o.bias:
        score += DBIAS
    if o.score is not None:
        each = SLOPED if backward else OPERATION
        score += each * (_operations(o.score.tree) + (_operations(o.score.derivative) if backward else 0))
    return DRAWN * elements + heads * p.seqlen_k * (EACH_HEAD * width + score * p.seqlen_q)


def _operations(tree: Node | None) -> int:
    return 0 if tree is None else sum(isinstance(node, Apply) for node in set(walk(tree)))


def require_room(need: int, what: str) -> None:
    """MemoryError for what is estimated to need more bytes than there are."""
    room = available()
    if need > room:
        raise MemoryError(
            f"{what} is estimated to need {_shown(need)} of memory, and {_shown(room)} are free here: make it smaller, or "
            f"allow more by {VARIABLE}=64GB (or inf)"
        )


def _shown(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"


def available() -> float:
    """Bytes that may be used: what the environment's CUPYFLASH_MAX_MEMORY says, else what is free here; infinity where the system
    does not say. Raises ValueError for a variable that says no size."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return min(_of_machine(), _of_group())
    match = re.fullmatch(r"(\d+(?:\.\d*)?) ?([KMGT]?)B?", text.strip().upper())
    if match is None and text.strip().lower() != "inf":
        raise ValueError(f"{VARIABLE} must be a size such as 500MB or 64GB, or inf, got {text!r}")
    return math.inf if match is None else float(match[1]) * UNITS[match[2]]


def _of_machine() -> float:
    """The memory that Linux could give without swapping."""
    return _read("/proc/meminfo", lambda text: _number(r"MemAvailable:\s+(\d+) kB", text) * 1024)


def _of_group() -> float:
    """The free part of a container's limit (cgroup v2); its files' cache can be given up."""
    limit = _read("/sys/fs/cgroup/memory.max", lambda text: _number(r"(\d+)", text))
    return limit - (0 if limit == math.inf else _read("/sys/fs/cgroup/memory.stat", lambda text: _number(r"anon (\d+)", text)))


def _read(path: str, find: Callable[[str], float]) -> float:
    try:
        return find(Path(path).read_text())
    except OSError:
        return math.inf


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    return math.inf if found is None else float(found[1])
