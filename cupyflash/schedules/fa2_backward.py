"""FlashAttention-2's backward (arXiv 2307.08691, Algorithm 2): column blocks are thread blocks, dK and dV stay on chip.

dQ is summed by atomics, or, `deterministic`, made by a kernel of its own, in which row blocks are thread blocks. They are too in
the kernel before all, which finds what weights are relative to (row_bases.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from cupyflash.dropout import with_dropout
from cupyflash.params import POINTER, Params, arrays
from cupyflash.schedules import fa2_backward_tiles as tiles
from cupyflash.schedules.backward import BackwardSchedule, RowBlocksOutside, gradient_params, require_mask_blocks
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
    element_constants,
    padded_dim,
    require_dtype,
    tile_constants,
    total_bytes,
    with_captured,
)
from cupyflash.schedules.fa2_backward_tiles import Launch, Warps, launches
from cupyflash.schedules.mask_tiles import MaskTiles, words
from cupyflash.schedules.moves import (
    block_mask_moves,
    head_moves,
    key_moves,
    keys_read,
    length_moves,
    row_moves,
    score_moves,
    visited_scores,
)
from cupyflash.schedules.row_bases import RowBasesSchedule, given_move, has_bases

ROW_THREADS = 128
# Rows that dQ's sum has together (query_sum.cuh)
SUMMED_ROWS = 8


class _Fa2Kernels(BackwardSchedule):
    """What the two schedules of this file share."""

    params: ClassVar[Params] = gradient_params(*arrays("float", POINTER, ("D", "dQ_acc", "dsinks")))

    def constants(self) -> tuple[tuple[str, int | str], ...]:
        rows, cols = self.shares
        return (
            *element_constants(self.problem, with_derivative=True, by_tiles=True),
            ("BR", self.block_rows),
            ("BC", self.block_cols),
            ("KEPT_ROWS", rows),
            ("KEPT_COLS", cols),
            ("VARLEN", int(self.problem.options.packed)),
        )

    @property
    def struct(self) -> Params:
        """One for the kernels of both schedules."""
        asked = self.problem.options
        tiles = ("tiles", "query_tiles") if asked.masked else ()
        return with_dropout(with_captured(self.params, (asked.score, asked.mask_function), tiles), asked.dropout)

    def extras(self, heads: list[Visited], keys: int, blocks: int, heads_each: int) -> Iterator[Phase]:
        """What `blocks` thread blocks read of masks, each its batch's length, what the block mask says of it, and what a score
        function reads once for each of the heads that it has."""
        yield Phase(blocks, enter=length_moves(self.problem))
        yield Phase(blocks * heads_each, enter=head_moves(self.problem))
        yield Phase(1, enter=block_mask_moves(self, sum(each.blocks for each in heads)))
        yield Phase(1, enter=score_moves(self, heads, keys, by_tiles=True))


@dataclass(frozen=True)
class QueriesSchedule(_Fa2Kernels, RowBlocksOutside):
    """dQ by itself."""

    algorithm: ClassVar[str] = "fa2"

    def _enter(self, seen: int) -> tuple[Move, ...]:
        p = self.problem
        return (
            Move("Q", seen * p.head_dim, p.itemsize),
            Move("dO", seen * p.head_dim_v, p.itemsize),
            given_move(p, seen),
            Move("D", seen, FLOAT32),
            *row_moves(p, seen),
        )

    def _visit(self, cols: int) -> tuple[Move, ...]:
        p, values = self.problem, "V" if self.stages else "K"
        K, V = Move("K", cols * p.head_dim, p.itemsize, tile="K"), Move("V", cols * p.head_dim_v, p.itemsize, tile=values)
        return (K, V, *key_moves(p, cols, 0))

    def _leave(self, rows: int) -> tuple[Move, ...]:
        return (Move("dQ", rows * self.problem.head_dim, self.problem.itemsize, write=True),)

    def _beside(self, heads: list[Visited], keys: int) -> Iterator[Phase]:
        yield Phase(1, enter=key_moves(self.problem, 0, sum(keys_read(self, each.asked, keys) for each in heads)))
        yield from self.extras(heads, keys, self.group * self.row_blocks, 1)

    @property
    def state_words(self) -> int:
        return words(self.problem.seqlen_k, self.block_cols)

    @property
    def mask_tiles(self) -> tuple[MaskTiles, ...]:
        return tuple(replace(each, field="query_tiles") for each in super().mask_tiles)

    @property
    def found_tiles(self) -> tuple[MaskTiles, ...]:
        """None where what comes before, in the same blocks, has found them."""
        return () if has_bases(self.problem) else super().found_tiles

    @property
    def grid(self) -> int:
        """Thread blocks."""
        return self.problem.head_count * self.row_blocks

    @cached_property
    def stages(self) -> int:
        """K and V blocks that there is room for."""
        stages = tiles.query_stages_for(self.problem, self.device, self.block_rows, self.block_cols)
        return 1 if stages is None else stages

    @cached_property
    def warps(self) -> Warps:
        """How its warps share S."""
        return tiles.query_warps_for(self.problem, self.device, self.block_rows, self.block_cols)

    def _tiles(self) -> tuple[Room, ...]:
        return tiles.query_tiles(self.problem, self.block_rows, self.block_cols, self.stages)

    def workspaces(self) -> Mapping[str, Workspace]:
        return self.tile_workspaces()

    def kernels(self) -> tuple[Kernel, ...]:
        others = tuple(self._kernel(each) for each in tiles.narrower(self.warps, self.block_cols))
        return (*self.tile_kernels(), replace(self._kernel(self.warps), instead=others))

    def _kernel(self, warps: Warps) -> Kernel:
        constants = (
            *self.constants(),
            *tile_constants(self),
            ("STAGES", self.stages),
            ("WARP_ROWS", warps.own),
            ("WARP_COLS", warps.at_once),
            ("COL_WARPS", warps.beside),
        )
        name, threads = "fa2_backward_queries", warps.count(self.block_rows) * WARP
        return Kernel(f"{name}.cu", name, constants, self.grid, threads, total_bytes(self._tiles()), self.struct)


@dataclass(frozen=True)
class Fa2BackwardSchedule(_Fa2Kernels):
    """A phase is a column block of a key head, its visits the row blocks that see it, of every query head of the group."""

    algorithm: ClassVar[str] = "fa2"

    @property
    def state_words(self) -> int:
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
        """Q and dO blocks that there is room for."""
        stages = tiles.stages_for(self.problem, self.device, self.block_rows, self.block_cols)
        return 1 if stages is None else stages

    @cached_property
    def warps(self) -> Warps:
        """How its warps share S^T."""
        return tiles.warps_for(self.problem, self.device, self.block_rows, self.block_cols)

    @cached_property
    def by_rows(self) -> QueriesSchedule:
        """Row blocks as thread blocks."""
        used = tiles.fit_queries(self.problem, self.device, self.mask_blocks)
        return QueriesSchedule(self.problem, self.device, replace(self.tiling, used=used), mask_blocks=self.mask_blocks)

    @property
    def queries(self) -> QueriesSchedule | None:
        """What makes dQ, where atomics do not."""
        return self.by_rows if self.deterministic else None

    @cached_property
    def bases(self) -> RowBasesSchedule:
        """What finds m and l, in the same blocks as dQ's kernel."""
        rows, struct = self.by_rows, self.struct
        skips, own = has_bases(rows.problem) and bool(rows.mask_tiles), rows.mask_blocks
        return RowBasesSchedule(
            rows.problem, rows.device, rows.tiling, mask_blocks=own, given=struct, skips=skips, packed=rows.together
        )

    @property
    def beside(self) -> tuple[RowBasesSchedule | QueriesSchedule, ...]:
        """What has row blocks as thread blocks."""
        return (self.bases, *((self.queries,) if self.queries else ()))

    @property
    def given_tiles(self) -> tuple[MaskTiles, ...]:
        of_rows = next((each.given_tiles for each in self.beside if each.mask_tiles), ())
        return (*super().given_tiles, *of_rows)

    def _tiles(self) -> tuple[Room, ...]:
        return self._rooms(self.warps)

    def _rooms(self, warps: Warps) -> tuple[Room, ...]:
        return tiles.main_tiles(self.problem, self.block_rows, self.block_cols, self.stages, warps.beside)

    def _visit(self, launch: Launch, times: int, rows: int) -> Visit:
        p = self.problem
        moves = [
            Move("Q", rows * p.head_dim, p.itemsize, tile="Q, dO"),
            Move("dO", rows * p.head_dim_v, p.itemsize, tile="Q, dO" if launch.dk or self.stages else "V"),
            given_move(p, rows, "L, D"),
            *row_moves(p, rows, asked=0),
        ]
        if launch.dk:
            moves.append(Move("D", rows, FLOAT32, tile="L, D"))
            if not self.deterministic:
                # An atomic reads and writes.
                moves += [Move("dQ_acc", rows * padded_dim(p.head_dim), FLOAT32, write=write) for write in (False, True)]
        return Visit(times, tuple(moves))

    def _column_block(self, launch: Launch, times: int, cols: int, visits: tuple[Visit, ...]) -> Phase:
        """`times` column blocks that are visited, of `cols` keys that there are."""
        p = self.problem
        enter = [Move("K", cols * p.head_dim, p.itemsize, tile="K")]
        if launch.dk:
            enter.append(Move("V", cols * p.head_dim_v, p.itemsize, tile="V"))
        return Phase(times, enter=tuple(enter), visits=visits, tiles=self._tiles())

    def phases(self, *, literal: bool = False, keys: int | None = None, kept: Tiles | None = None) -> Iterator[Phase]:
        p, group = self.problem, self.group
        keys = p.seqlen_k if keys is None else keys
        heads = self.visited(keys, kept)

        every = (p.seqlen_q * p.head_dim_v, p.itemsize)  # the first kernel: D, dQ = 0
        enter = [Move("O", *every), Move("dO", *every), Move("D", p.seqlen_q, FLOAT32, write=True)]
        sums = Move("dQ_acc", p.seqlen_q * padded_dim(p.head_dim), FLOAT32)
        if not self.deterministic:
            enter.append(Move("dQ_acc", sums.elements, FLOAT32, write=True))
        if p.options.sinks:
            enter += [Move(name, p.seqlen_q, FLOAT32, write=name == "dsinks") for name in ("sinks", "dsinks")]
            enter.append(given_move(p, p.seqlen_q))
        yield Phase(group, enter=tuple(enter))

        of_keys = sum(self._keys(each, keys) for each in heads)
        asked = int(sum(each.asked.count(0, self.col_blocks) @ self._rows() for each in heads))
        for launch in launches(p):
            yield Phase(1, enter=(*key_moves(p, of_keys), *row_moves(p, 0, asked)))
            yield from self._launch(launch, literal, keys, heads)
            yield from self.extras(heads, keys, self.col_blocks, self.group)
            gradients = (("dK", p.head_dim, launch.dk), ("dV", p.head_dim_v, launch.dv))
            leave = (Move(name, p.seqlen_k * d, p.itemsize, write=True) for name, d, made in gradients if made)
            yield Phase(1, leave=tuple(leave))
        if self.dbias:
            scores = sum(visited_scores(self, each, keys) for each in heads)
            yield Phase(1, enter=tuple(Move("dbias", scores, FLOAT32, write=write) for write in (False, True)))
        if not self.deterministic:
            yield Phase(group, enter=(sums,), leave=(Move("dQ", p.seqlen_q * p.head_dim, p.itemsize, write=True),))

    def _keys(self, visited: Visited, keys: int) -> int:
        """Those of the column blocks that a query head visits."""
        return int(np.clip(keys - visited.columns * self.block_cols, 0, self.block_cols).sum())

    def _launch(self, launch: Launch, literal: bool, keys: int, heads: list[Visited]) -> Iterator[Phase]:
        """The column blocks that any row block visits."""
        columns = np.unique(np.concatenate([each.columns for each in heads]))
        tail = (keys - 1) // self.block_cols
        tail_cols, rows = keys - tail * self.block_cols, self._rows()
        spans = [(j, j + 1) for j in columns.tolist()] if literal else [(0, tail), (tail, tail + 1)]
        for lo, hi in spans:
            steps = int(((lo <= columns) & (columns < hi)).sum())
            if steps:
                visits = np.sum([each.count(lo, hi) for each in heads], axis=0)
                kinds = tuple(self._visit(launch, int(visits[rows == extent].sum()), extent) for extent in np.unique(rows).tolist())
                yield self._column_block(launch, steps, tail_cols if lo == tail else self.block_cols, kinds)

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        yield from super().parts(literal=literal)
        for each in self.beside:
            yield from each.parts(literal=literal)

    def workspaces(self) -> Mapping[str, Workspace]:
        spaces = {"D": Workspace(self.query_shape, "float32")}
        if not self.deterministic:
            heads, rows = self.query_shape
            whole = -(-rows // SUMMED_ROWS) * SUMMED_ROWS
            spaces["dQ_acc"] = Workspace((heads, whole, padded_dim(self.problem.head_dim)), "float32")
        for each in self.beside:
            spaces |= each.workspaces()
        return spaces | self.tile_workspaces()

    def kernels(self) -> tuple[Kernel, ...]:
        p = self.problem
        require_dtype(p.dtype, self.device)
        require_mask_blocks(self)
        if self.dbias and not p.options.bias:
            raise ValueError("dbias is the gradient of a bias, and there is none")

        source, made = "fa2_backward.cu", launches(p)
        beside_main = self._constants(made[-1], self.warps)
        # The kernels before and behind are compiled with the launch that makes dK.
        pairs, total_q = self.query_shape
        row_grid = pairs * -(-total_q // (ROW_THREADS // tiles.row_lanes(p)))
        rows = Kernel(source, "fa2_backward_rows", beside_main, row_grid, ROW_THREADS, 0, self.struct)
        others = tiles.narrower(self.warps, self.block_rows)
        main = [replace(self._main(each, self.warps), instead=tuple(self._main(each, warps) for warps in others)) for each in made]
        before_main = *self.tile_kernels(), *self.bases.kernels(), rows
        if self.queries is not None:
            return (*before_main, *main, *self.queries.kernels())
        pieces = padded_dim(p.head_dim) // GRANULE  # side by side, of as many threads as they have rows
        threads = ROW_THREADS * (1 if pieces * SUMMED_ROWS <= ROW_THREADS else 2)
        of_block = threads // SUMMED_ROWS // pieces * SUMMED_ROWS
        finish = Kernel(source, "fa2_backward_finish", beside_main, pairs * -(-total_q // of_block), threads, 0, self.struct)
        return (*before_main, *main, finish)

    def _main(self, launch: Launch, warps: Warps) -> Kernel:
        """The main kernel, whose warps share a block so."""
        threads, shared = warps.count(self.block_cols) * WARP, total_bytes(self._rooms(warps))
        return Kernel("fa2_backward.cu", "fa2_backward", self._constants(launch, warps), self.grid, threads, shared, self.struct)

    def _constants(self, launch: Launch, warps: Warps) -> tuple[tuple[str, int | str], ...]:
        return (
            *self.constants(),
            *tile_constants(self),
            ("STAGES", self.stages),
            ("WARP_KEYS", warps.own),
            ("WARP_ROWS", warps.at_once),
            ("ROW_WARPS", warps.beside),
            ("WITH_DK", int(launch.dk)),
            ("WITH_DV", int(launch.dv)),
            ("WITH_DQ", int(launch.dk and not self.deterministic)),
            ("DBIAS", int(launch.dk and self.dbias)),
        )
