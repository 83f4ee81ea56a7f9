"""The queue from which FlashAttention-3's thread blocks take their row blocks: fa3_queue.cu, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyflash.basics import Array

THREADS = 128
NEVER, NONE = (1 << 31) - 1, (1 << 62) - 1
"""A number of column blocks, and a key, that there are not."""
FEW, SHORT = 6, 8
"""Row blocks are told apart by length to the end if each thread block takes at most so many; else those that are shorter than one
in so many parts of the longest, and at least those of one and two column blocks. Longer ones are alike: the shortest, which come
last, even out what these leave. Found by trying random problems (docs/l2.md)."""
LONG = 3 * SHORT
"""Column blocks of the longest row block from which on those that one eighth makes short load few keys again."""


def alike_from(rounds: float, longest: int) -> int:
    """The column blocks from which on row blocks count as equally long, for `rounds` row blocks each thread block, the longest of
    `longest` column blocks."""
    return NEVER if rounds <= FEW else 1 + max(2, longest // SHORT)


def evenly(total: int, most: int) -> int:
    """The size of parts of `total` things, of which all but the last are alike: half of `most` to `most`, the last as full as can
    be, since what comes last evens out what was before."""
    most = min(total, most)
    return max(range((most + 1) // 2, most + 1), key=lambda size: ((total % size or size) / size, size))


@dataclass(frozen=True)
class Items:
    """Blocks of rows of each of the `heads`, which come by `section`s: the number of column blocks that they visit, -1 if a
    sequence has none, and a number that sequences share whose K and V are in L2 together. `alike`: the number of column blocks
    from which on they count as equally long. `last`: whether their sequence is one of the last, whose heads from `last_head` on
    are one section."""

    turns: Array
    together: Array
    last: Array
    heads: int
    section: int
    last_head: int
    alike: int

    def order(self) -> tuple[Array, Array]:
        """The items and the heads in the order in which they are taken: the longest first, but of items that count as equally long
        those of sequences that are together, and of these the heads by sections.
        """
        n, turns = np.arange(len(self.turns)), self.turns
        length = np.minimum(turns, self.alike)
        item = np.lexsort((n, -turns, self.together, -length))
        new = np.flatnonzero(np.diff(length[item], prepend=-2) | np.diff(self.together[item], prepend=-1))
        size = np.diff(new, append=len(n))
        begin, alike = (np.repeat(each, size)[:, None] for each in (new, size))
        head, last_head = np.arange(self.heads)[None], np.where(self.last[item], self.last_head, self.heads)[:, None]
        last = head >= last_head
        first = np.where(last, last_head, head // self.section * self.section)
        beside = np.where(last, self.heads - first, np.minimum(self.section, last_head - first))
        place = begin * self.heads + first * alike + (n[:, None] - begin) * beside
        order = np.empty((2, self.heads * len(n)), np.int64)
        order[:, place + head - first] = np.broadcast_arrays(item[:, None], head)
        return order[0], order[1]
