"""FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2): column blocks are thread blocks, dK and dV stay on chip."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cupyflash.device import Device
from cupyflash.problem import Problem
from cupyflash.schedules.backward import BackwardSchedule
from cupyflash.schedules.base import (
    BLOCK_MASK_PARAMS,
    FLOAT32,
    GRANULE,
    MASK_PARAMS,
    WARP,
    Kernel,
    Move,
    Phase,
    Tile,
    Visit,
    Visited,
    Workspace,
    block_mask_moves,
    element_constants,
    length_moves,
    mask_moves,
    padded_dim,
    require_dtype,
    stride_params,
    visited_scores,
)
from cupyflash.tiling import DoesNotFit, TileSize

VARLEN_PARAMS = ("cu_seqlens_q", "cu_seqlens_k", "total_q")
ROW_THREADS = 128
MOST_WARPS = 8


def shared_bytes(problem: Problem, block_rows: int, block_cols: int, stages: int) -> int:
    """Bytes of K_j and V_j, dS, the Q and dO blocks with L and D, and the column block's part of a block mask."""
    row = (padded_dim(problem.head_dim) + padded_dim(problem.value_dim)) * problem.itemsize
    kept = 4 * math.ceil(math.ceil(problem.seqlen_q / block_rows) / 32) if problem.block_mask is not None else 0
    scores = block_cols * block_rows * problem.itemsize
    return block_cols * row + scores + stages * block_rows * (row + 2 * FLOAT32) + kept


@dataclass(frozen=True)
class Launch:
    """One launch of the main kernel: the gradients that it makes."""

    dk: bool
    dv: bool


def launches(problem: Problem) -> tuple[Launch, ...]:
    """dK and dV together, or one after the other where a warp's registers do not hold both."""
    if padded_dim(problem.head_dim) + padded_dim(problem.value_dim) <= MOST_ACCUMULATORS[problem.itemsize]:
        return (Launch(dk=True, dv=True),)
    return Launch(dk=False, dv=True), Launch(dk=True, dv=False)


# d + d_v of the gradients of 16 keys that a warp has in registers, by item size.
MOST_ACCUMULATORS = {2: 256, 4: 128}


def stages_for(problem: Problem, device: Device, block_rows: int, block_cols: int) -> int | None:
    """How many Q and dO blocks there is room for: two where they fit, None where not even one does."""
    fitting = [n for n in (2, 1) if shared_bytes(problem, block_rows, block_cols, n) <= device.sram_per_block]
    return fitting[0] if fitting else None


def fit(problem: Problem, device: Device) -> TileSize:
    """The largest blocks that registers and SRAM hold."""
    d = max(problem.head_dim, problem.value_dim)
    most_rows = (64 if d <= 128 else 32) if problem.itemsize == 2 else 32 if d <= 64 else 16
    for block_cols in (128, 64, 32, 16):
        for block_rows in (64, 32, 16):
            if block_rows <= most_rows and stages_for(problem, device, block_rows, block_cols):
                need = shared_bytes(problem, block_rows, block_cols, stages_for(problem, device, block_rows, block_cols) or 1)
                return TileSize(block_rows, block_cols, f"{need:,} of {device.sram_per_block:,} bytes")
    raise DoesNotFit(
        f"fa2's backward at head_dim {problem.head_dim} {problem.dtype} needs at least "
        f"{shared_bytes(problem, GRANULE, GRANULE, 1):,} bytes of SRAM; {device.name} gives a block {device.sram_per_block:,} bytes"
    )


@dataclass(frozen=True)
class Fa2BackwardSchedule(BackwardSchedule):
    """A phase is a column block of a key head, its visits the row blocks that see it, of every query head of the group."""

    algorithm: ClassVar[str] = "fa2"

    @property
    def stages(self) -> int:
        return stages_for(self.problem, self.device, self.block_rows, self.block_cols) or 1

    def _tiles(self) -> tuple[Tile, ...]:
        p, size = self.problem, self.problem.itemsize
        row, value_row = padded_dim(p.head_dim) * size, padded_dim(p.value_dim) * size
        kept = 4 * math.ceil(self.row_blocks / 32) if p.block_mask is not None else 0
        return (
            Tile("K", self.block_cols * row),
            Tile("V", self.block_cols * value_row),
            Tile("dS", self.block_cols * self.block_rows * size),
            Tile("Q, dO", self.stages * self.block_rows * (row + value_row)),
            Tile("L, D", self.stages * 2 * self.block_rows * FLOAT32),
            Tile("block_mask", kept),
        )

    def _rows(self) -> np.ndarray:
        """Rows of each row block."""
        starts = np.arange(self.row_blocks) * self.block_rows
        rows: np.ndarray = np.minimum(starts + self.block_rows, self.problem.seqlen_q) - starts
        return rows

    def _visit(self, launch: Launch, times: int, rows: int) -> Visit:
        p = self.problem
        moves = [
            Move("Q", rows * p.head_dim, p.itemsize, tile="Q, dO"),
            Move("dO", rows * p.value_dim, p.itemsize, tile="Q, dO"),
            Move("L", rows, FLOAT32, tile="L, D"),
        ]
        if launch.dk:
            moves.append(Move("D", rows, FLOAT32, tile="L, D"))
            if not self.deterministic:
                # An atomic reads and writes.
                moves += [Move("dQ_acc", rows * p.head_dim, FLOAT32, write=write) for write in (False, True)]
        return Visit(times, tuple(moves))

    def _column_block(self, launch: Launch, times: int, cols: int, visits: tuple[Visit, ...]) -> Phase:
        """`times` column blocks that are visited, of `cols` keys that there are."""
        p = self.problem
        enter = [Move("K", cols * p.head_dim, p.itemsize, tile="K")]
        if launch.dk:
            enter.append(Move("V", cols * p.value_dim, p.itemsize, tile="V"))
        return Phase(times, enter=tuple(enter), visits=visits, tiles=self._tiles())

    def phases(self, *, literal: bool = False, keys: int | None = None, block_mask: np.ndarray | None = None) -> Iterator[Phase]:
        p, group = self.problem, self.group
        keys = p.seqlen_k if keys is None else keys
        heads = [Visited.of(self, keys, None)] if block_mask is None else [Visited.of(self, keys, one) for one in block_mask]
        alike = group if block_mask is None else 1  # heads that visit the same

        every = (p.seqlen_q * p.value_dim, p.itemsize)  # kernel 1, and line 5 of the paper: D, dQ = 0
        enter = [Move("O", *every), Move("dO", *every), Move("D", p.seqlen_q, FLOAT32, write=True)]
        sums = Move("dQ_acc", p.seqlen_q * p.head_dim, FLOAT32)
        if not self.deterministic:
            enter.append(Move("dQ_acc", sums.elements, FLOAT32, write=True))
        yield Phase(group, enter=tuple(enter))

        for launch in launches(p):
            yield from self._launch(launch, literal, keys, heads, alike)
            # Every block reads its batch's length, and what the block mask says of it.
            yield Phase(self.col_blocks, enter=length_moves(p))
            yield Phase(alike, enter=block_mask_moves(p, sum(each.blocks for each in heads)))
            yield Phase(alike, enter=mask_moves(p, sum(visited_scores(self, each, keys) for each in heads)))
            gradients = (("dK", p.head_dim, launch.dk), ("dV", p.value_dim, launch.dv))
            leave = (Move(name, p.seqlen_k * d, p.itemsize, write=True) for name, d, made in gradients if made)
            yield Phase(1, leave=tuple(leave))
        if not self.deterministic:
            yield Phase(group, enter=(sums,), leave=(Move("dQ", sums.elements, p.itemsize, write=True),))

    def _launch(self, launch: Launch, literal: bool, keys: int, heads: list[Visited], alike: int) -> Iterator[Phase]:
        """The column blocks that any row block visits."""
        columns = np.unique(np.concatenate([each.columns for each in heads]))
        tail = (keys - 1) // self.block_cols
        tail_cols, rows = keys - tail * self.block_cols, self._rows()
        spans = [(j, j + 1) for j in columns.tolist()] if literal else [(0, tail), (tail, tail + 1)]
        for lo, hi in spans:
            steps = int(((lo <= columns) & (columns < hi)).sum())
            if steps:
                visits = np.sum([each.count(lo, hi) for each in heads], axis=0)
                kinds = [
                    self._visit(launch, alike * int(visits[rows == extent].sum()), extent) for extent in np.unique(rows).tolist()
                ]
                yield self._column_block(launch, steps, tail_cols if lo == tail else self.block_cols, tuple(kinds))

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        rows = (p.head_count, p.seqlen_q)
        spaces = {"D": Workspace(rows, "float32")}
        if not self.deterministic:
            spaces["dQ_acc"] = Workspace((*rows, p.head_dim), "float32")
        return spaces

    def kernels(self) -> tuple[Kernel, ...]:
        p, device = self.problem, self.device
        require_dtype(p.dtype, device)
        if self.block_rows % GRANULE or self.block_cols % GRANULE or self.block_cols > MOST_WARPS * GRANULE:
            raise ValueError(
                f"the fa2 backward runs blocks in steps of {GRANULE}, with at most {MOST_WARPS * GRANULE} columns; the tiling "
                f"asks for {self.tiling.used}"
            )
        shared = shared_bytes(p, self.block_rows, self.block_cols, self.stages)
        if shared > device.sram_per_block:
            raise DoesNotFit(
                f"fa2's backward with {self.tiling.used} needs {shared:,} bytes of shared memory at head_dim {p.head_dim} "
                f"{p.dtype}; {device.name} gives a block {device.sram_per_block:,} bytes"
            )

        def constants(launch: Launch) -> tuple[tuple[str, int | str], ...]:
            return (
                *element_constants(p),
                ("BR", self.block_rows),
                ("BC", self.block_cols),
                ("WARP_KEYS", GRANULE),
                ("STAGES", self.stages),
                ("BLOCKS", 1),
                ("WITH_DK", int(launch.dk)),
                ("WITH_DV", int(launch.dv)),
                ("WITH_DQ", int(launch.dk and not self.deterministic)),
                ("VARLEN", int(p.packed)),
            )

        source, made = "fa2_backward.cu", launches(p)
        whose = ("total_q", "heads")
        # The kernels before and behind are compiled with the launch that makes dK.
        lanes = _lanes(p)
        row_grid = -(-p.head_count * p.seqlen_q * lanes // ROW_THREADS)
        rows = Kernel(
            source,
            "fa2_backward_rows",
            constants(made[-1]),
            row_grid,
            ROW_THREADS,
            0,
            ("O", "dO", "D", "dQ_acc", "rows", *whose, *stride_params(("O", "dO"))),
        )
        finish = Kernel(
            source,
            "fa2_backward_finish",
            constants(made[-1]),
            row_grid,
            ROW_THREADS,
            0,
            ("dQ_acc", "dQ", "rows", *whose, "scale", *stride_params(("dQ",))),
        )
        params = (
            *("Q", "K", "V", "dO", "L", "D", "dQ_acc", "dK", "dV", "Nq", "Nk", "heads", "group", "scale"),
            *stride_params(("Q", "K", "V", "dO", "dK", "dV")),
            *MASK_PARAMS,
            *BLOCK_MASK_PARAMS,
            *VARLEN_PARAMS,
        )
        threads = self.block_cols // GRANULE * WARP
        main = [
            Kernel(source, "fa2_backward", constants(each), self.repeats * self.col_blocks, threads, shared, params)
            for each in made
        ]
        return (rows, *main) if self.deterministic else (rows, *main, finish)


def _lanes(problem: Problem) -> int:
    """Lanes that a row has in the first and last kernel: ROW_LANES in fa2_backward.cu."""
    width = max(problem.head_dim, problem.value_dim) // 2
    return 32 if width > 16 else 16 if width > 8 else 8 if width > 4 else 4
