"""FlashAttention-2 of sequences of their own lengths, packed one behind the other: a sum of schedules of fixed length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import ClassVar

from cupyflash.params import Params
from cupyflash.problem import Problem
from cupyflash.schedules.base import Move, Phase, attention_params
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule, QueriesSchedule
from cupyflash.schedules.fa2_backward_tiles import launches
from cupyflash.schedules.fa3 import MAPPED, OWN, Fa3Schedule
from cupyflash.tensor_maps import Box

Seqlens = tuple[tuple[int, int], ...]
# Bounds that the first warp of a thread block looks at in a step of its search
SEARCHED = 32


@dataclass(frozen=True)
class Packed:
    """Sequences packed along one axis: how many there are, and their queries and keys, all together."""

    sequences: int
    total_q: int
    total_k: int

    def blocks(self, tensor: str, size: int) -> int:
        """Thread blocks of a head for blocks of `size` queries ("q") or keys ("k"), wherever the sequences begin: sequence b has
        those from cu_seqlens[b] // size + b on, of which it needs all or all but one."""
        return (self.total_q if tensor == "q" else self.total_k) // size + self.sequences if self.sequences else 0

    def search(self, tensor: str, blocks: int) -> Phase:
        """What so many thread blocks read to find their sequences among the bounds of a tensor, and those of both tensors."""
        steps = 1
        while SEARCHED**steps < self.sequences:
            steps += 1
        looked = {"q": 2, "k": 2}
        looked[tensor] += SEARCHED * steps
        return Phase(blocks, enter=tuple(Move(f"cu_seqlens_{each}", bounds, 4) for each, bounds in looked.items()))


@dataclass(frozen=True)
class VarlenSchedule(Fa2Schedule):
    """FlashAttention-2's schedule for `problem.batch` sequences, the longest of `seqlen_q` queries and `seqlen_k` keys.

    `seqlens` has the (queries, keys) of each; None where the host does not know them: counts are then of full length. A thread
    block looks for its sequence; a sequence has one more than it needs at most, which leaves at once.
    """

    seqlens: Seqlens | None = None
    packed: Packed = Packed(0, 0, 0)

    def __post_init__(self) -> None:
        _require_packed(self.problem, self.seqlens)

    @property
    def works(self) -> int:
        return self.problem.heads * self.packed.blocks("q", self.block_rows)

    @property
    def searches(self) -> int:
        """How often a row block's sequence is looked for."""
        return 1

    def sequences(self) -> Mapping[Fa2Schedule, int]:
        """The schedule of each sequence, as a batch of its own, and how many are like it."""
        counted = _problems(self.problem, self.seqlens)
        return {Fa2Schedule(problem, self.device, self.tiling, self.lse): count for problem, count in counted.items()}

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        yield 1, iter([self.packed.search("q", self.works * self.searches)])
        for schedule, count in self.sequences().items():
            for repeats, phases in schedule.parts(literal=literal):
                yield count * repeats, phases


@dataclass(frozen=True)
class Fa3Sequence(Fa3Schedule):
    """One of several packed sequences: its last blocks are copied with what the tensors have behind it, to their end.

    `room_q` and `room_k` are the rows of Q and of K from the sequence's first on, as far as its blocks reach.
    """

    room_q: int = 0
    room_k: int = 0

    @property
    def pack(self) -> int:
        return 1


@dataclass(frozen=True)
class Fa3VarlenSchedule(VarlenSchedule, Fa3Schedule):
    """The same by FlashAttention-3: each warp looks for its thread block's sequence."""

    algorithm: ClassVar[str] = "fa3"
    params: ClassVar[Params] = attention_params(*OWN, maps=(*MAPPED, "O_row"))

    @property
    def searches(self) -> int:
        return self.warps

    def maps(self) -> Mapping[str, Box]:
        maps = super().maps()
        return {**maps, "O_row": replace(maps["O"], rows=1)}

    def sequences(self) -> Mapping[Fa2Schedule, int]:
        p, packed = self.problem, self.packed
        each = ((p.seqlen_q, p.seqlen_k),) * p.batch if self.seqlens is None else self.seqlens
        found: Counter[Fa2Schedule] = Counter()
        first_q = first_k = 0
        for n_q, n_k in each:
            room_q = min(packed.total_q - first_q, -(-n_q // self.block_rows) * self.block_rows)
            room_k = min(packed.total_k - first_k, -(-n_k // self.block_cols) * self.block_cols)
            one = replace(p.asking(packed=False), batch=1, seqlen_q=n_q, seqlen_k=n_k)
            found[Fa3Sequence(one, self.device, self.tiling, self.lse, room_q, room_k)] += 1
            first_q, first_k = first_q + n_q, first_k + n_k
        return found


@dataclass(frozen=True)
class VarlenQueriesSchedule(QueriesSchedule):
    """The backward's row blocks, of packed sequences."""

    packed: Packed = Packed(0, 0, 0)

    @property
    def grid(self) -> int:
        return self.problem.heads * self.packed.blocks("q", self.block_rows)


@dataclass(frozen=True)
class VarlenBackwardSchedule(Fa2BackwardSchedule):
    """FlashAttention-2's backward of packed sequences, as `VarlenSchedule`."""

    seqlens: Seqlens | None = None
    packed: Packed = Packed(0, 0, 0)

    def __post_init__(self) -> None:
        _require_packed(self.problem, self.seqlens)

    @property
    def query_shape(self) -> tuple[int, int]:
        return self.problem.heads, self.packed.total_q

    @property
    def grid(self) -> int:
        return self.problem.kv_heads * self.packed.blocks("k", self.block_cols)

    @cached_property
    def by_rows(self) -> VarlenQueriesSchedule:
        one = super().by_rows
        return VarlenQueriesSchedule(one.problem, one.device, one.tiling, packed=self.packed)

    def sequences(self) -> Mapping[Fa2BackwardSchedule, int]:
        """The schedule of each sequence, as a batch of its own, and how many are like it."""
        counted = _problems(self.problem, self.seqlens)
        return {
            Fa2BackwardSchedule(problem, self.device, self.tiling, deterministic=self.deterministic): count
            for problem, count in counted.items()
        }

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        yield len(launches(self.problem)), iter([self.packed.search("k", self.grid)])
        yield 1 if self.queries is None else 2, iter([self.packed.search("q", self.by_rows.grid)])
        for schedule, count in self.sequences().items():
            for repeats, phases in schedule.parts(literal=literal):
                yield count * repeats, phases


def packed_totals(problem: Problem, seqlens: Seqlens | None, totals: tuple[int, int] | None) -> Packed:
    """Of `problem.batch` sequences with so many queries and keys together: by default those of `seqlens`, or all the longest's."""
    _require_packed(problem, seqlens)
    if totals is not None and seqlens is not None and totals != (sum(n for n, _ in seqlens), sum(n for _, n in seqlens)):
        raise ValueError(f"totals must be what seqlens add up to, got {totals!r}")
    if totals is None:
        each = ((problem.seqlen_q, problem.seqlen_k),) * problem.batch if seqlens is None else seqlens
        totals = sum(n_q for n_q, _ in each), sum(n_k for _, n_k in each)
    whole = isinstance(totals, tuple) and all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 0 for n in totals)
    if not whole or len(totals) != 2:
        raise ValueError(f"totals must be (queries, keys) of all sequences together, got {totals!r}")
    return Packed(problem.batch, *totals)


def _require_packed(p: Problem, seqlens: Seqlens | None) -> None:
    """ValueError for masks that packed sequences have not, and for lengths of another batch or longer than the longest."""
    if p.options.masked or p.options.bias or p.options.padded or p.options.block_mask:
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
    return {replace(p.asking(packed=False), batch=1, seqlen_q=n_q, seqlen_k=n_k): count for (n_q, n_k), count in counted.items()}
