"""The backward call: gradients of attention, of CuPy arrays on the GPU or of NumPy arrays on the simulated device."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cupyflash import varlen
from cupyflash.attention import attention
from cupyflash.binding import Masks
from cupyflash.dispatch import as_array, device_of, on_gpu, target
from cupyflash.launcher import Prepared, as_contiguous, prepare_gradients, prepared
from cupyflash.problem import Array, Layout, Problem, Window, check_operand, row_alignment
from cupyflash.schedules import BACKWARD_ALGORITHMS, plan_backward, plan_varlen_backward
from cupyflash.simulated import PreparedSimulation
from cupyflash.tiling import TilingChoice


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any | None = None,
    bias: Any | None = None,
    key_lengths: Any | None = None,
    block_mask: Any | None = None,
    scale: float | None = None,
    algorithm: str = "auto",
    tiling: TilingChoice = None,
    deterministic: bool = False,
    return_dbias: bool = False,
) -> tuple[Any, ...]:
    """dq, dk and dv: what `attention`'s inputs do to sum(dout * O), without a matrix of n_q x n_k in memory.

    `out` and `lse` are what `attention(q, k, v, ..., return_lse=True)` returned; `dout` is the gradient of out, of its shape and
    dtype and contiguous along its last axis. All else as for `attention`, and with the values of that call. S and P are computed
    again, from L. Query heads that share a key head add up in its dk and dv; a row that sees no key has a gradient of zero, and
    so has a key that no row sees.

    `algorithm`: "fa2" (FlashAttention-2), or "auto", which is "fa2". It sums dq by atomics, in float32 and in no order;
    `deterministic` takes a kernel of its own for dq instead, which gives the same bits each time.

    Returns arrays of q's dtype on q's device, of the shapes of q, k and v; with `return_dbias` also the bias's gradient, of its
    shape ("fa2"; what is broadcast adds up, by atomics, which `deterministic` refuses). Raises as `attention` does.
    """
    if algorithm not in ("auto", *BACKWARD_ALGORITHMS):
        raise ValueError(f"algorithm must be one of auto, {', '.join(BACKWARD_ALGORITHMS)}, got {algorithm!r}")
    for name, flag in (("deterministic", deterministic), ("return_dbias", return_dbias)):
        if type(flag).__name__ not in ("bool", "bool_"):
            raise TypeError(f"{name} must be True or False, got {flag!r}")
    if return_dbias and bias is None:
        raise ValueError("return_dbias is for a call with a bias, and there is none")
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    masks = {"mask": mask, "bias": bias, "key_lengths": key_lengths, "block_mask": block_mask}
    given |= {name: array for name, array in masks.items() if array is not None}
    arrays = {name: as_array(name, array) for name, array in given.items()}
    gpu = on_gpu(**arrays)
    chosen = "fa2" if algorithm == "auto" else algorithm
    with device_of(gpu, **arrays):
        call = prepared(_prepare, gpu, arrays, causal, window, scale, chosen, tiling, bool(deterministic), bool(return_dbias))
        arrays["lse"] = as_contiguous(gpu, arrays["lse"], np.float32)
        if key_lengths is not None:
            arrays["key_lengths"] = as_contiguous(gpu, arrays["key_lengths"], np.int32)
        if return_dbias:  # a sum
            arrays["dbias"] = (sys.modules["cupy"] if gpu else np).zeros(arrays["bias"].shape, np.float32)
        made = call.launch(arrays | {tensor: arrays[name] for tensor, name in TENSORS.items()})
    gradients = (made["dQ"], made["dK"], made["dV"])
    return (*gradients, arrays["dbias"].astype(arrays["q"].dtype)) if return_dbias else gradients


# The kernels' names for the arrays of a call
TENSORS = {"Q": "q", "K": "k", "V": "v", "O": "out", "L": "lse", "dO": "dout"}


def _prepare(
    gpu: bool,
    arrays: Mapping[str, Array],
    causal: bool,
    window: Window | None,
    scale: float | None,
    algorithm: str,
    tiling: TilingChoice,
    deterministic: bool,
    dbias: bool,
) -> Prepared | PreparedSimulation:
    q, out, dout, bias = (arrays.get(name) for name in ("q", "out", "dout", "bias"))
    posed = {name: array for name, array in arrays.items() if name not in ("dout", "lse")}
    problem = Problem.from_arrays(**posed, causal=causal, window=window, scale=scale)
    _check_beside(dout, q, out, arrays["lse"], arrays["q"].shape[:-1])
    problem = replace(problem, alignment=min(problem.alignment, row_alignment(dout)))
    device, simulation = target(gpu)
    schedule = plan_backward(problem, device, algorithm, tiling, deterministic=deterministic, dbias=dbias)
    tensors: dict[str, Any] = {tensor: arrays[name] for tensor, name in TENSORS.items()}
    made = _made(tensors)
    if dbias:
        if deterministic and not _spans(bias, problem):
            raise ValueError(f"deterministic has no sum over what a bias is broadcast along, got shape {arrays['bias'].shape}")
        tensors["dbias"] = Layout.contiguous(arrays["bias"].shape, np.float32)
    masks = Masks(**{name: arrays.get(name) for name in ("mask", "bias", "key_lengths", "block_mask")})
    return prepare_gradients(schedule, simulation, tensors | made, masks, made)


def _made(tensors: Mapping[str, Array]) -> dict[str, Layout]:
    """The gradients, which a call allocates."""
    return {f"d{name}": Layout.contiguous(tensors[name].shape, tensors[name].dtype) for name in "QKV"}


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
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    tiling: TilingChoice = None,
    deterministic: bool = False,
) -> tuple[Any, Any, Any]:
    """dq, dk and dv of `attention_varlen`, whose out and lse these are; shapes as there, dout as out. Else as `attention_backward`.

    On a GPU pass both `max_seqlen`, or the bounds as NumPy arrays, as there.
    """
    if type(deterministic).__name__ not in ("bool", "bool_"):
        raise TypeError(f"deterministic must be True or False, got {deterministic!r}")
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays = {name: as_array(name, array) for name, array in given.items()}
    bounds = {name: as_array(name, array) for name, array in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))}
    gpu = on_gpu(**arrays)
    beside = {name: array for name, array in bounds.items() if not (gpu and isinstance(array, np.ndarray))}
    on_gpu(**arrays, **beside)
    every = {**arrays, **bounds}
    with device_of(gpu, **arrays, **beside):
        prepared(_posed, gpu, every, causal, window, scale)  # refuses what is no use looking at
        seqlens, longest = varlen.sequences(bounds, len(arrays["q"]), len(arrays["k"]), max_seqlen_q, max_seqlen_k)
        counted = None if gpu else seqlens
        call = prepared(_prepare_varlen, gpu, every, counted, *longest, causal, window, scale, tiling, bool(deterministic))
        arrays["lse"] = as_contiguous(gpu, arrays["lse"], np.float32)
        on_device = {name: as_contiguous(gpu, array, np.int32) for name, array in bounds.items()}
        made = call.launch(on_device | {tensor: arrays[name] for tensor, name in TENSORS.items()})
    return made["dQ"], made["dK"], made["dV"]


def _posed(gpu: bool, arrays: Mapping[str, Any], causal: bool, window: Window | None, scale: float | None) -> Problem:
    """As many sequences as there are, of lengths that are yet to be looked at."""
    forward = {name: array for name, array in arrays.items() if name not in ("dout", "lse")}
    problem = varlen.posed(gpu, forward, causal, window, scale)
    dout, q, out, lse = (arrays[name] for name in ("dout", "q", "out", "lse"))
    _check_beside(dout, q, out, lse, q.shape[1::-1])
    return replace(problem, alignment=min(problem.alignment, row_alignment(varlen.heads_first(dout))))


def _prepare_varlen(
    gpu: bool,
    arrays: Mapping[str, Array],
    seqlens: tuple[tuple[int, int], ...] | None,
    longest_q: int,
    longest_k: int,
    causal: bool,
    window: Window | None,
    scale: float | None,
    tiling: TilingChoice,
    deterministic: bool,
) -> Prepared | PreparedSimulation:
    problem = replace(_posed(gpu, arrays, causal, window, scale), seqlen_q=longest_q, seqlen_k=longest_k)
    device, simulation = target(gpu)
    total = arrays["q"].shape[0]
    schedule = plan_varlen_backward(problem, device, total, seqlens, tiling, deterministic=deterministic)
    tensors: dict[str, Any] = {tensor: arrays[name] for tensor, name in TENSORS.items()}
    made = _made(tensors)
    views = {name: array if name == "L" else varlen.heads_first(array) for name, array in (tensors | made).items()}
    masks = Masks(**{name: arrays[name] for name in varlen.BOUNDS})
    return prepare_gradients(schedule, simulation, views, masks, made)


def _check_beside(dout: Any, q: Any, out: Any, lse: Any, rows: tuple[int, ...]) -> None:
    """TypeError or ValueError for a `dout` or `lse` that does not go with q and out."""
    check_operand("dout", dout, q)
    if dout.shape != out.shape:
        raise ValueError(f"dout must have out's shape {out.shape}, got {dout.shape}")
    if lse.dtype != np.float32:
        raise TypeError(f"lse must be of dtype float32, got {lse.dtype}")
    if lse.shape != rows:
        raise ValueError(f"lse must have shape {rows}, got {lse.shape}")


def _spans(bias: Any, problem: Problem) -> bool:
    """Whether a bias has an element of its own for every score."""
    whole = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return math.prod(bias.shape) == math.prod(whole) and all(bias.strides[n] for n, size in enumerate(bias.shape) if size > 1)


def attention_vjp(
    q: Any, k: Any, v: Any, *, deterministic: bool = False, return_dbias: bool = False, **options: Any
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """`attention(q, k, v, **options)` and its pullback, which takes dout and returns (dq, dk, dv), with `return_dbias` also dbias.

    The pullback holds q, k, v, out and the log-sum-exps, 4 bytes a row; it may be called as often as one likes. `options` are
    those of `attention`, but for `return_lse` and `out`. Raises as `attention` does.
    """
    if unknown := {"return_lse", "out"} & set(options):
        raise TypeError(f"attention_vjp has no {unknown.pop()}")
    out, lse = attention(q, k, v, return_lse=True, **options)

    def pullback(dout: Any) -> tuple[Any, ...]:
        return attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, return_dbias=return_dbias, **options)

    return out, pullback
