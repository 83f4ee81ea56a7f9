"""`predict --time` and `--roofline`: the time of a call by the clock, its limits, and benchmark measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import say, show_table
from cupyflash.sim.cli.terminal import progress
from cupyflash.sim.names import NAMES

CLOCK_SECONDS = 15.0
"""Seconds that the clock takes for a call, with its compilation: 13 to 17 s of one core (`/usr/bin/time cupyflash predict --time`,
N 4,096, d 64 and 128, forward and backward, on an A100 and an H100, nothing compiled before)."""


@dataclass(frozen=True)
class Timing:
    """The options of a time and of a picture; `results` is the folder with what was measured, by default a checkout's."""

    with_time: bool
    roofline: Path | None
    results: Path | None

    @property
    def asked(self) -> bool:
        return self.with_time or self.roofline is not None

    def report_of(self, request: ProblemRequest) -> dict[str, Any] | None:
        """The predicted time for JSON; the picture is drawn on the way. None where nothing is asked.

        Raises ValueError if the request has no time, click.UsageError for --results without --time.
        """
        if not self.asked:
            if self.results is not None:
                raise click.UsageError("--results is for --time and --roofline")
            return None
        from cupyflash.sim.clock.measured import RESULTS, measured
        from cupyflash.sim.clock.predicted import predicted, require_work
        from cupyflash.sim.clock.roofline import Roofline, plot_roofline
        from cupyflash.sim.clock.sass import disassembler

        schedule = request.schedule()
        beside = measured(schedule, self.results or RESULTS)
        require_work(schedule)
        with progress(CLOCK_SECONDS if disassembler() else None) as steps:
            steps.begin(f"executing the machine code of {NAMES[schedule.algorithm]}")
            found = predicted(schedule, request.functions.given)
        peak = request.device.tensor_peak.get(request.problem.dtype)
        report = {**found.to_dict(), "peak_flops_a_second": peak}
        if self.roofline is not None:
            roofline = Roofline.of(schedule, found, request.functions.fields)
            plot_roofline(self.roofline, roofline, request.title, request.device.name)
            click.echo(f"wrote {self.roofline}", err=True)
            report |= {"intensities": roofline.intensities, "ridge": roofline.ridge}
        return report | {"measured": [asdict(each) | {"model_error": found.seconds / each.seconds - 1} for each in beside]}


def show(report: dict[str, Any]) -> None:
    """Show a report as text."""
    from cupyflash.sim.clock.known import KnownError

    seconds, peak, binds = report["seconds"], report["peak_flops_a_second"], report["binds"]
    share = f", {report['flops_a_second'] / peak:.0%} of the peak" if peak else ""
    by = f"by the clock; {binds} binds" if report["launches"] else "by the planner's formulas, which know of no mask and no length"
    say(f"predicted: {seconds * 1e6:,.1f} us, {report['flops_a_second'] / 1e12:,.1f} TFLOP/s{share}, {by}")
    if report["why"]:
        say(f"not by the clock: {report['why']}")
    for known in (KnownError(**each) for each in report["known_errors"]):
        say(f"Known error: {known}.")
    if report["launches"]:
        click.echo()
        rows = [launch_row(each, seconds) for each in report["launches"]]
        show_table(("launch", "us", "share", "binds", "blocks an SM", "rounds", "run"), rows, left=(0, 3, 6))
        click.echo()
        limits = [(name, f"{min(each, 1):.0%}") for name, each in report["busy"].items()]
        show_table(("limit", "share of the time"), limits)
    for each in report["measured"]:
        click.echo()
        waited = "; the device may have waited for the host" if each["exposed"] else ""
        say(
            f"measured: {each['seconds'] * 1e6:,.1f} us (quartiles {each['spread'] * 1e6:,.1f} apart{waited}) by "
            f"{each['implementation']} on {each['date']}, commit {each['commit'][:12]} ({each['file']}); predicted is "
            f"{each['model_error']:+.0%} from that"
        )
    if not report["measured"]:
        say("nothing was measured of this problem on this device, as far as benchmark results at hand tell")


def launch_row(launch: dict[str, Any], seconds: float) -> tuple[str, ...]:
    own = launch["seconds"]
    counts = str(launch["residents"]), f"{launch['rounds']:,.1f}"
    return launch["kernel"], f"{own * 1e6:,.1f}", f"{own / seconds:.0%}", launch["binds"], *counts, launch["sampled"]
