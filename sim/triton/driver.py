"""Triton's driver for the simulated device: it loads a kernel's PTX, and a launch runs on the machine."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import triton
from triton._C.libtriton import nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import _allocation
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from cupyflash.device import Device
from cupyflash.sim.clock.execution import CubinKernel
from cupyflash.sim.clock.sass import registers
from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.rawkernel import deliver
from cupyflash.sim.replaced import replaced

from . import BENCHMARK_SECONDS
from .calls import KernelCall, NumPyPointer, flat
from .memory import Addresses
from .timing import Benchmarks, Times, current_times

DEVICE_NUMBER = 1000
"""Numbers from here on are simulated devices, one for each architecture: a kernel is compiled once for each number."""


class Utilities:
    """The functions of Triton's C module for a device."""

    def __init__(self, device: Device):
        self.device = device

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        """Returns (module, function, registers, spilled bytes, most threads of a block) of machine code."""
        return None, None, registers(kernel).get(name, 0), 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        d = self.device
        sizes = {"max_shared_mem": d.sram_per_block, "max_num_regs": d.registers_per_sm, "multiprocessor_count": d.sm_count}
        return {**sizes, "warpSize": 32, "sm_clock_rate": 0, "mem_clock_rate": 0, "mem_bus_width": 0}

    def unload_module(self, module: Any) -> None:
        """Does nothing: a module is Python's."""


class Driver(DriverBase):
    """The driver of one simulated device."""

    def __init__(self, device: Device, addresses: Addresses, benchmark_seconds: float):
        self.device, self.addresses = device, addresses
        self.utils, self.benchmarks = Utilities(device), Benchmarks(device, benchmark_seconds)
        self.launcher_cls = Launcher
        major, minor = device.compute_capability
        self.capability = 10 * major + minor

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return DEVICE_NUMBER + self.capability

    def set_current_device(self, device: int) -> None:
        """Does nothing: there is one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_device_capability(self, device: int | None = None) -> tuple[int, int]:
        return self.device.compute_capability

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cuda", 0)

    def get_benchmarker(self) -> Any:
        return self.benchmarks.tune

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream: Any) -> Any:
        return np.zeros(size, np.int8)


@lru_cache(maxsize=256)
def loaded(path: str) -> Module:
    """Returns the module of a PTX file that Triton made."""
    return Module.from_ptx(INLINE.sub(one_place, Path(path).read_text()))


INLINE, PLACE = re.compile(r"// begin inline asm\n.*?// end inline asm", re.DOTALL), re.compile(r"^\s*\.loc\b.*", re.MULTILINE)
"""Assembly in a kernel, as each load and store of Triton is, and the statement of a place in it."""


def one_place(assembly: re.Match[str]) -> str:
    """Returns assembly without the places behind its first: Triton 3.9 gives its second line the next line of Python, and so on."""
    first = PLACE.search(assembly[0])
    return assembly[0] if first is None else assembly[0][: first.end()] + PLACE.sub("", assembly[0][first.end() :])


def ptx_file(metadata: Any) -> str:
    """Returns the file of a compiled kernel's PTX, in Triton's cache. Raises RuntimeError if it is not there."""
    group = get_cache_manager(metadata.hash).get_group(f"{metadata.name[:150]}.json") or {}
    path = next((path for name, path in group.items() if name.endswith(".ptx")), None)
    if path is None:
        raise RuntimeError(f"{metadata.name}: no PTX in Triton's cache, which is what runs here; unset TRITON_STORE_BINARY_ONLY")
    return str(path)


class Launcher:
    """A compiled kernel that runs on the machine: called as Triton calls the launcher of a driver."""

    def __init__(self, src: Any, metadata: Any):
        self.metadata = metadata
        self.signature: Mapping[Any, Any] = dict(src.signature)
        names = getattr(getattr(src, "fn", None), "arg_names", None)
        self.names = [names[key] if isinstance(key, int) and names else str(key) for key in self.signature]
        self.path = ptx_file(metadata)

    def __call__(self, x: int, y: int, z: int, *call: Any) -> None:
        """Launches a grid; `call`: stream, function, packed metadata, launch metadata, two hooks, and the kernel's arguments."""
        _, _, _, launch_metadata, enter_hook, exit_hook, *args = call
        if enter_hook is not None:
            enter_hook(launch_metadata)
        if x * y * z:
            self.launch((x, y, z), args)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def launch(self, grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        """Runs the kernel and hands the result on (`ptx.simulation` says to whom), or takes its time only (`timing`)."""
        m, driver = self.metadata, triton.runtime.driver.active
        module = loaded(self.path)
        cluster = tuple(getattr(m, "cluster_dims", None) or (1, 1, 1))
        if m.num_ctas > 1 and cluster == (1, 1, 1):
            cluster = m.num_ctas, 1, 1
        values = [*self.values(args), *self.scratch(grid, math.prod(cluster))]
        whole = tuple(g * c for g, c in zip(grid, cluster, strict=True))
        # More threads than the program's own have kernels with warps of other kinds (warp specialization).
        block = module.program.functions[m.name].block or (32 * int(m.num_warps), 1, 1)
        call = KernelCall(m.name, module, whole, block, m.shared, cluster if math.prod(cluster) > 1 else None, values)
        times = current_times()
        if times is None:
            deliver(m.name, call.run(driver.addresses), callers())
        elif isinstance(times, Times):
            times.add(call, driver.addresses, lambda: self.machine_code)

    def values(self, args: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        """Yields the kernel's parameters, (name, value), flat as Triton passes them: without constants, descriptors taken apart."""
        descriptions = list(getattr(self.metadata, "tensordesc_meta", None) or [])
        for name, kind, value in zip(self.names, self.signature.values(), args, strict=True):
            yield from flat(name, kind, value, descriptions)

    @cached_property
    def machine_code(self) -> CubinKernel:
        """The kernel's machine code, for the clock. Raises RuntimeError without a disassembler."""
        return CubinKernel.of(Path(self.path).with_suffix(".cubin").read_bytes(), self.metadata.name)

    def scratch(self, grid: tuple[int, int, int], blocks: int) -> Iterator[tuple[str, Any]]:
        """Yields the memory that the kernel needs besides its arguments: for its own use and for the profiler's."""
        count = grid[0] * grid[1] * grid[2] * blocks
        for kind in ("global", "profile"):
            size = getattr(self.metadata, f"{kind}_scratch_size", None)
            if size is None:
                continue
            memory: Any = None
            if size and kind == "global":
                memory = _allocation._allocator.get()(count * size, self.metadata.global_scratch_align, 0)
            elif size:
                memory = np.zeros(count * size, np.int8)
            yield f"{kind}_scratch", memory


def callers() -> int:
    """Returns how many frames of Triton's and of this package are between a launch and the program that called the kernel."""
    ours = str(Path(triton.__file__).parent), str(Path(__file__).parent)
    frame, count = sys._getframe(1), 0
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame, count = frame.f_back, count + 1
    return count + 1


@contextmanager
def replaced_driver(
    device: Device, addresses: Addresses | None = None, *, benchmark_seconds: float = BENCHMARK_SECONDS
) -> Iterator[Driver]:
    """Makes `device` Triton's active device, and PyTorch's "cuda", unless it has `addresses` and is that already."""
    active = triton.runtime.driver
    before, run = active._active, JITFunction.run
    if isinstance(before, Driver):
        raise RuntimeError(f"Triton runs on a simulated {before.device.name} already")
    found = Addresses() if addresses is None else addresses
    driver = Driver(device, found, benchmark_seconds)

    def passed(value: Any) -> Any:
        return NumPyPointer(value, found) if isinstance(value, np.ndarray) else value

    def run_with_arrays(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *map(passed, args), **{name: passed(value) for name, value in kwargs.items()})

    names = ("do_bench", "do_bench_cudagraph")
    changes: list[tuple[Any, str, Any]] = [(active, "_active", driver), (JITFunction, "run", run_with_arrays)]
    changes += [(triton.testing, name, driver.benchmarks.do_bench) for name in names]
    changes.append((triton.testing, "perf_report", driver.benchmarks.perf_report(triton.testing.perf_report)))
    of_torch: AbstractContextManager[None] = nullcontext()
    if find_spec("torch") is not None:
        from .devices import MatrixProducts, cuda_on_cpu

        changes.append((nvidia.cublas, "CublasLt", MatrixProducts))
        of_torch = cuda_on_cpu(device, found) if addresses is None else of_torch
    with replaced(changes), of_torch:
        yield driver
