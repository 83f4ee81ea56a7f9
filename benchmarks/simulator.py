"""Times the PTX machine on a single-pass attention kernel:  python benchmarks/simulator.py [--spike FOLDER] [--json FILE]

The kernel is single_pass.cu (float16, d 64, tiles of 64 x 64, seed=None). Each variant runs in turn, so that all of them see
the same machine; times are the least and the median over the turns, of the processor and of the wall. --cost adds the cost
against N, of this kernel and of Algorithm 1. --spike times another simulator and kernel in the same turns: a folder with
emu.py and the k.ptx that its c.py makes; ratios are to its processor time. --hopper times warp-specialised kernels (TMA, wgmma,
mbarriers) instead: the tests' GEMM (512 x 512 x 512) with and without a seed, and once fa3's forward (4 heads, N 4,096, d 128,
causal).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkout import ROOT

# isort: split
from cupyflash import Device, Problem, plan
from cupyflash.sim import Execution, execute
from cupyflash.sim.ptx import Launch, Module

D, TILE, THREADS = 64, 64, 128
SHARED_BYTES = 5 * TILE * (D + 8) * 2
LOG2_E = math.log2(math.e)
SIZES = (256, 512, 1024, 2048, 4096, 8192)


def single_pass(causal: bool) -> Module:
    constants = {"ELEMENT": "__half", "HEAD_DIM": D, "VALUE_DIM": D, "SUB": TILE, "COPY_BYTES": 16, "CAUSAL": int(causal)}
    options = ["-arch=compute_80", "--use_fast_math", f"-I{ROOT / 'kernels_cu'}", *(f"-D{k}={v}" for k, v in constants.items())]
    return Module.from_source((ROOT / "benchmarks" / "single_pass.cu").read_text(), options, name="single_pass.cu")


def draw(heads: int, n: int) -> tuple[np.ndarray, ...]:
    """Q, K, V (heads, n, D)."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((heads, n, D)).astype(np.float16) for _ in range(3))


def run(module: Module, heads: int, n: int, **options: Any) -> Launch:
    q, k, v = draw(heads, n)
    lse = np.empty((heads, n), np.float32)
    args = {"Q": q, "K": k, "V": v, "O": np.empty_like(q), "L": lse, "N": n, "scale": LOG2_E / math.sqrt(D)}
    launch = module.launch("single_pass", (-(-n // TILE), heads), THREADS, args, shared_bytes=SHARED_BYTES, **options)
    if launch.findings:
        raise SystemExit("\n".join(map(str, launch.findings)))
    return launch


class Spike:
    """The other simulator: its own module, and its kernel's PTX, which this one runs too."""

    def __init__(self, folder: Path):
        spec = importlib.util.spec_from_file_location("spike", folder / "emu.py")
        assert spec is not None and spec.loader is not None
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.ptx = (folder / "k.ptx").read_text()
        self.mine = Module.from_ptx(self.ptx)

    def theirs(self, n: int) -> Callable[[], object]:
        """One run of theirs; memory is prepared outside the measured time, as they do."""
        tensors = draw(1, n)
        size = tensors[0].nbytes
        memory = np.concatenate([*(x.view(np.uint8).reshape(-1) for x in tensors), np.zeros(size + 4 * n, np.uint8)])
        values = [0, size, 2 * size, 3 * size, 4 * size, n, np.float32(LOG2_E / math.sqrt(D)), 0]
        machine = self.module.Emu(self.ptx, (-(-n // TILE), 1), THREADS, 5 * TILE * D * 2, memory, values)
        return machine.run  # type: ignore[no-any-return]

    def ours(self, n: int, **options: Any) -> Launch:
        q, k, v = draw(1, n)
        args = {"Q": q, "K": k, "V": v, "O": np.empty_like(q), "L": np.empty((1, n), np.float32), "N": n}
        args |= {"scale_log2": LOG2_E / math.sqrt(D), "causal": 0}
        return self.mine.launch("fa2", (-(-n // TILE), 1), THREADS, args, shared_bytes=5 * TILE * D * 2, **options)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the processor (with child processes) and of the wall."""
    wall, before = time.perf_counter(), processor()
    call()
    return processor() - before, time.perf_counter() - wall


def processor() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def in_turns(variants: dict[str, Callable[[], Callable[[], object]]], turns: int) -> dict[str, dict[str, float]]:
    """Least and median seconds of each variant; a variant makes the call that is timed."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for turn in range(turns + 1):
        for name, make in variants.items():
            found = timed(make())
            if turn:  # the first one warms up
                times[name].append(found)
    return {
        name: {
            f"{kind}_{statistic.__name__}_s": statistic([t[k] for t in found])
            for k, kind in enumerate(("processor", "wall"))
            for statistic in (min, statistics.median)
        }
        for name, found in times.items()
    }


def compare(n: int, turns: int, spike: Spike | None) -> dict[str, dict[str, float]]:
    module = single_pass(causal=False)
    variants: dict[str, Callable[[], Callable[[], object]]] = {
        "all checks": lambda: lambda: run(module, 1, n),
        "races off": lambda: lambda: run(module, 1, n, races=False),
    }
    if spike is not None:
        variants["spike"] = lambda: spike.theirs(n)
        variants["its kernel, all checks"] = lambda: lambda: spike.ours(n)
        variants["its kernel, races off"] = lambda: lambda: spike.ours(n, races=False)
    rows = in_turns(variants, turns)
    for name, row in rows.items():
        if spike is not None:
            row["ratio_to_spike"] = row["processor_min_s"] / rows["spike"]["processor_min_s"]
        show(name, row)
    return rows


def show(name: str, row: dict[str, float]) -> None:
    print(f"{name:<24}" + "".join(f"  {key} {value:.3f}" for key, value in row.items()), flush=True)


def fa3(n: int) -> tuple[Execution, float]:
    """The project's forward for Hopper, causal, 4 heads of N rows of 128; the worst error of some rows of O against float64."""
    schedule = plan(Problem(1, 4, 4, n, n, 128, "float16", causal=True), Device.named("H100-SXM"), "fa3", lse=True)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, n, 128)).astype(np.float16) for _ in range(3))
    found = execute(schedule, q, k, v)
    rows = np.unique(np.linspace(0, n - 1, 64).astype(int))
    S = q[:, :, rows].astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) / math.sqrt(128)
    S[:, :, np.arange(n) > rows[:, None]] = -np.inf
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    errors = P @ v.astype(np.float64) / P.sum(axis=-1, keepdims=True) - found.out[:, :, rows]
    return found, float(np.abs(errors).max())


def hopper(turns: int) -> dict[str, dict[str, float]]:
    sys.path.insert(0, str(ROOT / "tests"))
    from test_ptx_wgmma_gemm import launch, module  # type: ignore[import-not-found]

    def require_right(found: Launch | Execution, error: float, most: float) -> None:
        if found.findings or error > most:
            raise SystemExit("\n".join(map(str, found.findings)) or f"wrong by {error}")

    def gemm(seed: int | None) -> None:
        require_right(*launch(module(), (512, 512, 512), seed), 1e-4)

    def forward(n: int) -> None:
        require_right(*fa3(n), 2e-3)

    gemm(None)  # compiled and decoded outside of the time
    forward(256)
    rows = in_turns({"GEMM": lambda: lambda: gemm(None), "GEMM, seed 0": lambda: lambda: gemm(0)}, turns)
    seconds, wall = timed(lambda: forward(4096))
    rows["forward"] = {"processor_s": seconds, "wall_s": wall}
    for name, row in rows.items():
        show(name, row)
    return rows


def cost(largest: int) -> list[dict[str, Any]]:
    """Seconds, warp instructions a second and peak memory against N, every size in a process of its own."""
    rows = []
    for kernel, heads in (("single_pass", 1), ("fa1", 1), ("single_pass", 4), ("fa1", 4)):
        for causal in (False, True):
            for n in SIZES if heads == 1 else (4096,):
                if n > largest or (heads == 4 and not causal):
                    continue
                command = [sys.executable, __file__, "--one", f"{kernel},{heads},{n},{int(causal)}"]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                rows.append({"kernel": kernel, "heads": heads, "n": n, "causal": causal, **json.loads(out)})
                row = rows[-1]
                print(
                    f"{kernel:<12} heads {heads} N {n:>5} causal {causal!s:<5} {row['processor_s']:8.2f} s "
                    f"{row['warp_instructions'] / row['processor_s']:12,.0f} warp instructions/s "
                    f"{row['peak_bytes'] / 2**20:7.0f} MiB",
                    flush=True,
                )
    return rows


def one(kernel: str, heads: int, n: int, causal: bool) -> dict[str, float]:
    """One kernel with every check on: the least processor time of up to three runs (one of a long run), and the memory that a
    further one allocates.

    `peak_bytes` are Python's and NumPy's, tensors included.
    """
    tracemalloc.start()
    if kernel == "fa1":
        schedule = plan(Problem(1, heads, heads, n, n, D, "float16", causal=causal), Device.named("A100-40GB"), "fa1", lse=True)

        def call() -> int:
            q, k, v = (x[None] for x in draw(heads, n))
            return sum(c.instructions for c in execute(schedule, q, k, v).counters.values())
    else:
        module = single_pass(causal)

        def call() -> int:
            return run(module, heads, n).counters.instructions

    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    times: list[float] = []
    while len(times) < 3 and sum(times) < 20:
        start = processor()
        instructions = call()
        times.append(processor() - start)
    return {"processor_s": min(times), "warp_instructions": instructions, "peak_bytes": peak}


def surroundings() -> dict[str, Any]:
    model = next((s.split(":")[1].strip() for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s), "unknown")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "processor": model,
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "nvrtc": next((d.version for d in importlib.metadata.distributions() if "cuda-nvrtc" in str(d.metadata["Name"])), None),
        "commit": commit or None,
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spike", type=Path, metavar="FOLDER", help="time the simulator and kernel in this folder beside ours")
    parser.add_argument("--turns", type=int, default=10, help="runs of each variant (default 10)")
    parser.add_argument("-n", type=int, default=1024, help="sequence length of the comparison (default 1024)")
    parser.add_argument("--cost", type=int, default=0, metavar="N", help="add the cost against N, up to this N")
    parser.add_argument("--hopper", action="store_true", help="time a warp-specialised GEMM of Hopper instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kernel, *numbers = options.one.split(",")
        heads, n, causal = map(int, numbers)
        print(json.dumps(one(kernel, heads, n, bool(causal))))
        return
    result: dict[str, Any] = surroundings()
    print(result, flush=True)
    if options.hopper:
        result["hopper"] = hopper(options.turns)
    else:
        result["comparison"] = compare(options.n, options.turns, Spike(options.spike) if options.spike else None)
    if options.cost:
        result["cost"] = cost(options.cost)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
