"""The call for batches of sequences of different lengths, packed one behind the other."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np

from cupyflash.attention import compute
from cupyflash.binding import Masks
from cupyflash.dispatch import as_array, device_of, on_gpu, refuse_overlap, target
from cupyflash.problem import MAX_LENGTH, Array, Problem, Window
from cupyflash.schedules import plan_varlen
from cupyflash.tiling import TilingChoice


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    tiling: TilingChoice = None,
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """O = softmax(scale Q K^T) V of each sequence of a batch without padding, by FlashAttention-2; as `attention` otherwise.

    Shapes: q (total_q, h, d), k (total_k, h_kv, d), v (total_k, h_kv, d_v). Sequence b has the rows cu_seqlens_q[b] to
    cu_seqlens_q[b + 1] - 1 of q, and those of k and v that cu_seqlens_k says: both are int32 of shape (b + 1,), begin with 0,
    do not decrease, and end with total_q and total_k. `causal` and `window` are aligned bottom-right in each sequence.
    A sequence may have no queries, or no keys: its rows are then zeros with a log-sum-exp of -inf.

    `max_seqlen_q` and `max_seqlen_k` are the lengths of the longest sequences, or more. Without them the bounds are looked at;
    where those are on a GPU that waits for the GPU, so pass both there, or pass the bounds as NumPy arrays. What is not looked
    at is taken as given: bounds on a GPU, beside which max_seqlen is given, must be right, or the result and what is read and
    written are undefined.

    Returns O in q's dtype, of shape (total_q, h, d_v); with `return_lse` also L, float32 of shape (h, total_q), as
    flash-attention's `flash_attn_varlen_func` lays it out. Raises as `attention` does.
    """
    if type(return_lse).__name__ not in ("bool", "bool_"):
        raise TypeError(f"return_lse must be True or False, got {return_lse!r}")
    inputs = {name: as_array(name, array) for name, array in (("q", q), ("k", k), ("v", v))}
    arrays = inputs if out is None else inputs | {"out": as_array("out", out)}
    bounds = {name: as_array(name, array) for name, array in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))}
    gpu = on_gpu(**arrays)
    # Bounds may stay behind on the host, where they can be looked at.
    beside = {name: array for name, array in bounds.items() if not (gpu and isinstance(array, np.ndarray))}
    on_gpu(**arrays, **beside)
    with device_of(gpu, **arrays, **beside):
        problem, seqlens = pose(
            **arrays, **bounds, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window=window, scale=scale
        )
        device, simulation = target(gpu)
        schedule = plan_varlen(problem, device, seqlens, tiling, lse=bool(return_lse))
        schedule.kernels()  # refuses what no kernel runs, before anything is allocated
        if out is not None:
            if not gpu and not arrays["out"].flags.writeable:
                raise ValueError("out must be writeable, got a read-only array")
            refuse_overlap(arrays["out"], **inputs, **beside)
        xp = sys.modules["cupy"] if gpu else np
        if out is None:
            out = arrays["out"] = xp.empty((*inputs["q"].shape[:-1], inputs["v"].shape[-1]), dtype=inputs["q"].dtype)
        lse = xp.empty((problem.heads, len(inputs["q"])), dtype=np.float32) if schedule.lse else None
        masks = Masks(**{name: xp.asarray(array, np.int32, order="C") for name, array in bounds.items()})
        views = {name: heads_first(array) for name, array in arrays.items()}
        compute(schedule, simulation, **views, lse=lse, masks=masks)
    return (out, lse) if schedule.lse else out


def heads_first(array: Any) -> Any:
    """(total, h, d) as the kernels' (h, total, d), a view."""
    return array.swapaxes(0, 1)


def pose(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    out: Any | None = None,
) -> tuple[Problem, tuple[tuple[int, int], ...] | None]:
    """The problem of the longest sequence, as often as there are sequences, and the (queries, keys) of each.

    The second is None where the bounds are on a GPU and need not be looked at. Arguments are `attention_varlen`'s, and so is
    what this raises.
    """
    _check_shapes(q, k, v, out)
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens.dtype != np.int32:
            raise TypeError(f"{name} must be of dtype int32, got {cu_seqlens.dtype}")
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"{name} must have shape (b + 1,), a bound more than there are sequences, got {cu_seqlens.shape}")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(f"cu_seqlens_k must have cu_seqlens_q's shape {cu_seqlens_q.shape}, got {cu_seqlens_k.shape}")
    arrays = {name: heads_first(array) for name, array in (("q", q), ("k", k), ("v", v), ("out", out)) if array is not None}
    problem = Problem.from_arrays(**arrays, causal=causal, window=window, scale=scale)
    queries, longest_q = _lengths("q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    keys, longest_k = _lengths("k", cu_seqlens_k, k.shape[0], max_seqlen_k)
    problem = replace(problem, batch=cu_seqlens_q.shape[0] - 1, seqlen_q=longest_q, seqlen_k=longest_k, packed=True)
    return problem, None if queries is None or keys is None else tuple(zip(queries, keys, strict=True))


def _check_shapes(q: Array, k: Array, v: Array, out: Array | None) -> None:
    """What `Problem.from_arrays` would say of other axes."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 3:
            raise ValueError(f"{name} must be (total, h, d), got shape {array.shape}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's head dimension {q.shape[-1]}, got shape {k.shape}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v must have k's shape {k.shape} but for the last axis, got {v.shape}")
    if out is not None and out.shape != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(f"out must have shape {(*q.shape[:-1], v.shape[-1])}, got {out.shape}")


def _lengths(side: str, cu_seqlens: Any, total: int, longest: int | None) -> tuple[tuple[int, ...] | None, int]:
    """The lengths of the sequences, None where they are on a GPU and `longest` is given; and the longest."""
    if longest is not None:
        if isinstance(longest, bool) or not isinstance(longest, Integral):
            raise TypeError(f"max_seqlen_{side} must be an integer or None, got {longest!r}")
        if not 0 <= longest <= MAX_LENGTH:
            raise ValueError(f"max_seqlen_{side} must be between 0 and {MAX_LENGTH:,}, got {longest}")
        if not isinstance(cu_seqlens, np.ndarray):
            return None, int(longest)
    found = cu_seqlens.tolist()  # from a GPU, this waits
    lengths = tuple(end - begin for begin, end in pairwise(found))
    if found[0] != 0 or found[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens_{side} must begin with 0, not decrease, and end with {total}, the length of {side}, "
            f"got {_shortened(found)}"
        )
    if longest is not None and longest < max(lengths, default=0):
        raise ValueError(f"max_seqlen_{side} must be at least the longest sequence's {max(lengths)}, got {longest}")
    return lengths, max(lengths, default=0) if longest is None else int(longest)


def _shortened(numbers: list[int]) -> str:
    """A list in one line."""
    return str(numbers) if len(numbers) <= 12 else f"[{', '.join(map(str, numbers[:6]))}, ..., {', '.join(map(str, numbers[-3:]))}]"
