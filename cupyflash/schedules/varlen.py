"""FlashAttention-2 of sequences of their own lengths, packed one behind the other: a sum of schedules of fixed length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cupyflash.schedules.base import Move, Phase
from cupyflash.schedules.fa2 import Fa2Schedule


@dataclass(frozen=True)
class VarlenSchedule(Fa2Schedule):
    """FlashAttention-2's schedule for `problem.batch` sequences, the longest of `seqlen_q` queries and `seqlen_k` keys.

    `seqlens` has the (queries, keys) of each; None where the host does not know them: counts are then of full length.
    Every sequence has the thread blocks of the longest; those beyond its rows read its bounds and leave.
    """

    seqlens: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        p = self.problem
        if p.mask or p.bias or p.padded or p.block_mask:
            raise ValueError("packed sequences have no mask, bias, key lengths or block mask")
        if self.seqlens is not None:
            longest = [(n_q, n_k) for n_q, n_k in self.seqlens if not (0 <= n_q <= p.seqlen_q and 0 <= n_k <= p.seqlen_k)]
            if len(self.seqlens) != p.batch or longest:
                raise ValueError(
                    f"seqlens must be {p.batch} pairs of at most {p.seqlen_q:,} queries and {p.seqlen_k:,} keys, got {self.seqlens}"
                )

    def sequences(self) -> Mapping[Fa2Schedule, int]:
        """The schedule of each sequence, as a batch of its own, and how many are like it."""
        p = self.problem
        seqlens = ((p.seqlen_q, p.seqlen_k),) * p.batch if self.seqlens is None else self.seqlens
        return {
            Fa2Schedule(replace(p, packed=False, batch=1, seqlen_q=n_q, seqlen_k=n_k), self.device, self.tiling, self.lse): count
            for (n_q, n_k), count in Counter(seqlens).items()
        }

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        bounds = tuple(Move(name, 2, 4) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        yield self.repeats, iter([Phase(self.row_blocks, enter=bounds)])
        for schedule, count in self.sequences().items():
            for repeats, phases in schedule.parts(literal=literal):
                yield count * repeats, phases
