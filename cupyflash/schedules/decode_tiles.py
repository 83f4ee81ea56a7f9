"""How the decoding kernel runs a problem: rows and keys of a thread block, slots of its ring, and into how many splits keys go."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from cupyflash.device import Device
from cupyflash.multiprocessor import WARP, occupancy
from cupyflash.problem import Problem
from cupyflash.schedules.base import FLOAT32, GRANULE, padded_dim, require_dtype
from cupyflash.tiling import DoesNotFit

# Keys of a block, and slots of the ring: those that are tried first are taken where others are not faster.
BLOCK_COLS = (64, 32, 16)
STAGES = (4, 3, 2)
# Without asynchronous copies more slots than one are of no use.
ASYNCHRONOUS = (8, 0)
# What a model's seconds are good for: a candidate that is faster by less is not taken to be.
NOISE = 0.03
# Warps of a thread block, where rows do not ask for more
WARPS = 4
MOST_ROW_WARPS = 8
# d_v up to which a warp's O of two tiles of 16 rows is in registers
MOST_DIM_OF_TWO = 128
# What the merging kernel has room for
MOST_SPLITS = 256
# Pages whose places are in shared memory at a time
KNOWN_PAGES = 128
# Seconds from a load to its data. That much times the bandwidth has to be under way (Little's law); twice that, since a memory that
# is busy takes longer.
LATENCY = 0.8e-6
BUSY = 2
# Of the bandwidth, where a device has none in the catalogue
BANDWIDTH = 1e12
# Seconds that a second kernel takes to begin behind the first.
LAUNCH = 2e-6
# Beside O, S and fragments a thread needs so many registers.
OTHER_REGISTERS = 70
MOST_REGISTERS = 255


@dataclass(frozen=True)
class Config:
    """One configuration of the kernel: `row_tiles` tiles of 16 rows a warp, `row_warps` warps that share out rows and `key_warps`
    the keys of a block, `block_cols` keys a block and `stages` slots of the ring."""

    row_tiles: int
    row_warps: int
    key_warps: int
    block_cols: int
    stages: int

    @property
    def block_rows(self) -> int:
        """Rows of a tile, all heads of a group and all queries together."""
        return GRANULE * self.row_tiles * self.row_warps

    @property
    def threads(self) -> int:
        return WARP * self.row_warps * self.key_warps

    def __str__(self) -> str:
        warps = f"{self.row_warps} x {self.key_warps} warps over rows x keys"
        return f"{warps}, {self.block_cols} keys a block, {self.stages} stages"


@dataclass(frozen=True)
class Candidate:
    """A configuration on a device: bytes of shared memory by what is held, thread blocks that share a multiprocessor, and splits
    with the seconds that the model takes it to need; or why it was rejected."""

    config: Config
    rooms: tuple[tuple[str, int], ...]
    resident: int = 0
    splits: int = 1
    seconds: float = 0.0
    rejected: str | None = None

    @property
    def shared_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.rooms)


def group(problem: Problem) -> int:
    """Query heads of a key head."""
    return problem.heads // max(1, problem.kv_heads)


def part_width(problem: Problem) -> int:
    """Floats of a row of a split's O."""
    return -(-problem.head_dim_v // 4) * 4


def key_bytes(problem: Problem) -> int:
    """Bytes of a row of K and one of V."""
    return (problem.head_dim + problem.head_dim_v) * problem.itemsize


def rooms(problem: Problem, config: Config) -> dict[str, int]:
    """Bytes of shared memory by what is held there: Q, the ring of K and V blocks, and pages' places (or the length)."""
    d, d_v = padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)
    return {
        "Q": config.block_rows * d * problem.itemsize,
        "K, V": config.stages * config.block_cols * (d + d_v) * problem.itemsize,
        "pages": KNOWN_PAGES * 4,
    }


def row_shape(problem: Problem) -> tuple[int, int]:
    """(tiles of 16 rows a warp, warps that share out rows): as few as hold all rows that read a key head, if any do."""
    tiles = -(-problem.seqlen_q * group(problem) // GRANULE)
    if tiles > MOST_ROW_WARPS:
        return (2 if problem.head_dim_v <= MOST_DIM_OF_TWO and problem.head_dim <= MOST_DIM_OF_TWO else 1), MOST_ROW_WARPS
    return 1, next(warps for warps in (1, 2, 4, 8) if warps >= tiles)


def registers(problem: Problem, config: Config) -> int:
    """What a thread needs about."""
    own = padded_dim(problem.head_dim_v) // 2 + config.block_cols // config.key_warps // 2
    in_registers = padded_dim(problem.head_dim) // 4 if config.row_tiles == 1 and problem.head_dim <= MOST_DIM_OF_TWO else 0
    return min(MOST_REGISTERS, config.row_tiles * own + in_registers + OTHER_REGISTERS)


def needed_in_flight(device: Device) -> float:
    """Bytes that a multiprocessor has to have under way for the memory's bandwidth."""
    return BUSY * LATENCY * (device.hbm_bandwidth or BANDWIDTH) / device.sm_count


def in_flight(problem: Problem, config: Config, blocks: int) -> int:
    """Bytes of K and V that so many thread blocks of a multiprocessor have under way."""
    return blocks * max(1, config.stages - 1) * config.block_cols * key_bytes(problem)


def works(problem: Problem, config: Config) -> int:
    """Thread blocks of a split: row tiles of all key heads."""
    return problem.batch * problem.kv_heads * -(-problem.seqlen_q * group(problem) // config.block_rows)


def seconds(problem: Problem, device: Device, config: Config, resident: int, splits: int) -> float:
    """What the model takes so many splits to need: the multiprocessor with the most keys, as fast as the memory or what it has
    under way lets it, and what splits write and read again."""
    p, bandwidth = problem, device.hbm_bandwidth or BANDWIDTH
    every = works(p, config)
    most = -(-every * splits // device.sm_count)  # thread blocks of a multiprocessor
    together = min(most, resident)
    keys = math.ceil(math.ceil(p.seqlen_k / config.block_cols) / splits) * config.block_cols
    rate = min(2 * bandwidth / device.sm_count, in_flight(p, config, together) / LATENCY)
    busiest = most * keys * key_bytes(p) / rate
    parts = 2 * splits * p.head_count * p.seqlen_q * (part_width(p) + 2) * FLOAT32 / bandwidth + LAUNCH if splits > 1 else 0.0
    return max(busiest, every * p.seqlen_k * key_bytes(p) / bandwidth) + LATENCY * -(-most // together) + parts


def candidates(problem: Problem, device: Device, splits: int | None = None) -> tuple[Candidate, ...]:
    """Every configuration with its best splits, or with those that are asked for."""
    row_tiles, row_warps = row_shape(problem)
    found = []
    for cols in BLOCK_COLS:
        key_warps = max(1, min(WARPS // row_warps, cols // GRANULE))
        for stages in STAGES if device.compute_capability >= ASYNCHRONOUS else (1,):
            found.append(_candidate(problem, device, Config(row_tiles, row_warps, key_warps, cols, stages), splits))
    return tuple(found)


def _candidate(p: Problem, device: Device, config: Config, splits: int | None) -> Candidate:
    one = Candidate(config, tuple(rooms(p, config).items()))
    parts = (config.key_warps - 1) * config.row_warps * config.row_tiles * (padded_dim(p.head_dim_v) // 8 + 1) * WARP * 16
    if parts > dict(one.rooms)["K, V"]:
        return replace(one, rejected="shared memory: the ring does not hold what the warps that share out keys make")
    if one.shared_bytes > device.sram_per_block:
        return replace(one, rejected=f"shared memory: {one.shared_bytes:,} of {device.sram_per_block:,} bytes")
    resident = occupancy(device, config.threads, registers(p, config), one.shared_bytes, estimate=True).blocks
    if not resident:
        return replace(one, rejected="registers: a thread block has more than a multiprocessor")
    every = works(p, config)
    most = max(1, min(MOST_SPLITS, -(-p.seqlen_k // config.block_cols)))
    # At least as many thread blocks as multiprocessors, where there are so many blocks of keys.
    least = min(most, -(-device.sm_count // max(1, every)))
    tried = range(least, most + 1) if splits is None else (splits,)
    best = min(tried, key=lambda s: (seconds(p, device, config, resident, s), s))
    return replace(one, resident=resident, splits=best, seconds=seconds(p, device, config, resident, best))


@lru_cache(maxsize=1024)
def choose(problem: Problem, device: Device, splits: int | None = None) -> Candidate:
    """The widest configuration that the model predicts to be about as fast as any, of those that give every multiprocessor a thread
    block, or if none does the most of them. `splits` fixes their number.

    ValueError where the device has not the element type, `DoesNotFit` where nothing fits.
    """
    require_dtype(problem.dtype, device)
    found = candidates(problem, device, splits)
    able = [each for each in found if not each.rejected]
    if not able:
        least = min(found, key=lambda each: each.shared_bytes)
        raise DoesNotFit(f"decoding at head_dim {problem.head_dim} does not fit {device.name}: {least.rejected}")

    def short(each: Candidate) -> int:
        """Multiprocessors without a thread block."""
        return max(0, device.sm_count - works(problem, each.config) * each.splits)

    least_short = min(map(short, able))
    able = [each for each in able if short(each) == least_short]
    fastest = min(each.seconds for each in able)
    return next(each for each in able if each.seconds <= (1 + NOISE) * fastest)
