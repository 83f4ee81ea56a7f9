"""FlashAttention-2 of sequences of their own lengths, packed one behind the other: a sum of schedules of fixed length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral

from cupyflash.problem import Problem
from cupyflash.schedules.base import Move, Phase
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.schedules.fa2_backward_tiles import launches

# What a thread block reads to find its sequence
BOUNDS = tuple(Move(name, 2, 4) for name in ("cu_seqlens_q", "cu_seqlens_k"))
Seqlens = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class VarlenSchedule(Fa2Schedule):
    """FlashAttention-2's schedule for `problem.batch` sequences, the longest of `seqlen_q` queries and `seqlen_k` keys.

    `seqlens` has the (queries, keys) of each; None where the host does not know them: counts are then of full length.
    Every sequence has the thread blocks of the longest; those beyond its rows read its bounds and leave.
    """

    seqlens: Seqlens | None = None

    def __post_init__(self) -> None:
        _require_packed(self.problem, self.seqlens)

    def sequences(self) -> Mapping[Fa2Schedule, int]:
        """The schedule of each sequence, as a batch of its own, and how many are like it."""
        counted = _problems(self.problem, self.seqlens)
        return {Fa2Schedule(problem, self.device, self.tiling, self.lse): count for problem, count in counted.items()}

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        yield self.repeats, iter([Phase(self.row_blocks, enter=BOUNDS)])
        for schedule, count in self.sequences().items():
            for repeats, phases in schedule.parts(literal=literal):
                yield count * repeats, phases


@dataclass(frozen=True)
class VarlenBackwardSchedule(Fa2BackwardSchedule):
    """FlashAttention-2's backward of `problem.batch` sequences with `total_q` queries together; else as `VarlenSchedule`."""

    seqlens: Seqlens | None = None
    total_q: int = 0

    def __post_init__(self) -> None:
        _require_packed(self.problem, self.seqlens)

    @property
    def query_rows(self) -> int:
        return self.problem.heads * self.total_q

    def sequences(self) -> Mapping[Fa2BackwardSchedule, int]:
        """The schedule of each sequence, as a batch of its own, and how many are like it."""
        counted = _problems(self.problem, self.seqlens)
        return {
            Fa2BackwardSchedule(problem, self.device, self.tiling, deterministic=self.deterministic): count
            for problem, count in counted.items()
        }

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        p = self.problem
        yield self.repeats, iter([Phase(len(launches(p)) * self.col_blocks, enter=BOUNDS)])
        if self.queries is not None:
            yield p.head_count, iter([Phase(self.queries.row_blocks, enter=BOUNDS)])
        for schedule, count in self.sequences().items():
            for repeats, phases in schedule.parts(literal=literal):
                yield count * repeats, phases


def _require_packed(p: Problem, seqlens: Seqlens | None) -> None:
    """ValueError for masks that packed sequences have not, and for lengths of another batch or longer than the longest."""
    if p.mask or p.bias or p.padded or p.block_mask:
        raise ValueError("packed sequences have no mask, bias, key lengths or block mask")
    if seqlens is not None:
        pairs = isinstance(seqlens, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in seqlens)
        if not pairs or not all(isinstance(length, Integral) for pair in seqlens for length in pair):
            raise TypeError(f"seqlens must be a tuple of (queries, keys), both integers, got {seqlens!r}")
        longer = [(n_q, n_k) for n_q, n_k in seqlens if not (0 <= n_q <= p.seqlen_q and 0 <= n_k <= p.seqlen_k)]
        if len(seqlens) != p.batch or longer:
            raise ValueError(
                f"seqlens must be {p.batch} pairs of at most {p.seqlen_q:,} queries and {p.seqlen_k:,} keys, got {seqlens}"
            )


def _problems(p: Problem, seqlens: Seqlens | None) -> Mapping[Problem, int]:
    """The problem of each sequence, of full length where that is not known, and how many are like it."""
    counted = Counter(((p.seqlen_q, p.seqlen_k),) * p.batch if seqlens is None else seqlens)
    return {replace(p, packed=False, batch=1, seqlen_q=n_q, seqlen_k=n_k): count for (n_q, n_k), count in counted.items()}
