"""The common part of NumPy and CuPy arrays, and what the kernels require of them: types, strides, alignment."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyflash.basics import ITEMSIZE as ITEMSIZE
from cupyflash.basics import Shape
from cupyflash.basics import is_number as is_number

# The widest copy between HBM and SRAM, in bytes.
MAX_ALIGNMENT = 16


class AnyArray(Protocol):
    """The common part of NumPy and CuPy arrays that a problem needs."""

    @property
    def shape(self) -> Shape: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def ndim(self) -> int: ...


class Held:
    """A value of a call that may hold arrays: a function, a mask whose tiles were found, blocks."""

    def held(self) -> tuple[Hashable, Mapping[str, Any]]:
        """The holder without its arrays, and its arrays by their names in a call."""
        raise NotImplementedError


class ArrayLayout(NamedTuple):
    """The layout of an array: all but its memory. `offset` is its address modulo `MAX_ALIGNMENT`.

    Arrays of equal layouts pose equal problems, so a launch that was prepared for one serves the other.
    """

    shape: Shape
    strides: tuple[int, ...]
    dtype: Any
    offset: int = 0

    @classmethod
    def of(cls, array: Any) -> ArrayLayout:
        """Return the layout of a NumPy or CuPy array."""
        return cls(array.shape, array.strides, array.dtype, address(array) % MAX_ALIGNMENT)

    @classmethod
    def contiguous(cls, shape: Shape, dtype: Any) -> ArrayLayout:
        """Return the layout of an array in C order, as it is allocated."""
        dtype = np.dtype(dtype)
        return cls(shape, tuple(math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))), dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def swapaxes(self, one: int, other: int) -> ArrayLayout:
        """The layout of `array.swapaxes(one, other)`."""
        axes = list(range(self.ndim))
        axes[one], axes[other] = axes[other], axes[one]
        return self._replace(shape=tuple(self.shape[a] for a in axes), strides=tuple(self.strides[a] for a in axes))


def dtype_name(dtype: Any, argument: str = "dtype") -> str:
    """The name of a supported dtype, from a name, a NumPy dtype or a scalar type."""
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype)
    if name not in ITEMSIZE:
        raise TypeError(f"{argument} must be one of {', '.join(ITEMSIZE)}, got {name}")
    return name


def array_dtype(name: str, array: Any) -> str:
    """The name of an array's dtype; TypeError with a hint for one that is not supported."""
    try:
        return dtype_name(array.dtype, name)
    except TypeError as error:
        if array.dtype.kind not in "fiu":
            raise
        library = "numpy" if isinstance(array, np.ndarray) else "cupy"
        raise TypeError(f"{error}: pass {name}.astype({library}.float32), or float16") from None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a name in `ITEMSIZE`; bfloat16 is that of ml_dtypes, which nothing else needs. ImportError without it."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"bfloat16 needs ml_dtypes ({error}): pip install ml_dtypes", name="ml_dtypes") from error
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def address(array: Any) -> int:
    """The address of an array's first element; for a layout, as far as it is known."""
    if isinstance(array, ArrayLayout):
        return array.offset
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def row_alignment(array: Any) -> int:
    """The largest power of two, up to 16 bytes, that divides the address of every row of an (..., n, d) array."""
    bits = address(array) | array.shape[-1] * array.dtype.itemsize | MAX_ALIGNMENT
    for length, stride in zip(array.shape[:-1], array.strides[:-1], strict=True):
        if length > 1:
            bits |= abs(stride)
    return int(bits & -bits)


def overlaps_itself(array: AnyArray) -> bool:
    """True if elements may share bytes: each stride, in order of size, must step over everything that the smaller ones reach."""
    reach = array.dtype.itemsize
    for stride, length in sorted((abs(stride), length) for length, stride in zip(array.shape, array.strides, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += (length - 1) * stride
    return False


def require_places(name: str, array: AnyArray, what: str = "element") -> None:
    """ValueError for an array to be written whose elements may share bytes."""
    if 0 not in array.shape and overlaps_itself(array):
        raise ValueError(f"{name} must have a place for every {what}, got strides {array.strides} bytes for shape {array.shape}")


def check_keys(q: AnyArray, keys: AnyArray, values: AnyArray, names: tuple[str, str] = ("k", "v")) -> None:
    """ValueError for keys of another head dimension than q's, and for values that do not go with them."""
    if keys.shape[-1] != q.shape[-1]:
        raise ValueError(f"{names[0]} must have q's head dimension {q.shape[-1]}, got shape {keys.shape}")
    if values.shape[:-1] != keys.shape[:-1]:
        raise ValueError(f"{names[1]} must have {names[0]}'s shape {keys.shape} but for the last axis, got {values.shape}")


def check_operand(name: str, array: Any, q: AnyArray) -> None:
    """TypeError or ValueError unless an array has q's number of axes and dtype, and strides that the kernels take."""
    check_array(name, array)
    if array.ndim not in (2, 3, 4):
        raise ValueError(f"{name} must be (n, d), (h, n, d) or (b, h, n, d), got shape {array.shape}")
    if array.ndim != q.ndim:
        raise ValueError(f"{name} must have as many axes as q, got shape {array.shape} beside q's {q.shape}")
    if array_dtype(name, array) != array_dtype("q", q):
        raise TypeError(f"{name} must have q's dtype {q.dtype}, got {array.dtype}")
    if not last_axis_contiguous(array):
        hint = "" if name == "out" else f": pass {name}.copy()"
        message = f"{name} must be contiguous along its last axis, got strides {array.strides} bytes for {array.dtype}{hint}"
        raise ValueError(message)
    check_strides(name, array)


def last_axis_contiguous(array: AnyArray) -> bool:
    """True if neighbours along the last axis are neighbours in memory, or there are none."""
    return not (array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize and 0 not in array.shape)


def check_array(name: str, array: Any) -> None:
    there = all(hasattr(array, attribute) for attribute in ("shape", "dtype", "strides", "ndim"))
    if not there or isinstance(array, np.generic):
        raise TypeError(f"{name} must be a NumPy or CuPy array, got {type(array).__name__}")
    if not getattr(array.dtype, "isnative", True):
        raise TypeError(f"{name} must have its bytes in the machine's own order, got dtype {array.dtype.str}")


def require_shape(name: str, array: AnyArray, shape: Shape, what: str = "") -> None:
    """ValueError for another shape; `what` describes the right one."""
    if array.shape != shape:
        raise ValueError(f"{name} must have shape {shape}{what}, got {array.shape}")


def require_dtype(name: str, array: AnyArray, dtype: Any) -> None:
    """TypeError for another type of elements."""
    if array.dtype != dtype:
        raise TypeError(f"{name} must be of dtype {np.dtype(dtype)}, got {array.dtype}")


def require_integers(name: str, array: AnyArray) -> None:
    """TypeError unless the elements are integers, of any width; the kernels take them as 32 bits."""
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be of an integer dtype, got {array.dtype}")


def check_strides(name: str, array: AnyArray) -> None:
    size = array.dtype.itemsize
    if any(stride % size for stride in array.strides):
        raise ValueError(f"{name} must have strides in whole elements, got {array.strides} bytes for {array.dtype}")
    if address(array) % size and 0 not in array.shape:
        raise ValueError(f"{name} must be aligned to its elements of {size} bytes, got one {address(array) % size} bytes off")


def check_scores_like(name: str, array: AnyArray, scores: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """An array of one of `dtypes` that broadcasts to the shape of S."""
    check_array(name, array)
    if array.dtype.name not in dtypes:
        added = dtypes == ("bool",) and array.dtype.name in ITEMSIZE
        hint = ": numbers that are added to the scores are bias" if added else ""
        raise TypeError(f"{name} must be of dtype {' or '.join(dict.fromkeys(dtypes))}, got {array.dtype}{hint}")
    check_strides(name, array)
    tail = scores[len(scores) - array.ndim :] if array.ndim <= len(scores) else None
    if tail is None or any(length not in (1, whole) for length, whole in zip(array.shape, tail, strict=True)):
        raise ValueError(f"{name} must broadcast to (..., n_q, n_k) = {scores}, got shape {array.shape}")


def heads_first(array: Any) -> Any:
    """(..., n, h, d) as (..., h, n, d), a view; an array without heads as it is."""
    return array.swapaxes(-3, -2) if array.ndim > 2 else array


def of_heads(rows: Any) -> Any:
    """The sums over each head's rows, (h,), of an array (..., h, n) or (n,) of NumPy or CuPy."""
    heads = rows.shape[-2] if rows.ndim > 1 else 1
    return rows.reshape(math.prod(rows.shape[:-2]), heads, rows.shape[-1]).sum(axis=(0, 2))
