"""Tests and times cupyflash on the GPU at hand, in one command:

    python benchmarks/on_gpu.py [--quick] [--only tests|forward|backward|decode] FOLDER

Runs tests/gpu, then forward.py, backward.py and decode.py, and writes FOLDER/DEVICE-DATE.jsonl, a line as soon as it is known, and
FOLDER/tests.txt, what pytest prints. Each of the four takes under 8 minutes on a machine of 16 cores, under 2 with --quick, or is
stopped. The .jsonl file names no user and no machine: CONTRIBUTING.md says what is in it, and how to send it in.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import machine  # noqa: E402
import report  # noqa: E402
from command import QUICK_SECONDS, SECONDS, surroundings  # noqa: E402
from records import Budget, Records  # noqa: E402

from cupyflash import Device  # noqa: E402
from cupyflash.sim.measured import read  # noqa: E402

STEPS = ("tests", "forward", "backward", "decode")
MOST_PROCESSES = 16
BYTES_EACH = 3 << 29  # of GPU memory, for a process of the tests
GRACE = 20  # seconds between the signal to stop and the one that does not ask


def processes() -> int:
    """How many can test at the same time on the GPU at hand."""
    import cupy

    memory = int(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["totalGlobalMem"])
    return max(1, min(os.cpu_count() or 1, MOST_PROCESSES, memory // BYTES_EACH))


def pytest_command(records: Path, tests: Path, quick: bool, parallel: int) -> list[str]:
    """The GPU's tests, the wide ones only if not quick."""
    found = [
        sys.executable,
        "-m",
        "pytest",
        str(tests),
        "-p",
        "no:cacheprovider",
        "-p",
        "pytest_records",
        "--records",
        str(records),
    ]
    found += [] if quick else ["-m", ""]
    return found + (["-n", str(parallel)] if parallel > 1 and importlib.util.find_spec("xdist") else [])


def benchmark_command(step: str, records: Path, quick: bool, dry: bool) -> list[str]:
    flags = [flag for flag, given in (("--quick", quick), ("--dry-run", dry)) if given]
    return [sys.executable, str(ROOT / "benchmarks" / f"{step}.py"), "--out", str(records), *flags]


def finished(command: Sequence[str], seconds: float, log: Path | None = None) -> int:
    """Runs it for so long at most, and gives its exit status; one that is too slow is asked to stop, then killed."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]))
    out = log.open("w", encoding="utf-8") if log else None
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=out, stderr=subprocess.STDOUT if out else None,
        start_new_session=True,
    ) as child:  # fmt: skip
        for patience, blow in ((seconds, signal.SIGINT), (GRACE, signal.SIGKILL)):
            try:
                return child.wait(patience)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, blow) if blow == signal.SIGKILL else child.send_signal(blow)
            except KeyboardInterrupt:
                os.killpg(child.pid, signal.SIGKILL)
                raise
        return child.wait()


def step(name: str, records: Path, folder: Path, given: argparse.Namespace) -> int:
    """One of the four; its exit status."""
    if name != "tests":
        seconds = QUICK_SECONDS if given.quick else SECONDS
        return finished(benchmark_command(name, records, given.quick, given.dry_run), seconds + GRACE)
    seconds = (QUICK_SECONDS if given.quick else SECONDS) - GRACE
    parallel = 1 if given.dry_run else processes()
    return finished(pytest_command(records, given.tests, given.quick, parallel), seconds, folder / "tests.txt")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--quick", action="store_true", help="under 2 minutes for each of the four")
    parser.add_argument("--only", action="append", choices=STEPS, help="leave out the others")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests" / "gpu", help="other tests than tests/gpu")
    parser.add_argument("--dry-run", action="store_true", help="on the simulated device, tiny: no figure means anything")
    given = parser.parse_args(argv)
    if given.dry_run:
        device, versions = Device.named("A100-40GB"), machine.library_versions
    else:
        device, versions = Device.current(), machine.gpu_versions
    folder, budget, failed = given.folder.resolve(), Budget(float("inf")), []
    with Records(folder, f"{'simulated ' if given.dry_run else ''}{device.name}") as records:
        steps = given.only or list(STEPS)
        header = {"what": "on_gpu", "steps": steps, "quick": given.quick, "simulated": given.dry_run}
        records.write("run", surroundings(device, versions) | header)
        for name in steps:  # whatever came before: a GPU may not be there again
            begun = budget.spent()
            status = step(name, records.path, folder, given)
            failed += [name] if status else []
            records.write("end", {"reason": f"{name}: exit status {status}", "seconds": budget.spent() - begun})
    print("\n".join(report.summary(read(records.path))))
    print(f"written: {records.path}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
