"""The command line. Data goes to stdout, progress to stderr; wrong input is one line."""

from __future__ import annotations

import click

from cupyflash.sim.cli.demo import demo
from cupyflash.sim.cli.devices import devices
from cupyflash.sim.cli.explain import explain
from cupyflash.sim.cli.group import EXIT_STATUS, CommandLine
from cupyflash.sim.cli.inspect import inspect
from cupyflash.sim.cli.nvcc import nvcc
from cupyflash.sim.cli.options import examples
from cupyflash.sim.cli.paper import paper
from cupyflash.sim.cli.predict import predict
from cupyflash.sim.cli.profile import profile
from cupyflash.sim.cli.run import run
from cupyflash.sim.cli.sweep import sweep
from cupyflash.sim.cli.time import time
from cupyflash.sim.cli.trace import trace
from cupyflash.sim.cli.verify import verify
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


for command in (demo, predict, verify, trace, sweep, paper, explain, inspect, profile, run, nvcc, time, devices):
    main.add_command(command)
