"""PyTorch's attention and its gradients on the CPU, where it is installed, beside ours on what both can do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import reference_gradients
from cupyflash.sim.numbers.yardstick import DTYPES, measure_gradients, plain, ulp

torch = pytest.importorskip("torch", reason="beside PyTorch, which is not installed")
pytestmark = pytest.mark.wide
GROUPED = (4, 40), (2, 40), (2, 24)  # heads and d of q, k and v
scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention


def normal(*shape: int, dtype: Any = np.float16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def theirs(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
    """PyTorch's O in float64, heads of k and v repeated for those of q."""
    group = q.shape[-3] // k.shape[-3]
    arrays = (q, np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3))
    q64, k64, v64 = (torch.from_numpy(array.astype(np.float64)) for array in arrays)
    out: np.ndarray = scaled_dot_product_attention(q64, k64, v64, **options).numpy()
    return out


def agrees(ours: np.ndarray, expected: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **asked: Any) -> None:
    """The 2x rule, with PyTorch in float64 for the truth."""
    rounded = plain(Inputs.of(q, k, v, **asked))
    allowed = 2 * np.abs(rounded.astype(np.float64) - expected).max() + 2 * ulp(np.abs(expected).max(), q.dtype)
    assert np.abs(ours.astype(np.float64) - expected).max() <= allowed


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads_and_causal(algorithm: str, dtype: Any, causal: bool) -> None:
    q, k, v = (normal(1, heads, 97, d, dtype=dtype, seed=seed) for seed, (heads, d) in enumerate(GROUPED))
    ours = cupyflash.attention(q, k, v, causal=causal, scale=0.3, algorithm=algorithm)
    agrees(ours, theirs(q, k, v, is_causal=causal, scale=0.3), q, k, v, causal=causal, scale=0.3)


@pytest.mark.parametrize(("n_q", "n_k"), [(30, 70), (70, 30)])
def test_causal_of_other_lengths_is_bottom_right_where_theirs_is_top_left(n_q: int, n_k: int) -> None:
    """Theirs by an explicit mask; a row that sees no key is NaN there, or zeros, and zeros here."""
    q, k, v = normal(2, n_q, 64), normal(2, n_k, 64, seed=1), normal(2, n_k, 64, seed=2)
    rows, cols = np.indices((n_q, n_k))
    seen = cols <= rows + n_k - n_q
    ours, some = cupyflash.attention(q, k, v, causal=True), seen.any(axis=1)
    expected = np.nan_to_num(theirs(q, k, v, attn_mask=torch.from_numpy(seen)))
    expected[:, ~some] = 0
    agrees(ours, expected, q, k, v, causal=True)
    # Top-left is what the same mask, aligned so, gives here.
    agrees(cupyflash.attention(q, k, v, mask=cols <= rows), theirs(q, k, v, is_causal=True), q, k, v, mask=cols <= rows)


def test_masks_and_biases() -> None:
    q, k, v = normal(2, 4, 50, 64), normal(2, 4, 60, 64, seed=1), normal(2, 4, 60, 64, seed=2)
    mask, bias = normal(2, 1, 50, 60, seed=3) < 1, normal(4, 50, 60, seed=4)
    agrees(cupyflash.attention(q, k, v, mask=mask), theirs(q, k, v, attn_mask=torch.from_numpy(mask)), q, k, v, mask=mask)
    shifts = torch.from_numpy(bias.astype(np.float64))
    agrees(cupyflash.attention(q, k, v, bias=bias), theirs(q, k, v, attn_mask=shifts), q, k, v, bias=bias)


def gradients_agree(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    theirs: tuple[np.ndarray, ...],
    deterministic: bool = False,
    **options: Any,
) -> None:
    """Ours by the 2x rule, whose truth is no further from PyTorch's autograd in float64 than float64 rounds."""
    names, truth = ("dQ", "dK", "dV"), reference_gradients(dout, q, k, v, **options)
    for name, expected in zip(names, theirs, strict=True):
        np.testing.assert_allclose(truth[name], expected, rtol=1e-9, atol=1e-12)
    _, pullback = cupyflash.attention_vjp(q, k, v, deterministic=deterministic, **options)
    numbers = measure_gradients(dict(zip(names, pullback(dout), strict=True)), dout, Inputs.of(q, k, v, **options))
    assert all(each.good for each in numbers.values()), numbers


def their_gradients(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> tuple[np.ndarray, ...]:
    """PyTorch's dQ, dK and dV in float64, on the CPU; heads of k and v are repeated for those of q, which adds theirs up."""
    q64, k64, v64 = (torch.from_numpy(array.astype(np.float64)).requires_grad_() for array in (q, k, v))
    repeated = (tensor.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3) for tensor in (k64, v64))
    out = scaled_dot_product_attention(q64, *repeated, **options)
    found = torch.autograd.grad(out, (q64, k64, v64), torch.from_numpy(dout.astype(np.float64)))
    return tuple(gradient.numpy() for gradient in found)


@pytest.mark.parametrize(
    ("dtype", "causal", "deterministic"),
    [(np.float16, False, False), (np.float16, True, True), (np.float32, False, True), (np.float32, True, False)],
)
def test_gradients_of_grouped_heads_and_causal(dtype: Any, causal: bool, deterministic: bool) -> None:
    q, k, v = (normal(1, heads, 70, d, dtype=dtype, seed=seed) for seed, (heads, d) in enumerate(GROUPED))
    dout = normal(1, 4, 70, 24, dtype=dtype, seed=3)
    expected = their_gradients(dout, q, k, v, is_causal=causal, scale=0.3)
    gradients_agree(dout, q, k, v, expected, deterministic, causal=causal, scale=0.3)


@pytest.mark.parametrize(("n_q", "n_k"), [(30, 70), (70, 70)])
def test_gradients_of_causal_of_other_lengths_are_of_bottom_right_where_theirs_are_of_top_left(n_q: int, n_k: int) -> None:
    """Theirs by an explicit mask, and with their own alignment where it is a mask here; alike when the lengths are."""
    q, k, v, dout = normal(2, n_q, 64), normal(2, n_k, 64, seed=1), normal(2, n_k, 64, seed=2), normal(2, n_q, 64, seed=3)
    rows, cols = np.indices((n_q, n_k))
    bottom_right, top_left = cols <= rows + n_k - n_q, cols <= rows
    gradients_agree(dout, q, k, v, their_gradients(dout, q, k, v, attn_mask=torch.from_numpy(bottom_right)), causal=True)
    gradients_agree(dout, q, k, v, their_gradients(dout, q, k, v, is_causal=True), mask=top_left)


def test_gradients_of_masks_and_biases() -> None:
    q, k, v, dout = normal(2, 4, 50, 64), normal(2, 4, 60, 64, seed=1), normal(2, 4, 60, 64, seed=2), normal(2, 4, 50, 64, seed=5)
    mask, bias = normal(2, 1, 50, 60, seed=3) < 1, normal(4, 50, 60, seed=4)
    gradients_agree(dout, q, k, v, their_gradients(dout, q, k, v, attn_mask=torch.from_numpy(mask)), mask=mask)
    shifts = torch.from_numpy(bias.astype(np.float64))
    gradients_agree(dout, q, k, v, their_gradients(dout, q, k, v, attn_mask=shifts), bias=bias)


def test_packed_sequences() -> None:
    """Against a padded batch of theirs under a mask: causal is top-left there, so lengths are alike."""
    lengths = [5, 40, 17]
    cu = np.cumsum([0, *lengths], dtype=np.int32)
    q, k, v = (normal(cu[-1], 2, 64, seed=seed) for seed in range(3))
    ours = cupyflash.attention_varlen(q, k, v, cu, cu, causal=True)
    for begin, n in zip(cu, lengths, strict=False):
        one = [array[begin : begin + n].swapaxes(0, 1) for array in (q, k, v)]
        agrees(ours[begin : begin + n].swapaxes(0, 1), theirs(*one, is_causal=True), *one, causal=True)


def test_tensors_of_torch_are_taken_as_views() -> None:
    q, k, v = (normal(2, 20, 64, seed=seed) for seed in range(3))
    ours = cupyflash.attention(*(torch.from_numpy(array) for array in (q, k, v)))
    assert np.array_equal(ours, cupyflash.attention(q, k, v))


def test_tensors_that_cannot_be_taken_are_refused_by_name() -> None:
    """NumPy takes no bfloat16 through DLPack; a tensor that requires grad would lose it."""
    q, k, v = (torch.from_numpy(normal(2, 20, 64, seed=seed)) for seed in range(3))
    with pytest.raises(TypeError, match=r"k must be a tensor that does not require grad, got one that does: pass k\.detach\(\)"):
        cupyflash.attention(q, k.requires_grad_(), v)
    out = torch.empty_like(q)
    assert cupyflash.attention(q, k.detach(), v, out=out) is out
    assert np.array_equal(out.numpy(), cupyflash.attention(q, k.detach(), v))
    rounded = [each.detach().bfloat16() for each in (q, k, v)]
    way_out = r"pass q\.view\(torch\.int16\)\.numpy\(\)\.view\(ml_dtypes\.bfloat16\), the same memory, or q\.float\(\)"
    with pytest.raises(TypeError, match=r"q, of dtype torch\.bfloat16, cannot be taken through DLPack: .*" + way_out):
        cupyflash.attention(*rounded)
    views = [each.view(torch.int16).numpy().view(DTYPES["bfloat16"]) for each in rounded]
    assert cupyflash.attention(*views).dtype == DTYPES["bfloat16"] and views[0].ctypes.data == rounded[0].data_ptr()


def test_the_gradient_of_a_sum_is_broadcast() -> None:
    """autograd passes an expanded tensor for `out.sum()`, of one element in memory."""
    q, k, v = (torch.from_numpy(normal(2, 20, 64, seed=seed)) for seed in range(3))
    _, pullback = cupyflash.attention_vjp(q, k, v)
    expanded = pullback(torch.ones((), dtype=torch.float16).expand(2, 20, 64))
    for ours, expected in zip(expanded, pullback(torch.ones(2, 20, 64, dtype=torch.float16)), strict=True):
        assert np.array_equal(ours, expected) or np.allclose(ours, expected, atol=2e-3)
