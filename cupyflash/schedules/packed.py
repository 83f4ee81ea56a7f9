"""Sequences of their own lengths, packed one after the other along one axis."""

from __future__ import annotations

from dataclasses import dataclass

# Bounds that the first warp of a thread block looks at in a step of its search
SEARCHED = 32


@dataclass(frozen=True)
class Packed:
    """Sequences packed along one axis: their number, and the total of their queries and keys."""

    sequences: int
    total_q: int
    total_k: int

    def blocks(self, tensor: str, size: int) -> int:
        """Thread blocks of a head for blocks of `size` queries ("q") or keys ("k"), wherever the sequences begin: sequence b has
        those from cu_seqlens[b] // size + b on, of which it needs all or all but one."""
        return (self.total_q if tensor == "q" else self.total_k) // size + self.sequences if self.sequences else 0

    def searched(self, tensor: str) -> dict[str, int]:
        """Bounds that a thread block reads of each tensor to find its sequence among those of one."""
        steps = 1
        while SEARCHED**steps < self.sequences:
            steps += 1
        looked = {"q": 2, "k": 2}
        looked[tensor] += SEARCHED * steps
        return {f"cu_seqlens_{each}": bounds for each, bounds in looked.items()}


NO_SEQUENCES = Packed(0, 0, 0)
