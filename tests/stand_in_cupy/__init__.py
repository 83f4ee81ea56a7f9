"""A stand-in for CuPy that needs no GPU: the tests of `tests/gpu` run on it with CUPYFLASH_STAND_IN=1.

It has what cupyflash and those tests use of CuPy, with the real one's types and refusals: no implicit conversion to NumPy, no
mixing with NumPy's arrays, ufunc loops that exist (asked of the real CuPy, which is installed and needs no GPU for that), scalars
of the sizes that a kernel's parameters have, no transfer to or from the host while a graph is captured. Kernels are compiled by
NVRTC, with CuPy's options, and executed by the PTX machine, which refuses a kernel with faults.

Work is queued on its stream, and is done when somebody waits: a test that forgets to wait sees unwritten memory, which is NaN. A
captured graph holds no memory, as CuPy's does not: to replay one whose memory was given back is an error.

Not modelled: time; memory that other arrays take over (fresh memory is always new, and what was freed too early is seen in graphs
only); blocking streams apart from each other; what no kernel here does (cuBLAS' rounding, the numbers that CuPy draws); and all
that a chip does otherwise than PTX says. CUPYFLASH_STAND_IN=T4 takes another device of the catalogue than the A100-40GB. There
are two GPUs.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import cupy as real
import numpy as np
from cupy.cuda import nvrtc
from numpy.lib import stride_tricks

from cupyflash import Device as Figures
from cupyflash.launch import cubins, driver

from . import nccl
from .array import Memory, MemoryPointer, MemoryPool, alloc_pinned_memory, elementwise, empty, host_of, ndarray, using_allocator
from .maps import functions
from .raw import RawKernel, RawModule, compiler, machine_code
from .streams import Device, Event, Stream, enqueue, get_current_stream, runtime

__version__ = real.__version__
float16, float32, int32 = np.float16, np.float32, np.int32


def full(shape: Any, value: Any, dtype: Any = None) -> ndarray:
    made = empty(shape, np.asarray(value).dtype if dtype is None else dtype)
    made.fill(value)
    return made


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def empty_like(a: ndarray, dtype: Any = None) -> ndarray:
    """An empty array in a's order of axes if its elements fill their memory, as NumPy and CuPy have it (order "K")."""
    like = np.empty_like(np.lib.stride_tricks.as_strided(np.empty((), a.dtype), a.shape, a.strides), dtype, subok=False)
    made = empty(like.size, like.dtype)
    return made._view(stride_tricks.as_strided(made.host, like.shape, like.strides))


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    made = empty_like(a, dtype)
    made.fill(0)
    return made


def ones_like(a: ndarray, dtype: Any = None) -> ndarray:
    made = empty_like(a, dtype)
    made.fill(1)
    return made


def asnumpy(a: Any) -> np.ndarray:
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def asarray(a: Any, dtype: Any = None, order: str = "K") -> ndarray:
    """A view of memory on the device; of what the host has, a copy, on the current stream."""
    if isinstance(a, ndarray):
        typed = a if dtype is None else a.astype(dtype, copy=False)
        return typed if order == "K" or typed.flags.c_contiguous else typed.copy()
    if hasattr(a, "__cuda_array_interface__"):
        return _of_interface(a.__cuda_array_interface__)
    host = np.array(a, dtype)
    if get_current_stream().is_capturing():
        raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")
    made = empty(host.shape, host.dtype)
    enqueue(lambda out: np.copyto(out, host), made)
    return made


def array(a: Any, dtype: Any = None) -> ndarray:
    return asarray(a, dtype).copy()


def _of_interface(told: dict[str, Any]) -> ndarray:
    dtype = np.dtype(told["typestr"])
    if told.get("stream") is not None:
        runtime.deviceSynchronize()  # CuPy waits for the stream that the producer names
    address = told["data"][0]
    if not address:
        return empty(told["shape"], dtype)
    memory = Memory.at(address)
    return ndarray(told["shape"], dtype, MemoryPointer(memory, address - memory.bytes.ctypes.data), told.get("strides"))


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    if not isinstance(a, ndarray):
        raise TypeError(f"Argument 'a' has incorrect type (expected cupy._core.core._ndarray_base, got {type(a).__name__})")
    return asarray(a, dtype, order="C")


def from_dlpack(array: Any) -> ndarray:
    kind, _ = array.__dlpack_device__()
    if kind != 2:
        raise TypeError("CPU arrays cannot be directly imported to CuPy.")
    made: ndarray = array.__dlpack__(stream=get_current_stream().ptr or 1, max_version=(1, 0), copy=None).taken()
    return made


def arange(*args: Any, dtype: Any = None) -> ndarray:
    return asarray(np.arange(*args, dtype=dtype))


def tri(n: int, dtype: Any = float) -> ndarray:
    return asarray(np.tri(n, dtype=dtype))


def broadcast_to(a: ndarray, shape: Any) -> ndarray:
    return a._view(np.broadcast_to(a.host, shape))


def concatenate(arrays: list[ndarray], axis: int = 0) -> ndarray:
    hosts = [host_of(each) for each in arrays]
    made = empty(np.concatenate(hosts, axis).shape, hosts[0].dtype)
    enqueue(lambda out, *_: np.copyto(out, np.concatenate(hosts, axis)), made, *arrays)
    return made


def where(condition: Any, x: Any, y: Any) -> ndarray:
    """NumPy's `where`, with the common type of x and y."""
    hosts = [host_of(each) for each in (condition, x, y)]
    dtype = np.where(True, *(np.ones((), host.dtype) if isinstance(host, np.ndarray) else host for host in hosts[1:])).dtype
    made = empty(np.broadcast_shapes(*map(np.shape, hosts)), dtype)
    enqueue(
        lambda out, *_: np.copyto(out, np.where(*hosts)), made, *(each for each in (condition, x, y) if isinstance(each, ndarray))
    )
    return made


def _ufunc(name: str) -> Any:
    return lambda *operands: elementwise(name, *operands)


maximum, exp, log, isneginf = map(_ufunc, ("maximum", "exp", "log", "isneginf"))

random = types.SimpleNamespace(standard_normal=lambda size, dtype=float: asarray(np.random.standard_normal(size).astype(dtype)))

cuda = types.SimpleNamespace(
    Device=Device,
    Event=Event,
    MemoryPointer=MemoryPointer,
    MemoryPool=MemoryPool,
    Stream=Stream,
    alloc_pinned_memory=alloc_pinned_memory,
    get_current_stream=get_current_stream,
    nccl=nccl,
    runtime=runtime,
    using_allocator=using_allocator,
)


def install(device: str = "1") -> None:
    """Be `cupy` from now on, on `device` ("1": the A100-40GB). `import cupy.cuda` and below stay the real one's."""
    nvrtc.getVersion()  # loads the library, while `cupy` is still the one that knows where it lies
    cubins.compiled, cubins.compiler = machine_code, compiler
    driver.functions = lambda: functions
    if device != "1":
        runtime.figures = Figures.named(device)
    for lazy in ("cupyx", "cupy.testing"):  # they load when somebody looks at them, as hypothesis does at all modules
        sys.modules.pop(lazy, None)
    sys.modules["cupy"] = sys.modules[__name__]
    sys.modules["nccl"] = sys.modules["nccl.core"] = nccl.nccl4py  # type: ignore[assignment]


__all__ = ["RawKernel", "RawModule", "cuda", "install", "ndarray"]
