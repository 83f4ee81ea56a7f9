"""The numeric yardstick of `cupyflash.sim.numbers.yardstick`, as an assertion."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import draw, draw_masks, measure

__all__ = ["check_numbers", "draw", "draw_masks"]


def check_numbers(
    out: np.ndarray,
    lse: np.ndarray | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    score_dtype: object = np.float32,
    **problem: Any,
) -> None:
    """The 2x rule for O, and L beside float64's; `problem` as `Inputs.of` takes it."""
    numbers = measure(out, lse, Inputs.of(q, k, v, **problem), score_dtype)
    assert all(each.good for each in numbers.values()), numbers
