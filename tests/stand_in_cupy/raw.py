"""RawModule and RawKernel of the stand-in: compiled by NVRTC to PTX, executed by the PTX machine."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from cupy._core._scalar import CScalar
from cupy.cuda._compiler_cache import DiskKernelCacheBackend

from cupyflash.launch import cubins
from cupyflash.launch.nvrtc import compile_to_ptx
from cupyflash.sim.ptx import Module, TensorMap
from cupyflash.sim.ptx.memory.swizzles import MAP_BYTES, Description, decode

from .array import ndarray
from .streams import enqueue, runtime

WITHOUT_ASKING = 48 * 1024
"""Dynamic shared memory in bytes that a kernel has without asking (CUDA C++ Programming Guide)."""

_execute = Module.launch  # as it is, whoever listens to it later
_disk = DiskKernelCacheBackend()  # made when CuPy is imported, as there: its folder is, too


@functools.cache
def _load(code: str | None, path: str | None, options: tuple[str, ...], device_id: int) -> Module:
    """Once a device, as CuPy does; what fails is tried again."""
    if path is not None:
        with open(path) as file:
            return Module.from_ptx(file.read())
    assert code is not None
    module = _compiled(code, options, runtime.figures.compute_capability)
    if os.environ.get("CUPY_CACHE_IN_MEMORY", "0") in ("", "0"):
        name = hashlib.sha1(repr((code, options)).encode()).hexdigest() + ".cubin"
        if _disk.load(name) is None:
            _disk.save(name, b"cubin", code)  # OSError where CuPy's folder has gone or cannot be written
    return module


def machine_code(program: cubins.Program) -> cubins.CompiledCubin:
    """The stand-in of a cubin: PTX, which RawModule reads from a file, as CuPy's does."""
    options = f"-arch=compute_{program.architecture}", *program.options
    return cubins.CompiledCubin(compile_to_ptx(program.source, options, program.name).encode(), "")


def compiler() -> str:
    """A name that tells these apart from real cubins."""
    return "PTX"


@functools.cache
def _compiled(code: str, options: tuple[str, ...], capability: tuple[int, int]) -> Module:
    arch = "-arch=compute_{}{}".format(*capability)
    return Module.from_ptx(compile_to_ptx(code, (arch, "-ftz=true", *options), "raw.cu"))


class RawModule:
    """The stand-in of `cupy.RawModule`."""

    def __init__(self, *, code: str | None = None, path: str | None = None, options: tuple[str, ...] = ()) -> None:
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        for name, value, kind in (("code", code, str), ("path", path, str), ("options", options, tuple)):
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"Argument '{name}' has incorrect type (expected {kind.__name__}, got {type(value).__name__})")
        self._what = (code, path, options)

    def compile(self) -> None:
        self._loaded()

    def _loaded(self) -> Module:
        return _load(*self._what, runtime.getDevice())

    def get_function(self, name: str) -> RawKernel:
        module = self._loaded()
        if name not in module.kernels:
            raise AssertionError(f"CUDA_ERROR_NOT_FOUND: {name}, of {module.kernels}")
        return RawKernel(module, name)


class RawKernel:
    """The stand-in of the `cupy.RawKernel` that a RawModule gives."""

    def __init__(self, module: Module, name: str) -> None:
        self._module, self.name = module, name
        self._shared = WITHOUT_ASKING

    @property
    def local_size_bytes(self) -> int:
        return 0  # PTX does not say what ptxas would put there

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        if size > runtime.figures.sram_per_block:
            raise AssertionError(f"CUDA_ERROR_INVALID_VALUE: {size} bytes of shared memory of {runtime.figures.sram_per_block}")
        self._shared = size

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Any, *, shared_mem: int = 0) -> None:
        if not isinstance(grid, tuple) or not isinstance(block, tuple):
            raise TypeError(f"grid and block must be tuples, got {grid!r} and {block!r}")
        if shared_mem > self._shared:
            raise AssertionError(f"CUDA_ERROR_INVALID_VALUE: {shared_mem} bytes of shared memory, allowed are {self._shared}")
        params = self._module.code(self.name).params
        if len(args) != len(params):
            raise AssertionError(f"{self.name} takes {len(params)} arguments and would read what it was not given: {len(args)}")
        flat: dict[Any, Any] = {}  # by the argument's place and, of a struct, the field
        maps: dict[tuple[int, str], Description] = {}  # of the arrays that a tensor map is over
        for place, (arg, param) in enumerate(zip(args, params, strict=True)):
            if isinstance(arg, np.void) and arg.dtype.names:
                if arg.dtype.itemsize != param.size:
                    raise AssertionError(f"{self.name}: a struct of {arg.dtype.itemsize} bytes; {param.name} of {param.size}")
                fields = dict(_fields(arg))
                maps |= {(place, field): value[0] for field, value in fields.items() if isinstance(value, tuple)}
                flat |= {(place, field): value[1] if isinstance(value, tuple) else value for field, value in fields.items()}
            else:
                flat[place] = arg if isinstance(arg, ndarray) else _value(self.name, arg, param)
        arrays = {key: value for key, value in flat.items() if isinstance(value, ndarray)}
        others = {key: None if key in arrays else value for key, value in flat.items()}  # in order; a graph keeps no array alive
        keys, count, module, name = list(arrays), len(params), self._module, self.name

        def act(*hosts: np.ndarray) -> None:
            given: list[Any] = [{} for _ in range(count)]
            for key, value in (others | dict(zip(keys, hosts, strict=True))).items():
                if isinstance(key, tuple):
                    given[key[0]][key[1]] = value
                else:
                    given[key] = value
            for (place, field), description in maps.items():
                given[place][field] = _map(description, given[place][field])
            launch = _execute(module, name, grid, block, given, shared_bytes=shared_mem, races=False)
            if launch.findings:
                raise AssertionError(f"{name} has {len(launch.findings)} faults, the first: {launch.findings[0]}")

        enqueue(act, *arrays.values())


def _fields(struct: np.void, name: str = "") -> Iterator[tuple[str, Any]]:
    """A struct's fields one behind the other, as they lie there; an unsigned 64-bit integer is an address, 0 is null. 16 of them
    are a tensor map: its description and its array."""
    for field in struct.dtype.names or ():
        value, path = struct[field], f"{name}.{field}" if name else field
        if isinstance(value, np.void):
            yield from _fields(value, path)
        elif value.shape == (MAP_BYTES // 8,):
            found = decode(value.tobytes())
            if found is None:
                raise AssertionError(f"{path} is no tensor map that the driver encoded")
            yield path, (found[0], ndarray.at(found[1]))
        elif value.dtype == np.uint64:
            yield path, ndarray.at(int(value)) if value else None
        else:
            yield path, value


def _map(of: Description, array: np.ndarray) -> TensorMap:
    how: dict[str, Any] = {"element_strides": of.element_strides, "swizzle": of.swizzle, "l2_promotion": of.l2_promotion}
    return TensorMap(array, of.box, dims=of.dims, strides=of.strides, dtype=of.dtype, fill=of.fill, **how)


def _value(kernel: str, arg: Any, param: Any) -> Any:
    """An argument as the machine takes it, held to the size and kind of its parameter, of which CuPy knows nothing."""
    if isinstance(arg, ndarray) or arg is None:
        size, kind, value = 8, "b", None
    elif isinstance(arg, np.ndarray):
        if arg.size != 1:
            raise TypeError(f"You are trying to pass a numpy.ndarray of shape {arg.shape} as a kernel parameter.")
        size, kind, value = arg.nbytes, "b", arg.tobytes()
    else:
        CScalar(arg)  # CuPy's own word on what is a scalar
        scalar = np.asarray(arg)
        size, kind, value = scalar.nbytes, scalar.dtype.kind, arg
    kinds_agree = kind == "b" or (kind == "f") == (param.type.kind == "f")
    if size != param.size or not kinds_agree:
        raise AssertionError(f"{kernel}: {arg!r} is of {size} bytes, kind {kind}; {param.name} of {param.size}, .{param.type.name}")
    return value
