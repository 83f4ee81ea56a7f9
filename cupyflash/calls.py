"""The calls: exact attention of CuPy arrays on the GPU, or of NumPy arrays on the simulated device, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np

from cupyflash.arrays import of_heads
from cupyflash.launch.launcher import CACHED, TENSORS, Arrays, PublicCall, held_for_graph, hold_for_graph
from cupyflash.request import keywords
from cupyflash.request.keywords import asks, keywords_of
from cupyflash.request.named_scores import one_score
from cupyflash.request.score import field
from cupyflash.request.score_sums import asked_sums, finished, most_terms


@asks(keywords.ForwardKeywords)
def attention(q: Any, k: Any, v: Any, **asked: Unpack[keywords.ForwardKeywords]) -> Any:
    """Compute O = softmax(scale Q K^T + bias) V exactly, by tiles.

    Shapes: q (n_q, d), (h, n_q, d) or (b, h, n_q, d); k the same with n_k and h_kv heads, where h_kv divides h; v as k, with d_v in
    place of d if you like. With `layout` "bnhd" q, k, v, `out` and the result are (n, h, d) or (b, n, h, d); everything else, L
    too, has its heads before its rows as ever. d and d_v are 1 to 256, up to 512 in half types for "fa2", gradients too; float16,
    bfloat16 (compute capability 8.0) or float32, all of one dtype; any strides whose last axis is contiguous. `scale` is 1 /
    sqrt(d) if None. Scores are float32 numbers: with finite inputs they are right up to 2e38, and NaN beyond.

    Masks. `causal` is aligned bottom-right: row r sees key c if c <= r + n_k - n_q. `window` = (left, right) lets row r see the
    keys from r + n_k - n_q - left to r + n_k - n_q + right, None for no limit on a side; with `causal` right is 0.

    `mask` is a boolean array, true if the row sees the key, or a `Mask`, one condition that is compiled into the kernels. `bias`,
    of q's dtype or float32, is added to the scaled scores. Both arrays broadcast to (..., n_q, n_k). A first pass finds the tiles
    that a mask leaves empty, which are neither loaded nor computed, and those that it leaves whole, which are not masked ("fa2",
    "fa3"; others evaluate the mask for every score). `block_mask` finds these tiles once for many calls. `window` and `mask`
    together are an *and*; to see the first keys beside a window, as in StreamingLLM, write the window into a mask, which skips
    tiles too: `Mask("k <= q and (q - k < width or k < first)", width=512, first=4)`.

    `key_lengths`, integers of shape (b,) from 0 to n_k in an array or a list, is the number of keys of each batch; later rows of k
    and v are never read. `block_mask`, of bool, (b or 1, h or 1, Tr, Tc) or with fewer axes, keeps blocks of `tiling` (Br, Bc),
    where Tr = ceil(n_q / Br) and Tc = ceil(n_k / Bc): other blocks are neither loaded nor computed ("fa1" and "fa2"). Several masks
    together are an *and*.

    Scores. `score`, a `Score`, transforms each scaled score before bias and masks: one expression, compiled into the kernels (all
    of them take one; "fa3" none with sin or cos). Two such expressions have names: `softcap`, a positive number, makes scores
    softcap tanh(s / softcap); `alibi_slopes`, of any of the three dtypes and shape (h,) or (b, h), then subtracts slope |q - k|,
    where q is the row's place on the keys' axis (r + n_k - n_q). Neither can be combined with `score`, which can express both.

    `sinks`, of any of the three dtypes and shape (h,), is one more score (a logit of no key) for each of a head's rows, without a
    value. L includes it, even if a row sees no key; if parts of the keys are merged, give the sinks to one of them.

    Dropout. `dropout`, 0 to below 1, is the probability with which each weight of the softmax is dropped (not by "decode");
    kept weights are multiplied by 1 / (1 - dropout), and L is that without dropout. `seed`, an integer below 2**64,
    `offset`, one below 2**32 that may count the calls, and batch, head, row and key decide which weights are dropped, independent
    of algorithm, tiling and device: `dropout_mask` returns them, `request.dropout.Dropout` defines them. For a part of a larger
    call `dropout_origin` is the (batch, head, row, key) of its first weight there; the row must be a multiple of 32, the key of 16.
    Probabilities are rounded to multiples of 2**-16. (A CUDA graph keeps the seed and offset with which it was captured.)

    A row that sees no key gives zeros and a log-sum-exp of -inf. Other masked keys have weight zero, but a NaN or infinity in a
    masked row of v may still show in rows that share a tile with it. (Lengths on a GPU are not checked: one that is out of range
    counts as 0 or n_k.)

    `algorithm`: "auto", the default, chooses "fa3", FlashAttention-3, on a Hopper if it accepts the call and a model predicts it to
    be faster (`cupyflash explain` gives the reasons); "decode", which splits the keys over thread blocks, for few queries against
    many keys if the models predict that to be faster; and else "fa2", FlashAttention-2. The tile is the one that a model of the
    chip predicts to be fastest, and not the FlashAttention paper's Bc = ceil(M / 4d), Br = min(Bc, d). "fa1" (FlashAttention,
    Algorithm 1) uses that formula, rounded to sizes that fit. "standard" is Algorithm 0, with S and P in memory in q's dtype, so
    that scores beyond its range overflow; `score_dtype` "float32" keeps S in float32. `tiling`: None for these choices,
    (block_rows, block_cols) that the kernel runs, or "paper" for the formula to the letter, which runs if it gives multiples of 16
    that fit.

    `out`, if given, receives O: q's dtype, shape (..., n_q, d_v), positive strides, no memory shared with an input. If a call fails
    after its arguments were checked, for lack of memory or by the device, it may hold a part of O.

    Returns O in q's dtype on q's device; with `return_lse` also L, the natural logarithm of the sum of exponentials of each row,
    float32 of shape q.shape[:-1]. CuPy arrays run on their device and the current stream; NumPy arrays run the same kernel on the
    simulated device (see `simulated_device`). Other objects that offer their memory are taken as views: through DLPack, after the
    pending work of their own stream, or else the CUDA array interface.

    While a CUDA graph is captured, a call keeps its own allocations for good; the caller must keep given and returned arrays as
    long as the graph lives, and no list or NumPy array can be copied to the GPU then.

    Raises TypeError or ValueError for bad arguments before anything is compiled or launched; RuntimeError for NumPy arrays that
    would take the simulated device too long.
    """
    return FORWARD({"q": q, "k": k, "v": v, **asked})


@asks(keywords.BackwardKeywords)
def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **asked: Unpack[keywords.BackwardKeywords]
) -> tuple[Any, ...]:
    """Compute dq, dk and dv, the effect of `attention`'s inputs on sum(dout * O), without a matrix of n_q x n_k in memory.

    `out` and `lse` are the results of `attention(q, k, v, ..., return_lse=True)`; `dout` is the gradient of out, of its shape and
    dtype. If its last axis is not contiguous, as in `broadcast_to(1, out.shape)`, the gradient of `out.sum()`, it is copied. All
    other arguments have the values of that call. S and P are computed again, from L. Gradients of query heads that share a key head
    add up in its dk and dv; a row that sees no key, and a key that no row sees, have a gradient of zero. A NaN or an infinity in a
    masked row of k or v is multiplied by a weight of zero, and makes the dq of rows that share a tile with it NaN; rows beyond
    `key_lengths` are not read. P = exp(S - L) would have the error of float32's rounding of L: in float32 each row therefore
    computes its scores once more, for m and log(l), and so do, with "fa2" and "fa3", rows of half types whose L is large.
    With a `score` function (`softcap` and `alibi_slopes` are two) dq and dk include its derivative by s, except where a score is
    masked, or its weight is 0. `return_dscore` asks for the gradients of the arrays of floats that it has captured: True for all,
    or a tuple of their names (`alibi_slopes` is one). Each score adds to the elements that it has loaded, by atomics in float32;
    with `deterministic` as integers of 64 bits, multiples of a fraction of the largest term, for which S and dP are computed twice
    more. Scores whose weight is 0 add nothing.

    `algorithm`: "auto", the default, is "fa3" on a Hopper that accepts the call (half types, d and d_v up to 256, no block mask;
    `cupyflash explain --backward` says why it does not), else "fa2" (FlashAttention-2). Both sum dq by additions in memory, in
    float32, in no order. With `deterministic` "fa3" adds in one order, and "fa2" uses a kernel of its own for dq: the same bits
    each time. "fa1" (FlashAttention's Algorithm 4) and "standard" (Algorithm 3, three matrices of n_q x n_k in memory) are here to
    be measured, up to a d of 256; they always give the same bits. "standard" rounds S as its forward did: `score_dtype` is that
    call's.

    Returns arrays of q's dtype on q's device, of the shapes of q, k and v; with `sinks` their float32 gradient ("fa2", "fa3"); with
    `return_dbias` also the bias's gradient, of its shape and dtype ("fa2", "fa3"; along broadcast axes atomics add it up, which
    `deterministic` refuses); with `return_dscore` last a dict of the gradients of captured arrays by name, of their shapes and
    dtypes ("fa2", "fa3"). Raises as `attention` does.
    """
    gradients: tuple[Any, ...] = BACKWARD({"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, **asked})
    return gradients


@asks(keywords.BackwardKeywords)
def attention_vjp(
    q: Any, k: Any, v: Any, **asked: Unpack[keywords.BackwardKeywords]
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """Return `attention(q, k, v, ...)` and its pullback, which takes dout and returns the results of `attention_backward`: dq, dk,
    dv, then dsinks if there are sinks, then dbias with `return_dbias`, then dscore with `return_dscore`.

    The pullback holds q, k, v, out and the log-sum-exps, 4 bytes a row; it may be called any number of times. `algorithm` and
    `tiling` are those of both passes ("auto" is each pass's default); `options` are `attention`'s, except `return_lse` and `out`.
    Raises as `attention` and `attention_backward` do, for both before anything is computed.
    """
    for name in asked.keys() & {"return_lse", "out"}:
        raise TypeError(f"attention_vjp has no {name}")
    VJP({"q": q, "k": k, "v": v, **asked})  # refuses what no backward runs
    forward: dict[str, Any] = {name: value for name, value in asked.items() if name not in keywords.OF_GRADIENTS}
    out, lse = attention(q, k, v, return_lse=True, **forward)
    if not isinstance(lse, np.ndarray):
        hold_for_graph(lse)  # which nobody but the pullback has

    def pullback(dout: Any) -> tuple[Any, ...]:
        return attention_backward(dout, q, k, v, out, lse, **asked)

    return out, pullback


@asks(keywords.Varlen)
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **asked: Unpack[keywords.Varlen],
) -> Any:
    """Compute O = softmax(scale Q K^T) V of each sequence of a batch without padding, by FlashAttention-2 or 3; as `attention`
    otherwise.

    Shapes: q (total_q, h, d), k (total_k, h_kv, d), v (total_k, h_kv, d_v). Sequence b has the rows cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] - 1 of q, and likewise by cu_seqlens_k of k and v: both are integers of shape (b + 1,) or lists, begin with
    0, do not decrease, and end with total_q and total_k. `causal` and `window` are aligned bottom-right in each sequence. A
    sequence may have no queries, or no keys: its rows are then zeros with a log-sum-exp of -inf. `mask` is a `Mask`, or a
    `block_mask` of one and of these bounds. In its expression, and in a `score`'s, b is the sequence's number, row, q and k count
    from its own beginning, and n_q and n_k are its own lengths; an axis that row or k indexes has as many elements as the longest
    sequence (`max_seqlen`). `alibi_slopes` are (h,) or (sequences, h). For `dropout` a sequence's number is its batch, and rows and
    keys count from its own beginning, too.

    `max_seqlen_q` and `max_seqlen_k` are the lengths of the longest sequences, or more. Without them the call reads the bounds,
    which waits for the GPU if they are there; so pass both lengths, or pass the bounds as lists or NumPy arrays. (While a CUDA
    graph is captured, pass bounds on the GPU and both lengths.) Bounds on a GPU with a given max_seqlen are not checked: they must
    be right, or the result and the accessed memory are undefined.

    Returns O in q's dtype, of shape (total_q, h, d_v); with `return_lse` also L, float32 of shape (h, total_q), as
    flash-attention's `flash_attn_varlen_func` lays it out. Raises as `attention` does.
    """
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return VARLEN({"q": q, "k": k, "v": v, **bounds, **longest, **asked})


@asks(keywords.VarlenBackward)
def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **asked: Unpack[keywords.VarlenBackward],
) -> tuple[Any, ...]:
    """Compute dq, dk and dv (and dsinks, and with `return_dscore` the gradients of captured arrays) of `attention_varlen`, from its
    out and lse; shapes as there, dout as out.

    All else as in `attention_backward`.

    On a GPU pass both `max_seqlen`, or the bounds as NumPy arrays, as there.
    """
    rows = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    longest = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    gradients: tuple[Any, ...] = VARLEN_BACKWARD({**rows, **bounds, **longest, **asked})
    return gradients


@asks(keywords.Decode, causal=True)
def attention_decode(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, **asked: Unpack[keywords.Decode]) -> Any:
    """Compute O = softmax(scale Q K^T) V of the newest queries of each sequence against its cache, whose keys are split over thread
    blocks.

    Shapes: q (b, h, n_q, d); k_cache (b, h_kv, n, d) and v_cache (b, h_kv, n, d_v), with room for n keys of each sequence, of any
    strides whose last axis is contiguous. Or the caches are pages, (pages, h_kv, page_size, d) and d_v, page_size a multiple of 16,
    and `block_table`, integers of shape (b, pages of a sequence), has the number of the page with a sequence's keys 0 to page_size
    - 1, then that of the next ones, and so on; entries after the sequence's last key are not read. h_kv divides h, and the rows of
    all query heads of a key head go together, so that K and V are read once. With `layout` "bnhd" all have their heads behind: q
    (b, n_q, h, d), caches (b, n, h_kv, d) or (pages, page_size, h_kv, d), k, v and the result likewise. For q of one order beside
    caches of another pass `swapaxes(1, 2)`, which makes no copy.

    `cache_seqlens`, integers of shape (b,) in an array or a list, are the numbers of keys that each sequence has in the cache, from
    0 on. `k` (b, h_kv, n_new, d) and `v`, if given, are appended to them, in place, and belong to the sequence; `cache_seqlens`
    itself is not changed. The queries are the newest n_q places of the sequence: with `causal`, query i sees the keys up to place i
    + n_all - n_q, where n_all includes the new ones; `window` is as for `attention`. `tree_mask`, of bool, (n_q, n_q) or (b, n_q,
    n_q), tells which of the newest n_q keys each query sees, for drafts that branch; `mask`, a `Mask`, is evaluated for every score
    that position leaves; several masks together are an *and*. `score`, `softcap`, `alibi_slopes` and `sinks` are `attention`'s: in
    the expression of a score or a mask b is the sequence, k a key's place in it, q that of the query, n_k the number of the
    sequence's keys with the new ones; an axis that k indexes has room for n keys, as the cache. A query that sees no key gives
    zeros and a log-sum-exp of -inf.

    `num_splits`, 1 to 256, is the number of parts into which a sequence's keys are split; the default depends on the cache's
    room and the device alone (`cupyflash explain --decode` explains it). The same call gives the same bits; another number of
    splits rounds differently.

    Returns O in q's dtype, of q's shape except for d_v; with `return_lse` also L, float32 of shape (b, h, n_q). CuPy arrays run on
    their device and the current stream, without a wait, and a CUDA graph may be replayed with other `cache_seqlens`, pages and
    contents of the same arrays. NumPy arrays run the same kernels on the simulated device.

    Lengths and pages on a GPU are not checked: a length out of range counts as 0, or as the most that leaves room for the new keys;
    a page out of range as the first or the last one. Nothing is written outside the cache. New keys of two sequences that share a
    page overwrite one another. Lengths and pages in lists or NumPy arrays are checked.

    Raises TypeError or ValueError for bad arguments before anything is compiled, launched or written; RuntimeError for NumPy arrays
    that would take the simulated device too long. If a call fails later, for lack of memory or by the device, new keys may be in
    their places already, and nothing else of the caches has changed: repeating the call corrects that.
    """
    return DECODE({"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, **asked})


def _rows(given: Mapping[str, Any], arrays: Arrays, made: dict[str, Any]) -> Any:
    out = given.get("out")
    out = made["O"] if out is None else out
    return (out, made["L"]) if "L" in made else out


def _gradients(given: Mapping[str, Any], arrays: Arrays, made: dict[str, Any]) -> tuple[Any, ...]:
    """dQ, dK and dV; the sums over a head's rows of the gradients that kernels made for each row; the bias's; captured arrays' by
    name."""
    gpu = not isinstance(made["dQ"], np.ndarray)
    for name in made.keys() - {"dQ", "dK", "dV"}:
        if gpu:
            hold_for_graph(made[name])  # which the caller does not get
        with held_for_graph(gpu):
            made[name] = of_heads(made[name])
    dbias = (arrays["dbias"].astype(arrays["bias"].dtype),) if "dbias" in arrays else ()
    if not given.get("return_dscore"):
        return (*made.values(), *dbias)
    score = one_score(given)
    assert score is not None
    names = asked_sums(score.form, given["return_dscore"])
    keys = given["max_seqlen_k"] if "cu_seqlens_k" in arrays else arrays["K"].shape[-3 if given.get("layout") == "bnhd" else -2]
    terms = math.prod(arrays["Q"].shape[:-1]) * keys * most_terms(score.form)
    with held_for_graph(gpu):
        sums = finished(arrays, names, terms)
        return (*made.values(), *dbias, {name: sums[name].astype(arrays[field(name)].dtype) for name in names})


FORWARD = PublicCall(keywords_of(attention), TENSORS, _rows)
BACKWARD = PublicCall(keywords_of(attention_backward), TENSORS, _gradients)
VJP = PublicCall(keywords_of(attention_vjp), TENSORS, lambda given, arrays, made: None)
VARLEN = PublicCall(keywords_of(attention_varlen), TENSORS, _rows, "sequences")
VARLEN_BACKWARD = PublicCall(keywords_of(attention_varlen_backward), TENSORS, _gradients, "sequences")
DECODE = PublicCall(keywords_of(attention_decode), {**TENSORS, **CACHED}, _rows, "function")
