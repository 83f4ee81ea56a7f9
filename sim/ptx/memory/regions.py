"""The two ends of bulk copies, of many copies at once: parts of tensors, tiles of shared memory, tensor maps in memory.

Tensor copies go row by row, the innermost dimension contiguous, as PTX ISA, "Tensors" describes; a swizzle exchanges the 16-byte
chunks of a tile by the bits of their addresses in shared memory.

A kernel may copy a tensor map in memory, and must make the stores visible to the unit that copies boxes (PTX ISA, "Proxies",
"membar/fence"). A parameter is never written. Copies see a kernel's stores into a map in global memory only behind
fence.proxy.tensormap::generic: .release by the storing thread, .acquire by the using one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cupyflash.sim.ranges import ranges
from cupyflash.words import plural

from ..state.findings import ERROR, Verdict
from ..state.lane_sets import SECTOR, LaneSet, Wave, by_value
from ..state.segments import UNWRITTEN, WINDOW_BITS, WRITTEN, Segment
from ..text.syntax import ELEMENT, Array, PtxInstruction
from .mbarriers import MBarriers
from .ports import NOBODY, targets
from .spaces import LOCAL_WINDOW, SHARED_WINDOW, SPACE_BITS, LaunchMemory, MemoryUnit
from .swizzles import MAP_ALIGN, MAP_BYTES, NAN, Description, decode

CHUNK = 16
"""Bytes that bulk copies move as one: sizes and addresses in shared memory are multiples of it."""


@dataclass(frozen=True)
class Region:
    """The reads or writes of n copies in one tensor, `size` bytes each in shared memory.

    index: (n, size // unit), elements of `unit` bytes of the segment; inside: a mask of those that lie in the tensor, None for all.
    The pieces are contiguous ranges inside: virtual addresses `starts`, bytes `lengths`, and the copy, `row`, of each.
    """

    segment: Segment
    size: int
    unit: int
    index: Array
    inside: Array | None
    starts: Array
    lengths: Array
    row: Array
    description: Description | None = None

    def take(self, rows: Array) -> Region:
        """Returns the copies at these rows (sorted)."""
        renumbered = np.full(len(self.index), -1)
        renumbered[rows] = np.arange(len(rows))
        pieces = renumbered[self.row] >= 0
        return replace(
            self,
            index=self.index[rows],
            inside=None if self.inside is None else self.inside[rows],
            starts=self.starts[pieces],
            lengths=self.lengths[pieces],
            row=renumbered[self.row[pieces]],
        )

    def outside(self) -> Array:
        """Returns the copies (rows) with something outside of the segment's bytes."""
        end = self.segment.start + self.segment.size
        bad = (self.starts < self.segment.start) | (self.starts + self.lengths > end)
        return np.unique(self.row[bad])

    def unwritten(self) -> Array:
        """Returns the copies (rows) with bytes that nobody wrote."""
        if self.segment.state is None:
            return np.empty(0, np.int64)
        states = self.segment.states(self.unit).take(self.index, mode="clip").view(np.uint8).reshape(*self.index.shape, -1)
        fresh = (states == UNWRITTEN).any(axis=2)
        if self.inside is not None:
            fresh &= self.inside
        return np.flatnonzero(fresh.any(axis=1))

    def mark_written(self) -> None:
        if self.segment.state is not None:
            where = self.index if self.inside is None else self.index[self.inside]
            self.segment.states(self.unit)[where] = np.frombuffer(bytes([WRITTEN]) * self.unit, ELEMENT[self.unit])[0]

    def sectors(self) -> int:
        """Returns the sectors that the copies touch, each copy on its own."""
        if not len(self.starts):
            return 0
        if not np.count_nonzero((self.starts | self.lengths) & SECTOR - 1):
            return int(self.lengths.sum()) // SECTOR
        first, last = self.starts // SECTOR, (self.starts + self.lengths - 1) // SECTOR
        count = last - first + 1
        return len(np.unique(np.repeat(self.row << WINDOW_BITS, count) + ranges(first, count)))

    def fetch(self) -> Array:
        """Returns the bytes as chunks, (n, size // CHUNK), filled outside of the tensor."""
        data = self.segment.window(self.unit)[0].take(self.index, mode="clip")
        description = self.description
        if self.inside is not None:
            assert description is not None
            data[~self.inside] = filler(description, self.unit)
        if description is not None and description.dtype not in _PLAIN:
            convert(data.view(np.uint32), description.dtype)
        return data.view(ELEMENT[CHUNK])

    def put(self, data: Array, rows: Array) -> None:
        """Writes chunks (n, size // CHUNK) to their places, those of some rows only."""
        view, units = self.segment.window(self.unit)[0], data.view(ELEMENT[self.unit])
        if self.inside is None:
            view[self.index[rows]] = units[rows]
        else:
            inside = self.inside[rows]
            view[self.index[rows][inside]] = units[rows][inside]


_PLAIN = frozenset({"uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16"})


def filler(description: Description, unit: int) -> Array:
    """Returns an element of `unit` bytes of the map's fill outside of its tensor."""
    size = description.element
    value = NAN.get(description.dtype, 0x7FFFFFFF) if description.fill == "nan" else 0
    return np.frombuffer(value.to_bytes(size, "little") * (unit // size), ELEMENT[unit])[0]


def convert(bits: Array, dtype: str) -> None:
    """Converts float32 as maps of these types load it: subnormals to 0, mantissas to tf32's 10 bits (nearest, ties away from 0)."""
    exponent = bits & np.uint32(0x7F800000)
    if dtype.endswith("ftz"):
        bits[exponent == 0] &= np.uint32(0x80000000)
    if dtype.startswith("tfloat32"):
        finite = exponent != np.uint32(0x7F800000)
        bits[finite] = (bits[finite] + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def byte_region(segment: Segment, addresses: Array, size: int) -> Region:
    """Returns ranges of `size` bytes from these aligned addresses (int64) on."""
    _, first, _ = segment.window(CHUNK)
    index = ((addresses - int(first)) // CHUNK)[:, None] + np.arange(size // CHUNK)
    rows = np.arange(len(addresses))
    return Region(segment, size, CHUNK, index, None, addresses, np.full(len(addresses), size), rows)


class TensorBox:
    """The index arrays of a map's box."""

    def __init__(self, description: Description):
        self.description = description
        self.counts = np.array(description.counts)
        self.steps = np.array((1, *description.element_strides[1:]))
        self.strides = np.array((description.element, *description.strides))
        self.dims = np.array(description.dims)
        self.inner = int(self.counts[0]) * description.element
        offsets = np.zeros(1, np.int64)
        for k in range(1, description.rank):
            along = np.arange(self.counts[k]) * self.steps[k] * self.strides[k]
            offsets = (along[:, None] + offsets).reshape(-1)
        self.offsets = offsets
        """Offset of each row of the box, the second dimension fastest."""
        self._elements: dict[int, Array] = {}

    def elements(self, unit: int) -> Array:
        """Returns offsets of the box's elements of `unit` bytes, in such units (each offset must be a multiple)."""
        found = self._elements.get(unit)
        if found is None:
            found = self._elements[unit] = ((self.offsets[:, None] + np.arange(0, self.inner, unit)) // unit).reshape(-1)
        return found

    def region(self, segment: Segment, address: int, coordinates: Array) -> Region:
        """Returns the boxes at (n, rank) coordinates (int64) of the tensor at `address`."""
        description, n = self.description, len(coordinates)
        corner = address + coordinates @ self.strides
        starts = corner[:, None] + self.offsets
        aligned = not np.count_nonzero(corner & CHUNK - 1)
        whole = bool((coordinates >= 0).all() and (coordinates + (self.counts - 1) * self.steps < self.dims).all())
        if whole:
            unit = CHUNK if aligned else description.element
            inside = None
            lengths = np.full(starts.size, self.inner)
            row = np.repeat(np.arange(n), len(self.offsets))
            starts = starts.reshape(-1)
        else:
            ok = self.rows_inside(coordinates)
            low = np.clip(-coordinates[:, 0], 0, self.counts[0]) * description.element
            high = np.clip(self.dims[0] - coordinates[:, 0], 0, self.counts[0]) * description.element
            ok &= (high > low)[:, None]
            unit = CHUNK if aligned and not np.count_nonzero((low | high) & CHUNK - 1) else description.element
            column = np.arange(0, self.inner, unit)
            across = (column >= low[:, None]) & (column < high[:, None])
            inside = (ok[:, :, None] & across[:, None, :]).reshape(n, -1)
            row, at = np.nonzero(ok)
            starts, lengths = starts[row, at] + low[row], (high - low)[row]
        _, first, _ = segment.window(unit)
        index = ((corner - int(first)) // unit)[:, None] + self.elements(unit)
        return Region(segment, description.size, unit, index, inside, starts, lengths, row, description)

    def rows_inside(self, coordinates: Array) -> Array:
        """Returns a mask (n, rows) of the boxes' rows with outer coordinates in the tensor."""
        ok = np.ones((len(coordinates), 1), bool)
        for k in range(1, self.description.rank):
            at = coordinates[:, k, None] + np.arange(self.counts[k]) * self.steps[k]
            fits = (at >= 0) & (at < self.dims[k])
            ok = (fits[:, :, None] & ok[:, None, :]).reshape(len(coordinates), -1)
        return ok


@dataclass(frozen=True)
class Tile:
    """The reads or writes of n copies in shared memory: `size` bytes from `offsets` on in `blocks` of the wave.

    chunks: (n, size // CHUNK), 16-byte elements of the wave's shared memory in the order of the data.
    """

    blocks: Array
    offsets: Array
    size: int
    swizzle: int
    chunks: Array

    @classmethod
    def of(cls, memory: LaunchMemory, blocks: Array, offsets: Array, size: int, swizzle: int) -> Tile:
        start = (blocks * memory.shared_stride + offsets) // CHUNK
        if not swizzle:
            return cls(blocks, offsets, size, swizzle, start[:, None] + np.arange(size // CHUNK))
        phases = offsets % (8 * swizzle)
        if not np.count_nonzero(phases != phases[0]):
            return cls(blocks, offsets, size, swizzle, start[:, None] + swizzled(int(phases[0]), size, swizzle))
        patterns = np.stack([swizzled(phase, size, swizzle) for phase in phases.tolist()])
        return cls(blocks, offsets, size, swizzle, start[:, None] + patterns)

    def take(self, rows: Array) -> Tile:
        return Tile(self.blocks[rows], self.offsets[rows], self.size, self.swizzle, self.chunks[rows])


@lru_cache(maxsize=256)
def swizzled(phase: int, size: int, swizzle: int) -> Array:
    """Returns a tile's chunks in the order of its data, relative to the first one, `phase` bytes behind the pattern's start.

    Bits 4 to 6 of an address are exclusive-ored with bits 7 to 9 (128 bytes), 4 and 5 with 7 and 8 (64), or 4 with 7 (32).
    """
    address = phase + np.arange(0, size, CHUNK)
    return ((address ^ (address >> 3 & swizzle - CHUNK)) - phase) // CHUNK


def extent(size: int, swizzle: int) -> int:
    """Returns the bytes of shared memory that a tile may touch: with a swizzle, whole lines."""
    return -(-size // max(swizzle, 1)) * max(swizzle, 1)


BAD = "bad tensor map"


def box_of(data: bytes) -> tuple[TensorBox, int] | str | None:
    """Returns the box of a map and its tensor's address; None for bytes that are no map, the reason for an impossible one."""
    found = decode(data)
    if found is None:
        return None
    try:
        found[0].check()
    except ValueError as error:
        return str(error)
    return TensorBox(found[0]), found[1]


class Maps(MemoryUnit):
    """The tensor maps that a launch uses."""

    def __init__(self, memory: LaunchMemory):
        super().__init__(memory)
        self.boxes: dict[bytes, tuple[TensorBox, int] | str | None] = {}
        self.released: dict[int, int] = {}
        """Moments when a block of the grid fenced its stores into maps."""
        self.acquired: dict[int, int] = {}
        """Moments when somebody fenced the 128 bytes at this address for their use."""

    def find(self, lanes: LaneSet, addresses: Array, rank: int, i: PtxInstruction) -> list[tuple[Array, TensorBox, Segment, int]]:
        """Returns the good maps at the lanes' addresses: (positions of lanes, box, tensor, tensor's address). rank: 0 for any."""
        found = []
        for address, at in by_value(addresses):
            some = lanes.subset(at)
            wrong = self.wrong(some, address, i)
            if wrong is None:
                data = self.memory.peek(0, address, MAP_BYTES)
                if data not in self.boxes:
                    self.boxes[data] = box_of(data)
                good = self.boxes[data]
                if good is None:
                    wrong = BAD, f"the {MAP_BYTES} bytes at {self.place(address)} are no tensor map"
                elif isinstance(good, str):
                    wrong = BAD, f"the tensor map at {self.place(address)}, which a kernel made: {good}"
                elif rank not in (0, good[0].description.rank):
                    dimensions = plural(good[0].description.rank, "dimension")
                    wrong = BAD, f"the tensor map at {self.place(address)} has {dimensions}, the instruction {rank}"
                else:
                    segment = self.memory.segments.get(good[1] >> WINDOW_BITS)
                    if segment is not None and segment.space == "global" and good[1] % CHUNK == 0:
                        found.append((at, good[0], segment, good[1]))
                        continue
                    wrong = BAD, f"the tensor map at {self.place(address)} is of memory at {good[1]:#x}, where no tensor begins"
            kind, message = wrong
            self.findings.report(kind, message, i, some, address=address)
        return found

    def wrong(self, lanes: LaneSet, address: int, i: PtxInstruction) -> tuple[str, str] | None:
        """Returns why there can be no map at an address, as (kind, message) of a finding."""
        space = address >> SPACE_BITS << SPACE_BITS
        if space == LOCAL_WINDOW:
            return BAD, "the tensor map is in local memory: a parameter that is not const __grid_constant__ is copied there"
        if space == SHARED_WINDOW:
            return BAD, "the tensor map is in shared memory; it may be a parameter, in constant or in global memory"
        segment = self.memory.segments.get(address >> WINDOW_BITS)
        if segment is None:
            return (
                ("null pointer", "the tensor map's address is null")
                if address < 1 << WINDOW_BITS
                else (
                    "out of bounds",
                    f"the tensor map at {address:#x} belongs to no tensor",
                )
            )
        offset = address - segment.start
        if not 0 <= offset <= segment.size - MAP_BYTES:
            return "out of bounds", f"tensor map at {self.place(address)}, which has {plural(segment.size, 'byte')}"
        if segment.space == "global":
            if address % MAP_ALIGN:
                return "misaligned", f"the tensor map at {self.place(address)} is not aligned to {MAP_ALIGN} bytes"
            if segment.state is not None and (segment.state[offset : offset + MAP_BYTES] == UNWRITTEN).any():
                return "uninitialised", f"tensor map at {self.place(address)}, which nobody wrote"
            self.look(lanes, segment, address, i)
        return None

    def look(self, lanes: LaneSet, segment: Segment, address: int, i: PtxInstruction) -> None:
        """Notes that a map is read. Reports stores of this launch into it without the fences that make them visible."""
        races = self.races
        if races is None:
            return
        access = races.piece_access(lanes, segment, np.full(lanes.n, address), np.full(lanes.n, MAP_BYTES), np.arange(lanes.n), i)
        if access is None:
            return
        races.read_map(access)
        moment, block = races.last_write(access)
        if moment > self.acquired.get(address, 0) or moment > self.released.get(block, 0):
            release = moment > self.released.get(block, 0)
            missing = "release, after the store" if release else "acquire, before the use"
            message = f"the tensor map at {self.place(address)} was stored: no fence.proxy.tensormap::generic.{missing}"
            verdict = Verdict("proxy", ERROR, mend=f"fence.proxy.tensormap::generic.{missing}")
            self.findings.report(verdict, message, i, lanes, address=address, tensor=segment.name)

    def release(self, lanes: LaneSet) -> None:
        """Runs fence.proxy.tensormap::generic.release for these lanes; it counts for their whole blocks."""
        races = self.races
        if races is not None:
            self.released |= dict.fromkeys((lanes.block_ids + lanes.wave.first_block).tolist(), races.now)
            races.now += 1

    def acquire(self, addresses: Array) -> None:
        """Runs fence.proxy.tensormap::generic.acquire for the bytes at these addresses; it counts for all threads."""
        races = self.races
        if races is not None:
            self.acquired |= dict.fromkeys(addresses.tolist(), races.now)
            races.now += 1

    def place(self, address: int) -> str:
        segment = self.memory.segments.get(address >> WINDOW_BITS)
        return f"{address:#x}" if segment is None else f"offset {address - segment.start:#x} of {segment.name!r}"


@dataclass(frozen=True)
class Shape:
    """The shape of tiles in shared memory: bytes, the alignment of their addresses, and the swizzle."""

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
    def of(cls, lanes: LaneSet, addresses: Array) -> Spot:
        return cls(np.arange(lanes.n), *targets(lanes, addresses))

    def take(self, at: Array) -> Spot:
        return Spot(self.row[at], self.blocks[at], self.offsets[at])


@dataclass(frozen=True)
class Arrival:
    """Destinations of loads, one entry each: the copy (row) it belongs to, the tile, and its mbarrier's key."""

    row: Array
    tile: Tile
    keys: Array


class Ends(MemoryUnit):
    """The checks of both ends of a wave's bulk copies."""

    def __init__(self, wave: Wave, memory: LaunchMemory, mbarriers: MBarriers):
        super().__init__(memory)
        self.wave, self.mbarriers = wave, mbarriers
        self.room = memory.shared_size - memory.reserved
        """Bytes of shared memory that a block may use."""

    # -- tensors ------------------------------------------------------------------------------------------------------------

    def ranges(self, lanes: LaneSet, addresses: Array, sizes: Array, i: PtxInstruction) -> list[tuple[Array, Region]]:
        """Returns plain bytes of tensors, together where size and tensor are the same: (positions of their lanes, region)."""
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

    def own_ranges(self, lanes: LaneSet, addresses: Array, sizes: Array, i: PtxInstruction) -> list[tuple[Array, Tile]]:
        """Returns bytes of the lanes' own shared memory, together where sizes are the same: (positions of their lanes, tiles)."""
        found: list[tuple[Array, Tile]] = []
        for size in set(sizes.tolist()):
            at = np.flatnonzero(sizes == size)
            if size % CHUNK:
                message = f"{i.name} of {plural(size, 'byte')}: the size is a multiple of {CHUNK}"
                self.report("misaligned", message, lanes, at, i)
            elif size and (good := self.own(lanes.subset(at), addresses[at], Shape(size), i)):
                found.append((at[good[0]], good[1]))
        return found

    def inside(self, lanes: LaneSet, at: Array, region: Region, i: PtxInstruction) -> list[tuple[Array, Region]]:
        """Returns the copies by lanes `at` that stay within the bytes of their tensor."""
        segment, bad = region.segment, region.outside()
        if not len(bad):
            return [(at, region)]
        where = f"{segment.name!r}, which has {plural(segment.size, 'byte')}"
        first = int(region.starts[np.flatnonzero(region.row == bad[0])].max()) - segment.start
        message = f"{i.name} of {plural(region.size, 'byte')}, some at offset {first:#x} of {where}"
        self.report("out of bounds", message, lanes, at[bad], i, segment.name)
        good = np.setdiff1d(np.arange(len(at)), bad)
        return [(at[good], region.take(good))] if len(good) else []

    def writable(self, segment: Segment, lanes: LaneSet, i: PtxInstruction) -> bool:
        if not segment.writable:
            message = f"{i.name} to {segment.name!r}, which is read-only"
            self.findings.report("read-only", message, i, lanes)
        return segment.writable

    # -- shared memory ------------------------------------------------------------------------------------------------------

    def own(self, lanes: LaneSet, addresses: Array, shape: Shape, i: PtxInstruction) -> tuple[Array, Tile] | None:
        """Returns tiles of the lanes' own blocks: (positions of the lanes, tiles)."""
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
        self, lanes: LaneSet, ends: tuple[Array, Array, Array | None], shape: Shape, i: PtxInstruction
    ) -> tuple[Array, Arrival] | None:
        """Returns destinations of copies: (positions of the lanes, tiles and mbarriers). `ends`: addresses of the tiles, of the
        mbarriers, and masks of the ranks of a multicast.
        """
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

    def spread(self, lanes: LaneSet, spot: Spot, barrier: Spot, masks: Array, i: PtxInstruction) -> tuple[Spot, Spot]:
        """Spreads a multicast: the same offsets in each block of the cluster whose bit is set."""
        cluster = self.wave.cluster
        beyond = np.flatnonzero(masks >> cluster)
        if len(beyond):
            message = f"multicast to the blocks of mask {int(masks[beyond[0]]):#x}: the cluster has {plural(cluster, 'block')}"
            self.report("out of bounds", message, lanes, beyond, i)
        row, rank = np.nonzero(masks[:, None] >> np.arange(cluster) & 1)
        blocks = lanes.block[row] // cluster * cluster + rank
        return Spot(row, blocks, spot.offsets[row]), Spot(row, blocks, barrier.offsets[row])

    def places(self, lanes: LaneSet, spot: Spot, shape: Shape, i: PtxInstruction) -> Array:
        """Returns a mask of the tiles in the shared memory of a living block; the others are findings."""
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

    def barriers(self, lanes: LaneSet, spot: Spot, barrier: Spot, i: PtxInstruction) -> Array:
        """Returns a mask of the mbarriers in bounds and in their tile's block; the others are findings."""
        checks = (
            ("misaligned", barrier.offsets % 8 != 0, "is not aligned to 8 bytes"),
            ("out of bounds", (barrier.offsets < 0) | (barrier.offsets > self.room - 8), "is not in shared memory"),
            ("out of bounds", barrier.blocks != spot.blocks, "is not in the block that gets the bytes"),
        )
        return self.judged(checks, lanes, spot, i, lambda at: f"{i.name}: the mbarrier at {int(barrier.offsets[at]):#x} ")

    def judged(
        self, checks: Sequence[tuple[str, Array, str]], lanes: LaneSet, spot: Spot, i: PtxInstruction, subject: Callable[[int], str]
    ) -> Array:
        """Returns a mask of the ends that pass all checks (kind, wrong ends, message); `subject` names the first that does not."""
        good = np.ones(len(spot.row), bool)
        for kind, wrong, why in checks:
            bad = np.flatnonzero(good & wrong)
            if len(bad):
                self.report(kind, subject(int(bad[0])) + why, lanes, spot.row[bad], i)
                good[bad] = False
        return good

    def report(self, kind: str, message: str, lanes: LaneSet, at: Array, i: PtxInstruction, tensor: str | None = None) -> None:
        self.findings.report(kind, message, i, lanes, at, tensor=tensor)
