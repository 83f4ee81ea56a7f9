"""The memory of a launch: named tensors in global memory, shared memory of the wave's blocks, local memory; the heap; sums that
wait.

Every load, store, atomic and asynchronous copy resolves its addresses through a port (`memory.ports`), which checks bounds,
alignment and initialisation, and reports each access once to `LaunchMemory.accessed`, which counts it and calls the observer.
Addresses are virtual: tensors as in `state.segments`, with windows for shared and local memory above them.

The heap is that from which kernels allocate: malloc and free, new and delete. Allocations lie apart, and the place of a freed one
is the last to be used again: an access behind an end, or to freed memory, is found. (CUDA C++ Programming Guide, "Dynamic Global
Memory Allocation and Operations".) `DeviceRuntime` answers the calls.

Sums of floating-point numbers in global memory by atomics without a result: CUDA leaves their order open. Addends of a wave wait
until its end, or until anything else looks at their tensor. Then they are added block after block; in a block those between two
barriers before later ones, warp after warp; in a warp as it made them, lane after lane. So bytes do not depend on how many warps
the machine runs together, and compiled code, which runs blocks one by one, has the same.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cupyflash.words import plural

from ..order.races import Lifetimes, Races
from ..order.shadow import Stored, windows
from ..state.counters import LaunchTally
from ..state.findings import Findings
from ..state.lane_sets import LaneSet, Wave, wavefronts
from ..state.segments import PAGE, UNALLOCATED, UNWRITTEN, WINDOW_BITS, WRITTEN, Access, Pages, Segment
from ..text.syntax import ELEMENT, Array, PtxInstruction
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


class EarlyLoad:
    """An early load's lanes that read what nobody wrote, and the place that they read, until its shadow has them."""

    def __init__(self) -> None:
        self.found: tuple[Array, str] | None = None

    def take(self) -> tuple[Array, str] | None:
        found, self.found = self.found, None
        return found


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
        self.early: dict[PtxInstruction, EarlyLoad] = {}
        """The loads of `decode.flow.early_loads`."""
        self.sums: WaitingSums | None = None
        """Floating-point sums that wait; None: each is made at once."""
        self.lifetimes: Lifetimes | None = None
        """The lifetimes of the blocks of a wave of clusters, if races are looked for."""
        self._shared = np.empty(0, np.uint8)
        self._state = np.empty(0, np.uint8)
        self._local = np.empty(0, np.uint8)
        self._lent: dict[tuple[str, int, np.dtype[Any]], Array] = {}

    def lend(self, name: str, n: int, dtype: np.dtype[Any]) -> Array:
        """Lends an array to work in while one instruction looks at memory; whoever asks for the same gets the same."""
        key = name, n, dtype
        found = self._lent.get(key)
        if found is None:
            found = self._lent[key] = np.empty(n, dtype)
        return found

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


# -- the heap --------------------------------------------------------------------------------------------------------------

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


# -- sums of floating-point numbers ----------------------------------------------------------------------------------------

MOST_WAITING = 1 << 23
"""Addends that may wait together: when more come in a wave, all so far are added."""


class Addends(NamedTuple):
    """One addition of some lanes: places in a view of the tensor, numbers, and the order of the lanes."""

    places: Array
    values: Array
    order: Array


class WaitingSums:
    """The addends that wait, by tensor and the floating-point view of it.

    `own`: the instructions that make them; `around` runs an addition in the environment of floating point that it needs; `barriers`
    returns how many barriers each block of the wave has behind it.
    """

    def __init__(
        self,
        own: frozenset[PtxInstruction],
        around: Callable[[Callable[[], None]], None],
        barriers: Callable[[], Array],
    ):
        self.own, self.around, self.barriers = own, around, barriers
        self.waiting: defaultdict[Segment, list[tuple[Array, Addends]]] = defaultdict(list)
        self.count = 0

    def add(self, segment: Segment, view: Array, addends: Addends) -> None:
        """Notes addends to places of `view`, a tensor seen as floating-point numbers."""
        kept = self.waiting[segment]
        if kept and kept[0][0].dtype != view.dtype:
            self.finish(segment)
        self.waiting[segment].append((view, addends))
        self.count += len(addends.places)
        if self.count > MOST_WAITING:
            self.finish_all()

    def finish(self, segment: Segment) -> None:
        """Adds what waits for a tensor."""
        kept = self.waiting.pop(segment, None)
        if not kept:
            return
        view = kept[0][0]
        index, values, order = (np.concatenate(parts) for parts in zip(*(addends for _, addends in kept), strict=True))
        self.count -= len(index)
        at = np.argsort(order, kind="stable")
        self.around(lambda: np.add.at(view, index[at], values[at]))

    def finish_all(self) -> None:
        for segment in list(self.waiting):
            self.finish(segment)
