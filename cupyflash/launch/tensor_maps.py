"""Tensor maps: the box of a tensor that one bulk copy (TMA) moves, and the arrays of which a map can be made.
`cupyflash.launch.driver` encodes them on a GPU, and the PTX machine's own `TensorMap` on the simulated device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cupyflash.arrays import AnyArray, address, last_axis_contiguous

WORDS = 16
"""A map is this many words of 8 bytes, opaque ones."""
ALIGNMENT = 128
"""The alignment of a map's own address, in bytes: the driver asks for 64, CUDA 13's type has 128."""
UNIT = 16
"""Bytes that divide the tensor's address and all its strides but the last."""
MOST_STRIDE, MOST_LENGTH = 1 << 40, 1 << 32
"""A stride is shorter, in bytes; an axis is no longer, in elements (CUDA driver API, cuTensorMapEncodeTiled)."""
L2_PROMOTION = 128
"""Bytes that a copy's misses fetch into L2: a row of a swizzled box."""
AXES = ("batch", "head", "row", "column")


@dataclass(frozen=True)
class Box:
    """The part of a tensor (batch, head, row, column) that one copy moves: `rows` x `columns` of one head, or of each of `heads`,
    all heads' parts of a row one after the other.

    In shared memory it lies in rows of `columns`, whose 16-byte pieces are exchanged within `swizzle` bytes (0, 32, 64 or 128).
    Elements outside the tensor are zero there, and are not stored.
    """

    tensor: str
    rows: int
    columns: int
    swizzle: int
    heads: int = 1

    def of(self, array: AnyArray) -> MapPlan:
        """Return the map of an array (..., n, d), or of a layout: dimensions (d, N, H, B), of which missing ones are 1; for several
        heads (d, heads, N, H / heads, B).

        ValueError if `refusal` has a reason.
        """
        reason = refusal(self.tensor, array)
        if reason:
            raise ValueError(reason)
        # One line for each dimension, the innermost first: elements, bytes from one to the next, and how many a copy moves.
        size = array.dtype.itemsize
        lengths, steps = (1,) * (4 - array.ndim) + array.shape, (0,) * (4 - array.ndim) + array.strides
        boxes: tuple[int, ...] = (1, 1, self.rows, self.columns)
        if self.heads > 1:
            lengths = (lengths[0], lengths[1] // self.heads, lengths[2], self.heads, lengths[3])
            steps = (steps[0], steps[1] * self.heads, steps[2], steps[1], steps[3])
            boxes = (1, 1, self.rows, self.heads, self.columns)
        whole = -(-array.shape[-1] * size // UNIT) * UNIT  # a stride that no copy takes has to be a legal one all the same
        dimensions = [
            (length, step if length > 1 else whole, box) for length, step, box in zip(lengths, steps, boxes, strict=True)
        ][::-1]
        dims, strides, box = zip(*dimensions, strict=True)
        return MapPlan(self.tensor, array, dims, strides[1:], box, self.swizzle)


@dataclass(frozen=True)
class MapPlan:
    """A map that is to be made: of `array` (or of any with its layout), tuples with the innermost dimension first.

    dims: elements. strides: bytes from one to the next, of all dimensions but the innermost. box: elements of one copy.
    swizzle: bytes, 0 for none.
    """

    tensor: str
    array: Any
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int

    @property
    def dtype(self) -> str:
        """The name of the elements' type."""
        return str(self.array.dtype.name)

    def over(self, array: Any) -> MapPlan:
        """The same of another array of the same layout."""
        return replace(self, array=array)


def refusal(tensor: str, array: AnyArray) -> str | None:
    """The reason why TMA does not take an array (..., n, d) or layout, in one sentence; None if it does.

    Depends on shape, strides and the address modulo 16.
    """
    if 0 in array.shape:
        return f"TMA copies from tensors with elements, and {tensor} has shape {array.shape}"
    if not last_axis_contiguous(array):
        return f"TMA copies rows of neighbours, and {tensor}'s last axis has a stride of {array.strides[-1]} bytes"
    off = address(array) % UNIT
    if off:
        return f"TMA takes addresses that are multiples of {UNIT} bytes, and {tensor}'s is {off} bytes off"
    for axis, length, stride in zip(AXES[-array.ndim :], array.shape, array.strides, strict=True):
        if length > MOST_LENGTH:
            return f"TMA takes axes of at most 2**32 elements, and {tensor}'s {axis} has {length:,}"
        if axis != AXES[-1] and length > 1 and (stride <= 0 or stride % UNIT or stride >= MOST_STRIDE):
            what = f"positive multiples of {UNIT} bytes below 2**40"
            return f"TMA takes strides that are {what}, and {tensor}'s from {axis} to {axis} is {stride:,}"
    return None


def first_refusal(arrays: Mapping[str, AnyArray | None]) -> str | None:
    """The first reason why TMA does not take one of these, by tensor name."""
    reasons = (refusal(tensor, array) for tensor, array in arrays.items() if array is not None)
    return next((reason for reason in reasons if reason), None)
