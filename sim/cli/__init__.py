"""The command line. Data goes to stdout, progress to stderr; wrong input is one line.

A command is declared in `commands`, which imports neither NumPy nor a kernel: help and completion are instant. Its work is in the
module of its name here.
"""

from __future__ import annotations

import click

from cupyflash.sim.cli.commands.demo import demo
from cupyflash.sim.cli.commands.devices import devices
from cupyflash.sim.cli.commands.explain import explain
from cupyflash.sim.cli.commands.inspect import inspect
from cupyflash.sim.cli.commands.learn import learn
from cupyflash.sim.cli.commands.nvcc import nvcc
from cupyflash.sim.cli.commands.paper import paper
from cupyflash.sim.cli.commands.predict import predict
from cupyflash.sim.cli.commands.profile import profile
from cupyflash.sim.cli.commands.run import run
from cupyflash.sim.cli.commands.sweep import sweep
from cupyflash.sim.cli.commands.time import time
from cupyflash.sim.cli.commands.trace import trace
from cupyflash.sim.cli.commands.verify import verify
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


for command in (demo, learn, predict, verify, trace, sweep, paper, explain, inspect, profile, run, nvcc, time, devices):
    main.add_command(command)
