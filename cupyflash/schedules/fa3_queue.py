"""The queue from which FlashAttention-3's thread blocks take their row blocks: fa3_queue.cu, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cupyflash.basics import Array
from cupyflash.schedules.balance import Pieces, busiest

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


class Grouping(NamedTuple):
    """The row blocks that come together, by the names of the kernel's struct.

    Heads come by `section`s; sequences that begin within `keys_together` keys, whose K and V are in L2 together, come one behind
    the other. Row blocks of `alike` column blocks and more count as equally long. Sequences from `last_key` on are all together,
    and of their heads those from `last_head` on are one section, the last.
    """

    section: int
    keys_together: int
    alike: int
    last_key: int = NONE
    last_head: int = 0


@dataclass(frozen=True)
class Items:
    """Blocks of rows of each of the `heads`: the number of column blocks that they visit, -1 if a sequence has none, and the first
    key of their sequence. `takers`: thread blocks that take them."""

    turns: Array
    first_key: Array
    heads: int
    takers: int
    grouping: Grouping

    @property
    def slower(self) -> float:
        """The time of the busiest taker over that by the longest first. A row block's begin and end count as another turn."""
        turns = self.turns[self.order()[0]] + 1.0
        times = (busiest(Pieces.listed(each), self.takers) for each in (turns, np.sort(turns)[::-1]))
        return next(times) / next(times)

    def order(self) -> tuple[Array, Array]:
        """The items and the heads in the order in which they are taken: the longest first, but of items that count as equally long
        those of sequences that are together, and of these the heads by sections.
        """
        n, turns = np.arange(len(self.turns)), self.turns
        section, keys_together, alike_from, last_key, last_of_heads = self.grouping
        length, together = np.minimum(turns, alike_from), np.minimum(self.first_key, last_key) // keys_together
        item = np.lexsort((n, -turns, together, -length))
        new = np.flatnonzero(np.diff(length[item], prepend=-2) | np.diff(together[item], prepend=-1))
        size = np.diff(new, append=len(n))
        begin, alike = (np.repeat(each, size)[:, None] for each in (new, size))
        head = np.arange(self.heads)[None]
        last_head = np.where(self.first_key[item] >= last_key, last_of_heads, self.heads)[:, None]
        last = head >= last_head
        first = np.where(last, last_head, head // section * section)
        beside = np.where(last, self.heads - first, np.minimum(section, last_head - first))
        place = begin * self.heads + first * alike + (n[:, None] - begin) * beside
        order = np.empty((2, self.heads * len(n)), np.int64)
        order[:, place + head - first] = np.broadcast_arrays(item[:, None], head)
        return order[0], order[1]
