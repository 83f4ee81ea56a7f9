"""Runs kernels on the GPU: CuPy's current device and stream, workspaces from its memory pool, nothing waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from cupyflash.binding import Masks, argument_values, gradient_values, kernel_arguments
from cupyflash.compiler import gpu_function
from cupyflash.schedules import BackwardSchedule, Kernel, TileSchedule


def launch(schedule: TileSchedule, q: Any, k: Any, v: Any, out: Any, lse: Any | None, masks: Masks) -> None:
    """Compute attention of CuPy arrays into `out` (and `lse`), without copies."""
    workspaces = allocate(schedule)
    launch_kernels(schedule.kernels(), argument_values(schedule, q, k, v, out, lse, workspaces, masks))


def launch_backward(schedule: BackwardSchedule, arrays: Mapping[str, Any], masks: Masks) -> None:
    """Compute the gradients of CuPy arrays, by their names in `gradient_values`, without copies."""
    launch_kernels(schedule.kernels(), gradient_values(schedule, arrays, allocate(schedule), masks))


def allocate(schedule: TileSchedule) -> dict[str, Any]:
    """The schedule's workspaces, from CuPy's memory pool."""
    import cupy

    workspaces = {
        name: cupy.empty(space.shape, np.dtype(ml_dtypes.bfloat16 if space.dtype == "bfloat16" else space.dtype))
        for name, space in schedule.workspaces().items()
    }
    if cupy.cuda.get_current_stream().is_capturing():
        _held_for_graphs.append(workspaces)
    return workspaces


# A CUDA graph replays with the addresses that it was captured with, so the memory pool must not hand a captured call's
# workspaces to anyone else. CuPy does not say when a graph is gone: they are kept for good.
_held_for_graphs: list[dict[str, Any]] = []


def launch_kernels(kernels: Sequence[Kernel], values: Mapping[str, Any]) -> None:
    """Launch kernels one after another on the current stream, with `values` for their parameters."""
    import cupy

    device_id = cupy.cuda.runtime.getDevice()
    for kernel in kernels:
        if kernel.grid:
            arguments = kernel_arguments(kernel, values)
            pointers = tuple(np.uint64(0) if value is None else value for value in arguments.values())
            function = gpu_function(kernel, device_id)
            function((kernel.grid,), (kernel.threads,), pointers, shared_mem=kernel.shared_bytes)
