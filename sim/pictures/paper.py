"""The papers' own figures from our counts: for each a table, a picture, the paper's statement, and the reasons for differences.

Sources: FlashAttention (arXiv 2205.14135: Figure 2, Theorem 2, Proposition 4), FlashAttention-2 (arXiv 2307.08691, section 3.1),
online softmax (Milakov and Gimelshein, arXiv 1805.02867). Nothing here is measured, except figures quoted from a paper. 1 GB is
10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cupyflash.device import Device
from cupyflash.request.options import BlockMask
from cupyflash.request.problem import Problem
from cupyflash.schedules import plan, plan_backward, plan_softmax
from cupyflash.sim import theory
from cupyflash.sim.pictures.sweep import sweep
from cupyflash.sim.traffic import Traffic
from cupyflash.tiling import TilingChoice

A100 = Device.named("A100-40GB")
GPT2 = Problem(64, 16, 16, 1024, 1024, 64, "float16")
"""GPT-2 medium's attention, as in Figure 2: batch 64, 16 heads, N 1,024, d 64."""
GB = 1e9


@dataclass(frozen=True)
class Line:
    """Points of a picture: a line with markers, "points" without a line, or a "guide", a slope without markers."""

    label: str
    points: tuple[tuple[float, float], ...]
    kind: Literal["line", "points", "guide"] = "line"


@dataclass(frozen=True)
class Picture:
    """A picture over log x: y is logarithmic too, or linear from 0 with `y_from_0`, or 1, 2, ... for each of `places`."""

    x: str
    y: str
    lines: tuple[Line, ...]
    places: tuple[str, ...] = ()
    y_from_0: bool = False


@dataclass(frozen=True)
class Figure:
    """One figure: the paper's statement, our table, and the reasons for differences."""

    name: str
    title: str
    paper: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    explained: str
    picture: Picture


def in_two_bytes(traffic: Traffic) -> float:
    """GB of a float32 count if each element had two bytes, O and dQ between visits too, but l, m and L four."""
    return sum(moved.total_bytes / (1 if name in ("l", "m", "L") else 2) for name, moved in traffic.items()) / GB


def both_passes(problem: Problem, device: Device, algorithm: str, tiling: TilingChoice = None) -> tuple[Traffic, Traffic]:
    """The traffic of the forward and of the backward."""
    forward, backward = plan(problem, device, algorithm, tiling), plan_backward(problem, device, algorithm, tiling)
    return theory.traffic(forward), theory.traffic(backward)


def in_gb(moved: Sequence[Traffic]) -> tuple[float, float]:
    forward, backward = (each.total_bytes / GB for each in moved)
    return forward, backward


def bytes_of_training() -> Figure:
    """Figure 2, left: HBM traffic of GPT-2 medium's attention, forward and backward."""
    p, wide = GPT2, replace(GPT2, dtype="float32")
    one_pass, rows = (p.head_count * p.seqlen_k * length * 2 / GB for length in (p.seqlen_q, p.head_dim))
    standard = tuple(map(in_two_bytes, (theory.standard_ideal(wide), theory.standard_backward_ideal(wide))))
    baselines = {"standard: Algorithms 0 and 3, 11 passes over S": standard}
    # Each direction moves P (or dP) once more each way, with a mask of a byte a score for it; then S (or dS) once more each way.
    for what, passes in (("dropout, 16 passes", 2.5), ("dropout and a mask in memory, 20 passes", 2.0)):
        standard = (standard[0] + passes * one_pass, standard[1] + passes * one_pass)
        baselines[f"standard with {what}"] = standard
    large = A100.with_sram(4 * 192 * 1024 // 2)
    flash = {
        "FlashAttention, M = 192 KB, two bytes throughout": tuple(map(in_two_bytes, both_passes(wide, large, "fa1", "paper"))),
        "FlashAttention, M = 163 KB, O and dQ in float32": in_gb(both_passes(p, A100, "fa1", "paper")),
        "our fa1 kernels": in_gb(both_passes(p, A100, "fa1")),
        "our fa2 kernels": in_gb(both_passes(p, A100, "fa2")),
        "Q, K, V, O and their gradients once": (4 * rows, 8 * rows),
    }
    found = [*((name, gb, "40.3 (35.3)") for name, gb in baselines.items()), *((name, gb, "4.4") for name, gb in flash.items())]
    names = tuple(name for name, *_ in reversed(found))
    ours = tuple((sum(gb), names.index(name) + 1.0) for name, gb, _ in found)
    theirs = tuple(
        (gb, names.index(name) + 1.0)
        for name, at in ((next(iter(baselines)), (40.3, 35.3)), (next(iter(flash)), (4.4,)))
        for gb in at
    )
    return Figure(
        "training",
        "Figure 2, left: bytes of GPT-2 medium's attention",
        "Forward and backward on an A100, measured: standard attention 40.3 GB (35.3 in the later version), "
        "FlashAttention 4.4 GB, with more arithmetic.",
        ("counted", "forward GB", "backward GB", "both", "the paper, measured"),
        tuple((name, f"{gb[0]:.2f}", f"{gb[1]:.2f}", f"{sum(gb):.1f}", said) for name, gb, said in found),
        f"A pass over the N^2 scores of all heads is {one_pass:.2f} GB. Algorithms 0 and 3 make 11 passes. The paper's figures are "
        f"{(40.3 - 12 * rows) / one_pass:.1f} and {(35.3 - 12 * rows) / one_pass:.1f} passes: about as many as with dropout (which "
        "reads and writes P and dP once more, and a byte of its mask for each score, each way), or a little fewer than with a mask "
        "in memory too. Algorithms 1 and 4 move its 4.4 GB with blocks for 192 KB and O in two bytes. A thread block of an A100 "
        "may have only 163 KB, and O and dQ in float32 cost more. On the other hand a profiler sees fewer bytes than kernels "
        f"request, since the L2 serves a part. The backward computes S again: {14 / 12:.2f} times the arithmetic.",
        Picture(
            "GB, read and written", "", (Line("counted", ours, "points"), Line("the paper, measured", theirs, "points")), names
        ),
    )


def bytes_by_block_size() -> Figure:
    """Figure 2, middle: larger blocks of K and V, fewer bytes."""
    p, peak, bandwidth = GPT2, A100.tensor_peak["float16"], A100.hbm_bandwidth
    assert bandwidth is not None
    products = 4 * p.head_count * p.seqlen_q * p.seqlen_k * p.head_dim / peak * 1e3
    rows, points = [], []
    for point in sweep(p, A100, "block-cols", (32, 64, 128, 256, 326, 512, 1024)).points:
        moved = point.total_bytes / GB
        points.append((float(point.block_cols), moved))
        size = 4 * p.head_dim * p.itemsize * point.block_cols / 1024
        fits = "fits" if size * 1024 <= A100.sram_per_block else "does not fit"
        at_peak = moved * GB / bandwidth * 1e3
        rows.append((f"{point.block_cols:,}", f"{size:.0f}", fits, f"{moved:.2f}", f"{at_peak:.1f}"))
    least = 4 * p.head_count * p.seqlen_q * p.head_dim * p.itemsize / GB
    return Figure(
        "block_size",
        "Figure 2, middle: bytes by the size of a block",
        "FlashAttention's forward on an A100 gets faster with larger blocks, which need fewer accesses, up to a point.",
        ("Bc", "KB: M = 4 d Bc", "an A100's 163 KB a block", "GB", "ms at its HBM's peak"),
        tuple(rows),
        "Each block of K and V takes a pass over Q and O, so bytes fall as 1 / Bc until K, V and the first visits remain (Q, "
        f"K, V and O once are {least:.2f} GB). The times follow from the data sheet's peak and are not measured. The products "
        f"take {products:.1f} ms at their peak, beside exponentials and sums, so less traffic helps less from Bc = 256 on. "
        "(326, the formula's Bc for 163 KB, divides 1,024 keys into as many blocks as 256: four.)",
        Picture(
            "columns of a K/V block, Bc",
            "GB, read and written",
            (Line("FlashAttention, counted", tuple(points)), _slope(points, -1)),
        ),
    )


def _slope(points: Sequence[tuple[float, float]], power: int, under: float = 0.6) -> Line:
    """A line of a slope, below the points."""
    (x0, y0), (x1, _) = points[0], points[-1]
    return Line(f"slope {power:+d}".replace("-", "−"), ((x0, under * y0), (x1, under * y0 * (x1 / x0) ** power)), "guide")


def bytes_of_sparse_blocks() -> Figure:
    """Figure 2, right: block-sparse attention by the share of kept blocks."""
    p = Problem(1, 16, 16, 4096, 4096, 64, "float16")
    dense = plan(p, A100, "fa1", (64, 128))
    Tr, Tc = -(-p.seqlen_q // dense.block_rows), -(-p.seqlen_k // dense.block_cols)
    rows, points = [], []
    whole = theory.traffic(dense).total_bytes
    for of_32 in (1, 2, 4, 8, 16, 32):
        kept = (np.arange(Tr)[:, None] + np.arange(Tc)) % 32 < of_32
        sparse = plan(p.asking(block_mask=BlockMask.of(kept)), A100, "fa1", (64, 128))
        moved = theory.traffic(sparse)
        visits = sum(moved[name].total_bytes for name in ("Q", "O", "O_acc", "l", "m"))
        points.append((of_32 / 32, moved.total_bytes / whole))
        rows.append(
            (f"{of_32 / 32:.1%}", f"{moved.total_bytes / GB:.3f}", f"{moved.total_bytes / whole:.3f}", f"{visits / GB:.3f}")
        )
    return Figure(
        "block_sparse",
        "Figure 2, right: block-sparse attention, N 4,096",
        "Runtime (forward and backward) falls in proportion to the share of blocks that are not zero; Proposition 4: Theta(N d + "
        "N^2 d^2 s / M) accesses, where s is that share.",
        ("blocks kept", "GB", "of dense", "of these Q, O, l and m, at the visits"),
        tuple(rows),
        "The bytes of the visits are the share s of the dense ones, exactly, except for the first write of O. That write, K and V "
        "are the constant part, N d. Batch 1, 16 heads, tiles of 64 x 128; each row block and column block keeps the same share.",
        Picture(
            "share of blocks that are kept",
            "bytes, of dense",
            (Line("Algorithm 1, counted", tuple(points)), Line("s", ((1 / 32, 1 / 32), (1, 1)), "guide")),
        ),
    )


def bytes_by_sram() -> Figure:
    """Theorem 2 and the lower bound: bytes against SRAM."""
    p = Problem(1, 1, 1, 8192, 8192, 64, "float16")
    sizes = [1024 * 2**power for power in range(11)]
    flash = {point.value: point for point in sweep(p, A100, "sram", sizes).points}
    size, area = p.itemsize / GB, p.seqlen_q * p.seqlen_k
    standard = theory.standard_ideal(p).total_bytes / GB
    bound = {M: theory.lower_bound(p.seqlen_q, p.head_dim, M // p.itemsize) * size for M in sizes}
    rows = []
    for M in sizes:
        moved = flash[M].total_bytes / GB if M in flash else math.nan
        where = "M < d^2" if M // p.itemsize < p.head_dim**2 else "M >= d^2"
        cells = (f"{moved:.3f}", f"{moved / standard:.2f}", f"{moved / bound[M]:.1f}") if M in flash else ("-", "-", "-")
        rows.append((f"{M // 1024:,}", cells[0], f"{standard:.3f}", cells[1], f"{bound[M]:.4f}", cells[2], where))
    ours = tuple((float(M), point.total_bytes / GB) for M, point in flash.items())
    return Figure(
        "sram",
        "Theorem 2: bytes against SRAM",
        "Standard attention makes Theta(N d + N^2) accesses, FlashAttention Theta(N^2 d^2 / M) for d <= M <= N d; no exact "
        "algorithm can do with fewer, up to a constant (Proposition 3; Saha and Ye, arXiv 2402.07443: from M >= d^2 on N^2 d^2 / "
        "M, below N^2 d / sqrt(M)).",
        ("M in KB", "FlashAttention GB", "standard GB", "ratio", "the bound's argument", "ratio to that", "where"),
        tuple(rows),
        f"They meet where M is about 3 d^2 elements ({3 * p.head_dim**2 * p.itemsize // 1024} KB here; in float16 later, since "
        "O is float32 between visits). The bound's constant is not known: compare its shape, not its level. Algorithm 1 runs "
        f"parallel to it from M = d^2 on ({p.head_dim**2 * p.itemsize // 1024} KB). N 8,192, d 64, one head; "
        f"{area * p.itemsize / GB:.2f} GB are one pass over S.",
        Picture(
            "SRAM of one thread block, M (KB)",
            "GB, read and written",
            (
                Line("standard attention, each input of a step read once", tuple((M / 1024, standard) for M in sizes)),
                Line("FlashAttention, the paper's tiling", tuple((M / 1024, gb) for M, gb in ours)),
                Line("the lower bound's argument", tuple((M / 1024, gb) for M, gb in bound.items()), "guide"),
            ),
        ),
    )


def passes_of_softmax() -> Figure:
    """Online softmax: three accesses an element instead of four."""
    rows, lines = [], []
    lengths = (128, 1024, 8192, 65536)
    for algorithm, reads in (("safe", 3), ("online", 2)):
        points = []
        for n in lengths:
            moved = theory.traffic(plan_softmax(4000, n, "float32", A100, algorithm))
            accesses = moved.total_bytes / (4000 * n * 4)
            points.append((float(n), accesses))
        rows.append((algorithm, str(reads), "1", f"{accesses:.0f}", f"{4 / accesses:.2f}"))
        lines.append(Line(f"{algorithm}, counted", tuple(points)))
    return Figure(
        "softmax",
        "Online softmax: accesses an element",
        "Safe softmax reads a row for its largest element, for its sum and for the output: 4 accesses for each element, with the "
        "write. The online form joins the first two passes: 3.",
        ("softmax", "times read", "times written", "accesses an element", "safe / this"),
        tuple(rows),
        "The counts are the same at every length, to the byte. A row that stays in registers or in a cache is read from memory "
        "once: there the passes cost accesses, not HBM bytes.",
        Picture("elements of a row", "accesses an element", tuple(lines), y_from_0=True),
    )


def operations_beside_products() -> Figure:
    """FlashAttention-2's operations other than products, per score, beside Algorithm 1's."""
    rows, sizes = [], (32, 64, 128, 256)
    for d in (64, 128):
        for Bc in sizes:
            first, second = beside_products(d, Bc)
            rows.append((str(d), str(Bc), f"{first:.2f}", f"{second:.2f}", f"{first / second:.2f}", f"{4 * d / 16:.0f}"))
    names = ("FlashAttention", "FlashAttention-2")
    drawn = [(name, tuple((float(Bc), beside_products(128, Bc)[which]) for Bc in sizes)) for which, name in enumerate(names)]
    return Figure(
        "operations",
        "FlashAttention-2: operations besides the products",
        "An A100 does 312 TFLOP/s in products and 19.5 in other float32 operations, so each of these costs 16 times as much; "
        "FlashAttention-2 has fewer of them: O is divided by l once at the end, and only L is kept.",
        ("d", "Bc", "FlashAttention, a score", "FlashAttention-2, a score", "ratio", "operations that cost what its products do"),
        tuple(rows),
        "Counted from the algorithms' lines, for long N. Both scale a score, compare it, subtract m, take the exponential and add "
        "it. A visit of a row costs Algorithm 1 ten operations for m and l and four for each element of O, FlashAttention-2 "
        "five and one; fewer columns in a block mean more visits. The last column is 4 d / 16: the number of operations that take "
        "as long as the two products.",
        Picture("columns of a K/V block, Bc", "operations a score, d 128", tuple(Line(*line) for line in drawn), y_from_0=True),
    )


def beside_products(head_dim: int, block_cols: int) -> tuple[float, float]:
    """Operations per score, other than the products, of Algorithm 1 (lines 10 to 15) and of FlashAttention-2 (lines 9 to 12).

    A score in both: scaled, the maximum, less m, the exponential, the sum: 5. A visit of a row, Algorithm 1: m_new 1; l_new two
    differences, exponentials and products, a sum: 7; 1 / l_new and the factor of O: 2; an element of O: its two terms' factors,
    their sum, 1 / l_new: 4. FlashAttention-2: m 1; e^(m_old - m) 2, l 2; an element of O: the factor. In long rows,
    the work once a row (the division by l, L) is negligible.
    """
    return 5 + (10 + 4 * head_dim) / block_cols, 5 + (5 + head_dim) / block_cols


FIGURES: Mapping[str, Callable[[], Figure]] = {
    "training": bytes_of_training,
    "block_size": bytes_by_block_size,
    "block_sparse": bytes_of_sparse_blocks,
    "sram": bytes_by_sram,
    "softmax": passes_of_softmax,
    "operations": operations_beside_products,
}


def markdown(figures: Sequence[Figure]) -> str:
    """The figures as a page, each with its picture beside it in a file `paper_NAME.png`."""
    lines = [
        "# The papers' figures, from our counts",
        "",
        "`cupyflash paper --format markdown` writes this page, `python docs/pictures.py` draws its pictures. We measured nothing",
        "on it: the tables are closed forms, with which replay and execution agree to the byte ([Bytes](traffic.md)). The papers'",
        "measurements are called so. 1 GB is 10^9 bytes.",
    ]
    for figure in figures:
        lines += ["", f"## {figure.title}", "", f"The paper: {figure.paper}", ""]
        lines += [f"| {' | '.join(figure.heads)} |", "|" + " --- |" * len(figure.heads)]
        lines += [f"| {' | '.join(row)} |" for row in figure.rows]
        lines += ["", figure.explained, "", f"![{figure.title}](paper_{figure.name}.png)"]
    return "\n".join(lines) + "\n"
