"""Times what needs no compiler and no GPU:  python benchmarks/planning.py [--runs N] [--json FILE]

Importing cupyflash in a new process, behind NumPy, and which of its modules take longest (`-X importtime`); ten thousand points
of a sweep, each planned and counted by the closed forms; a replay of a million tokens. Seconds are the least of several runs,
since whatever else the machine does only adds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from checkout import environment

# isort: split
from cupyflash import Device, Problem, plan
from cupyflash.basics import Report
from cupyflash.sim import replay
from cupyflash.sim.pictures.sweep import default_range, spaced, sweep

IMPORT = "import numpy, time; start = time.perf_counter(); import cupyflash; print(time.perf_counter() - start)"
SHOWN = 8
ALGORITHMS = ("fa1", "fa2", "standard")  # that the device has
DEVICE, PROBLEM = "A100-40GB", Problem(1, 16, 16, 4096, 4096, 64, "float16")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A new process that finds this checkout's cupyflash."""
    return subprocess.run([sys.executable, *arguments], env=environment(), capture_output=True, text=True, check=True)


def imports(runs: int) -> Report:
    """Seconds to import cupyflash behind NumPy, and the modules that come with it: how many, and the slowest in microseconds."""
    listed = python("-X", "importtime", "-c", "import numpy; import sys; print(file=sys.stderr); import cupyflash").stderr
    modules = module_times(listed)
    slowest = sorted(modules.items(), key=lambda each: -each[1])[:SHOWN]
    seconds = min(float(python("-c", IMPORT).stdout) for _ in range(runs))
    return {"seconds": seconds, "modules": len(modules), "slowest_us": dict(slowest)}


def module_times(listed: str) -> dict[str, int]:
    """Microseconds of each module by itself, of what -X importtime lists behind the last empty line."""
    lines = [line.removeprefix("import time:").split("|") for line in listed.rsplit("\n\n", 1)[-1].splitlines()]
    return {name.strip(): int(own) for own, _, name in (line for line in lines if len(line) == 3) if own.strip().isdigit()}


def least(call: Callable[[], object], runs: int) -> float:
    """Processor seconds of the fastest run."""
    times = []
    for _ in range(runs):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return min(times)


def points(runs: int, count: int = 10_000) -> dict[str, float]:
    """Seconds of a sweep of so many points, each of another SRAM size or length."""
    device, found = Device.named(DEVICE), {}
    for over in ("sram", "seqlen"):
        first, last, _, _ = default_range(PROBLEM, over)
        values = spaced(first, last, count, log=False)
        for causal in (False, True):
            problem = replace(PROBLEM, causal=causal)
            name = f"over {over}{', causal' if causal else ''}"
            found[name] = least(lambda problem=problem, over=over, values=values: sweep(problem, device, over, values), runs)
    return found


def replays(runs: int, tokens: int = 1 << 20) -> dict[str, float]:
    """Seconds of a replay of so many tokens by algorithm, causal."""
    device = Device.named(DEVICE)
    problem = Problem(1, 1, 1, tokens, tokens, 128, "float16", causal=True)
    return {name: least(lambda name=name: replay(plan(problem, device, name)), runs) for name in ALGORITHMS}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of which the fastest counts (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    given = parser.parse_args(argv)
    found: Report = {"import": imports(given.runs)}
    told = found["import"]
    print(
        f"importing cupyflash behind NumPy: {told['seconds']:.3f} s, {told['modules']} modules; the slowest, in us by themselves:"
    )
    print("  " + ", ".join(f"{name} {took:,}" for name, took in told["slowest_us"].items()))
    found["ten_thousand_points_s"], found["million_tokens_s"] = points(given.runs), replays(given.runs)
    for title, figures in (
        ("a sweep of 10,000 points", "ten_thousand_points_s"),
        ("a replay of 1,048,576 tokens", "million_tokens_s"),
    ):
        print(f"{title}: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in found[figures].items()))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
