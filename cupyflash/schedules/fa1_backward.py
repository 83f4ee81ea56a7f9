"""FlashAttention, Algorithm 4 (arXiv 2205.14135, appendix B.4): K/V blocks outside, Q blocks inside, dQ in HBM between.

L, one float a row, stands for the paper's l and m: diag(l)^-1 exp(S - m) = exp(S - L).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cupyflash.device import Device
from cupyflash.problem import Problem
from cupyflash.schedules.backward import BackwardSchedule, require_no_dbias
from cupyflash.schedules.base import (
    BLOCK_MASK_PARAMS,
    FLOAT32,
    GRANULE,
    MASK_PARAMS,
    MAX_BLOCK_ROWS,
    ROW_PADDING_BYTES,
    WARP,
    Kernel,
    Move,
    Phase,
    Tile,
    Visit,
    Visited,
    Workspace,
    block_mask_bytes,
    block_mask_moves,
    element_constants,
    length_moves,
    mask_moves,
    padded_dim,
    require_block_mask,
    require_kernel_tiling,
    row_bytes,
    scores_seen,
    stride_params,
    value_row_bytes,
    visited_scores,
)
from cupyflash.tiling import TileSize, paper_blocks, round_down, shrink_to_fit

# Queries of S^T in registers at a time: S^T and dP^T together take as many registers of a thread.
SUB_TILES = (32, 16)


def tiles(problem: Problem, block_rows: int, block_cols: int) -> dict[str, Tile]:
    """What is in shared memory, by tensor: dK~ and dV~ are float32 sums, all else elements in padded rows."""
    p, row, value_row = problem, row_bytes(problem), value_row_bytes(problem)
    query_heads = p.heads // p.kv_heads if p.kv_heads else 1
    sizes = {
        "dK": block_cols * padded_dim(p.head_dim) * FLOAT32,
        "dV": block_cols * padded_dim(p.value_dim) * FLOAT32,
        "K": block_cols * row,
        "V": block_cols * value_row,
        "Q": block_rows * row,
        "dO": block_rows * value_row,
        "dS": block_cols * (padded_dim(block_rows) * p.itemsize + ROW_PADDING_BYTES),
        "L": block_rows * FLOAT32,
        "D": block_rows * FLOAT32,
        "block_mask": block_mask_bytes(p, query_heads * -(-p.seqlen_q // block_rows), block_cols),
    }
    return {name: Tile(name, nbytes) for name, nbytes in sizes.items()}


def shared_bytes(problem: Problem, block_rows: int, block_cols: int) -> int:
    """Bytes of shared memory; S^T, dP^T, O_i and dQ_i are in registers, some of their columns at a time."""
    return sum(tile.nbytes for tile in tiles(problem, block_rows, block_cols).values())


def fit(problem: Problem, device: Device) -> TileSize:
    """The paper's blocks rounded down to tensor core tiles, and further until the kernel's tiles fit the SRAM."""
    paper = paper_blocks(problem, device)
    rounded = round_down(paper.block_cols, GRANULE)
    rows = min(round_down(paper.block_rows, GRANULE), MAX_BLOCK_ROWS)

    def smaller(block_rows: int, block_cols: int) -> tuple[int, int] | None:
        if block_cols == GRANULE:
            return None
        return min(block_rows, block_cols - GRANULE), block_cols - GRANULE

    block_rows, block_cols = shrink_to_fit(
        (rows, rounded),
        smaller,
        lambda r, c: shared_bytes(problem, r, c),
        device,
        f"fa1's backward at head_dim {problem.head_dim} {problem.dtype}",
    )
    reasons = [f"in steps of {GRANULE}: {rounded} columns"]
    if block_cols < rounded:
        reasons.append(f"K, V, dK and dV in float32, Q, dO and dS fit at {block_cols} columns")
    if rows == MAX_BLOCK_ROWS < paper.block_rows:
        reasons.append(f"the register file holds {MAX_BLOCK_ROWS} rows")
    reasons.append(f"{shared_bytes(problem, block_rows, block_cols):,} of {device.sram_per_block:,} bytes")
    return TileSize(block_rows, block_cols, "; ".join(reasons))


@dataclass(frozen=True)
class Fa1BackwardSchedule(BackwardSchedule):
    """Algorithm 4's schedule. dQ is float32 in HBM between visits: dQ_acc for half types, dQ itself for float32.

    It is deterministic as it is: a thread block sums for all row blocks of its key head, in their order.
    """

    algorithm: ClassVar[str] = "fa1"

    @property
    def _accumulator(self) -> str:
        return "dQ" if self.problem.dtype == "float32" else "dQ_acc"

    def _tiles(self) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
        """What stays for an outer step, and what a visit brings."""
        p = self.problem
        if self.tiling.used == self.tiling.paper:
            # Line 2's ceil(M / 4d) is for four tiles of Bc rows in elements of the input type. It leaves no room for what a
            # visit brings: that passes through.
            rows = {"K": p.head_dim, "V": p.value_dim, "dK": p.head_dim, "dV": p.value_dim}
            return tuple(Tile(name, self.block_cols * d * p.itemsize) for name, d in rows.items()), ()
        made = tiles(p, self.block_rows, self.block_cols)
        visit = tuple(made.pop(name) for name in ("Q", "dO", "dS", "L", "D"))
        return tuple(made.values()), visit

    def _initialise(self, heads: list[Visited], alike: int) -> Phase:
        """Line 5: dQ = 0, dK = 0, dV = 0. A row block that no column block will visit has its dQ for good."""
        p = self.problem
        unseen = alike * sum(int(self._rows()[visited.last < 0].sum()) for visited in heads)
        seen = self.group * p.seqlen_q - unseen
        moves = (
            *length_moves(p),
            *block_mask_moves(p, alike * sum(visited.blocks for visited in heads)),
            Move(self._accumulator, seen * p.head_dim, FLOAT32, write=True),
            Move("dQ", unseen * p.head_dim, p.itemsize, write=True),
            Move("dK", p.seqlen_k * p.head_dim, p.itemsize, write=True),
            Move("dV", p.seqlen_k * p.value_dim, p.itemsize, write=True),
        )
        return Phase(1, enter=moves)

    def _visit(self, times: int, rows: int, last: bool, masks: tuple[Move, ...] = ()) -> Visit:
        """Lines 10 to 22 for a row block of `rows` rows; its last visit writes dQ in its own type."""
        p, (_, visit_tiles) = self.problem, self._tiles()
        names = {tile.name for tile in visit_tiles}

        def load(tensor: str, d: int, itemsize: int) -> Move:
            return Move(tensor, rows * d, itemsize, tile=tensor if tensor in names else None)

        moves = (
            load("Q", p.head_dim, p.itemsize),
            load("dO", p.value_dim, p.itemsize),
            load("O", p.value_dim, p.itemsize),
            load("L", 1, FLOAT32),
            *masks,
            Move(self._accumulator, rows * p.head_dim, FLOAT32),
            Move("dQ", rows * p.head_dim, p.itemsize, write=True)
            if last
            else Move(self._accumulator, rows * p.head_dim, FLOAT32, write=True),
        )
        return Visit(times, moves, visit_tiles)

    def _outer(self, times: int, cols: int, visits: tuple[Visit, ...]) -> Phase:
        """Lines 7, 8 and 24: `cols` rows of K_j and V_j, and their gradients, stay in SRAM while the row blocks come by."""
        p, (stays, _) = self.problem, self._tiles()
        rows = (("K", p.head_dim), ("V", p.value_dim))
        return Phase(
            times,
            enter=tuple(Move(name, cols * d, p.itemsize, tile=name) for name, d in rows),
            visits=visits,
            leave=tuple(Move(f"d{name}", cols * d, p.itemsize, write=True, tile=f"d{name}") for name, d in rows),
            tiles=stays,
        )

    def phases(self, *, literal: bool = False, keys: int | None = None, block_mask: np.ndarray | None = None) -> Iterator[Phase]:
        p = self.problem
        keys = p.seqlen_k if keys is None else keys
        heads = [Visited.of(self, keys, None)] if block_mask is None else [Visited.of(self, keys, one) for one in block_mask]
        alike = self.group if block_mask is None else 1  # query heads that visit the same
        yield self._initialise(heads, alike)
        # Line 6: the column blocks that any row block of any query head visits; only the one with the last key may be short.
        columns = np.unique(np.concatenate([visited.columns for visited in heads]))
        tail = (keys - 1) // self.block_cols
        tail_cols = keys - tail * self.block_cols
        if literal:
            for j in columns.tolist():
                cols = tail_cols if j == tail else self.block_cols
                yield self._outer(1, cols, tuple(visit for each in heads * alike for visit in self._walk(j, cols, each)))
            return
        for cols, lo, hi in ((self.block_cols, 0, tail), (tail_cols, tail, tail + 1)):
            steps = int(((lo <= columns) & (columns < hi)).sum())
            if steps:
                yield self._outer(steps, cols, tuple(visit for each in heads for visit in self._count(lo, hi, each, alike)))
        # What masks read differs from visit to visit; counted, it is one sum.
        yield Phase(alike, enter=mask_moves(p, sum(visited_scores(self, each, keys) for each in heads)))

    def _walk(self, j: int, cols: int, visited: Visited) -> Iterator[Visit]:
        """The visits of outer step j by one query head, one by one."""
        p, columns = self.problem, range(j * self.block_cols, j * self.block_cols + cols)
        for i in visited.rows(j).tolist():
            rows = range(i * self.block_rows, min((i + 1) * self.block_rows, p.seqlen_q))
            yield self._visit(1, len(rows), j == visited.last[i], mask_moves(p, scores_seen(p, rows, columns)))

    def _count(self, lo: int, hi: int, visited: Visited, alike: int) -> Iterator[Visit]:
        """The visits of the outer steps from lo to hi by `alike` query heads, by kind: full or ragged row block, last or not."""
        visits, finished = visited.count(lo, hi), (lo <= visited.last) & (visited.last < hi)
        for rows in np.unique(self._rows()).tolist():
            of_kind = self._rows() == rows
            last = int(finished[of_kind].sum())
            for times, is_last in ((int(visits[of_kind].sum()) - last, False), (last, True)):
                if times:
                    yield self._visit(alike * times, rows, is_last)

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        return {"dQ_acc": Workspace((p.head_count, p.seqlen_q, p.head_dim), "float32")} if self._accumulator == "dQ_acc" else {}

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        require_no_dbias(self)
        shared = shared_bytes(p, self.block_rows, self.block_cols)
        require_kernel_tiling(self, shared)
        require_block_mask(self)
        constants = (
            *element_constants(p),
            ("BR", self.block_rows),
            ("BC", self.block_cols),
            ("SUB", next(width for width in SUB_TILES if self.block_rows % width == 0)),
        )
        params = (
            *("Q", "K", "V", "O", "dO", "L", "dQ", "dK", "dV", "dQ_acc", "Nq", "Nk", "heads", "group", "scale"),
            *stride_params(("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")),
            *MASK_PARAMS,
            *BLOCK_MASK_PARAMS,
        )
        threads = self.block_rows // GRANULE * WARP
        return (Kernel("fa1_backward.cu", "fa1_backward", constants, self.repeats, threads, shared, params),)
