"""Counts of one launch: bytes and requests by tensor, instructions by opcode, work of the tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .lanes import Lanes
from .patterns import SECTOR, distinct
from .types import Array


@dataclass
class Traffic:
    """Traffic of one tensor in global memory.

    `*_bytes` are lane-requested bytes: the sum over active lanes of the access width. `unique_*_bytes` count a byte
    once for each warp request; `*_sectors` are the distinct 32-byte sectors of each warp request; `*_requests` are
    warp-level memory instructions with at least one active lane. Atomics count as a read and a write.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    read_requests: int = 0
    write_requests: int = 0
    read_sectors: int = 0
    write_sectors: int = 0
    unique_read_bytes: int = 0
    unique_write_bytes: int = 0

    def count(self, lanes: Lanes, addresses: Array, size: int | Array, write: bool) -> None:
        """Count one access of `size` bytes a lane at aligned virtual `addresses` (uint64, one a lane).

        `size` is an array where lanes differ (cp.async with a source size); then each address has one size.
        """
        if isinstance(size, int):
            requested = lanes.n * size
            first, pattern = lanes.pattern(addresses, size)
            unique, sectors = pattern.unique_bytes, pattern.sectors(first)
        else:
            requested = int(size.sum())
            place = (lanes.warp << 48) + addresses.view(np.int64) - int(addresses[0])
            unique = int(size[np.unique(place, return_index=True)[1]].sum())
            sectors = distinct(place + (int(addresses[0]) & (SECTOR - 1)) >> 5)
        if write:
            self.write_bytes += requested
            self.write_requests += lanes.warps
            self.write_sectors += sectors
            self.unique_write_bytes += unique
        else:
            self.read_bytes += requested
            self.read_requests += lanes.warps
            self.read_sectors += sectors
            self.unique_read_bytes += unique


@dataclass
class SharedCounts:
    """Shared memory: warp-level requests, lane-requested bytes, and wavefronts.

    A wavefront is one pass over the 32 banks of 4 bytes; lanes that read the same word share it. `ideal_wavefronts`
    is what the same bytes would take without bank conflicts.
    """

    requests: int = 0
    bytes: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0


@dataclass(frozen=True)
class Counters:
    """Counts of a launch. `instructions` are warp instructions (predicated-off ones included), by opcode in `by_opcode`.

    `mma_flops` is 2 m n k for each warp-level mma. `shared` maps "ld", "st", "atom", "ldmatrix", "stmatrix",
    "cp.async" to `SharedCounts`. `barriers` counts completed block barriers.
    """

    instructions: int
    by_opcode: Mapping[str, int]
    mma_flops: int
    shared: Mapping[str, SharedCounts]
    barriers: int
    waves: int


@dataclass
class Tally:
    """The growing counts of a running launch."""

    by_opcode: dict[str, int] = field(default_factory=dict)
    shared: dict[str, SharedCounts] = field(default_factory=dict)
    mma_flops: int = 0
    barriers: int = 0
    waves: int = 0

    def freeze(self) -> Counters:
        return Counters(
            sum(self.by_opcode.values()),
            dict(sorted(self.by_opcode.items(), key=lambda item: -item[1])),
            self.mma_flops,
            dict(self.shared),
            self.barriers,
            self.waves,
        )
