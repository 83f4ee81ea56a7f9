"""FlashAttention-2's forward (arXiv 2307.08691): row blocks are thread blocks, O, l and m stay on chip to the end.

Theory and replay only: this version has no kernel for it yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from cupyflash.device import Device
from cupyflash.problem import Problem
from cupyflash.schedules.base import (
    FLOAT32,
    GRANULE,
    Kernel,
    Move,
    Phase,
    Tile,
    TileSchedule,
    Visit,
    Workspace,
    length_moves,
    mask_moves,
    row_bytes,
    scores_seen,
    value_row_bytes,
)
from cupyflash.tiling import TileSize, shrink_to_fit

# Rows and columns to start from; each is halved until Q and two stages of K and V fit.
WIDEST = (128, 64)
STAGES = 2


def fit(problem: Problem, device: Device) -> TileSize:
    """128 x 64, halved until Q_i and two stages of K_j and V_j fit the SRAM."""

    def need(block_rows: int, block_cols: int) -> int:
        return (block_rows + STAGES * block_cols) * row_bytes(problem) + STAGES * block_cols * value_row_bytes(problem)

    def smaller(block_rows: int, block_cols: int) -> tuple[int, int] | None:
        if block_rows == block_cols == GRANULE:
            return None
        return (block_rows // 2, block_cols) if block_rows > block_cols else (block_rows, block_cols // 2)

    what = f"fa2 at head_dim {problem.head_dim} {problem.dtype}"
    rows, cols = shrink_to_fit(WIDEST, smaller, need, device, what)
    reason = f"Q and {STAGES} stages of K and V: {need(rows, cols):,} of {device.sram_per_block:,} bytes"
    return TileSize(rows, cols, reason)


class Fa2Schedule(TileSchedule):
    """FlashAttention-2's schedule: a phase is a row block, its visits the column blocks that it sees."""

    algorithm: ClassVar[str] = "fa2"

    def _row_block(self, times: int, rows: int, full_visits: int, tail_visits: int, tail_cols: int) -> Phase:
        """`times` row blocks of `rows` rows that visit full and ragged column blocks so often in all."""
        p = self.problem
        row, value_row = row_bytes(p), value_row_bytes(p)
        tiles = (
            Tile("Q", self.block_rows * row),
            Tile("K", STAGES * self.block_cols * row),
            Tile("V", STAGES * self.block_cols * value_row),
        )
        visits = tuple(
            Visit(
                count,
                (
                    Move("K", cols * p.head_dim, p.itemsize, tile="K"),
                    Move("V", cols * p.value_dim, p.itemsize, tile="V"),
                ),
            )
            for count, cols in ((full_visits, self.block_cols), (tail_visits, tail_cols))
            if count
        )
        leave = [Move("O", rows * p.value_dim, p.itemsize, write=True)]
        if self.lse:
            leave.append(Move("L", rows, FLOAT32, write=True))
        return Phase(
            times,
            enter=(*length_moves(p), Move("Q", rows * p.head_dim, p.itemsize, tile="Q")),
            visits=visits,
            leave=tuple(leave),
            tiles=tiles,
        )

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
        groups = every[:, None] if literal else (every[:-1], every[-1:])
        for blocks in groups:
            if not len(blocks):
                continue
            visits = self._visits(blocks, keys)
            closing = int((visits == col_blocks).sum()) if col_blocks else 0
            rows = tail_rows if blocks[0] == self.row_blocks - 1 else self.block_rows
            yield self._row_block(len(blocks), rows, int(visits.sum()) - closing, closing, tail_cols)
        yield Phase(1, enter=mask_moves(p, scores_seen(p, range(p.seqlen_q), range(keys))))

    def workspaces(self) -> Mapping[str, Workspace]:
        return {}

    def kernels(self) -> tuple[Kernel, ...]:
        raise ValueError("algorithm 'fa2' has theory and replay, but no kernel yet; the kernels are 'fa1' and 'standard'")
