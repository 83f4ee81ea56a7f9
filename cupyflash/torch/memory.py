"""Tensors as arrays and arrays as tensors, in the same memory; PyTorch's stream as CuPy's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from cupyflash.arrays import numpy_dtype

# The types of q, k and v
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def require_operands(**tensors: Any) -> None:
    """TypeError or ValueError unless tensors (or None) are dense, of one of the three types, and on the first one's device."""
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in there.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}: cupyflash's own calls take arrays")
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else "sparse"
            raise TypeError(f"{name} must be a dense tensor, got a {kind} one; attention_varlen takes sequences that are packed")
        if tensor.dtype not in TYPES:
            raise TypeError(f"{name} must be of float16, bfloat16 or float32, got {tensor.dtype}: pass {name}.to(torch.float32)")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(f"{name} has a tangent, and the operations have no forward mode: cupyflash.attention_jvp has")
    first, one = next(iter(there.items()))
    for name, tensor in there.items():
        if tensor.device != one.device:
            raise ValueError(f"{name} must be on {first}'s device {one.device}, got {tensor.device}")


def array_of(tensor: Any) -> Any:
    """A tensor's memory as an array of NumPy (a CPU tensor's) or of CuPy (a CUDA tensor's)."""
    tensor = tensor.detach()
    if tensor.is_cuda:
        import cupy

        return cupy.from_dlpack(tensor)
    if tensor.dtype == torch.bfloat16:  # which NumPy does not take from PyTorch
        return tensor.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def tensor_of(array: Any) -> Any:
    """An array's memory as a tensor."""
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def same_stream(tensor: Any) -> AbstractContextManager[Any]:
    """A context in which CuPy's current stream is PyTorch's: neither waits, nor hands out memory that the other uses."""
    if not tensor.is_cuda:
        return nullcontext()
    import cupy

    stream = torch.cuda.current_stream(tensor.device)
    return cupy.cuda.ExternalStream(stream.cuda_stream, tensor.device.index)  # type: ignore[no-any-return]
