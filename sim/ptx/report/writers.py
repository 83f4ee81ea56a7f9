"""Who wrote what a loop that asks memory reads: the stores and atomics of a wave, by words of memory of four bytes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..state.lanes import Wave
from ..state.segments import Segment
from ..text.types import Array

WORD = 4


class Written(NamedTuple):
    """What made a word what it is: numbers of the block's own stores and atomics, and whether other blocks had a part in it."""

    by: tuple[int, ...]
    outside: bool


class Writers:
    """The last store of each word, and the atomics since. `rows`: of each number its warp."""

    def __init__(self, wave: Wave, rows: Mapping[int, int]):
        self.rows = rows
        self.shared = wave.blocks * wave.shared_stride
        self.every = [Written((), False), Written((), True)]
        """Of which tables have the places: nobody, another block, and so on."""
        self.tables: dict[Segment | None, Array] = {}

    def table(self, segment: Segment | None) -> Array:
        """Of a tensor, or of the wave's shared memory."""
        found = self.tables.get(segment)
        if found is None:
            nbytes = self.shared if segment is None else segment.size
            found = self.tables[segment] = np.zeros(nbytes // WORD + 1, np.int32)
        return found

    def stored(self, segment: Segment | None, words: Array, numbers: Array) -> None:
        """Lanes (rows of `words`) store; `numbers`: of each its store, 0 for lanes of other blocks."""
        places = np.ones(len(numbers), np.int32)
        for number in np.unique(numbers[numbers > 0]).tolist():
            places[numbers == number] = len(self.every)
            self.every.append(Written((number,), False))
        self.table(segment)[words] = places[:, None]

    def added(self, segment: Segment | None, words: Array, numbers: Array) -> None:
        """Lanes change what is there: theirs joins what others did, of each warp the last."""
        table, each = self.table(segment), np.repeat(numbers, words.shape[1])
        order = np.argsort(words, axis=None, kind="stable")
        found, each = words.reshape(-1)[order], each[order]
        for a, b in pairwise([*np.flatnonzero(np.diff(found, prepend=-1)).tolist(), len(found)]):
            before, mine = self.every[table[found[a]]], np.unique(each[a:b]).tolist()
            rows = {self.rows[number] for number in mine if number}
            kept = [number for number in before.by if self.rows[number] not in rows]
            table[found[a]] = len(self.every)
            self.every.append(Written((*kept, *(number for number in mine if number)), before.outside or 0 in mine))

    def of(self, segment: Segment | None, words: Array) -> Written:
        """Of all these words together."""
        some = [self.every[place] for place in sorted(set(self.table(segment)[words].ravel().tolist()))]
        return Written(tuple(dict.fromkeys(n for one in some for n in one.by)), any(one.outside for one in some))
