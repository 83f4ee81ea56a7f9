"""`cupyflash run`: a whole CUDA program on the simulated device, with a report of what the machine found in its kernels."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from cupyflash.device import Device
from cupyflash.sim.cli.commands.kernels import SOURCES, divided
from cupyflash.sim.cli.options import gathered
from cupyflash.sim.cli.profile import preprocessed
from cupyflash.sim.cli.reporting import FindingsReport
from cupyflash.sim.formats import CheckedKernels
from cupyflash.sim.ptx import Suppression


@dataclass(frozen=True)
class Building:
    """Options of the compilation of sources."""

    defines: tuple[str, ...]
    includes: tuple[Path, ...]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Running:
    """Options of the run."""

    device: Device
    seed: int | None
    max_seconds: float | None
    clock: bool
    suppressions: Path | tuple[Suppression, ...]


@gathered(building=Building, running=Running, told=FindingsReport)
def run(files: tuple[str, ...], building: Building, running: Running, told: FindingsReport) -> None:
    """Run a whole CUDA program without a GPU, and check its kernels."""
    from cupyflash.sim.program import build
    from cupyflash.sim.program.report import found, report, summary, suppressed
    from cupyflash.sim.program.session import run_program
    from cupyflash.sim.program.streams import Settings

    paths, arguments = divided(files)
    limit, known = running.max_seconds, running.suppressions
    settings = Settings(seed=running.seed, max_seconds=limit, suppressions=known, say=say, clock=running.clock)
    with tempfile.TemporaryDirectory() as folder:
        try:
            program = paths[0]
            if program.suffix in SOURCES:
                major, minor = running.device.compute_capability
                options = preprocessed(building.defines, building.includes)
                click.echo(f"compiling {', '.join(map(str, paths))} ...", err=True)
                program = build.build(paths, Path(folder), f"{major}{minor}", [*options, *building.flags])
            elif len(paths) > 1:
                raise click.UsageError(f"{paths[1]}: a binary stands alone; its arguments stand behind --")
            sys.stdout.flush()
            result = run_program(program, arguments, device=running.device, settings=settings)
        except build.BuildError as error:
            raise click.UsageError(str(error)) from error
    findings = [one for kernel in result.kernels for one in found(kernel)]
    allowed = [one for kernel in result.kernels for one in suppressed(kernel)]
    checked = CheckedKernels([kernel.name for kernel in result.kernels], findings, allowed, str(paths[0]))
    told.tell(checked, lambda: report(result), lambda: summary(result), "the program's kernels", text_to_stderr=True)
    sys.exit(result.status if result.status >= 0 else 128 - result.status)


def say(line: str) -> None:
    click.echo(f"cupyflash: {line}", err=True)
