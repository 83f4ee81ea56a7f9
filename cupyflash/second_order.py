"""Tangents of attention, and gradients of its gradients, composed of calls: exact, in float32, without a matrix of n_q x n_k, slow.

With weights P, attention's backward computes from any X and Y, in the places of dO and V, the products of W = P * (X Y^T - D) with
K and Q: dQ = scale W K and dK = scale W^T Q, where D = rowsum(X * out) for any out. Further columns of k beside zeros in q, or of q
beside zeros in k, do not change scores, and W is applied to them too. Second order needs sums of such products.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Unpack

import numpy as np

from cupyflash.arrays import check_array, require_dtype, require_shape
from cupyflash.basics import Report, Values
from cupyflash.calls import attention, attention_backward
from cupyflash.expressions.tree import Number
from cupyflash.launch.dispatch import as_arrays, on_gpu
from cupyflash.launch.launcher import held_for_graph
from cupyflash.request import keywords
from cupyflash.request.keywords import asks, keywords_of
from cupyflash.request.named_scores import one_score
from cupyflash.request.problem import USUAL_HEAD_DIM

# Columns beside q's and k's own for which there must be room.
LEAST_ROOM = 16
ONE = Number("float", 1.0)
Pair = tuple[Any, Any]


@asks(keywords.Tangents)
def attention_jvp(q: Any, k: Any, v: Any, q_dot: Any, k_dot: Any, v_dot: Any, **asked: Unpack[keywords.Tangents]) -> Any:
    """Return O and its derivative along tangents of q, k and v: `attention(q, k, v, ...)` and d/dt of
    `attention(q + t q_dot, k + t k_dot, v + t v_dot, ...)` at t = 0.

    Tangents have the shapes and dtypes of q, k and v; None is zero. Everything else counts as constant: masks, bias, sinks, the
    values that a score function has captured, the weights that are dropped. `return_lse` gives (O, L, O's tangent, L's tangent).

    It is composed of calls in float32: two forwards, and a backward (two with dropout) with d + d_v + 1 columns of k, and 2 d in
    the place of v's, 256 of each at a time. d is at most 240. Raises as `attention` does.
    """
    given = {"q": q, "k": k, "v": v, "q_dot": q_dot, "k_dot": k_dot, "v_dot": v_dot}
    weights = _Weights.of(attention_jvp, given, asked, ("q", "k", "v"))
    with weights.held:
        out, lse, out_dot, lse_dot = _tangents(weights)
        dtype = weights.dtype
        if asked.get("return_lse"):
            swapped = weights.asked["layout"] == "bnhd" and out.ndim > 2  # L has its heads first in any layout
            of_rows = lse_dot[..., 0].swapaxes(-1, -2) if swapped else lse_dot[..., 0]
            return out.astype(dtype), lse, out_dot.astype(dtype), of_rows
        return out.astype(dtype), out_dot.astype(dtype)


@asks(keywords.SecondOrder)
def attention_double_backward(
    q_dot: Any, k_dot: Any, v_dot: Any, dout: Any, q: Any, k: Any, v: Any, **asked: Unpack[keywords.SecondOrder]
) -> tuple[Any, ...]:
    """Return the gradients of sum(q_dot * dq) + sum(k_dot * dk) + sum(v_dot * dv) by dout, q, k and v, where dq, dk and dv are
    `attention_backward`'s: gradients of gradients, as a gradient penalty needs them. (Those by q, k and v are also the product of
    the Hessian of sum(dout * O) with q_dot, k_dot and v_dot; those by dout are `attention_jvp`'s tangent of O.)

    Arguments as there and in `attention_jvp`. A score function must only add to s, as `alibi_slopes` and tables do: of others, and
    of `softcap`, the second derivative has no place in the kernels.

    It is composed of calls in float32: beside a few others, a forward and a backward for each 256 of 2 d d_v products of columns
    (32 of each for d and d_v of 64). d is at most 240. Raises as `attention` does.
    """
    given = {"q": q, "k": k, "v": v, "dout": dout, "q_dot": q_dot, "k_dot": k_dot, "v_dot": v_dot}
    weights = _Weights.of(attention_double_backward, given, asked, ("q", "k", "v", "dout"))
    with weights.held:
        return tuple(each.astype(weights.dtype) for each in _double(weights))


class _Weights:
    """A call's softmax weights P, by what calls make of them. Arrays are in float32, None for a tangent of zero."""

    def __init__(self, arrays: Values, asked: Values, dtype: Any, gpu: bool) -> None:
        self.arrays, self.asked, self.dtype = arrays, asked, dtype
        self.array = sys.modules["cupy"] if gpu else np
        self.held: AbstractContextManager[None] = held_for_graph(gpu)
        self.q, self.k, self.v = (arrays[name] for name in "qkv")
        self.room = USUAL_HEAD_DIM - self.q.shape[-1]

    @classmethod
    def of(cls, call: Any, given: Values, asked: Values, there: tuple[str, ...]) -> _Weights:
        """TypeError or ValueError for arguments that do not go together; what calls refuse, the first of them refuses."""
        complete = {name: value for name, value in keywords_of(call).complete(asked).items() if name not in {*given, "return_lse"}}
        arrays = as_arrays(given, there)
        gpu = on_gpu(**arrays)
        for name, array in arrays.items():
            check_array(name, array)
            require_dtype(name, array, arrays["q"].dtype)
        for name in "qkv":
            if f"{name}_dot" in arrays:
                require_shape(f"{name}_dot", arrays[f"{name}_dot"], arrays[name].shape)
        if "dout" in arrays:
            require_shape("dout", arrays["dout"], (*arrays["q"].shape[:-1], arrays["v"].shape[-1]))
        d, most = arrays["q"].shape[-1], USUAL_HEAD_DIM - LEAST_ROOM
        if d > most:
            raise ValueError(f"head_dim must be between 1 and {most} for {call.__name__}, got {d}")
        score = one_score(complete)
        if call is attention_double_backward and score is not None and score.form.derivative != ONE:
            raise ValueError(f"score must only add to s for {call.__name__}, as s + table[h, q - k] does, got {score.form.text!r}")
        if complete["scale"] is None:
            complete["scale"] = 1 / d**0.5
        if complete["bias"] is not None:
            complete["bias"] = as_arrays({"bias": complete["bias"]})["bias"].astype(np.float32)
        return cls({name: array.astype(np.float32) for name, array in arrays.items()}, complete, arrays["q"].dtype, gpu)

    @cached_property
    def whole(self) -> _Weights:
        """The same weights, none of them dropped."""
        if not self.asked["dropout"]:
            return self
        return _Weights(self.arrays, {**self.asked, "dropout": 0.0}, self.dtype, self.array is not np)

    @property
    def _forward(self) -> Report:
        return {name: value for name, value in self.asked.items() if name != "deterministic"}

    def outputs(self) -> tuple[Any, Any]:
        """O and L."""
        found: tuple[Any, Any] = attention(self.q, self.k, self.v, return_lse=True, **self._forward)
        return found

    def times(self, values: Any) -> Any:
        """P times values, (..., n_k, any)."""
        parts = [attention(self.q, self.k, part, **self._forward) for part in _parts(values, USUAL_HEAD_DIM)]
        return self.joined(parts)

    def joined(self, parts: list[Any]) -> Any:
        """The arrays that are not None, joined along their last axis."""
        return self.array.concatenate([part for part in parts if part is not None], axis=-1)

    def added(self, pairs: Iterator[Pair] | list[Pair], lse: Any, q_more: Any = None, k_more: Any = None, *, centred: bool) -> Any:
        """The sums over pairs (X, Y) of scale W k_more and scale W^T q_more, W = P * (X Y^T - D); D is rowsum(P * X Y^T) if
        `centred`, else 0. Without either: of scale W k and scale W^T q."""
        totals: list[Any] = [None, None]
        for X, Y in pairs:
            for x, y in zip(_parts(X, USUAL_HEAD_DIM), _parts(Y, USUAL_HEAD_DIM), strict=True):
                out = self.times(y) if centred else self.array.zeros_like(x)
                for place, found in enumerate(self._applied(x, y, out, lse, q_more, k_more)):
                    totals[place] = found if totals[place] is None else totals[place] + found
        return totals

    def _applied(self, x: Any, y: Any, out: Any, lse: Any, q_more: Any, k_more: Any) -> tuple[Any, Any]:
        if q_more is None and k_more is None:
            dq, dk, *_ = attention_backward(x, self.q, self.k, y, out, lse, **self.asked)
            return dq, dk
        d, found = self.q.shape[-1], []
        for part in _parts(q_more if k_more is None else k_more, self.room):
            mine, other = (self.q, self.k) if k_more is None else (self.k, self.q)
            wide = self.joined([mine, part])
            padded = self.joined([other, self.array.zeros((*other.shape[:-1], part.shape[-1]), np.float32)])
            q, k = (wide, padded) if k_more is None else (padded, wide)
            dq, dk, *_ = attention_backward(x, q, k, y, out, lse, **self.asked)
            found.append((dk if k_more is None else dq)[..., d:])
        joined = self.joined(found)
        return joined, joined


def _parts(array: Any, most: int) -> Iterator[Any]:
    """An array by its last axis, up to `most` at a time."""
    for first in range(0, array.shape[-1], most):
        yield array[..., first : first + most]


def _bilinear(weights: _Weights, factor: float = 1.0) -> list[Pair]:
    """X and Y of q_dot K^T + Q k_dot^T, the scores' tangent without scale."""
    a = weights.arrays
    columns = [(factor * a[x], a[y]) for x, y in (("q_dot", "k"), ("q", "k_dot")) if x in a and y in a]
    return [(weights.joined([x for x, _ in columns]), weights.joined([y for _, y in columns]))] if columns else []


def _tangents(weights: _Weights) -> tuple[Any, Any, Any, Any]:
    """O, L and their tangents; L's has an axis of one at the end."""
    out, lse = weights.outputs()
    v, a = weights.v, weights.arrays
    ones = weights.array.ones((*v.shape[:-1], 1), np.float32)
    pairs = _bilinear(weights)
    if not pairs:
        out_dot, lse_dot = weights.array.zeros_like(out), weights.array.zeros((*out.shape[:-1], 1), np.float32)
    elif weights.whole is weights:
        moved, _ = weights.added(pairs, lse, k_more=weights.joined([v, ones]), centred=False)
        out_dot, lse_dot = moved[..., :-1], moved[..., -1:]
    else:
        out_dot, _ = weights.added(pairs, lse, k_more=v, centred=False)
        lse_dot, _ = weights.whole.added(pairs, lse, k_more=ones, centred=False)
    out_dot = out_dot - lse_dot * out
    if "v_dot" in a:
        out_dot = out_dot + weights.times(a["v_dot"])
    return out, lse, out_dot, lse_dot


def _double(weights: _Weights) -> tuple[Any, Any, Any, Any]:
    """The gradients by dout, q, k and v.

    With S' = scale (q_dot K^T + Q k_dot^T), r = rowsum(P * S'), P' = P * (S' - r), dP = dout V^T, D = rowsum(dout * O) and
    dS = P * (dP - D): the tangent of dS is P * (E - rowsum(P * E)), E = S' * dP - D S' - r dP + dout v_dot^T. Products of two sums
    of columns are sums over pairs of columns. Dropout makes dP, and dout v_dot^T with it, zero where it drops a weight.
    """
    a, v, dout = weights.arrays, weights.v, weights.arrays["dout"]
    out, lse, out_dot, r = _tangents(weights)
    D = (dout * out).sum(axis=-1, keepdims=True)
    own = [(dout, v)]
    of_scores = _bilinear(weights, weights.asked["scale"])
    dropped = [*_products(of_scores, own), *((-r * x, y) for x, y in own if of_scores)]
    dropped += [(dout, a["v_dot"])] if "v_dot" in a else []
    if not dropped:
        return tuple(weights.array.zeros_like(each) for each in (dout, weights.q, weights.k, v))
    dq, dk = weights.added(dropped, lse, centred=True)
    if of_scores:
        of_q, of_k = weights.whole.added([(-D * x, y) for x, y in of_scores], lse, centred=True)
        dq, dk = dq + of_q, dk + of_k
    if "k_dot" in a:
        dq = dq + weights.added(own, lse, k_more=a["k_dot"], centred=True)[0]
    if "q_dot" in a:
        dk = dk + weights.added(own, lse, q_more=a["q_dot"], centred=True)[1]
    if not of_scores:
        return out_dot, dq, dk, weights.array.zeros_like(v)
    ((x, y),) = _bilinear(weights)
    ones, scale = weights.array.ones((*y.shape[:-1], 1), np.float32), weights.asked["scale"] or 1.0  # r is 0 if the scale is
    moved = [(weights.joined([x, -r / scale]), weights.joined([y, ones]))]
    _, dv = weights.added(moved, lse, q_more=dout, centred=False)
    return out_dot, dq, dk, dv


def _products(first: list[Pair], second: list[Pair]) -> Iterator[Pair]:
    """X and Y of the product, element by element, of two X Y^T: each column of one times all of the other, up to 256 at a time."""
    for (x, y), (x_other, y_other) in ((one, other) for one in first for other in second):
        together = max(1, USUAL_HEAD_DIM // x_other.shape[-1])
        for xs, ys in zip(_parts(x, together), _parts(y, together), strict=True):
            yield _spread(xs, x_other), _spread(ys, y_other)


def _spread(few: Any, columns: Any) -> Any:
    """(..., a) and (..., b) as (..., a b)."""
    return (few[..., :, None] * columns[..., None, :]).reshape(*columns.shape[:-1], -1)
