"""The L2 from an execution: the lines that the thread blocks of any kernel ask for on the PTX machine, at their exact addresses.

A turn is a request: the k-th memory instruction of a thread block that reaches global memory, by whichever of its warps run it
together. Blocks of one kernel ask for the same at the same place of their code, so the k-th requests of those that run together
are about as far as they are on a device; nothing else is known of time here. L1 is not modelled, nor is local memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.array_utils import byte_bounds

from cupyflash.basics import Array, Report
from cupyflash.request.score import Mask, Score
from cupyflash.schedules import TileSchedule
from cupyflash.sim.execution import Onlookers, Watch
from cupyflash.sim.l2 import Behind, Given, TooLong, behind, launches_of, require_followed
from cupyflash.sim.l2 import run as model
from cupyflash.sim.l2.cache import L2, LINE, ROTATED, SECTOR, SECTORS, CacheCounts, Sets
from cupyflash.sim.l2.launch import DeviceMemory, LaunchedBlocks, resident
from cupyflash.sim.ptx import Access
from cupyflash.sim.ptx.state.lane_sets import AddressPattern, Wave
from cupyflash.sim.ptx.state.segments import ALIGNMENT, Segment, owner_of
from cupyflash.sim.ranges import ranges

SECTOR_BITS, SECTORS_BITS = SECTOR.bit_length() - 1, SECTORS.bit_length() - 1
# Lines that are looked up at once, about
AT_ONCE = 1 << 21
# Of patterns of access that are remembered
KNOWN_LANES = 1 << 20
# Of a launch: some three gigabytes
MOST_LINES = 1 << 26


class Placed:
    """HBM with an execution's arrays: each allocation at an address of its own, and views of it at their places in it."""

    def __init__(self) -> None:
        self._placed: list[tuple[int, int, int]] = []  # from and to where on the host, and the address
        self.end = 0

    def shift(self, segment: Segment) -> int:
        """The offset from a segment's virtual addresses to addresses in HBM."""
        low = segment.address
        for first, end, address in self._placed:
            if first <= low and low + segment.size <= end:
                return address + low - first - segment.start
        first, end = byte_bounds(owner_of(segment.array))
        address = self.end + (segment.start - (low - first)) % ALIGNMENT
        self._placed.append((first, end, address))
        self.end = -(-(address + end - first) // (ROTATED * LINE)) * ROTATED * LINE
        return address + low - first - segment.start


@dataclass(frozen=True)
class SectorLines:
    """Lines that thread blocks ask for: the block, the line, and the sectors of it as a mask."""

    block: Array
    line: Array
    mask: Array

    @classmethod
    def of(cls, block: Array, sector: Array) -> SectorLines:
        """Join neighbouring requests for sectors of one line into one, unless few would join."""
        line, new = sector >> SECTORS_BITS, np.ones(len(sector), np.bool_)
        np.not_equal(line[1:], line[:-1], new[1:])
        new[1:] |= block[1:] != block[:-1]
        mask = np.left_shift(np.uint8(1), (sector & SECTORS - 1).astype(np.uint8))
        if 2 * np.count_nonzero(new) > len(new):
            return cls(block, line, mask)
        at = np.flatnonzero(new)
        return cls(block[at], line[at], np.bitwise_or.reduceat(mask, at) if len(at) else mask)

    @classmethod
    def of_pieces(cls, block: Array, first: Array, nbytes: Array) -> SectorLines:
        """The lines of `nbytes` bytes from address `first` on, for each request."""
        there = nbytes > 0
        block, first, nbytes = block[there], first[there], nbytes[there]
        sector = first >> SECTOR_BITS
        number = (first + nbytes - 1 >> SECTOR_BITS) - sector + 1
        return cls.of(np.repeat(block, number), ranges(sector, number))


class AskedLines(LaunchedBlocks):
    """The observer of a launch: it notes the lines that each thread block asks for, in the block's order."""

    def __init__(self, execution: Observed, grid: int, slots: int) -> None:
        self.execution, self.grid, self.slots = execution, grid, slots
        self.turns = np.zeros(grid, np.int32)
        self._parts: list[tuple[Array, Array, Array, Array]] = []  # blocks, their turns, lines, masks
        self._whose: list[tuple[int, bool]] = []  # of each part the tensor, and whether it is written
        self._noted = 0
        self._wave: Wave | None = None
        self._known: dict[tuple[AddressPattern, int], SectorLines] = {}
        self._known_lanes = 0

    def __call__(self, access: Access) -> None:
        segment, lanes, write = access.segment, access.lanes, access.write
        if segment is None or segment.space != "global":
            return
        tensor, shift = self.execution.place(segment)
        lines, line, nbytes, sectors = self._lines(access, shift)
        self.execution.counts[tensor] += (0, nbytes, 0) if write else (nbytes, 0, sectors)
        again = access.kind == "atom" and write  # an atomic is shown as a read, then as a write
        self._parts.append((lines.block, self.turns.take(lines.block) - again, lines.line + line, lines.mask))
        self._whose.append((tensor, write))
        self._noted += len(lines.line)
        if self._noted > MOST_LINES:
            raise TooLong(f"the L2 model follows an execution's launch up to {MOST_LINES:,} lines: take a smaller problem")
        self.cluster = lanes.wave.cluster
        if not again:
            self.turns[lanes.block_ids + lanes.wave.first_block] += 1

    def _lines(self, access: Access, shift: int) -> tuple[SectorLines, int, int, int]:
        """The lines of an access, what is to be added to their numbers, its bytes and its warps' sectors."""
        lanes, size, first_block = access.lanes, access.size, access.lanes.wave.first_block
        if not isinstance(size, int):
            blocks = np.broadcast_to(lanes.block, access.addresses.shape)  # a bulk copy has one lane and many pieces
            found = SectorLines.of_pieces(blocks + first_block, access.addresses.astype(np.int64) + shift, size.astype(np.int64))
            return found, 0, int(size.sum()), int(np.bitwise_count(found.mask).sum())
        address, pattern = lanes.pattern(access.addresses, size)
        line, within = divmod(address + shift, LINE)
        if lanes.wave is not self._wave or self._known_lanes > KNOWN_LANES:
            self._wave, self._known, self._known_lanes = lanes.wave, {}, 0
        known = self._known.get((pattern, within))
        if known is None:
            # A lane's bytes are aligned, and 32 at most
            known = SectorLines.of(lanes.block + first_block, pattern.relative + within >> SECTOR_BITS)
            self._known[pattern, within] = known
            self._known_lanes += lanes.n
        return known, line, lanes.n * size, pattern.sectors(address)

    def look_up(self, sets: Sets, counts: CacheCounts) -> None:
        """All of it: in each turn by address, reads first, what several ask for once."""
        starts, (lines, tensors) = self.starts(), self.execution.extent
        sizes = int((starts + self.turns).max()) + 1, lines, 2, tensors, 1 << SECTORS
        key, end = np.empty(self._noted, np.int64), 0
        for (block, turn, line, mask), (tensor, write) in zip(self._parts, self._whose, strict=True):
            fields = starts.take(block) + turn, line, int(write), tensor, mask
            key[end : end + len(line)] = np.ravel_multi_index(fields, sizes)
            end += len(line)
        key.sort()
        asked = key >> SECTORS
        at = np.flatnonzero(np.concatenate((asked[:1] >= 0, asked[1:] != asked[:-1])))
        masks = np.bitwise_or.reduceat(key & (1 << SECTORS) - 1, at) if len(at) else key
        for first in range(0, len(at), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            _, line, written, whose = np.unravel_index(asked[at[some]], sizes[:-1])
            counts.add_dram(sets.look_up(line, masks[some], written > 0), written > 0, whose)


class Observed:
    """The launches of one execution, in order: their requests, and the DRAM traffic.

    `names` are the tensors of arguments that have other names in the kernels, such as those of a tensor map.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.launches: list[AskedLines] = []
        self.counts: list[Array] = []
        """Bytes read and written, and sectors read, of each tensor."""
        self._names = names or {}
        self._tensors: dict[str, int] = {}
        self._places: dict[Segment, tuple[int, int]] = {}
        self._placed = Placed()

    def launch(self, grid: int, slots: int) -> AskedLines:
        """The observer of the next launch, of which `slots` thread blocks run at a time."""
        self.launches.append(AskedLines(self, grid, slots))
        return self.launches[-1]

    @property
    def extent(self) -> tuple[int, int]:
        """Lines of all arrays, and tensors."""
        return self._placed.end // LINE, len(self._tensors)

    def place(self, segment: Segment) -> tuple[int, int]:
        """(The number of a segment's tensor, the offset from its virtual addresses to addresses in HBM)."""
        found = self._places.get(segment)
        if found is None:
            tensor = self._tensors.setdefault(self._names.get(segment.name, segment.name), len(self._tensors))
            if tensor == len(self.counts):
                self.counts.append(np.zeros(3, np.int64))
            found = self._places[segment] = tensor, self._placed.shift(segment)
        return found

    def behind(self, l2: L2) -> Behind:
        """All launches through one L2, cold at the start."""
        counts, sets = CacheCounts.zero(len(self._tensors)), Sets(l2)
        counts.read_bytes[:], counts.write_bytes[:], counts.sectors[:] = np.reshape(self.counts, (-1, 3)).T
        for launch in self.launches:
            launch.look_up(sets, counts)
        return behind(list(self._tensors), counts, self.launches)


def observed(schedule: TileSchedule) -> tuple[Observed, Watch]:
    """(The observed execution, the `watch` that `sim.execute` takes) for a schedule's kernels."""
    execution = Observed({name: box.tensor for name, box in schedule.maps().items()})
    slots = iter([slots for kernel, slots in zip(schedule.kernels(), resident_of(schedule), strict=True) if kernel.grid])
    return execution, lambda kernel: Onlookers(execution.launch(kernel.grid, next(slots)))


def resident_of(schedule: TileSchedule) -> list[int]:
    """The thread blocks of each kernel that run at a time, as in `l2.run`; for a schedule that the model does not cover, by threads
    and shared memory with as many registers as a thread can have."""
    try:
        require_followed(schedule, "rows")
    except ValueError:
        return [resident(schedule.device, kernel.threads, kernel.shared_bytes) for kernel in schedule.kernels()]
    return [launch.resident for launch in launches_of(schedule, "rows", DeviceMemory())]


@dataclass(frozen=True)
class Beside:
    """The DRAM traffic of an execution, beside that of `l2.run` for its schedule: None if the model does not cover it,
    and `why`."""

    executed: Behind
    schedule: Behind | None
    why: str = ""

    @classmethod
    def of(cls, execution: Observed, schedule: TileSchedule, given: Given | None = None) -> Beside:
        """Model the L2 of the schedule's device; `given` as for `l2.run`."""
        executed = execution.behind(L2.of(schedule.device))
        try:
            return cls(executed, model(schedule, given=given))
        except ValueError as error:
            return cls(executed, None, str(error))

    def as_dict(self) -> Report:
        """Both models for JSON."""
        schedule = self.schedule.as_dict() if self.schedule else None
        return {"executed": self.executed.as_dict(), "schedule": schedule, "not_followed": self.why or None}


def run(
    schedule: TileSchedule, data_seed: int = 0, score: Score | None = None, mask: Mask | None = None, *, l2: L2 | None = None
) -> Behind:
    """Execute a schedule's kernels on drawn arrays and play their requests through an L2, by default the device's.

    `score` and `mask` have the captured values of the problem's functions, as for `verify`. ValueError for a schedule that no
    kernel runs, ImportError without a compiler.
    """
    from cupyflash.sim.numbers.yardstick import knowing_mask
    from cupyflash.sim.verification import DrawnInputs, run_drawn

    given = DrawnInputs.of(schedule.problem, data_seed, score, mask)
    execution, watch = observed(knowing_mask(schedule, data_seed, given.mask))
    run_drawn(schedule, replace(given, watch=watch))
    return execution.behind(l2 or L2.of(schedule.device))
