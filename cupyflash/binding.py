"""Gives a schedule's kernel parameters their values: the one place that knows what each name means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from cupyflash.problem import Array
from cupyflash.schedules import BackwardSchedule, Kernel, TileSchedule
from cupyflash.schedules.base import FLOAT32


@dataclass(frozen=True)
class Masks:
    """What restricts or shifts the scores, as arrays: see `Problem`. `key_lengths` is int32 of shape (batch,).

    `cu_seqlens_q` and `cu_seqlens_k`, int32 of shape (batch + 1,), go with a `VarlenSchedule`, whose q, k, v and out are
    (h, total, d).
    """

    mask: Any = None
    bias: Any = None
    key_lengths: Any = None
    block_mask: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None


NO_MASKS = Masks()


def argument_values(
    schedule: TileSchedule,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None,
    workspaces: Mapping[str, Array],
    masks: Masks = NO_MASKS,
) -> dict[str, Any]:
    """Every parameter name of the schedule's kernels with its value: arrays, scalars of the kernel's own types, None.

    Strides are in elements; an axis that an array does not have, or has to be broadcast along, has stride 0.
    """
    p = schedule.problem
    values: dict[str, Any] = {"Q": q, "K": k, "V": v, "O": out, "L": lse, "O_acc": None, **workspaces}
    values |= {"mask": masks.mask, "bias": masks.bias, "key_lengths": masks.key_lengths}
    values |= {"cu_seqlens_q": masks.cu_seqlens_q, "cu_seqlens_k": masks.cu_seqlens_k}
    sizes = {
        "Nq": p.seqlen_q,
        "Nk": p.seqlen_k,
        "total_q": q.shape[-2],
        "heads": p.heads,
        "sequences": p.batch,
        "group": p.heads // p.kv_heads if p.kv_heads else 1,
    }
    values |= {name: np.int32(size) for name, size in sizes.items()}
    # No limit is one that no row reaches, and that no sum with a row exceeds 32 bits.
    unlimited = np.iinfo(np.int32).max - max(p.seqlen_q, p.seqlen_k)
    values["left"] = np.int32(unlimited if p.left is None else min(p.left, unlimited))
    values["right"] = np.int32(unlimited if p.right is None else min(p.right, unlimited))
    values["rows"] = np.int64(schedule.repeats * p.seqlen_q)
    values["scale"] = np.float32(p.softmax_scale)
    for name, array in (("Q", q), ("K", k), ("V", v), ("O", out)):
        values |= _strides(name, ("batch", "head", "row"), array.shape[:-1], array.strides[:-1], p.itemsize)
    values["block_mask"] = masks.block_mask
    for name, scores_like, itemsize in (
        ("mask", masks.mask, 1),
        ("bias", masks.bias, p.itemsize),
        ("block_mask", masks.block_mask, 1),
    ):
        shape, strides = (scores_like.shape, scores_like.strides) if scores_like is not None else ((), ())
        values |= _strides(name, ("batch", "head", "row", "col"), shape, strides, itemsize)
    return values


def gradient_values(
    schedule: BackwardSchedule, arrays: Mapping[str, Array | None], workspaces: Mapping[str, Array], masks: Masks = NO_MASKS
) -> dict[str, Any]:
    """The same for the kernels of a backward pass; `arrays` are Q, K, V, O, L, dO, dQ, dK and dV by these names."""
    q, k, v, out = (cast(Array, arrays[name]) for name in "QKVO")
    values = argument_values(schedule, q, k, v, out, arrays["L"], workspaces, masks)
    values["rows"] = np.int64(math.prod(q.shape[:-1]))
    for name in ("dO", "dQ", "dK", "dV"):
        array = cast(Array, arrays[name])
        values[name] = array
        values |= _strides(name, ("batch", "head", "row"), array.shape[:-1], array.strides[:-1], schedule.problem.itemsize)
    values.setdefault("dQ_acc", None)
    dbias = arrays.get("dbias")
    values["dbias"] = dbias
    shape, strides = (dbias.shape, dbias.strides) if dbias is not None else ((), ())
    values |= _strides("dbias", ("batch", "head", "row", "col"), shape, strides, FLOAT32)
    return values


def _strides(
    name: str, axes: tuple[str, ...], shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> dict[str, np.int64]:
    """`name`_`axis` for the last axes of an array, in elements."""
    elements = [0 if length == 1 else stride // itemsize for length, stride in zip(shape, strides, strict=True)]
    padded = [0] * (len(axes) - len(elements)) + elements
    return {f"{name}_{axis}": np.int64(stride) for axis, stride in zip(axes, padded, strict=True)}


def kernel_arguments(kernel: Kernel, values: Mapping[str, Any]) -> dict[str, Any]:
    """One kernel's arguments, by name, in the order of its parameters."""
    return {name: values[name] for name in kernel.params}
