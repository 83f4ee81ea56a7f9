"""The things that threads wait for in machine code: named barriers, mbarriers with their phases, barriers of a cluster.

Each time that one of them completes is a meeting with a key of its own. A warp's signal says that it counts for a meeting, waits
for it, or both: the clock needs no more of a barrier than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .lanes import Array
from .memory import RANK_AT, SHARED_OFFSET
from .operands import WARP

NAMED, PHASE, CLUSTER = "barrier", "phase", "cluster"
COUNT_BIAS = 0x100000
"""An mbarrier's first word holds twice this less its count, as SYNCS.EXCH gets it."""


class Key(NamedTuple):
    """A meeting: kind, block among those that run together, barrier number or offset, and how often it had completed before."""

    kind: str
    block: int
    number: int
    generation: int


class Signal(NamedTuple):
    """A warp's part in a meeting."""

    warp: int
    key: Key
    counts: bool
    waits: bool


Ways = list[tuple[int, Array]]
"""Places at which threads go on, or wait: the number of an instruction, and which threads."""


@dataclass
class Named:
    """A named barrier of a block: threads that arrived, those that wait, with the address at which they go on."""

    arrived: int = 0
    generation: int = 0
    needed: int = 0  # 0: all living threads of the block
    waiting: Ways = field(default_factory=list)


@dataclass
class MBarrier:
    """An mbarrier: arrivals a phase, those that are missing, bytes that are missing, completed phases, and who waits where."""

    count: int
    pending: int
    tx: int = 0
    phase: int = 0
    waiting: Ways = field(default_factory=list)


class Waits:
    """The barriers of blocks that run together; `released` are threads that go on, with their addresses."""

    def __init__(self, blocks: int, threads: int, cluster: int) -> None:
        self.blocks, self.threads, self.cluster = blocks, threads, cluster  # threads: of a block, whole warps
        self.named: dict[tuple[int, int], Named] = {}
        self.mbarriers: dict[tuple[int, int], MBarrier] = {}
        self.clusters: dict[int, Named] = {}
        self.free: Ways = []

    def warps_of(self, lanes: Array) -> list[int]:
        return np.flatnonzero(lanes.reshape(-1, WARP).any(axis=1)).tolist()

    def part(self, block: int, lanes: Array, count: int = 1) -> Array:
        """Returns those lanes that belong to some blocks."""
        part = np.zeros_like(lanes)
        part[block * self.threads : (block + count) * self.threads] = True
        part &= lanes
        return part

    def blocks_of(self, lanes: Array, count: int = 1) -> list[int]:
        """Returns the blocks, or the first blocks of clusters, that have some of these lanes."""
        found: list[int] = (np.flatnonzero(lanes.reshape(-1, count * self.threads).any(axis=1)) * count).tolist()
        return found

    # -- barriers of a block and of a cluster

    def meet(self, numbers: Array, threads: int, lanes: Array, to: int | None) -> list[Signal]:
        """Lanes arrive at barriers; they go on at `to`, or at once if that is None."""
        signals = []
        for block in self.blocks_of(lanes):
            part = self.part(block, lanes)
            for number in np.unique(numbers[part]).tolist():
                here = part & (numbers == number)
                barrier = self.named.setdefault((block, number), Named())
                warps = self.warps_of(here)
                key = Key(NAMED, block, number, barrier.generation)
                signals += [Signal(warp, key, True, to is not None) for warp in warps]
                barrier.needed = threads
                barrier.arrived += WARP * len(warps) if threads else int(here.sum())
                if to is not None:
                    barrier.waiting.append((to, here))
        return signals

    def meet_cluster(self, lanes: Array, to: int) -> list[Signal]:
        signals = []
        for block in self.blocks_of(lanes, self.cluster):
            here = self.part(block, lanes, self.cluster)
            barrier = self.clusters.setdefault(block, Named())
            key = Key(CLUSTER, block, 0, barrier.generation)
            signals += [Signal(warp, key, True, True) for warp in self.warps_of(here)]
            barrier.arrived += int(here.sum())
            barrier.waiting.append((to, here))
        return signals

    def released(self, alive: Array) -> Ways:
        """Takes the threads that may go on."""
        found, self.free = self.free, []
        for (block, _), barrier in self.named.items():
            if barrier.arrived and barrier.arrived >= (barrier.needed or int(self.part(block, alive).sum())):
                found += _completed(barrier)
        for block, barrier in self.clusters.items():
            if barrier.arrived and barrier.arrived >= int(self.part(block, alive, self.cluster).sum()):
                found += _completed(barrier)
        return found

    # -- mbarriers

    def places(self, addresses: Array, lanes: Array) -> Iterator[tuple[tuple[int, int], Array]]:
        """Yields the block and offset of each mbarrier that lanes name, with those lanes (their numbers)."""
        at = np.flatnonzero(lanes)
        own = at // self.threads
        block = own if self.cluster == 1 else own // self.cluster * self.cluster + (addresses[at] >> RANK_AT)
        keys = (block << RANK_AT) + (addresses[at] & SHARED_OFFSET)
        for key in np.unique(keys).tolist():
            yield (key >> RANK_AT, key & SHARED_OFFSET), at[keys == key]

    def begin(self, place: tuple[int, int], low: int) -> None:
        """SYNCS.EXCH: sets an mbarrier up."""
        count = COUNT_BIAS - (low >> 1)
        self.mbarriers[place] = MBarrier(count, count)

    def find(self, place: tuple[int, int]) -> MBarrier:
        found = self.mbarriers.get(place)
        if found is None:
            raise ValueError(f"no mbarrier was set up at {place[1]:#x} of the shared memory of block {place[0]}")
        return found

    def arrive(self, place: tuple[int, int], arrivals: int, tx: int) -> Key:
        """Counts arrivals and bytes to come (negative: that came); returns the meeting that they are for."""
        barrier = self.find(place)
        key = Key(PHASE, *place, barrier.phase)
        barrier.pending -= arrivals
        barrier.tx += tx
        if barrier.pending <= 0 and barrier.tx == 0:
            barrier.phase, barrier.pending = barrier.phase + 1, barrier.count
            self.free += barrier.waiting
            barrier.waiting = []
        return key

    def passes(self, place: tuple[int, int], parity: int) -> Key | None:
        """Returns the meeting of the phase with this parity if it has completed, else None."""
        barrier = self.find(place)
        return Key(PHASE, *place, barrier.phase - 1) if barrier.phase & 1 != parity else None

    @property
    def held(self) -> int:
        """Threads that wait."""
        all_barriers: Sequence[Named | MBarrier] = [*self.named.values(), *self.clusters.values(), *self.mbarriers.values()]
        return sum(int(lanes.sum()) for each in all_barriers for _, lanes in each.waiting)


def _completed(barrier: Named) -> Ways:
    waiting, barrier.waiting = barrier.waiting, []
    barrier.arrived, barrier.generation = 0, barrier.generation + 1
    return waiting


class Convergence:
    """The lanes of a warp that meet again (BSSY, BSYNC, WARPSYNC): needed where some of them wait while others could go ahead."""

    def __init__(self, threads: int) -> None:
        self.none = np.zeros(threads, np.bool_)
        self.members: dict[str, Array] = {}
        self.met: dict[tuple[str, int], Array] = {}

    def begin(self, name: str, lanes: Array) -> None:
        """BSSY: these lanes are to meet."""
        warps = np.repeat(lanes.reshape(-1, WARP).any(axis=1), WARP)
        self.members[name] = np.where(warps, lanes, self.members.get(name, self.none))

    def leave(self, name: str, lanes: Array) -> None:
        """BREAK: these lanes will not come."""
        self.members[name] = self.members.get(name, self.none) & ~lanes

    def meet(self, name: str, to: int, lanes: Array) -> None:
        """BSYNC: lanes have come; they go on at `to`."""
        self.met[name, to] = self.met.get((name, to), self.none) | lanes

    def released(self, alive: Array) -> Ways:
        """Takes the lanes whose warp has no other that is to come."""
        found = []
        for (name, to), met in list(self.met.items()):
            missing = (self.members.get(name, self.none) if name else alive) & alive & ~met
            late = np.repeat(missing.reshape(-1, WARP).any(axis=1), WARP)
            done = met & ~late
            if done.any():
                found.append((to, done))
                self.met[name, to] = met & late
            if not (met & late).any():
                del self.met[name, to]
        return found

    def all(self) -> Ways:
        """Takes all lanes that wait here."""
        found, self.met = [(to, lanes) for (_, to), lanes in self.met.items()], {}
        return found
