"""Accesses to memory, as the race detector keeps them: their kinds, their granules, tables of the last writers and readers.

The shadow memory has granules: the smallest width with which the kernel accesses shared memory, or a tensor, so that an access
of 16 bytes is often one entry. Each granule has an entry for its last writer, and a summary of its readers. In shared memory
each warp of the cluster has its own summary.

A race of writers that write the same value is a warning: every known chip leaves that value there, in whatever order they come.
Each of these writers stays in `Shadow.agreeing`: later readers and writers of the granule, and earlier readers, must be ordered
with all of them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..state.lane_sets import WARP, LaneSet
from ..state.segments import Place, Segment, meets
from ..text.syntax import Array, PtxInstruction
from .moments import STAMP

DEVICE, CLUSTER, BLOCK = range(3)
"""Scopes of fences, atomics and strong accesses, the widest first."""


def scope_of(mods: Sequence[str]) -> int:
    """Returns the scope that modifiers name; the device's if they name none (PTX ISA, "atom", "membar/fence")."""
    return BLOCK if "cta" in mods else CLUSTER if "cluster" in mods else DEVICE


STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"})
"""Modifiers of loads and stores that, like atomics, do not race with each other."""


def is_phase(i: PtxInstruction) -> bool:
    """True for instructions on an mbarrier object, whose orders `order.moments` keeps."""
    return i.opcode == "mbarrier" or (i.opcode == "cp" and "mbarrier" in i.mods)


def is_async(i: PtxInstruction) -> bool:
    """True for instructions that access memory through the asynchronous proxy (PTX ISA, "Async proxy")."""
    if i.opcode == "cp":
        return "bulk" in i.mods and len(i.operands) > 1
    return i.opcode == "wgmma" and "mma_async" in i.mods


def is_strong(i: PtxInstruction) -> bool:
    """True for atomics, and for loads and stores that other threads may make at the same time."""
    if is_phase(i):
        # Nor is an order asked for before inval: CUDA's pipelines (libcu++) end by a count that a lane of each warp makes for all.
        return "init" not in i.mods
    return i.opcode in ("atom", "red") or (i.opcode in ("ld", "st") and bool(STRONG & set(i.mods)))


def is_narrow(i: PtxInstruction) -> bool:
    """True for atomics and strong accesses whose scope excludes threads of other blocks or clusters."""
    return is_strong(i) and not is_phase(i) and scope_of(i.mods) != DEVICE


WIDEST = 16
"""Bytes of the widest granule: an access of more has several."""


def never(*_: PtxInstruction) -> bool:
    return False


@dataclass(frozen=True)
class Sharing:
    """Facts about a kernel that the race detector works from.

    `shared_granule`: the smallest width of an access; `global_granules`: the same by the place of the pointer that it may have come
    from, under "*" for accesses to anywhere. `atomics`: the kernel has atomics or strong loads and stores; `releases`: and fences
    or releases. `written`: places of the pointers that stores may have come from, None if unknown. `proxies`: something accesses
    memory through the asynchronous proxy, `products`: wgmma does. `narrow`: it has atomics or strong accesses whose scope is less
    than the device, to memory that other blocks may reach. `guesses`: plain loads whose values only a compare-and-swap uses, so
    that atomics do not race with them. `lockstep`: volatile loads and stores, except loads on which a loop waits: between lanes of
    a warp they need an order, too. `barriers`: those of the block; `loops`: the first and last PTX line of each.
    `shuffled`: True for a load and a store if the stored value comes from the loaded ones of all lanes, by shuffles.
    """

    shared_granule: int
    global_granules: dict[Place, int]
    atomics: bool
    releases: bool
    written: frozenset[Place] | None
    proxies: bool = False
    products: bool = False
    narrow: bool = False
    guesses: frozenset[PtxInstruction] = frozenset()
    lockstep: frozenset[PtxInstruction] = frozenset()
    barriers: tuple[PtxInstruction, ...] = ()
    loops: tuple[tuple[int, int], ...] = ()
    shuffled: Callable[[PtxInstruction, PtxInstruction], bool] = never

    def turns(self, first: PtxInstruction, last: PtxInstruction) -> bool:
        """True if a barrier is between two instructions, the first one first in the code, and a loop has both: nothing orders
        the last one of a turn before the first one of the next."""
        met = any(between(first, barrier, last) for barrier in self.barriers)
        return met and any(start <= first.line and last.line <= end for start, end in self.loops)

    def global_granule(self, places: list[Place]) -> int:
        """Returns the smallest width of an access to memory that the pointers at these places point to."""
        widths = (width for found, width in self.global_granules.items() if any(meets(found, place) for place in places))
        return min([WIDEST, self.global_granules.get("*", WIDEST), *widths])

    def writes(self, place: Place) -> bool:
        """True if a store may reach the memory that the pointer at this place points to."""
        return self.written is None or any(meets(found, place) for found in self.written)


def between(first: PtxInstruction, middle: PtxInstruction, last: PtxInstruction) -> bool:
    """True if an instruction is between two others: by the kernel's lines if these tell, since a compiler moves code."""
    lines = [i.inlined_at[-1] if i.inlined_at else i.source for i in (first, middle, last)]
    numbers = [line[1] for line in lines if line and line[0] == (lines[0] or ("",))[0]]
    if len(numbers) == 3 and len(set(numbers)) == 3:
        return numbers[0] < numbers[1] < numbers[2]
    return first.line < middle.line < last.line


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass
class Table:
    """Entries of all granules, one row a granule, with the number of the instruction of each entry; made when first used.

    `sparse`: few rows are ever touched, and only those take memory.
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
        """Returns a mask of the rows with an entry."""
        return (self.entries != 0).any(axis=1) if "entries" in vars(self) else np.zeros(self.rows, bool)

    @cached_property
    def touched(self) -> Array:
        """Mask of the rows of shared memory with an entry."""
        return np.zeros(self.rows, bool)

    @cached_property
    def by(self) -> Array:
        return zeros((self.rows, self.columns), self.numbers, self.sparse)


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any], sparse: bool) -> Array:
    """Returns zeros; `sparse` ones take memory a page at a time, when touched, not 2 MiB at a time as NumPy's large arrays do."""
    size = math.prod(shape) * dtype.itemsize
    if not sparse or not size or not hasattr(mmap, "MADV_NOHUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, size)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


class Shadow:
    """The accesses to each granule: the last plain writer, the plain readers, the atomics; those that asynchronous copies may still
    read (`copies`) and, in tensors, write (`landing`); the last `volatile` writer of shared memory, as far as lockstep matters.

    `sparse`: bulk copies make most of the reads, each for one warp.
    """

    def __init__(self, granules: int, columns: int, shared: bool, numbers: np.dtype[Any], sparse: bool = False):
        self.shared = shared
        self.reads, self.atomics = (Table(granules, columns, numbers, sparse) for _ in range(2))
        self.writes, self.copies, self.landing, self.volatile = (Table(granules, 1, numbers) for _ in range(4))
        self.agreeing = Table(granules, columns, numbers)
        """Plain writers that raced with the last one and wrote the same."""
        self.scoped: dict[tuple[int, bool], Table] = {}
        """All strong accesses by (scope, whether they write), if the scope of some excludes other blocks."""
        self.mixed: Array | None = None
        """Granules that lanes of one warp wrote at once, with several values: any of these may be there."""
        self.ragged = False
        """True if a copy to or from a tensor began or ended within a granule, so that the entries may omit it."""

    def mix(self, rows: Array) -> None:
        """Records that lanes of one warp wrote several values to these granules at once."""
        if len(rows) and self.mixed is None:
            self.mixed = np.zeros(self.writes.rows, bool)
        if self.mixed is not None:
            self.mixed[rows] = True

    def touched(self) -> tuple[Array, Array]:
        """Returns masks of the granules that somebody may have written, and of those that anybody may have touched."""
        wrote = self.writes.marked() | self.atomics.marked() | self.landing.marked() | self.ragged
        return wrote, wrote | self.reads.marked() | self.copies.marked()


@dataclass
class Who:
    """The lanes of an access, one entry for each granule: grid-wide lane, position in the `LaneSet`, shared row, column."""

    lane: Array
    position: Array
    row: Array
    column: Array


@dataclass
class ShadowAccess:
    """The granules of one access: `rows` of the shadow (and `columns`, where readers have one each), and the lanes that made it.

    `collective`: the lanes of a warp made it together, so that none of them made it alone.
    """

    instruction: PtxInstruction
    lanes: LaneSet
    addresses: Array
    segment: Segment | None
    shadow: Shadow
    rows: Array
    columns: Array | None
    who: Who
    collective: bool = False
    last: Array | None = None
    """Positions in `rows` of the last lane of each warp, if the warps are whole and the lanes of each access the same granules."""

    boxes: None = None

    @property
    def different(self) -> Array:
        """The rows, without repetitions for other lanes of a warp."""
        return self.rows if self.last is None else self.rows[self.last]


@dataclass(frozen=True)
class Boxes:
    """Ranges of rows, `count` each from `starts` on, which do not overlap; the k-th is accessed by `lane[k]` of the grid."""

    starts: Array
    count: int
    lane: Array
    column: Array

    def take(self, at: Array) -> Boxes:
        return Boxes(self.starts[at], self.count, self.lane[at], self.column[at])


@dataclass
class TileAccess:
    """Tiles of shared memory that bulk copies move, the k-th by lane row[k] of `lanes`: an `Access`, split into granules on demand.

    chunks: (tiles, n) 16-byte elements of the wave's, each of 1 << per granules. `boxes`: the same as ranges, if they are ranges.
    """

    instruction: PtxInstruction
    lanes: LaneSet
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

    def take(self, at: Array, lanes: LaneSet) -> TileAccess:
        """Returns only these tiles, for lanes that have waited for them."""
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


Touch = ShadowAccess | TileAccess

Rows = tuple[Shadow, Array, Array | None, Who]
"""Shadow, rows and columns of an access, and the lanes that made it."""


@dataclass(frozen=True)
class Area:
    """The shadow that tensors share which share memory: granules of 1 << shift bytes from host address `low` on."""

    low: int
    shift: int
    shadow: Shadow


def windows(array: Array, count: int) -> Array:
    """Returns, for each row of `array`, the `count` rows from there on, without a copy: an array to index with starts of ranges."""
    shape = len(array) - count + 1, count, *array.shape[1:]
    return np.ndarray(shape, array.dtype, array, 0, (array.strides[0], *array.strides))  # ten times as fast as as_strided


def same_for_warps(lanes: LaneSet, rows: Array) -> Array | None:
    """Returns positions in `rows` of each warp's last lane's granules; None unless all lanes of whole warps access the same."""
    count = len(rows) // lanes.n
    if lanes.n < WARP or rows[0] != rows[count] or not lanes.whole_warps:
        return None
    each = rows.reshape(-1, WARP, count)
    if np.count_nonzero(each != each[:, :1]):
        return None
    return (np.arange(0, len(rows), WARP * count)[:, None] + np.arange((WARP - 1) * count, WARP * count)).reshape(-1)


SAME = "are not ordered; both write the same bytes"
STORES = frozenset({"st", "stmatrix", "wmma", "mbarrier", "sust"})
"""Opcodes of plain stores. mbarrier is here for its init: its other accesses are strong."""


@dataclass(frozen=True)
class Stored:
    """A store that is about to be made: `values`, one element a lane; `shared`: the bytes of the wave's shared memory, with
    1 << `shift` in a granule. `earlier`: its parts that are in the tables already, while nothing of the store is in memory yet.
    """

    lanes: LaneSet
    values: Array
    shared: Array
    shift: int
    earlier: list[Touch] = field(default_factory=list)

    def written(self, access: Touch, where: Array) -> Array:
        """Returns the bytes that a part of the store writes at these of its granules, a row each."""
        count = len(access.rows) // access.lanes.n
        row = access.who.position[where]
        if access.lanes is not self.lanes:
            order = np.argsort(self.lanes.index)
            row = order[np.searchsorted(self.lanes.index, access.lanes.index[row], sorter=order)]
        return self.values.view(np.uint8).reshape(self.lanes.n, count, -1)[row, where % count]

    def there(self, access: Touch, where: Array, size: int) -> Array:
        """Returns the bytes in memory at these granules, `size` of each, before a part of the store."""
        if access.segment is None:
            memory, starts = self.shared, access.rows[where] << self.shift
        else:
            count = len(access.rows) // access.lanes.n
            memory = access.segment.window(1)[0]
            starts = access.addresses[access.who.position[where]].astype(np.int64) - access.segment.start + where % count * size
        found = memory[starts[:, None] + np.arange(size)]
        for one in self.earlier:
            if one.shadow is access.shadow:
                order = np.argsort(one.rows, kind="stable")
                last = order[np.searchsorted(one.rows, access.rows[where], sorter=order, side="right") - 1]
                hit = np.flatnonzero(one.rows[last] == access.rows[where])
                found[hit] = self.written(one, last[hit])
        return found

    def same_at_once(self, access: Touch, lost: Array, winners: Array) -> Array:
        """Returns a mask of the `lost` granules, stored to by several lanes of a part, that get what the lane `winners` stores."""
        # The winner's own entry of each granule.
        keys = access.rows << np.int64(STAMP) | access.who.lane
        order = np.argsort(keys, kind="stable")
        wanted = access.rows[lost] << np.int64(STAMP) | winners
        theirs = order[np.searchsorted(keys, wanted, sorter=order, side="right") - 1]
        return (self.written(access, lost) == self.written(access, theirs)).all(axis=1)
