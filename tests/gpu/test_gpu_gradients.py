"""Gradients of CuPy arrays: by the 2x rule for every algorithm, under every mask, of a bias, and the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chip import DTYPES, check_backward, choose, on_gpu, on_host

import cupyflash
from cupyflash import Problem
from cupyflash.request.options import BlockMask
from cupyflash.sim.numbers.reference import reference_gradients
from cupyflash.sim.numbers.yardstick import draw_gradient
from yardstick import draw

KINDS = (("fa2", False), ("fa2", True), ("fa1", False), ("standard", False))
KERNELS = choose(
    [
        (algorithm, deterministic, dtype, d, causal)
        for algorithm, deterministic in KINDS
        for dtype in DTYPES
        for d in ((40, 64, 128, 256) if algorithm == "fa2" else (40, 64))
        for causal in (False, True)
    ],
    [
        ("fa2", False, "float16", 16, True),
        ("fa2", True, "bfloat16", 16, False),
        ("fa1", False, "float32", 16, True),
        ("standard", False, "float16", 16, False),
    ],
)


@pytest.mark.parametrize(("algorithm", "deterministic", "dtype", "d", "causal"), KERNELS)
def test_numbers(algorithm: str, deterministic: bool, dtype: str, d: int, causal: bool) -> None:
    """Grouped heads and ragged lengths."""
    for n_q, n_k in choose(((128, 128), (97, 513), (513, 97), (1, 200)), ((33, 20),)):
        check_backward(Problem(2, 4, 2, n_q, n_k, d, dtype, causal=causal), algorithm, deterministic=deterministic)


# What restricts the scores, each a kernel of its own.
MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": (20, 7)},
    "causal window": {"window": (5, None), "causal": True},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "key lengths": {"padded": True},
    "all": {"mask": True, "bias": True, "padded": True, "causal": True, "window": (60, None)},
}


@pytest.mark.parametrize("masks", choose([*MASKS], ["all"]))
@pytest.mark.parametrize("dtype", choose(DTYPES, ("float16",)))
@pytest.mark.parametrize(("algorithm", "deterministic"), choose(KINDS, KINDS[:1]))
def test_masks(algorithm: str, deterministic: bool, dtype: str, masks: str) -> None:
    for seed, (n_q, n_k) in enumerate(choose([(100, 150), (257, 130)], [(20, 33)])):
        lengths = {"key_lengths": (n_k, n_k // 2)} if MASKS[masks].get("padded") else {}
        problem = Problem(2, 4, 2, n_q, n_k, 64, dtype, head_dim_v=48, **MASKS[masks], **lengths)
        check_backward(problem, algorithm, seed=seed, deterministic=deterministic)


@pytest.mark.parametrize("dtype", choose(DTYPES, ("float16",)))
@pytest.mark.parametrize("deterministic", choose([False, True], [True]))
def test_sinks(deterministic: bool, dtype: str) -> None:
    check_backward(Problem(2, 4, 2, *choose((257, 130), (20, 33)), 64, dtype, causal=True, sinks=True), deterministic=deterministic)


@pytest.mark.parametrize(("algorithm", "deterministic"), choose(KINDS[:3], KINDS[1:2]))
def test_block_masks(algorithm: str, deterministic: bool) -> None:
    tiling, (n_q, n_k) = (32, 64), choose((200, 300), (40, 70))
    for share in (0.0, 0.4, 1.0):
        kept = np.random.default_rng(0).random((1, 2, -(-n_q // 32), -(-n_k // 64))) < share
        problem = Problem(2, 2, 1, n_q, n_k, 64, "float16", block_mask=BlockMask.of(kept))
        check_backward(problem, algorithm, tiling, deterministic=deterministic)


@pytest.mark.parametrize("dtype", choose(DTYPES, ("float16",)))
def test_the_gradient_of_a_bias(dtype: str) -> None:
    """With an element for every score, which `deterministic` has too, and of fewer: what was broadcast adds up."""
    n_q, n_k = choose((100, 150), (20, 33))
    problem = Problem(2, 4, 2, n_q, n_k, 64, dtype, causal=True, bias=True)
    for deterministic in (False, True):
        check_backward(problem, deterministic=deterministic, return_dbias=True)
    (q, k, v), dout = draw(problem, v_mean=1.0), draw_gradient(problem)
    shape = (1, 4, 1, n_k)
    bias = np.random.default_rng(1).standard_normal(shape).astype(q.dtype)
    given, (on_chip,) = on_gpu(q, k, v), on_gpu(bias)
    _, pullback = cupyflash.attention_vjp(*given, causal=True, bias=on_chip, return_dbias=True)
    (dbias,) = on_host(pullback(*on_gpu(dout))[3])
    expected = reference_gradients(dout, q, k, v, causal=True, bias=bias)["dbias"].sum(axis=(0, 2), keepdims=True)
    step = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}[dtype]
    assert dbias.shape == shape and dbias.dtype == q.dtype
    assert np.abs(dbias - expected).max() <= step * np.abs(expected).max()


def test_a_pullback_may_be_called_again() -> None:
    """And has attention's output, its shapes, and views of any strides for its argument."""
    problem = Problem(2, 4, 2, choose(100, 20), choose(150, 33), 64, "float16", head_dim_v=48)
    q, k, v = on_gpu(*draw(problem, v_mean=1.0))
    out, pullback = cupyflash.attention_vjp(q, k, v, deterministic=True)
    assert out.tobytes() == cupyflash.attention(q, k, v).tobytes()
    dout, other = on_gpu(draw_gradient(problem), draw_gradient(problem, 1))
    first = [gradient.tobytes() for gradient in pullback(dout)]
    assert [gradient.shape for gradient in pullback(other)] == [q.shape, k.shape, v.shape]
    rows_first = on_gpu(np.ascontiguousarray(on_host(dout)[0].swapaxes(1, 2)))[0].swapaxes(1, 2)
    assert not rows_first.flags.c_contiguous
    assert [gradient.tobytes() for gradient in pullback(rows_first)] == first


@pytest.mark.parametrize("dtype", choose(DTYPES, ("float16",)))
@pytest.mark.parametrize(("algorithm", "deterministic"), choose(KINDS, KINDS[1:2]))
def test_the_same_bits_every_time(algorithm: str, deterministic: bool, dtype: str) -> None:
    """All but dQ of FlashAttention-2 without `deterministic`, which atomics sum."""
    heads, n = choose((8, 700), (2, 40))
    problem = Problem(1, heads, heads, n, n, 64, dtype, causal=True)
    _, pullback = cupyflash.attention_vjp(*on_gpu(*draw(problem)), causal=True, algorithm=algorithm, deterministic=deterministic)
    (dout,) = on_gpu(draw_gradient(problem))
    skipped = 1 if algorithm == "fa2" and not deterministic else 0
    first = [gradient.tobytes() for gradient in pullback(dout)][skipped:]
    for _ in range(choose(10, 2)):
        assert [gradient.tobytes() for gradient in pullback(dout)][skipped:] == first
