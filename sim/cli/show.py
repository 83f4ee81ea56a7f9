"""What commands show alike: names, problems, tilings, devices, errors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click
import numpy as np

from cupyflash.device import Device
from cupyflash.problem import Problem
from cupyflash.schedules import TileSchedule

NAMES = {"standard": "standard", "fa1": "FlashAttention", "fa2": "FlashAttention-2"}


def describe(problem: Problem) -> str:
    """A problem in one line."""
    p = problem
    kv = f" ({p.kv_heads} of K and V)" if p.kv_heads != p.heads else ""
    d = f"d {p.head_dim}" + (f", d_v {p.value_dim}" if p.value_dim != p.head_dim else "")
    masks = [name for name in ("causal", "mask", "bias") if getattr(p, name)] + ["key lengths"] * p.padded
    masks += ["window of {} and {}".format(*("-" if side is None else side for side in p.window))] if p.window else []
    sizes = f"batch {p.batch}, heads {p.heads}{kv}, Nq {p.seqlen_q:,}, Nk {p.seqlen_k:,}, {d}, {p.dtype}"
    return ", ".join([sizes, *masks])


def tiling_report(schedule: TileSchedule) -> dict[str, Any]:
    """The three stages of a tiling, for JSON."""
    tiling = schedule.tiling
    stages = {"paper": tiling.paper, "fitted": tiling.fitted, "used": tiling.used}
    return {name: None if size is None else asdict(size) for name, size in stages.items()}


def show_tiling(stages: dict[str, Any]) -> None:
    """The three stages of a tiling, as text."""
    for name, size in stages.items():
        if size is None:
            click.echo(f"  {name:<8}nothing fits")
        else:
            click.echo(f"  {name:<8}Br {size['block_rows']:>4}  Bc {size['block_cols']:>5}  {size['reason']}")


def detected() -> Device | None:
    """The current GPU, or None where there is none or no CuPy."""
    try:
        return Device.current()
    except (ImportError, RuntimeError):
        return None


def worst_error(out: np.ndarray, expected: np.ndarray) -> float:
    """The largest absolute difference."""
    return float(np.abs(out.astype(np.float64) - expected).max(initial=0))
