"""Softmax along an axis, in two passes over its rows or in three: Milakov and Gimelshein's pair of algorithms."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyflash.arrays import address, array_dtype, overlaps_itself
from cupyflash.dispatch import as_array, device_of, on_gpu, refuse_overlap, target
from cupyflash.launcher import Prepared
from cupyflash.options import require_choice
from cupyflash.rows import Rows, softmax_values
from cupyflash.schedules.softmax import SOFTMAX_ALGORITHMS, SoftmaxSchedule, plan_softmax
from cupyflash.simulated import Simulation, refuse_findings


def softmax(x: Any, *, algorithm: str = "online", axis: int = -1, out: Any | None = None) -> Any:
    """y = exp(x - max(x)) / sum(exp(x - max(x))) along `axis`, with the sums in float32.

    x has one axis or more, any length and any strides (those of the other axes may leave at most three when axes that are
    one in memory are merged; arrays of up to four axes always do); float16, bfloat16 or float32. `algorithm`: "online"
    reads x twice (largest element and normalizer in one pass; Milakov and Gimelshein, arXiv 1805.02867, Algorithm 3),
    "safe" three times (Algorithm 2); both write y once. `out`, if given, receives y: of x's shape and dtype, x itself, or
    sharing no memory with it.

    Not-a-numbers are as in scipy.special.softmax: a row with a NaN or +inf, or of -inf alone, becomes NaN throughout, an
    element of -inf beside finite ones 0. (The attention kernels differ: a row that sees no key gives zeros.)

    Returns y with x's shape and dtype, on x's device; empty for an empty x. CuPy arrays run on their device and the current
    stream, without copies; NumPy arrays run the same kernel on the simulated device (see `simulated_device`). Objects with
    DLPack or the CUDA array interface are taken as views.

    Raises TypeError or ValueError for bad arguments, before anything is compiled or launched; RuntimeError for a NumPy
    array that would take the simulated device too long.
    """
    require_choice("algorithm", algorithm, SOFTMAX_ALGORITHMS)
    arrays = {"x": as_array("x", x)} | ({} if out is None else {"out": as_array("out", out)})
    gpu = on_gpu(**arrays)
    x, y = arrays["x"], arrays.get("out")
    _check_elements("x", x)
    axis = _axis(axis, x.ndim)
    if y is not None:
        _check_out(y, x)
    with device_of(gpu, **arrays):
        rows = Rows.of(x, x if y is None else y, axis)
        device, simulation = target(gpu)
        schedule = plan_softmax(rows.rows, rows.cols, str(x.dtype), device, algorithm, adjacent_rows=rows.adjacent)
        schedule.kernels()  # refuses what no kernel runs, before anything is allocated
        if simulation is not None and 0 not in x.shape:
            from cupyflash.sim.estimate import refuse_slow

            refuse_slow(schedule, simulation.max_seconds)
        if y is None:
            out = y = (sys.modules["cupy"] if gpu else np).empty_like(x)
            rows = Rows.of(x, y, axis)
        if 0 not in x.shape:
            _run(schedule, simulation, softmax_values(x, y, rows))
    return out


def _run(schedule: SoftmaxSchedule, simulation: Simulation | None, values: Mapping[str, Any]) -> None:
    if simulation is None:
        Prepared(schedule.kernels(), values).launch(values)
        return
    from cupyflash.sim.execution import run_kernels

    in_place = address(values["x"]) == address(values["y"])
    _, _, findings = run_kernels(schedule, values, () if in_place else ("y",))
    refuse_findings(findings)


def _axis(axis: Any, ndim: int) -> int:
    """The axis as 0 to ndim - 1."""
    if ndim == 0:
        raise ValueError("x must have at least one axis, got an array of shape ()")
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(f"axis must be an integer, got {axis!r}")
    place = int(axis)
    if not -ndim <= place < ndim:
        raise ValueError(f"axis must be between {-ndim} and {ndim - 1} for an x of {ndim} axes, got {axis}")
    return place % ndim


def _check_elements(name: str, array: Any) -> None:
    """Elements of a type that the kernels know, each at an address that is a multiple of its size."""
    array_dtype(name, array)
    size = array.dtype.itemsize
    if 0 not in array.shape and any(number % size for number in (address(array), *array.strides)):
        raise ValueError(f"{name} must be aligned to its elements of {size} bytes, got strides {array.strides} bytes")


def _check_out(out: Any, x: Any) -> None:
    if out.dtype != x.dtype:
        raise TypeError(f"out must have x's dtype {x.dtype}, got {out.dtype}")
    if out.shape != x.shape:
        raise ValueError(f"out must have x's shape {x.shape}, got {out.shape}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("out must be writeable, got a read-only array")
    _check_elements("out", out)
    if 0 not in out.shape and overlaps_itself(out):
        raise ValueError(f"out must have a place for every element, got strides {out.strides} bytes for shape {out.shape}")
    if (address(out), out.strides) != (address(x), x.strides):  # x itself may be written: a thread reads what it writes
        refuse_overlap({"out": out, "x": x}, "out")
