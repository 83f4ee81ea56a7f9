"""A kernel's thread blocks as its schedule's walk has them, and the addresses for which they ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cupyflash.basics import Array
from cupyflash.schedules import BackwardSchedule, Kernel, Move, Walk
from cupyflash.schedules.balance import taken
from cupyflash.schedules.moves import Of, When
from cupyflash.schedules.parts import Axis
from cupyflash.sim.l2.bounds import Bounds
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import TOGETHER, DeviceMemory, PlacedTensor, PlayedLaunch, unit_of
from cupyflash.sim.l2.reads import Given, Place, Reading, reading
from cupyflash.sim.l2.works import MovedTiles, Order, Tables, Works
from cupyflash.sim.two_level.steps import OF_WORKS


class PlayedWalk(PlayedLaunch):
    """A walk's kernel on a device that runs `slots` of its thread blocks at a time."""

    def __init__(self, walk: Walk, kernel: Kernel, slots: int, memory: DeviceMemory, given: Given, order: Order = "rows") -> None:
        self.schedule: Any = walk.schedule
        self.slots, self.grid = slots // walk.cluster, kernel.grid // walk.cluster
        self._resident = slots = self.slots
        if walk.streamed:
            # Those of a multiprocessor are one: their requests are too small to be followed one by one.
            self.slots = self.schedule.device.sm_count
            walk = replace(walk, sizes=(walk.streamed * (slots // self.slots), walk.blocks[1]))
        self.walk, self.memory, self.given = walk, memory, given
        packed = None if walk.works is None else self.schedule.together
        axis, size = ("q", walk.blocks[0]) if "i" in walk.block.lower() else ("k", walk.blocks[1])
        self.bounds = None if packed is None else Bounds.of(packed, axis, size, walk.parts, memory)
        self.works = Works.of(walk, order, self.bounds)
        self.tables = Tables(walk, self.works)
        self.visits, self.work_turns = self.tables.visits, self.tables.turns
        self.begins = np.zeros(len(self.visits), np.int64)  # the turn in which each piece of work begins
        self.whose = self._takers()
        self.turns = np.bincount(self.whose, self.work_turns[: len(self.whose)]).astype(np.int64)
        self.q, self.k = (Axis(*np.array(each).T) for each in ([part.q for part in walk.parts], [part.k for part in walk.parts]))
        self.numbers, self.lengths = (np.array(each) for each in ([p.number for p in walk.parts], [p.sizes for p in walk.parts]))
        self.together = walk.parts[0].heads_together
        self.units, self.heft = [0], 1
        tiles_first = sorted(enumerate(walk.moves), key=lambda each: not each[1].tensor.along or each[1].tensor.load is not None)
        made = {number: self._made(move) for number, move in tiles_first}  # in this order they lie in memory
        self.made = [made[number] for number in range(len(made))]
        self.unit = unit_of(self.units)

    @property
    def resident(self) -> int:
        return self._resident

    def _takers(self) -> Array:
        """The thread block of each piece of work."""
        s = self.walk.takes
        if s is None:
            return np.arange(len(self.visits))
        # Who is free first takes the next; at the end each asks once more, as far as there are numbers.
        whose, _ = taken(self.work_turns[: s.blocks_there] if s.queued else np.ones(s.asked_for), s.grid)
        return np.append(whose, np.arange(s.asked_for - len(whose)))

    def played(self) -> Iterator[tuple[float, Requests]]:
        works = np.argsort(self.whose, kind="stable")
        turns = self.work_turns[works]
        starts = np.cumsum(turns) - turns + (self.starts() - np.cumsum(self.turns) + self.turns)[self.whose[works]]
        order = np.argsort(starts, kind="stable")
        works, starts = works[order], starts[order]
        self.begins[works] = starts
        ends, step = starts + self.work_turns[works], max(1, TOGETHER // (self.slots * self.heft))
        last, launched, running = int(ends.max(initial=0)), 0, works[:0]
        for now in range(0, last, step):
            upto = int(np.searchsorted(starts, now + step))
            running = np.append(running[ends[running] > now], np.arange(launched, upto))
            launched = upto
            begin, end = np.maximum(now, starts[running]), np.minimum(now + step, ends[running])
            yield min(1.0, (now + step) / last), self.requests(works[running], begin - starts[running], end - starts[running])

    def requests(self, works: Array, first: Array, end: Array) -> Requests:
        """The requests of pieces of work in their turns from `first` to `end`, which are numbered from their own begin."""
        new = works[first == 0]
        asked: dict[When | None, MovedTiles] = {None: MovedTiles(new, *[np.zeros_like(new)] * 4)}
        parts = []
        for number, (move, made) in enumerate(zip(self.walk.moves, self.made, strict=True)):
            when = None if move.tensor.of in OF_WORKS else move.when
            if when is not None and when not in asked:
                asked[when] = self.tables.asked(when, works, first, end)
            at = asked[when]
            if len(at.work):
                parts.append(made(at._replace(turn=at.turn + self.begins[at.work])).of_move(number, move.write))
        return Requests.together(parts)

    def _made(self, move: Move) -> Callable[[MovedTiles], Requests]:
        """A function that makes the requests of a move."""
        moved, memory = move.tensor, self.memory
        if moved.of in ("one", "work"):
            return partial(self._words, move, memory.words(moved.name, len(self.visits)))
        self.units.append(moved.itemsize)
        if moved.of == "row block":
            heads = int(self.q.plane.max()) + self.schedule.problem.heads
            return partial(self._row_blocks, move, memory.rows(moved.name, heads * int(self.q.length.max()), moved.itemsize))
        if moved.of == "search":
            return partial(self._search, move)
        if moved.of == "tile":
            return partial(self._state, move, self._states(moved.name))
        if moved.load or moved.name in ("mask", "bias", "dbias", "tree_mask"):
            found = reading(self.schedule, moved, memory, self.given)
            if moved.of in ("query", "key", "head"):
                return partial(self._line, move, found)
            self.heft += found.heft(*self.walk.blocks)
            return partial(self._scores, move, found)
        return self._placed(move)

    def _placed(self, move: Move) -> Callable[[MovedTiles], Requests]:
        """The same for tensors that lie row by row."""
        moved, p = move.tensor, self.schedule.problem
        of_keys, (Br, Bc) = moved.of == "key", self.walk.blocks
        axis, heads, size = (self.k, p.kv_heads, Bc) if of_keys else (self.q, p.heads, Br)
        count = {"head": p.heads, "batch": len(self.numbers)}.get(moved.of)
        if count is None:
            length = -(-int(axis.length.max()) // moved.rounded) * moved.rounded
            count = (int(axis.plane.max()) + heads) * length
            whole = np.concatenate([np.array([size if moved.along[0] in self.walk.axes(move.when) else 0, length]), *axis[2:]])
            self.units[-1] *= moved.width * int(np.gcd.reduce(whole))
        if moved.of == "scores":
            self.heft = max(self.heft, Br // 2)  # its rows are apart, and no two thread blocks ask for the same
            self.units[-1] = moved.itemsize * int(np.gcd.reduce([p.seqlen_k, Bc, *self.k.there, *self.k.room]))
            return partial(self._squares, move, self.memory.rows(moved.name, count * p.seqlen_k, moved.itemsize))
        tensor = self.memory.rows(moved.name, count, moved.row_bytes)
        return partial(self._rows if moved.along else self._one, move, tensor)

    def _by_heads(self, move: Move, at: MovedTiles) -> tuple[MovedTiles, Array]:
        """Moves for each query head, and the heads."""
        if "g" not in self.walk.axes(move.when):
            at, g = at.repeated(self.walk.group)
            at = at._replace(g=g)
        head = (self.works.k[at.work] * self.walk.group + at.g) * self.walk.pack * self.together
        if self.walk.pack > 1:
            at, member = at.repeated(self.walk.pack)
            head = np.repeat(head, self.walk.pack) + member
        return at, head

    def _extent(self, move: Move, at: MovedTiles, letter: str) -> tuple[Array, Array]:
        """The first row or key of a part that is moved, and how many."""
        axis, size, tile = (self.q, self.walk.blocks[0], at.i) if letter == "i" else (self.k, self.walk.blocks[1], at.j)
        part = self.works.part[at.work]
        ends = (axis.room if move.room else axis.there)[part]
        if letter not in self.walk.axes(move.when):
            return np.zeros_like(ends), ends
        first = self.walk.parts[0].rows(tile, size) if letter == "i" else tile * size
        return first, np.clip(ends - first, 0, size)

    def _row(self, move: Move, at: MovedTiles, head: Array, row: Array) -> Array:
        """The numbers of heads' rows."""
        axis, part, rounded = self.k if move.tensor.of == "key" else self.q, self.works.part[at.work], move.tensor.rounded
        length = -(-axis.length[part] // rounded) * rounded
        found: Array = (axis.plane[part] + head) * length + axis.begin[part] + row
        return found

    def _rows(self, move: Move, tensor: PlacedTensor, at: MovedTiles) -> Requests:
        at, head = (at, self.works.k[at.work]) if move.tensor.of == "key" else self._by_heads(move, at)
        first, rows = self._extent(move, at, move.tensor.along)
        return tensor.of(at.turn, self._row(move, at, head, first), rows, times=move.times)

    def _squares(self, move: Move, tensor: PlacedTensor, at: MovedTiles) -> Requests:
        """Requests for some columns of each row of S or its like."""
        at, head = self._by_heads(move, at)
        (row, rows), (col, cols) = self._extent(move, at, "i"), self._extent(move, at, "j")
        at, n = at.repeated(rows)
        head, row, col, cols = (np.repeat(each, rows) for each in (head, row, col, cols))
        first = self._row(move, at, head, row + n) * self.schedule.problem.seqlen_k + col
        return tensor.of(at.turn, first, cols)

    def _one(self, move: Move, tensor: PlacedTensor, at: MovedTiles) -> Requests:
        """Requests for the one element of a head or a batch."""
        at, head = self._by_heads(move, at) if move.tensor.of == "head" else (at, self.numbers[self.works.part[at.work]])
        times = self._extent(move, at, "i")[1] if move.by_rows else move.times
        return tensor.of(at.turn, head, 1, times=times)

    def _words(self, move: Move, tensor: PlacedTensor, at: MovedTiles) -> Requests:
        return tensor.of(at.turn, at.work if move.tensor.of == "work" else 0, 1)

    def _row_blocks(self, move: Move, tensor: PlacedTensor, at: MovedTiles) -> Requests:
        head = self.works.k[at.work] * self.walk.group + at.g  # the first one's, if it is none's own
        row = self._row(move, at, head, self._extent(move, at, "i")[0])
        return tensor.of(at.turn, row, np.minimum(self.q.there[self.works.part[at.work]], 1), times=move.times)

    def _search(self, move: Move, at: MovedTiles) -> Requests:
        assert self.bounds is not None
        times = np.where(self.works.there[at.work], move.times, 1)
        return self.bounds.search(move.tensor.name, at.turn, self.works.part[at.work], times)

    def _states(self, name: str) -> tuple[Place, tuple[int, int]]:
        """The place of an array with a byte a tile, and the row blocks and column blocks that share one."""
        s, block_mask = self.schedule, self.schedule.problem.options.block_mask
        if name == "block_mask" and block_mask is not None:
            return Place.of(name, block_mask.shape, 1, self.memory), s.shares if isinstance(s, BackwardSchedule) else (1, 1)
        return Place.of(name, s.mask_tiles[0].shape, 1, self.memory), (1, 1)

    def _state(self, move: Move, states: tuple[Place, tuple[int, int]], at: MovedTiles) -> Requests:
        at, head = self._by_heads(move, at)
        (place, shares), part = states, self.works.part[at.work]
        before = 0 if self.schedule.together is None else self.q.begin[part] // self.walk.blocks[0] + self.numbers[part]
        index = self.numbers[part], head, before + at.i // shares[0], at.j // shares[1]
        steps = (step if length > 1 else 0 for length, step in zip(place.lengths, place.steps, strict=True))
        address = place.first + sum(n * step for n, step in zip(index, steps, strict=True))
        return Requests.of_elements(at.turn, address, np.ones_like(address), 1, whose=at.work)

    def _names(self, at: MovedTiles, head: Array, row: Array, k: Array) -> dict[str, Array]:
        """The values of an expression's names for elements, (moves, elements of each)."""
        p, part = self.schedule.problem, self.works.part[at.work][:, None]
        n_q, n_k = self.lengths[part, 0], self.lengths[part, 1]
        place = {"b": self.numbers[part], "h": head, "kv_h": head // p.group, "n_q": n_q, "n_k": n_k}
        return {**place, "row": row, "q": row + n_k - n_q, "k": k}

    def _line(self, move: Move, found: Reading, at: MovedTiles) -> Requests:
        """Requests for an element of each head, or of each of a tile's rows or keys."""
        at, head = self._by_heads(move, at)
        along, none = move.tensor.along or "i" * move.by_rows, np.zeros((len(head), 1), np.int64)
        if not along:
            return found.of_each(at.turn[:, None], self._names(at, head[:, None], none, none), none + move.times)
        first, length = self._extent(move, at, along)
        n = np.arange(length.max(initial=0))
        query, member = np.divmod(first[:, None] + n, self.together)
        row, k = (query, none) if along == "i" else (none, query)
        often = (n < length[:, None]) * move.times
        return found.of_each(at.turn[:, None], self._names(at, head[:, None] + member, row, k), often)

    def _scores(self, move: Move, found: Reading, at: MovedTiles) -> Requests:
        """Requests for an element of each score of a tile, or of each that position leaves."""
        at, head = self._by_heads(move, at)
        (row0, rows), (col0, cols) = self._extent(move, at, "i"), self._extent(move, at, "j")
        of, n = move.tensor.of, np.arange(rows.max(initial=0))
        row, first, end = row0[:, None] + n, col0[:, None], (col0 + cols)[:, None]
        query, member = np.divmod(row, self.together)
        if of == "scores":
            first, end = (np.broadcast_to(each, row.shape) for each in (first, end))
        else:
            first, end = self._seen(at, row, of, first, col0[:, None] + self.walk.blocks[1])
        if of == "newest":
            n_q, n_k = self.lengths[self.works.part[at.work]].T
            first, end = (each - (n_k - n_q)[:, None] for each in (first, end))
        end = np.where(n < rows[:, None], end, 0)
        names = self._names(at, head[:, None] + member, query, first)
        return found.of_tiles(at.turn[:, None], names, first, end, alike=self.together == 1).by(move.times)

    def _seen(self, at: MovedTiles, row: Array, of: Of, lo: Array, hi: Array) -> tuple[Array, Array]:
        """The keys of tiles from `lo` to before `hi` that rows see for their position."""
        first, end, whose = np.zeros_like(row), np.zeros_like(row), self.works.part[at.work]
        for part in np.unique(whose).tolist():
            first[whose == part], end[whose == part] = self.walk.parts[part].keys_seen(row[whose == part], of)
        return np.maximum(first, lo), np.minimum(end, hi)
