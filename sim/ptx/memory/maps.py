"""Tensor maps in memory: what instructions find at the address of one, and whether the unit that copies boxes may see it.

PTX ISA, "Proxies", "membar/fence". A parameter is never written. What a kernel stores into a map in global memory the copies see
only behind fence.proxy.tensormap::generic: .release by who stored, .acquire by who uses it.
"""

from __future__ import annotations

import numpy as np

from cupyflash.words import plural

from ..order.transfers import last_write, piece_access, bulk_read
from ..state.lanes import Lanes
from ..state.segments import UNWRITTEN, WINDOW_BITS, Segment
from ..text.syntax import Instruction
from ..text.types import Array
from .memory import LOCAL_WINDOW, SHARED_WINDOW, SPACE_BITS, Memory
from .regions import CHUNK, Box
from .tensormap import MAP_ALIGN, MAP_BYTES, decode

BAD = "bad tensor map"


class Maps:
    """The tensor maps that a launch uses."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.boxes: dict[bytes, tuple[Box, int] | None] = {}
        self.released: dict[int, int] = {}
        """When a block of the grid fenced what it had stored into maps."""
        self.acquired: dict[int, int] = {}
        """When somebody fenced the 128 bytes at this address for their use."""

    def find(self, lanes: Lanes, addresses: Array, rank: int, i: Instruction) -> list[tuple[Array, Box, Segment, int]]:
        """The good maps at the lanes' addresses: (positions of lanes, box, tensor, the tensor's address). rank: 0 for any."""
        found = []
        for address in np.unique(addresses).tolist():
            at = np.flatnonzero(addresses == address)
            some = lanes.subset(at)
            wrong = self.wrong(some, address, i)
            if wrong is None:
                data = self.memory.peek(0, address, MAP_BYTES)
                if data not in self.boxes:
                    decoded = decode(data)
                    self.boxes[data] = (Box(decoded[0]), decoded[1]) if decoded else None
                good = self.boxes[data]
                if good is None:
                    wrong = BAD, f"the {MAP_BYTES} bytes at {self.place(address)} are no tensor map"
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
            self.memory.findings.report(kind, message, i, some, 0, count=some.n, address=address)
        return found

    def wrong(self, lanes: Lanes, address: int, i: Instruction) -> tuple[str, str] | None:
        """Why there can be no map at an address, as (kind, message) of a finding."""
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

    def look(self, lanes: Lanes, segment: Segment, address: int, i: Instruction) -> None:
        """Note that a map is read. That this launch stored into it without the fences that make it visible is a finding."""
        races = self.memory.races
        if races is None:
            return
        access = piece_access(
            races, lanes, segment, np.full(lanes.n, address), np.full(lanes.n, MAP_BYTES), np.arange(lanes.n), i
        )
        if access is None:
            return
        bulk_read(races, access)
        moment, block = last_write(races, access)
        if moment > self.acquired.get(address, 0) or moment > self.released.get(block, 0):
            release = moment > self.released.get(block, 0)
            missing = "release, after the store" if release else "acquire, before the use"
            message = f"the tensor map at {self.place(address)} was stored: no fence.proxy.tensormap::generic.{missing}"
            self.memory.findings.report("proxy", message, i, lanes, 0, count=lanes.n, address=address, tensor=segment.name)

    def release(self, lanes: Lanes) -> None:
        """fence.proxy.tensormap::generic.release by these lanes; believed of their blocks."""
        races = self.memory.races
        if races is not None:
            self.released |= dict.fromkeys((lanes.block_ids + lanes.wave.first_block).tolist(), races.now)
            races.now += 1

    def acquire(self, addresses: Array) -> None:
        """fence.proxy.tensormap::generic.acquire of the bytes at these addresses; believed of everybody."""
        races = self.memory.races
        if races is not None:
            self.acquired |= dict.fromkeys(addresses.tolist(), races.now)
            races.now += 1

    def place(self, address: int) -> str:
        segment = self.memory.segments.get(address >> WINDOW_BITS)
        return f"{address:#x}" if segment is None else f"offset {address - segment.start:#x} of {segment.name!r}"
