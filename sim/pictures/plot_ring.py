"""A picture of a sequence split over more and more ranks: the share of the ideal, and the busiest rank's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.request.problem import Problem
from cupyflash.sim import text
from cupyflash.sim.clock.ring_model import RingModel, ring_of
from cupyflash.sim.files import save
from cupyflash.sim.pictures.plot import TITLE_WIDTH, along_x, in_bytes, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS: tuple[tuple[str, str, bool, Report], ...] = (
    ("ring, zigzag", "zigzag", False, {"color": "#0b5394", "marker": "s"}),
    ("ring, contiguous", "contiguous", False, {"color": "#c0392b", "marker": "D"}),
    ("gathered, zigzag", "zigzag", True, {"color": "#38761d", "marker": "^"}),
)


def plot_ranks(path: Path, problem: Problem, device: Device, link: float, ranks: Sequence[int], title: str) -> None:
    """Write the picture that `draw_ranks` draws; raises as `plot_sweep` does."""
    save(draw_ranks(problem, device, link, ranks, title), path)


def draw_ranks(problem: Problem, device: Device, link: float, ranks: Sequence[int], title: str) -> Figure:
    """Draw each way's share of the ideal, by the models and by counts alone, and the bytes that the busiest rank receives, moves in
    HBM and holds.

    Raises ImportError without matplotlib.
    """
    figure, (share, counts) = new_figure((8.6, 8.0), rows=2)
    share.set_xscale("log", base=2)
    for label, layout, gather, style in WAYS:
        models = [RingModel(ring_of(problem, each, layout, gather), problem, device, link) for each in ranks]
        drawn = {"linewidth": 1.8, "markersize": 4.5, **style}
        by_count = drawn | {"linestyle": ":", "marker": "", "label": "_"}
        share.plot(ranks, [100 * (model.efficiency or 0) for model in models], **drawn, label=label)
        share.plot(ranks, [100 * (model.efficiency_by_count or 0) for model in models], **by_count)
        counted = [("HBM, " + label, "-", [model.hbm(model.busiest).total_bytes for model in models])]
        counted.append(("memory, " + label, "--", [sum(model.memory(model.busiest).values()) for model in models]))
        for name, line, amounts in counted:
            if layout == "zigzag" or name.startswith("HBM"):
                counts.plot(ranks, amounts, **drawn | {"linestyle": line}, label=name)
    received = [model.link_bytes[model.busiest][1] for model in models]
    some = [(each, n) for each, n in zip(ranks, received, strict=True) if n]
    if some:
        counts.plot(*zip(*some, strict=True), color="#444444", linewidth=1.4, label="received, whichever way")
    share.set_ylabel("share of ideal, % (dotted: by counts alone)", fontsize=10)
    share.set_ylim(0, 105)
    counts.set_ylabel("bytes of the busiest rank", fontsize=10)
    counts.set_yscale("log")
    in_bytes(counts)
    for axes, label in ((share, ""), (counts, "ranks")):
        along_x(axes, label, lambda x: f"{x:,.0f}")
    share.legend(frameon=False, fontsize=9)
    counts.legend(frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    share.set_title("\n".join(text.paragraph(title, width=TITLE_WIDTH)), fontsize=11, loc="left")
    return figure
