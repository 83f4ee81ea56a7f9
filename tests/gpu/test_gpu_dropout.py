"""Dropout on the chip: the weights that the reference says, in every algorithm, forward and backward, by the 2x rule."""

from __future__ import annotations

import numpy as np
import pytest
from chip import DTYPES, check_backward, check_forward, choose, on_host

import cupyflash
from cupyflash import Problem
from cupyflash.request.dropout import Dropout
from cupyflash.sim.numbers.reference import dropped

ALGORITHMS = ("fa2", "fa1", "standard")


@pytest.mark.parametrize("shape", choose([(2, 3, 700, 900), (1000, 33)], [(2, 40, 33)]))
def test_the_mask(shape: tuple[int, ...]) -> None:
    import cupy

    (kept,) = on_host(cupyflash.dropout_mask(shape, 0.3, seed=2**40 + 1, offset=7, xp=cupy))
    assert np.array_equal(kept, ~dropped(Dropout(0.3, 2**40 + 1, 7), shape))


@pytest.mark.parametrize("d", choose([40, 64, 128, 256], [16]))
@pytest.mark.parametrize("dtype", choose(DTYPES, ("float16",)))
@pytest.mark.parametrize("algorithm", choose(ALGORITHMS, ("fa2",)))
def test_numbers(algorithm: str, dtype: str, d: int) -> None:
    for causal in choose((False, True), (True,)):
        problem = Problem(2, 4, 2, *choose((257, 513), (33, 40)), d, dtype, causal=causal, dropout=True)
        check_forward(problem, algorithm)
        for deterministic in choose((False, True), (False,)) if algorithm == "fa2" else (False,):
            check_backward(problem, algorithm, deterministic=deterministic)
