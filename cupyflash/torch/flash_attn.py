"""flash-attn's functions, by their own arguments: (b, n, h, d), causal masks and windows aligned bottom-right."""

from __future__ import annotations

from typing import Any

import torch

from cupyflash.torch.calls import attention, attention_decode, attention_varlen


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute attention as `flash_attn.flash_attn_func` does, with gradients of q, k and v.

    Shapes: q (b, n_q, h, d), k and v (b, n_k, h_kv, d), where h_kv divides h; float16, bfloat16, and float32 too. `causal` and
    `window_size` = (left, right) are aligned bottom-right: row i sees keys from i + n_k - n_q - left to i + n_k - n_q + right; a
    negative side has no limit, and with `causal` the right side is 0, whatever is passed. Rows that see no key are zeros. `softcap`
    of 0 is none. `alibi_slopes`, (h,) or (b, h), subtract slope |i + n_k - n_q - j| from scores. `dropout_p` takes its seed from
    PyTorch's generator for CPUs. Gradients are the same bits each time with `deterministic`, or PyTorch's own switch.

    Returns O, (b, n_q, h, d) in C order. With `return_attn_probs`: (O, the log-sum-exps (b, h, n_q) in float32, an empty tensor);
    flash-attn's third result, the dropped weights, is refused. The log-sum-exps have no gradient, and slopes none.
    """
    _without_weights(dropout_p, return_attn_probs)
    out, lse = attention(
        q,
        k,
        v,
        dropout=dropout_p,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        layout="bnhd",
        return_lse=True,
        **_ours(softmax_scale, causal, window_size, softcap),
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Compute attention of packed sequences as `flash_attn.flash_attn_varlen_func` does, with gradients of q, k and v.

    Shapes: q (total_q, h, d), k and v (total_k, h_kv, d); `cu_seqlens_q` and `cu_seqlens_k`, integers of shape (b + 1,), are the
    sequences' bounds; all else as in `flash_attn_func`, for each sequence. `block_table`, keys in pages, is refused.

    Returns O, (total_q, h, d). With `return_attn_probs`: (O, the log-sum-exps (h, total_q) in float32, an empty tensor).
    """
    _without_weights(dropout_p, return_attn_probs)
    if block_table is not None:
        raise ValueError("block_table must be None here: keys in pages are for flash_attn_with_kvcache")
    out, lse = attention_varlen(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        dropout=dropout_p,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_lse=True,
        **_ours(softmax_scale, causal, window_size, softcap),
    )
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute attention of new queries against caches as `flash_attn.flash_attn_with_kvcache` does, without gradients.

    Shapes: q (b, n_q, h, d); the caches (b, n, h_kv, d), or pages (pages, page_size, h_kv, d) with `block_table` (b, pages of a
    sequence), page_size a multiple of 16. `k` and `v`, (b, n_new, h_kv, d), are written into the caches after each sequence's
    `cache_seqlens` keys, one integer or (b,); without it, and without k, the whole cache counts. `cache_batch_idx`, (b,), names the
    rows of the caches, whose n must be a multiple of 16 then. Causal masks, windows, `softcap` and slopes as in `flash_attn_func`,
    where n_k is the number of a sequence's keys with the new ones. `num_splits` of 0 leaves it to the device. Rotary embeddings and
    `cache_leftpad` are refused.

    Returns O, (b, n_q, h, d); with `return_softmax_lse` also the log-sum-exps, (b, h, n_q) in float32.
    """
    for name, given in {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_leftpad": cache_leftpad}.items():
        if given is not None:
            raise ValueError(f"{name} must be None: rotate q and k before the call, and let a sequence's keys begin at 0")
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens must be given with k: it says where new keys go")
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if not isinstance(cache_seqlens, torch.Tensor):
        cache_seqlens = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    if cache_batch_idx is not None:
        if block_table is not None:
            raise ValueError("cache_batch_idx must be None beside a block_table, which names the pages")
        block_table = cache_batch_idx[:, None]  # each row of the cache is one page
    return attention_decode(
        *(q, k_cache, v_cache, cache_seqlens),
        k=k,
        v=v,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits or None,
        layout="bnhd",
        return_lse=return_softmax_lse,
        **_ours(softmax_scale, causal, window_size, softcap),
    )


def _ours(scale: float | None, causal: bool, window_size: tuple[int, int], softcap: float) -> dict[str, Any]:
    """The keywords for flash-attn's: no limit is a negative side, and no cap 0."""
    left, right = (None if side < 0 else side for side in window_size)
    return {"causal": causal, "window": (left, None if causal else right), "scale": scale, "softcap": softcap or None}


def _without_weights(dropout_p: float, return_attn_probs: bool) -> None:
    if return_attn_probs and dropout_p > 0:
        raise ValueError("return_attn_probs must be False with dropout_p: the dropped weights are never in memory")
