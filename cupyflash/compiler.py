"""A schedule's kernel to PTX (for the simulated device) or to a CuPy function (for a GPU), from the same options."""

from __future__ import annotations

from functools import cache
from typing import Any

from cupyflash import kernels_cu
from cupyflash.nvrtc import compile_to_ptx, header_directories
from cupyflash.schedules import Kernel


def options(kernel: Kernel) -> tuple[str, ...]:
    """NVRTC's options for a kernel, less the architecture: language, includes, and the schedule's constants.

    The sources' fingerprint is among them, so that CuPy's disk cache, which does not see included files, misses when a
    `.cuh` has changed.
    """
    includes = (kernels_cu.DIRECTORY, *header_directories())
    return (
        "-std=c++17",
        f"-DCUPYFLASH_SOURCES=0x{kernels_cu.fingerprint()}",
        *(f"-I{path}" for path in includes),
        *(f"-D{name}={value}" for name, value in kernel.constants),
    )


@cache
def ptx(kernel: Kernel, compute_capability: tuple[int, int]) -> str:
    """The PTX of a kernel's file for compute_XY. CuPy flushes denormals (-ftz=true); so does this."""
    arch = "-arch=compute_{}{}".format(*compute_capability)
    return compile_to_ptx(kernels_cu.source(kernel.source), (arch, "-ftz=true", *options(kernel)), kernel.source)


@cache
def gpu_function(kernel: Kernel, device_id: int) -> Any:
    """The kernel as a CuPy RawKernel on device `device_id`, which must be the current one."""
    import cupy

    module = cupy.RawModule(code=kernels_cu.source(kernel.source), options=options(kernel))
    function = module.get_function(kernel.name)
    if kernel.shared_bytes > 48 * 1024:
        # More than 48 KB of dynamic shared memory has to be asked for (CUDA C Programming Guide, "Shared Memory").
        function.max_dynamic_shared_size_bytes = kernel.shared_bytes
    return function
