"""Attention for PyTorch with gradients, beside PyTorch's own:  python examples/torch_attention.py [--on_gpu]

CUDA tensors run on the GPU without a copy, CPU tensors the same kernels on the simulated device. What is printed is how far output
and gradients are from PyTorch's own, in float64; and the gradient of a table of numbers by distance, as T5 learns one.
"""

from __future__ import annotations

import argparse

import torch

from cupyflash.torch import attention


def differences(device: str, n: int = 100, d: int = 32, causal: bool = True) -> dict[str, float]:
    """The largest differences from PyTorch's attention in float64, of O and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, n, d, generator=generator).half().to(device) for _ in range(4))
    ours, theirs = ([tensor.to(dtype).requires_grad_() for tensor in (q, k, v)] for dtype in (q.dtype, torch.float64))
    found = attention(*ours, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=causal)
    pairs = {"O": (found, expected)}
    gradients = (torch.autograd.grad(out, inputs, dout.to(out.dtype)) for out, inputs in ((found, ours), (expected, theirs)))
    pairs |= dict(zip(("dQ", "dK", "dV"), zip(*gradients, strict=True), strict=True))
    return {name: float((one.double() - other).detach().abs().max()) for name, (one, other) in pairs.items()}


def learned_table(device: str, n: int = 100, d: int = 32) -> torch.Tensor:
    """The gradient of a table (2, n), whose number for head and distance is added to each score."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, d, generator=generator).half().to(device) for _ in range(3))
    table = torch.zeros(2, n, device=device, requires_grad=True)
    out = attention(q, k, v, causal=True, score=lambda s, h, q, k: s + table[h, q - k])
    (gradient,) = torch.autograd.grad(out.float().square().sum(), table)
    return gradient


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] if __doc__ else None)
    parser.add_argument("--on_gpu", action="store_true", help="CUDA tensors in place of CPU tensors")
    device = "cuda" if parser.parse_args().on_gpu else "cpu"
    print(", ".join(f"{name} {difference:.1e}" for name, difference in differences(device).items()))
    print(f"largest of the table's gradients: {float(learned_table(device).abs().max()):.2g}")
