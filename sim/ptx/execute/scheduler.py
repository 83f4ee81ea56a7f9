"""Who runs next: the set of groups of lanes that are ready, each at one instruction."""

from __future__ import annotations

import numpy as np

from ..state.lanes import Lanes, merged

PATIENCE = 512
"""Picks by lowest instruction before the groups that have waited longest get their turn."""

TURN = 64
"""How many picks that turn lasts."""


class Ready:
    """Groups by instruction; lanes that come to the same instruction run together.

    The lowest instruction goes first, so that diverged lanes meet again where their paths join. Because that would let
    a spin loop starve the very lanes it waits for, after every `PATIENCE` picks the longest waiting groups run for
    `TURN` picks.
    """

    def __init__(self) -> None:
        self.groups: dict[int, list[Lanes]] = {}
        self.since: dict[int, int] = {}
        self.picks = 0

    def __bool__(self) -> bool:
        return bool(self.groups)

    def push(self, pc: int, lanes: Lanes) -> None:
        found = self.groups.get(pc)
        if found is None:
            self.groups[pc] = [lanes]
            self.since[pc] = self.picks
        else:
            found.append(lanes)

    def pop(self) -> tuple[int, Lanes]:
        self.picks += 1
        if len(self.groups) == 1:
            pc = next(iter(self.groups))
        elif self.picks % (PATIENCE + TURN) >= PATIENCE:
            pc = min(self.groups, key=self.since.__getitem__)
        else:
            pc = min(self.groups)
        return pc, merged(self.groups.pop(pc))


class SeededReady(Ready):
    """Every warp by itself, in random order: one runs for a random stretch, then another.

    Stretches are geometric with a mean that is itself random, so that some warps run far ahead of the others, up to
    what barriers allow.
    """

    def __init__(self, random: np.random.Generator):
        super().__init__()
        self.random = random
        self.keyed: dict[tuple[int, int], list[Lanes]] = {}
        self.warp = -1
        self.stretch = 0

    def __bool__(self) -> bool:
        return bool(self.keyed)

    def push(self, pc: int, lanes: Lanes) -> None:
        if lanes.warps == 1:
            self.keyed.setdefault((int(lanes.warp_ids[0]), pc), []).append(lanes)
            return
        starts = np.flatnonzero(np.diff(lanes.warp, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], lanes.n], strict=True):
            part = lanes.wave.lanes(lanes.index[start:stop])
            self.keyed.setdefault((int(part.warp_ids[0]), pc), []).append(part)

    def pop(self) -> tuple[int, Lanes]:
        self.stretch -= 1
        keys = [key for key in self.keyed if key[0] == self.warp] if self.stretch > 0 else []
        if not keys:
            every = list(self.keyed)
            self.warp = every[int(self.random.integers(len(every)))][0]
            self.stretch = int(self.random.geometric(1 / self.random.choice([1, 4, 32, 256])))
            keys = [key for key in every if key[0] == self.warp]
        # Diverged lanes of a warp: mostly lowest instruction first, so that they meet; now and then any of them.
        key = min(keys) if self.random.random() < 0.9 else keys[int(self.random.integers(len(keys)))]
        return key[1], merged(self.keyed.pop(key))


def make_ready(random: np.random.Generator | None) -> Ready:
    return Ready() if random is None else SeededReady(random)
