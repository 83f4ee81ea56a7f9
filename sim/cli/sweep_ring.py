"""The output of `cupyflash sweep --over ranks`: bytes, time, memory and the share of the ideal by the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cupyflash.sim.cli.points import Column, Points
from cupyflash.sim.cli.predict_ring import better
from cupyflash.sim.cli.ranks import Split, require_over_ranks
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import describe, flat, taken
from cupyflash.sim.cli.terminal import tracked
from cupyflash.sim.clock.ring_model import RingModel

OVER = "ranks"
DEFAULT_RANGE = (1, 1024, 11, True)
COLUMNS = {
    "ranks": Column("ranks"),
    "steps": Column("steps"),
    "sent_bytes": Column("sent"),
    "received_bytes": Column("received"),
    "hbm_bytes": Column("HBM"),
    "memory_bytes": Column("memory"),
    "step_seconds": Column("step, us", ",.1f", 1e6),
    "transfer_seconds": Column("transfer, us", ",.1f", 1e6),
    "seconds": Column("all, ms", ",.3f", 1e3),
    "efficiency_by_count": Column("count", ".1%"),
    "efficiency": Column("model", ".1%"),
    "other_efficiency": Column("other", ".1%"),
    "better": Column("better"),
}


def points_of(request: ProblemRequest, values: list[int], split: Split, plot: Path | None) -> Points:
    """The points; a picture is drawn on the way."""
    require_over_ranks("--over ranks")
    counting = tracked(values, "counting the points")
    rows = [row(split.model(request, ranks), split.model(request, ranks, gather=not split.gather_kv)) for ranks in counting]
    told, device = describe(request.problem), request.device
    link = f"{device.name}, {split.link / 1e9:g} GB/s each way"
    if plot is not None:
        from cupyflash.sim.pictures.plot_ring import plot_ranks

        plot_ranks(plot, request.problem, device, split.link, values, f"{told}; {link}, by models")
    head = {
        "over": OVER,
        "problem": flat(request.problem),
        "device": taken(device, "name", "hbm_bandwidth"),
        "layout": split.layout,
        "gather_kv": split.gather_kv,
        "link_bytes_a_second": split.link,
    }
    way, other = ("K and V gathered", "of a ring") if split.gather_kv else ("a ring", "of gathered keys")
    legend = (
        "of the busiest rank; sent, received: bytes of the link; HBM: bytes that its calls move; memory: bytes of what it holds; "
        "step: the longest one's products (by the planner's formulas) and sums, transfer: the longest one, us and all by models, "
        "nothing is measured; count, "
        "model: share of ideal by count of work and transfers, and by the models, which count ends of tiles and sums too; other: "
        f"the latter {other}"
    )
    return Points(head, rows, f"{told} over ranks, {split.layout}, {way}; {link}", COLUMNS, (legend,), {})


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
