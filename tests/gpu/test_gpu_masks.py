"""Mask functions of CuPy arrays: what they have captured, and the states of tiles, lie on the GPU. By the 2x rule, beside an array
of what a mask says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chip import choose, on_gpu, on_host
from test_varlen import bounds

import cupyflash
from cupyflash import Mask
from cupyflash.sim.numbers.inputs import Decoding, Inputs
from cupyflash.sim.numbers.yardstick import measure, measure_decode, measure_gradients

LENGTHS = choose(((5, 17), (130, 1000), (0, 9), (70, 0), (700, 700)), ((5, 17), (0, 9), (7, 0), (33, 20)))
B, ROOM = len(LENGTHS), max(n for _, n in LENGTHS)
TEXT = "h == 0 and document[b, q] == document[b, k] and k <= q or h > 0 and (q - k < width or k < prefix[b])"


def masks(longest: int) -> tuple[Mask, Mask]:
    """One with its arrays on the host, and one with them on the GPU."""
    rng = np.random.default_rng(0)
    document, prefix = np.sort(rng.integers(0, 3, (B, longest)), axis=1), rng.integers(0, longest, B).astype(np.int32)
    ours: dict[str, Any] = {"document": document, "prefix": prefix}
    there = dict(zip(ours, on_gpu(*ours.values()), strict=True))
    return Mask(TEXT, width=9, **ours), Mask(TEXT, width=9, **there)


def seen_by(mask: Mask, b: int, n_q: int, n_k: int) -> np.ndarray:
    """The keys that the two heads of one sequence see under `masks`."""
    k = np.arange(n_k)
    q = np.arange(n_q)[:, None] + n_k - n_q
    ids = mask.arrays["document"][b]
    same = ids[np.clip(q, 0, len(ids) - 1)] == ids[k]
    return np.stack([same & (k <= q), (q - k < 9) | (k < mask.arrays["prefix"][b])])


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("deterministic", choose([False, True], [True]))
def test_packed_sequences(deterministic: bool, known: bool) -> None:
    rng, (mask, there) = np.random.default_rng(1), masks(ROOM)
    total_q, total_k = (sum(each[side] for each in LENGTHS) for side in (0, 1))
    q, k, v, dout = (rng.standard_normal((n, 2, 64)).astype(np.float16) for n in (total_q, total_k, total_k, total_q))
    cu_q, cu_k = (bounds([each[side] for each in LENGTHS]) for side in (0, 1))
    given, sides = on_gpu(q, k, v), on_gpu(cu_q, cu_k)
    asked = {"max_seqlen_q": max(n for n, _ in LENGTHS), "max_seqlen_k": ROOM}
    asked["mask"] = cupyflash.block_mask(there, *given[:2], *sides) if known else there
    out, lse = cupyflash.attention_varlen(*given, *sides, return_lse=True, **asked)
    made = cupyflash.attention_varlen_backward(*on_gpu(dout), *given, out, lse, *sides, deterministic=deterministic, **asked)
    out, lse, *gradients = on_host(out, lse, *made)
    for b, (n_q, n_k) in enumerate(LENGTHS):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        qkv = (x[at].swapaxes(0, 1) for x, at in ((q, rows), (k, keys), (v, keys)))
        inputs = Inputs(*qkv, beside={"mask": seen_by(mask, b, n_q, n_k)})
        numbers = measure(out[rows].swapaxes(0, 1), lse[:, rows], inputs)
        own = {name: x[at].swapaxes(0, 1) for name, x, at in zip(("dQ", "dK", "dV"), gradients, (rows, keys, keys), strict=True)}
        numbers |= measure_gradients(own, dout[rows].swapaxes(0, 1), inputs)
        assert all(each.good for each in numbers.values()), (b, numbers)


@pytest.mark.parametrize("splits", choose([1, 7, None], [2]))
def test_decoding(splits: int | None) -> None:
    rng, (mask, there) = np.random.default_rng(2), masks(ROOM)
    q, k_cache, v_cache = (rng.standard_normal((B, 2, n, 64)).astype(np.float16) for n in (3, ROOM, ROOM))
    lengths = np.array([n for _, n in LENGTHS], np.int32)
    given = on_gpu(q, k_cache, v_cache, lengths)
    out, lse = on_host(*cupyflash.attention_decode(*given, mask=there, num_splits=splits, return_lse=True))
    numbers = measure_decode(out, lse, Decoding.of(q, k_cache, v_cache, lengths, mask=mask).sequences)
    assert all(each.good for each in numbers.values()), numbers


@pytest.mark.parametrize("known", [False, True])
def test_a_batch(known: bool) -> None:
    """Forward and backward of equal lengths, on tiles found anew or once."""
    rng, n, (mask, there) = np.random.default_rng(3), choose(513, 40), masks(choose(513, 40))
    q, k, v, dout = rng.standard_normal((4, B, 2, n, 64)).astype(np.float16)
    given = on_gpu(q, k, v)
    said = cupyflash.block_mask(there, *given[:2]) if known else there
    out, pullback = cupyflash.attention_vjp(*given, mask=said, deterministic=True)
    gradients = dict(zip(("dQ", "dK", "dV"), on_host(*pullback(*on_gpu(dout))), strict=True))
    inputs = Inputs(q, k, v, beside={"mask": np.stack([seen_by(mask, b, n, n) for b in range(B)])})
    numbers = measure(*on_host(out), None, inputs) | measure_gradients(gradients, dout, inputs)
    assert all(each.good for each in numbers.values()), numbers
