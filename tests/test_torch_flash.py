"""flash-attn's functions beside plain attention by PyTorch's operations, on CPU tensors, as flash-attn's documentation has them."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="beside PyTorch, which is not installed")
pytestmark = pytest.mark.wide

from beside_torch import close, drawn, plain  # noqa: E402

from cupyflash.torch import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: E402

SLOPES = torch.tensor([0.5, 0.25])


def seen(n_q: int, n_k: int, causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Any:
    """The mask of flash-attn's documentation: keys i + n_k - n_q - left to i + n_k - n_q + right, negative sides without limit."""
    place, key = torch.arange(n_q)[:, None] + n_k - n_q, torch.arange(n_k)
    left, right = window_size[0], 0 if causal else window_size[1]
    mask = torch.ones(n_q, n_k, dtype=torch.bool)
    mask &= (key >= place - left) if left >= 0 else mask
    return mask & (key <= place + right) if right >= 0 else mask


def right(q: Any, k: Any, v: Any, softmax_scale: Any = None, alibi_slopes: Any = None, **masks: Any) -> Any:
    """The documented function of (b, n, h, d)."""
    n_q, n_k = q.shape[1], k.shape[1]
    bias = None
    if alibi_slopes is not None:
        far = (torch.arange(n_q)[:, None] + n_k - n_q - torch.arange(n_k)).abs()
        bias = -alibi_slopes.to(q.dtype)[..., None, None] * far.to(q.dtype)
    heads = (each.transpose(1, 2) for each in (q, k, v))
    return plain(*heads, seen(n_q, n_k, **masks), bias, softmax_scale).transpose(1, 2)


# (n_q, n_k), arguments
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "causal, fewer keys": ((23, 18), {"causal": True}),
    "window": ((18, 23), {"window_size": (5, 2), "softmax_scale": 0.4}),
    "causal with a window's right side": ((18, 23), {"causal": True, "window_size": (5, 9)}),
    "slopes": ((18, 23), {"alibi_slopes": SLOPES, "causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_flash_attn_documents(name: str) -> None:
    (n_q, n_k), asked = CASES[name]
    tensors = drawn((2, n_q, 2, 16), (2, n_k, 1, 16), (2, n_k, 1, 16), dtype=torch.float16)
    close(lambda *t: flash_attn_func(*t, **asked), lambda *t: right(*t, **asked), tensors)


def test_log_sum_exps_and_the_empty_third_result() -> None:
    q, k, v = drawn((2, 18, 2, 16), (2, 23, 2, 16), (2, 23, 2, 16))
    out, lse, weights = flash_attn_func(q, k, v, return_attn_probs=True)
    S = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 4
    assert out.is_contiguous() and weights.numel() == 0 and lse.dtype == torch.float32
    assert lse.shape == (2, 2, 18) and torch.allclose(lse.double(), torch.logsumexp(S, -1), atol=1e-5)


def test_deterministic_gradients_and_a_softcap() -> None:
    tensors = [each.requires_grad_() for each in drawn((1, 40, 2, 16), (1, 40, 2, 16), (1, 40, 2, 16))]
    out = flash_attn_func(*tensors, softcap=2.0, deterministic=True)
    first, second = (torch.autograd.grad(out.sum(), tensors, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    S = 2 * torch.tanh(torch.einsum("bihd,bjhd->bhij", *tensors[:2]) / 8)
    expected = torch.einsum("bhij,bjhd->bihd", torch.softmax(S, -1), tensors[2])
    assert torch.allclose(out, expected, atol=1e-5)


def test_packed_sequences() -> None:
    """Each against attention of its own, sequences without queries or keys among them."""
    queries, keys = [5, 0, 18], [23, 4, 9]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys))
    asked = {"causal": True, "window_size": (7, -1)}

    def ours(q: Any, k: Any, v: Any) -> Any:
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(queries), max(keys), **asked)

    def each(q: Any, k: Any, v: Any) -> Any:
        parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
        return torch.cat([right(*(x[None] for x in part), **asked)[0] for part in parts])

    tensors = drawn((sum(queries), 2, 16), (sum(keys), 1, 16), (sum(keys), 1, 16), dtype=torch.float16)
    close(ours, each, tensors)
    out, lse, _ = flash_attn_varlen_func(*tensors, cu_q, cu_k, 18, 23, return_attn_probs=True)
    assert out.shape == (23, 2, 16) and lse.shape == (2, 23)


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_that_grows(paged: bool) -> None:
    """New keys are written in place; the queries see what the causal mask of all keys lets them see."""
    lengths, n_new, room = [9, 20], 2, 32
    k_cache, v_cache, q, k, v = drawn(
        (2, room, 1, 16), (2, room, 1, 16), (2, n_new, 2, 16), (2, n_new, 1, 16), (2, n_new, 1, 16), dtype=torch.float16
    )
    caches, table = [k_cache.clone(), v_cache.clone()], None
    if paged:  # pages of 16, in another order
        table = torch.tensor([[2, 0], [3, 1]])
        caches = [torch.stack([each[0, 16:], each[1, 16:], each[0, :16], each[1, :16]]) for each in caches]
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=torch.tensor(lengths), block_table=table, causal=True, return_softmax_lse=True
    )
    assert lse.shape == (2, 2, n_new) and not out.requires_grad
    for b, length in enumerate(lengths):
        keys, values = (torch.cat([old[b, :length], new[b]])[None] for old, new in ((k_cache, k), (v_cache, v)))
        expected = right(q[b : b + 1].double(), keys.double(), values.double(), causal=True)
        assert torch.allclose(out[b : b + 1].double(), expected, atol=2e-3)
        rows = caches[0][table[b]].flatten(0, 1) if table is not None else caches[0][b]
        assert torch.equal(rows[length : length + n_new], k[b]) and torch.equal(rows[:length], k_cache[b, :length])


def test_a_cache_by_rows_and_of_one_length() -> None:
    k_cache, v_cache, q = drawn((3, 32, 1, 16), (3, 32, 1, 16), (2, 1, 2, 16))
    rows = torch.tensor([2, 0], dtype=torch.int32)
    found = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=20, cache_batch_idx=rows)
    assert torch.allclose(found, right(q, k_cache[rows, :20], v_cache[rows, :20]), atol=1e-5)
    whole = flash_attn_with_kvcache(q, k_cache[:2], v_cache[:2])
    assert torch.allclose(whole, right(q, k_cache[:2], v_cache[:2]), atol=1e-5)


def test_what_is_refused() -> None:
    q, k, cu = *drawn((1, 4, 2, 16), (1, 32, 2, 16)), torch.tensor([0, 4])
    refused = [
        (lambda: flash_attn_func(q, k, k, 0.1, return_attn_probs=True), "return_attn_probs must be False with dropout_p"),
        (lambda: flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 4, 4, block_table=cu), "block_table must be None here"),
        (lambda: flash_attn_with_kvcache(q, k, k, rotary_cos=q), "rotary_cos must be None: rotate q and k before"),
        (lambda: flash_attn_with_kvcache(q, k, k, cache_leftpad=cu), "cache_leftpad must be None"),
        (lambda: flash_attn_with_kvcache(q, k, k, q, q), "cache_seqlens must be given with k"),
        (lambda: flash_attn_with_kvcache(q, k, k, cache_batch_idx=cu, block_table=cu[None]), "cache_batch_idx must be None beside"),
        (lambda: flash_attn_func(q.double(), k, k), "q must be of float16, bfloat16 or float32, got torch.float64"),
    ]
    for call, message in refused:
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            call()
