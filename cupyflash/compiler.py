"""A schedule's kernel to PTX (for the simulated device) or to a CuPy function (for a GPU), from the same options."""

from __future__ import annotations

from functools import cache
from typing import Any

from cupyflash import kernels_cu
from cupyflash.nvrtc import compile_to_ptx, header_directories
from cupyflash.schedules import Kernel

# Dynamic shared memory above this has to be asked for (CUDA C Programming Guide, "Shared Memory").
SHARED_WITHOUT_ASKING = 48 * 1024
# CuPy compiles with this, so everything else here does.
FLUSH_DENORMALS = "-ftz=true"


def options(kernel: Kernel) -> tuple[str, ...]:
    """NVRTC's options for a kernel, less architecture and CUDA's own headers: language, includes, constants.

    The sources' fingerprint is among them, so that CuPy's disk cache, which does not see included files, misses when a
    `.cuh` has changed.
    """
    return (
        "-std=c++17",
        f"-DCUPYFLASH_SOURCES=0x{kernels_cu.fingerprint()}",
        f"-I{kernels_cu.DIRECTORY}",
        *(f"-D{name}={value}" for name, value in kernel.constants),
    )


def ptx(kernel: Kernel, compute_capability: tuple[int, int]) -> str:
    """The PTX of a kernel's file for compute_XY."""
    return _ptx(kernel.source, options(kernel), compute_capability)


@cache
def _ptx(source: str, options: tuple[str, ...], compute_capability: tuple[int, int]) -> str:
    arch = "-arch=compute_{}{}".format(*compute_capability)
    return compile_to_ptx(kernels_cu.source(source), (arch, FLUSH_DENORMALS, *options), source)


def gpu_function(kernel: Kernel, device_id: int) -> Any:
    """The kernel as a CuPy RawKernel on device `device_id`, which must be the current one."""
    return _gpu_function(kernel.source, kernel.name, options(kernel), kernel.shared_bytes, device_id)


@cache
def _gpu_function(source: str, name: str, options: tuple[str, ...], shared_bytes: int, device_id: int) -> Any:
    import cupy

    includes = tuple(f"-I{path}" for path in header_directories())
    function = cupy.RawModule(code=kernels_cu.source(source), options=(*options, *includes)).get_function(name)
    if shared_bytes > SHARED_WITHOUT_ASKING:
        function.max_dynamic_shared_size_bytes = shared_bytes
    return function
