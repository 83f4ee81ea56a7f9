"""Generating: a few new queries of each sequence against its cache of keys and values; the problem that they pose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupyflash.arrays import (
    AnyArray,
    check_array,
    check_keys,
    check_operand,
    require_dtype,
    require_integers,
    require_places,
    row_alignment,
)
from cupyflash.basics import Array, Values
from cupyflash.request.options import VECTORS, Options
from cupyflash.request.problem import Problem, check_out, check_vectors, require_lengths
from cupyflash.request.score import captured_among, check_captured
from cupyflash.schedules import Cache
from cupyflash.schedules.decode import PAGE_STEP

REQUIRED = ("q", "k_cache", "v_cache")


def pose(arrays: Values, options: Options) -> tuple[Problem, Cache]:
    """The problem of `attention_decode`'s arrays, by name, and its cache; key lengths are NumPy's cache_seqlens.

    Raises the errors of `attention_decode` about shapes and types.
    """
    q, k_cache, v_cache = (arrays[name] for name in REQUIRED)
    k, table = arrays.get("k"), arrays.get("block_table")
    operands = {name: arrays[name] for name in ("q", "k_cache", "v_cache", "k", "v", "out") if name in arrays}
    for name, array in operands.items():
        check_operand(name, array, q)
    if q.ndim != 4 or not q.shape[2]:
        raise ValueError(f"q must be (b, h, n_q, d) with at least one query, got shape {q.shape}")
    batch, heads, n_q, d = q.shape
    check_keys(q, k_cache, v_cache, ("k_cache", "v_cache"))
    d_v = v_cache.shape[-1]
    require_lengths("cache_seqlens", arrays["cache_seqlens"], batch)
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
        for name, axis, width in (("k", "d", d), ("v", "d_v", d_v)):
            expected = (batch, k_cache.shape[1], k.shape[2], width)
            if arrays[name].shape != expected:
                raise ValueError(f"{name} must be (b, h_kv, n_new, {axis}) = {expected}, got {arrays[name].shape}")
        if k.shape[2] > room:
            raise ValueError(f"k must have at most {room} new keys, the cache's room for each sequence, got {k.shape[2]}")
        for name in ("k_cache", "v_cache"):
            require_places(name, arrays[name], "new element")
    if "tree_mask" in arrays:
        check_tree_mask(batch, n_q, arrays["tree_mask"])
    check_vectors(q, arrays)
    if "out" in arrays:
        check_out(arrays["out"], (*q.shape[:-1], d_v))
    check_contents(arrays)
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
        **{name: name in arrays for name in VECTORS},
    )
    check_captured(problem, captured_among(arrays))
    paged = {} if table is None else {"page_size": k_cache.shape[2], "pages": k_cache.shape[0]}
    return problem, Cache(0 if k is None else k.shape[2], tree="tree_mask" in arrays, **paged)


def check_table(batch: int, table: AnyArray) -> None:
    """TypeError or ValueError for a block table of another type or batch."""
    check_array("block_table", table)
    require_integers("block_table", table)
    if table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table must be (b, pages of a sequence) with b = {batch}, got shape {table.shape}")


def _check_paged(batch: int, k_cache: AnyArray, table: AnyArray) -> None:
    check_table(batch, table)
    if not k_cache.shape[0]:
        raise ValueError(f"k_cache must have at least one page, got shape {k_cache.shape}")
    if not k_cache.shape[2] or k_cache.shape[2] % PAGE_STEP:
        what = f"(pages, h_kv, page_size, d) with a page_size that is a multiple of {PAGE_STEP}"
        raise ValueError(f"k_cache must be {what}, got shape {k_cache.shape}")


def for_all_heads(tree: Any) -> Any:
    """A tree mask of (b, n_q, n_q) as (b, 1, n_q, n_q); others as they are."""
    return tree[:, None] if getattr(tree, "ndim", 0) == 3 else tree


def check_tree_mask(batch: int, n_q: int, tree: AnyArray) -> None:
    """TypeError or ValueError for one `for_all_heads` of another type or shape."""
    check_array("tree_mask", tree)
    require_dtype("tree_mask", tree, np.bool_)
    if tree.shape not in ((n_q, n_q), (batch, 1, n_q, n_q)):
        given = tree.shape if tree.ndim != 4 else (tree.shape[0], *tree.shape[2:])
        raise ValueError(f"tree_mask must be (n_q, n_q) = {(n_q, n_q)} or (b, n_q, n_q), got shape {given}")


def check_contents(arrays: Values) -> None:
    """ValueError for lengths and pages on the host, where they can be checked, that the cache does not have."""
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
            raise ValueError(f"cache_seqlens must be between 0 and {room - added}, the cache's room{new}, got {length}")
    if isinstance(table, np.ndarray):
        check_pages(table, lengths.tolist(), added, page, k_cache.shape[0])


def check_pages(table: Array, lengths: Sequence[int], added: int, page: int, pages: int) -> None:
    """ValueError for a page that a cache of `pages` pages, of `page` keys each, does not have, if sequences have `lengths` keys and
    `added` ones after them; and if the added ones would go to a page that is used twice."""
    used = [table[b, : -(-(length + added) // page)] for b, length in enumerate(lengths)]
    for b, own in enumerate(used):
        bad = own[(own < 0) | (own >= pages)]
        if bad.size:
            raise ValueError(f"block_table must be pages from 0 to {pages - 1}, got {bad[0]} for sequence {b}")
    if added and used:
        _check_own_pages(used, [length // page for length in lengths])


def _check_own_pages(used: Sequence[Array], cached: Sequence[int]) -> None:
    """ValueError if new keys, which follow a sequence's keys in its pages, would go to a page that is used twice."""
    pages, uses = np.unique(np.concatenate(used), return_counts=True)
    for b, (own, whole) in enumerate(zip(used, cached, strict=True)):
        shared = np.intersect1d(own[whole:], pages[uses > 1])
        if shared.size:
            raise ValueError(f"block_table must give new keys a page of their own, got page {shared[0]} of sequence {b} twice")
