"""Standard attention's backward, Algorithm 3 of the paper: dV = P^T dO, dP = dO V^T, dS, dQ = dS K, dK = dS^T Q, with P, dP and dS
in HBM.

The paper has P from the forward and counts each input of a product once: `tiling="paper"`. The kernels, which are given L and no P,
make P again in a kernel before the five, and a tiled product reads its inputs again. Half types take P from L and from S rounded as
the forward kept it; float32 takes m and log(l) (row_bases.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.params import POINTER, Params, arrays
from cupyflash.problem import Problem
from cupyflash.schedules.backward import BackwardSchedule, gradient_params, require_no_dbias
from cupyflash.schedules.base import (
    GRANULE,
    MAX_BLOCK_ROWS,
    WARP,
    Kernel,
    Move,
    Phase,
    Room,
    Tiles,
    Visit,
    Workspace,
    element_constants,
    require_kernel_tiling,
    row_bytes,
    sub_tile,
    value_row_bytes,
)
from cupyflash.schedules.moves import head_moves, length_moves, mask_moves, scores_seen
from cupyflash.schedules.row_bases import RowBasesSchedule, given_move, has_bases
from cupyflash.schedules.standard import SOFTMAX_WARPS, extents, fit_square, score_type
from cupyflash.tiling import TileSize


def shared_bytes(problem: Problem, block_rows: int, block_cols: int) -> int:
    """Bytes of the two tiles of a product: Q and K, or dO and V."""
    return (block_rows + block_cols) * max(row_bytes(problem), value_row_bytes(problem))


def fit(problem: Problem, device: Device) -> TileSize:
    """The largest square tile up to 64 x 64 whose two inputs fit the SRAM."""
    return fit_square(problem, device, shared_bytes, "the standard backward", "two tiles")


@dataclass(frozen=True)
class StandardBackwardSchedule(BackwardSchedule):
    """P made again, and the five steps of Algorithm 3, each a kernel; deterministic as they are."""

    algorithm: ClassVar[str] = "standard"
    params: ClassVar[Params] = gradient_params(*arrays("Element", POINTER, ("P", "dP", "dS")))

    @property
    def bases(self) -> RowBasesSchedule | None:
        """What finds m and l, where they are needed."""
        return RowBasesSchedule.before(self) if has_bases(self.problem) and not self.ideal else None

    @property
    def ideal(self) -> bool:
        """Whether this is the paper's count and not the kernels': with P given."""
        return self.tiling.used == self.tiling.paper

    def phases(self, *, literal: bool = False, keys: int | None = None, kept: Tiles | None = None) -> Iterator[Phase]:
        p = self.problem
        keys = p.seqlen_k if keys is None else keys
        for heads in [1] * self.group if literal else [self.group]:
            if not self.ideal:
                enter = given_move(p, 1)
                yield from self._tile_product(heads, literal, keys, "Q", "K", "P", p.head_dim, row_bytes(p), enter)
                yield Phase(heads * self.row_blocks * self.col_blocks, enter=head_moves(p))
                yield Phase(heads, enter=mask_moves(p, scores_seen(p, range(p.seqlen_q), range(keys))))
                yield Phase(heads, leave=self._slopes(p.seqlen_q, write=True))
        yield from self._transposed_product(literal, "P", "dO", "dV", p.head_dim_v, value_row_bytes(p))  # line 1
        for heads in [1] * self.group if literal else [self.group]:
            yield from self._tile_product(heads, literal, keys, "dO", "V", "dP", p.head_dim_v, value_row_bytes(p))  # line 2
            # Line 3. The kernel reads a row once for the sum and once for dS, the paper once.
            reads = (Move("P", p.seqlen_k, p.itemsize), Move("dP", p.seqlen_k, p.itemsize)) * (1 if self.ideal else 2)
            reads += self._slopes(1, write=False)
            for times, rows in extents(p.seqlen_q, 1, literal):
                yield Phase(heads * times * rows, enter=reads, leave=(Move("dS", p.seqlen_k, p.itemsize, write=True),))
            yield from self._queries(heads, literal, keys)  # line 4
        yield from self._transposed_product(literal, "dS", "Q", "dK", p.head_dim, row_bytes(p))  # line 5

    def _slopes(self, rows: int, write: bool) -> tuple[Move, ...]:
        """Of the score function, if there is one: they lie where dS will."""
        p = self.problem
        return (Move("dS", rows * p.seqlen_k, p.itemsize, write=write),) if p.options.score else ()

    def _tile_product(
        self, heads: int, literal: bool, keys: int, left: str, right: str, out: str, d: int, row: int, *row_moves: Move
    ) -> Iterator[Phase]:
        """out = left right^T, (Nq x d) by (Nk x d), a tile at a time; `row_moves` are what each row of a tile brings besides."""
        p = self.problem
        left_tile, right_tile = Room(left, self.block_rows * row), Room(right, self.block_cols * row)
        for row_times, rows in extents(p.seqlen_q, self.block_rows, literal):
            for times, cols in extents(p.seqlen_k, self.block_cols, literal):
                enter = (
                    *length_moves(p),
                    Move(left, rows * d, p.itemsize, tile=left),
                    *(Move(move.tensor, rows * move.elements, move.itemsize) for move in row_moves),
                )
                leave = (Move(out, rows * cols, p.itemsize, write=True),)
                yield Phase(heads * row_times * times, enter=enter, leave=leave, tiles=(left_tile, right_tile))
            for times, cols in extents(keys, self.block_cols, literal):  # of the keys that there are
                yield Phase(heads * row_times * times, enter=(Move(right, cols * d, p.itemsize, tile=right),), tiles=(right_tile,))

    def _queries(self, heads: int, literal: bool, keys: int) -> Iterator[Phase]:
        """dQ = dS K, a row block at a time."""
        p = self.problem
        for row_times, rows in extents(p.seqlen_q, self.block_rows, literal):
            turns = heads * row_times
            visits = [
                Visit(turns * times, (Move("dS", rows * cols, p.itemsize),))
                for times, cols in extents(p.seqlen_k, self.block_cols, literal)
            ]
            visits += [
                Visit(turns * times, (Move("K", cols * p.head_dim, p.itemsize, tile="K"),))
                for times, cols in extents(keys, self.block_cols, literal)
            ]
            leave = (Move("dQ", rows * p.head_dim, p.itemsize, write=True),)
            tiles = (Room("K", self.block_cols * row_bytes(p)),)
            yield Phase(turns, enter=length_moves(p), visits=tuple(visits), leave=leave, tiles=tiles)

    def _transposed_product(self, literal: bool, scores: str, right: str, out: str, d: int, row: int) -> Iterator[Phase]:
        """out = scores^T right, summed over the query heads, a column block at a time."""
        p = self.problem
        for col_times, cols in extents(p.seqlen_k, self.block_cols, literal):
            visits = tuple(
                Visit(
                    self.group * col_times * times,
                    (Move(scores, rows * cols, p.itemsize), Move(right, rows * d, p.itemsize, tile=right)),
                )
                for times, rows in extents(p.seqlen_q, self.block_rows, literal)
            )
            leave = (Move(out, cols * d, p.itemsize, write=True),)
            yield Phase(col_times, visits=visits, leave=leave, tiles=(Room(right, self.block_rows * row),))

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        yield from super().parts(literal=literal)
        if self.bases:
            yield from self.bases.parts(literal=literal)

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        matrices = {name: Workspace((p.head_count, p.seqlen_q, p.seqlen_k), p.dtype) for name in ("P", "dP", "dS")}
        return {**matrices, **(self.bases.workspaces() if self.bases else {})}

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        require_no_dbias(self)
        shared = shared_bytes(p, self.block_rows, self.block_cols)
        require_kernel_tiling(self, shared)
        if self.block_cols > MAX_BLOCK_ROWS:
            raise ValueError(
                f"the standard backward runs blocks of at most {MAX_BLOCK_ROWS} columns; the tiling asks for {self.tiling.used}"
            )
        constants = (
            *element_constants(p, with_derivative=True),
            ("BR", self.block_rows),
            ("BC", self.block_cols),
            ("SUB", sub_tile(p, math.gcd(self.block_rows, self.block_cols))),
            ("SOFTMAX_WARPS", SOFTMAX_WARPS),
            *score_type(p),
        )
        row_warps, col_warps = self.block_rows // GRANULE, self.block_cols // GRANULE
        tiles, row, value_row = p.head_count * self.row_blocks * self.col_blocks, row_bytes(p), value_row_bytes(p)
        both = self.block_rows + self.block_cols

        def kernel(step: str, grid: int, warps: int, shared: int) -> Kernel:
            name = f"standard_backward_{step}"
            return Kernel("standard_backward.cu", name, constants, grid, warps * WARP, shared, self.struct)

        columns = self.repeats * self.col_blocks
        return (
            *(self.bases.kernels() if self.bases else ()),
            kernel("weights", tiles, row_warps, both * row),
            kernel("values", columns, col_warps, self.block_rows * value_row),
            kernel("weight_gradients", tiles, row_warps, both * value_row),
            kernel("softmax", -(-p.head_count * p.seqlen_q // SOFTMAX_WARPS), SOFTMAX_WARPS, 0),
            kernel("queries", p.head_count * self.row_blocks, row_warps, self.block_cols * row),
            kernel("keys", columns, col_warps, self.block_rows * row),
        )
