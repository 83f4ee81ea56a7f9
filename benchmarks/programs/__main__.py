"""Programs that others wrote, under `cupyflash run`: what becomes of each, and the processor time that it takes.

    python benchmarks/programs --samples CHECKOUT [--list FILE.toml] [--only PART] [--include DIR] [--max-seconds N] [--write]

Each program is compiled, then run in a process of its own with a limit of processor time. The table of results goes to stdout;
`--write` keeps it beside the list, with the earlier results of programs that were not run now. A program's state is

- passes: it ends with its own success, and the machine found nothing;
- finding: the machine found a fault in a kernel;
- too large: its launches take more than the limit, or more memory than there is;
- refused: it called what is not simulated, and the report names it, or its kernels are machine code only;
- waived: it says itself that this device cannot run it;
- not built: nvcc did not compile it;
- wrong: anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import checkout  # noqa: E402

from cupyflash import Device  # noqa: E402
from cupyflash.basics import Values  # noqa: E402
from cupyflash.sim.ptx.text.syntax import source_name  # noqa: E402

SOURCES = (".cu", ".cpp", ".c")
WAIVED = 2
"""The exit status by which NVIDIA's samples say that a device cannot run them."""
OURS = (sys.executable, "-m", "cupyflash")
MEMORY = 6 << 30
"""Bytes of private memory that a process may have."""
TOO_MUCH = "not enough memory"
UNKNOWN = ("NotSupported", "InvalidKernelImage")
LAUNCH = tuple(f"__cudaLaunchKernel: cudaError{name}" for name in UNKNOWN)
FOUND = 12
"""Findings of a program that are kept in the results."""


@dataclass(frozen=True)
class Program:
    """One program of the list: its folder in the checkout, or its one file, and how to build it."""

    name: str
    folder: Path
    includes: tuple[Path, ...]
    flags: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    note: str = ""

    @property
    def sources(self) -> list[Path]:
        if self.folder.is_file():
            return [self.folder, *(self.folder.parent / path for path in self.more)]
        folders = [self.folder, self.folder / "src"]
        own = [path for one in folders if one.is_dir() for path in sorted(one.iterdir()) if path.suffix in SOURCES]
        return [*own, *(self.folder / path for path in self.more)]


@dataclass
class Outcome:
    """A program's end. Processor time: `seconds` of the whole run, `build_seconds` of the compiler, `limit` for the kernels."""

    name: str
    state: str
    limit: float = 0.0
    seconds: float = 0.0
    build_seconds: float = 0.0
    status: int | None = None
    launches: int = 0
    repeated: int = 0
    missing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    arithmetic: list[str] = field(default_factory=list)
    """Returns the arithmetic of a program that is too large: what its kernels took, and what the machine estimates."""
    said: str = ""
    note: str = ""


def listed(file: Path, checked_out: Path, includes: Sequence[Path] = ()) -> list[Program]:
    """Returns the programs of a list, in a checkout of its repository; `includes` are folders of headers that it does not have."""
    told = tomllib.loads(file.read_text(encoding="utf-8"))
    shared = (*(checked_out / one for one in told.get("include", [])), *includes)
    programs = []
    for name, more in told["programs"].items():
        folder = checked_out / told["folder"] / name
        words = {key: tuple(value) if isinstance(value, list) else value for key, value in more.items()}
        programs.append(Program(name, folder, (*shared, folder, folder / "inc"), **words))
    return programs


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compiled(program: Program, into: Path, device: str) -> str:
    """Compiles a program to `into`, unless it is there. Returns the compiler's complaint, or nothing."""
    if into.exists():
        return ""
    includes = [f"-I{path}" for path in program.includes if path.is_dir()]
    major, minor = Device.named(device).compute_capability
    command = [
        *OURS,
        "nvcc",
        f"-arch=compute_{major}{minor}",
        f"-code=compute_{major}{minor}",
        "-std=c++17",
        "--extended-lambda",
        "-w",
    ]
    done = subprocess.run(
        [*command, *includes, *program.flags, "-o", str(into), *map(str, program.sources)],
        capture_output=True,
        text=True,
        env=checkout.environment(),
    )
    return last_line(done.stderr or done.stdout) if done.returncode else ""


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:200]


def tried(program: Program, builds: Path, device: str, limit: float) -> Outcome:
    """Compiles a program and runs it, in a folder of its own that has a copy of its data."""
    binary = builds / program.name.replace("/", "-").replace(".", "-")  # no suffix of a source
    before = seconds_of_children()
    complaint = compiled(program, binary, device)
    building = seconds_of_children() - before
    if complaint:
        return Outcome(program.name, "not built", build_seconds=building, said=complaint, note=program.note)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        place.mkdir()
        if (program.folder / "data").is_dir():
            shutil.copytree(program.folder / "data", place / "data")
        told, before = Path(folder) / "told.json", seconds_of_children()
        command = [*OURS, "run", f"--device={device}", f"--max-seconds={limit}", f"--format=json={told}", str(binary)]
        with (Path(folder) / "said").open("w+") as said:
            process = subprocess.Popen(
                [*command, "--", *program.arguments],
                cwd=place,
                stdout=said,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=checkout.environment(),
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
            )
            late = False
            try:
                status: int | None = process.wait(5 * limit + 60)
            except subprocess.TimeoutExpired:
                late = True
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = None
            said.seek(0)
            text = said.read()
        result = json.loads(told.read_text(encoding="utf-8")) if told.exists() else None
    outcome = judged(program, result, status, text, late)
    outcome.limit = limit
    outcome.seconds, outcome.build_seconds = round(seconds_of_children() - before, 2), round(building, 2)
    return outcome


def judged(program: Program, result: Values | None, status: int | None, text: str, late: bool) -> Outcome:
    """Returns a program's state from the report of its run; see the head of this file."""
    outcome = Outcome(program.name, "wrong", status=status, said=last_line(text), note=program.note)
    if result is None:
        outcome.state = "too large" if late or TOO_MUCH in outcome.said else "wrong"
        return outcome
    kernels = result["kernels"]
    outcome.status = result["status"]
    outcome.launches, outcome.repeated = sum(one["launches"] for one in kernels), sum(one["repeated"] for one in kernels)
    outcome.missing = list(result["missing"])
    outcome.failed = [f"{one['function']}: {one['error']}" for one in result["failed"] if one["function"] not in result["missing"]]
    found = [f"{place(one)}: {one['kind']}: {one['message']}"[:240] for kernel in kernels for one in kernel["findings"]]
    outcome.findings = found[:FOUND]
    if any(one.startswith(LAUNCH) for one in outcome.failed):
        outcome.state = "refused"  # whatever the program makes of it
    elif found:
        outcome.state = "finding"
    elif result["cut"]:
        outcome.state = "too large"
        outcome.arithmetic = [arithmetic(one) for one in kernels if one["launches"]]
        outcome.arithmetic += [f"memory: {result['memory']}"] if result["memory"] else []
    elif outcome.status == 0:
        outcome.state = "passes"
    elif outcome.missing or any(name in one for one in outcome.failed for name in UNKNOWN):
        outcome.state = "refused"
    elif outcome.status == WAIVED:
        outcome.state = "waived"
    return outcome


def arithmetic(kernel: Values) -> str:
    """Returns the processor time of a kernel's launches so far, and of one as it was estimated, if that is long."""
    ran = kernel["launches"] - kernel["repeated"] - kernel["unfinished"]
    so_far = f"{source_name(kernel['kernel'])}: {ran} run to the end, {kernel['repeated']} repeated, in {kernel['seconds']:.1f} s"
    one = kernel["estimate"]
    if one is None:
        return so_far
    least = "at least " if one["at_least"] else ""
    return f"{so_far}; a launch: {least}{one['seconds']:,.0f} s, by {one['done']:,} of its {one['waves']:,} groups of blocks"


def place(finding: Values) -> str:
    """Returns the line of a finding; that of the PTX if the program was built without lines."""
    file, line = finding["source"] or ("PTX", finding["ptx_line"])
    return f"{Path(file).name}:{line}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the outcomes, a line each, and their sums."""
    lines = []
    for one in outcomes:
        why = "; ".join(filter(None, [", ".join(one.missing), *one.failed[:2], *one.findings[:1], *one.arithmetic[-1:]]))
        why = why or (one.said if one.state not in ("passes", "waived") else "")
        lines.append(f"{one.name:56} {one.state:10} {one.seconds:7.1f} s  {one.launches:5} launches  {why[:160]}")
    states = Counter(one.state for one in outcomes)
    passed = sum(one.seconds for one in outcomes if one.state == "passes")
    all_seconds = sum(one.seconds for one in outcomes)
    lines.append(f"{len(outcomes)} programs: " + ", ".join(f"{count} {state}" for state, count in states.most_common()))
    lines.append(f"processor time: {passed:.0f} s of those that pass, {all_seconds:.0f} s of all")
    return "\n".join(lines)


def keep(outcome: Outcome, given: argparse.Namespace) -> None:
    """Writes an outcome into the results beside the list, with what they have of its other programs."""
    file = given.list.with_name(f"{given.list.stem}-results.json")
    kept = {one["name"]: one for one in json.loads(file.read_text(encoding="utf-8"))["programs"]} if file.exists() else {}
    kept[outcome.name] = {key: value for key, value in asdict(outcome).items() if value or key == "seconds"}
    every = [kept[one.name] for one in listed(given.list, given.samples) if one.name in kept]
    told = {
        "command": f"python benchmarks/programs --samples DIR --device {given.device} --max-seconds {given.max_seconds:g} --write",
        "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
        "states": Counter(one["state"] for one in every),
        "seconds": round(sum(one["seconds"] for one in every), 1),
        "programs": every,
    }
    file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--samples", type=Path, required=True, help="the checkout")
    parser.add_argument("--list", type=Path, default=HERE / "samples.toml", help="the list of programs")
    parser.add_argument("--only", default="", help="programs whose names have one of these parts, with commas between")
    parser.add_argument("--device", default="A100-80GB")
    parser.add_argument("--max-seconds", type=float, default=40.0, help="processor time of a program's kernels")
    parser.add_argument("--include", type=Path, action="append", default=[], help="a folder of headers, as cuBLAS's")
    parser.add_argument("--builds", type=Path, help="folder that keeps the compiled programs")
    parser.add_argument("--write", action="store_true", help="keep the results beside the list")
    given = parser.parse_args()
    parts = given.only.split(",")
    every = listed(given.list, given.samples.resolve(), given.include)
    programs = [one for one in every if any(part in one.name for part in parts)]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        builds = given.builds or Path(folder)
        builds.mkdir(exist_ok=True, parents=True)
        for program in programs:
            outcomes.append(tried(program, builds.resolve(), given.device, given.max_seconds))
            print(table(outcomes[-1:]).splitlines()[0], flush=True)
            if given.write:
                keep(outcomes[-1], given)
    print(*table(outcomes).splitlines()[-2:], sep="\n")


if __name__ == "__main__":
    main()
