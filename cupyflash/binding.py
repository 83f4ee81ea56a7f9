"""Gives the fields of a schedule's struct their values: the one place that knows what each number means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyflash.arrays import Array
from cupyflash.dropout import NO_NUMBERS
from cupyflash.schedules import TileSchedule
from cupyflash.score import no_numbers

# The kernels' names for the arrays of a call; the others have one name.
TENSORS = {"Q": "q", "K": "k", "V": "v", "O": "out", "L": "lse", "dO": "dout"}


def by_tensor(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arrays by the kernels' names for them."""
    return {**arrays, **{tensor: arrays[name] for tensor, name in TENSORS.items() if name in arrays}}


def argument_values(schedule: TileSchedule, arrays: Mapping[str, Array | None]) -> dict[str, Any]:
    """What the kernels' struct holds for arrays (or layouts) by the kernels' names, workspaces too; an array is in place of its
    address, None of a null pointer. TypeError for an array of another type than the kernels read, ValueError for one that a tensor
    map of the schedule's does not take."""
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
        "group": p.heads // p.kv_heads if p.kv_heads else 1,
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


def _there(tensor: str, arrays: Mapping[str, Array | None]) -> Array:
    array = arrays[tensor]
    assert array is not None
    return array
