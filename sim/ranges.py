"""Ranges of whole numbers, many at once."""

from __future__ import annotations

import numpy as np

from cupyflash.basics import Array


def ranges(first: Array | int, count: Array) -> Array:
    """Returns the numbers first[k] to first[k] + count[k] - 1 of every k, one range behind the other."""
    behind = np.cumsum(count)
    numbers: Array = np.arange(behind[-1] if len(count) else 0) + np.repeat(first - behind + count, count)
    return numbers


def members(groups: Array, size: int) -> Array:
    """Returns the numbers of the `size` members of each of these groups, those of group 0 first from 0 on."""
    numbers: Array = (groups[:, None] * size + np.arange(size)).reshape(-1)
    return numbers
