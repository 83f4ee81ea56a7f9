"""Decoding: few queries against a long cache of keys, which are split over thread blocks, and the parts merged (Flash-Decoding)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from cupyflash.arrays import is_number
from cupyflash.basics import Array, Values
from cupyflash.device import Device
from cupyflash.launch.params import POINTER, ROWS, SCORES, Field, Params, numbers
from cupyflash.launch.params import arrays as array_fields
from cupyflash.request.options import require_taken
from cupyflash.request.problem import Problem, require_usual_head_dim
from cupyflash.request.score import named
from cupyflash.schedules import decode_tiles
from cupyflash.schedules.base import (
    Kernel,
    TileSchedule,
    Workspace,
    attention_params,
    element_constants,
    require_device,
    require_problem,
)
from cupyflash.schedules.moves import (
    BEGIN,
    END,
    SEEN,
    VISIT,
    Move,
    Of,
    Room,
    Walk,
    When,
    captured,
    reads,
    score_reads,
    sink_reads,
    tensor,
    writes,
)
from cupyflash.schedules.parts import Axis, Part, Visited
from cupyflash.tiling import TileSize, Tiling, paper_blocks

LENGTH = 4  # bytes of a sequence's length, and of a page's place
MERGE_THREADS = 128
DONE = When("", at="last")  # of splits that have keys
PAGE_STEP = 16  # keys: what a page's size is a multiple of
OWN = (
    *array_fields("const Element", ROWS, ("K_new", "V_new")),
    *array_fields("float", POINTER, ("O_part", "m_part", "l_part")),
    *array_fields("const int", POINTER, ("cache_seqlens", "block_table")),
    Field("tree_mask", "const unsigned char", SCORES),
    *numbers("int", "splits", "row_tiles", "appended", "table_row", "pages"),
)


def _params() -> Params:
    """The fields of the struct: the kernel may write to K and V, which are the cache."""
    fields = attention_params(*OWN).fields
    return Params(tuple(replace(each, type="Element") if each.name in ("K", "V") else each for each in fields))


@dataclass(frozen=True)
class Cache:
    """The cache of decoding: the figures that a problem lacks. The problem's `seqlen_k` is the room for each sequence's keys.

    appended: new keys of each sequence, placed after its cached ones. page_size: keys of a page, None if each sequence's keys lie
    together. pages: their number. tree: True if a mask says which of the newest keys each query sees.

    Raises TypeError or ValueError that names the argument, its value and the allowed values.
    """

    appended: int = 0
    page_size: int | None = None
    pages: int = 0
    tree: bool = False

    def __post_init__(self) -> None:
        for name, least in (("appended", 0), ("page_size", PAGE_STEP), ("pages", 0)):
            value = getattr(self, name)
            if value is None and name == "page_size":
                continue
            if not is_number(value):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.page_size is not None and self.page_size % PAGE_STEP:
            raise ValueError(f"page_size must be a multiple of {PAGE_STEP}, got {self.page_size}")


@dataclass(frozen=True)
class DecodeSchedule(TileSchedule):
    """The schedule of decoding: a thread block has a split of the keys of a row tile of a key head.

    `problem.options.key_lengths` are the keys that each sequence has cached, before any are appended; None if the host does not
    know them: counts are then of full length.
    """

    algorithm: ClassVar[str] = "decode"
    params: ClassVar[Params] = _params()

    cache: Cache = Cache()
    candidate: decode_tiles.DecodeCandidate = field(kw_only=True)

    @property
    def config(self) -> decode_tiles.DecodeConfig:
        """The configuration of the kernel."""
        return self.candidate.config

    @property
    def splits(self) -> int:
        """Parts of the keys of each sequence."""
        return self.candidate.splits

    @property
    def group(self) -> int:
        """Query heads whose rows share tiles."""
        return self.problem.group

    @property
    def rows(self) -> int:
        """Rows that read a key head."""
        return self.problem.seqlen_q * self.group

    @property
    def row_tiles(self) -> int:
        """Tiles of them: as often is a key head read."""
        return -(-self.rows // self.block_rows)

    @property
    def row_blocks(self) -> int:
        return self.row_tiles

    @property
    def repeats(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @property
    def grid(self) -> int:
        """Thread blocks."""
        return self.repeats * self.row_tiles * self.splits

    @property
    def cached(self) -> tuple[int, ...]:
        """The keys that each sequence has cached."""
        p = self.problem
        return p.options.key_lengths or (p.seqlen_k - self.cache.appended,) * p.batch

    def lengths(self) -> Mapping[int, int]:
        """The number of sequences by the keys that they have cached."""
        return Counter(self.cached)

    def sharing(self, kernel: str) -> int | None:
        return max(1, self.candidate.resident) if kernel == "decode" else None

    def walks(self) -> Iterator[Walk]:
        p, cache, cached = self.problem, self.cache, [Cached.of(self, number) for number in range(self.problem.batch)]
        lengths = reads(p, BEGIN, *["cache_seqlens"] * p.options.padded)
        results = (*sink_reads(p, END), *writes(p, END, "O", *["L"] * self.lse))
        parts = (tensor(p, "O_part", width=decode_tiles.part_width(p)), tensor(p, "m_part"), tensor(p, "l_part"))

        def load(name: str) -> Move:
            return Move(tensor(p, name), VISIT, tile="K, V")

        new = cache.appended > 0
        moves = (
            *lengths,
            Move(tensor(p, "Q"), SEEN, tile="Q"),
            *(replace(each, by_rows=True) for each in captured(p, "head", SEEN)),
            *reads(p, SEEN, *["block_table"] * bool(cache.page_size)),
            *(load(name) for name in ("K", *["K_new"] * new)),
            *score_reads(p),
            *reads(p, VISIT, *["tree_mask"] * cache.tree),
            *(load(name) for name in ("V", *["V_new"] * new)),
            *(Move(tensor(p, name, of="added"), VISIT, write=True, tile="K, V") for name in "KV" if new),
            *(results if self.splits == 1 else (Move(each, DONE, write=True) for each in parts)),
        )
        rooms = tuple(Room(name, nbytes) for name, nbytes in decode_tiles.rooms(p, self.config).items())
        yield Walk("decode", self, tuple(cached), "i", "j", moves, rooms, heads=(p.kv_heads, 1))
        if self.splits > 1:
            merged = (*lengths, *(Move(each, VISIT) for each in parts), *results)
            yield Walk("merge_splits", self, tuple(map(Merged.of, cached)), "gi", "", merged, sizes=(1, 1), few=True)

    def workspaces(self) -> Mapping[str, Workspace]:
        p = self.problem
        if self.splits == 1:
            return {}
        each = (self.splits, p.batch, p.heads, p.seqlen_q)
        return {
            "O_part": Workspace((*each, decode_tiles.part_width(p)), "float32"),
            "m_part": Workspace(each, "float32"),
            "l_part": Workspace(each, "float32"),
        }

    def numbers(self) -> Values:
        c = self.cache
        return {
            "splits": self.splits,
            "row_tiles": self.row_tiles,
            "appended": c.appended,
            "table_row": 0 if c.page_size is None else self.problem.seqlen_k // c.page_size,
            "pages": c.pages,
        }

    def kernels(self) -> tuple[Kernel, ...]:
        p, c, candidate = self.problem, self.cache, self.candidate
        config = candidate.config
        constants = (
            *element_constants(p),
            *named(PACK=self.group, ROW_TILES=config.row_tiles, ROW_WARPS=config.row_warps, KEY_WARPS=config.key_warps),
            *named(BC=config.block_cols, STAGES=config.stages, SPLIT=int(self.splits > 1)),
            *named(PAGE=c.page_size or 0, APPEND=int(c.appended > 0), TREE=int(c.tree)),
            *named(SCALE_FIRST=int(p.options.transformed or p.softmax_scale <= 0), MOST_SPLITS=decode_tiles.MOST_SPLITS),
        )
        split = Kernel("decode.cu", "decode", constants, self.grid, config.threads, candidate.shared_bytes, self.struct)
        if self.splits == 1:
            return (split,)
        merge = Kernel("decode.cu", "merge_splits", constants, p.head_count * p.seqlen_q, MERGE_THREADS, 0, self.struct)
        return split, merge


@dataclass(frozen=True, eq=False)
class Cached(Part):
    """A sequence with a cache: its row blocks are (row tile, split); a tile's rows are sorted by query, then by head."""

    schedule: DecodeSchedule

    @classmethod
    def of(cls, schedule: DecodeSchedule, number: int) -> Cached:
        """Sequence `number`."""
        p, rows = schedule.problem, schedule.rows
        keys = Axis(number * p.kv_heads, p.seqlen_k, 0, schedule.cached[number], p.seqlen_k)
        return cls(number, schedule, Axis(number * p.heads, p.seqlen_q, 0, rows, rows), keys)

    @property
    def keys(self) -> int:
        """Cached and new."""
        return int(self.k.there) + self.schedule.cache.appended

    @property
    def sizes(self) -> tuple[int, int]:
        return self.schedule.problem.seqlen_q, self.keys

    @property
    def heads_together(self) -> int:
        return self.schedule.group

    def tile(self, number: int) -> tuple[int, int]:
        """The blocks of keys that a row tile goes through, first <= j < end."""
        s, cols = self.schedule, self.schedule.block_cols
        begin, behind = schedule_keys(s, self.keys, *queries(s, number))
        if s.cache.appended and number == s.row_tiles - 1:
            begin = min(begin, self.k.there)  # it sees the last key
        return begin // cols, -(-behind // cols)

    @cached_property
    def splits(self) -> tuple[Array, Array]:
        """The blocks of keys of each row tile and each split that has any; and how many those are of each row tile."""
        tiles = [self.tile(number) for number in range(self.schedule.row_tiles)]
        first, end = np.array(tiles, np.int64).reshape(-1, 2).T[..., None]
        working = np.minimum(self.schedule.splits, end - first)
        split = np.arange(self.schedule.splits + 1)
        bounds = np.where(split <= working, first + (end - first) * split // np.maximum(1, working), 0)
        return bounds, working[:, 0]

    @cached_property
    def _visited(self) -> list[Visited]:
        bounds, working = self.splits
        there = np.arange(self.schedule.splits) < working[:, None]
        return [Visited(*(np.where(there, each, 0).ravel() for each in (bounds[:, :-1], bounds[:, 1:])))]

    def extents(self, blocks: tuple[int, int], room: bool = False, of: Of = "scores") -> tuple[Array, Array]:
        (visited,), page, (rows, cols) = self._visited, self.schedule.cache.page_size, super().extents(blocks, room, of)
        rows = np.repeat(rows, self.schedule.splits)
        if of == "pages" and page:
            ends = np.minimum(visited.end * blocks[1], self.keys)
            return np.where(visited.counts > 0, -(-ends // page) - visited.first * blocks[1] // page, 0), cols
        if of in ("new", "added"):
            begins = np.arange(len(cols)) * blocks[1]
            cols = np.maximum(0, np.minimum(begins + blocks[1], self.keys) - np.maximum(begins, self.k.there))
        return np.arange(len(rows)) // self.schedule.splits == self.schedule.row_tiles - 1 if of == "added" else rows, cols

    def rows(self, i: Array, size: int) -> Array:
        return i // self.schedule.splits * size

    def keys_seen(self, rows: Array, of: Of = "seen") -> tuple[Array, Array]:
        first, end = seen_keys(self.schedule, self.keys, rows // self.schedule.group)
        return np.maximum(first, self.keys - self.schedule.problem.seqlen_q) if of == "newest" else first, end


@dataclass(frozen=True, eq=False)
class Merged(Part):
    """The rows of a sequence, each with the splits that have a part of it."""

    schedule: DecodeSchedule
    cached: Cached = field(kw_only=True)

    @classmethod
    def of(cls, cached: Cached) -> Merged:
        """The rows of a sequence."""
        s, n = cached.schedule, cached.schedule.problem.seqlen_q
        return cls(cached.number, s, cached.q._replace(there=n, room=n), Axis(0, 0, 0, s.splits, s.splits), cached=cached)

    @property
    def kind(self) -> tuple[object, ...]:
        return self.cached.kind

    @property
    def alike(self) -> bool:
        return self.schedule.row_tiles == 1

    def visited(self, head: int) -> Visited:
        s, (_, working) = self.schedule, self.cached.splits
        tiles = (np.arange(self.q.there) * s.group + head % s.group) // s.block_rows
        return Visited(np.zeros_like(tiles), working[tiles])


def queries(schedule: DecodeSchedule, tile: int) -> tuple[int, int]:
    """The first and the last query of a row tile."""
    first, end = tile * schedule.block_rows, min((tile + 1) * schedule.block_rows, schedule.rows)
    return first // schedule.group, (end - 1) // schedule.group


def seen_keys(schedule: DecodeSchedule, every: int, query: Array) -> tuple[Array, Array]:
    """(first, end) of the keys that queries see by their position, in a sequence with `keys` keys."""
    return replace(schedule.problem.asking(padded=False, key_lengths=None), seqlen_k=every).keys_seen(query, every)


def schedule_keys(schedule: DecodeSchedule, every: int, first: int, last: int) -> tuple[int, int]:
    """The keys that any of the queries from `first` to `last` sees."""
    begins, ends = seen_keys(schedule, every, np.array([first, last]))
    return int(begins[0]), int(ends[1])


def plan_decode(
    problem: Problem, device: Device, cache: Cache | None = None, *, num_splits: int | None = None, lse: bool = False
) -> DecodeSchedule:
    """Return the schedule of decoding: `problem.seqlen_q` queries of each sequence, the newest, against a cache with room for
    `problem.seqlen_k` keys, of which `problem.options.key_lengths` (None: the host does not know) are there before any are
    appended.

    `num_splits` (1 to 256) fixes the number of splits; without it, it is the fastest one by a model, a function of problem and
    device alone. TypeError or ValueError for arguments that the kernel does not run, `DoesNotFit` if nothing fits.
    """
    require_problem(problem)
    require_device(device)
    if not isinstance(cache, Cache | None):
        raise TypeError(f"cache must be a Cache or None, got {cache!r}")
    require_usual_head_dim(problem, "decoding")
    cache = cache or Cache()
    require_taken(problem.options, "attention_decode")
    if cache.appended > problem.seqlen_k:
        raise ValueError(f"the cache must have room for the {cache.appended} new keys, got room for {problem.seqlen_k}")
    longest = max(problem.options.key_lengths or (0,))
    if longest > problem.seqlen_k - cache.appended:
        raise ValueError(
            f"cache_seqlens must be at most {problem.seqlen_k - cache.appended}, the cache's room for {problem.seqlen_k} keys less "
            f"the {cache.appended} new ones, got {longest}"
        )
    if cache.page_size is not None and problem.seqlen_k % cache.page_size:
        raise ValueError(f"seqlen_k must be whole pages of {cache.page_size} keys, got {problem.seqlen_k}")
    if num_splits is not None:
        if not is_number(num_splits):
            raise TypeError(f"num_splits must be an integer or None, got {num_splits!r}")
        if not 1 <= num_splits <= decode_tiles.MOST_SPLITS:
            raise ValueError(f"num_splits must be between 1 and {decode_tiles.MOST_SPLITS}, got {num_splits}")
        num_splits = int(num_splits)
    best = decode_tiles.choose(problem.asking(key_lengths=None), device, num_splits)
    used = TileSize(best.config.block_rows, best.config.block_cols, f"{best.config}; {best.splits} splits")
    return DecodeSchedule(problem, device, Tiling(paper_blocks(problem, device), used, used), lse, cache, candidate=best)
