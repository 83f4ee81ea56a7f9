"""`cupyflash run`: a whole CUDA program on the simulated device, with a report of what the machine found in its kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.commands.profile import DEFINES, INCLUDES
from cupyflash.sim.cli.help import command, completing
from cupyflash.sim.cli.options import DEVICE, SEED, examples
from cupyflash.sim.cli.reporting import findings_report, watched

SOURCES = (".cu", ".cpp", ".cc", ".c", ".cxx")

EXAMPLES = examples(
    "cupyflash run program.cu",
    "cupyflash run main.cu kernels.cu -I include -- --size 1024",
    "cupyflash run ./program",
)


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


@command(epilog=EXAMPLES, context_settings={"ignore_unknown_options": True})
@click.argument("files", nargs=-1, required=True, type=click.UNPROCESSED, shell_complete=completing("file"))
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
def run(**given: Any) -> None:
    """Run a whole CUDA program without a GPU, and check its kernels.

    FILES are the program's sources (CUDA C++, compiled by nvcc), or one binary that loads the CUDA runtime library (nvcc
    -cudart shared -no-compress). Arguments of the program stand behind `--`.

    The program runs as it is; its calls of the CUDA runtime are answered by the simulated device, and its kernels run on the PTX
    machine, which checks every access. Times of events are a model's where it knows the kernels, else the simulation's; the
    report says which. It goes to stderr, and before it an estimate of each launch that takes 10 s or more.

    Exit status 1 if the machine finds a fault in a kernel; else the program's own.
    """
    from cupyflash.sim.cli.run import run as work

    work(**given)
