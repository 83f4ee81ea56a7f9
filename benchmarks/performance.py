"""Writes the tables of docs/performance.md between their markers, all or those named:  python benchmarks/performance.py [NAME ...]

Models' times and counts of the PTX machine; nothing is timed and no GPU is needed. The clock's figures are those that calls.py and
auto.py keep.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from checkout import ROOT

# isort: split
import auto
import calls
import decode as decoding
import numpy as np
from cases import DecodeCase

from cupyflash import Device, Problem
from cupyflash.multiprocessor import EXPONENTIALS, clock_rate
from cupyflash.schedules import BackwardSchedule, decode_tiles, fa2_tiles, fa3_tiles, plan_backward
from cupyflash.sim import execute_backward
from cupyflash.sim.clock.rates import ChipRates
from cupyflash.sim.numbers.yardstick import draw, draw_gradient
from cupyflash.sim.ptx import Counters
from cupyflash.sim.theory.forms import split_bytes

PAGE = ROOT / "docs" / "performance.md"
DEVICES, HEAD_DIMS = ("A100-40GB", "RTX 4090", "H100-SXM"), (64, 128)
LONG = {"batch": 4, "heads": 16, "kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096}
PARTS = ("tensor", "exp", "float32", "issue", "shared", "L2", "HBM")
WARPS = 4  # of split.cu
MOST_GROWTH = 8.0  # of fa2_forward.cu


def full_rate(device: Device, rate: float) -> float:
    """FMAs a clock of a multiprocessor's tensor cores, where mma.sync reaches `rate`."""
    constants = ChipRates.of(device).constants
    return constants["wgmma.fmas"].value if "wgmma.fmas" in constants else rate


def hbm_bytes(device: Device) -> float:
    """Bytes of device memory in a clock of one multiprocessor."""
    assert device.hbm_bandwidth is not None
    return device.hbm_bandwidth / device.sm_count / clock_rate(device)


def tiles() -> Iterator[str]:
    """Clocks of one tile by part, what binds it, and the fraction of the tensor cores' peak that the model leaves."""
    yield f"| | tile | {' | '.join(PARTS)} | binds | no overlap | of mma.sync's peak | of the chip's |"
    yield "| --- |" + " --- |" * (len(PARTS) + 5)
    for name in DEVICES:
        device = Device.named(name)
        for d in HEAD_DIMS:
            problem = Problem(**LONG, head_dim=d, dtype="float16")
            best = fa2_tiles.choose(problem, device)
            config = best.config
            parts = dict(best.parts)
            serial = parts["tensor"] + parts["exp"] + parts["float32"]
            rate = fa2_tiles.fma_rate(problem, device)
            reached = best.rate * 2 * d  # FMAs a clock
            unique = 4 * problem.seqlen_q * d * problem.itemsize / (problem.seqlen_q**2 / config.block_rows / config.block_cols)
            full = full_rate(device, rate)
            parts["HBM"] = unique / hbm_bytes(device)
            clocks = " | ".join(f"{parts[part]:,.0f}" for part in PARTS)
            sizes = f"{config.block_rows} x {config.block_cols}"
            yield (
                f"| {name}, d {d} | {sizes}, {config.warps} x {config.warp_rows} rows, {config.blocks} blocks | {clocks} "
                f"| {best.bound} | {parts['tensor'] / serial:.0%} | {reached / rate:.0%} | {reached / full:.0%} |"
            )


def warpgroups() -> Iterator[str]:
    """fa3's turn on an H100 by the planner's model, and the TFLOP/s that it gives rows of 16k, of 2,048 columns in all."""
    device = Device.named("H100-SXM")
    parts = ("tensor", "exp", "float32", "issue")
    yield f"| | tile | consumers, stages | {' | '.join(parts)} | binds | TFLOP/s |"
    yield "| --- |" + " --- |" * (len(parts) + 4)
    for d in (64, 128, 256):
        for causal in (False, True):
            problem = Problem(1, 2048 // d, 2048 // d, 16384, 16384, d, "float16", causal=causal)
            best = fa3_tiles.choose(problem, device)
            config, found = best.config, dict(best.parts)
            seconds = fa3_tiles.clocks(problem, device, best) / clock_rate(device)
            rate = problem.flops / (2 if causal else 1) / seconds / 1e12
            clocks = " | ".join(f"{found[part]:,.0f}" for part in parts)
            yield (
                f"| d {d}{', causal' if causal else ''} | {config.team.block_rows} x {config.block_cols} "
                f"| {config.team.consumers}, {config.stages} | {clocks} | {best.bound} | {rate:.0f} |"
            )


def split() -> Iterator[str]:
    """Shared memory traffic of one tile under both ways to split it."""
    yield "| tile of four warps | | Q | K, V | O, written and read | maxima | all | wavefronts of 128 bytes |"
    yield "| --- | --- |" + " --- |" * 6
    for rows, cols, d in ((128, 64, 64), (128, 48, 128)):
        for name, moved in split_bytes(rows, cols, d, WARPS).items():
            total = sum(moved.values())
            cells = " | ".join(f"{value:,}" for value in moved.values())
            yield f"| {rows} x {cols}, d {d} | {name} | {cells} | {total:,} | {total // 128:,} |"


def rescaled(n: int, d: int, block_cols: int, warp_rows: int, spread: float, rows: int = 256) -> tuple[float, float]:
    """The share of tiles after a warp's first in which it rescales O: at any growth of a maximum of its rows, and at more than 2^8.

    Standard normal Q and K, Q times `spread`; tiles from the last to the first, as the kernel takes them.
    """
    random = np.random.default_rng(0)
    q = spread * random.standard_normal((rows, d), np.float32)
    k = random.standard_normal((n, d), np.float32)
    scores = q @ k.T * np.float32(np.log2(np.e) / np.sqrt(d))
    maxima = scores.reshape(rows, n // block_cols, block_cols).max(2)[:, ::-1]
    counted = []
    for most in (0.0, MOST_GROWTH):
        m, times = maxima[:, 0].copy(), 0
        for tile in maxima[:, 1:].T:
            grown = (np.maximum(m, tile) - m > most).reshape(-1, warp_rows).any(1)
            times += int(grown.sum())
            m = np.where(np.repeat(grown, warp_rows), np.maximum(m, tile), m)
        counted.append(times / (rows // warp_rows * (n // block_cols - 1)))
    return counted[0], counted[1]


def lazy() -> Iterator[str]:
    """The table of how often O is rescaled, at d 64 in tiles of 128 x 64."""
    yield "| N | scores' standard deviation | tiles that rescale, at any growth | beyond 2^8 |"
    yield "| --- | --- | --- | --- |"
    for n, spread in ((1024, 1.0), (4096, 1.0), (16384, 1.0), (4096, 4.0)):
        always, beyond = rescaled(n, 64, 64, 32, spread)
        yield f"| {n:,} | {spread:g} | {always:.1%} | {beyond:.1%} |"


def backward_tile(device: Device, d: int, tiles: int) -> tuple[BackwardSchedule, Counters]:
    """The backward of one column block and `tiles` row blocks on the PTX machine: what its main kernel counted."""
    problem = Problem(1, 1, 1, 4096, 4096, d, "float16")
    used = plan_backward(problem, device).tiling.used
    problem = replace(problem, seqlen_q=tiles * used.block_rows, seqlen_k=used.block_cols)
    schedule = plan_backward(problem, device, tiling=(used.block_rows, used.block_cols))
    (q, k, v), dout = draw(problem), draw_gradient(problem)
    execution = execute_backward(schedule, dout, q, k, v, np.zeros_like(dout), np.zeros(q.shape[:-1], np.float32))
    if execution.findings:
        raise RuntimeError(f"fa2_backward.cu has a fault: {execution.findings[0]}")
    return schedule, execution.counters["fa2_backward"]


def backward() -> Iterator[str]:
    """Clocks of one Br x Bc tile of the backward, from counts: five products, what passes through shared memory, exponentials."""
    yield "| | tile | tensor | shared | of it fragments | exp | binds | of mma.sync's peak | of the chip's | dQ by atomics, bytes |"
    yield "| --- |" + " --- |" * 9
    for name in DEVICES:
        device = Device.named(name)
        for d in HEAD_DIMS:
            (schedule, few), (_, more) = (backward_tile(device, d, tiles) for tiles in (2, 4))
            rate = fa2_tiles.fma_rate(schedule.problem, device)
            tensor = (more.mma_flops - few.mma_flops) / 2 / 2 / rate
            passed = [sum(each.wavefronts for each in counts.shared.values()) for counts in (few, more)]
            fragments = [counts.shared_kind("ldmatrix").wavefronts for counts in (few, more)]
            parts = {
                "tensor": tensor,
                "shared": (passed[1] - passed[0]) / 2,
                "fragments": (fragments[1] - fragments[0]) / 2,
                "exp": schedule.block_rows * schedule.block_cols / EXPONENTIALS,
            }
            clocks = " | ".join(f"{each:,.0f}" for each in parts.values())
            binds = max(("tensor", "shared", "exp"), key=lambda part: parts[part])
            reached, full = tensor / parts[binds], full_rate(device, rate)
            yield (
                f"| {name}, d {d} | {schedule.block_rows} x {schedule.block_cols} | {clocks} | {binds} | {reached:.0%} | "
                f"{reached * rate / full:.0%} | {2 * 4 * schedule.block_rows * d:,} |"
            )


def decode() -> Iterator[str]:
    """The table of decoding's plans for 32 query heads, four a key head, in float16: with few thread blocks, some, and many."""
    yield "| | batch, cache | configuration | splits | thread blocks | waves | kB in flight (needed) | copies a turn |"
    yield "| --- |" + " --- |" * 7
    for name in ("A100-40GB", "H100-SXM"):
        device = Device.named(name)
        needed = decode_tiles.needed_in_flight(device)
        for d in (64, 128, 256):
            for batch, n in ((1, 4096), (8, 16384), (128, 4096)):
                schedule = decoding.planned(device, DecodeCase("float16", d, n, True, batch, 32, 8))
                says = decoding.facts(schedule)
                blocks = f"{says['splits']} | {says['blocks']:,} | {says['waves']:.2f}"
                flight = f"{says['in_flight'] / 1e3:.0f} ({needed / 1e3:.0f})"
                case = f"{name}, d {d} | {batch}, {n:,} | {schedule.config}"
                yield f"| {case} | {blocks} | {flight} | {says['loads_a_turn']} |"


def replaced(page: str, name: str, lines: Iterator[str]) -> str:
    """The page with the block between `<!-- name -->` and `<!-- end -->` written anew."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda match: match[1] + "\n".join(lines) + "\n" + match[2], page)


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "tiles": tiles,
    "warpgroups": warpgroups,
    "split": split,
    "lazy": lazy,
    "backward": backward,
    "decode": decode,
    "calls": calls.table,
    "auto": partial(auto.table, True),
    "choices of tiles": partial(auto.table, False),
}


def main(names: Sequence[str]) -> None:
    page = PAGE.read_text()
    for name in names or TABLES:
        page = replaced(page, name, TABLES[name]())
    PAGE.write_text(page)


if __name__ == "__main__":
    main(sys.argv[1:])
