"""Addresses in masks, biases and captured arrays, for the elements that scores, rows, keys and heads look up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupyflash.basics import Array
from cupyflash.expressions.evaluate import evaluate
from cupyflash.expressions.tree import Apply, Load, Name, Node, Number, counted, depends_on
from cupyflash.request import score
from cupyflash.request.decode import for_all_heads
from cupyflash.request.problem import Problem
from cupyflash.schedules import TileSchedule
from cupyflash.schedules.moves import Tensor
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import DeviceMemory

Given = Mapping[str, Any]
"""Arrays and numbers of a call by the names of the kernels' struct"""
# Elements whose addresses take as long to find as a turn of a few tiles to play
EVALUATED = 32


class Place(NamedTuple):
    """The place of an array: its first byte, and the steps in bytes along each axis of its `lengths`."""

    first: int
    lengths: tuple[int, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, name: str, lengths: tuple[int, ...], itemsize: int, memory: DeviceMemory, given: Any = None) -> Place:
        """Returns the tensor as the given array lies, or contiguous with these lengths."""
        if given is None:
            steps = tuple(itemsize * int(np.prod(lengths[axis + 1 :], dtype=object)) for axis in range(len(lengths)))
        else:
            lengths, steps = given.shape, given.strides
        ends = [(length - 1) * step for length, step in zip(lengths, steps, strict=True) if length > 1]
        behind = sum(end for end in ends if end < 0)
        tensor = memory.rows(name, sum(ends) - 2 * behind + itemsize, 1)
        return cls(tensor.first - behind, lengths, steps)


Names = Mapping[str, Any]
"""Values of an expression's names for elements: batch, head, row, key."""


@dataclass(frozen=True)
class Reading:
    """The reads of an array: `at` finds the addresses of its elements from the names of an expression."""

    itemsize: int
    at: Callable[[Names], Array]
    along_row: bool = False
    along_column: bool = False
    contiguous: bool = False
    """True if keys that are neighbours have neighbouring elements."""

    @classmethod
    def of_scores(cls, name: str, lengths: tuple[int, ...], itemsize: int, memory: DeviceMemory, given: Any) -> Reading:
        """An array that broadcasts to (b, h, n_q, n_k)."""
        place = Place.of(name, lengths, itemsize, memory, given)
        rest = 4 - len(place.lengths)
        steps = (0,) * rest + tuple(0 if n == 1 else step for n, step in zip(place.lengths, place.steps, strict=True))

        def at(names: Names) -> Array:
            each = zip(("b", "h", "row", "k"), steps, strict=True)
            return np.asarray(sum((names[axis] * step for axis, step in each), place.first))

        return cls(itemsize, at, steps[2] != 0, steps[3] != 0, steps[3] == itemsize)

    @classmethod
    def of_load(cls, form: score.Form, load: Load, where: Place, values: Names) -> Reading:
        """Return the reads of a captured array of a score or mask function."""

        def at(names: Names) -> Array:
            found = np.asarray(where.first)
            for index, length, step in zip(load.indices, where.lengths, where.steps, strict=True):
                place = np.asarray(evaluate(index, {**values, **names}, np.float32), np.int64)
                found = found + np.clip(place, 0, max(0, length - 1)) * step
            return found

        along, itemsize = depends_on(load), score.itemsize(form, load)
        by_key = [step for index, step in zip(load.indices, where.steps, strict=True) if "column" in depends_on(index)]
        contiguous = by_key == [itemsize] and any(counted(index) == "k" for index in load.indices)
        return cls(itemsize, at, "row" in along, "column" in along, contiguous)

    def heft(self, rows: int, columns: int) -> int:
        """The work of modelling a tile of `rows` x `columns` scores that read it, as a multiple of a plain turn's."""
        if self.along_column and not self.contiguous:
            return rows * columns // EVALUATED
        return rows // 2 if self.along_row else 1

    def of_each(self, turn: Array, names: Names, often: Array) -> Requests:
        """The requests for elements, each `often`."""
        return Requests.of_elements(turn, self.at(names), often.astype(np.int64), self.itemsize)

    def of_tiles(self, turn: Array, names: Names, first: Array, end: Array, *, alike: bool) -> Requests:
        """The requests of tiles (tiles, rows), one in a `turn`, whose rows each see the keys from `first` to before `end`; `alike`:
        True if the rows of a tile are of one head."""
        number, size = np.maximum(0, end - first), self.itemsize
        if not number.size or not self.along_column:
            return Requests.of_elements(turn, self.at(names), number, size)
        begin = np.where(number > 0, first, np.iinfo(np.int64).max).min(axis=1, keepdims=True)
        behind = np.where(number > 0, end, 0).max(axis=1, keepdims=True)
        begin = np.minimum(begin, behind)
        one = not self.along_row and alike  # all rows of a tile read the same keys' elements
        if one:
            names = {name: each[:, :1] for name, each in names.items()}
        if self.contiguous:
            lo, hi, often = (begin, behind, number.sum(axis=1, keepdims=True)) if one else (first, first + number, number)
            at, nbytes = self.at({**names, "k": lo}), (hi - lo) * size
            turn, at, nbytes, often = (each.ravel() for each in np.broadcast_arrays(turn, at, nbytes, often))
            some = nbytes > 0
            return Requests.of(turn[some], at[some], nbytes[some], asked=often[some] * size)
        k = begin[..., None] + np.arange((behind - begin).max())
        seen = (first[..., None] <= k) & (k < end[..., None])
        often = seen.sum(axis=1, keepdims=True) if one else seen.astype(np.int64)
        address = self.at({**{name: each[..., None] for name, each in names.items()}, "k": k})
        return Requests.of_elements(turn[..., None], address, often, size)


def reading(schedule: TileSchedule, moved: Tensor, memory: DeviceMemory, given: Given) -> Reading:
    """The reading of a tensor into which scores, rows, keys or heads look."""
    p = schedule.problem
    if moved.load is not None:
        form, load = moved.load
        own = score.captured_by(form, given)
        values = {one.name: _known(own.get(one.name), one.axes or 0) for one in form.captured}
        reach = {name: _bounds(value) for name, value in values.items()} | _positions(p)
        alike = [each for each in form.loads if each.name == load.name]  # as far as any load of the array reaches
        ends = [[max(1, 1 + _reach(index, reach)[1]) for index in each.indices] for each in alike]
        where = Place.of(moved.name, tuple(map(max, zip(*ends, strict=True))), moved.itemsize, memory, own.get(load.name))
        return Reading.of_load(form, load, where, values)
    lengths: tuple[int, ...] = (p.batch, p.heads, p.seqlen_q, p.seqlen_k)
    value = given.get(moved.name)
    if moved.name == "mask":
        lengths = _of_mask(p, lengths)
    if moved.name == "tree_mask":
        lengths, value = (p.batch, 1, p.seqlen_q, p.seqlen_q), for_all_heads(value)
    return Reading.of_scores(moved.name, lengths, moved.itemsize, memory, value)


def _of_mask(p: Problem, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """A mask's shape: an axis along which it is broadcast has a length of 1, as far as that is known."""
    pattern = p.options.pattern
    if pattern is None:
        return lengths
    return pattern.shape if pattern.bits is not None else (*pattern.shape[:2], *lengths[2:])


def _known(value: Any, axes: int) -> Any:
    """A number, or an array's values: zeros if they are not known."""
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
