"""Models beside `predict`: the DRAM traffic behind the device's L2, beside the requests of thread blocks (--l2); the time of a
call by the clock, its limits, and benchmark measurements (--time, --roofline)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from cupyflash.basics import Report
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim import l2
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import beside_balance, intensity, machine_balance, say, show_table
from cupyflash.sim.cli.terminal import progress, tracked
from cupyflash.sim.names import NAMES

ORDERS = {
    "rows": "row blocks, heads, batch (the kernels')",
    "batch": "row blocks, batch, heads (flash-attention 2's)",
    "heads": "heads, batch, row blocks",
}


def l2_report(request: ProblemRequest) -> Report:
    """The model's result for JSON. Raises ValueError where it does not follow the schedule."""
    schedule, device, given = request.schedule(), request.device, request.functions.fields
    found = l2.run(schedule, given=given)
    report: Report = {**l2.L2.of(device).as_dict(), **found.as_dict(), "dram_bytes": found.dram.total_bytes}
    if isinstance(schedule, Fa2Schedule) and not isinstance(schedule, Fa3Schedule):
        orders = tracked([order for order in l2.ORDERS if order != "rows"], "following the requests in other orders of the grid")
        others = {order: l2.run(schedule, order=order, given=given).dram for order in orders}
        totals = {order: others.get(order, found.dram) for order in l2.ORDERS}
        report["grid_orders"] = {order: dram.total_bytes for order, dram in totals.items()}
    if request.cache is None:
        flops = request.problem.backward_flops if request.backward else request.problem.flops
        report["intensity_behind_l2"] = intensity(flops, found.dram.total_bytes)
        report["machine_balance"] = machine_balance(device, request.problem.dtype)
    return report


def show_l2(report: Report) -> None:
    """Show a report as text."""
    rates = {name: "-" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}" for name, row in report["tensors"].items()}
    columns = ("read_bytes", "dram_read_bytes", "write_bytes", "dram_write_bytes")
    rows = [(name, *(f"{row[key]:,}" for key in columns), rates[name]) for name, row in report["tensors"].items()]
    say(said_of(report, report["resident_blocks"], report["thread_blocks"]))
    click.echo()
    show_table(("tensor", "asked to read", "from DRAM", "asked to write", "to DRAM", "reads hit"), rows)
    click.echo()
    if report.get("intensity_behind_l2") is not None:
        beside = beside_balance(report["machine_balance"])
        say(f"arithmetic intensity behind the L2: {report['intensity_behind_l2']:.1f} FLOP a byte of DRAM{beside}")
    if "grid_orders" in report:
        least = report["grid_orders"]["rows"]
        click.echo()
        cells = [
            (ORDERS[order], f"{nbytes:,}", f"{nbytes / least:.2f}" if least else "-")
            for order, nbytes in report["grid_orders"].items()
        ]
        show_table(("grid, the fastest axis first", "bytes of DRAM", "ratio"), cells)


def show_executed(report: Report) -> None:
    """Show an execution beside its schedule as text."""
    executed, schedule = report["executed"], report["schedule"]
    say(said_of(report, executed["resident_blocks"], executed["thread_blocks"]))
    click.echo()
    witnesses = {"executed": executed, **({"schedule": schedule} if schedule else {})}
    none = dict.fromkeys(("dram_read_bytes", "dram_write_bytes"), 0)
    rows = []
    for name, row in executed["tensors"].items():
        dram = [f"{one['tensors'].get(name, none)[side]:,}" for side in none for one in witnesses.values()]
        n = len(witnesses)
        hits = "-" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}"
        rows.append((name, f"{row['read_bytes']:,}", *dram[:n], f"{row['write_bytes']:,}", *dram[n:], hits))
    titles = ("", "asked to", *("from DRAM" for _ in witnesses), "asked to", *("to DRAM" for _ in witnesses), "reads")
    show_table(("tensor", "read", *witnesses, "write", *witnesses, "hit"), rows, titles=titles)
    if report["not_followed"]:
        click.echo()
        say(report["not_followed"])


def said_of(cache: Report, slots: Sequence[int], grids: Sequence[int]) -> str:
    """The model's assumptions: the cache, and how many of each kernel's thread blocks run at a time."""
    return (
        f"Behind the L2, by a model: {cache['l2_bytes']:,} bytes, {cache['ways']} ways, lines of {cache['line_bytes']} bytes in "
        f"sectors of {cache['sector_bytes']}, least recently used; thread blocks in launch order and in lockstep, "
        + ", then ".join(f"{running:,} at a time of {number:,}" for running, number in zip(slots, grids, strict=True))
    )


# -- time --------------------------------------------------------------------------------------------------------------------

MOST_LINES = 8
"""Lines of the longest launch that are shown."""
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

    def report_of(self, request: ProblemRequest) -> Report | None:
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


def show_time(report: Report) -> None:
    """Show a report as text."""
    from cupyflash.sim.cli.time import show_lines
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
        click.echo()
        show_lines(report["lines"][:MOST_LINES])
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


def launch_row(launch: Report, seconds: float) -> tuple[str, ...]:
    own = launch["seconds"]
    counts = str(launch["residents"]), f"{launch['rounds']:,.1f}"
    return launch["kernel"], f"{own * 1e6:,.1f}", f"{own / seconds:.0%}", launch["binds"], *counts, launch["sampled"]


def show_models(report: Report) -> None:
    """Show the models of the L2 and of times, if a report has them."""
    for name, show_model in (("l2", show_l2), ("time", show_time)):
        if name in report:
            click.echo()
            show_model(report[name])
