"""The call: exact attention of CuPy arrays on the GPU, or of NumPy arrays on the simulated device."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from cupyflash.binding import Masks
from cupyflash.dispatch import as_array, device_of, on_gpu, refuse_findings, refuse_overlap, target
from cupyflash.problem import Problem
from cupyflash.schedules import TileSchedule, plan
from cupyflash.simulated import Simulation
from cupyflash.tiling import TilingChoice

ALGORITHMS = ("auto", "fa1", "fa2", "standard")


def attention(
    q: Any,
    k: Any,
    v: Any,
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
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """O = softmax(scale Q K^T + bias) V, computed exactly and by tiles.

    Shapes: q (n_q, d), (h, n_q, d) or (b, h, n_q, d); k the same with n_k and h_kv heads, where h_kv divides h; v as k, with
    d_v in place of d if you like. d and d_v are 1 to 256; float16, bfloat16 (compute capability 8.0) or float32, all alike;
    any strides whose last axis is contiguous. `scale` is 1 / sqrt(d) when None.

    What a row sees: `causal` is aligned bottom-right, row r sees key c when c <= r + n_k - n_q; `window` = (left, right) lets
    it see the keys from r + n_k - n_q - left to r + n_k - n_q + right, None for no limit on a side. `mask`, of bool, is true
    where row and key go together; `bias`, of q's dtype, is added to the scaled scores; both broadcast to (..., n_q, n_k).
    `key_lengths`, integers of shape (b,) from 0 to n_k, says how many keys each batch has; what k and v hold behind them is
    never read. `block_mask`, of bool, (b or 1, h or 1, Tr, Tc) with fewer axes at will, keeps blocks of `tiling` (Br, Bc), where
    Tr = ceil(n_q / Br) and Tc = ceil(n_k / Bc): what it leaves out is neither loaded nor computed ("fa1" and "fa2"). The masks
    add up. A row that sees no key gives zeros and a log-sum-exp of -inf. What else is masked has weight
    zero, but a NaN or infinity in a masked row of v may still show in rows that share a tile with it. (Lengths on a GPU are
    not looked at beforehand: one that is out of range there is taken as 0 or n_k.)

    `algorithm`: "fa2" (FlashAttention-2), "fa1" (FlashAttention, Algorithm 1), "standard" (Algorithm 0, with S and P in memory
    in q's dtype, so that scores beyond its range overflow), or "auto", which is "fa2". `tiling`: None for block sizes fitted
    to the device,
    (block_rows, block_cols), or "paper" for the formula's own, which run where they are multiples of 16.
    `out`, if given, receives O: q's dtype, shape (..., n_q, d_v), positive strides, no memory shared with an input.

    Returns O in q's dtype on q's device; with `return_lse` also L, the natural logarithm of the sum of exponentials of each
    row, float32 of shape q.shape[:-1]. CuPy arrays run on their device and the current stream; NumPy arrays run the same
    kernel on the simulated device (see `simulated_device`). Objects with the CUDA array interface or DLPack are taken as
    views.

    Raises TypeError or ValueError for bad arguments before anything is compiled or launched; RuntimeError for NumPy arrays
    that would take the simulated device too long.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if type(return_lse).__name__ not in ("bool", "bool_"):
        raise TypeError(f"return_lse must be True or False, got {return_lse!r}")
    given = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "key_lengths": key_lengths, "block_mask": block_mask}
    inputs = {name: as_array(name, array) for name, array in given.items() if name in "qkv" or array is not None}
    arrays = inputs if out is None else inputs | {"out": as_array("out", out)}
    gpu = on_gpu(**arrays)
    with device_of(gpu, **arrays):
        problem = Problem.from_arrays(**arrays, causal=causal, window=window, scale=scale)
        device, simulation = target(gpu)
        schedule = plan(problem, device, "fa2" if algorithm == "auto" else algorithm, tiling, lse=bool(return_lse))
        schedule.kernels()  # refuses what no kernel runs, before anything is allocated
        if out is not None:
            if not gpu and not arrays["out"].flags.writeable:
                raise ValueError("out must be writeable, got a read-only array")
            refuse_overlap(arrays["out"], **inputs)
        return _run(schedule, simulation, inputs, out, arrays.get("out"), sys.modules["cupy"] if gpu else np)


def _run(
    schedule: TileSchedule, simulation: Simulation | None, inputs: dict[str, Any], out: Any, target_array: Any, xp: Any
) -> Any:
    """Allocate what is missing, launch or simulate, and hand over what was asked for."""
    q, k, v = (inputs[name] for name in "qkv")
    if target_array is None:
        out = target_array = xp.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)
    lse = xp.empty(q.shape[:-1], dtype=np.float32) if schedule.lse else None
    lengths = inputs.get("key_lengths")
    lengths = None if lengths is None else xp.ascontiguousarray(lengths, np.int32)
    masks = Masks(inputs.get("mask"), inputs.get("bias"), lengths, inputs.get("block_mask"))
    compute(schedule, simulation, q, k, v, target_array, lse, masks)
    return (out, lse) if schedule.lse else out


def compute(
    schedule: TileSchedule, simulation: Simulation | None, q: Any, k: Any, v: Any, out: Any, lse: Any | None, masks: Masks
) -> None:
    """Attention into `out` and `lse`, on the GPU or on the simulated device."""
    if schedule.problem.head_count and schedule.problem.seqlen_q:
        if simulation is None:
            from cupyflash.launcher import launch

            launch(schedule, q, k, v, out, lse, masks)
        else:
            # The one place where attention reaches into the simulator.
            from cupyflash.sim.estimate import refuse_slow
            from cupyflash.sim.execution import allocate, run

            refuse_slow(schedule, simulation.max_seconds)
            execution = run(schedule, q, k, v, out, lse, allocate(schedule), masks=masks)
            refuse_findings(execution.findings)
