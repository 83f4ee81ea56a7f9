"""The heap from which kernels allocate: malloc and free, new and delete.

Allocations lie apart, and the place of a freed one is the last to be used again: an access behind an end, or to freed memory, is
found. (CUDA C++ Programming Guide, "Dynamic Global Memory Allocation and Operations".) `DeviceRuntime` answers the calls.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cupyflash.words import plural

from ..state.lane_sets import LaneSet
from ..state.segments import UNALLOCATED, UNWRITTEN, WINDOW_BITS, Segment
from ..text.syntax import Array, PtxInstruction
from .spaces import LaunchMemory

ALIGNMENT = 16
GAP = 64
"""Bytes between two allocations, at least: more than any access has."""
SPARE = 24 << 20
"""Addresses of a heap beyond its bytes: so much is allocated before a place is used again. Race detection needs memory for all."""
HEAP_WINDOW = (1 << 15) - 2
"""The number of its window of addresses: above those of all tensors."""


class BadCall(Exception):
    """Raised for a call of a function of the device with which the launch cannot go on; says why."""


class Heap:
    """A heap of `size` bytes: allocations stay from launch to launch. `segment`: its memory, most of it never touched."""

    def __init__(self, size: int = 8 << 20, spare: int = SPARE, name: str = "heap", window: int = HEAP_WINDOW):
        self.size, self.used = size, 0
        memory, state = (np.zeros(size + spare, np.uint8) for _ in range(2))
        self.segment = Segment(name, 0, memory, start=(window << WINDOW_BITS) + (1 << (WINDOW_BITS - 1)))
        self.segment.state = state  # zeros_like would touch all of it
        self.segment.places, self.segment.heap = ("*",), self
        self.live: dict[int, int] = {}
        """Bytes of each allocation, by its offset."""
        self._freed: dict[int, int] = {}
        self._starts: list[int] = []
        self._next = self.top = 0

    def allocate(self, size: int) -> int:
        """Returns the address of `size` bytes that nobody wrote; 0 if there is no room for them."""
        if not 0 < size <= self.size - self.used:
            return 0
        offset = self._place(-(-size // ALIGNMENT) * ALIGNMENT + GAP)
        if offset is None:
            return 0
        self.used += size
        self.live[offset] = size
        bisect.insort(self._starts, offset)
        state = self.segment.state
        assert state is not None
        state[offset : offset + size] = UNWRITTEN
        state[offset + size : self._next] = UNALLOCATED
        self.top = max(self.top, self._next)
        return self.segment.start + offset

    def _place(self, stretch: int) -> int | None:
        """Returns the next offset, round and round, with so much room."""
        at, again = self._next, False
        while True:
            position = bisect.bisect_left(self._starts, at)
            end = self._starts[position] if position < len(self._starts) else self.segment.size
            if at + stretch <= end:
                self._next = at + stretch
                return at
            if end < self.segment.size:
                at = -(-(end + self.live[end]) // ALIGNMENT) * ALIGNMENT + GAP
            elif again:
                return None
            else:
                at, again = 0, True

    def free(self, address: int) -> None:
        """Frees an allocation by its address; nothing at 0. Raises BadCall, with the reason, for any other."""
        offset = address - self.segment.start
        if not address:
            return
        size = self.live.pop(offset, None)
        if size is None:
            again = offset in self._freed
            raise BadCall(
                f"{address:#x} " + ("was freed before" if again else f"is not the begin of an allocation of {self.segment.name!r}")
            )
        self._starts.remove(offset)
        self._freed.pop(offset, None)
        self._freed[offset] = size
        self.used -= size
        assert self.segment.state is not None
        self.segment.state[offset : offset + size] = UNALLOCATED

    def unallocated(self, addresses: Array, size: int | Array) -> Array:
        """Returns a mask of the accesses, which are in the heap's bounds, to bytes that are not allocated."""
        state = self.segment.state
        assert state is not None
        first = (addresses - np.uint64(self.segment.start)).view(np.int64)
        last = first + (size - 1)
        return (state[first] == UNALLOCATED) | (state[last] == UNALLOCATED) | (last >= self.top)

    def place(self, address: int) -> str:
        """Returns the end of the message about an access to bytes that are not allocated."""
        offset = address - self.segment.start
        freed = next((start for start, size in reversed(self._freed.items()) if start <= offset < start + size), None)
        if freed is not None:
            return f": offset {offset - freed} of {plural(self._freed[freed], 'byte')} of {self.segment.name!r} that were freed"
        position = bisect.bisect_right(self._starts, offset)
        if not position:
            return f": in {self.segment.name!r}, where nothing is allocated"
        start = self._starts[position - 1]
        return f": offset {offset - start} of {plural(self.live[start], 'byte')} that were allocated in {self.segment.name!r}"


PRINTING = frozenset({"vprintf", "__assertfail"})
"""Functions that give no memory; the machine answers them itself."""


@dataclass(frozen=True)
class Caller:
    """A thread that calls a function of the device: the launch's memory, the thread as a set of one lane, the call, and the
    names of the module's functions by address.
    """

    memory: LaunchMemory
    lanes: LaneSet
    instruction: PtxInstruction
    functions: Mapping[int, str]

    def read(self, address: int, size: int) -> bytes:
        """Returns the bytes at a generic address. Raises BadCall if they are not all there."""
        found = self.memory.view(int(self.lanes.index[0]), address, size)
        if len(found) < size:
            raise BadCall(f"{size} bytes at {address:#x} are in no memory of the thread")
        return found.tobytes()

    def write(self, address: int, data: bytes) -> None:
        """Writes bytes at a generic address. Raises BadCall if that is in no memory of the thread."""
        place = self.memory.view(int(self.lanes.index[0]), address, len(data), write=True)
        if len(place) < len(data):
            raise BadCall(f"{len(data)} bytes at {address:#x} are in no memory of the thread")
        place[:] = np.frombuffer(data, np.uint8)


class DeviceRuntime:
    """Answers the calls: the method of a function's name gets the caller and the words of the arguments. It keeps the heap."""

    def __init__(self, heap_bytes: int = 8 << 20):
        self.heap_bytes = heap_bytes
        self.calls = 0

    @cached_property
    def heap(self) -> Heap:
        """The heap, which few kernels ever use."""
        return Heap(self.heap_bytes)

    def segments(self, called: Collection[str]) -> list[Segment]:
        """Returns the memory that kernels were given, or may be given by one that has calls of these functions."""
        given = "heap" in vars(self) and self.heap.top
        return [self.heap.segment] if given or not PRINTING.issuperset(called) else []

    def call(self, name: str, caller: Caller, words: Sequence[int]) -> int:
        """Returns the result of a call. Raises BadCall for arguments with which the launch cannot go on."""
        self.calls += 1
        method = getattr(self, name.replace("__", "_"), None)
        if method is None:
            raise BadCall(f"{name} is answered in whole programs only (cupyflash run)")
        return int(method(caller, *words) or 0)

    def malloc(self, caller: Caller, size: int) -> int:
        return self.heap.allocate(size)

    def free(self, caller: Caller, address: int) -> None:
        self.heap.free(address)
