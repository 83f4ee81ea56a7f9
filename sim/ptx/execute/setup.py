"""What a launch is given besides code: how many blocks of which size, memory, parameters, and how to schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..report.diary import Diary
from ..state.segments import Segment
from ..text.types import Array
from .budgets import Limits


@dataclass(frozen=True)
class Geometry:
    """Grid (in blocks), block (in threads) and cluster (in blocks) of a launch, (x, y, z) each.

    Blocks run cluster by cluster: the n-th block to run is at `position(n)` of the grid. `explicit`: the launch, or the kernel,
    says what a cluster is.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    explicit: bool = False

    @property
    def blocks(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cluster_blocks(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]

    def position(self, blocks: Array) -> tuple[list[Array], list[Array]]:
        """(x, y, z) of the cluster in the grid of clusters, and of the block in its cluster, of the n-th blocks to run."""
        cluster, rank = np.divmod(blocks, self.cluster_blocks)
        wide, high = (g // c for g, c in zip(self.grid[:2], self.cluster[:2], strict=True))
        x, y, _ = self.cluster
        return [cluster % wide, cluster // wide % high, cluster // (wide * high)], [rank % x, rank // x % y, rank // (x * y)]

    def number(self, block: int) -> int:
        """Linear index in the grid of the n-th block to run."""
        where, inside = self.position(np.array(block))
        x, y, z = (int(w * c + i) for w, c, i in zip(where, self.cluster, inside, strict=True))
        return x + self.grid[0] * (y + self.grid[1] * z)


@dataclass
class Setup:
    """What a launch is given besides code: memory, parameters, and how to schedule."""

    geometry: Geometry
    parameters: bytes
    parameter_segment: Segment
    shared_bytes: int
    symbols: dict[str, int]
    seed: int | None = None
    on_barrier: Callable[[int, int], None] | None = None
    limits: Limits = field(default_factory=Limits)
    workspace: int = 0
    approximate: bool = True
    diary: Diary | None = None
