"""Tests and measures cupyflash on the GPU at hand in one call:  python benchmarks/on_gpu.py FOLDER

Runs tests/gpu, then times the forward pass of each algorithm beside PyTorch's scaled_dot_product_attention where PyTorch
is installed, and writes FOLDER/tests.txt and FOLDER/DEVICE-DATE.json (device, driver, versions, commit, figures). Nothing
is installed; the repository's root goes on the path.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 16384  # a batch: batch x N
GRID = [(d, n, causal) for d in (64, 128) for n in (512, 2048, 8192) for causal in (False, True)]


def seconds(call: Callable[[], object], repeats: int = 10) -> tuple[float, float]:
    """Median and spread (interquartile) of the device time of one call, from events, after a warm-up."""
    import cupy

    call()
    stream, times = cupy.cuda.get_current_stream(), []
    for _ in range(repeats):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(stream)
        call()
        end.record(stream)
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    quartiles = statistics.quantiles(times, n=4)
    return statistics.median(times), quartiles[2] - quartiles[0]


def peers(q: Any, k: Any, v: Any, causal: bool) -> dict[str, Callable[[], object]]:
    """PyTorch's backends that answer, on the same memory and CuPy's stream."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    import cupy

    tensors = [torch.from_dlpack(array) for array in (q, k, v)]
    stream = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)

    def call(backend: Any) -> Callable[[], object]:
        def run() -> object:
            with torch.cuda.stream(stream), sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

        return run

    found = {}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        run = call(getattr(SDPBackend, name))
        try:
            run()
        except RuntimeError:
            continue
        found[f"torch {name.lower()}"] = run
    return found


def measure() -> list[dict[str, Any]]:
    """One row a problem and implementation: seconds, spread, TFLOP/s (4 B H N^2 d, half when causal)."""
    import cupy

    import cupyflash

    rows = []
    for d, n, causal in GRID:
        heads = 2048 // d
        shape = (TOKENS // n, heads, n, d)
        q, k, v = (cupy.random.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16) for _ in range(3))
        calls: dict[str, Callable[[], object]] = {
            "fa1": lambda q=q, k=k, v=v, causal=causal: cupyflash.attention(q, k, v, causal=causal),
            "standard": lambda q=q, k=k, v=v, causal=causal: cupyflash.attention(q, k, v, causal=causal, algorithm="standard"),
        }
        calls |= peers(q, k, v, causal)
        flops = 4 * shape[0] * heads * n * n * d / (2 if causal else 1)
        for name, call in calls.items():
            median, spread = seconds(call)
            row = {"d": d, "n": n, "batch": shape[0], "heads": heads, "causal": causal, "implementation": name}
            rows.append(row | {"seconds": median, "spread_s": spread, "tflops": flops / median / 1e12})
            print(f"d {d:>4} N {n:>6} causal {causal!s:<5} {name:<24} {median * 1e3:9.3f} ms {rows[-1]['tflops']:8.1f} TFLOP/s")
    return rows


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-p", "no:cacheprovider"]
    with (folder / "tests.txt").open("w") as log:
        tests = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    print((folder / "tests.txt").read_text()[-2000:])

    sys.path.insert(0, str(ROOT))
    import cupy

    from cupyflash import Device

    device = Device.current()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    result = {
        "device": device.name,
        "date": datetime.date.today().isoformat(),
        "commit": commit or None,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "tests_passed": tests.returncode == 0,
        "forward": measure(),
    }
    name = f"{device.name.replace(' ', '-')}-{result['date']}.json"
    (folder / name).write_text(json.dumps(result, indent=1) + "\n")
    return tests.returncode


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
