"""Scheduling: which group of lanes runs next, and when a launch has taken too long."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..decode.code import Code, CodeRegion
from ..decode.flow import CodeLoop, ExitTest
from ..decode.registry import Arg, arg
from ..order.shadow import is_strong
from ..state.findings import Findings, at_line, source
from ..state.lane_sets import WARP, LaneSet, Wave, by_value, merged
from ..text.syntax import Array, Mem, PtxInstruction, Reg

PATIENCE = 512
"""Picks by lowest instruction before the groups that have waited longest get their turn."""

TURN = 64
"""Picks that such a turn lasts."""


class ReadyLanes:
    """Groups by instruction; lanes that come to the same instruction run together.

    The lowest instruction goes first, so that diverged lanes meet again where their paths join. Because that would let
    a spin loop starve the very lanes it waits for, after every `PATIENCE` picks the longest waiting groups run for
    `TURN` picks, in a kernel that `spins`.

    Lanes of a loop that only looks at memory go last, until somebody has written there: then they go first. Those that have seen
    what they look for stay in front until they write something themselves: of lanes that wait for each other in a row all come
    through it, and go on together, where else the first would run to its end before the second has looked.
    """

    def __init__(self, spins: bool = True) -> None:
        self.spins = spins
        self.groups: dict[int, list[LaneSet]] = {}
        self.since: dict[int, int] = {}
        self.late: set[int] = set()
        """The instructions of groups that have looked in vain."""
        self.urgent: set[int] = set()
        """Those of groups that look after a write, and of what comes behind."""
        self.in_front = False
        """True if the group that runs is urgent."""
        self.picks = 0

    def __bool__(self) -> bool:
        return bool(self.groups)

    def push(self, pc: int, lanes: LaneSet) -> None:
        found = self.groups.get(pc)
        if found is None:
            self.groups[pc] = [lanes]
            self.since[pc] = self.picks
        else:
            found.append(lanes)
            self.late.discard(pc)
        if self.in_front:
            self.urgent.add(pc)

    def look_again(self, pc: int, lanes: LaneSet) -> None:
        """Adds lanes that have not yet seen in memory what others must do."""
        alone = pc in self.late or pc not in self.groups
        self.in_front = False
        self.push(pc, lanes)
        if alone:
            self.late.add(pc)

    def told(self) -> None:
        """Lets those that have looked in vain look again, since somebody has written."""
        self.in_front = False
        self.urgent |= self.late
        self.late.clear()

    def pop(self) -> tuple[int, LaneSet]:
        self.picks += 1
        if len(self.groups) == 1:
            pc = next(iter(self.groups))
        elif self.spins and self.picks % (PATIENCE + TURN) >= PATIENCE:
            pc = min(self.groups, key=self.since.__getitem__)
        else:
            pc = min(self.urgent or self.groups.keys() - self.late or self.groups) if self.urgent or self.late else min(self.groups)
        self.late.discard(pc)
        self.in_front = pc in self.urgent
        self.urgent.discard(pc)
        return pc, merged(self.groups.pop(pc))


TEAMS = 4
"""Groups in which the warps of a wave run apart under a seed."""

STRETCHES = (1, 4, 32, 256)
"""Means of the number of picks in a row that a team gets."""

ASIDE = 0.1
"""Probability that a team's warps run although they are not at its lowest instruction."""

KINDS = 4
"""Kinds of blocks of a kernel with wgmma."""

WARPGROUP = 4

GONE = np.iinfo(np.int64).max
"""The place of a warp that is not known to wait anywhere."""

REMEMBERED = 1024
"""Most sets of lanes whose parts in each team are remembered."""

DRAWS = (64, 512, 4096)
"""Means of the number of picks before the teams are drawn anew: the next time that all are at one instruction, where new teams are
as large as the old ones and stay together; after `PATIENCE` more anyway.
"""


class SeededReady(ReadyLanes):
    """Warps apart, in random order: they are drawn into `TEAMS` teams, of which one runs for a random stretch, then another.

    The warps of a block are spread over the teams as evenly as can be, each block's in its own way, so that up to `TEAMS`
    warps of a block run apart as far as barriers allow, and so do blocks; teams are drawn anew from time to time. A team runs
    together where its warps are at the same instruction: a launch takes a few times as long as one without a seed, however many
    warps it has. Stretches are geometric with a mean that is itself random, so that some teams run far ahead of the others.

    With `warpgroups` (the kernel has wgmma) blocks are of `KINDS` kinds, and blocks of a kind are spread alike: else few of the
    warps that meet at a wgmma are there at a time. In blocks of the first kind warps are apart, in the others warpgroups.
    """

    def __init__(self, random: np.random.Generator, wave: Wave, warpgroups: bool):
        super().__init__()
        self.random = random
        self.wave = wave
        self.teams: dict[int, dict[int, list[LaneSet]]] = {}
        self.team = -1
        self.stretch = 0
        # The last known instruction of each warp: lanes that are not ready wait there.
        self.place = np.full(wave.blocks * wave.warps_per_block, GONE)
        self.exits = wave.exits
        self.kinds = random.permutation(wave.blocks) % KINDS if warpgroups else None
        self.draw()

    def __bool__(self) -> bool:
        return bool(self.teams)

    def draw(self) -> None:
        """Draws the teams, and the number of picks until the next draw."""
        self.team_of = (self.by_warps() if self.kinds is None else self.by_kinds(self.kinds)).reshape(-1)
        self.members = [np.flatnonzero(self.team_of == team) for team in range(TEAMS)]
        self.picks = int(self.random.geometric(1 / self.random.choice(DRAWS)))
        self._parts: dict[LaneSet, list[tuple[int, LaneSet]]] = {}
        old, self.teams = self.teams, {}
        for groups in old.values():
            for pc, parts in groups.items():
                for lanes in parts:
                    self.push(pc, lanes)

    def by_warps(self) -> Array:
        """Returns a team for each warp, (blocks, warps)."""
        blocks, warps = self.wave.blocks, self.wave.warps_per_block
        first = self.random.permutation(blocks) * warps
        return (first[:, None] + self.random.random((blocks, warps)).argsort(axis=1)) % TEAMS

    def by_kinds(self, kinds: Array) -> Array:
        """Returns the same for blocks of these kinds: in those of the first one warps are apart, in the others warpgroups."""
        teams, warps = self.by_warps(), self.wave.warps_per_block
        for kind, mine in by_value(kinds):
            if kind == 0:
                teams[mine] = teams[mine[0]]
            else:
                order = self.random.permutation(-(-warps // WARPGROUP)).repeat(WARPGROUP)[:warps]
                teams[mine] = (order + int(self.random.integers(TEAMS))) % TEAMS
        return teams

    def push(self, pc: int, lanes: LaneSet) -> None:
        self.place[lanes.warp_ids] = GONE
        for team, part in self.parts(lanes):
            self.teams.setdefault(team, {}).setdefault(pc, []).append(part)

    def look_again(self, pc: int, lanes: LaneSet) -> None:
        self.push(pc, lanes)

    def parts(self, lanes: LaneSet) -> list[tuple[int, LaneSet]]:
        """Returns lanes by their teams."""
        found = self._parts.get(lanes)
        if found is None:
            teams = self.team_of[lanes.warp]
            here = np.unique(teams).tolist()
            found = [(team, lanes if len(here) == 1 else lanes.where(teams == team)) for team in here]
            if len(self._parts) >= REMEMBERED:
                self._parts.clear()
            self._parts[lanes] = found
        return found

    def together(self) -> bool:
        """True if all living lanes are ready at one instruction."""
        ready = [(pc, lanes.n) for groups in self.teams.values() for pc, parts in groups.items() for lanes in parts]
        return len({pc for pc, _ in ready}) == 1 and sum(n for _, n in ready) == self.wave.alive_by_warp.sum()

    def held(self, team: int) -> bool:
        """True if some of a team wait at a lower instruction than those that are ready."""
        if self.exits != self.wave.exits:
            self.exits = self.wave.exits
            self.place[self.wave.alive_by_warp == 0] = GONE
        return int(self.place[self.members[team]].min(initial=GONE)) < min(self.teams[team])

    def pop(self) -> tuple[int, LaneSet]:
        """Takes mostly the lowest instruction of a team, so that the team meets: if lanes wait at a lower one, another team."""
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


def make_ready(random: np.random.Generator | None, wave: Wave, code: Code) -> ReadyLanes:
    return ReadyLanes(code.spins) if random is None else SeededReady(random, wave, code.in_flight is not None)


STALL_SECONDS = 20.0
"""Seconds of processor time without progress after which a launch is ended."""

LOOK_SECONDS = 1.0
"""Seconds between two looks at the loops; with a smaller limit, a quarter of that."""

GLANCE = 16
"""Steps of the machine between two looks at the clock."""

ROUNDS = 64
"""Times that some code must have run since the last progress before a launch is ended: one turn of a loop may take seconds."""

TRAIL = 1024
"""The newest steps, from which a finding names the loop of a warp."""

APART = 256
"""Sets of lanes whose places are kept apart before they are entered for their warps."""

LONG_SECONDS, FEW_SECONDS, WAVE_SECONDS = 10.0, 1.0, 4.0
"""Processor time: of a launch that is long; of the waves from which it is estimated; of a first wave from which alone it is, as
the first one may compile code.
"""

processor_seconds = time.thread_time
"""Processor time of this thread, so that a busy computer does not change the limit."""


@dataclass(frozen=True)
class Estimate:
    """The processor time of a whole launch, estimated from `done` of its `waves`.

    If none is done it comes from an earlier launch of the kernel, or, `at_least`, from what the first wave has taken so far.
    """

    seconds: float
    done: int
    waves: int
    at_least: bool = False


class Forecast:
    """Estimates of a launch while it runs: a wave takes what those before have taken, the first one apart, as it may compile code.

    The first estimate of `least` seconds or more is told, and then one that is twice the last one.
    """

    def __init__(self, told: Callable[[Estimate], None], least: float):
        self.told = told
        self.last = least / 2

    def begin(self, waves: int) -> None:
        """Begins a launch of so many waves; again if it is run a second time, in another way."""
        self.waves = waves
        self.begun, self.first = processor_seconds(), 0.0
        self.done = -1
        """Waves that are over; -1 before the first one."""

    def before(self, seconds_of_wave: float) -> None:
        """Estimates the launch before it begins, from the time of a wave of an earlier one; 0: there was none."""
        self.tell(Estimate(seconds_of_wave * self.waves, 0, self.waves))

    def begin_wave(self) -> None:
        self.done += 1
        spent = processor_seconds() - self.begun
        if self.done == 1:
            self.first = spent
        if self.done > 1 and spent > FEW_SECONDS:
            a_wave = (spent - self.first) / (self.done - 1)
            self.tell(Estimate(self.first + (self.waves - 1) * a_wave, self.done, self.waves))
        elif self.done == 1:
            self.look(processor_seconds())

    def look(self, now: float) -> None:
        """Estimates the time of a launch while its first wave runs, or once that has ended, if the wave takes long."""
        if self.done < 2 and now - self.begun > WAVE_SECONDS:
            spent = self.first if self.done else now - self.begun
            self.tell(Estimate(spent * self.waves, self.done, self.waves, not self.done))

    def tell(self, estimate: Estimate) -> None:
        if estimate.seconds >= 2 * self.last:
            self.last = estimate.seconds
            self.told(estimate)


@dataclass(frozen=True)
class Limits:
    """The limits of a launch. max_instructions: of all its warps together; max_seconds: of processor time; None: no limit.

    forecast: tells a launch that is expected to take long.
    """

    max_instructions: int | None = None
    stall_seconds: float = STALL_SECONDS
    max_seconds: float | None = None
    forecast: Forecast | None = None

    @classmethod
    def asked(
        cls,
        max_instructions: int | None,
        stall_seconds: float | None,
        max_seconds: float | None,
        on_long: Callable[[Estimate], None] | None = None,
        long_seconds: float | None = None,
    ) -> Limits:
        """Returns these limits; a missing one is the environment's (CUPYFLASH_MAX_INSTRUCTIONS, CUPYFLASH_STALL_SECONDS), else the
        default. Raises ValueError for a wrong limit.
        """
        most = _asked("max_instructions", max_instructions, int, "a whole number from 1")
        seconds = _asked("stall_seconds", stall_seconds, float, "a number of seconds above 0")
        in_all = None if max_seconds is None else _asked("max_seconds", max_seconds, float, "a number of seconds above 0")
        forecast = None if on_long is None else Forecast(on_long, LONG_SECONDS if long_seconds is None else long_seconds)
        return cls(None if most is None else int(most), STALL_SECONDS if seconds is None else float(seconds), in_all, forecast)


def _asked(name: str, value: float | None, kind: Callable[[Any], float], wanted: str) -> float | None:
    text: object = value
    if value is None:
        name = f"CUPYFLASH_{name.upper()}"
        text = os.environ.get(name)
        if text is None:
            return None
    try:
        found = kind(text)
        if isinstance(text, bool) or not found > 0 or (not isinstance(text, str) and found != text):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be {wanted}, got {text!r}") from None
    return found


class Budgets:
    """The limits of a launch at work. A wave without progress, or too many instructions, is a finding; too long a time is none.

    Progress is that threads end, that code runs which had not run before, or that a loop comes nearer to its end: of the lanes that
    have been in it since the last look and whose comparison at one of its exits (`ExitTest`) has changed, most compare numbers
    less far apart than at any look before. The record of a loop is dropped once a loop around it comes nearer to its end.
    `values`: returns a register or constant as an array over the lanes of the wave.
    """

    def __init__(self, code: Code, findings: Findings, limits: Limits, values: Callable[[Arg], Array], waves: int):
        self.code = code
        self.findings = findings
        self.limits = limits
        self.values = values
        self.block_at = np.searchsorted(code.leaders, np.arange(len(code.plans)), side="right") - 1
        self.interval = min(LOOK_SECONDS, limits.stall_seconds / 4)
        self.instructions = 0
        self.begun = processor_seconds()
        if limits.forecast is not None:
            limits.forecast.begin(waves)
        self.spent = False
        """True if the launch was ended for its time."""
        self.glance = GLANCE

    def begin_wave(self, wave: Wave) -> None:
        self.wave = wave
        if self.limits.forecast is not None:
            self.limits.forecast.begin_wave()
        # Many waves are over before the first glance, and the clock of a thread is a system call.
        self.looked = self.progress = math.inf
        self.exits = wave.exits
        self.ran: set[int] = set()
        self.news = False
        self.trail: deque[tuple[int, LaneSet]] = deque(maxlen=TRAIL)
        self.rounds = Counter[int]()
        self.apart: dict[LaneSet, set[int]] = {}
        self.places = self.nowhere()
        self.stalled: Array | None = None
        self.latest: Array | None = None
        self.nearness = [Nearness(test, self.outside(test.loop)) for test in self.code.exit_tests]

    def nowhere(self) -> Array:
        """Returns a mask of the blocks of code that each warp has run, (warps, blocks): none."""
        return np.zeros((self.wave.size // WARP, len(self.code.leaders)), bool)

    def outside(self, loop: CodeLoop) -> Array:
        """Returns the numbers of the basic blocks outside of a loop."""
        return np.array([n for n, start in enumerate(self.code.leaders) if start not in loop.body], np.int64)

    def exceeded(self, region: CodeRegion, lanes: LaneSet) -> bool:
        """Returns True, and reports it, if the launch has come to a limit before these lanes run a region."""
        pc = region.start
        self.trail.append((pc, lanes))
        self.rounds[pc] += 1
        if pc not in self.ran:
            self.ran.add(pc)
            self.news = True
        ran = self.apart.get(lanes)
        if ran is None:
            if len(self.apart) >= APART:
                self.enter()
            ran = self.apart[lanes] = set()
        ran.add(pc)
        most = self.limits.max_instructions
        if most is not None:
            self.instructions += (region.end - region.start + (region.ends is not None)) * lanes.warps
            if self.instructions > most:
                self.report("budget", f"the launch has run {most:,} instructions (max_instructions) and goes on{{}}")
                return True
        self.glance -= 1
        if self.glance:
            return False
        self.glance = GLANCE
        now = processor_seconds()
        if self.limits.max_seconds is not None and now - self.begun > self.limits.max_seconds:
            self.spent = True
            return True
        if self.limits.forecast is not None:
            self.limits.forecast.look(now)
        if self.looked == math.inf:
            self.looked = self.progress = now
        return now - self.looked >= self.interval and self.stalls(now)

    def over(self, waves: int) -> bool:
        """True if the launch has taken longer than it may; so many waves have run since it was asked last."""
        if self.limits.forecast is not None:
            self.limits.forecast.done += waves - 1
            self.limits.forecast.begin_wave()
        self.spent = self.limits.max_seconds is not None and processor_seconds() - self.begun > self.limits.max_seconds
        return self.spent

    def enter(self) -> None:
        for lanes, ran in self.apart.items():
            self.places[lanes.warp_ids[:, None], self.block_at[list(ran)]] = True
        self.apart.clear()

    def stalls(self, now: float) -> bool:
        """Looks at the loops; returns True if none has made progress for too long."""
        self.enter()
        nearer = [one for one in self.nearness if one.look(self.values, self.places)]
        for one in nearer:
            for other in self.nearness:
                if one.test.encloses(other.test):
                    other.forget()
        if nearer or self.news or self.exits != self.wave.exits:
            self.progress, self.stalled = now, None
            self.rounds.clear()
        elif self.stalled is None:
            self.stalled = self.places
        else:
            self.stalled |= self.places
        self.looked, self.news, self.exits = now, False, self.wave.exits
        self.latest, self.places = self.places, self.nowhere()
        if now - self.progress < self.limits.stall_seconds or max(self.rounds.values()) < ROUNDS:
            return False
        seconds = f"{self.limits.stall_seconds:g} seconds of processor time (stall_seconds)"
        self.report("endless", f"in {seconds} no loop has come nearer to its end, and the launch goes on{{}}")
        return True

    # -- findings ----------------------------------------------------------------------------------------------------------------

    def report(self, kind: str, message: str) -> None:
        """Reports a finding at the first load or atomic on which the busiest warp waited lately, else at the first instruction."""
        code = self.code
        warps = Counter(warp for _, lanes in self.trail for warp in lanes.warp_ids.tolist() if self.wave.alive_by_warp[warp])
        warp = min(warps, key=lambda one: (-warps[one], one))
        visits = sorted(((pc, lanes) for pc, lanes in self.trail if warp in lanes.warp_ids), key=lambda visit: visit[0])
        stretches = dict.fromkeys(pc for pc, _ in visits)
        round_trip = [i for pc in stretches for i in code.instructions[pc : code.block_end(pc)]]
        reads = [i for i in round_trip if i.opcode in ("ld", "atom") and "param" not in i.mods]
        loads = [i for i in reads if is_strong(i)] or reads
        lines = list(dict.fromkeys(source(i) for i in round_trip))
        of_late = f", of late at {', '.join(lines[:6])}{' and elsewhere' if len(lines) > 6 else ''}"
        lanes = visits[0][1]
        said = message.format(self.loop(warp) + of_late)
        at, i = int(np.searchsorted(lanes.warp, warp)), (loads or round_trip)[0]
        self.findings.report(kind, said, i, lanes, at, address=self.address(i, warp))

    def address(self, i: PtxInstruction, warp: int) -> int | None:
        """Returns the address of an instruction's operand in memory as the first lane of a warp had it last; None without one."""
        memory = next((one for one in i.operands if isinstance(one, Mem)), None)
        if memory is None or not isinstance(memory.base, Reg):
            return None
        return int(self.values(arg(memory.base, memory.base.type))[warp * WARP]) + memory.offset

    def loop(self, warp: int) -> str:
        """Returns the smallest loop around all that a warp has run since the last progress, or else of late, if there is one."""
        self.enter()
        seen = [places[warp] for places in (self.stalled, self.latest, self.places) if places is not None]
        around = [[loop for loop in self.code.loops if not ran[self.outside(loop)].any()] for ran in seen if ran.any()]
        found = next((each[-1] for each in around if each), None)
        if found is None:
            return ""
        body = sorted(found.body)
        return f", in the loop {span([i for start in body for i in self.code.instructions[start : self.code.block_end(start)]])}"


def span(instructions: list[PtxInstruction]) -> str:
    """Returns the first and last line of code in the CUDA source, in the file of most of it; without line information, in PTX."""
    places = [i.inlined_at[-1] if i.inlined_at else i.source for i in instructions]
    lines = [place for place in places if place is not None]
    if not lines:
        return f"of PTX lines {instructions[0].line} to {instructions[-1].line}"
    file = Counter(file for file, _ in lines).most_common(1)[0][0]
    numbers = [line for name, line in lines if name == file]
    first, last = min(numbers), max(numbers)
    return f"at {at_line((file, first))}" + (f" to {last}" if last > first else "")


class Nearness:
    """The distance of each lane from its exit in one comparison: the difference of the two numbers."""

    def __init__(self, test: ExitTest, outside: Array):
        self.test = test
        self.outside = outside
        self.before: Array | None = None
        self.best: Array | None = None

    def forget(self) -> None:
        self.before = self.best = None

    def look(self, values: Callable[[Arg], Array], places: Array) -> bool:
        """True if most of the lanes for which it changed are nearer than ever."""
        warps = places.any(axis=1) & ~places[:, self.outside].any(axis=1)
        if not warps.any():
            return False
        now = distance(values(self.test.left), values(self.test.right))
        there = np.repeat(warps, WARP)
        if self.before is None or self.best is None:
            # The comparison may not have run yet: what its registers hold then is no distance.
            self.before, self.best = now, np.full(now.shape, math.inf)
            return False
        changed = there & (now != self.before)
        nearer = changed & (now < self.best)
        self.before, self.best = now, np.where(changed, np.minimum(self.best, now), self.best)
        count = np.count_nonzero(changed)
        return bool(count > 0 and 2 * np.count_nonzero(nearer) >= count)


def distance(left: Array, right: Array) -> Array:
    """Returns the difference of numbers of one type, as float64: infinite if one is NaN."""
    if left.dtype.kind == "f":
        apart = np.abs(left.astype(np.float64) - right.astype(np.float64))
        return np.where(np.isnan(apart), math.inf, apart)
    low, high = np.minimum(left, right), np.maximum(left, right)
    unsigned = np.dtype(f"u{low.dtype.itemsize}")
    return np.subtract(high.view(unsigned), low.view(unsigned)).astype(np.float64)
