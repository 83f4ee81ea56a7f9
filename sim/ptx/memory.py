"""The memory of a launch: named tensors in global memory, shared memory of the wave's blocks, local memory.

Every load, store, atomic and asynchronous copy resolves its addresses through a port (`ports`), which checks bounds,
alignment and initialisation, and reports each access once to `Memory.accessed`, which counts it and calls the observer.
Addresses are virtual: tensor number i owns the window of 2**40 bytes from (i + 1) << 40 and lies in the
middle of it. So a stray access is charged to the tensor whose pointer it came from, and two arguments that are views of
the same memory stay apart in every count although they share their bytes.

A NumPy allocation starts at an aligned address, as one on a device does, and a view of it keeps its offset: sector
counts and misalignment are those of the view, and do not change with where the host put the bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.lib.array_utils import byte_bounds

from .counters import Tally
from .findings import Findings
from .lanes import Lanes, Wave
from .patterns import wavefronts
from .races import Races
from .sharing import Place
from .syntax import Instruction
from .types import ELEMENT, Array

WINDOW_BITS = 40
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
SPACE_BITS = 56
ALIGNMENT = 4096

WRITTEN, UNWRITTEN, IN_FLIGHT = 0, 1, 2
"""State of a byte of shared memory, and of a tensor whose contents nobody wrote. 0 is the state of the bytes between a tensor's
elements: fresh memory is zero without being touched, and they may be many."""


@dataclass(frozen=True)
class Access:
    """One memory access of a set of lanes, as an observer sees it. `kind`: ld, st, atom, ldmatrix, cp.async, ...

    `addresses` (uint64 or uint32, one a lane) are virtual; in shared and local memory offsets. `segment` is the tensor.
    """

    lanes: Lanes
    space: str
    segment: Segment | None
    addresses: Array
    size: int | Array
    kind: str
    write: bool
    instruction: Instruction


Observer = Callable[[Access], None]


class Segment:
    """A named range of global (or constant, or parameter) memory that shows the bytes of a NumPy array."""

    def __init__(self, name: str, number: int, array: Array, space: str = "global"):
        low, high = byte_bounds(array)
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        origin = byte_bounds(root)[0]
        # Memory that NumPy did not allocate (a mapped file, another library's buffer) keeps its real alignment.
        place = low - origin if root.flags.owndata and origin % 16 == 0 else low
        self.name = name
        self.place: Place = name
        """The parameter, the field of one, or the variable that points here."""
        self.space = space
        self.array = array
        self.size = high - low if array.size else 0
        self.start = ((number + 1) << WINDOW_BITS) + (1 << (WINDOW_BITS - 1)) + place % ALIGNMENT
        self.writable = array.flags.writeable
        self.address = low
        base = array.__array_interface__["data"][0]
        self.pointer = self.start + (base - low)
        self.state: Array | None = None
        """UNWRITTEN or WRITTEN for each byte from `start`; None: the launch was given the contents."""
        self._windows: dict[int, tuple[Array, Array, Array]] = {}
        self._states: dict[int, Array] = {}

    def window(self, size: int) -> tuple[Array, Array, Array]:
        """(elements of `size` bytes, virtual address of the first aligned one, largest offset of one) as arrays."""
        found = self._windows.get(size)
        if found is None:
            first = -(-self.start // size) * size
            count = max(0, (self.start + self.size - first) // size)
            raw = (ctypes.c_ubyte * (count * size)).from_address(self.address + first - self.start)
            view = np.frombuffer(memoryview(raw), ELEMENT[size]) if count else np.empty(0, ELEMENT[size])
            found = (view, np.array(first, np.uint64), np.array(max(count - 1, 0) * size, np.uint64))
            self._windows[size] = found
        return found

    def states(self, size: int) -> Array:
        """`state` as elements of `size` bytes, the same ones as in `window`."""
        found = self._states.get(size)
        if found is None:
            view, first, _ = self.window(size)
            assert self.state is not None
            skipped = int(first) - self.start
            found = self._states[size] = self.state[skipped : skipped + len(view) * size].view(ELEMENT[size])
        return found

    def array_states(self) -> Array:
        """`state` of the array's elements: their bytes are the last axis."""
        assert self.state is not None
        own = self.state[self.pointer - self.start :]
        return np.lib.stride_tricks.as_strided(own, (*self.array.shape, self.array.itemsize), (*self.array.strides, 1))

    def neighbours(self, segments: list[Segment]) -> tuple[list[Segment], int, int]:
        """Those that share memory with this one, itself included, and the host addresses where they begin and end."""
        group, low, high = [self], self.address, self.address + self.size
        for _ in segments:
            for one in segments:
                if one not in group and one.size and one.address < high and low < one.address + one.size:
                    group.append(one)
                    low, high = min(low, one.address), max(high, one.address + one.size)
        return group, low, high


def mark_unwritten(chosen: list[tuple[Segment, Array | bool]], segments: list[Segment]) -> None:
    """Nobody wrote the elements of these arrays, or those of their bytes where a mask says so, nor whatever other segments show
    of the same memory."""
    for segment, where in chosen:
        if segment.state is None:
            group, low, high = segment.neighbours(segments)
            low -= low % 16  # as aligned as the memory itself
            together = np.zeros(high - low, np.uint8)  # WRITTEN
            for one in group:
                one.state = together[one.address - low : one.address - low + one.size]
        if segment.array.size:
            np.copyto(segment.array_states(), UNWRITTEN, where=where)


class Memory:
    """All memory of a running launch. `begin_wave` gives the blocks of the next wave fresh shared and local memory."""

    def __init__(self, segments: list[Segment], shared_size: int, local_size: int, findings: Findings, tally: Tally):
        self.segments = {segment.start >> WINDOW_BITS: segment for segment in segments}
        self.shared_size = shared_size
        self.shared_stride = -(-max(shared_size, 1) // 128) * 128
        self.local_size = local_size
        self.local_stride = -(-max(local_size, 1) // 32) * 32
        self.findings = findings
        self.tally = tally
        self.observer: Observer | None = None
        self.races: Races | None = None
        self._shared = np.empty(0, np.uint8)
        self._state = np.empty(0, np.uint8)
        self._local = np.empty(0, np.uint8)

    def begin_wave(self, wave: Wave) -> None:
        # Nobody has written yet: all ones is NaN in every floating-point format, so that a use of it shows.
        if len(self._shared) != wave.blocks * self.shared_stride:
            self._shared = np.empty(wave.blocks * self.shared_stride, np.uint8)
            self._state = np.empty_like(self._shared)
            self._local = np.empty(wave.size * self.local_stride, np.uint8)
        if self.races is not None:
            self.races.begin_wave(wave)
        self.lanes_per_block = wave.lanes_per_block
        self._shared[:] = 0xFF
        self._state[:] = UNWRITTEN
        self._local[:] = 0xFF
        self.settled = False
        self.flying = 0
        """Asynchronous copies that somebody has yet to wait for."""
        self._checks = 0
        self._shared_views = {size: self._shared.view(dtype) for size, dtype in ELEMENT.items()}
        self._state_views = {size: self._state.view(dtype) for size, dtype in ELEMENT.items()}
        self._local_views = {size: self._local.view(dtype) for size, dtype in ELEMENT.items()}

    def shared_view(self, size: int) -> Array:
        """Shared memory of all blocks of the wave as elements of `size` bytes; `Lanes.shared_base` says whose is where."""
        return self._shared_views[size]

    def state_view(self, size: int) -> Array:
        """For each byte of shared memory UNWRITTEN, WRITTEN or IN_FLIGHT, seen as elements of `size` bytes."""
        return self._state_views[size]

    def local_view(self, size: int) -> Array:
        return self._local_views[size]

    def peek(self, lane: int, address: int, size: int) -> bytes:
        """Up to `size` bytes at a generic address as lane `lane` of the wave sees it, uncounted; none where it is invalid."""
        base, offset = address >> SPACE_BITS << SPACE_BITS, address & ((1 << SPACE_BITS) - 1)
        if base == LOCAL_WINDOW:
            start, limit, data = lane * self.local_stride, self.local_stride, self._local
        elif base == SHARED_WINDOW:
            start, limit, data = lane // self.lanes_per_block * self.shared_stride, self.shared_stride, self._shared
        else:
            segment = self.segments.get(address >> WINDOW_BITS)
            if segment is None:
                return b""
            start, limit, data = 0, segment.size, segment.window(1)[0]
            offset = address - segment.start
        return data[start + offset : start + min(offset + size, limit)].tobytes() if 0 <= offset < limit else b""

    def text(self, lane: int, address: int) -> str:
        """The C string at a generic address."""
        out = b""
        while part := self.peek(lane, address + len(out), 256):
            out += part
            if 0 in part:
                break
        return out.partition(b"\0")[0].decode(errors="replace")

    def settle(self) -> None:
        """Now and then: once every shared byte is written, reads need no check any more."""
        self._checks += 1
        if self._checks % 32 == 0:
            self.settled = bool((self._state == WRITTEN).all())

    # -- the one place that every access passes ---------------------------------------------------------------------

    def accessed(
        self,
        space: str,
        segment: Segment | None,
        lanes: Lanes,
        addresses: Array,
        size: int | Array,
        kind: str,
        instruction: Instruction,
    ) -> None:
        """Count a checked access and show it to the observer, once as a read and once as a write for an atomic."""
        reads, writes = kind not in STORES, kind in STORES or kind == "atom"
        if segment is not None:
            traffic = self.tally.traffic[instruction, segment]
            if reads:
                traffic.count(lanes, addresses, size, False)
            if writes:
                traffic.count(lanes, addresses, size, True)
        elif space == "shared" and isinstance(size, int):
            counts = self.tally.shared[instruction, kind, size]
            passes, ideal = wavefronts(lanes, addresses, size)
            counts.requests += lanes.warps
            counts.bytes += lanes.n * size
            counts.wavefronts += passes
            counts.ideal_wavefronts += ideal
        if self.races is not None:
            self.races.access(space, segment, lanes, addresses, size, kind, instruction)
        if self.observer is not None:
            if reads:
                self.observer(Access(lanes, space, segment, addresses, size, kind, False, instruction))
            if writes:
                self.observer(Access(lanes, space, segment, addresses, size, kind, True, instruction))


STORES = frozenset({"st", "red", "stmatrix", "cp.async"})
"""Kinds that only write. cp.async resolves its global source as "ld" and its shared destination as "cp.async"."""
