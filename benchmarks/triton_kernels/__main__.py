"""Triton's official tutorials on the PTX machine, from a checkout of Triton: their own asserts, and seeded faults.

    python benchmarks/triton_kernels --triton CHECKOUT [--only NAME] [--device NAME] [--faults] [--write]
    python benchmarks/triton_kernels --table

Each tutorial runs unmodified in a process of its own, by `simulated_triton` with findings kept. `tutorials.toml` says what runs of
each: a program's own main part, or some cases of its tests, and what is too large. `--faults` takes each barrier of a block, one
at a time, out of the PTX of each kernel of the tutorial at its first launch, and asks whether the machine finds a race, a deadlock
or other findings; of those that are not missed `barriers.py` says why. `--write` puts the figures into `results.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

from cupyflash.basics import Report

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"


def run(name: str, entry: Report, checkout: Path, device: str, faults: bool) -> Report:
    """Runs a tutorial in a process of its own; returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        file = checkout / "python" / "tutorials" / f"{name}.py"
        command = [sys.executable, str(HERE / "tutorial.py"), str(file), device, json.dumps(entry), str(out), "faults" * faults]
        paths = filter(None, (str(HERE.parent.parent), os.environ.get("PYTHONPATH")))
        environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        found = json.loads(out.read_text()) if out.exists() else {}
    if "❌" in done.stdout:  # some tutorials print their verdicts
        found["error"] = [line for line in done.stdout.splitlines() if "❌" in line]
    if done.returncode:
        found["error"] = done.stderr.strip().splitlines()[-1:] or ["killed"]
    return found


def of_barriers(kernels: dict[str, Report]) -> str:
    """Returns what became of the barriers that were taken out of a tutorial's kernels."""
    if not kernels:
        return "has none"
    tried, seen = (sum(row[key] for row in kernels.values()) for key in ("tried", "found"))
    why = Counter(reason for row in kernels.values() for reason in row["missed"].values())
    return "; ".join((f"{seen} of {tried}", *(f"{number} {reason}" for reason, number in sorted(why.items()))))


def table(results: Report) -> str:
    """Returns the table of docs/triton.md."""
    rows = [
        "| tutorial | device | asserts | seconds | launches | findings | barriers taken out: found; the others |",
        "|---" * 7 + "|",
    ]
    for name, devices in sorted(results.items()):
        for device, one in sorted(devices.items()):
            if "run" not in one:  # a package's (packages.py)
                continue
            ran, held = one["run"], "hold" if "error" not in one["run"] else "fail"
            found = ", ".join(f"{number} x {text}" for text, number in ran["findings"].items()) or "none"
            seeded = of_barriers(one["faults"]["faults"]) if "faults" in one else ""
            rows.append(f"| {name} | {device} | {held} | {ran['seconds']} | {ran['launches']} | {found} | {seeded} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--triton", type=Path, metavar="CHECKOUT")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only", metavar="NAME")
    parser.add_argument("--device", choices=("A100-40GB", "H100-SXM"))
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if asked.table:
        print(table(results), end="")
        return
    if asked.triton is None:
        parser.error("--triton CHECKOUT is missing: a checkout of triton-lang/triton")
    for name, entry in tomllib.loads((HERE / "tutorials.toml").read_text()).items():
        for device in entry.get("devices", ("A100-40GB", "H100-SXM")):
            if asked.only not in (None, name) or asked.device not in (None, device):
                continue
            key = "faults" if asked.faults else "run"
            found = run(name, entry, asked.triton, device, asked.faults)
            print(name, device, json.dumps(found), flush=True)
            if asked.write:
                results.setdefault(name, {}).setdefault(device, {})[key] = found
                RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
