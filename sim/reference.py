"""Attention in float64 with NumPy: what every other result is measured against."""

from __future__ import annotations

import numpy as np

from cupyflash.problem import Problem


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """O = softmax(scale Q K^T) V and L = log sum exp, in float64, for shapes (..., n, d) with grouped heads.

    A row that sees no key has O = 0 and L = -inf. Holds all of S: memory grows as n_q n_k.
    """
    problem = Problem.from_arrays(q, k, v, causal=causal, scale=scale)
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    if q.ndim > 2:
        k, v = (np.repeat(array, problem.heads // problem.kv_heads, axis=-3) for array in (k, v))
    S = problem.softmax_scale * (q @ np.swapaxes(k, -1, -2))
    if causal:
        rows, cols = np.indices(S.shape[-2:])
        S = np.where(cols <= rows + problem.diagonal, S, -np.inf)
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    P = np.exp(S - np.where(np.isneginf(m), 0, m))
    total = P.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        L = m + np.log(total)
    return P @ v / np.where(total == 0, 1, total), L[..., 0]
