"""`cupyflash sweep`: traffic along one axis, as a table, CSV, JSON or a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from cupyflash.device import Device
from cupyflash.sim import sweep as sweeping
from cupyflash.sim.cli.options import Request, problem_options
from cupyflash.sim.cli.show import NAMES, describe
from cupyflash.sim.sweep import AXES, Axis, Point, Sweep, default_range, spaced

HEADINGS = {"sram": "SRAM bytes", "seqlen": "N", "head-dim": "d", "block-cols": "paper's Bc"}
COLUMNS = {"sram": "sram_bytes", "seqlen": "seqlen", "head-dim": "head_dim", "block-cols": "paper_block_cols"}


@click.command()
@click.option("--over", required=True, type=click.Choice(AXES), help="What to vary; block-cols varies Bc, and with it M = 4 d Bc.")
@click.option("--from", "first", metavar="VALUE", help="Where to begin; sram takes sizes such as 8KB.")
@click.option("--to", "last", metavar="VALUE", help="Where to end.")
@click.option("--points", type=click.IntRange(1), help="How many values at most.")
@click.option("--log/--linear", default=None, help="Spaced evenly in the logarithm, or evenly.  [default: log, head-dim: linear]")
@problem_options(seqlen=4096, head_dim=64, tiling="paper")
@click.option("--format", "form", default="table", show_default=True, type=click.Choice(["table", "csv", "json"]))
@click.option("--json", "form", flag_value="json", help="As --format json.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write there instead of to stdout.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw a picture too, log-log: a .png, .svg or .pdf.")
def sweep(
    request: Request,
    over: Axis,
    first: str | None,
    last: str | None,
    points: int | None,
    log: bool | None,
    form: str,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Count HBM bytes along one axis, by the closed forms, beside standard attention and N^2 d^2 / M.

    The tiling is the paper's own unless --tiling says otherwise: the theorem is about that one.
    """
    if over == "block-cols" and isinstance(request.tiling, tuple):
        raise click.UsageError("--over block-cols chooses the block sizes itself: --tiling can be paper or fitted")
    start, end, count, in_log = default_range(request.problem, over)
    values = spaced(
        start if first is None else parse_value(over, "--from", first),
        end if last is None else parse_value(over, "--to", last),
        points or count,
        in_log if log is None else log,
    )
    found = sweeping.sweep(request.problem, request.device, over, values, request.algorithm, request.tiling, lse=request.lse)
    if not found.points:
        raise click.ClickException(found.skipped[0][1])
    if found.skipped:
        skipped = found.skipped
        click.echo(f"skipped {len(skipped)} of {len(values)} points, the first at {skipped[0][0]:,}: {skipped[0][1]}", err=True)
    if plot is not None:
        from cupyflash.sim.plot import plot_sweep

        plot_sweep(plot, request.problem, request.device, over, values)
        click.echo(f"wrote {plot}", err=True)
    text = {"table": table, "csv": comma_separated, "json": as_json}[form](request, over, found)
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text)
        click.echo(f"wrote {output}", err=True)


def parse_value(over: Axis, option: str, text: str) -> int:
    """A value on an axis: a size for sram, else a whole number."""
    if over == "sram":
        return Device.named("T4", sram=text).sram_per_block
    if not text.isdecimal():
        raise click.BadParameter(f"a whole number, got {text!r}", param_hint=option)
    return int(text)


def rows(over: Axis, found: Sweep) -> list[dict[str, Any]]:
    """The points with names for their columns."""
    return [{COLUMNS[over]: point.value} | fields(point) for point in found.points]


def fields(point: Point) -> dict[str, Any]:
    return {
        "sram_elements": point.sram_elements,
        "block_rows": point.block_rows,
        "block_cols": point.block_cols,
        "read_bytes": point.read_bytes,
        "write_bytes": point.write_bytes,
        "total_bytes": point.total_bytes,
        "standard_ideal_bytes": point.ideal_bytes,
        "ratio_to_standard": point.ratio,
        "theorem2_elements": point.theorem2_elements,
    }


def as_json(request: Request, over: Axis, found: Sweep) -> str:
    report = {
        "over": over,
        "problem": asdict(request.problem),
        "algorithm": request.algorithm,
        "device": {"name": request.device.name, "sram_bytes": request.device.sram_per_block},
        "tiling": request.tiling or "fitted",
        "points": rows(over, found),
        "skipped": [{"value": value, "reason": reason} for value, reason in found.skipped],
    }
    return json.dumps(report, indent=2) + "\n"


def comma_separated(request: Request, over: Axis, found: Sweep) -> str:
    text = io.StringIO()
    content = rows(over, found)
    writer = csv.DictWriter(text, list(content[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(content)
    return text.getvalue()


def table(request: Request, over: Axis, found: Sweep) -> str:
    """Text with a heading, aligned."""
    M = "" if over in ("sram", "block-cols") else f", M = {request.device.sram_per_block:,} bytes"
    tiling = "BR x BC as asked" if isinstance(request.tiling, tuple) else f"{request.tiling or 'fitted'} tiling"
    lines = [f"{NAMES[request.algorithm]}, {tiling}: {describe(request.problem)}; {request.device.name}{M}", ""]
    headings = (HEADINGS[over], "M", "Br", "Bc", "bytes read", "bytes written", "bytes", "standard", "ratio", "N^2 d^2 / M")
    widths = (14, 12, 6, 8, 18, 18, 18, 18, 9, 18)

    def line(cells: Sequence[str]) -> str:
        return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    lines.append(line(headings))
    for point in found.points:
        counts = (point.read_bytes, point.write_bytes, point.total_bytes, point.ideal_bytes)
        ratio = "-" if point.ratio is None else f"{point.ratio:.3f}"
        sizes = (point.value, point.sram_elements, point.block_rows, point.block_cols)
        lines.append(line([f"{n:,}" for n in (*sizes, *counts)] + [ratio, f"{point.theorem2_elements:,.0f}"]))
    lines += [
        "",
        "M and N^2 d^2 / M in elements; standard: the bytes of Algorithm 0 if it reads each input of each step once; ratio: "
        "bytes / standard",
    ]
    return "\n".join(lines) + "\n"
