"""Which tiles a schedule's kernels really move, one after the other: from the global accesses of an execution on the PTX machine.

A launch's thread blocks run on many multiprocessors at once; here they come one after the other, in the order of the grid, so
that a trace is what one SRAM sees. Within a block the order is the machine's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from cupyflash.schedules import TileSchedule
from cupyflash.schedules.base import Kernel, Phase, Room
from cupyflash.sim import theory
from cupyflash.sim.ptx import Access
from cupyflash.sim.traffic import TensorTraffic, Traffic
from cupyflash.words import plural

MOST_STEPS = 20_000
"""Moves of a trace: what a page plays without delay, and keeps below about two megabytes."""

# Tensors by what their last two axes are; of the vectors, what the last one is.
QUERY_VECTORS = frozenset({"L", "l", "m", "D", "l_part", "m_part"})
QUERY_ROWS = frozenset({"Q", "O", "O_acc", "O_part", "dO", "dQ", "dQ_acc", "bases"})
KEY_ROWS = frozenset({"K", "V", "dK", "dV", "K_new", "V_new"})
SCORES = frozenset({"S", "P", "dP", "dS", "mask", "bias", "dbias"})

# Where S = Q K^T is made: the tensor whose tiles come and go while the other's stays
INNER = {
    "standard_scores": "K",
    "standard_backward_weights": "K",
    "fa1_forward": "Q",
    "fa1_backward": "Q",
    "fa2_forward": "K",
    "fa2_backward": "Q",
    "fa2_backward_queries": "K",
    "fa3_forward": "K",
    "decode": "K",
}
INNER_FIRST = frozenset({"fa3_forward"})
"""Of these, where the first of them is asked for before what stays."""


class Span(NamedTuple):
    """Places along an axis: first <= place < end."""

    first: int
    end: int


@dataclass(frozen=True)
class Scores:
    """A tile of S (or of S^T) of a query head, for which Q_i and K_j are on chip."""

    head: int
    rows: Span
    cols: Span


@dataclass(frozen=True)
class TileMove:
    """What a thread block moves of one tile of a tensor between HBM and the chip: each of its bytes once.

    `slab` counts along all axes of the tensor but the last two (of a vector, the last): heads, mostly. `source` is the place in the
    kernel's own source. `scores` are the tiles of S that can be made from here on, since their Q_i and K_j are there.
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
    scores: tuple[Scores, ...] = ()


@dataclass(frozen=True)
class Held:
    """A tensor in HBM as (slabs, rows, cols); of a vector cols is 1."""

    name: str
    shape: tuple[int, int, int]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Trace:
    """What a schedule moved, in order, and between what. `kernels` by `TileMove.launch`."""

    schedule: TileSchedule
    kernels: tuple[Kernel, ...]
    tensors: dict[str, Held]
    moves: tuple[TileMove, ...]
    executed: Traffic
    problems: tuple[str, ...] = ()

    @property
    def traffic(self) -> Traffic:
        """The sum of the moves."""
        sums = {name: [0, 0] for name in self.tensors}
        for move in self.moves:
            sums[move.tensor][move.write] += move.nbytes
        return Traffic({name: TensorTraffic(*both) for name, both in sums.items()})

    @property
    def agrees(self) -> bool:
        """Whether the moves sum to the executed traffic, and that is the theory's."""
        return self.traffic == self.executed == theory.traffic(self.schedule)


def trace(schedule: TileSchedule, data_seed: int = 0, score: Any = None) -> Trace:
    """Run a schedule's kernels on arrays that are drawn for it, and say what they moved.

    `score` has the values of what the problem's score function captures, as for `verify`. ValueError for a schedule of more than
    about `MOST_STEPS` moves, or one that no kernel runs; ImportError without a compiler.
    """
    from cupyflash.sim.verification import run_drawn
    from cupyflash.sim.yardstick import knowing_mask

    schedule.kernels()  # refuses what no kernel runs
    refuse_longer(schedule)
    schedule = knowing_mask(schedule, data_seed)
    recorder = Recorder(schedule)
    run = run_drawn(schedule, data_seed, score=score, watch=recorder.watch)
    wrong = tuple(
        f"{name} is {n.error:.2e} from float64, {n.allowed:.2e} is allowed" for name, n in run.numbers.items() if not n.good
    )
    found = (*wrong, *map(str, run.findings))
    return Trace(schedule, tuple(recorder.kernels), recorder.tensors, tuple(recorder.moves()), run.traffic, found)


def refuse_longer(schedule: TileSchedule) -> None:
    """ValueError for a schedule of more than about `MOST_STEPS` moves."""
    steps = sum(times * sum(map(_steps, phases)) for times, phases in schedule.parts())
    if steps > MOST_STEPS:
        p = schedule.problem
        raise ValueError(
            f"a trace holds at most {MOST_STEPS:,} moves of tiles; {schedule.algorithm} makes about {steps:,} here "
            f"(Nq {p.seqlen_q:,}, Nk {p.seqlen_k:,}, {plural(p.head_count, 'head')}, Br {schedule.block_rows}, "
            f"Bc {schedule.block_cols}): take fewer rows, or larger tiles"
        )


def _steps(phase: Phase) -> int:
    """Moves of a phase, about: what is summed over rows counts as one."""
    own = sum(move.elements > 0 for move in (*phase.enter, *phase.leave))
    return phase.times * own + sum(visit.times * len(visit.moves) for visit in phase.visits)


@dataclass
class _Launch:
    """Moves of a running launch by (block, tensor, write, tile, turn), in the order of their first access."""

    number: int
    kernel: Kernel
    tile_rows: int
    tile_cols: int
    moves: dict[tuple[int, str, bool, int, int], TileMove] = field(default_factory=dict)
    touched: dict[tuple[int, str, bool, int], np.ndarray] = field(default_factory=dict)
    last: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """By block, the tensor that it accessed last."""


class Recorder:
    """Observes the launches of one execution. A tile's elements that a block accesses for the n-th time are its n-th move."""

    def __init__(self, schedule: TileSchedule):
        self.schedule = schedule
        self.kernels: list[Kernel] = []
        self.tensors: dict[str, Held] = {}
        self._mapped = {name: box.tensor for name, box in schedule.maps().items()}
        self._launches: list[_Launch] = []

    def watch(self, kernel: Kernel) -> Any:
        """The observer of the next launch."""
        constants, used = dict(kernel.constants), self.schedule.tiling.used
        rows, cols = int(constants.get("BR", used.block_rows)), int(constants.get("BC", used.block_cols))
        if "softmax" in kernel.name:
            rows, cols = int(constants["SOFTMAX_WARPS"]), max(1, self.schedule.problem.seqlen_k)
        launch = _Launch(len(self.kernels), kernel, rows, cols)
        self.kernels.append(kernel)
        self._launches.append(launch)
        return lambda access: self._observe(launch, access)

    def _observe(self, launch: _Launch, access: Access) -> None:
        segment = access.segment
        if segment is None or segment.space != "global":
            return
        name = self._mapped.get(segment.name, segment.name)
        held = self.tensors.get(name)
        if held is None:
            held = self.tensors[name] = Held(name, shape_of(name, segment.array), segment.array.itemsize)
        if not segment.array.flags.c_contiguous:
            raise ValueError(f"{name} must be contiguous to be traced")
        wave, offsets = access.lanes.wave, access.addresses.astype(np.int64) - segment.pointer
        blocks = np.broadcast_to(access.lanes.block, offsets.shape)  # a bulk copy has one lane and many pieces
        sizes = np.broadcast_to(np.asarray(access.size, np.int64), offsets.shape)
        counts = -(-sizes // held.itemsize)
        ends = np.cumsum(counts)
        along = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
        elements = np.repeat(offsets // held.itemsize, counts) + along
        each = np.repeat(np.minimum(sizes, held.itemsize), counts)
        source = place_of(access)
        for block in np.unique(blocks).tolist():
            own = np.repeat(blocks == block, counts)
            number = wave.number(wave.first_block + block)
            if own.any():
                self._record(launch, number, held, access.write, elements[own], each[own], source)

    def _record(
        self, launch: _Launch, block: int, held: Held, write: bool, elements: np.ndarray, nbytes: np.ndarray, source: str
    ) -> None:
        """The elements that one block accesses at once."""
        before = launch.last.get(block)
        launch.last[block] = held.name, write
        _, rows, cols = held.shape
        tile_rows, tile_cols = self._tile(launch, held)
        slab, place = np.divmod(elements, rows * cols)
        row, col = np.divmod(place, cols)
        across, down = -(-cols // tile_cols), -(-rows // tile_rows)
        tiles = (slab * down + row // tile_rows) * across + col // tile_cols
        local = row % tile_rows * tile_cols + col % tile_cols
        for tile in np.unique(tiles).tolist():
            here = tiles == tile
            key = block, held.name, write, tile
            touched = launch.touched.get(key)
            if touched is None:
                touched = launch.touched[key] = np.zeros(tile_rows * tile_cols, np.int32)
            if held.name in QUERY_VECTORS | QUERY_ROWS | KEY_ROWS | SCORES:
                turns = touched[local[here]]
                touched[np.unique(local[here])] += 1
            else:  # of these, what is read without anything between
                touched[0] += before != (held.name, write)
                turns = np.full(int(here.sum()), touched[0])
            for turn in np.unique(turns).tolist():
                at = np.flatnonzero(here)[turns == turn]
                rows_here, cols_here = (
                    Span(int(row[at].min()), int(row[at].max()) + 1),
                    Span(int(col[at].min()), int(col[at].max()) + 1),
                )
                move = TileMove(
                    launch.number, block, held.name, write, int(slab[at[0]]), rows_here, cols_here, int(nbytes[at].sum()), source
                )
                known = launch.moves.get((*key, turn))
                launch.moves[(*key, turn)] = move if known is None else joined(known, move)

    def _tile(self, launch: _Launch, held: Held) -> tuple[int, int]:
        """Rows and columns of a tensor's tile in a launch; all of one that has none."""
        _, rows, cols = held.shape
        if held.name in SCORES:
            return min(rows, launch.tile_rows), min(cols, launch.tile_cols)
        if held.name in QUERY_ROWS | QUERY_VECTORS:
            return min(rows, launch.tile_rows), cols
        return (min(rows, launch.tile_cols) if held.name in KEY_ROWS else rows), cols

    def moves(self) -> Iterator[TileMove]:
        """In order: launches, in each its blocks, in each the first accesses."""
        for launch in self._launches:
            blocks: dict[int, list[TileMove]] = {}
            for move in launch.moves.values():
                blocks.setdefault(move.block, []).append(move)
            for block in sorted(blocks):
                yield from with_scores(launch.kernel.name, blocks[block])


def shape_of(name: str, array: np.ndarray) -> tuple[int, int, int]:
    """An array as (slabs, rows, cols)."""
    if name in QUERY_VECTORS:
        return math.prod(array.shape[:-1]), array.shape[-1], 1
    if array.ndim < 2 or name not in QUERY_ROWS | KEY_ROWS | SCORES:
        return 1, array.size, 1
    return math.prod(array.shape[:-2]), array.shape[-2], array.shape[-1]


def place_of(access: Access) -> str:
    """An access's line in the kernel's own source."""
    i = access.instruction
    file, line = i.inlined_at[-1] if i.inlined_at else i.place
    return f"{str(file).rpartition('/')[2]}:{line}"


def joined(one: TileMove, more: TileMove) -> TileMove:
    """Of the same tile."""
    rows = Span(min(one.rows.first, more.rows.first), max(one.rows.end, more.rows.end))
    cols = Span(min(one.cols.first, more.cols.first), max(one.cols.end, more.cols.end))
    return replace(one, rows=rows, cols=cols, nbytes=one.nbytes + more.nbytes)


def with_scores(kernel: str, moves: Iterable[TileMove]) -> Iterator[TileMove]:
    """A thread block's moves, with the tiles of S at the move with which Q_i and K_j are both there."""
    inner = INNER.get(kernel)
    outer = {"Q": "K", "K": "Q", None: None}[inner]
    every = list(moves)
    # Of the two, what comes next
    following = [move.tensor for move in every if not move.write and move.tensor in (inner, outer)][1:]
    stays: list[TileMove] = []
    before: list[TileMove] = []
    """Tiles that came before any that stays."""
    passed = False
    for move in every:
        made: tuple[Scores, ...] = ()
        if move.write or inner is None or move.tensor not in (inner, outer):
            yield move
            continue
        then = following.pop(0) if following else None
        if move.tensor == outer:
            stays = [move] if passed else [*stays, move]
            passed = False
            made = tuple(scores_of(move, other) for other in before)
        elif not stays or (kernel in INNER_FIRST and then == outer):
            before, stays, passed = [*([] if stays else before), move], [], False
        else:
            made = tuple(scores_of(other, move) for other in stays)
            before, passed = [], True
        yield replace(move, scores=made) if made else move


def scores_of(one: TileMove, other: TileMove) -> Scores:
    """S of a tile of Q and one of K, in either order."""
    queries, keys = (one, other) if one.tensor == "Q" else (other, one)
    return Scores(queries.slab, queries.rows, keys.rows)


def rooms_of(schedule: TileSchedule, trace: Trace, launch: int) -> tuple[tuple[Room, ...], dict[str, str]]:
    """The rooms in SRAM of a launch, and in which of them a tensor's tiles are; those of others are in registers."""
    kernel = trace.kernels[launch]
    moved = {(move.tensor, move.write) for move in trace.moves if move.launch == launch}
    rooms: dict[str, Room] = {}
    inside: dict[str, str] = {}
    for _, phases in schedule.parts():
        for phase in phases:
            own = [
                move
                for part in (phase.enter, phase.leave, *(visit.moves for visit in phase.visits))
                for move in part
                if move.elements
            ]
            if kernel.shared_bytes and own and {(move.tensor, move.write) for move in own} <= moved:
                held = (*phase.tiles, *(room for visit in phase.visits for room in visit.tiles))
                rooms |= {room.name: room for room in held if room.nbytes}
                inside |= {move.tensor: move.tile for move in own if move.tile}
    return tuple(rooms.values()), inside
