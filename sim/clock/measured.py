"""Benchmark measurements of a schedule's problem on its device: the lines of their files about the same case."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from cupyflash.basics import Report, Values
from cupyflash.device import Device
from cupyflash.request.options import Options
from cupyflash.schedules import BackwardSchedule, DecodeSchedule, TileSchedule

from .rates import catalogue_name

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
"""The folder of results in a checkout; an installed package has none."""


@dataclass(frozen=True)
class Measured:
    """One measurement: the median of a call's seconds on the device, and the distance of its quartiles; the day and the commit, the
    file's name. `exposed`: the device may have waited for the host."""

    implementation: str
    seconds: float
    spread: float
    exposed: bool
    date: str
    commit: str
    file: str


def measured(schedule: TileSchedule, folder: Path = RESULTS) -> tuple[Measured, ...]:
    """The measurements of the schedule's own kernels, newest first: on the same device, the same case, the same tile if the line
    has one.

    Left out are wrong results, figures beyond the device's peak, and times of the simulated device. None for a problem with options
    that no benchmark times. ValueError, with the file, for a line that is not JSON.
    """
    case = case_of(schedule)
    if case is None or not folder.is_dir():
        return ()
    found: list[Measured] = []
    for file in files(folder):
        run: Values = {}
        for number, line in numbered(file):
            run = line if line["kind"] == "run" else run
            try:
                if line["kind"] == "measurement" and is_of(schedule, case, run, line):
                    found.append(measurement(run, line, file))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file.name}, line {number}: not a benchmark's measurement: {error!r}") from None
    found.sort(key=lambda each: each.date)
    return tuple(reversed(found))


def files(folder: Path) -> list[Path]:
    """The files of results, the oldest of a device and date first: later ones of a date end in -2, -3."""
    return sorted(folder.glob("*.jsonl"), key=lambda each: each.stem)


def measurement(run: Values, line: Values, file: Path) -> Measured:
    """The measurement of a run's line. KeyError, TypeError or ValueError if it is not one."""
    seconds, spread = float(line["seconds"]), float(line["spread_s"])
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds = {seconds}")
    exposed = bool(line.get("exposed"))
    return Measured(line["implementation"], seconds, spread, exposed, str(run["date"]), str(run["commit"]), file.name)


def read(file: Path) -> Iterator[Report]:
    """The lines of a benchmark's file; an incomplete last one is left out."""
    return (line for _, line in numbered(file))


def numbered(file: Path) -> Iterator[tuple[int, Report]]:
    """The same with their numbers. ValueError, with file and line, for a line that no benchmark writes."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name}: not UTF-8: {error}") from None
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except ValueError:
            if number < len(lines):
                raise ValueError(f"{file.name}, line {number}: not JSON: {text[:80]!r}") from None
            return
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            raise ValueError(f"{file.name}, line {number}: not a benchmark's record, an object with a kind: {text[:80]!r}")
        yield number, line


def case_of(schedule: TileSchedule) -> Report | None:
    """The fields of lines about the same problem, as benchmarks/cases.py names them; None if no benchmark times such a problem."""
    p, asked = schedule.problem, schedule.problem.options
    decoding = isinstance(schedule, DecodeSchedule)
    full = asked.key_lengths in (None, (p.seqlen_k,) * p.batch)
    plain = replace(asked, causal=False, padded=False, key_lengths=None, scale=None) == Options()
    shape = p.seqlen_q == 1 if decoding else p.seqlen_q == p.seqlen_k and p.heads == p.kv_heads
    if not (full and plain and shape and p.head_dim == p.head_dim_v):
        return None
    case = {"dtype": p.dtype, "d": p.head_dim, "n": p.seqlen_k, "causal": asked.causal, "batch": p.batch, "heads": p.heads}
    if decoding:  # a single query sees every key, causal or not
        return {"pass": "decode", **case, "causal": True, "kv_heads": p.kv_heads}
    return {"pass": "backward" if isinstance(schedule, BackwardSchedule) else "forward", **case}


def is_of(schedule: TileSchedule, case: Values, run: Values, line: Values) -> bool:
    """True if a line has a right figure of the schedule's kernels on its device."""
    good = not run.get("simulated", True) and "seconds" in line and "invalid" not in line and line.get("right") is not False
    same = good and all(line.get(name) == value for name, value in case.items()) and same_chip(schedule.device, run["device"])
    return same and implements(schedule, line)


def implements(schedule: TileSchedule, line: Values) -> bool:
    """True if a line is about the schedule's kernels: by the benchmark's names, and its tile or splits if the line has them."""
    size, named = f"{schedule.block_rows}x{schedule.block_cols}", line["implementation"]
    if isinstance(schedule, DecodeSchedule):
        page = schedule.cache.page_size
        return named == ("decode" if page is None else f"decode, pages of {page}") and line.get("splits") == schedule.splits
    if isinstance(schedule, BackwardSchedule):
        return bool(named == schedule.algorithm + " deterministic" * schedule.deterministic)
    return named in (schedule.algorithm, f"{schedule.algorithm} {size}") and line.get("tile", size) == size


def same_chip(device: Device, told: Values) -> bool:
    """True if a file's device, which CUDA named, is this one: the same name in the catalogue, and the same size."""
    return catalogue_name(str(told["name"])) == catalogue_name(device.name) and told["sm_count"] == device.sm_count
