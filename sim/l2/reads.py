"""What thread blocks read beside tiles: of masks, biases, captured arrays and what is known of tiles, where their elements lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cupyflash import score
from cupyflash.expressions.evaluate import evaluate
from cupyflash.expressions.tree import Apply, Load, Name, Node, Number, counted, depends_on
from cupyflash.problem import Problem
from cupyflash.schedules import BackwardSchedule, TileSchedule
from cupyflash.schedules.base import FLOAT32
from cupyflash.schedules.moves import functions
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import Memory
from cupyflash.sim.l2.parts import Part

Given = Mapping[str, Any]
"""Arrays and numbers of a call by the names of the kernels' struct"""
# Elements whose addresses take as long to find as a turn of a few tiles to play
EVALUATED = 32


class At(NamedTuple):
    """A batch or sequence and a query head (or one for each row), and how many queries and keys it has."""

    batch: int
    head: Any
    queries: int
    keys: int

    @classmethod
    def of(cls, part: Part, head: int) -> At:
        return cls(part.number, head, part.problem.seqlen_q, part.problem.seqlen_k)


class Scores(NamedTuple):
    """Of tiles (tiles, rows): which row, and the keys that it sees, from the first to before the end, if there are any."""

    row: np.ndarray
    first: np.ndarray
    end: np.ndarray

    @property
    def number(self) -> np.ndarray:
        """How many."""
        found: np.ndarray = np.maximum(0, self.end - self.first)
        return found

    @property
    def reach(self) -> tuple[np.ndarray, np.ndarray]:
        """The first key and the end of all that rows of a tile see, (tiles, 1)."""
        some, far = self.number > 0, np.iinfo(np.int64).max
        end = np.where(some, self.end, 0).max(axis=1, keepdims=True)
        return np.minimum(np.where(some, self.first, far).min(axis=1, keepdims=True), end), end


class Place(NamedTuple):
    """Where an array lies, and by which steps in bytes along each axis of its `lengths`."""

    first: int
    lengths: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, name: str, lengths: tuple[int, ...], itemsize: int, memory: Memory, given: Any = None) -> Place:
        """As the array that is given lies, or contiguous with these lengths."""
        if given is None:
            steps = tuple(itemsize * int(np.prod(lengths[axis + 1 :], dtype=object)) for axis in range(len(lengths)))
        else:
            lengths, steps = given.shape, given.strides
        ends = [(length - 1) * step for length, step in zip(lengths, steps, strict=True) if length > 1]
        behind = sum(end for end in ends if end < 0)
        tensor = memory.rows(name, sum(ends) - 2 * behind + itemsize, 1)
        return cls(tensor.first - behind, lengths, steps)


@dataclass(frozen=True)
class Reading:
    """An array of which each head, row, key or score (`place`) has an element, at an address that `at` finds from names of an
    expression. `kind` is that of the function which asks for it."""

    kind: str
    place: str
    itemsize: int
    at: Callable[[Mapping[str, Any]], np.ndarray]
    along_row: bool
    along_column: bool
    contiguous: bool
    """Whether keys that are neighbours have neighbouring elements"""

    @classmethod
    def of_scores(cls, name: str, kind: str, lengths: tuple[int, ...], itemsize: int, memory: Memory, given: Any) -> Reading:
        """An array that broadcasts to (b, h, n_q, n_k)."""
        place = Place.of(name, lengths, itemsize, memory, given)
        rest = 4 - len(place.lengths)
        steps = (0,) * rest + tuple(0 if n == 1 else step for n, step in zip(place.lengths, place.steps, strict=True))

        def at(names: Mapping[str, Any]) -> np.ndarray:
            each = zip(("b", "h", "row", "k"), steps, strict=True)
            return np.asarray(sum((names[axis] * step for axis, step in each), place.first))

        return cls(kind, "score", itemsize, at, steps[2] != 0, steps[3] != 0, steps[3] == itemsize)

    @classmethod
    def of_load(cls, form: score.Form, load: Load, place: str, where: Place, values: Mapping[str, Any]) -> Reading:
        """What a score or mask function has captured."""

        def at(names: Mapping[str, Any]) -> np.ndarray:
            found = np.asarray(where.first)
            for index, length, step in zip(load.indices, where.lengths, where.steps, strict=True):
                place = np.asarray(evaluate(index, {**values, **names}, np.float32), np.int64)
                found = found + np.clip(place, 0, max(0, length - 1)) * step
            return found

        along, itemsize = depends_on(load), score.itemsize(form, load)
        by_key = [step for index, step in zip(load.indices, where.steps, strict=True) if "column" in depends_on(index)]
        contiguous = by_key == [itemsize] and any(counted(index) == "k" for index in load.indices)
        return cls(form.kind, place, itemsize, at, "row" in along, "column" in along, contiguous)


class Reads:
    """All that a kernel of a schedule reads, `by_tiles` what is one for a row or a key; with `of_mask` only what the mask does,
    with `dbias` what is added to the bias's gradient too."""

    def __init__(
        self,
        schedule: TileSchedule,
        memory: Memory,
        given: Given,
        *,
        by_tiles: bool,
        of_mask: bool = False,
        dbias: bool = False,
    ) -> None:
        p = schedule.problem
        self.group = p.heads // p.kv_heads
        self.readings = list(_loads(p, memory, given, by_tiles, of_mask))
        lengths = (p.batch, p.heads, p.seqlen_q, p.seqlen_k)
        if p.options.mask:
            self.readings.append(Reading.of_scores("mask", "mask", _of_mask(p, lengths), 1, memory, given.get("mask")))
        if p.options.bias and not of_mask:
            self.readings.append(Reading.of_scores("bias", "score", lengths, p.itemsize, memory, given.get("bias")))
        of_bias = Reading.of_scores("dbias", "score", lengths, FLOAT32, memory, given.get("dbias")) if dbias else None
        self.dbias = of_bias  # read and written by atomics

    @property
    def unit(self) -> int:
        """What divides where they begin, in bytes; 0 where there are none."""
        return int(np.gcd.reduce([0, *(each.itemsize for each in (*self.readings, *([self.dbias] if self.dbias else [])))]))

    def heft(self, rows: int, columns: int) -> int:
        """How much a tile of so many scores is to play."""
        found = 0
        for each in (*self.readings, *([self.dbias] if self.dbias else [])):
            if each.place == "score":
                one_by_one = each.along_column and not each.contiguous
                found += rows * columns // EVALUATED if one_by_one else rows // 2 if each.along_row else 1
        return found

    @cached_property
    def of_each(self) -> Mapping[str, list[Reading]]:
        """By place."""
        return {place: [each for each in self.readings if each.place == place] for place in score.Parts._fields}

    def names(self, at: At, row: Any = 0, k: Any = 0) -> dict[str, Any]:
        """What an expression knows."""
        b, h, n_q, n_k = at
        return {"b": b, "h": h, "kv_h": h // self.group, "n_q": n_q, "n_k": n_k, "row": row, "q": row + n_k - n_q, "k": k}

    def of_head(self, at: At, turn: int, move: int, times: int = 1) -> Iterator[Requests]:
        """What is one for a head."""
        for each in self.of_each["head"]:
            yield Requests.of_elements(np.array(turn), move, each.at(self.names(at)), np.array(times), each.itemsize)

    def of_rows(self, at: At, move: int, turn: Any, row0: Any, rows: Any, asked: Any = True) -> Iterator[Requests]:
        """What is one for a row, of some tiles' rows; of a mask where that is asked."""
        return self._of_line("row", at, move, turn, row0, rows, asked)

    def of_keys(self, at: At, move: int, turn: Any, col0: Any, cols: Any, asked: Any = True) -> Iterator[Requests]:
        """What is one for a key."""
        return self._of_line("key", at, move, turn, col0, cols, asked)

    def _of_line(self, place: str, at: At, move: int, turn: Any, first: Any, number: Any, asked: Any) -> Iterator[Requests]:
        if not self.of_each[place]:
            return
        every = np.broadcast_arrays(*map(np.atleast_1d, (turn, first, number, asked)))
        turn, first, number, asked = (each[:, None] for each in every)
        n = np.arange(number.max(initial=0))
        there = n < number
        names = self.names(at, **{"row" if place == "row" else "k": first + n})
        for each in self.of_each[place]:
            often = there & asked if each.kind == "mask" else there
            yield Requests.of_elements(turn, move, each.at(names), often.astype(np.int64), each.itemsize)

    def of_tiles(
        self, part: Part, head: int, move: int, turn: Any, rows: tuple[Any, Any], columns: tuple[Any, Any], asked: Any = True
    ) -> Iterator[Requests]:
        """What the scores of tiles read that position leaves: `rows` and `columns` are the first of each tile, and how many."""
        if not (self.of_each["score"] or self.dbias):
            return
        turn, row0, number, col0, cols = (np.atleast_1d(each)[:, None] for each in (turn, *rows, *columns))
        n = np.arange(number.max(initial=0))
        first, end = part.problem.keys_seen(row0 + n, part.keys)
        seen = np.maximum(first, col0), np.where(n < number, np.minimum(end, col0 + cols), 0)
        yield from self.of_scores(At.of(part, head), move, turn, Scores(row0 + n, *seen), np.atleast_1d(asked)[:, None])

    def of_scores(self, at: At, move: int, turn: np.ndarray, scores: Scores, asked: Any = True) -> Iterator[Requests]:
        """What scores read, of each tile in a `turn` (tiles, 1)."""
        for each in self.of_each["score"]:
            some = scores if each.kind == "score" else scores._replace(end=np.where(asked, scores.end, 0))
            yield self.of_reading(each, at, move, turn, some)
        if self.dbias:  # an atomic reads and writes
            for write in (False, True):
                yield self.of_reading(self.dbias, at, move, turn, scores, write)

    def of_reading(self, each: Reading, at: At, move: int, turn: np.ndarray, scores: Scores, write: bool = False) -> Requests:
        number, size = scores.number, each.itemsize
        if not number.size or not each.along_column:
            return Requests.of_elements(turn, move, each.at(self.names(at, scores.row)), number, size, write=write)
        if not each.along_row and np.ndim(at.head) == 0:  # all rows of a tile read the same keys' elements
            row, (first, end), often = scores.row[:, :1], scores.reach, number.sum(axis=1, keepdims=True)
        else:
            row, (first, end), often = scores.row, (scores.first, scores.first + number), number
        if each.contiguous:
            begin, nbytes = each.at(self.names(at, row, first)), (end - first) * size
            turn, begin, nbytes, often = (one.ravel() for one in np.broadcast_arrays(turn, begin, nbytes, often))
            some = nbytes > 0
            return Requests.of(turn[some], move, begin[some], nbytes[some], write=write, asked=often[some] * size)
        k = scores.reach[0][..., None] + np.arange((scores.reach[1] - scores.reach[0]).max())
        seen = (scores.first[..., None] <= k) & (k < scores.end[..., None])
        if row.shape[1] < number.shape[1]:
            seen = seen.sum(axis=1, keepdims=True)
        at = at._replace(head=np.asarray(at.head)[..., None])
        address = each.at(self.names(at, row[..., None], k))
        return Requests.of_elements(turn[..., None], move, address, seen.astype(np.int64), size, write=write)


def _of_mask(p: Problem, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """A mask's shape: what it is broadcast along has a length of 1, as far as that is known."""
    pattern = p.options.pattern
    if pattern is None:
        return lengths
    return pattern.shape if pattern.bits is not None else (*pattern.shape[:2], *lengths[2:])


def _loads(p: Problem, memory: Memory, given: Given, by_tiles: bool, of_mask: bool) -> Iterator[Reading]:
    """The loads of score and mask functions."""
    for form in functions(p):
        if of_mask and form.kind != "mask":
            continue
        own = score.captured_by(form, given)
        values = {one.name: _known(own.get(one.name), one.axes or 0) for one in form.captured}
        reach = {name: _bounds(value) for name, value in values.items()} | _positions(p)
        lengths: dict[str, tuple[int, ...]] = {}  # as far as any load of an array reaches
        for load in form.loads:
            ends = [max(1, 1 + _reach(index, reach)[1]) for index in load.indices]
            lengths[load.name] = tuple(map(max, ends, lengths.get(load.name, ends)))
        parts = score.parts(form, by_tiles)
        for place in score.Parts._fields:
            for load in getattr(parts, place):
                name, itemsize = score.field(load.name, form.kind), score.itemsize(form, load)
                where = Place.of(name, lengths[load.name], itemsize, memory, own.get(load.name))
                yield Reading.of_load(form, load, place, where, values)


def _known(value: Any, axes: int) -> Any:
    """A number, or what an array holds: zeros where that is not here to be looked at."""
    if value is None or (hasattr(value, "shape") and not isinstance(value, np.ndarray | np.generic)):
        return np.zeros((1,) * axes, np.int64)
    return value


def _bounds(value: Any) -> tuple[int, int]:
    array = np.asarray(value)
    return (int(array.min()), int(array.max())) if array.size and np.all(np.isfinite(array)) else (0, 0)


def _positions(p: Problem) -> dict[str, tuple[int, int]]:
    """The least and the largest of each position."""
    sizes = score.sizes_of(p)
    found = {name: (0, max(0, sizes[name] - 1)) for name in ("b", "h", "kv_h", "row", "k")}
    return found | {"q": (-p.seqlen_q, max(0, p.seqlen_k - 1)), "n_q": (0, p.seqlen_q), "n_k": (0, p.seqlen_k)}


def _reach(node: Node, known: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """The least and the largest that an index may be."""
    if isinstance(node, Number):
        return int(node.value), int(node.value)
    if isinstance(node, Name | Load):
        return known[node.name]
    assert isinstance(node, Apply)
    operands = [_reach(each, known) for each in node.operands if each.type != "bool"]
    (a, b), (c, d) = operands[0] if operands else (0, 1), operands[1] if len(operands) > 1 else (0, 0)
    products = [x * y for x in (a, b) for y in (c, d)]
    most = max(abs(a), abs(b))
    found = {
        "+": (a + c, b + d),
        "-": (a - d, b - c),
        "*": (min(products), max(products)),
        "%": (min(0, c + 1), max(0, d - 1)),
        "negate": (-b, -a),
        "abs": (0 if a <= 0 <= b else min(abs(a), abs(b)), most),
        "min": (min(a, c), min(b, d)),
        "max": (max(a, c), max(b, d)),
        "where": (min(a, c), max(b, d)),
        "int": (a, b),
    }
    return found[node.operation]


class Known:
    """What is said of tiles: a block mask, and the states that a mask's first kernel found. A byte each."""

    def __init__(self, schedule: TileSchedule, memory: Memory) -> None:
        self.shares = schedule.shares if isinstance(schedule, BackwardSchedule) else (1, 1)
        self.block_rows, self.packed = schedule.block_rows, schedule.together is not None
        block_mask = schedule.problem.options.block_mask
        shapes = {} if block_mask is None else {"block_mask": block_mask.shape}
        shapes |= {each.field: each.shape for each in schedule.mask_tiles[:1]}
        self.places = {name: Place.of(name, shape, 1, memory) for name, shape in shapes.items()}

    @property
    def unit(self) -> int:
        """As `Reads.unit`."""
        return int(bool(self.places))

    def of(self, part: Part, head: int, move: int, i: Any, j: Any, turn: int = 0) -> Iterator[Requests]:
        """What is read of tiles (i, j)."""
        for name in self.places:
            row = i // self.shares[0] if name == "block_mask" else i
            column = j // self.shares[1] if name == "block_mask" else j
            address = self.at(name, part, head, row, column)
            yield Requests.of_elements(np.array(turn), move, address, np.ones_like(address), 1)

    def at(self, name: str, part: Part, head: int, i: Any, j: Any) -> np.ndarray:
        """The address of a tile's byte."""
        place = self.places[name]
        first_block = part.rows[0] // self.block_rows + part.number if self.packed else 0
        batch = part.number if place.lengths[0] > 1 else 0
        of_plane = place.first + batch * place.steps[0] + (head if place.lengths[1] > 1 else 0) * place.steps[1]
        return np.asarray(of_plane + (first_block + i) * place.steps[2] + j * place.steps[3])
