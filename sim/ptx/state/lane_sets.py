"""Sets of lanes, which run an instruction together, and the patterns of their addresses.

A pattern has the addresses of a set of lanes relative to the first one's. A loop runs the same access again and again with only
its start moved, and so do the blocks of a grid. Results that depend on the distances between the lanes (bounds, alignment, bank
conflicts, distinct bytes and sectors) are computed once a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..text.syntax import Array

SECTOR = 32
"""Bytes of a sector, the unit in which global memory is fetched."""

REMEMBERED_LANES = 1 << 17
"""Most lanes of the remembered patterns of a wave together: each takes some 30 bytes a lane."""

MOST = 16
"""Most patterns remembered for one set of lanes and one width."""


class AddressPattern:
    """Accesses of `size` bytes by `lanes`, at `relative` (signed, one a lane) bytes from the first one's address."""

    def __init__(self, lanes: LaneSet, relative: Array, size: int, key: bytes):
        self.lanes = lanes
        self.relative = relative
        self.size = size
        self.key = key
        self.low, self.high = int(relative.min()), int(relative.max())
        self.aligned = not np.count_nonzero(relative & (size - 1))
        self._indices: dict[str, Array] = {}
        self._wavefronts: dict[int, tuple[int, int]] = {}
        self._sectors: dict[int, int] = {}

    def fits(self, first: int, end: int, start: int = 0) -> bool:
        """True if, with the first access at offset `first`, all are aligned and lie in the bytes from `start` to `end`."""
        return self.aligned and not first & (self.size - 1) and first + self.low >= start and first + self.high <= end - self.size

    def index(self, space: str, base: Callable[[int], Array], first: int) -> Array:
        """Returns each lane's element index (int64) in the memory of all blocks or lanes; `base`: start of each lane's memory."""
        shift = self.size.bit_length() - 1
        found = self._indices.get(space)
        if found is None:
            found = self._indices[space] = (self.relative >> shift) + base(shift).astype(np.int64)
        return found + (first >> shift)

    # -- counts -----------------------------------------------------------------------------------------------------------

    def wavefronts(self, first: int) -> tuple[int, int]:
        """Returns (wavefronts, those without bank conflicts) of these lanes with the first one's address at `first`."""
        first &= 3  # a whole number of words further on, all lanes move by the same number of banks
        found = self._wavefronts.get(first)
        if found is None:
            found = self._wavefronts[first] = bank_passes(self.lanes, self.relative.astype(np.int64) + first, self.size)
        return found

    @cached_property
    def unique_bytes(self) -> int:
        """Bytes of the accesses, each counted once a warp. They are aligned: two are the same or apart."""
        return self.size * distinct((self.lanes.warp << 48) + self.relative)

    def sectors(self, first: int) -> int:
        """Returns the number of distinct 32-byte sectors, counted for each warp."""
        first &= SECTOR - 1
        found = self._sectors.get(first)
        if found is None:
            place = (self.relative.astype(np.int64) + first) >> (SECTOR.bit_length() - 1)
            found = self._sectors[first] = distinct((self.lanes.warp << 48) + place)
        return found


class Patterns:
    """The patterns of a wave, the latest of each set of lanes."""

    def __init__(self) -> None:
        self._found: dict[tuple[LaneSet, int], list[AddressPattern]] = {}
        self._lanes = 0

    def of(self, lanes: LaneSet, addresses: Array, size: int) -> tuple[int, AddressPattern]:
        """Returns (first address, pattern) of accesses of `size` bytes at `addresses` (uint32 or uint64, one a lane)."""
        start = addresses[0]
        relative = (addresses - start).view(np.int32 if addresses.itemsize == 4 else np.int64)
        key = relative.tobytes()
        patterns = self._found.get((lanes, size))
        if patterns is None:
            patterns = self._found[lanes, size] = []
        for pattern in patterns:
            if pattern.key == key:
                return int(start), pattern
        found = AddressPattern(lanes, relative, size, key)
        self._lanes += lanes.n
        if self._lanes > REMEMBERED_LANES:
            self._found.clear()
            self._lanes = lanes.n
            patterns = self._found[lanes, size] = []
        elif len(patterns) >= MOST:
            del patterns[0]
            self._lanes -= lanes.n
        patterns.append(found)
        return int(start), found


FEW = 8
"""Values that are looked for one by one."""


def run_starts(numbers: Array) -> Array:
    """Returns the places where runs of equal numbers begin."""
    later = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    return np.concatenate(([0], later)) if len(numbers) else later


def by_value(values: Array) -> Iterator[tuple[int, Array]]:
    """Yields each of the values, the lowest first, with its places."""
    found = np.unique(values).tolist()
    if len(found) <= FEW:
        for value in found:
            yield value, np.flatnonzero(values == value)
        return
    order = np.argsort(values, kind="stable")
    for value, places in zip(found, np.split(order, run_starts(values[order])[1:]), strict=True):
        yield value, places


def distinct(keys: Array) -> int:
    """Returns the number of different keys, which it may sort in place."""
    # A merge sort is fast where the keys come in ordered runs, as those of neighbouring lanes mostly do.
    keys.sort(kind="stable")
    return 1 + int(np.count_nonzero(keys[1:] != keys[:-1]))


def wavefronts(lanes: LaneSet, addresses: Array, size: int) -> tuple[int, int]:
    """Returns (wavefronts, those without bank conflicts) of a shared access: 32 banks of 4 bytes, one word a bank a pass.

    Lanes with 8 or 16 bytes go in halves or quarters of a warp, as the 128 bytes of a pass allow.
    """
    first, pattern = lanes.pattern(addresses, size)
    return pattern.wavefronts(first)


def bank_passes(lanes: LaneSet, addresses: Array, size: int) -> tuple[int, int]:
    """Returns (wavefronts, those without bank conflicts) of a shared access; `addresses` (int64) may count from any bank on."""
    found = bank_turns(lanes, addresses, size)
    return int(found.sum()), int(np.count_nonzero(found))


def bank_turns(lanes: LaneSet, addresses: Array, size: int) -> Array:
    """Returns the wavefronts of each turn of a shared access, from the first lane's turn to the last one's; 0 without lanes."""
    columns = bank_columns(size)
    row = lanes.phase(columns)
    units = addresses >> (max(size, 4).bit_length() - 1)
    place = (units & (columns - 1)) + row
    base = int(row[0])
    span = int(row[-1]) + columns - base
    passes = np.bincount(place - base, minlength=span).reshape(-1, columns).max(axis=1)
    if passes.max() > 1:
        # Several lanes in one column: those that want the same word share a pass.
        units = units - units.min() // columns * columns
        keys = np.sort((row << 32) + units, kind="stable")
        keys = keys[run_starts(keys)]
        place = (keys >> 32) + (keys & (columns - 1))
        passes = np.bincount(place - base, minlength=span).reshape(-1, columns).max(axis=1)
    return passes


def bank_columns(size: int) -> int:
    """Returns the lanes of a turn: as many accesses of `size` bytes as the 32 banks of 4 bytes serve at once."""
    return 128 // max(size, 4)


WARP = 32
GROUP = 4
"""Warps of a warpgroup."""

INTERNED_LANES = 1 << 20
"""Most lanes of the remembered sets of a wave together: each set holds some ten arrays."""


INTERNED_PAIRS = 1 << 12
"""Most pairs of sets for which a wave remembers whether they meet."""


class Wave:
    """The blocks that are resident together, and their living threads.

    Lane `l` of the wave is thread `l % lanes_per_block` of its block `l // lanes_per_block`; a block has whole warps, the last of
    which may have lanes without a thread (never alive). A wave holds whole clusters of `cluster` blocks: block `b` of the wave has
    rank `b % cluster` in its own.
    """

    number: Callable[[int], int] = staticmethod(lambda block: block)
    """Linear index in the grid of the n-th block to run. It differs from n if clusters have more than one row of blocks."""

    def __init__(self, first_block: int, blocks: int, threads: int, shared_stride: int, local_stride: int, cluster: int = 1):
        self.first_block = first_block
        self.blocks = blocks
        self.cluster = cluster
        self.threads = threads
        self.warps_per_block = -(-threads // WARP)
        self.lanes_per_block = self.warps_per_block * WARP
        self.size = blocks * self.lanes_per_block
        self.shared_stride = shared_stride
        self.local_stride = local_stride
        self.alive = np.tile(np.arange(self.lanes_per_block) < threads, blocks)
        self.alive_by_warp = self.alive.reshape(-1, WARP).sum(axis=1)
        self.alive_by_block = np.full(blocks, threads)
        self.exits = 0
        self.patterns = Patterns()
        self._meet: dict[tuple[LaneSet, LaneSet], bool] = {}
        self._interned: dict[bytes, LaneSet] = {}
        self._interned_lanes = 0

    def lanes(self, index: Array) -> LaneSet:
        """Returns the set of the sorted lane numbers `index`; equal sets are the same object while the cache holds them."""
        key = index.tobytes()
        found = self._interned.get(key)
        if found is None:
            self._interned_lanes += len(index)
            if self._interned_lanes > INTERNED_LANES:
                self._interned.clear()
                self._interned_lanes = len(index)
            found = self._interned[key] = LaneSet(self, index)
        return found

    def meet(self, some: LaneSet, others: LaneSet) -> bool:
        """True if two sets, of which the second is of this wave, have a lane in common."""
        if not some.warp_bits & others.warp_bits:
            return False
        if some.whole_warps or others.whole_warps:
            return True
        key = some, others
        found = self._meet.get(key)
        if found is None:
            if len(self._meet) > INTERNED_PAIRS:
                self._meet.clear()
            member = np.zeros(max(self.size, int(some.index[-1]) + 1), bool)
            member[others.index] = True
            found = self._meet[key] = bool(member[some.index].any())
        return found

    def exit(self, lanes: LaneSet) -> None:
        """Ends the threads of `lanes`."""
        self.alive[lanes.index] = False
        self.alive_by_warp = self.alive.reshape(-1, WARP).sum(axis=1)
        self.alive_by_block = self.alive.reshape(self.blocks, -1).sum(axis=1)
        self.exits += 1

    def place(self, lane: int) -> tuple[int, int, int]:
        """Returns (linear block index in the grid, warp in the block, lane in the warp) of a lane."""
        block, thread = divmod(lane, self.lanes_per_block)
        return self.number(self.first_block + block), thread // WARP, thread % WARP

    def release(self) -> None:
        """Forgets the sets of lanes: they refer to the wave, and would live until the next garbage collection."""
        self._interned.clear()
        self._meet.clear()
        self.patterns = Patterns()


@dataclass(frozen=True)
class Geometry:
    """Grid (in blocks), block (in threads) and cluster (in blocks) of a launch, (x, y, z) each.

    Blocks run cluster by cluster: the n-th block to run is at `position(n)` of the grid. `explicit`: the launch, or the kernel,
    gives the cluster's size.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    explicit: bool = False

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cluster_blocks(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    def position(self, blocks: Array) -> tuple[list[Array], list[Array]]:
        """Returns (x, y, z) of the cluster in the grid of clusters, and of the block in its cluster, of the n-th blocks to run."""
        cluster, rank = np.divmod(blocks, self.cluster_blocks)
        wide, high = (g // c for g, c in zip(self.grid[:2], self.cluster[:2], strict=True))
        x, y, _ = self.cluster
        return [cluster % wide, cluster // wide % high, cluster // (wide * high)], [rank % x, rank // x % y, rank // (x * y)]

    def number(self, block: int) -> int:
        """Returns the linear index in the grid of the n-th block to run."""
        where, inside = self.position(np.array(block))
        x, y, z = (int(w * c + i) for w, c, i in zip(where, self.cluster, inside, strict=True))
        return x + self.grid[0] * (y + self.grid[1] * z)


class Grid(NamedTuple):
    """Lanes at equal distances on each of three levels: the same warps of many blocks, mostly."""

    first: int
    counts: tuple[int, int, int]
    steps: tuple[int, int, int]

    @classmethod
    def find(cls, index: Array) -> Grid | None:
        """Returns the sorted lane numbers `index` as a grid, if they are one."""
        breaks = np.flatnonzero(index[1:] - index[:-1] != 1) + 1
        length, rest = divmod(len(index), len(breaks) + 1)
        if rest or (breaks != np.arange(length, len(index), length)).any():
            return None
        counts, steps = [length], [1]
        starts = index[::length]
        for _ in range(2):
            distances = starts[1:] - starts[:-1]
            step = int(distances[0]) if len(distances) else 0
            other = np.flatnonzero(distances != step)
            count = int(other[0]) + 1 if len(other) else len(starts)
            if len(starts) % count:
                return None
            if (starts - np.repeat(starts[::count], count) != np.tile(np.arange(count) * step, len(starts) // count)).any():
                return None
            counts.append(count)
            steps.append(step)
            starts = starts[::count]
        return cls(int(index[0]), (counts[2], counts[1], counts[0]), (steps[2], steps[1], 1)) if len(starts) == 1 else None

    def of(self, rows: Array) -> Array:
        """Returns the columns of contiguous `rows` at these lanes, (rows, *counts), without a copy."""
        size = rows.itemsize
        steps = (rows.strides[0], *(step * size for step in self.steps))
        # Ten times as fast as as_strided.
        return np.ndarray((len(rows), *self.counts), rows.dtype, rows, self.first * size, steps)


class LaneSet:
    """A non-empty sorted set of lanes of a wave, with its properties (computed when asked)."""

    def __init__(self, wave: Wave, index: Array):
        self.wave = wave
        self.index = index
        self.n = len(index)
        self.full = self.n == wave.size
        first, last = int(index[0]), int(index[-1])
        self.slice = slice(first, last + 1) if last - first + 1 == self.n else None
        self._bases: dict[int, Array] = {}
        self._local_bases: dict[int, Array] = {}
        self.repeated: dict[int, object] = {}
        """Data that the race detector remembers for the set."""
        self._converged = (-1, False)

    def subset(self, positions: Array) -> LaneSet:
        """Returns the lanes at `positions` (sorted) of this set."""
        return self.wave.lanes(self.index[positions])

    def where(self, mask: Array) -> LaneSet:
        """Returns the lanes of this set for which a mask, one boolean a lane, holds."""
        return self.subset(np.flatnonzero(mask))

    def split(self, values: Array) -> list[tuple[int, LaneSet]]:
        """Returns each of the values, one a lane, with the lanes that have it."""
        return [(value, self.subset(at)) for value, at in by_value(values)]

    @cached_property
    def grid(self) -> Grid | None:
        """The set as a grid, if it is one."""
        return Grid.find(self.index)

    @cached_property
    def warp(self) -> Array:
        """Warp within the wave, of each lane."""
        return self.index >> 5

    @cached_property
    def lane(self) -> Array:
        """Lane within the warp, of each lane."""
        return self.index & 31

    @cached_property
    def block(self) -> Array:
        """Block within the wave, of each lane."""
        return self.index // self.wave.lanes_per_block

    @cached_property
    def warp_ids(self) -> Array:
        """The warps of which at least one lane is in the set."""
        return self.warp[run_starts(self.warp)]

    @cached_property
    def warp_bits(self) -> int:
        """The warps of which at least one lane is in the set, as bits."""
        member = np.zeros(int(self.warp_ids[-1]) + 1, bool)
        member[self.warp_ids] = True
        return int.from_bytes(np.packbits(member, bitorder="little").tobytes(), "little")

    @cached_property
    def block_starts(self) -> Array:
        """Positions at which the lanes of each block begin."""
        return run_starts(self.block)

    @cached_property
    def block_ids(self) -> Array:
        return self.block[self.block_starts]

    @cached_property
    def warps(self) -> int:
        return len(self.warp_ids)

    @cached_property
    def whole_warps(self) -> bool:
        """All 32 lanes of each warp are in the set: arrays over the lanes reshape to (warps, 32)."""
        return self.n == WARP * self.warps

    @property
    def converged(self) -> bool:
        """All living lanes of each warp in the set are in the set."""
        if self.whole_warps:
            return True
        if self._converged[0] != self.wave.exits:
            self._converged = (self.wave.exits, int(self.wave.alive_by_warp[self.warp_ids].sum()) == self.n)
        return self._converged[1]

    @property
    def whole_blocks(self) -> bool:
        """All living lanes of each block in the set are in the set."""
        return self.full or int(self.wave.alive_by_block[self.block_ids].sum()) == self.n

    def pattern(self, addresses: Array, size: int) -> tuple[int, AddressPattern]:
        """Returns (first address, pattern) of accesses of `size` bytes by these lanes."""
        return self.wave.patterns.of(self, addresses, size)

    def shared_base(self, shift: int) -> Array:
        """Returns the index of each lane's shared memory in an array of elements of 1 << shift bytes (uint32)."""
        base = self._bases.get(shift)
        if base is None:
            base = self._bases[shift] = (self.block * (self.wave.shared_stride >> shift)).astype(np.uint32)
        return base

    def phase(self, columns: int) -> Array:
        """Returns the first lane (of the wave) of each lane's turn: lanes go through shared memory `columns` at a time."""
        return self.index & -columns

    def local_base(self, shift: int) -> Array:
        """Returns the index of each lane's local memory in an array of elements of 1 << shift bytes."""
        base = self._local_bases.get(shift)
        if base is None:
            base = self._local_bases[shift] = self.index * (self.wave.local_stride >> shift)
        return base

    def bits(self) -> Array:
        """Returns, for each warp of the wave, a uint32 with the bits of its lanes that are in the set."""
        member = np.zeros(self.wave.size, bool)
        member[self.index] = True
        return warp_bits(member)

    def place(self, position: int) -> tuple[int, int, int]:
        """Returns `Wave.place` of one lane."""
        return self.wave.place(int(self.index[position]))


def merged(parts: list[LaneSet]) -> LaneSet:
    """Returns one set of the lanes of disjoint sets."""
    if len(parts) == 1:
        return parts[0]
    return parts[0].wave.lanes(np.sort(np.concatenate([p.index for p in parts]), kind="stable"))


def warp_bits(member: Array) -> Array:
    """Booleans over whole warps to one uint32 a warp, bit i for lane i."""
    return np.packbits(member.reshape(-1, WARP), axis=1, bitorder="little").view(np.uint32).reshape(-1)
