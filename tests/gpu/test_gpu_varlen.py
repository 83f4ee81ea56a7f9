"""Packed sequences of CuPy arrays, forward and backward: each is attention of its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from chip import DTYPES, choose, on_gpu, on_host
from test_varlen import bounds, check_sequences, packed

import cupyflash
from cupyflash.request.options import Options
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import measure_gradients

Seqlens = tuple[tuple[int, int], ...]

BATCHES: tuple[Seqlens, ...] = choose(
    (
        ((5, 17), (130, 100), (0, 9), (70, 0), (0, 0), (33, 90)),
        ((1, 1000), (1, 3), (1, 64)),  # decoding
        ((700, 700), *(((3, 5),) * 40)),  # one long among many short
        (),
    ),
    (((5, 17), (30, 20), (0, 9), (7, 0)), ()),
)
KERNELS = choose(
    [(dtype, d, d_v, options) for dtype in DTYPES for d, d_v in ((64, 64), (40, 96)) for options in ("", "causal", "window")],
    [("float16", 16, 16, "causal")],
)
OPTIONS: dict[str, dict[str, Any]] = {"": {}, "causal": {"causal": True}, "window": {"window": (9, 4), "scale": 0.2}}


def calls(seqlens: Seqlens, cu_q: np.ndarray, cu_k: np.ndarray) -> list[tuple[Any, ...]]:
    """Bounds as a user may pass them: on the host; on the GPU, looked at; on the GPU, with the longest said, or more."""
    longest = [max((each[side] for each in seqlens), default=0) for side in (0, 1)]
    there = on_gpu(cu_q, cu_k)
    return [(cu_q, cu_k), tuple(there), (*there, *longest), (*there, longest[0] + 70, longest[1] + 1)]


@pytest.mark.parametrize(("dtype", "d", "d_v", "options"), KERNELS)
def test_forward(dtype: str, d: int, d_v: int, options: str) -> None:
    for seqlens in BATCHES:
        q, k, v, cu_q, cu_k = packed(seqlens, 4, 2, d, d_v, dtype)
        given, found = on_gpu(q, k, v), []
        for bounds_of_it in calls(seqlens, cu_q, cu_k):
            out, lse = on_host(*cupyflash.attention_varlen(*given, *bounds_of_it, **OPTIONS[options], return_lse=True))
            found.append((out.tobytes(), lse.tobytes()))
        check_sequences(out, lse, q, k, v, seqlens, Options(**OPTIONS[options]))
        assert len(set(found[:3])) == 1  # a longer longest may have another tile


@pytest.mark.parametrize("deterministic", choose([False, True], [True]))
@pytest.mark.parametrize(("dtype", "d", "d_v", "options"), KERNELS)
def test_backward(dtype: str, d: int, d_v: int, options: str, deterministic: bool) -> None:
    for seqlens in BATCHES:
        q, k, v, cu_q, cu_k = packed(seqlens, 4, 2, d, d_v, dtype)
        dout = np.random.default_rng(7).standard_normal((*q.shape[:-1], d_v)).astype(np.float32).astype(q.dtype)
        given, (on_chip,) = on_gpu(q, k, v), on_gpu(dout)
        for bounds_of_it in calls(seqlens, cu_q, cu_k)[:: choose(1, 3)]:
            out, lse = cupyflash.attention_varlen(*given, *bounds_of_it, **OPTIONS[options], return_lse=True)
            backward = cupyflash.attention_varlen_backward(
                on_chip, *given, out, lse, *bounds_of_it, **OPTIONS[options], deterministic=deterministic
            )
            check_gradients(on_host(*backward), dout, q, k, v, cu_q, cu_k, **OPTIONS[options])


def check_gradients(
    gradients: list[np.ndarray],
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cu_q: np.ndarray,
    cu_k: np.ndarray,
    **options: Any,
) -> None:
    """The 2x rule for each sequence on its own."""
    for (first_q, end_q), (first_k, end_k) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        rows, cols = slice(first_q, end_q), slice(first_k, end_k)
        places = {"dQ": rows, "dK": cols, "dV": cols}
        own = {name: each[places[name]].swapaxes(0, 1) for name, each in zip(places, gradients, strict=True)}
        of_one, *qkv = (array.swapaxes(0, 1) for array in (dout[rows], q[rows], k[cols], v[cols]))
        numbers = measure_gradients(own, of_one, Inputs.of(*qkv, **options))
        assert all(each.good for each in numbers.values()), numbers


def test_slices_of_one_array() -> None:
    """q, k and v as three parts of each row, as a projection makes them, and `out` a part of another."""
    import cupy

    lengths = choose([50, 1, 120], [9, 1, 20])
    cu = bounds(lengths)
    whole = np.random.default_rng(0).standard_normal((cu[-1], 3, 2, 64)).astype(np.float16)
    (qkv,) = on_gpu(whole)
    out = cupy.zeros((cu[-1], 2, 2, 64), cupy.float16)[:, 1]
    assert cupyflash.attention_varlen(qkv[:, 0], qkv[:, 1], qkv[:, 2], cu, cu, causal=True, out=out) is out
    seqlens = tuple((n, n) for n in lengths)
    check_sequences(*on_host(out), None, *(whole[:, place] for place in range(3)), seqlens, Options(causal=True))


def test_bounds_that_were_looked_at_are_checked() -> None:
    q, k, v, _, cu_k = packed(((5, 17), (30, 20)), 2, 2, 64, 64)
    given = on_gpu(q, k, v)
    wrong = np.array([0, 40, 35], np.int32)
    for bad in (wrong, *on_gpu(wrong)):
        with pytest.raises(ValueError, match="not decrease"):
            cupyflash.attention_varlen(*given, bad, cu_k)
