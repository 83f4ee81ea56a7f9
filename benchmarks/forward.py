"""Times the forward pass beside its peers on the GPU at hand, and writes one file:

    python benchmarks/forward.py [--out benchmarks/results] [--quick] [--dry-run]

In one run, on the same memory: cupyflash by algorithm, PyTorch's scaled_dot_product_attention with each backend that answers,
`flash_attn` when it can be imported. TFLOP/s count 4 B H N^2 d, half when causal. How, and what a dry run is: timing.py.
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import timing
from timing import ROOT, Bench, Call, Case, Gpu, Pass

import cupyflash
from cupyflash import Device, plan
from cupyflash.sim import theory
from cupyflash.sim.reference import reference

ALGORITHMS = ("fa2", "fa1", "standard")
# What ncu counts: bytes of L2 that its callers asked for, and of device memory. Our counts are requested bytes (docs/ptx.md).
NCU_METRICS = ("lts__t_bytes.sum", "dram__bytes_read.sum", "dram__bytes_write.sum")


def implementations(bench: Bench, case: Case, seed: int) -> Mapping[str, Call]:
    """O, by cupyflash and by the others that there are."""
    q, k, v = bench.draw(case, seed, 3)

    def ours(algorithm: str) -> Call:
        return lambda: cupyflash.attention(q, k, v, causal=case.causal, algorithm=algorithm)

    return {algorithm: ours(algorithm) for algorithm in ALGORITHMS} | dict(peers(bench, case, q, k, v))


def peers(bench: Bench, case: Case, q: Any, k: Any, v: Any) -> Iterator[tuple[str, Call]]:
    """Other implementations on these arrays: on the simulated device NumPy's."""
    if not isinstance(bench, Gpu):
        yield "numpy", lambda: reference(q, k, v, causal=case.causal)[0]
    elif found := bench.torch(q, k, v):

        def without_graph(attention: Callable[..., Any], tensors: Sequence[Any]) -> Call:
            def call() -> Any:
                with found.torch.no_grad():
                    return attention(*tensors, case.causal)

            return call

        for name, attention in found.backends("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
            yield name, without_graph(attention, found.tensors)
        for name, attention in found.flash_attn():
            yield name, without_graph(attention, found.rows_first())


FORWARD = Pass("forward", 1, ALGORITHMS, implementations)

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


def more(simulated: bool) -> dict[str, Any]:
    """First calls and ncu's bytes."""
    found = {"first_call": first_calls(FIRST_CALL_SIMULATED if simulated else FIRST_CALL_GPU)}
    print(f"first calls: {found['first_call']}")
    return found | {"ncu": None if simulated else profiled(Case("float16", 64, 2048, False, 2, 8))}


def main(argv: Sequence[str] | None = None, clock: Callable[[], float] = time.perf_counter) -> int:
    return timing.main(__doc__, FORWARD, argv, clock, more)


if __name__ == "__main__":
    sys.exit(main())
