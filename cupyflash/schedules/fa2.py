"""FlashAttention-2's forward (arXiv 2307.08691): row blocks are thread blocks, O, l and m stay on chip to the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from cupyflash.schedules import fa2_tiles
from cupyflash.schedules.base import (
    FLOAT32,
    GRANULE,
    MASK_PARAMS,
    Kernel,
    Move,
    Phase,
    Tile,
    TileSchedule,
    Visit,
    Workspace,
    element_constants,
    length_moves,
    mask_moves,
    require_dtype,
    scores_seen,
    stride_params,
)

VARLEN_PARAMS = ("cu_seqlens_q", "cu_seqlens_k", "total_q")
# What the ring holds in a replay of block sizes that no kernel runs.
LEAST_STAGES = 2


class Fa2Schedule(TileSchedule):
    """FlashAttention-2's schedule: a phase is a row block, its visits the column blocks that it sees."""

    algorithm: ClassVar[str] = "fa2"
    varlen: ClassVar[bool] = False
    """Whether the batch is packed sequences: `VarlenSchedule`."""

    @property
    def candidate(self) -> fa2_tiles.Candidate:
        """How the kernel runs these block sizes. Raises `DoesNotFit` where it cannot."""
        require_dtype(self.problem.dtype, self.device)
        if self.block_rows % GRANULE or self.block_cols % GRANULE:
            raise ValueError(f"the fa2 kernel runs blocks in steps of {GRANULE}; the tiling asks for {self.tiling.used}")
        return fa2_tiles.choose(self.problem, self.device, (self.block_rows, self.block_cols))

    def _tiles(self) -> tuple[Tile, Tile]:
        """The Q block, which O leaves through, and the ring that K and V blocks go round."""
        p = self.problem
        if self.block_rows % GRANULE or self.block_cols % GRANULE:
            row, stages = max(p.head_dim, p.value_dim) * p.itemsize, LEAST_STAGES
        else:
            row = fa2_tiles.row_size(p)
            best = next(iter(fa2_tiles.candidates(p, self.device, (self.block_rows, self.block_cols))))
            stages = LEAST_STAGES if best.rejected else best.tile.stages
        return Tile("Q", self.block_rows * row), Tile("K, V", stages * self.block_cols * row)

    def _row_block(self, times: int, rows: int, full_visits: int, tail_visits: int, tail_cols: int) -> Phase:
        """`times` row blocks of `rows` rows that visit full and ragged column blocks so often in all, or see none."""
        p = self.problem
        visits = tuple(
            Visit(
                count,
                (
                    Move("K", cols * p.head_dim, p.itemsize, tile="K, V"),
                    Move("V", cols * p.value_dim, p.itemsize, tile="K, V"),
                ),
            )
            for count, cols in ((full_visits, self.block_cols), (tail_visits, tail_cols))
            if count
        )
        enter = list(length_moves(p))
        if visits:
            enter.append(Move("Q", rows * p.head_dim, p.itemsize, tile="Q"))
        leave = [Move("O", rows * p.value_dim, p.itemsize, write=True, tile="Q")]
        if self.lse:
            leave.append(Move("L", rows, FLOAT32, write=True))
        return Phase(times, enter=tuple(enter), visits=visits, leave=tuple(leave), tiles=self._tiles())

    def _visits(self, blocks: np.ndarray, keys: int) -> np.ndarray:
        """Column blocks that each row block in `blocks` visits."""
        p = self.problem
        last_row = np.minimum((blocks + 1) * self.block_rows, p.seqlen_q) - 1
        seen = np.clip(last_row + p.diagonal + 1, 0, keys) if p.causal else np.full_like(blocks, keys)
        visits: np.ndarray = -(-seen // self.block_cols)
        return visits

    def phases(self, *, literal: bool = False, keys: int | None = None) -> Iterator[Phase]:
        p = self.problem
        keys = p.seqlen_k if keys is None else keys
        if self.row_blocks == 0:
            return
        col_blocks = -(-keys // self.block_cols)
        tail_rows = p.seqlen_q - (self.row_blocks - 1) * self.block_rows
        tail_cols = keys - (col_blocks - 1) * self.block_cols
        every = np.arange(self.row_blocks)
        visits = self._visits(every, keys)
        last = every == self.row_blocks - 1
        groups = every[:, None] if literal else [every[mask] for mask in (~last & (visits == 0), ~last & (visits > 0), last)]
        for blocks in groups:
            if not len(blocks):
                continue
            closing = int((visits[blocks] == col_blocks).sum()) if col_blocks else 0
            rows = tail_rows if blocks[0] == self.row_blocks - 1 else self.block_rows
            yield self._row_block(len(blocks), rows, int(visits[blocks].sum()) - closing, closing, tail_cols)
        yield Phase(1, enter=mask_moves(p, scores_seen(p, range(p.seqlen_q), range(keys))))

    def workspaces(self) -> Mapping[str, Workspace]:
        return {}

    def kernels(self) -> tuple[Kernel, ...]:
        p, best = self.problem, self.candidate
        tile = best.tile
        constants = (
            *element_constants(p),
            ("BR", tile.block_rows),
            ("BC", tile.block_cols),
            ("WARP_ROWS", tile.warp_rows),
            ("STAGES", tile.stages),
            ("BLOCKS", tile.blocks),
            ("Q_IN_REGS", int(tile.q_in_regs)),
            ("SCALE_FIRST", int(p.bias or p.softmax_scale <= 0)),
            ("VARLEN", int(self.varlen)),
        )
        sizes = ("Nq", "Nk", "heads", "group", "scale")
        params = (*("Q", "K", "V", "O", "L"), *sizes, *stride_params("QKVO"), *MASK_PARAMS, *VARLEN_PARAMS)
        grid = self.repeats * self.row_blocks
        return (Kernel("fa2_forward.cu", "fa2_forward", constants, grid, tile.threads, best.shared_bytes, params),)
