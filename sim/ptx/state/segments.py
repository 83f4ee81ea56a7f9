"""Named ranges of memory at virtual addresses: the tensors of a launch, and the pages of shared memory.

Tensor number i owns the window of 2**40 bytes from (i + 1) << 40 and lies in the middle of it. So a stray access is charged to the
tensor whose pointer it came from, and two arguments that are views of the same memory stay apart in every count although they
share their bytes.

A NumPy allocation starts at an aligned address, as one on a device does, and a view of it keeps its offset: sector
counts and misalignment are those of the view, and do not depend on where the host put the bytes.

Pages of shared memory: a fact about all bytes of a page need not be checked byte by byte. Tiles of wgmma and of bulk copies are
mostly whole pages: 1024 bytes are eight rows of the widest swizzle. Each block has its own.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..text.syntax import ELEMENT, Array, PtxInstruction
from .lane_sets import LaneSet

WINDOW_BITS = 40
ALIGNMENT = 4096

WRITTEN, UNWRITTEN, IN_FLIGHT, UNALLOCATED = 0, 1, 2, 3
"""State of a byte of shared memory, and of a tensor whose contents nobody wrote; UNALLOCATED: of a heap, not given to anybody. 0 is
the state of the bytes between a tensor's elements: fresh memory is zero without being touched, and they may be many."""


class PointerField(NamedTuple):
    """A pointer, or some of its bytes, at a byte offset of a parameter that is a structure."""

    parameter: str
    offset: int
    width: int = 8


Place = str | PointerField
"""The source of a pointer: a parameter, a variable's address, or a field. The name of a structure stands for any of its fields."""


def meets(found: Place, place: Place) -> bool:
    """True if a value loaded from `found` may be (part of) the pointer at `place`."""
    if isinstance(found, PointerField) and isinstance(place, PointerField):
        return found.parameter == place.parameter and -found.width < found.offset - place.offset < place.width
    return found == place or (isinstance(place, PointerField) and found == place.parameter)


class Allocated(Protocol):
    """The allocations within a segment (`memory.spaces`)."""

    def unallocated(self, addresses: Array, size: int | Array) -> Array:
        """Returns a mask of the accesses, which are in the segment's bounds, to bytes that are not allocated."""

    def place(self, address: int) -> str:
        """Returns the end of the message about an access to bytes that are not allocated."""


class Segment:
    """A named range of global (or constant, or parameter) memory that shows the bytes of a NumPy array."""

    def __init__(self, name: str, number: int, array: Array, space: str = "global", start: int | None = None):
        """`start`: its virtual address, if that is not the one of tensor `number`."""
        low, high = byte_bounds(array)
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        origin = byte_bounds(root)[0]
        # Memory that NumPy did not allocate (a mapped file, another library's buffer) keeps its real alignment.
        place = low - origin if root.flags.owndata and origin % 16 == 0 else low
        self.name = name
        self.root = root
        """The array that owns this memory."""
        self.places: tuple[Place, ...] = (name,)
        """The parameters, fields of such, and variables that point here; "*": pointers in memory may."""
        self.narrowest = 1 << 10
        """Bytes of the smallest texel that a texture shows of it: less than any access without one."""
        self.space = space
        self.array = array
        self.size = high - low if array.size else 0
        middle = ((number + 1) << WINDOW_BITS) + (1 << (WINDOW_BITS - 1)) + place % ALIGNMENT
        self.start = middle if start is None else start
        self.writable = array.flags.writeable
        self.address = low
        base = array.__array_interface__["data"][0]
        self.pointer = self.start + (base - low)
        self.state: Array | None = None
        """UNWRITTEN or WRITTEN for each byte from `start`; None: the launch was given the contents."""
        self.heap: Allocated | None = None
        """The heap whose memory this is: not all of its bytes are allocated."""
        self._windows: dict[int, tuple[Array, Array, Array]] = {}
        self._states: dict[int, Array] = {}

    def window(self, size: int) -> tuple[Array, Array, Array]:
        """Returns (elements of `size` bytes, virtual address of the first aligned one, largest offset of one) as arrays."""
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
        """Returns `state` as elements of `size` bytes, the same ones as in `window`."""
        found = self._states.get(size)
        if found is None:
            view, first, _ = self.window(size)
            assert self.state is not None
            skipped = int(first) - self.start
            found = self._states[size] = self.state[skipped : skipped + len(view) * size].view(ELEMENT[size])
        return found

    def array_states(self) -> Array:
        """Returns `state` of the array's elements: their bytes are the last axis."""
        assert self.state is not None
        own = self.state[self.pointer - self.start :]
        return np.lib.stride_tricks.as_strided(own, (*self.array.shape, self.array.itemsize), (*self.array.strides, 1))

    def neighbours(self, segments: list[Segment]) -> tuple[list[Segment], int, int]:
        """Returns the segments that share memory with this one, itself included, and their first and last host addresses."""
        group, low, high = [self], self.address, self.address + self.size
        grown = True
        while grown:
            grown = False
            for one in segments:
                if one.size and one.address < high and low < one.address + one.size and one not in group:
                    group.append(one)
                    low, high, grown = min(low, one.address), max(high, one.address + one.size), True
        return group, low, high


class Access(NamedTuple):
    """One memory access of a set of lanes. `kind`: ld, st, atom, ldmatrix, cp.async, ...; `write`: it writes. An observer sees an
    atomic twice, as a read and as a write.

    `addresses` (uint64 or uint32, one a lane) are virtual; in shared and local memory they are offsets; in `space`
    "shared::cluster", the shared memory of another block, places in the shared memory of all blocks of the wave
    (block * shared_stride + offset, int64). `segment` is the tensor. A bulk copy between a tensor and shared memory
    (cp.async.bulk) is one access, to the tensor: one lane, and the copy's contiguous pieces in `addresses` and `size`.
    """

    lanes: LaneSet
    space: str
    segment: Segment | None
    addresses: Array
    size: int | Array
    kind: str
    write: bool
    instruction: PtxInstruction

    @property
    def sides(self) -> tuple[bool, ...]:
        """Its read (False) and write (True)."""
        return (False, True) if self.kind == "atom" else (self.write,)


def mark_unwritten(chosen: list[tuple[Segment, Array | bool]], segments: list[Segment]) -> None:
    """Marks the elements of these arrays, or those of their bytes where a mask says so, as unwritten, and all that other segments
    show of the same memory.
    """
    for segment, where in chosen:
        if segment.state is None:
            group, low, high = segment.neighbours(segments)
            low -= low % 16  # as aligned as the memory itself
            together = np.zeros(high - low, np.uint8)  # WRITTEN
            for one in group:
                one.state = together[one.address - low : one.address - low + one.size]
        if segment.array.size:
            np.copyto(segment.array_states(), UNWRITTEN, where=where)


LARGEST_FINITE = {1: 0x7E, 2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0000000000000}
"""Largest bits, by width in bytes and without the sign, that are no NaN in the floating-point type."""


def may_hold_nan(segment: Segment) -> bool:
    """True if some written element is NaN; an array of integers, which may hold any bits, is checked as if it held floats."""
    array = segment.array
    whole = np.ones(array.shape, bool) if segment.state is None else (segment.array_states() == WRITTEN).all(axis=-1)
    try:
        if array.dtype.kind not in "iub":
            return bool(np.isnan(array)[whole].any())
        bits = array.view(f"u{array.itemsize}")[whole]
    except TypeError:
        return True
    limit = LARGEST_FINITE[array.itemsize]
    return bool((bits & bits.dtype.type((1 << (8 * array.itemsize - 1)) - 1) > limit).any())


PAGE = 1024
"""Bytes of a page."""


class Pages:
    """The pages of a wave whose blocks have `stride` bytes of shared memory each; the last page of a block may be shorter."""

    def __init__(self, stride: int, blocks: int):
        self.stride = stride
        self.per_block = -(-stride // PAGE)
        self.count = blocks * self.per_block

    def of(self, at: Array) -> Array:
        """Returns the pages of bytes of the wave's shared memory."""
        block = at // self.stride
        return block * self.per_block + (at - block * self.stride) // PAGE

    def of_ranges(self, starts: Array, size: int) -> tuple[Array, bool]:
        """Returns pages of ranges of `size` bytes, (ranges, n), the last repeated where there are fewer; True if all are whole."""
        first, last = self.of(starts), self.of(starts + (size - 1))
        found = np.minimum(first[:, None] + np.arange(int((last - first).max()) + 1), last[:, None])
        return found, size % PAGE == 0 and not (starts % self.stride % PAGE).any()

    def start(self, pages: Array) -> Array:
        """Returns the first byte of each of these pages in the wave's shared memory."""
        block = pages // self.per_block
        return block * self.stride + (pages - block * self.per_block) * PAGE

    def whole(self, pages: Array) -> Array:
        """Returns a mask of the pages that have all their bytes."""
        return (pages % self.per_block + 1) * PAGE <= self.stride
