"""Softmax along an axis, of arrays of any rank and strides as rows: in two passes or in three (Milakov and Gimelshein)."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash.arrays import AnyArray, address, array_dtype, is_number, require_places
from cupyflash.basics import Report, Values
from cupyflash.launch.dispatch import as_array, device_of, on_gpu, refuse_written, target
from cupyflash.launch.launcher import Prepared
from cupyflash.launch.simulated import Simulation, run_simulated
from cupyflash.request.options import require_choice
from cupyflash.schedules.softmax import PARAMS, SOFTMAX_ALGORITHMS, SoftmaxSchedule, plan_softmax

OUTER_AXES = ("outer", "middle", "inner")


@dataclass(frozen=True)
class Rows:
    """x and y, of one shape, as `rows` rows of `cols` elements.

    `steps` are x's and y's strides from one element of a row to the next, `outer` the (length, x's stride, y's stride) of
    the three axes that the rows themselves are laid out on, the widest stride first. Strides are in elements.
    """

    rows: int
    cols: int
    steps: tuple[int, int]
    outer: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, x: AnyArray, y: AnyArray, axis: int) -> Rows:
        """The rows of x and y along `axis` (0 to x.ndim - 1).

        The other axes are taken in the order of x's strides, and two that are one in memory, in x and in y, are merged.
        Raises ValueError when more than three are left.
        """
        itemsize = x.dtype.itemsize
        axes = [
            (length, x_bytes // itemsize, y_bytes // itemsize) if length > 1 else (length, 0, 0)
            for length, x_bytes, y_bytes in zip(x.shape, x.strides, y.strides, strict=True)
        ]
        cols, *steps = axes.pop(axis)
        outer = _merged(sorted(axes, key=lambda one: (-abs(one[1]), -abs(one[2]))))
        if len(outer) > len(OUTER_AXES):
            raise ValueError(
                f"x and out must have at most {len(OUTER_AXES)} axes beside axis {axis}, after a merge of those that are "
                f"contiguous in memory, got {len(outer)} from shape {x.shape} and strides {x.strides} bytes: pass x.copy()"
            )
        padding = [(1, 0, 0)] * (len(OUTER_AXES) - len(outer))
        return cls(math.prod(length for length, _, _ in axes), cols, (steps[0], steps[1]), (*padding, *outer))

    @property
    def adjacent(self) -> bool:
        """True if neighbouring rows are closer in memory than neighbouring elements of a row."""
        return 0 < abs(self.outer[-1][1]) < abs(self.steps[0])


def _merged(axes: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The axes, outermost first, less those of length 1 and those that continue the one inside them."""
    merged: list[tuple[int, int, int]] = []
    for length, x, y in axes:
        if length == 1:
            continue
        if merged and merged[-1][1:] == (length * x, length * y):
            length *= merged.pop()[0]
        merged.append((length, x, y))
    return merged


def softmax_values(x: AnyArray, y: AnyArray, rows: Rows) -> Report:
    """The values of the softmax kernels' struct, with the arrays in place of their addresses."""
    sizes = {"rows": rows.rows, "n": rows.cols, "x_step": rows.steps[0], "y_step": rows.steps[1]}
    for name, (length, x_stride, y_stride) in zip(OUTER_AXES, rows.outer, strict=True):
        sizes |= {name: length, f"x_{name}": x_stride, f"y_{name}": y_stride}
    return PARAMS.values({"x": x, "y": y, **sizes}, x.dtype.name)


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


def _run(schedule: SoftmaxSchedule, simulation: Simulation | None, values: Values) -> None:
    if simulation is None:
        Prepared(schedule.kernels(), values).launch(values)
        return
    in_place = address(values["x"]) == address(values["y"])
    run_simulated(schedule, values, () if in_place else ("y",))


def _axis(axis: Any, ndim: int) -> int:
    """The axis as 0 to ndim - 1."""
    if ndim == 0:
        raise ValueError("x must have at least one axis, got an array of shape ()")
    if not is_number(axis):
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
    _check_elements("out", out)
    require_places("out", out)
    itself = (address(out), out.strides) == (address(x), x.strides)  # may be written: a thread reads what it writes
    refuse_written({"out": out} if itself else {"out": out, "x": x}, ("out",))
