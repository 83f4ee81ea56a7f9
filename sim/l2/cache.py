"""The L2: a sectored, set-associative cache with least-recently-used replacement, which receives requests for runs of whole tiles.

A line is 128 bytes in four sectors of 32; a miss loads the requested ones. A write loads nothing: it marks its sectors, which go to
DRAM when their line is evicted, or at the end. Consecutive lines are in consecutive sets. A hash of its number rotates each stretch
of as many lines as there are sets, since real caches hash addresses; otherwise heads whose sizes are powers of two would all meet
in the same sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from cupyflash.basics import Array
from cupyflash.device import Device
from cupyflash.sim.ranges import ranges

SECTOR = 32
LINE = 128
SECTORS = LINE // SECTOR
# Microbenchmarks found 16 ways in Volta's and Turing's L2 (Jia et al., arXiv 1804.06826 and 1903.07486; not re-read here); NVIDIA
# tells none, and no figure for later ones was found.
WAYS = 16
# Lines by whose multiples a stretch is rotated, so that a tile of whole runs of lines stays one
ROTATED = 256
_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
_VALID = (1 << SECTORS) - 1
_COUNT = np.array([mask.bit_count() for mask in range(1 << SECTORS)])
# Of the sectors between the first and the last element, as a multiple of the elements: up to so many are counted one by one
DENSE = 8
# Runs of lines that are looked up at once, about
AT_ONCE = 1 << 21


@dataclass(frozen=True)
class L2:
    """A cache of `nbytes` bytes, of which sets of `ways` lines are made; bytes that make no whole set are left out."""

    nbytes: int
    ways: int = WAYS

    def __post_init__(self) -> None:
        for name in ("nbytes", "ways"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
        if self.ways < 1:
            raise ValueError(f"ways = {self.ways}: allowed is at least 1")
        if self.nbytes < self.ways * LINE:
            raise ValueError(f"nbytes = {self.nbytes:,}: allowed is at least a set of {self.ways} lines of {LINE} bytes")

    @classmethod
    def of(cls, device: Device) -> L2:
        """A device's."""
        return cls(device.l2_bytes)

    @property
    def sets(self) -> int:
        return self.nbytes // (LINE * self.ways)

    @property
    def rotated(self) -> int:
        """The number of lines by whose multiples stretches are rotated."""
        return math.gcd(self.sets, ROTATED)

    def as_dict(self) -> dict[str, int]:
        """The cache for JSON."""
        return {"l2_bytes": self.nbytes, "ways": self.ways, "sets": self.sets, "line_bytes": LINE, "sector_bytes": SECTOR}

    def sets_of(self, lines: Array) -> Array:
        """The sets of these line numbers."""
        stretch = (lines // self.sets).astype(np.uint64)
        turns = (stretch * np.uint64(_MIX) >> np.uint64(40)) % np.uint64(self.sets // self.rotated)
        return (lines + turns.astype(np.int64) * self.rotated) % self.sets


Many = np.ndarray | int


@dataclass(frozen=True)
class Requests:
    """Requests of thread blocks for bytes of HBM: `nbytes` from `first` on, read or written, by `times` of them.

    Within a turn, those of `move` 0 come first. Thread blocks that request the same in the same move of a turn are served together.
    `asked` are the bytes that their lanes request in all: a different number if lanes request the same bytes, or leave some out.
    """

    turn: Array
    move: Array
    first: Array
    nbytes: Array
    write: Array
    times: Array
    asked: Array

    @classmethod
    def of(
        cls,
        turn: Many,
        first: Many,
        nbytes: Many,
        *,
        times: Many = 1,
        asked: Many | None = None,
    ) -> Requests:
        """Return reads of a turn's first move from numbers or arrays that broadcast; `asked` None: each byte once."""
        given = (turn, 0, first, nbytes, 0, times, nbytes * times if asked is None else asked)
        return cls(*(np.array(each, np.int64) for each in np.broadcast_arrays(*map(np.atleast_1d, given))))

    def of_move(self, move: int, write: bool) -> Requests:
        """The same as those of another move, which reads or writes."""
        return replace(self, move=np.full_like(self.turn, move), write=np.full_like(self.turn, write))

    def by(self, threads: int) -> Requests:
        """The same by so many threads, each of which requests all of it."""
        return replace(self, times=self.times * threads, asked=self.asked * threads)

    @classmethod
    def of_elements(cls, turn: Array, at: Array, often: Array, itemsize: int, *, whose: Array | None = None) -> Requests:
        """Return requests for elements at these addresses, each `often`, by sectors. Neighbouring elements are one request if
        thread blocks request them together: at the same place along the first axis, or with the same `whose`; and in one `turn`."""
        turn, sector, often = (np.atleast_1d(each) for each in np.broadcast_arrays(turn, at // SECTOR, often))
        asks = np.arange(len(turn)) if whose is None else np.unique(whose, return_inverse=True)[1]
        turns = np.zeros(len(turn), np.int64)
        turns[asks] = turn.reshape(len(turn), -1)[:, 0] if turn.size else 0
        asks = np.broadcast_to(asks.reshape(-1, *[1] * (turn.ndim - 1)), turn.shape)
        there = often > 0
        asks, sector, often = asks[there], sector[there], often[there]
        if not len(asks):
            return cls.of(asks, asks, asks)
        sector0 = int(sector.min())
        width = int(sector.max()) - sector0 + 2  # the last sector of one is no neighbour of the next one's first
        place = asks * width + sector - sector0
        if place.max() < DENSE * len(place):
            counted = np.bincount(place, often)
            found = np.flatnonzero(counted)
            counted = counted[found]
        else:
            found, inverse = np.unique(place, return_inverse=True)
            counted = np.bincount(inverse, often)
        begins = np.flatnonzero(np.diff(found, prepend=-2) > 1)
        number = np.diff(np.append(begins, len(found)))
        asks, sector = np.divmod(found[begins], width)
        asked = np.add.reduceat(counted, begins).astype(np.int64) * itemsize
        return cls.of(turns[asks], (sector0 + sector) * SECTOR, number * SECTOR, asked=asked)

    @classmethod
    def together(cls, parts: Sequence[Requests]) -> Requests:
        """Join parts one after the other."""
        names = [each.name for each in fields(cls)]
        none = np.zeros(0, np.int64)
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) if parts else none for name in names))

    def in_order(self) -> Requests:
        """Sort by turn, move and address, and merge requests that are served together, with the sum of their `times`."""
        names = [each.name for each in fields(self)]
        order = np.lexsort((self.write, self.nbytes, self.first, self.move, self.turn))
        order = order[self.nbytes[order] > 0]
        sorted_ = {name: getattr(self, name)[order] for name in names}
        new = np.zeros(len(order), bool)
        new[:1] = True
        for name in names[:-2]:
            new[1:] |= sorted_[name][1:] != sorted_[name][:-1]
        at = np.flatnonzero(new)
        if not len(at):
            return Requests(**sorted_)
        summed = {name: np.add.reduceat(sorted_[name], at) for name in names[-2:]}
        return Requests(**{name: sorted_[name][at] for name in names[:-2]}, **summed)


@dataclass
class CacheCounts:
    """Counts for each tensor: bytes asked for, sectors that reads asked for, those of them that DRAM had to give, and sectors that
    were written and go back to DRAM."""

    read_bytes: Array
    write_bytes: Array
    sectors: Array
    missed: Array
    returned: Array

    @classmethod
    def zero(cls, tensors: int) -> CacheCounts:
        return cls(*np.zeros((len(fields(cls)), tensors), np.int64))

    def add_dram(self, sectors: Array, write: Array, tensor: Array) -> None:
        """Add sectors that DRAM gives to a tensor's reads, or gets from its writes."""
        for counts, these in ((self.missed, ~write), (self.returned, write)):
            counts += np.bincount(tensor[these], sectors[these], len(counts)).astype(np.int64)


class Sets:
    """The sets of an L2 at work. They hold runs of lines that are always requested together and so act alike."""

    def __init__(self, l2: L2, run: int = 1) -> None:
        self.l2, self.run = l2, run
        self._now = 0
        # By set and way: the run that is there, when it was used last, its valid and dirty sectors
        shape = l2.sets // run, l2.ways
        self._runs, self._used, self._known = np.full(shape, -1), np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def look_up(self, runs: Array, masks: Array, write: Array) -> Array:
        """Look up runs that are requested in this order, of each the sectors in a mask, to be read or (with `write`) written.

        Returns for each the number of sectors that DRAM has to give, or will get: written sectors count once until their line is
        evicted. They go to DRAM when it is, or at the end.
        """
        where = self.l2.sets_of(runs * self.run) // self.run
        many = np.bincount(where, minlength=len(self._runs))
        sets = np.argsort(-many, kind="stable")[: np.count_nonzero(many)]  # those with most to do first
        by_set = np.argsort(where, kind="stable")
        begins = (np.cumsum(many) - many)[sets]
        held, used, known = self._runs[sets], self._used[sets], self._known[sets]
        left = -many[sets]  # grows
        asked, fresh = masks | write * masks << SECTORS, np.zeros(len(runs), np.int64)
        for turn in range(int(many.max(initial=0))):
            n = int(np.searchsorted(left, -turn))
            at = by_set[begins[:n] + turn]
            run, every = runs[at], np.arange(n)
            way = np.where(held[:n] == run[:, None], -1, used[:n]).argmin(axis=1)
            there = np.where(held[every, way] == run, known[every, way], 0)
            fresh[at] = asked[at] & ~there
            held[every, way], used[every, way], known[every, way] = run, self._now + turn + 1, asked[at] | there
        self._runs[sets], self._used[sets], self._known[sets] = held, used, known
        self._now += len(runs)
        found: Array = self.run * _COUNT[np.where(write, fresh >> SECTORS, fresh) & _VALID]
        return found


class SectoredCache:
    """An L2 that is asked for tensors, which begin at the addresses `bases`, in order, each at a line's begin; no two share a line.

    `unit` bytes divide the begin and the size of each request. If these are whole lines, runs of `unit` bytes are always requested
    together, so their sets act alike and one stands for all. That is exact. Requests for tensors `of_words` may be for any bytes:
    their few lines are taken to be in use too often to be evicted, and have a cache of their own.
    """

    def __init__(self, l2: L2, bases: Sequence[int], unit: int, of_words: Sequence[bool]) -> None:
        self.bases, self.of_words = np.array(bases, np.int64), np.array(of_words, bool)
        run = math.gcd(unit // LINE, l2.rotated) if unit % LINE == 0 else 1  # lines
        self.sets, self.words = Sets(l2, run), Sets(l2)
        self.counts, self.looked_up = CacheCounts.zero(len(bases)), 0

    @property
    def run(self) -> int:
        """The number of lines that are requested together."""
        return self.sets.run

    def serve(self, requests: Requests) -> None:
        """Serve the requests of some turns, all of which come after the earlier ones."""
        asked = requests.in_order()
        tensor = np.searchsorted(self.bases, asked.first, "right") - 1
        counts, reads, moved = self.counts, asked.write == 0, asked.asked
        sectors = (asked.first + asked.nbytes - 1) // SECTOR - asked.first // SECTOR + 1
        np.add.at(counts.read_bytes, tensor[reads], moved[reads])
        np.add.at(counts.write_bytes, tensor[~reads], moved[~reads])
        np.add.at(counts.sectors, tensor[reads], (sectors * asked.times)[reads])
        apart = self.of_words[tensor]
        for sets, which in ((self.sets, np.flatnonzero(~apart)), (self.words, np.flatnonzero(apart))):
            first, end = asked.first[which], (asked.first + asked.nbytes)[which]
            number = (end - 1) // (sets.run * LINE) - first // (sets.run * LINE) + 1  # runs of lines of each
            self.looked_up += int(number.sum())
            parts = np.flatnonzero(np.diff(np.cumsum(number) // AT_ONCE, prepend=0))
            for some in np.split(np.arange(len(number)), parts):
                runs, masks = _runs_of(sets.run, first[some], end[some], number[some])
                write, of = (np.repeat(each[which[some]], number[some]) for each in (~reads, tensor))
                counts.add_dram(sets.look_up(runs, masks, write), write, of)


def _runs_of(run: int, first: Array, end: Array, number: Array) -> tuple[Array, Array]:
    """The runs of lines of some requests, and of each the requested sectors, as a mask."""
    ends, runs = np.cumsum(number), ranges(first // (run * LINE), number)
    masks = np.full(len(runs), _VALID)
    if run == 1:  # sectors of the first line before the request, and of the last behind it
        masks[ends - number] &= _VALID << (first % LINE // SECTOR)
        masks[ends - 1] &= _VALID >> (SECTORS - 1 - (end - 1) % LINE // SECTOR)
    return runs, masks
