"""Numbers of the benchmarks: what the bound takes and refuses, the reference, how inputs are drawn."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cupyflash.sim import ptx
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import reference, reference_gradients
from cupyflash.sim.numbers.yardstick import DTYPES, plain, plain_gradients

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
accuracy, machine = importlib.import_module("accuracy"), importlib.import_module("machine")


def drawn(n: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    """Q, K, V and dO, (1, 2, n, 32)."""
    random = np.random.default_rng(seed)
    return [random.standard_normal((1, 2, n, 32)).astype(np.float32).astype(DTYPES[dtype]) for _ in range(4)]


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_float64_s_and_never_holds_more_scores_than_it_may(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "SCORES", 24 * 50)
    arrays = [array[..., :50, :] for array in drawn(64, "float32")]
    parts = list(accuracy.weights(np, *(array[0] for array in arrays[:2]), causal))
    assert len(parts) > 4 and max(P.size for *_, P in parts) <= accuracy.SCORES
    expected, _ = reference(*arrays[:3], causal=causal)
    exact = reference_gradients(arrays[3], *arrays[:3], causal=causal)
    found = accuracy.forward(np, arrays[:3], causal) + accuracy.gradients(np, arrays, causal)
    for ours, right in zip(found, (expected, *(exact[name] for name in ("dQ", "dK", "dV"))), strict=True):
        assert accuracy.relative_rms(np, ours, right) < 1e-6


def without_some(arrays: Sequence[np.ndarray], kept: np.ndarray, causal: bool) -> tuple[np.ndarray, ...]:
    """O, dQ, dK and dV with the keys that are not kept left out, by a mask."""
    out, _ = reference(*arrays[:3], causal=causal, mask=kept)
    exact = reference_gradients(arrays[3], *arrays[:3], causal=causal, mask=kept)
    return out, exact["dQ"], exact["dK"], exact["dV"]


@pytest.mark.wide
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_bound_takes_plain_low_precision_and_refuses_an_eighth_of_the_keys_left_out(dtype: str, causal: bool) -> None:
    n = 128
    arrays = drawn(n, dtype)
    wide = [array.astype(np.float32) for array in arrays]
    right = accuracy.forward(np, wide[:3], causal) + accuracy.gradients(np, wide, causal)
    rounded = plain_gradients(arrays[3], Inputs.of(*arrays[:3], causal=causal), from_out=True)
    good = (plain(Inputs.of(*arrays[:3], causal=causal)), *(rounded[name] for name in ("dQ", "dK", "dV")))
    bound = accuracy.bound(dtype)
    for ours, exact in zip(good, right, strict=True):
        assert accuracy.relative_rms(np, ours.astype(np.float32), exact) < bound / 1.5
    keys = np.arange(n)
    for kept in (keys < n * 7 // 8, keys >= n // 8, keys % 8 != 3):
        for bad, exact in zip(without_some(arrays, kept, causal), right, strict=True):
            assert accuracy.relative_rms(np, bad.astype(DTYPES[dtype]).astype(np.float32), exact) > 1.5 * bound


def test_what_is_no_number_or_of_another_shape_is_infinitely_wrong() -> None:
    right = np.ones((2, 3), np.float32)
    assert accuracy.relative_rms(np, right, right) == 0
    for bad in (np.full_like(right, np.nan), np.full_like(right, np.inf), np.ones((3, 2), np.float32)):
        assert accuracy.relative_rms(np, bad, right) == math.inf
    assert accuracy.relative_rms(np, np.zeros_like(right), np.zeros_like(right)) == 0
    assert accuracy.relative_rms(np, right, np.zeros_like(right)) == math.inf


def test_normal_numbers_are_drawn_by_a_kernel_of_our_own() -> None:
    module = ptx.Module.from_source(machine.NORMAL, options=["-arch=compute_75"])
    x, again, other = (np.empty(4000, np.float32) for _ in range(3))
    for array, seed in ((x, 0), (again, 0), (other, 1)):
        launch = module.launch("normal", 4, 256, {"x": array, "n": array.size, "seed": seed})
        assert not launch.findings
    assert np.array_equal(x, again) and abs(np.corrcoef(x, other)[0, 1]) < 0.06 and abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 0.06
    assert np.isfinite(x).all() and abs(x.mean()) < 0.06 and abs(x.std() - 1) < 0.05 and abs((x**4).mean() - 3) < 0.5
