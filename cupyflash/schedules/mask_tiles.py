"""The states of a mask's tiles: which are empty, mixed or whole. A kernel of its own finds them, before those that skip tiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from cupyflash.basics import Array
from cupyflash.expressions.tree import depends_on
from cupyflash.request import score
from cupyflash.request.problem import Problem
from cupyflash.schedules.moves import BEGIN, END, PLACES, Move, Of, loaded, tensor
from cupyflash.schedules.packed import Packed

# Of a launch of the kernel; a thread block has a tile.
THREADS = 128
MOST_TILES = 2**31 - 1
# What a thread block that skips tiles keeps of the states in shared memory: two bits a tile, in words of 32, of so many bytes at
# most. Where a mask has more tiles than either, none are skipped.
MOST_STATE_BYTES = 16384
# By so many bytes at a time, so that all usual lengths have one kernel.
STEP_BYTES = 512


def words(length: int, size: int) -> int:
    """Words of 32 bits for a bit of each block of `size`."""
    return math.ceil(math.ceil(length / size) / 32)


def kept_bytes(problem: Problem, words: int) -> int:
    """Bytes of shared memory for the states of tiles, if a bit of each takes `words` words."""
    if problem.options.masked and 8 * words <= MOST_STATE_BYTES:
        return -(-8 * words // STEP_BYTES) * STEP_BYTES
    return 4 * words if problem.options.block_mask is not None else 0


def block_mask_bytes(problem: Problem, row_blocks: int, block_cols: int) -> int:
    """Bytes of shared memory for the block masks of `row_blocks` row blocks, a bit a block in words of 32."""
    return 4 * row_blocks * words(problem.seqlen_k, block_cols) if problem.options.block_mask is not None else 0


@dataclass(frozen=True)
class MaskTiles:
    """The states of a mask's tiles of `blocks` (Br, Bc): a byte each, (b or 1, h or 1, Tr, Tc), in the array `field` of the
    kernels' struct.

    For `packed` sequences the shape is (1, h or 1, row blocks, Tc): the states of sequence b begin at cu_seqlens_q[b] // Br + b,
    wherever that is, and Tc is the longest sequence's. Tiles beyond a sequence are neither written nor read.
    """

    problem: Problem
    blocks: tuple[int, int]
    field: str = "tiles"
    packed: Packed | None = None

    @property
    def planes(self) -> tuple[int, int]:
        """(batches, heads) for which the states differ: the problem's numbers, or 1."""
        p = self.problem
        if p.options.pattern is not None:
            return p.options.pattern.shape[:2]
        if p.options.mask_function is None:
            return p.batch, p.heads
        changes = depends_on(p.options.mask_function.tree)
        return p.batch if "batch" in changes and self.packed is None else 1, p.heads if "head" in changes else 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The array's shape."""
        rows, cols = (-(-n // size) for n, size in zip((self.problem.seqlen_q, self.problem.seqlen_k), self.blocks, strict=True))
        return (*self.planes, rows if self.packed is None else self.packed.blocks("q", self.blocks[0]), cols)

    @property
    def count(self) -> int:
        """The number of tiles."""
        return math.prod(self.shape)

    @property
    def states(self) -> Array | None:
        """EMPTY, MIXED or WHOLE for each tile; None if the host does not know, and counts them as mixed."""
        p = self.problem
        if p.options.pattern is None or p.options.pattern.bits is None:
            return None
        return p.options.pattern.states((p.seqlen_q, p.seqlen_k), self.blocks)

    def moves(self) -> tuple[Move, ...]:
        """The moves of a thread block: the reads for its tile, and the write of the state. Keys beyond a batch's length count."""
        p, form, here = self.problem, self.problem.options.mask_function, partial(Move, when=BEGIN, room=self.packed is None)
        state = Move(tensor(p, self.field), END, write=True)
        if form is None:
            return here(tensor(p, "mask", of="scores")), state
        of: Mapping[str, Of] = {**PLACES, "score": "scores"}  # each of the tile's, whatever its position
        places = zip(score.Parts._fields, score.parts(form), strict=True)
        return (*(here(loaded(form, load, of[place])) for place, loads in places for load in loads), state)

    def constants(self) -> score.Constants:
        """The constants with which the kernel is compiled."""
        form, (rows, cols) = self.problem.options.mask_function, self.blocks
        own = () if form is None else score.mask_constants(form, by_tiles=True)
        sizes = score.named(BR=rows, BC=cols, TILES=self.field, **{"VARLEN": 1} if self.packed else {})
        return (*score.named(ELEMENT="float", MASK=1 if form is None else 2), *own, *sizes)
