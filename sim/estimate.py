"""An estimate of the PTX machine's time for a schedule, so that a forgotten `cupy.asarray` does not look like a hang."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from cupyflash.expressions.tree import walk
from cupyflash.request.problem import Problem
from cupyflash.schedules import BackwardSchedule, DecodeSchedule, SoftmaxSchedule, TileSchedule, VarlenSchedule
from cupyflash.schedules.base import WARP, padded_dim, sub_tile
from cupyflash.schedules.dropout_mask import DropoutMaskSchedule
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.schedules.fa2_backward_tiles import SHARING
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.schedules.mask_tiles import THREADS, MaskTiles
from cupyflash.sim.host_memory import Planned, launched, require_room
from cupyflash.sim.theory.visits import seen_blocks, span, visits_of
from cupyflash.words import plural

# Seconds that the machine takes for one instruction of a group of warps: so much for the instruction, and so much for each
# lane. Fitted on a two-core machine (AMD EPYC); good to a factor of about two.
SECONDS_PER_STEP = 2.6e-6
SECONDS_PER_LANE = 3e-9
LANES_PER_WAVE = 1 << 16


def refuse_slow(schedule: Planned, max_seconds: float) -> None:
    """RuntimeError when a simulated call is estimated to take longer than `max_seconds`, MemoryError when it needs more memory than
    there is."""
    estimate = seconds(schedule)
    if estimate > max_seconds:
        raise RuntimeError(
            f"{_what(schedule)} is estimated at {estimate:,.0f} s on a simulated {schedule.device.name}, over the limit of "
            f"{max_seconds:g} s. For a GPU pass CuPy arrays (cupy.asarray); to allow it here: "
            "with cupyflash.simulated_device(max_seconds=math.inf), or CUPYFLASH_MAX_SECONDS=inf"
        )
    require_room(launched(schedule), _what(schedule))


def _what(schedule: Planned) -> str:
    """The call in a few words."""
    if isinstance(schedule, SoftmaxSchedule):
        return f"softmax of a NumPy array ({plural(schedule.rows, 'row')} of {schedule.cols:,}, {schedule.dtype})"
    if isinstance(schedule, DropoutMaskSchedule):
        return "dropout_mask of shape ({})".format(", ".join(f"{size:,}" for size in schedule.shape))
    p = schedule.problem
    return f"attention of NumPy arrays ({plural(p.head_count, 'head')}, {p.seqlen_q:,} x {p.seqlen_k:,}, d {p.head_dim}, {p.dtype})"


def seconds(schedule: Planned, *, seeded: bool = False) -> float:
    """Estimated seconds to execute a schedule's kernels on the PTX machine, compilation aside.

    `seeded` for a run with a schedule seed, which takes warps one at a time.
    """
    together = WARP if seeded else LANES_PER_WAVE
    total = 0.0
    for steps, lanes in _kernels(schedule):
        waves = max(1, math.ceil(lanes / together))
        total += steps * (waves * SECONDS_PER_STEP + lanes * SECONDS_PER_LANE)
    return total


Runs = Iterator[tuple[float, int]]
"""The instructions of each kernel one after another, and the lanes that run them together."""


def _kernels(schedule: Planned) -> Runs:
    if isinstance(schedule, SoftmaxSchedule):
        return _softmax(schedule)
    if isinstance(schedule, DropoutMaskSchedule):
        return iter([(120, math.prod(schedule.shape))])
    tiles = (_mask_tiles(each) for each in schedule.found_tiles)
    if schedule.algorithm == "mask":
        return tiles
    if isinstance(schedule, BackwardSchedule):
        return chain(tiles, _backward(schedule))
    own = {"fa1": _fa1, "fa2": _fa2, "fa3": _fa3, "standard": _standard, "decode": _decode}[schedule.algorithm]
    return chain(tiles, own(schedule))


def _mask_tiles(tiles: MaskTiles) -> tuple[float, int]:
    """A tile's scores, by so many threads."""
    form, (rows, cols) = tiles.problem.options.mask_function, tiles.blocks
    score = 60 if form is None else 30 + 5 * sum(1 for _ in walk(form.tree))
    return 150 + math.ceil(rows * cols / THREADS) * score, tiles.count * THREADS


def _softmax(schedule: SoftmaxSchedule) -> Runs:
    column = 28 if schedule.dtype == "float32" else 14
    yield 200 + math.ceil(schedule.cols / schedule.lanes) * column, schedule.rows * schedule.lanes


def _sub_tile_steps(schedule: TileSchedule) -> float:
    """Instructions that a warp issues for one sub-tile: the two products and the softmax of 16 x SUB scores."""
    p = schedule.problem
    width = sub_tile(p, schedule.block_cols)
    products = width * padded_dim(max(p.head_dim, p.head_dim_v)) * (3.5 if p.dtype == "float32" else 1 / 40)
    return products + 8 * width + padded_dim(max(p.head_dim, p.head_dim_v)) + 150


def _most_visits(schedule: TileSchedule) -> int:
    """Column blocks that the row blocks in the middle and at the ends visit, of which one visits about the most."""
    keys = schedule.problem.seqlen_k
    seen = seen_blocks(schedule, keys)
    some = (seen[0], seen[len(seen) // 2], seen[-1]) if seen else ()
    return max((end - begin for begin, end in (span(schedule, keys, block) for block in some)), default=0)


def _fa1(schedule: TileSchedule) -> Runs:
    p = schedule.problem
    visits, seen = visits_of(schedule, p.seqlen_k), len(seen_blocks(schedule, p.seqlen_k))
    sub_tiles = seen * math.ceil(visits.keys / max(1, seen) / sub_tile(p, schedule.block_cols))
    steps = sub_tiles * _sub_tile_steps(schedule) + visits.blocks * (200 + 3 * padded_dim(max(p.head_dim, p.head_dim_v)))
    yield steps, schedule.repeats * schedule.block_rows * 2


def _fa2(schedule: TileSchedule) -> Runs:
    assert isinstance(schedule, Fa2Schedule)
    config = schedule.candidate.config
    work, copies = _visit(schedule.problem, config.warp_rows * config.block_cols / 32, config)
    # The row blocks of a wave keep step with the longest, and part ways behind it.
    steps = _most_visits(schedule) * 2 * (work + 5 * copies + 150) + 400 + 8 * padded_dim(schedule.problem.head_dim_v)
    blocks = schedule.repeats * schedule.row_blocks
    if isinstance(schedule, VarlenSchedule):  # the others leave at once
        blocks = sum(count * one.repeats * one.row_blocks for one, count in schedule.sequences().items())
    yield steps, blocks * config.threads


def _visit(p: Problem, scores: float, config: Any) -> tuple[float, float]:
    """(Instructions for a thread's scores of a tile and their products, those that copy its part of K and V)."""
    dims = padded_dim(p.head_dim) + padded_dim(p.head_dim_v)
    products = scores * dims * (1.3 if p.dtype == "float32" else 1 / 48)
    return products + 9 * scores, config.block_cols * dims * p.itemsize / p.alignment / config.threads


def _fa3(schedule: TileSchedule) -> Runs:
    assert isinstance(schedule, Fa3Schedule)
    p = schedule.problem
    every = schedule.sequences() if isinstance(schedule, VarlenSchedule) else {schedule: 1}
    works = sum(count * one.works for one, count in every.items())
    turns = sum(count * one.repeats * visits_of(one, one.problem.seqlen_k).blocks for one, count in every.items())
    # Fitted. A warpgroup's product is one step however warps are scheduled, and costs by its FMAs; beside it, the first block of a
    # row block, whose scores are masked one by one, takes most.
    fmas = schedule.tiling.used.block_rows * schedule.block_cols * (padded_dim(p.head_dim) + padded_dim(p.head_dim_v))
    yield turns * fmas / 1800, WARP
    yield 13000 * math.ceil(works / max(1, schedule.grid)), schedule.grid * schedule.config.team.threads


def _decode(schedule: TileSchedule) -> Runs:
    """A split's blocks of keys, and what its key warps join; then the merge."""
    assert isinstance(schedule, DecodeSchedule)
    p, config = schedule.problem, schedule.config
    work, copies = _visit(p, config.row_tiles * config.block_cols / config.key_warps / 2, config)
    keys = max(schedule.lengths(), default=0) + schedule.cache.appended
    turns = math.ceil(math.ceil(keys / config.block_cols) / schedule.splits)
    yield turns * (work + 12 * copies + 250) + 800 + 8 * padded_dim(p.head_dim_v), schedule.grid * config.threads
    if schedule.splits > 1:
        yield 250 + 3 * schedule.splits, p.head_count * p.seqlen_q * 128


def _standard(schedule: TileSchedule) -> Runs:
    p = schedule.problem
    tile = _sub_tile_steps(schedule) * schedule.block_cols / sub_tile(p, schedule.block_cols)
    rows = schedule.repeats * schedule.row_blocks
    yield tile, rows * schedule.col_blocks * schedule.block_rows * 2
    yield 400 + 45 * math.ceil(p.seqlen_k / 32), schedule.repeats * p.seqlen_q * 32
    yield tile * schedule.col_blocks, rows * schedule.block_rows * 2


def _backward(schedule: BackwardSchedule) -> Runs:
    """Five products of a tile, of a warp's 16 keys, and the sums of dQ; the row blocks that see a column block come one by one."""
    p = schedule.problem
    d = padded_dim(p.head_dim) + padded_dim(p.head_dim_v)
    scores = 16 * schedule.block_rows / 32
    products = scores * d * (6.0 if p.dtype == "float32" else 1 / 20)
    # Fitted: Algorithm 4's sums go through shared memory, and one block has all of a head.
    fitted = {"fa1": 4.5, "fa2": 2.0, "fa3": 2.0, "standard": 1.8}[schedule.algorithm]
    visits = schedule.group * visits_of(schedule, p.seqlen_k).blocks / max(1, schedule.col_blocks)
    steps = fitted * (visits * (products + 20 * scores + schedule.block_rows / 16 * d + 400) + 400)
    beside = schedule.warps.beside if isinstance(schedule, Fa2BackwardSchedule) and schedule.warps == SHARING else 1
    yield steps, schedule.repeats * schedule.col_blocks * schedule.block_cols * 2 * beside
    yield 200 + 8 * d, p.head_count * p.seqlen_q * 32
