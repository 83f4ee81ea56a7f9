"""The values of the fields of a schedule's struct: the one place that knows the meaning of each number."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from cupyflash.arrays import AnyArray, ArrayLayout, numpy_dtype
from cupyflash.basics import Report
from cupyflash.launch.launcher import Prepared
from cupyflash.launch.simulated import PreparedSimulation, Simulation
from cupyflash.request.dropout import NO_NUMBERS
from cupyflash.request.score import no_numbers
from cupyflash.schedules import TileSchedule


def prepare(
    schedule: TileSchedule, simulation: Simulation | None, arrays: Mapping[str, AnyArray], outputs: Mapping[str, ArrayLayout]
) -> Prepared | PreparedSimulation:
    """Prepare a schedule's kernels for arrays of these layouts, by the kernels' names, on the GPU or in a simulation.

    Each launch allocates the `outputs`, which are among the arrays, and the schedule's workspaces. ValueError if no kernel runs the
    schedule.
    """
    workspaces = {
        name: ArrayLayout.contiguous(space.shape, numpy_dtype(space.dtype)) for name, space in schedule.workspaces().items()
    }
    kernels = schedule.kernels()  # refuses what no kernel runs
    tiles = {each.field: ArrayLayout.contiguous(each.shape, np.uint8) for each in schedule.given_tiles}
    pointers = schedule.struct.pointers.items()
    vectors = {name: ArrayLayout.contiguous(arrays[name].shape, kind) for name, kind in pointers if arrays.get(name) is not None}
    values = argument_values(schedule, {**arrays, **vectors, **workspaces, **tiles})
    if simulation is None:
        return Prepared(kernels, values, outputs, workspaces, schedule.given_tiles)
    return PreparedSimulation(simulation, schedule, values, outputs, workspaces)


def argument_values(schedule: TileSchedule, arrays: Mapping[str, AnyArray | None]) -> Report:
    """The values of the kernels' struct for arrays (or layouts) by the kernels' names, workspaces too. An array stands for its
    address, None for a null pointer. TypeError for an array of another type than the kernels read, ValueError for one that a tensor
    map of the schedule cannot describe."""
    p, q = schedule.problem, arrays["Q"]
    assert q is not None
    # No limit is one that no row reaches, and that no sum with a row exceeds 32 bits.
    unlimited = np.iinfo(np.int32).max - max(p.seqlen_q, p.seqlen_k)
    left, right = (unlimited if side is None else min(side, unlimited) for side in (p.options.left, p.options.right))
    numbers = {
        "Nq": p.seqlen_q,
        "Nk": p.seqlen_k,
        "total_q": q.shape[-2],
        "heads": p.heads,
        "sequences": p.batch,
        "group": p.group,
        "left": left,
        "right": right,
        "rows": math.prod(q.shape[:-1]),
        "scale": p.softmax_scale,
        "scale_log2": np.float32(p.softmax_scale) * np.float32(math.log2(math.e)),  # for exponents of two
        **schedule.numbers(),
    }
    maps = {name: box.of(_there(box.tensor, arrays)) for name, box in schedule.maps().items()}
    none = {**NO_NUMBERS, **no_numbers(p.options.score, p.options.mask_function)}
    return schedule.struct.values({**none, **arrays, **numbers, **maps}, p.dtype)


def _there(tensor: str, arrays: Mapping[str, AnyArray | None]) -> AnyArray:
    array = arrays[tensor]
    assert array is not None
    return array
