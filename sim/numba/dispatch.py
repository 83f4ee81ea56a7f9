"""Numba's dispatcher with the PTX machine behind it: types and PTX are Numba's, an array's descriptor becomes parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numba.cuda.api
import numba.cuda.dispatcher
import numpy as np
from numba import cuda, types
from numba.cuda.compiler import compile_ptx
from numba.cuda.dispatcher import CUDADispatcher, normalize_kernel_dimensions
from numba.cuda.typing.typeof import Purpose, typeof

from cupyflash.basics import Array
from cupyflash.sim.ptx.cupy_module import IdleQueue
from cupyflash.sim.ptx.module import Module
from cupyflash.sim.ptx.rawkernel import issue, settings
from cupyflash.sim.ptx.state.segments import empty

FORALL_BLOCK = 128
OPTIONS = ("debug", "fastmath", "opt", "forceinline")
"""Options of `cuda.jit` that compilation takes."""


class NumbaArray(np.ndarray):
    """An array "on the device": NumPy's, with the copies of Numba's device arrays."""

    def copy_to_host(self, ary: Any = None, stream: Any = 0) -> Array:
        """Returns a copy, in `ary` if it is given."""
        made = np.array(self, subok=False) if ary is None else ary
        if ary is not None:
            np.copyto(ary, np.asarray(self))
        return np.asarray(made)

    def copy_to_device(self, ary: Any, stream: Any = 0) -> None:
        np.copyto(self, np.asarray(ary))


class IdleNumbaQueue(IdleQueue):
    """A stream or an event of Numba's: everything is done when a call returns."""

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return self

    wait = query = auto_synchronize = _nothing


def on_device(value: Any, *_: Any, **__: Any) -> NumbaArray:
    """Returns a copy as an array on the device, as `cuda.to_device` does."""
    return np.array(value, order="K").view(NumbaArray)


def allocated(shape: Any, dtype: Any = np.float64, strides: Any = None, order: str = "C", stream: Any = 0) -> NumbaArray:
    """Returns fresh memory, as `cuda.device_array` does."""
    return empty(shape, dtype, order=order).view(NumbaArray)


def allocated_like(ary: Any, stream: Any = 0) -> NumbaArray:
    return allocated(ary.shape, ary.dtype, order="F" if ary.flags.f_contiguous and not ary.flags.c_contiguous else "C")


def flattened(name: str, kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parameters that an argument becomes: an array is null, null, its size, an element's size, its address, its shape,
    its strides. Raises NotImplementedError for a type that Numba's kernels take and this module does not.
    """
    if isinstance(kind, types.Array):
        array = np.asarray(value)
        yield from ((f"{name}.{part}", None) for part in ("meminfo", "parent"))
        yield f"{name}.nitems", np.int64(array.size)
        yield f"{name}.itemsize", np.int64(array.itemsize)
        yield name, array
        yield from ((f"{name}.shape[{k}]", np.int64(n)) for k, n in enumerate(array.shape))
        yield from ((f"{name}.strides[{k}]", np.int64(n)) for k, n in enumerate(array.strides))
    elif isinstance(kind, types.Record):
        yield name, np.asarray(value).reshape(1)
    elif isinstance(kind, types.BaseTuple):
        for k, (each, part) in enumerate(zip(kind, value, strict=True)):
            yield from flattened(f"{name}[{k}]", each, part)
    elif isinstance(kind, types.EnumMember):
        yield from flattened(name, kind.dtype, value.value)
    elif isinstance(kind, types.Complex):
        part = np.dtype(f"float{kind.bitwidth // 2}").type
        yield from ((f"{name}.real", part(value.real)), (f"{name}.imag", part(value.imag)))
    elif isinstance(kind, types.Boolean):
        yield name, np.bool_(value)
    elif isinstance(kind, (types.Integer, types.Float)):
        yield name, np.dtype(str(kind)).type(value)
    else:
        raise NotImplementedError(f"argument {name} has the type {kind}, which is not simulated")


def capability() -> tuple[int, int]:
    """Returns the compute capability to compile for, by the settings in force."""
    version = re.match(r"compute_(\d+)(\d)", settings().arch or "")
    assert version
    return int(version[1]), int(version[2])


def current_device() -> SimpleNamespace:
    """Returns what device functions and programs ask of the device."""
    return SimpleNamespace(compute_capability=capability(), WARP_SIZE=32, MAX_THREADS_PER_BLOCK=1024, id=0, name=b"PTX machine")


@lru_cache(maxsize=256)
def compiled(dispatcher: Any, kinds: tuple[Any, ...], capability: tuple[int, int]) -> tuple[Module, str]:
    """Returns the module of a kernel for arguments of these types, and the kernel's name in it."""
    given = dispatcher.targetoptions
    if given.get("link"):
        raise NotImplementedError(f"{dispatcher.py_func.__name__}: link= is not simulated")
    options = {name: given[name] for name in OPTIONS if name in given}
    ptx, _ = compile_ptx(dispatcher.py_func, kinds, cc=capability, lineinfo=not given.get("debug"), **options)
    # The name that Numba gives a kernel has hundreds of letters, its types among them.
    mangled = re.search(r"\.entry\s+([\w$]+)", ptx)
    name = dispatcher.py_func.__name__
    if mangled and name.isascii():
        return Module.from_ptx(re.sub(rf"\b{re.escape(mangled[1])}(?=\b|_param)", name, ptx)), name
    module = Module.from_ptx(ptx)
    return module, module.kernels[0]


def kinds_of(dispatcher: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the types to compile for: those of the signature that fits, else the arguments' own."""
    own = tuple(typeof(np.asarray(arg) if isinstance(arg, np.ndarray) else arg, Purpose.argument) for arg in args)
    declared = [kinds for kinds in getattr(dispatcher, "_simulated_signatures", ()) if len(kinds) == len(own)]
    return own if not declared else own if own in declared else declared[0]


def configured(dispatcher: Any, griddim: Any, blockdim: Any, stream: Any = 0, sharedmem: int = 0) -> Callable[..., None]:
    """Returns what `kernel[griddim, blockdim, stream, sharedmem]` is: a call that launches."""
    grid, block = normalize_kernel_dimensions(griddim, blockdim)

    def launch(*args: Any) -> None:
        for extension in reversed(dispatcher.extensions):
            raise NotImplementedError(f"extensions of arguments ({type(extension).__name__}) are not simulated")
        kinds = kinds_of(dispatcher, args)
        module, name = compiled(dispatcher, kinds, capability())
        names = list(inspect.signature(dispatcher.py_func).parameters)
        given = {part: one for each, kind, arg in zip(names, kinds, args, strict=True) for part, one in flattened(each, kind, arg)}
        issue(module, name, grid, block, given, shared_mem=int(sharedmem))

    return launch


def chosen(dispatcher: Any, how: tuple[Any, ...]) -> Callable[..., None]:
    """Does what `kernel[...]` does."""
    if len(how) not in (2, 3, 4):
        raise ValueError("must specify at least the griddim and blockdim")
    return configured(dispatcher, *how)


def for_all(dispatcher: Any, ntasks: int, tpb: int = 0, stream: Any = 0, sharedmem: int = 0) -> Callable[..., None]:
    """Does what `kernel.forall` does."""
    threads = tpb or FORALL_BLOCK
    blocks = -(-ntasks // threads)
    return configured(dispatcher, blocks, threads, stream, sharedmem) if ntasks else lambda *_: None


def remembered(dispatcher: Any, sig: Any) -> None:
    """Takes the place of a kernel's compilation for a signature: it only keeps the types."""
    kinds = tuple(sig.args) if hasattr(sig, "args") else tuple(sig)
    dispatcher._simulated_signatures = (*getattr(dispatcher, "_simulated_signatures", ()), kinds)


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yields the names to replace during the simulation: (owner, name, value)."""
    calls = {"__getitem__": chosen, "configure": configured, "forall": for_all, "compile": remembered}
    calls["disable_compile"] = lambda *_: None
    yield from ((CUDADispatcher, name, value) for name, value in calls.items())
    queue = lambda *_, **__: IdleNumbaQueue()  # noqa: E731
    api = {
        "to_device": on_device,
        **dict.fromkeys(("device_array", "pinned_array", "mapped_array", "managed_array"), allocated),
        **dict.fromkeys(("device_array_like", "pinned_array_like", "mapped_array_like"), allocated_like),
        **dict.fromkeys(("stream", "default_stream", "legacy_default_stream", "per_thread_default_stream", "event"), queue),
        "synchronize": lambda: None,
        "is_available": lambda: True,
    }
    yield from ((module, "get_current_device", current_device) for module in (cuda, numba.cuda.api, numba.cuda.dispatcher))
    yield from ((cuda, name, value) for name, value in api.items() if hasattr(cuda, name))
