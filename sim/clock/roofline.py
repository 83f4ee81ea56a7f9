"""A roofline: FLOP/s against FLOP a byte, the roofs of DRAM, the L2 and the tensor cores, and a problem under them, by models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyflash.device import Device
from cupyflash.schedules import TileSchedule
from cupyflash.sim import l2
from cupyflash.sim.files import save
from cupyflash.sim.l2.reads import Given
from cupyflash.sim.pictures.plot import TITLE_WIDTH, log_log
from cupyflash.sim.text import paragraph

from .predicted import Prediction
from .rates import ChipRates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAM = "DRAM"
STYLES: dict[str, dict[str, Any]] = {DRAM: {"color": "#0b5394", "marker": "s"}, "L2": {"color": "#38761d", "marker": "^"}}
NOTE = (
    "A model, nothing is measured: FLOP/s by the {source}, DRAM's bytes by a model of the L2. A point lies below the roof\n"
    "of its colour by what the kernel waits for. Without the L2, all bytes that are asked for would have to pass under DRAM's roof."
)


@dataclass(frozen=True)
class Roofline:
    """A call under its device's roofs: FLOP/s, the FLOP for each byte from and to each memory, and the roofs in FLOP/s and
    bytes/s."""

    rate: float
    intensities: Mapping[str, float]
    peak: float
    bandwidths: Mapping[str, float]
    source: str

    @property
    def ridge(self) -> float:
        """FLOP a byte of DRAM from which on the tensor cores bind."""
        return self.peak / self.bandwidths[DRAM]

    @classmethod
    def of(cls, schedule: TileSchedule, found: Prediction, given: Given | None = None) -> Roofline:
        """`given` as for `l2.run`. ValueError if the device's peak, bandwidth or rates are not known, or the L2's model does not
        cover the call."""
        device: Device = schedule.device
        peak, bandwidth = device.tensor_peak.get(schedule.problem.dtype), device.hbm_bandwidth
        if peak is None or bandwidth is None:
            raise ValueError(f"a roofline needs the peak and the bandwidth of {device.name}, which are not known")
        rates, behind = ChipRates.of(device), l2.run(schedule, given=given)
        moved = {"L2": behind.asked.total_bytes, DRAM: behind.dram.total_bytes}
        intensities = {name: found.flops / nbytes for name, nbytes in moved.items() if nbytes}
        roofs = {DRAM: bandwidth, "L2": rates["l2.rate"] * rates["clock.boost"] * 1e6}
        return cls(found.rate, intensities, peak, roofs, found.source)


def plot_roofline(path: Path, found: Roofline, problem: str, device: str) -> None:
    """Write the picture that `draw_roofline` draws to a .png, .svg or .pdf. Raises as `plot.plot_sweep` does."""
    save(draw_roofline(found, problem, device), path)


def draw_roofline(found: Roofline, problem: str, device: str) -> Figure:
    """Draw a device's roofs, each memory's ridge, and a problem's points; problem and device in words.

    Raises ImportError without matplotlib.
    """
    figure, axes = log_log()
    from matplotlib.ticker import FuncFormatter

    roofs, points = found.bandwidths, found.intensities
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
    note = NOTE.format(source=found.source)
    legend: Any = figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=9.5, title=note, alignment="left")
    legend.get_title().set(fontsize=9, color="#444444", linespacing=1.3)
    return figure
