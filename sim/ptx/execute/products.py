"""Products of warpgroups as numbers: from registers and tiles of shared memory to sums, and back to registers.

With g = lane >> 2, t = lane & 3, warp w of a group has rows 16 w + g and 8 more of D and of A (`decode.matrices`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..decode.code import runs
from ..decode.matrices import FACTORS, Decode, fragment
from ..decode.primitives import aligned_sums, half_bits
from ..decode.registry import ENVIRONMENT, KEEP, Arg, Multiply
from ..memory.swizzles import DESCRIPTOR_UNIT, Descriptor
from ..state.lane_sets import GROUP, WARP, LaneSet
from ..state.segments import PAGE
from ..text.syntax import Array, PtxInstruction
from .registers import RegisterFiles, WaveUnit, by_warp

REMEMBERED = 512
"""Matrices whose units are kept, and operands of warpgroups."""

UnitShape = tuple[int, int, bool]
"""Rows of units, units of a row, and whether K-major, as descriptors count them."""


@dataclass(frozen=True)
class Matrix:
    """The units of a matrix and their pages, both from the beginning of its block's shared memory."""

    units: Array
    pages: Array


@dataclass(eq=False)
class MatrixOperand:
    """One matrix for each warpgroup: `matrices[which[k]]` in block `blocks[k]` of the wave. `base`: units before the block's."""

    descriptors: Array
    shape: UnitShape
    blocks: Array
    base: Array
    matrices: list[Matrix]
    which: Array
    pages: Array
    """(warpgroups, any), of the wave."""

    @property
    def size(self) -> int:
        """Returns the number of units of all matrices."""
        return len(self.blocks) * len(self.matrices[0].units)

    @cached_property
    def keys(self) -> Array:
        """(warpgroups, 2): equal rows for equal matrices."""
        return np.stack((self.descriptors, self.blocks.astype(np.uint64)), axis=1)

    def units(self) -> Array:
        """Returns (warpgroups, rows of units, units of a row) of the wave."""
        each = self.matrices[0].units
        if len(self.matrices) > 1:
            each = np.stack([one.units for one in self.matrices])[self.which]
        return (each + self.base[:, None]).reshape(len(self.blocks), *self.shape[:2])


class MatrixOperands(WaveUnit):
    """The maker of the operands of a wave."""

    def __init__(self, machine: RegisterFiles):
        super().__init__(machine)
        self._matrices: dict[tuple[int, UnitShape], Matrix] = {}
        self._operands: dict[tuple[bytes, LaneSet, UnitShape], MatrixOperand] = {}

    def of(self, descriptors: Array, lanes: LaneSet, shape: UnitShape, i: PtxInstruction) -> MatrixOperand:
        """Returns the matrices of these descriptors, one for each warpgroup of `lanes`."""
        key = descriptors.tobytes(), lanes, shape
        if key not in self._operands:
            if len(self._operands) > REMEMBERED:
                self._operands.clear()
            self._operands[key] = self.make(descriptors, lanes, shape, i)
        return self._operands[key]

    def make(self, descriptors: Array, lanes: LaneSet, shape: UnitShape, i: PtxInstruction) -> MatrixOperand:
        memory = self.memory
        blocks = lanes.block[:: lanes.n // len(descriptors)]
        if np.count_nonzero(descriptors != descriptors[0]):
            each, which = np.unique(descriptors, return_inverse=True)
        else:
            each, which = descriptors[:1], np.zeros(len(descriptors), np.int64)
        matrices = [self.matrix(bits, shape, i, lanes) for bits in each.tolist()]
        if len(matrices) == 1:
            pages = matrices[0].pages
        else:
            most = max(len(one.pages) for one in matrices)
            pages = np.stack([np.pad(one.pages, (0, most - len(one.pages)), "edge") for one in matrices])[which]
        pages = pages + (blocks * memory.pages.per_block)[:, None]
        return MatrixOperand(descriptors, shape, blocks, blocks * (memory.shared_stride // DESCRIPTOR_UNIT), matrices, which, pages)

    def matrix(self, bits: int, shape: UnitShape, i: PtxInstruction, lanes: LaneSet) -> Matrix:
        """Returns one matrix in its block's shared memory, in bounds."""
        found = self._matrices.get((bits, shape))
        if found is not None:
            return found
        units = Descriptor.of(bits).units(*shape)
        limit = self.memory.shared_size // DESCRIPTOR_UNIT
        if units.max() >= limit:
            last = int(units.max()) * DESCRIPTOR_UNIT
            end, size = last + DESCRIPTOR_UNIT, limit * DESCRIPTOR_UNIT
            message = f"wgmma reads up to offset {end:#x} of shared memory, which has {size:#x} bytes"
            self.findings.report("out of bounds", message, i, lanes, address=last)
            units = np.minimum(units, limit - 1)
        if len(self._matrices) > REMEMBERED:
            self._matrices.clear()
        found = self._matrices[bits, shape] = Matrix(units, np.unique(units // (PAGE // DESCRIPTOR_UNIT)))
        return found


THREADS = GROUP * WARP
ROWS = 64

EIGHT = np.dtype("V32")
"""Eight float32 that lie together."""

ALONE = 1 << 18
"""Most multiplications of a matrix product that OpenBLAS makes in one thread."""


@dataclass
class BoundProduct:
    """The operands of an instruction: places of the registers in the file of 32 bits, and their rows in `Flights`."""

    instruction: PtxInstruction
    control: Multiply
    d_places: Array
    d_rows: Array
    a_places: Array
    a_rows: Array
    others: tuple[Arg, ...]
    decode: tuple[Decode, Decode]

    def goes_on(self, other: BoundProduct) -> bool:
        """True if a product of `other` may go on with the sums of one of this."""
        mine, theirs = self.control, other.control
        return (mine.columns, mine.result) == (theirs.columns, theirs.result)


class Sums:
    """Accumulators of warpgroups, (slots, 64, columns) float32: those of products on their way."""

    def __init__(self, columns: int):
        self.pool = np.zeros((0, ROWS, columns), np.float32)
        self.newest = np.zeros(0, np.int64)
        """The newest product that adds to each slot; 0: none."""

    def take(self, count: int) -> Array:
        """Returns unused slots; their contents are not set yet."""
        free = np.flatnonzero(self.newest == 0)
        if len(free) < count:
            size = len(self.pool)
            more = max(count, size)
            self.pool = np.concatenate((self.pool, np.empty((more, *self.pool.shape[1:]), np.float32)))
            self.newest = np.concatenate((self.newest, np.zeros(more, np.int64)))
            free = np.concatenate((free, np.arange(size, size + more)))
        return free[:count]

    def of(self, slots: Array) -> Array:
        """Returns the sums in these slots, without a copy if they are contiguous."""
        first = int(slots[0])
        if np.count_nonzero(slots - first != np.arange(len(slots))):
            return self.pool[slots]
        return self.pool[first : first + len(slots)]


@dataclass(eq=False)
class PendingProduct:
    """One executed wgmma of some warpgroups. Arrays have one entry a warpgroup; `over` one a warp.

    `first`: the first warp of each; `operands`: A (none if it is in registers) and B; `slots`: of its sums, shared by a chain;
    `adds`: scale-d; `group`: commits before it; `reading`: its numbers in the race detector.
    """

    number: int
    bound: BoundProduct
    lanes: LaneSet
    first: Array
    operands: tuple[MatrixOperand | None, MatrixOperand]
    adds: Array
    sums: Sums
    slots: Array
    group: Array
    landed: Array
    over: Array
    reading: Array | None = None
    held: Array | None = None

    def registers(self) -> Array:
        """Returns D as (registers, lanes of the warpgroups); kept, once all of it has landed."""
        if self.held is not None:
            return self.held
        found = registers(self.sums.of(self.slots), self.bound.control)
        if self.landed.all():
            self.held = found
        return found

    def of(self, first: Array) -> Array:
        """Returns a mask of its warpgroups with these first warps."""
        return (self.first[:, None] == first).any(axis=1)


ProductStep = list[tuple[PendingProduct, Array]]
"""A step along K of some warpgroups: products of one instruction, and a selection of the warpgroups of each."""

Chain = list[tuple[PendingProduct, int]]
"""Steps along K of one warpgroup: a product, and the warpgroup's place in it."""


def land(machine: RegisterFiles, products: list[PendingProduct], due: Callable[[PendingProduct], Array]) -> None:
    """Computes the due parts (booleans, a warpgroup each) of these products, oldest first: chains of steps at once, also of
    warpgroups that came to the same instructions one after the other.
    """
    pending: list[tuple[PendingProduct, Array]] = []
    for product in products:
        now = due(product) & ~product.landed
        if now.any():
            product.landed |= now
            pending.append((product, np.flatnonzero(now)))
    if all(len(at) == len(p.first) and np.array_equal(p.first, pending[0][0].first) for p, at in pending):
        steps: list[ProductStep] = []
        for product, at in pending:
            before = steps[-1][0][0] if steps else None
            if before is not None and not (joins(before, product) and product.adds.all() and (before.slots == product.slots).all()):
                compute(machine, steps)
                steps = []
            steps.append([(product, at)])
        if steps:
            compute(machine, steps)
        return
    chains: dict[int, list[Chain]] = {}
    for product, at in pending:
        for k, one in zip(at.tolist(), product.first[at].tolist(), strict=True):
            mine = chains.setdefault(one, [])
            before, place = mine[-1][-1] if mine else (None, 0)
            if before is not None and joins(before, product) and product.adds[k] and before.slots[place] == product.slots[k]:
                mine[-1].append((product, k))
            else:
                mine.append([(product, k)])
    for turn in range(max(map(len, chains.values()))):
        alike: dict[tuple[object, ...], list[Chain]] = {}
        for mine in chains.values():
            if turn < len(mine):
                product, k = mine[turn][0]
                key = bool(product.adds[k]), *(id(p.bound) for p, _ in mine[turn])
                alike.setdefault(key, []).append(mine[turn])
        for group in alike.values():
            compute(machine, [together(step) for step in zip(*group, strict=True)])


def together(step: Sequence[tuple[PendingProduct, int]]) -> ProductStep:
    """Groups warpgroups of one step, in order, those of one product together."""
    out: list[tuple[PendingProduct, list[int]]] = []
    for product, k in step:
        if out and out[-1][0] is product:
            out[-1][1].append(k)
        else:
            out.append((product, [k]))
    return [(product, np.array(at)) for product, at in out]


def compute(machine: RegisterFiles, steps: list[ProductStep]) -> None:
    """Computes steps of one chain as one product along K."""
    ENVIRONMENT.setter(KEEP)()  # tensor cores flush nothing, whatever instructions around them do
    _compute(machine, steps)
    ENVIRONMENT.setter(machine.code.base_mode)()


def _compute(machine: RegisterFiles, steps: list[ProductStep]) -> None:
    control, sums = steps[0][0][0].bound.control, steps[0][0][0].sums
    slots, adds = (gathered([getattr(p, name)[at] for p, at in steps[0]]) for name in ("slots", "adds"))
    a, b = factor(machine, steps, 0), factor(machine, steps, 1)
    # Warpgroups with the same B stay apart: BLAS chooses its order of summation, and so the bits, by the number of rows.
    a = a.reshape(len(b), len(slots) // len(b), ROWS, a.shape[2])
    product = np.empty((len(slots), ROWS, control.columns), np.float32)
    total = sums.of(slots)
    chip = machine.tensor_cores is not None and control.types[0] in FACTORS
    # Step after step, so that sums have the same bits whichever steps of a chain are computed at a time.
    for first in range(0, a.shape[3], control.depth):
        depth = slice(first, first + control.depth)
        if chip:
            kept = total if first or adds.all() else np.where(adds[:, None, None], total, np.float32(0))
            as_chip(control, a[..., depth], b[:, depth], kept, product)
        else:
            multiply(a[..., depth], b[:, None, depth], product.reshape(*a.shape[:3], control.columns))
            if control.sign < 0:
                np.negative(product, product)
            if first == 0 and not adds.all():
                if adds.any():
                    np.add(product, total, out=product, where=adds[:, None, None])
            else:
                product += total
            if control.result == "f16":
                product = half_bits(product).view(np.float16).astype(np.float32)
        if first == 0:
            total = np.empty_like(product)
        product, total = total, product
    sums.pool[slots] = total


def gathered(parts: list[Array], axis: int = 0) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)


def factor(machine: RegisterFiles, steps: list[ProductStep], side: int) -> Array:
    """Returns A (side 0) as (warpgroups, 64, K), or B as (warpgroups, K, N), of steps side by side along K; B only once for
    contiguous warpgroups that have it in common, if they are equally many everywhere.
    """
    control, decode = steps[0][0][0].bound.control, steps[0][0][0].bound.decode[side]
    if side == 0 and control.a_in_registers:
        bits = gathered([gathered([fragments(machine, p)[at] for p, at in step]) for step in steps], axis=2)
        out = np.empty((bits.shape[0], ROWS, control.depth * len(steps)), np.float32)
        decode(np.ascontiguousarray(bits), out)
        return out
    k_major = control.k_major[side]
    shared = 1 if side == 0 else min(in_common(step) for step in steps)
    tiles = [gathered([operand_of(p, side).units()[at] for p, at in step])[::shared] for step in steps]
    data = machine.memory.shared[DESCRIPTOR_UNIT].take(gathered(tiles, axis=2 if k_major else 1))
    size = 32 // control.depth
    out = np.empty((data.shape[0], data.shape[1], data.shape[2] * DESCRIPTOR_UNIT // size), np.float32)
    decode(data.view(np.uint32), out)
    # In memory: rows of M or N if K-major, rows of K if not; A is needed by rows of M, B by rows of K.
    return out if k_major == (side == 0) else out.transpose(0, 2, 1)


def operand_of(product: PendingProduct, side: int) -> MatrixOperand:
    operand = product.operands[side]
    assert operand is not None
    return operand


def in_common(step: ProductStep) -> int:
    """Returns the number of contiguous warpgroups with the same B, if it is the same number everywhere; else 1."""
    keys = gathered([operand_of(p, 1).keys[at] for p, at in step])
    other = np.flatnonzero((keys != keys[0]).any(axis=1))
    count = int(other[0]) if len(other) else len(keys)
    if len(keys) % count:
        return 1
    runs = keys.reshape(-1, count, 2)
    return 1 if np.count_nonzero(runs != runs[:, :1]) else count


def rows_of(machine: RegisterFiles, places: Array, lanes: LaneSet) -> Array:
    """Returns registers of 32 bits as (registers, lanes)."""
    file, grid = machine.full.files[32], lanes.grid
    if grid is None:
        return by_warp(file)[places[:, None], lanes.warp_ids].reshape(len(places), lanes.n)
    out, there = np.empty((len(places), *grid.counts), file.dtype), grid.of(file)
    for at, run in runs(places):
        out[at] = there[run]
    return out.reshape(len(places), lanes.n)


def put_rows(machine: RegisterFiles, places: Array, lanes: LaneSet, values: Array) -> None:
    """Writes registers of 32 bits, (registers, lanes)."""
    file, grid = machine.full.files[32], lanes.grid
    if grid is None:
        by_warp(file)[places[:, None], lanes.warp_ids] = values.reshape(len(places), -1, WARP)
        return
    held, there = values.reshape(len(places), *grid.counts), grid.of(file)
    for at, run in runs(places):
        there[run] = held[at]


def fragments(machine: RegisterFiles, product: PendingProduct) -> Array:
    """Returns A from registers: (warpgroups, 64, 8 words), rows 16 w + g + 8 r, words t + 4 k of a row."""
    out = np.empty((len(product.first) * GROUP, 16, 8), np.uint32)
    parts = fragment(out)
    parts[...] = rows_of(machine, product.bound.a_places, product.lanes).reshape(parts.shape)
    return out.reshape(-1, ROWS, 8)


def multiply(a: Array, b: Array, out: Array) -> None:
    """Computes a b for each warpgroup, some columns at a time: for larger products OpenBLAS starts threads and waits for them."""
    step = max(8, ALONE // (a.shape[-2] * a.shape[-1]))
    for first in range(0, out.shape[-1], step):
        np.matmul(a, b[..., first : first + step], out=out[..., first : first + step])


def as_chip(control: Multiply, a: Array, b: Array, total: Array, out: Array) -> None:
    """Computes `total` + a b as a chip's tensor cores sum them; a: (matrices B, warpgroups of each, 64, k), total and out:
    (warpgroups, 64, N).
    """
    count = a.shape[1]
    for at, factor in enumerate(b):
        mine = slice(at * count, (at + 1) * count)
        rows = total[mine].reshape(-1, control.columns)
        sums = aligned_sums(control.sign * a[at].reshape(len(rows), -1).T, factor, rows, control.result)
        out[mine] = sums.reshape(count, ROWS, control.columns)


def joins(before: PendingProduct, after: PendingProduct) -> bool:
    """True if two products may be one along K, if the second adds to the sums of the first."""
    mine, theirs = before.bound.control, after.bound.control
    return mine == theirs and mine.result == "f32"


def registers(total: Array, control: Multiply) -> Array:
    """Returns D (warpgroups, 64, N) as (registers, lanes of the warpgroups)."""
    count, _, columns = total.shape
    if control.result == "f16":
        return fragment(half_bits(total).view(np.uint32).reshape(-1, 16, columns // 2)).reshape(columns // 4, -1)
    # Eight columns of a row at a time, then one register at a time: twice as fast as at once.
    parts = np.ascontiguousarray(total.reshape(-1, columns).view(EIGHT).T).view(np.uint32)
    turned = np.empty((columns // 8, 2, 2, count * GROUP, WARP), np.uint32)
    np.copyto(turned, parts.reshape(columns // 8, count * GROUP, 2, WARP, 2).transpose(0, 2, 4, 1, 3))
    return turned.reshape(columns // 2, count * THREADS)


def matrix(held: Array, count: int, control: Multiply) -> Array:
    """Returns D (warpgroups, 64, N) from the result of `registers`."""
    elements, kind = (1, np.float16) if control.result == "f16" else (2, np.float32)
    words = np.empty((count * GROUP, 16, control.columns * elements // 2), np.uint32)
    parts = fragment(words, elements)
    parts[...] = held.reshape(parts.shape)
    return words.view(kind).reshape(count, ROWS, control.columns).astype(np.float32, copy=False)
