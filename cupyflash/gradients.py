"""The backward call: gradients of attention, of CuPy arrays on the GPU or of NumPy arrays on the simulated device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cupyflash import varlen
from cupyflash.attention import attention
from cupyflash.binding import Masks
from cupyflash.device import Device
from cupyflash.dispatch import as_array, as_integers, device_of, placed, target
from cupyflash.launcher import (
    Prepared,
    as_contiguous,
    hold_for_graph,
    integers_on_device,
    lengths_on_device,
    prepare_gradients,
    prepared,
    zeros,
)
from cupyflash.problem import (
    Array,
    Layout,
    Problem,
    Window,
    check_array,
    check_operand,
    last_axis_contiguous,
    require_choice,
    require_flag,
    row_alignment,
)
from cupyflash.schedules import BACKWARD_ALGORITHMS, BackwardSchedule, plan_backward, plan_varlen_backward
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
    dtype; where its last axis is not contiguous, as in `broadcast_to(1, out.shape)`, the gradient of `out.sum()`, it is copied.
    All else as for `attention`, and with the values of that call. S and P are computed again, from L. Query heads that share a
    key head add up in its dk and dv; a row that sees no key has a gradient of zero, and so has a key that no row sees. A NaN or
    an infinity in a masked row of k or v makes the dq of rows that share a tile with it NaN, being multiplied by a weight of zero;
    what is behind `key_lengths` is not read. Rows whose L is beyond 4096 take "fa2" longer: it goes through their scores once more,
    where the other two take P from what float32 leaves of L.

    `algorithm`: "fa2" (FlashAttention-2), or "auto", which is "fa2". It sums dq by atomics, in float32 and in no order;
    `deterministic` takes a kernel of its own for dq instead, which gives the same bits each time. "fa1" (FlashAttention's
    Algorithm 4) and "standard" (Algorithm 3, three matrices of n_q x n_k in memory) are here to be measured; they give the same
    bits each time as they are.

    Returns arrays of q's dtype on q's device, of the shapes of q, k and v; with `return_dbias` also the bias's gradient, of its
    shape ("fa2"; what is broadcast adds up, by atomics, which `deterministic` refuses). Raises as `attention` does.
    """
    _check_choices(algorithm, bias, deterministic=deterministic, return_dbias=return_dbias)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    masks = {"mask": mask, "bias": bias, "block_mask": block_mask}
    given |= {name: array for name, array in masks.items() if array is not None}
    arrays = {name: as_array(name, array) for name, array in given.items()}
    lengths = {} if key_lengths is None else {"key_lengths": as_integers("key_lengths", key_lengths)}
    gpu, beside = placed(arrays, lengths)
    with device_of(gpu, **arrays, **beside):
        options = causal, window, scale, algorithm, tiling, bool(deterministic), bool(return_dbias)
        call = prepared(_prepare, gpu, _readable(arrays | lengths), *options)
        arrays |= lengths_on_device(gpu, lengths, arrays["k"].shape[-2])
        arrays |= _beside(gpu, arrays)
        if return_dbias:
            arrays["dbias"] = zeros(gpu, arrays["bias"].shape, np.float32)
        made = call.launch(arrays | {tensor: arrays[name] for tensor, name in TENSORS.items()})
    gradients = (made["dQ"], made["dK"], made["dV"])
    return (*gradients, arrays["dbias"].astype(arrays["q"].dtype)) if return_dbias else gradients


# The kernels' names for the arrays of a call
TENSORS = {"Q": "q", "K": "k", "V": "v", "O": "out", "L": "lse", "dO": "dout"}
MASKS = ("mask", "bias", "key_lengths", "block_mask")


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
    problem = Problem.from_arrays(**_inputs(arrays), causal=causal, window=window, scale=scale)
    alignment = check_beside(arrays, arrays["q"].shape[:-1])
    problem = replace(problem, alignment=min(problem.alignment, alignment))
    device, simulation = target(gpu)
    schedule = _planned(problem, device, algorithm, tiling, deterministic, arrays["bias"] if dbias else None)
    tensors: dict[str, Any] = {tensor: arrays[name] for tensor, name in TENSORS.items()}
    made = _made(tensors)
    if dbias:
        tensors["dbias"] = Layout.contiguous(arrays["bias"].shape, np.float32)
    masks = Masks(**{name: arrays.get(name) for name in MASKS})
    return prepare_gradients(schedule, simulation, tensors | made, masks, made)


def _readable(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays as the kernels get them: of a dout that they cannot read, the layout of its copy."""
    dout = arrays["dout"]
    return arrays if last_axis_contiguous(dout) else arrays | {"dout": Layout.contiguous(dout.shape, dout.dtype)}


def _beside(gpu: bool, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """lse without strides, and a dout that kernels can read: a broadcast gradient, of `out.sum()` say, has none of its own."""
    dout = arrays["dout"]
    if not last_axis_contiguous(dout):
        dout = as_contiguous(gpu, dout, dout.dtype)
    return {"lse": as_contiguous(gpu, arrays["lse"], np.float32), "dout": dout}


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
    require_flag("deterministic", deterministic)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays = {name: as_array(name, array) for name, array in given.items()}
    gpu, bounds, beside = varlen.bounds_of(arrays, cu_seqlens_q, cu_seqlens_k)
    with device_of(gpu, **arrays, **beside):
        options = causal, window, scale, tiling, bool(deterministic)
        longest = max_seqlen_q, max_seqlen_k
        call = varlen.prepared_sequences(_posed, _prepare_varlen, gpu, _readable(arrays), bounds, longest, *options)
        on_device = integers_on_device(gpu, bounds)
        arrays |= _beside(gpu, arrays)
        made = call.launch(on_device | {tensor: arrays[name] for tensor, name in TENSORS.items()})
    return made["dQ"], made["dK"], made["dV"]


def _posed(gpu: bool, arrays: Mapping[str, Any], causal: bool, window: Window | None, scale: float | None) -> Problem:
    """As many sequences as there are, of lengths that are yet to be looked at."""
    problem = varlen.posed(gpu, _inputs(arrays), causal, window, scale)
    alignment = check_beside(arrays, arrays["q"].shape[1::-1])
    return replace(problem, alignment=min(problem.alignment, alignment))


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
    totals = arrays["q"].shape[0], arrays["k"].shape[0]
    schedule = plan_varlen_backward(problem, device, seqlens, tiling, deterministic=deterministic, totals=totals)
    tensors: dict[str, Any] = {tensor: arrays[name] for tensor, name in TENSORS.items()}
    made = _made(tensors)
    views = {name: array if name == "L" else varlen.heads_first(array) for name, array in (tensors | made).items()}
    masks = Masks(**{name: arrays[name] for name in varlen.BOUNDS})
    return prepare_gradients(schedule, simulation, views, masks, made)


def _inputs(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What the forward is given: without what it returned and the gradient."""
    return {name: array for name, array in arrays.items() if name not in ("dout", "out", "lse")}


def check_beside(arrays: Mapping[str, Any], rows: tuple[int, ...]) -> int:
    """TypeError or ValueError for a dout, out or lse that does not go with the others; the alignment of the first two's rows."""
    q, v, lse = (arrays[name] for name in ("q", "v", "lse"))
    check_array("lse", lse)
    for name in ("out", "dout"):
        check_operand(name, arrays[name], q)
        if arrays[name].shape != (*q.shape[:-1], v.shape[-1]):
            raise ValueError(f"{name} must have shape {(*q.shape[:-1], v.shape[-1])}, got {arrays[name].shape}")
    if lse.dtype != np.float32:
        raise TypeError(f"lse must be of dtype float32, got {lse.dtype}")
    if lse.shape != rows:
        raise ValueError(f"lse must have shape {rows}, got {lse.shape}")
    return min(row_alignment(arrays[name]) for name in ("out", "dout"))


def _spans(bias: Any, problem: Problem) -> bool:
    """Whether a bias has an element of its own for every score."""
    whole = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return math.prod(bias.shape) == math.prod(whole) and all(bias.strides[n] for n, size in enumerate(bias.shape) if size > 1)


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    algorithm: str = "auto",
    tiling: TilingChoice = None,
    deterministic: bool = False,
    return_dbias: bool = False,
    **options: Any,
) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """`attention(q, k, v, ...)` and its pullback, which takes dout and returns (dq, dk, dv), with `return_dbias` also dbias.

    The pullback holds q, k, v, out and the log-sum-exps, 4 bytes a row; it may be called as often as one likes. `algorithm` and
    `tiling` are those of both passes; `options` are `attention`'s, but for `return_lse` and `out`. Raises as `attention` and
    `attention_backward` do, for both before anything is computed.
    """
    if unknown := {"return_lse", "out"} & set(options):
        raise TypeError(f"attention_vjp has no {unknown.pop()}")
    _check_choices(algorithm, options.get("bias"), deterministic=deterministic, return_dbias=return_dbias)
    given = {"q": q, "k": k, "v": v} | {name: options[name] for name in MASKS if options.get(name) is not None}
    lengths = {name: as_integers(name, given.pop(name)) for name in ("key_lengths",) if name in given}
    arrays = {name: as_array(name, array) for name, array in given.items()}
    gpu, beside = placed(arrays, lengths)
    with device_of(gpu, **arrays, **beside):
        posed = options.get("causal", False), options.get("window"), options.get("scale")
        prepared(_check_planned, gpu, arrays | lengths, *posed, algorithm, tiling, bool(deterministic), bool(return_dbias))
        out, lse = attention(q, k, v, algorithm=algorithm, tiling=tiling, return_lse=True, **options)
        if gpu:
            hold_for_graph(lse)  # which nobody but the pullback has
    options |= {"algorithm": algorithm, "tiling": tiling, "deterministic": deterministic, "return_dbias": return_dbias}

    def pullback(dout: Any) -> tuple[Any, ...]:
        return attention_backward(dout, q, k, v, out, lse, **options)

    return out, pullback


def _check_planned(
    gpu: bool,
    arrays: Mapping[str, Array],
    causal: bool,
    window: Window | None,
    scale: float | None,
    algorithm: str,
    tiling: TilingChoice,
    deterministic: bool,
    dbias: bool,
) -> None:
    """Refuses what no backward kernel runs."""
    problem = Problem.from_arrays(**arrays, causal=causal, window=window, scale=scale)
    _planned(problem, target(gpu)[0], algorithm, tiling, deterministic, arrays["bias"] if dbias else None).kernels()


def _planned(
    problem: Problem, device: Device, algorithm: str, tiling: TilingChoice, deterministic: bool, bias: Any | None
) -> BackwardSchedule:
    """The schedule, with the gradient of `bias` if there is one."""
    if bias is not None and deterministic and not _spans(bias, problem):
        raise ValueError(f"deterministic has no sum over what a bias is broadcast along, got shape {bias.shape}")
    algorithm = "fa2" if algorithm == "auto" else algorithm
    return plan_backward(problem, device, algorithm, tiling, deterministic=deterministic, dbias=bias is not None)


def _check_choices(algorithm: str, bias: Any | None, **flags: bool) -> None:
    """TypeError or ValueError for options that are none, whatever the arrays."""
    require_choice("algorithm", algorithm, ("auto", *BACKWARD_ALGORITHMS))
    for name, flag in flags.items():
        require_flag(name, flag)
    if flags["return_dbias"] and bias is None:
        raise ValueError("return_dbias is for a call with a bias, and there is none")
