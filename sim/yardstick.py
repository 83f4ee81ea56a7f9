"""When numbers are right: error against float64 at most twice that of the plain computation in the low precision.

`verify` and the tests hold kernels to the same rule, which stands here only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash.problem import Problem, numpy_dtype
from cupyflash.sim.reference import gradient_factors, gradients_of, masked_scores, reference, reference_gradients


class _Dtypes(dict[str, np.dtype[Any]]):
    """NumPy's dtypes by name, looked up when they are asked for: bfloat16 needs a package that nothing else does."""

    def __missing__(self, name: str) -> np.dtype[Any]:
        return self.setdefault(name, numpy_dtype(name))


DTYPES = _Dtypes()
# Of bfloat16, which NumPy's own finfo does not know.
BFLOAT16_EPS = 2.0**-7


@dataclass(frozen=True)
class Numbers:
    """One tensor's largest absolute error against float64, and what is allowed.

    A NaN, or a log-sum-exp that is finite where it should be -inf or the other way round, is an infinite error.
    """

    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return bool(self.error <= self.allowed)


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
    finfo: Any = np.finfo
    eps = BFLOAT16_EPS if np.dtype(dtype).name == "bfloat16" else float(finfo(dtype).eps)  # type: ignore[call-overload]
    return eps * 2.0 ** math.floor(math.log2(max(x, 1e-30)))


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
    blocks: tuple[int, int] | None = None,
    **masks: Any,
) -> dict[str, Numbers]:
    """The errors of O, and of L where there is one, and what is allowed of them; `masks` as `cupyflash.attention` takes them,
    `block_mask` of `blocks` (Br, Bc).

    O: twice the plain computation's error plus two units in the last place of the output. L: 1e-3 (float32: 1e-5) plus
    four units in the last place of the largest score. `score_dtype` is what S is held in: float32 on chip, the element
    type where S goes to HBM.
    """
    masks = expanded(masks, blocks, q, k)
    expected, expected_lse = reference(q, k, v, causal=causal, scale=scale, **masks)
    step = ulp(np.abs(expected).max(initial=0), out.dtype)
    error, plain_error = _largest(out, expected), _largest(plain(q, k, v, causal, scale, **masks), expected)
    numbers = {"O": Numbers(error, 2 * plain_error + 2 * step)}
    if lse is None:
        return numbers
    seen = np.isfinite(expected_lse)
    shapes_agree = np.array_equal(np.isfinite(lse), seen) and bool(np.all(np.isneginf(lse[~seen])))
    S, _ = masked_scores(q, k, v, np.float64, causal=False, scale=scale, mask=None, bias=masks.get("bias"), key_lengths=None)
    score = np.abs(S[np.isfinite(S)]).max(initial=0)
    lse_error = _largest(lse[seen], expected_lse[seen]) if shapes_agree else float("inf")
    return numbers | {"L": Numbers(lse_error, (1e-5 if q.dtype == np.float32 else 1e-3) + 4 * ulp(score, score_dtype))}


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
    blocks: tuple[int, int] | None = None,
    from_weights: bool = False,
    **problem: Any,
) -> dict[str, Numbers]:
    """The errors of gradients by name (dQ, dK, dV, dbias), each held to the 2x rule; `problem` as for `measure`.

    Allowed is twice the plain computation's error, of the worse of its two ways to D, plus two units in the last place of the
    gradient; of float32, in which sums are, for the largest term of which dP - D cancels a part; and what the rounding of L and
    S to float32 does to P = exp(S - L), which no division by their own sum takes back, and so to every term: of dS to what is
    left of it, or, where D is rowsum(P * dP) of that P (`from_weights`), to what cancels.
    """
    problem = expanded(problem, blocks, q, k)
    expected = reference_gradients(dout, q, k, v, **problem)
    plainly = [plain_gradients(dout, q, k, v, **problem, from_out=from_out) for from_out in (False, True)]
    P, dP, D = gradient_factors(dout, q, k, v, **problem)
    scale, (dO, Q, K) = problem.get("scale"), (np.abs(array.astype(np.float64)) for array in (dout, q, k))
    terms = {"dbias": np.abs(P * (dP - D))} | gradients_of(P, np.abs(P * (dP - D)), dO, Q, K, None if scale is None else abs(scale))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    uncancelled = (P * (np.abs(dP) + np.abs(D))).max(initial=0)
    largest = {"dQ": factor * uncancelled * K.max(initial=0), "dK": factor * uncancelled * Q.max(initial=0), "dbias": uncancelled}
    _, L = reference(q, k, v, **problem)
    S, _ = masked_scores(q, k, v, np.float64, **{"causal": False, "scale": None} | problem)
    of_lse, of_score = (ulp(np.abs(x[np.isfinite(x)]).max(initial=0), np.float32) for x in (L, S))
    numbers = {}
    for name, ours in gradients.items():
        exact, *rough, term = (_summed(each[name], ours.shape) for each in (expected, *plainly, terms))
        numbers[name] = Numbers(
            _largest(ours, exact),
            2 * max(_largest(each, exact) for each in rough)
            + 2 * ulp(np.abs(exact).max(initial=0), ours.dtype)
            + 2 * ulp(largest.get(name, 0.0), np.float32) * expected[name].size / max(ours.size, 1)
            + (of_lse / 2 + 2 * of_score) * max(term.max(initial=0), largest.get(name, 0.0) if from_weights else 0.0),
        )
    return numbers


def _summed(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of an array of `shape` that was broadcast to the axes of `gradient`."""
    axes = tuple(axis for axis, length in enumerate(shape) if length == 1)
    return gradient.sum(axis=axes, keepdims=True, dtype=np.float64) if axes else gradient


def expanded(problem: Mapping[str, Any], blocks: tuple[int, int] | None, q: np.ndarray, k: np.ndarray) -> dict[str, Any]:
    """A problem's masks with the block mask, of `blocks` (Br, Bc), as part of the boolean mask."""
    plain = dict(problem)
    block_mask = plain.pop("block_mask", None)
    if block_mask is None or blocks is None:
        return plain
    rows, cols = (np.arange(length) // size for length, size in zip((q.shape[-2], k.shape[-2]), blocks, strict=True))
    kept = block_mask[..., rows[:, None], cols]
    return plain | {"mask": kept & plain["mask"] if plain.get("mask") is not None else kept}
