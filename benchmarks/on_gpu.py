"""Tests and times cupyflash on the GPU at hand, in one command:

    python benchmarks/on_gpu.py [--quick] [--only STEP] [--resume] [--dry-run] FOLDER

In this order: `correctness` (tests/gpu/first.py: each kernel with each option, its programs compiled in parallel before), the table
(`forward`, `backward`, `decode`), `accuracy` (long sequences and scores of every magnitude), `machine` (the PTX machine beside the
chip), and, if not --quick, `tests` (the rest of tests/gpu). It writes FOLDER/DEVICE-DATE.jsonl, a line as soon as it is known, and
FOLDER/STEP.txt, what pytest prints. Each step ends in time or is stopped: with --quick all of it takes under 9 minutes, without
under 40. --resume goes on with the folder's newest file: what ended in it is not done again, nor a case that the table has.
The .jsonl file names no user and no machine: CONTRIBUTING.md says what is in it, and how to send it in.

--dry-run does all of it without a GPU, on small sizes: tests/gpu on the stand-in for CuPy, the table on the simulated device.
CUPYFLASH_STAND_IN=H200 names the device (the A100-40GB without it). No figure means anything; the exit status does.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from checkout import ROOT, environment

# isort: split
import machine
import report
from command import surroundings
from records import Budget, Records

from cupyflash import Device
from cupyflash.basics import Values
from cupyflash.sim.clock.measured import read

TABLE = ("forward", "backward", "decode")
FILES = {"correctness": "test_gpu_first.py", "accuracy": "test_gpu_large.py", "machine": "test_machine.py"}
STEPS = ("correctness", *TABLE, "accuracy", "machine", "tests")
# Seconds that a step may take, quick and not; 0: it is not among the quick ones. What no step uses is the next ones'.
SECONDS = {
    "correctness": (110, 300),
    "forward": (130, 450),
    "backward": (90, 450),
    "decode": (50, 300),
    "accuracy": (50, 300),
    "machine": (50, 120),
    "tests": (0, 450),
}
COMPILING = 0.6  # of the seconds for correctness
DRY_SECONDS = 900
MOST_PROCESSES = 16
BYTES_EACH = 3 << 29  # of GPU memory, for a process of the tests
# A process of several has one thread for NumPy's products: sixteen processes of sixteen threads each took turns, on an H100's host.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
GRACE = 20  # seconds between the signal to stop and the one that does not ask


def processes() -> int:
    """The number of processes that can test at the same time on the GPU at hand."""
    import cupy

    memory = int(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["totalGlobalMem"])
    return max(1, min(os.cpu_count() or 1, MOST_PROCESSES, memory // BYTES_EACH))


def pytest_command(records: Path, tests: Sequence[Path], quick: bool, parallel: int) -> list[str]:
    """The GPU's tests of these files, the wide ones only if not quick."""
    found = [sys.executable, "-m", "pytest", *map(str, tests), "-p", "no:cacheprovider", "-p", "pytest_records"]
    found += ["--records", str(records), *([] if quick else ["-m", ""])]
    return found + (["-n", str(parallel)] if parallel > 1 and importlib.util.find_spec("xdist") else [])


def script_command(name: str, records: Path, given: argparse.Namespace, seconds: float) -> list[str]:
    """A script beside this one, with those of our flags that it has."""
    known = ("dry_run",) if name == "ahead" else ("quick", "dry_run", "resume")
    flags = [f"--{flag.replace('_', '-')}" for flag in known if getattr(given, flag)]
    return [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--out", str(records), "--budget", f"{seconds:.0f}", *flags]


def files_of(name: str, tests: Path) -> list[Path]:
    """The test files of a step."""
    if name in FILES:
        return [tests / FILES[name]]
    return sorted(path for path in tests.glob("test_*.py") if path.name not in FILES.values())


def finished(command: Sequence[str], seconds: float, log: Path | None = None, **variables: str) -> int:
    """Runs it for so long at most, and gives its exit status; one that is too slow is asked to stop, then killed."""
    out = log.open("w", encoding="utf-8") if log else None
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(ROOT / "benchmarks") | variables, start_new_session=True,
        stdout=out, stderr=subprocess.STDOUT if out else None,
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


def step(name: str, records: Path, folder: Path, given: argparse.Namespace, seconds: float) -> int:
    """Run one step for at most `seconds`; its exit status."""
    if name in TABLE:
        return finished(script_command(name, records, given, seconds - GRACE), seconds)
    begun, compiled, log = Budget(seconds), 0, folder / f"{name}.txt"
    if name == "correctness":
        compiled = finished(script_command("ahead", records, given, COMPILING * seconds), COMPILING * seconds + GRACE)
    stand_in = {"CUPYFLASH_STAND_IN": machine.stand_in().name} if given.dry_run else {}
    parallel = 1 if given.dry_run else processes()
    command = pytest_command(records, files_of(name, given.tests), given.quick, parallel)
    status = finished(command, begun.left(), log, **stand_in, **(ONE_THREAD if parallel > 1 else {}))
    print(log.read_text(encoding="utf-8").rstrip().rpartition("\n")[2] if log.is_file() else "", flush=True)
    return status or compiled


def ended(lines: Iterable[Values]) -> set[str]:
    """The steps that came to their end in a file, well or not."""
    words = [str(line["reason"]).partition(": exit status ") for line in lines if line["kind"] == "end"]
    return {name for name, _, status in words if name in STEPS and status in ("0", "1")}


def newest(folder: Path, device: str) -> Path | None:
    """The file of this device that was written last."""
    files = folder.glob(f"{device.replace(' ', '-')}-*.jsonl")
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--quick", action="store_true", help="under 9 minutes for all of it")
    parser.add_argument("--only", action="append", choices=STEPS, help="leave out the others")
    parser.add_argument("--resume", action="store_true", help="go on with the folder's newest file of this device")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests" / "gpu", help="another folder than tests/gpu")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, small: no figure means anything")
    given = parser.parse_args(argv)
    if given.dry_run:
        device, versions = machine.stand_in(), machine.library_versions
    else:
        try:
            device, versions = Device.current(), machine.gpu_versions
        except (ImportError, RuntimeError) as error:
            parser.error(str(error))
    folder, failed, left = given.folder.resolve(), [], 0.0
    name = f"{'simulated ' if given.dry_run else ''}{device.name}"
    old = newest(folder, name) if given.resume else None
    steps = [each for each in given.only or STEPS if SECONDS[each][not given.quick]]
    with Records(old or folder, name) as records:
        done = ended(read(records.path)) if old else set()
        header = {"what": "on_gpu", "steps": steps, "quick": given.quick, "simulated": given.dry_run, "resumed": sorted(done)}
        records.write("run", surroundings(device, versions) | header)
        for each in steps:  # whatever came before: a GPU may not be there again
            if each in done:
                continue
            budget = Budget(DRY_SECONDS if given.dry_run else SECONDS[each][not given.quick] + left)
            print(f"{each}: {budget.left():.0f} s at most", flush=True)
            status = step(each, records.path, folder, given, budget.left())
            failed += [each] if status else []
            left = max(0.0, budget.left())
            records.write("end", {"reason": f"{each}: exit status {status}", "seconds": budget.spent()})
    print("\n".join(report.summary(read(records.path))))
    print(f"written: {records.path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
