"""The turns of a walk's thread blocks, one by one: which tiles they visit, and which moves come when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cupyflash.basics import Array
from cupyflash.schedules.moves import Walk, When
from cupyflash.schedules.parts import Part, Visited

OF_WORKS = frozenset({"search", "work"})
"""Kinds of tensors that each thread block reads to find a piece of work, if there is one."""


class Heads(NamedTuple):
    """The query heads of a key head: the visited tiles of each; if they visit the same, of one, and `alike` is their number."""

    visited: tuple[Visited, ...]
    alike: int

    @classmethod
    def of(cls, walk: Walk, part: Part, number: int) -> Heads:
        """The heads of a part's key head."""
        if walk.every:
            tiles = Visited.every(*map(len, part.extents(walk.blocks)))
            return cls((tiles,), walk.group)
        if part.alike:
            return cls((part.visited(0),), walk.group)
        return cls(tuple(part.visited(number * walk.group + g) for g in range(walk.group)), 1)

    @property
    def each(self) -> tuple[Visited, ...]:
        """The visited tiles of each."""
        return self.visited * self.alike


def distinct(walk: Walk) -> Iterator[tuple[int, Part, Heads]]:
    """The key heads of a walk's parts by what they do, and how many do the same."""
    counted = Counter(part.kind for part in walk.parts)
    for kind, part in {part.kind: part for part in walk.parts}.items():
        times, own = counted[kind], not (part.alike or walk.every)
        for number in range(walk.key_heads if own else min(1, walk.key_heads)):
            yield times * (1 if own else walk.key_heads), part, Heads.of(walk, part, number)


class Events(NamedTuple):
    """Turns of thread blocks in which something moves, in order, and of which tile: what that does not fix is 0."""

    block: Array
    turn: Array
    g: Array
    i: Array
    j: Array


class Steps:
    """The turns of a walk's thread blocks that have a part's key head."""

    def __init__(self, walk: Walk, part: Part, heads: Heads) -> None:
        self.walk, self.part, self.heads = walk, part, heads
        rows, cols = part.extents(walk.blocks)
        self.sizes = {"g": walk.group, "i": len(rows), "j": len(cols)}
        self.blocks = int(np.prod([self.sizes[axis] for axis in walk.block.lower()], dtype=np.int64))
        self.visits = self._counted()
        self.turns = np.maximum(self.visits, 1) if walk.loop else np.ones_like(self.visits)
        self._events: dict[When, Events] = {}

    def _counted(self) -> Array:
        """The tiles that each thread block visits."""
        block, heads = self.walk.block.lower(), self.heads.each
        if "i" in block and "j" in block:
            return np.ones(self.blocks, np.int64)
        if "i" in block or "j" in block:
            each = np.array([visited.counts if "i" in block else visited.column_counts(self.sizes["j"]) for visited in heads])
        else:
            each = np.array([[int(visited.counts.sum())] for visited in heads])
        return each.ravel() if "g" in block else each.sum(axis=0)

    @cached_property
    def tiles(self) -> tuple[Array, ...]:
        """g, i and j of all visits, thread block by thread block."""
        tiles = self._listed(self.heads.each)
        order = np.argsort(self._number(self.walk.block.lower() + self.walk.loop, tiles), kind="stable")
        return tuple(each[order] for each in tiles)

    @cached_property
    def turn(self) -> Array:
        """The turns in which they come, all in one where there is no loop."""
        if not self.walk.loop:
            return np.zeros(int(self.visits.sum()), np.int32)
        before = (np.cumsum(self.visits) - self.visits).astype(np.int32)
        counted: Array = np.arange(self.visits.sum(), dtype=np.int32) - np.repeat(before, self.visits)
        return counted

    def _listed(self, heads: tuple[Visited, ...]) -> tuple[Array, Array, Array]:
        """g, i and j of the tiles that heads visit."""
        pairs = [each.pairs for each in heads]
        g = np.repeat(np.arange(len(pairs), dtype=np.int32), [len(i) for i, _ in pairs])
        none = np.zeros(0, np.int32)
        return g, np.concatenate([none, *(i for i, _ in pairs)]), np.concatenate([none, *(j for _, j in pairs)])

    def _number(self, axes: str, tiles: tuple[Array, ...]) -> Array:
        """Tiles numbered by some axes, the last one fastest; those in capitals from the last one on."""
        found = np.zeros(len(tiles[0]), np.int64)
        for axis in axes:
            size, at = self.sizes[axis.lower()], tiles["gij".index(axis.lower())]
            found = found * size + (size - 1 - at if axis.isupper() else at)
        return found

    def events(self, when: When) -> Events:
        """The turns in which something moves then."""
        if when not in self._events:
            self._events[when] = self._found(when)
        return self._events[when]

    def _found(self, when: When) -> Events:
        axes = "".join(axis for axis in "gij" if axis in self.walk.axes(when))
        if when.tiles in ("visited", "mixed", "earlier"):
            at = self._visits(when, axes)
            turn, tiles = self.turn[at], tuple(each[at] for each in self.tiles)
        else:
            tiles = self._others(when, axes)
            turn = np.zeros(len(tiles[0]), np.int32)
        tiles = tuple(each if axis in axes else np.zeros_like(each) for axis, each in zip("gij", tiles, strict=True))
        block = self._number(self.walk.block.lower(), tiles)
        if when.at in ("begin", "end"):
            order = np.argsort(block, kind="stable")
            block, tiles = block[order], tuple(each[order] for each in tiles)
            turn = np.zeros_like(block) if when.at == "begin" else self.turns[block] - 1
        return Events(block, turn, *tiles)

    def _visits(self, when: When, axes: str) -> Any:
        """The places of those visits among all."""
        if axes == "gij" and when.tiles == "visited":
            return slice(None)
        every = np.arange(len(self.turn))
        if when.tiles == "mixed":
            mixed = [each.asked for each in self.heads.each]
            if mixed[0].kept is None:
                return slice(None)
            g, i, j = self.tiles
            return np.flatnonzero(np.array([each.kept for each in mixed])[g, i, j])
        if when.tiles == "earlier":
            return np.setdiff1d(every, self._visits(When("gi", at="last"), "gi"))
        number = self._number(axes, self.tiles)
        if when.at == "last":
            return np.sort(len(every) - 1 - np.unique(number[::-1], return_index=True)[1])
        return np.sort(np.unique(number, return_index=True)[1])

    def _others(self, when: When, axes: str) -> tuple[Array, ...]:
        """Tiles that are moved for whether they are visited or not."""
        if when.tiles == "spanned":
            return self._listed(tuple(each.spanned for each in self.heads.each))
        every = np.indices([self.sizes[axis] if axis in axes else 1 for axis in "gij"]).reshape(3, -1)
        if when.tiles == "unseen":
            every = every[:, np.concatenate([each.counts == 0 for each in self.heads.each])]
        return tuple(every)
