"""Fresh memory: arrays that nobody has written yet, as `cupy.empty` returns them, filled with a pattern that no program writes.

An element that still has the pattern is unwritten: a kernel that reads it has a finding, and a result shows where it was never
stored. Floating-point types have a NaN of a rare payload, integers 0xA5 in each byte (a bool is True).
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from .text.syntax import Array

_PAYLOADS = {2: 0x7E5A, 4: 0x7FC5A5A5, 8: 0x7FF85A5AA5A55A5A}
_fresh: dict[int, tuple[int, int, weakref.ref[Array], Array]] = {}
"""The fresh allocations that still live, by the identity of the array: first and last address, and which bytes no launch wrote."""


def pattern(dtype: Any) -> Array:
    """Returns one element of the pattern, as bytes (uint8)."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return np.ones(kind.itemsize, np.uint8)
    name, size = kind.name, kind.itemsize
    if kind.kind == "c":
        return np.tile(pattern(f"f{size // 2}"), 2)
    if kind.kind == "f" or "float" in name:
        bits = 0x7FE5 if name == "bfloat16" else _PAYLOADS.get(size, (1 << (8 * size - 1)) - 1)
        return np.frombuffer(bits.to_bytes(size, "little"), np.uint8)
    return np.full(size, 0xA5, np.uint8)


def filled(array: Array) -> Array:
    """Fills an array of its own memory with the pattern, remembers that it is fresh, and returns it."""
    if array.size and not array.dtype.hasobject:
        plain = np.asarray(array)
        elements = plain.view(f"V{plain.itemsize}")
        elements[...] = pattern(plain.dtype).view(elements.dtype)[0]
        start, stop = np.lib.array_utils.byte_bounds(plain)
        key = id(array)
        _fresh[key] = start, stop, weakref.ref(array, lambda _: _fresh.pop(key, None)), np.ones(stop - start, bool)
    return array


def empty(*args: Any, **kwargs: Any) -> Array:
    """Returns `numpy.empty` of the arguments, fresh."""
    return filled(np.empty(*args, **kwargs))


def empty_like(*args: Any, **kwargs: Any) -> Array:
    """Returns `numpy.empty_like` of the arguments, fresh."""
    return filled(np.empty_like(*args, **kwargs))


def unwritten_elements(array: Array) -> Array:
    """Returns a mask of the elements that have the pattern, whoever allocated the array."""
    kind = pattern(array.dtype)
    plain = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).reshape(*array.shape, array.itemsize)
    found: Array = (plain == kind).all(axis=-1)
    return found


def untouched(array: Array) -> Array | None:
    """Returns which bytes no launch wrote, as a view into the allocation's; None if the memory is not fresh."""
    if not _fresh or not array.size or array.dtype.hasobject:
        return None
    start, stop = np.lib.array_utils.byte_bounds(array)
    known = next(((first, memory) for first, last, _, memory in _fresh.values() if first <= start and stop <= last), None)
    if known is None:
        return None
    offset = int(array.__array_interface__["data"][0]) - known[0]
    return np.ndarray((*array.shape, array.itemsize), bool, known[1], offset, (*array.strides, 1))


def unwritten(array: Array) -> Array | None:
    """Returns a mask of the unwritten bytes of an array in fresh memory, None if there are none; an element's bytes are the last
    axis. A byte is written if a launch wrote it, or its element has no pattern any more."""
    never = untouched(array)
    if never is None:
        return None
    mask: Array = never & unwritten_elements(array)[..., None]
    return mask if mask.any() else None


def launched(array: Array, still: Array | None) -> None:
    """Notes which bytes of an array are unwritten after a launch; None: none is."""
    never = untouched(array)
    if never is not None:
        never[...] = False if still is None else still.reshape(never.shape)


def never_written(array: Array) -> Array:
    """Returns a mask of the elements that nobody wrote, as far as it can be told: in memory that is not fresh by the pattern, which
    a small integer may have by chance."""
    never = untouched(array)
    small = array.dtype.kind in "biu" and array.itemsize < 4
    known = np.full(array.shape, not small) if never is None else never.all(axis=-1)
    return np.asarray(known & unwritten_elements(array))
