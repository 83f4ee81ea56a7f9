"""Calls with a score function: numbers against NumPy's evaluation of its tree, bytes by all three witnesses, what is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Device, Options, Problem, Score, plan
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.schedules import choose
from cupyflash.sim import theory
from cupyflash.sim.execution import execute
from cupyflash.sim.two_level.machine import replay
from suites import sample

B, H, HKV, NQ, NK, D = 2, 4, 2, 37, 70, 24
A100 = Device.named("A100-40GB")
RNG = np.random.default_rng(18)
SLOPES = (2.0 ** -np.arange(1, H + 1)).astype(np.float32)
DOCUMENTS = np.sort(RNG.integers(0, 3, (B, NK)), axis=1)  # int64, as NumPy makes them
NEAR = RNG.standard_normal((H, 16)).astype(np.float16)[:, ::-2]  # clamped at both ends, with a stride below 0
SCORES = {
    "ALiBi": Score("s + slope[h] * (k - q)", slope=SLOPES),
    "soft-cap": Score("cap * tanh(s / cap)", cap=2.5),
    "documents": Score("where(document[b, k] == document[b, q], s, -far)", document=DOCUMENTS, far=np.inf),
    "relative": Score("s + near[h, q - k + 4] * near[h, row % 8 + kv_h]", near=NEAR),
    "scalar": Score("s * gain + (q + k) % 3", gain=np.array(0.5, np.float32)),
    "lengths": Score("s - log(1 + abs(q - k)) * n_q / n_k"),
}
CASES = [("ALiBi", "fa2", "float16", True), ("documents", "fa1", "float16", True), ("relative", "standard", "float32", False)]
EVERY = [
    *((name, "fa2", dtype, causal) for name in SCORES for dtype, causal in (("float16", True), ("float32", False))),
    *product(["documents"], ["fa1"], ["float16"], [False, True]),
    *product(["relative"], ["fa1", "standard"], ["float32"], [False, True]),
    ("soft-cap", "standard", "float16", True),
]
# Of what the largest of V is; standard rounds S to the element type.
TOLERANCES = {("fa", "float16"): 2e-3, ("fa", "float32"): 3e-6, ("standard", "float16"): 2e-2, ("standard", "float32"): 3e-6}


def arrays(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = ((B, H, NQ, D), (B, HKV, NK, D), (B, HKV, NK, D))
    q, k, v = (RNG.standard_normal(shape).astype(dtype) for shape in shapes)
    return q, k, v


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, score: Score, causal: bool, bias: Any = 0.0) -> tuple[Any, Any]:
    """O and L in float64."""
    k, v = (np.repeat(x.astype(np.float64), H // HKV, axis=1) for x in (k, v))
    at = positions({"b": B, "h": H, "kv_h": HKV, "row": NQ, "k": NK})
    S = evaluate(score.form.tree, at | {"s": q.astype(np.float64) @ k.swapaxes(2, 3) / np.sqrt(D)} | score.arrays | score.numbers)
    S = np.where(~np.bool_(causal) | (at["k"] <= at["q"]), S + bias, -np.inf)
    m = S.max(axis=-1, keepdims=True)
    P = np.exp(S - np.where(np.isinf(m), 0, m))
    total = P.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return P / np.where(total == 0, 1, total) @ v, (m + np.log(total))[..., 0]


@pytest.mark.parametrize(("name", "algorithm", "dtype", "causal"), sample(EVERY, CASES))
def test_numbers_and_bytes(name: str, algorithm: str, dtype: str, causal: bool) -> None:
    score, (q, k, v) = SCORES[name], arrays(dtype)
    problem = Problem.from_arrays(q, k, v, Options(causal=causal, score=score.form))
    schedule = plan(problem, A100, algorithm, lse=True)
    made = execute(schedule, q, k, v, score=score)
    assert made.findings == ()
    assert made.traffic == replay(schedule) == replay(schedule, literal=True) == theory.traffic(schedule)
    for captured in score.arrays:
        assert made.traffic[f"score_{captured}"].read_bytes > 0
    o, L = reference(q, k, v, score, causal)
    most = TOLERANCES["standard" if algorithm == "standard" else "fa", dtype]
    np.testing.assert_allclose(made.out.astype(np.float64), o, rtol=0, atol=most * np.abs(v).max())
    np.testing.assert_allclose(made.lse, L, rtol=1e-5, atol=most)


@pytest.mark.wide
def test_a_call_takes_it_beside_masks_and_a_bias_that_is_added_behind_it() -> None:
    q, k, v = arrays("float16")
    bias = RNG.standard_normal((NQ, NK)).astype(np.float16)
    keys = np.arange(NK) % 5 > 0
    score = Score("where(k < few, s * 2, -s) + slope[h]", slope=SLOPES, few=30)
    out, lse = cupyflash.attention(q, k, v, score=score, bias=bias, mask=keys, return_lse=True)
    o, L = reference(q, k, v, score, False, np.where(keys, bias.astype(np.float64), -np.inf))
    np.testing.assert_allclose(out.astype(np.float64), o, rtol=0, atol=2e-3 * np.abs(v).max())
    np.testing.assert_allclose(lse, L, rtol=1e-5, atol=2e-3)
    # Another number of the same expression is another result of the same kernel.
    other = Score("where(k < few, s * 2, -s) + slope[h]", slope=SLOPES, few=32)
    assert other.form == score.form and not np.array_equal(cupyflash.attention(q, k, v, score=other, bias=bias, mask=keys), out)


def test_rows_all_of_whose_scores_are_masked_give_zeros() -> None:
    q, k, v = arrays("float16")
    score = Score("where(row == 3, -far, s)", far=np.inf)
    out, lse = cupyflash.attention(q, k, v, score=score, return_lse=True)
    assert (out[:, :, 3] == 0).all() and np.isneginf(lse[:, :, 3]).all()
    assert np.isfinite(np.delete(lse, 3, axis=2)).all()


def test_what_has_no_score_function_says_so() -> None:
    q, k, v = arrays("float16")
    problem = Problem.from_arrays(q, k, v, score=SCORES["ALiBi"].form)
    hopper = Device.named("H100-SXM")
    sine = problem.asking(score=Score("s + sin(s)").form)
    assert choose(sine, hopper).algorithm == "fa2" and "score function's sin" in choose(sine, hopper).reason
    with pytest.raises(ValueError, match="score function"):
        plan(sine, hopper, "fa3")
    for wrong, error, words in (
        ("s", TypeError, "score must be a cupyflash.Score or None, got str"),
        (Score("s * x[h]", x=SLOPES[:2]), ValueError, "x must have length 4 along axis 0, which h indexes"),
        (Score("s * x[k]", x=np.ones((NQ,), np.float32)), ValueError, "x must have length 70 along axis 0, which k indexes"),
    ):
        with pytest.raises(error, match=words):
            cupyflash.attention(q, k, v, score=wrong)
    with pytest.raises(ValueError, match="another score function"):
        execute(plan(problem, A100), q, k, v)
    with pytest.raises(TypeError, match="score must be a Score's form or None"):
        Problem.from_arrays(q, k, v, score=SCORES["ALiBi"])
