"""Measures constants of the clock (cupyflash/rates.toml) on the GPU at hand, and writes a line of JSON a constant:

    python benchmarks/rates.py [--out FOLDER] [--budget SECONDS] [--dry-run] [--measure NAME ...]

By CuPy and NVRTC alone: no nvcc, no framework. The kernels are rates.cu and the repeated instructions of rate_steps.py.
Measurements run in a process of their own, the ones that could fault or hang last: if one ends its process, or takes too long, the
others go on in a new one. At the end each value stands beside the table's; those more than 15 % apart are marked. docs/clock.md
says how they are found.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from checkout import ROOT, environment

# isort: split
from command import folder, surroundings, writing
from machine import gpu_versions, stand_in
from rate_chips import Chip, Gpu, Simulated
from rate_measurements import MEASUREMENTS, Found, known, names
from records import Budget, Records, attempt, told

from cupyflash import Device
from cupyflash.basics import Report, Values
from cupyflash.sim.clock.measured import read

SECONDS, SILENT_SECONDS = 45.0, 20.0  # of the whole; without a line after which a process is ended
LOST = 3  # exit status of a process whose device does not answer any more
APART = 0.15


def units() -> dict[str, str]:
    """The units of the table's constants."""
    meanings = tomllib.loads((ROOT / "cupyflash" / "rates.toml").read_text())["meanings"]
    return {f"{group}.{name}": each["unit"] for group, constants in meanings.items() for name, each in constants.items()}


def told_rate(found: Found, device: Device, unit: str | None) -> Report:
    """The line of a constant."""
    told_line = {"name": found.name, "value": found.value, "unit": unit, "spread": found.spread, "values": list(found.values)}
    table = known(device).get(found.name)
    if table:
        told_line |= {"table": table.value, "source": table.source, "ratio": found.value / table.value if table.value else None}
    return told_line | ({"note": found.note} if found.note else {})


def measure(chip: Chip, wanted: Sequence[str], records: Records) -> int:
    """Measures in this process; exit status LOST where the device answers no more, 1 where a measurement failed."""
    told_units, status = units(), 0
    for name in wanted:
        begun = time.perf_counter()
        try:
            for found in MEASUREMENTS[name](chip):
                records.write("rate", {"measurement": name, **told_rate(found, chip.device, told_units.get(found.name))})
            error: Values = {"value": time.perf_counter() - begun}
        except Exception as raised:
            error, status = {"error": told(raised)}, 1
        records.write("extra", {"name": name, **error})
        print(f"{name}: {error.get('error') or f'{time.perf_counter() - begun:.1f} s'}", flush=True)
        if "error" in attempt(chip.check):
            return LOST
    records.extra("clocks", chip.clocks)
    return status


def done(path: Path) -> set[str]:
    """The measurements of which a file has the end, or the error."""
    return {each["name"] for each in read(path) if each["kind"] == "extra"} if path.is_file() else set()


def in_processes(wanted: Sequence[str], path: Path, budget: Budget, command: Sequence[str]) -> int:
    """Measures in a process, and behind one that ends it or says nothing for too long in a new one."""
    status, remaining = 0, list(wanted)
    while remaining and budget.left() > 0:
        process = subprocess.Popen([*command, "--out", str(path), "--measure", *remaining], env=environment())
        size, since = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.1)
            now = path.stat().st_size
            size, since = (now, time.monotonic()) if now != size else (size, since)
            if time.monotonic() - since > SILENT_SECONDS or budget.left() <= 0:
                process.kill()
                process.wait()
        behind = [name for name in remaining if name not in done(path)]
        if (behind and len(behind) == len(remaining)) or process.returncode not in (0, 1, LOST):
            status, broken = 1, behind[:1]
            with Records(path, "") as records:
                for name in broken:
                    records.write("extra", {"name": name, "error": f"its process ended with {process.returncode}"})
            behind = behind[1:]
        status, remaining = status or process.returncode, behind
    if remaining:
        with Records(path, "") as records:
            records.write("left_out", {"cases": remaining, "reason": "no time was left"})
        return 1
    return status


def table(lines: Iterable[Values]) -> Iterator[str]:
    """The lines of a file: what was measured beside the table's value."""
    yield f"{'constant':34} {'measured':>10} {'spread':>8} {'table':>9} {'ratio':>6}    unit; the table's source"
    for each in lines:
        if each["kind"] == "rate":
            value, ratio = each["value"], each.get("ratio")
            known_value = f"{each['table']:9.4g} {ratio or math.nan:6.2f}" if "table" in each else f"{'':9} {'':6}"
            apart = "!" if ratio is not None and abs(ratio - 1) > APART else " "
            shown = math.nan if value is None else value
            source = f"{each.get('unit') or ''}; {each.get('source', '')}"[:70]
            yield f"{each['name']:34} {shown:10.4g} {each['spread'] or 0:8.2g} {known_value} {apart}  {source}"
        elif each["kind"] == "extra" and "error" in each:
            yield f"{each['name']:34} {each['error']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = writing(__doc__, "the PTX machine")
    parser.add_argument("--budget", type=float, default=SECONDS, metavar="SECONDS", help=f"stop in time ({SECONDS:.0f})")
    parser.add_argument("--measure", nargs="+", choices=list(MEASUREMENTS), help="only these, in this process")
    given = parser.parse_args(argv)
    dry = given.dry_run
    device = stand_in() if dry else Device.current()
    with Records(folder(given), f"{'simulated ' if dry else ''}{device.name} rates") as records:
        if given.measure or dry:
            chip = Simulated() if dry else Gpu()
            return measure(chip, given.measure or names(device), records)
        records.write("run", surroundings(device, gpu_versions) | {"what": "rates", "simulated": False})
    print(f"writing {records.path}")
    budget = Budget(given.budget)
    status = in_processes(names(device), records.path, budget, [sys.executable, __file__])
    with Records(records.path, "") as records:
        records.write("end", {"reason": "done", "seconds": budget.spent()})
    print("\n".join(table(read(records.path))))
    return status


if __name__ == "__main__":
    sys.exit(main())
