"""Runs a schedule's kernels on the GPU: CuPy's current device and stream, workspaces from its memory pool."""

from __future__ import annotations

from typing import Any

from cupyflash.binding import argument_values, kernel_arguments
from cupyflash.compiler import gpu_function
from cupyflash.schedules import TileSchedule


def launch(schedule: TileSchedule, q: Any, k: Any, v: Any, out: Any, lse: Any | None) -> None:
    """Compute attention of CuPy arrays into `out` (and `lse`), without copies and without waiting for the GPU."""
    import cupy

    kernels = schedule.kernels()
    workspaces = {name: cupy.empty(space.shape, dtype=_dtype(space.dtype)) for name, space in schedule.workspaces().items()}
    values = argument_values(schedule, q, k, v, out, lse, workspaces)
    device_id = cupy.cuda.runtime.getDevice()
    for kernel in kernels:
        if kernel.grid:
            arguments = kernel_arguments(kernel, values)
            pointers = tuple(cupy.uint64(0) if value is None else value for value in arguments.values())
            function = gpu_function(kernel, device_id)
            function((kernel.grid,), (kernel.threads,), pointers, shared_mem=kernel.shared_bytes)


def _dtype(name: str) -> Any:
    """A dtype by name; bfloat16 is ml_dtypes'."""
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
