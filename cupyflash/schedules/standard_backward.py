"""Standard attention's backward, Algorithm 3 of the paper: dV = P^T dO, dP = dO V^T, dS, dQ = dS K, dK = dS^T Q, with P, dP and dS
in HBM.

The paper has P from the forward and counts each input of a product once: `tiling="paper"`. The kernels get L but no P: a kernel
before the five computes P again, and a tiled product reads its inputs again. Half types compute P from L and from S rounded as the
forward kept it; float32 from m and log(l) (row_bases.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.launch.params import POINTER, Params, arrays
from cupyflash.request.problem import Problem
from cupyflash.request.score import named
from cupyflash.schedules.backward import BackwardSchedule, gradient_params
from cupyflash.schedules.base import (
    GRANULE,
    MAX_BLOCK_ROWS,
    WARP,
    Kernel,
    Workspace,
    element_constants,
    require_kernel_tiling,
    row_bytes,
    sub_tile,
    value_row_bytes,
)
from cupyflash.schedules.moves import (
    BEGIN,
    END,
    VISIT,
    Move,
    Room,
    Walk,
    captured,
    length_reads,
    passing,
    reads,
    score_reads,
    tensor,
    writes,
)
from cupyflash.schedules.parts import Part
from cupyflash.schedules.row_bases import RowBasesSchedule, given_name, has_bases
from cupyflash.schedules.standard import SOFTMAX_WARPS, fit_square, score_rows, score_type
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
        """The schedule that finds m and l, if they are needed."""
        return RowBasesSchedule.before(self) if has_bases(self.problem) and not self.ideal else None

    @property
    def ideal(self) -> bool:
        """True if this is the paper's count, with P given, and not the kernels'."""
        return self.tiling.used == self.tiling.paper

    def walks(self) -> Iterator[Walk]:
        p, parts = self.problem, self.parts
        slopes = ["dS"] * p.options.transformed  # they lie where dS will
        given = (*captured(p, "head", BEGIN), *reads(p, BEGIN, given_name(p)), *score_reads(p))
        if self.bases:
            yield from self.bases.walks()
        if not self.ideal:
            yield self._tile_product("weights", parts, ("Q", "K"), ("P", *slopes), given)
        yield self._transposed_product("values", parts, "P", "dO", "dV")  # line 1
        yield self._tile_product("weight_gradients", parts, ("dO", "V"), ("dP",))  # line 2
        # Line 3. The kernel reads a row once for the sum and once for dS, the paper once.
        passes = 1 if self.ideal else 2
        twice = tuple(Move(score_rows(p, name), BEGIN) for name in ("P", "dP") for _ in range(passes))
        found = tuple(Move(score_rows(p, name), BEGIN) for name in slopes)
        moves = (*twice, *found, Move(score_rows(p, "dS"), END, write=True))
        yield passing("standard_backward_softmax", self, parts, moves, SOFTMAX_WARPS)
        moves = (
            *length_reads(p),
            Move(tensor(p, "dS"), VISIT, room=True),
            Move(tensor(p, "K"), VISIT, tile="K"),
            *writes(p, END, "dQ"),
        )
        rooms = (Room("K", self.block_cols * row_bytes(p)),)
        yield Walk("standard_backward_queries", self, parts, "gi", "j", moves, rooms, every=True)  # line 4
        yield self._transposed_product("keys", parts, "dS", "Q", "dK")  # line 5

    def _row_bytes(self, name: str) -> int:
        return value_row_bytes(self.problem) if name[-1] in "OV" else row_bytes(self.problem)

    def _tile_product(
        self, step: str, parts: tuple[Part, ...], of: tuple[str, str], out: tuple[str, ...], beside: tuple[Move, ...] = ()
    ) -> Walk:
        """out = left right^T, (Nq x d) by (Nk x d), a tile a thread block."""
        p, sizes = self.problem, self.blocks
        moves = (
            *length_reads(p),
            *beside,
            *(Move(tensor(p, name), BEGIN, tile=name) for name in of),
            *writes(p, END, *out, room=True),
        )
        rooms = tuple(Room(name, size * self._row_bytes(name)) for name, size in zip(of, sizes, strict=True))
        return Walk(f"standard_backward_{step}", self, parts, "gij", "", moves, rooms, every=True)

    def _transposed_product(self, step: str, parts: tuple[Part, ...], scores: str, right: str, out: str) -> Walk:
        """out = scores^T right, summed over the query heads, a column block a thread block."""
        p = self.problem
        moves = (
            Move(tensor(p, scores), VISIT, room=True),
            Move(tensor(p, right), VISIT, tile=right),
            *writes(p, END, out, room=True),
        )
        rooms = (Room(right, self.block_rows * self._row_bytes(right)),)
        return Walk(f"standard_backward_{step}", self, parts, "j", "gi", moves, rooms, every=True)

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        matrices = {name: Workspace((p.head_count, p.seqlen_q, p.seqlen_k), p.dtype) for name in ("P", "dP", "dS")}
        return {**matrices, **(self.bases.workspaces() if self.bases else {})}

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        shared = shared_bytes(p, *self.blocks)
        require_kernel_tiling(self, shared)
        if self.block_cols > MAX_BLOCK_ROWS:
            raise ValueError(
                f"the standard backward runs blocks of at most {MAX_BLOCK_ROWS} columns; the tiling asks for {self.tiling.used}"
            )
        width = sub_tile(p, math.gcd(*self.blocks))
        sizes = named(BR=self.block_rows, BC=self.block_cols, SUB=width, SOFTMAX_WARPS=SOFTMAX_WARPS)
        constants = *element_constants(p, with_derivative=True), *sizes, *score_type(p)
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
