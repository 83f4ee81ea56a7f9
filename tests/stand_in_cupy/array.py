"""Memory and arrays of the stand-in: NumPy's underneath, with CuPy's refusals."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import cupy as real
import numpy as np

from .streams import Device, enqueue, get_current_stream, runtime, wait_for

ALIGNMENT = 512
FILLED = 1 << 26
"""Fresh memory up to so many bytes is all ones, NaN in every floating-point type; more of it is the system's zeros, untouched."""


class Memory:
    """An allocation on a device, or another's memory; a pointer to it, and to places in it, is the host's own."""

    living: ClassVar[weakref.WeakSet[Memory]] = weakref.WeakSet()

    def __init__(self, size: int, device_id: int) -> None:
        room = np.zeros(size + ALIGNMENT, np.uint8) if size > FILLED else np.full(size + ALIGNMENT, 0xFF, np.uint8)
        # Over a memoryview, not a view of `room`: the machine places what NumPy allocated anew, and anything else as it is aligned.
        self.bytes = np.frombuffer(memoryview(room), np.uint8, size, -room.ctypes.data % ALIGNMENT)
        self.device_id = device_id
        Memory.living.add(self)

    @classmethod
    def at(cls, address: int) -> Memory:
        """The allocation that an address lies in."""
        for memory in list(cls.living):
            if memory.bytes.ctypes.data <= address <= memory.bytes.ctypes.data + memory.bytes.size:
                return memory
        raise AssertionError(f"{address:#x} is in no memory of the device")


class MemoryPointer:
    """The stand-in of `cupy.cuda.MemoryPointer`."""

    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.bytes.ctypes.data + offset, mem.device_id

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.bytes.ctypes.data + offset)

    def copy_from_async(self, mem: MemoryPointer, size: int) -> None:
        """Copy from another device's memory too."""
        source = ndarray(size, np.uint8, mem)
        enqueue(lambda out: np.copyto(out, source.host), ndarray(size, np.uint8, self))

    def copy_to_host_async(self, mem: int, size: int, stream: Any) -> None:
        with stream:
            enqueue(lambda x: np.copyto(_pinned(mem, size), x), ndarray(size, np.uint8, self))

    def copy_from_host_async(self, mem: int, size: int, stream: Any) -> None:
        with stream:
            enqueue(lambda out: np.copyto(out, _pinned(mem, size)), ndarray(size, np.uint8, self))


def _pinned(address: int, size: int) -> np.ndarray:
    """Memory of the host that `alloc_pinned_memory` gave."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def alloc_pinned_memory(size: int) -> Any:
    """Pinned memory as CuPy's: rounded up, and freed with the last reference to it."""
    return np.full(-(-size // ALIGNMENT) * ALIGNMENT, 0xFF, np.uint8)


class MemoryPool:
    """The stand-in of `cupy.cuda.MemoryPool`, which rounds to 512 bytes; nothing is kept for the next."""

    def __init__(self) -> None:
        self._total = 0

    def malloc(self, size: int) -> MemoryPointer:
        self._total += -(-size // ALIGNMENT) * ALIGNMENT
        return MemoryPointer(Memory(size, runtime.getDevice()), 0)

    def total_bytes(self) -> int:
        return self._total


class _Allocator(threading.local):
    malloc: Callable[[int], MemoryPointer] = MemoryPool().malloc


_allocator = _Allocator()


@contextlib.contextmanager
def using_allocator(malloc: Callable[[int], MemoryPointer]) -> Iterator[None]:
    before, _allocator.malloc = _allocator.malloc, malloc
    try:
        yield
    finally:
        _allocator.malloc = before


def host_of(value: Any) -> Any:
    """The value with which NumPy computes: an array's contents, or a scalar; NumPy's arrays are refused, as by CuPy's ufuncs."""
    if isinstance(value, ndarray):
        return value.host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    return value


def elementwise(name: str, *operands: Any) -> ndarray:
    """NumPy's ufunc of this name, done later; refused for types that CuPy's has no loop for."""
    function, hosts = getattr(np, name), [host_of(operand) for operand in operands]
    loops = getattr(getattr(real, name), "types", real.isinf.types)  # isneginf is made of isinf
    for host in hosts:
        own = isinstance(host, np.ndarray) and host.dtype.kind == "V"  # bfloat16, which is cast to nothing by itself
        if own and not any(host.dtype.char in loop.split("->")[0] for loop in loops):
            raise TypeError(f"Wrong type ({host.dtype}) of arguments for cupy_{name}")
    # One element of each tells the type: this is NumPy's own rule, which CuPy follows.
    with np.errstate(all="ignore"):
        dtype = function(*(np.ones((), host.dtype) if isinstance(host, np.ndarray) else host for host in hosts)).dtype
    made = empty(np.broadcast_shapes(*(np.shape(host) for host in hosts)), dtype)

    def act(out: np.ndarray, *_: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            out[...] = function(*hosts)

    enqueue(act, made, *(operand for operand in operands if isinstance(operand, ndarray)))
    return made


class ndarray:
    """The stand-in of `cupy.ndarray`, with the methods that are used here."""

    __array_ufunc__ = None  # NumPy's operators leave it to ours, which refuse
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, strides: Any = None) -> None:
        shape, dtype = ((shape,) if isinstance(shape, int) else tuple(shape)), np.dtype(dtype)
        if memptr is None:
            memptr = _allocator.malloc(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        offset = memptr.ptr - memptr.mem.bytes.ctypes.data
        self._set(np.ndarray(shape, dtype, memptr.mem.bytes, offset, strides), memptr.mem)

    living: ClassVar[dict[int, list[weakref.ref[ndarray]]]] = {}

    @classmethod
    def at(cls, address: int) -> ndarray:
        """The largest array that begins at an address, of those that somebody holds: what a kernel is given in a struct."""
        found = [array for array in (reference() for reference in cls.living.get(address, ())) if array is not None]
        if not found:
            raise AssertionError(f"{address:#x} is where no array of the device begins")
        return max(found, key=lambda array: sum((n - 1) * abs(s) for n, s in zip(array.shape, array.strides, strict=True)))

    def _set(self, host: np.ndarray, mem: Memory) -> None:
        self.host = host
        references = self.living.setdefault(host.ctypes.data, [])
        references[:] = [*(reference for reference in references if reference() is not None), weakref.ref(self)]
        self.data = MemoryPointer(mem, host.ctypes.data - mem.bytes.ctypes.data)
        self.shape, self.strides, self.dtype, self.ndim, self.size = host.shape, host.strides, host.dtype, host.ndim, host.size
        self.nbytes, self.itemsize, self.flags = host.nbytes, host.itemsize, host.flags

    def _view(self, host: np.ndarray) -> ndarray:
        view = ndarray.__new__(ndarray)
        view._set(host, self.data.mem)
        return view

    @property
    def device(self) -> Device:
        return Device(self.data.device_id)

    # -- to the host, which waits -----------------------------------------------------------------------------------------

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
        )

    def get(self) -> np.ndarray:
        stream = get_current_stream()
        if stream.is_capturing():
            raise RuntimeError("the current stream is capturing, so D2H transfers are disallowed")
        wait_for(stream)
        return self.host.copy()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self) -> bytes:
        return self.get().tobytes()

    def item(self) -> Any:
        return self.get().item()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __len__(self) -> int:
        return len(self.host)

    # -- views ------------------------------------------------------------------------------------------------------------

    def view(self, dtype: Any) -> ndarray:
        return self._view(self.host.view(dtype))

    def swapaxes(self, one: int, other: int) -> ndarray:
        return self._view(self.host.swapaxes(one, other))

    def reshape(self, *shape: Any) -> ndarray:
        made = self.host.reshape(*shape)
        if not np.shares_memory(made, self.host) and made.size:
            raise AssertionError("the stand-in reshapes contiguous arrays only")
        return self._view(made)

    def __getitem__(self, key: Any) -> ndarray:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(each is None or each is Ellipsis or isinstance(each, int | slice) for each in keys):
            raise AssertionError(f"the stand-in has basic slices only, got {key!r}")
        host = self.host[key] if Ellipsis in keys else self.host[(*keys, ...)]
        return self._view(host)

    # -- work -------------------------------------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any) -> None:
        view, given = self[key], host_of(value)
        if isinstance(value, ndarray):
            enqueue(np.copyto, view, value) if value.dtype == view.dtype else enqueue(_cast, view, value)
        else:
            enqueue(lambda out: out.__setitem__(..., given), view)

    def __iadd__(self, more: Any) -> ndarray:
        if isinstance(more, ndarray):
            enqueue(lambda out, x: np.add(out, x, out=out), self, more)
        else:
            enqueue(lambda out: np.add(out, more, out=out), self)
        return self

    def __neg__(self) -> ndarray:
        return elementwise("negative", self)

    def fill(self, value: Any) -> None:
        self[...] = value

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        made = empty(self.shape, dtype)
        enqueue(_cast, made, self)
        return made

    def copy(self) -> ndarray:
        return self.astype(self.dtype)

    def _reduced(self, function: Callable[..., Any], axis: int | tuple[int, ...] | None, keepdims: bool) -> ndarray:
        told = function(np.ones(self.shape or (1,), self.dtype) if self.size < 2 else np.ones((2,) * self.ndim, self.dtype))
        given = range(self.ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
        axes = tuple(each % self.ndim for each in given)
        kept = [(length, 1)[n in axes] for n, length in enumerate(self.shape) if keepdims or n not in axes]
        made = empty(tuple(kept), told.dtype)
        enqueue(lambda out, x: out.__setitem__(..., function(x, axis=axis, keepdims=keepdims)), made, self)
        return made

    def all(self, axis: int | None = None, keepdims: bool = False) -> ndarray:
        return self._reduced(np.all, axis, keepdims)

    def sum(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> ndarray:
        return self._reduced(np.sum, axis, keepdims)

    def max(self, axis: int | None = None, keepdims: bool = False) -> ndarray:
        return self._reduced(np.max, axis, keepdims)

    def __matmul__(self, other: ndarray) -> ndarray:
        shape = (*np.broadcast_shapes(self.shape[:-2], other.shape[:-2]), self.shape[-2], other.shape[-1])
        made = empty(shape, np.result_type(self.dtype, other.dtype))
        enqueue(lambda out, a, b: np.matmul(a, b, out=out), made, self, other)
        return made

    # -- protocols --------------------------------------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": get_current_stream().ptr or 1,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.data.device_id  # kDLCUDA

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None) -> Capsule:
        if stream is not None and (not isinstance(stream, int) or stream < -1):
            raise ValueError(f"On CUDA, the valid stream for the DLPack protocol is -1, 1, 2, or any larger value, got {stream}")
        return Capsule(self)


class Capsule:
    """The capsule that DLPack passes, once."""

    def __init__(self, array: ndarray) -> None:
        self.array: ndarray | None = array

    def taken(self) -> ndarray:
        array, self.array = self.array, None
        if array is None:
            raise ValueError("A DLPack tensor object cannot be consumed multiple times")
        return array._view(array.host)


def _cast(out: np.ndarray, x: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        out[...] = x.astype(out.dtype)


def _operators() -> None:
    """Python's operators by NumPy's names for them."""
    binary = {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "and": "bitwise_and"}
    for python, numpy in binary.items():
        setattr(ndarray, f"__{python}__", lambda a, b, numpy=numpy: elementwise(numpy, a, b))
        setattr(ndarray, f"__r{python}__", lambda a, b, numpy=numpy: elementwise(numpy, b, a))
    for python, numpy in {
        "eq": "equal",
        "ne": "not_equal",
        "lt": "less",
        "le": "less_equal",
        "gt": "greater",
        "ge": "greater_equal",
    }.items():
        setattr(ndarray, f"__{python}__", lambda a, b, numpy=numpy: elementwise(numpy, a, b))


_operators()


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)
