"""The configurations of the decoding kernel: rows and keys of a thread block, slots of its ring, and the number of splits of the
keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cupyflash.basics import Array
from cupyflash.device import Device
from cupyflash.multiprocessor import PARTITIONS, WARP, clock_rate, occupancy
from cupyflash.request import score
from cupyflash.request.problem import Problem
from cupyflash.schedules import fa2_tiles
from cupyflash.schedules.base import GRANULE, padded_dim, require_dtype
from cupyflash.schedules.moves import FLOAT32, functions
from cupyflash.tiling import DoesNotFit

# Keys of a block, and slots of the ring: those that are tried first are taken where others are not faster.
BLOCK_COLS = (64, 32, 16)
STAGES = (4, 3, 2)
# Without asynchronous copies more slots than one are of no use.
ASYNCHRONOUS = (8, 0)
# What a model's seconds are good for: a candidate that is faster by less is not taken to be.
NOISE = 0.03
# By which share fewer thread blocks than multiprocessors must be faster, by a model that no chip has shown to be as near as that.
WORTH = 0.1
# Warps of a thread block, where rows do not ask for more
WARPS = 4
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
OTHER_REGISTERS = 80
MOST_REGISTERS = 255


@dataclass(frozen=True)
class DecodeConfig:
    """One configuration of the kernel: `row_tiles` tiles of 16 rows a warp; `row_warps` warps that divide the rows and `key_warps`
    that divide the keys of a block; `block_cols` keys a block; `stages` slots of the ring."""

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
class DecodeCandidate:
    """A configuration on a device: bytes of shared memory by contents, thread blocks that share a multiprocessor, and splits with
    the model's seconds; or the reason why it was rejected."""

    config: DecodeConfig
    rooms: tuple[tuple[str, int], ...]
    resident: int = 0
    splits: int = 1
    seconds: float = 0.0
    rejected: str | None = None

    @property
    def shared_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.rooms)


def part_width(problem: Problem) -> int:
    """The number of floats in a row of a split's O."""
    return -(-problem.head_dim_v // 4) * 4


def key_bytes(problem: Problem) -> int:
    """Bytes of a row of K and one of V."""
    return (problem.head_dim + problem.head_dim_v) * problem.itemsize


def rooms(problem: Problem, config: DecodeConfig) -> dict[str, int]:
    """Bytes of shared memory by contents: Q, the ring of K and V blocks, pages' places (or the length), and the values that score
    and mask functions read once a head, for each row."""
    d, d_v = padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)
    found = {
        "Q": config.block_rows * d * problem.itemsize,
        "K, V": config.stages * config.block_cols * (d + d_v) * problem.itemsize,
        "pages": KNOWN_PAGES * 4,
    }
    loads = sum(len(score.of_head(form)) for form in functions(problem))
    return found | ({"of_head": config.block_rows * FLOAT32 * loads} if loads else {})


def row_shapes(problem: Problem) -> tuple[tuple[int, int], ...]:
    """(tiles of 16 rows a warp, warps that divide the rows): first the shape that holds all rows that read a key head, or most of
    them, then those that take less shared memory and read K and V more often."""
    tiles = -(-problem.seqlen_q * problem.group // GRANULE)
    narrow = max(problem.head_dim, problem.head_dim_v) <= MOST_DIM_OF_TWO
    shapes = [(2, 8), *((1, warps) for warps in (8, 4, 2, 1))] if narrow else [(1, warps) for warps in (8, 4, 2, 1)]
    enough = [shape for shape in shapes if math.prod(shape) >= tiles]
    return tuple(shapes[len(enough) - 1 if enough else 0 :])


def registers(problem: Problem, config: DecodeConfig) -> int:
    """The approximate number of registers that a thread needs."""
    own = padded_dim(problem.head_dim_v) // 2 + config.block_cols // config.key_warps // 2
    fragments = padded_dim(problem.head_dim) // 4 if in_registers(problem, config) else 0
    return config.row_tiles * own + fragments + OTHER_REGISTERS


def needed_in_flight(device: Device) -> float:
    """Bytes that a multiprocessor has to have under way for the memory's bandwidth."""
    return BUSY * LATENCY * (device.hbm_bandwidth or BANDWIDTH) / device.sm_count


def in_flight(problem: Problem, config: DecodeConfig, blocks: Any) -> Any:
    """Bytes of K and V that `blocks` thread blocks (an integer, or an array of them) of a multiprocessor have in flight."""
    return blocks * max(1, config.stages - 1) * config.block_cols * key_bytes(problem)


def works(problem: Problem, config: DecodeConfig) -> int:
    """Thread blocks of a split: row tiles of all key heads."""
    return problem.batch * problem.kv_heads * -(-problem.seqlen_q * problem.group // config.block_rows)


def in_registers(problem: Problem, config: DecodeConfig) -> bool:
    """True if the kernel keeps a warp's rows of Q in registers."""
    return config.row_tiles == 1 and max(problem.head_dim, problem.head_dim_v) <= MOST_DIM_OF_TWO


def part_clocks(problem: Problem, device: Device, config: DecodeConfig) -> dict[str, float]:
    """Clocks of one multiprocessor for a block of keys of a thread block, by unit, as for a tile of `fa2`."""
    rows = GRANULE * config.row_tiles
    alike = fa2_tiles.Fa2Config(config.block_rows, config.block_cols, rows, config.stages, in_registers(problem, config))
    return fa2_tiles.part_clocks(problem, device, alike)


def turn(problem: Problem, device: Device, config: DecodeConfig, together: int) -> float:
    """Clocks in which `together` thread blocks of a multiprocessor all advance by a block of keys: the cost of `fa2`'s turn, with
    the keys divided among the warps that have the same rows."""
    parts = part_clocks(problem, device, config)
    busy = together * max(1.0, PARTITIONS * WARP / config.threads) * max(parts.values())
    serial = sum(clocks for name, clocks in parts.items() if name not in ("shared", "L2")) * PARTITIONS * WARP / config.threads
    return max(busy, serial + fa2_tiles.TILE_LATENCY)


def keys_read(problem: Problem, config: DecodeConfig) -> tuple[int, int]:
    """Keys that row tiles read, of a cache that is full: the most that one does, and all together."""
    p, rows = problem, problem.seqlen_q * problem.group
    starts = np.arange(0, rows, config.block_rows)
    first, _ = p.keys_seen(starts // p.group, p.seqlen_k)
    _, end = p.keys_seen((np.minimum(starts + config.block_rows, rows) - 1) // p.group, p.seqlen_k)
    keys = np.maximum(0, end - first)
    return int(keys.max(initial=0)), p.batch * p.kv_heads * int(keys.sum())


def least_seconds(problem: Problem, device: Device) -> float:
    """The seconds in which the memory delivers the visible K and V once for each key head."""
    p = problem
    first, _ = p.keys_seen(np.array([0]), p.seqlen_k)
    _, end = p.keys_seen(np.array([max(0, p.seqlen_q - 1)]), p.seqlen_k)
    return p.batch * p.kv_heads * max(0, int(end[0] - first[0])) * key_bytes(p) / (device.hbm_bandwidth or BANDWIDTH)


def times(problem: Problem, device: Device, config: DecodeConfig, resident: int, splits: Array) -> dict[str, Array]:
    """The model's seconds with each number of splits, by part. memory: the reads of all row tiles, at the bandwidth. loads: those
    of the multiprocessor with the most keys, as fast as its bytes in flight and twice its share of the bandwidth allow. arithmetic:
    its products and exponentials. start: of its thread blocks. partial: the bytes that splits write and read again, and the launch
    for this."""
    p, bandwidth = problem, device.hbm_bandwidth or BANDWIDTH
    most = -(-works(p, config) * splits // device.sm_count)  # thread blocks of a multiprocessor
    together = np.clip(most, 1, resident)
    rounds = -(-most // together)
    longest, all_keys = keys_read(p, config)
    turns = -(-math.ceil(longest / config.block_cols) // splits)
    rate = np.minimum(2 * bandwidth / device.sm_count, in_flight(p, config, together) / LATENCY)
    clocks = np.array([turn(p, device, config, each) for each in range(1, resident + 1)])[together - 1]
    again = 2 * splits * p.head_count * p.seqlen_q * (part_width(p) + 2) * FLOAT32 / bandwidth + LAUNCH
    return {
        "memory": np.full(len(splits), all_keys * key_bytes(p) / bandwidth),
        "loads": most * turns * config.block_cols * key_bytes(p) / rate,
        "arithmetic": rounds * turns * clocks / clock_rate(device),
        "start": rounds * fa2_tiles.BLOCK_LATENCY / clock_rate(device),
        "partial": np.where(splits > 1, again, 0.0),
    }


def seconds(problem: Problem, device: Device, config: DecodeConfig, resident: int, splits: Array) -> Array:
    """The seconds that the model gives each number of splits: the longest of memory, loads and arithmetic, plus the rest."""
    return overall(times(problem, device, config, resident, splits))


def overall(parts: dict[str, Array]) -> Array:
    """The parts of `times` as one: the longest of memory, loads and arithmetic, and the rest."""
    longest = np.maximum(np.maximum(parts["memory"], parts["loads"]), parts["arithmetic"])
    needed: Array = longest + parts["start"] + parts["partial"]
    return needed


def split_keys(problem: Problem, config: DecodeConfig, splits: int) -> int:
    """Keys that the longest of `splits` splits reads, in whole blocks."""
    longest, _ = keys_read(problem, config)
    return -(-math.ceil(longest / config.block_cols) // splits) * config.block_cols


def at_a_time(problem: Problem, device: Device, candidate: DecodeCandidate) -> int:
    """Thread blocks that run together on the whole device."""
    return min(works(problem, candidate.config) * candidate.splits, candidate.resident * device.sm_count)


def under_way(problem: Problem, device: Device, candidate: DecodeCandidate) -> int:
    """Bytes of K and V that a multiprocessor with any thread block has under way, on the average. A split may have fewer blocks of
    keys than its ring has slots."""
    c, together = candidate, at_a_time(problem, device, candidate)
    each = min(in_flight(problem, c.config, 1), split_keys(problem, c.config, c.splits) * key_bytes(problem))
    return int(together * each // max(1, min(together, device.sm_count)))


def candidates(problem: Problem, device: Device, splits: int | None = None) -> tuple[DecodeCandidate, ...]:
    """Every configuration with its best number of splits, or with the given one: those of the first shape of rows of which any
    fits."""
    found: list[DecodeCandidate] = []
    for row_tiles, row_warps in row_shapes(problem):
        found = []
        for cols in BLOCK_COLS:
            key_warps = max(1, min(WARPS // row_warps, cols // GRANULE))
            for stages in STAGES if device.compute_capability >= ASYNCHRONOUS else (1,):
                found.append(_candidate(problem, device, DecodeConfig(row_tiles, row_warps, key_warps, cols, stages), splits))
        if not all(each.rejected for each in found):
            break
    return tuple(found)


def _candidate(p: Problem, device: Device, config: DecodeConfig, splits: int | None) -> DecodeCandidate:
    one = DecodeCandidate(config, tuple(rooms(p, config).items()))
    parts = (config.key_warps - 1) * config.row_warps * config.row_tiles * (padded_dim(p.head_dim_v) // 8 + 1) * WARP * 16
    if parts > dict(one.rooms)["K, V"]:
        return replace(one, rejected="shared memory: the ring does not hold what the warps that share out keys make")
    if one.shared_bytes > device.sram_per_block:
        return replace(one, rejected=f"shared memory: {one.shared_bytes:,} of {device.sram_per_block:,} bytes")
    if registers(p, config) > MOST_REGISTERS:
        return replace(one, rejected=f"registers: a thread needs about {registers(p, config)} of {MOST_REGISTERS}")
    resident = occupancy(device, config.threads, registers(p, config), one.shared_bytes, estimate=True).blocks
    if not resident:
        return replace(one, rejected="registers: a thread block has more than a multiprocessor")
    every = works(p, config)
    most = max(1, min(MOST_SPLITS, -(-p.seqlen_k // config.block_cols)))
    # At least as many thread blocks as multiprocessors, where there are so many blocks of keys and the others gain too little.
    least = min(most, -(-device.sm_count // max(1, every)))
    tried = np.arange(1, most + 1) if splits is None else np.array([splits])
    needed = seconds(p, device, config, resident, tried)
    idle = tried < least if splits is None else np.zeros(1, bool)
    best = int(np.argmin(needed / np.where(idle, 1 - WORTH, 1)))
    return replace(one, resident=resident, splits=int(tried[best]), seconds=float(needed[best]))


@lru_cache(maxsize=1024)
def choose(problem: Problem, device: Device, splits: int | None = None) -> DecodeCandidate:
    """The widest configuration that the model predicts to be about as fast as any, of those that give every multiprocessor a thread
    block, or the most thread blocks if none does; others must be faster by the share `WORTH`. `splits` fixes the number of splits.

    ValueError if the device lacks the element type, `DoesNotFit` if nothing fits.
    """
    require_dtype(problem.dtype, device)
    found = candidates(problem, device, splits)
    able = [each for each in found if not each.rejected]
    if not able:
        least = min(found, key=lambda each: each.shared_bytes)
        raise DoesNotFit(f"decoding at head_dim {problem.head_dim} does not fit {device.name}: {least.rejected}")

    def short(each: DecodeCandidate) -> int:
        """Multiprocessors without a thread block."""
        return max(0, device.sm_count - works(problem, each.config) * each.splits)

    least_short = min(map(short, able))
    busy = [each for each in able if short(each) == least_short]
    if min(each.seconds for each in able) > (1 - WORTH) * min(each.seconds for each in busy):
        able = busy
    fastest = min(each.seconds for each in able)
    return next(each for each in able if each.seconds <= (1 + NOISE) * fastest)
