"""The two-level machine: an SRAM of M bytes over an HBM that counts. A schedule is replayed on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from cupyflash.basics import Array
from cupyflash.request.options import require_flag
from cupyflash.schedules import Move, Room, Schedule, TileSchedule, Walk, require_schedule
from cupyflash.schedules.moves import BEGIN, VISIT, Of, Tensor, Totals, When
from cupyflash.schedules.parts import Part, Visited
from cupyflash.sim.traffic import Traffic
from cupyflash.sim.two_level.steps import OF_WORKS, Heads, Steps, distinct

# A replay goes through every row, up to some 50 bytes each.
MOST_ROWS = 1 << 22
OF_HEADS = frozenset({"query", "part", "scores", "seen", "newest", "head"})
"""Kinds of tensors that each query head has of its own."""
WORK = Move(Tensor("", "batch", 1, 0), BEGIN)
LAST = When("gi", at="last")
ONE = np.ones(1, np.int64)
# Tiles of scores that are looked at together
TOGETHER = 1 << 10


class SramOverflow(ValueError):
    """A tile does not fit what is left of the SRAM, or a move does not fit its tile."""


class TooLong(ValueError):
    """The lengths are more than a replay, or the model of the L2, goes through."""


@dataclass
class Machine:
    """SRAM of `sram_bytes`; every tile is allocated before it is used, and refused when it does not fit."""

    sram_bytes: int
    peak_bytes: int = 0
    _tiles: dict[str, int] = field(default_factory=dict)
    _read: Counter[str] = field(default_factory=Counter)
    _written: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def hold(self, tiles: Iterable[Room]) -> Iterator[None]:
        """Allocate tiles for as long as the context lasts."""
        held = []
        for tile in tiles:
            used = sum(self._tiles.values())
            if tile.name in self._tiles:
                raise SramOverflow(f"tile {tile.name} is already in SRAM")
            if used + tile.nbytes > self.sram_bytes:
                raise SramOverflow(
                    f"tile {tile.name} of {tile.nbytes:,} bytes does not fit an SRAM of {self.sram_bytes:,} bytes, of which "
                    f"{used:,} are taken"
                )
            self._tiles[tile.name] = tile.nbytes
            self.peak_bytes = max(self.peak_bytes, used + tile.nbytes)
            held.append(tile.name)
        yield
        for name in held:
            del self._tiles[name]

    def move(self, move: Move, elements: int, largest: int) -> None:
        """Move so many elements, at most `largest` at a time."""
        room, nbytes = self._tiles.get(move.tile or "", 0), largest * move.tensor.itemsize
        if move.tile is not None and nbytes > room:
            raise SramOverflow(f"{nbytes:,} bytes of {move.tensor.name} do not fit tile {move.tile} of {room:,} bytes")
        (self._written if move.write else self._read)[move.tensor.name] += elements * move.tensor.itemsize

    def run(self, walk: Walk | Totals, literal: bool = False) -> None:
        """Make all moves of a walk; `literal`: turn by turn."""
        with self.hold(walk.rooms):
            if isinstance(walk, Totals):
                for move in walk.moves:
                    self.move(move, move.tensor.width, 0)
                return
            found = 0  # pieces of work
            for times, part, heads in distinct(walk):
                tally = (Literal if literal else Tally)(walk, part, heads)
                found += times * tally.works
                for move in walk.moves:
                    if elements := tally.elements(move):
                        shared = walk.cluster if move.tensor.of == "key" else 1  # blocks of a cluster have the same rows
                        self.move(move, times * elements, -(-tally.largest(move) // shared))
            for move in walk.moves:
                if move.tensor.of in OF_WORKS and walk.works is not None:  # those who find none look for one too
                    self.move(move, (walk.works - found) * move.tensor.width, 0)

    @property
    def traffic(self) -> Traffic:
        """The moves so far."""
        return Traffic.of(self._read, self._written)


class Tally:
    """The moves of the thread blocks of a part's key head, counted by sums."""

    def __init__(self, walk: Walk, part: Part, heads: Heads) -> None:
        self.walk, self.part, self.heads = walk, part, heads
        self.works = self.elements(WORK)

    def elements(self, move: Move) -> int:
        """Elements that a move has in all turns together."""
        of, when = move.tensor.of, move.when
        number = self._seen(when, of) if of in ("seen", "newest") else self._sum(when, *self._extents(move))
        every = self.walk.group if of in OF_HEADS and "g" not in self.walk.axes(when) else 1
        return number * every * self._row(move) * move.times

    def turns(self, move: Move) -> int:
        """The number of turns in which a move comes."""
        return self.elements(replace(WORK, when=move.when))

    def largest(self, move: Move) -> int:
        """Elements of its largest box."""
        axes = self.walk.axes(move.when)
        rows, cols = (int(n.max(initial=0) if axis in axes else n.sum()) for axis, n in zip("ij", self._extents(move), strict=True))
        return rows * cols * self._row(move)

    def _row(self, move: Move) -> int:
        """Elements of a row, of all heads that share a tile."""
        return move.tensor.width * (self.walk.pack if move.tensor.of in OF_HEADS else 1)

    def _extents(self, move: Move) -> tuple[Array, Array]:
        """Rows of each row block, and columns of each column block: 1 of what has not so many."""
        along, axes, first_of_all = move.tensor.along + "i" * move.by_rows, self.walk.axes(move.when), move.tensor.of == "row block"
        rows, cols = (
            tiles if axis in along else np.ones_like(tiles) if axis in axes else ONE[: len(tiles)] if first_of_all else ONE
            for axis, tiles in zip("ij", self.part.extents(self.walk.blocks, move.room, move.tensor.of), strict=True)
        )
        return rows, cols

    def _sum(self, when: When, rows: Array, cols: Array) -> int:
        """The sum of rows[i] * cols[j] over all that `when` says."""
        axes, heads = self.walk.axes(when), self.heads
        if when.tiles == "every":
            return int(rows.sum() * cols.sum()) * (self.walk.group if "g" in axes else 1)
        if when.tiles == "unseen":
            return self._sum(when._replace(tiles="every"), rows, cols) - self._sum(when._replace(tiles="visited"), rows, cols)
        if when.tiles == "earlier":
            return self._sum(VISIT, rows, cols) - self._sum(LAST, rows, ONE)
        every = [_of(visited, when) for visited in heads.visited]
        if "g" in axes:
            return heads.alike * sum(_projected(visited, axes, rows, cols) for visited in every)
        return _projected(Visited.by_any(every), axes, rows, cols)

    def _seen(self, when: When, of: Of) -> int:
        """Scores that are seen for their position."""
        (Br, Bc), found = self.walk.blocks, 0
        rows, cols = np.arange(self.part.q.there), np.arange(-(-self.part.k.room // Bc)) * Bc
        first, end = self.part.keys_seen(rows, of)
        for visited in self.heads.visited:
            kept = _of(visited, when).kept
            if kept is None:
                found += int(np.maximum(0, end - first).sum())
            else:
                each = np.minimum(end[:, None], cols + Bc) - np.maximum(first[:, None], cols)
                found += int((np.maximum(0, each) * kept[rows // Br]).sum())
        return self.heads.alike * found


def _of(visited: Visited, when: When) -> Visited:
    """The tiles that `when` speaks of."""
    return visited.asked if when.tiles == "mixed" else visited.spanned if when.tiles == "spanned" else visited


def _projected(visited: Visited, axes: str, rows: Array, cols: Array) -> int:
    """The sum of rows[i] * cols[j] over the tiles that a head visits, once for all that agree in the axes."""
    if "i" in axes and "j" in axes:
        return visited.sum(rows, cols)
    if "i" in axes:
        return int(rows[visited.counts > 0].sum() * cols.sum())
    if "j" in axes:
        return int(rows.sum() * cols[visited.columns].sum())
    return int(rows.sum() * cols.sum()) if visited.counts.any() else 0


class Literal(Tally):
    """The same moves, turn by turn."""

    def __init__(self, walk: Walk, part: Part, heads: Heads) -> None:
        self.steps = Steps(walk, part, heads)
        super().__init__(walk, part, heads)

    def _sum(self, when: When, rows: Array, cols: Array) -> int:
        events, axes = self.steps.events(when), self.walk.axes(when)
        moved = np.ones_like(events.block)
        for axis, extents, at in zip("ij", (rows, cols), (events.i, events.j), strict=True):
            moved *= extents[at] if axis in axes else extents.sum()
        return int(moved.sum())

    def _seen(self, when: When, of: Of) -> int:
        (Br, Bc), found = self.walk.blocks, 0
        events = self.steps.events(when)
        for at in range(0, len(events.i), TOGETHER):
            i, j = (each[at : at + TOGETHER, None] for each in (events.i, events.j))
            row = self.part.rows(i, Br) + np.arange(Br)
            first, end = self.part.keys_seen(row, of)
            seen = np.minimum(end, (j + 1) * Bc) - np.maximum(first, j * Bc)
            found += int(np.maximum(0, seen)[row < self.part.q.there].sum())
        return found


@dataclass(frozen=True)
class Replay:
    """The result of a replay: traffic in bytes per tensor, and the most SRAM that one thread block held, in bytes."""

    traffic: Traffic
    peak_sram_bytes: int


def run(schedule: Schedule, *, literal: bool = False) -> Replay:
    """Run a schedule on the machine; `literal` walks every step on its own instead of counting equal ones together.

    Time and memory grow with the lengths (up to some 50 bytes a row), `literal` time with their product. Raises SramOverflow when a
    tile does not fit, and TooLong for more than 4,194,304 queries or keys: `theory.traffic` counts those as fast as any.
    """
    require_schedule(schedule, Schedule, "plan")
    require_flag("literal", literal)
    if isinstance(schedule, TileSchedule) and max(schedule.problem.seqlen_q, schedule.problem.seqlen_k) > MOST_ROWS:
        p = schedule.problem
        raise TooLong(f"a replay goes through at most {MOST_ROWS:,} queries and keys a head, got {p.seqlen_q:,} and {p.seqlen_k:,}")
    machine = Machine(schedule.device.sram_per_block)
    for walk in schedule.walks():
        machine.run(walk, literal)
    return Replay(machine.traffic, machine.peak_bytes)


def replay(schedule: Schedule, *, literal: bool = False) -> Traffic:
    """The HBM traffic of a schedule run on an SRAM of the device's M bytes.

    Costs and raises as `run` does.
    """
    return run(schedule, literal=literal).traffic
