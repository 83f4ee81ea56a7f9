"""Where the rows and keys of each batch lie, or of each packed sequence; which tiles it visits; and how thread blocks find it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from cupyflash.problem import Problem
from cupyflash.schedules import TileSchedule, VarlenBackwardSchedule, VarlenSchedule
from cupyflash.schedules.base import Tiles, Visited
from cupyflash.schedules.packed import SEARCHED, Packed
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Memory, Tensor

LENGTH = 4  # bytes of a key length, and of a bound of packed sequences


@dataclass(frozen=True)
class Part:
    """Batch `number`, or the packed sequence of that number by a `schedule` of its own; it has so many `keys`.

    `rows` and `columns` are, of what has a row for each query or each key, row 0 of head 0 and the rows from a head to the next.
    """

    number: int
    schedule: TileSchedule
    keys: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    kept: Tiles | None = None
    """What masks keep of each query head's tiles, (heads, Tr, Tc)"""

    @property
    def problem(self) -> Problem:
        return self.schedule.problem

    def query(self, head: Any) -> Any:
        """Row 0 of a query head, or of several."""
        return self.rows[0] + head * self.rows[1]

    def key(self, kv_head: Any) -> Any:
        """Row 0 of a key head."""
        return self.columns[0] + kv_head * self.columns[1]

    def kv_head(self, head: int) -> int:
        """The key head that a query head reads."""
        return head // (self.problem.heads // self.problem.kv_heads)

    @cached_property
    def _visited(self) -> list[Visited]:
        """Of each query head, or once for all."""
        kept = [None] if self.kept is None else [self.kept.at(head) for head in range(len(self.kept.kept))]
        return [Visited.of(self.schedule, self.keys, each) for each in kept]

    def visited(self, head: int) -> Visited:
        """Which column blocks the row blocks of a query head visit."""
        return self._visited[head if self.kept is not None else 0]


def parts_of(schedule: TileSchedule, own: Callable[[Any], TileSchedule] = lambda one: one) -> list[Part]:
    """All of a schedule; of a packed sequence by `own` of what it is by itself."""
    p = schedule.problem
    if isinstance(schedule, VarlenSchedule | VarlenBackwardSchedule):
        return list(_sequences(schedule, own))
    tiles, lengths = schedule.kept_tiles(), p.options.key_lengths or (p.seqlen_k,) * p.batch
    return [
        Part(
            batch,
            schedule,
            keys,
            (batch * p.heads * p.seqlen_q, p.seqlen_q),
            (batch * p.kv_heads * p.seqlen_k, p.seqlen_k),
            None if tiles is None else tiles.at(batch),
        )
        for batch, keys in enumerate(lengths)
    ]


def _sequences(schedule: VarlenSchedule | VarlenBackwardSchedule, own: Callable[[Any], TileSchedule]) -> Iterator[Part]:
    packed, query, key = schedule.packed, 0, 0
    for number, each in enumerate(schedule.in_order()):
        one = own(each)
        p, tiles = one.problem, one.kept_tiles()
        kept = None if tiles is None else tiles.at(0)
        yield Part(number, one, p.seqlen_k, (query, packed.total_q), (key, packed.total_k), kept)
        query, key = query + p.seqlen_q, key + p.seqlen_k


def row_count(schedule: TileSchedule) -> int:
    """Of what has a row for each query of each head."""
    p, packed = schedule.problem, schedule.together
    return p.head_count * p.seqlen_q if packed is None else p.heads * packed.total_q


def key_count(schedule: TileSchedule) -> int:
    """Of what has a row for each key of each key head."""
    p, packed = schedule.problem, schedule.together
    return p.batch * p.kv_heads * p.seqlen_k if packed is None else p.kv_heads * packed.total_k


@dataclass(frozen=True)
class Bounds:
    """Where packed sequences begin along one axis ("q" or "k"), of which thread blocks have `size` rows, and how one is found."""

    packed: Packed
    axis: str
    size: int
    begins: np.ndarray
    own: Tensor
    other: Tensor

    @classmethod
    def of(cls, packed: Packed, axis: str, size: int, parts: list[Part], memory: Memory) -> Bounds:
        of_axis = [(part.rows if axis == "q" else part.columns)[0] for part in parts]
        q, k = (memory.rows(f"cu_seqlens_{name}", packed.sequences + 1, LENGTH) for name in "qk")
        return cls(packed, axis, size, np.array(of_axis, np.int64), *((q, k) if axis == "q" else (k, q)))

    @property
    def first_blocks(self) -> np.ndarray:
        """The number of each sequence's first thread block among those of a head."""
        found: np.ndarray = self.begins // self.size + np.arange(len(self.begins))
        return found

    @property
    def blocks(self) -> int:
        """Thread blocks of a head."""
        return self.packed.blocks(self.axis, self.size)

    def found(self) -> tuple[np.ndarray, np.ndarray]:
        """Of all of them: the sequence, and which of its blocks, which may be one more than it has."""
        index, first = np.arange(self.blocks), self.first_blocks
        sequence = np.searchsorted(first, index, "right") - 1
        return sequence, index - first[sequence]

    def halvings(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The bounds of both axes that threads read which each look for one by themselves (`sequence_of` in fa3_queue.cu)."""
        sequence, read = np.zeros_like(index), []
        for bit in reversed(range(max(1, (self.packed.sequences - 1).bit_length()))):
            nearer = np.minimum(sequence + (1 << bit), self.packed.sequences - 1)
            read.append(nearer)
            sequence = np.where(self.first_blocks[nearer] <= index, nearer, sequence)
        of_one = [sequence, sequence + 1]
        return np.concatenate(read + of_one), np.concatenate(of_one)

    def search(self, move: int, sequence: int, times: int = 1) -> Iterator[Requests]:
        """What is read to find one: 32 bounds at a time (`search_sequence` in sequence.cuh), then its own two of both axes."""
        steps = [1]
        while SEARCHED * steps[-1] < self.packed.sequences:
            steps.append(SEARCHED * steps[-1])
        for step in steps:
            first = sequence // (SEARCHED * step) * SEARCHED * step
            lanes = np.minimum(first + np.arange(SEARCHED) * step, self.packed.sequences - 1)
            yield Requests.of_elements(np.zeros_like(lanes), move, self.own.first + lanes * LENGTH, np.array(times), LENGTH)
        for tensor in (self.own, self.other):
            yield tensor.of(0, move, sequence, 2, asked=2 * times)
