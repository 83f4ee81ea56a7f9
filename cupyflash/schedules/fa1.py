"""FlashAttention, Algorithm 1 (arXiv 2205.14135): K/V blocks outside, Q blocks inside, O, l and m in HBM between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from cupyflash.device import Device
from cupyflash.problem import Problem
from cupyflash.schedules.base import (
    BLOCK_MASK_PARAMS,
    FLOAT32,
    GRANULE,
    MASK_PARAMS,
    MAX_BLOCK_ROWS,
    WARP,
    Kernel,
    Move,
    Phase,
    Tile,
    TileSchedule,
    Visit,
    Visited,
    Workspace,
    block_mask_bytes,
    block_mask_moves,
    element_constants,
    length_moves,
    mask_moves,
    require_block_mask,
    require_kernel_tiling,
    row_bytes,
    scores_seen,
    stride_params,
    sub_tile,
    value_row_bytes,
    visited_scores,
)
from cupyflash.tiling import TileSize, paper_blocks, round_down, shrink_to_fit


def shared_bytes(problem: Problem, block_rows: int, block_cols: int) -> int:
    """Bytes of K_j, V_j, Q_i and a block mask in shared memory; O_i, S_ij, l_i and m_i are in registers."""
    tiles = (block_cols + block_rows) * row_bytes(problem) + block_cols * value_row_bytes(problem)
    return tiles + block_mask_bytes(problem, -(-problem.seqlen_q // block_rows), block_cols)


def fit(problem: Problem, device: Device) -> TileSize:
    """The paper's blocks rounded down to tensor core tiles, and further until K_j, V_j and Q_i fit the SRAM."""
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
        f"fa1 at head_dim {problem.head_dim} {problem.dtype}",
    )
    reasons = [f"in steps of {GRANULE}: {rounded} columns"]
    if block_cols < rounded:
        reasons.append(f"K, V and Q with padded rows fit at {block_cols} columns")
    if rows == MAX_BLOCK_ROWS < paper.block_rows:
        reasons.append(f"the register file holds {MAX_BLOCK_ROWS} rows")
    reasons.append(f"{shared_bytes(problem, block_rows, block_cols):,} of {device.sram_per_block:,} bytes")
    return TileSize(block_rows, block_cols, "; ".join(reasons))


class Fa1Schedule(TileSchedule):
    """Algorithm 1's schedule. O is float32 in HBM between visits: O_acc for half types, O itself for float32."""

    algorithm: ClassVar[str] = "fa1"

    @property
    def _accumulator(self) -> str:
        return "O" if self.problem.dtype == "float32" else "O_acc"

    def _tiles(self) -> dict[str, Tile]:
        p = self.problem
        if self.tiling.used == self.tiling.paper:
            # The paper's own residency: K_j, V_j, Q_i and O_i in elements of the input type.
            row, value_row = p.head_dim * p.itemsize, p.value_dim * p.itemsize
            sizes = {"O": self.block_rows * value_row}
        else:
            row, value_row = row_bytes(p), value_row_bytes(p)
            sizes = {}
        sizes |= {"K": self.block_cols * row, "V": self.block_cols * value_row, "Q": self.block_rows * row}
        return {name: Tile(name, nbytes) for name, nbytes in sizes.items()}

    def _initialise(self, visited: Visited) -> Phase:
        """Line 2: O = 0, l = 0, m = -inf. A row block that no column block will visit has its O and L for good."""
        p = self.problem
        unseen = int(self._rows()[visited.last < 0].sum())
        moves = [
            *length_moves(p),
            *block_mask_moves(p, visited.blocks),
            Move(self._accumulator, (p.seqlen_q - unseen) * p.value_dim, FLOAT32, write=True),
            Move("O", unseen * p.value_dim, p.itemsize, write=True),
            Move("l", p.seqlen_q, FLOAT32, write=True),
            Move("m", p.seqlen_q, FLOAT32, write=True),
        ]
        if self.lse:
            moves.append(Move("L", unseen, FLOAT32, write=True))
        return Phase(1, enter=tuple(moves))

    def _visit(self, times: int, rows: int, last: bool, masks: tuple[Move, ...] = ()) -> Visit:
        """Lines 8 to 13 for a row block of `rows` rows; its last visit writes O in the output's own type, and L."""
        p, tiles = self.problem, self._tiles()
        moves = [
            Move("Q", rows * p.head_dim, p.itemsize, tile="Q"),
            *masks,
            Move(self._accumulator, rows * p.value_dim, FLOAT32),
            Move("l", rows, FLOAT32),
            Move("m", rows, FLOAT32),
            Move("O", rows * p.value_dim, p.itemsize, write=True)
            if last
            else Move(self._accumulator, rows * p.value_dim, FLOAT32, write=True),
            Move("l", rows, FLOAT32, write=True),
            Move("m", rows, FLOAT32, write=True),
        ]
        if last and self.lse:
            moves.append(Move("L", rows, FLOAT32, write=True))
        return Visit(times, tuple(moves), tuple(tile for name, tile in tiles.items() if name in "QO"))

    def _outer(self, times: int, cols: int, visits: tuple[Visit, ...]) -> Phase:
        """Line 6: K_j and V_j, `cols` rows of them, stay in SRAM while the row blocks come by."""
        p, tiles = self.problem, self._tiles()
        load = (
            Move("K", cols * p.head_dim, p.itemsize, tile="K"),
            Move("V", cols * p.value_dim, p.itemsize, tile="V"),
        )
        kept = Tile("block_mask", block_mask_bytes(p, self.row_blocks, self.block_cols))
        return Phase(times, enter=load, visits=visits, tiles=(tiles["K"], tiles["V"], kept))

    def phases(self, *, literal: bool = False, keys: int | None = None, block_mask: np.ndarray | None = None) -> Iterator[Phase]:
        p = self.problem
        keys = p.seqlen_k if keys is None else keys
        visited = Visited.of(self, keys, block_mask)
        yield self._initialise(visited)
        # Line 5: the column blocks that any row block visits, of which only the one with the last key may be short.
        tail = (keys - 1) // self.block_cols
        tail_cols, columns = keys - tail * self.block_cols, visited.columns
        if literal:
            for j in columns.tolist():
                cols = tail_cols if j == tail else self.block_cols
                yield self._outer(1, cols, tuple(self._walk(j, cols, visited)))
            return
        for cols, lo, hi in ((self.block_cols, 0, tail), (tail_cols, tail, tail + 1)):
            steps = int(((lo <= columns) & (columns < hi)).sum())
            if steps:
                yield self._outer(steps, cols, self._count(lo, hi, visited))
        # What masks read differs from visit to visit; counted, it is one sum.
        yield Phase(1, enter=mask_moves(p, visited_scores(self, visited, keys)))

    def _walk(self, j: int, cols: int, visited: Visited) -> Iterator[Visit]:
        """The visits of outer step j, one by one."""
        p, columns = self.problem, range(j * self.block_cols, j * self.block_cols + cols)
        for i in visited.rows(j).tolist():
            rows = range(i * self.block_rows, min((i + 1) * self.block_rows, p.seqlen_q))
            yield self._visit(1, len(rows), j == visited.last[i], mask_moves(p, scores_seen(p, rows, columns)))

    def _count(self, lo: int, hi: int, visited: Visited) -> tuple[Visit, ...]:
        """The visits of the outer steps from lo to hi together, by kind: full or ragged row block, last visit or not."""
        visits, finished = visited.count(lo, hi), (lo <= visited.last) & (visited.last < hi)
        kinds = []
        for rows in np.unique(self._rows()).tolist():
            alike = self._rows() == rows
            last = int(finished[alike].sum())
            kinds += [self._visit(int(visits[alike].sum()) - last, rows, last=False), self._visit(last, rows, last=True)]
        return tuple(kind for kind in kinds if kind.times)

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        rows = (p.head_count, p.seqlen_q)
        spaces = {"l": Workspace(rows, "float32"), "m": Workspace(rows, "float32")}
        if self._accumulator == "O_acc":
            spaces["O_acc"] = Workspace((*rows, p.value_dim), "float32")
        return spaces

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        shared = shared_bytes(p, self.block_rows, self.block_cols)
        require_kernel_tiling(self, shared)
        require_block_mask(self)
        constants = (
            *element_constants(p),
            ("BR", self.block_rows),
            ("BC", self.block_cols),
            ("SUB", sub_tile(p, self.block_cols)),
        )
        params = (
            *("Q", "K", "V", "O", "L", "O_acc", "l", "m", "Nq", "Nk", "heads", "group", "scale"),
            *stride_params("QKVO"),
            *MASK_PARAMS,
            *BLOCK_MASK_PARAMS,
        )
        return (
            Kernel(
                "fa1_forward.cu",
                "fa1_forward",
                constants,
                self.repeats if self.row_blocks else 0,
                self.block_rows // GRANULE * WARP,
                shared,
                params,
            ),
        )
