"""When numbers are right: error against float64 at most twice that of the plain computation in the low precision.

`verify` and the tests hold kernels to the same rule, which stands here only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cupyflash.problem import Problem
from cupyflash.sim.reference import gradients_of, masked_scores, reference, reference_gradients

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Numbers:
    """Largest absolute errors against float64, and what is allowed; those of L are None when L was not asked for.

    A NaN, or a log-sum-exp that is finite where it should be -inf or the other way round, is an infinite error.
    """

    error: float
    allowed: float
    lse_error: float | None = None
    lse_allowed: float | None = None

    @property
    def good(self) -> bool:
        """Whether no error is over what is allowed."""
        lse_good = self.lse_error is None or self.lse_allowed is None or self.lse_error <= self.lse_allowed
        return self.error <= self.allowed and lse_good


def draw(problem: Problem, seed: int = 0, v_mean: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal q, k and v of shape (b, h, n, d); V about `v_mean`, since a mean of zero hides errors in the weights."""
    rng = np.random.default_rng(seed)
    p = problem
    q = rng.standard_normal((p.batch, p.heads, p.seqlen_q, p.head_dim))
    k = rng.standard_normal((p.batch, p.kv_heads, p.seqlen_k, p.head_dim))
    v = rng.standard_normal((p.batch, p.kv_heads, p.seqlen_k, p.value_dim)) + v_mean
    return tuple(array.astype(np.float32).astype(DTYPES[p.dtype]) for array in (q, k, v))  # type: ignore[return-value]


def draw_gradient(problem: Problem, seed: int = 0) -> np.ndarray:
    """A normal gradient of O, of shape (b, h, n_q, d_v)."""
    rng, p = np.random.default_rng([seed, 2]), problem
    dout: np.ndarray = rng.standard_normal((p.batch, p.heads, p.seqlen_q, p.value_dim)).astype(np.float32).astype(DTYPES[p.dtype])
    return dout


def draw_masks(problem: Problem, seed: int = 0) -> dict[str, np.ndarray]:
    """The mask, bias and key lengths that a problem says it has, by argument name: mask and bias vary in all four axes."""
    rng = np.random.default_rng([seed, 1])
    p, scores = problem, (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    drawn: dict[str, np.ndarray] = {}
    if p.mask:
        drawn["mask"] = rng.random(scores) < 0.7
    if p.bias:
        drawn["bias"] = rng.standard_normal(scores).astype(np.float32).astype(DTYPES[p.dtype])
    if p.padded:
        lengths = rng.integers(0, p.seqlen_k + 1, p.batch) if p.key_lengths is None else p.key_lengths
        drawn["key_lengths"] = np.array(lengths, np.int32)
    if p.block_mask is not None:
        drawn["block_mask"] = p.block_mask.kept
    return drawn


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, scale: float | None, **masks: Any) -> np.ndarray:
    """Attention done plainly in q's dtype: S, P and O each rounded to it, sums in float32. Masks as `attention` takes them."""
    dtype = q.dtype
    S, v = masked_scores(q, k, v, np.float32, causal=causal, scale=scale, **masks)
    S = S.astype(dtype).astype(np.float32)
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    P = np.exp(S - np.where(np.isneginf(m), np.float32(0), m))
    total = P.sum(axis=-1, keepdims=True)
    P = (P / np.where(total == 0, np.float32(1), total)).astype(dtype).astype(np.float32)
    O: np.ndarray = (P @ v).astype(dtype)  # noqa: E741 (the paper's name)
    return O


def ulp(x: float, dtype: object) -> float:
    """The unit in the last place of x in a dtype."""
    finfo: Any = ml_dtypes.finfo
    return float(finfo(dtype).eps) * 2.0 ** math.floor(math.log2(max(x, 1e-30)))


def measure(
    out: np.ndarray,
    lse: np.ndarray | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    scale: float | None = None,
    score_dtype: object = np.float32,
    block_mask: np.ndarray | None = None,
    blocks: tuple[int, int] | None = None,
    **masks: Any,
) -> Numbers:
    """The errors of attention's results, and what is allowed of them; `masks` as `cupyflash.attention` takes them; `block_mask`
    is of `blocks` (Br, Bc).

    O: twice the plain computation's error plus two units in the last place of the output. L: 1e-3 (float32: 1e-5) plus
    four units in the last place of the largest score. `score_dtype` is what S is held in: float32 on chip, the element
    type where S goes to HBM.
    """
    masks = _expanded(masks, block_mask, blocks, q, k)
    expected, expected_lse = reference(q, k, v, causal=causal, scale=scale, **masks)
    step = ulp(np.abs(expected).max(initial=0), out.dtype)
    error, plain_error = _largest(out, expected), _largest(plain(q, k, v, causal, scale, **masks), expected)
    if lse is None:
        return Numbers(error, 2 * plain_error + 2 * step)
    seen = np.isfinite(expected_lse)
    shapes_agree = np.array_equal(np.isfinite(lse), seen) and bool(np.all(np.isneginf(lse[~seen])))
    S, _ = masked_scores(q, k, v, np.float64, causal=False, scale=scale, mask=None, bias=masks.get("bias"), key_lengths=None)
    score = np.abs(S[np.isfinite(S)]).max(initial=0)
    return Numbers(
        error,
        2 * plain_error + 2 * step,
        _largest(lse[seen], expected_lse[seen]) if shapes_agree else float("inf"),
        (1e-5 if q.dtype == np.float32 else 1e-3) + 4 * ulp(score, score_dtype),
    )


def _largest(ours: np.ndarray, expected: np.ndarray) -> float:
    """The largest absolute difference; infinite where one is not a number."""
    with np.errstate(invalid="ignore"):  # an infinity less an infinity
        largest = float(np.abs(ours.astype(np.float64) - expected).max(initial=0))
    return float("inf") if np.isnan(largest) else largest


def plain_gradients(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float | None = None, from_out: bool, **masks: Any
) -> dict[str, np.ndarray]:
    """The gradients done plainly in q's dtype: S, P, O, dP, dS and the results each rounded to it, sums in float32 (Algorithm 3).

    D is rowsum(P dP), or with `from_out` rowsum(dO O): as the paper's Algorithms 3 and 4 have it.
    """
    dtype, masks = q.dtype, {"causal": False} | masks

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(dtype).astype(np.float32)

    S, V = masked_scores(q, k, v, np.float32, scale=scale, **masks)
    S = rounded(S)
    m = S.max(axis=-1, keepdims=True, initial=-np.inf)
    P = np.exp(S - np.where(np.isneginf(m), np.float32(0), m))
    total = P.sum(axis=-1, keepdims=True)
    P = rounded(P / np.where(total == 0, np.float32(1), total))
    dO = dout.astype(np.float32)
    dP = rounded(dO @ np.swapaxes(V, -1, -2))
    D = (dO * rounded(P @ V) if from_out else P * dP).sum(axis=-1, keepdims=True)
    dS = rounded(P * (dP - D))
    made = gradients_of(P, dS, dO, q.astype(np.float32), k.astype(np.float32), scale)
    return {"dbias": dS.astype(dtype)} | {name: gradient.astype(dtype) for name, gradient in made.items()}


def measure_gradients(
    gradients: Mapping[str, np.ndarray],
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    block_mask: np.ndarray | None = None,
    blocks: tuple[int, int] | None = None,
    **problem: Any,
) -> dict[str, Numbers]:
    """The errors of gradients by name (dQ, dK, dV), each held to the 2x rule; `problem` as for `measure`.

    Allowed is twice the plain computation's error, of the worse of its two ways to D, plus two units in the last place of the
    gradient, and of what dP - D cancels in float32, in which all sums are; and what the rounding of L and S to float32 does to
    P = exp(S - L), which no division by their own sum takes back.
    """
    problem = _expanded(problem, block_mask, blocks, q, k)
    _, L = reference(q, k, v, **problem)
    S, _ = masked_scores(q, k, v, np.float64, **{"causal": False, "scale": None} | problem)
    of_lse, of_score = (ulp(np.abs(x[np.isfinite(x)]).max(initial=0), np.float32) for x in (L, S))
    expected, terms = reference_gradients(dout, q, k, v, **problem), reference_gradients(dout, q, k, v, **problem, terms=True)
    plainly = [plain_gradients(dout, q, k, v, **problem, from_out=from_out) for from_out in (False, True)]
    return {
        name: Numbers(
            _largest(ours, expected[name]),
            2 * max(_largest(plain[name], expected[name]) for plain in plainly)
            + 2 * ulp(np.abs(expected[name]).max(initial=0), ours.dtype)
            + 2 * ulp(np.abs(terms[name]).max(initial=0), np.float32)
            + (of_lse / 2 + 2 * of_score) * np.abs(terms[name]).max(initial=0),
        )
        for name, ours in gradients.items()
    }


def _expanded(
    problem: dict[str, Any], block_mask: np.ndarray | None, blocks: tuple[int, int] | None, q: np.ndarray, k: np.ndarray
) -> dict[str, Any]:
    """A problem's masks with the block mask, of `blocks` (Br, Bc), as part of the boolean mask."""
    if block_mask is None or blocks is None:
        return problem
    rows, cols = (np.arange(length) // size for length, size in zip((q.shape[-2], k.shape[-2]), blocks, strict=True))
    kept = block_mask[..., rows[:, None], cols]
    return problem | {"mask": kept & problem["mask"] if problem.get("mask") is not None else kept}
