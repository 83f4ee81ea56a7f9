"""`predict --time` and `--roofline`: how long the forward pass takes by a model, and what binds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.options import Command, NewFile, Request
from cupyflash.sim.cli.show import say, show_table
from cupyflash.sim.times import times


@dataclass(frozen=True)
class Timing:
    """What is asked for: times, and a picture."""

    with_time: bool
    roofline: Path | None

    @property
    def asked(self) -> bool:
        return self.with_time or self.roofline is not None

    def report_of(self, request: Request) -> dict[str, Any] | None:
        """What the model says, for JSON; the picture is drawn on the way. None where nothing is asked.

        Raises ValueError where it has no times.
        """
        if not self.asked:
            return None
        if request.cache is not None or request.backward:
            given = "--decode" if request.cache is not None else "--backward"
            raise click.UsageError(
                f"--time and --roofline cannot go with {given}: times are modelled of the forward of fa2 and fa3"
            )
        found = times(request.schedule(), request.functions.fields)
        if self.roofline is not None:
            from cupyflash.sim.roofline import plot_roofline

            plot_roofline(self.roofline, found, request.title, request.device.name)
            click.echo(f"wrote {self.roofline}", err=True)
        return {
            "modelled": True,
            "busy_seconds": dict(found.busy),
            "kernel_seconds": found.kernel,
            "seconds": found.seconds,
            "bound": found.bound,
            "waves": found.waves,
            "idle": found.idle,
            "tile_flops": found.flops,
            "flops_a_second": found.rate,
            "peak_flops_a_second": found.peak,
            "intensities": found.intensities,
            "ridge": found.ridge,
        }


def options(command: Command) -> Command:
    """--time and --roofline."""
    drawn = "Draw the device's roofs and this problem between them: a .png, .svg or .pdf."
    file = click.option("--roofline", metavar="FILE", type=NewFile((".png", ".svg", ".pdf")), help=drawn)
    return click.option("--time", "with_time", is_flag=True, help="With a model's times of the forward, by part of the device.")(
        file(command)
    )


def show(report: dict[str, Any]) -> None:
    """As text."""
    seconds = report["seconds"]
    say("Times by a model; nothing here is measured. What each part of the device is busy for, were it alone:")
    click.echo()
    rows = [(part, f"{busy * 1e6:,.1f}", f"{busy / seconds:.0%}") for part, busy in report["busy_seconds"].items()]
    show_table(("part", "microseconds", "of the pass"), rows)
    click.echo()
    peak = report["peak_flops_a_second"]
    share = f", {report['flops_a_second'] / peak:.0%} of the peak" if peak else ""
    say(
        f"the pass: {seconds * 1e6:,.1f} microseconds, with what thread blocks wait for, in {report['waves']:.2f} waves, in which "
        f"{report['idle']:.0%} of their places are empty; {report['flops_a_second'] / 1e12:,.1f} TFLOP/s{share}, of whole tiles; "
        f"busiest: {report['bound']}"
    )
