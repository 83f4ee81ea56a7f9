"""Times the PTX machine:  python benchmarks/simulator.py [--cost N] [--json FILE]

Our forwards (fa1 and fa2 as tiled for an A100: float16, d 64, one head, N 512), and on a Hopper the tests' GEMM by wgmma (512 x
512 x 512) and fa3's forward (4 heads, N 4,096, d 128, causal), with every check, with a seed and without. Variants take turns, so
that all of them see the same machine; times are the least over the turns, of the processor. --cost adds the cost against N: every
size in a process of its own, with the memory that Python and NumPy allocate, tensors included.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from checkout import ROOT, environment

# isort: split
from records import commit

from cupyflash import Device, Problem, plan
from cupyflash.basics import Array, Report, Shape
from cupyflash.sim import Execution, execute

SIZES = (256, 512, 1024, 2048, 4096, 8192)


def forward(algorithm: str, n: int, causal: bool = False, seed: int | None = None) -> Execution:
    """A forward of one head on an A100, of which a finding ends the benchmark."""
    schedule = plan(Problem(1, 1, 1, n, n, 64, "float16", causal=causal), Device.named("A100-40GB"), algorithm, lse=True)
    found = execute(schedule, *drawn((1, 1, n, 64)), seed=seed)
    if found.findings:
        raise SystemExit("\n".join(map(str, found.findings)))
    return found


def drawn(shape: Shape) -> list[Array]:
    """Q, K and V."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float16) for _ in range(3)]


def fa3(n: int) -> tuple[Execution, float]:
    """The project's forward for Hopper, causal, 4 heads of N rows of 128; the worst error of some rows of O against float64."""
    schedule = plan(Problem(1, 4, 4, n, n, 128, "float16", causal=True), Device.named("H100-SXM"), "fa3", lse=True)
    q, k, v = drawn((1, 4, n, 128))
    found = execute(schedule, q, k, v)
    rows = np.unique(np.linspace(0, n - 1, 64).astype(int))
    S = q[:, :, rows].astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) / math.sqrt(128)
    S[:, :, np.arange(n) > rows[:, None]] = -np.inf
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    errors = P @ v.astype(np.float64) / P.sum(axis=-1, keepdims=True) - found.out[:, :, rows]
    return found, float(np.abs(errors).max())


def require_right(found: Any, error: float, most: float) -> None:
    if found.findings or error > most:
        raise SystemExit("\n".join(map(str, found.findings)) or f"wrong by {error}")


def variants() -> dict[str, Callable[[], object]]:
    sys.path.insert(0, str(ROOT / "tests"))
    from test_ptx_wgmma_gemm import launch, module  # type: ignore[import-not-found]

    def gemm(seed: int | None) -> None:
        require_right(*launch(module(), (512, 512, 512), seed), 1e-4)

    seeds = {"no seed": None, "seed 0": 0}
    own = {f"{name}, {how}": partial(forward, name, 512, seed=seed) for name in ("fa1", "fa2") for how, seed in seeds.items()}
    hopper = {f"GEMM, {how}": partial(gemm, seed) for how, seed in seeds.items()}
    return {**own, **hopper, "fa3": lambda: require_right(*fa3(4096), 2e-3)}


def timed(call: Callable[[], object]) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


def cost(largest: int) -> list[Report]:
    """Seconds, warp instructions and peak memory against N."""
    rows = []
    for algorithm in ("fa1", "fa2"):
        for causal in (False, True):
            for n in (each for each in SIZES if each <= largest):
                command = [sys.executable, __file__, "--one", json.dumps([algorithm, n, causal])]
                out = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
                rows.append({"algorithm": algorithm, "n": n, "causal": causal, **json.loads(out)})
                print(rows[-1], flush=True)
    return rows


def one(algorithm: str, n: int, causal: bool) -> dict[str, float]:
    """The least of up to three runs (one of a long run), and the memory of the first."""
    tracemalloc.start()
    instructions = sum(each.instructions for each in forward(algorithm, n, causal).counters.values())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    times: list[float] = []
    while len(times) < 3 and sum(times) < 20:
        times.append(timed(partial(forward, algorithm, n, causal)))
    return {"seconds": min(times), "warp_instructions": instructions, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="runs of each variant behind its first (default 3)")
    parser.add_argument("--cost", type=int, default=0, metavar="N", help="add the cost against N, up to this N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(*given.one)))
        return
    every = variants()
    turns = [{name: timed(call) for name, call in every.items()} for _ in range(1 + given.turns)]
    found = {name: min(turn[name] for turn in turns[1:]) for name in every}
    for name, seconds in found.items():
        print(f"{name:<20}{seconds:8.3f} s", flush=True)
    result = {"commit": commit(), "numpy": np.__version__, "seconds": found, "cost": cost(given.cost)}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
