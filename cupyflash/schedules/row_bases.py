"""m and log(l) of each row, which a backward pass computes again: the numbers to which its weights are relative (row_bases.cu).

A call passes on only L, which float32 rounds; weights of float32 would have the error of that. Those of half types do not, unless L
is very large: only the device knows such rows, and their cost is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.launch.params import Params
from cupyflash.request.problem import Problem
from cupyflash.request.score import named
from cupyflash.schedules.backward import BackwardSchedule, RowBlocksOutside
from cupyflash.schedules.base import (
    GRANULE,
    WARP,
    Kernel,
    Workspace,
    element_constants,
    padded_dim,
    tile_constants,
    total_bytes,
)
from cupyflash.schedules.mask_tiles import kept_bytes, words
from cupyflash.schedules.moves import (
    BEGIN,
    END,
    SEEN,
    VISIT,
    Move,
    Room,
    Walk,
    passing,
    reads,
    score_reads,
    search_reads,
    sink_reads,
    tensor,
    writes,
)
from cupyflash.schedules.parts import Part
from cupyflash.tiling import DoesNotFit, TileSize, Tiling

# Rows and columns, the best first
SIZES = (64, 48, 32, 16)


def has_bases(problem: Problem) -> bool:
    """True if the weights of every row are relative to its own m and l: EXACT in weight.cuh."""
    return problem.dtype == "float32"


def given_floats(problem: Problem) -> int:
    """The number of floats to which the weights of a row are relative."""
    return 2 if has_bases(problem) else 1


def given_name(problem: Problem) -> str:
    """The name of the tensor that has a row's base: its m and l, or L."""
    return "bases" if has_bases(problem) else "L"


def _rooms(problem: Problem, block_rows: int, block_cols: int) -> tuple[Room, ...]:
    row = padded_dim(problem.head_dim) * problem.itemsize
    kept = kept_bytes(problem, words(problem.seqlen_k, block_cols))
    return Room("Q", block_rows * row), Room("K", block_cols * row), Room("block_mask", kept)


def fit(problem: Problem, device: Device, within: tuple[int, int] | None) -> Tiling:
    """The largest blocks that fit the SRAM; those of a block mask, `within`, are whole ones of them."""
    for rows in SIZES:
        for cols in SIZES:
            divides = within is None or (within[0] % rows == 0 and within[1] % cols == 0)
            if divides and total_bytes(_rooms(problem, rows, cols)) <= device.sram_per_block:
                made = TileSize(rows, cols, "the largest that fits")
                return Tiling(made, made, made)
    least = total_bytes(_rooms(problem, GRANULE, GRANULE))
    raise DoesNotFit(
        f"a row's m and l at head_dim {problem.head_dim} {problem.dtype} take at least {least:,} bytes of SRAM; "
        f"{device.name} gives a block {device.sram_per_block:,} bytes"
    )


@dataclass(frozen=True)
class RowBasesSchedule(RowBlocksOutside):
    """The forward's S, once more.

    It comes before the kernels of another schedule and takes their struct, `given`.
    """

    algorithm: ClassVar[str] = "row_bases"

    given: Params = field(kw_only=True)
    skips: bool = False

    @classmethod
    def before(cls, schedule: BackwardSchedule) -> RowBasesSchedule:
        """The schedule for kernels whose blocks a block mask has."""
        p, device, blocks = schedule.problem, schedule.device, schedule.blocks
        within = None if p.options.block_mask is None else blocks
        return cls(p, device, fit(p, device, within), mask_blocks=within, given=schedule.struct)

    @property
    def struct(self) -> Params:
        return self.given

    def _tiles(self) -> tuple[Room, ...]:
        return _rooms(self.problem, *self.blocks)

    def walks(self, parts: tuple[Part, ...] | None = None) -> Iterator[Walk]:
        p, parts = self.problem, self.parts if parts is None else parts
        if has_bases(p):
            moves = (
                *reads(p, SEEN, "Q", tile="Q"),
                Move(tensor(p, "K"), VISIT, tile="K"),
                *score_reads(p),
                *sink_reads(p, END),
                *reads(p, END, "L"),
                *writes(p, END, "bases"),
            )
            yield from self.tile_walks(parts)
            yield self.row_walk("row_bases", parts, moves, self._tiles())
            return
        looked = passing("row_bases", self, parts, reads(p, BEGIN, "L"), self.block_rows)
        if self.packed is None:
            yield looked
        else:
            moves = (*search_reads(self.packed, "q"), *looked.moves)
            yield replace(looked, block="gI", moves=moves, streamed=0, works=self.grid)

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        shape = (p.head_count, p.seqlen_q) if self.packed is None else (p.heads, self.packed.total_q)
        return {"bases": Workspace((*shape, 2), "float32"), **self.tile_workspaces()}

    def kernels(self) -> tuple[Kernel, ...]:
        rows, cols = self.shares
        constants = (
            *element_constants(self.problem.asking(dropout=False)),
            *named(BR=self.block_rows, BC=self.block_cols, KEPT_ROWS=rows, KEPT_COLS=cols),
            *named(VARLEN=int(self.problem.options.packed)),
            *tile_constants(self),
        )
        threads = self.block_rows // GRANULE * WARP
        shared = total_bytes(self._tiles())
        return (
            *self.tile_kernels(),
            Kernel("row_bases.cu", "row_bases", constants, self.grid, threads, shared, self.struct),
        )
