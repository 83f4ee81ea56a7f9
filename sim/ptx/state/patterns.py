"""Access patterns: the addresses of a set of lanes relative to the first one's.

A loop runs the same access again and again with only its start moved, and so do the blocks of a grid. What depends on the
distances between the lanes (bounds, alignment, bank conflicts, distinct bytes and sectors) is worked out once a pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from ..text.types import Array
from .lanes import Lanes

SECTOR = 32
"""Bytes of a sector, the unit in which global memory is fetched."""

REMEMBERED_LANES = 1 << 17
"""How many lanes the remembered patterns of a wave may have together: each takes some 30 bytes a lane."""

MOST = 16
"""Patterns remembered of one set of lanes and one width."""


class Pattern:
    """Accesses of `size` bytes by `lanes`, at `relative` (signed, one a lane) bytes from the first one's address."""

    def __init__(self, lanes: Lanes, relative: Array, size: int, key: bytes):
        self.lanes = lanes
        self.relative = relative
        self.size = size
        self.key = key
        self.low, self.high = int(relative.min()), int(relative.max())
        self.aligned = not np.count_nonzero(relative & (size - 1))
        self._indices: dict[str, Array] = {}
        self._wavefronts: dict[int, tuple[int, int]] = {}
        self._sectors: dict[int, int] = {}

    def fits(self, first: int, end: int, start: int = 0) -> bool:
        """Whether every access is aligned and inside of the bytes from `start` to `end` when the first is at offset `first`."""
        return self.aligned and not first & (self.size - 1) and first + self.low >= start and first + self.high <= end - self.size

    def index(self, space: str, base: Callable[[int], Array], first: int) -> Array:
        """Index of each lane's element (int64) in the memory of all blocks or lanes, of which `base` says whose is where."""
        shift = self.size.bit_length() - 1
        found = self._indices.get(space)
        if found is None:
            found = self._indices[space] = (self.relative >> shift) + base(shift).astype(np.int64)
        index: Array = found + (first >> shift)
        return index

    # -- counts -----------------------------------------------------------------------------------------------------------

    def wavefronts(self, first: int) -> tuple[int, int]:
        """(wavefronts, those without bank conflicts) of these lanes where the first one's address is `first`."""
        first &= 3  # a whole number of words further on, all lanes move by the same number of banks
        found = self._wavefronts.get(first)
        if found is None:
            found = self._wavefronts[first] = bank_passes(self.lanes, self.relative.astype(np.int64) + first, self.size)
        return found

    @cached_property
    def unique_bytes(self) -> int:
        """Bytes of the accesses, each counted once a warp. They are aligned: two are the same or apart."""
        return self.size * distinct((self.lanes.warp << 48) + self.relative)

    def sectors(self, first: int) -> int:
        """Distinct 32-byte sectors, counted for each warp."""
        first &= SECTOR - 1
        found = self._sectors.get(first)
        if found is None:
            place = (self.relative.astype(np.int64) + first) >> (SECTOR.bit_length() - 1)
            found = self._sectors[first] = distinct((self.lanes.warp << 48) + place)
        return found


class Patterns:
    """The patterns of a wave, the latest of each set of lanes."""

    def __init__(self) -> None:
        self._found: dict[tuple[Lanes, int], list[Pattern]] = {}
        self._lanes = 0

    def of(self, lanes: Lanes, addresses: Array, size: int) -> tuple[int, Pattern]:
        """(first address, pattern) of accesses of `size` bytes at `addresses` (uint32 or uint64, one a lane)."""
        start = addresses[0]
        relative = (addresses - start).view(np.int32 if addresses.itemsize == 4 else np.int64)
        key = relative.tobytes()
        patterns = self._found.get((lanes, size))
        if patterns is None:
            patterns = self._found[lanes, size] = []
        for pattern in patterns:
            if pattern.key == key:
                return int(start), pattern
        found = Pattern(lanes, relative, size, key)
        self._lanes += lanes.n
        if self._lanes > REMEMBERED_LANES:
            self._found.clear()
            self._lanes = lanes.n
            patterns = self._found[lanes, size] = []
        elif len(patterns) >= MOST:
            del patterns[0]
            self._lanes -= lanes.n
        patterns.append(found)
        return int(start), found


def distinct(keys: Array) -> int:
    keys.sort()
    return 1 + int(np.count_nonzero(keys[1:] != keys[:-1]))


def wavefronts(lanes: Lanes, addresses: Array, size: int) -> tuple[int, int]:
    """(wavefronts, those without bank conflicts) of a shared access: 32 banks of 4 bytes, one word a bank a pass.

    Lanes with 8 or 16 bytes go in halves or quarters of a warp, as the 128 bytes of a pass allow.
    """
    first, pattern = lanes.pattern(addresses, size)
    return pattern.wavefronts(first)


def bank_passes(lanes: Lanes, addresses: Array, size: int) -> tuple[int, int]:
    """(wavefronts, those without bank conflicts) of a shared access; `addresses` (int64) may count from any bank on."""
    found = bank_turns(lanes, addresses, size)
    return int(found.sum()), int(np.count_nonzero(found))


def bank_turns(lanes: Lanes, addresses: Array, size: int) -> Array:
    """Wavefronts of each turn of a shared access, from the first lane's turn to the last one's; 0 where no lane takes part."""
    columns = bank_columns(size)
    row = lanes.phase(columns)
    units = addresses >> (max(size, 4).bit_length() - 1)
    place = (units & (columns - 1)) + row
    base = int(row[0])
    span = int(row[-1]) + columns - base
    passes: Array = np.bincount(place - base, minlength=span).reshape(-1, columns).max(axis=1)
    if passes.max() > 1:
        # Several lanes in one column: those that want the same word share a pass.
        units = units - units.min() // columns * columns
        keys = np.sort((row << 32) + units)
        keys = keys[np.concatenate(([True], keys[1:] != keys[:-1]))]
        place = (keys >> 32) + (keys & (columns - 1))
        passes = np.bincount(place - base, minlength=span).reshape(-1, columns).max(axis=1)
    return passes


def bank_columns(size: int) -> int:
    """Lanes of a turn: as many accesses of `size` bytes as the 32 banks of 4 bytes serve at once."""
    return 128 // max(size, 4)
