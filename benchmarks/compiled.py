"""Times the PTX machine's compiled code beside NumPy:  python benchmarks/compiled.py [--only PART] [--json FILE]

Small kernels (tests/kernels/compiled.cu) and our own attention, every check on, no seed. Each engine in its turn, in one process:
NumPy once more than it takes to warm up, compiled code once, which translates the kernel and takes its machine code from the disk
or compiles it, and then twice. Times are seconds of processor time; `compiled` is what LLVM took, 0 if all was on the disk.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkout import ROOT

# isort: split
from cupyflash import Device, Problem, plan
from cupyflash.basics import Array
from cupyflash.schedules import plan_backward
from cupyflash.sim import execute, execute_backward
from cupyflash.sim.ptx import Module
from cupyflash.sim.ptx.execute.compiled import CompiledUnit, Compiler

RNG = np.random.default_rng(0)
DEVICE = Device.named("A100-40GB")


def floats(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def small(name: str, grid: Any, block: Any, *args: Any) -> Callable[[], object]:
    """Returns a launch of a kernel of compiled.cu."""
    module = Module.from_source((ROOT / "tests" / "kernels" / "compiled.cu").read_text())
    return lambda: module.launch(name, grid, block, list(args))


def attention(algorithm: str, n: int, d: int, dtype: str, causal: bool, backward: bool = False) -> Callable[[], object]:
    """Returns a call of attention (2 heads), or of its gradients."""
    problem = Problem(1, 2, 2, n, n, d, dtype, causal=causal)
    q, k, v, dout = (floats(1, 2, n, d, dtype=dtype) for _ in range(4))
    schedule = plan(problem, DEVICE, algorithm, lse=True)
    if not backward:
        return lambda: execute(schedule, q, k, v)
    made = execute(schedule, q, k, v)
    gradients = plan_backward(problem, DEVICE, algorithm)
    return lambda: execute_backward(gradients, dout, q, k, v, made.out, made.lse)


def cases() -> Iterator[tuple[str, Callable[[], Callable[[], object]]]]:
    """Yields what is timed: a name, and a function that makes the call."""
    n = 512
    a, b, c = floats(n, n), floats(n, n), np.zeros((n, n), np.float32)
    yield "product of 512 x 512, tiles of 16 x 16", lambda: small("gemm16", (32, 32), (16, 16), a, b, c, np.int32(n))
    x, sums = floats(1 << 20), np.zeros(4096, np.float32)
    yield "sums of 256 numbers, 4,096 blocks", lambda: small("reduce", 4096, 256, x, sums, np.int32(1 << 20))
    big, other = floats(2048, 2048), np.zeros((2048, 2048), np.float32)
    yield "transpose of 2,048 x 2,048", lambda: small("transpose", (64, 64), (32, 8), big, other, np.int32(2048))
    y = floats(1 << 21)
    yield "saxpy, 2,097,152 numbers", lambda: small("saxpy", 1 << 14, 128, floats(1 << 21), y, np.int32(1 << 21))
    rows = floats(8192, 200)
    yield "softmax, 8,192 rows of 200", lambda: small("softmax", 2048, 128, rows, np.zeros_like(rows), np.int32(200))
    grid = floats(2048, 2048, dtype=np.float64)
    yield (
        "stencil of five float64, 2,048 x 2,048",
        lambda: small("stencil", (64, 256), (32, 8), grid, np.zeros_like(grid), np.int32(2048)),
    )
    some = RNG.integers(0, 256, 1 << 20).astype(np.uint8)
    yield "histogram of 2**20 bytes", lambda: small("hist", 128, 256, some, np.zeros(64, np.uint32), np.int32(1 << 20))
    starts = np.concatenate([[0], np.cumsum(RNG.integers(0, 33, 16384))]).astype(np.int32)
    columns = RNG.integers(0, 16384, starts[-1]).astype(np.int32)
    values, vector, out = floats(int(starts[-1])), floats(16384), np.zeros(16384, np.float32)
    yield (
        "sparse matrix times vector, 16,384 rows",
        lambda: small("spmv", 128, 128, starts, columns, values, vector, out, np.int32(16384)),
    )
    yield (
        "sums of floats by atomics, 65,536 threads",
        lambda: small("scatter", 512, 128, floats(1 << 16), np.zeros(64, np.float32), np.int32(1)),
    )
    yield "fa2, float16, d 64, N 1,024", lambda: attention("fa2", 1024, 64, "float16", False)
    yield "fa2, float16, d 128, N 1,024, causal", lambda: attention("fa2", 1024, 128, "float16", True)
    yield "fa2, float32, d 64, N 512", lambda: attention("fa2", 512, 64, "float32", False)
    yield "fa1, float16, d 64, N 512", lambda: attention("fa1", 512, 64, "float16", False)
    yield "standard, float16, d 64, N 512", lambda: attention("standard", 512, 64, "float16", False)
    yield "fa2's gradients, float16, d 64, N 1,024", lambda: attention("fa2", 1024, 64, "float16", False, True)
    yield "fa2's gradients, float16, d 128, N 512, causal", lambda: attention("fa2", 512, 128, "float16", True, True)
    yield "fa1's gradients, float16, d 64, N 256", lambda: attention("fa1", 256, 64, "float16", False, True)


def timed(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def measure(call: Callable[[], object]) -> dict[str, float]:
    """Returns the seconds of a call by NumPy, and by compiled code at first and then."""
    spent = [0.0]
    own = Compiler.compiled

    def compiled(compiler: Compiler, unit: CompiledUnit) -> bytes:
        began = time.process_time()
        code = own(compiler, unit)
        spent[0] += time.process_time() - began
        return code

    Compiler.compiled = compiled  # type: ignore[method-assign]
    try:
        os.environ["CUPYFLASH_ENGINE"] = "numpy"
        call()
        numpy = timed(call)
        os.environ["CUPYFLASH_ENGINE"] = "llvm"
        first = timed(call)
        return {"numpy": numpy, "first": first, "compiled": spent[0], "then": min(timed(call), timed(call))}
    finally:
        Compiler.compiled = own  # type: ignore[method-assign]
        del os.environ["CUPYFLASH_ENGINE"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PART", help="only the cases whose names have this part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there")
    options = parser.parse_args()
    found, ratios = {}, []
    print(f"{'kernel':<48}{'NumPy':>8}{'first':>8}{'LLVM':>8}{'then':>8}{'times':>7}")
    for name, make in cases():
        if options.only not in name:
            continue
        times = found[name] = measure(make())
        ratios.append(times["numpy"] / times["then"])
        shown = "".join(f"{times[key]:8.3f}" for key in ("numpy", "first", "compiled", "then"))
        print(f"{name:<48}{shown}{ratios[-1]:7.1f}", flush=True)
    if ratios:
        print(f"geometric mean {math.exp(float(np.mean(np.log(ratios)))):.1f}, least {min(ratios):.1f}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
