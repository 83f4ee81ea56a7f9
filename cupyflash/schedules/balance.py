"""Who takes which piece of work: list scheduling, in which whoever is free first takes the next."""

from __future__ import annotations

import heapq

import numpy as np

MOST_PIECES = 1 << 13
"""Whose takers are followed one by one, which takes some 3 ms; those before them are taken to be spread evenly, as many are."""


def taken(lengths: np.ndarray, takers: int) -> tuple[np.ndarray, np.ndarray]:
    """Who takes each piece, and when it begins; of those who are free at once the first one takes it."""
    whose, begins = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), lengths.dtype)
    free = [(lengths.dtype.type(0).item(), taker) for taker in range(takers)]
    for piece, length in enumerate(lengths.tolist()):
        begins[piece], whose[piece] = free[0]
        heapq.heapreplace(free, (free[0][0] + length, free[0][1]))
    return whose, begins


def busiest(lengths: np.ndarray, takers: int) -> float:
    """How long who is busy longest is."""
    many = max(0, len(lengths) - MOST_PIECES)
    _, begins = taken(lengths[many:], takers)
    return float(lengths[:many].sum()) / takers + float((begins + lengths[many:]).max(initial=0))


def balance(lengths: np.ndarray, takers: int) -> float:
    """The busiest over the mean, 1 where there is nothing to do."""
    mean = float(lengths.sum()) / takers
    return busiest(lengths, takers) / mean if mean else 1.0
