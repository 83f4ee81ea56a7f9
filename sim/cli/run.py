"""`cupyflash run`: a whole CUDA program on the simulated device, with a report of what the machine found in its kernels."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click

from cupyflash.device import Device
from cupyflash.sim.cli.options import DEVICE, SEED, examples, gathered
from cupyflash.sim.cli.profile import DEFINES, INCLUDES, preprocessed
from cupyflash.sim.cli.reporting import FindingsReport, findings_report, watched
from cupyflash.sim.formats import CheckedKernels
from cupyflash.sim.ptx import Suppression

EXAMPLES = examples(
    "cupyflash run program.cu",
    "cupyflash run main.cu kernels.cu -I include -- --size 1024",
    "cupyflash run ./program",
)
SOURCES = (".cu", ".cpp", ".cc", ".c", ".cxx")


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


@click.command(epilog=EXAMPLES, context_settings={"ignore_unknown_options": True})
@click.argument("files", nargs=-1, required=True, type=click.UNPROCESSED)
@DEFINES
@INCLUDES
@click.option("--flag", "flags", multiple=True, metavar="FLAG", help="Another flag for nvcc; may be repeated.")
@DEVICE
@SEED
@click.option(
    "--max-seconds",
    type=click.FloatRange(0, min_open=True),
    help="End the program when its kernels have taken this processor time.",
)
@click.option(
    "--clock/--no-clock",
    default=True,
    show_default=True,
    help="Events tell the time that the clock predicts for the device, where it knows the kernels (docs/clock.md).",
)
@findings_report
@watched(lambda given: [*divided(given["files"])[0], *given["includes"]])
@gathered(building=Building, running=Running, told=FindingsReport)
def run(files: tuple[str, ...], building: Building, running: Running, told: FindingsReport) -> None:
    """Run a whole CUDA program without a GPU, and check its kernels.

    FILES are the program's sources (CUDA C++, compiled by nvcc), or one binary that loads the CUDA runtime library (nvcc
    -cudart shared -no-compress). Arguments of the program stand behind `--`.

    The program runs as it is; its calls of the CUDA runtime are answered by the simulated device, and its kernels run on the PTX
    machine, which checks every access. Times of events are a model's where it knows the kernels, else the simulation's; the
    report says which. It goes to stderr, and before it an estimate of each launch that takes 10 s or more.

    Exit status 1 if the machine finds a fault in a kernel; else the program's own.
    """
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


def divided(files: tuple[str, ...]) -> tuple[list[Path], list[str]]:
    """Returns the sources or the binary, and the program's arguments."""
    paths = [Path(files[0])]
    rest = list(files[1:])
    while rest and paths[0].suffix in SOURCES and Path(rest[0]).suffix in SOURCES:
        paths.append(Path(rest.pop(0)))
    for path in paths:
        if not path.is_file():
            raise click.UsageError(f"{path}: there is no such file")
    return paths, rest
