"""Who runs next: the set of groups of lanes that are ready, each at one instruction."""

from __future__ import annotations

import numpy as np

from ..state.lanes import Lanes, Wave, merged
from ..text.types import Array

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


TEAMS = 4
"""In how many groups the warps of a wave run apart under a seed."""

STRETCHES = (1, 4, 32, 256)
"""Means of how many picks in a row a team gets."""

ASIDE = 0.1
"""How often a team's warps that are not at its lowest instruction go on all the same."""

KINDS = 4
"""Of how many kinds the blocks of a kernel with wgmma are."""

WARPGROUP = 4

GONE = np.iinfo(np.int64).max
"""The place of a warp that is not known to wait anywhere."""

REMEMBERED = 1024
"""Sets of lanes of which the parts in each team are remembered."""

DRAWS = (64, 512, 4096)
"""Means of how many picks pass before the teams are drawn anew: the next time that all are at one instruction, where new teams are
as large as the old ones and nothing is torn apart; after `PATIENCE` more anyway."""


class SeededReady(Ready):
    """Warps apart, in random order: they are drawn into `TEAMS` teams, of which one runs for a random stretch, then another.

    The warps of a block are spread over the teams as evenly as can be, each block's in its own way, so that up to `TEAMS`
    warps of a block run apart as far as barriers allow, and so do blocks; who is in a team with whom is drawn anew from time
    to time. A team runs together where its warps are at the same instruction: a launch takes a few times what one without
    a seed takes, however many warps it has. Stretches are geometric with a mean that is itself random, so that some teams run
    far ahead of the others.

    With `warpgroups` (the kernel has wgmma) blocks are of `KINDS` kinds, and blocks of a kind are spread alike: else few of the
    warps that meet at a wgmma are there at a time. In blocks of the first kind warps are apart, in the others warpgroups.
    """

    def __init__(self, random: np.random.Generator, wave: Wave, warpgroups: bool):
        super().__init__()
        self.random = random
        self.wave = wave
        self.teams: dict[int, dict[int, list[Lanes]]] = {}
        self.team = -1
        self.stretch = 0
        # Where each warp was last seen to go on: what is not ready waits there.
        self.place = np.full(wave.blocks * wave.warps_per_block, GONE)
        self.exits = wave.exits
        self.kinds = random.permutation(wave.blocks) % KINDS if warpgroups else None
        self.draw()

    def __bool__(self) -> bool:
        return bool(self.teams)

    def draw(self) -> None:
        """Who is in which team, until when."""
        self.team_of = (self.by_warps() if self.kinds is None else self.by_kinds(self.kinds)).reshape(-1)
        self.members = [np.flatnonzero(self.team_of == team) for team in range(TEAMS)]
        self.picks = int(self.random.geometric(1 / self.random.choice(DRAWS)))
        self._parts: dict[Lanes, list[tuple[int, Lanes]]] = {}
        old, self.teams = self.teams, {}
        for groups in old.values():
            for pc, parts in groups.items():
                for lanes in parts:
                    self.push(pc, lanes)

    def by_warps(self) -> Array:
        """A team for each warp, (blocks, warps)."""
        blocks, warps = self.wave.blocks, self.wave.warps_per_block
        first = self.random.permutation(blocks) * warps
        return np.asarray((first[:, None] + self.random.random((blocks, warps)).argsort(axis=1)) % TEAMS)

    def by_kinds(self, kinds: Array) -> Array:
        """The same where blocks are of these kinds: in those of the first one warps are apart, in the others warpgroups."""
        teams, warps = self.by_warps(), self.wave.warps_per_block
        for kind in np.unique(kinds).tolist():
            mine = np.flatnonzero(kinds == kind)
            if kind == 0:
                teams[mine] = teams[mine[0]]
            else:
                order = self.random.permutation(-(-warps // WARPGROUP)).repeat(WARPGROUP)[:warps]
                teams[mine] = (order + int(self.random.integers(TEAMS))) % TEAMS
        return teams

    def push(self, pc: int, lanes: Lanes) -> None:
        self.place[lanes.warp_ids] = GONE
        for team, part in self.parts(lanes):
            self.teams.setdefault(team, {}).setdefault(pc, []).append(part)

    def parts(self, lanes: Lanes) -> list[tuple[int, Lanes]]:
        """Lanes by their teams."""
        found = self._parts.get(lanes)
        if found is None:
            teams = self.team_of[lanes.warp]
            here = np.unique(teams).tolist()
            found = [(team, lanes if len(here) == 1 else lanes.subset(np.flatnonzero(teams == team))) for team in here]
            if len(self._parts) >= REMEMBERED:
                self._parts.clear()
            self._parts[lanes] = found
        return found

    def together(self) -> bool:
        """Whether all that live are ready at one instruction."""
        ready = [(pc, lanes.n) for groups in self.teams.values() for pc, parts in groups.items() for lanes in parts]
        return len({pc for pc, _ in ready}) == 1 and sum(n for _, n in ready) == self.wave.alive_by_warp.sum()

    def held(self, team: int) -> bool:
        """Whether some of a team wait at a lower instruction than those that are ready."""
        if self.exits != self.wave.exits:
            self.exits = self.wave.exits
            self.place[self.wave.alive_by_warp == 0] = GONE
        return int(self.place[self.members[team]].min(initial=GONE)) < min(self.teams[team])

    def pop(self) -> tuple[int, Lanes]:
        """Of a team that is at several instructions mostly the lowest first, so that it meets: if those wait, another team."""
        self.picks -= 1
        if self.picks < 0 and (self.picks < -PATIENCE or self.together()):
            self.draw()
        self.stretch -= 1
        aside = self.random.random() < ASIDE
        if self.team not in self.teams or self.stretch < 0 or (not aside and self.held(self.team)):
            every = list(self.teams)
            every = every if aside else [team for team in every if not self.held(team)] or every
            self.team = every[int(self.random.integers(len(every)))]
            self.stretch = int(self.random.geometric(1 / self.random.choice(STRETCHES)))
        groups = self.teams[self.team]
        pc = min(groups)
        if len(groups) > 1 and aside:
            pc = list(groups)[int(self.random.integers(len(groups)))]
        lanes = merged(groups.pop(pc))
        self.place[lanes.warp_ids] = pc
        if not groups:
            del self.teams[self.team]
        return pc, lanes


def make_ready(random: np.random.Generator | None, wave: Wave, warpgroups: bool) -> Ready:
    return Ready() if random is None else SeededReady(random, wave, warpgroups)
