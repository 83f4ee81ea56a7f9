"""The memory of a launch: named tensors in global memory, shared memory of the wave's blocks, local memory.

Every load, store, atomic and asynchronous copy resolves its addresses through a port (`memory.ports`), which checks bounds,
alignment and initialisation, and reports each access once to `LaunchMemory.accessed`, which counts it and calls the observer.
Addresses are virtual: tensors as in `state.segments`, with windows for shared and local memory above them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cupyflash.words import plural

from ..order.races import Lifetimes, Races
from ..order.shadow import Stored, windows
from ..state.counters import LaunchTally
from ..state.findings import Findings
from ..state.lane_sets import LaneSet, Wave, wavefronts
from ..state.segments import PAGE, UNWRITTEN, WINDOW_BITS, WRITTEN, Access, Pages, Segment
from ..text.syntax import ELEMENT, Array, PtxInstruction
from .open_sums import WaitingSums
from .swizzles import Swizzles

SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 4 << 56
"""Window of the kernel's parameters; an address of .param may include it or, from a register of 32 bits, not."""
PARAM_START = 1 << 20
"""Offset of the parameters in it: a 32-bit address that is not near 0, and has room in front for stray accesses."""
SPACE_BITS = 56

LOOK = 1 << 16
"""Bytes of shared memory that are searched together for an unwritten one."""


Observer = Callable[[Access], None]


class LaunchMemory:
    """All memory of a running launch. `begin_wave` gives the blocks of the next wave fresh shared and local memory."""

    def __init__(self, segments: list[Segment], shared_size: int, local_size: int, findings: Findings, tally: LaunchTally):
        self.segments = {segment.start >> WINDOW_BITS: segment for segment in segments}
        self.shared_size = shared_size
        self.shared_stride = -(-max(shared_size, 1) // 128) * 128
        self.local_size = local_size
        self.local_stride = -(-max(local_size, 1) // 32) * 32
        self.findings = findings
        self.tally = tally
        self.observer: Observer | None = None
        self.races: Races | None = None
        self.reserved = 0
        """Bytes at the end of each block's shared memory that the system reserves: zero at first."""
        self.shared_names: Mapping[str, int] = {}
        """Offsets of the variables of shared memory."""
        self.homes: Mapping[PtxInstruction, tuple[str, int, int | None]] = {}
        """The only variable of shared memory that an access may be of, if known: its name, start and end (None: the end of all)."""
        self.sums: WaitingSums | None = None
        """Floating-point sums that wait; None: each is made at once."""
        self.lifetimes: Lifetimes | None = None
        """The lifetimes of the blocks of a wave of clusters, if races are looked for."""
        self._shared = np.empty(0, np.uint8)
        self._state = np.empty(0, np.uint8)
        self._local = np.empty(0, np.uint8)

    def begin_wave(self, wave: Wave) -> None:
        # Unwritten memory is all ones: NaN in every floating-point format, so that a use of it shows.
        if len(self._shared) != wave.blocks * self.shared_stride:
            self._shared = np.empty(wave.blocks * self.shared_stride, np.uint8)
            self._state = np.empty_like(self._shared)
            self._local = np.empty(wave.size * self.local_stride, np.uint8)
        if self.races is not None:
            self.races.begin_wave(wave)
            self.lifetimes = Lifetimes(self.races, wave, self.findings) if wave.cluster > 1 else None
        self.lanes_per_block = wave.lanes_per_block
        self._shared[:] = 0xFF
        self._state[:] = UNWRITTEN
        self._local[:] = 0xFF
        if self.reserved:
            own = slice(self.shared_size - self.reserved, self.shared_size)
            self._shared.reshape(wave.blocks, -1)[:, own] = 0
            self._state.reshape(wave.blocks, -1)[:, own] = WRITTEN
        self.settled = False
        self.pages = Pages(self.shared_stride, wave.blocks)
        self.swizzles = Swizzles(self.pages)
        self._written_pages = np.zeros(self.pages.count, bool)
        self.flying = 0
        """Asynchronous copies for which a wait is still to come."""
        self.landing = 0
        """Bulk copies to shared memory of which nobody has seen the end."""
        self._checks = 0
        self._unwritten = 0
        self.shared, self.states, self.local = (
            {size: memory.view(dtype) for size, dtype in ELEMENT.items()} for memory in (self._shared, self._state, self._local)
        )
        """All shared memory of the wave (`LaneSet.shared_base`: each block's start), UNWRITTEN, WRITTEN or IN_FLIGHT for each of
        its bytes, and all local memory, as elements of 1 to 32 bytes, by size.
        """

    def segment_of(self, view: Array, size: int) -> Segment | None:
        """Returns the tensor that a port resolved to this view of elements of `size` bytes; None: the memory of a block."""
        return next((one for one in self.segments.values() if one.window(size)[0] is view), None)

    def storing(self, lanes: LaneSet, values: Array) -> None:
        """Tells the race detector the values that lanes are about to store, one element each."""
        if self.races is not None:
            self.races.storing = Stored(lanes, values, self.shared[1], self.races.shared_shift)

    def stored(self) -> None:
        """Tells the race detector that the store has been made."""
        if self.races is not None:
            self.races.storing = None

    def peek(self, lane: int, address: int, size: int) -> bytes:
        """Returns up to `size` bytes at a generic address as lane `lane` of the wave sees it, uncounted; none if it is invalid."""
        return self.view(lane, address, size).tobytes()

    def view(self, lane: int, address: int, size: int, write: bool = False) -> Array:
        """Returns the memory itself, of which `write` marks the bytes as written."""
        base, offset = address >> SPACE_BITS << SPACE_BITS, address & ((1 << SPACE_BITS) - 1)
        state: Array | None = None
        if base == LOCAL_WINDOW:
            start, limit, data = lane * self.local_stride, self.local_stride, self._local
        elif base == SHARED_WINDOW:
            start, limit, data = lane // self.lanes_per_block * self.shared_stride, self.shared_stride, self._shared
            state = self._state
        else:
            segment = self.segments.get(address >> WINDOW_BITS)
            if segment is None:
                return np.empty(0, np.uint8)
            if self.sums is not None:
                self.sums.finish(segment)
            start, limit, data = 0, segment.size, segment.window(1)[0]
            offset, state = address - segment.start, segment.state
        where = slice(start + offset, start + min(offset + size, limit)) if 0 <= offset < limit else slice(0, 0)
        if write and state is not None:
            state[where] = WRITTEN
        return data[where]

    def strays(self, i: PtxInstruction, offsets: Array, size: int) -> Array:
        """Returns a mask of accesses of `size` bytes at these offsets in shared memory (int64) that leave their variable."""
        _, start, end = self.homes.get(i, ("", 0, None))
        return (offsets < start) | (offsets > (self.shared_size if end is None else end) - size)

    def strayed(self, i: PtxInstruction, offset: int) -> str:
        """Returns the end of the message about such an access."""
        name, start, end = self.homes[i]
        where = f"{start - offset} before {name!r}" if offset < start else f"offset {offset - start} of {name!r}"
        size = "" if end is None else f", which has {plural(end - start, 'byte')}"
        inside = start <= offset and (end is None or offset < end)
        return f": {where}{size}" + ("" if inside else f"; what lies there is {self.shared_name(offset)}")

    def shared_name(self, offset: int) -> str:
        """Returns an offset in shared memory with the name of the variable there, if it is known."""
        found = max(((start, name) for name, start in self.shared_names.items() if start <= offset), default=None)
        if found is None:
            return f"{offset:#x}"
        start, name = found
        return f"{offset:#x} ({name}{f' + {offset - start}' if offset > start else ''})"

    def text(self, lane: int, address: int) -> str:
        """Returns the C string at a generic address."""
        out = b""
        while part := self.peek(lane, address + len(out), 256):
            out += part
            if 0 in part:
                break
        return out.partition(b"\0")[0].decode(errors="replace")

    def settle(self) -> None:
        """Looks, now and then, if every shared byte is written: then reads need no check any more."""
        self._checks += 1
        if self._checks % 32:
            return
        # Most often the byte that was unwritten last time still is.
        while self._unwritten < len(self._state):
            part = self._state[self._unwritten : self._unwritten + LOOK]
            if part[0] != WRITTEN or part.any():
                self._unwritten += int(np.argmax(part != WRITTEN))
                return
            self._unwritten += LOOK
        self._unwritten = 0
        self.settled = not self._state.any()

    def unsettle(self, starts: Array | None = None, size: int = 0) -> None:
        """Marks shared memory as unwritten in `size` bytes from each of these places of the wave on; None: somewhere."""
        self.settled = False
        where: Any = slice(None) if starts is None else self.pages.of_ranges(starts, size)[0]
        self._written_pages[where] = False

    def all_written(self, pages: Array) -> bool:
        """True if all bytes of these pages are written."""
        if self._written_pages[pages].all():
            return True
        some = np.unique(pages[~self._written_pages[pages]])
        some = some[self.pages.whole(some)]
        words = windows(self.states[8], PAGE // 8)[self.pages.start(some) // 8]
        self._written_pages[some] = ~words.any(axis=1)
        return bool(self._written_pages[pages].all())

    # -- counts and the observer: every access passes here ----------------------------------------------------------

    def accessed(self, access: Access) -> None:
        """Counts a checked access and shows it to the observer."""
        lanes, segment, addresses, size, i = access.lanes, access.segment, access.addresses, access.size, access.instruction
        if segment is not None:
            traffic = self.tally.traffic[i, segment]
            for write in access.sides:
                traffic.count(lanes, addresses, size, write)
        elif access.space == "shared" and isinstance(size, int):
            passes = wavefronts(lanes, addresses, size)
            self.tally.shared[i, access.kind, size].count(lanes.warps, lanes.n * size, *passes)
        self.show(access)

    def reached(self, access: Access, blocks: Array) -> None:
        """Counts a checked access to the shared memory of other `blocks` of the cluster (numbers in the wave), and shows it."""
        lanes, places, size, i = access.lanes, access.addresses, access.size, access.instruction
        assert isinstance(size, int)
        each = [np.flatnonzero(blocks == block) for block in np.unique(blocks)]
        passes = np.sum([wavefronts(lanes.subset(at), places[at], size) for at in each], axis=0).tolist()
        self.tally.distributed[i, access.kind, size].count(lanes.warps, lanes.n * size, *passes)
        if self.lifetimes is not None:
            self.lifetimes.touch(lanes, blocks, i)
        self.show(access)

    def show(self, access: Access) -> None:
        """Shows an access to the race detector and the observer."""
        if self.races is not None:
            self.races.access(access)
        if self.observer is not None:
            for write in access.sides:
                self.observer(access._replace(write=write))


class MemoryUnit:
    """A unit that works on the memory of a wave."""

    def __init__(self, memory: LaunchMemory):
        self.memory, self.findings = memory, memory.findings
        self.races = memory.races


STORES = frozenset({"st", "red", "stmatrix", "cp.async"})
"""Kinds that only write. cp.async resolves its global source as "ld" and its shared destination as "cp.async"."""
