"""Times the forward pass beside its peers on the GPU at hand, and writes one file:

    python benchmarks/forward.py [--out benchmarks/results] [--quick] [--dry-run]

In one run, on the same memory: cupyflash by algorithm, PyTorch's scaled_dot_product_attention with each backend that answers,
`flash_attn` when it can be imported. Nothing is installed. Device times come from events around one call, behind a buffer
that is overwritten first: that empties the L2 and keeps the GPU busy until the call is queued. Inputs are random and rotate.
TFLOP/s count 4 B H N^2 times the mean of d and d_v, half when causal. `--dry-run` does all of it on the simulated device, with
tiny sizes and a wall clock: figures of no meaning, every line run.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import cupyflash  # noqa: E402
from cupyflash import Device, Problem, plan, simulated_device  # noqa: E402
from cupyflash.sim import theory  # noqa: E402

ALGORITHMS = ("fa2", "fa1", "standard")
TOKENS, WIDTH = 16384, 2048  # of a batch: B x N, and H x d
HEAD_DIMS, LENGTHS, DTYPES = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), ("float16", "bfloat16")
ROTATED = 3  # sets of inputs
SECONDS_EACH = 0.3  # of repeats of one implementation on one case, between LEAST and MOST of them
LEAST, MOST = 5, 50
HOST_CALLS = 200
# The most that two right implementations in half types are apart; random inputs give outputs well below 1.
ALIKE = 0.03
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
# What ncu counts: bytes of L2 that its callers asked for, and of device memory. Our counts are requested bytes (docs/ptx.md).
NCU_METRICS = ("lts__t_bytes.sum", "dram__bytes_read.sum", "dram__bytes_write.sum")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """B x H heads of N x N scores; d is that of Q, K, V and O."""

    dtype: str
    d: int
    n: int
    causal: bool
    batch: int
    heads: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.n, self.d

    @property
    def problem(self) -> Problem:
        return Problem(self.batch, self.heads, self.heads, self.n, self.n, self.d, self.dtype, self.causal)

    @property
    def flops(self) -> float:
        """Of the two products, as FlashAttention's own benchmarks count them."""
        return 4 * self.batch * self.heads * self.n**2 * (self.d + self.problem.value_dim) / 2 / (2 if self.causal else 1)


def grid(dtypes: Sequence[str], head_dims: Sequence[int], lengths: Sequence[int], tokens: int, width: int) -> list[Case]:
    """Cases of the same number of tokens and the same width."""
    every = itertools.product(dtypes, head_dims, lengths, (False, True))
    return [Case(dtype, d, n, causal, max(1, tokens // n), max(1, width // d)) for dtype, d, n, causal in every]


class Bench(Protocol):
    """What a run needs of the machine that it runs on."""

    device: Device

    def draw(self, case: Case, seed: int) -> tuple[Any, Any, Any]:
        """Q, K, V of standard normal numbers."""

    def seconds(self, call: Call) -> float:
        """Time of one call on the device."""

    def wait(self) -> None:
        """Until the device has done all that it was given."""

    def release(self) -> None:
        """Give cached memory back, so that one implementation's is there for the next."""

    def peers(self, case: Case, q: Any, k: Any, v: Any) -> Mapping[str, Call]:
        """Other implementations on these arrays."""

    def to_host(self, out: Any) -> np.ndarray:
        """An implementation's output as float32 (b, h, n, d)."""

    def versions(self) -> dict[str, Any]:
        """Driver, clocks and the libraries that take part."""


class Gpu:
    """The current CUDA device."""

    def __init__(self) -> None:
        import cupy

        self.cupy, self.device = cupy, Device.current()
        self._flush = cupy.empty(max(4 * self.device.l2_bytes, 1 << 29), cupy.uint8)

    def draw(self, case: Case, seed: int) -> tuple[Any, Any, Any]:
        random = self.cupy.random.default_rng(seed)
        arrays = (random.standard_normal(case.shape, dtype=np.float32) for _ in "qkv")
        q, k, v = (self._rounded(array, case.dtype) for array in arrays)
        return q, k, v

    def _rounded(self, array: Any, dtype: str) -> Any:
        if dtype != "bfloat16":
            return array.astype(dtype)
        bits = (array.view(np.uint32) >> 16).astype(np.uint16)  # rounded to zero: CuPy may not know the type's arithmetic
        return bits.view(np.dtype(ml_dtypes.bfloat16))

    def seconds(self, call: Call) -> float:
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        self._flush.fill(0)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def wait(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def release(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()

    def peers(self, case: Case, q: Any, k: Any, v: Any) -> Mapping[str, Call]:
        try:
            import torch
        except ImportError:
            return {}
        # Through integers, since DLPack of bfloat16 is not everywhere; the same memory all the same.
        dtype = getattr(torch, case.dtype)
        bits = np.int16 if case.problem.itemsize == 2 else np.int32
        tensors = [torch.from_dlpack(array.view(bits)).view(dtype) for array in (q, k, v)]
        stream = torch.cuda.ExternalStream(self.cupy.cuda.get_current_stream().ptr)
        found = {f"torch {name}": call for name, call in _sdpa(torch, stream, tensors, case.causal)}
        try:
            from flash_attn import flash_attn_func
        except ImportError:
            return found
        rows_first = [tensor.transpose(1, 2).contiguous() for tensor in tensors]

        def flash() -> Any:
            with torch.cuda.stream(stream):
                return flash_attn_func(*rows_first, causal=case.causal).transpose(1, 2)

        return found | {"flash_attn": flash}

    def to_host(self, out: Any) -> np.ndarray:
        if hasattr(out, "detach"):
            return np.asarray(out.detach().float().cpu().numpy())
        return np.asarray(self.cupy.asnumpy(out)).astype(np.float32)

    def versions(self) -> dict[str, Any]:
        from cupy.cuda import nvrtc

        runtime = self.cupy.cuda.runtime
        told = {
            "driver": runtime.driverGetVersion(),
            "runtime": runtime.runtimeGetVersion(),
            "nvrtc": "{}.{}".format(*nvrtc.getVersion()),
            "cupy": self.cupy.__version__,
            "clocks": clocks(),
        }
        for name in ("torch", "flash_attn"):
            try:
                told[name] = __import__(name).__version__
            except ImportError:
                told[name] = None
        return told


def _sdpa(torch: Any, stream: Any, tensors: Sequence[Any], causal: bool) -> Iterator[tuple[str, Call]]:
    """PyTorch's attention by backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def by(backend: Any) -> Call:
        def call() -> Any:
            with torch.no_grad(), torch.cuda.stream(stream), sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

        return call

    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        yield name.lower().removesuffix("_attention"), by(getattr(SDPBackend, name))


class Simulated:
    """The simulated device, by a wall clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self._clock = Device.named("A100-40GB"), clock

    def draw(self, case: Case, seed: int) -> tuple[Any, Any, Any]:
        dtype = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
        q, k, v = (array.astype(dtype) for array in np.random.default_rng(seed).standard_normal((3, *case.shape), np.float32))
        return q, k, v

    def seconds(self, call: Call) -> float:
        start = self._clock()
        call()
        return self._clock() - start

    def wait(self) -> None:
        pass

    def release(self) -> None:
        pass

    def peers(self, case: Case, q: Any, k: Any, v: Any) -> Mapping[str, Call]:
        def plain() -> Any:
            q64, k64, v64 = (array.astype(np.float64) for array in (q, k, v))
            scores = q64 @ k64.swapaxes(-1, -2) / np.sqrt(case.d)
            if case.causal:
                scores = np.where(np.tri(case.n, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            return weights / weights.sum(-1, keepdims=True) @ v64

        return {"numpy": plain}

    def to_host(self, out: Any) -> np.ndarray:
        return np.asarray(out, dtype=np.float32)

    def versions(self) -> dict[str, Any]:
        return {"numpy": np.__version__, "clocks": None}


def clocks() -> dict[str, str] | None:
    """What nvidia-smi says of clocks and power, if it is there."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader", "--id=0"]
    told = subprocess.run(command, capture_output=True, text=True)
    return dict(zip(CLOCKS.split(","), (value.strip() for value in told.stdout.split(",")), strict=False)) or None


def ours(case: Case, q: Any, k: Any, v: Any) -> dict[str, Call]:
    """cupyflash by algorithm."""

    def call(algorithm: str) -> Call:
        return lambda: cupyflash.attention(q, k, v, causal=case.causal, algorithm=algorithm)

    return {algorithm: call(algorithm) for algorithm in ALGORITHMS}


def timed(bench: Bench, calls: Sequence[Call]) -> dict[str, float | int]:
    """Median and spread (between the quartiles) of a call's seconds; `calls` is one a set of inputs, taken in turns."""
    once = max(bench.seconds(call) for call in calls)  # warm: each was called before
    repeats = min(max(LEAST, int(SECONDS_EACH / max(once, 1e-9))), MOST)
    times = [bench.seconds(calls[turn % len(calls)]) for turn in range(repeats)]
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"seconds": median, "spread_s": upper - lower, "repeats": repeats}


def measure(bench: Bench, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """A row for each case and implementation: seconds, spread, TFLOP/s, distance from the first one's output; or what it raised."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        sets = [bench.draw(case, seed) for seed in range(ROTATED)]
        every = [ours(case, *arrays) | dict(bench.peers(case, *arrays)) for arrays in sets]
        expected: np.ndarray | None = None
        for name in every[0]:
            row: dict[str, Any] = asdict(case) | {"implementation": name, "ours": name in ALGORITHMS}
            rows.append(row)
            try:
                outs = [calls[name]() for calls in every]  # compiles, warms up, and is what is checked
                bench.wait()
                first = bench.to_host(outs[0])
                del outs
                if expected is None:
                    expected = first
                row["largest_difference"] = float(np.abs(first - expected).max(initial=0))
                row["agrees"] = row["largest_difference"] <= ALIKE
                row |= timed(bench, [calls[name] for calls in every])
                row["tflops"] = case.flops / row["seconds"] / 1e12
            except (RuntimeError, ValueError, MemoryError) as error:  # a backend that does not answer, or memory that ends
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            bench.release()
    return rows


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case our default's TFLOP/s, the best other's that computes the same, and the ratio of the two."""
    found = []
    fields = list(Case.__dataclass_fields__)
    for case in dict.fromkeys(tuple(row[field] for field in fields) for row in rows):
        of_case = [row for row in rows if tuple(row[field] for field in fields) == case and "tflops" in row]
        mine = next((row for row in of_case if row["implementation"] == ALGORITHMS[0]), None)
        others = [row for row in of_case if not row["ours"] and row["agrees"]]
        best = max(others, key=lambda row: row["tflops"], default=None)
        told = dict(zip(fields, case, strict=True)) | {"ours_tflops": mine["tflops"] if mine else None}
        told |= {"best_other": best["implementation"] if best else None, "best_other_tflops": best["tflops"] if best else None}
        found.append(told | {"ratio": mine["tflops"] / best["tflops"] if mine and best else None})
    return found


def host_seconds(bench: Bench, case: Case, clock: Callable[[], float], calls: int) -> dict[str, float]:
    """Host time of one warm call, from entry to return, nothing waited for: median and spread; `case` is small."""
    q, k, v = bench.draw(case, 0)
    cupyflash.attention(q, k, v)
    times = []
    for _ in range(calls):
        bench.wait()  # an empty queue, so that no call waits for a place in it
        start = clock()
        cupyflash.attention(q, k, v)
        times.append(clock() - start)
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"seconds": median, "spread_s": upper - lower}


# In a process of its own: a first call's seconds behind an empty module's, when CUDA is already up.
FIRST_CALL_GPU = """
import time, json, cupy, cupyflash
q = cupy.ones((1, 1, 128, 64), cupy.float16)
cupy.cuda.Device().synchronize()
start = time.perf_counter()
cupy.RawModule(code='extern "C" __global__ void empty() {}').get_function("empty")((1,), (1,), ())
cupy.cuda.Device().synchronize()
middle = time.perf_counter()
cupyflash.attention(q, q, q)
cupy.cuda.Device().synchronize()
print(json.dumps({"empty_module_s": middle - start, "first_call_s": time.perf_counter() - middle}))
"""
FIRST_CALL_SIMULATED = """
import time, json, numpy, cupyflash
q = numpy.ones((1, 1, 16, 16), numpy.float16)
start = time.perf_counter()
cupyflash.attention(q, q, q)
print(json.dumps({"empty_module_s": 0.0, "first_call_s": time.perf_counter() - start}))
"""


def first_calls(code: str) -> dict[str, dict[str, float]]:
    """Seconds of a first call in a new process: with an empty disk cache, then with the one that it left."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"CUPY_CACHE_DIR": cache, "PYTHONPATH": path}
        for name in ("cold", "warm"):
            told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
            found[name] = json.loads(told.stdout.splitlines()[-1])
    return found


def profiled(case: Case) -> dict[str, Any] | None:
    """ncu's bytes of one fa2 call beside the theory's, where ncu is there; compared, not equated."""
    if shutil.which("ncu") is None:
        return None
    code = (
        f"import cupy, cupyflash; q, k, v = (cupy.ones({case.shape}, cupy.{case.dtype}) for _ in range(3)); "
        f"cupyflash.attention(q, k, v, causal={case.causal}); cupy.cuda.Device().synchronize()"
    )
    command = ["ncu", "--csv", "--print-units", "base", "--metrics", ",".join(NCU_METRICS), "--kernel-name", "fa2_forward"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    told = subprocess.run(
        [*command, sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    theirs = ncu_metrics(told.stdout)
    if not theirs:
        return {"error": (told.stdout + told.stderr).strip()[-300:]}
    form = theory.traffic(plan(case.problem, Device.current()))
    return asdict(case) | {"ncu": theirs, "theory": {"read_bytes": form.read_bytes, "write_bytes": form.write_bytes}}


def ncu_metrics(text: str) -> dict[str, float]:
    """The metrics of ncu's CSV, whatever it prints around it."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if '"Metric Name"' in line), len(lines))
    rows = csv.DictReader(io.StringIO("\n".join(lines[begin:])))
    return {
        row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in rows if row.get("Metric Name") in NCU_METRICS
    }


def show(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows as lines."""
    yield f"{'dtype':<10}{'d':>4}{'N':>7} {'causal':<7}{'implementation':<20}{'ms':>10}{'spread':>9}{'TFLOP/s':>9}"
    for row in rows:
        head = f"{row['dtype']:<10}{row['d']:>4}{row['n']:>7} {row['causal']!s:<7}{row['implementation']:<20}"
        if "error" in row:
            yield f"{head}  {row['error'][:70]}"
        else:
            doubt = "" if row["agrees"] else f"  DIFFERS by {row['largest_difference']:.2g}"
            yield f"{head}{row['seconds'] * 1e3:>10.3f}{row['spread_s'] * 1e3:>9.3f}{row['tflops']:>9.1f}{doubt}"


def commit() -> str | None:
    """The commit that is measured, marked where files differ from it."""
    told = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or None


def run(
    bench: Bench, cases: Sequence[Case], small: Case, first_call: str, host_calls: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Everything, as it is written to the file."""
    rows = measure(bench, cases)
    return {
        "device": bench.device.name,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cupyflash": cupyflash.__version__,
        "python": platform.python_version(),
        "versions": bench.versions(),
        "forward": rows,
        "ratios": ratios(rows),
        "warm_call_host": host_seconds(bench, small, clock, host_calls),
        "first_call": first_calls(first_call),
    }


def main(argv: Sequence[str] | None = None, clock: Callable[[], float] = time.perf_counter) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the file")
    parser.add_argument("--quick", action="store_true", help="float16, d 64 and 128, three lengths")
    parser.add_argument("--dry-run", action="store_true", help="on the simulated device, with tiny sizes and a wall clock")
    arguments = parser.parse_args(argv)
    small = Case("float16", 64, 128, False, 1, 1)
    if arguments.dry_run:
        with simulated_device("A100-40GB"):
            cases = grid(("float16",), (16,), (16, 32), 32, 32)
            result = run(Simulated(clock), cases, Case("float16", 16, 16, False, 1, 1), FIRST_CALL_SIMULATED, 5, clock)
        result |= {"simulated": True, "ncu": None}
    else:
        quick = (("float16",), (64, 128), (512, 2048, 8192))
        cases = grid(*(quick if arguments.quick else (DTYPES, HEAD_DIMS, LENGTHS)), TOKENS, WIDTH)
        result = run(Gpu(), cases, small, FIRST_CALL_GPU, HOST_CALLS, clock)
        result |= {"simulated": False, "ncu": profiled(Case("float16", 64, 2048, False, 2, 8))}
    print("\n".join(show(result["forward"])))
    for row in result["ratios"]:
        if row["ratio"] is not None:
            print(f"{row['dtype']}, d {row['d']}, N {row['n']}, causal {row['causal']}: {row['ratio']:.2f} of {row['best_other']}")
    print(f"a warm call takes {result['warm_call_host']['seconds'] * 1e6:.1f} us of the host; first calls: {result['first_call']}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"{'simulated-' if result['simulated'] else ''}{result['device'].replace(' ', '-')}-{result['date']}.json"
    (arguments.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.out / name}")
    return 0 if all(row.get("agrees", True) for row in result["forward"] if row["ours"]) else 1


if __name__ == "__main__":
    sys.exit(main())
