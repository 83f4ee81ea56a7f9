"""The base of the backward pass's schedules: a (batch, key head) at a time, its gradients dK and dV on chip."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from cupyflash.basics import Array
from cupyflash.launch import params
from cupyflash.launch.params import CapturedField, Field, Params
from cupyflash.request.score_sums import LARGEST, sum_field
from cupyflash.schedules.base import TileSchedule, attention_params
from cupyflash.schedules.mask_tiles import MaskTiles, words
from cupyflash.schedules.moves import BEGIN, Move, Room, Walk, captured, length_reads, search_reads, tile_reads
from cupyflash.schedules.packed import Packed
from cupyflash.schedules.parts import Part


def gradient_params(*own: Field) -> Params:
    """The struct of a backward's kernels: the fields of `attention_params`, dO, the gradients, and fields of its `own`."""
    return attention_params(
        Field("dO", "const Element", params.ROWS),
        *params.arrays("Element", params.ROWS, ("dQ", "dK", "dV")),
        Field("dbias", "float", params.SCORES),
        Field("bases", "Base", params.POINTER),
        *own,
    )


@dataclass(frozen=True)
class BackwardSchedule(TileSchedule):
    """A schedule of dQ, dK and dV (and of the bias's gradient, with `dbias`) from dO, O and L.

    `dscore`: the names of arrays that the score function has captured, whose gradients it makes, too.

    `deterministic`: an algorithm that would otherwise sum in any order gives the same bits each time. `mask_blocks`: the block
    sizes of the block mask, if they differ from the schedule's, which divide them.
    """

    results: ClassVar[tuple[str, ...]] = ("dQ", "dK", "dV")

    deterministic: bool = False
    dbias: bool = False
    dscore: tuple[str, ...] = ()
    mask_blocks: tuple[int, int] | None = None

    @property
    def sum_fields(self) -> tuple[Field, ...]:
        form = self.problem.options.score
        axes = {one.name: one.axes or 0 for one in form.captured} if form else {}
        type_ = "long long" if self.deterministic else "float"
        largest = (Field(LARGEST, "unsigned", params.POINTER),) if self.dscore and self.deterministic else ()
        return (*(CapturedField.of(sum_field(name), type_, axes[name]) for name in self.dscore), *largest)

    @property
    def row_results(self) -> tuple[str, ...]:
        """The tensors that the kernels write for each row besides, in float32 and of L's shape: the gradient of a number that a
        head has one of."""
        return ()

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.problem.group

    @property
    def repeats(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @property
    def shares(self) -> tuple[int, int]:
        """Row blocks and column blocks that share an element of the block mask."""
        rows, cols = self.mask_blocks or self.blocks
        return rows // self.block_rows, cols // self.block_cols

    def _by_heads(self, block_mask: Array) -> Array:
        rows, cols = self.shares
        spread = block_mask.repeat(rows, axis=2).repeat(cols, axis=3)[:, :, : self.row_blocks, : self.col_blocks]
        return super()._by_heads(spread)


@dataclass(frozen=True)
class RowBlocksOutside(BackwardSchedule):
    """A kernel beside the gradients' main one, with row blocks as thread blocks: they visit the column blocks that they see, from
    the last one on. `packed`: the sequences, if they are packed. `skips`: True if it leaves out tiles that a mask leaves empty,
    provided that there is room for their states."""

    packed: Packed | None = None
    skips: bool = True

    @property
    def together(self) -> Packed | None:
        return self.packed

    @property
    def state_words(self) -> int | None:
        return words(self.problem.seqlen_k, self.block_cols) if self.skips else None

    @property
    def mask_tiles(self) -> tuple[MaskTiles, ...]:
        return tuple(replace(each, field="query_tiles") for each in super().mask_tiles)

    @property
    def grid(self) -> int:
        """The number of thread blocks."""
        p = self.problem
        return p.head_count * self.row_blocks if self.packed is None else p.heads * self.packed.blocks("q", self.block_rows)

    @abstractmethod
    def walks(self, parts: tuple[Part, ...] | None = None) -> Iterator[Walk]:
        """The walks through some parts, by default the schedule's own."""

    def row_walk(self, kernel: str, parts: tuple[Part, ...], moves: Iterable[Move], rooms: tuple[Room, ...]) -> Walk:
        """A walk that makes `moves`, after the reads by which all such kernels find their work."""
        p, packed = self.problem, self.packed
        first = (*search_reads(packed, "q"), *length_reads(p), *tile_reads(self), *captured(p, "head", BEGIN))
        return Walk(kernel, self, parts, "gI", "J", (*first, *moves), rooms, works=self.grid if packed else None)
