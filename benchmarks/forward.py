"""Times the forward pass beside its peers on the GPU at hand, and writes a line of JSON a measurement:

    python benchmarks/forward.py [--out FOLDER] [--quick] [--budget SECONDS] [--dry-run]

In one run, on the same memory and stream: cupyflash as users call it ("auto"), by algorithm, fa3 on a Hopper, and fa2 with each of
the tiles that its model chooses between, with the clocks that its model gives them; the peers of peers.py, of which those that are
missing are said. What closes the run compares "auto" with the best of them.
TFLOP/s count 4 B H N^2 d, half when causal. README.md has the format.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from checkout import environment

# isort: split
import accuracy
import command
from cases import Case
from machine import Call, Machine
from report import MODEL
from timing import Implementation, Pass, peers_of

import cupyflash
from cupyflash import Device, plan
from cupyflash.basics import Report, Values
from cupyflash.schedules import Kernel, TileSchedule, choose, fa2_tiles, fa3_tiles
from cupyflash.sim import theory

DEFAULT, TILED, OTHERS = "auto", "fa2", ("fa1", "standard")
# What ncu counts: bytes of L2 that its callers asked for, and of device memory. Our counts are requested bytes (docs/ptx.md).
NCU_METRICS = ("lts__t_bytes.sum", "dram__bytes_read.sum", "dram__bytes_write.sum")
NCU_CASE = Case("float16", 64, 2048, False, 2, 8)


def tiles(device: Device, case: Case) -> Iterator[tuple[str, tuple[int, int], Values]]:
    """fa2's tiles that the model chooses between, its choice first: name, (Br, Bc), and what the model says of it."""
    for rank, each in enumerate(fa2_tiles.finalists(case.problem, device)):
        blocks = each.config.block_rows, each.config.block_cols
        size = f"{blocks[0]}x{blocks[1]}"
        says = {"tile": size, "model_clocks": each.clocks, "model_waves": each.waves, "model_bound": each.bound}
        yield f"{TILED} {size}" if rank else TILED, blocks, says


def others(device: Device, case: Case) -> Iterator[tuple[str, Values]]:
    """The algorithms beside fa2, with what a model says of them: fa3 where it runs."""
    if not fa3_tiles.refusal(case.problem, device):
        best = fa3_tiles.choose(case.problem, device)
        size = f"{best.config.team.block_rows}x{best.config.block_cols}"
        clocks = fa3_tiles.clocks(case.problem, device, best)
        yield "fa3", {"tile": size, "model_clocks": clocks, "model_bound": best.bound}
    yield from ((algorithm, {}) for algorithm in OTHERS)


def ours(machine: Machine, case: Case, arrays: Sequence[Any]) -> Iterator[Implementation]:
    """O by cupyflash: what a call takes, then fa2's tiles and the other algorithms."""
    q, k, v = arrays

    def by(algorithm: str, tiling: tuple[int, int] | None = None) -> Call:
        return partial(cupyflash.attention, q, k, v, causal=case.causal, algorithm=algorithm, tiling=tiling)

    yield Implementation(DEFAULT, by(DEFAULT), ours=True, facts={"algorithm": choose(case.problem, machine.device).algorithm})
    for name, blocks, says in tiles(machine.device, case):
        yield Implementation(name, by(TILED, None if name == TILED else blocks), ours=True, facts=says)
    for algorithm, says in others(machine.device, case):
        yield Implementation(algorithm, by(algorithm), ours=True, facts=says)


def kernels(device: Device, case: Case) -> Iterator[Kernel]:
    yield from plan(case.problem, device, choose(case.problem, device).algorithm).kernels()
    for _, blocks, _ in tiles(device, case):
        yield from plan(case.problem, device, TILED, blocks).kernels()
    for algorithm, _ in others(device, case):
        yield from plan(case.problem, device, algorithm).kernels()


def theirs(machine: Machine, case: Case, arrays: Sequence[Any]) -> Iterable[tuple[str, Call]]:
    torch = machine.torch(*arrays)
    return torch.forward(case.causal, case.scores) if torch else ()


PEERS = peers_of(accuracy.forward, 3, theirs)
FORWARD = Pass("forward", 1, 3, ("O",), DEFAULT, ours, PEERS, accuracy.forward, kernels)

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


def first_calls(code: str, seconds: float) -> dict[str, dict[str, float]]:
    """Seconds of a first call in a new process: with an empty disk cache, then with the one that it left."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        variables = environment() | {"CUPY_CACHE_DIR": cache}
        for name in ("cold", "warm"):
            done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=seconds)
            if done.returncode:
                raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-200:]}")
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def profiled(case: Case, seconds: float) -> Report:
    """ncu's bytes of one fa2 call beside the theory's; compared, not equated. RuntimeError where ncu does not answer."""
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu is not on the PATH")
    code = (
        f"import cupy, cupyflash; q, k, v = (cupy.ones({case.shape}, cupy.{case.dtype}) for _ in range(3)); "
        f"cupyflash.attention(q, k, v, causal={case.causal}, algorithm={TILED!r}); cupy.cuda.Device().synchronize()"
    )
    ncu = ["ncu", "--csv", "--print-units", "base", "--metrics", ",".join(NCU_METRICS), "--kernel-name", "fa2_forward"]
    done = subprocess.run([*ncu, sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=seconds)
    theirs = ncu_metrics(done.stdout)
    if not theirs:
        raise RuntimeError((done.stdout + done.stderr).strip()[-250:])
    form = theory.traffic(plan(case.problem, Device.current(), TILED))
    return asdict(case) | {"ncu": theirs, "theory": {"read_bytes": form.read_bytes, "write_bytes": form.write_bytes}}


def ncu_metrics(text: str) -> dict[str, float]:
    """The metrics of ncu's CSV, whatever it prints around it."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if '"Metric Name"' in line), len(lines))
    rows = csv.DictReader(io.StringIO("\n".join(lines[begin:])))
    return {
        row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in rows if row.get("Metric Name") in NCU_METRICS
    }


def variants(device: Device, cases: Sequence[Case]) -> Iterator[tuple[Values, TileSchedule]]:
    """fa2's tiles for each case of a half type, named as their measurements are, for the clock model."""
    for case in cases:
        for name, blocks, _ in tiles(device, case) if case.problem.itemsize == 2 else ():
            named = {"pass": "forward", **asdict(case), "implementation": name}
            yield named, plan(case.problem, device, TILED, blocks)


def extras(simulated: bool) -> command.Extras:
    """First calls; fa2's tiles by the clock model, which report.py shows beside the measured ones; and ncu's bytes."""
    first = partial(first_calls, FIRST_CALL_SIMULATED if simulated else FIRST_CALL_GPU)
    found = {"first call": first, MODEL: command.modelled(simulated, variants)}
    return found if simulated else found | {"ncu": partial(profiled, NCU_CASE)}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main(__doc__, FORWARD, argv, extras)


if __name__ == "__main__":
    sys.exit(main())
