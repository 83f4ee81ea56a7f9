"""FlashAttention, Algorithm 4 (arXiv 2205.14135, appendix B.4): K/V blocks outside, Q blocks inside, dQ in HBM between.

For half types L, one float a row, stands for the paper's l and m: diag(l)^-1 exp(S - m) = exp(S - L). Of float32 a kernel before
finds m and log(l) (row_bases.py), but in the paper's own count, which has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.launch.params import POINTER, Field, Params
from cupyflash.request.problem import Problem
from cupyflash.request.score import named
from cupyflash.schedules.backward import BackwardSchedule, gradient_params
from cupyflash.schedules.base import (
    GRANULE,
    ROW_PADDING_BYTES,
    WARP,
    Kernel,
    Workspace,
    element_constants,
    padded_dim,
    require_block_mask,
    require_kernel_tiling,
    row_bytes,
    total_bytes,
    value_row_bytes,
)
from cupyflash.schedules.columns_outside import (
    COLUMN,
    COLUMN_END,
    EARLIER,
    LAST,
    SEEN_ROWS,
    UNSEEN,
    fit_paper_blocks,
)
from cupyflash.schedules.mask_tiles import block_mask_bytes
from cupyflash.schedules.moves import (
    BEGIN,
    FLOAT32,
    VISIT,
    Move,
    Room,
    Walk,
    captured,
    length_reads,
    reads,
    score_reads,
    tensor,
    tile_reads,
    writes,
)
from cupyflash.schedules.row_bases import RowBasesSchedule, given_floats, given_name, has_bases
from cupyflash.tiling import TileSize

# Queries of S^T in registers at a time: S^T and dP^T together take as many registers of a thread.
SUB_TILES = (32, 16)


def tiles(problem: Problem, block_rows: int, block_cols: int) -> dict[str, Room]:
    """The rooms in shared memory, by tensor: dK~ and dV~ are float32 sums, all others elements in padded rows."""
    p, row, value_row = problem, row_bytes(problem), value_row_bytes(problem)
    sizes = {
        "dK": block_cols * padded_dim(p.head_dim) * FLOAT32,
        "dV": block_cols * padded_dim(p.head_dim_v) * FLOAT32,
        "K": block_cols * row,
        "V": block_cols * value_row,
        "block_mask": block_mask_bytes(p, p.group * -(-p.seqlen_q // block_rows), block_cols),
        "Q": block_rows * row,
        "dO": block_rows * value_row,
        "dS": block_cols * (padded_dim(block_rows) * p.itemsize + ROW_PADDING_BYTES),
        "L": given_floats(p) * block_rows * FLOAT32,
        "D": block_rows * FLOAT32,
    }
    return {name: Room(name, nbytes) for name, nbytes in sizes.items()}


def shared_bytes(problem: Problem, block_rows: int, block_cols: int) -> int:
    """Bytes of shared memory; S^T, dP^T, O_i and dQ_i are in registers, some of their columns at a time."""
    return total_bytes(tiles(problem, block_rows, block_cols).values())


def fit(problem: Problem, device: Device) -> TileSize:
    """The paper's blocks rounded down to tensor core tiles, and further until the kernel's tiles fit the SRAM."""
    return fit_paper_blocks(problem, device, shared_bytes, "fa1's backward", "K, V, dK and dV in float32, Q, dO and dS")


@dataclass(frozen=True)
class Fa1BackwardSchedule(BackwardSchedule):
    """Algorithm 4's schedule. dQ is float32 in HBM between visits: dQ_acc for half types, dQ itself for float32.

    It is always deterministic: a thread block sums for all row blocks of its key head, in their order.
    """

    algorithm: ClassVar[str] = "fa1"
    params: ClassVar[Params] = gradient_params(Field("dQ_acc", "float", POINTER))

    @property
    def bases(self) -> RowBasesSchedule | None:
        """The kernel that finds m and l, if they are needed."""
        exact = has_bases(self.problem) and self.tiling.used != self.tiling.paper
        return RowBasesSchedule.before(self) if exact else None

    @property
    def _accumulator(self) -> str:
        return "dQ" if self.problem.dtype == "float32" else "dQ_acc"

    def _tiles(self) -> tuple[Room, ...]:
        """The tiles that stay for an outer step, and those that a visit loads."""
        p = self.problem
        if self.tiling.used == self.tiling.paper:
            # Line 2's ceil(M / 4d) is for four tiles of Bc rows in elements of the input type. It leaves no room for what a
            # visit brings: that passes through.
            rows = {"K": p.head_dim, "V": p.head_dim_v, "dK": p.head_dim, "dV": p.head_dim_v}
            return tuple(Room(name, self.block_cols * d * p.itemsize) for name, d in rows.items())
        return tuple(tiles(p, *self.blocks).values())

    def walks(self) -> Iterator[Walk]:
        p, sums, rooms = self.problem, self._accumulator, self._tiles()
        names = {room.name for room in rooms}

        def load(name: str) -> Move:
            return Move(tensor(p, name), VISIT, tile=name if name in names else None)

        given = replace(load(given_name(p)), tile="L") if self.bases else load("L")
        moves = (
            *length_reads(p),
            *tile_reads(self),
            # Line 5: dQ = 0, dK = 0, dV = 0. A row block that no column block will visit has its dQ for good.
            *writes(p, SEEN_ROWS, sums),
            *writes(p, UNSEEN, "dQ"),
            *writes(p, BEGIN, "dK", "dV", room=True),
            *(Move(tensor(p, name), COLUMN, tile=name) for name in "KV"),  # line 7
            *captured(p, "head", COLUMN),
            *(load(name) for name in ("Q", "dO", "O")),  # line 10
            given,
            *score_reads(p),
            *reads(p, VISIT, sums),
            *writes(p, EARLIER, sums),  # line 21: the last visit writes dQ in its own type
            *writes(p, LAST, "dQ"),
            *(Move(tensor(p, name), COLUMN_END, write=True, tile=name) for name in ("dK", "dV")),  # line 24
        )
        if self.bases:
            yield from self.bases.walks()
        yield Walk("fa1_backward", self, self.parts, "", "jgi", moves, rooms)

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        if self.bases:
            return self.bases.workspaces()
        return {"dQ_acc": Workspace((p.head_count, p.seqlen_q, p.head_dim), "float32")} if self._accumulator == "dQ_acc" else {}

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        shared = shared_bytes(p, *self.blocks)
        require_kernel_tiling(self, shared)
        require_block_mask(self)
        sub_tile = next(width for width in SUB_TILES if self.block_rows % width == 0)
        constants = *element_constants(p, with_derivative=True), *named(BR=self.block_rows, BC=self.block_cols, SUB=sub_tile)
        threads = self.block_rows // GRANULE * WARP
        before = self.bases.kernels() if self.bases else ()
        return (*before, Kernel("fa1_backward.cu", "fa1_backward", constants, self.repeats, threads, shared, self.struct))
