"""Known errors: cupyflash/clock_errors.toml, which benchmarks/published/scores.py writes.

They are the clock's by class of kernels, and those of the clock and of the planner's formulas on our calls that were measured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from .whole import Clock, Time

TENSOR_SHARE = 0.05
ROLES = "warp roles"
CLOCK, PLANNER = "clock", "planner"


@dataclass(frozen=True)
class KnownError:
    """The errors of predictions of a class of published kernels, or of our calls: ratios are predicted over measured time.

    `median`: of |ratio - 1|; `near`: figures within 20 %; `bias`: the geometric mean's distance from 1.
    """

    kind: str
    figures: int
    median: float
    near: int
    least: float
    most: float
    bias: float

    def __str__(self) -> str:
        one, many = "published kernel of this class", "published kernels of this class"
        if self.kind.startswith((CLOCK, PLANNER)):
            one, many = "call of ours", "calls of ours"
        if not self.figures:
            return f"no {one} ({self.kind}) was compared"
        return (f"of {self.figures} {many} ({self.kind}) half were within {self.median:.0%}, {self.near} within 20 %, all from "
                f"{self.least:.2f} to {self.most:.2f} of the measured time")  # fmt: skip


def kind_of(clock: Clock, time: Time) -> str:
    """The class of a kernel: "warp roles" if warps wait for mbarriers, "tensor cores" if these work for a twentieth of the time,
    "memory" if DRAM or the L2 binds, else "arithmetic"."""
    if clock.roles:
        return ROLES
    if time.busy["tensor"] > TENSOR_SHARE:
        return "tensor cores"
    return "memory" if time.binds in ("DRAM", "L2") else "arithmetic"


def known_error(clock: Clock, time: Time) -> KnownError:
    """The known error for a kernel of the same class; of no figures, if none was compared."""
    return error_of(kind_of(clock, time))


def error_of(kind: str) -> KnownError:
    """The known error of a class."""
    return KnownError(kind, **_table()[kind]) if kind in _table() else KnownError(kind, 0, 0, 0, 1, 1, 0)


def own_error(source: str, direction: str) -> KnownError:
    """The known error of CLOCK or PLANNER on our calls that were measured: "forward", "backward" or "decoding"."""
    return error_of(f"{source}, {direction}")


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(resources.files("cupyflash").joinpath("clock_errors.toml").read_text())
