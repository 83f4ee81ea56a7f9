"""Room schedules: `plan` chooses a `TileSchedule`."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from cupyflash.arrays import is_number
from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.request.options import BlockMask, refused, require_choice, require_flag, require_taken
from cupyflash.request.problem import USUAL_HEAD_DIM, Problem, require_usual_head_dim
from cupyflash.request.score_sums import asked_sums
from cupyflash.schedules import (
    fa1,
    fa1_backward,
    fa2,
    fa2_backward,
    fa2_backward_tiles,
    fa2_tiles,
    fa3,
    fa3_backward,
    fa3_tiles,
    formulas,
    standard,
    standard_backward,
)
from cupyflash.schedules.backward import BackwardSchedule
from cupyflash.schedules.base import (
    GRANULE,
    Kernel,
    Schedule,
    TileSchedule,
    Workspace,
    has_dtype,
    require_device,
    require_problem,
    require_schedule,
)
from cupyflash.schedules.decode import Cache, DecodeSchedule, plan_decode
from cupyflash.schedules.moves import Move, Room, Walk
from cupyflash.schedules.softmax import SoftmaxSchedule, plan_softmax
from cupyflash.schedules.varlen import (
    Fa3VarlenBackwardSchedule,
    Fa3VarlenSchedule,
    Patterns,
    Seqlens,
    VarlenBackwardSchedule,
    VarlenSchedule,
    packed_totals,
    patterns_of,
)
from cupyflash.tiling import DoesNotFit, TileSize, Tiling, TilingChoice, paper_blocks

__all__ = [
    "ALGORITHMS",
    "BACKWARD_ALGORITHMS",
    "VARLEN_ALGORITHMS",
    "BackwardSchedule",
    "Cache",
    "Choice",
    "DecodeSchedule",
    "Kernel",
    "Move",
    "Room",
    "Schedule",
    "SoftmaxSchedule",
    "TileSchedule",
    "VarlenBackwardSchedule",
    "VarlenSchedule",
    "Walk",
    "Workspace",
    "choose",
    "choose_backward",
    "patterns_of",
    "plan",
    "plan_backward",
    "plan_decode",
    "plan_softmax",
    "plan_varlen",
    "plan_varlen_backward",
    "require_schedule",
]

_SCHEDULES: dict[str, Callable[[Problem, Device, Tiling, bool], TileSchedule]] = {
    "fa1": fa1.Fa1Schedule,
    "fa2": fa2.Fa2Schedule,
    "fa3": fa3.Fa3Schedule,
    "standard": standard.StandardSchedule,
}
ALGORITHMS = (*_SCHEDULES, "decode")
_VARLEN: dict[str, type[VarlenSchedule]] = {"fa2": VarlenSchedule, "fa3": Fa3VarlenSchedule}
_BACKWARD: Report = {
    "fa1": (fa1_backward.Fa1BackwardSchedule, fa1_backward.fit),
    "fa2": (fa2_backward.Fa2BackwardSchedule, fa2_backward_tiles.fit),
    "fa3": (fa3_backward.Fa3BackwardSchedule, fa3_backward.fit),
    "standard": (standard_backward.StandardBackwardSchedule, standard_backward.fit),
}
_VARLEN_BACKWARD: dict[str, type[VarlenBackwardSchedule]] = {"fa2": VarlenBackwardSchedule, "fa3": Fa3VarlenBackwardSchedule}
BACKWARD_ALGORITHMS = tuple(_BACKWARD)
VARLEN_ALGORITHMS = tuple(_VARLEN)
# Keys are split over thread blocks where the models have that faster by so much, at least: two launches are no gain if they err.
SPLIT_GAIN = 1.25
# ... and where each query has so many keys, at least.
KEYS_A_QUERY = 4
# Eight warps of 32 rows: no kernel has more.
MOST_ROWS = 256


def plan(
    problem: Problem,
    device: Device,
    algorithm: str = "fa2",
    tiling: TilingChoice = None,
    *,
    lse: bool = False,
) -> TileSchedule:
    """Return the tile schedule of `algorithm` ("fa1", "fa2", "fa3", "standard" or "decode") for a problem on a device.

    "decode" splits the keys over thread blocks and has no tiling to choose (`plan_decode` plans it with a cache). `tiling` is None
    for the sizes fitted to the kernel's layout, "paper" for the formula's own, or (block_rows, block_cols) that the kernel runs.
    "paper" and a `TileSize` are used unchanged: if no kernel runs them, theory and replay still count them, but `.kernels()`
    refuses. `lse`: True if L is written. Kernels, launch and simulator read everything from the result.

    Raises ValueError for an unknown algorithm, another kind of tiling, (block_rows, block_cols) that the kernel does not run (the
    message has the nearest that it does), or an SRAM too small for the smallest block.
    """
    tiling = _checked_choice(problem, device, algorithm, tiling)
    if problem.options.packed:
        raise ValueError("packed sequences are planned by plan_varlen")
    if algorithm == "decode":
        if tiling is not None:
            raise ValueError(f"algorithm 'decode' has no tiling, got {tiling!r}")
        return plan_decode(problem.asking(tiles_given=False), device, lse=lse)  # which asks a mask for each score
    return _planned(problem, device, algorithm, tiling, lse)


@dataclass(frozen=True)
class Choice:
    """The forward that "auto" takes, and why in one sentence."""

    algorithm: str
    reason: str


def choose(problem: Problem, device: Device, tiling: TilingChoice = None, refused: str | None = None) -> Choice:
    """The algorithm that "auto" chooses for a problem on a device, by the models, with the reason.

    "fa2"; or "fa3", if it runs and is faster; or "decode" for few queries of few heads, whose keys are then split over thread
    blocks. A given `tiling` means "fa2", whose blocks it fixes. `refused`: the reason why "fa3" does not take the arrays, if it is
    known.
    """
    if tiling is not None:
        return Choice("fa2", "tiling= speaks of fa2's blocks")
    return _choose(problem, device, refused)


@lru_cache(maxsize=1024)
def _choose(problem: Problem, device: Device, refused: str | None) -> Choice:
    reason = fa3_tiles.refusal(problem, device) or refused
    if problem.options.dropout and not reason:
        return Choice("fa2", "for dropout fa3 makes twice as many random numbers as it uses, and by the clock fa2 is faster")
    needed: dict[str, float] = {}  # clocks
    try:
        for algorithm in ("fa3", "fa2") if not reason else ("fa2",):
            needed[algorithm] = formulas.clocks(problem, device, algorithm)
    except DoesNotFit as error:
        return Choice("fa2", str(error))
    if _splits_keys(problem):
        with suppress(DoesNotFit):
            needed["decode"] = formulas.clocks(problem, device, "decode")
    best = min(needed, key=lambda name: needed[name] * (SPLIT_GAIN if name == "decode" else 1.0))
    if best == "fa2" and reason:
        return Choice("fa2", f"fa3 does not run this: {reason}")
    others = " and ".join(f"{clocks:,.0f} of {name}" for name, clocks in needed.items() if name != best)
    return Choice(best, f"by the models, {needed[best]:,.0f} clocks of {best} against {others}")


def choose_backward(problem: Problem, device: Device, tiling: TilingChoice = None, refused: str | None = None) -> Choice:
    """The algorithm that "auto" chooses for a problem's gradients, with the reason: "fa3" if it runs, else "fa2", which has dropout
    of narrow heads, too.

    Arguments as those of `choose`. On an H100 fa3 took about half of fa2's time (docs/measured.md); of d above 128, which no GPU
    has timed, the clock has it at 0.6 to 0.7 (docs/kernels.md).
    """
    if tiling is not None:
        return Choice("fa2", "tiling= speaks of fa2's blocks")
    reason = fa3_backward.refusal(problem, device) or refused
    if reason:
        return Choice("fa2", f"fa3's backward does not run this: {reason}")
    try:
        fa3_backward.fit(problem, device)
    except DoesNotFit as error:
        return Choice("fa2", str(error))
    if problem.options.dropout and max(problem.head_dim, problem.head_dim_v) <= fa3_tiles.SLAB:
        return Choice("fa2", f"with dropout and heads of up to {fa3_tiles.SLAB} the clock has fa3 5 % faster, less than its error")
    return Choice("fa3", "gradients by warpgroup products take less time")


def _splits_keys(problem: Problem) -> bool:
    """True if a call without a cache may have its keys split: few queries against many keys, no mask (`decode` skips no tiles)."""
    p = problem
    plain = refused(p.options, "decode") is None and not p.options.masked and max(p.head_dim, p.head_dim_v) <= USUAL_HEAD_DIM
    return plain and p.head_count > 0 and p.seqlen_k >= KEYS_A_QUERY * p.seqlen_q > 0


def _planned(problem: Problem, device: Device, algorithm: str, tiling: TilingChoice, lse: bool) -> TileSchedule:
    require_flag("lse", lse)

    def made(problem: Problem, tiling: TilingChoice) -> TileSchedule:
        return _plan(problem, device, algorithm, tiling, lse)

    return _runnable(made, problem, device, tiling)


Planned = TypeVar("Planned", bound=TileSchedule)


def _runnable(made: Callable[[Problem, Any], Planned], problem: Problem, device: Device, blocks: TilingChoice) -> Planned:
    """The schedule of a choice of blocks. ValueError if no kernel runs those that are requested, with the nearest that one does."""
    if not isinstance(blocks, tuple):
        return made(problem, blocks)
    try:
        schedule = made(problem, blocks)
        if has_dtype(problem.dtype, device):  # else nothing runs, whatever the blocks
            schedule.kernels()
    except ValueError as error:
        near = _nearest(made, problem, blocks)
        if near is None or near == blocks:
            raise
        raise type(error)(f"{error}; the nearest blocks that run are Br {near[0]} x Bc {near[1]}") from None
    return schedule


def _nearest(
    made: Callable[[Problem, tuple[int, int]], TileSchedule], problem: Problem, blocks: tuple[int, int]
) -> tuple[int, int] | None:
    """The blocks nearest to some that kernels run, by the ratios of rows and of columns; the block mask is as they need it."""

    def runs(rows: int, cols: int) -> bool:
        mask = BlockMask((1, 1, -(-problem.seqlen_q // rows), -(-problem.seqlen_k // cols)))
        try:
            return bool(made(problem.asking(block_mask=problem.options.block_mask and mask), (rows, cols)).kernels())
        except ValueError:
            return False

    near = []
    below, above = blocks[1] // GRANULE, -(-blocks[1] // GRANULE)
    for rows in range(GRANULE, MOST_ROWS + GRANULE, GRANULE):
        # Where blocks do not run, wider ones do not either.
        most = bisect_left(range(1, above + 1), True, key=lambda wide: not runs(rows, wide * GRANULE))
        near += [(rows, GRANULE * wide) for wide in {min(max(below, 1), most), min(above, most)} if wide]
    return min(near, key=lambda size: sum(abs(math.log(a / b)) for a, b in zip(size, blocks, strict=True)), default=None)


def _checked_choice(problem: Problem, device: Device, algorithm: str, tiling: TilingChoice, backward: bool = False) -> TilingChoice:
    """The tiling in its one form. TypeError or ValueError for a wrong tiling, wrong other arguments, and options that the algorithm
    does not have."""
    require_problem(problem)
    require_device(device)
    require_choice("algorithm", algorithm, BACKWARD_ALGORITHMS if backward else ALGORITHMS)
    require_taken(problem.options, f"{algorithm} backward" if backward else algorithm)
    if algorithm != "fa2":
        require_usual_head_dim(problem, f"{'gradients of ' * backward}algorithm {algorithm!r}")
    if isinstance(tiling, tuple) and _are_blocks(tiling):
        return int(tiling[0]), int(tiling[1])
    if isinstance(tiling, TileSize) and _are_blocks((tiling.block_rows, tiling.block_cols)):
        return tiling
    if tiling is not None and not (isinstance(tiling, str) and tiling == "paper"):
        raise ValueError(f"tiling must be None, 'paper' or (block_rows, block_cols), got {tiling!r}")
    return tiling


def _are_blocks(tiling: tuple[Any, ...]) -> bool:
    """True if these are two whole numbers above zero."""
    return len(tiling) == 2 and all(is_number(size) and int(size) > 0 for size in tiling)


def _packed(problem: Problem, algorithm: str) -> Problem:
    require_choice("algorithm", algorithm, VARLEN_ALGORITHMS)
    require_problem(problem)
    return problem.asking(packed=True)


def plan_varlen(
    problem: Problem,
    device: Device,
    seqlens: Seqlens | None = None,
    tiling: TilingChoice = None,
    *,
    lse: bool = False,
    totals: tuple[int, int] | None = None,
    algorithm: str = "fa2",
    patterns: Patterns | None = None,
) -> VarlenSchedule:
    """Return the schedule of `problem.batch` packed sequences, the longest of `seqlen_q` queries and `seqlen_k` keys.

    `seqlens` has the (queries, keys) of each, None if the host does not know them; `totals` are then the queries and keys of all
    together, by default as many as if all were as long as the longest. `algorithm` is "fa2" or "fa3". `patterns` are the patterns
    of a mask function in each sequence, if they are known (`patterns_of` finds them). Raises as `plan` does, and ValueError for
    seqlens of another batch or longer than the longest.
    """
    packed = _packed(problem, algorithm)
    longest = _planned(packed, device, algorithm, _checked_choice(packed, device, algorithm, tiling), lse)
    together = packed_totals(packed, seqlens, totals)
    return _VARLEN[algorithm](packed, device, longest.tiling, lse, seqlens, together, patterns)


def plan_backward(
    problem: Problem,
    device: Device,
    algorithm: str = "fa2",
    tiling: TilingChoice = None,
    *,
    deterministic: bool = False,
    dbias: bool = False,
    dscore: tuple[str, ...] = (),
) -> BackwardSchedule:
    """The tile schedule of the gradients by `algorithm` ("fa1", "fa2", "fa3" or "standard") for a problem on a device.

    `tiling` as for `plan`. For "fa2" it is the forward's: the kernels take blocks that divide it, and a block mask has its blocks.
    `deterministic`: the same bits each time; `dbias`: with the bias's gradient; `dscore`: with the gradients of the arrays of these
    names that the score function has captured. Raises as `plan` does.
    """
    tiling = _checked_choice(problem, device, algorithm, tiling, backward=True)
    require_flag("deterministic", deterministic)
    require_flag("dbias", dbias)
    if dbias and algorithm not in ("fa2", "fa3"):
        what = f"algorithm {algorithm!r}, which has no gradient of the bias: 'fa2' and 'fa3' have"
        raise ValueError(f"dbias (a call's return_dbias) must be False for {what}")
    _require_sums(problem, algorithm, dscore)
    if dbias and not problem.options.bias:
        raise ValueError("dbias is the gradient of a bias, and there is none")
    if problem.options.packed:
        raise ValueError("packed sequences are planned by plan_varlen_backward")

    def made(problem: Problem, tiling: TilingChoice) -> BackwardSchedule:
        return _plan_backward(problem, device, algorithm, tiling, deterministic, dbias, dscore)

    return _runnable(made, problem, device, tiling)


def plan_varlen_backward(
    problem: Problem,
    device: Device,
    seqlens: Seqlens | None = None,
    tiling: TilingChoice = None,
    *,
    deterministic: bool = False,
    totals: tuple[int, int] | None = None,
    algorithm: str = "fa2",
    patterns: Patterns | None = None,
    dscore: tuple[str, ...] = (),
) -> VarlenBackwardSchedule:
    """The backward of `plan_varlen`'s problem; arguments and errors as there, `dscore` and `deterministic` as in
    `plan_backward`."""
    packed = _packed(problem, algorithm)
    tiling = _checked_choice(packed, device, algorithm, tiling, backward=True)
    require_flag("deterministic", deterministic)
    _require_sums(problem, algorithm, dscore)

    def made(problem: Problem, tiling: TilingChoice) -> BackwardSchedule:
        return _plan_backward(problem, device, algorithm, tiling, deterministic, False, dscore)

    one = _runnable(made, packed, device, tiling)
    how: Report = {"deterministic": deterministic, "dscore": dscore, "patterns": patterns}
    together = packed_totals(packed, seqlens, totals)
    return _VARLEN_BACKWARD[algorithm](packed, device, one.tiling, seqlens=seqlens, packed=together, **how)


def _require_sums(problem: Problem, algorithm: str, dscore: object) -> None:
    """TypeError or ValueError for names of captured arrays whose gradients an algorithm does not make."""
    if not isinstance(dscore, tuple) or not all(isinstance(name, str) for name in dscore):
        raise TypeError(f"dscore must be a tuple of names of captured arrays, got {dscore!r}")
    if dscore:
        asked_sums(problem.options.score, dscore, "dscore")
    if dscore and algorithm not in ("fa2", "fa3"):
        what = f"algorithm {algorithm!r}, which has no gradients of captured arrays: 'fa2' and 'fa3' have"
        raise ValueError(f"dscore (a call's return_dscore) must be empty for {what}")


@lru_cache(maxsize=1024)
def _plan_backward(
    problem: Problem,
    device: Device,
    algorithm: str,
    tiling: TilingChoice,
    deterministic: bool,
    dbias: bool,
    dscore: tuple[str, ...] = (),
) -> BackwardSchedule:
    schedule, fit = _BACKWARD[algorithm]
    more: Report = {"deterministic": deterministic, "dbias": dbias, "dscore": dscore}
    paper = standard.paper_blocks(problem) if algorithm == "standard" else paper_blocks(problem, device)
    if algorithm != "fa2" or (tiling is None and problem.options.block_mask is None):
        tiles = _tiling(paper, fit, problem, device, tiling)
        made: BackwardSchedule = schedule(problem, device, tiles, **more)
        return made
    # The tiling is the forward's, and a block mask has its blocks; the kernels take blocks that divide them.
    forward = _plan(problem, device, algorithm, tiling, lse=True).tiling.used
    blocks = forward.block_rows, forward.block_cols
    own = fa2_backward_tiles.fit(problem, device, blocks)
    return fa2_backward.Fa2BackwardSchedule(
        problem,
        device,
        Tiling(paper, own, own),
        **more,
        mask_blocks=None if problem.options.block_mask is None else blocks,
    )


@lru_cache(maxsize=1024)
def _plan(problem: Problem, device: Device, algorithm: str, tiling: TilingChoice, lse: bool) -> TileSchedule:
    paper = standard.paper_blocks(problem) if algorithm == "standard" else paper_blocks(problem, device)
    fit = {"fa1": fa1, "fa2": fa2_tiles, "fa3": fa3_tiles, "standard": standard}[algorithm].fit
    return _SCHEDULES[algorithm](problem, device, _tiling(paper, fit, problem, device, tiling), lse)


def _tiling(
    paper: TileSize, fit: Callable[[Problem, Device], TileSize], problem: Problem, device: Device, tiling: TilingChoice
) -> Tiling:
    """The three stages of a tiling; raises `DoesNotFit` if nothing fits, unless the caller chose the blocks."""
    try:
        fitted = fit(problem, device)
    except DoesNotFit:
        if tiling is None:
            raise
        fitted = None
    if isinstance(tiling, TileSize):
        used = tiling
    elif isinstance(tiling, tuple):
        used = TileSize(*tiling, reason="asked for")
    else:
        used = paper if fitted is None or tiling == "paper" else fitted
    return Tiling(paper, fitted, used)
