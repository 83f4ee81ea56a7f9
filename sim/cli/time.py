"""`cupyflash time`: how long a kernel takes, and at which lines, by the clock that executes its machine code."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from cupyflash.basics import Report, Shape, Values
from cupyflash.device import Device
from cupyflash.sim.cli.options import gathered
from cupyflash.sim.cli.profile import (
    complete,
    first_reason,
    preprocessed,
)
from cupyflash.sim.cli.show import say, show_table
from cupyflash.sim.cli.terminal import LONG_SECONDS, progress
from cupyflash.sim.ptx import PtxError

if TYPE_CHECKING:
    from cupyflash.sim.clock.lines import TimedLine

NEEDED = ("seconds", "lines", "device", "kernel")


@dataclass(frozen=True)
class TimedLaunch:
    """A kernel's file, its compilation and its launch."""

    file: Path
    kernel: str | None
    grid: Shape
    block: Shape
    spec: str | None
    defines: tuple[str, ...]
    includes: tuple[Path, ...]
    shared_bytes: int


@dataclass(frozen=True)
class Chip:
    """A device and its state."""

    device: Device
    mhz: float | None
    cold: bool


@dataclass(frozen=True)
class TimeReport:
    """Options of the output."""

    lines: int
    against: Path | None
    as_json: bool


@gathered(launch=TimedLaunch, chip=Chip, report=TimeReport)
def time(launch: TimedLaunch, chip: Chip, report: TimeReport) -> None:
    """Time a kernel on a device that is not there."""
    earlier = None if report.against is None else _earlier(report.against)
    try:
        with progress() as steps:
            steps.begin(f"executing the machine code of {launch.file}")
            begun = monotonic()

            def foretold(rest: float) -> None:
                whole = monotonic() - begun + rest
                if whole > LONG_SECONDS:
                    steps.expect(whole)

            found = _timed(launch, chip, foretold)
    except PtxError as error:
        raise click.UsageError(f"{launch.file}: {first_reason(error)}") from error
    except RuntimeError as error:  # a tool is missing, or refuses the file
        raise click.UsageError(str(error)) from error
    if earlier is not None:
        found["against"] = _compared(earlier, found)
    if report.as_json:
        click.echo(json.dumps(found, indent=2))
        return
    _show(found, report.lines)


def _timed(asked: TimedLaunch, chip: Chip, foretold: Callable[[float], None]) -> Report:
    """Returns the report of a launch, for JSON; `foretold` as `sim.clock.timed` has it."""
    from cupyflash.sim.clock.loaded import of_file
    from cupyflash.sim.clock.timed import timed
    from cupyflash.sim.profiling.arguments import read_arguments, template_text
    from cupyflash.sim.ptx.parameters import ask_about_types
    from cupyflash.sim.ptx.text.syntax import find_kernel

    options = preprocessed(asked.defines, asked.includes)
    code = of_file(asked.file, chip.device, options)
    kernel = find_kernel(tuple(code.kernels), asked.kernel)
    cuda = "" if asked.file.suffix in (".ptx", ".cubin") else asked.file.read_text(encoding="utf-8")
    shape = {"--grid": asked.grid, "--block": asked.block}
    spec = complete(asked.spec, shape, lambda: template_text(cuda, kernel, code.kernels[kernel]))
    arguments = read_arguments(spec).values
    ask_about_types(cuda, kernel, arguments)
    loaded = code.launch(kernel, (asked.grid, asked.block), arguments, asked.shared_bytes)
    return timed(loaded, chip.device, chip.mhz, cold=chip.cold, foretold=foretold).to_dict()


def _earlier(path: Path) -> Report:
    """Reads an earlier run's JSON; ValueError if it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--against {path} is not valid JSON: {error}") from error
    if not isinstance(found, dict) or not all(name in found for name in NEEDED):
        raise ValueError(f"--against {path} is not what `cupyflash time --json` writes")
    return found


def _lines(report: Values) -> Sequence[TimedLine]:
    from cupyflash.sim.clock.lines import TimedLine

    return [TimedLine.read(each) for each in report["lines"]]


def _compared(earlier: Values, found: Values) -> Report:
    """Returns the change since an earlier run: of the whole time, and of each line."""
    from cupyflash.sim.clock.lines import changes

    moved = [dict(zip(("text", "before", "after"), each, strict=True)) for each in changes(_lines(earlier), _lines(found))]
    kept = {name: earlier[name] for name in ("kernel", "device", "seconds")}
    return kept | {"change": found["seconds"] - earlier["seconds"], "lines": moved}


def _show(found: Values, count: int) -> None:
    from cupyflash.sim.clock.known import KnownError

    rates = f"{found['tflops']:,.2f} TFLOP/s" if found["tflops"] > 0.1 else f"{found['dram_gbs']:,.0f} GB/s of DRAM"
    watts = "" if found["watts"] is None else f" and {found['watts']:,.0f} W"
    say(f"{found['kernel']} on {found['device']} at {found['mhz']:,.0f} MHz{watts}, predicted: {found['seconds'] * 1e6:,.1f} us, "
        f"{rates}; {found['binds']} binds")  # fmt: skip
    say(f"Known error: {KnownError(**found['known_error'])}.")
    say(f"{found['residents']} blocks a multiprocessor at once, {found['rounds']:,.1f} rounds; run: {found['sampled']}")
    show_table(("limit", "share of the time"), [(name, f"{min(share, 1):.0%}") for name, share in found["busy"].items()])
    click.echo()
    show_lines(found["lines"][:count])
    if "against" in found:
        _show_change(found["against"], found["seconds"], count)


def show_lines(lines: Sequence[Values]) -> None:
    """Show the lines of `to_dict`s as text."""
    show_table(("line", "source", "us", "share", "warps wait for"), [_row(line) for line in lines], left=(0, 1, 4))


def _row(line: Values) -> tuple[str, ...]:
    spent = sum(line["stalls"].values())
    reasons = [f"{name} {clocks / spent:.0%}" for name, clocks in list(line["stalls"].items())[:2] if clocks > 0.05 * spent]
    place = f"{Path(line['file']).name}:{line['line']}" if line["file"] else str(line["line"])
    return place, _short(line["text"]), f"{line['seconds'] * 1e6:,.2f}", f"{line['share']:.0%}", ", ".join(reasons)


def _show_change(change: Values, seconds: float, count: int) -> None:
    click.echo()
    before = change["seconds"]
    say(f"Against {change['kernel']} on {change['device']}, {before * 1e6:,.1f} us: {(seconds - before) * 1e6:+,.1f} us, "
        f"{seconds / before:.3f} of its time.")  # fmt: skip
    rows = [
        (
            _short(each["text"]),
            *(f"{each[name] * 1e6:,.2f}" for name in ("before", "after")),
            _signed(each["after"] - each["before"]),
        )
        for each in change["lines"][:count]
    ]
    show_table(("source", "us before", "us now", "change"), rows)


def _signed(seconds: float) -> str:
    return f"{seconds * 1e6:+,.2f}"


def _short(text: str) -> str:
    return text if len(text) <= 28 else f"{text[:25]}..."
