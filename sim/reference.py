"""Attention in float64 with NumPy: what every other result is measured against."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cupyflash.problem import Problem, Window


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    key_lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """O = softmax(scale Q K^T + bias) V and L = log sum exp, in float64; arguments as `cupyflash.attention` takes them.

    A row that sees no key has O = 0 and L = -inf. Holds all of S: memory grows as n_q n_k.
    """
    S, v = masked_scores(
        q, k, v, np.float64, causal=causal, window=window, scale=scale, mask=mask, bias=bias, key_lengths=key_lengths
    )
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    P = np.exp(S - np.where(np.isneginf(m), 0, m))
    total = P.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        L = m + np.log(total)
    return P @ v / np.where(total == 0, 1, total), L[..., 0]


def masked_scores(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dtype: type[np.floating[Any]],
    *,
    causal: bool,
    window: Window | None = None,
    scale: float | None,
    mask: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    key_lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """S in `dtype` with -inf where a row does not see a key, and V in `dtype` with a head for each of q's."""
    p = Problem.from_arrays(q, k, v, causal=causal, window=window, scale=scale, mask=mask, bias=bias, key_lengths=key_lengths)
    q, k, v = (array.astype(dtype) for array in (q, k, v))
    if q.ndim > 2:
        k, v = (np.repeat(array, p.heads // p.kv_heads, axis=-3) for array in (k, v))
    S = dtype(p.softmax_scale) * (q @ np.swapaxes(k, -1, -2))
    if bias is not None:
        S += bias.astype(dtype)
    rows, cols = np.indices(S.shape[-2:])
    seen = np.ones(S.shape, bool)
    if causal:
        seen &= cols <= rows + p.diagonal
    left, right = window or (None, None)
    if left is not None:
        seen &= cols >= rows + p.diagonal - left
    if right is not None:
        seen &= cols <= rows + p.diagonal + right
    if mask is not None:
        seen &= mask
    if key_lengths is not None:
        seen &= cols < np.asarray(key_lengths).reshape(-1, *(1,) * 3)[(0,) * (4 - q.ndim)]
    return np.where(seen, S, dtype(-np.inf)), v


def reference_gradients(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float | None = None, **masks: Any
) -> dict[str, np.ndarray]:
    """dQ, dK and dV (and dbias, of S's shape) of sum(dout * O), in float64; `masks` as for `reference`.

    Source: FlashAttention (arXiv 2205.14135), Appendix B.2.
    """
    P, dP, D = gradient_factors(dout, q, k, v, scale=scale, **masks)
    dS = P * (dP - D)
    dO, Q, K = (array.astype(np.float64) for array in (dout, q, k))
    return {"dbias": dS} | gradients_of(P, dS, dO, Q, K, scale)


def gradient_factors(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **masks: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P, dP = dO V^T and D = rowsum(P * dP) in float64, of which dS = P * (dP - D)."""
    S, V = masked_scores(q, k, v, np.float64, **{"causal": False, "scale": None} | masks)
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    P = np.exp(S - np.where(np.isneginf(m), 0, m))
    total = P.sum(axis=-1, keepdims=True)
    P /= np.where(total == 0, 1, total)
    dP = dout.astype(np.float64) @ np.swapaxes(V, -1, -2)
    return P, dP, (P * dP).sum(axis=-1, keepdims=True)


def gradients_of(
    P: np.ndarray, dS: np.ndarray, dO: np.ndarray, q: np.ndarray, k: np.ndarray, scale: float | None
) -> dict[str, np.ndarray]:
    """dQ = scale dS K, dK = scale dS^T Q and dV = P^T dO, the last two summed over the query heads of each key head."""
    factor = q.dtype.type(1 / math.sqrt(q.shape[-1]) if scale is None else scale)

    def grouped(gradient: np.ndarray) -> np.ndarray:
        if q.ndim == 2 or q.shape[-3] == k.shape[-3]:
            return gradient
        groups = (*gradient.shape[:-3], k.shape[-3], q.shape[-3] // k.shape[-3], *gradient.shape[-2:])
        summed: np.ndarray = gradient.reshape(groups).sum(axis=-3)
        return summed

    K = k if q.ndim == 2 else np.repeat(k, q.shape[-3] // max(k.shape[-3], 1), axis=-3)
    return {
        "dQ": factor * (dS @ K),
        "dK": grouped(factor * (np.swapaxes(dS, -1, -2) @ q)),
        "dV": grouped(np.swapaxes(P, -1, -2) @ dO),
    }
