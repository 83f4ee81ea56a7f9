"""A sweep as a log-log picture: the counts of each algorithm and the theorem's slope."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.request.problem import Problem
from cupyflash.schedules import fa3_tiles
from cupyflash.sim import text
from cupyflash.sim.files import save
from cupyflash.sim.pictures.sweep import Axis, Sweep, at, sweep
from cupyflash.sim.pictures.sweep_decode import CachePoint
from cupyflash.sim.theory import theorem2_holds_for
from cupyflash.tiling import TilingChoice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Series = tuple[tuple[str, str, TilingChoice, Report], ...]
"""Lines as (label, algorithm, tiling, style), in the order of the legend."""
# The two tilings often coincide: one is wide and pale, the
# other narrow on top of it. Markers distinguish the lines without colour.
SERIES: Series = (
    ("standard attention, each input of a step read once", "standard", "paper", {"color": "#c0392b", "marker": "D"}),
    ("FlashAttention, the paper's tiling", "fa1", "paper", {"color": "#9cc3e6", "marker": "o", "linewidth": 5, "markersize": 8}),
    ("FlashAttention, fitted to the kernel", "fa1", None, {"color": "#0b5394", "marker": "s"}),
    ("FlashAttention-2 (the default), tile of long rows", "fa2", None, {"color": "#38761d", "marker": "^"}),
)
# Replaces the last one on a Hopper, for problems that fa3 runs.
HOPPER: Series = (
    ("FlashAttention-2, tile of long rows", "fa2", None, {"color": "#38761d", "marker": "^"}),
    ("FlashAttention-3 (the default of long rows)", "fa3", None, {"color": "#b45f06", "marker": "v"}),
)
NOTE = (
    "Counted is what kernels ask for. FlashAttention-2 asks for K and V again for each row block: on a chip mostly the L2 cache\n"
    "answers, at the cost of an L2 access, and memory sees less, down to Q, K, V and O once."
)
# The algorithms whose bytes behind the L2 are drawn
FOLLOWED = ("fa2", "fa3")
TITLE_WIDTH = 90  # letters of a title's line
MANY = 60  # points; with more of them markers would hide the lines
XLABELS = {
    "sram": "SRAM of one thread block, M (bytes)",
    "seqlen": "sequence length N",
    "head-dim": "head dimension d",
    "block-cols": "columns of a K/V block, Bc (M = 4 d Bc)",
}
# N^2 d^2 / M as a power of the axis: with Bc, M = 4 d Bc moves.
SLOPES = {"sram": -1, "seqlen": 2, "head-dim": 2, "block-cols": -1}


def plot_sweep(path: Path, problem: Problem, device: Device, over: Axis, values: list[int], *, with_l2: bool = False) -> None:
    """Write the picture that `draw` draws to a .png, .svg or .pdf.

    Raises ImportError without matplotlib, ValueError for another kind of file.
    """
    save(draw(problem, device, over, values, with_l2=with_l2), path)


def plot_cache(path: Path, points: Sequence[CachePoint], problem: str, device: str) -> None:
    """Write the picture that `draw_cache` draws; raises as `plot_sweep` does."""
    save(draw_cache(points, problem, device), path)


def draw_cache(points: Sequence[CachePoint], problem: str, device: str) -> Figure:
    """Draw the bytes of decoding, in all and by part, along the length of the cache, and those of fa2; `problem` is its text.

    Raises ImportError without matplotlib.
    """
    figure, axes = log_log()
    lines: dict[str, tuple[list[int], Report]] = {
        "FlashAttention-2, of gathered keys": ([p.fa2_bytes or 0 for p in points], {"color": "#38761d", "marker": "^"}),
        "decoding": ([p.total_bytes for p in points], {"color": "#0b5394", "marker": "s"}),
        "of it partial results of splits": ([p.part_bytes for p in points], {"color": "#c0392b", "marker": "D"}),
        "of it the table of pages": ([p.page_bytes for p in points], {"color": "#b45f06", "marker": "v"}),
    }
    for label, (counts, style) in lines.items():
        drawn = [(point.value, count) for point, count in zip(points, counts, strict=True) if count]
        if drawn:
            axes.plot(*zip(*drawn, strict=True), label=label, linewidth=1.8, markersize=4.5, **style)
    _axes(axes, "keys of a sequence in the cache", lambda x: f"{x:,.0f}")
    words = text.paragraph(problem, width=TITLE_WIDTH)
    axes.set_title("\n".join([f"HBM traffic of decoding, {device}:", *words]), fontsize=11, loc="left")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9.5)
    return figure


def new_figure(size: tuple[float, float], rows: int = 1) -> tuple[Figure, Any]:
    """A figure of (width, height) in inches and its axes, several for several rows. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib ({error}): pip install 'cupyflash[plot]'") from error

    figure: Figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, 1, sharex=True)


def log_log() -> tuple[Figure, Any]:
    """A figure and its axes. Raises ImportError without matplotlib."""
    figure, axes = new_figure((8.6, 6.1))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    return figure, axes


def draw(problem: Problem, device: Device, over: Axis, values: list[int], *, with_l2: bool = False) -> Figure:
    """Draw bytes along an axis: FlashAttention (both tilings), FlashAttention-2, FlashAttention-3 on a Hopper, and standard
    attention, if they run the problem; `with_l2` adds DRAM's bytes behind the L2 for kernels that the L2 model follows.

    Raises ImportError without matplotlib.
    """
    figure, axes = log_log()
    theorem: Sweep | None = None
    for label, algorithm, tiling, style in series(problem, device):
        followed = with_l2 and algorithm in FOLLOWED
        try:
            found = sweep(problem, device, over, values, algorithm, tiling)
        except ValueError:  # it does not run such a problem, for example heads wider than 256
            continue
        points = [point for point in found.points if point.total_bytes]
        if points:
            x, y = [point.value for point in points], [point.total_bytes for point in points]
            marks = {"marker": ""} if len(values) > MANY else {}
            axes.plot(x, y, label=label, **{"linewidth": 1.8, "markersize": 4.5, **style, **marks})
        if followed:
            behind = {p.value: p.behind for p in sweep(problem, device, over, values, algorithm, tiling, with_l2=True).points}
            drawn = [(x, each.dram.total_bytes) for x, each in behind.items() if each is not None and each.dram.total_bytes]
            if drawn:
                name = f"{label.split(' (')[0].split(',')[0]} behind the L2, by a model"
                axes.plot(*zip(*drawn, strict=True), label=name, linewidth=1.8, linestyle=(0, (4, 1.5)), color=style["color"])
        if (algorithm, tiling) == ("fa1", "paper"):
            theorem = found
    if theorem is not None:
        _slope(axes, problem, device, over, theorem)
    _least(axes, problem, device, over, values)
    if over == "sram" and values[0] < device.sram_per_block < values[-1]:
        axes.axvline(device.sram_per_block, color="#888888", linewidth=1, linestyle=":")
        at_top = {"xy": (device.sram_per_block, 1), "xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
        axes.annotate(f"{device.name}: {_size(device.sram_per_block)}", xytext=(4, -9), color="#666666", fontsize=9, **at_top)
    _label(axes, problem, device, over)
    legend: Any = figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9.5, title=NOTE, alignment="left")
    legend.get_title().set(fontsize=9, color="#444444", linespacing=1.3)
    return figure


def series(problem: Problem, device: Device) -> Series:
    """The lines to draw, fa3's only if it runs."""
    return SERIES if fa3_tiles.refusal(problem, device) else (*SERIES[:-1], *HOPPER)


def _slope(axes: Any, problem: Problem, device: Device, over: Axis, found: Sweep) -> None:
    """Draw a line with the slope of Theorem 2's N^2 d^2 / M, where the theorem holds: d <= M <= N d."""
    points = []
    for point in found.points:
        posed, _ = at(problem, device, over, point.value)
        if theorem2_holds_for(posed.seqlen_q, posed.head_dim, point.sram_elements):
            points.append(point)
    if len(points) < 2:
        return
    # Half of the leading constant, so that the line is below the counts: a visit reads Q in s bytes an element, reads and writes
    # O in 4 each, and there are N^2 / Bc with Bc = M / 4d: 4 (s + 8) N^2 d^2 / M bytes; under a causal mask half as many.
    constant = 4 * (problem.itemsize + 8) * (0.5 if problem.options.causal else 1)
    x, y = [point.value for point in points], [constant / 2 * point.theorem2_elements for point in points]
    axes.plot(x, y, color="#444444", linestyle=(0, (5, 3)), linewidth=1.4, label="Theorem 2: N² d² / M, its slope only")
    middle = len(points) // 3
    slope = f"slope {SLOPES[over]:+d}".replace("-", "−")
    below = {"ha": "right", "va": "top", "xytext": (-4, -4)} if SLOPES[over] < 0 else {"ha": "left", "va": "top", "xytext": (5, -4)}
    axes.annotate(slope, (x[middle], y[middle]), textcoords="offset points", color="#444444", fontsize=10, **below)


def _least(axes: Any, problem: Problem, device: Device, over: Axis, values: list[int]) -> None:
    """Draw the bytes of Q, K, V and O once: the least that remains if a cache serves all repeated reads."""
    y = []
    for value in values:
        p, _ = at(problem, device, over, value)
        queries, keys = p.heads * p.seqlen_q, p.kv_heads * p.seqlen_k
        y.append(p.batch * p.itemsize * (queries + keys) * (p.head_dim + p.head_dim_v))
    axes.plot(values, y, color="#888888", linestyle=(0, (1, 2)), linewidth=1.4, label="Q, K, V and O once")


def _label(axes: Any, problem: Problem, device: Device, over: Axis) -> None:
    """Set axes, grid and title."""
    _axes(axes, XLABELS[over], _size if over == "sram" else lambda x: f"{x:,.0f}")
    axes.set_title(_title(problem, device, over), fontsize=11, loc="left")


def _axes(axes: Any, label: str, told: Callable[[float], str]) -> None:
    """Set both axes, x with a label and its values as text, and the grid."""
    axes.set_ylabel("HBM traffic, read + written (bytes)", fontsize=11)
    along_x(axes, label, told)
    in_bytes(axes)


def in_bytes(axes: Any) -> None:
    """Make the y axis count bytes."""
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _amount(y)))


def along_x(axes: Any, label: str, told: Callable[[float], str]) -> None:
    """Set the x axis in powers of two, with a label and its values as text, and the grid."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xlabel(label, fontsize=11)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=14))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: told(x)))
    framed(axes)


def framed(axes: Any) -> None:
    """Set the grid, and a frame on two sides."""
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _title(problem: Problem, device: Device, over: Axis) -> str:
    fixed = {
        "seqlen": f"N = {problem.seqlen_q:,}"
        if problem.seqlen_q == problem.seqlen_k
        else f"Nq = {problem.seqlen_q:,}, Nk = {problem.seqlen_k:,}",
        "head-dim": f"d = {problem.head_dim}",
        "sram": f"M = {_size(device.sram_per_block)} ({device.name})",
    }
    fixed.pop("sram" if over == "block-cols" else over)
    if over == "seqlen" and problem.seqlen_q != problem.seqlen_k:
        fixed["head-dim"] = f"Nk = {problem.seqlen_k:,}, {fixed['head-dim']}"
    heads = problem.head_count
    rest = f"{heads} head{'s' if heads != 1 else ''}, {problem.dtype}{', causal' if problem.options.causal else ''}"
    return f"HBM traffic of exact attention: {', '.join(fixed.values())}, {rest}"


def _size(x: float) -> str:
    """Bytes with K = 1,024."""
    return text.in_units(x, text.BINARY, ".4g", f"{x:.0f} B")


def _amount(y: float) -> str:
    """Bytes with K = 1,000, for an axis in powers of ten."""
    return text.in_units(y, text.DECIMAL, "g", f"{y:g} B")
