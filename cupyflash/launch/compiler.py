"""A schedule's kernel to PTX (for the simulated device) or to a CuPy function (for a GPU), from the same options.

CuPy compiles all kernels but those that need their architecture's own instructions: `cupyflash.launch.cubins` compiles these.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from cupyflash import kernels_cu
from cupyflash.launch import cubins, dispatch, first_use
from cupyflash.launch.nvrtc import compile_to_ptx, header_directories
from cupyflash.launch.recent import Recent
from cupyflash.launch.turns import Turns
from cupyflash.schedules import Kernel

# A kernel must request dynamic shared memory above this (CUDA C Programming Guide, "Shared Memory").
SHARED_WITHOUT_ASKING = 48 * 1024
# CuPy compiles with this option, so all other compilations here do too.
FLUSH_DENORMALS = "-ftz=true"


def options(kernel: Kernel) -> tuple[str, ...]:
    """NVRTC's options for a kernel, without architecture and CUDA's own headers: language, includes, constants, its struct.

    They contain the sources' fingerprint: CuPy's disk cache does not see included files, and must miss when a `.cuh` has changed.
    """
    return (
        "-std=c++17",
        f"-DCUPYFLASH_SOURCES=0x{kernels_cu.fingerprint()}",
        f"-I{kernels_cu.DIRECTORY}",
        *(f"-D{name}={value}" for name, value in (*kernel.constants, *kernel.params.constants)),
    )


def architecture(kernel: Kernel, compute_capability: tuple[int, int]) -> str:
    """The architecture of a kernel, without "sm_" or "compute_": "90", or "90a" for its own generation's instructions."""
    return "{}{}".format(*compute_capability) + ("a" if kernel.accelerated else "")


def ptx(kernel: Kernel, compute_capability: tuple[int, int]) -> str:
    """The PTX of a kernel's file for compute_XY, or compute_XYa."""
    source, given, arch = kernel.source, options(kernel), architecture(kernel, compute_capability)
    found = _texts.get((source, given, arch))
    if found is not None:
        return found
    made = compile_to_ptx(kernels_cu.source(source), (f"-arch=compute_{arch}", FLUSH_DENORMALS, *given), source)
    return _texts.keep((source, given, arch), made)


# Characters of PTX in the cache: enough for about a hundred kernels
MOST_PTX = 1 << 24
_texts: Recent[tuple[object, ...], str] = Recent(MOST_PTX, lambda _, text: len(text))


def program(kernel: Kernel, compute_capability: tuple[int, int]) -> cubins.Program:
    """The program from which NVRTC makes a kernel's machine code for sm_XY or sm_XYa."""
    whole = (FLUSH_DENORMALS, *options(kernel))
    return cubins.Program(kernels_cu.source(kernel.source), kernel.source, whole, architecture(kernel, compute_capability))


def gpu_kernel(kernel: Kernel, device_id: int) -> tuple[Kernel, Any]:
    """The kernel and its CuPy RawKernel on device `device_id`, which must be the current one.

    If the installed compiler spills the kernel to local memory or makes the tensor cores wait, returns the first kernel of
    `instead` with neither fault, or the kernel itself if all have one. Threads compile one at a time.
    """
    key = (kernel.source, kernel.name, options(kernel), kernel.shared_bytes, kernel.accelerated, device_id)
    found = _functions.get(key)
    if found is None:
        with _compiling.lock:
            found = _functions.get(key)
            if found is None:
                with first_use.patience(f"{kernel.name} ({kernel.source})"):
                    found = _functions[key] = _without_fault(kernel, device_id)
                for old in list(_functions)[:-MOST_FUNCTIONS]:
                    del _functions[old]
    place, function = found
    return (kernel, *kernel.instead)[place], function


# The oldest are dropped; a prepared call keeps its own.
MOST_FUNCTIONS = 1024
_functions: dict[tuple[object, ...], tuple[int, Any]] = {}
_compiling = Turns()


def _without_fault(kernel: Kernel, device_id: int) -> tuple[int, Any]:
    """The index of the chosen kernel, among the kernel and its replacements (each call has its own grids), and the function."""
    first, good = _compile_for_gpu(kernel, device_id)
    if good:
        return 0, first
    others = ((place, *_compile_for_gpu(each, device_id)) for place, each in enumerate(kernel.instead, 1))
    return next(((place, function) for place, function, good in others if good), (0, first))


def _compile_for_gpu(kernel: Kernel, device_id: int) -> tuple[Any, bool]:
    """The function, and whether its machine code is without faults."""
    remarks: tuple[str, ...] = ()
    if kernel.accelerated:
        function, remarks = cubins.function(program(kernel, dispatch.current_gpu(device_id).compute_capability), kernel.name)
    else:
        function = _by_cupy(kernel)
    good = function.local_size_bytes == 0 and not remarks
    if kernel.shared_bytes > SHARED_WITHOUT_ASKING:
        function.max_dynamic_shared_size_bytes = kernel.shared_bytes
    return function, good


def _by_cupy(kernel: Kernel) -> Any:
    cupy = sys.modules["cupy"]
    includes = tuple(f"-I{path}" for path in header_directories())
    module = cupy.RawModule(code=kernels_cu.source(kernel.source), options=(*options(kernel), *includes))
    try:
        module.compile()
        first_use.say_what_is_not_kept()
    except OSError as error:
        # If the cache directory cannot be created or written, compile anyway and keep the result in memory only.
        first_use.cache_is_unusable(first_use.cache_folder(), error)
        before = os.environ.get(cubins.IN_MEMORY)
        os.environ[cubins.IN_MEMORY] = "1"
        try:
            module.compile()
        finally:
            del os.environ[cubins.IN_MEMORY]
            if before is not None:
                os.environ[cubins.IN_MEMORY] = before
    return module.get_function(kernel.name)
