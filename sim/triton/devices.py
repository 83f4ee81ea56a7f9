"""PyTorch's device "cuda" on the CPU: programs that ask for it get CPU tensors, `torch.cuda` answers for the simulated device.

Functions that are given "cuda" as a device are called with "cpu" (`TorchFunctionMode`), a tensor says that it is on "cuda:0", and
its `data_ptr()` is its address on the simulated device: what a program stores in memory, a kernel can follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cupyflash.basics import Report, Values
from cupyflash.device import Device
from cupyflash.sim.replaced import replaced

from .memory import Addresses

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def is_cuda(value: Any) -> bool:
    """True for a device, or the name of one, that is CUDA's."""
    if isinstance(value, torch.device):
        return bool(value.type == "cuda")
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


IN_FLOAT32 = {torch.nn.functional.layer_norm, torch.nn.functional.rms_norm, torch.nn.functional.group_norm}
"""Functions whose gradients PyTorch's CPU kernels sum in half precision, and CUDA's in float32: here the CPU's do so, too."""

HALVES = (torch.float16, torch.bfloat16)


def in_float32(func: Any, args: Sequence[Any], kwargs: Values) -> Any:
    """Calls a function on float32 for half types; the result is of the first argument's type."""

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALVES else value

    found = func(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()})
    return found.to(args[0].dtype) if args else found


class CudaOnCpu(TorchFunctionMode):
    """Hands CPU tensors to code that asks for "cuda"."""

    def __init__(self, addresses: Addresses):
        super().__init__()
        tensor = torch.Tensor
        self._own: dict[Any, Callable[..., Any]] = {
            tensor.data_ptr: addresses.of,
            tensor.device.__get__: lambda *_: CUDA,
            tensor.is_cuda.__get__: lambda *_: True,
            tensor.get_device: lambda *_: 0,
            tensor.cuda: lambda self, *_, **__: self,
            tensor.pin_memory: lambda self, *_, **__: self,
            tensor.record_stream: lambda *_: None,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Values | None = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        own = self._own.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        args = tuple(CPU if is_cuda(value) else value for value in args)
        kwargs = {name: CPU if is_cuda(value) else value for name, value in (kwargs or {}).items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func in IN_FLOAT32:
            return in_float32(func, args, kwargs)
        return func(*args, **kwargs)


class Queue:
    """A stream or an event: everything is done when a call returns, so there is nothing to wait for."""

    cuda_stream = 0
    device = CUDA

    def __init__(self, *_: Any, **__: Any):
        pass

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return self

    synchronize = record = wait = wait_event = wait_stream = record_event = __enter__ = _nothing

    def query(self) -> bool:
        return True

    def __exit__(self, *_: Any) -> None:
        pass


class Generator(torch.Generator):
    """A generator of random numbers, for "cuda" the CPU's: its numbers are not CUDA's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, CPU if is_cuda(device) else device)


class MatrixProducts:
    """Stands for Triton's binding of cuBLAS, which its benchmarks compare with: PyTorch multiplies on the CPU."""

    def __init__(self, workspace: Any):
        pass

    def matmul(self, a: Any, b: Any, c: Any) -> None:
        """Writes a times the transpose of b to c."""
        c.copy_(torch.matmul(a.float(), b.float().T))


def properties(device: Device) -> SimpleNamespace:
    """Returns the simulated device as `torch.cuda.get_device_properties` describes one."""
    major, minor = device.compute_capability
    return SimpleNamespace(
        name=device.name,
        major=major,
        minor=minor,
        total_memory=16 << 30,
        multi_processor_count=device.sm_count,
        regs_per_multiprocessor=device.registers_per_sm,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=device.sram_per_block,
        shared_memory_per_multiprocessor=device.sram_per_sm,
        max_threads_per_multi_processor=1536 if minor in (6, 9) or major == 12 else 2048,
        L2_cache_size=device.l2_bytes,
        warp_size=32,
        is_integrated=0,
    )


def replacements(device: Device) -> Report:
    """Returns the functions and types of `torch.cuda` that are replaced."""
    stream = Queue()
    nothing = ("synchronize", "set_device", "empty_cache", "set_stream", "init", "ipc_collect", "reset_peak_memory_stats")
    return {
        **{name: lambda *_, **__: None for name in nothing},
        **{name: lambda *_, **__: stream for name in ("current_stream", "default_stream", "stream", "device")},
        "Stream": Queue,
        "Event": Queue,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_, **__: device.compute_capability >= (8, 0),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: device.name,
        "get_device_capability": lambda *_: device.compute_capability,
        "get_device_properties": lambda *_: properties(device),
    }


@contextmanager
def cuda_on_cpu(device: Device, addresses: Addresses) -> Iterator[None]:
    """Makes "cuda" a name of the CPU, and `torch.cuda` the simulated device."""
    mode, run = CudaOnCpu(addresses), torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:  # PyTorch has it off while it computes gradients
            return run(*args, **kwargs)

    changes = [(torch.cuda, *each) for each in replacements(device).items()]
    changes += [(torch.autograd, "_engine_run_backward", run_backward), (torch, "Generator", Generator)]
    with replaced(changes), mode:
        yield
