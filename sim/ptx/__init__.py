"""The PTX machine: executes a kernel's own PTX on the CPU, checks every access and counts every byte.

    module = Module.from_source(cuda_source, ["--use_fast_math"])
    launch = module.launch("kernel", grid=4, block=128, args={"x": x, "y": y, "n": 100})
    launch.traffic["x"].read_bytes, launch.findings, launch.counters.instructions

Needs NumPy only; compiling CUDA C needs CuPy and NVRTC. No GPU, no driver.
"""

from __future__ import annotations

from .cupy_module import simulated_cupy
from .decode.registry import Coverage, coverage
from .execute.scheduler import Estimate
from .memory.swizzles import TensorMap
from .memory.texels import TexelFormat, Texels, Texture
from .module import Launch, Module
from .order.history import Event, History, Stream
from .parameters import Allocation, RawArguments
from .rawkernel import KernelFault, KernelFaultWarning, KernelWarning, RawKernel, RawModule, simulation
from .state.counters import Counters, Counts, SharedCounts
from .state.counters import TensorCounts as Traffic
from .state.findings import Finding, Suppressed, Suppression
from .state.segments import Access
from .text.syntax import PtxError, UnsupportedPTX

__all__ = [
    "Access",
    "Allocation",
    "Counters",
    "Counts",
    "Coverage",
    "Estimate",
    "Event",
    "Finding",
    "History",
    "KernelFault",
    "KernelFaultWarning",
    "KernelWarning",
    "Launch",
    "Module",
    "PtxError",
    "RawArguments",
    "RawKernel",
    "RawModule",
    "SharedCounts",
    "Stream",
    "Suppressed",
    "Suppression",
    "TensorMap",
    "TexelFormat",
    "Texels",
    "Texture",
    "Traffic",
    "UnsupportedPTX",
    "coverage",
    "simulated_cupy",
    "simulation",
]
