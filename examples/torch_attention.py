"""Attention for PyTorch, with gradients, in one autograd function:  python examples/torch_attention.py [--on_gpu]

Tensors go to cupyflash and come back through DLPack, as views: CUDA tensors run on the GPU through CuPy, on PyTorch's current
stream, CPU tensors the same kernels on the simulated device. What is printed is how far output and gradients are from PyTorch's
own, in float64. (NumPy takes no bfloat16 through DLPack, so that CPU tensors are float16 or float32.)
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import cupyflash


def same_stream(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """CuPy's current stream is PyTorch's, so that neither waits, nor hands out memory that the other uses."""
    if not tensor.is_cuda:
        return nullcontext()
    import cupy

    stream = torch.cuda.current_stream(tensor.device)
    return cupy.cuda.ExternalStream(stream.cuda_stream, tensor.device.index)


class Attention(torch.autograd.Function):
    """O = softmax(scale Q K^T) V; `options` are those that cupyflash.attention and cupyflash.attention_backward both take."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        with same_stream(q):
            made = cupyflash.attention(q.detach(), k.detach(), v.detach(), return_lse=True, **options)
            out, lse = map(torch.from_dlpack, made)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with same_stream(douts[0]):
            given = (tensor.detach() for tensor in (*douts, *ctx.saved_tensors))
            dq, dk, dv = map(torch.from_dlpack, cupyflash.attention_backward(*given, **ctx.options))
        return dq, dk, dv, None


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """`cupyflash.attention` of tensors (n, d), (h, n, d) or (b, h, n, d), with gradients of q, k and v."""
    out: torch.Tensor = Attention.apply(q, k, v, options)
    return out


def differences(device: str, n: int = 100, d: int = 32, **options: Any) -> dict[str, float]:
    """The largest differences from PyTorch's attention in float64, of O and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, n, d, generator=generator).half().to(device) for _ in range(4))
    ours, theirs = ([tensor.to(dtype).requires_grad_() for tensor in (q, k, v)] for dtype in (q.dtype, torch.float64))
    found = attention(*ours, **options)
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=options.get("causal", False))
    pairs = {"O": (found, expected)}
    gradients = (torch.autograd.grad(out, inputs, dout.to(out.dtype)) for out, inputs in ((found, ours), (expected, theirs)))
    pairs |= dict(zip(("dQ", "dK", "dV"), zip(*gradients, strict=True), strict=True))
    return {name: float((one.double() - other).detach().abs().max()) for name, (one, other) in pairs.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else None)
    parser.add_argument("--on_gpu", action="store_true", help="CUDA tensors in place of CPU tensors")
    device = "cuda" if parser.parse_args().on_gpu else "cpu"
    print(", ".join(f"{name} {difference:.1e}" for name, difference in differences(device, causal=True).items()))
