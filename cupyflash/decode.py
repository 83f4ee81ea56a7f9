"""The call for generating: a few new queries of each sequence against its cache of keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupyflash.arrays import Array, Layout, check_array, check_operand, overlaps_itself, row_alignment
from cupyflash.dispatch import as_array, as_integers, device_of, placed, refuse_overlap, target
from cupyflash.launcher import Prepared, kept, prepare, vectors_on_device
from cupyflash.named_scores import one_score
from cupyflash.options import Options, require_flag
from cupyflash.problem import Problem, check_out, check_sinks
from cupyflash.schedules import Cache, plan_decode
from cupyflash.schedules.decode import PAGE_STEP
from cupyflash.score import Mask, Score, captured_among, captured_values, check_captured
from cupyflash.simulated import PreparedSimulation

TENSORS = {"q": "Q", "k_cache": "K", "v_cache": "V", "out": "O", "k": "K_new", "v": "V_new"}
REQUIRED = ("q", "k_cache", "v_cache")


def attention_decode(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    *,
    k: Any | None = None,
    v: Any | None = None,
    block_table: Any | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    mask: Mask | None = None,
    score: Score | None = None,
    softcap: float | None = None,
    alibi_slopes: Any | None = None,
    tree_mask: Any | None = None,
    sinks: Any | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """O = softmax(scale Q K^T) V of the newest queries of each sequence against its cache, whose keys are split over thread blocks.

    Shapes: q (b, h, n_q, d); k_cache (b, h_kv, n, d) and v_cache (b, h_kv, n, d_v), with room for n keys of each sequence, of any
    strides whose last axis is contiguous. Or the caches are pages, (pages, h_kv, page_size, d) and d_v, page_size a multiple of 16,
    and `block_table`, int32 of shape (b, pages of a sequence), says which page has a sequence's keys 0 to page_size - 1, which the
    next ones, and so on; of a row the entries behind the sequence's last key are not read. h_kv divides h, and the rows of
    all query heads of a key head go together, so that K and V are read once. What has heads and keys the other way round, as
    (b, n, h_kv, d) or (pages, page_size, h_kv, d), is `swapaxes(1, 2)` of it, without a copy.

    `cache_seqlens`, integers of shape (b,) in an array or a list, are the keys that each sequence has in the cache, from 0 on. `k`
    (b, h_kv, n_new, d) and `v`, if given, are put behind them, in place, and belong to the sequence; `cache_seqlens` itself is not
    changed. The queries are the newest n_q places of the sequence: with `causal`, query i sees the keys up to place i + n_all -
    n_q, where n_all counts the new ones; `window` is as for `attention`. `tree_mask`, of bool, (n_q, n_q) or (b, n_q, n_q), says
    which of the newest n_q keys each query sees, for drafts that branch; `mask`, a `Mask`, is asked for every score that position
    leaves; all masks add up. `score`, `softcap`, `alibi_slopes` and `sinks` are `attention`'s: in the line of a score or a mask b
    is the sequence, k a key's place in it, q that of the query, n_k all keys that the sequence has with the new ones; an axis that
    k indexes has room for n keys, as the cache. A query that sees no key gives zeros and a log-sum-exp of -inf.

    `num_splits`, 1 to 256, is the number of parts that a sequence's keys are split into: by default what
    `cupyflash explain --decode` says, from the cache's room and the device alone. The same call gives the same bits; another number
    of splits rounds otherwise.

    Returns O in q's dtype, of q's shape but for d_v; with `return_lse` also L, float32 of shape (b, h, n_q). CuPy arrays run on
    their device and the current stream, nothing is waited for, and a CUDA graph may be replayed with other `cache_seqlens`, pages
    and contents of the same arrays. NumPy arrays run the same kernels on the simulated device.

    On a GPU lengths and pages are not looked at beforehand: a length out of range is taken as 0, or as the most for which the new
    keys have room; a page out of range as the first or the last one. Nothing is written outside the cache. New keys of two
    sequences that share a page overwrite one another. Lengths and pages in lists or NumPy arrays are checked.

    Raises TypeError or ValueError for bad arguments before anything is compiled, launched or written; RuntimeError for NumPy
    arrays that would take the simulated device too long. Where a call fails later, for want of memory or by the device, new keys
    may be in their places already, and nothing else of the caches has changed: the same call again puts that right.
    """
    score = one_score(score, softcap, alibi_slopes)
    captured, numbers = captured_values(score, mask)
    options = Options.asked(causal=causal, window=window, scale=scale, score=None if score is None else score.form)
    options = options if mask is None else replace(options, mask_function=mask.form)
    require_flag("return_lse", return_lse)
    given = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "tree_mask": tree_mask,
        "sinks": sinks,
        "out": out,
        **captured,
    }
    arrays = {name: as_array(name, array) for name, array in given.items() if array is not None or name in REQUIRED}
    integers = {"cache_seqlens": as_integers("cache_seqlens", cache_seqlens)}
    if block_table is not None:
        integers["block_table"] = as_array("block_table", block_table)
    if "tree_mask" in arrays:
        arrays["tree_mask"] = for_all_heads(arrays["tree_mask"])
    gpu, beside = placed(arrays, integers)
    with device_of(gpu, **arrays, **beside):
        call = kept(_prepare, gpu, arrays | integers, options, num_splits, bool(return_lse))
        if gpu:  # of layouts, `kept` could not
            _check_contents(arrays | integers)
        _refuse_shared(arrays, beside)
        inputs = arrays | integers
        inputs |= vectors_on_device(gpu, inputs)
        made = call.launch({TENSORS.get(name, name): array for name, array in inputs.items()}, dict(numbers))
    o = made["O"] if out is None else out
    return (o, made["L"]) if return_lse else o


def _prepare(
    gpu: bool,
    arrays: Mapping[str, Array],
    options: Options,
    num_splits: int | None,
    lse: bool,
) -> Prepared | PreparedSimulation:
    problem, cache = pose(arrays, options)
    device, simulation = target(gpu)
    schedule = plan_decode(problem, device, cache, num_splits=num_splits, lse=lse)
    q = arrays["q"]
    made = {} if "out" in arrays else {"O": Layout.contiguous((*q.shape[:-1], problem.head_dim_v), q.dtype)}
    if lse:
        made["L"] = Layout.contiguous(q.shape[:-1], np.float32)
    by_name = {TENSORS.get(name, name): array for name, array in arrays.items()} | made
    return prepare(schedule, simulation, by_name, made)


def pose(arrays: Mapping[str, Any], options: Options) -> tuple[Problem, Cache]:
    """The problem that `attention_decode`'s arrays by name pose, and its cache; key lengths are NumPy's cache_seqlens.

    Raises what `attention_decode` does of their shapes and types.
    """
    q, k_cache, v_cache = (arrays[name] for name in REQUIRED)
    k, table = arrays.get("k"), arrays.get("block_table")
    operands = {name: arrays[name] for name in ("q", "k_cache", "v_cache", "k", "v", "out") if name in arrays}
    for name, array in operands.items():
        check_operand(name, array, q)
    if q.ndim != 4 or not q.shape[2]:
        raise ValueError(f"q must be (b, h, n_q, d) with a query at least, got shape {q.shape}")
    batch, heads, n_q, d = q.shape
    if k_cache.shape[-1] != d:
        raise ValueError(f"k_cache must have q's head dimension {d}, got shape {k_cache.shape}")
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        raise ValueError(f"v_cache must have k_cache's shape {k_cache.shape} but for the last axis, got {v_cache.shape}")
    d_v = v_cache.shape[-1]
    _check_lengths(batch, arrays["cache_seqlens"])
    if table is None:
        if k_cache.shape[0] != batch:
            raise ValueError(f"k_cache must have q's batch size {batch}, or pages and a block_table, got shape {k_cache.shape}")
        room = k_cache.shape[2]
    else:
        _check_paged(batch, k_cache, table)
        room = table.shape[1] * k_cache.shape[2]
    if (k is None) != (arrays.get("v") is None):
        raise ValueError("k and v must be given together, got one of them")
    if k is not None:
        for name, width in (("k", d), ("v", d_v)):
            expected = (batch, k_cache.shape[1], k.shape[2], width)
            axes = "b, h_kv, n_new, d" if name == "k" else "b, h_kv, n_new, d_v"
            if arrays[name].shape != expected:
                raise ValueError(f"{name} must be ({axes}) = {expected}, got {arrays[name].shape}")
        if k.shape[2] > room:
            raise ValueError(f"k must have at most {room} new keys, the cache's room for each sequence, got {k.shape[2]}")
        for name in ("k_cache", "v_cache"):
            if 0 not in arrays[name].shape and overlaps_itself(arrays[name]):
                strides, shape = arrays[name].strides, arrays[name].shape
                raise ValueError(f"{name} must have a place for every new element, got strides {strides} bytes for shape {shape}")
    if "tree_mask" in arrays:
        check_tree_mask(batch, n_q, arrays["tree_mask"])
    if "sinks" in arrays:
        check_sinks(q, arrays["sinks"])
    if "out" in arrays:
        check_out(arrays["out"], (*q.shape[:-1], d_v))
    _check_contents(arrays)
    lengths = arrays["cache_seqlens"]
    known = tuple(lengths.tolist()) if isinstance(lengths, np.ndarray) else None
    problem = Problem(
        batch,
        heads,
        k_cache.shape[1],
        n_q,
        room,
        d,
        str(q.dtype),
        options,
        d_v,
        min(row_alignment(array) for array in operands.values()),
        padded=True,
        key_lengths=known,
        sinks="sinks" in arrays,
    )
    check_captured(problem, captured_among(arrays))
    paged = {} if table is None else {"page_size": k_cache.shape[2], "pages": k_cache.shape[0]}
    return problem, Cache(0 if k is None else k.shape[2], tree="tree_mask" in arrays, **paged)


def _check_lengths(batch: int, lengths: Array) -> None:
    check_array("cache_seqlens", lengths)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"cache_seqlens must be of an integer dtype, got {lengths.dtype}")
    if lengths.shape != (batch,):
        raise ValueError(f"cache_seqlens must have shape {(batch,)}, a length for each of the batch, got {lengths.shape}")


def check_table(batch: int, table: Array) -> None:
    """TypeError or ValueError for a block table of another type or batch."""
    check_array("block_table", table)
    if table.dtype != np.int32:
        raise TypeError(f"block_table must be of dtype int32, got {table.dtype}")
    if table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table must be (b, pages of a sequence) with b = {batch}, got shape {table.shape}")


def _check_paged(batch: int, k_cache: Array, table: Array) -> None:
    check_table(batch, table)
    if not k_cache.shape[0]:
        raise ValueError(f"k_cache must have a page at least, got shape {k_cache.shape}")
    if not k_cache.shape[2] or k_cache.shape[2] % PAGE_STEP:
        what = f"(pages, h_kv, page_size, d) with a page_size that is a multiple of {PAGE_STEP}"
        raise ValueError(f"k_cache must be {what}, got shape {k_cache.shape}")


def for_all_heads(tree: Any) -> Any:
    """A tree mask of (b, n_q, n_q) as (b, 1, n_q, n_q); others as they are."""
    return tree[:, None] if getattr(tree, "ndim", 0) == 3 else tree


def check_tree_mask(batch: int, n_q: int, tree: Array) -> None:
    """TypeError or ValueError for one `for_all_heads` of another type or shape."""
    check_array("tree_mask", tree)
    if tree.dtype != np.bool_:
        raise TypeError(f"tree_mask must be of dtype bool, got {tree.dtype}")
    if tree.shape not in ((n_q, n_q), (batch, 1, n_q, n_q)):
        given = tree.shape if tree.ndim != 4 else (tree.shape[0], *tree.shape[2:])
        raise ValueError(f"tree_mask must be (n_q, n_q) = {(n_q, n_q)} or (b, n_q, n_q), got shape {given}")


def _check_contents(arrays: Mapping[str, Any]) -> None:
    """ValueError for lengths and pages that are on the host, where they can be looked at, and that the cache does not have."""
    lengths, table, k_cache, k = (arrays.get(name) for name in ("cache_seqlens", "block_table", "k_cache", "k"))
    assert lengths is not None and k_cache is not None
    if not isinstance(lengths, np.ndarray):
        return
    page = k_cache.shape[2]
    room = page if table is None else page * table.shape[1]
    added = 0 if k is None else k.shape[2]
    for length in lengths.tolist():
        if not 0 <= length <= room - added:
            new = f" less the {added} new ones" if added else ""
            raise ValueError(f"cache_seqlens must be between 0 and {room - added}, what the cache has room for{new}, got {length}")
    if isinstance(table, np.ndarray):
        check_pages(table, lengths.tolist(), added, page, k_cache.shape[0])


def check_pages(table: np.ndarray, lengths: Sequence[int], added: int, page: int, pages: int) -> None:
    """ValueError for a page that a cache of so many, of `page` keys each, does not have, where sequences have `lengths` keys and
    `added` ones behind them; and where those would go to a page that is used twice."""
    used = [table[b, : -(-(length + added) // page)] for b, length in enumerate(lengths)]
    for b, own in enumerate(used):
        bad = own[(own < 0) | (own >= pages)]
        if bad.size:
            raise ValueError(f"block_table must be pages from 0 to {pages - 1}, got {bad[0]} for sequence {b}")
    if added and used:
        _check_own_pages(used, [length // page for length in lengths])


def _check_own_pages(used: Sequence[np.ndarray], cached: Sequence[int]) -> None:
    """ValueError where new keys, which go to a sequence's pages behind so many, would go to one that is used twice."""
    pages, uses = np.unique(np.concatenate(used), return_counts=True)
    for b, (own, whole) in enumerate(zip(used, cached, strict=True)):
        shared = np.intersect1d(own[whole:], pages[uses > 1])
        if shared.size:
            raise ValueError(f"block_table must give new keys a page of their own, got page {shared[0]} of sequence {b} twice")


def _refuse_shared(arrays: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
    """ValueError where what is written, O and with new keys the caches, cannot be or is something else's memory."""
    written = [name for name in (("k_cache", "v_cache", "out") if "k" in arrays else ("out",)) if name in arrays]
    for name in written:
        if isinstance(arrays[name], np.ndarray) and not arrays[name].flags.writeable:
            raise ValueError(f"{name} must be writeable, got a read-only array")
    if written:
        refuse_overlap({**arrays, **beside}, *written)
