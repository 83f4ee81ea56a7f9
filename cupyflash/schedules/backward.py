"""What the schedules of the backward pass have in common: a (batch, key head) at a time, its gradients dK and dV on chip."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cupyflash import params
from cupyflash.params import Field, Params
from cupyflash.schedules.base import (
    Move,
    Phase,
    Room,
    Tiles,
    TileSchedule,
    Visit,
    Visited,
    attention_params,
    require_block_mask,
)


def gradient_params(*own: Field) -> Params:
    """The struct of a backward's kernels: what `attention_params` has, dO, the gradients, and fields of its `own`."""
    return attention_params(
        Field("dO", "const Element", params.ROWS),
        *params.arrays("Element", params.ROWS, ("dQ", "dK", "dV")),
        Field("dbias", "float", params.SCORES),
        Field("bases", "Base", params.POINTER),
        *own,
    )


@dataclass(frozen=True)
class BackwardSchedule(TileSchedule):
    """A schedule of dQ, dK and dV (and of the bias's gradient where `dbias`) from dO, O and L.

    `deterministic` is for an algorithm that would else sum in no order: the same bits each time. `mask_blocks` are the block sizes
    of the block mask where they are not the schedule's own, which divide them. Each of `repeats` (batch, key head) pairs runs
    `phases` for the query heads of its group.
    """

    results: ClassVar[tuple[str, ...]] = ("dQ", "dK", "dV")

    deterministic: bool = False
    dbias: bool = False
    mask_blocks: tuple[int, int] | None = None

    @property
    def row_results(self) -> tuple[str, ...]:
        """What the kernels make for each row besides, in float32 and of L's shape: the gradient of what a head has one of."""
        return ()

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        p = self.problem
        return p.heads // p.kv_heads if p.kv_heads else 1

    @property
    def repeats(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @property
    def shares(self) -> tuple[int, int]:
        """Row blocks and column blocks that share an element of the block mask."""
        rows, cols = self.mask_blocks or (self.block_rows, self.block_cols)
        return rows // self.block_rows, cols // self.block_cols

    @abstractmethod
    def phases(self, *, literal: bool = False, keys: int | None = None, kept: Tiles | None = None) -> Iterator[Phase]:
        """The phases of one (batch, key head) with `keys` keys, all seqlen_k when None, whose query heads visit the tiles that are
        `kept` (group, Tr, Tc), or all."""

    def visited(self, keys: int, kept: Tiles | None) -> list[Visited]:
        """What each query head of the group visits."""
        return [Visited.of(self, keys, None if kept is None else kept.at(head)) for head in range(self.group)]

    def _by_heads(self, block_mask: np.ndarray) -> np.ndarray:
        rows, cols = self.shares
        spread = block_mask.repeat(rows, axis=2).repeat(cols, axis=3)[:, :, : self.row_blocks, : self.col_blocks]
        return super()._by_heads(spread)

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        p, tiles = self.problem, self.kept_tiles()
        yield from self.tile_parts()
        if tiles is not None:
            for batch in range(p.batch):
                keys = p.options.key_lengths[batch] if p.options.key_lengths else None
                for first in range(0, p.heads, self.group):
                    yield 1, self.phases(literal=literal, keys=keys, kept=tiles.at(batch, slice(first, first + self.group)))
            return
        counted = {None: p.batch} if p.options.key_lengths is None else Counter(p.options.key_lengths)
        for keys, batches in counted.items():
            yield batches * p.kv_heads, self.phases(literal=literal, keys=keys)


@dataclass(frozen=True)
class RowBlocksOutside(BackwardSchedule):
    """A kernel beside the gradients' main one whose thread blocks are row blocks: a phase is one, its visits the column blocks that
    it sees, from the last one on."""

    @abstractmethod
    def _enter(self, seen: int) -> tuple[Move, ...]:
        """What comes first, for so many rows of row blocks that visit any column block."""

    @abstractmethod
    def _visit(self, cols: int) -> tuple[Move, ...]:
        """What a visit brings, of so many keys."""

    @abstractmethod
    def _leave(self, rows: int) -> tuple[Move, ...]:
        """What is written for so many rows, whatever they see."""

    @abstractmethod
    def _tiles(self) -> tuple[Room, ...]:
        """What is in shared memory."""

    @abstractmethod
    def _beside(self, heads: list[Visited], keys: int) -> Iterator[Phase]:
        """What is read besides, of the query heads that visit so."""

    def phases(self, *, literal: bool = False, keys: int | None = None, kept: Tiles | None = None) -> Iterator[Phase]:
        keys = self.problem.seqlen_k if keys is None else keys
        heads, rows = self.visited(keys, kept), self._rows()
        tail = (keys - 1) // self.block_cols
        for each in heads:
            visits = np.array([each.count(0, tail), each.count(tail, tail + 1)])
            for i in range(self.row_blocks) if literal else [slice(None)]:
                yield self._row_blocks(np.atleast_1d(rows[i]), np.atleast_2d(visits[:, i].T).T, keys - tail * self.block_cols)
        yield from self._beside(heads, keys)

    def _row_blocks(self, rows: np.ndarray, visits: np.ndarray, tail_cols: int) -> Phase:
        """Row blocks of `rows` rows that visit full and ragged column blocks so often (2, row blocks); in one phase."""
        seen = int(rows[visits.sum(axis=0) > 0].sum())
        sizes = zip(visits.sum(axis=1), (self.block_cols, tail_cols), strict=True)
        counted = tuple(Visit(int(times), self._visit(cols)) for times, cols in sizes if times)
        return Phase(1, enter=self._enter(seen), visits=counted, leave=self._leave(int(rows.sum())), tiles=self._tiles())


def require_mask_blocks(schedule: BackwardSchedule) -> None:
    """ValueError unless the block mask, if there is one, has an element for each of `mask_blocks`, and those are whole blocks."""
    require_block_mask(schedule, schedule.mask_blocks)
    own = schedule.block_rows, schedule.block_cols
    rows, cols = schedule.mask_blocks or own
    if schedule.problem.options.block_mask is not None and (rows % own[0] or cols % own[1]):
        raise ValueError(f"the block mask's blocks must be whole blocks of {own}, got {(rows, cols)}")


def require_no_dbias(schedule: BackwardSchedule) -> None:
    """ValueError for a gradient of the bias, which FlashAttention-2's kernels alone have."""
    if schedule.dbias:
        what = f"algorithm {schedule.algorithm!r}, which has no gradient of the bias: 'fa2' has"
        raise ValueError(f"dbias (a call's return_dbias) must be False for {what}")
