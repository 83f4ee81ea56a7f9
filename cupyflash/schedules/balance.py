"""List scheduling: the taker that is free first takes the next piece of work."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from cupyflash.basics import Array

MOST_PIECES = 1 << 10
"""The number of last pieces whose takers are followed one by one, which takes a millisecond. Earlier pieces count as spread evenly,
since they are many.
"""
SAMPLE = 1 << 9
"""The number of pieces that are read together, and the size of the sample that stands for many."""


class Pieces(NamedTuple):
    """Pieces of work in the order in which they are taken.

    lengths: maps an array of piece numbers, each below `number`, to their lengths. period: the number of pieces after which the
    lengths repeat.
    """

    number: int
    lengths: Callable[[Array], Array]
    period: int

    @classmethod
    def listed(cls, lengths: Array) -> Pieces:
        return cls(len(lengths), lengths.__getitem__, len(lengths))

    def total(self, end: int) -> float:
        """The sum of the lengths of the first `end`, from an even sample if there are many."""

        def added(first: int) -> float:
            some = min(first, SAMPLE)
            sample = (np.arange(some) * 2 + 1) * first // max(1, 2 * some)
            return float(self.lengths(sample).sum()) * first / max(1, some)

        whole, part = divmod(end, max(1, self.period))
        return whole * added(self.period) + added(part)

    def since(self, begin: int) -> Iterator[float]:
        """The lengths from `begin` on."""
        for index in range(begin, self.number, SAMPLE):
            yield from self.lengths(np.arange(index, min(index + SAMPLE, self.number))).tolist()


def taken(lengths: Array, takers: int) -> tuple[Array, Array]:
    """The taker of each piece, and the time at which it begins. Of several free takers the first one takes the piece."""
    whose, begins = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), lengths.dtype)
    free = [(lengths.dtype.type(0).item(), taker) for taker in range(takers)]
    for piece, length in enumerate(lengths.tolist()):
        begins[piece], whose[piece] = free[0]
        heapq.heapreplace(free, (free[0][0] + length, free[0][1]))
    return whose, begins


def busiest(pieces: Pieces, takers: int) -> float:
    """The time that the busiest taker needs."""
    before = max(0, pieces.number - MOST_PIECES) // takers * takers  # so that equal ones end together
    free = [pieces.total(before) / takers] * takers  # when each is
    for length in pieces.since(before):
        heapq.heapreplace(free, free[0] + length)
    return max(free)


def balance(lengths: Array, takers: int) -> float:
    """The busiest over the mean; 1 if there is no work."""
    mean = float(lengths.sum()) / takers
    return busiest(Pieces.listed(lengths), takers) / mean if mean else 1.0
