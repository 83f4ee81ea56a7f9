"""The choice of where a call runs: CuPy arrays on the current GPU, NumPy arrays on the simulated device."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from cupyflash.arrays import address, is_number
from cupyflash.basics import Array, Report, Values
from cupyflash.device import Device
from cupyflash.launch.simulated import Simulation, current_simulation

# DLPack's numbers for memory of the host: kDLCPU, kDLCUDAHost (pinned).
DLPACK_HOST = (1, 3)


def on_gpu(**arrays: Any) -> bool:
    """True when all arrays are CuPy's, False when all are NumPy's; TypeError for anything else, or foreign byte order."""
    cupy = sys.modules.get("cupy")
    kinds = {}
    for name, array in arrays.items():
        if isinstance(array, np.ndarray):
            kinds[name] = "NumPy"
        elif cupy is not None and isinstance(array, cupy.ndarray):
            kinds[name] = "CuPy"
        else:
            raise TypeError(f"{name} must be a NumPy or CuPy array, got {type(array).__name__}")
        if not array.dtype.isnative:
            raise TypeError(f"{name} must have its bytes in the machine's own order, got dtype {array.dtype.str}")
    if len(set(kinds.values())) > 1:
        mixed = ", ".join(f"{name} is {kind}'s" for name, kind in kinds.items())
        raise TypeError(f"all arrays must be NumPy's or all CuPy's: {mixed}")
    return "CuPy" in kinds.values()


def as_arrays(given: Values, required: Collection[str] = ()) -> Report:
    """The arrays by name, each by `as_array`; one that is None is left out unless it is `required`."""
    return {name: as_array(name, array) for name, array in given.items() if array is not None or name in required}


def as_array(name: str, array: Any, others: str = "") -> Any:
    """NumPy and CuPy arrays unchanged; other objects that offer their memory (DLPack, CUDA array interface) as views.

    DLPack goes first: it knows bfloat16, and orders the pending work of the object's own stream before CuPy's current stream,
    whereas the CUDA array interface has two nameless bytes, and at best waits. TypeError for everything else: lists, scalars, None,
    masked arrays, tensors that require grad; `others` are words for other types that the caller takes.
    """
    cupy = sys.modules.get("cupy")
    if isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray):
        return array
    if cupy is not None and isinstance(array, cupy.ndarray):
        return array
    if not isinstance(array, np.generic | np.ma.MaskedArray):
        if getattr(array, "requires_grad", False) is True:
            raise TypeError(f"{name} must be a tensor that does not require grad, got one that does: pass {name}.detach()")
        if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
            try:
                if array.__dlpack_device__()[0] in DLPACK_HOST:
                    if str(getattr(array, "dtype", None)) == "torch.bfloat16":
                        raise TypeError(
                            "NumPy has no bfloat16 of its own: "
                            f"pass {name}.view(torch.int16).numpy().view(ml_dtypes.bfloat16), the same memory, or {name}.float()"
                        )
                    return np.from_dlpack(array)
                return importlib.import_module("cupy").from_dlpack(array)
            except (BufferError, RuntimeError, TypeError, ValueError) as error:
                dtype = f", of dtype {array.dtype}," if hasattr(array, "dtype") else ""
                raise TypeError(f"{name}{dtype} cannot be taken through DLPack: {error}") from error
        if hasattr(array, "__cuda_array_interface__"):
            try:
                return importlib.import_module("cupy").asarray(array)
            except (RuntimeError, TypeError, ValueError) as error:
                raise TypeError(f"{name} cannot be taken through the CUDA array interface: {error}") from error
    raise TypeError(f"{name} must be a NumPy or CuPy array{others}, got {type(array).__name__}")


def as_integers(name: str, numbers: Any) -> Any:
    """A list or tuple of integers as a NumPy array of int32; all else as `as_array`. TypeError or ValueError for other numbers."""
    if not isinstance(numbers, list | tuple):
        return as_array(name, numbers, ", or a list or tuple of integers")
    limits = np.iinfo(np.int32)
    for number in numbers:
        if not is_number(number):
            raise TypeError(f"{name} must be integers, got {number!r} among them")
        if not limits.min <= int(number) <= limits.max:
            raise ValueError(f"{name} must fit 32 bits, got {number} among them")
    return np.array(numbers, np.int32)


def placed(arrays: Values, integers: Values) -> tuple[bool, Report]:
    """(True if a call's arrays are on a GPU, those of its integers that must be there too, by name). TypeError as `on_gpu`.

    NumPy's integers beside arrays on a GPU stay on the host, where their values can be checked; a call copies them.
    """
    gpu = on_gpu(**arrays)
    beside = {name: array for name, array in integers.items() if not (gpu and isinstance(array, np.ndarray))}
    on_gpu(**arrays, **beside)
    return gpu, beside


def device_of(gpu: bool, **arrays: Any) -> AbstractContextManager[object]:
    """A context in which the arrays' own GPU is the current one; ValueError if they are on several."""
    if not gpu:
        return nullcontext()
    ordinals = {name: int(array.device) for name, array in arrays.items()}
    if len(set(ordinals.values())) > 1:
        places = ", ".join(f"{name} is on GPU {ordinal}" for name, ordinal in ordinals.items())
        raise ValueError(f"all arrays must be on one GPU: {places}")
    cuda = sys.modules["cupy"].cuda
    ordinal = next(iter(ordinals.values()))
    return nullcontext() if ordinal == cuda.runtime.getDevice() else cuda.Device(ordinal)


def refuse_written(arrays: Values, written: Iterable[str]) -> None:
    """ValueError when one of those that are written cannot be, or shares memory with another: the kernels read after they have
    begun to write."""
    known = {name: (address(array), *reach_of(array)) for name, array in arrays.items()}
    spans = {name: (at - before, at + behind) for name, (at, before, behind) in known.items()}
    for one in written:
        if isinstance(arrays[one], np.ndarray) and not arrays[one].flags.writeable:
            raise ValueError(f"{one} must be writeable, got a read-only array")
        first, end = spans[one]
        for other, (other_first, other_end) in spans.items():
            near = other_first < end and first < other_end and other != one
            if near and np.shares_memory(_Extent.of(arrays[one]), _Extent.of(arrays[other])):
                raise ValueError(f"{one} must not overlap {other}, but they share memory")


def reach_of(array: Any) -> tuple[int, int]:
    """The numbers of bytes of an array before its first element's address, and from that address on."""
    if 0 in array.shape:
        return 0, 0
    steps = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    return -sum(step for step in steps if step < 0), array.dtype.itemsize + sum(step for step in steps if step > 0)


class _Extent:
    """An array's layout without its memory, for NumPy to reason about; CuPy's too, without asking the GPU."""

    def __init__(self, array: Any, start: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (start, True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
        }

    @classmethod
    def of(cls, array: Any) -> Array:
        return np.asarray(cls(array, address(array)))


def target(gpu: bool) -> tuple[Device, Simulation | None]:
    """The device that a call is planned for, and the simulation that stands in for it (None on a GPU)."""
    if gpu:
        return current_gpu(sys.modules["cupy"].cuda.runtime.getDevice()), None
    simulation = current_simulation()
    return simulation.device, simulation


@cache
def current_gpu(ordinal: int) -> Device:
    """The GPU of that number; asked for once, since its properties take longer to read than a small call to run."""
    return Device.current(ordinal)
