"""FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2): column blocks are thread blocks, dK and dV stay on chip.

Atomics sum dQ or, with `deterministic`, a kernel of its own computes it, with row blocks as thread blocks. So has the kernel before
all others, which finds the numbers to which weights are relative (row_bases.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

from cupyflash.expressions.tree import Load
from cupyflash.launch.params import POINTER, Params, arrays
from cupyflash.request.score import Constants, Form, named
from cupyflash.request.score_sums import LARGEST, CapturedSums, sum_constants, sum_field, summed
from cupyflash.schedules import fa2_backward_tiles as tiles
from cupyflash.schedules.backward import BackwardSchedule, RowBlocksOutside, gradient_params
from cupyflash.schedules.base import (
    GRANULE,
    WARP,
    Kernel,
    Workspace,
    element_constants,
    padded_dim,
    require_block_mask,
    require_dtype,
    tile_constants,
    total_bytes,
)
from cupyflash.schedules.fa2_backward_tiles import GradientsLaunch, Warps, launches
from cupyflash.schedules.mask_tiles import MaskTiles, words
from cupyflash.schedules.moves import (
    BEGIN,
    END,
    FLOAT32,
    MIXED,
    SEEN,
    VISIT,
    WORD,
    Move,
    Of,
    Room,
    Tensor,
    Walk,
    When,
    captured,
    length_reads,
    loaded,
    passing,
    reads,
    score_reads,
    search_reads,
    sink_reads,
    tensor,
    tile_reads,
    writes,
)
from cupyflash.schedules.parts import NOWHERE, Axis, Part
from cupyflash.schedules.row_bases import RowBasesSchedule, given_name, has_bases

ROW_THREADS = 128
INT64 = 8
# Rows that dQ's sum has together (query_sum.cuh)
SUMMED_ROWS = 8


class _Fa2Kernels(BackwardSchedule):
    """The common part of the two schedules of this file."""

    params: ClassVar[Params] = gradient_params(*arrays("float", POINTER, ("D", "dQ_acc", "dsinks")))
    by_tiles: ClassVar[bool] = True
    """True if it reads what functions have captured of a row or a key once for a tile."""

    def constants(self) -> Constants:
        rows, cols = self.shares
        return (
            *element_constants(self.problem, with_derivative=True, by_tiles=self.by_tiles),
            *named(BR=self.block_rows, BC=self.own_cols, KEPT_ROWS=rows, KEPT_COLS=cols),
            *named(VARLEN=int(self.problem.options.packed)),
        )

    @property
    def own_cols(self) -> int:
        """Keys of a thread block's column block, BC of the kernels."""
        return self.block_cols

    @property
    def tile_fields(self) -> tuple[str, ...]:
        """The fields of both schedules, whose kernels have one struct."""
        return ("tiles", "query_tiles") if self.problem.options.masked else ()


@dataclass(frozen=True)
class QueriesSchedule(_Fa2Kernels, RowBlocksOutside):
    """The schedule of the kernel of dQ alone, in the struct of the schedule beside which it runs, `given`, if that has one of its
    own."""

    algorithm: ClassVar[str] = "fa2"

    given: Params | None = None

    @property
    def struct(self) -> Params:
        return self.given or super().struct

    def walks(self, parts: tuple[Part, ...] | None = None) -> Iterator[Walk]:
        p, parts, values = self.problem, self.parts if parts is None else parts, "V" if self.stages else "K"
        moves = (
            *(Move(tensor(p, name), SEEN, tile=name) for name in ("Q", "dO")),
            *reads(p, SEEN, given_name(p), "D", tile="L, D"),
            *captured(p, "row", SEEN),
            Move(tensor(p, "K"), VISIT, tile="K"),
            *captured(p, "key", VISIT, MIXED),
            *score_reads(p, by_tiles=True),
            Move(tensor(p, "V"), VISIT, tile=values),
            *self.made,
        )
        yield from self.tile_walks(parts)
        yield self.row_walk("fa2_backward_queries", parts, moves, self._tiles())

    @property
    def made(self) -> tuple[Move, ...]:
        """The moves of its results."""
        return writes(self.problem, END, "dQ")

    @property
    def found_tiles(self) -> tuple[MaskTiles, ...]:
        """The tiles whose states it finds: none if an earlier kernel with the same blocks has found them."""
        return () if has_bases(self.problem) else super().found_tiles

    @cached_property
    def stages(self) -> int:
        """The number of K and V blocks for which there is room."""
        stages = tiles.query_stages_for(self.problem, self.device, *self.blocks)
        return 1 if stages is None else stages

    @cached_property
    def warps(self) -> Warps:
        """The division of S among its warps."""
        return tiles.query_warps_for(self.problem, self.device, *self.blocks)

    def _tiles(self) -> tuple[Room, ...]:
        return tiles.query_tiles(self.problem, *self.blocks, self.stages)

    def workspaces(self) -> Mapping[str, Workspace]:
        return self.tile_workspaces()

    def kernels(self) -> tuple[Kernel, ...]:
        others = tuple(self._kernel(each) for each in tiles.narrower(self.warps, self.block_cols))
        return (*self.tile_kernels(), replace(self._kernel(self.warps), instead=others))

    def _kernel(self, warps: Warps) -> Kernel:
        own = named(STAGES=self.stages, WARP_ROWS=warps.own, WARP_COLS=warps.at_once, COL_WARPS=warps.beside)
        constants = *self.constants(), *tile_constants(self), *own
        name, threads = "fa2_backward_queries", warps.count(self.block_rows) * WARP
        return Kernel(f"{name}.cu", name, constants, self.grid, threads, total_bytes(self._tiles()), self.struct)


@dataclass(frozen=True)
class SumsSchedule(QueriesSchedule):
    """The same kernel's launch that makes the gradients of captured arrays in place of dQ: it computes S and dP once more, and adds
    with atomics. `deterministic`: two launches, of which the first finds how large the terms are, and the second adds integers.
    `first`: False if another launch with the same blocks has found the mask's tiles."""

    first: bool = True

    @property
    def found_tiles(self) -> tuple[MaskTiles, ...]:
        return super().found_tiles if self.first else ()

    @property
    def summed(self) -> CapturedSums:
        """The elements to whose gradients the scores add."""
        return summed(self._form, self.dscore)

    @property
    def _form(self) -> Form:
        assert self.problem.options.score is not None
        return self.problem.options.score

    @property
    def ways(self) -> tuple[int, ...]:
        """The launches, by SCORE_SUMS of score_sums.cuh."""
        return (2, 3) if self.deterministic else (1,)

    def walks(self, parts: tuple[Part, ...] | None = None) -> Iterator[Walk]:
        for way in self.ways:
            *tiles_walks, main = super().walks(parts)
            yield from tiles_walks if way == self.ways[0] else ()
            yield replace(main, moves=(*main.moves, *self._added(way)))

    @property
    def made(self) -> tuple[Move, ...]:
        return tuple(Move(loaded(self._form, load, "seen"), VISIT) for load in self.summed.again)

    def _added(self, way: int) -> Iterator[Move]:
        """The atomics of a launch, which read and write, and its reading of the largest sizes."""
        largest = Tensor(LARGEST, "one", len(self.dscore), WORD)
        if way == 3:
            yield Move(largest, BEGIN)
        terms: list[tuple[Tensor, When]] = [(largest, END)]
        if way != 2:
            terms = [(self._sum_of(load, "seen"), VISIT) for load, _ in self.summed.score]
            terms += [(self._sum_of(load, "head"), END) for load, _ in self.summed.head]
        yield from (Move(sums, when, write) for sums, when in terms for write in (False, True))

    def _sum_of(self, load: Load, of: Of) -> Tensor:
        return Tensor(sum_field(load.name), of, 1, INT64 if self.deterministic else FLOAT32, load=(self._form, load))

    def kernels(self) -> tuple[Kernel, ...]:
        *before, main = super().kernels()
        return (*before, *(self._adding(main, way) for way in self.ways))

    def _adding(self, kernel: Kernel, way: int) -> Kernel:
        constants = (*kernel.constants, *sum_constants(self._form, self.dscore, way))
        return replace(kernel, constants=constants, instead=tuple(self._adding(each, way) for each in kernel.instead))


@dataclass(frozen=True)
class Fa2BackwardSchedule(_Fa2Kernels):
    """A thread block is a column block of a key head, and visits the row blocks that see it, of every query head of the group."""

    algorithm: ClassVar[str] = "fa2"
    whole_boxes: ClassVar[bool] = False

    @property
    def state_words(self) -> int | None:
        return self.group * words(self.problem.seqlen_q, self.block_rows)

    @property
    def row_results(self) -> tuple[str, ...]:
        return ("dsinks",) if self.problem.options.sinks else ()

    @property
    def query_shape(self) -> tuple[int, int]:
        """The shape of L and D: heads of all batches, rows of each."""
        return self.problem.head_count, self.problem.seqlen_q

    @property
    def grid(self) -> int:
        """Thread blocks of a launch of the main kernel."""
        return self.repeats * self.col_blocks

    @cached_property
    def stages(self) -> int:
        """The number of Q and dO blocks for which there is room."""
        stages = tiles.stages_for(self.problem, self.device, *self.blocks)
        return 1 if stages is None else stages

    @cached_property
    def warps(self) -> Warps:
        """The division of S^T among its warps."""
        return tiles.warps_for(self.problem, self.device, *self.blocks)

    @cached_property
    def by_rows(self) -> QueriesSchedule:
        """Row blocks as thread blocks."""
        used = tiles.fit_queries(self.problem, self.device, self.mask_blocks)
        tiling, packed = replace(self.tiling, used=used), self.together
        given = self.struct if self.struct.maps or self.dscore else None
        return QueriesSchedule(self.problem, self.device, tiling, mask_blocks=self.mask_blocks, packed=packed, given=given)

    @property
    def sums_queries(self) -> bool:
        """True if the main kernel sums dQ in HBM; otherwise a kernel of its own computes it."""
        return not self.deterministic

    @property
    def queries(self) -> QueriesSchedule | None:
        """The schedule that computes dQ, if the main kernel does not sum it."""
        return None if self.sums_queries else self.by_rows

    @cached_property
    def sums(self) -> SumsSchedule | None:
        """The schedule that makes the gradients of captured arrays, if any are asked for."""
        if not self.dscore:
            return None
        own = {each.name: getattr(self.by_rows, each.name) for each in fields(self.by_rows)}
        return SumsSchedule(**own | {"dscore": self.dscore, "deterministic": self.deterministic, "first": self.sums_queries})

    @cached_property
    def bases(self) -> RowBasesSchedule:
        """The schedule that finds m and l, in the same blocks as dQ's kernel."""
        rows, struct = self.by_rows, self.struct
        skips, own = has_bases(rows.problem) and bool(rows.mask_tiles), rows.mask_blocks
        return RowBasesSchedule(
            rows.problem, rows.device, rows.tiling, mask_blocks=own, given=struct, skips=skips, packed=rows.together
        )

    @property
    def beside(self) -> tuple[RowBasesSchedule | QueriesSchedule, ...]:
        """The schedules that have row blocks as thread blocks."""
        return (self.bases, *(each for each in (self.queries, self.sums) if each))

    @property
    def given_tiles(self) -> tuple[MaskTiles, ...]:
        of_rows = next((each.given_tiles for each in self.beside if each.mask_tiles), ())
        return (*super().given_tiles, *of_rows)

    @property
    def begun(self) -> tuple[Move, ...]:
        """Further moves of the kernel before the main one, for each row."""
        return ()

    def _tiles(self) -> tuple[Room, ...]:
        return self._rooms(self.warps)

    def _rooms(self, warps: Warps) -> tuple[Room, ...]:
        return tiles.main_tiles(self.problem, *self.blocks, self.stages, warps.beside)

    def parts_beside(self, each: RowBlocksOutside) -> tuple[Part, ...]:
        """The parts for a kernel with row blocks as thread blocks."""
        return each.parts

    def walks(self) -> Iterator[Walk]:
        p, parts, rows = self.problem, self.parts, self.query_shape[1]
        every = parts if self.together is None else (Part(0, self, Axis(0, rows, 0, rows, rows), NOWHERE),)
        sums = tensor(p, "dQ_acc", width=padded_dim(p.head_dim), rounded=SUMMED_ROWS)
        yield from self.tile_walks(parts)
        yield from self.bases.walks(self.parts_beside(self.bases))
        moves = (*reads(p, BEGIN, "O", "dO"), *writes(p, END, "D"))
        if self.sums_queries:
            moves += (Move(sums, END, write=True), *self.begun)
        if p.options.sinks:
            moves += (*sink_reads(p, BEGIN), *reads(p, BEGIN, given_name(p)), *writes(p, END, "dsinks"))
        yield passing("fa2_backward_rows", self, every, moves, ROW_THREADS // tiles.row_lanes(p))
        for launch in self.launches:
            yield self._main_walk(launch, parts, sums)
        if self.queries is not None:
            yield from self.queries.walks(self.parts_beside(self.queries))
        else:
            yield passing("fa2_backward_finish", self, every, (Move(sums, BEGIN), *writes(p, END, "dQ")), self.finished_rows)
        if self.sums is not None:
            yield from self.sums.walks(self.parts_beside(self.sums))

    @property
    def cluster(self) -> int:
        """Thread blocks that have a column block together."""
        return 1

    @property
    def launches(self) -> tuple[GradientsLaunch, ...]:
        """The launches of the main kernel."""
        return launches(self.problem)

    @property
    def readers(self) -> int:
        """Warps that each read what a score has of its own."""
        return 1

    def head_reads(self) -> tuple[Move, ...]:
        """The main kernel's reads of what functions have captured of a head."""
        return captured(self.problem, "head", BEGIN)

    def _main_walk(self, launch: GradientsLaunch, parts: tuple[Part, ...], sums: Tensor) -> Walk:
        """A column block's walk: K and V, Q and dO of the row blocks that see it, of every query head of the group, dK and dV."""
        p, packed = self.problem, self.together

        def load(name: str, when: When, tile: str) -> Move:
            return Move(tensor(p, name), when, tile=tile)

        of_dO = "Q, dO" if launch.dk or self.stages else "V"
        moves = [
            *search_reads(packed, "k"),
            *length_reads(p),
            *tile_reads(self),
            *self.head_reads(),
            *(Move(tensor(p, name), SEEN, tile=name, room=self.whole_boxes) for name in ("K", "V") if launch.dk or name == "K"),
            *captured(p, "key", When("gj"), by_tiles=self.by_tiles),
            *(Move(tensor(p, name), VISIT, tile=tile, room=self.whole_boxes) for name, tile in (("Q", "Q, dO"), ("dO", of_dO))),
            *(replace(load(name, VISIT, "L, D"), times=self.cluster) for name in (given_name(p), *["D"] * launch.dk)),
            *captured(p, "row", VISIT, MIXED, by_tiles=self.by_tiles),
            *(replace(each, times=self.readers) for each in score_reads(p, by_tiles=self.by_tiles)),
        ]
        # An atomic reads and writes.
        added = [tensor(p, "dbias")] * self.dbias + [sums] * self.sums_queries
        moves += [Move(each, VISIT, write) for each in added if launch.dk for write in (False, True)]
        moves += writes(p, END, *["dK"] * launch.dk, *["dV"] * launch.dv, room=packed is None)
        return Walk(
            f"{self.algorithm}_backward", self, parts, "j", "gI", tuple(moves), self._tiles(), works=self.grid if packed else None
        )

    def workspaces(self) -> Mapping[str, Workspace]:
        spaces = {"D": Workspace(self.query_shape, "float32")}
        if self.sums_queries:
            heads, rows = self.query_shape
            whole = -(-rows // SUMMED_ROWS) * SUMMED_ROWS
            spaces["dQ_acc"] = Workspace((heads, whole, padded_dim(self.problem.head_dim)), "float32")
        for each in self.beside:
            spaces |= each.workspaces()
        return spaces | self.tile_workspaces()

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        require_dtype(p.dtype, self.device)
        require_block_mask(self, self.mask_blocks)
        made = self.launches
        others = tiles.narrower(self.warps, self.block_rows)
        main = [replace(self._main(each, self.warps), instead=tuple(self._main(each, warps) for warps in others)) for each in made]
        # The kernels before and behind are compiled with the launch that makes dK.
        beside_main = replace(main[-1], shared_bytes=0, instead=())
        pairs, total_q = self.query_shape
        row_grid = pairs * -(-total_q // (ROW_THREADS // tiles.row_lanes(p)))
        rows = replace(beside_main, name="fa2_backward_rows", grid=row_grid, threads=ROW_THREADS)
        before_main = *self.tile_kernels(), *self.bases.kernels(), rows
        behind = self.sums.kernels() if self.sums is not None else ()
        if self.queries is not None:
            return (*before_main, *main, *self.queries.kernels(), *behind)
        grid = pairs * -(-total_q // self.finished_rows)
        finish = replace(beside_main, name="fa2_backward_finish", grid=grid, threads=self._finish_threads)
        return (*before_main, *main, finish, *behind)

    @property
    def _row_pieces(self) -> int:
        """Adjacent pieces of a row, each with as many threads as there are rows together."""
        return padded_dim(self.problem.head_dim) // GRANULE

    @property
    def _finish_threads(self) -> int:
        return ROW_THREADS * (1 if self._row_pieces * SUMMED_ROWS <= ROW_THREADS else 2)

    @property
    def finished_rows(self) -> int:
        """Rows that a thread block of the last kernel has."""
        return self._finish_threads // SUMMED_ROWS // self._row_pieces * SUMMED_ROWS

    def _main(self, launch: GradientsLaunch, warps: Warps) -> Kernel:
        """The main kernel with this division of a block among its warps."""
        threads, shared = warps.count(self.block_cols) * WARP, total_bytes(self._rooms(warps))
        return Kernel("fa2_backward.cu", "fa2_backward", self._constants(launch, warps), self.grid, threads, shared, self.struct)

    def _constants(self, launch: GradientsLaunch, warps: Warps) -> Constants:
        sizes = named(STAGES=self.stages, WARP_KEYS=warps.own, WARP_ROWS=warps.at_once, ROW_WARPS=warps.beside)
        made = named(WITH_DK=int(launch.dk), WITH_DV=int(launch.dv), WITH_DQ=int(launch.dk and self.sums_queries))
        return (*self.constants(), *tile_constants(self), *sizes, *made, *named(DBIAS=int(launch.dk and self.dbias)))
