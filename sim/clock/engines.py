"""The parts of a multiprocessor that run beside its warps, and what warps wait for there: meetings, and wgmma's queue.

Of a warpgroup's product each of four tensor cores makes a quarter, with the same columns of B: it begins when all four warps have
issued it, and products run one after another in the order in which that happened. They fetch from shared memory before all others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from .rates import ChipRates
from .steps import TraceStep
from .waits import CLUSTER, NAMED, PHASE, Key

if TYPE_CHECKING:
    from .multiprocessor import ClockedWarp, Issue

GROUP_WARPS = 4
"""Warps of a warpgroup."""
Place = tuple[int, Key]
"""A meeting of a block that runs: the block's number, and the meeting of its trace."""


class Meetings:
    """Barriers and phases of mbarriers: who still has to come, when the last one came, and who waits.

    A multiprocessor has one unit for barriers, which takes a warp after the other, of whatever block.
    """

    def __init__(self, rates: ChipRates) -> None:
        self.after = {NAMED: rates["latency.barrier"], PHASE: 0.0, CLUSTER: 0.0}
        self.each = rates["latency.barrier_warp"]
        if "copies.mbarrier_wait" in rates.constants:
            self.after[PHASE] = rates["copies.mbarrier_wait"]
        if "copies.cluster_barrier" in rates.constants:
            self.after[CLUSTER] = rates["copies.cluster_barrier"]
        self.needed: dict[Place, int] = {}
        self.last: dict[Place, float] = {}
        self.waiting: dict[Place, list[ClockedWarp]] = {}
        self.free = 0.0  # the clock at which the unit for barriers takes its next warp

    def begin(self, block: int, traces: Sequence[Sequence[Issue]]) -> None:
        """Counts who comes to each meeting of a block."""
        counts = Counter(key for trace in traces for issue in trace for key, comes, _ in issue.signals if comes)
        for key, count in counts.items():
            self.needed[block, key] = count

    def come(self, place: Place, at: float) -> list[ClockedWarp]:
        """Counts one that comes at a time; returns the warps that waited for it, if it was the last one."""
        if place[1].kind == NAMED:
            at = self.free = max(self.free, at) + self.each
        self.last[place] = max(self.last.get(place, 0.0), at)
        self.needed[place] -= 1
        return self.waiting.pop(place, []) if not self.needed[place] else []

    def over(self, place: Place) -> float:
        """Returns the time from which those who waited go on: inf while some have not come, 0 if nobody has to."""
        needed = self.needed.get(place)
        if needed is None:
            return 0.0
        if needed:
            return inf
        return self.last[place] + self.after[place[1].kind]


@dataclass
class QueuedProduct:
    """A product that some warps of a warpgroup have issued: how many have, and the end of its sums, once it is known."""

    issued: int = 0
    done: float = inf
    waiting: list[ClockedWarp] = field(default_factory=list)


class Products:
    """The tensor cores as wgmma's queue."""

    def __init__(self, rates: ChipRates) -> None:
        self.room, self.latency = int(rates["wgmma.queue"]), rates["wgmma.latency"]
        self.register, self.collision = rates["wgmma.latency_register"], rates["wgmma.collision"]
        self.free = self.busy = 0.0
        self.made: dict[tuple[int, int, int], QueuedProduct] = {}
        self.open = 0  # issued by some warps of their group, not by all
        self.ends: deque[float] = deque()
        self.fetches: deque[tuple[float, float, float]] = deque()  # begin, end, wavefronts a clock

    def earliest(self, key: tuple[int, int, int], now: float) -> float:
        """The time at which a warp may issue a product: the first of its warpgroup needs room in the queue."""
        if key in self.made:
            return now
        while self.ends and self.ends[0] <= now:
            self.ends.popleft()
        over = self.open + len(self.ends) - self.room
        if over < 0:
            return now
        return self.ends[over] if over < len(self.ends) else now + GROUP_WARPS

    def issue(self, key: tuple[int, int, int], step: TraceStep, now: float) -> QueuedProduct:
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = QueuedProduct()
            self.open += 1
        found.issued += 1
        if found.issued == GROUP_WARPS:
            self.open -= 1
            begins = max(self.free, now)
            clocks = max(step.clocks, step.fetched)
            self.free = begins + clocks
            self.busy += clocks
            self.ends.append(self.free)
            if step.fetched:
                self.fetches.append((begins, self.free, step.fetched / clocks))
            found.done = begins + max(self.latency + self.register * step.count, clocks)
        return found

    def collide(self, now: float, cores: int) -> float:
        """Returns the clocks that an arithmetic result waits for a bank into which a product writes its sums.

        What waits behind that product does so as long, once all sub-cores had such a result.
        """
        if self.free <= now:
            return 0.0
        self.free += self.collision / cores
        return self.collision

    def beside(self, begins: float, wavefronts: float) -> float:
        """Returns the end of an access to shared memory that takes what products leave of it."""
        fetches, at, left = self.fetches, begins, wavefronts
        while fetches and fetches[0][1] <= begins - FORGOTTEN:
            fetches.popleft()
        for begin, end, share in fetches:
            if end <= at:
                continue
            if begin - at >= left:
                break
            if begin > at:
                left -= begin - at
                at = begin
            given = (end - at) * (1 - share)
            if given >= left:
                return at + (left / (1 - share) if left else 0.0)
            left -= given
            at = end
        return at + left


FORGOTTEN = 4096
"""Clocks behind which a product's fetches count for no access: none begins so much earlier than the latest."""
