"""The setup of a launch: number and size of blocks, memory, parameters, scheduling; the machine as its parts see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import numpy as np

from ..decode.code import Code
from ..decode.registry import Arg
from ..memory.mbarriers import MBarriers
from ..memory.memory import Memory, MemoryUnit
from ..report.diary import Diary
from ..state.lanes import Lanes, Wave
from ..state.segments import Segment
from ..text.syntax import Array
from .registers import RegisterFrame
from .scheduler import Limits
from .unwritten import Shadows


@dataclass(frozen=True)
class Geometry:
    """Grid (in blocks), block (in threads) and cluster (in blocks) of a launch, (x, y, z) each.

    Blocks run cluster by cluster: the n-th block to run is at `position(n)` of the grid. `explicit`: the launch, or the kernel,
    gives the cluster's size.
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
        """Returns (x, y, z) of the cluster in the grid of clusters, and of the block in its cluster, of the n-th blocks to run."""
        cluster, rank = np.divmod(blocks, self.cluster_blocks)
        wide, high = (g // c for g, c in zip(self.grid[:2], self.cluster[:2], strict=True))
        x, y, _ = self.cluster
        return [cluster % wide, cluster // wide % high, cluster // (wide * high)], [rank % x, rank // x % y, rank // (x * y)]

    def number(self, block: int) -> int:
        """Returns the linear index in the grid of the n-th block to run."""
        where, inside = self.position(np.array(block))
        x, y, z = (int(w * c + i) for w, c, i in zip(where, self.cluster, inside, strict=True))
        return x + self.grid[0] * (y + self.grid[1] * z)


@dataclass
class Setup:
    """The inputs of a launch besides code: memory, parameters, and scheduling."""

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


class Host(Protocol):
    """The machine, as barriers and calls see it."""

    wave: Wave
    mbarriers: MBarriers
    full: RegisterFrame
    """The registers of the whole wave."""

    code: Code
    memory: Memory
    """The memory, with the findings and the tally of the launch."""
    diary: Diary | None
    """The diary of a block of the wave, if one was requested."""
    shadows: Shadows
    on_barrier: Callable[[int, int], None] | None
    """Callback with a block and the number of barriers that it has completed."""

    def push(self, pc: int, lanes: Lanes) -> None:
        """Makes lanes ready to go on at an instruction."""

    def read(self, lanes: Lanes, arg: Arg) -> Array:
        """Returns an operand for lanes, one value a lane."""

    def write(self, lanes: Lanes, arg: Arg, values: object) -> None:
        """Writes a register of `full` while no frame is active."""

    def deactivate(self) -> None:
        """Moves all registers to `full`."""

    def rewritten(self, mask: int) -> None:
        """Marks these rows (bits; -1: any) of `full`, written while no frame was active: no frame has them any more."""

    def flush(self) -> None:
        """Copies all registers to `full`; the frame that runs keeps its copies."""

    def stop(self, kind: str, message: str, pc: int, lanes: Lanes) -> NoReturn:
        """Reports a finding that ends the launch."""


class WaveUnit(MemoryUnit):
    """A unit of the machine that lives as long as a wave."""

    def __init__(self, machine: Host):
        super().__init__(machine.memory)
        self.machine, self.code, self.wave, self.push = machine, machine.code, machine.wave, machine.push
