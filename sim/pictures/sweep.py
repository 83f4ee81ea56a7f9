"""Traffic along one axis, by the closed forms alone: Theorem 2's counts as functions of M, N, d or Bc."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from cupyflash.device import Device
from cupyflash.request.problem import USUAL_HEAD_DIM, Problem
from cupyflash.schedules import TileSchedule, plan
from cupyflash.sim import l2, theory
from cupyflash.sim.names import AXES as AXES
from cupyflash.sim.names import Axis as Axis
from cupyflash.tiling import DoesNotFit, TilingChoice

# Enough rows to fill any device many times over.
LONG = 1 << 30


@dataclass(frozen=True)
class Point:
    """One point of a sweep; `value` is its place on the axis (sram in bytes), bytes are over all heads.

    `ideal_bytes` are standard attention's if it reads each input of each step once; `theorem2_elements` is
    N^2 d^2 / M, the argument of Theorem 2, over all heads. `behind` has the bytes behind the L2 by a model, on request.
    """

    value: int
    sram_elements: int
    block_rows: int
    block_cols: int
    read_bytes: int
    write_bytes: int
    ideal_bytes: int
    theorem2_elements: float
    behind: l2.Behind | None = None

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def ratio(self) -> float | None:
        """Bytes over standard attention's; None if that moves nothing."""
        return self.total_bytes / self.ideal_bytes if self.ideal_bytes else None


@dataclass(frozen=True)
class Sweep:
    """The points where blocks fit, and (value, reason) for the others."""

    points: tuple[Point, ...]
    skipped: tuple[tuple[int, str], ...]


def sweep(
    problem: Problem,
    device: Device,
    over: Axis,
    values: Iterable[int],
    algorithm: str = "fa1",
    tiling: TilingChoice = "paper",
    *,
    lse: bool = False,
    with_l2: bool = False,
) -> Sweep:
    """Compute the closed form's traffic of `algorithm` at each value of an axis; `problem` and `device` give everything else.

    `tiling` is "paper" for the formula's sizes, (block_rows, block_cols), or None for sizes fitted to the kernel. For
    FlashAttention-2 that is the tile of long rows at all lengths: a call too small to fill the device takes smaller row blocks, to
    have more of them, and reads K and V once for each (`cupyflash.plan` says which).

    sram: bytes of one block's SRAM. seqlen: queries, and keys too if the problem has as many of both. head-dim: d, of V too if
    the problem has one d.
    block-cols: Bc, and with it M = 4 d Bc, the SRAM at which the paper's formula gives that Bc.

    `with_l2` adds the L2 model's bytes of DRAM (`sim.l2`); values that are too long for it are skipped.

    Raises ValueError for values that no problem or device can have.
    """
    points, skipped = [], []
    for value in values:
        posed, chip = at(problem, device, over, value)
        try:
            schedule = schedule_at(posed, chip, algorithm, tiling, lse=lse)
            behind = l2.run(schedule) if with_l2 else None
        except (DoesNotFit, l2.TooLong) as error:
            skipped.append((value, str(error)))
            continue
        traffic = theory.traffic(schedule)
        elements = chip.sram_per_block // posed.itemsize
        area = posed.head_count * posed.seqlen_q * posed.seqlen_k
        points.append(
            Point(
                value,
                elements,
                schedule.block_rows,
                schedule.block_cols,
                traffic.read_bytes,
                traffic.write_bytes,
                theory.standard_ideal(posed).total_bytes,
                area * posed.head_dim**2 / max(1, elements),
                behind,
            )
        )
    return Sweep(tuple(points), tuple(skipped))


def schedule_at(problem: Problem, device: Device, algorithm: str, tiling: TilingChoice, *, lse: bool) -> TileSchedule:
    """A point's schedule, with the tile of long rows if the tile would depend on lengths and heads. Raises as `plan` does."""
    if algorithm != "fa2" or tiling is not None or problem.options.block_mask is not None:
        return plan(problem, device, algorithm, tiling, lse=lse)
    return replace(plan(replace(problem, seqlen_q=LONG, seqlen_k=LONG), device, algorithm, lse=lse), problem=problem)


def at(problem: Problem, device: Device, over: Axis, value: int) -> tuple[Problem, Device]:
    """The problem and the device at one value of an axis."""
    if over == "sram":
        return problem, device.with_sram(value)
    if over == "seqlen":
        keys = value if problem.seqlen_k == problem.seqlen_q else problem.seqlen_k
        return replace(problem, seqlen_q=value, seqlen_k=keys), device
    if over == "head-dim":
        value_dim = value if problem.head_dim_v == problem.head_dim else problem.head_dim_v
        return replace(problem, head_dim=value, head_dim_v=value_dim), device
    return problem, device.with_sram(4 * problem.head_dim * problem.itemsize * value)


def default_range(problem: Problem, over: Axis) -> tuple[int, int, int, bool]:
    """(first, last, points, true for logarithmic spacing) that show an axis well.

    SRAM goes from the 4 d elements that make Bc = 1 to the N d of the theorem, Bc likewise; two points for each doubling.
    """
    d, N = problem.head_dim, max(4, problem.seqlen_k)
    if over == "head-dim":
        return 16, USUAL_HEAD_DIM, 16, False
    if over == "seqlen":
        return 64, 65536, 21, True
    doublings = 2 * round(math.log2(N / 4)) + 1
    unit = 4 * d * problem.itemsize if over == "sram" else 1
    return unit, N // 4 * unit, doublings, True


def spaced(first: int, last: int, points: int, log: bool) -> list[int]:
    """Whole numbers from first to last, evenly spaced or in the logarithm; fewer than `points` if some coincide."""
    if not 0 < first <= last:
        raise ValueError(f"a sweep goes from a positive value up, got {first:,} to {last:,}")
    between = np.geomspace(first, last, points) if log else np.linspace(first, last, points)
    return [int(value) for value in np.unique(between.round())]
