"""The bounds of packed sequences, among which thread blocks find theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupyflash.basics import Array
from cupyflash.schedules.moves import WORD
from cupyflash.schedules.packed import SEARCHED, Packed
from cupyflash.schedules.parts import Part
from cupyflash.sim.l2.cache import Requests
from cupyflash.sim.l2.launch import DeviceMemory, PlacedTensor


@dataclass(frozen=True)
class Bounds:
    """The bounds of packed sequences along one axis ("q" or "k"), of which thread blocks have `size` rows."""

    packed: Packed
    axis: str
    size: int
    begins: Array
    own: PlacedTensor
    other: PlacedTensor

    @classmethod
    def of(cls, packed: Packed, axis: str, size: int, parts: Sequence[Part], memory: DeviceMemory) -> Bounds:
        of_axis = [(part.q if axis == "q" else part.k).begin for part in parts]
        q, k = (memory.rows(f"cu_seqlens_{name}", packed.sequences + 1, WORD) for name in "qk")
        return cls(packed, axis, size, np.array(of_axis, np.int64), *((q, k) if axis == "q" else (k, q)))

    @property
    def first_blocks(self) -> Array:
        """The number of each sequence's first thread block among those of a head."""
        return self.begins // self.size + np.arange(len(self.begins))

    @property
    def blocks(self) -> int:
        """Thread blocks of a head."""
        return self.packed.blocks(self.axis, self.size)

    def found(self) -> tuple[Array, Array]:
        """The sequence of each of them, and which of its blocks it is, which may be one more than it has."""
        index, first = np.arange(self.blocks), self.first_blocks
        sequence = np.searchsorted(first, index, "right") - 1
        return sequence, index - first[sequence]

    def halvings(self, index: Array) -> tuple[Array, Array]:
        """The bounds of both axes that threads read which each look for one by themselves (`sequence_of` in fa3_queue.cu)."""
        sequence, read = np.zeros_like(index), []
        for bit in reversed(range(max(1, (self.packed.sequences - 1).bit_length()))):
            nearer = np.minimum(sequence + (1 << bit), self.packed.sequences - 1)
            read.append(nearer)
            sequence = np.where(self.first_blocks[nearer] <= index, nearer, sequence)
        of_one = [sequence, sequence + 1]
        return np.concatenate(read + of_one), np.concatenate(of_one)

    def search(self, name: str, turn: Array, sequence: Array, times: Array) -> Requests:
        """Requests to find sequences, of one tensor: 32 bounds of the own axis at a time (`search_sequence` in sequence.cuh), then
        its two of both."""
        tensor = self.own if name == f"cu_seqlens_{self.axis}" else self.other
        found = [tensor.of(turn, sequence, 2, asked=2 * times)]
        step = 1
        while tensor is self.own and (step == 1 or step < self.packed.sequences):
            first = sequence // (SEARCHED * step) * SEARCHED * step
            lanes = np.minimum(first[:, None] + np.arange(SEARCHED) * step, self.packed.sequences - 1)
            found.append(Requests.of_elements(turn[:, None], tensor.first + lanes * WORD, times[:, None], WORD))
            step *= SEARCHED
        return Requests.together(found)
