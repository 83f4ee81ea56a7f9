"""Layouts of tiles: tensor maps, the swizzles of tiles that their copies wrote, and the descriptors of wgmma.

A tensor copy and a wgmma descriptor each name a swizzle: a permutation of 16-byte units. If they differ, the product's numbers
are of other rows and columns. So the mode is kept of each unit that a tensor copy wrote, until something else writes there.

wgmma's descriptors describe matrices in shared memory in units of 16 bytes (PTX ISA, "Asynchronous Warpgroup Level Matrix
Instructions: Shared Memory Matrix Layout"). A descriptor has, in such units, the start address in bits 0-13, the leading offset L
in 16-29 and the stride offset S in 32-45; a base offset in 49-51, the swizzle in 62-63. With W = 1, 2, 4, 8 units a row of no,
32-, 64- and 128-byte swizzle, unit (i, j) lies, before swizzling, at

- K-major, row i of M or N, unit j of 2 along K: (i % 8) W + (i / 8) S + j; without swizzle j L for j;
- M- or N-major, unit i along M or N, row j of K: i % W + (i / W) L + (j % 8) W + (j / 8) S; without swizzle L and S change places.

A swizzle of 128 bytes exchanges units by xor of bits 4-6 of the address with bits 7-9, one of 64 bits 4-5 with 7-8, one of 32
bit 4 with 7. The base offset is the position of the matrix in its pattern of eight rows, for patterns that are not aligned.

A tensor map describes a tensor and the boxes of it that cp.async.bulk.tensor copies (CUDA driver API, "Tensor Map Object
Management"; PTX ISA, "Tensors"). On a device it is 128 opaque bytes that cuTensorMapEncodeTiled makes. Here the bytes are the
machine's own, made of the same description; a kernel may copy them, but not interpret them.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ..state.segments import Pages, Segment
from ..text.syntax import Array

UNIT = 16
"""Bytes that stay together whatever the swizzle."""

UNKNOWN = 0
"""Mode of units that no tensor copy wrote, or that were overwritten since."""

MODES = {"none": 1, "32 bytes": 2, "64 bytes": 3, "128 bytes": 4}
"""Modes as a record has them, by name."""


class Swizzles:
    """The record of a wave: a mode for each 16-byte unit of the shared memory of all its blocks; made by the first copy."""

    def __init__(self, pages: Pages):
        self.pages = pages
        self.modes: Array | None = None
        self._of_pages = np.zeros(pages.count, np.uint8)

    def landed(self, starts: Array, size: int, mode: str) -> None:
        """Records that tensor copies of this mode (a key of MODES) wrote `size` bytes from each of `starts` in shared memory."""
        if self.modes is None:
            self.modes = np.zeros(self.pages.count // self.pages.per_block * self.pages.stride // UNIT, np.uint8)
        self.put(starts, size, MODES[mode])

    def forget(self, starts: Array, size: int) -> None:
        """Forgets the modes of bytes that something else writes."""
        if self.modes is not None:
            self.put(starts, size, UNKNOWN)

    def put(self, starts: Array, size: int, mode: int) -> None:
        assert self.modes is not None
        for start in starts.tolist():
            self.modes[start // UNIT : -(-(start + size) // UNIT)] = mode
        pages, whole = self.pages.of_ranges(starts, size)
        self._of_pages[pages] = mode if whole else UNKNOWN

    def pages_are(self, pages: Array, modes: Array) -> bool:
        """True if tensor copies are known to have written all of these pages in these modes (numbers)."""
        return not np.count_nonzero(self._of_pages[pages] != modes)

    def all_are(self, units: Array, modes: Array) -> bool:
        """True if tensor copies wrote all of these units in these modes (numbers)."""
        return self.modes is not None and not np.count_nonzero(self.modes[units] != modes)

    def differing(self, units: Array, mode: str) -> str | None:
        """Returns the mode in which a tensor copy wrote one of these units, if it is another one than `mode`."""
        if self.modes is None:
            return None
        found = self.modes[units]
        other = found[(found != UNKNOWN) & (found != MODES[mode])]
        return next(name for name, number in MODES.items() if number == other[0]) if len(other) else None


DESCRIPTOR_UNIT = 16
DESCRIPTOR_MODES = {0: "none", 1: "128 bytes", 2: "64 bytes", 3: "32 bytes"}
"""Swizzles by the descriptor's bits 62-63, named as `memory.swizzles` names them."""

ROW = {0: 1, 1: 8, 2: 4, 3: 2}
"""Units of a row of the swizzle's pattern."""

PATTERN = 64
"""Units after which every pattern repeats: 1024 bytes."""


@dataclass(frozen=True)
class Descriptor:
    """The fields of a descriptor, offsets and start in units."""

    start: int
    leading: int
    stride: int
    base: int
    swizzle: int

    @classmethod
    def of(cls, bits: int) -> Descriptor:
        return cls(bits & 0x3FFF, bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF, bits >> 49 & 7, bits >> 62 & 3)

    @property
    def mode(self) -> str:
        return DESCRIPTOR_MODES[self.swizzle]

    def units(self, rows: int, depth: int, k_major: bool) -> Array:
        """Returns offsets of a matrix's units from the shared memory's beginning, row by row as they lie in `rows` x `depth` units.

        K-major: `rows` of M or N by 2 units along K. Else `rows` of K by units along M or N.
        """
        phase = self.start % PATTERN
        found = pattern(phase, self.leading, self.stride, self.base, self.swizzle, (rows, depth, k_major))
        return found + (self.start - phase)


@lru_cache(maxsize=1024)
def pattern(phase: int, leading: int, stride: int, base: int, swizzle: int, shape: tuple[int, int, bool]) -> Array:
    """Returns the units of a matrix that begins `phase` units into an aligned pattern, from that pattern's beginning."""
    rows, depth, k_major = shape
    i, j = np.arange(rows)[:, None], np.arange(depth)
    row = ROW[swizzle]
    if k_major:
        at = i % 8 * row + i // 8 * stride + (j if swizzle else j * leading)
    else:
        outer, inner = (leading, stride) if swizzle else (stride, leading)
        at = j % row + j // row * outer + i % 8 * row + i // 8 * inner
    at = (at + phase).reshape(-1)
    return at ^ ((at >> 3) - base & row - 1)


MAP_BYTES = 128
MAP_ALIGN = 64

TYPES = {
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float32_ftz": 4,
    "tfloat32": 4,
    "tfloat32_ftz": 4,
}
"""Bytes of an element, in the order of CUtensorMapDataType."""

NAN = {"float16": 0x7FFF, "bfloat16": 0x7FFF, "float64": (1 << 63) - 1}
"""Bits of an element out of bounds for maps with NaN fill; 0x7FFFFFFF in the types of 32 bits."""

INTERLEAVES, SWIZZLES, PROMOTIONS, FILLS = (0, 16, 32), (0, 32, 64, 128), (0, 64, 128, 256), ("zeros", "nan")
CHOICES: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(TYPES),
    "interleave": INTERLEAVES,
    "swizzle": SWIZZLES,
    "l2_promotion": PROMOTIONS,
    "fill": FILLS,
}
"""Allowed values of a description's fields, in the order of the driver's enumerations."""

MOST_RANK, MOST_BOX, MOST_STEP = 5, 256, 8

_FORMAT = struct.Struct("<8sQ5I4Q5B5B6B")
_MAGIC = b"tensormp"
ADDRESS_AT = 8
"""Byte offset of the tensor's address in a map."""


@dataclass(frozen=True)
class Description:
    """A tensor and the box that one copy moves of it; all tuples begin with the innermost dimension.

    dims: elements. strides: bytes from one to the next along each dimension but the innermost. box: elements that a copy spans;
    of them it takes every element_strides[k]-th. interleave, swizzle, l2_promotion: bytes, 0 for none. fill: value of elements
    out of bounds.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    fill: str = "zeros"

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def element(self) -> int:
        """Bytes of an element."""
        return TYPES[self.dtype]

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that a copy takes along each dimension; the innermost one has no element stride."""
        return (self.box[0], *(-(-box // step) for box, step in zip(self.box[1:], self.element_strides[1:], strict=True)))

    @property
    def size(self) -> int:
        """Bytes of one copy, with elements out of bounds."""
        return math.prod(self.counts) * self.element

    def check(self) -> None:
        """Raises ValueError for a description that cuTensorMapEncodeTiled refuses."""
        for name in CHOICES:
            one_of(name, getattr(self, name))
        least = 3 if self.interleave else 1
        if not least <= self.rank <= MOST_RANK:
            suffix = " with interleave" if self.interleave else ""
            raise ValueError(f"a tensor map has {least} to {MOST_RANK} dimensions{suffix}, got dims={self.dims}")
        for name, values, count in (
            ("strides", self.strides, self.rank - 1),
            ("box", self.box, self.rank),
            ("element_strides", self.element_strides, self.rank),
        ):
            if len(values) != count:
                raise ValueError(f"{name} must have {count} numbers for {self.rank} dimensions, got {values}")
        within("dims", self.dims, 1, 1 << 32)
        within("box", self.box, 1, MOST_BOX)
        within("element_strides", self.element_strides, 1, MOST_STEP)
        within("strides", self.strides, 0, (1 << 40) - 1)
        unit = 32 if self.interleave == 32 else 16
        for stride in self.strides:
            if stride % unit:
                raise ValueError(f"strides must be multiples of {unit} bytes, got {self.strides}")
        inner = self.box[0] * self.element
        if not self.interleave and inner % 16:
            what = "the innermost dimension of the box must be a multiple of 16 bytes"
            raise ValueError(f"{what}, got {inner} ({self.box[0]} elements)")
        if not self.interleave and self.swizzle and inner > self.swizzle:
            raise ValueError(
                f"the innermost dimension of the box must be at most the swizzle's {self.swizzle} bytes, "
                f"got {inner} ({self.box[0]} elements)"
            )
        if self.interleave == 32 and self.swizzle != 32:
            raise ValueError(f"interleave of 32 bytes needs a swizzle of 32 bytes, got {self.swizzle}")
        if self.fill == "nan" and "float" not in self.dtype:
            raise ValueError(f"fill='nan' needs a floating-point dtype, got {self.dtype!r}")
        if self.interleave:
            layout = {16: "NC/8HWC8", 32: "NC/16HWC16"}[self.interleave]
            raise ValueError(
                f"interleave={self.interleave}: the machine executes no interleaved layouts, only 0. The CUDA Driver API "
                f"(cuTensorMapEncodeTiled) names {layout}, but has no stride from one slice of channels to the next, and "
                "neither it nor the PTX ISA (Tensors) says how the slices of a box lie in shared memory"
            )

    def encode(self, address: int) -> bytes:
        """Returns the 128 bytes of a map of the tensor at this address."""
        outer = MOST_RANK - self.rank
        data = _FORMAT.pack(
            _MAGIC,
            address,
            *(dim - 1 for dim in self.dims),
            *[0] * outer,
            *self.strides,
            *[0] * (MOST_RANK - 1 - len(self.strides)),
            *(box - 1 for box in self.box),
            *[0] * outer,
            *self.element_strides,
            *[0] * outer,
            self.rank,
            *(allowed.index(getattr(self, name)) for name, allowed in CHOICES.items()),
        )
        return (data + _checksum(data)).ljust(MAP_BYTES, b"\0")


def decode(data: bytes) -> tuple[Description, int] | None:
    """Returns the description and the address in 128 bytes; None if they are no tensor map."""
    used = data[: _FORMAT.size]
    if len(data) != MAP_BYTES or data[_FORMAT.size :] != _checksum(used).ljust(MAP_BYTES - _FORMAT.size, b"\0"):
        return None
    magic, address, *numbers = _FORMAT.unpack(used)
    dims, strides, box, steps, rest = numbers[:5], numbers[5:9], numbers[9:14], numbers[14:19], numbers[19:]
    rank, *chosen = rest
    if magic != _MAGIC or rank > MOST_RANK:
        return None
    description = Description(
        dims=tuple(dim + 1 for dim in dims[:rank]),
        strides=tuple(strides[: rank - 1]),
        box=tuple(length + 1 for length in box[:rank]),
        element_strides=tuple(steps[:rank]),
        **{name: allowed[k] for (name, allowed), k in zip(CHOICES.items(), chosen, strict=True)},
    )
    return description, address


PLACES = {"global_dim": (0, 1), "global_stride": (5, 0), "box_dim": (9, 1), "element_stride": (14, 0), "rank": (19, -1)}
"""Fields that a kernel may replace: the place of the first among a map's numbers, and what they are less than it gives them."""


def replaced(data: bytes, field: str, ordinal: int, value: int) -> bytes | str:
    """Returns a map with another value of a field: "global_address", a name of `PLACES` (dimension `ordinal`; rank is given less
    one) or of `CHOICES` (by its number). A map may begin as zeros. Returns the reason if the bytes are neither zeros nor a map, or
    the value is none of the field.
    """
    used = data[: _FORMAT.size] if any(data) else _MAGIC + bytes(_FORMAT.size - len(_MAGIC))
    known = used.startswith(_MAGIC) and data[_FORMAT.size :] == _checksum(used).ljust(MAP_BYTES - _FORMAT.size, b"\0")
    if any(data) and not known:
        return f"the {MAP_BYTES} bytes are no tensor map, nor zeros of which one can be made"
    magic, *numbers = _FORMAT.unpack(used)
    bounds = (64, *[32] * 5, *[64] * 4, *[8] * 16)
    if field == "global_address":
        place, less = 0, 0
    elif field in PLACES:
        place, less = PLACES[field][0] + 1 + ordinal, PLACES[field][1]
    else:
        place, less = 21 + list(CHOICES).index(field), 0
    if bounds[place] == 8 and not 0 <= value - less < 256:
        return f"{field} cannot be {value}"
    numbers[place] = (value - less) & ((1 << bounds[place]) - 1)
    made = _FORMAT.pack(magic, *numbers)
    return (made + _checksum(made)).ljust(MAP_BYTES, b"\0")


def _checksum(data: bytes) -> bytes:
    """Returns the checksum of all but the address, which a launch fills in."""
    return zlib.crc32(data[:ADDRESS_AT] + data[ADDRESS_AT + 8 :]).to_bytes(4, "little")


@dataclass(eq=False, repr=False)
class TensorMap:
    """A tensor map for a launch, as cuTensorMapEncodeTiled makes it, but of an array in place of an address.

    array: the tensor's memory; it begins at the array's first element. box: elements that a copy spans along each dimension.
    As for the driver, all sequences begin with the **innermost** dimension, the array's last axis. Without `dims` the map has the
    array's own shape and strides, reversed; with them but without `strides`, rows are contiguous.

    dtype: one of the names in `TYPES`; default: the array's (of bytes and 8-bit floats "uint8"). "tfloat32" rounds float32 on
    loading, "..._ftz" makes subnormal numbers 0. element_strides: 1 to 8 each; a copy takes every so-many-th element of the
    box (not in the innermost dimension). swizzle: 0, 32, 64 or 128 bytes. interleave: 0; the driver has 16 and 32, too.
    l2_promotion: 0, 64, 128 or 256 bytes, without effect. fill: "zeros" or "nan", the value of elements outside of the tensor.
    Raises ValueError or TypeError for a map that the driver refuses: an address or strides that are no multiples of 16, a box of
    more than 256 elements along a dimension, or whose innermost dimension is no multiple of 16 bytes or beyond the swizzle.
    """

    array: Array
    box: Sequence[int] | int
    _: KW_ONLY
    dims: Sequence[int] | None = None
    strides: Sequence[int] | None = None
    dtype: str | None = None
    element_strides: Sequence[int] | None = None
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    fill: str = "zeros"
    description: Description = field(init=False)
    """The same description, complete and checked."""

    def __post_init__(self) -> None:
        array = self.array
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise TypeError(f"array must be a NumPy array of numbers, got {type(array).__name__}")
        dtype = type_of(array) if self.dtype is None else self.dtype
        one_of("dtype", dtype)
        dims, strides = self.layout(dtype)
        steps = (1,) * len(dims) if self.element_strides is None else whole("element_strides", self.element_strides)
        hints = self.interleave, self.swizzle, self.l2_promotion, self.fill
        self.description = Description(dtype, dims, strides, whole("box", self.box), steps, *hints)
        self.description.check()
        unit = 32 if self.interleave == 32 else 16
        if array.size and Segment("", 0, array).pointer % unit:
            raise ValueError(f"the tensor's address must be a multiple of {unit}: the array begins between two")

    def layout(self, dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns dims and strides, those of the array where none are given."""
        array = self.array
        if self.dims is not None:
            dims = whole("dims", self.dims)
            if self.strides is not None:
                return dims, whole("strides", self.strides)
            return dims, tuple(math.prod(dims[:k]) * TYPES[dtype] for k in range(1, len(dims)))
        if self.strides is not None:
            raise ValueError("strides without dims")
        if array.ndim and array.strides[-1] != array.itemsize and array.shape[-1] > 1:
            raise ValueError(f"the array's last axis must be contiguous, its strides are {array.strides} bytes")
        if TYPES[dtype] != array.itemsize:
            raise ValueError(f"dtype={dtype!r} has {TYPES[dtype]} bytes, the array's elements {array.itemsize}: give dims")
        return array.shape[::-1], array.strides[::-1][1:]

    def __repr__(self) -> str:
        d = self.description
        return f"TensorMap({d.dtype}, dims={d.dims}, strides={d.strides}, box={d.box}, swizzle={d.swizzle})"


def type_of(array: Array) -> str:
    """Returns the name of an array's type for a tensor map."""
    name = array.dtype.name
    if name in TYPES:
        return name
    if array.itemsize == 1:
        return "uint8"
    if name == "int16":
        return "uint16"
    raise ValueError(f"tensor maps have no type for {name}: give dtype, one of {', '.join(TYPES)}")


def whole(name: str, values: Sequence[int] | int) -> tuple[int, ...]:
    """Returns whole numbers as a tuple of Python's."""
    found = (values,) if isinstance(values, (int, np.integer)) else tuple(values)
    if not all(isinstance(value, (int, np.integer)) and not isinstance(value, bool) for value in found):
        raise TypeError(f"{name} must be whole numbers, got {values!r}")
    return tuple(int(value) for value in found)


def within(name: str, values: tuple[int, ...], low: int, high: int) -> None:
    for value in values:
        if not low <= value <= high:
            raise ValueError(f"{name} must be from {low} to {high}, got {values}")


def one_of(name: str, value: object) -> None:
    if value not in CHOICES[name]:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, CHOICES[name]))}, got {value!r}")
