"""Attention sinks: one more score a head, without a value, in every algorithm, with the gradient of its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Device, Problem
from cupyflash.schedules import plan_varlen
from cupyflash.sim import execute_varlen, replay, theory
from cupyflash.sim.numbers.reference import reference, reference_gradients
from suites import wide

A100 = Device.named("A100-40GB")
ALGORITHMS = ("fa1", "fa2", "standard")


def arrays(h: int = 2, n_q: int = 40, n_k: int = 50, d: int = 16, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((h, n, d)).astype(dtype) for n in (n_q, n_k, n_k)]


def with_a_key(q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray) -> tuple[np.ndarray, ...]:
    """The definition: q, k and v with a key of value zero whose score is the sink, by one more dimension of q and k."""
    scale = np.sqrt(q.shape[-1])
    more = np.concatenate([np.zeros((*k.shape[:-1], 1)), scale * sinks[:, None, None]], axis=1).astype(k.dtype)
    ones = np.ones((*q.shape[:-1], 1), q.dtype)
    longer = np.concatenate([k, np.zeros_like(k[:, :1])], axis=1)
    return np.concatenate([q, ones], -1), np.concatenate([longer, more], -1), np.concatenate([v, np.zeros_like(v[:, :1])], axis=1)


def test_a_sink_is_a_key_without_a_value() -> None:
    """The gradient of the sink is that of the score of such a key, in float64, forward and backward."""
    q, k, v = (array.astype(np.float64).astype(np.float32) for array in arrays())
    sinks = np.array([0.5, -2], np.float32)
    out, lse = reference(q, k, v, sinks=sinks)
    as_key = reference(*with_a_key(q, k, v, sinks), scale=1 / np.sqrt(q.shape[-1]))
    assert np.allclose(out, as_key[0], atol=1e-6) and np.allclose(lse, as_key[1], atol=1e-6)
    dout = arrays()[0]
    made = reference_gradients(dout, q, k, v, sinks=sinks)
    by_key = reference_gradients(dout, *with_a_key(q, k, v, sinks), scale=1 / np.sqrt(q.shape[-1]))
    assert np.allclose(made["dsinks"], by_key["dbias"][..., -1], atol=1e-6)
    assert np.allclose(made["dQ"], by_key["dQ"][..., :-1], atol=1e-6) and np.allclose(made["dV"], by_key["dV"][:, :-1], atol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ["fa1", wide("fa2"), wide("standard")])
def test_a_row_without_keys_has_the_sink_alone(algorithm: str) -> None:
    q, k, v = arrays(n_q=20, n_k=16, dtype=np.float16)
    sinks = np.array([1.5, -np.inf], np.float32)
    out, lse = cupyflash.attention(q, k, v, causal=True, sinks=sinks, return_lse=True, algorithm=algorithm)
    assert (out[:, :4] == 0).all() and (lse[0, :4] == 1.5).all() and np.isneginf(lse[1, :4]).all()
    plain = cupyflash.attention(q, k, v, causal=True, algorithm=algorithm)
    assert np.allclose(out[1], plain[1], atol=1e-3)  # no sink


def test_a_large_sink_leaves_nothing_and_a_small_one_all() -> None:
    q, k, v = arrays(dtype=np.float16)
    plain = cupyflash.attention(q, k, v)
    for sink, share in ((1e30, 0), (3e38, 0), (-1e30, 1), (-3e38, 1)):
        out, lse = cupyflash.attention(q, k, v, sinks=np.full(2, sink, np.float32), return_lse=True)
        assert np.array_equal(out, share * plain) and np.isfinite(lse).all()


@pytest.mark.wide
def test_gradients_through_the_call() -> None:
    """dsinks comes behind dv, before dbias, summed over batches and rows; finite differences say the same."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 2, n, 16)).astype(np.float32) for n in (20, 30, 30))
    bias, sinks = rng.standard_normal((2, 2, 20, 30)).astype(np.float32), np.array([0.3, 1], np.float32)
    out, pullback = cupyflash.attention_vjp(q, k, v, sinks=sinks, bias=bias, return_dbias=True)
    dout = rng.standard_normal(out.shape).astype(np.float32)
    dq, _, _, dsinks, dbias = pullback(dout)
    assert dsinks.shape == (2,) and dsinks.dtype == np.float32 and dbias.shape == bias.shape and dq.shape == q.shape
    for head in range(2):
        step = np.zeros(2, np.float32)
        step[head] = 1e-2
        high, low = ((dout * reference(q, k, v, bias=bias, sinks=sinks + sign * step)[0]).sum() for sign in (1, -1))
        assert np.isclose(dsinks[head], (high - low) / 2e-2, rtol=1e-3, atol=1e-4)


@pytest.mark.wide
def test_packed_sequences_and_their_gradients() -> None:
    rng = np.random.default_rng(2)
    cu_q, cu_k = np.array([0, 5, 25, 25, 40], np.int32), np.array([0, 17, 17, 30, 60], np.int32)
    q, k, v = (rng.standard_normal((n, 2, 16)).astype(np.float16) for n in (40, 60, 60))
    sinks = np.array([0.5, -1], np.float32)
    out, lse = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, sinks=sinks, return_lse=True)
    gradients = cupyflash.attention_varlen_backward(out, q, k, v, out, lse, cu_q, cu_k, sinks=sinks)
    total = np.zeros(2)
    for (first_q, end_q), (first_k, end_k) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        one = [array.swapaxes(0, 1) for array in (q[first_q:end_q], k[first_k:end_k], v[first_k:end_k])]
        expected, expected_lse = reference(*one, sinks=sinks)
        assert np.allclose(out[first_q:end_q].swapaxes(0, 1), expected, atol=2e-3)
        assert np.allclose(lse[:, first_q:end_q], expected_lse, atol=1e-5)
        total += reference_gradients(out[first_q:end_q].swapaxes(0, 1), *one, sinks=sinks)["dsinks"].sum(axis=-1)
    assert np.allclose(gradients[3], total, atol=2e-3) and len(gradients) == 4
    lengths = tuple((int(b - a), int(d - c)) for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k), strict=True))
    schedule = plan_varlen(Problem(4, 2, 2, 20, 30, 16, "float16", sinks=True), A100, lengths, lse=True)
    found = execute_varlen(schedule, q, k, v, sinks=sinks)
    assert found.findings == () and theory.traffic(schedule) == replay(schedule) == found.traffic


@pytest.mark.wide
def test_of_merged_parts_one_has_the_sink() -> None:
    q, k, v = arrays(dtype=np.float16)
    sinks = np.array([0.5, 2], np.float32)
    whole, lse = cupyflash.attention(q, k, v, sinks=sinks, return_lse=True)
    first = cupyflash.attention(q, k[:, :20], v[:, :20], sinks=sinks, return_lse=True)
    second = cupyflash.attention(q, k[:, 20:], v[:, 20:], return_lse=True)
    merged, merged_lse = cupyflash.merge_states(*first, *second)
    assert np.allclose(merged, whole, atol=2e-3) and np.allclose(merged_lse, lse, atol=1e-5)


@pytest.mark.parametrize(
    ("sinks", "says"),
    [
        (np.zeros(3, np.float32), r"sinks must be float16, bfloat16, float32 of shape \(2,\), a number a head, got float32"),
        (np.zeros(2), r"sinks must be float16, bfloat16, float32 of shape \(2,\), a number a head, got float64"),
        (np.zeros((2, 1), np.float32), "sinks must be float16"),
    ],
)
def test_other_sinks_are_refused_by_name(sinks: np.ndarray, says: str) -> None:
    q, k, v = arrays(dtype=np.float16)
    with pytest.raises(ValueError, match=says):
        cupyflash.attention(q, k, v, sinks=sinks)
    with pytest.raises(TypeError, match="sinks must be a NumPy or CuPy array"):
        cupyflash.attention(q, k, v, sinks=[0.0, 1.0])


@pytest.mark.parametrize("algorithm", ["fa1", "standard"])
def test_only_the_tensor_cores_kernels_have_their_gradient(algorithm: str) -> None:
    q, k, v = arrays(dtype=np.float16)
    with pytest.raises(ValueError, match=f"the backward of {algorithm!r} has no place for sinks: 'fa2' and 'fa3' have"):
        cupyflash.attention_vjp(q, k, v, sinks=np.zeros(2, np.float32), algorithm=algorithm)
