"""The output of `cupyflash sweep --over cache`: decoding's bytes, splits and thread blocks along the length of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cupyflash.sim.cli.points import Column, Points
from cupyflash.sim.cli.request import ProblemRequest
from cupyflash.sim.cli.show import describe_cache, taken
from cupyflash.sim.names import NAMES
from cupyflash.sim.pictures.sweep_decode import CachePoint, sweep_cache

OVER = "cache"
COLUMNS = {
    "cache": Column("keys"),
    "splits": Column("splits"),
    "thread_blocks": Column("blocks"),
    "read_bytes": Column("bytes read"),
    "write_bytes": Column("bytes written"),
    "total_bytes": Column("bytes"),
    "partial_share": Column("partial", ".2%"),
    "fa2_ratio": Column("fa2", ".2f"),
    "model_seconds": Column("us, model", ",.2f", 1e6),
}
LEGEND = (
    "keys: of a full cache, a sequence; blocks: thread blocks; partial: what share of all bytes the splits' results are, "
    "written and read again; fa2: how many times as many bytes FlashAttention-2 would move for the same queries, of keys that "
    "are gathered in one array; us, model: the planner's microseconds, nothing is measured"
)


def points_of(request: ProblemRequest, values: list[int], plot: Path | None) -> Points:
    """The points; a picture is drawn on the way."""
    assert request.cache is not None
    device, told = request.device, describe_cache(request.problem, request.cache, swept=True)
    points = sweep_cache(request.problem, device, request.cache, values, num_splits=request.num_splits, lse=request.lse)
    if plot is not None:
        from cupyflash.sim.pictures.plot import plot_cache

        plot_cache(plot, points, told, device.name)
    head = request.report
    head |= {  # what varies with the length is null
        "problem": head["problem"] | {"seqlen_k": None, "key_lengths": None},
        "cache": head["cache"] | {"pages": None},
        "device": taken(device, "name", "sm_count"),
    }
    title = f"{NAMES[request.algorithm]}: {told}; {device.name}, {device.sm_count} multiprocessors"
    return Points({"over": OVER, **head}, rows(points), title, COLUMNS, (LEGEND,), {})


def rows(points: tuple[CachePoint, ...]) -> list[dict[str, Any]]:
    """The points with names for their columns."""
    return [
        {
            "cache": point.value,
            **taken(point, "splits", "thread_blocks", "read_bytes", "write_bytes", "total_bytes"),
            "partial_bytes": point.part_bytes,
            "partial_share": point.part_share,
            "page_bytes": point.page_bytes,
            "fa2_bytes": point.fa2_bytes,
            "fa2_ratio": point.fa2_ratio,
            "model_seconds": point.seconds,
        }
        for point in points
    ]
