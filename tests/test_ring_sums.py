"""The kernel that adds a call's O and L to the sums of a ring: its numbers, its bytes, and how it is launched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.arrays import numpy_dtype
from cupyflash.distributed import sums
from cupyflash.merge import merged
from cupyflash.schedules.add_state import AddStateSchedule
from cupyflash.sim import replay, theory
from cupyflash.sim.execution import run_kernels
from mutants import Mutant, check_mutant
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


def expected_of(given: dict[str, Any]) -> Any:
    """O and L when the kernel is done."""
    o, lse, part, own = (given[name].copy() for name in ("O", "L", "O_part", "L_part"))
    return merged(np, o, lse[..., 0], part.astype(np.float32), own[..., 0])


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
    o, lse = given["O"], given["L"]
    expected, expected_lse = expected_of(given)
    schedule = sums.schedule_of(given, A100)
    traffic, _, findings = run_kernels(schedule, sums.values(given), ())
    assert not findings
    assert traffic == theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)
    np.testing.assert_allclose(o, expected, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(lse[..., 0], expected_lse, rtol=2e-6, atol=2e-6)
    assert np.isneginf(lse).any() and np.isfinite(o).all()


FAULTS = [
    ("fmaxf(before, now)", "fminf(before, now)", "numbers"),
    ("m == NEG_INF ? 0.0f : m", "m", "numbers"),
    ("sum == 0 ? 1.0f : sum", "sum", "numbers"),
    ("if (lane == 0) *L = m + logf(total);", "", "bytes"),
    ("if (at >= p.rows) return;", "", "out of bounds"),
    ("if (col < DV) O[col]", "O[col]", "bytes"),
    ("pair % p.heads", "pair / p.heads", "numbers"),
    ("a * O[col] + b *", "a * O[col] +", "numbers"),
]


@pytest.mark.parametrize(("old", "new", "finds"), [FAULTS[1], *(wide(*fault) for fault in FAULTS if fault != FAULTS[1])])
def test_a_seeded_fault_is_found(old: str, new: str, finds: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn((2, 3, 25), slice(3, 22), 40, "float16")  # 114 rows: the last thread block has some too many
    expected = expected_of(given)

    def run(schedule: AddStateSchedule, seed: int | None) -> tuple[Any, bool]:
        traffic, _, findings = run_kernels(schedule, sums.values(given), (), seed=seed)
        found = given["O"], given["L"][..., 0]
        right = all(np.allclose(a, b, rtol=2e-6, atol=2e-6) for a, b in zip(found, expected, strict=True))
        return SimpleNamespace(traffic=traffic, findings=findings), right

    fault = Mutant("add_state.cu", old, new, finds, ("before = *L",))
    check_mutant(fault, sums.schedule_of(given, A100), run, tmp_path, monkeypatch)


def test_numpy_arrays_are_added_in_place() -> None:
    given = drawn((2, 30), slice(3, 20), 16, "float16")
    o, lse, part, own = (given[name] for name in ("O", "L", "O_part", "L_part"))
    expected, expected_lse = merged(np, o.copy(), lse[..., 0].copy(), part.astype(np.float32), own[..., 0])
    sums.add_state(False, o, lse[..., 0], part, own[..., 0])
    np.testing.assert_allclose(o, expected, rtol=1e-6)
    np.testing.assert_array_equal(lse[..., 0], expected_lse)
