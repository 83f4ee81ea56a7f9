"""Clocks of each unit of a multiprocessor for a turn of FlashAttention-2's backward kernels, which `explain` shows.

The counts follow the kernels (fa2_backward.cu, fa2_backward_queries.cu); instructions beside products were counted in their machine
code.
"""

from __future__ import annotations

from cupyflash.device import Device
from cupyflash.multiprocessor import EXPONENTIALS, L2_BYTES, PARTITIONS, SHARED_BYTES, WARP, Multiprocessor
from cupyflash.request.problem import Problem
from cupyflash.schedules.base import GRANULE, padded_dim
from cupyflash.schedules.fa2_backward_tiles import GradientsLaunch, Warps
from cupyflash.schedules.fa2_tiles import fma_rate
from cupyflash.schedules.moves import FLOAT32
from cupyflash.schedules.score_cost import of_score

# Instructions of a turn beside products, reads and writes: of each score, for 32 lanes; and of a warp. At d 64 and 128 all are 3.80
# and 3.26 for each product instruction.
EACH_SCORE, EACH_WARP = 6.0, 330.0
FLOAT_OPERATIONS = 3  # of each score: less L, less D, times P


def main_fmas(d: int, dv: int, launch: GradientsLaunch, dq: bool) -> int:
    """FMAs of a score in a launch of the main kernel: S, and dV; or dP, dK and, if atomics sum it, dQ."""
    return d + launch.dv * dv + launch.dk * (dv + d + dq * d)


def query_fmas(d: int, dv: int) -> int:
    """FMAs of a score in the kernel of dQ: S, dP, dQ."""
    return 2 * d + dv


def column_parts(
    problem: Problem, device: Device, blocks: tuple[int, int], warps: Warps, launch: GradientsLaunch, dq: bool
) -> dict[str, float]:
    """Clocks of one multiprocessor for a row block's visit to a column block (Br x Bc), by unit. `dq`: True if atomics sum dQ."""
    p, (rows, cols) = problem, blocks
    d, dv, size = padded_dim(p.head_dim), padded_dim(p.head_dim_v), p.itemsize
    dq = dq and launch.dk
    products = rows * cols * main_fmas(d, dv, launch, dq)
    again, groups = rows // warps.at_once, cols // warps.own  # how often a warp reads its keys; warps that read all rows
    read = cols * again * (d + launch.dk * dv) + groups * rows * (d + launch.dv * dv + launch.dk * (dv + d))
    # dS, and where two warps share keys P: written once; dQ's items read all of dS, or half, and of K as much
    kept = rows * cols * (dq or (warps.beside > 1 and launch.dk)) + rows * cols * (warps.beside > 1 and launch.dv)
    read += rows * cols * (warps.beside > 1) * warps.beside * (launch.dk + launch.dv)
    if dq:
        item_rows = GRANULE * (warps.own // GRANULE if rows % warps.own == 0 else 1)
        down = rows // item_rows
        read += -(-warps.count(cols) // down) * rows * cols + down * cols * d
    loaded = rows * (d + dv) * size
    added = dq * rows * d * FLOAT32
    moved = (read + kept) * size + loaded + added
    return _parts(p, device, (rows, cols), warps.count(cols), products, moved, loaded + added)


def query_parts(problem: Problem, device: Device, blocks: tuple[int, int], warps: Warps) -> dict[str, float]:
    """The same for the kernel of dQ alone: a column block's turn of a row block."""
    p, (rows, cols) = problem, blocks
    d, dv, size = padded_dim(p.head_dim), padded_dim(p.head_dim_v), p.itemsize
    in_regs = warps.own == 2 * GRANULE and warps.beside == 1 and d <= 64
    again, groups = (0 if in_regs else cols // warps.at_once), rows // warps.own
    read = rows * again * (d + dv) + groups * cols * (2 * d + dv)
    loaded = cols * (d + dv) * size
    products = rows * cols * query_fmas(d, dv)
    return _parts(p, device, (rows, cols), warps.count(rows), products, read * size + loaded, loaded)


def _parts(
    problem: Problem, device: Device, blocks: tuple[int, int], warps: int, products: int, moved: int, asked: int
) -> dict[str, float]:
    """The clocks of each unit, from FMAs (`products`), bytes through shared memory (`moved`), and bytes to and from the L2
    (`asked`). For float32 the cost of shared memory is unknown and left out: its FMAs take far longer."""
    rows, cols = blocks
    each, special = of_score(problem)
    half = problem.itemsize == 2
    issued = products / (2048 if half else WARP) + moved / SHARED_BYTES / 4
    issued += rows * cols / WARP * (EACH_SCORE + each) + warps * EACH_WARP
    parts = {
        "tensor" if half else "FMA": products / fma_rate(problem, device),
        "exp": rows * cols * (1 + special) / EXPONENTIALS,
        "float32": rows * cols * FLOAT_OPERATIONS / Multiprocessor.like(device.compute_capability).fma_lanes,
        "issue": issued / PARTITIONS,
        "L2": asked / L2_BYTES,
    }
    return parts | ({"shared": moved / SHARED_BYTES} if half else {})
