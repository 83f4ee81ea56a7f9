"""The tile of FlashAttention-3's kernel: which sizes a Hopper runs, which of them a problem gets, and why a problem gets none.

Everything here is a pure function of the problem and the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash.device import Device
from cupyflash.multiprocessor import EXPONENTIALS, PARTITIONS, Multiprocessor
from cupyflash.problem import Problem
from cupyflash.schedules.base import GRANULE, padded_dim
from cupyflash.tiling import DoesNotFit, TileSize

WARPGROUP = 128
WARPGROUP_ROWS = 64
"""Rows of a warpgroup's product (wgmma m64nNk16)."""
MOST_COLS = 256
"""Columns of one product."""
SLAB = 64
"""Columns of a half type in a row of 128 bytes, which is what the 128-byte swizzle exchanges 16-byte pieces in."""
SLAB_BYTES = 128
STAGES = (4, 3, 2)
"""Slots of the rings: as many as fit."""
BARRIER_BYTES = 8
ALIGNMENT = 16
"""Bytes that TMA wants to divide every row's address."""
ISSUED = 2.75, 70
"""Instructions of a warp's turn besides its products: for each column, and for all of them (machine code of d 64, 128 and 256)."""
WORK_LATENCY = 2000
"""Clocks from a row block's start to its first products and from its last to its end."""
IN_STEP = 1.1
"""A turn takes so much longer than what binds it: warpgroups wait for one another."""


@dataclass(frozen=True)
class Team:
    """The consumer warpgroups of a thread block.

    `registers`: of a consumer's and of a producer's thread, once `setmaxnreg` has moved them. Together they are what the block has
    at launch: a multiprocessor's 65,536 over its threads, rounded down to eights. The second pair is for a producer with more
    to keep than a causal mask: a window, key lengths, packed sequences.
    `accumulators`: of a thread, for O, S and P, up to which `.ci/compile_gate.py` sees neither spills nor serialised products,
    with none, one or both of a window and packed sequences, which keep bounds through the loops.
    """

    consumers: int
    registers: tuple[tuple[int, int], tuple[int, int]]
    accumulators: tuple[int, int, int]

    @property
    def block_rows(self) -> int:
        """Br."""
        return WARPGROUP_ROWS * self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)


TEAMS = (
    Team(3, ((160, 32), (152, 56)), (128, 104, 88)),
    Team(2, ((240, 24), (232, 40)), (200, 176, 160)),
)


@dataclass(frozen=True)
class Config:
    """One configuration of the kernel."""

    team: Team
    block_cols: int
    stages: int
    ping_pong: bool
    registers: tuple[int, int]

    def __str__(self) -> str:
        order = "in turns" if self.ping_pong else "each when it can"
        return f"a producer and {self.team.consumers} consumer warpgroups, {order}, {self.stages} stages"


def refusal(problem: Problem, device: Device) -> str | None:
    """Why the kernel does not run a problem, whatever the tile, in one sentence; None where it does."""
    p, asked = problem, problem.options
    if device.compute_capability != (9, 0):
        return f"warpgroup products are compute capability 9.0's, and {device.name} has " + "{}.{}".format(
            *device.compute_capability
        )
    if p.itemsize != 2:
        return f"warpgroup products are of half types, and this is {p.dtype}"
    for name, has in (("a mask", asked.mask), ("a bias", asked.bias), ("a block mask", asked.block_mask is not None)):
        if has:
            return f"the kernel has no place for {name}"
    if p.softmax_scale <= 0:
        return f"the kernel's scale is positive, and this is {p.softmax_scale}"
    if not (p.seqlen_q and p.seqlen_k and p.head_count):
        return "TMA copies from tensors with elements, and one here has none"
    if p.alignment < ALIGNMENT:
        return f"TMA takes rows at multiples of {ALIGNMENT} bytes, and here they are at multiples of {p.alignment}"
    return None


def slab_bytes(columns: int) -> int:
    """Bytes that a row of so many elements takes in shared memory."""
    return -(-columns // SLAB) * SLAB_BYTES


def rooms(problem: Problem, config: Config) -> dict[str, int]:
    """Bytes of shared memory by what is held there: Q, which O leaves through, the two rings, and the barriers."""
    k, v = slab_bytes(problem.head_dim), slab_bytes(problem.head_dim_v)
    return {
        "Q": config.team.block_rows * max(k, v),
        "K": config.stages * config.block_cols * k,
        "V": config.stages * config.block_cols * v,
        "barriers": BARRIER_BYTES * (3 + 4 * config.stages),
    }


def accumulators(problem: Problem, block_cols: int) -> int:
    """Registers of a thread for O, S and P."""
    return padded_dim(problem.head_dim_v) // 2 + block_cols // 2 + block_cols // 4


def config_of(problem: Problem, device: Device, blocks: tuple[int, int]) -> Config:
    """How the kernel runs (Br, Bc). ValueError where it does not run such blocks, `DoesNotFit` where they do not fit."""
    team = next((team for team in TEAMS if team.block_rows == blocks[0]), None)
    if team is None or blocks[1] % GRANULE or not 0 < blocks[1] <= MOST_COLS:
        rows = " or ".join(str(team.block_rows) for team in reversed(TEAMS))
        raise ValueError(
            f"the fa3 kernel runs blocks of {rows} rows and a multiple of {GRANULE} up to {MOST_COLS} columns, got {blocks}"
        )
    asked, held = problem.options, accumulators(problem, blocks[1])
    kept = (asked.window is not None) + asked.packed
    most = team.accumulators[kept]
    if held > most:
        sizes = f"blocks of {blocks[0]} x {blocks[1]}"
        raise DoesNotFit(f"fa3 with {sizes} needs {held} registers of a thread for O, S and P; {most} are free")
    registers = team.registers[bool(kept or asked.padded)]
    for stages in STAGES:
        config = Config(team, blocks[1], stages, problem.head_dim_v <= 128, registers)
        need = sum(rooms(problem, config).values())
        if need <= device.sram_per_block:
            break
    else:
        raise DoesNotFit(
            f"fa3 with blocks of {blocks[0]} x {blocks[1]} needs {need:,} bytes of shared memory; {device.name} gives a block "
            f"{device.sram_per_block:,}"
        )
    return config


def fit(problem: Problem, device: Device) -> TileSize:
    """The widest blocks that registers and shared memory hold, of three warpgroups where O is narrow.

    ValueError where `refusal` has a reason, `DoesNotFit` where nothing fits.
    """
    reason = refusal(problem, device)
    if reason:
        raise ValueError(f"fa3 does not run this: {reason}")
    widest = 128 if problem.options.causal else MOST_COLS  # what is masked of a block on the diagonal is computed in vain
    for team in TEAMS if max(problem.head_dim, problem.head_dim_v) <= SLAB else TEAMS[1:]:
        for block_cols in range(widest, 0, -GRANULE):
            try:
                config = config_of(problem, device, (team.block_rows, block_cols))
            except DoesNotFit:
                continue
            return TileSize(team.block_rows, block_cols, f"the widest that registers and shared memory hold: {config}")
    need = sum(rooms(problem, Config(TEAMS[-1], GRANULE, STAGES[-1], False, TEAMS[-1].registers[0])).values())
    raise DoesNotFit(
        f"fa3 at head_dim {problem.head_dim} needs at least {need:,} bytes of SRAM; {device.name} gives a block "
        f"{device.sram_per_block:,} bytes"
    )


def part_clocks(problem: Problem, device: Device, config: Config) -> dict[str, float]:
    """Clocks of one multiprocessor for one turn of a whole block (Br x Bc, both products), by what it is spent on."""
    sm = Multiprocessor.like(device.compute_capability)
    peak, scalar = device.tensor_peak.get(problem.dtype), device.tensor_peak.get("float32")
    fma_rate = peak / scalar * sm.fma_lanes if peak and scalar else 2048.0  # both of the same clock
    rows, cols = config.team.block_rows, config.block_cols
    each, all_ = ISSUED
    return {
        "tensor": rows * cols * (padded_dim(problem.head_dim) + padded_dim(problem.head_dim_v)) / fma_rate,
        "exp": rows * cols / EXPONENTIALS,
        "float32": rows * cols * 2 / sm.fma_lanes,
        "issue": rows // GRANULE * (each * cols + all_) / PARTITIONS,
    }


def clocks(problem: Problem, device: Device, blocks: tuple[int, int]) -> float:
    """What the model takes the problem to need, in clocks; row blocks are spread over the multiprocessors."""
    p, (block_rows, block_cols) = problem, blocks
    turn = IN_STEP * max(part_clocks(p, device, config_of(p, device, blocks)).values())
    row_blocks = -(-p.seqlen_q // block_rows)
    starts = np.arange(0, row_blocks, max(1, row_blocks // 128)) * block_rows  # a sample
    first, _ = p.keys_seen(starts, p.seqlen_k)
    _, end = p.keys_seen(np.minimum(starts + block_rows, p.seqlen_q) - 1, p.seqlen_k)
    turns = np.maximum(0, -(-end // block_cols) - first // block_cols)
    rounds = -(-row_blocks * p.head_count // device.sm_count)
    return max(rounds * float(turns.mean()), float(turns.max())) * turn + rounds * WORK_LATENCY
