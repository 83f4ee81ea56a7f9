"""What the benchmarks of the forward and of the backward pass share: cases, the machine, the clock, the file.

Device times come from events around one call, behind a buffer that is overwritten first: that empties the L2 and keeps the
GPU busy until the call is queued. Inputs are random and rotate. Nothing is installed. A dry run does all of it on the simulated
device, with tiny sizes and a wall clock: figures of no meaning, every line run.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import shutil
import statistics
import subprocess
import sys
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
from cupyflash import Device, Problem, simulated_device  # noqa: E402

TOKENS, WIDTH = 16384, 2048  # of a batch: B x N, and H x d
HEAD_DIMS, LENGTHS, DTYPES = (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384), ("float16", "bfloat16")
ROTATED = 3  # sets of inputs
SECONDS_EACH = 0.3  # of repeats of one implementation on one case, between LEAST and MOST of them
LEAST, MOST = 5, 50
HOST_CALLS = 200
# The most that two right implementations in half types are apart, of values up to 1; of larger ones in proportion.
ALIKE = 0.03
CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
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
        """Of a forward pass' two products, as FlashAttention's own benchmarks count them."""
        return 4 * self.batch * self.heads * self.n**2 * self.d / (2 if self.causal else 1)


def grid(dtypes: Sequence[str], head_dims: Sequence[int], lengths: Sequence[int], tokens: int, width: int) -> list[Case]:
    """Cases of the same number of tokens and the same width."""
    every = itertools.product(dtypes, head_dims, lengths, (False, True))
    return [Case(dtype, d, n, causal, max(1, tokens // n), max(1, width // d)) for dtype, d, n, causal in every]


class Bench(Protocol):
    """What a run needs of the machine that it runs on."""

    device: Device

    def draw(self, case: Case, seed: int, count: int) -> list[Any]:
        """So many arrays of the case's shape, of standard normal numbers."""

    def seconds(self, call: Call) -> float:
        """Time of one call on the device."""

    def wait(self) -> None:
        """Until the device has done all that it was given."""

    def release(self) -> None:
        """Give cached memory back, so that one implementation's is there for the next."""

    def to_host(self, out: Any) -> np.ndarray:
        """An array or tensor of (b, h, n, d) as float32."""

    def versions(self) -> dict[str, Any]:
        """Driver, clocks and the libraries that take part."""


@dataclass(frozen=True)
class Pass:
    """What is timed: a pass over attention, which costs `cost` forward passes' FLOPs.

    `implementations(bench, case, seed)` draws inputs and gives what computes from them, by name, an array or several; `ours`
    are the names that are cupyflash's, the default first: the first in order that answers is what the others are compared with.
    """

    name: str
    cost: float
    ours: tuple[str, ...]
    implementations: Callable[[Bench, Case, int], Mapping[str, Call]]


class Gpu:
    """The current CUDA device."""

    def __init__(self) -> None:
        import cupy

        self.cupy, self.device = cupy, Device.current()
        self._flush = cupy.empty(max(4 * self.device.l2_bytes, 1 << 29), cupy.uint8)

    def draw(self, case: Case, seed: int, count: int) -> list[Any]:
        random = self.cupy.random.default_rng(seed)
        return [self._rounded(random.standard_normal(case.shape, dtype=np.float32), case.dtype) for _ in range(count)]

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

    def torch(self, *arrays: Any) -> Torch | None:
        """PyTorch on the same memory and the current stream, where it can be imported."""
        try:
            import torch
        except ImportError:
            return None
        # Through integers, since DLPack of bfloat16 is not everywhere; the same memory all the same.
        bits = {2: np.int16, 4: np.int32}[arrays[0].dtype.itemsize]
        dtype = getattr(torch, arrays[0].dtype.name)
        tensors = [torch.from_dlpack(array.view(bits)).view(dtype) for array in arrays]
        return Torch(torch, torch.cuda.ExternalStream(self.cupy.cuda.get_current_stream().ptr), tensors)

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


@dataclass(frozen=True)
class Torch:
    """PyTorch with a stream and tensors; `flash_attn` beside it."""

    torch: Any
    stream: Any
    tensors: list[Any]

    def backends(self, *names: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """scaled_dot_product_attention by the backend that answers, as functions of (q, k, v, causal)."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def by(backend: Any) -> Callable[..., Any]:
            def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
                with self.torch.cuda.stream(self.stream), sdpa_kernel(backend):
                    return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

            return attention

        for name in names:
            yield f"torch {name.lower().removesuffix('_attention')}", by(getattr(SDPBackend, name))

    def flash_attn(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """flash_attn's function, of tensors (b, h, n, d), where it can be imported; their (b, n, h, d) is copied beforehand."""
        try:
            from flash_attn import flash_attn_func
        except ImportError:
            return

        def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
            with self.torch.cuda.stream(self.stream):
                return flash_attn_func(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal=causal).transpose(1, 2)

        yield "flash_attn", attention

    def rows_first(self) -> list[Any]:
        """The tensors with (b, n, h, d) in memory, which flash_attn reads without copies."""
        return [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in self.tensors]


class Simulated:
    """The simulated device, by a wall clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self._clock = Device.named("A100-40GB"), clock

    def draw(self, case: Case, seed: int, count: int) -> list[Any]:
        dtype = np.dtype(ml_dtypes.bfloat16 if case.dtype == "bfloat16" else case.dtype)
        return [array.astype(dtype) for array in np.random.default_rng(seed).standard_normal((count, *case.shape), np.float32)]

    def seconds(self, call: Call) -> float:
        start = self._clock()
        call()
        return self._clock() - start

    def wait(self) -> None:
        pass

    def release(self) -> None:
        pass

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


def timed(bench: Bench, calls: Sequence[Call]) -> dict[str, float | int]:
    """Median and spread (between the quartiles) of a call's seconds; `calls` is one a set of inputs, taken in turns."""
    once = max(bench.seconds(call) for call in calls)  # warm: each was called before
    repeats = min(max(LEAST, int(SECONDS_EACH / max(once, 1e-9))), MOST)
    times = [bench.seconds(calls[turn % len(calls)]) for turn in range(repeats)]
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"seconds": median, "spread_s": upper - lower, "repeats": repeats}


def measure(bench: Bench, what: Pass, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """A row for each case and implementation: seconds, spread, TFLOP/s, distance from the first one's output; or what it raised."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        every = [what.implementations(bench, case, seed) for seed in range(ROTATED)]
        expected: list[np.ndarray] | None = None
        for name in every[0]:
            row: dict[str, Any] = asdict(case) | {"implementation": name, "ours": name in what.ours}
            rows.append(row)
            try:
                outs = [calls[name]() for calls in every]  # compiles, warms up, and is what is checked
                bench.wait()
                first = [bench.to_host(out) for out in (outs[0] if isinstance(outs[0], tuple) else outs[:1])]
                del outs
                if expected is None:
                    expected = first
                pairs = list(zip(first, expected, strict=True))
                row["largest_difference"] = max(float(np.abs(ours - theirs).max(initial=0)) for ours, theirs in pairs)
                row["agrees"] = all(
                    np.abs(ours - theirs).max(initial=0) <= ALIKE * max(1, np.abs(theirs).max(initial=0)) for ours, theirs in pairs
                )
                row |= timed(bench, [calls[name] for calls in every])
                row["tflops"] = what.cost * case.flops / row["seconds"] / 1e12
            except (RuntimeError, ValueError, MemoryError) as error:  # a backend that does not answer, or memory that ends
                row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            bench.release()
    return rows


def ratios(rows: Sequence[dict[str, Any]], default: str) -> list[dict[str, Any]]:
    """For each case `default`'s TFLOP/s, the best other's that computes the same, and the ratio of the two."""
    found = []
    fields = list(Case.__dataclass_fields__)
    for case in dict.fromkeys(tuple(row[field] for field in fields) for row in rows):
        of_case = [row for row in rows if tuple(row[field] for field in fields) == case and "tflops" in row]
        mine = next((row for row in of_case if row["implementation"] == default), None)
        others = [row for row in of_case if not row["ours"] and row["agrees"]]
        best = max(others, key=lambda row: row["tflops"], default=None)
        told = dict(zip(fields, case, strict=True)) | {"ours_tflops": mine["tflops"] if mine else None}
        told |= {"best_other": best["implementation"] if best else None, "best_other_tflops": best["tflops"] if best else None}
        found.append(told | {"ratio": mine["tflops"] / best["tflops"] if mine and best else None})
    return found


def host_seconds(bench: Bench, call: Call, clock: Callable[[], float], calls: int) -> dict[str, float]:
    """Host time of one warm call, from entry to return, nothing waited for: median and spread; a small problem's."""
    call()
    times = []
    for _ in range(calls):
        bench.wait()  # an empty queue, so that no call waits for a place in it
        start = clock()
        call()
        times.append(clock() - start)
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"seconds": median, "spread_s": upper - lower}


def show(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows as lines."""
    yield f"{'dtype':<10}{'d':>4}{'N':>7} {'causal':<7}{'implementation':<22}{'ms':>10}{'spread':>9}{'TFLOP/s':>9}"
    for row in rows:
        head = f"{row['dtype']:<10}{row['d']:>4}{row['n']:>7} {row['causal']!s:<7}{row['implementation']:<22}"
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
    bench: Bench, what: Pass, cases: Sequence[Case], small: Case, host_calls: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """What every file has."""
    rows = measure(bench, what, cases)
    call = what.implementations(bench, small, 0)[what.ours[0]]
    return {
        "device": bench.device.name,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "cupyflash": cupyflash.__version__,
        "python": platform.python_version(),
        "versions": bench.versions(),
        what.name: rows,
        "ratios": ratios(rows, what.ours[0]),
        "warm_call_host": host_seconds(bench, call, clock, host_calls),
    }


def main(
    doc: str | None,
    what: Pass,
    argv: Sequence[str] | None,
    clock: Callable[[], float],
    more: Callable[[bool], dict[str, Any]] = lambda simulated: {},
    suffix: str = "",
) -> int:
    """A benchmark's command: measures, prints, writes a file of the device's name, the date and `suffix`.

    `more(simulated)` is what its file has beside what every file has. Exit status 1 where one of ours differs from the others.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the file")
    parser.add_argument("--quick", action="store_true", help="float16, d 64 and 128, three lengths")
    parser.add_argument("--dry-run", action="store_true", help="on the simulated device, with tiny sizes and a wall clock")
    arguments = parser.parse_args(argv)
    simulated = arguments.dry_run
    if simulated:
        cases = grid(("float16",), (16,), (16, 32), 32, 32)
        with simulated_device("A100-40GB"):
            result = run(Simulated(clock), what, cases, Case("float16", 16, 16, False, 1, 1), 5, clock)
    else:
        quick = (("float16",), (64, 128), (512, 2048, 8192))
        cases = grid(*(quick if arguments.quick else (DTYPES, HEAD_DIMS, LENGTHS)), TOKENS, WIDTH)
        result = run(Gpu(), what, cases, Case("float16", 64, 128, False, 1, 1), HOST_CALLS, clock)
    result |= {"simulated": simulated} | more(simulated)
    print("\n".join(show(result[what.name])))
    for row in result["ratios"]:
        if row["ratio"] is not None:
            print(f"{row['dtype']}, d {row['d']}, N {row['n']}, causal {row['causal']}: {row['ratio']:.2f} of {row['best_other']}")
    print(f"a warm call takes {result['warm_call_host']['seconds'] * 1e6:.1f} us of the host")
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"{'simulated-' if simulated else ''}{result['device'].replace(' ', '-')}-{result['date']}{suffix}.json"
    (arguments.out / name).write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {arguments.out / name}")
    return 0 if all(row.get("agrees", True) for row in result[what.name] if row["ours"]) else 1
