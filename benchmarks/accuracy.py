"""The accuracy of an implementation: relative RMS against a float32 reference, on the device where the arrays are.

relative RMS = sqrt(sum (x - y)^2 / sum y^2) over all of a tensor, where y is the reference. The reference is computed plainly, by
rows and heads, so that no matrix of N x N x heads is in memory. `xp` is CuPy or NumPy, arrays are (b, h, n, d) in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
SCORES = 1 << 26  # elements of S in memory at a time
# Plain computation in a half type, with everything rounded, is up to 0.7 eps off; leaving out an eighth of the keys at least 0.03
# (the last ones, under a causal mask; 0.37 without). The least that is allowed is for the order of sums in float32.
EPS_ALLOWED, LEAST_ALLOWED = 2.0, 1e-4


def bound(dtype: str) -> float:
    """The largest relative RMS of a right result in that dtype."""
    return max(EPS_ALLOWED * EPS[dtype], LEAST_ALLOWED)


def relative_rms(xp: Any, out: Any, expected: Any) -> float:
    """Infinite where `out` has another shape, or something that is no number."""
    if out.shape != expected.shape:
        return math.inf
    off, size = (float(xp.square(x).sum(dtype=np.float64)) for x in (out - expected, expected))
    found = math.sqrt(off / size) if size else (0.0 if off == 0 else math.inf)
    return found if math.isfinite(found) else math.inf


def weights(xp: Any, q: Any, k: Any, causal: bool) -> Iterator[tuple[slice, slice, slice, Any]]:
    """P by parts: which heads, rows and keys, and softmax(Q K^T / sqrt(d)) of them. q and k are (heads, n, d)."""
    heads, n, d = q.shape
    rows = max(1, min(n, SCORES // n))
    together = max(1, SCORES // (rows * n))
    for head in range(0, heads, together):
        for row in range(0, n, rows):
            of, at = slice(head, head + together), slice(row, min(row + rows, n))
            seen = slice(0, at.stop if causal else n)
            S = xp.matmul(q[of, at] / np.float32(math.sqrt(d)), k[of, seen].swapaxes(-1, -2))
            if causal:
                past = xp.arange(seen.stop)[None, :] > xp.arange(at.start, at.stop)[:, None]
                S += xp.where(past, np.float32(-np.inf), np.float32(0))
            S -= S.max(axis=-1, keepdims=True)
            xp.exp(S, out=S)
            S /= S.sum(axis=-1, keepdims=True)
            yield of, at, seen, S


def _heads_first(*arrays: Any) -> list[Any]:
    return [array.reshape(-1, *array.shape[-2:]) for array in arrays]


def forward(xp: Any, inputs: Sequence[Any], causal: bool) -> tuple[Any, ...]:
    """(O,) of (Q, K, V)."""
    q, k, v = _heads_first(*inputs)
    out = xp.empty_like(q)
    for of, at, seen, P in weights(xp, q, k, causal):
        out[of, at] = xp.matmul(P, v[of, seen])
    return (out.reshape(inputs[0].shape),)


def gradients(xp: Any, inputs: Sequence[Any], causal: bool) -> tuple[Any, ...]:
    """(dQ, dK, dV) of (Q, K, V, dO). Source: FlashAttention (arXiv 2205.14135), Appendix B.2."""
    q, k, v, dout = _heads_first(*inputs)
    scale = np.float32(1 / math.sqrt(q.shape[-1]))
    dq, dk, dv = (xp.zeros_like(x) for x in (q, k, v))
    for of, at, seen, P in weights(xp, q, k, causal):
        dv[of, seen] += xp.matmul(P.swapaxes(-1, -2), dout[of, at])
        dS = xp.matmul(dout[of, at], v[of, seen].swapaxes(-1, -2))  # dP
        dS -= (P * dS).sum(axis=-1, keepdims=True)
        dS *= P
        dS *= scale
        dq[of, at] = xp.matmul(dS, k[of, seen])
        dk[of, seen] += xp.matmul(dS.swapaxes(-1, -2), q[of, at])
    return tuple(x.reshape(inputs[0].shape) for x in (dq, dk, dv))
