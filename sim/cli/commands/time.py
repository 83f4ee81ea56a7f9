"""`cupyflash time`: how long a kernel takes, and at which lines, by the clock that executes its machine code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.commands.profile import ARGS, BLOCK, DEFINES, FILE, GRID, INCLUDES, KERNEL, SHARED
from cupyflash.sim.cli.help import command
from cupyflash.sim.cli.options import AS_JSON, DEVICE, examples

EXAMPLES = examples(
    "cupyflash time k.cu --grid 4 --block 128 --args '[{\"shape\": [512]}, 512]'",
    "cupyflash time k.cu --grid 8 --block 32 --args a.json --json",
    "cupyflash time k.cu --grid 8 --block 32 --args a.json --against before.json",
    "cupyflash time k.cubin --grid 8 --block 32 --args a.json --lines 5",
)


@command(epilog=EXAMPLES)
@FILE
@KERNEL
@GRID
@BLOCK
@ARGS
@DEFINES
@INCLUDES
@SHARED
@click.option(
    "--mhz", type=click.FloatRange(0, min_open=True), help="The most that the clock rate is; by default the device's boost clock."
)
@click.option("--cold", is_flag=True, help="The L2 was emptied before; else it has the arrays that fit into it.")
@DEVICE
@click.option("--lines", default=10, show_default=True, type=click.IntRange(1), help="The number of lines in a table.")
@click.option(
    "--against",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="RUN.json",
    help="An earlier run's --json: which lines cost more or less than there.",
)
@AS_JSON
def time(**given: Any) -> None:
    """Time a kernel on a device that is not there.

    FILE is CUDA C, PTX (.ptx, which needs ptxas) or machine code (.cubin). The machine code is executed for addresses and branches,
    and one multiprocessor is run clock by clock over it; a long loop is sampled. The result is a model's, never a measurement: the
    error that is known of kernels of its class stands beside it (docs/clock.md). Floating-point numbers are not computed: a branch
    on one is not taken. The lines of the source are those at which warps spend their time, with the reasons for which they wait.
    Needs NVIDIA's disassemblers (the extra `clock`).

    Exit status 2, with one line, for wrong input or a tool that is missing.
    """
    from cupyflash.sim.cli.time import time as work

    work(**given)
