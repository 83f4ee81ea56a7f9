"""The queue from which FlashAttention-3's thread blocks take their row blocks: fa3_queue.cu, in NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

THREADS = 128
LOCKSTEP = 4
"""Thread blocks that read the same K and V at about the same time, at least: a block of 128 rows asks for a byte in 128 FLOP, for
which DRAM is too slow, and these together for one in 512."""
WHOLE = 31
ALIKE, UNLIKE = ((8, WHOLE), (12, 1), (math.inf, 0)), ((8, WHOLE), (64, 3), (math.inf, 0))
"""Pairs (row blocks for each thread block, at most; bits after the first by which lengths are told apart), if all sequences have
the same length and if not. With few row blocks a class that ends unevenly shows in the end. Found by trying random problems.
"""


@dataclass(frozen=True)
class Items:
    """Blocks of rows of each of the `heads`, which come by `section`s: the number of column blocks that they visit, -1 if a
    sequence has none, and a number that sequences share whose K and V are in L2 together. `exact`: the number of bits after the
    first by which classes tell lengths apart."""

    turns: np.ndarray
    together: np.ndarray
    heads: int
    section: int
    exact: int

    def order(self) -> tuple[np.ndarray, np.ndarray]:
        """The items and the heads in the order in which they are taken: the longest first, but in classes. Of items whose lengths
        agree in their first bits, those of sequences that are together follow each other, and within these the heads by sections.
        """
        n, turns = np.arange(len(self.turns)), self.turns
        dropped = np.maximum(np.frexp(np.maximum(turns, 1))[1] - 1 - self.exact, 0)
        length = np.where(turns < 1, turns, turns >> dropped << dropped)
        item = np.lexsort((n, -turns, self.together, -length))
        new = np.flatnonzero(np.diff(length[item], prepend=-2) | np.diff(self.together[item], prepend=-1))
        size = np.diff(new, append=len(n))
        begin, alike = (np.repeat(each, size)[:, None] for each in (new, size))
        head = np.arange(self.heads)[None]
        first = head // self.section * self.section
        place = begin * self.heads + first * alike + (n[:, None] - begin) * np.minimum(self.section, self.heads - first)
        order = np.empty((2, self.heads * len(n)), np.int64)
        order[:, place + head - first] = np.broadcast_arrays(item[:, None], head)
        return order[0], order[1]
