"""The command line. Data goes to stdout, progress to stderr; wrong input is one line.

A command is declared in `commands`, which imports neither NumPy nor a kernel: help and completion are instant. Its work is in the
module of its name here.
"""

from __future__ import annotations

import click

from cupyflash.sim.cli.commands import COMMANDS
from cupyflash.sim.cli.group import EXIT_STATUS, CommandLine
from cupyflash.sim.cli.options import examples
from cupyflash.version import __version__

EXAMPLES = examples(
    "cupyflash demo",
    "cupyflash predict --seqlen 4096 --head-dim 64 --heads 16 --causal",
    "cupyflash sweep --over sram",
)


@click.group(
    "cupyflash",
    cls=CommandLine,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"{EXAMPLES}\n\n{EXIT_STATUS}",
)
@click.version_option(__version__)
def main() -> None:
    """Exact attention, and the HBM traffic that it costs.

    Counts are predicted by closed forms, replayed from the schedule, and executed: the kernels' own PTX on the simulated
    device. No GPU is needed. `cupyflash COMMAND --help` has each command's options and examples.
    """


for command in COMMANDS:
    main.add_command(command)
