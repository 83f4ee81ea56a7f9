"""A CuPy that writes down what it is asked for, for tests of the GPU path on a machine that has none."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.kernels_cu import source
from cupyflash.launch import compiler, launcher


class Recorded(types.ModuleType):
    """A module that stands in for CuPy and writes down what it was asked for."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.launches: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], int]] = []
        self.functions: list[object] = []
        self.allocated: list[tuple[tuple[int, ...], np.dtype]] = []
        self.opted_in: list[int] = []
        self.devices: list[int] = []
        self.disk_is_full, self.compile_seconds, self.capturing = False, 0.0, False
        self.current = [0]
        self.looked_at = 0
        self.spilled: set[str] = set()  # constants with which a kernel has local memory
        self.by_address: Any = weakref.WeakValueDictionary()
        recorded = self

        class ndarray:
            """An array with CuPy's attributes, and nothing of NumPy's."""

            def __init__(self, shape: tuple[int, ...], dtype: np.dtype, host: np.ndarray | None = None) -> None:
                if host is None:
                    recorded.allocated.append((shape, np.dtype(dtype)))
                self.host = np.empty(shape, dtype) if host is None else host
                self.shape, self.dtype, self.strides, self.ndim = (
                    shape,
                    self.host.dtype,
                    self.host.strides,
                    self.host.ndim,
                )
                self.data = types.SimpleNamespace(ptr=self.host.ctypes.data, device_id=0)
                recorded.by_address[self.data.ptr] = self

            @property
            def device(self) -> int:
                return int(self.data.device_id)

            @device.setter
            def device(self, ordinal: int) -> None:
                self.data.device_id = ordinal

            def __len__(self) -> int:
                return self.shape[0]

            def swapaxes(self, one: int, other: int) -> ndarray:
                host = self.host.swapaxes(one, other)
                return ndarray(host.shape, host.dtype, host)

            def astype(self, dtype: Any) -> ndarray:
                return ndarray(self.shape, np.dtype(dtype), np.empty(self.shape, dtype))

            def reshape(self, *shape: int) -> ndarray:
                host = self.host.reshape(shape)
                return ndarray(host.shape, host.dtype, host)

            def sum(self, axis: tuple[int, ...]) -> ndarray:
                shape = tuple(n for place, n in enumerate(self.shape) if place not in axis)
                return ndarray(shape, self.dtype, np.empty(shape, self.dtype))

            def tolist(self) -> Any:
                recorded.looked_at += 1
                return self.host.tolist()

        class Function:
            @property
            def local_size_bytes(self) -> int:
                return 8 if recorded.spilled & {option.removeprefix("-D") for option in recorded.compiled[-1][1]} else 0

            def __setattr__(self, name: str, value: int) -> None:
                assert name == "max_dynamic_shared_size_bytes"
                recorded.opted_in.append(value)

            def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[object, ...], *, shared_mem: int) -> None:
                (struct,) = args
                recorded.launches.append((grid, block, recorded.fields(struct), shared_mem))
                recorded.functions.append(self)
                recorded.devices.append(recorded.current[-1])

        class RawModule:
            def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
                self.code, self.options = code, options

            def compile(self) -> None:
                if recorded.disk_is_full and os.environ.get("CUPY_CACHE_IN_MEMORY") != "1":
                    raise PermissionError("the cache directory is read-only")
                time.sleep(recorded.compile_seconds)
                recorded.compiled.append((self.code, self.options))

            def get_function(self, name: str) -> Function:
                code = recorded.compiled[-1][0]
                assert any(name in text for text in (code, *map(source, re.findall(r'#include "(\w+\.cuh)"', code))))
                return Function()

        def empty(shape: tuple[int, ...], dtype: np.dtype) -> ndarray:
            return ndarray(shape, dtype)

        def zeros(shape: tuple[int, ...], dtype: type) -> ndarray:
            return ndarray(shape, np.dtype(dtype), np.zeros(shape, dtype))

        def from_dlpack(array: Any) -> ndarray:
            """An array from DLPack as in CuPy 14, which requests the memory on its own current stream."""
            return array.__dlpack__(stream=1)

        self.ndarray, self.RawModule, self.empty, self.zeros, self.from_dlpack = ndarray, RawModule, empty, zeros, from_dlpack

        @contextlib.contextmanager
        def on_device(ordinal: int) -> Iterator[None]:
            recorded.current.append(ordinal)
            yield
            recorded.current.pop()

        runtime = types.SimpleNamespace(getDevice=lambda: recorded.current[-1])
        stream = types.SimpleNamespace(is_capturing=lambda: recorded.capturing)
        allocators = [lambda size: bytearray(size)]

        @contextlib.contextmanager
        def using_allocator(allocator: Any) -> Iterator[None]:
            allocators.append(allocator)
            yield
            allocators.pop()

        self.cuda = types.SimpleNamespace(
            runtime=runtime,
            Device=on_device,
            get_current_stream=lambda: stream,
            get_allocator=lambda: allocators[-1],
            using_allocator=using_allocator,
        )

        def asarray(array: Any, dtype: type, order: str) -> ndarray:
            if isinstance(array, ndarray) and array.dtype == dtype and array.host.flags.c_contiguous:
                return array
            return ndarray(array.shape, np.dtype(dtype), np.ascontiguousarray(getattr(array, "host", array), dtype))

        self.asarray = asarray

    def fields(self, struct: Any) -> dict[str, Any]:
        """A kernel's struct as a caller sees it: arrays in place of addresses, strides by name and axis, None for null."""
        found: dict[str, Any] = {}
        for name in struct.dtype.names:
            value = struct[name]
            if value.dtype.names:
                found |= {f"{name}_{axis}": value[axis] for axis in value.dtype.names[1:]}
                value = value["at"]
            found[name] = (self.by_address[int(value)] if value else None) if value.dtype == np.uint64 else value
        return found

    def array(self, *shape: int, dtype: object = np.float16, device: int = 0) -> Any:
        made = self.ndarray(shape, np.dtype(dtype), np.empty(shape, np.dtype(dtype)))
        made.device = device
        return made


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    recorded = Recorded()
    monkeypatch.setitem(sys.modules, "cupy", recorded)
    monkeypatch.setattr("cupyflash.launch.dispatch.current_gpu", lambda ordinal: Device.named("B200"))
    monkeypatch.setattr(compiler, "_functions", {})
    launcher.KEPT.clear()
    yield recorded
    launcher.KEPT.clear()
