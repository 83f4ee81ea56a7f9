"""The tile of FlashAttention-2's kernel: the candidates, the reasons against others, and the one that is predicted to be fastest.

Everything here is a pure function of the problem and the device. The times are a model's, in clocks of one multiprocessor. A tile
of S (Br x Bc) with its two products takes time on the tensor cores (or FMA lanes), the exponential units, float32 arithmetic, issue
slots, shared memory and the way to the L2; in one warp, products and softmax come one after the other. The warps of a scheduler
overlap: together they take as long as the busiest of the six, or as one warp by itself.

Lengths and heads decide only between the three BLOCK_ROWS: everything else of a tile follows from the constants of a compiled
kernel, so calls of any size share three kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cupyflash.basics import Array
from cupyflash.device import Device
from cupyflash.multiprocessor import EXPONENTIALS, L2_BYTES, PARTITIONS, SHARED_BYTES, WARP, Multiprocessor, mma_rate, occupancy
from cupyflash.request.problem import Problem
from cupyflash.schedules.balance import Pieces, busiest
from cupyflash.schedules.base import GRANULE, padded_dim
from cupyflash.schedules.mask_tiles import kept_bytes, words
from cupyflash.schedules.moves import FLOAT32, part_bytes
from cupyflash.schedules.score_cost import of_score
from cupyflash.tiling import DoesNotFit, TileSize
from cupyflash.words import plural

BLOCK_ROWS = (16, 64, 128)
SHARED_BLOCK_ROWS = (16, 32, 64)
"""The rows of a block whose warps share their rows."""
WIDEST = 256
"""Columns of O that a warp's registers hold, of 16 rows."""
WARP_ROWS = (16, 32)
BLOCK_COLS = (16, 32, 48, 64, 96, 128)
STAGES = (1, 2)
MOST_FLOAT_COLS = 32  # P goes from lane to lane in unrolled code
MOST_REGISTERS = 255
SHARING_ROOM = 24
MOST_WARPS = 8
BLOCK_LATENCY = 2000
"""Clocks from a thread block's start to its first tile and from its last to its end; those of an SM's blocks overlap."""
TILE_LATENCY = 600
"""Clocks of a warp's tile in which it only waits: two barriers, first fragments, sums and maxima over lanes."""
BARRIER = 50
"""Clocks of a block's tile that overlap with nothing, for each barrier in it: one with two stages, two with one."""
IN_STEP = 1.1
"""A block that has a multiprocessor to itself takes so much longer: its warps meet at barriers, so that they do less at
the same time that differs."""
ALIKE = 1.03
"""The model cannot tell candidates within this factor of the fastest apart: of these the one with the most stages wins, then the
one with the fewest turns of the loop.
"""


@dataclass(frozen=True)
class Fa2Config:
    """One configuration of the kernel.

    block_rows, block_cols: Br and Bc. warp_rows: rows of S that a warp owns. stages: slots of the ring, a K and a V block each.
    q_in_regs: Q stays in registers too. blocks: thread blocks that share a multiprocessor. col_warps: warps that share their rows,
    each with its part of d and d_v.
    """

    block_rows: int
    block_cols: int
    warp_rows: int
    stages: int
    q_in_regs: bool
    blocks: int = 1
    col_warps: int = 1

    @property
    def warps(self) -> int:
        return self.block_rows // self.warp_rows * self.col_warps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def barriers(self) -> int:
        """Barriers in a turn of the loop. With one slot V_j has a wait of its own, and warps that share rows meet twice."""
        meetings = 2 if self.col_warps > 1 else 0
        return 1 + meetings if self.stages == 2 else max(2, 1 + meetings)  # which waiting for V_j is one of

    def __str__(self) -> str:
        held = "O, S and Q" if self.q_in_regs else "O and S"
        shared = f", {self.col_warps} to the same with half of d and d_v each" if self.col_warps > 1 else ""
        shape = f"{plural(self.warps, 'warp')} of {self.warp_rows} rows{shared}, {held} in registers"
        return f"{shape}, {plural(self.stages, 'stage')}, {plural(self.blocks, 'block')} an SM"


@dataclass(frozen=True)
class Fa2Candidate:
    """A configuration with its needs, and the reason why it was rejected or its speed by the model.

    `parts`: clocks that one tile of the whole block takes of a multiprocessor's tensor cores (or FMA lanes), exponential units and
    so on. `rate`: scores a clock of a multiprocessor that is full of such blocks. `clocks`: the problem's, and `waves`: how often
    it fills the device; only for the fastest of each Br.
    """

    config: Fa2Config
    shared_bytes: int
    registers: int
    rejected: str | None = None
    parts: tuple[tuple[str, float], ...] = ()
    rate: float = 0.0
    clocks: float = math.inf
    waves: float = 0.0

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda part: part[1])[0]


def col_warps(problem: Problem) -> int:
    """Warps that share their rows: as many as O takes to be in registers."""
    return -(-padded_dim(problem.head_dim_v) // WIDEST)


def part(problem: Problem, d: int) -> int:
    """Columns of d, padded, that a warp has."""
    shared_by = col_warps(problem)
    return -(-d // (GRANULE * shared_by)) * GRANULE


def row_size(problem: Problem) -> int:
    """Bytes that a row of any tile has room for in shared memory."""
    return col_warps(problem) * part(problem, max(problem.head_dim, problem.head_dim_v)) * problem.itemsize


def exchange_bytes(problem: Problem, block_rows: int, block_cols: int) -> int:
    """Bytes through which warps that share their rows give each other S."""
    return block_rows * block_cols * FLOAT32 if col_warps(problem) > 1 else 0


def shared_bytes(problem: Problem, block_rows: int, block_cols: int, stages: int) -> int:
    """Bytes of the Q block, which O leaves through, of the ring, of S, and of the row block's part of a block mask."""
    tiles = (block_rows + 2 * stages * block_cols) * row_size(problem) + exchange_bytes(problem, block_rows, block_cols)
    return tiles + kept_bytes(problem, words(problem.seqlen_k, block_cols)) + part_bytes(problem, block_rows, 2 * block_cols)


def accumulators(problem: Problem, config: Fa2Config) -> int:
    """Registers a thread for O and S, and Q."""
    rows = config.warp_rows
    q = rows * part(problem, problem.head_dim) * problem.itemsize // (4 * WARP) if config.q_in_regs else 0
    return rows * (part(problem, problem.head_dim_v) + config.block_cols) // WARP + q


def most_accumulators(problem: Problem, device: Device, config: Fa2Config) -> int:
    """Registers a thread for O, S and Q beyond which ptxas was seen to spill; `.ci/compile_gate.py` checks it.

    A block of one warp, whose lanes make all copies, has room for fewer. ptxas for compute capability 12.0 keeps more addresses,
    head dimensions above 128 need more of them, and so do masks.
    """
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    half, one_warp, capability = problem.itemsize == 2, config.warps == 1, device.compute_capability
    if part(problem, problem.head_dim_v) == WIDEST and config.warp_rows == GRANULE and not masked(problem):
        # O alone takes 128.
        if half:
            return 136 if one_warp or capability < (8, 0) or positioned(problem) else 144
        return 0 if one_warp else 136
    if masked(problem):
        most = 72 if capability >= (12, 0) else 80 if wide or capability >= (10, 0) else 104
    elif positioned(problem):
        most = 104 if wide or not half else 112
        if narrow(problem):
            most = 88 if config.warp_rows > GRANULE else 96
    elif not half:
        most = 104 if wide else 128
    elif wide or capability >= (12, 0):
        most = 144
    else:
        most = 144 if config.warps <= 2 or capability < (8, 0) else 160
        if config.warps > 2 and not odd(problem) and capability in ((8, 0), (9, 0)) and not problem.options.dropout:
            most = 176
    if problem.options.masked:
        most = min(most, 128 if (10, 0) <= capability < (12, 0) else 144 if narrow(problem) else 160)
    if config.block_cols == max(BLOCK_COLS):
        most -= 40  # S takes twice the registers of the next narrower, and P half as much again
    return most - (32 if one_warp else 0)


def masked(problem: Problem) -> bool:
    """True if each score of every block has data or code of its own. (A mask concerns the scores of some blocks only.)"""
    return problem.options.bias or problem.options.transformed


def positioned(problem: Problem) -> bool:
    """True if more than the diagonal decides which keys a row sees, so that bounds are kept through the loops."""
    return problem.options.window is not None or problem.options.block_mask is not None or problem.options.packed


def narrow(problem: Problem) -> bool:
    """True if rows of a half type are copied in such small pieces that their addresses take many registers."""
    return problem.itemsize == 2 and problem.alignment < 8


def odd(problem: Problem) -> bool:
    """True if a row is not a whole number of swizzled groups of chunks, so that more addresses are needed."""
    return bool(problem.head_dim % 64 or problem.head_dim_v % 64)


def is_least(problem: Problem, device: Device, config: Fa2Config) -> bool:
    """True if no tile takes fewer registers, of four warps if the SRAM has room for them: such a tile is accepted in any case."""
    if config.warp_rows != GRANULE or config.block_cols != GRANULE or config.q_in_regs:
        return False
    if config.col_warps > 1:
        return True
    one_warp = shared_bytes(problem, BLOCK_ROWS[1], GRANULE, STAGES[0]) > device.sram_per_block
    if problem.itemsize == 4 and problem.options.of_scores and padded_dim(problem.head_dim_v) == WIDEST:
        one_warp |= device.compute_capability >= (12, 0)
    return one_warp == (config.warps == 1) and config.block_rows <= BLOCK_ROWS[1]


def registers(problem: Problem, device: Device, config: Fa2Config) -> int:
    """The approximate number of registers of a thread, derived from ptxas' results: accumulators, fragments, addresses."""
    slack = (32 if problem.itemsize == 2 else 80) + config.block_cols * config.warp_rows // 128
    if odd(problem):
        slack += 16
    if problem.options.of_scores:
        slack += 32
    if positioned(problem):
        slack += 64 if narrow(problem) else 16
    if device.compute_capability >= (12, 0):
        slack += 16
    elif device.compute_capability not in ((8, 0), (9, 0), (10, 0), (10, 3)):
        slack += 8  # the smaller chips of each kind
    return min(accumulators(problem, config) + slack, MOST_REGISTERS)


def configs(problem: Problem, blocks: tuple[int, int] | None) -> Iterator[Fa2Config]:
    """All configurations to choose from, with the given block sizes or with any."""
    half, shared_by = problem.itemsize == 2, col_warps(problem)
    every_cols = BLOCK_COLS if half else tuple(cols for cols in BLOCK_COLS if cols <= MOST_FLOAT_COLS)
    every_rows = BLOCK_ROWS if shared_by == 1 else SHARED_BLOCK_ROWS
    for block_rows, warp_rows in itertools.product((blocks[0],) if blocks else every_rows, WARP_ROWS):
        if block_rows % warp_rows:
            continue
        for block_cols, stages in itertools.product((blocks[1],) if blocks else every_cols, STAGES):
            for q_in_regs in (False, True) if half else (False,):
                yield Fa2Config(block_rows, block_cols, warp_rows, stages, q_in_regs, col_warps=shared_by)


def candidate(problem: Problem, device: Device, config: Fa2Config) -> Fa2Candidate:
    """A configuration's needs, and its rejection or rate."""
    need, regs = shared_bytes(problem, config.block_rows, config.block_cols, config.stages), registers(problem, device, config)

    def reject(reason: str) -> Fa2Candidate:
        return Fa2Candidate(config, need, regs, rejected=reason)

    if need > device.sram_per_block:
        return reject(f"shared memory: {need:,} of {device.sram_per_block:,} bytes")
    if config.warps > MOST_WARPS:
        return reject(f"registers: they feed {MOST_WARPS} warps, not {config.warps}")
    held, most = accumulators(problem, config), most_accumulators(problem, device, config)
    if held > most and not is_least(problem, device, config):
        return reject(f"registers: O, S{' and Q' if config.q_in_regs else ''} take {held} of {most}")
    # Where blocks share a register file, ptxas is held to their number: with some room, since the need is an estimate.
    resident = occupancy(device, config.threads, min(regs + SHARING_ROOM, MOST_REGISTERS), need, estimate=True).blocks
    if not resident:
        return reject("registers: no multiprocessor holds a block")
    config = replace(config, blocks=resident)
    parts = part_clocks(problem, device, config)
    rate = resident * config.block_rows * config.block_cols / turn(config, parts, resident)
    return Fa2Candidate(config, need, regs, None, tuple(parts.items()), rate)


def fma_rate(problem: Problem, device: Device) -> float:
    """FMAs of the two products in a clock of one multiprocessor."""
    if problem.itemsize == 4:
        return Multiprocessor.like(device.compute_capability).fma_lanes
    return mma_rate(device, problem.dtype)


def part_clocks(problem: Problem, device: Device, config: Fa2Config) -> dict[str, float]:
    """Clocks of one multiprocessor for one tile of the whole block (Br x Bc, both products), by unit."""
    sm = Multiprocessor.like(device.compute_capability)
    shared_by, size = config.col_warps, problem.itemsize
    d, dv = shared_by * part(problem, problem.head_dim), shared_by * part(problem, problem.head_dim_v)
    rows, cols, warps = config.block_rows, config.block_cols, config.warps
    products = rows * cols * (d + dv)
    loaded = cols * (d + dv) * size
    if size == 2:
        # Each warp reads its columns of K and V, and of its rows of Q; of S, those that share rows write and read two halves each.
        # A request moves 512 bytes, a tensor core instruction 2,048 FMAs.
        given = 4 * exchange_bytes(problem, rows, cols)
        wavefronts = (warps // shared_by * loaded + (0 if config.q_in_regs else rows * d * size) + given) / SHARED_BYTES
        issued = products / 2048 + wavefronts / 4
    else:
        # Four wavefronts a request of K and Q, two of V; P goes from lane to lane.
        requests = warps * d // 4 * (cols // 4 + config.warp_rows // 8)
        values = warps * cols * (dv // 8 + config.warp_rows // 8)
        wavefronts = 4 * requests + 2 * values
        issued = products / WARP + requests + values
    # Of each element of S: scaled, maximum, exponential, sum, half a conversion. 60 others a warp; three a copy.
    each, special = of_score(problem)
    issued += rows * cols / WARP * (4.5 * shared_by + each) + warps * 60 + loaded / 16 / WARP * 3
    return {
        "tensor" if size == 2 else "FMA": products / fma_rate(problem, device),
        "exp": rows * cols * (shared_by + special) / EXPONENTIALS,
        "float32": rows * cols * 2 * shared_by / sm.fma_lanes,
        "issue": issued / PARTITIONS,
        "shared": wavefronts + loaded / SHARED_BYTES,
        "L2": loaded / L2_BYTES,
    }


def turn(config: Fa2Config, parts: dict[str, float], resident: int) -> float:
    """Clocks in which `resident` blocks of a multiprocessor all go one tile further."""
    serial = sum(clocks for name, clocks in parts.items() if name in ("tensor", "FMA", "exp", "float32"))
    a_warp = PARTITIONS / config.warps  # what a warp's scheduler takes of the block's parts
    together = -(-resident * config.warps // PARTITIONS) * a_warp * (max(parts.values()) + BARRIER * config.barriers)
    return max(together, a_warp * serial + TILE_LATENCY) * (IN_STEP if resident == 1 else 1.0)


def whole(problem: Problem, device: Device, candidate: Fa2Candidate) -> Fa2Candidate:
    """A candidate with the problem's clocks and waves: row blocks spread over the multiprocessors."""
    p, config = problem, candidate.config
    row_blocks, heads = -(-max(p.seqlen_q, 1) // config.block_rows), max(p.head_count, 1)

    def visits(pieces: Array) -> Array:  # in launch order a head's last rows come first
        starts = (row_blocks - 1 - pieces % row_blocks) * config.block_rows
        first, _ = p.keys_seen(starts, p.seqlen_k)
        _, end = p.keys_seen(np.minimum(starts + config.block_rows, max(p.seqlen_q, 1)) - 1, p.seqlen_k)
        seen: Array = np.maximum(0, -(-end // config.block_cols) - first // config.block_cols)
        return seen

    clocks = spread(candidate, device, Pieces(row_blocks * heads, visits, row_blocks))
    return replace(candidate, clocks=clocks, waves=row_blocks * heads / (config.blocks * device.sm_count))


def spread(candidate: Fa2Candidate, device: Device, visits: Pieces) -> float:
    """Clocks of row blocks that visit these numbers of column blocks, in launch order: those of the busiest multiprocessor, which
    divides its time among as many as it has room for."""
    config, parts, blocks = candidate.config, dict(candidate.parts), visits.number
    full, rest = divmod(-(-blocks // device.sm_count), config.blocks)
    places = config.blocks * device.sm_count
    each = busiest(visits, places) / -(-blocks // places)  # of the row blocks of the busiest place
    clocks = full * (each * turn(config, parts, config.blocks) + BLOCK_LATENCY)
    return clocks + (each * turn(config, parts, rest) + BLOCK_LATENCY if rest else 0)


def _best(able: Iterable[Fa2Candidate], least: Callable[[Fa2Candidate], int]) -> Fa2Candidate:
    """The candidate with the smallest value of `least`, of those that are the fastest or nearly so."""
    able = list(able)
    alike = max(each.rate for each in able) / ALIKE
    return min((each for each in able if each.rate >= alike), key=lambda each: (least(each), -each.rate))


@lru_cache(maxsize=1024)
def candidates(problem: Problem, device: Device, blocks: tuple[int, int] | None = None) -> tuple[Fa2Candidate, ...]:
    """Every configuration: the fastest of each Br, fastest first, then the others, then the rejected ones.

    `blocks` fixes (Br, Bc).
    """
    found = [candidate(problem, device, config) for config in configs(problem, blocks)]
    able = [each for each in found if not each.rejected]
    # First the best of each Br x Bc, so that fixing the chosen block sizes chooses the same again.
    shapes: dict[tuple[int, int], list[Fa2Candidate]] = {}
    for each in able:
        shapes.setdefault((each.config.block_rows, each.config.block_cols), []).append(each)
    of_shape = [_best(same, lambda each: -each.config.stages) for same in shapes.values()]
    finalists: list[Fa2Candidate] = []
    for block_rows in sorted({each.config.block_rows for each in able}):
        of_rows = [each for each in of_shape if each.config.block_rows == block_rows]
        finalists.append(whole(problem, device, _best(of_rows, lambda each: -each.config.block_cols)))
    finalists.sort(key=lambda each: (each.clocks, -each.config.block_rows))
    chosen = {each.config for each in finalists}
    others = sorted((each for each in able if each.config not in chosen), key=lambda each: -each.rate)
    return (*finalists, *others, *(each for each in found if each.rejected))


def choose(problem: Problem, device: Device, blocks: tuple[int, int] | None = None) -> Fa2Candidate:
    """The configuration that is predicted to be fastest. Raises `DoesNotFit` if none can run."""
    found = candidates(problem, device, blocks)
    if found and not found[0].rejected:
        return found[0]
    what = f"fa2 at head_dim {problem.head_dim} {problem.dtype}"
    least = min(found, key=lambda each: each.shared_bytes, default=None)
    if least is None:
        assert blocks is not None  # else there are some
        raise DoesNotFit(f"{what} runs blocks in steps of {GRANULE}; the tiling asks for Br {blocks[0]} x Bc {blocks[1]}")
    sizes = f"blocks of {least.config.block_rows} x {least.config.block_cols}"
    if least.shared_bytes > device.sram_per_block:
        raise DoesNotFit(
            f"{what} needs at least {least.shared_bytes:,} bytes of SRAM ({sizes}); {device.name} gives a block "
            f"{device.sram_per_block:,} bytes"
        )
    raise DoesNotFit(f"{what} cannot run {sizes} on {device.name}: {least.rejected}")


def finalists(problem: Problem, device: Device) -> tuple[Fa2Candidate, ...]:
    """The configurations of which lengths and number of heads choose one. Raises as `choose` does."""
    choose(problem, device)
    return tuple(each for each in candidates(problem, device) if each.clocks < math.inf)


def fit(problem: Problem, device: Device) -> TileSize:
    """The chosen configuration's block sizes, with the reason."""
    best = choose(problem, device)
    reason = f"{best.config}; {best.shared_bytes:,} of {device.sram_per_block:,} bytes; bound by {best.bound}"
    return TileSize(best.config.block_rows, best.config.block_cols, reason)
