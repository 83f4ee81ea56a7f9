"""The backward call: gradients of attention, of CuPy arrays on the GPU or of NumPy arrays on the simulated device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cupyflash.attention import attention
from cupyflash.binding import Masks
from cupyflash.dispatch import as_array, device_of, on_gpu, refuse_findings, target
from cupyflash.problem import Problem, check_operand, row_alignment
from cupyflash.schedules import BACKWARD_ALGORITHMS, BackwardSchedule, plan_backward
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
) -> tuple[Any, Any, Any]:
    """dq, dk and dv: what `attention`'s inputs do to sum(dout * O), without a matrix of n_q x n_k in memory.

    `out` and `lse` are what `attention(q, k, v, ..., return_lse=True)` returned; `dout` is the gradient of out, of its shape and
    dtype and contiguous along its last axis. All else as for `attention`, and with the values of that call. S and P are computed
    again, from L. Query heads that share a key head add up in its dk and dv; a row that sees no key has a gradient of zero, and
    so has a key that no row sees.

    `algorithm`: "fa2" (FlashAttention-2), or "auto", which is "fa2". It sums dq by atomics, in float32 and in no order;
    `deterministic` takes a kernel of its own for dq instead, which gives the same bits each time. "fa1" (FlashAttention's
    Algorithm 4) and "standard" (Algorithm 3, three matrices of n_q x n_k in memory) are here to be measured; they give the same
    bits each time as they are.

    Returns arrays of q's dtype on q's device, of the shapes of q, k and v. Raises as `attention` does.
    """
    if algorithm not in ("auto", *BACKWARD_ALGORITHMS):
        raise ValueError(f"algorithm must be one of auto, {', '.join(BACKWARD_ALGORITHMS)}, got {algorithm!r}")
    if type(deterministic).__name__ not in ("bool", "bool_"):
        raise TypeError(f"deterministic must be True or False, got {deterministic!r}")
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    arrays = {name: as_array(name, array) for name, array in given.items()}
    masks = {name: array for name, array in zip(MASKS, (mask, bias, key_lengths, block_mask), strict=True) if array is not None}
    masks = {name: as_array(name, array) for name, array in masks.items()}
    gpu = on_gpu(**arrays, **masks)
    with device_of(gpu, **arrays, **masks):
        problem = pose(**arrays, **masks, causal=causal, window=window, scale=scale)
        device, simulation = target(gpu)
        chosen = "fa2" if algorithm == "auto" else algorithm
        schedule = plan_backward(problem, device, chosen, tiling, deterministic=bool(deterministic))
        schedule.kernels()  # refuses what no kernel runs, before anything is allocated
        xp = sys.modules["cupy"] if gpu else np
        gradients = {f"d{name}": xp.empty(arrays[name].shape, dtype=arrays[name].dtype) for name in "qkv"}
        _compute(schedule, simulation, arrays | gradients, masks, xp)
    return gradients["dq"], gradients["dk"], gradients["dv"]


def pose(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, causal: bool, window: Any, scale: float | None, **masks: Any
) -> Problem:
    """The forward's problem. TypeError or ValueError for a `dout`, `out` or `lse` that does not go with it."""
    problem = Problem.from_arrays(q, k, v, out=out, causal=causal, window=window, scale=scale, **masks)
    check_operand("dout", dout, q)
    if dout.shape != out.shape:
        raise ValueError(f"dout must have out's shape {out.shape}, got {dout.shape}")
    if lse.dtype != np.float32:
        raise TypeError(f"lse must be of dtype float32, got {lse.dtype}")
    if lse.shape != q.shape[:-1]:
        raise ValueError(f"lse must have shape {q.shape[:-1]}, got {lse.shape}")
    return replace(problem, alignment=min(problem.alignment, row_alignment(dout)))


def _compute(
    schedule: BackwardSchedule, simulation: Simulation | None, arrays: dict[str, Any], masks: dict[str, Any], xp: Any
) -> None:
    """Launch or simulate; where there is nothing to multiply, the gradients are zeros."""
    p = schedule.problem
    if not (p.head_count and p.seqlen_q and p.seqlen_k):
        for name in ("dq", "dk", "dv"):
            arrays[name][...] = 0
        return
    names = {"Q": "q", "K": "k", "V": "v", "O": "out", "dO": "dout", "dQ": "dq", "dK": "dk", "dV": "dv"}
    tensors = {name: arrays[array] for name, array in names.items()} | {"L": xp.ascontiguousarray(arrays["lse"])}
    lengths = masks.get("key_lengths")
    lengths = None if lengths is None else xp.ascontiguousarray(lengths, np.int32)
    bound = Masks(masks.get("mask"), masks.get("bias"), lengths, masks.get("block_mask"))
    if simulation is None:
        from cupyflash.launcher import launch_backward

        launch_backward(schedule, tensors, bound)
    else:
        from cupyflash.sim.estimate import refuse_slow
        from cupyflash.sim.execution import run_backward

        refuse_slow(schedule, simulation.max_seconds)
        *_, findings = run_backward(schedule, tensors, masks=bound)
        refuse_findings(findings)


def attention_vjp(q: Any, k: Any, v: Any, *, deterministic: bool = False, **options: Any) -> tuple[Any, Callable[[Any], Any]]:
    """`attention(q, k, v, **options)` and its pullback, which takes dout and returns (dq, dk, dv).

    The pullback holds q, k, v, out and the log-sum-exps, 4 bytes a row; it may be called as often as one likes. `options` are
    those of `attention`, but for `return_lse` and `out`. Raises as `attention` does.
    """
    if unknown := {"return_lse", "out"} & set(options):
        raise TypeError(f"attention_vjp has no {unknown.pop()}")
    out, lse = attention(q, k, v, return_lse=True, **options)

    def pullback(dout: Any) -> Any:
        return attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)

    return out, pullback
