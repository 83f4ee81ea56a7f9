"""Matrices in shared memory that products of warpgroups read: checked once, in units of 16 bytes only when somebody needs these."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..memory.descriptors import UNIT, Descriptor
from ..state.lanes import Lanes
from ..state.pages import PAGE
from ..text.syntax import Instruction
from ..text.types import Array
from .host import Host

REMEMBERED = 512
"""Matrices whose units are kept."""

Shape = tuple[int, int, bool]
"""Rows of units, units of a row, and whether K-major, as descriptors count them."""


@dataclass(frozen=True)
class Matrix:
    """The units of a matrix and the pages that they are in, both from the beginning of its block's shared memory."""

    units: Array
    pages: Array


@dataclass(eq=False)
class Operand:
    """One matrix for each warpgroup: `matrices[which[k]]` in block `blocks[k]` of the wave. `base`: units before the block's."""

    descriptors: Array
    shape: Shape
    blocks: Array
    base: Array
    matrices: list[Matrix]
    which: Array
    pages: Array
    """(warpgroups, any), of the wave."""

    @property
    def size(self) -> int:
        """Units of all of them."""
        return len(self.blocks) * len(self.matrices[0].units)

    def keys(self) -> Array:
        """(warpgroups, 2): equal where the matrix is the same."""
        return np.stack((self.descriptors, self.blocks.astype(np.uint64)), axis=1)

    def units(self) -> Array:
        """(warpgroups, rows of units, units of a row) of the wave."""
        each = self.matrices[0].units
        if len(self.matrices) > 1:
            each = np.stack([one.units for one in self.matrices])[self.which]
        return np.asarray((each + self.base[:, None]).reshape(len(self.blocks), *self.shape[:2]))


class Operands:
    """Makes the operands of a wave."""

    def __init__(self, machine: Host):
        self.machine = machine
        self._matrices: dict[tuple[int, Shape], Matrix] = {}

    def of(self, descriptors: Array, lanes: Lanes, shape: Shape, i: Instruction) -> Operand:
        """The matrices of these descriptors, one for each warpgroup of `lanes`."""
        memory = self.machine.memory
        blocks = lanes.block[:: lanes.n // len(descriptors)]
        if np.count_nonzero(descriptors != descriptors[0]):
            each, which = np.unique(descriptors, return_inverse=True)
        else:
            each, which = descriptors[:1], np.zeros(len(descriptors), np.int64)
        matrices = [self.matrix(bits, shape, i, lanes) for bits in each.tolist()]
        if len(matrices) == 1:
            pages = matrices[0].pages
        else:
            most = max(len(one.pages) for one in matrices)
            pages = np.stack([np.pad(one.pages, (0, most - len(one.pages)), "edge") for one in matrices])[which]
        pages = pages + (blocks * memory.pages.per_block)[:, None]
        return Operand(descriptors, shape, blocks, blocks * (memory.shared_stride // UNIT), matrices, which, pages)

    def matrix(self, bits: int, shape: Shape, i: Instruction, lanes: Lanes) -> Matrix:
        """One matrix in its block's shared memory, in bounds."""
        found = self._matrices.get((bits, shape))
        if found is not None:
            return found
        units = Descriptor.of(bits).units(*shape)
        limit = self.machine.memory.shared_size // UNIT
        if units.max() >= limit:
            last = int(units.max()) * UNIT
            message = f"wgmma reads up to offset {last + UNIT:#x} of shared memory, which has {limit * UNIT:#x} bytes"
            self.machine.memory.findings.report("out of bounds", message, i, lanes, 0, count=lanes.n, address=last)
            units = np.minimum(units, limit - 1)
        if len(self._matrices) > REMEMBERED:
            self._matrices.clear()
        found = self._matrices[bits, shape] = Matrix(units, np.unique(units // (PAGE // UNIT)))
        return found
