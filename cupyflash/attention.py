"""The call: exact attention of CuPy arrays on the GPU, or of NumPy arrays on the simulated device."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

from cupyflash.device import Device
from cupyflash.problem import Problem, dtype_name
from cupyflash.schedules import TileSchedule, plan
from cupyflash.simulated import Simulation, current_simulation
from cupyflash.tiling import TilingChoice

ALGORITHMS = ("auto", "fa1", "standard")


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    algorithm: str = "auto",
    tiling: TilingChoice = None,
    return_lse: bool = False,
    out: Any | None = None,
) -> Any:
    """O = softmax(scale Q K^T) V, computed exactly and by tiles.

    Shapes: q (n_q, d), (h, n_q, d) or (b, h, n_q, d); k and v (n_k, d), (h_kv, n_k, d) or (b, h_kv, n_k, d), where h_kv
    divides h. d is 1 to 256; float16, bfloat16 or float32, all three the same; any strides whose last axis is
    contiguous. `causal` is aligned bottom-right: row r sees key c when c <= r + n_k - n_q. `scale` is 1 / sqrt(d) when
    None. A row that sees no key gives zeros and a log-sum-exp of -inf.

    `algorithm`: "fa1" (FlashAttention, Algorithm 1), "standard" (Algorithm 0, with S and P in memory), or "auto", which is
    "fa1". `tiling`: None for block sizes fitted to the device, "paper" for the formula's own, or (block_rows, block_cols).
    `out`, if given, receives O; it has q's shape and dtype.

    Returns O with q's shape and dtype, on q's device; with `return_lse` also L, the natural logarithm of the sum of
    exponentials of each row, float32 of shape q.shape[:-1]. CuPy arrays run on the current device and stream; NumPy
    arrays run the same kernel on the simulated device (see `simulated_device`).

    Raises TypeError or ValueError for bad arguments, before anything is compiled or launched.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    on_gpu = _on_gpu(q=q, k=k, v=v) if out is None else _on_gpu(q=q, k=k, v=v, out=out)
    problem = Problem.from_arrays(q, k, v, causal=causal, scale=scale, out=out)
    simulation = None if on_gpu else current_simulation()
    device = _gpu(sys.modules["cupy"].cuda.runtime.getDevice()) if simulation is None else simulation.device
    chosen = "fa1" if algorithm == "auto" else algorithm
    schedule = plan(problem, device, chosen, tiling, lse=bool(return_lse))
    if problem.head_count and problem.seqlen_q:
        schedule.kernels()  # refuses what no kernel runs, before anything is allocated

    xp: Any = sys.modules["cupy"] if on_gpu else np
    if out is None:
        out = xp.empty(q.shape, dtype=q.dtype)
    elif on_gpu is False and not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    lse = xp.empty(q.shape[:-1], dtype=np.float32) if return_lse else None
    if problem.head_count and problem.seqlen_q:
        _run(schedule, simulation, q, k, v, out, lse)
    return (out, lse) if return_lse else out


def _run(schedule: TileSchedule, simulation: Simulation | None, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    if simulation is None:
        from cupyflash.launcher import launch

        launch(schedule, q, k, v, out, lse)
        return
    # The one place where cupyflash reaches into the simulator.
    from cupyflash.sim.estimate import refuse_slow
    from cupyflash.sim.execution import allocate, run

    refuse_slow(schedule, simulation.max_seconds)
    findings = run(schedule, q, k, v, out, lse, allocate(schedule)).findings
    if findings:
        raise RuntimeError(f"the simulated device found {len(findings)} faults in the kernel, the first: {findings[0]}")


@cache
def _gpu(ordinal: int) -> Device:
    """The GPU of that number; asked for once, since its properties take longer to read than a small call to run."""
    return Device.current(ordinal)


def _on_gpu(**arrays: Any) -> bool:
    """True when all arrays are CuPy's, False when all are NumPy's."""
    cupy = sys.modules.get("cupy")
    kinds = {}
    for name, array in arrays.items():
        if isinstance(array, np.ndarray):
            kinds[name] = "NumPy"
        elif cupy is not None and isinstance(array, cupy.ndarray):
            kinds[name] = "CuPy"
        else:
            raise TypeError(f"{name} must be a NumPy or CuPy array, got {type(array).__name__}")
        dtype_name(array.dtype, name)
    if len(set(kinds.values())) > 1:
        mixed = ", ".join(f"{name} is {kind}'s" for name, kind in kinds.items())
        raise TypeError(f"all arrays must be NumPy's or all CuPy's: {mixed}")
    return kinds["q"] == "CuPy"
