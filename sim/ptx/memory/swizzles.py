"""How the bytes of shared memory were laid out by the tensor copies that wrote them.

A tensor copy and a wgmma descriptor each name a swizzle: how 16-byte units are permuted. If they differ the numbers are
those of other rows and columns. For each unit that a tensor copy wrote the mode is kept until something else writes there.
"""

from __future__ import annotations

import numpy as np

from ..state.pages import Pages
from ..text.types import Array

UNIT = 16
"""Bytes that stay together whatever the swizzle."""

UNKNOWN = 0
"""Not written by a tensor copy, or written over since."""

MODES = {"none": 1, "32 bytes": 2, "64 bytes": 3, "128 bytes": 4}
"""Modes as a record has them, by name."""


class Swizzles:
    """The record of a wave: a mode for each 16-byte unit of the shared memory of all its blocks; made by the first copy."""

    def __init__(self, pages: Pages):
        self.pages = pages
        self.modes: Array | None = None
        self._of_pages = np.zeros(pages.count, np.uint8)

    def landed(self, starts: Array, size: int, mode: str) -> None:
        """Tensor copies of this mode (a key of MODES) wrote `size` bytes from these bytes of the wave's shared memory on."""
        if self.modes is None:
            self.modes = np.zeros(self.pages.count // self.pages.per_block * self.pages.stride // UNIT, np.uint8)
        self.put(starts, size, MODES[mode])

    def forget(self, starts: Array, size: int) -> None:
        """Something else writes there."""
        if self.modes is not None:
            self.put(starts, size, UNKNOWN)

    def put(self, starts: Array, size: int, mode: int) -> None:
        assert self.modes is not None
        for start in starts.tolist():
            self.modes[start // UNIT : -(-(start + size) // UNIT)] = mode
        pages, whole = self.pages.of_ranges(starts, size)
        self._of_pages[pages] = mode if whole else UNKNOWN

    def pages_are(self, pages: Array, modes: Array) -> bool:
        """Whether tensor copies are known to have written all of these pages in these modes (numbers)."""
        return not np.count_nonzero(self._of_pages[pages] != modes)

    def all_are(self, units: Array, modes: Array) -> bool:
        """Whether tensor copies wrote all of these units in these modes (numbers)."""
        return self.modes is not None and not np.count_nonzero(self.modes[units] != modes)

    def differing(self, units: Array, mode: str) -> str | None:
        """The mode in which one of these units was written, if a tensor copy wrote it in another one than `mode`."""
        if self.modes is None:
            return None
        found = self.modes[units]
        other = found[(found != UNKNOWN) & (found != MODES[mode])]
        return next(name for name, number in MODES.items() if number == other[0]) if len(other) else None
