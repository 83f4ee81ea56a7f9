"""Products of warpgroups as numbers: from registers and tiles of shared memory to sums, and back to registers.

With g = lane >> 2, t = lane & 3, warp w of a group has rows 16 w + g and 8 more of D and of A (`decode.ops.wgmma`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..decode.ops.rounding import half_bits
from ..decode.ops.tensor import Decode
from ..decode.registry import Arg, Multiply
from ..memory.descriptors import UNIT
from ..state.fpenv import ENVIRONMENT, KEEP
from ..state.lanes import WARP, Lanes
from ..text.syntax import Instruction
from ..text.types import Array
from .host import Host

GROUP = 4
THREADS = GROUP * WARP
ROWS = 64

ALONE = 1 << 18
"""Multiplications of a matrix product that OpenBLAS makes in one thread."""


@dataclass
class Bound:
    """What an instruction asks for: places of the registers in the file of 32 bits, and their rows in `Flights`."""

    instruction: Instruction
    control: Multiply
    d_places: Array
    d_rows: Array
    a_places: Array
    a_rows: Array
    others: tuple[Arg, ...]
    decode: tuple[Decode, Decode]


@dataclass(eq=False)
class Product:
    """One executed wgmma of some warpgroups. Arrays have one entry a warpgroup; `over` one a warp.

    `first`: the first warp of each; `units`: of A (none where it is in registers) and B; `total`: where the sums go, shared by
    a chain; `adds`: scale-d; `group`: commits before it; `reading`: its numbers in the race detector.
    """

    number: int
    bound: Bound
    lanes: Lanes
    first: Array
    units: tuple[Array | None, Array]
    adds: Array
    total: Array
    group: Array
    landed: Array
    over: Array
    reading: Array | None = None
    held: Array | None = None

    def registers(self) -> Array:
        """D as (registers, lanes of the warpgroups); kept, once everything of it has landed."""
        if self.held is not None:
            return self.held
        found = registers(self.total, self.bound.control)
        if self.landed.all():
            self.held = found
        return found

    def of(self, first: Array) -> Array:
        """Which of its warpgroups have these first warps."""
        return np.asarray((self.first[:, None] == first).any(axis=1))


def compute(machine: Host, run: list[Product], at: Array | None = None) -> None:
    """Products of one chain, together as one along K; `at`: only of these warpgroups."""
    if run:
        ENVIRONMENT.setter(KEEP)()  # tensor cores flush nothing, whatever instructions around them do
        _compute(machine, run, at)
        ENVIRONMENT.setter(machine.code.base_mode)()


def _compute(machine: Host, run: list[Product], at: Array | None) -> None:
    control = run[0].bound.control
    a, b = factor(machine, run, 0, at), factor(machine, run, 1, at)
    total, adds = (run[0].total, run[0].adds) if at is None else (run[0].total[at], run[0].adds[at])
    if control.result == "f32" and at is None and control.sign > 0 and not adds.any():
        multiply(a, b, total)
        return
    product = np.empty(total.shape, np.float32)
    multiply(a, b, product)
    if control.sign < 0:
        np.negative(product, product)
    if adds.all():
        product += total
    elif adds.any():
        np.add(product, total, out=product, where=adds[:, None, None])
    if control.result == "f16":
        product = half_bits(product).view(np.float16).astype(np.float32)
    if at is None:
        np.copyto(total, product)
    else:
        run[0].total[at] = product


def factor(machine: Host, run: list[Product], side: int, at: Array | None) -> Array:
    """A (side 0) as (warpgroups, 64, K), or B as (warpgroups, K, N), of products side by side along K."""
    control = run[0].bound.control
    where: Any = slice(None) if at is None else at
    decode = run[0].bound.decode[side]
    if side == 0 and control.a_in_registers:
        parts = [fragments(machine, p)[where] for p in run]
        bits = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
        out = np.empty((bits.shape[0], ROWS, control.depth * len(run)), np.float32)
        decode(np.ascontiguousarray(bits), out)
        return out
    k_major = control.k_major[side]
    tiles = []
    for p in run:
        units = p.units[side]
        assert units is not None
        tiles.append(units[where])
    units = tiles[0] if len(tiles) == 1 else np.concatenate(tiles, axis=2 if k_major else 1)
    data = machine.memory.shared_view(UNIT).take(units)
    size = 32 // control.depth
    out = np.empty((data.shape[0], data.shape[1], data.shape[2] * UNIT // size), np.float32)
    decode(data.view(np.uint32), out)
    # As it lies: rows of M or N if K-major, rows of K if not; A is wanted by rows of M, B by rows of K.
    return out if k_major == (side == 0) else out.transpose(0, 2, 1)


def rows_of(machine: Host, places: Array, lanes: Lanes) -> Array:
    """Registers of 32 bits as (registers, lanes)."""
    file = machine.full.files[32]
    return file[places, lanes.slice] if lanes.slice is not None else file[places[:, None], lanes.index]


def fragments(machine: Host, product: Product) -> Array:
    """A from registers: (warpgroups, 64, 8 words), rows 16 w + g + 8 r, words t + 4 k of a row."""
    lanes = product.lanes
    held = rows_of(machine, product.bound.a_places, lanes)
    parts = held.reshape(2, 2, len(product.first), GROUP, 8, 4)
    return parts.transpose(2, 3, 1, 4, 0, 5).reshape(len(product.first), ROWS, 8)


def multiply(a: Array, b: Array, out: Array) -> None:
    """a b for each warpgroup, some columns at a time: for larger products OpenBLAS calls other threads, and waits for them."""
    step = max(8, ALONE // (ROWS * a.shape[2]))
    for first in range(0, out.shape[2], step):
        np.matmul(a, b[:, :, first : first + step], out=out[:, :, first : first + step])


def joins(before: Product, after: Product) -> bool:
    """Whether two products of one chain may be one along K."""
    mine, theirs = before.bound.control, after.bound.control
    return mine == theirs and mine.result == "f32" and bool(after.adds.all())


def registers(total: Array, control: Multiply) -> Array:
    """D (warpgroups, 64, N) as (registers, lanes of the warpgroups)."""
    count, _, columns = total.shape
    if control.result == "f16":
        halves = half_bits(total).reshape(count, GROUP, 2, 8, columns // 8, 4, 2)
        turned = np.ascontiguousarray(halves.transpose(4, 2, 0, 1, 3, 5, 6))
        return turned.view(np.uint32).reshape(columns // 4, count * THREADS)
    parts = total.view(np.uint32).reshape(count, GROUP, 2, 8, columns // 8, 4, 2)
    return parts.transpose(4, 2, 6, 0, 1, 3, 5).reshape(columns // 2, count * THREADS)


def matrix(held: Array, count: int, control: Multiply) -> Array:
    """What `registers` makes of D, back."""
    columns = control.columns
    if control.result == "f16":
        halves = np.ascontiguousarray(held).view(np.float16).reshape(columns // 8, 2, count, GROUP, 8, 4, 2)
        return halves.transpose(2, 3, 1, 4, 0, 5, 6).reshape(count, ROWS, columns).astype(np.float32)
    parts = np.ascontiguousarray(held).view(np.float32).reshape(columns // 8, 2, 2, count, GROUP, 8, 4)
    return parts.transpose(3, 4, 1, 5, 0, 6, 2).reshape(count, ROWS, columns)
