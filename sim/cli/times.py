"""`predict --time` and `--roofline`: the time of a pass by a model, its limit, and benchmark measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.options import Command, NewFile, ProblemRequest
from cupyflash.sim.cli.show import say, show_table
from cupyflash.sim.clock.measured import RESULTS, measured
from cupyflash.sim.clock.times import times


@dataclass(frozen=True)
class Timing:
    """The options of times and of a picture; `results` is the folder with what was measured, by default a checkout's."""

    with_time: bool
    roofline: Path | None
    results: Path | None

    @property
    def asked(self) -> bool:
        return self.with_time or self.roofline is not None

    def report_of(self, request: ProblemRequest) -> dict[str, Any] | None:
        """The modelled times for JSON; the picture is drawn on the way. None where nothing is asked.

        Raises ValueError if the model has no times for the request, click.UsageError for --results without --time.
        """
        if not self.asked:
            if self.results is not None:
                raise click.UsageError("--results is for --time and --roofline")
            return None
        schedule = request.decode_schedule() if request.cache is not None else request.schedule()
        found, beside = times(schedule, request.functions.fields), measured(schedule, self.results or RESULTS)
        if self.roofline is not None:
            from cupyflash.sim.clock.roofline import plot_roofline

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
            "balance": found.balance,
            "tile_flops": found.flops,
            "flops_a_second": found.rate,
            "peak_flops_a_second": found.peak,
            "intensities": found.intensities,
            "ridge": found.ridge,
            "measured": [asdict(each) | {"model_error": found.seconds / each.seconds - 1} for each in beside],
        }


def options(command: Command) -> Command:
    """--time, --roofline and --results."""
    drawn = "Draw the device's roofs and this problem below them: a .png, .svg or .pdf."
    file = click.option("--roofline", metavar="FILE", type=NewFile((".png", ".svg", ".pdf")), help=drawn)
    told = "Model the times, by part of the device, beside measured ones."
    timed = click.option("--time", "with_time", is_flag=True, help=told)
    folder = click.option(
        "--results",
        metavar="FOLDER",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="The folder of benchmark results that --time shows beside the model.  [default: benchmarks/results of a checkout]",
    )
    return timed(file(folder(command)))


def show(report: dict[str, Any]) -> None:
    """Show a report as text."""
    seconds = report["seconds"]
    say("Times by a model. What each part of the device is busy for, were it alone:")
    click.echo()
    rows = [(part, f"{busy * 1e6:,.1f}", f"{busy / seconds:.0%}") for part, busy in report["busy_seconds"].items()]
    show_table(("part", "microseconds", "of the pass"), rows)
    click.echo()
    peak = report["peak_flops_a_second"]
    share = f", {report['flops_a_second'] / peak:.0%} of the peak" if peak else ""
    say(
        f"the pass: {seconds * 1e6:,.1f} microseconds, with what thread blocks wait for, in {report['waves']:.2f} waves, in which "
        f"{report['idle']:.0%} of their places are empty (the busiest has {report['balance']:.2f} times the mean); "
        f"{report['flops_a_second'] / 1e12:,.1f} TFLOP/s{share}, of whole tiles; busiest: {report['bound']}"
    )
    for each in report["measured"]:
        click.echo()
        waited = "; the device may have waited for the host" if each["exposed"] else ""
        say(
            f"measured: {each['seconds'] * 1e6:,.1f} microseconds (quartiles {each['spread'] * 1e6:,.1f} apart{waited}) by "
            f"{each['implementation']} on {each['date']}, commit {each['commit'][:12]} ({each['file']}); the model's are "
            f"{each['model_error']:+.0%} from that"
        )
    if not report["measured"]:
        say("nothing was measured of this problem on this device, as far as benchmark results at hand tell")
