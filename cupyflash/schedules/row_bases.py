"""m and log(l) of each row, which a backward pass makes again: what its weights are relative to (row_bases.cu).

A call hands on L alone, which float32 rounds; weights of float32 would be off by that. Those of half types are not, but where L is
very large: only the device knows of such rows, and what they take is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.params import Params
from cupyflash.problem import Problem
from cupyflash.schedules.backward import BackwardSchedule, RowBlocksOutside
from cupyflash.schedules.base import (
    FLOAT32,
    GRANULE,
    WARP,
    Kernel,
    Move,
    Phase,
    Room,
    Tiles,
    Visited,
    Workspace,
    element_constants,
    padded_dim,
    tile_constants,
    total_bytes,
)
from cupyflash.schedules.mask_tiles import MaskTiles, kept_bytes, words
from cupyflash.schedules.moves import block_mask_moves, head_moves, length_moves, score_moves
from cupyflash.schedules.packed import Packed
from cupyflash.tiling import DoesNotFit, TileSize, Tiling

# Rows and columns, the best first
SIZES = (64, 48, 32, 16)


def has_bases(problem: Problem) -> bool:
    """Whether the weights of every row are relative to its own m and l: EXACT in weight.cuh."""
    return problem.dtype == "float32"


def given_floats(problem: Problem) -> int:
    """Floats that say what the weights of a row are relative to."""
    return 2 if has_bases(problem) else 1


def given_move(problem: Problem, rows: int, tile: str | None = None) -> Move:
    """The reading of them for so many rows."""
    return Move("bases" if has_bases(problem) else "L", given_floats(problem) * rows, FLOAT32, tile=tile)


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
    """A phase is a row block, its visits the column blocks that it sees: the forward's S, once more.

    It comes before the kernels of another schedule and takes their struct, `given`. `skips`: whether the tiles that a mask leaves
    empty are left out. `packed`: the sequences, where they are packed.
    """

    algorithm: ClassVar[str] = "row_bases"

    given: Params = field(kw_only=True)
    skips: bool = False
    packed: Packed | None = None

    @classmethod
    def before(cls, schedule: BackwardSchedule) -> RowBasesSchedule:
        """For kernels by whose blocks a block mask is."""
        p, device, blocks = schedule.problem, schedule.device, (schedule.block_rows, schedule.block_cols)
        within = None if p.options.block_mask is None else blocks
        return cls(p, device, fit(p, device, within), mask_blocks=within, given=schedule.struct)

    @property
    def struct(self) -> Params:
        return self.given

    @property
    def together(self) -> Packed | None:
        return self.packed

    @property
    def state_words(self) -> int | None:
        return words(self.problem.seqlen_k, self.block_cols) if self.skips else None

    @property
    def mask_tiles(self) -> tuple[MaskTiles, ...]:
        return tuple(replace(each, field="query_tiles") for each in super().mask_tiles)

    @property
    def grid(self) -> int:
        """Thread blocks."""
        p = self.problem
        return p.head_count * self.row_blocks if self.packed is None else p.heads * self.packed.blocks("q", self.block_rows)

    def _tiles(self) -> tuple[Room, ...]:
        return _rooms(self.problem, self.block_rows, self.block_cols)

    def _enter(self, seen: int) -> tuple[Move, ...]:
        return (Move("Q", seen * self.problem.head_dim, self.problem.itemsize),)

    def _visit(self, cols: int) -> tuple[Move, ...]:
        return (Move("K", cols * self.problem.head_dim, self.problem.itemsize, tile="K"),)

    def _leave(self, rows: int) -> tuple[Move, ...]:
        return (Move("bases", given_floats(self.problem) * rows, FLOAT32, write=True),)

    def _beside(self, heads: list[Visited], keys: int) -> Iterator[Phase]:
        p, blocks = self.problem, self.group * self.row_blocks
        yield Phase(self.group, enter=tuple(Move(name, p.seqlen_q, FLOAT32) for name in ("L", *("sinks",) * p.options.sinks)))
        yield Phase(blocks, enter=(*length_moves(p), *head_moves(p)))
        yield Phase(1, enter=block_mask_moves(self, sum(each.blocks for each in heads)))
        yield Phase(1, enter=score_moves(self, heads, keys))

    def phases(self, *, literal: bool = False, keys: int | None = None, kept: Tiles | None = None) -> Iterator[Phase]:
        if has_bases(self.problem):
            yield from super().phases(literal=literal, keys=keys, kept=kept)
        else:
            yield Phase(self.group, enter=(Move("L", self.problem.seqlen_q, FLOAT32),))

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        shape = (p.head_count, p.seqlen_q) if self.packed is None else (p.heads, self.packed.total_q)
        return {"bases": Workspace((*shape, 2), "float32"), **self.tile_workspaces()}

    def kernels(self) -> tuple[Kernel, ...]:
        rows, cols = self.shares
        constants = (
            *element_constants(self.problem.asking(dropout=False)),
            ("BR", self.block_rows),
            ("BC", self.block_cols),
            ("KEPT_ROWS", rows),
            ("KEPT_COLS", cols),
            ("VARLEN", int(self.problem.options.packed)),
            *tile_constants(self),
        )
        threads = self.block_rows // GRANULE * WARP
        shared = total_bytes(self._tiles())
        return (
            *self.tile_kernels(),
            Kernel("row_bases.cu", "row_bases", constants, self.grid, threads, shared, self.struct),
        )
