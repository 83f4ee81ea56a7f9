"""The output of `cupyflash sweep --over cache`: decoding's bytes, splits and thread blocks along the length of the cache."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from cupyflash.sim import text
from cupyflash.sim.cli.options import Request
from cupyflash.sim.cli.show import NAMES, describe_cache, width
from cupyflash.sim.pictures.sweep_decode import CachePoint, sweep_cache

OVER = "cache"
# Of the table, whose columns have the names of `rows`
HEADINGS = {
    "cache": "keys",
    "splits": "splits",
    "thread_blocks": "blocks",
    "read_bytes": "bytes read",
    "write_bytes": "bytes written",
    "total_bytes": "bytes",
    "partial_share": "partial",
    "fa2_ratio": "fa2",
    "model_seconds": "us, model",
}


def content(request: Request, values: list[int], kind: str, plot: Path | None) -> str:
    """The output, as a table, csv or json; a picture is drawn on the way."""
    assert request.cache is not None
    points = sweep_cache(request.problem, request.device, request.cache, values, num_splits=request.num_splits, lse=request.lse)
    if plot is not None:
        from cupyflash.sim.pictures.plot import plot_cache

        plot_cache(plot, points, describe_cache(request.problem, request.cache, swept=True), request.device.name)
    return {"table": table, "csv": comma_separated, "json": json_report}[kind](request, points)


def rows(points: tuple[CachePoint, ...]) -> list[dict[str, Any]]:
    """The points with names for their columns."""
    return [
        {
            "cache": point.value,
            "splits": point.splits,
            "thread_blocks": point.thread_blocks,
            "read_bytes": point.read_bytes,
            "write_bytes": point.write_bytes,
            "total_bytes": point.total_bytes,
            "partial_bytes": point.part_bytes,
            "partial_share": point.part_share,
            "page_bytes": point.page_bytes,
            "fa2_bytes": point.fa2_bytes,
            "fa2_ratio": point.fa2_ratio,
            "model_seconds": point.seconds,
        }
        for point in points
    ]


def json_report(request: Request, points: tuple[CachePoint, ...]) -> str:
    """The output as JSON; values that vary with the length are null."""
    head = request.report
    report = {
        "over": OVER,
        **head,
        "problem": head["problem"] | {"seqlen_k": None, "key_lengths": None},
        "cache": head["cache"] | {"pages": None},
        "device": {"name": request.device.name, "sm_count": request.device.sm_count},
        "points": rows(points),
    }
    return json.dumps(report, indent=2) + "\n"


def comma_separated(request: Request, points: tuple[CachePoint, ...]) -> str:
    file = io.StringIO()
    content = rows(points)
    writer = csv.DictWriter(file, list(content[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(content)
    return file.getvalue()


def table(request: Request, points: tuple[CachePoint, ...]) -> str:
    """Text with a heading, aligned."""
    assert request.cache is not None
    device = request.device
    told = describe_cache(request.problem, request.cache, swept=True)
    title = f"{NAMES[request.algorithm]}: {told}; {device.name}, {device.sm_count} multiprocessors"
    cells = [[cell(name, row[name]) for name in HEADINGS] for row in rows(points)]
    legend = (
        "keys: of a full cache, a sequence; blocks: thread blocks; partial: what share of all bytes the splits' results are, "
        "written and read again; fa2: how many times as many bytes FlashAttention-2 would move for the same queries, of keys that "
        "are gathered in one array; us, model: the planner's microseconds, nothing is measured"
    )
    across = width()
    lines = [
        *text.paragraph(title, rest="  ", width=min(across, text.WIDTH)),
        "",
        *text.table(list(HEADINGS.values()), cells, left=(), width=across),
        "",
        *text.paragraph(legend, width=min(across, text.WIDTH)),
    ]
    return "\n".join(lines) + "\n"


def cell(name: str, value: float | None) -> str:
    """One cell of the table."""
    if value is None:
        return "-"
    if name == "model_seconds":
        return f"{value * 1e6:,.2f}"
    return {"partial_share": f"{value:.2%}", "fa2_ratio": f"{value:.2f}"}.get(name, f"{value:,}")
