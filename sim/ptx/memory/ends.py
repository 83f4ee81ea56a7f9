"""Where bulk copies come from and go to: regions and tiles of the lanes' addresses, and findings of what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cupyflash.words import plural

from ..state.lanes import Lanes, Wave
from ..state.segments import WINDOW_BITS, Segment
from ..text.syntax import Instruction
from ..text.types import Array
from .cluster import NOBODY, targets
from .memory import Memory
from .phases import MBarriers
from .regions import CHUNK, Region, Tile, byte_region, extent


@dataclass(frozen=True)
class Shape:
    """Of tiles in shared memory: bytes, what their addresses must be a multiple of, and the swizzle."""

    size: int
    align: int = CHUNK
    swizzle: int = 0


@dataclass(frozen=True)
class Spot:
    """Addresses of tiles, one each: the lane (row) that copies, the block of the wave, the offset in its shared memory."""

    row: Array
    blocks: Array
    offsets: Array

    @classmethod
    def of(cls, lanes: Lanes, addresses: Array) -> Spot:
        return cls(np.arange(lanes.n), *targets(lanes, addresses))

    def take(self, at: Array) -> Spot:
        return Spot(self.row[at], self.blocks[at], self.offsets[at])


@dataclass(frozen=True)
class Arrival:
    """Where loads go, one entry a destination: the copy (row) it belongs to, the tile, and its mbarrier's key."""

    row: Array
    tile: Tile
    keys: Array


class Ends:
    """Checks the ends of a wave's bulk copies."""

    def __init__(self, wave: Wave, memory: Memory, mbarriers: MBarriers):
        self.wave = wave
        self.memory = memory
        self.mbarriers = mbarriers
        self.room = memory.shared_size - memory.reserved
        """Bytes of shared memory that a block may use."""

    # -- tensors ------------------------------------------------------------------------------------------------------------

    def ranges(self, lanes: Lanes, addresses: Array, sizes: Array, i: Instruction) -> list[tuple[Array, Region]]:
        """Plain bytes of tensors, together where size and tensor are the same: (positions of their lanes, region)."""
        found: list[tuple[Array, Region]] = []
        crooked = (addresses | sizes) % CHUNK != 0
        if crooked.any():
            first = int(np.flatnonzero(crooked)[0])
            message = f"{i.name} of {plural(int(sizes[first]), 'byte')}: addresses and size are multiples of {CHUNK}"
            self.report("misaligned", message, lanes, np.flatnonzero(crooked), i)
        numbers = addresses >> WINDOW_BITS
        for number, size in sorted(set(zip(numbers[~crooked].tolist(), sizes[~crooked].tolist(), strict=True))):
            at = np.flatnonzero(~crooked & (numbers == number) & (sizes == size))
            segment = self.memory.segments.get(number)
            if segment is None:
                message = f"{i.name} of {plural(size, 'byte')} at {int(addresses[at[0]]):#x} of no tensor"
                self.report("out of bounds", message, lanes, at, i)
            elif size:
                region = byte_region(segment, addresses[at], size)
                found += self.inside(lanes, at, region, i)
        return found

    def own_ranges(self, lanes: Lanes, addresses: Array, sizes: Array, i: Instruction) -> list[tuple[Array, Tile]]:
        """Bytes of the lanes' own shared memory, together where sizes are the same: (positions of their lanes, tiles)."""
        found: list[tuple[Array, Tile]] = []
        for size in set(sizes.tolist()):
            at = np.flatnonzero(sizes == size)
            if size % CHUNK:
                message = f"{i.name} of {plural(size, 'byte')}: the size is a multiple of {CHUNK}"
                self.report("misaligned", message, lanes, at, i)
            elif size and (good := self.own(lanes.subset(at), addresses[at], Shape(size), i)):
                found.append((at[good[0]], good[1]))
        return found

    def inside(self, lanes: Lanes, at: Array, region: Region, i: Instruction) -> list[tuple[Array, Region]]:
        """Those of the copies by lanes `at` that stay within the bytes of their tensor."""
        segment, bad = region.segment, region.outside()
        if not len(bad):
            return [(at, region)]
        where = f"{segment.name!r}, which has {plural(segment.size, 'byte')}"
        first = int(region.starts[np.flatnonzero(region.row == bad[0])].max()) - segment.start
        message = f"{i.name} of {plural(region.size, 'byte')}, some at offset {first:#x} of {where}"
        self.report("out of bounds", message, lanes, at[bad], i, segment.name)
        good = np.setdiff1d(np.arange(len(at)), bad)
        return [(at[good], region.take(good))] if len(good) else []

    def writable(self, segment: Segment, lanes: Lanes, i: Instruction) -> bool:
        if not segment.writable:
            message = f"{i.name} to {segment.name!r}, which is read-only"
            self.memory.findings.report("read-only", message, i, lanes, 0, count=lanes.n)
        return segment.writable

    # -- shared memory ------------------------------------------------------------------------------------------------------

    def own(self, lanes: Lanes, addresses: Array, shape: Shape, i: Instruction) -> tuple[Array, Tile] | None:
        """Tiles of the lanes' own blocks: (positions of the lanes, tiles)."""
        spot = Spot.of(lanes, addresses)
        foreign = np.flatnonzero(spot.blocks != lanes.block)
        if len(foreign):
            message = f"{i.name} of another block's shared memory: the source is the own block's"
            self.report("out of bounds", message, lanes, foreign, i)
        good = np.flatnonzero(self.places(lanes, spot, shape, i) & (spot.blocks == lanes.block))
        if not len(good):
            return None
        return good, Tile.of(self.memory, spot.blocks[good], spot.offsets[good], shape.size, shape.swizzle)

    def arrival(
        self, lanes: Lanes, ends: tuple[Array, Array, Array | None], shape: Shape, i: Instruction
    ) -> tuple[Array, Arrival] | None:
        """Destinations of copies: (positions of the lanes, tiles and mbarriers). `ends`: addresses of the tiles, of the
        mbarriers, and masks of the ranks of a multicast."""
        to, bar, masks = ends
        spot, barrier = Spot.of(lanes, to), Spot.of(lanes, bar)
        if masks is not None:
            spot, barrier = self.spread(lanes, spot, barrier, masks, i)
        good = self.places(lanes, spot, shape, i) & self.barriers(lanes, spot, barrier, i)
        if not good.any():
            return None
        spot, barrier = spot.take(np.flatnonzero(good)), barrier.take(np.flatnonzero(good))
        keys = (barrier.blocks * self.memory.shared_stride + barrier.offsets) >> 3
        at, row = np.unique(spot.row, return_inverse=True)
        tile = Tile.of(self.memory, spot.blocks, spot.offsets, shape.size, shape.swizzle)
        self.mbarriers.used_by_copy(keys, lanes, spot.row, i)
        return at, Arrival(row, tile, keys)

    def spread(self, lanes: Lanes, spot: Spot, barrier: Spot, masks: Array, i: Instruction) -> tuple[Spot, Spot]:
        """A multicast: the same offsets in each block of the cluster whose bit is set."""
        cluster = self.wave.cluster
        beyond = np.flatnonzero(masks >> cluster)
        if len(beyond):
            message = f"multicast to the blocks of mask {int(masks[beyond[0]]):#x}: the cluster has {plural(cluster, 'block')}"
            self.report("out of bounds", message, lanes, beyond, i)
        row, rank = np.nonzero(masks[:, None] >> np.arange(cluster) & 1)
        blocks = lanes.block[row] // cluster * cluster + rank
        return Spot(row, blocks, spot.offsets[row]), Spot(row, blocks, barrier.offsets[row])

    def places(self, lanes: Lanes, spot: Spot, shape: Shape, i: Instruction) -> Array:
        """Which tiles lie in the shared memory of a living block; the others are findings."""
        blocks, offsets = spot.blocks, spot.offsets
        room = self.room - extent(shape.size, shape.swizzle)
        checks: Sequence[tuple[str, Array, str]] = (
            ("out of bounds", blocks == NOBODY, "the address names a block outside of the cluster"),
            ("misaligned", offsets % shape.align != 0, f"the address is no multiple of {shape.align}"),
            ("out of bounds", (offsets < 0) | (offsets > room), f"it has {plural(self.room, 'byte')}"),
            ("exited block", self.wave.alive_by_block[blocks] == 0, "the block that is to get it has exited"),
        )
        strays = (offsets >= 0) & (offsets <= room) & self.memory.strays(i, offsets, shape.size)
        if strays.any():
            why = self.memory.strayed(i, int(offsets[strays][0])).removeprefix(": ")
            checks = (*checks, ("out of bounds", strays, why))
        what = f"{i.name} of {plural(shape.size, 'byte')}"
        return self.judged(checks, lanes, spot, i, lambda at: f"{what} at {int(offsets[at]):#x} of shared memory: ")

    def barriers(self, lanes: Lanes, spot: Spot, barrier: Spot, i: Instruction) -> Array:
        """Which mbarriers lie where they may, in their tile's block; the others are findings."""
        checks = (
            ("misaligned", barrier.offsets % 8 != 0, "is not aligned to 8 bytes"),
            ("out of bounds", (barrier.offsets < 0) | (barrier.offsets > self.room - 8), "is not in shared memory"),
            ("out of bounds", barrier.blocks != spot.blocks, "is not in the block that gets the bytes"),
        )
        return self.judged(checks, lanes, spot, i, lambda at: f"{i.name}: the mbarrier at {int(barrier.offsets[at]):#x} ")

    def judged(
        self, checks: Sequence[tuple[str, Array, str]], lanes: Lanes, spot: Spot, i: Instruction, subject: Callable[[int], str]
    ) -> Array:
        """Which ends pass all checks (kind, where it is wrong, why); `subject` names the first that does not."""
        good = np.ones(len(spot.row), np.bool_)
        for kind, wrong, why in checks:
            bad = np.flatnonzero(good & wrong)
            if len(bad):
                self.report(kind, subject(int(bad[0])) + why, lanes, spot.row[bad], i)
                good[bad] = False
        return good

    def report(self, kind: str, message: str, lanes: Lanes, at: Array, i: Instruction, tensor: str | None = None) -> None:
        self.memory.findings.report(kind, message, i, lanes, int(at[0]), count=len(at), tensor=tensor)
