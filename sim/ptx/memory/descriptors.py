"""Matrices in shared memory as wgmma's descriptors describe them, in units of 16 bytes.

PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: Shared Memory Matrix Layout". A descriptor has, in units of 16
bytes, the start address in bits 0-13, the leading offset L in 16-29 and the stride offset S in 32-45; a base offset in 49-51,
the swizzle in 62-63. With W = 1, 2, 4, 8 units a row of no, 32-, 64- and 128-byte swizzle, unit (i, j) lies, before swizzling, at

- K-major, row i of M or N, unit j of 2 along K: (i % 8) W + (i / 8) S + j; without swizzle j L for j;
- M- or N-major, unit i along M or N, row j of K: i % W + (i / W) L + (j % 8) W + (j / 8) S; without swizzle L and S change places.

A swizzle of 128 bytes exchanges units by xor of bits 4-6 of the address with bits 7-9, one of 64 bits 4-5 with 7-8, one of 32
bit 4 with 7. The base offset is where in its pattern of eight rows the matrix begins, for patterns that are not aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..text.types import Array

UNIT = 16
MODES = {0: "none", 1: "128 bytes", 2: "64 bytes", 3: "32 bytes"}
"""Swizzles by the descriptor's bits 62-63, named as `memory.swizzles` names them."""

ROW = {0: 1, 1: 8, 2: 4, 3: 2}
"""Units of a row of the swizzle's pattern."""

PATTERN = 64
"""Units after which every pattern repeats: 1024 bytes."""


@dataclass(frozen=True)
class Descriptor:
    """The fields of a descriptor, offsets and start in units."""

    start: int
    leading: int
    stride: int
    base: int
    swizzle: int

    @classmethod
    def of(cls, bits: int) -> Descriptor:
        return cls(bits & 0x3FFF, bits >> 16 & 0x3FFF, bits >> 32 & 0x3FFF, bits >> 49 & 7, bits >> 62 & 3)

    @property
    def mode(self) -> str:
        return MODES[self.swizzle]

    def units(self, rows: int, depth: int, k_major: bool) -> Array:
        """Offsets of a matrix's units from the shared memory's beginning, row by row as they lie in `rows` x `depth` units.

        K-major: `rows` of M or N by 2 units along K. Else `rows` of K by units along M or N.
        """
        phase = self.start % PATTERN
        found = pattern(phase, self.leading, self.stride, self.base, self.swizzle, (rows, depth, k_major))
        return found + (self.start - phase)


@lru_cache(maxsize=1024)
def pattern(phase: int, leading: int, stride: int, base: int, swizzle: int, shape: tuple[int, int, bool]) -> Array:
    """The units of a matrix that begins `phase` units into an aligned pattern, from that pattern's beginning."""
    rows, depth, k_major = shape
    i, j = np.arange(rows)[:, None], np.arange(depth)
    row = ROW[swizzle]
    if k_major:
        at = i % 8 * row + i // 8 * stride + (j if swizzle else j * leading)
    else:
        outer, inner = (leading, stride) if swizzle else (stride, leading)
        at = j % row + j // row * outer + i % 8 * row + i // 8 * inner
    at = (at + phase).reshape(-1)
    return at ^ ((at >> 3) - base & row - 1)
