"""The output of `cupyflash sweep --over ranks`: bytes, time, memory and the share of the ideal by the number of ranks."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from cupyflash.sim import text
from cupyflash.sim.cli.options import Request
from cupyflash.sim.cli.predict_ring import better
from cupyflash.sim.cli.ranks import Split, require_over_ranks
from cupyflash.sim.cli.show import describe, flat, width
from cupyflash.sim.clock.ring_model import RingModel

OVER = "ranks"
DEFAULT_RANGE = (1, 1024, 11, True)
# Of the table, whose columns have the names of `row`
HEADINGS = {
    "ranks": "ranks",
    "steps": "steps",
    "sent_bytes": "sent",
    "received_bytes": "received",
    "hbm_bytes": "HBM",
    "memory_bytes": "memory",
    "step_seconds": "step, us",
    "transfer_seconds": "transfer, us",
    "seconds": "all, ms",
    "efficiency_by_count": "count",
    "efficiency": "model",
    "other_efficiency": "other",
    "better": "better",
}


def content(request: Request, values: list[int], split: Split, kind: str, plot: Path | None) -> str:
    """The output, as a table, csv or json; a picture is drawn on the way."""
    require_over_ranks("--over ranks")
    rows = [row(split.model(request, ranks), split.model(request, ranks, gather=not split.gather_kv)) for ranks in values]
    if plot is not None:
        from cupyflash.sim.pictures.plot_ring import plot_ranks

        title = f"{describe(request.problem)}; {request.device.name}, {split.link / 1e9:g} GB/s each way, by models"
        plot_ranks(plot, request.problem, request.device, split.link, values, title)
    return {"table": table, "csv": comma_separated, "json": json_report}[kind](request, split, rows)


def row(model: RingModel, other: RingModel) -> dict[str, Any]:
    """One number of ranks: the counts of the busiest rank, the seconds of its longest step."""
    rank, steps = model.busiest, model.timeline
    sent, received = model.link_bytes[rank]
    return {
        "ranks": model.ring.ranks,
        "steps": len(model.ring.shifts),
        "sent_bytes": sent,
        "received_bytes": received,
        "hbm_bytes": model.hbm(rank).total_bytes,
        "memory_bytes": sum(model.memory(rank).values()),
        "step_seconds": max(step.products + step.sums for step in steps),
        "transfer_seconds": max(step.transfer for step in steps),
        "seconds": model.seconds,
        "balance": model.balance,
        "efficiency_by_count": model.efficiency_by_count,
        "efficiency": model.efficiency,
        "other_efficiency": other.efficiency,
        "hidden_from": model.hidden_from and model.hidden_from.length,
        "better": better(model, other)["way"],
    }


def json_report(request: Request, split: Split, rows: list[dict[str, Any]]) -> str:
    report = {
        "over": OVER,
        "problem": flat(request.problem),
        "device": {"name": request.device.name, "hbm_bandwidth": request.device.hbm_bandwidth},
        "layout": split.layout,
        "gather_kv": split.gather_kv,
        "link_bytes_a_second": split.link,
        "points": rows,
    }
    return json.dumps(report, indent=2) + "\n"


def comma_separated(request: Request, split: Split, rows: list[dict[str, Any]]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def table(request: Request, split: Split, rows: list[dict[str, Any]]) -> str:
    """Text with a heading, aligned."""
    way, other = ("K and V gathered", "of a ring") if split.gather_kv else ("a ring", "of gathered keys")
    title = (
        f"{describe(request.problem)} over ranks, {split.layout}, {way}; {request.device.name}, {split.link / 1e9:g} GB/s each way"
    )
    legend = (
        "of the busiest rank; sent, received: bytes of the link; HBM: bytes that its calls move; memory: bytes of what it holds; "
        "step: the longest one's products and sums, transfer: the longest one, us and all by models, nothing is measured; count, "
        "model: share of ideal by count of work and transfers, and by the models, which count ends of tiles and sums too; other: "
        f"the latter {other}"
    )
    across = width()
    lines = [
        *text.paragraph(title, rest="  ", width=min(across, text.WIDTH)),
        "",
        *text.table(list(HEADINGS.values()), [[cell(name, row[name]) for name in HEADINGS] for row in rows], left=(), width=across),
        "",
        *text.paragraph(legend, width=min(across, text.WIDTH)),
    ]
    return "\n".join(lines) + "\n"


def cell(name: str, value: Any) -> str:
    """One cell of the table."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if name in ("step_seconds", "transfer_seconds"):
        return f"{value * 1e6:,.1f}"
    return f"{value * 1e3:,.3f}" if name == "seconds" else f"{value:.1%}" if "efficiency" in name else f"{value:,}"
