"""FlashAttention, Algorithm 1 (arXiv 2205.14135): K/V blocks outside, Q blocks inside, O, l and m in HBM between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.launch.params import POINTER, Params, arrays
from cupyflash.request.problem import Problem
from cupyflash.request.score import named
from cupyflash.schedules.base import (
    GRANULE,
    WARP,
    Kernel,
    TileSchedule,
    Workspace,
    attention_params,
    element_constants,
    require_block_mask,
    require_kernel_tiling,
    row_bytes,
    sub_tile,
    value_row_bytes,
)
from cupyflash.schedules.columns_outside import (
    COLUMN,
    EARLIER,
    EVERY_ROW,
    LAST,
    SEEN_ROWS,
    UNSEEN,
    fit_paper_blocks,
)
from cupyflash.schedules.mask_tiles import block_mask_bytes
from cupyflash.schedules.moves import (
    BEGIN,
    VISIT,
    Move,
    Room,
    Walk,
    captured,
    length_reads,
    reads,
    score_reads,
    sink_reads,
    tensor,
    tile_reads,
    writes,
)
from cupyflash.tiling import TileSize


def shared_bytes(problem: Problem, block_rows: int, block_cols: int) -> int:
    """Bytes of K_j, V_j, Q_i and a block mask in shared memory; O_i, S_ij, l_i and m_i are in registers."""
    tiles = (block_cols + block_rows) * row_bytes(problem) + block_cols * value_row_bytes(problem)
    return tiles + block_mask_bytes(problem, -(-problem.seqlen_q // block_rows), block_cols)


def fit(problem: Problem, device: Device) -> TileSize:
    """The paper's blocks rounded down to tensor core tiles, and further until K_j, V_j and Q_i fit the SRAM."""
    return fit_paper_blocks(problem, device, shared_bytes, "fa1", "K, V and Q with padded rows")


class Fa1Schedule(TileSchedule):
    """Algorithm 1's schedule. O is float32 in HBM between visits: O_acc for half types, O itself for float32."""

    algorithm: ClassVar[str] = "fa1"
    params: ClassVar[Params] = attention_params(*arrays("float", POINTER, ("O_acc", "l", "m")))

    @property
    def _accumulator(self) -> str:
        return "O" if self.problem.dtype == "float32" else "O_acc"

    def _tiles(self) -> tuple[Room, ...]:
        """The rooms of K_j and V_j, which stay in SRAM while the row blocks pass, and of the row blocks' tensors."""
        p = self.problem
        if self.tiling.used == self.tiling.paper:
            # The paper's own residency: K_j, V_j, Q_i and O_i in elements of the input type.
            row, value_row = p.head_dim * p.itemsize, p.head_dim_v * p.itemsize
            beside = {"O": self.block_rows * value_row}
        else:
            row, value_row = row_bytes(p), value_row_bytes(p)
            beside = {"block_mask": block_mask_bytes(p, self.row_blocks, self.block_cols)}
        sizes = {"K": self.block_cols * row, "V": self.block_cols * value_row, **beside, "Q": self.block_rows * row}
        return tuple(Room(name, nbytes) for name, nbytes in sizes.items())

    def walks(self) -> Iterator[Walk]:
        p, state = self.problem, ("l", "m")
        sums, results = self._accumulator, ("O", *["L"] * self.lse)
        moves = (
            *length_reads(p),
            *captured(p, "head", BEGIN),
            *tile_reads(self),
            # Line 2: O = 0, l = 0, m = -inf. A row block that no column block will visit has its O and L for good.
            *writes(p, SEEN_ROWS, sums),
            *sink_reads(p, UNSEEN),
            *writes(p, UNSEEN, *results),
            *writes(p, EVERY_ROW, *state),
            *(Move(tensor(p, name), COLUMN, tile=name) for name in "KV"),  # line 6
            Move(tensor(p, "Q"), VISIT, tile="Q"),  # line 8
            *reads(p, VISIT, sums),
            *reads(p, VISIT, *state),
            *score_reads(p),
            *sink_reads(p, LAST),
            *writes(p, EARLIER, sums),  # lines 12 and 13: the last visit writes O in its own type, and L
            *writes(p, LAST, *results),
            *writes(p, VISIT, *state),
        )
        # Without row blocks nothing is launched
        yield Walk("fa1_forward", self, self.parts, "g", "ji", moves if self.row_blocks else (), self._tiles())

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        rows = (p.head_count, p.seqlen_q)
        spaces = {"l": Workspace(rows, "float32"), "m": Workspace(rows, "float32")}
        if self._accumulator == "O_acc":
            spaces["O_acc"] = Workspace((*rows, p.head_dim_v), "float32")
        return spaces

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        shared = shared_bytes(p, *self.blocks)
        require_kernel_tiling(self, shared)
        require_block_mask(self)
        own = named(BR=self.block_rows, BC=self.block_cols, SUB=sub_tile(p, self.block_cols))
        constants, threads = (*element_constants(p), *own), self.block_rows // GRANULE * WARP
        grid = self.repeats if self.row_blocks else 0
        return (Kernel("fa1_forward.cu", "fa1_forward", constants, grid, threads, shared, self.struct),)
