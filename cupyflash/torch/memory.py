"""Tensors as arrays and arrays as tensors, in the same memory; PyTorch's stream as CuPy's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from cupyflash.arrays import numpy_dtype


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
