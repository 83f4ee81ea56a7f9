"""FlashAttention-2 for sequences of their own lengths, packed one after the other: a sum of schedules of fixed length."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from cupyflash.arrays import is_number
from cupyflash.basics import Array, Values
from cupyflash.launch import params
from cupyflash.launch.params import Params
from cupyflash.launch.tensor_maps import Box
from cupyflash.request.options import Pattern, require_taken
from cupyflash.request.problem import Problem
from cupyflash.request.score import seen_by
from cupyflash.schedules.backward import RowBlocksOutside
from cupyflash.schedules.base import TileSchedule, attention_params
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule, QueriesSchedule
from cupyflash.schedules.fa3 import MAPPED, OWN, Fa3Schedule
from cupyflash.schedules.fa3_backward import Fa3BackwardSchedule
from cupyflash.schedules.fa3_queue import Grouping, Items
from cupyflash.schedules.mask_tiles import MaskTiles
from cupyflash.schedules.packed import NO_SEQUENCES, Packed
from cupyflash.schedules.parts import Part, Visited, packed_parts
from cupyflash.schedules.row_bases import RowBasesSchedule
from cupyflash.tiling import Tiling

Seqlens = tuple[tuple[int, int], ...]
# What a mask function says of each sequence
Patterns = tuple[Pattern, ...]


One = TypeVar("One", bound=TileSchedule)


@dataclass(frozen=True)
class PackedSchedule(TileSchedule, Generic[One]):
    """A schedule for `problem.batch` sequences, the longest of `seqlen_q` queries and `seqlen_k` keys.

    `seqlens` has the (queries, keys) of each; None if the host does not know them: counts are then of full length. A thread block
    searches its sequence; a sequence has at most one more than it needs, which exits at once. `patterns` are those of a mask
    function in each sequence, None if they are not known: every tile then counts as mixed.
    """

    seqlens: Seqlens | None = None
    packed: Packed = NO_SEQUENCES
    patterns: Patterns | None = None

    def __post_init__(self) -> None:
        _require_packed(self.problem, self.seqlens, self.patterns)

    @property
    def together(self) -> Packed:
        return self.packed

    @property
    def parts(self) -> tuple[Part, ...]:
        return packed_parts(self.packed, self.in_order())

    def sequences(self) -> Mapping[One, int]:
        """The schedule of each sequence, as a batch of its own, and how many are like it."""
        return Counter(self.in_order())

    def in_order(self) -> list[One]:
        """The schedule of each sequence, one after the other; equal sequences share one object."""
        problems = _each(self.problem, self.seqlens, self.patterns)
        made = {problem: self._one(problem) for problem in dict.fromkeys(problems)}
        return [made[problem] for problem in problems]

    @abstractmethod
    def _one(self, problem: Problem) -> One:
        """The schedule of a sequence."""


@dataclass(frozen=True)
class Fa2Sequence(Fa2Schedule):
    """One of several packed sequences by itself. `skips`: True if there is room for the states of the longest sequence's tiles."""

    skips: bool = True

    @property
    def mask_tiles(self) -> tuple[MaskTiles, ...]:
        return super().mask_tiles if self.skips else ()


@dataclass(frozen=True)
class VarlenSchedule(PackedSchedule[Fa2Schedule], Fa2Schedule):
    """FlashAttention-2's schedule of packed sequences."""

    @property
    def works(self) -> int:
        return self.problem.heads * self.packed.blocks("q", self.block_rows)

    @property
    def searching(self) -> int:
        return self.works

    def _one(self, problem: Problem) -> Fa2Schedule:
        return Fa2Sequence(problem, self.device, self.tiling, self.lse, bool(self.mask_tiles))


@dataclass(frozen=True)
class Fa3Sequence(Fa2Sequence, Fa3Schedule):
    """One of several packed sequences by itself. Copies of its last blocks include rows beyond it, up to the tensors' ends.

    `room_q` and `room_k` are the rows of Q and of K from the sequence's first one to the end of its blocks.
    """

    room_q: int = 0
    room_k: int = 0

    @property
    def pack(self) -> int:
        return 1

    @property
    def queued(self) -> bool:
        return False


@dataclass(frozen=True)
class Fa3VarlenSchedule(VarlenSchedule, Fa3Schedule):
    """The same by FlashAttention-3: each warp looks for its thread block's sequence."""

    algorithm: ClassVar[str] = "fa3"
    params: ClassVar[Params] = attention_params(*OWN, maps=(*MAPPED, "O_row"))

    @property
    def searching(self) -> int:
        """Row blocks that the producer requests: some more than there are."""
        return self.asked_for

    def _items(self, grouping: Grouping) -> Items:
        """The blocks of rows of a head, of all sequences."""
        turns = np.full(self.packed.blocks("q", self.block_rows), -1)
        starts, first_q, first_k = np.zeros_like(turns), 0, 0
        for number, one in enumerate(self.in_order()):
            first = first_q // self.block_rows + number
            turns[first : first + one.row_blocks] = Visited.of(one, one.problem.seqlen_k, None).counts
            starts[first:] = first_k
            first_q, first_k = first_q + one.problem.seqlen_q, first_k + one.problem.seqlen_k
        return Items(turns, starts, self.problem.heads, self.grid, grouping)

    @property
    def blocks_there(self) -> int:
        return self.problem.heads * sum(one.row_blocks for one in self.in_order())

    def order(self) -> tuple[Array, Array]:
        if self.queued:
            return self.items.order()
        head, item = np.divmod(np.arange(self.works), len(self.items.turns))
        return item, head

    @property
    def look_words(self) -> Mapping[str, int]:
        """The words that a thread reads to find the sequence by itself."""
        steps = max(1, (self.packed.sequences - 1).bit_length())
        return {"cu_seqlens_q": steps + 2, "cu_seqlens_k": 2}

    def maps(self) -> Mapping[str, Box]:
        maps = super().maps()
        return {**maps, "O_row": replace(maps["O"], rows=1)}

    def in_order(self) -> list[Fa2Schedule]:
        found, skips = _with_rooms(self), bool(self.mask_tiles)
        made = {each: Fa3Sequence(each[0], self.device, self.tiling, self.lse, skips, *each[1:]) for each in dict.fromkeys(found)}
        return [made[each] for each in found]


def _with_rooms(schedule: PackedSchedule[Any]) -> list[tuple[Problem, int, int]]:
    """The problem of each sequence, with the rows of Q and of K from its first one to the end of its blocks, within the tensors."""
    p, packed, (Br, Bc) = schedule.problem, schedule.packed, schedule.blocks
    found: list[tuple[Problem, int, int]] = []
    first_q = first_k = 0
    for one in _each(p, schedule.seqlens, schedule.patterns):
        n_q, n_k = one.seqlen_q, one.seqlen_k
        # Of unknown lengths, which count as full, the totals may be less.
        room_q = min(max(n_q, packed.total_q - first_q), -(-n_q // Br) * Br)
        room_k = min(max(n_k, packed.total_k - first_k), -(-n_k // Bc) * Bc)
        found.append((one, room_q, room_k))
        first_q, first_k = first_q + n_q, first_k + n_k
    return found


@dataclass(frozen=True)
class BackwardOfSequence(Fa2BackwardSchedule):
    """One of several packed sequences by itself, as `Fa2Sequence`. `skips`: for the main kernel, and for that of row blocks, whose
    blocks are `of_rows`."""

    skips: tuple[bool, bool] = (True, True)
    of_rows: Tiling = field(kw_only=True)

    @property
    def mask_tiles(self) -> tuple[MaskTiles, ...]:
        return super().mask_tiles if self.skips[0] else ()

    @cached_property
    def by_rows(self) -> QueriesSchedule:
        return QueriesSchedule(self.problem, self.device, self.of_rows, skips=self.skips[1])


@dataclass(frozen=True)
class VarlenBackwardSchedule(PackedSchedule[Fa2BackwardSchedule], Fa2BackwardSchedule):
    """FlashAttention-2's backward of packed sequences."""

    @property
    def query_shape(self) -> tuple[int, int]:
        return self.problem.heads, self.packed.total_q

    @property
    def grid(self) -> int:
        return self.problem.kv_heads * self.packed.blocks("k", self.block_cols)

    def _one(self, problem: Problem) -> Fa2BackwardSchedule:
        skips, of_rows = (bool(self.mask_tiles), bool(self.by_rows.mask_tiles)), self.by_rows.tiling
        how: Any = {"deterministic": self.deterministic, "dscore": self.dscore}
        return BackwardOfSequence(problem, self.device, self.tiling, **how, skips=skips, of_rows=of_rows)

    def parts_beside(self, each: RowBlocksOutside) -> tuple[Part, ...]:
        own = (one.bases if isinstance(each, RowBasesSchedule) else one.by_rows for one in self.in_order())
        return packed_parts(self.packed, own)


@dataclass(frozen=True)
class Fa3BackwardOfSequence(BackwardOfSequence, Fa3BackwardSchedule):
    """One of several packed sequences by itself. Copies of its last blocks include rows beyond it, as `Fa3Sequence`'s do."""

    room_q: int = field(kw_only=True)
    room_k: int = field(kw_only=True)

    @property
    def rooms_beyond(self) -> tuple[int, int]:
        return self.room_q, self.room_k


@dataclass(frozen=True)
class Fa3VarlenBackwardSchedule(VarlenBackwardSchedule, Fa3BackwardSchedule):
    """The same by warpgroup products."""

    algorithm: ClassVar[str] = "fa3"
    params: ClassVar[Params] = Params((*params.maps("dK_row", "dV_row"), *Fa3BackwardSchedule.params.fields))

    def maps(self) -> Mapping[str, Box]:
        maps = super().maps()
        return {**maps, **{f"{name}_row": replace(maps[f"{name}_tiles"], rows=1) for name in ("dK", "dV")}}

    def in_order(self) -> list[Fa2BackwardSchedule]:
        found, of_rows = _with_rooms(self), self.by_rows.tiling
        made = {
            each: Fa3BackwardOfSequence(
                each[0],
                self.device,
                self.tiling,
                deterministic=self.deterministic,
                dscore=self.dscore,
                of_rows=of_rows,
                room_q=each[1],
                room_k=each[2],
            )
            for each in dict.fromkeys(found)
        }
        return [made[each] for each in found]


def packed_totals(problem: Problem, seqlens: Seqlens | None, totals: tuple[int, int] | None) -> Packed:
    """The total queries and keys of `problem.batch` sequences: `totals`, else the sum of `seqlens`, else all sequences as long as
    the longest."""
    _require_packed(problem, seqlens)
    each = ((problem.seqlen_q, problem.seqlen_k),) * problem.batch if seqlens is None else seqlens
    added = sum(n_q for n_q, _ in each), sum(n_k for _, n_k in each)
    totals = added if totals is None else totals
    whole = isinstance(totals, tuple) and all(is_number(n) and int(n) >= 0 for n in totals)
    if not whole or len(totals) != 2:
        raise ValueError(f"totals must be (queries, keys) of all sequences together, got {totals!r}")
    if seqlens is not None and totals != added:
        raise ValueError(f"totals must be the sums of seqlens, got {totals!r}")
    return Packed(problem.batch, *totals)


def _require_packed(p: Problem, seqlens: Seqlens | None, patterns: Patterns | None = None) -> None:
    """TypeError or ValueError for options that packed sequences have not, and for lengths or patterns that are not theirs."""
    require_taken(p.options, "attention_varlen")
    if seqlens is not None:
        pairs = isinstance(seqlens, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in seqlens)
        if not pairs or not all(isinstance(length, Integral) for pair in seqlens for length in pair):
            raise TypeError(f"seqlens must be a tuple of (queries, keys), both integers, got {seqlens!r}")
        longer = [(n_q, n_k) for n_q, n_k in seqlens if not (0 <= n_q <= p.seqlen_q and 0 <= n_k <= p.seqlen_k)]
        if len(seqlens) != p.batch or longer:
            raise ValueError(
                f"seqlens must be {p.batch} pairs of at most {p.seqlen_q:,} queries and {p.seqlen_k:,} keys, got {seqlens}"
            )
    if patterns is None:
        return
    if not isinstance(patterns, tuple) or not all(isinstance(each, Pattern) for each in patterns):
        raise TypeError(f"patterns must be a tuple of a Pattern for each sequence, got {patterns!r}")
    if p.options.mask_function is None or seqlens is None or len(patterns) != p.batch:
        raise ValueError(f"patterns must be those of a mask function in {p.batch} sequences of known seqlens, got {len(patterns)}")


def patterns_of(p: Problem, seqlens: Seqlens, values: Values) -> Patterns | None:
    """The pattern of a problem's mask function in each sequence, None without such a function; `values` are the captured NumPy
    arrays and numbers, by the function's names."""
    form = p.options.mask_function
    if form is None:
        return None
    every = (seen_by(form, of_sequence(p, *lengths), values, number) for number, lengths in enumerate(seqlens))
    return tuple(Pattern.of(each) for each in every)


def _each(p: Problem, seqlens: Seqlens | None, patterns: Patterns | None) -> list[Problem]:
    """The problem of each sequence, of full length if its length is not known; equal sequences share one object."""
    each = ((p.seqlen_q, p.seqlen_k),) * p.batch if seqlens is None else seqlens
    said = list(zip(each, patterns or (None,) * p.batch, strict=True))
    made = {(lengths, pattern): of_sequence(p, *lengths, pattern) for lengths, pattern in dict.fromkeys(said)}
    return [made[one] for one in said]


def of_sequence(p: Problem, queries: int, keys: int, pattern: Pattern | None = None) -> Problem:
    """The problem of one of several packed sequences, as a batch of its own."""
    options = replace(p.options, packed=False, pattern=pattern)
    return replace(p, batch=1, seqlen_q=queries, seqlen_k=keys, options=options)
