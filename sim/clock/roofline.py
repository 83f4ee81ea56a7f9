"""A roofline: FLOP/s against FLOP a byte, the roofs of DRAM, the L2 and the tensor cores, and a problem under them, by a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyflash.sim.clock.times import DRAM, Times
from cupyflash.sim.files import save
from cupyflash.sim.pictures.plot import TITLE_WIDTH, log_log
from cupyflash.sim.text import paragraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {DRAM: {"color": "#0b5394", "marker": "s"}, "L2": {"color": "#38761d", "marker": "^"}}
NOTE = (
    "A model, nothing is measured: FLOP/s by the planner's clocks, DRAM's bytes by a model of the L2. A point lies below the roof\n"
    "of its colour by what the kernel waits for. Without the L2, all bytes that are asked for would have to pass under DRAM's roof."
)


def plot_roofline(path: Path, found: Times, problem: str, device: str) -> None:
    """Write the picture that `draw_roofline` draws to a .png, .svg or .pdf. Raises as `plot.plot_sweep` does."""
    save(draw_roofline(found, problem, device), path)


def draw_roofline(found: Times, problem: str, device: str) -> Figure:
    """Draw a device's roofs, each memory's ridge, and a problem's points; problem and device in words.

    Raises ImportError without matplotlib, ValueError if the problem computes nothing, or the device's peak or bandwidth is not
    known.
    """
    if not found.flops:
        raise ValueError("a roofline needs a problem in which rows see keys: this one computes nothing")
    if found.peak is None or found.bandwidth is None:
        raise ValueError(f"a roofline needs the peak and the bandwidth of {device}, which are not known")
    figure, axes = log_log()
    from matplotlib.ticker import FuncFormatter

    roofs = {DRAM: found.bandwidth, "L2": found.l2_bandwidth}
    points = found.intensities
    told = [*points.values(), *(found.peak / roof for roof in roofs.values())]
    for name, roof in roofs.items():
        ridge = found.peak / roof
        label = f"{name}: {roof / 1e12:,.2f} TB/s, ridge at {ridge:,.0f} FLOP a byte"
        x = [min(told) / 4, ridge, max(told) * 4]
        axes.plot(x, [roof * x[0], found.peak, found.peak], label=label, color=STYLES[name]["color"], linewidth=1.8)
        axes.plot([ridge], [found.peak], color=STYLES[name]["color"], marker="|", markersize=14, linestyle="")
    for name, intensity in points.items():
        moved = "bytes of DRAM" if name == DRAM else "bytes asked of the L2"
        label = f"this problem by its {moved}: {intensity:,.0f} FLOP a byte, {found.rate / 1e12:,.0f} TFLOP/s"
        axes.plot([intensity], [found.rate], label=label, linestyle="", markersize=9, **STYLES[name])
    axes.axhline(found.peak, color="#888888", linewidth=1, linestyle=":")
    at_left = {"xy": (0, found.peak), "xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
    axes.annotate(f"peak: {found.peak / 1e12:,.0f} TFLOP/s", xytext=(4, 4), color="#666666", fontsize=9, **at_left)
    axes.set_xlabel("FLOP a byte", fontsize=11)
    axes.set_ylabel("TFLOP/s", fontsize=11)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis(FuncFormatter(lambda value, _: f"{value / 1e12:,.3g}" if f"{value:.0e}"[0] in "125" else ""))
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_title(
        "\n".join([f"Roofline of {device}, by a model:", *paragraph(problem, width=TITLE_WIDTH)]), fontsize=11, loc="left"
    )
    legend: Any = figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=9.5, title=NOTE, alignment="left")
    legend.get_title().set(fontsize=9, color="#444444", linespacing=1.3)
    return figure
