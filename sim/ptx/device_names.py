"""Replaces the module `cupy` for a while, without a GPU: array functions are NumPy's, raw kernels run on the PTX machine.

with simulated_cupy():
    x = cupy.arange(1000, dtype=cupy.float32)
    cupy.RawKernel(code, "twice")((8,), (128,), (x, x.size))
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from cupyflash.launch import first_use

from . import cupy_kernels, fresh
from .cupy_kernels import ElementwiseKernel, ReductionKernel, compile_with_cache
from .rawkernel import DeviceArray, RawKernel, RawModule, place_in, settings


def on_device(value: Any) -> Any:
    """Returns NumPy's result as CuPy gives it: arrays of the device, without dimensions where NumPy has a scalar."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value).view(DeviceArray)
    if isinstance(value, (tuple, list)):
        return type(value)(map(on_device, value)) if type(value) in (tuple, list) else value
    return value


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a NumPy function: it returns arrays of the device, and takes `dtype` even if NumPy's does not (random)."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return on_device(function(*args, **kwargs))
        except TypeError:
            dtype = kwargs.pop("dtype", None)
            if dtype is None:
                raise
            return on_device(function(*args, **kwargs)).astype(dtype)

    return call


def copied(a: Any, dtype: Any = None, **kwargs: Any) -> DeviceArray:
    """Does what `asarray` and its like do: arrays of the device stay as they are, the host's are copied."""
    kwargs.pop("blocking", None)
    made = np.asanyarray(a, dtype, **kwargs) if isinstance(a, DeviceArray) else np.array(a, dtype, **kwargs)
    return np.asarray(made).view(DeviceArray)


def asnumpy(a: Any, *_: Any, **__: Any) -> np.ndarray:
    return a.get() if isinstance(a, DeviceArray) else np.asarray(a)


class Submodule:
    """`random`, `linalg` or `fft` of NumPy's, with results on the device."""

    def __init__(self, module: ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        return wrapped(found) if callable(found) and not isinstance(found, type) else found


class IdleQueue:
    """A stream, an event or a device: everything is done when the call returns, so there is nothing to wait for."""

    ptr, id = 0, 0

    def __init__(self, *_: Any, **__: Any):
        pass

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return self

    use = synchronize = record = wait_event = __enter__ = _nothing

    def __exit__(self, *_: Any) -> None:
        pass

    @property
    def compute_capability(self) -> str:
        return (settings().arch or "").removeprefix("compute_")


class IdlePool:
    """A pool of memory, which is NumPy's: it holds nothing."""

    def _nothing(self, *_: Any, **__: Any) -> int:
        return 0

    used_bytes = free_bytes = total_bytes = n_free_blocks = get_limit = _nothing
    free_all_blocks = free_all_free = set_limit = _nothing


class IdleStream(IdleQueue):
    null: IdleQueue


IdleStream.null = IdleStream()


def replacements(cupy: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yields the names to replace during the simulation: (module, name, value)."""
    own = {
        "RawKernel": RawKernel,
        "RawModule": RawModule,
        "ElementwiseKernel": ElementwiseKernel,
        "ReductionKernel": ReductionKernel,
        "ndarray": DeviceArray,
        "asnumpy": asnumpy,
        "is_available": lambda: True,
        "memoize": lambda *_, **__: functools.cache,
        "get_default_memory_pool": IdlePool,
        "get_default_pinned_memory_pool": IdlePool,
        "get_array_module": lambda *args: cupy if any(isinstance(arg, DeviceArray) for arg in args) else np,
        "empty": wrapped(fresh.empty),
        "empty_like": wrapped(fresh.empty_like),
        "asarray": copied,
        "asanyarray": copied,
        "ascontiguousarray": functools.partial(copied, order="C"),
        "asfortranarray": functools.partial(copied, order="F"),
        **{name: Submodule(getattr(np, name)) for name in ("random", "linalg", "fft")},
    }
    for name in dir(cupy):
        there, numpys = getattr(cupy, name), getattr(np, name, None)
        if name in own:
            yield cupy, name, own[name]
        elif (
            not name.startswith("_")
            and callable(there)
            and callable(numpys)
            and there is not numpys
            and not isinstance(numpys, type)
        ):
            yield cupy, name, numpys if isinstance(numpys, np.ufunc) else wrapped(numpys)
    for kernel in (ElementwiseKernel, ReductionKernel):  # by which `cupy.vectorize` calls them
        yield cupy._core, kernel.__name__, kernel
    yield cupy.cuda.device, "get_compute_capability", lambda: IdleQueue().compute_capability
    yield cupy.cuda, "get_elapsed_time", lambda *_: 0.0
    for name, value in {"Stream": IdleStream, "Event": IdleQueue, "Device": IdleQueue}.items():
        yield cupy.cuda, name, value
    # `cupyx.jit` keeps what it compiled by the device's number: none that a GPU has.
    yield cupy.cuda, "get_device_id", lambda: -1
    yield cupy._core.core, "compile_with_cache", compile_with_cache
    yield from cupy_kernels.functions_of_jit(cupy)
    yield cupy.cuda, "is_available", lambda: True
    yield cupy.cuda, "get_current_stream", lambda *_: IdleStream.null
    runtime = {"deviceSynchronize": None, "streamSynchronize": None, "getDevice": 0, "getDeviceCount": 1, "setDevice": None}
    for name, result in runtime.items():
        yield cupy.cuda.runtime, name, lambda *_, result=result: result


def remade(value: Any, file: str) -> RawKernel | RawModule:
    """Returns a kernel or module that the real CuPy made before, in a Python file, as one of ours."""
    made: RawKernel | RawModule
    if type(value).__name__ == "RawModule":
        kept = {"backend": value.backend, "enable_cooperative_groups": value.enable_cooperative_groups}
        given = {"path": value.file_path} if value.code is None else {"code": value.code, "options": value.options, **kept}
        made, name = RawModule(**given, name_expressions=value.name_expressions), "module"
    else:
        state = value.__getstate__()
        kept = {name: state[name] for name in ("options", "backend", "translate_cucomplex", "enable_cooperative_groups")}
        made, name = RawKernel(state["code"], state["name"], **kept), state["name"]
    if made.code is not None:
        made._source = replace(made._source, place=place_in(file, made.code, name))
    return made


@contextmanager
def simulated_cupy() -> Iterator[None]:
    """Makes `cupy` work without a GPU in the `with` block, as far as arrays and raw kernels go.

    Functions that NumPy has under the same name are NumPy's, on a subclass of its arrays with `get` and `set`; RawKernel and
    RawModule are those of the PTX machine; streams, events and devices have nothing to do. Kernels, modules and functions that
    other modules hold by a name of their own, made or imported before, are replaced there too. ElementwiseKernel, ReductionKernel
    and `cupyx.jit.rawkernel` run there too (`cupy_kernels`). Not replaced, and failing as they do without a GPU: the rest of
    `cupyx`, and what NumPy does not have. Raises ImportError without CuPy.
    """
    cupy = first_use.import_cupy()
    real = (cupy.RawKernel, cupy.RawModule)
    if RawKernel in real:  # simulated already
        yield
        return
    changes = list(replacements(cupy))
    instead = {id(getattr(owner, name)): value for owner, name, value in changes if owner is cupy}
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if not names or getattr(module, "__name__", "").partition(".")[0] in (
            "cupy",
            "cupyx",
            "cupy_backends",
            "numpy",
            "cupyflash",
        ):
            continue
        for name, value in list(names.items()):
            if type(value) in real and (type(value) is real[1] or value.code is not None):
                changes.append((module, name, remade(value, str(names.get("__file__", "")))))
            elif (kernel := cupy_kernels.remade(value)) is not None:
                changes.append((module, name, kernel))
            elif id(value) in instead and not isinstance(value, (int, float, bool)):
                changes.append((module, name, instead[id(value)]))
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
