"""Pieces of work of a kernel: the order in which thread blocks take them, and the turns of their moves."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np

from cupyflash.basics import Array
from cupyflash.schedules import Walk
from cupyflash.schedules.moves import When
from cupyflash.sim.l2.bounds import Bounds
from cupyflash.sim.ranges import ranges
from cupyflash.sim.two_level.steps import Events, Heads, Steps

Order = Literal["rows", "batch", "heads"]
ORDERS: tuple[Order, ...] = get_args(Order)
"""The order of thread blocks in a grid: "rows": row blocks of one head, then its heads, then the batch, as the kernels have
it. "batch": row blocks, then the batch, then heads, as in FlashAttention-2's own grid. "heads": the same row block of all heads."""


class Works(NamedTuple):
    """Pieces of work in the order in which they are taken, by their part, key head and tile; `there`: those that exist."""

    part: Array
    k: Array
    g: Array
    i: Array
    j: Array
    there: Array

    @classmethod
    def of(cls, walk: Walk, order: str, bounds: Bounds | None) -> Works:
        """A walk's."""
        rows, cols = (np.array([part.extents(walk.blocks)[axis].size for part in walk.parts], np.int64) for axis in range(2))
        sizes = {"b": len(walk.parts), "k": walk.key_heads, "g": walk.group, "i": rows.max(initial=0), "j": cols.max(initial=0)}
        along = "i" if "i" in walk.block.lower() else "j"
        if walk.takes is not None:
            item, head = walk.takes.order()
            k, g = np.divmod(head, walk.group)
            part, i = np.divmod(item, sizes["i"]) if bounds is None else (each[item] for each in bounds.found())
            return cls(part, k, g, i, np.zeros_like(i), i < rows[part])
        if bounds is not None:  # thread blocks are launched for the longest that a call allows
            longest = walk.schedule.problem.seqlen_q, walk.schedule.problem.seqlen_k
            sizes |= {axis: -(-n // size) for axis, n, size in zip("ij", longest, walk.blocks, strict=True)}
        if bounds is None:
            axes = {"rows": "bk" + walk.block, "batch": "kgbI", "heads": "Ibkg"}[order]
        else:
            axes = "k" + "".join("b" if axis.lower() == along else axis for axis in walk.block)
            sizes["b"] = bounds.blocks
        found = dict(zip(axes.lower(), np.indices([sizes[axis] for axis in axes.lower()]).reshape(len(axes), -1), strict=True))
        for axis in filter(str.isupper, axes):
            found[axis.lower()] = sizes[axis.lower()] - 1 - found[axis.lower()]
        if walk.alternate > 1:
            pair, block = (found["b"] * sizes["k"] + found["k"], found[along]) if bounds is None else (found["k"], found["b"])
            launched = np.lexsort((pair, block, pair // walk.alternate))
            found = {axis: each[launched] for axis, each in found.items()}
        if bounds is not None:
            found["b"], index = (each[found["b"]] for each in bounds.found())
            last = (rows if along == "i" else cols)[found["b"]] - 1
            found[along] = last - index if along.upper() in walk.block else index
        part, k, g, i, j = (found.get(axis, np.zeros_like(found["b"])) for axis in "bkgij")
        here = [(at >= 0) & (at < size[part]) for axis, at, size in (("i", i, rows), ("j", j, cols)) if axis in walk.block.lower()]
        return cls(part, k, g, i, j, np.logical_and.reduce(here) if here else np.ones(len(part), bool))


class MovedTiles(NamedTuple):
    """Turns in which something moves: whose piece of work, when, and of which tile."""

    work: Array
    turn: Array
    g: Array
    i: Array
    j: Array

    def repeated(self, number: Array | int) -> tuple[MovedTiles, Array]:
        """Each repeated so often, and the index of the repetition."""
        each = np.broadcast_to(number, self.work.shape)
        return MovedTiles(*(np.repeat(one, each) for one in self)), ranges(0, each)


class Tables:
    """The turns of all thread blocks of a walk, numbered through its parts and key heads; equal ones are stored once."""

    def __init__(self, walk: Walk, works: Works) -> None:
        self.steps: list[Steps] = []
        known: dict[object, int] = {}
        whose = np.zeros((len(walk.parts), walk.key_heads), np.int64)
        for number, part in enumerate(walk.parts):
            for k in range(walk.key_heads):
                key = part.kind, 0 if part.alike or walk.every else k
                if key not in known:
                    known[key] = len(self.steps)
                    self.steps.append(Steps(walk, part, Heads.of(walk, part, k)))
                whose[number, k] = known[key]
        self.first = np.cumsum([0, *(each.blocks for each in self.steps)])
        self._visits = np.concatenate([np.zeros(1, np.int64), *(each.visits for each in self.steps)])
        self._turns = np.concatenate([np.ones(1, np.int64), *(each.turns for each in self.steps)])
        self.width = int(self._turns.max()) + 2
        self._events: dict[When, tuple[Array, Events]] = {}
        # The number of each piece of work
        table = whose[works.part, works.k]
        block = np.zeros(len(table), np.int64)
        for axis in walk.block.lower():
            block = block * np.array([each.sizes[axis] for each in self.steps], np.int64)[table] + getattr(works, axis)
        self.block = np.where(works.there, self.first[table] + block, -1)

    @property
    def visits(self) -> Array:
        """The tiles that each piece of work visits."""
        found: Array = self._visits[self.block + 1]
        return found

    @property
    def turns(self) -> Array:
        """The turns that each piece of work takes."""
        found: Array = self._turns[self.block + 1]
        return found

    def asked(self, when: When, works: Array, first: Array, end: Array) -> MovedTiles:
        """The moves of pieces of work in their turns from `first` to `end`."""
        if when not in self._events:
            every = [each.events(when) for each in self.steps]
            blocks = np.concatenate([each.block + first for each, first in zip(every, self.first, strict=False)])
            events = every[0] if len(every) == 1 else Events(*map(np.concatenate, zip(*every, strict=True)))
            self._events[when] = blocks * self.width + events.turn, events
        order, events = self._events[when]
        block = self.block[works] * self.width
        begin, behind = (np.searchsorted(order, block + turn) for turn in (first, end))
        number = behind - begin
        at = ranges(begin, number)
        return MovedTiles(np.repeat(works, number), *(each[at].astype(np.int64) for each in events[1:]))
