"""Who touched what: the tables of the race detector, and accesses as the rows of them.

Memory is looked at in granules: the smallest width with which the kernel accesses shared memory, or a tensor, so that an
access of 16 bytes is often one entry. There is one for the last writer of a granule, and a summary of who read it. In
shared memory each warp of the cluster has its own summary.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..state.lanes import WARP, Lanes
from ..state.segments import Segment
from ..text.syntax import Instruction
from ..text.types import Array


@dataclass
class Table:
    """Entries of all granules, one row a granule, with the number of the instruction of each entry; made when first used.

    `sparse`: few of them are ever touched, and only those take memory.
    """

    rows: int
    columns: int
    numbers: np.dtype[Any]
    sparse: bool = False
    used: bool = False

    @cached_property
    def entries(self) -> Array:
        return zeros((self.rows, self.columns), np.dtype(np.uint64), self.sparse)

    def marked(self) -> Array:
        """Rows with an entry."""
        return (self.entries != 0).any(axis=1) if "entries" in vars(self) else np.zeros(self.rows, np.bool_)

    @cached_property
    def touched(self) -> Array:
        """Rows of shared memory in which there is any entry."""
        return np.zeros(self.rows, np.bool_)

    @cached_property
    def by(self) -> Array:
        return zeros((self.rows, self.columns), self.numbers, self.sparse)


def zeros(shape: tuple[int, int], dtype: np.dtype[Any], sparse: bool) -> Array:
    """Zeros; `sparse` ones take memory where they are touched, a page at a time, not 2 MiB at a time as NumPy's large arrays do."""
    size = shape[0] * shape[1] * dtype.itemsize
    if not sparse or not size or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


@dataclass
class Shadow:
    """Who touched each granule: the last plain writer, the plain readers, the atomics; what asynchronous copies may yet read
    (`copies`) and, in tensors, write (`landing`); the last `volatile` writer of shared memory, as far as lockstep matters."""

    writes: Table
    reads: Table
    atomics: Table
    shared: bool
    copies: Table | None = None
    volatile: Table | None = None
    landing: Table | None = None
    scoped: dict[tuple[int, bool], Table] = field(default_factory=dict)
    """Where some strong accesses leave out other blocks, all strong accesses by (scope, whether they write)."""
    agreeing: Table | None = None
    """Plain writers that raced with the last one and wrote the same, in columns as `reads`."""
    mixed: Array | None = None
    """Granules whose last writers were lanes of one warp, at once, with several values: which one is there is not said."""
    ragged: bool = False
    """Some copy to or from a tensor began or ended within a granule, which may then say nothing of it."""

    @classmethod
    def of(cls, granules: int, columns: int, shared: bool, numbers: np.dtype[Any], sparse: bool = False) -> Shadow:
        """`sparse`: bulk copies are what reads most of it, each for one warp."""
        reads, atomics = (Table(granules, columns, numbers, sparse) for _ in range(2))
        return cls(Table(granules, 1, numbers), reads, atomics, shared)

    def touched(self) -> tuple[Array, Array]:
        """Which granules somebody may have written, and which anybody may have touched."""
        wrote = self.writes.marked() | self.atomics.marked() | self.ragged
        touched = wrote | self.reads.marked()
        for table in (self.landing, self.copies):
            touched |= table.marked() if table is not None else False
        return wrote if self.landing is None else wrote | self.landing.marked(), touched


@dataclass
class Who:
    """The lanes of an access, one entry for each granule: grid-wide lane, position in the `Lanes`, shared row, column."""

    lane: Array
    position: Array
    row: Array
    column: Array


@dataclass
class Access:
    """One access as its granules: `rows` of the shadow (and `columns`, where readers have one each), and who made it.

    `collective`: the lanes of a warp made it together, so that none of them made it alone.
    """

    instruction: Instruction
    lanes: Lanes
    addresses: Array
    segment: Segment | None
    shadow: Shadow
    rows: Array
    columns: Array | None
    who: Who
    collective: bool = False
    last: Array | None = None
    """Where the last lane of each warp is in `rows`, if the warps are whole and the lanes of each access the same granules."""

    boxes: None = None

    @property
    def different(self) -> Array:
        """The rows without those that are there again for other lanes of a warp."""
        return self.rows if self.last is None else self.rows[self.last]


@dataclass(frozen=True)
class Boxes:
    """Ranges of rows, `count` each from `starts` on, of which no two meet; the k-th is accessed by `lane[k]` of the grid."""

    starts: Array
    count: int
    lane: Array
    column: Array

    def take(self, at: Array) -> Boxes:
        return Boxes(self.starts[at], self.count, self.lane[at], self.column[at])


@dataclass
class TileAccess:
    """Tiles of shared memory that bulk copies move, the k-th by lane row[k] of `lanes`: an `Access`, seen as granules when asked.

    chunks: (tiles, n) 16-byte elements of the wave's, each of 1 << per granules. `boxes`: the same as ranges, where they are that.
    """

    instruction: Instruction
    lanes: Lanes
    addresses: Array
    shadow: Shadow
    chunks: Array
    per: int
    row: Array
    lane: Array
    column: Array
    collective = False
    segment = None
    last = None
    boxes: Boxes | None = field(init=False)

    def __post_init__(self) -> None:
        low, count = self.chunks.min(axis=1), self.chunks.shape[1]
        order = np.sort(low)
        ranges = not np.count_nonzero(self.chunks.max(axis=1) - low != count - 1)
        if ranges and not np.count_nonzero(order[1:] - order[:-1] < count):
            self.boxes = Boxes(low << self.per, count << self.per, self.lane, self.column)
        else:
            self.boxes = None

    def take(self, at: Array, lanes: Lanes) -> TileAccess:
        """Only these tiles, for lanes that have waited for them."""
        some = self.chunks[at], self.per, self.row[at], self.lane[at], self.column[at]
        return TileAccess(self.instruction, lanes, self.addresses, self.shadow, *some)

    @cached_property
    def rows(self) -> Array:
        rows = self.chunks
        if self.per:
            rows = (rows[:, :, None] << self.per) + np.arange(1 << self.per)
        return rows.reshape(-1)

    @cached_property
    def who(self) -> Who:
        count = self.chunks.shape[1] << self.per
        return Who(np.repeat(self.lane, count), np.repeat(self.row, count), self.rows, self.columns)

    @cached_property
    def columns(self) -> Array:
        return np.repeat(self.column, self.chunks.shape[1] << self.per)

    @property
    def different(self) -> Array:
        return self.rows


Touch = Access | TileAccess

Rows = tuple[Shadow, Array, Array | None, Who]
"""Shadow, rows and columns of an access, and who made it."""


@dataclass(frozen=True)
class Area:
    """Tensors that share memory have one shadow: granules of 1 << shift bytes from host address `low` on."""

    low: int
    shift: int
    shadow: Shadow


def windows(array: Array, count: int) -> Array:
    """For each row of `array` the `count` rows from there on, without a copy: to be indexed with where ranges start."""
    return as_strided(array, (len(array) - count + 1, count, *array.shape[1:]), (array.strides[0], *array.strides))


def same_for_warps(lanes: Lanes, rows: Array) -> Array | None:
    """Where the granules of the last lane of each warp are in `rows`, if all lanes of whole warps access the same; None: not so."""
    count = len(rows) // lanes.n
    if lanes.n < WARP or rows[0] != rows[count] or not lanes.whole_warps:
        return None
    each = rows.reshape(-1, WARP, count)
    if np.count_nonzero(each != each[:, :1]):
        return None
    return np.asarray((np.arange(0, len(rows), WARP * count)[:, None] + np.arange((WARP - 1) * count, WARP * count)).reshape(-1))
