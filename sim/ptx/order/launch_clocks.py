"""Launches of a history, and clocks that say which of them are over: for a stream, an event, the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..report.findings import thread_name
from ..state.lanes import WARP
from ..text.syntax import Array
from .clocks import BLOCKS, CROWD, LANE, LANES, LEVEL, WARPS, GridClock, lanes_of, levels_of, stamps_of


class LaunchPart(NamedTuple):
    """A launch that is over `until` these moments, by lane of its grid."""

    run: OrderedLaunch
    until: GridClock

    def covers(self, entries: Array, own: Array) -> Array:
        """Returns a mask of the entries, among those that are its `own`, that are not later."""
        out = own.copy()
        lane, level = lanes_of(entries[out]), levels_of(entries[out])
        per = self.run.lanes_per_cluster
        until = self.until.at(lane, per)
        for size, several in ((WARP, level == LANES), (self.run.lanes_per_block, level == WARPS)):
            until[several] = self.until.at(lane[several], per, size)
        out[out] = stamps_of(entries[out]) <= np.where(level >= BLOCKS, self.until.least(), until)
        return out


@dataclass(frozen=True)
class LaunchClock:
    """Launches that are over: of each stream the `first` so many, and those `besides`, each a (stream, number); some in `parts`."""

    first: dict[int, int] = field(default_factory=dict)
    besides: frozenset[tuple[int, int]] = frozenset()
    parts: tuple[LaunchPart, ...] = ()

    def knows(self, launch: tuple[int, int]) -> bool:
        return launch[1] <= self.first.get(launch[0], 0) or launch in self.besides

    def join(self, *others: LaunchClock) -> LaunchClock:
        first, besides, parts = dict(self.first), self.besides, {id(part.until): part for part in self.parts}
        for other in others:
            besides |= other.besides
            parts |= {id(part.until): part for part in other.parts}
            for stream, count in other.first.items():
                first[stream] = max(count, first.get(stream, 0))
        over = LaunchClock(first, frozenset(one for one in besides if one[1] > first.get(one[0], 0)))
        return replace(over, parts=tuple(part for part in parts.values() if not over.knows(part.run.launch)))

    def plus(self, launch: tuple[int, int]) -> LaunchClock:
        """Returns a clock for which this one launch is over, too."""
        stream, number = launch
        if number == self.first.get(stream, 0) + 1:
            return replace(self, first=self.first | {stream: number})
        return replace(self, besides=self.besides | {launch})


@dataclass(eq=False)
class OrderedLaunch:
    """One launch, with the clocks of launches that are over at its begin, and after its wait (griddepcontrol.wait).

    `behind`: the launch before whose end it may begin. `told` is over for a launch that begins once all its blocks have let
    dependents go, `done` once it is over itself.
    """

    kernel: str
    launch: tuple[int, int]
    start: LaunchClock
    wait: LaunchClock
    behind: OrderedLaunch | None = None
    told: LaunchClock = field(init=False)
    done: LaunchClock = field(init=False)
    lanes_per_block: int = 1
    lanes_per_cluster: int = 1
    number: Callable[[int], int] = int
    """The linear index in the grid of the n-th block that ran."""

    def __post_init__(self) -> None:
        self.told, self.done = self.start, self.wait.plus(self.launch)

    def thread(self, entry: int) -> str:
        """Returns the kernel and the thread, or threads, of an entry in words."""
        block, thread = divmod(entry & LANE, self.lanes_per_block)
        place = self.number(block), thread // WARP, thread % WARP
        return f"of {self.kernel}, {thread_name(place)}{CROWD[(entry & LEVEL) >> 29]}"

    def forget(self) -> None:
        """Forgets its clocks, once nobody needs them."""
        self.behind, self.start, self.wait, self.told, self.done = None, LaunchClock(), LaunchClock(), LaunchClock(), LaunchClock()
