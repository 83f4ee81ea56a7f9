"""FlashAttention, Algorithm 1 (arXiv 2205.14135): K/V blocks outside, Q blocks inside, O, l and m in HBM between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.params import POINTER, Params, arrays
from cupyflash.problem import Problem
from cupyflash.schedules.base import (
    FLOAT32,
    GRANULE,
    WARP,
    Kernel,
    Move,
    Phase,
    Room,
    Tiles,
    Visit,
    Visited,
    Workspace,
    attention_params,
    element_constants,
    require_block_mask,
    require_kernel_tiling,
    row_bytes,
    sub_tile,
    value_row_bytes,
)
from cupyflash.schedules.columns_outside import ColumnsOutside, fit_paper_blocks
from cupyflash.schedules.moves import block_mask_bytes, block_mask_moves, head_moves, length_moves
from cupyflash.tiling import TileSize


def shared_bytes(problem: Problem, block_rows: int, block_cols: int) -> int:
    """Bytes of K_j, V_j, Q_i and a block mask in shared memory; O_i, S_ij, l_i and m_i are in registers."""
    tiles = (block_cols + block_rows) * row_bytes(problem) + block_cols * value_row_bytes(problem)
    return tiles + block_mask_bytes(problem, -(-problem.seqlen_q // block_rows), block_cols)


def fit(problem: Problem, device: Device) -> TileSize:
    """The paper's blocks rounded down to tensor core tiles, and further until K_j, V_j and Q_i fit the SRAM."""
    return fit_paper_blocks(problem, device, shared_bytes, "fa1", "K, V and Q with padded rows")


class Fa1Schedule(ColumnsOutside):
    """Algorithm 1's schedule. O is float32 in HBM between visits: O_acc for half types, O itself for float32."""

    algorithm: ClassVar[str] = "fa1"
    params: ClassVar[Params] = attention_params(*arrays("float", POINTER, ("O_acc", "l", "m")))

    @property
    def _accumulator(self) -> str:
        return "O" if self.problem.dtype == "float32" else "O_acc"

    def _tiles(self) -> dict[str, Room]:
        p = self.problem
        if self.tiling.used == self.tiling.paper:
            # The paper's own residency: K_j, V_j, Q_i and O_i in elements of the input type.
            row, value_row = p.head_dim * p.itemsize, p.head_dim_v * p.itemsize
            sizes = {"O": self.block_rows * value_row}
        else:
            row, value_row = row_bytes(p), value_row_bytes(p)
            sizes = {}
        sizes |= {"K": self.block_cols * row, "V": self.block_cols * value_row, "Q": self.block_rows * row}
        return {name: Room(name, nbytes) for name, nbytes in sizes.items()}

    def _initialise(self, visited: Visited) -> Phase:
        """Line 2: O = 0, l = 0, m = -inf. A row block that no column block will visit has its O and L for good."""
        p = self.problem
        unseen = int(self._rows()[visited.last < 0].sum())
        moves = [
            *length_moves(p),
            *head_moves(p),
            *block_mask_moves(self, visited.blocks),
            Move(self._accumulator, (p.seqlen_q - unseen) * p.head_dim_v, FLOAT32, write=True),
            Move("O", unseen * p.head_dim_v, p.itemsize, write=True),
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
            Move(self._accumulator, rows * p.head_dim_v, FLOAT32),
            Move("l", rows, FLOAT32),
            Move("m", rows, FLOAT32),
            Move("O", rows * p.head_dim_v, p.itemsize, write=True)
            if last
            else Move(self._accumulator, rows * p.head_dim_v, FLOAT32, write=True),
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
            Move("V", cols * p.head_dim_v, p.itemsize, tile="V"),
        )
        kept = Room("block_mask", block_mask_bytes(p, self.row_blocks, self.block_cols))
        return Phase(times, enter=load, visits=visits, tiles=(tiles["K"], tiles["V"], kept))

    def phases(self, *, literal: bool = False, keys: int | None = None, kept: Tiles | None = None) -> Iterator[Phase]:
        keys = self.problem.seqlen_k if keys is None else keys
        visited = Visited.of(self, keys, kept)
        yield self._initialise(visited)
        yield from self._outer_steps([visited], 1, keys, literal)  # line 5

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        rows = (p.head_count, p.seqlen_q)
        spaces = {"l": Workspace(rows, "float32"), "m": Workspace(rows, "float32")}
        if self._accumulator == "O_acc":
            spaces["O_acc"] = Workspace((*rows, p.head_dim_v), "float32")
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
        return (
            Kernel(
                "fa1_forward.cu",
                "fa1_forward",
                constants,
                self.repeats if self.row_blocks else 0,
                self.block_rows // GRANULE * WARP,
                shared,
                self.struct,
            ),
        )
