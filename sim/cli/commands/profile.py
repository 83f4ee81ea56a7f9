"""`cupyflash profile`: any CUDA kernel on the PTX machine, with the report that a profiler's first page would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.help import command, completing
from cupyflash.sim.cli.options import DEVICE, SEED, NewFile, examples, from_0, timeline_block
from cupyflash.sim.cli.reporting import findings_report, watched

EXAMPLES = examples(
    "cupyflash profile k.cu --grid 4 --block 128 --args '[{\"shape\": [512]}, 512]'",
    "cupyflash profile k.cu --grid 8,8 --block 32 --args spec.json --arch sm_90",
    "cupyflash profile k.ptx --kernel k --grid 1 --block 32 --args spec.json",
    "cupyflash profile k.cu --grid 8 --block 32 --args spec.json --html out.html",
    "cupyflash profile k.cu --grid 8 --block 32 --args spec.json --l2 --device T4",
)


def extent(context: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """X, X,Y or X,Y,Z."""
    if value is None:
        return None
    parts = value.split(",")
    if not 1 <= len(parts) <= 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not one to three positive whole numbers; 4 or 16,8 would be", context, param)
    return tuple(int(part) for part in parts)


def targets(context: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """NAME=FILE.npy, each."""
    out = {}
    for value in values:
        tensor, _, file = value.partition("=")
        if not tensor or Path(file).suffix != ".npy":
            raise click.BadParameter(f"{value!r} is not NAME=FILE.npy", context, param)
        out[tensor] = NewFile((".npy",)).convert(file, param, context)
    return out


FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
KERNEL = click.option(
    "--kernel", metavar="NAME", help="The kernel's name, as in the source or in the PTX; not needed if there is only one."
)
GRID = click.option("--grid", callback=extent, metavar="X[,Y,Z]", help="Blocks.  [required]")
BLOCK = click.option("--block", callback=extent, metavar="X[,Y,Z]", help="Threads of a block.  [required]")
ARGS = click.option(
    "--args",
    "spec",
    metavar="SPEC.json",
    shell_complete=completing("file"),
    help="The arguments: a JSON file, or JSON itself (docs/profile.md). Without it a template to fill in is printed.",
)
DEFINES = click.option("-D", "--define", "defines", multiple=True, metavar="NAME[=VALUE]", help="A macro; may be repeated.")
INCLUDES = click.option(
    "-I",
    "--include",
    "includes",
    multiple=True,
    type=click.Path(path_type=Path),
    shell_complete=completing("dir"),
    help="A folder of headers.",
)
SHARED = from_0("--shared-bytes", "Dynamic shared memory of a block.")


@command(epilog=EXAMPLES)
@FILE
@KERNEL
@GRID
@BLOCK
@click.option("--cluster", callback=extent, metavar="X[,Y,Z]", help="Blocks of a cluster.")
@ARGS
@click.option("--arch", default="compute_80", show_default=True, help="The architecture to compile for: compute_90, sm_90 or 9.0.")
@DEFINES
@INCLUDES
@SHARED
@SEED
@click.option("--max-instructions", type=click.IntRange(1), help="End a launch that has run so many, of all warps together.")
@click.option(
    "--stall-seconds",
    type=click.FloatRange(0, min_open=True),
    help="End a launch whose loops come no nearer to their ends for this many seconds of processor time (20 by default).",
)
@findings_report
@click.option("--top", default=10, show_default=True, type=click.IntRange(1), help="The number of lines in a table.")
@click.option(
    "--save",
    "saves",
    multiple=True,
    callback=targets,
    metavar="NAME=FILE.npy",
    help="Write an array to a file after the run; may be repeated.",
)
@click.option("--l2", is_flag=True, help="Model the L2: the bytes that reach DRAM, from the exact lines that the kernel requests.")
@DEVICE
@click.option("--html", metavar="FILE", type=NewFile((".html", ".htm")), help="Write it as one page, which needs no network.")
@timeline_block()
@watched(lambda given: [given["file"], *given["includes"], *[Path(given["spec"])] * str(given["spec"]).endswith(".json")])
def profile(**given: Any) -> None:
    """Execute and profile any kernel.

    FILE is CUDA C, or PTX if its name ends in .ptx; its kernel runs on the PTX machine.

    The report has bytes by tensor, coalescing, bank conflicts, instruction mix, divergence, tensor-core work, findings, and the
    most expensive lines of the source. All counts are simulated: of PTX instructions, not of machine code. No GPU is needed. --html
    writes the same as a page, with a heat map of the source and the banks of shared memory. --l2 shows the bytes that reach DRAM on
    --device.

    --format writes the findings as other tools read them (lines as a compiler's, GitHub's annotations, JUnit, SARIF).

    Exit status 1 if the machine finds a fault in the kernel, an error or a warning (or as --fail-on says), after the report; 2,
    with one line, for wrong input.
    """
    from cupyflash.sim.cli.profile import profile as work

    work(**given)
