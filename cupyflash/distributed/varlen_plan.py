"""The calls that a rank makes of packed sequences that are cut over ranks, wherever the cuts fall."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from cupyflash.distributed.layout import Chunk, Part, arrivals, parts, placed
from cupyflash.distributed.plan import piece_of
from cupyflash.request.options import Window


class Cut(NamedTuple):
    """A call of attention: some rows of one sequence against some of its keys.

    As a `Piece`, but that `row` and `key` count in the sequence, which is number `sequence` and has n_q rows and n_k keys.
    """

    rows: range
    keys: range
    row: int
    key: int
    causal: bool
    window: Window | None
    sequence: int
    n_q: int
    n_k: int


class Packed(NamedTuple):
    """A call of packed attention: consecutive whole sequences, from number `sequence` on, with their bounds."""

    rows: range
    keys: range
    sequence: int
    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]


class VarlenStep(NamedTuple):
    source: int
    pieces: tuple[Cut | Packed, ...]


@dataclass(frozen=True)
class VarlenPlan:
    """A `RingPlan` for sequences with these bounds. The layout cuts tokens without regard to where sequences begin."""

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_k: tuple[int, ...]
    ranks: int
    layout: str
    reach: Window
    gather: bool

    @property
    def n_q(self) -> int:
        return self.cu_seqlens_q[-1]

    @property
    def n_k(self) -> int:
        return self.cu_seqlens_k[-1]

    @cached_property
    def q_parts(self) -> tuple[Part, ...]:
        return parts(self.n_q, self.ranks, self.layout)

    @cached_property
    def k_parts(self) -> tuple[Part, ...]:
        return parts(self.n_k, self.ranks, self.layout)

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """The distances of `RingPlan.shifts` at which any rank sees anything."""
        if self.gather:
            return (0,)
        ranks = range(self.ranks)
        return (0, *(shift for shift in ranks if shift and any(self._sees(rank, shift) for rank in ranks)))

    def _sees(self, rank: int, shift: int) -> bool:
        """True if any row of a rank sees any key of the rank that many before it."""
        return bool(self._pieces(self.q_parts[rank], self.k_parts[(rank - shift) % self.ranks]))

    def steps(self, rank: int) -> tuple[VarlenStep, ...]:
        found = arrivals(rank, self.k_parts, self.shifts, self.gather)
        return tuple(VarlenStep(source, self._pieces(self.q_parts[rank], keys)) for source, keys in found)

    def _pieces(self, rows: Part, keys: Part) -> tuple[Cut | Packed, ...]:
        return tuple(self._calls(placed(rows), placed(keys)))

    def _calls(self, of_rows: tuple[Chunk, ...], of_keys: tuple[Chunk, ...]) -> Iterator[Cut | Packed]:
        for rows, keys in product(of_rows, of_keys):
            run: list[int] = []  # whole sequences, one behind the other
            for sequence in self._sequences(rows.positions):
                q, k = self._bounds(sequence)
                mine, there = rows.within(*q), keys.within(*k)
                if len(mine) == q[1] - q[0] and len(there) == k[1] - k[0]:
                    run.append(sequence)
                    continue
                yield from self._packed(rows, keys, run)
                run = []
                if mine and there:
                    yield from self._cut(sequence, rows, keys)
            yield from self._packed(rows, keys, run)

    def _bounds(self, sequence: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The begin and end of a sequence's rows, and of its keys."""
        of_rows, of_keys = self.cu_seqlens_q, self.cu_seqlens_k
        return (of_rows[sequence], of_rows[sequence + 1]), (of_keys[sequence], of_keys[sequence + 1])

    def _sequences(self, tokens: range) -> list[int]:
        """The sequences that have rows among these."""
        found = enumerate(pairwise(self.cu_seqlens_q))
        return [number for number, (begin, end) in found if begin < tokens.stop and end > tokens.start and begin < end]

    def _cut(self, sequence: int, rows: Chunk, keys: Chunk) -> Iterator[Cut]:
        (q, q_end), (k, k_end) = self._bounds(sequence)
        mine, there = rows.within(q, q_end), keys.within(k, k_end)
        i, j, n_q, n_k = rows.local(mine), keys.local(there), q_end - q, k_end - k
        row, key = mine.start - q - i.start, there.start - k - j.start  # from a place in a part to one in the sequence
        found = piece_of(i, j, (row, key), row + n_k - n_q - key, self.reach)
        if found is not None:
            yield Cut(*found, sequence, n_q, n_k)

    def _packed(self, rows: Chunk, keys: Chunk, run: list[int]) -> Iterator[Packed]:
        """Sequences of a run that are consecutive among the keys, too: those between them without rows have no keys."""
        while run:
            first, last = run[0], run[0]
            for number in run[1:]:
                if self.cu_seqlens_k[last + 1] != self.cu_seqlens_k[number]:
                    break
                last = number
            (q, _), (k, _) = self._bounds(first)
            (_, q_end), (_, k_end) = self._bounds(last)
            if k < k_end:
                bounds = ([x - of[first] for x in of[first : last + 2]] for of in (self.cu_seqlens_q, self.cu_seqlens_k))
                yield Packed(rows.local(range(q, q_end)), keys.local(range(k, k_end)), first, *(tuple(each) for each in bounds))
            run = [number for number in run if number > last]
