"""Draws a figure of `cupyflash paper`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupyflash.sim.pictures.paper import Figure as OfPaper
from cupyflash.sim.pictures.plot import framed, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colours for readers with limited colour vision; markers distinguish the lines without colour.
STYLES = ({"color": "#0b5394", "marker": "s"}, {"color": "#c0392b", "marker": "D"})
GUIDE = {"color": "#444444", "linestyle": (0, (5, 3)), "linewidth": 1.4}


def draw(of_paper: OfPaper) -> Figure:
    """The picture. Raises ImportError without matplotlib."""
    picture = of_paper.picture
    figure, axes = new_figure((8.6, 4.6))
    axes.set_xscale("log", base=10 if picture.places else 2)
    styles = iter(STYLES)
    for line in picture.lines:
        style = GUIDE if line.kind == "guide" else {**next(styles), "linewidth": 1.8 if line.kind == "line" else 0}
        axes.plot(*zip(*line.points, strict=True), label=line.label, **style)
    if picture.places:
        axes.set_yticks(range(1, len(picture.places) + 1), picture.places, fontsize=8)
    elif picture.y_from_0:
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
    else:
        axes.set_yscale("log")
    _label(axes, of_paper)
    return figure


def _label(axes: Any, of_paper: OfPaper) -> None:
    """Set axes with plain numbers, grid, title, legend."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    picture = of_paper.picture
    axes.set_xlabel(picture.x)
    axes.set_ylabel(picture.y)
    for axis in [axes.xaxis, *([] if picture.places else [axes.yaxis])]:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_minor_formatter(NullFormatter())
    if picture.places:
        ticks = (1, 2, 5, 10, 20, 40)
        axes.set_xticks(ticks, map(str, ticks))
    framed(axes)
    axes.set_title(of_paper.title, fontsize=11, loc="left")
    axes.legend(frameon=False, fontsize=9)
