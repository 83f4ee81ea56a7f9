"""FlashAttention-2's forward (arXiv 2307.08691): row blocks are thread blocks, O, l and m stay on chip to the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from cupyflash.params import Params
from cupyflash.schedules import fa2_tiles
from cupyflash.schedules.base import (
    FLOAT32,
    GRANULE,
    Kernel,
    Move,
    Phase,
    Room,
    Tiles,
    TileSchedule,
    Visit,
    Visited,
    Workspace,
    attention_params,
    element_constants,
    require_block_mask,
    require_dtype,
    tile_constants,
)
from cupyflash.schedules.mask_tiles import kept_bytes, words
from cupyflash.schedules.moves import (
    block_mask_moves,
    head_moves,
    key_moves,
    keys_read,
    length_moves,
    part_bytes,
    row_moves,
    score_moves,
)

# What the ring holds in a replay of block sizes that no kernel runs: one K and one V block.
LEAST_STAGES = 1


class Fa2Schedule(TileSchedule):
    """FlashAttention-2's schedule: a phase is a row block, its visits the column blocks that it sees."""

    algorithm: ClassVar[str] = "fa2"
    params: ClassVar[Params] = attention_params()
    # Where K and V blocks are held
    rings: ClassVar[Mapping[str, str]] = {"K": "K, V", "V": "K, V"}
    # Whether what score and mask functions read for a row or a key is read once for a tile of them, and not for each score
    by_tiles: ClassVar[bool] = True

    @property
    def state_words(self) -> int:
        return words(self.problem.seqlen_k, self.block_cols)

    @property
    def candidate(self) -> fa2_tiles.Candidate:
        """How the kernel runs these block sizes. Raises `DoesNotFit` where it cannot."""
        require_dtype(self.problem.dtype, self.device)
        if self.block_rows % GRANULE or self.block_cols % GRANULE:
            raise ValueError(f"the fa2 kernel runs blocks in steps of {GRANULE}; the tiling asks for {self.tiling.used}")
        return fa2_tiles.choose(self.problem, self.device, (self.block_rows, self.block_cols))

    def _tiles(self) -> tuple[Room, ...]:
        """The Q block, which O leaves through, the ring of K and V blocks, S on its way between warps, and the block mask."""
        p = self.problem
        if self.block_rows % GRANULE or self.block_cols % GRANULE:
            row, stages = max(p.head_dim, p.head_dim_v) * p.itemsize, LEAST_STAGES
        else:
            row = fa2_tiles.row_size(p)
            best = fa2_tiles.candidates(p, self.device, (self.block_rows, self.block_cols))[0]
            stages = LEAST_STAGES if best.rejected else best.config.stages
        rooms = {
            "Q": self.block_rows * row,
            "K, V": 2 * stages * self.block_cols * row,
            "S": fa2_tiles.exchange_bytes(p, self.block_rows, self.block_cols),
            "block_mask": kept_bytes(p, words(p.seqlen_k, self.block_cols)),
            "parts": part_bytes(p, self.block_rows, 2 * self.block_cols),
        }
        return tuple(Room(name, nbytes) for name, nbytes in rooms.items())

    def _row_block(self, times: int, rows: int, full_visits: int, tail_visits: int, tail_cols: int) -> Phase:
        """`times` row blocks of `rows` rows that visit full and ragged column blocks so often in all, or see none."""
        p = self.problem
        visits = tuple(
            Visit(
                count,
                (
                    Move("K", cols * p.head_dim, p.itemsize, tile=self.rings["K"]),
                    Move("V", cols * p.head_dim_v, p.itemsize, tile=self.rings["V"]),
                    *(key_moves(p, cols, asked=0) if self.by_tiles else ()),
                ),
            )
            for count, cols in ((full_visits, self.block_cols), (tail_visits, tail_cols))
            if count
        )
        enter = [*self._length_moves(), *self._head_moves()]
        if visits:
            enter.append(Move("Q", self.pack * self.copied_rows(rows) * p.head_dim, p.itemsize, tile="Q"))
            enter += row_moves(p, rows) if self.by_tiles else ()
        leave = [Move("O", self.pack * rows * p.head_dim_v, p.itemsize, write=True, tile=self.out_room)]
        if self.lse:
            leave.append(Move("L", self.pack * rows, FLOAT32, write=True))
        return Phase(times, enter=tuple(enter), visits=visits, leave=tuple(leave), tiles=self._tiles())

    def phases(self, *, literal: bool = False, keys: int | None = None, kept: Tiles | None = None) -> Iterator[Phase]:
        p = self.problem
        keys = p.seqlen_k if keys is None else keys
        if self.row_blocks == 0:
            return
        visited = Visited.of(self, keys, kept)
        tail = -(-keys // self.block_cols) - 1  # of the column blocks, the one that may be short
        tail_rows, tail_cols = p.seqlen_q - (self.row_blocks - 1) * self.block_rows, self.tail_cols(tail, keys)
        full_visits, tail_visits = visited.count(0, tail), visited.count(tail, tail + 1)
        every = np.arange(self.row_blocks)
        last, none = every == self.row_blocks - 1, full_visits + tail_visits == 0
        kinds = (~last & none, ~last & ~none, last)
        for blocks in every[:, None] if literal else [every[kind] for kind in kinds]:
            if not len(blocks):
                continue
            rows = tail_rows if blocks[0] == self.row_blocks - 1 else self.block_rows
            visits = int(full_visits[blocks].sum()), int(tail_visits[blocks].sum())
            yield self._row_block(len(blocks), rows, *visits, tail_cols)
        yield Phase(1, enter=block_mask_moves(self, visited.blocks))
        yield Phase(self.pack, enter=score_moves(self, [visited], keys, self.by_tiles))
        if self.by_tiles:
            yield Phase(1, enter=key_moves(p, 0, keys_read(self, visited.asked, keys)))

    @property
    def out_room(self) -> str:
        """What O leaves through."""
        return "Q"

    @property
    def pack(self) -> int:
        """Query heads whose rows share a row block."""
        return 1

    def _length_moves(self) -> tuple[Move, ...]:
        """What a row block reads to learn how many keys its batch has."""
        return length_moves(self.problem)

    def _head_moves(self) -> tuple[Move, ...]:
        """What a row block reads of a score function's arrays that is one for its head."""
        return head_moves(self.problem)

    def copied_rows(self, rows: int) -> int:
        """Rows that are copied of a row block of so many."""
        return rows

    def tail_cols(self, tail: int, keys: int) -> int:
        """Columns that are copied of the column block `tail`, where the keys end."""
        return keys - tail * self.block_cols

    @property
    def works(self) -> int:
        """Row blocks of all heads."""
        return self.repeats * self.row_blocks

    @property
    def grid(self) -> int:
        """Thread blocks."""
        return self.works

    def workspaces(self) -> Mapping[str, Workspace]:
        return self.tile_workspaces()

    def kernels(self) -> tuple[Kernel, ...]:
        best = self.candidate
        require_block_mask(self)
        same_blocks = fa2_tiles.candidates(self.problem, self.device, (self.block_rows, self.block_cols))
        others = tuple(self.kernel_of(each) for each in same_blocks if each is not best and not each.rejected)
        return (*self.tile_kernels(), replace(self.kernel_of(best), instead=others))

    def kernel_of(self, candidate: fa2_tiles.Candidate) -> Kernel:
        """The kernel with a configuration, one of the schedule's blocks where it is to be launched."""
        p, config = self.problem, candidate.config
        constants = (
            *element_constants(p, by_tiles=True),
            *tile_constants(self),
            ("BR", config.block_rows),
            ("BC", config.block_cols),
            ("WARP_ROWS", config.warp_rows),
            ("COL_WARPS", config.col_warps),
            ("STAGES", config.stages),
            ("BLOCKS", config.blocks),
            ("Q_IN_REGS", int(config.q_in_regs)),
            ("SCALE_FIRST", int(p.options.bias or p.options.transformed or p.softmax_scale <= 0)),
            ("VARLEN", int(p.options.packed)),
        )
        return Kernel("fa2_forward.cu", "fa2_forward", constants, self.grid, config.threads, candidate.shared_bytes, self.struct)
