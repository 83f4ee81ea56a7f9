"""FlashAttention-4's Hopper kernels on the PTX machine:  python benchmarks/flash_attention_4.py [--seed N | --time N] [WORD ...]

Needs no GPU, but an environment of its own (PyTorch's CPU build will do):

    pip install '.[cute]' flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.1 quack-kernels==0.6.5 torch

`flash_attn_func` and its gradients are called as on a GPU. For each case: the error of O, dQ, dK and dV against float64, as a part
of twice the plain computation's in the same half type; the error of LSE; processor time; findings. WORDs narrow the cases; --seed
runs warps in random order. The exit status is 1 for an error beyond those.

--time N runs none of them: the clock (docs/clock.md) times the launches of a forward and of gradients of 32 heads and N queries and
keys, on an H200 whose L2 was emptied, one call at a time, and beside them those of our fa3. It needs ptxas, and '.[clock]'.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from calls import arguments
from flash_attn.cute import flash_attn_func, interface

from cupyflash import Device, Problem, plan
from cupyflash.schedules import plan_backward
from cupyflash.sim import ptx
from cupyflash.sim.clock import planned
from cupyflash.sim.clock.execution import CodeLaunch, CubinKernel
from cupyflash.sim.clock.loaded import of_ptx
from cupyflash.sim.clock.whole import Clock
from cupyflash.sim.cute import simulated_cute
from cupyflash.sim.replaced import replaced

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
TIMED_HEADS, ALONE = 32, 0.01
"""Heads of the calls that are timed, and the seconds for which one of them has the device to itself."""
OURS = "ours"
TIMED = [
    ["bfloat16", "128", mask, way, *whose]
    for mask in ("full", "causal")
    for way in ("forward", "backward")
    for whose in ([], [OURS])
]


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


def clocks_of(case: Sequence[str], n: int, device: Device) -> list[Clock]:
    """Returns the clocks of a call's launches, none of which is run; arrays hold zeros."""
    found: list[Clock] = []
    if OURS in case:
        problem = Problem(1, TIMED_HEADS, TIMED_HEADS, n, n, int(case[1]), case[0], causal="causal" in case)
        found = [*planned.clocks((plan if "forward" in case else plan_backward)(problem, device, "fa3"))]
        for clock in found:
            clock.cold = True
        return found

    def launch(module: ptx.Module, name: str, grid: Any, block: Any, given: ptx.RawArguments, **how: Any) -> Any:
        pairs = ((each, np.zeros(each.memory.nbytes, np.uint8)) for each in given.allocations)
        bound = arguments(given.data, module.code(name).params, pairs)
        kernel, cluster = CubinKernel.of(of_ptx(module.text, device).cubin, name), how["cluster"] or (1, 1, 1)
        found.append(Clock(CodeLaunch(kernel, grid, block, bound, how["shared_bytes"], cluster=cluster), device, cold=True))
        return SimpleNamespace(findings=(), notes=(), suppressed=(), unmatched=())

    q, k, v, dout, out = (torch.zeros(1, n, TIMED_HEADS, int(case[1]), dtype=getattr(torch, case[0])) for _ in range(5))
    causal = "causal" in case
    with simulated_cute(device, findings="keep"), replaced([(ptx.Module, "launch", launch)]):
        if "forward" in case:
            flash_attn_func(q, k, v, causal=causal)
        else:
            lse = torch.zeros(1, TIMED_HEADS, n)
            interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=causal)
    return found


def timed(words: set[str], n: int) -> None:
    """Prints the predicted times of the calls that words choose."""
    device = Device.named("H200")
    for case in TIMED:
        if not words <= set(case):
            continue
        clocks = clocks_of(case, n, device)
        for clock in clocks:
            clock.series = ALONE
        times = [clock.time() for clock in clocks]
        seconds = sum(each.seconds for each in times)
        flops = 4 * n * n * int(case[1]) * TIMED_HEADS * (1 if "forward" in case else 2.5) / (2 if "causal" in case else 1)
        longest = max(times, key=lambda each: each.seconds)
        print(
            f"{' '.join(case):44} N {n:,}: {seconds * 1e6:9,.1f} us, {flops / seconds / 1e12:4.0f} TFLOP/s; {longest.binds} binds",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--time", type=int, metavar="N", help="time calls of N queries and keys by the clock, and run none")
    given = parser.parse_args()
    if given.time:
        timed(set(given.words), given.time)
        return 0
    right = [tried(case, given.seed) for case in CASES if set(given.words) <= set(case)]
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
