"""`cupyflash sweep`: traffic along one axis, as a table, CSV, JSON or a picture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import click

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.distributed.layout import MOST_RANKS
from cupyflash.request.problem import Problem
from cupyflash.sim.cli import decoding, over_ranks
from cupyflash.sim.cli.options import (
    first_given,
    gathered,
    kind_of,
    whole_number,
)
from cupyflash.sim.cli.over_ranks import Split, refuse_without_ranks
from cupyflash.sim.cli.request import ProblemRequest, requested
from cupyflash.sim.cli.show import Column, Points, describe, flat, print_or_write, taken
from cupyflash.sim.cli.terminal import tracked
from cupyflash.sim.names import NAMES
from cupyflash.sim.pictures import sweep as sweeping
from cupyflash.sim.pictures.sweep import Axis, Point, default_range, spaced
from cupyflash.sim.pictures.sweep_decode import DEFAULT_RANGE as CACHES
from cupyflash.words import plural

HEADINGS = {"sram": "SRAM bytes", "seqlen": "N", "head-dim": "d", "block-cols": "paper's Bc"}
COLUMNS = {"sram": "sram_bytes", "seqlen": "seqlen", "head-dim": "head_dim", "block-cols": "paper_block_cols"}
COUNTED = {
    "sram_elements": Column("M"),
    "block_rows": Column("Br"),
    "block_cols": Column("Bc"),
    "read_bytes": Column("bytes read"),
    "write_bytes": Column("bytes written"),
    "total_bytes": Column("bytes"),
    "standard_ideal_bytes": Column("standard"),
    "ratio_to_standard": Column("ratio", ".3f"),
    "theorem2_elements": Column("N^2 d^2 / M", ",.0f"),
}
BEHIND_L2 = {"dram_bytes": Column("DRAM bytes"), "l2_hit_rate": Column("reads hit", ".1%")}

Over = Axis | Literal["cache", "ranks"]
# The options that say what an axis varies.
SETS = {
    "sram": ("sram",),
    "seqlen": ("seqlen",),
    "head-dim": ("head_dim",),
    "block-cols": ("sram",),
    "cache": ("seqlen_k", "cache_seqlens"),
    "ranks": (),
}
LEGENDS = (
    "M and N^2 d^2 / M in elements; standard: the bytes of Algorithm 0 if it reads each input of each step once; ratio: "
    "bytes / standard",
    "DRAM bytes and reads hit: behind the L2 and in it, by a model",
)
LONGEST = 12  # digits of a value: no axis has longer ones


@dataclass(frozen=True)
class AxisSpan:
    """The asked values of an axis, in the words of the command line; None where it says nothing."""

    first: str | None
    last: str | None
    points: int | None
    log: bool | None

    def values(self, problem: Problem, over: Over) -> list[int]:
        """The values on a problem's axis. UsageError for what are none."""
        own = {"cache": CACHES, "ranks": over_ranks.DEFAULT_RANGE}
        start, end, count, in_log = own[over] if over == "cache" or over == "ranks" else default_range(problem, over)
        return spaced(
            start if self.first is None else parse_value(over, "--from", self.first),
            end if self.last is None else parse_value(over, "--to", self.last),
            self.points or count,
            in_log if self.log is None else self.log,
        )


@dataclass(frozen=True)
class SweepReport:
    """Options of the output, and of the L2."""

    form: str | None
    as_json: bool
    output: Path | None
    plot: Path | None
    with_l2: bool

    @property
    def kind(self) -> str:
        """table, csv or json. UsageError for two at once."""
        return kind_of(self.form, self.as_json) or "table"


@requested
@gathered(span=AxisSpan, split=Split, report=SweepReport)
def sweep(request: ProblemRequest, over: Over, span: AxisSpan, split: Split, report: SweepReport) -> None:
    """Count HBM bytes along one axis."""
    kind = report.kind
    refuse_swept(request, over)
    if report.with_l2 and (request.cache is not None or over == "ranks"):
        other = "--over ranks, of which it has no model" if over == "ranks" else "--decode in a sweep: predict --decode --l2 has it"
        raise click.UsageError(f"--l2 cannot go with {other}")
    if over != "ranks":
        refuse_without_ranks("--over ranks")
    if over == "ranks":
        points = over_ranks.points_of(request, span.values(request.problem, over), split, report.plot)
    elif over == "cache":
        points = decoding.points_of(request, span.values(request.problem, over), report.plot)
    elif request.cache is not None:
        raise click.UsageError(f"--decode is swept over the keys of its cache, --over cache: got --over {over}")
    else:
        points = of_axis(request, over, span, report)
    if report.plot is not None:
        click.echo(f"wrote {report.plot}", err=True)
    if kind == "table" and report.output is None:
        points.show()
    else:
        print_or_write(points.printed(kind), report.output)


def of_axis(request: ProblemRequest, over: Axis, span: AxisSpan, report: SweepReport) -> Points:
    """The points along one of the theorem's axes; a picture is drawn on the way."""
    request = replace(request, problem=posed(request.problem, over))
    values = span.values(request.problem, over)
    counting = tracked(values, "counting the points")
    asked = request.problem, request.device, over, counting, request.algorithm, request.tiling
    found = sweeping.sweep(*asked, lse=request.lse, with_l2=report.with_l2)
    if not found.points:
        raise click.UsageError(found.skipped[0][1])
    if found.skipped:
        skipped = found.skipped
        points_skipped = f"{len(skipped)} of {plural(len(values), 'point')}"
        click.echo(f"skipped {points_skipped}, the first at {skipped[0][0]:,}: {skipped[0][1]}", err=True)
    if report.plot is not None:
        from cupyflash.sim.pictures.plot import plot_sweep

        plot_sweep(report.plot, request.problem, request.device, over, values, with_l2=report.with_l2)
    swept, device = swept_fields(request.problem, over), request.device
    head = {
        "over": over,
        "problem": flat(request.problem) | dict.fromkeys(swept),
        "algorithm": request.algorithm,
        "device": {"name": device.name, "sram_bytes": device.sram_per_block},
        "tiling": request.tiling or "fitted",
    }
    M = "" if over in ("sram", "block-cols") else f", M = {device.sram_per_block:,} bytes"
    tiling = "{} x {}".format(*request.tiling) if isinstance(request.tiling, tuple) else request.tiling or "fitted"
    title = f"{NAMES[request.algorithm]}, {tiling} tiling: {describe(request.problem, swept)}; {device.name}{M}"
    columns = {COLUMNS[over]: Column(HEADINGS[over]), **COUNTED, **(BEHIND_L2 if report.with_l2 else {})}
    left_out = {"skipped": [{"value": value, "reason": reason} for value, reason in found.skipped]}
    rows = [{COLUMNS[over]: point.value} | fields(point) for point in found.points]
    return Points(head, rows, title, columns, LEGENDS[: 1 + report.with_l2], left_out, folded=True)


def refuse_swept(request: ProblemRequest, over: Over) -> None:
    """UsageError for an option that says what the axis varies."""
    if over == "block-cols" and isinstance(request.tiling, tuple):
        raise click.UsageError("--over block-cols chooses the block sizes itself: --tiling can be paper or fitted")
    if option := first_given(SETS[over]):
        raise click.UsageError(f"--over {over} varies what {option} fixes: give --from and --to, without {option}")


def posed(problem: Problem, over: Axis) -> Problem:
    """The problem, in which a size follows the swept one only if it was not given itself.

    A sweep treats equal sizes as one: a given --seqlen-k 4096 must not follow because --seqlen's default is 4096,
    too.
    """
    if over == "seqlen" and first_given(("seqlen_k",)):
        return replace(problem, seqlen_q=problem.seqlen_k - 1 if problem.seqlen_k else 1)
    if over == "head-dim" and first_given(("head_dim_v",)):
        return replace(problem, head_dim=problem.head_dim_v - 1 if problem.head_dim_v > 1 else 2)
    return problem


def swept_fields(problem: Problem, over: Axis) -> tuple[str, ...]:
    """The problem's fields that have another value at each point."""
    if over == "seqlen":
        return ("seqlen_q", "seqlen_k") if problem.seqlen_q == problem.seqlen_k else ("seqlen_q",)
    if over == "head-dim":
        return ("head_dim", "head_dim_v") if problem.head_dim == problem.head_dim_v else ("head_dim",)
    return ()


def parse_value(over: Over, option: str, value: str) -> int:
    """A value on an axis: a size for sram, a whole number of ranks from 1 on, else a whole number."""
    if over == "sram":
        try:
            return Device.named("T4", sram=value).sram_per_block
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint=option) from error
    number = whole_number(value)
    if number is None or len(value) > LONGEST:
        raise click.BadParameter(f"a whole number of at most {LONGEST} digits, got {value!r}", param_hint=option)
    if over == "ranks" and not 1 <= number <= MOST_RANKS:
        raise click.BadParameter(f"ranks from 1 to {MOST_RANKS:,}, got {value}", param_hint=option)
    return number


def fields(point: Point) -> Report:
    return {
        **taken(point, "sram_elements", "block_rows", "block_cols", "read_bytes", "write_bytes", "total_bytes"),
        "standard_ideal_bytes": point.ideal_bytes,
        "ratio_to_standard": point.ratio,
        "theorem2_elements": point.theorem2_elements,
        **({} if point.behind is None else {"dram_bytes": point.behind.dram.total_bytes, "l2_hit_rate": point.behind.hit_rate}),
    }
