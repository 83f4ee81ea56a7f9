"""The numeric yardstick: error against float64 at most twice that of the plain computation in the low precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from cupyflash import Problem
from cupyflash.sim.reference import reference

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


def draw(problem: Problem, seed: int = 0, v_mean: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal q, k and v of shape (b, h, n, d); V about `v_mean`, since a mean of zero hides errors in the weights."""
    rng = np.random.default_rng(seed)
    p = problem
    q = rng.standard_normal((p.batch, p.heads, p.seqlen_q, p.head_dim))
    k = rng.standard_normal((p.batch, p.kv_heads, p.seqlen_k, p.head_dim))
    v = rng.standard_normal((p.batch, p.kv_heads, p.seqlen_k, p.head_dim)) + v_mean
    return tuple(array.astype(np.float32).astype(DTYPES[p.dtype]) for array in (q, k, v))  # type: ignore[return-value]


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, scale: float | None) -> np.ndarray:
    """Attention done plainly in q's dtype: S, P and O each rounded to it, sums in float32."""
    problem, dtype = Problem.from_arrays(q, k, v, causal=causal, scale=scale), q.dtype
    q, k, v = (array.astype(np.float32) for array in (q, k, v))
    if q.ndim > 2:
        k, v = (np.repeat(array, problem.heads // problem.kv_heads, axis=-3) for array in (k, v))
    S = (np.float32(problem.softmax_scale) * (q @ np.swapaxes(k, -1, -2))).astype(dtype).astype(np.float32)
    if causal:
        rows, cols = np.indices(S.shape[-2:])
        S = np.where(cols <= rows + problem.diagonal, S, np.float32(-np.inf))
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    P = np.exp(S - np.where(np.isneginf(m), np.float32(0), m))
    total = P.sum(axis=-1, keepdims=True)
    P = (P / np.where(total == 0, np.float32(1), total)).astype(dtype).astype(np.float32)
    return (P @ v).astype(dtype)


def ulp(x: float, dtype: object) -> float:
    """The unit in the last place of x in a dtype."""
    return float(ml_dtypes.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(max(x, 1e-30)))


def check_numbers(
    out: np.ndarray,
    lse: np.ndarray | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    scale: float | None = None,
    score_dtype: object = np.float32,
) -> None:
    """The 2x rule for O, plus two units in the last place of the output; L to 1e-3 (1e-5 float32) plus 4 ulp of S.

    `score_dtype` is what S is held in: float32 on chip, the element type where S goes to HBM.
    """
    expected, expected_lse = reference(q, k, v, causal=causal, scale=scale)
    ours, theirs = (np.abs(x.astype(np.float64) - expected).max(initial=0) for x in (out, plain(q, k, v, causal, scale)))
    step = ulp(np.abs(expected).max(initial=0), out.dtype)
    assert ours <= 2 * theirs + 2 * step, f"error {ours:.3g}, plainly {theirs:.3g}, one ulp {step:.3g}"
    if lse is not None:
        seen = np.isfinite(expected_lse)
        assert np.array_equal(np.isfinite(lse), seen) and np.all(np.isneginf(lse[~seen]))
        p = Problem.from_arrays(q, k, v, scale=scale)
        heads = np.repeat(k.astype(np.float64), p.heads // p.kv_heads, axis=-3) if q.ndim > 2 else k.astype(np.float64)
        largest = np.abs(p.softmax_scale * (q.astype(np.float64) @ np.swapaxes(heads, -1, -2))).max(initial=0)
        allowed = (1e-5 if q.dtype == np.float32 else 1e-3) + 4 * ulp(largest, score_dtype)
        assert np.abs(lse[seen] - expected_lse[seen]).max(initial=0) <= allowed
