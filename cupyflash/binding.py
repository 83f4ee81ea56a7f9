"""Gives a schedule's kernel parameters their values: the one place that knows what each name means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyflash.problem import Array
from cupyflash.schedules import Kernel, TileSchedule


def argument_values(
    schedule: TileSchedule, q: Array, k: Array, v: Array, out: Array, lse: Array | None, workspaces: Mapping[str, Array]
) -> dict[str, Any]:
    """Every parameter name of the schedule's kernels with its value: arrays, scalars of the kernel's own types, None.

    Strides are in elements; an axis that an array does not have has stride 0.
    """
    p = schedule.problem
    values: dict[str, Any] = {"Q": q, "K": k, "V": v, "O": out, "L": lse, "O_acc": None, **workspaces}
    sizes = {
        "Nq": p.seqlen_q,
        "Nk": p.seqlen_k,
        "heads": p.heads,
        "group": p.heads // p.kv_heads if p.kv_heads else 1,
    }
    values |= {name: np.int32(size) for name, size in sizes.items()}
    values["rows"] = np.int64(schedule.repeats * p.seqlen_q)
    values["scale"] = np.float32(p.softmax_scale)
    for name, array in (("Q", q), ("K", k), ("V", v), ("O", out)):
        strides = (0, 0, *(stride // p.itemsize for stride in array.strides[:-1]))
        for axis, stride in zip(("batch", "head", "row"), strides[-3:], strict=True):
            values[f"{name}_{axis}"] = np.int64(stride)
    return values


def kernel_arguments(kernel: Kernel, values: Mapping[str, Any]) -> dict[str, Any]:
    """One kernel's arguments, by name, in the order of its parameters."""
    return {name: values[name] for name in kernel.params}
