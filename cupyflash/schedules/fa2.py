"""FlashAttention-2's forward (arXiv 2307.08691): row blocks are thread blocks, O, l and m stay on chip to the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from cupyflash.launch.params import Params
from cupyflash.request.score import named
from cupyflash.schedules import fa2_tiles
from cupyflash.schedules.base import (
    GRANULE,
    Kernel,
    TileSchedule,
    Workspace,
    attention_params,
    element_constants,
    require_block_mask,
    require_dtype,
    tile_constants,
)
from cupyflash.schedules.mask_tiles import kept_bytes, words
from cupyflash.schedules.moves import (
    BEGIN,
    END,
    MIXED,
    SEEN,
    VISIT,
    Move,
    Room,
    Totals,
    Walk,
    captured,
    length_reads,
    part_bytes,
    score_reads,
    search_reads,
    sink_reads,
    tensor,
    tile_reads,
    writes,
)

# What the ring holds in a replay of block sizes that no kernel runs: one K and one V block.
LEAST_STAGES = 1


class Fa2Schedule(TileSchedule):
    """FlashAttention-2's schedule: a thread block is a row block, and visits the column blocks that it sees."""

    algorithm: ClassVar[str] = "fa2"
    params: ClassVar[Params] = attention_params()
    # Where K and V blocks are held
    rings: ClassVar[Mapping[str, str]] = {"K": "K, V", "V": "K, V"}
    # Whether what score and mask functions read for a row or a key is read once for a tile of them, and not for each score
    by_tiles: ClassVar[bool] = True
    # Whether boxes are copied whole, as far as there is room
    whole_boxes: ClassVar[bool] = False

    @property
    def state_words(self) -> int:
        return words(self.problem.seqlen_k, self.block_cols)

    @property
    def candidate(self) -> fa2_tiles.Fa2Candidate:
        """The kernel's configuration for these block sizes. Raises `DoesNotFit` if it cannot run them."""
        require_dtype(self.problem.dtype, self.device)
        if self.block_rows % GRANULE or self.block_cols % GRANULE:
            raise ValueError(f"the fa2 kernel runs blocks in steps of {GRANULE}; the tiling asks for {self.tiling.used}")
        return fa2_tiles.choose(self.problem, self.device, self.blocks)

    def _tiles(self) -> tuple[Room, ...]:
        """The Q block, which O leaves through, the ring of K and V blocks, S on its way between warps, and the block mask."""
        p = self.problem
        if self.block_rows % GRANULE or self.block_cols % GRANULE:
            row, stages = max(p.head_dim, p.head_dim_v) * p.itemsize, LEAST_STAGES
        else:
            row = fa2_tiles.row_size(p)
            best = fa2_tiles.candidates(p, self.device, self.blocks)[0]
            stages = LEAST_STAGES if best.rejected else best.config.stages
        rooms = {
            "Q": self.block_rows * row,
            "K, V": 2 * stages * self.block_cols * row,
            "S": fa2_tiles.exchange_bytes(p, *self.blocks),
            "block_mask": kept_bytes(p, words(p.seqlen_k, self.block_cols)),
            "parts": part_bytes(p, self.block_rows, 2 * self.block_cols),
        }
        return tuple(Room(name, nbytes) for name, nbytes in rooms.items())

    def walks(self) -> Iterator[Walk | Totals]:
        parts, moves, name = self.parts, tuple(self._moves()), f"{self.algorithm}_forward"
        yield from self.tile_walks(parts)
        yield Walk(name, self, parts, "gI", "J", moves, self._tiles(), pack=self.pack, works=self.searching, any_order=True)

    def _moves(self) -> Iterator[Move]:
        """A row block's moves: Q, each K and V that it sees from the last on, O and L."""
        p, by_tiles, whole = self.problem, self.by_tiles, self.whole_boxes
        yield from search_reads(self.together, "q", self.looks)
        yield from length_reads(p, self.looks)
        yield from tile_reads(self)
        yield from captured(p, "head", BEGIN, times=max(1, self.looks - 1))  # the producer warp has no scores
        yield Move(tensor(p, "Q"), SEEN, tile="Q", room=whole)
        yield from captured(p, "row", SEEN, by_tiles=by_tiles)
        yield Move(tensor(p, "K"), VISIT, tile=self.rings["K"], room=whole)
        yield from captured(p, "key", VISIT, MIXED, by_tiles=by_tiles)
        yield from score_reads(p, by_tiles=by_tiles)
        yield Move(tensor(p, "V"), VISIT, tile=self.rings["V"], room=whole)
        yield from sink_reads(p, END)
        yield from writes(p, END, "O", tile=self.out_room)
        yield from writes(p, END, *["L"] * self.lse)

    def sharing(self, kernel: str) -> int | None:
        return self.candidate.config.blocks if kernel == "fa2_forward" else None

    @property
    def out_room(self) -> str:
        """The room in SRAM through which O is stored."""
        return "Q"

    @property
    def pack(self) -> int:
        """Query heads whose rows share a row block."""
        return 1

    @property
    def looks(self) -> int:
        """Warps of a row block that each look for its work: the keys of its batch, its sequence."""
        return 1

    @property
    def searching(self) -> int | None:
        """Thread blocks that look for a row block, if not each finds one."""
        return None

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
        same_blocks = fa2_tiles.candidates(self.problem, self.device, self.blocks)
        others = tuple(self.kernel_of(each) for each in same_blocks if each is not best and not each.rejected)
        return (*self.tile_kernels(), replace(self.kernel_of(best), instead=others))

    def kernel_of(self, candidate: fa2_tiles.Fa2Candidate) -> Kernel:
        """The kernel with a configuration, whose blocks must be the schedule's for a launch."""
        p, config = self.problem, candidate.config
        constants = (
            *element_constants(p, by_tiles=True),
            *tile_constants(self),
            *named(BR=config.block_rows, BC=config.block_cols, WARP_ROWS=config.warp_rows, COL_WARPS=config.col_warps),
            *named(STAGES=config.stages, BLOCKS=config.blocks, Q_IN_REGS=int(config.q_in_regs)),
            *named(SCALE_FIRST=int(p.options.bias or p.options.transformed or p.softmax_scale <= 0), VARLEN=int(p.options.packed)),
        )
        return Kernel("fa2_forward.cu", "fa2_forward", constants, self.grid, config.threads, candidate.shared_bytes, self.struct)
