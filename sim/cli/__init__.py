"""The command line. Data goes to stdout, progress to stderr; wrong input is one line."""

from __future__ import annotations

from typing import Any

import click

from cupyflash import __version__
from cupyflash.sim.cli.demo import demo
from cupyflash.sim.cli.devices import devices
from cupyflash.sim.cli.explain import explain
from cupyflash.sim.cli.inspect import inspect
from cupyflash.sim.cli.predict import predict
from cupyflash.sim.cli.profile import profile
from cupyflash.sim.cli.sweep import sweep
from cupyflash.sim.cli.verify import verify


class Friendly(click.Group):
    """Shows what a wrong value or a missing package is told as one line, not as a traceback."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.UsageError as error:
            # The error alone in one line, without the usage above it.
            raise click.UsageError(" ".join(error.format_message().split())) from error
        except (ValueError, TypeError, ImportError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Friendly, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Exact attention, and the HBM traffic that it costs: predicted, replayed, executed."""


for command in (demo, predict, verify, profile, sweep, explain, inspect, devices):
    main.add_command(command)
