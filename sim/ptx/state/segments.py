"""Named ranges of memory at virtual addresses: the tensors of a launch, the pages of shared memory; and fresh memory.

Tensor number i owns the window of 2**40 bytes from (i + 1) << 40 and lies in the middle of it. So a stray access is charged to
the tensor whose pointer it came from, and two arguments that are views of the same memory stay apart in every count although
they share their bytes.

A NumPy allocation starts at an aligned address, as one on a device does, and a view of it keeps its offset: sector counts and
misalignment are those of the view, and do not depend on where the host put the bytes.

Pages of shared memory: a fact about all bytes of a page need not be checked byte by byte. Tiles of wgmma and of bulk copies are
mostly whole pages: 1024 bytes are eight rows of the widest swizzle. Each block has its own.

Fresh memory is arrays that nobody has written yet, as `cupy.empty` returns them, filled with a pattern that no program writes.
An element that still has the pattern is unwritten: a kernel that reads it has a finding, and a result shows where it was never
stored. Floating-point types have a NaN of a rare payload, integers 0xA5 in each byte (a bool is True).
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple, Protocol

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


def owner_of(array: Array) -> Array:
    """Returns the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class Segment:
    """A named range of global (or constant, or parameter) memory that shows the bytes of a NumPy array."""

    def __init__(self, name: str, number: int, array: Array, space: str = "global", start: int | None = None):
        """`start`: its virtual address, if that is not the one of tensor `number`."""
        low, high = byte_bounds(array)
        root = owner_of(array)
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
        """The sides of the access: a read (False), a write (True)."""
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


# -- fresh memory ------------------------------------------------------------------------------------------------------------

_PAYLOADS = {2: 0x7E5A, 4: 0x7FC5A5A5, 8: 0x7FF85A5AA5A55A5A}
_fresh: dict[int, tuple[int, int, weakref.ref[Array], Array]] = {}
"""The fresh allocations that still live, by the identity of the array: first and last address, and which bytes no launch wrote."""


def pattern(dtype: Any) -> Array:
    """Returns one element of the pattern, as bytes (uint8)."""
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return np.ones(kind.itemsize, np.uint8)
    name, size = kind.name, kind.itemsize
    if kind.kind == "c":
        return np.tile(pattern(f"f{size // 2}"), 2)
    if kind.kind == "f" or "float" in name:
        bits = 0x7FE5 if name == "bfloat16" else _PAYLOADS.get(size, (1 << (8 * size - 1)) - 1)
        return np.frombuffer(bits.to_bytes(size, "little"), np.uint8)
    return np.full(size, 0xA5, np.uint8)


def filled(array: Array) -> Array:
    """Fills an array of its own memory with the pattern, remembers that it is fresh, and returns it."""
    if array.size and not array.dtype.hasobject:
        plain = np.asarray(array)
        elements = plain.view(f"V{plain.itemsize}")
        elements[...] = pattern(plain.dtype).view(elements.dtype)[0]
        start, stop = np.lib.array_utils.byte_bounds(plain)
        key = id(array)
        _fresh[key] = start, stop, weakref.ref(array, lambda _: _fresh.pop(key, None)), np.ones(stop - start, bool)
    return array


def empty(*args: Any, **kwargs: Any) -> Array:
    """Returns `numpy.empty` of the arguments, fresh."""
    return filled(np.empty(*args, **kwargs))


def empty_like(*args: Any, **kwargs: Any) -> Array:
    """Returns `numpy.empty_like` of the arguments, fresh."""
    return filled(np.empty_like(*args, **kwargs))


def unwritten_elements(array: Array) -> Array:
    """Returns a mask of the elements that have the pattern, whoever allocated the array."""
    kind = pattern(array.dtype)
    plain = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).reshape(*array.shape, array.itemsize)
    found: Array = (plain == kind).all(axis=-1)
    return found


def untouched(array: Array) -> Array | None:
    """Returns which bytes no launch wrote, as a view into the allocation's; None if the memory is not fresh."""
    if not _fresh or not array.size or array.dtype.hasobject:
        return None
    start, stop = np.lib.array_utils.byte_bounds(array)
    known = next(((first, memory) for first, last, _, memory in _fresh.values() if first <= start and stop <= last), None)
    if known is None:
        return None
    offset = int(array.__array_interface__["data"][0]) - known[0]
    return np.ndarray((*array.shape, array.itemsize), bool, known[1], offset, (*array.strides, 1))


def unwritten(array: Array) -> Array | None:
    """Returns a mask of the unwritten bytes of an array in fresh memory, None if there are none; an element's bytes are the last
    axis. A byte is written if a launch wrote it, or its element has no pattern any more."""
    never = untouched(array)
    if never is None:
        return None
    mask: Array = never & unwritten_elements(array)[..., None]
    return mask if mask.any() else None


def launched(array: Array, still: Array | None) -> None:
    """Notes which bytes of an array are unwritten after a launch; None: none is."""
    never = untouched(array)
    if never is not None:
        never[...] = False if still is None else still.reshape(never.shape)


def never_written(array: Array) -> Array:
    """Returns a mask of the elements that nobody wrote, as far as it can be told: in memory that is not fresh by the pattern, which
    a small integer may have by chance."""
    never = untouched(array)
    small = array.dtype.kind in "biu" and array.itemsize < 4
    known = np.full(array.shape, not small) if never is None else never.all(axis=-1)
    return np.asarray(known & unwritten_elements(array))
