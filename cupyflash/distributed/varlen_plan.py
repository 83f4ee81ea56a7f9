"""The calls that a rank makes of packed sequences that are cut over ranks, wherever the cuts fall."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

from cupyflash.distributed.layout import Chunk, Part, placed
from cupyflash.distributed.plan import PackedPiece, Piece, PlanOverRanks, SeenBand


@dataclass(frozen=True)
class VarlenPlan(PlanOverRanks):
    """The plan for sequences with these bounds. Tokens are cut by the layout, with no regard to where sequences begin."""

    cu_seqlens_q: tuple[int, ...] = (0,)
    cu_seqlens_k: tuple[int, ...] = (0,)

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        if self.gather:
            return (0,)
        ranks = range(self.ranks)
        return (0, *(shift for shift in ranks if shift and any(self._sees(rank, shift) for rank in ranks)))

    def _sees(self, rank: int, shift: int) -> bool:
        """True if any row of a rank sees any key of the rank that many before it."""
        return bool(self.pieces(self.q_parts[rank], self.k_parts[(rank - shift) % self.ranks]))

    def pieces(self, rows: Part, keys: Part) -> tuple[Piece | PackedPiece, ...]:
        chunks = product(placed(rows), placed(keys))
        return tuple(piece for mine, there in chunks for piece in self._calls(mine, there))

    def _calls(self, rows: Chunk, keys: Chunk) -> Iterator[Piece | PackedPiece]:
        run: list[int] = []  # whole sequences, one behind the other
        for sequence in self._sequences(rows.positions):
            q, k = self._bounds(sequence)
            n_q, n_k = q[1] - q[0], k[1] - k[0]
            mine, there = rows.within(*q), keys.within(*k)
            if len(mine) == n_q and len(there) == n_k:
                run.append(sequence)
                continue
            yield from self._packed(rows, keys, run)
            run = []
            if mine and there and (band := SeenBand.of(rows, keys, q, k, self.reach)):
                yield band.piece(sequence, n_q, n_k)
        yield from self._packed(rows, keys, run)

    def _bounds(self, sequence: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The begin and end of a sequence's rows, and of its keys."""
        of_rows, of_keys = self.cu_seqlens_q, self.cu_seqlens_k
        return (of_rows[sequence], of_rows[sequence + 1]), (of_keys[sequence], of_keys[sequence + 1])

    def _sequences(self, tokens: range) -> list[int]:
        """The sequences that have rows among these tokens."""
        found = enumerate(pairwise(self.cu_seqlens_q))
        return [number for number, (begin, end) in found if begin < tokens.stop and end > tokens.start and begin < end]

    def _packed(self, rows: Chunk, keys: Chunk, run: list[int]) -> Iterator[PackedPiece]:
        """Sequences of a run that are one behind the other among the keys, too: those between them without rows have no keys."""
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
                yield PackedPiece(
                    rows.local(range(q, q_end)), keys.local(range(k, k_end)), first, *(tuple(each) for each in bounds)
                )
            run = [number for number in run if number > last]
