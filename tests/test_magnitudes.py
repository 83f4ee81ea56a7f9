"""Scores from 1e-40 to 1e38, forward and backward: whatever float32 can hold comes out right.

q and k are small whole numbers times a power of two, and so is the scale. Scores are then exact in any order of summation, many
of them equal, and what is expected of the weights is known to the last digits, however large the scores are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Device, Problem, plan
from cupyflash.schedules import BackwardSchedule, plan_backward, plan_decode, plan_varlen
from cupyflash.sim import replay, theory
from cupyflash.sim.execution import BackwardExecution, execute_backward
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import backward, reference, reference_gradients
from cupyflash.sim.numbers.yardstick import DTYPES, plain, plain_gradients
from cupyflash.sim.verification import verify
from mutants import Mutant, check_mutant
from suites import sample, wide

A100 = Device.named("A100-40GB")
# Powers of two that q and k are multiples of, and of the scale. Gradients are as large as scale q, which float16 has to hold.
POWERS: dict[str, tuple[tuple[int, int], ...]] = {
    "float16": ((-14, -3), (-4, -100), (0, -2), (2, -2), (5, 0), (8, 2), (11, -3), (13, -10), (13, -3)),
    "bfloat16": ((-62, -10), (-60, -3), (0, -120), (0, -2), (3, -2), (7, 0), (14, 3), (30, 0), (58, 4), (40, 40)),
    "float32": ((-62, -10), (-60, -3), (0, -120), (0, -2), (3, -2), (7, 0), (14, 3), (30, 0), (58, 4), (40, 40)),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "masks": {"mask": True, "bias": True, "key_lengths": True},
    "negative": {"sign": -1},
}


def pose(dtype: str, power: int, scale_power: int, kind: str, n_k: int = 40) -> tuple[list[np.ndarray], dict[str, Any]]:
    """q, k, v and dout of one head, and the options; every row sees a key but those that a mask leaves none."""
    rng = np.random.default_rng([power + 200, scale_power + 200])
    size = 2.0**power
    q = rng.integers(-2, 3, (1, 1, 33, 16)) * size
    k = rng.integers(-2, 3, (1, 1, n_k, 16)) * size
    v, dout = rng.standard_normal((1, 1, n_k, 16)) + 1, rng.standard_normal((1, 1, 33, 16))
    options = dict(KINDS[kind])
    scale = options.pop("sign", 1) * 2.0**scale_power
    if options.pop("mask", False):
        # A bias of multiples of what scores are multiples of, as far as the dtype goes
        steps = rng.integers(-2, 3, (33, n_k)) * min(size * size * scale, 2.0**13)
        options["bias"] = steps.astype(DTYPES[dtype])
        options["mask"] = rng.random((33, n_k)) < 0.7
        options["key_lengths"] = np.array([n_k - 3], np.int32)
    return [array.astype(np.float32).astype(DTYPES[dtype]) for array in (q, k, v, dout)], options | {"scale": scale}


def steps_of(dtype: str) -> float:
    """A few roundings of the dtype: P is rounded to it, and O. Of float32, exponents are rounded besides."""
    return {"float16": 4 * 2.0**-11, "bfloat16": 4 * 2.0**-8, "float32": 64 * 2.0**-24}[dtype]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "kind", "algorithm"),
    [
        *(("float16", "plain", "fa2"), ("float32", "plain", "fa2")),
        *(wide("float16", kind, "fa2") for kind in ("masks", "causal", "negative")),
        *(wide(dtype, "masks", "fa2") for dtype in ("bfloat16", "float32")),
        *(wide("bfloat16", kind, "fa1") for kind in ("plain", "causal")),
        *(wide("float32", "masks", "fa1"), wide("float16", "negative", "fa1")),
    ],
)
def test_weights(dtype: str, kind: str, algorithm: str) -> None:
    for powers in POWERS[dtype]:
        (q, k, v, _), options = pose(dtype, *powers, kind)
        out, lse = cupyflash.attention(q, k, v, return_lse=True, algorithm=algorithm, **options)
        expected, expected_lse = reference(q, k, v, **options)
        assert np.abs(out.astype(np.float64) - expected).max() <= steps_of(dtype) * np.abs(v.astype(np.float64)).max(), powers
        seen = np.isfinite(expected_lse)
        assert np.array_equal(np.isfinite(lse), seen), powers
        assert np.allclose(lse[seen], expected_lse[seen], rtol=2.0**-21, atol=1e-5), powers


def errors(found: dict[str, np.ndarray], arrays: list[np.ndarray], options: dict[str, Any]) -> dict[str, float]:
    """The largest error of each gradient, as a part of what is allowed: more than 1 is too much."""
    q, k, v, dout = arrays
    expected = reference_gradients(dout, q, k, v, **options)
    _, L = reference(q, k, v, **options)
    # Up to 4096, P of half types is off by what float32 rounds off L and S.
    of_lse = 0.0 if q.dtype == np.float32 else 2.0**-22 * min(4096, np.abs(L[np.isfinite(L)]).max())
    rounded = 2 * steps_of(q.dtype.name) + of_lse
    # As large as the sums would be if nothing cancelled: P and dS are rounded, and D, of O that is
    exact = backward(dout, Inputs.of(q, k, v, **options))
    P = exact.P
    dS = P * (np.abs(exact.dP) + np.abs(exact.D) + np.abs(dout.astype(np.float64)).sum(-1, keepdims=True))
    scale = abs(options["scale"])
    q64, k64, dout64 = (np.abs(array.astype(np.float64)) for array in (q, k, dout))
    whole = {"dQ": scale * dS @ k64, "dK": scale * dS.swapaxes(-1, -2) @ q64, "dV": P.swapaxes(-1, -2) @ dout64}
    parts = {
        name: float(np.abs(gradient.astype(np.float64) - expected[name]).max() / (rounded * whole[name].max() + 2.0**-24))
        for name, gradient in found.items()
    }
    return {name: float("inf") if np.isnan(part) else part for name, part in parts.items()}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "kind", "deterministic"),
    [
        ("float16", "plain", False),
        *(wide(dtype, "masks", False) for dtype in ("float16", "bfloat16", "float32")),
        *(wide("float16", "causal", False), wide("float32", "negative", False)),
        wide("float16", "masks", True),
    ],
)
def test_gradients(dtype: str, kind: str, deterministic: bool) -> None:
    for powers in POWERS[dtype]:
        arrays, options = pose(dtype, *powers, kind)
        q, k, v, dout = arrays
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        made = cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
        found = errors(dict(zip(("dQ", "dK", "dV"), made, strict=True)), arrays, options)
        assert max(found.values()) <= 1, (powers, found)


LARGE, BWD, DQ, WEIGHT = "row_bases.cu", "fa2_backward.cu", "fa2_backward_queries.cu", "weight.cuh"
# What breaks the way of rows with a large L, by whether dQ has a kernel of its own
MUTANTS = {
    "no row is large": Mutant(LARGE, "if (!__syncthreads_or(large)) return;", "return;", "uninitialised", ("return bases[row]",)),
    "K is read early": Mutant(LARGE, "wait_for_groups<0>();\n    __syncthreads();", "wait_for_groups<0>();", "race", ("ldmatrix",)),
    "K is overwritten early": Mutant(
        LARGE, "__syncthreads();  // all are done", "// all are done", "race", ("cp.async.cg", "ldmatrix")
    ),
    "m is a lane's": Mutant(LARGE, "m_all = row_max(m[h])", "m_all = m[h]", "numbers"),
    "l is a lane's": Mutant(LARGE, "row_sum(m[h]", "(m[h]", "numbers"),
    "what is masked counts": Mutant(LARGE, "scale_and_mask(S[0]", "if (false) scale_and_mask(S[0]", "numbers"),
    "L is believed": Mutant(LARGE, "> fmaxf(S_all, fmaxf(fabsf(L * UNIT), fabsf(m_all * size))) * ROUNDED", ">= 0.f", "numbers"),
    "a row's score is forgotten": Mutant(WEIGHT, "fmaf(s - score,", "fmaf(s,", "numbers"),
    "the loop is not told": Mutant(
        BWD, "any_large<BR, THREADS>(slot.of_rows);", "any_large<BR, THREADS>(slot.of_rows) && false;", "numbers"
    ),
    "dQ: a row's score is forgotten": Mutant(WEIGHT, "fmaf(s - score,", "fmaf(s,", "numbers"),
    "dQ: no row is large": Mutant(DQ, "large |= is_large(rows_smem[row]);", "", "numbers"),
}


def backward_of_large_scores(schedule: BackwardSchedule, seed: int | None = None) -> tuple[BackwardExecution, bool]:
    """Gradients of scores about 2^28, some of them equal."""
    return backward_of(schedule, *pose("float16", 13, -3, "causal", 100), seed)


def backward_of(
    schedule: BackwardSchedule, arrays: list[np.ndarray], options: dict[str, Any], seed: int | None = None
) -> tuple[BackwardExecution, bool]:
    """An execution on what `pose` gives, and whether its errors are allowed."""
    q, k, v, dout = arrays
    out, lse = reference(q, k, v, **options)
    beside = {name: options[name] for name in ("mask", "bias", "key_lengths") if name in options}
    execution = execute_backward(schedule, dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), seed=seed, **beside)
    found = errors({"dQ": execution.dq, "dK": execution.dk, "dV": execution.dv}, arrays, options)
    return execution, max(found.values()) <= 1


def planned(deterministic: bool) -> BackwardSchedule:
    problem = Problem(1, 1, 1, 33, 100, 16, "float16", causal=True, scale=0.125)
    return plan_backward(problem, Device.named("A100-40GB"), "fa2", (32, 32), deterministic=deterministic)


@pytest.mark.parametrize("name", sample(MUTANTS, {"a row's score is forgotten"}))
def test_mutant(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mutant(MUTANTS[name], planned(name.startswith("dQ")), backward_of_large_scores, tmp_path, monkeypatch)


@pytest.mark.parametrize("deterministic", [wide(False), wide(True)])
def test_every_schedule_seed_gives_the_same_numbers(deterministic: bool) -> None:
    for seed in (None, *range(5)):
        execution, good = backward_of_large_scores(planned(deterministic), seed)
        assert good and execution.findings == ()


@pytest.mark.parametrize("deterministic", [False, wide(True)])
def test_keys_in_parts(deterministic: bool) -> None:
    """With a part of the keys and the L of all, the weights sum to less than one, by the other part's."""
    arrays, options = pose("float32", 7, 0, "plain", 64)
    q, k, v, dout = arrays
    k[..., 32:, :] = k[..., :32, :]  # each part has half of each row's weights, and L of the whole is log(2) more than of the part
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    whole = reference_gradients(dout, q, k, v, **options)
    dq = np.zeros(q.shape)
    for keys in (slice(0, 32), slice(32, 64)):
        one, dk, dv = cupyflash.attention_backward(
            dout, q, k[..., keys, :], v[..., keys, :], out, lse, deterministic=deterministic, **options
        )
        dq += one
        for name, gradient in (("dK", dk), ("dV", dv)):
            assert np.abs(gradient - whole[name][..., keys, :]).max() <= 0.1 * np.abs(whole[name]).max(), name
    assert np.abs(dq - whole["dQ"]).max() <= 0.1 * np.abs(whole["dQ"]).max()
    assert np.abs(lse).max() > 4096


def test_the_scores_of_equal_keys() -> None:
    """The same score for all keys, up to the largest that float16 can multiply: O is V's mean (it was 0, infinite or NaN)."""
    v = np.random.default_rng(0).standard_normal((1, 16, 64)).astype(np.float16)
    for value in (20001, 12001, 30001, 60000):
        q = np.full((1, 16, 64), value, np.float16)
        out, lse = cupyflash.attention(q, q, v, return_lse=True)
        assert np.allclose(out, v.astype(np.float64).mean(axis=-2), atol=2e-3)
        assert np.allclose(lse, float(q[0, 0, 0]) ** 2 * 8, rtol=1e-6)


@pytest.mark.parametrize("deterministic", [False, wide(True)])
def test_a_row_without_weights_stays_alone(deterministic: bool) -> None:
    """L = -inf in a row that sees keys, since its scores overflow or since somebody says so: the gradients of others are right."""
    (q, k, v, dout), options = pose("float32", 0, -2, "plain")
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    lse[..., 5] = -np.inf
    dq, dk, dv = cupyflash.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
    assert np.isfinite(np.delete(dq, 5, axis=-2)).all() and np.isfinite(dk).all() and np.isfinite(dv).all()


@pytest.mark.wide
def test_standard_attention_of_scores_beyond_float16() -> None:
    """With S in float32 they are right; with S in float16 they are infinite."""
    (q, k, v, _), options = pose("float16", 6, 0, "causal")
    expected, expected_lse = reference(q, k, v, **options)
    assert np.abs(expected_lse).max() > 65504
    asked = options | {"algorithm": "standard", "score_dtype": "float32"}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **asked)
    assert np.abs(out.astype(np.float64) - expected).max() <= steps_of("float16") * np.abs(v.astype(np.float64)).max()
    assert np.allclose(lse, expected_lse, rtol=2.0**-21, atol=1e-5)
    beyond = cupyflash.attention(q, k, v, return_lse=True, **asked | {"score_dtype": None})[1]
    assert not np.isfinite(beyond[np.abs(expected_lse) > 65504]).any()


ONE_HOT = (24, 75, 150)  # scores of 101, 994 and 3,977


@pytest.mark.parametrize(
    ("algorithm", "size"), [("fa2", 150), *(wide(name, size) for name in ("fa1", "fa2", "standard") for size in ONE_HOT)]
)
def test_one_hot_rows_in_float32_have_weights_of_one(algorithm: str, size: int) -> None:
    """Each row sees its own key alone: dV is dout, whatever float32's rounding of L."""
    x, dout = np.eye(32, dtype=np.float32) * size, np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    _, pullback = cupyflash.attention_vjp(x, x, dout, algorithm=algorithm)
    assert np.array_equal(pullback(dout)[2], dout)


@pytest.mark.wide
def test_of_large_normal_inputs_in_float32_nothing_is_further_off_than_plain_computation() -> None:
    """The median counts: in one draw a row or two decide, whose largest scores nearly agree, and chance decides which computation
    is right. P = exp(S - L) with an L of float32 alone is off by several times as much."""
    found = []
    for seed in range(9):
        rng = np.random.default_rng(seed)
        q, k = (rng.standard_normal((1, 1, 24, 16)).astype(np.float32) * 10 for _ in range(2))
        v, dout = (rng.standard_normal((1, 1, 24, 16)).astype(np.float32) for _ in range(2))
        inputs = Inputs.of(q, k, v)
        out, pullback = cupyflash.attention_vjp(q, k, v)
        expected, plainly = backward(dout, inputs).gradients, plain_gradients(dout, inputs, from_out=True)
        exact = reference(q, k, v)[0]
        pairs = [(out, exact, plain(inputs))]
        pairs += [(made, expected[name], plainly[name]) for name, made in zip(("dQ", "dK", "dV"), pullback(dout), strict=True)]
        found.append([np.abs(made - right).max() / np.abs(rough - right).max() for made, right, rough in pairs])
    assert (np.median(found, axis=0) <= 1.5).all(), found


@pytest.mark.parametrize(
    ("dtype", "size"), [("float16", 17), *(wide(dtype, size) for dtype in ("float16", "bfloat16") for size in (10.5, 41.0))]
)
def test_standard_attention_s_weights_go_with_its_own_lse(dtype: str, size: float) -> None:
    """L comes from S as it was rounded to be kept, and so must P: of a row with one key it is 1."""
    x = (np.eye(32, dtype=np.float32) * size).astype(DTYPES[dtype])
    dout = np.random.default_rng(0).standard_normal((32, 32)).astype(DTYPES[dtype])
    _, pullback = cupyflash.attention_vjp(x, x, dout, algorithm="standard", causal=True, window=(0, 0))
    assert np.array_equal(pullback(dout)[2], dout)


@pytest.mark.wide
def test_gradients_of_standard_attention_of_scores_beyond_float16() -> None:
    """P is taken from an L that float32 rounds to a 64th at most: weights are off by that."""
    (q, k, v, dout), options = pose("float16", 6, 0, "causal")
    _, pullback = cupyflash.attention_vjp(q, k, v, algorithm="standard", score_dtype="float32", **options)
    whole = reference_gradients(dout, q, k, v, **options)
    for name, found in zip(("dQ", "dK", "dV"), pullback(dout), strict=True):
        assert np.abs(found.astype(np.float64) - whole[name]).max() <= np.abs(whole[name]).max() / 32, name


@pytest.mark.wide
def test_bytes_of_scores_in_float32() -> None:
    """The bytes of S, and no others, are four for each score."""
    problem = Problem(1, 2, 1, 75, 101, 16, "float16", score_dtype="float32", mask=True)
    schedule = plan(problem, A100, "standard", lse=True)
    made = verify(schedule)
    assert made.good and replay(schedule, literal=True) == made.theory
    plain = theory.traffic(plan(problem.asking(score_dtype=None), A100, "standard", lse=True))
    assert made.theory["S"].read_bytes == 2 * made.theory["S"].write_bytes == 2 * 4 * 2 * 75 * 101
    assert {name for name in plain if plain[name] != made.theory[name]} == {"S"}
    ideal = theory.standard_ideal(problem)
    assert (
        ideal == theory.traffic(plan(problem, A100, "standard", "paper", lse=False)) and ideal["S"].read_bytes == 4 * 2 * 75 * 101
    )


def test_what_has_no_scores_in_memory_says_so() -> None:
    problem = Problem(1, 1, 1, 64, 64, 16, "float16", score_dtype="float32")
    x = np.zeros((4, 16), np.float16)
    for refused in (
        lambda: plan(problem, A100, "fa2"),
        lambda: plan(problem, A100, "decode"),
        lambda: plan_decode(problem, A100),
        lambda: plan_varlen(problem, A100),
        lambda: plan_backward(problem, A100, "fa2"),
        lambda: plan_backward(problem, A100, "fa1"),
        lambda: cupyflash.attention(x, x, x, score_dtype="float32"),
        lambda: cupyflash.attention(x, x, x, algorithm="standard", score_dtype="float16"),
    ):
        with pytest.raises(ValueError, match="score_dtype"):
            refused()
