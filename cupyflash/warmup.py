"""Compiles ahead of the first call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from cupyflash.arrays import MAX_ALIGNMENT
from cupyflash.device import Device
from cupyflash.options import Options, require_choice, require_flag
from cupyflash.problem import Problem
from cupyflash.schedules import ALGORITHMS, TileSchedule, fa2_tiles, plan, plan_varlen
from cupyflash.simulated import current_simulation
from cupyflash.tiling import TilingChoice


def warmup(
    *,
    head_dim: int,
    dtype: str = "float16",
    head_dim_v: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: bool = False,
    bias: bool = False,
    padded: bool = False,
    sinks: bool = False,
    varlen: bool = False,
    algorithm: str = "auto",
    tiling: TilingChoice = None,
) -> None:
    """Compile the kernels of such calls, so that the first of them is as quick as the others.

    `mask`, `bias` and `padded` say whether calls will have a mask, a bias, key lengths; `varlen` is for `attention_varlen`, which
    has none of the three. Sizes (of a window too) do not matter, since kernels are compiled for none: where they choose between
    kernels, and on a Hopper between "fa3" and "fa2", all of those are compiled (but for "fa3" with rows of several heads in a
    block, which takes few queries and grouped heads, and for "decode", few queries against many keys). Contiguous arrays are
    assumed. On the current GPU the kernels are loaded too; without a GPU it is the simulated device's kernels that are compiled and
    parsed. Raises as `attention` does.
    """
    require_flag("varlen", varlen)
    require_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
    options = Options(causal=causal, window=window, mask=mask, bias=bias, padded=padded, packed=varlen, sinks=sinks)
    problem = Problem(1, 1, 1, 1, 1, head_dim, dtype, options, head_dim_v)
    bits = problem.head_dim * problem.itemsize | problem.head_dim_v * problem.itemsize | MAX_ALIGNMENT
    problem = replace(problem, alignment=bits & -bits)
    try:
        device, simulated = Device.current(), False
    except (ImportError, RuntimeError):
        device, simulated = current_simulation().device, True
    if varlen and algorithm not in ("auto", "fa2"):
        raise ValueError(f"algorithm must be 'auto' or 'fa2' for varlen, got {algorithm!r}")
    schedules = list(_schedules(problem, device, algorithm, tiling))
    for kernel in [kernel for schedule in schedules for kernel in schedule.kernels()]:
        if simulated:
            from cupyflash.sim.execution import module

            module(kernel, device.compute_capability)
        else:
            from cupyflash.compiler import gpu_kernel

            gpu_kernel(kernel, sys.modules["cupy"].cuda.runtime.getDevice())


def _schedules(problem: Problem, device: Device, algorithm: str, tiling: TilingChoice) -> Iterator[TileSchedule]:
    """What calls that differ in lengths and heads run."""

    def planned(algorithm: str, tiling: TilingChoice) -> TileSchedule:
        if problem.options.packed:
            return plan_varlen(problem, device, None, tiling, algorithm=algorithm)
        return plan(problem, device, algorithm, tiling)

    if algorithm == "auto" and tiling is None:
        with suppress(ValueError):  # where it does not run such calls
            yield planned("fa3", None)
    if algorithm in ("auto", "fa2") and tiling is None:
        for each in fa2_tiles.finalists(problem, device):
            yield planned("fa2", (each.config.block_rows, each.config.block_cols))
    else:
        yield planned("fa2" if algorithm == "auto" else algorithm, tiling)
