"""The backward call: gradients of attention, of CuPy arrays on the GPU or of NumPy arrays on the simulated device."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cupyflash import varlen
from cupyflash.attention import attention
from cupyflash.binding import Masks
from cupyflash.dispatch import as_array, device_of, on_gpu, refuse_findings, target
from cupyflash.problem import Problem, check_operand, row_alignment
from cupyflash.schedules import BACKWARD_ALGORITHMS, BackwardSchedule, plan_backward, plan_varlen_backward
from cupyflash.simulated import Simulation
from cupyflash.tiling import TilingChoice

MASKS = ("mask", "bias", "key_lengths", "block_mask")


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
    arrays = {name: as_array(name, array) for name, array in given.items()}
    masks = {name: array for name, array in zip(MASKS, (mask, bias, key_lengths, block_mask), strict=True) if array is not None}
    masks = {name: as_array(name, array) for name, array in masks.items()}
    gpu = on_gpu(**arrays, **masks)
    with device_of(gpu, **arrays, **masks):
        problem = pose(**arrays, **masks, causal=causal, window=window, scale=scale)
        device, simulation = target(gpu)
        chosen = "fa2" if algorithm == "auto" else algorithm
        schedule = plan_backward(problem, device, chosen, tiling, deterministic=bool(deterministic), dbias=bool(return_dbias))
        schedule.kernels()  # refuses what no kernel runs, before anything is allocated
        if return_dbias and deterministic and not _spans(masks["bias"], problem):
            raise ValueError(f"deterministic has no sum over what a bias is broadcast along, got shape {masks['bias'].shape}")
        xp = sys.modules["cupy"] if gpu else np
        made = {f"d{name}": xp.empty(arrays[name].shape, dtype=arrays[name].dtype) for name in "qkv"}
        if return_dbias:
            made["dbias"] = xp.zeros(masks["bias"].shape, np.float32)  # a sum
        lengths = masks.get("key_lengths")
        bound = Masks(**masks | ({} if lengths is None else {"key_lengths": xp.ascontiguousarray(lengths, np.int32)}))
        _compute(schedule, simulation, arrays | made | {"lse": xp.ascontiguousarray(arrays["lse"])}, bound)
    gradients = (made["dq"], made["dk"], made["dv"])
    return (*gradients, made["dbias"].astype(arrays["q"].dtype)) if return_dbias else gradients


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
    with device_of(gpu, **arrays, **beside):
        problem, seqlens = varlen.pose(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            **bounds,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            causal=causal,
            window=window,
            scale=scale,
            out=arrays["out"],
        )
        _check_beside(arrays["dout"], arrays["q"], arrays["out"], arrays["lse"], arrays["q"].shape[1::-1])
        problem = replace(problem, alignment=min(problem.alignment, row_alignment(arrays["dout"].swapaxes(0, 1))))
        device, simulation = target(gpu)
        total = arrays["q"].shape[0]
        schedule = plan_varlen_backward(problem, device, total, seqlens, tiling, deterministic=bool(deterministic))
        schedule.kernels()  # refuses what no kernel runs, before anything is allocated
        xp = sys.modules["cupy"] if gpu else np
        made = {f"d{name}": xp.empty(arrays[name].shape, dtype=arrays[name].dtype) for name in "qkv"}
        views = {name: varlen.heads_first(array) for name, array in (arrays | made).items() if name != "lse"}
        bound = Masks(**{name: xp.asarray(array, np.int32, order="C") for name, array in bounds.items()})
        _compute(schedule, simulation, views | {"lse": xp.ascontiguousarray(arrays["lse"])}, bound)
    return made["dq"], made["dk"], made["dv"]


def _spans(bias: Any, problem: Problem) -> bool:
    """Whether a bias has an element of its own for every score."""
    whole = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
    return math.prod(bias.shape) == math.prod(whole) and all(bias.strides[n] for n, size in enumerate(bias.shape) if size > 1)


def pose(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, causal: bool, window: Any, scale: float | None, **masks: Any
) -> Problem:
    """The forward's problem. TypeError or ValueError for a `dout`, `out` or `lse` that does not go with it."""
    problem = Problem.from_arrays(q, k, v, out=out, causal=causal, window=window, scale=scale, **masks)
    _check_beside(dout, q, out, lse, q.shape[:-1])
    return replace(problem, alignment=min(problem.alignment, row_alignment(dout)))


def _check_beside(dout: Any, q: Any, out: Any, lse: Any, rows: tuple[int, ...]) -> None:
    """TypeError or ValueError for a `dout` or `lse` that does not go with q and out."""
    check_operand("dout", dout, q)
    if dout.shape != out.shape:
        raise ValueError(f"dout must have out's shape {out.shape}, got {dout.shape}")
    if lse.dtype != np.float32:
        raise TypeError(f"lse must be of dtype float32, got {lse.dtype}")
    if lse.shape != rows:
        raise ValueError(f"lse must have shape {rows}, got {lse.shape}")


def _compute(schedule: BackwardSchedule, simulation: Simulation | None, arrays: dict[str, Any], masks: Masks) -> None:
    """Launch or simulate; where there is nothing to multiply, the gradients are zeros."""
    p = schedule.problem
    if not (p.head_count and p.seqlen_q and p.seqlen_k):
        for name in ("dq", "dk", "dv"):
            arrays[name][...] = 0
        return
    names = {
        "Q": "q",
        "K": "k",
        "V": "v",
        "O": "out",
        "L": "lse",
        "dO": "dout",
        "dQ": "dq",
        "dK": "dk",
        "dV": "dv",
        "dbias": "dbias",
    }
    tensors = {tensor: arrays.get(name) for tensor, name in names.items()}
    if simulation is None:
        from cupyflash.launcher import launch_backward

        launch_backward(schedule, tensors, masks)
    else:
        from cupyflash.sim.estimate import refuse_slow
        from cupyflash.sim.execution import run_backward

        refuse_slow(schedule, simulation.max_seconds)
        *_, findings = run_backward(schedule, tensors, masks=masks)
        refuse_findings(findings)


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
