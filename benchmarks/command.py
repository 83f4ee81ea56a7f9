"""The command of a benchmark: what it is told, the machine, the file, and the order of things."""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

import ahead
import report
from cases import SMALL, TINY, Case, chosen
from machine import Gpu, Machine, Simulated
from peers import all_missing
from records import ROOT, Budget, Records, attempt, commit, told
from timing import DeviceLost, Effort, Pass, Session

import cupyflash
from cupyflash import Device
from cupyflash.basics import Report, Values
from cupyflash.schedules import Kernel, TileSchedule
from cupyflash.sim.clock.measured import read
from cupyflash.sim.clock.planned import clocks

# Seconds: of the command, and of these, what is kept for the extras behind the measurements.
SECONDS, QUICK_SECONDS = 450.0, 105.0
EXTRAS_SHARE, AHEAD_SHARE = 0.15, 0.3
HOST_CALLS = 200
FULL, QUICK, DRY = Effort(), Effort(seconds=0.1, least=3, most=30), Effort(sets=1, least=2, most=2)
INTERRUPTED = 130  # exit status, as a shell has it
# By name, what gives it: called one after another while time is left, with the seconds that are left.
Extras = Mapping[str, Callable[[float], Any]]


def surroundings(device: Device, versions: Callable[[], Any]) -> Report:
    """The subject of a run: device, versions, commit; nothing that names a user or a machine."""
    return {
        "device": {**{each.name: getattr(device, each.name) for each in fields(device)}, "tensor_peak": dict(device.tensor_peak)},
        "date": datetime.date.today().isoformat(),
        "cupyflash": cupyflash.__version__,
        "commit": first(attempt(commit)),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": first(attempt(versions)),
    }


def first(found: Values) -> Any:
    """The value that was found, or the error."""
    return found.get("value", found.get("error"))


def distinct(what: Pass, machine: Machine, cases: Sequence[Case]) -> Iterator[Kernel]:
    """One kernel for each binary that the cases need, in the order of the cases."""
    seen = set()
    for case in cases:
        for kernel in attempt(lambda case=case: list(what.kernels(machine.device, case))).get("value", ()):  # type: ignore[misc]
            binary = kernel.source, kernel.constants
            if binary not in seen:
                seen.add(binary)
                yield kernel


def host_seconds(session: Session) -> dict[str, float]:
    """Host time of one warm call of the default, from entry to return, nothing waited for: median and spread; a small problem's."""
    machine, what = session.machine, session.what
    case = what.tiny or TINY if isinstance(machine, Simulated) else what.small or SMALL
    arrays = what.draw(machine, case, 0)
    call = next(each.call for each in what.ours(machine, case, arrays) if each.name == what.default)
    call()
    times = []
    for _ in range(2 if isinstance(machine, Simulated) else HOST_CALLS):
        machine.wait()  # an empty queue, so that no call waits for a place in it
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"seconds": median, "spread_s": upper - lower}


def failed(rows: Sequence[Values]) -> bool:
    """True if one of ours is wrong, or raised an error other than too little memory."""
    return any(row["ours"] and (row.get("right") is False or "MemoryError" not in row.get("error", "MemoryError")) for row in rows)


def run(session: Session, cases: Sequence[Case], header: Values, extras: Extras) -> int:
    """Run all steps and return the exit status; the last line of the output tells how it ended."""
    records, budget, reason, status = session.records, session.budget, "done", 0
    try:
        machine = session.machine
        here = surroundings(machine.device, machine.versions)
        records.write("run", {**here, **header, "fill_seconds": machine.fill_seconds})
        if not header["simulated"]:
            kernels, share = list(distinct(session.what, machine, cases)), AHEAD_SHARE * budget.left()
            records.extra("compiled ahead", lambda: ahead.compile_all(kernels, share, ahead.processes()))
        if lacking := records.extra("peers missing", all_missing):
            print("not timed, since not here: " + "; ".join(f"{module} ({reason})" for module, reason in lacking.items()))
        if known := session.what.known:
            session.known = records.extra("machine", lambda: known(machine)) or {}
        session.budget = Budget(budget.left() * (1 - EXTRAS_SHARE))
        session.measure(cases)
        records.extra("warm call, host", lambda: host_seconds(session))
        for name, extra in extras.items():
            if budget.left() > 0:
                found = records.extra(name, lambda extra=extra: extra(budget.left()))  # type: ignore[misc]
                print("\n".join(report.against(session.rows, found or ())) if name == report.MODEL else f"{name}: {found}")
            else:
                records.write("extra", {"name": name, "error": "no time left"})
    except DeviceLost as lost:
        reason, status = f"the device does not answer any more, since {lost}", 1
    except KeyboardInterrupt:
        reason, status = "interrupted", INTERRUPTED
    except BaseException as error:
        reason, status = told(error), 1
        raise
    finally:
        records.write("end", {"reason": reason, "seconds": budget.spent()})
        print(f"ended: {reason}")
    return status or int(failed(session.rows))


Variants = Callable[[Device, list[Case]], Iterator[tuple[Mapping[str, Any], TileSchedule]]]


def modelled(simulated: bool, variants: Variants) -> Callable[[float], list[Report]]:
    """The extra that asks the clock (docs/clock.md) about the most important cases' `variants`, each with its name's fields.

    It returns these with `model_seconds`, as many as can be computed in its seconds; RuntimeError without NVIDIA's disassemblers.
    """

    def predictions(seconds: float) -> list[Report]:
        device = Simulated().device if simulated else Device.current()
        asked = islice(variants(device, [TINY]), 1) if simulated else variants(device, chosen(device, quick=True))
        found, begun = [], time.monotonic()
        for name, schedule in asked:
            if time.monotonic() - begun > seconds:
                break
            found.append({**name, "model_seconds": sum(clock.time().seconds for clock in clocks(schedule))})
        return found

    return predictions


def parsed(doc: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = measuring(doc, "float16, d 64 and 128, three lengths, fewer repeats")
    parser.add_argument("--without", action="append", default=[], help="leave out an implementation, as 'torch math'")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that the file of --out has already")
    return completed(parser.parse_args(argv))


def writing(doc: str | None, dry: str) -> argparse.ArgumentParser:
    """A parser with the arguments of all that writes figures; `dry`: where --dry-run runs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = "benchmarks/results; of a dry run a new folder for temporary files"
    parser.add_argument("--out", type=Path, help=f"folder of the file, or a .jsonl file to add to (default: {results})")
    parser.add_argument("--dry-run", action="store_true", help=f"on {dry}, tiny: no figure means anything")
    return parser


def folder(given: argparse.Namespace) -> Path:
    """The folder or file of the figures."""
    return given.out or (Path(tempfile.mkdtemp(prefix="cupyflash-")) if given.dry_run else ROOT / "benchmarks" / "results")


def measuring(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with the arguments of all that measures, `quick` being what --quick leaves."""
    parser = writing(doc, "the simulated device")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help=f"stop in time ({SECONDS:.0f}; quick {QUICK_SECONDS:.0f})")
    return parser


def completed(given: argparse.Namespace) -> argparse.Namespace:
    """Arguments with the folder and the seconds that are taken where none are given."""
    given.out = folder(given)
    given.budget = given.budget or (QUICK_SECONDS if given.quick else SECONDS)
    return given


def remaining(cases: Sequence[Case], what: Pass, path: Path) -> list[Case]:
    """The cases of which a file has no measurement of this pass."""
    lines = [line for line in read(path) if line.get("pass") == what.name] if path.is_file() else []
    return [case for case in cases if not any(asdict(case).items() <= line.items() for line in lines)]


def main(
    doc: str | None,
    what: Pass,
    argv: Sequence[str] | None,
    extras: Callable[[bool], Extras] = lambda simulated: {},
) -> int:
    """Measures and writes. Exit status 1 where one of ours is wrong or fails."""
    given = parsed(doc, argv)
    budget = Budget(given.budget)
    dry, effort = given.dry_run, DRY if given.dry_run else QUICK if given.quick else FULL
    with Simulated() if dry else Gpu() as machine:
        if dry:
            cases: Sequence[Case] = [what.tiny or TINY]
        else:
            cases = what.cases(machine, given.quick) if what.cases else chosen(machine.device, given.quick)
        if given.resume:
            cases = remaining(cases, what, given.out)
        name = f"{'simulated ' if dry else ''}{machine.device.name} {what.name}"
        with Records(given.out, name) as records:
            print(f"writing {records.path}\n{report.heading(what.name)}")
            session = Session(machine, what, records, budget, effort, given.without, show)
            header = {"what": what.name, "default": what.default, "quick": given.quick, "simulated": dry}
            status = run(session, cases, header, extras(dry))
    print("\n".join(report.ratios(session.rows, what.default)))
    return status


def show(line: Values) -> None:
    print(f"left out: {len(line['cases'])} cases" if "cases" in line else report.line(line), flush=True)
    sys.stdout.flush()
