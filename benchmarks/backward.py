"""Times the backward pass beside its peers on the GPU at hand, and writes one file:

    python benchmarks/backward.py [--out benchmarks/results] [--quick] [--dry-run]

In one run, on the same memory: cupyflash by algorithm and deterministic, the gradients of PyTorch's
scaled_dot_product_attention by each backend that answers, those of `flash_attn` when it can be imported; the forward that they
need is not timed. TFLOP/s count 10 B H N^2 d, half when causal: five products for the forward's two. How, and what a dry run
is: timing.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import timing
from timing import Bench, Call, Case, Gpu, Pass

import cupyflash
from cupyflash.schedules import BACKWARD_ALGORITHMS
from cupyflash.sim.reference import reference_gradients

DEFAULT = "fa2"
OURS = (DEFAULT, f"{DEFAULT} deterministic", *(name for name in BACKWARD_ALGORITHMS if name != DEFAULT))


def implementations(bench: Bench, case: Case, seed: int) -> Mapping[str, Call]:
    """dQ, dK and dV, by cupyflash and by the others that there are; each has its forward behind it after its first call."""
    q, k, v, dout = bench.draw(case, seed, 4)

    @cache
    def forward() -> tuple[Any, Any]:
        out, lse = cupyflash.attention(q, k, v, causal=case.causal, return_lse=True)
        return out, lse

    def ours(name: str) -> Call:
        algorithm, _, deterministic = name.partition(" ")
        options: dict[str, Any] = {"causal": case.causal, "algorithm": algorithm, "deterministic": bool(deterministic)}
        return lambda: cupyflash.attention_backward(dout, q, k, v, *forward(), **options)

    return {name: ours(name) for name in OURS} | dict(peers(bench, case, dout, q, k, v))


def peers(bench: Bench, case: Case, dout: Any, q: Any, k: Any, v: Any) -> Iterator[tuple[str, Call]]:
    """Other implementations on these arrays: on the simulated device NumPy's."""
    if not isinstance(bench, Gpu):

        def plain() -> tuple[Any, ...]:
            gradients = reference_gradients(dout, q, k, v, causal=case.causal)
            return tuple(gradients[name] for name in ("dQ", "dK", "dV"))

        yield "numpy", plain
    elif found := bench.torch(q, k, v, dout):

        def differentiated(attention: Callable[..., Any], tensors: Sequence[Any]) -> Call:
            *inputs, gradient = (tensor.detach() for tensor in tensors)

            @cache
            def out() -> Any:
                for tensor in inputs:
                    tensor.requires_grad_()
                return attention(*inputs, case.causal)

            def call() -> Any:
                with found.torch.cuda.stream(found.stream):
                    return found.torch.autograd.grad(out(), inputs, gradient, retain_graph=True)

            return call

        # Without PyTorch's own products: their graph holds matrices of N x N.
        for name, attention in found.backends("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
            yield name, differentiated(attention, found.tensors)
        for name, attention in found.flash_attn():
            yield name, differentiated(attention, found.rows_first())


BACKWARD = Pass("backward", 2.5, OURS, implementations)


def main(argv: Sequence[str] | None = None, clock: Callable[[], float] = time.perf_counter) -> int:
    return timing.main(__doc__, BACKWARD, argv, clock, suffix="-backward")


if __name__ == "__main__":
    sys.exit(main())
