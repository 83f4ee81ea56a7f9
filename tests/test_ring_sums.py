"""The kernel that adds a call's O and L to the sums of a ring: its numbers, its bytes, and how it is launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.arrays import numpy_dtype
from cupyflash.distributed import sums
from cupyflash.merge import merged
from cupyflash.sim import replay, theory
from cupyflash.sim.execution import run_kernels
from suites import wide

A100 = Device.named("A100-40GB")


def drawn(shape: tuple[int, ...], rows: slice, d: int, dtype: str) -> dict[str, Any]:
    """Sums of which some rows are added to, and what is added; some rows have seen no key before, now, or at all."""
    random = np.random.default_rng(sum(shape) + d)
    out, lse = random.standard_normal((*shape, d), np.float32), 20 * random.standard_normal(shape, np.float32)
    lse[..., ::5] = -np.inf
    out[..., ::5, :] = 0
    part = out[..., rows, :]
    o, own = (
        random.standard_normal(part.shape, np.float32).astype(numpy_dtype(dtype)),
        20 * random.standard_normal(part.shape[:-1], np.float32),
    )
    own[..., ::3] = -np.inf
    return sums.arrays(part, lse[..., rows], o, own)


@pytest.mark.parametrize(
    ("shape", "rows", "d", "dtype"),
    [
        ((2, 3, 40), slice(7, 24), 40, "float16"),
        wide((3, 70), slice(0, 70), 128, "bfloat16"),
        wide((33,), slice(1, 33), 1, "float32"),
        wide((1, 2, 64), slice(32, 64), 100, "float16"),
    ],
)
def test_the_kernel_merges_as_merge_states_does_and_moves_what_theory_says(
    shape: tuple[int, ...], rows: slice, d: int, dtype: str
) -> None:
    given = drawn(shape, rows, d, dtype)
    o, lse, part, own = (given[name] for name in ("O", "L", "O_part", "L_part"))
    expected, expected_lse = merged(np, o.copy(), lse[..., 0].copy(), part.astype(np.float32), own[..., 0])
    schedule = sums.schedule_of(given, A100)
    traffic, _, findings = run_kernels(schedule, sums.values(given), ())
    assert not findings
    assert traffic == theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)
    np.testing.assert_allclose(o, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse[..., 0], expected_lse, rtol=2e-6, atol=2e-6)
    assert np.isneginf(lse).any() and np.isfinite(o).all()


def test_numpy_arrays_are_added_in_place() -> None:
    given = drawn((2, 30), slice(3, 20), 16, "float16")
    o, lse, part, own = (given[name] for name in ("O", "L", "O_part", "L_part"))
    expected, expected_lse = merged(np, o.copy(), lse[..., 0].copy(), part.astype(np.float32), own[..., 0])
    sums.add_state(False, o, lse[..., 0], part, own[..., 0])
    np.testing.assert_allclose(o, expected, rtol=1e-6)
    np.testing.assert_array_equal(lse[..., 0], expected_lse)
