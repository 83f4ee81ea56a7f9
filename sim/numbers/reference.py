"""Attention and its gradients with NumPy: in float64, the measure of all other results, or rounded at each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cupyflash.basics import Array, Shape
from cupyflash.expressions.derivative import derivative
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.expressions.tree import Node
from cupyflash.request.dropout import Dropout
from cupyflash.request.score import sizes_of
from cupyflash.sim.numbers.inputs import Decoding, Inputs

# The rounding of S, P, O, dP and dS when they are stored.
Rounding = Callable[[np.ndarray], np.ndarray]


def exactly(x: Array) -> Array:
    """Return x without rounding."""
    return x


@dataclass(frozen=True)
class Forward:
    """S (..., n_q, n_k) with -inf where a row does not see a key, P = softmax(S), L = log sum exp; V has a head for each of q's.

    `kept` is 1 / (1 - p) for a kept weight and 0 for a dropped one, 1 without dropout; `weights` are P * kept.
    """

    S: Array
    P: Array
    kept: Any
    weights: Array
    L: Array
    V: Array
    O: Array  # noqa: E741 (the paper's name)


def forward(inputs: Inputs, dtype: type[np.floating[Any]] = np.float64, rounded: Rounding = exactly) -> Forward:
    """O = softmax(scale Q K^T + bias) V, computed in `dtype`; a row that sees no key has O = 0 and L = -inf.

    It holds all of S: memory grows as n_q n_k.
    """
    S = rounded(masked_scores(inputs, dtype))
    sinks = sinks_of(inputs, dtype)
    m = np.maximum(S.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
    safe = np.where(np.isneginf(m), dtype(0), m)
    P = np.exp(S - safe)
    l = P.sum(axis=-1, keepdims=True) + np.exp(sinks - safe)  # noqa: E741 (the paper's name)
    with np.errstate(divide="ignore"):
        L = m + np.log(l)
    P = rounded(P / np.where(l == 0, dtype(1), l))
    V = every_head(inputs, inputs.v.astype(dtype))
    kept = dtype(1) if inputs.dropout is None else kept_of(inputs.dropout, S.shape).astype(dtype)
    weights = rounded(P * kept)
    return Forward(S, P, kept, weights, L[..., 0], V, rounded(weights @ V))


def kept_of(dropout: Dropout, shape: Shape) -> Array:
    """1 / (1 - p) for a kept weight and 0 for a dropped one, in S's shape (..., n_q, n_k)."""
    return np.where(dropped(dropout, shape), 0.0, dropout.scale)


def dropped(dropout: Dropout, shape: Shape) -> Array:
    """True for each dropped weight, in S's shape (..., n_q, n_k)."""
    *pairs, n_q, n_k = shape
    sizes = (1,) * (2 - len(pairs)) + (*pairs, n_q, n_k)
    batch, head, row, key = (at + np.arange(size, dtype=np.uint64) for at, size in zip(dropout.origin, sizes, strict=True))
    counter = (
        (row // 32 * 8 + row % 8)[:, None],
        key // 16 * 8 + key % 8,
        (batch[:, None] << 16 | head)[:, :, None, None],
        np.uint64(dropout.offset),
    )
    words = np.stack(philox(counter, (dropout.seed % 2**32, dropout.seed >> 32)))
    word = np.take_along_axis(words, (row // 8 % 4).astype(np.intp)[None, None, None, :, None], axis=0)[0]
    numbers = word >> 16 * (key // 8 % 2) & 0xFFFF
    found: Array = (numbers < dropout.threshold).reshape(shape)
    return found


def philox(counter: Sequence[Any], key: tuple[int, int]) -> tuple[Array, ...]:
    """Philox4x32-10: four words of 32 bits from four words, each an array of uint64 that broadcasts against the others."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    low = np.uint64(2**32 - 1)
    for turn in range(10):
        k0, k1 = ((word + turn * step) % 2**32 for word, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True))
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = b >> np.uint64(32) ^ c1 ^ np.uint64(k0), b & low, a >> np.uint64(32) ^ c3 ^ np.uint64(k1), a & low
    return c0, c1, c2, c3


def sinks_of(inputs: Inputs, dtype: type[np.floating[Any]]) -> Array:
    """The sink of each row, -inf if there is none."""
    return vector_of(inputs, "sinks", -np.inf, dtype)


def vector_of(inputs: Inputs, name: str, usual: float, dtype: type[np.floating[Any]]) -> Array:
    """The number of each head beside its scores, `usual` if there is no such array."""
    given = inputs.beside.get(name, np.full(inputs.problem.heads, usual)).astype(dtype)
    return given[:, None, None] if inputs.q.ndim > 2 else given


def masked_scores(inputs: Inputs, dtype: type[np.floating[Any]] = np.float64) -> Array:
    """S = scale Q K^T in `dtype`, or the score function of that, plus bias, with -inf where a row does not see a key."""
    S = scaled_scores(inputs, dtype)
    if inputs.score is not None:
        S = of_scores(inputs, S, inputs.score.form.tree)
    if "bias" in inputs.beside:
        S = S + inputs.beside["bias"].astype(dtype)
    return np.where(visible(inputs, S.shape), S, dtype(-np.inf))


def scaled_scores(inputs: Inputs, dtype: type[np.floating[Any]]) -> Array:
    """scale Q K^T in `dtype`."""
    keys = np.swapaxes(every_head(inputs, inputs.k.astype(dtype)), -1, -2)
    scaled: Array = dtype(inputs.problem.softmax_scale) * (inputs.q.astype(dtype) @ keys)
    return scaled


def of_scores(inputs: Inputs, scaled: Array, tree: Node | None) -> Array:
    """The value of a score function's tree for each scaled score, in their dtype; 0 for no tree."""
    p, score, dtype = inputs.problem, inputs.score, scaled.dtype.type
    assert score is not None
    shape, at = (p.batch, p.heads, p.seqlen_q, p.seqlen_k), positions(sizes_of(p))
    values = at | {"b": at["b"] + inputs.sequence, "s": scaled.reshape(shape)} | score.arrays | score.numbers
    found = dtype(0) if tree is None else evaluate(tree, values, dtype)
    return np.broadcast_to(found, shape).reshape(scaled.shape).copy()


def before_function(inputs: Inputs, P: Array, dS: Array) -> Array:
    """The gradient of the score function's input: dS times its derivative, and 0 where P is 0, whatever the derivative."""
    if inputs.score is None:
        return dS
    slopes = of_scores(inputs, scaled_scores(inputs, P.dtype.type), inputs.score.form.derivative)
    with np.errstate(invalid="ignore", over="ignore"):
        made: Array = np.where(P == 0, P.dtype.type(0), dS * slopes)
    return made


def to_captured(
    inputs: Inputs,
    dS: Array,
    name: str,
    slope_of: Callable[[Node, Node], Node | None] = derivative,
    *,
    at_random: Literal["", "scores", "rows"] = "",
) -> Array:
    """The sums over all scores of dS times the derivative by each element of a captured array. `slope_of` takes the function's tree
    and a load. `at_random`: the roots of the sums of squares, of each score's terms or of each row's, as errors add up.
    """
    score, scaled = inputs.score, scaled_scores(inputs, dS.dtype.type)
    assert score is not None
    made, rows = np.zeros(score.arrays[name].shape, dS.dtype), math.prod(dS.shape[:-1])
    own_rows = np.zeros((rows if at_random == "rows" else 0, made.size), dS.dtype)
    for load in (load for load in score.form.loads if load.name == name):
        slope = slope_of(score.form.tree, load)
        if slope is None:
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            terms = np.where(dS == 0, dS, dS * of_scores(inputs, scaled, slope))
        places = np.zeros(terms.shape, np.intp)  # in memory
        for index, length in zip(load.indices, made.shape, strict=True):
            places = places * length + np.clip(of_scores(inputs, scaled, index), 0, length - 1)
        if at_random == "rows":
            np.add.at(own_rows, (np.arange(rows)[:, None], places.reshape(rows, -1)), terms.reshape(rows, -1))
        else:
            np.add.at(made.reshape(-1), places, terms * terms if at_random else terms)
    if at_random == "rows":
        made = (own_rows * own_rows).sum(axis=0).reshape(made.shape)
    return np.sqrt(made) if at_random else made


def visible(inputs: Inputs, shape: Shape) -> Array:
    """True where a row sees a key, in S's shape (..., n_q, n_k)."""
    p, beside = inputs.problem, inputs.beside
    rows, cols = np.arange(p.seqlen_q), np.arange(p.seqlen_k)
    seen = np.broadcast_to(p.sees(rows, p.seqlen_k), shape).copy()
    if "mask" in beside:
        seen &= beside["mask"]
    if "key_lengths" in beside:
        seen &= cols < np.asarray(beside["key_lengths"]).reshape(-1, *(1,) * 3)[(0,) * (4 - len(shape))]
    if "block_mask" in beside and inputs.blocks is not None:
        seen &= beside["block_mask"][..., rows[:, None] // inputs.blocks[0], cols // inputs.blocks[1]]
    return seen


def every_head(inputs: Inputs, array: Array) -> Array:
    """Repeat the heads of K or V to have one for each of q's."""
    p = inputs.problem
    return array if array.ndim == 2 or p.heads == p.kv_heads else np.repeat(array, p.group, axis=-3)


@dataclass(frozen=True)
class Backward:
    """P, `weights` of V, dP = dO V^T (times `kept`), D = rowsum(P * dP) and, by name, the gradients.

    dS = P * (dP - D) is the gradient of S, and dbias before the sum over broadcast axes; `before_function` of it gives dQ and dK.
    """

    P: Array
    weights: Array
    dP: Array
    D: Array
    gradients: dict[str, Array]


def backward(
    dout: Array,
    inputs: Inputs,
    dtype: type[np.floating[Any]] = np.float64,
    rounded: Rounding = exactly,
    *,
    from_out: bool = False,
) -> Backward:
    """The gradients of sum(dout * O), computed in `dtype`; D is rowsum(dO * O) with `from_out`, as Algorithm 4 has it.

    Source: FlashAttention (arXiv 2205.14135), Appendix B.2.
    """
    made = forward(inputs, dtype, rounded)
    dO = dout.astype(dtype)
    dP = rounded((dO @ np.swapaxes(made.V, -1, -2)) * made.kept)
    D = (dO * made.O if from_out else made.P * dP).sum(axis=-1, keepdims=True)
    dS = made.P * (dP - D)
    given, dS = rounded(before_function(inputs, made.P, dS)), rounded(dS)
    q, k = inputs.q.astype(dtype), inputs.k.astype(dtype)
    of_sink = np.exp(sinks_of(inputs, dtype) - np.where(np.isneginf(made.L), dtype(0), made.L)[..., None])
    more = {"dbias": dS, "dsinks": -(of_sink * D)[..., 0]}
    return Backward(made.P, made.weights, dP, D, products(inputs, made.weights, given, dO, q, k) | more)


def products(inputs: Inputs, weights: Array, dS: Array, dO: Array, Q: Array, K: Array) -> dict[str, Array]:
    """dQ = scale dS K, dK = scale dS^T Q and dV = weights^T dO, the last two summed over the query heads of each key head."""
    p, scale = inputs.problem, Q.dtype.type(inputs.problem.softmax_scale)

    def grouped(gradient: Array) -> Array:
        if gradient.ndim == 2 or p.heads == p.kv_heads:
            return gradient
        heads = (*gradient.shape[:-3], p.kv_heads, p.group, *gradient.shape[-2:])
        summed: Array = gradient.reshape(heads).sum(axis=-3)
        return summed

    return {
        "dQ": scale * (dS @ every_head(inputs, K)),
        "dK": grouped(scale * (np.swapaxes(dS, -1, -2) @ Q)),
        "dV": grouped(np.swapaxes(weights, -1, -2) @ dO),
    }


def reference(q: Array, k: Array, v: Array, **asked: Any) -> tuple[Array, Array]:
    """O and L in float64; arguments as `cupyflash.attention` takes them, and `blocks` (Br, Bc) of a block mask."""
    made = forward(Inputs.of(q, k, v, **asked))
    return made.O, made.L


def reference_decode(*arrays: Any, **asked: Any) -> tuple[Array, Array]:
    """O and L of decoding in float64, each sequence by itself; arguments as `cupyflash.attention_decode` takes them.

    New keys, `k` and `v`, count; the cache is not changed.
    """
    made = [forward(inputs) for inputs in Decoding.of(*arrays, **asked).sequences]
    return np.concatenate([each.O for each in made]), np.concatenate([each.L for each in made])


def reference_gradients(dout: Array, q: Array, k: Array, v: Array, **asked: Any) -> dict[str, Array]:
    """dQ, dK, dV and dbias (of S's shape) of sum(dout * O), in float64; arguments as for `reference`."""
    return backward(dout, Inputs.of(q, k, v, **asked)).gradients
