"""Theorem 2 with its constants, on the paper's own tilings: float32 throughout, so that a byte is a quarter element."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupyflash import Device, Problem, plan
from cupyflash.sim import theory

BASE = Device.named("A100-40GB")


def elements(n: int, d: int, M: float, algorithm: str = "fa1") -> int:
    """HBM accesses in elements for one head with an SRAM of M elements."""
    problem = Problem(1, 1, 1, n, n, d, "float32")
    if algorithm == "standard":
        return theory.standard_ideal(problem).total_bytes // 4
    return theory.traffic(plan(problem, BASE.with_sram(4 * round(M)), algorithm, "paper")).total_bytes // 4


GRID = [
    (n, d, 4 * d * cols)
    for n in (1024, 4096, 16384, 65536)
    for d in (16, 64, 128, 256)
    for cols in (16, 23, 64, 128, 256, 1024)
    if 16 <= cols <= n // 16 and d <= 4 * d * cols <= n * d
]


@pytest.mark.parametrize(("n", "d", "M"), GRID)
def test_between_two_constants(n: int, d: int, M: int) -> None:
    """12 N^2 d^2 / M to leading order; l and m add 4 / 3d, the terms linear in N at most (1 + 1 / d) / 16."""
    ratio = elements(n, d, M) / theory.theorem2_flash(n, d, M)
    assert 12 <= ratio <= 12 * (1 + 4 / (3 * d) + (1 + 1 / d) / 16)


@pytest.mark.parametrize("d", [16, 64, 128])
def test_slope_in_sram_is_minus_one(d: int) -> None:
    n = 65536
    sizes = [4 * d * cols for cols in np.unique(np.geomspace(16, n // 16, 20).round().astype(int))]
    slope = np.polyfit(np.log(sizes), np.log([elements(n, d, M) for M in sizes]), 1)[0]
    assert slope == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize("d", [16, 64, 128])
def test_slope_in_sequence_length_is_two(d: int) -> None:
    M = 4 * d * 64
    lengths = np.unique(np.geomspace(1024, 1 << 20, 20).round().astype(int))
    slope = np.polyfit(np.log(lengths), np.log([elements(int(n), d, M) for n in lengths]), 1)[0]
    assert slope == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_flash_attention_wins_exactly_above_three_d_squared(d: int) -> None:
    """Above about 3 d^2 elements of SRAM, and honestly loses below."""
    n = 65536
    standard, even = elements(n, d, 0, "standard"), theory.break_even_sram(d)
    margin = 1 + 4 / (3 * d) + 0.03  # what l, m and the linear terms move the crossing by
    for factor in (0.1, 0.5, 0.9, 0.97):
        assert elements(n, d, factor * even) > standard
    for factor in (margin, 1.5, 2, 10):
        assert elements(n, d, factor * even) < standard


@pytest.mark.parametrize(("d", "dtype", "ratio"), [(128, "float16", 0.60), (128, "float32", 1.17), (256, "float16", 2.3)])
def test_where_an_a100_stands(d: int, dtype: str, ratio: float) -> None:
    """Accesses in elements against standard attention's, with 163 KB a block."""
    n = 65536
    M = BASE.sram_per_block // (2 if dtype == "float16" else 4)
    assert elements(n, d, M) / elements(n, d, M, "standard") == pytest.approx(ratio, abs=0.05)


@pytest.mark.parametrize("n", [1024, 8192])
@pytest.mark.parametrize("d", [32, 128])
def test_bounds_are_below_and_meet_at_d_squared(n: int, d: int) -> None:
    for M in (d, d * d // 2, d * d, 4 * d * d, 16 * d * d):
        if theory.theorem2_holds_for(n, d, M):
            assert theory.lower_bound(n, d, M) <= elements(n, d, M)
    assert math.isclose(theory.lower_bound(n, d, d * d), n * n)
    assert math.isclose(theory.lower_bound(n, d, d * d - 1e-6), n * n, rel_tol=1e-6)


def test_range_of_the_theorem() -> None:
    assert theory.theorem2_holds_for(1024, 64, 64) and theory.theorem2_holds_for(1024, 64, 1024 * 64)
    assert not theory.theorem2_holds_for(1024, 64, 63) and not theory.theorem2_holds_for(1024, 64, 1024 * 64 + 1)
