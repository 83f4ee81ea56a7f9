"""Theorem 5 with its constants, on the paper's own tilings: float32 throughout, so that a byte is a quarter element."""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_theorem2 import GRID

from cupyflash import Device, Problem, plan
from cupyflash.schedules import plan_backward
from cupyflash.sim import SramOverflow, replay, theory
from cupyflash.sim.pictures.paper import in_two_bytes

BASE = Device.named("A100-40GB")
# GPT-2 medium in FlashAttention's Figure 2 (left): N 1024, d 64, 16 heads, batch 64; forward and backward on an A100.
GPT2 = Problem(64, 16, 16, 1024, 1024, 64, "float32")


def elements(n: int, d: int, M: int, algorithm: str = "fa1") -> int:
    """HBM accesses in elements of one head's backward with an SRAM of M elements."""
    schedule = plan_backward(Problem(1, 1, 1, n, n, d, "float32"), BASE.with_sram(4 * M), algorithm, "paper")
    return theory.traffic(schedule).total_bytes // 4


@pytest.mark.parametrize(("n", "d", "M"), GRID)
def test_between_two_constants(n: int, d: int, M: int) -> None:
    """20 N^2 d^2 / M to leading order; L adds 1 / 5d, a ragged last block at most 1 / 16, the terms linear in N at most 7 / 80."""
    ratio = elements(n, d, M) / theory.theorem5_flash(n, d, M)
    assert 20 <= ratio <= 20 * ((1 + 1 / (5 * d)) * 17 / 16 + 7 / 80)


@pytest.mark.parametrize("d", [16, 64, 128])
def test_the_constant_is_twenty(d: int) -> None:
    n, M = 1 << 20, 4 * d * 64
    assert elements(n, d, M) / theory.theorem5_flash(n, d, M) == pytest.approx(20 * (1 + 1 / (5 * d)), rel=1e-3)


@pytest.mark.parametrize("d", [16, 64, 128])
def test_slope_in_sram_is_minus_one(d: int) -> None:
    n = 65536
    sizes = [4 * d * int(cols) for cols in np.unique(np.geomspace(16, n // 16, 20).round())]
    slope = np.polyfit(np.log(sizes), np.log([elements(n, d, M) for M in sizes]), 1)[0]
    assert slope == pytest.approx(-1, abs=0.05)


@pytest.mark.parametrize("d", [16, 64, 128])
def test_slope_in_sequence_length_is_two(d: int) -> None:
    lengths = np.unique(np.geomspace(1024, 1 << 20, 20).round().astype(int))
    slope = np.polyfit(np.log(lengths), np.log([elements(int(n), d, 4 * d * 64) for n in lengths]), 1)[0]
    assert slope == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("n", [512, 4096, 65536])
@pytest.mark.parametrize("d", [16, 64, 256])
def test_standard_is_between_two_constants(n: int, d: int) -> None:
    """Seven passes over N^2, eight over N d, whatever M is."""
    counted = elements(n, d, 4096, "standard")
    assert counted == 7 * n * n + 8 * n * d == elements(n, d, 65536, "standard")
    assert 7 <= counted / theory.theorem5_standard(n, d) <= 8


@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_flash_attention_wins_above_twenty_sevenths_of_d_squared(d: int) -> None:
    """Above about 2.9 d^2 elements of SRAM, and honestly loses below."""
    n = 65536
    standard, even = elements(n, d, 4 * d, "standard"), theory.theorem5_break_even_sram(d) / (4 * d)
    margin = 1 + 1 / (5 * d) + 0.03  # what L and the linear terms move the crossing by
    for factor in (0.1, 0.5, 0.9, 0.99):
        assert elements(n, d, 4 * d * math.floor(factor * even)) > standard
    for factor in (margin, 1.5, 2, 10):
        assert elements(n, d, 4 * d * math.ceil(factor * even)) < standard


@pytest.mark.parametrize(
    ("d", "dtype", "ratio"),
    [(64, "float16", 0.14), (64, "float32", 0.28), (128, "float16", 0.56), (128, "float32", 1.12), (256, "float16", 2.23)],
)
def test_where_an_a100_stands(d: int, dtype: str, ratio: float) -> None:
    """Accesses in elements against standard attention's, with 163 KB a block."""
    M = BASE.sram_per_block // (2 if dtype == "float16" else 4)
    assert elements(65536, d, M) / elements(65536, d, M, "standard") == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_papers_residency_replays(causal: bool, dtype: str) -> None:
    """K_j, V_j, dK_j and dV_j fill M to the byte where 4d divides it, and do not fit where the ceiling has rounded up."""
    problem = Problem(1, 2, 1, 1000, 900, 64, dtype, causal=causal)
    schedule = plan_backward(problem, BASE, "fa1", "paper")
    assert 4 * schedule.block_cols * 64 * problem.itemsize == BASE.sram_per_block
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)
    with pytest.raises(SramOverflow, match="does not fit"):
        replay(plan_backward(problem, BASE.with_sram(BASE.sram_per_block - 64), "fa1", "paper"))


def test_extra_memory() -> None:
    """Three N^2 matrices for standard attention, float32 dQ for half types, m and log(l) for float32."""
    for n in (100, 1000):
        for d in (16, 128):
            for dtype, size in (("float32", 4), ("float16", 2)):
                problem = Problem(2, 3, 3, n, n, d, dtype)
                spaces = {name: plan_backward(problem, BASE, name).workspace_bytes for name in ("standard", "fa1", "fa2")}
                bases = 2 * 3 * n * 2 * 4 if dtype == "float32" else 0
                assert spaces["standard"] == 3 * 2 * 3 * n * n * size + bases
                assert spaces["fa1"] == (bases or 2 * 3 * n * d * 4)
                assert spaces["fa2"] <= 2 * 3 * (n + 7) * (d + 3) * 4  # dQ's sum has whole eights of rows


def test_figure_2_flash_attention() -> None:
    """The paper measured 4.4 GB; Algorithms 1 and 4 at M = 192 KB of 2-byte elements, with O and dQ in two bytes, are 4.6 GB."""
    device = BASE.with_sram(4 * 192 * 1024 // 2)
    forward, backward = plan(GPT2, device, "fa1", "paper"), plan_backward(GPT2, device, "fa1", "paper")
    assert (forward.block_cols, backward.block_cols) == (384, 384)
    moved = [in_two_bytes(theory.traffic(each)) for each in (forward, backward)]
    assert moved == [pytest.approx(1.67, abs=0.005), pytest.approx(2.97, abs=0.005)]
    assert round(sum(moved), 1) == 4.6


def test_figure_2_standard_attention() -> None:
    """The paper measured 40.3 GB, and 35.3 in its later version: 18.0 and 15.7 passes over N^2. Algorithms 0 and 3 are 11."""
    one_pass, rows = GPT2.head_count * 1024**2 * 2 / 1e9, GPT2.head_count * 1024 * 64 * 2 / 1e9
    counted = theory.standard_ideal(GPT2), theory.traffic(plan_backward(GPT2, BASE, "standard", "paper"))
    assert sum(map(in_two_bytes, counted)) == pytest.approx(11 * one_pass + 12 * rows)
    passes = [(measured - 12 * rows) / one_pass for measured in (40.3, 35.3)]
    assert passes == [pytest.approx(18.0, abs=0.05), pytest.approx(15.7, abs=0.05)]
    # Dropout reads and writes P once more each way, and a byte of its mask; a mask of its own reads and writes S and dS once more.
    dropout, masking = 2 * (2 + 0.5), 2 * 2
    assert 11 < passes[1] < 11 + dropout < passes[0] < 11 + dropout + masking
