"""Decoding: few queries against a long cache of keys, which are split over thread blocks, and the parts merged (Flash-Decoding)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, ClassVar

import numpy as np

from cupyflash.device import Device
from cupyflash.options import require_taken
from cupyflash.params import POINTER, ROWS, SCORES, Field, Params, numbers
from cupyflash.params import arrays as array_fields
from cupyflash.problem import Problem, require_usual_head_dim
from cupyflash.schedules import decode_tiles
from cupyflash.schedules.base import (
    FLOAT32,
    Kernel,
    Move,
    Phase,
    Room,
    Tiles,
    TileSchedule,
    Visit,
    Workspace,
    attention_params,
    element_constants,
)
from cupyflash.schedules.moves import head_moves, mask_moves
from cupyflash.tiling import TileSize, Tiling, paper_blocks

LENGTH = 4  # bytes of a sequence's length, and of a page's place
MERGE_THREADS = 128
PAGE_STEP = 16  # keys: what a page's size is a multiple of
OWN = (
    *array_fields("const Element", ROWS, ("K_new", "V_new")),
    *array_fields("float", POINTER, ("O_part", "m_part", "l_part")),
    *array_fields("const int", POINTER, ("cache_seqlens", "block_table")),
    Field("tree_mask", "const unsigned char", SCORES),
    *numbers("int", "splits", "row_tiles", "appended", "table_row", "pages"),
)


def _params() -> Params:
    """Of the cache the kernel may write to K and V."""
    fields = attention_params(*OWN).fields
    return Params(tuple(replace(each, type="Element") if each.name in ("K", "V") else each for each in fields))


@dataclass(frozen=True)
class Cache:
    """What decoding has beside a problem, whose `seqlen_k` keys are the room for each sequence's.

    appended: new keys of each sequence, which go behind its cached ones. page_size: keys of a page, None where each sequence's keys
    lie together. pages: how many there are. tree: whether a mask says which of the newest keys each query sees.

    Raises TypeError or ValueError that names the argument, its value and what is allowed.
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
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.page_size is not None and self.page_size % PAGE_STEP:
            raise ValueError(f"page_size must be a multiple of {PAGE_STEP}, got {self.page_size}")


@dataclass(frozen=True)
class DecodeSchedule(TileSchedule):
    """A phase is a split of a row tile of a key head, its visits the blocks of keys that it has.

    `problem.options.key_lengths` are the keys that each sequence has cached, before any are appended; None where they are not known
    to the host: counts are then of full length.
    """

    algorithm: ClassVar[str] = "decode"
    params: ClassVar[Params] = _params()

    cache: Cache = Cache()
    candidate: decode_tiles.Candidate = field(kw_only=True)

    @property
    def config(self) -> decode_tiles.Config:
        """How the kernel runs it."""
        return self.candidate.config

    @property
    def splits(self) -> int:
        """Parts of the keys of each sequence."""
        return self.candidate.splits

    @property
    def group(self) -> int:
        """Query heads whose rows share tiles."""
        return decode_tiles.group(self.problem)

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

    def lengths(self) -> Mapping[int, int]:
        """How many sequences have how many keys cached."""
        p = self.problem
        known = p.options.key_lengths
        return {p.seqlen_k - self.cache.appended: p.batch} if known is None else Counter(known)

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        for cached, batches in self.lengths().items():
            yield batches * self.problem.kv_heads, self.phases(literal=literal, keys=cached)

    def phases(self, *, literal: bool = False, keys: int | None = None, kept: Tiles | None = None) -> Iterator[Phase]:
        """Of one key head of a sequence that has `keys` keys cached."""
        cached = self.problem.seqlen_k - self.cache.appended if keys is None else keys
        for tile in range(self.row_tiles):
            row_tile = RowTile.of(self, cached, tile)
            yield Phase(self.splits, enter=self._length_moves())
            yield from row_tile.phases(literal)
        if self.splits > 1:
            yield Phase(self.rows, enter=self._length_moves(), leave=self._results(1))

    def _length_moves(self) -> tuple[Move, ...]:
        """What a thread block reads to learn how many keys its sequence has."""
        return (Move("cache_seqlens", 1, LENGTH),) if self.problem.options.padded else ()

    def _results(self, rows: int) -> tuple[Move, ...]:
        """What is written of so many rows in the end, and read for it."""
        p = self.problem
        moves = [Move("O", rows * p.head_dim_v, p.itemsize, write=True)]
        if self.lse:
            moves.append(Move("L", rows, FLOAT32, write=True))
        if p.options.sinks:
            moves.append(Move("sinks", rows, FLOAT32))
        return tuple(moves)

    def _parts_of(self, rows: int, write: bool) -> tuple[Move, ...]:
        """A split's results of so many rows."""
        return (
            Move("O_part", rows * decode_tiles.part_width(self.problem), FLOAT32, write=write),
            Move("m_part", rows, FLOAT32, write=write),
            Move("l_part", rows, FLOAT32, write=write),
        )

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

    def numbers(self) -> Mapping[str, Any]:
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
            ("PACK", self.group),
            ("ROW_TILES", config.row_tiles),
            ("ROW_WARPS", config.row_warps),
            ("KEY_WARPS", config.key_warps),
            ("BC", config.block_cols),
            ("STAGES", config.stages),
            ("SPLIT", int(self.splits > 1)),
            ("PAGE", c.page_size or 0),
            ("APPEND", int(c.appended > 0)),
            ("TREE", int(c.tree)),
            ("SCALE_FIRST", int(p.options.transformed or p.softmax_scale <= 0)),
            ("MOST_SPLITS", decode_tiles.MOST_SPLITS),
        )
        split = Kernel("decode.cu", "decode", constants, self.grid, config.threads, candidate.shared_bytes, self.struct)
        if self.splits == 1:
            return (split,)
        merge = Kernel("decode.cu", "merge_splits", constants, p.head_count * p.seqlen_q, MERGE_THREADS, 0, self.struct)
        return split, merge


@dataclass(frozen=True)
class RowTile:
    """A row tile of a sequence's key head: which of the sequence's keys were cached, and the blocks of keys it goes through."""

    schedule: DecodeSchedule
    tile: int
    cached: int
    all: int
    first: int
    end: int

    @classmethod
    def of(cls, schedule: DecodeSchedule, cached: int, tile: int) -> RowTile:
        p, cols = schedule.problem, schedule.block_cols
        every = cached + schedule.cache.appended
        begin, behind = schedule_keys(schedule, every, *queries(schedule, tile))
        if schedule.cache.appended and tile == schedule.row_tiles - 1:
            begin = min(begin, cached)  # it sees the last key
        first, end = (begin // cols, -(-behind // cols)) if begin < behind and p.seqlen_q else (0, 0)
        return cls(schedule, tile, cached, every, first, end)

    @property
    def rows(self) -> int:
        s = self.schedule
        return min(s.block_rows, s.rows - self.tile * s.block_rows)

    def phases(self, literal: bool) -> Iterator[Phase]:
        s = self.schedule
        blocks = self.end - self.first
        splits = min(s.splits, blocks)
        for split in range(splits):
            begin, end = (self.first + blocks * each // splits for each in (split, split + 1))
            yield self._split(begin, end, literal)
        if s.splits == 1 and not blocks:
            yield Phase(1, leave=s._results(self.rows))
        if s.splits > 1:
            yield Phase(splits, leave=s._parts_of(self.rows, write=False))

    def _split(self, begin: int, end: int, literal: bool) -> Phase:
        s = self.schedule
        p, cols, page = s.problem, s.block_cols, s.cache.page_size
        enter = [Move("Q", self.rows * p.head_dim, p.itemsize, tile="Q")]
        enter += head_moves(p, self.rows)
        if page:
            pages = -(-min(end * cols, self.all) // page) - begin * cols // page
            enter.append(Move("block_table", pages, LENGTH))
        kinds: Counter[tuple[int, int]] = Counter()
        mixed = min(max(self.cached // cols, begin), end)  # blocks before hold cached keys only
        if literal:
            mixed = begin
        else:
            kinds[cols, 0] += mixed - begin
        for block in range(mixed, end):
            behind = min((block + 1) * cols, self.all)
            old = min(max(self.cached - block * cols, 0), behind - block * cols)
            kinds[old, behind - block * cols - old] += 1
        visits = tuple(Visit(times, self._visit(*kind)) for kind, times in kinds.items() if times)
        leave = s._parts_of(self.rows, write=True) if s.splits > 1 else s._results(self.rows)
        keys = begin * cols, min(end * cols, self.all)
        tree = Move("tree_mask", self._scores(max(keys[0], self.all - p.seqlen_q), keys[1]), 1)
        enter += mask_moves(p, self._scores(*keys))
        rooms = decode_tiles.rooms(p, s.config)
        tiles = tuple(Room(name, nbytes) for name, nbytes in rooms.items())
        return Phase(1, enter=tuple(enter), visits=visits, leave=(*leave, *((tree,) if s.cache.tree else ())), tiles=tiles)

    def _visit(self, old: int, new: int) -> tuple[Move, ...]:
        """A block with so many cached and so many new keys."""
        p, last = self.schedule.problem, self.tile == self.schedule.row_tiles - 1
        moves = []
        for tensor, d in (("K", p.head_dim), ("V", p.head_dim_v)):
            moves.append(Move(tensor, old * d, p.itemsize, tile="K, V"))
            if new:
                moves.append(Move(f"{tensor}_new", new * d, p.itemsize, tile="K, V"))
            if new and last:
                moves.append(Move(tensor, new * d, p.itemsize, write=True, tile="K, V"))
        return tuple(moves)

    def _scores(self, begin: int, end: int) -> int:
        """How many scores of these keys position lets a row see."""
        s = self.schedule
        rows = self.tile * s.block_rows + np.arange(self.rows)
        first, behind = seen_keys(s, self.all, rows // s.group)
        return int(np.maximum(0, np.minimum(behind, end) - np.maximum(first, begin)).sum())


def queries(schedule: DecodeSchedule, tile: int) -> tuple[int, int]:
    """The first and the last query of a row tile."""
    first, end = tile * schedule.block_rows, min((tile + 1) * schedule.block_rows, schedule.rows)
    return first // schedule.group, (end - 1) // schedule.group


def seen_keys(schedule: DecodeSchedule, every: int, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first, end) of the keys that queries see for their position, of a sequence with so many."""
    return replace(schedule.problem.asking(padded=False, key_lengths=None), seqlen_k=every).keys_seen(query, every)


def schedule_keys(schedule: DecodeSchedule, every: int, first: int, last: int) -> tuple[int, int]:
    """The keys that any of the queries from `first` to `last` sees."""
    begins, ends = seen_keys(schedule, every, np.array([first, last]))
    return int(begins[0]), int(ends[1])


def plan_decode(
    problem: Problem, device: Device, cache: Cache | None = None, *, num_splits: int | None = None, lse: bool = False
) -> DecodeSchedule:
    """The schedule of decoding: `problem.seqlen_q` queries of each sequence, the newest, against a cache with room for
    `problem.seqlen_k` keys, of which `problem.options.key_lengths` (None: not known to the host) are there before any are appended.

    The number of splits, a function of problem and device alone, is the one that a model predicts to be fastest, where `num_splits`
    (1 to 256) does not say. TypeError or ValueError for what the kernel does not run, `DoesNotFit` where nothing fits.
    """
    if not isinstance(problem, Problem):
        raise TypeError(f"problem must be a Problem, got {type(problem).__name__}")
    if not isinstance(device, Device):
        raise TypeError(f"device must be a Device (Device.named finds one by name), got {device!r}")
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
        if isinstance(num_splits, bool) or not isinstance(num_splits, Integral):
            raise TypeError(f"num_splits must be an integer or None, got {num_splits!r}")
        if not 1 <= num_splits <= decode_tiles.MOST_SPLITS:
            raise ValueError(f"num_splits must be between 1 and {decode_tiles.MOST_SPLITS}, got {num_splits}")
        num_splits = int(num_splits)
    best = decode_tiles.choose(problem.asking(key_lengths=None), device, num_splits)
    used = TileSize(best.config.block_rows, best.config.block_cols, f"{best.config}; {best.splits} splits")
    return DecodeSchedule(problem, device, Tiling(paper_blocks(problem, device), used, used), lse, cache, candidate=best)
