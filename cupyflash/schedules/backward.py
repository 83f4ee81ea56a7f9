"""What the schedules of the backward pass have in common: a (batch, key head) at a time, its gradients dK and dV on chip."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cupyflash.schedules.base import Phase, TileSchedule


@dataclass(frozen=True)
class BackwardSchedule(TileSchedule):
    """A schedule of dQ, dK and dV (and of the bias's gradient where `dbias`) from dO, O and L.

    `deterministic` is for an algorithm that would else sum in no order: the same bits each time. Each of `repeats` (batch, key
    head) pairs runs `phases` for the query heads of its group.
    """

    deterministic: bool = False
    dbias: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        p = self.problem
        return p.heads // p.kv_heads if p.kv_heads else 1

    @property
    def repeats(self) -> int:
        return self.problem.batch * self.problem.kv_heads

    @abstractmethod
    def phases(self, *, literal: bool = False, keys: int | None = None, block_mask: np.ndarray | None = None) -> Iterator[Phase]:
        """The phases of one (batch, key head) with `keys` keys, all seqlen_k when None, and a `block_mask` (group, Tr, Tc)."""

    def parts(self, *, literal: bool = False) -> Iterator[tuple[int, Iterator[Phase]]]:
        p = self.problem
        if p.block_mask is not None:
            masks = np.broadcast_to(p.block_mask.kept, (p.batch, p.heads, *p.block_mask.shape[2:]))
            for batch in range(p.batch):
                keys = p.key_lengths[batch] if p.key_lengths else None
                for first in range(0, p.heads, self.group):
                    yield 1, self.phases(literal=literal, keys=keys, block_mask=masks[batch, first : first + self.group])
            return
        counted = {None: p.batch} if p.key_lengths is None else Counter(p.key_lengths)
        for keys, batches in counted.items():
            yield batches * p.kv_heads, self.phases(literal=literal, keys=keys)


def require_no_extras(schedule: BackwardSchedule) -> None:
    """ValueError for packed sequences and for a gradient of the bias, which FlashAttention-2's kernels alone have."""
    if schedule.problem.packed:
        raise ValueError(f"algorithm {schedule.algorithm!r} has no backward of packed sequences: 'fa2' has")
    if schedule.dbias:
        raise ValueError(f"algorithm {schedule.algorithm!r} has no gradient of the bias: 'fa2' has")
