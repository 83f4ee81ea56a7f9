"""Eight kernels of Liger-Kernel (pip install --no-deps liger-kernel), forward and backward, on the PTX machine beside PyTorch.

    python benchmarks/triton_kernels/liger.py [DEVICE]

A line each: the largest difference from PyTorch's CPU results in float32, of outputs and gradients; launches; findings; seconds of
processor time, compiling included.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

from cupyflash.sim.triton import simulated_triton


def difference(ours: Callable[..., Any], theirs: Callable[..., Any], tensors: list[Any]) -> float:
    """The largest difference of output and gradients. Kernels may write to their gradient's memory, so each gets its own."""
    import torch

    out, reference = ours(*tensors), theirs(*tensors)
    gradient = torch.randn_like(out)
    pairs = [(out, reference)]
    found = torch.autograd.grad(out, tensors, gradient.clone())
    pairs += zip(found, torch.autograd.grad(reference, tensors, gradient.clone()), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def main() -> None:
    import torch
    import torch.nn.functional as F

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", requires_grad=True)

    def of(module: str, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply
        return function

    with simulated_triton(*sys.argv[1:], findings="keep") as launches:
        torch.manual_seed(0)
        labels, target = torch.randint(0, 300, (8,)), torch.softmax(torch.randn(4, 64), -1)
        rms, layer = of("rms_norm", "LigerRMSNormFunction"), of("layer_norm", "LigerLayerNormFunction")
        group, silu = of("group_norm", "LigerGroupNormFunction"), of("swiglu", "LigerSiLUMulFunction")
        gelu, entropy = of("geglu", "LigerGELUMulFunction"), of("cross_entropy", "LigerCrossEntropyFunction")
        divergence, softmax = of("kl_div", "LigerKLDivLossFunction"), of("softmax", "LigerSoftmaxFunction")
        # An input that a kernel overwrites is a copy (x * 1).
        cases: list[tuple[str, Callable[..., Any], Callable[..., Any], list[Any]]] = [
            ("rms_norm", lambda x, w: rms(x * 1, w, 1e-6), lambda x, w: F.rms_norm(x, (96,), w, 1e-6), [drawn(6, 96), drawn(96)]),
            ("layer_norm", lambda x, w, b: layer(x, w, b, 1e-5), lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-5),
             [drawn(6, 96), drawn(96), drawn(96)]),
            ("group_norm", lambda x, w, b: group(x, w, b, 8, 2, 1e-5), lambda x, w, b: F.group_norm(x, 2, w, b, 1e-5),
             [drawn(2, 8, 40), drawn(8), drawn(8)]),
            ("swiglu", lambda a, b: silu(a * 1, b * 1), lambda a, b: F.silu(a) * b, [drawn(6, 100), drawn(6, 100)]),
            ("geglu", lambda a, b: gelu(a * 1, b * 1), lambda a, b: F.gelu(a, approximate="tanh") * b,
             [drawn(6, 100), drawn(6, 100)]),
            ("cross_entropy", lambda x: entropy(x * 1, labels, None)[0], lambda x: F.cross_entropy(x, labels), [drawn(8, 300)]),
            ("kl_div", lambda x: divergence(torch.log_softmax(x, -1), target, "batchmean", False),
             lambda x: F.kl_div(torch.log_softmax(x, -1), target, reduction="batchmean"), [drawn(4, 64)]),
            ("softmax", softmax, lambda x: torch.softmax(x, -1), [drawn(6, 200)]),
        ]  # fmt: skip
        for name, ours, theirs, tensors in cases:
            began, before = time.process_time(), len(launches)
            largest = difference(ours, theirs, tensors)
            texts = {f"{one.severity}: {one.kind}" for launch in launches[before:] for one in launch.findings}
            seconds = time.process_time() - began
            print(f"{name}: {largest:.1e}, {len(launches) - before} launches, {', '.join(texts) or 'no findings'}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
