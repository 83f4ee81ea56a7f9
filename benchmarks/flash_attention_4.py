"""FlashAttention-4's Hopper kernels on the PTX machine:  python benchmarks/flash_attention_4.py [--seed N] [WORD ...]

Needs no GPU, but an environment of its own (PyTorch's CPU build will do):

    pip install '.[cute]' flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.1 quack-kernels==0.6.5 torch

`flash_attn_func` and its gradients are called as on a GPU. For each case: the error of O, dQ, dK and dV against float64, as a part
of twice the plain computation's in the same half type; the error of LSE; processor time; findings. WORDs narrow the cases; --seed
runs warps in random order. The exit status is 1 for an error beyond those.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from flash_attn.cute import flash_attn_func

from cupyflash.sim.cute import simulated_cute

N, HEADS = 200, 2
LSE_ERROR = 1e-5
NAMES = "O", "dQ", "dK", "dV"
CASES = [
    [kind, d, masking, *order]
    for kind in ("float16", "bfloat16")
    for d in ("64", "128")
    for masking in ("full", "causal")
    for order in ((), ("deterministic",))
]
CASES.append(["bfloat16", "128", "causal", "grouped"])


def drawn(case: list[str]) -> list[torch.Tensor]:
    """Returns Q, K, V and dO, as (batch, N, heads, d)."""
    generator = torch.Generator().manual_seed(0)
    heads = (2 * HEADS if "grouped" in case else HEADS), HEADS, HEADS, (2 * HEADS if "grouped" in case else HEADS)
    made = [torch.randn(1, N, count, int(case[1]), generator=generator) for count in heads]
    return [one.to(getattr(torch, case[0])) for one in made]


def gradients(forward: Any, inputs: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns O, dQ, dK and dV, and the LSE, of a function of Q, K and V."""
    *qkv, dout = (one.detach().clone() for one in inputs)
    out, lse = forward(*(one.requires_grad_() for one in qkv))
    out.backward(dout)
    return [out.detach(), *(one.grad for one in qkv)], lse.detach()


def plain(causal: bool) -> Any:
    """Returns attention in PyTorch's matrix products, in the type of its arguments."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (one.repeat_interleave(q.shape[2] // one.shape[2], 2) for one in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return torch.einsum("bhij,bjhd->bihd", wide.softmax(-1).to(v.dtype), v), wide.logsumexp(-1)

    return forward


def largest(got: torch.Tensor, true: torch.Tensor) -> float:
    return float((got.double() - true).abs().max())


def tried(case: list[str], seed: int | None) -> bool:
    """Runs a case and prints its line; returns True if all errors are allowed."""
    inputs, causal = drawn(case), "causal" in case
    true, true_lse = gradients(plain(causal), [one.double() for one in inputs])
    low, _ = gradients(plain(causal), inputs)
    began = time.process_time()
    with simulated_cute("H100-SXM", findings="keep", seed=seed) as launches:
        how = {"causal": causal, "deterministic": "deterministic" in case, "return_lse": True}
        got, lse = gradients(lambda *qkv: flash_attn_func(*qkv, **how), inputs)
    shares = [largest(a, b) / (2 * largest(c, b)) for a, b, c in zip(got, true, low, strict=True)]
    right = max(shares) <= 1 and largest(lse, true_lse) <= LSE_ERROR
    errors = ", ".join(f"{name} {share:.2f}" for name, share in zip(NAMES, shares, strict=True))
    spent = time.process_time() - began
    print(f"{' '.join(case):36} {errors}, LSE {largest(lse, true_lse):.1e}, {spent:.0f} s{'' if right else ': WRONG'}", flush=True)
    for launch in launches:
        for one in (*launch.findings, *launch.notes):
            print(f"    {one}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    right = [tried(case, given.seed) for case in CASES if set(given.words) <= set(case)]
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
