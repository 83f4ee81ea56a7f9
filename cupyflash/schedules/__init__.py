"""Tile schedules: `plan` chooses one, `TileSchedule` is what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from numbers import Integral
from typing import Any

from cupyflash.device import Device
from cupyflash.problem import Problem
from cupyflash.schedules import fa1, fa1_backward, fa2, fa2_backward, fa2_backward_tiles, fa2_tiles, standard, standard_backward
from cupyflash.schedules.backward import BackwardSchedule
from cupyflash.schedules.base import Kernel, Move, Phase, Schedule, Tile, TileSchedule, Visit, Workspace
from cupyflash.schedules.softmax import SoftmaxSchedule, plan_softmax
from cupyflash.schedules.varlen import Seqlens, VarlenBackwardSchedule, VarlenSchedule, packed_totals
from cupyflash.tiling import DoesNotFit, TileSize, Tiling, TilingChoice, paper_blocks

__all__ = [
    "ALGORITHMS",
    "BACKWARD_ALGORITHMS",
    "BackwardSchedule",
    "Kernel",
    "Move",
    "Phase",
    "Schedule",
    "SoftmaxSchedule",
    "Tile",
    "TileSchedule",
    "VarlenBackwardSchedule",
    "VarlenSchedule",
    "Visit",
    "Workspace",
    "plan",
    "plan_backward",
    "plan_softmax",
    "plan_varlen",
    "plan_varlen_backward",
]

_SCHEDULES: dict[str, Callable[[Problem, Device, Tiling, bool], TileSchedule]] = {
    "fa1": fa1.Fa1Schedule,
    "fa2": fa2.Fa2Schedule,
    "standard": standard.StandardSchedule,
}
ALGORITHMS = tuple(_SCHEDULES)
_BACKWARD: dict[str, Any] = {
    "fa1": (fa1_backward.Fa1BackwardSchedule, fa1_backward.fit),
    "fa2": (fa2_backward.Fa2BackwardSchedule, fa2_backward_tiles.fit),
    "standard": (standard_backward.StandardBackwardSchedule, standard_backward.fit),
}
BACKWARD_ALGORITHMS = tuple(_BACKWARD)


def plan(
    problem: Problem,
    device: Device,
    algorithm: str = "fa2",
    tiling: TilingChoice = None,
    *,
    lse: bool = False,
) -> TileSchedule:
    """The tile schedule of `algorithm` ("fa1", "fa2" or "standard") for a problem on a device.

    `tiling` is None for the sizes fitted to the kernel's layout, "paper" for the formula's own, or (block_rows,
    block_cols). `lse` says whether L is written. Kernels, launch and simulator read everything from what this returns.

    Raises ValueError for an unknown algorithm, a tiling that is none of these, or an SRAM too small for the least block.
    """
    if isinstance(problem, Problem) and problem.packed:
        raise ValueError("packed sequences are planned by plan_varlen")
    return _checked(problem, device, algorithm, tiling, lse)


def _checked(problem: Problem, device: Device, algorithm: str, tiling: TilingChoice, lse: bool) -> TileSchedule:
    return _plan(problem, device, algorithm, _checked_choice(problem, device, algorithm, tiling, ALGORITHMS), lse)


def _checked_choice(
    problem: Problem, device: Device, algorithm: str, tiling: TilingChoice, algorithms: tuple[str, ...]
) -> TilingChoice:
    """The tiling in its one form; TypeError or ValueError for what is none, and for the other arguments."""
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a Problem, got {type(problem).__name__}")
    if not isinstance(device, Device):
        raise TypeError(f"device must be a Device (Device.named finds one by name), got {device!r}")
    if algorithm not in algorithms:
        raise ValueError(f"algorithm must be one of {', '.join(algorithms)}, got {algorithm!r}")
    if isinstance(tiling, tuple) and len(tiling) == 2 and all(isinstance(s, Integral) and s > 0 for s in tiling):
        return int(tiling[0]), int(tiling[1])
    if tiling is not None and tiling != "paper":
        raise ValueError(f"tiling must be None, 'paper' or (block_rows, block_cols), got {tiling!r}")
    return tiling


def plan_varlen(
    problem: Problem,
    device: Device,
    seqlens: Seqlens | None = None,
    tiling: TilingChoice = None,
    *,
    lse: bool = False,
    totals: tuple[int, int] | None = None,
) -> VarlenSchedule:
    """The schedule of `problem.batch` packed sequences, the longest of `seqlen_q` queries and `seqlen_k` keys.

    `seqlens` has the (queries, keys) of each, None where the host does not know them; `totals` are the queries and keys of all
    together, where `seqlens` does not say: by default as many as if all were as long as the longest. Raises as `plan` does, and
    ValueError for seqlens of another batch or longer than the longest.
    """
    packed = replace(problem, packed=True)
    longest = _checked(packed, device, "fa2", tiling, lse)
    return VarlenSchedule(packed, device, longest.tiling, lse, seqlens, packed_totals(packed, seqlens, totals))


def plan_backward(
    problem: Problem,
    device: Device,
    algorithm: str = "fa2",
    tiling: TilingChoice = None,
    *,
    deterministic: bool = False,
    dbias: bool = False,
) -> BackwardSchedule:
    """The tile schedule of the backward pass of `algorithm` for a problem on a device; `tiling` as for `plan`.

    For "fa2" the tiling is the forward's: the kernels take blocks that divide it, and a block mask has its blocks.
    `deterministic`: the same bits each time; `dbias`: with the bias's gradient. Raises as `plan` does.
    """
    tiling = _checked_choice(problem, device, algorithm, tiling, BACKWARD_ALGORITHMS)
    if problem.packed:
        raise ValueError("packed sequences are planned by plan_varlen_backward")
    return _plan_backward(problem, device, algorithm, tiling, deterministic, dbias)


def plan_varlen_backward(
    problem: Problem,
    device: Device,
    seqlens: Seqlens | None = None,
    tiling: TilingChoice = None,
    *,
    deterministic: bool = False,
    totals: tuple[int, int] | None = None,
) -> VarlenBackwardSchedule:
    """The backward of `plan_varlen`'s problem; arguments and errors as there."""
    packed = replace(problem, packed=True)
    tiling = _checked_choice(packed, device, "fa2", tiling, BACKWARD_ALGORITHMS)
    one = _plan_backward(packed, device, "fa2", tiling, deterministic, False)
    together = packed_totals(packed, seqlens, totals)
    return VarlenBackwardSchedule(packed, device, one.tiling, deterministic=deterministic, seqlens=seqlens, packed=together)


@lru_cache(maxsize=1024)
def _plan_backward(
    problem: Problem, device: Device, algorithm: str, tiling: TilingChoice, deterministic: bool, dbias: bool
) -> BackwardSchedule:
    schedule, fit = _BACKWARD[algorithm]
    paper = standard.paper_blocks(problem) if algorithm == "standard" else paper_blocks(problem, device)
    if algorithm != "fa2" or (tiling is None and problem.block_mask is None):
        tiles = _tiling(paper, fit, problem, device, tiling)
        made: BackwardSchedule = schedule(problem, device, tiles, deterministic=deterministic, dbias=dbias)
        return made
    # The tiling is the forward's, and a block mask has its blocks; the kernels take blocks that divide them.
    forward = _plan(problem, device, algorithm, tiling, lse=True).tiling.used
    blocks = forward.block_rows, forward.block_cols
    own = fa2_backward_tiles.fit(problem, device, blocks)
    return fa2_backward.Fa2BackwardSchedule(
        problem,
        device,
        Tiling(paper, own, own),
        deterministic=deterministic,
        dbias=dbias,
        mask_blocks=None if problem.block_mask is None else blocks,
    )


@lru_cache(maxsize=1024)
def _plan(problem: Problem, device: Device, algorithm: str, tiling: TilingChoice, lse: bool) -> TileSchedule:
    paper = standard.paper_blocks(problem) if algorithm == "standard" else paper_blocks(problem, device)
    fit = {"fa1": fa1, "fa2": fa2_tiles, "standard": standard}[algorithm].fit
    return _SCHEDULES[algorithm](problem, device, _tiling(paper, fit, problem, device, tiling), lse)


def _tiling(
    paper: TileSize, fit: Callable[[Problem, Device], TileSize], problem: Problem, device: Device, tiling: TilingChoice
) -> Tiling:
    """The three stages; raises `DoesNotFit` where nothing fits, unless the caller chose the blocks."""
    try:
        fitted = fit(problem, device)
    except DoesNotFit:
        if tiling is None:
            raise
        fitted = None
    if isinstance(tiling, tuple):
        used = TileSize(*tiling, reason="asked for")
    else:
        used = paper if fitted is None or tiling == "paper" else fitted
    return Tiling(paper, fitted, used)
