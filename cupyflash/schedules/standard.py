"""Standard attention, Algorithm 0 of the paper: S = scale Q K^T, P = softmax(S), O = P V, with S and P in HBM.

The paper counts each input of a product once; a tiled product re-reads them. `tiling="paper"` is the ideal, one tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
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
    TileSchedule,
    Visit,
    Workspace,
    attention_params,
    element_constants,
    require_kernel_tiling,
    row_bytes,
    sub_tile,
    value_row_bytes,
)
from cupyflash.schedules.moves import head_moves, length_moves, mask_moves, scores_seen
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


def score_type(problem: Problem) -> tuple[tuple[str, str], ...]:
    """The constant that says what S is in memory where that is not q's type."""
    return (("SCORE_TYPE", "float"),) if problem.score_itemsize != problem.itemsize else ()


def extents(length: int, block: int, literal: bool) -> list[tuple[int, int]]:
    """(times, extent) of the blocks along an axis, each on its own where `literal`."""
    full, tail = divmod(length, block)
    blocks = [(1, block)] * full if literal else [(full, block)] * (full > 0)
    return blocks + [(1, tail)] * (tail > 0)


@lru_cache(maxsize=256)
def _with_scores(struct: Params, dtype: str | None) -> Params:
    """A struct whose S is of another type than the elements."""
    if dtype is None:
        return struct
    return Params(tuple(replace(each, type="float") if each.name == "S" else each for each in struct.fields))


class StandardSchedule(TileSchedule):
    """Three kernels: a tiled product, a softmax a row, a tiled product."""

    algorithm: ClassVar[str] = "standard"
    params: ClassVar[Params] = attention_params(*arrays("Element", POINTER, "SP"))

    @property
    def struct(self) -> Params:
        return _with_scores(super().struct, self.problem.options.score_dtype)

    @property
    def ideal(self) -> bool:
        """Whether this is the paper's count and not a kernel's."""
        return self.tiling.used == self.tiling.paper

    @property
    def softmax_passes(self) -> int:
        """How often softmax reads S: the kernel once for m and l and once for P, the paper once."""
        return 1 if self.ideal else 2

    def phases(self, *, literal: bool = False, keys: int | None = None, kept: Tiles | None = None) -> Iterator[Phase]:
        p = self.problem
        keys = p.seqlen_k if keys is None else keys
        rows_of = extents(p.seqlen_q, self.block_rows, literal)
        cols_of = extents(p.seqlen_k, self.block_cols, literal)
        keys_of = extents(keys, self.block_cols, literal)  # S and P have columns for all, K and V rows for these
        row = row_bytes(p)
        q_tile, k_tile = Room("Q", self.block_rows * row), Room("K", self.block_cols * row)
        v_tile = Room("V", self.block_cols * value_row_bytes(p))

        for row_times, rows in rows_of:  # S = scale Q K^T
            for col_times, cols in cols_of:
                yield Phase(
                    row_times * col_times,
                    enter=(
                        *length_moves(p),
                        *head_moves(p),
                        Move("Q", rows * p.head_dim, p.itemsize, tile="Q"),
                    ),
                    leave=(Move("S", rows * cols, p.score_itemsize, write=True),),
                    tiles=(q_tile, k_tile),
                )
            for times, cols in keys_of:
                yield Phase(row_times * times, enter=(Move("K", cols * p.head_dim, p.itemsize, tile="K"),), tiles=(k_tile,))
        yield Phase(1, enter=mask_moves(p, scores_seen(p, range(p.seqlen_q), range(keys))))

        reads = (Move("S", p.seqlen_k, p.score_itemsize),) * self.softmax_passes  # P = softmax(S)
        writes: tuple[Move, ...] = (Move("P", p.seqlen_k, p.itemsize, write=True),)
        if self.lse:
            writes += (Move("L", 1, FLOAT32, write=True),)
        for times, rows in extents(p.seqlen_q, 1, literal):
            yield Phase(times * rows, enter=reads, leave=writes)

        for row_times, rows in rows_of:  # O = P V
            visits = tuple(Visit(row_times * times, (Move("P", rows * cols, p.itemsize),)) for times, cols in cols_of)
            visits += tuple(
                Visit(row_times * times, (Move("V", cols * p.head_dim_v, p.itemsize, tile="V"),)) for times, cols in keys_of
            )
            leave = (Move("O", rows * p.head_dim_v, p.itemsize, write=True),)
            yield Phase(row_times, enter=length_moves(p), visits=visits, leave=leave, tiles=(v_tile,))

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        shape = p.head_count, p.seqlen_q, p.seqlen_k
        return {"S": Workspace(shape, p.options.score_dtype or p.dtype), "P": Workspace(shape, p.dtype)}

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        shared = shared_bytes(p, self.block_rows, self.block_cols)
        require_kernel_tiling(self, shared)
        constants = (
            *element_constants(p),
            ("BR", self.block_rows),
            ("BC", self.block_cols),
            ("SUB", sub_tile(p, self.block_cols)),
            ("SOFTMAX_WARPS", SOFTMAX_WARPS),
            *score_type(p),
        )
        threads = self.block_rows // GRANULE * WARP

        # Without keys there is no S: the softmax still writes L, and the second product O = 0.
        scores_grid = self.row_blocks * self.col_blocks * self.repeats
        scores = Kernel(
            "standard.cu",
            "standard_scores",
            constants,
            scores_grid,
            threads,
            shared,
            self.struct,
        )
        softmax = Kernel(
            "standard.cu",
            "standard_softmax",
            constants,
            -(-self.repeats * p.seqlen_q // SOFTMAX_WARPS),
            SOFTMAX_WARPS * WARP,
            0,
            self.struct,
        )
        values = Kernel(
            "standard.cu",
            "standard_values",
            constants,
            self.row_blocks * self.repeats,
            threads,
            self.block_cols * value_row_bytes(p),
            self.struct,
        )
        return (scores, softmax, values) if scores_grid else (softmax, values)
