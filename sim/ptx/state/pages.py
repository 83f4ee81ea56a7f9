"""Pages of shared memory: what is true of all bytes of a page need not be asked byte by byte.

Tiles of wgmma and of bulk copies are mostly whole pages: 1024 bytes are eight rows of the widest swizzle. Each block has its own.
"""

from __future__ import annotations

import numpy as np

from ..text.types import Array

PAGE = 1024
"""Bytes of a page."""


class Pages:
    """The pages of a wave whose blocks have `stride` bytes of shared memory each; the last page of a block may be shorter."""

    def __init__(self, stride: int, blocks: int):
        self.stride = stride
        self.per_block = -(-stride // PAGE)
        self.count = blocks * self.per_block

    def of(self, at: Array) -> Array:
        """The pages of bytes of the wave's shared memory."""
        block = at // self.stride
        return np.asarray(block * self.per_block + (at - block * self.stride) // PAGE)

    def of_ranges(self, starts: Array, size: int) -> tuple[Array, bool]:
        """The pages of ranges of `size` bytes, (ranges, n), the last again where there are fewer; and whether they are whole."""
        first, last = self.of(starts), self.of(starts + (size - 1))
        found = np.minimum(first[:, None] + np.arange(int((last - first).max()) + 1), last[:, None])
        return found, size % PAGE == 0 and not (starts % self.stride % PAGE).any()

    def start(self, pages: Array) -> Array:
        """The first byte of each of these pages in the wave's shared memory."""
        block = pages // self.per_block
        return np.asarray(block * self.stride + (pages - block * self.per_block) * PAGE)

    def whole(self, pages: Array) -> Array:
        """Which of these pages have all their bytes."""
        return np.asarray((pages % self.per_block + 1) * PAGE <= self.stride)
