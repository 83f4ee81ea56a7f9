"""Standard attention, Algorithm 0 of the paper: S = scale Q K^T, P = softmax(S), O = P V, with S and P in HBM.

The paper counts each input of a product once; a tiled product re-reads them. `tiling="paper"` is the ideal, one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from cupyflash.device import Device
from cupyflash.launch.params import POINTER, Params, arrays
from cupyflash.request.problem import Problem
from cupyflash.request.score import Constants, named
from cupyflash.schedules.base import (
    GRANULE,
    WARP,
    Kernel,
    TileSchedule,
    Workspace,
    attention_params,
    element_constants,
    in_float32,
    require_kernel_tiling,
    row_bytes,
    sub_tile,
    value_row_bytes,
)
from cupyflash.schedules.moves import (
    BEGIN,
    END,
    VISIT,
    Move,
    Room,
    Tensor,
    Walk,
    captured,
    length_reads,
    passing,
    score_reads,
    sink_reads,
    tensor,
    writes,
)
from cupyflash.tiling import TileSize, shrink_to_fit

WIDEST = 64
SOFTMAX_WARPS = 4


def shared_bytes(problem: Problem, block_rows: int, block_cols: int) -> int:
    """Bytes of a Q tile and a K tile, or of a V tile: the larger of the two products' needs."""
    return max((block_rows + block_cols) * row_bytes(problem), block_cols * value_row_bytes(problem))


def paper_blocks(problem: Problem) -> TileSize:
    """Algorithms 0 and 3 name no blocks: one tile, each input read once, is their ideal count."""
    return TileSize(max(1, problem.seqlen_q), max(1, problem.seqlen_k), "the paper names no blocks: each input is read once")


def fit(problem: Problem, device: Device) -> TileSize:
    """The largest square tile up to 64 x 64 whose Q and K rows fit the SRAM."""
    return fit_square(problem, device, shared_bytes, "standard attention", "a Q and a K tile")


def fit_square(
    problem: Problem, device: Device, shared_bytes: Callable[[Problem, int, int], int], what: str, residents: str
) -> TileSize:
    """The largest square tile up to 64 x 64 whose `shared_bytes`, of the `residents`, fit the SRAM. Raises `DoesNotFit`."""

    def smaller(block_rows: int, block_cols: int) -> tuple[int, int] | None:
        return None if block_rows == GRANULE else (block_rows - GRANULE, block_cols - GRANULE)

    rows, cols = shrink_to_fit(
        (WIDEST, WIDEST),
        smaller,
        lambda r, c: shared_bytes(problem, r, c),
        device,
        f"{what} at head_dim {problem.head_dim} {problem.dtype}",
    )
    return TileSize(rows, cols, f"{residents}: {shared_bytes(problem, rows, cols):,} of {device.sram_per_block:,} bytes")


def score_type(problem: Problem) -> Constants:
    """The constant with the type of S in memory, if it is not q's."""
    return named(SCORE_TYPE="float") if problem.score_itemsize != problem.itemsize else ()


def score_product_reads(p: Problem) -> tuple[Move, ...]:
    """A tile's reading, for S = Q K^T, of all but Q and K."""
    return (*length_reads(p), *captured(p, "head", BEGIN), *score_reads(p))


def score_rows(p: Problem, name: str) -> Tensor:
    """S, or another tensor of the scores, by its rows."""
    return tensor(p, name, of="query", width=p.seqlen_k)


class StandardSchedule(TileSchedule):
    """Three kernels: a tiled product, a softmax a row, a tiled product."""

    algorithm: ClassVar[str] = "standard"
    params: ClassVar[Params] = attention_params(*arrays("Element", POINTER, "SP"))

    @property
    def struct(self) -> Params:
        return super().struct if self.problem.options.score_dtype is None else in_float32(super().struct, "S")

    @property
    def ideal(self) -> bool:
        """True if this is the paper's count and not a kernel's."""
        return self.tiling.used == self.tiling.paper

    @property
    def softmax_passes(self) -> int:
        """The number of times that softmax reads S: the kernel once for m and l and once for P, the paper once."""
        return 1 if self.ideal else 2

    def walks(self) -> Iterator[Walk]:
        p, parts, row = self.problem, self.parts, row_bytes(self.problem)
        q_tile, k_tile = Room("Q", self.block_rows * row), Room("K", self.block_cols * row)
        if self.col_blocks:
            moves = (*(Move(tensor(p, name), BEGIN, tile=name) for name in "QK"), *writes(p, END, "S", room=True))
            yield Walk("standard_scores", self, parts, "gij", "", (*score_product_reads(p), *moves), (q_tile, k_tile), every=True)
        moves = (
            *(Move(score_rows(p, "S"), BEGIN),) * self.softmax_passes,
            *sink_reads(p, BEGIN),
            Move(score_rows(p, "P"), END, write=True),
            *writes(p, END, *["L"] * self.lse),
        )
        yield passing("standard_softmax", self, parts, moves, SOFTMAX_WARPS)
        moves = (
            *length_reads(p),
            Move(tensor(p, "P"), VISIT, room=True),
            Move(tensor(p, "V"), VISIT, tile="V"),
            *writes(p, END, "O"),
        )
        rooms = (Room("V", self.block_cols * value_row_bytes(p)),)
        yield Walk("standard_values", self, parts, "gi", "j", moves, rooms, every=True)

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        shape = p.head_count, p.seqlen_q, p.seqlen_k
        return {"S": Workspace(shape, p.options.score_dtype or p.dtype), "P": Workspace(shape, p.dtype)}

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        shared = shared_bytes(p, *self.blocks)
        require_kernel_tiling(self, shared)
        sizes = named(BR=self.block_rows, BC=self.block_cols, SUB=sub_tile(p, self.block_cols), SOFTMAX_WARPS=SOFTMAX_WARPS)
        constants, warps = (*element_constants(p), *sizes, *score_type(p)), self.block_rows // GRANULE

        def kernel(step: str, grid: int, warps: int, shared: int) -> Kernel:
            return Kernel("standard.cu", f"standard_{step}", constants, grid, warps * WARP, shared, self.struct)

        rows = self.row_blocks * self.repeats
        softmax = kernel("softmax", -(-self.repeats * p.seqlen_q // SOFTMAX_WARPS), SOFTMAX_WARPS, 0)
        values = kernel("values", rows, warps, self.block_cols * value_row_bytes(p))
        # Without keys there is no S: the softmax still writes L, and the second product O = 0.
        scores_grid = rows * self.col_blocks
        return (kernel("scores", scores_grid, warps, shared), softmax, values) if scores_grid else (softmax, values)
