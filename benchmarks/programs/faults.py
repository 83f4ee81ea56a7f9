"""Faults seeded in strangers' programs: which of them `cupyflash run` finds, and where.

    python benchmarks/programs/faults.py --samples CHECKOUT [--only PART] [--max-seconds N] [--write]

faults.toml has them, a line or two each. Each program's folder is copied and changed; its source is compiled and run. Exit status
1 if one is not found as the list says: by a finding of that kind, at that line. `--write` keeps the results in faults-results.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import checkout  # noqa: E402

from cupyflash.basics import Report, Values  # noqa: E402


def seeded(fault: Values, samples: Path, into: Path) -> Path:
    """The changed copy of a program's folder. ValueError if the text is not in it."""
    folder = into / "Samples" / fault["program"]
    shutil.copytree(samples / "Samples" / fault["program"], folder)
    path = folder / fault["file"]
    parts = path.read_text().split(fault["old"])
    nth = fault.get("nth", 0)
    if len(parts) < nth + 2:
        raise ValueError(f"{fault['program']}/{fault['file']} has no {fault['old']!r}, {nth} times before")
    path.write_text(fault["old"].join(parts[: nth + 1]) + fault["new"] + fault["old"].join(parts[nth + 1 :]))
    return folder


def findings(folder: Path, fault: Values, samples: Path, limit: float) -> tuple[list[Report], str]:
    """Runs the program: the machine's findings, and the output."""
    sources = sorted(str(path) for path in folder.iterdir() if path.suffix in (".cu", ".cpp"))
    report = folder / "report.json"
    command = [sys.executable, "-m", "cupyflash", "run", *sources, "-I", str(samples / "Common"), f"--format=json={report}"]
    command += ["--max-seconds", f"{limit:g}", "--flag=-std=c++17", "--", *fault.get("arguments", ())]
    ran = subprocess.run(command, cwd=folder, env=checkout.environment(), capture_output=True, text=True)
    kernels = json.loads(report.read_text())["kernels"] if report.exists() else []
    return [finding for kernel in kernels for finding in kernel["findings"]], ran.stdout + ran.stderr


def places(finding: Values, folder: Path) -> Iterator[str]:
    """Both sides of a finding: its kind, and the place and the line of source."""
    sides = [finding.get("source"), finding.get("other"), *finding.get("inlined_at", ())]
    for path, number in filter(None, sides):
        if path and (copy := folder / Path(path).name).exists():
            yield f"{finding['kind']}, {copy.name}:{number}: {copy.read_text().splitlines()[int(number) - 1].strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=Path, required=True, help="a checkout of NVIDIA/cuda-samples")
    parser.add_argument("--only", default="", help="faults with this in what they are or in their program")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="of processor time, of a program's kernels")
    parser.add_argument("--write", action="store_true", help="keep the results beside the list")
    given = parser.parse_args()
    every = tomllib.loads((HERE / "faults.toml").read_text())["fault"]
    faults = [each for each in every if given.only in each["what"] + each["program"]]
    results: list[Report] = []
    for fault in faults:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as into:
            folder = seeded(fault, given.samples.resolve(), Path(into))
            findings_of, said = findings(folder, fault, given.samples.resolve(), given.max_seconds)
            lines = [line for each in findings_of if each["kind"] == fault["kind"] for line in places(each, folder)]
        good = any(fault["line"] in line for line in lines)
        shown = next((line for line in lines if fault["line"] in line), "; ".join(lines[:3]) or said.strip()[-200:])
        verdict, took = "found" if good else "MISSED", time.monotonic() - begun
        print(f"{verdict}  {fault['program']}: {fault['what']}: {shown} ({took:.0f} s)", flush=True)
        results.append({"program": fault["program"], "what": fault["what"], "found": good, "at": shown, "seconds": round(took)})
    found = sum(each["found"] for each in results)
    print(f"{found} of {len(faults)} found")
    if given.write:
        told = {"date": time.strftime("%Y-%m-%d"), "found": found, "of": len(faults), "faults": results}
        (HERE / "faults-results.json").write_text(json.dumps(told, indent=1) + "\n")
    return int(found < len(faults))


if __name__ == "__main__":
    sys.exit(main())
