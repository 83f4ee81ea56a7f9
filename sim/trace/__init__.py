"""The tiles that a schedule's kernels really move, one after the other: from the global accesses of an execution on the PTX
machine.

A launch's thread blocks run on many multiprocessors at once; here they come one after the other, in the order of the grid, so that
a trace is what one SRAM sees. Within a block the order is the machine's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from cupyflash import kernels_cu
from cupyflash.basics import Array, Report, Shape, Values
from cupyflash.request.score import Mask, Score
from cupyflash.schedules import DecodeSchedule, Kernel, Move, Room, TileSchedule, Walk
from cupyflash.schedules.moves import ONE, TENSORS, Totals
from cupyflash.sim import theory
from cupyflash.sim.execution import Onlookers
from cupyflash.sim.host_memory import require_room, verified
from cupyflash.sim.numbers.inputs import Decoding
from cupyflash.sim.ptx import Access
from cupyflash.sim.ptx.text.syntax import Line
from cupyflash.sim.ranges import ranges
from cupyflash.sim.traffic import Traffic
from cupyflash.sim.two_level.machine import Tally
from cupyflash.sim.two_level.steps import distinct
from cupyflash.words import plural

MOST_STEPS = 20_000
"""Moves of a trace: what a page plays without delay, and keeps below about two megabytes."""

KEYS = frozenset({"K", "K_new"})


def axes_of(name: str) -> str:
    """The axes that the rows and columns of a tensor's tiles count: i, j, both, or none."""
    of = TENSORS[name][0] if name in TENSORS else None
    return {"query": "i", "part": "i", "key": "j", "new": "j", "scores": "ij", "seen": "ij"}.get(of or "", "")


def is_vector(name: str) -> bool:
    """True for a tensor with one element for each query."""
    return axes_of(name) == "i" and TENSORS[name][1] == ONE


def inner_of(walk: Walk | Totals | None) -> str | None:
    """The tensor whose tiles pass by while the other's tile stays, in a kernel that computes S = Q K^T."""
    if not isinstance(walk, Walk):
        return None
    read, written = ({move.tensor.name for move in walk.moves if move.write == write} for write in (False, True))
    if not {"Q", "K"} <= read or not ({"V", "dO"} & read or {"S", "P"} & written):
        return None
    return "K" if "i" in walk.block.lower() else "Q"


class Span(NamedTuple):
    """Places along an axis: first <= place < end."""

    first: int
    end: int


@dataclass(frozen=True)
class ScoreTile:
    """A tile of S (or of S^T) of a query head, for which Q_i and K_j are on chip."""

    head: int
    rows: Span
    cols: Span


@dataclass(frozen=True)
class TileMove:
    """The part of one tile of a tensor that a thread block moves between HBM and the chip: each of its bytes once.

    `slab` counts along all axes of the tensor but the last two (of a vector, the last): heads, mostly. `source` is the place in the
    kernel's own source. `scores` are the tiles of S that can be computed from here on, since their Q_i and K_j are there.
    """

    launch: int
    block: int
    tensor: str
    write: bool
    slab: int
    rows: Span
    cols: Span
    nbytes: int
    source: str
    scores: tuple[ScoreTile, ...] = ()


class Page(NamedTuple):
    """A page of a cache, or a sequence's new keys: whose it is, and which of that sequence's keys its first row is."""

    sequence: int
    first: int


@dataclass(frozen=True)
class HeldTensor:
    """A tensor in HBM as (slabs, rows, cols); of a vector cols is 1.

    Where rows are not a sequence's keys in their order, `pages` says whose they are, as many rows each, slab by slab; None where
    they are nobody's.
    """

    name: str
    shape: tuple[int, int, int]
    itemsize: int
    pages: tuple[Page | None, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def page_rows(self) -> int:
        """Rows of a page; all of a slab's where there are none."""
        return self.shape[0] * self.shape[1] // len(self.pages) if self.pages else self.shape[1]

    @cached_property
    def firsts(self) -> Array:
        """The keys of the pages' first rows; 0 of nobody's."""
        return np.array([0 if page is None else page.first for page in self.pages] or [0] * self.shape[0])

    def keys(self, slab: Array, row: Array) -> Array:
        """The sequence's keys that rows are; without pages, the rows themselves."""
        per_slab = -(-self.shape[1] // max(1, self.page_rows))
        found: Array = self.firsts[slab * per_slab + row // self.page_rows] + row % self.page_rows
        return found

    def keys_of(self, move: TileMove) -> Span:
        """The keys of a move's rows."""
        first = int(self.keys(np.array(move.slab), np.array(move.rows.first)))
        return Span(first, first + move.rows.end - move.rows.first)


@dataclass(frozen=True)
class Trace:
    """The moves of a schedule, in order, and their tensors. `kernels` are by `TileMove.launch`; `executed` is the machine's count,
    `problems` its findings and wrong numbers. `decoding` is what was drawn for `attention_decode`. `timelines`: by launch, the
    timeline of one of its thread blocks or the reason for none (`clock.timeline.told`), if requested."""

    schedule: TileSchedule
    kernels: tuple[Kernel, ...]
    tensors: dict[str, HeldTensor]
    moves: tuple[TileMove, ...]
    executed: Traffic
    problems: tuple[str, ...] = ()
    decoding: Decoding | None = None
    timelines: tuple[Report, ...] = ()

    @property
    def traffic(self) -> Traffic:
        """The sum of the moves."""
        sums = Counter[str](), Counter[str]()
        for move in self.moves:
            sums[move.write][move.tensor] += move.nbytes
        return Traffic.of(*sums)

    def walk(self, launch: int) -> Walk | Totals:
        """The schedule's walk of a launch."""
        name = self.kernels[launch].name
        before = sum(kernel.name == name for kernel in self.kernels[:launch])
        return [walk for walk in self.schedule.walks() if walk.kernel == name][before]

    @property
    def agrees(self) -> bool:
        """True if the moves sum to the executed traffic, and that is the theory's."""
        return self.traffic == self.executed == theory.traffic(self.schedule)


def trace(
    schedule: TileSchedule,
    data_seed: int = 0,
    score: Score | None = None,
    mask: Mask | None = None,
    timeline_block: int | None = None,
) -> Trace:
    """Run a schedule's kernels on arrays that are drawn for it, and say what they moved.

    `score` and `mask` have the values of what the problem's functions capture, as for `verify`. `timeline_block`: of which thread
    block of each launch to make a timeline. ValueError for a schedule of more than about `MOST_STEPS` moves, or one that no kernel
    runs; MemoryError for one that is estimated to need more memory than there is; ImportError without a compiler.
    """
    from cupyflash.sim.numbers.yardstick import draw_decode, knowing_mask
    from cupyflash.sim.verification import DrawnInputs, has_cache, run_drawn, with_lengths

    schedule.kernels()  # refuses what no kernel runs
    refuse_longer(schedule)
    require_room(verified(schedule), f"tracing {schedule.algorithm}")
    schedule = with_lengths(schedule)
    decoding = draw_decode(schedule.problem, schedule.cache, data_seed) if has_cache(schedule) else None
    recorder = Recorder(schedule, decoding, timeline_block)
    given = DrawnInputs.of(schedule.problem, data_seed, score, mask, watch=recorder.watch)
    if decoding is None:
        schedule = knowing_mask(schedule, data_seed, given.mask)
    else:
        decoding = replace(decoding, score=given.score, mask=given.mask)
    run = run_drawn(schedule, given)
    wrong = tuple(
        f"{name} is {n.error:.2e} from float64, {n.allowed:.2e} is allowed" for name, n in run.numbers.items() if not n.good
    )
    kernels = tuple(launch.kernel for launch in recorder.launches)
    found = (*wrong, *run.caches, *map(str, run.findings))
    timelines = tuple(recorder.timelines)
    return Trace(schedule, kernels, recorder.tensors, tuple(recorder.moves()), run.traffic, found, decoding, timelines)


def refuse_longer(schedule: TileSchedule, most: int = MOST_STEPS) -> None:
    """ValueError for a schedule of more than about `most` moves."""
    steps = schedule.row_blocks + schedule.col_blocks  # at least: beyond that nothing is gone through
    if steps <= most:
        steps = sum(map(_steps, schedule.walks()))
    if steps > most:
        p = schedule.problem
        raise ValueError(
            f"a trace holds at most {most:,} moves of tiles; {schedule.algorithm} makes about {steps:,} or more here "
            f"(Nq {p.seqlen_q:,}, Nk {p.seqlen_k:,}, {plural(p.head_count, 'head')}, Br {schedule.block_rows}, "
            f"Bc {schedule.block_cols}): take fewer rows, or larger tiles"
        )


def _steps(walk: Walk | Totals) -> int:
    """Moves of a walk, about: what scores look into one by one counts as one."""
    steps = len(walk.moves)
    if isinstance(walk, Walk):
        for times, part, heads in distinct(walk):
            tally, placed = Tally(walk, part, heads), [move for move in walk.moves if move.tensor.along]
            steps += times * sum(tally.turns(move) * _pieces(walk.schedule, move) for move in placed)
    return steps


def _pieces(schedule: TileSchedule, move: Move) -> int:
    """Pieces in which a tile comes: in decoding heads of a group have rows of their own, and K_j comes by its pages."""
    if not isinstance(schedule, DecodeSchedule):
        return 1
    if "i" in move.tensor.along:
        return schedule.group
    return -(-schedule.block_cols // (schedule.cache.page_size or schedule.block_cols))


class Touch(NamedTuple):
    """A thread block's accesses to a tensor at one time: elements, counted through the whole tensor, and the bytes of each."""

    held: HeldTensor
    write: bool
    elements: Array
    nbytes: Array
    source: str


@dataclass
class TracedLaunch:
    """A running launch's moves by (block, tensor, write, tile, turn), in the order of their first accesses.

    What a block accesses of a tile's elements for the n-th time is the n-th move of that tile, its n-th turn.
    """

    number: int
    kernel: Kernel
    inner: str | None
    tile_rows: int
    tile_cols: int
    inner_first: bool
    moves: dict[tuple[int, str, bool, int, int], TileMove] = field(default_factory=dict)
    turns: dict[tuple[int, str, bool, int], Array] = field(default_factory=dict)
    """The number of accesses of each element, by block, tensor, write and tile."""
    last: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """The last access of each block."""

    def add(self, block: int, touch: Touch) -> None:
        """Add an access of a block."""
        held = touch.held
        tile_rows, tile_cols = self.tile_of(held)
        slab, row, col = np.unravel_index(touch.elements, held.shape)
        across = -(-held.shape[2] // tile_cols)
        within = np.minimum(held.keys(slab, row) % tile_rows, row % held.page_rows)  # a tile ends with its page
        tiles = (slab * held.shape[1] + row - within) * across + col // tile_cols
        inside = within * tile_cols + col % tile_cols
        anew = self.last.get(block) != (held.name, touch.write)
        self.last[block] = held.name, touch.write
        for tile in np.unique(tiles).tolist():
            here = np.flatnonzero(tiles == tile)
            key = block, held.name, touch.write, tile
            turns = self.turns.setdefault(key, np.zeros(tile_rows * tile_cols, np.int32))
            if axes_of(held.name):
                now = turns[inside[here]]
                turns[np.unique(inside[here])] += 1
            else:  # of these, what is accessed without anything between
                turns[0] += anew
                now = np.full(len(here), turns[0])
            for turn in np.unique(now).tolist():
                at = here[now == turn]
                spans, nbytes = (span_of(row[at]), span_of(col[at])), int(touch.nbytes[at].sum())
                move = TileMove(self.number, block, held.name, touch.write, int(slab[at[0]]), *spans, nbytes, touch.source)
                known = self.moves.get((*key, turn))
                self.moves[(*key, turn)] = move if known is None else joined(known, move)

    def tile_of(self, held: HeldTensor) -> tuple[int, int]:
        """The rows and columns of a tensor's tile; all of them if the tensor has no tiles."""
        _, rows, cols = held.shape
        axes = axes_of(held.name)
        return min(rows, self.tile_rows) if "i" in axes else self.tile_cols if axes else rows, (
            min(cols, self.tile_cols) if axes == "ij" else cols
        )

    def in_order(self, tensors: Mapping[str, HeldTensor]) -> Iterator[TileMove]:
        """Block by block, in each by the first accesses."""
        blocks: dict[int, list[TileMove]] = {}
        for move in self.moves.values():
            blocks.setdefault(move.block, []).append(move)
        for block in sorted(blocks):
            if self.kernel.name == "decode":
                yield from with_scores_of_pieces(blocks[block], tensors, self.tile_cols)
            else:
                yield from with_scores(self.inner, blocks[block], first=self.inner_first)


class Recorder:
    """Observes the launches of one execution; of `decoding`, what is where in its caches."""

    def __init__(self, schedule: TileSchedule, decoding: Decoding | None = None, timeline_block: int | None = None):
        self.schedule, self.decoding, self.timeline_block = schedule, decoding, timeline_block
        self.launches: list[TracedLaunch] = []
        self.timelines: list[Report] = []
        self.tensors: dict[str, HeldTensor] = {}
        self._mapped = {name: box.tensor for name, box in schedule.maps().items()}
        self._walks = {walk.kernel: walk for walk in schedule.walks()}

    def watch(self, kernel: Kernel) -> Onlookers:
        """The observer of the next launch."""
        constants, used = dict(kernel.constants), self.schedule.tiling.used
        rows, cols = int(constants.get("BR", used.block_rows)), int(constants.get("BC", used.block_cols))
        if "softmax" in kernel.name:
            rows, cols = int(constants["SOFTMAX_WARPS"]), max(1, self.schedule.problem.seqlen_k)
        walk = self._walks.get(kernel.name)
        launch = TracedLaunch(len(self.launches), kernel, inner_of(walk), rows, cols, isinstance(walk, Walk) and walk.inner_first)
        self.launches.append(launch)
        follow = None if self.timeline_block is None else partial(self._follow, kernel, self.timeline_block)
        return Onlookers(lambda access: self._observe(launch, access), follow)

    def _follow(self, kernel: Kernel, block: int, given: Values) -> None:
        """Makes the timeline of a launch that is about to begin."""
        from cupyflash.sim.clock import planned, timeline

        if block >= kernel.grid:
            self.timelines.append({"timeline": None, "timeline_why": f"the launch has {plural(kernel.grid, 'thread block')}"})
            return
        load = partial(planned.launched, kernel, self.schedule, given)
        self.timelines.append(timeline.told(load, self.schedule.device, block, source_text))

    def _observe(self, launch: TracedLaunch, access: Access) -> None:
        segment, lanes = access.segment, access.lanes
        if segment is None or segment.space != "global":
            return
        held = self._held(self._mapped.get(segment.name, segment.name), segment.array)
        offsets = access.addresses.astype(np.int64) - segment.pointer
        blocks = np.broadcast_to(lanes.block, offsets.shape)  # a bulk copy has one lane and many pieces
        sizes = np.broadcast_to(np.asarray(access.size, np.int64), offsets.shape)
        counts = -(-sizes // held.itemsize)
        elements = ranges(offsets // held.itemsize, counts)
        if held.pages and elements.size and self._in_pages(segment.name):
            elements = by_heads(elements, segment.array.shape)
        nbytes = np.repeat(np.minimum(sizes, held.itemsize), counts)
        for block in np.unique(blocks[counts > 0]).tolist():
            own, number = np.repeat(blocks == block, counts), lanes.wave.number(lanes.wave.first_block + block)
            launch.add(number, Touch(held, access.write, elements[own], nbytes[own], place_of(access)))

    def _held(self, name: str, array: Array) -> HeldTensor:
        known = self.tensors.get(name)
        if known is None:
            assert array.flags.c_contiguous, name  # as they are drawn
            shape, pages = shape_of(name, array), self._pages(name, array)
            if pages and self._in_pages(name):  # all pages of a head together
                shape = array.shape[1], array.shape[0] * array.shape[2], array.shape[3]
            known = self.tensors[name] = HeldTensor(name, shape, array.itemsize, pages)
        return known

    def _in_pages(self, name: str) -> bool:
        """True if an array is (pages, heads, rows, d)."""
        return name in ("K", "V") and self.decoding is not None and "block_table" in self.decoding.arrays

    def _pages(self, name: str, array: Array) -> tuple[Page | None, ...]:
        """`Held.pages` of decoding's arrays."""
        if self.decoding is None or name not in ("K", "V", "K_new", "V_new"):
            return ()
        lengths = self.decoding.arrays["cache_seqlens"].tolist()
        if name.endswith("_new"):
            return tuple(Page(b, length) for b, length in enumerate(lengths) for _ in range(array.shape[1]))
        if not self._in_pages(name):
            return ()
        owners: dict[int, Page] = {}
        for b, row in enumerate(self.decoding.arrays["block_table"].tolist()):
            owners |= {page: Page(b, place * int(array.shape[2])) for place, page in enumerate(row) if page >= 0}
        return tuple(owners.get(page) for page in range(array.shape[0])) * int(array.shape[1])

    def moves(self) -> Iterator[TileMove]:
        """The moves in order."""
        for launch in self.launches:
            yield from launch.in_order(self.tensors)


def source_text(line: Line) -> str:
    """A line of the kernels' sources, "" for one of another file."""
    file, number = line
    try:
        lines = kernels_cu.source(file.rpartition("/")[2]).splitlines()
    except OSError:
        return ""
    return lines[number - 1].strip() if number <= len(lines) else ""


def by_heads(elements: Array, shape: Shape) -> Array:
    """Elements of (pages, heads, rows, d), counted as those of (heads, pages, rows, d)."""
    page, head, row, col = np.unravel_index(elements, shape)
    return np.ravel_multi_index((head, page, row, col), (shape[1], shape[0], *shape[2:]))


def shape_of(name: str, array: Array) -> tuple[int, int, int]:
    """An array as (slabs, rows, cols)."""
    if is_vector(name):
        return math.prod(array.shape[:-1]), array.shape[-1], 1
    if not axes_of(name) and name not in ("block_table", "tree_mask"):
        return 1, array.size, 1
    return math.prod(array.shape[:-2]), array.shape[-2], array.shape[-1]


def place_of(access: Access) -> str:
    """An access's line in the kernel's own source."""
    i = access.instruction
    file, line = i.inlined_at[-1] if i.inlined_at else i.place
    return f"{str(file).rpartition('/')[2]}:{line}"


def span_of(places: Array) -> Span:
    """The span from the first to the last."""
    return Span(int(places.min()), int(places.max()) + 1)


def joined(one: TileMove, more: TileMove) -> TileMove:
    """Joins two moves of the same tile to one."""
    rows = Span(min(one.rows.first, more.rows.first), max(one.rows.end, more.rows.end))
    cols = Span(min(one.cols.first, more.cols.first), max(one.cols.end, more.cols.end))
    return replace(one, rows=rows, cols=cols, nbytes=one.nbytes + more.nbytes)


def with_scores(inner: str | None, moves: Iterable[TileMove], *, first: bool = False) -> Iterator[TileMove]:
    """A thread block's moves, with the tiles of S at the move with which Q_i and K_j are both there, where `inner` passes by, and
    perhaps is asked for `first`."""
    outer = {"Q": "K", "K": "Q", None: None}[inner]
    every = list(moves)
    # Of the two, what comes next
    following = [move.tensor for move in every if not move.write and move.tensor in (inner, outer)][1:]
    stays: list[TileMove] = []
    before: list[TileMove] = []
    """Tiles that came before any that stays."""
    passed = False
    for move in every:
        made: tuple[ScoreTile, ...] = ()
        if move.write or inner is None or move.tensor not in (inner, outer):
            yield move
            continue
        then = following.pop(0) if following else None
        if move.tensor == outer:
            stays = [move] if passed else [*stays, move]
            passed = False
            made = tuple(scores_of(move, other) for other in before)
        elif not stays or (first and then == outer):
            before, stays, passed = [*([] if stays else before), move], [], False
        else:
            made = tuple(scores_of(other, move) for other in stays)
            before, passed = [], True
        yield replace(move, scores=made) if made else move


def with_scores_of_pieces(moves: Iterable[TileMove], tensors: Mapping[str, HeldTensor], block_cols: int) -> Iterator[TileMove]:
    """The same of decoding, where K_j comes in pieces, pages of the cache and new keys: S_ij begins with the last of them."""
    every = list(moves)
    queries = [move for move in every if move.tensor == "Q"]
    keys = {at: tensors[move.tensor].keys_of(move) for at, move in enumerate(every) if move.tensor in KEYS and not move.write}
    blocks: dict[int, list[int]] = {}
    for at, span in keys.items():
        blocks.setdefault(span.first // block_cols, []).append(at)
    whole = {own[-1]: Span(min(keys[at].first for at in own), max(keys[at].end for at in own)) for own in blocks.values()}
    for at, move in enumerate(every):
        made = tuple(ScoreTile(one.slab, one.rows, whole[at]) for one in queries) if at in whole else ()
        yield replace(move, scores=made) if made else move


def scores_of(one: TileMove, other: TileMove) -> ScoreTile:
    """S of a tile of Q and one of K, in either order."""
    queries, keys = (one, other) if one.tensor == "Q" else (other, one)
    return ScoreTile(queries.slab, queries.rows, keys.rows)


def rooms_of(trace: Trace, launch: int) -> tuple[tuple[Room, ...], dict[str, str]]:
    """The rooms in SRAM of a launch, and in which of them a tensor's tiles are; those of others are in registers."""
    moved = {(move.tensor, move.write) for move in trace.moves if move.launch == launch}
    if not trace.kernels[launch].shared_bytes:
        return (), {}
    walk = trace.walk(launch)
    rooms = {room.name: room for room in walk.rooms if room.nbytes}
    inside = {move.tensor.name: move.tile for move in walk.moves if move.tile and (move.tensor.name, move.write) in moved}
    if "pages" in rooms:  # decoding's length comes there, then some of the table's places at a time
        paged = isinstance(trace.schedule, DecodeSchedule) and trace.schedule.cache.page_size
        name = "pages" if paged else "length"
        rooms["pages"] = Room(name, rooms["pages"].nbytes)
        inside |= {"cache_seqlens": name, "block_table": name}
    return tuple(rooms.values()), inside
