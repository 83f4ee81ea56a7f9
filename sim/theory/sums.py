"""Sums of rounded and clipped linear functions, exact in Python's integers, at a cost that does not grow with their length."""

from __future__ import annotations


def floor_sum(n: int, slope: int, start: int, divisor: int) -> int:
    """The sum of (slope i + start) // divisor over 0 <= i < n, in O(log divisor) steps; divisor > 0.

    It counts the lattice points under a line: it takes out whole multiples of the divisor and counts the rest along the other
    axis, which exchanges slope and divisor as Euclid's algorithm does.
    """
    whole, slope = divmod(slope, divisor)
    more, start = divmod(start, divisor)
    total = whole * (n * (n - 1) // 2) + more * n
    turns, rest = divmod(slope * n + start, divisor)
    return total + (floor_sum(turns, divisor, rest, slope) if turns else 0)


def count_below(n: int, slope: int, start: int, level: int) -> int:
    """The number of 0 <= i < n with slope i + start < level; slope > 0."""
    return min(max(-((start - level) // slope), 0), n)


def clipped_sum(n: int, slope: int, start: int, most: int, divisor: int = 1, add: int = 0) -> int:
    """The sum of (clip(slope i + start, 0, most) + add) // divisor over 0 <= i < n; slope > 0, most >= 0."""
    low, high = count_below(n, slope, start, 0), count_below(n, slope, start, most)
    between = floor_sum(high - low, slope, slope * low + start + add, divisor)
    return low * (add // divisor) + between + (n - high) * ((most + add) // divisor)
