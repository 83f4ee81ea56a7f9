"""What a launch may take: loops that never end become a finding, not a hang."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..decode.code import Code, Region
from ..decode.loops import ExitTest, Loop
from ..decode.registry import Arg
from ..order.sharing import is_strong
from ..report.findings import Findings, at_line, source
from ..state.lanes import WARP, Lanes, Wave
from ..text.syntax import Instruction
from ..text.types import Array

STALL_SECONDS = 20.0
"""Seconds of processor time without progress after which a launch is over."""

LOOK_SECONDS = 1.0
"""From one look at the loops to the next; of a smaller limit a quarter."""

GLANCE = 16
"""Steps of the machine from one look at the clock to the next."""

TRAIL = 1024
"""The newest steps, by which a finding says where a warp goes round."""

APART = 256
"""Sets of lanes whose places are kept apart before they are entered for their warps."""

processor_seconds = time.thread_time
"""Of this thread: a launch is not slower for what else the computer does."""


@dataclass(frozen=True)
class Limits:
    """What a launch may take. max_instructions: of all its warps together, None: any number."""

    max_instructions: int | None = None
    stall_seconds: float = STALL_SECONDS

    @classmethod
    def asked(cls, max_instructions: int | None, stall_seconds: float | None) -> Limits:
        """What is not given is taken from the environment (CUPYFLASH_MAX_INSTRUCTIONS, CUPYFLASH_STALL_SECONDS), if it is there.
        Raises ValueError for what is no limit."""
        most = _asked("max_instructions", max_instructions, int, "a whole number from 1")
        seconds = _asked("stall_seconds", stall_seconds, float, "a number of seconds above 0")
        return cls(None if most is None else int(most), STALL_SECONDS if seconds is None else float(seconds))


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
    """Tells when a wave makes no progress, or a launch has run all it may.

    Progress is that threads end, that code runs which had not run before, or that a loop comes nearer to its end: of those who have
    been in it all the time since the last look and whose comparison at one of its exits (`ExitTest`) has changed, most compare
    numbers less far apart than at any look before. What was seen of a loop counts no more once one around it comes nearer.
    `values`: a register or constant as an array over the lanes of the wave.
    """

    def __init__(self, code: Code, findings: Findings, limits: Limits, values: Callable[[Arg], Array]):
        self.code = code
        self.findings = findings
        self.limits = limits
        self.values = values
        self.block_at = np.searchsorted(code.leaders, np.arange(len(code.plans)), side="right") - 1
        self.interval = min(LOOK_SECONDS, limits.stall_seconds / 4)
        self.instructions = 0

    def begin_wave(self, wave: Wave) -> None:
        self.wave = wave
        self.glance = GLANCE
        self.looked = self.progress = processor_seconds()
        self.exits = wave.exits
        self.ran: set[int] = set()
        self.news = False
        self.trail: deque[tuple[int, Lanes]] = deque(maxlen=TRAIL)
        self.apart: dict[Lanes, set[int]] = {}
        self.places = self.nowhere()
        self.stalled: Array | None = None
        self.latest: Array | None = None
        self.nearness = [Nearness(test, self.outside(test.loop)) for test in self.code.exit_tests]

    def nowhere(self) -> Array:
        """Which blocks of code each warp has run, (warps, blocks): none."""
        return np.zeros((self.wave.size // WARP, len(self.code.leaders)), np.bool_)

    def outside(self, loop: Loop) -> Array:
        """The numbers of the blocks that a loop has not."""
        return np.array([n for n, start in enumerate(self.code.leaders) if start not in loop.body], np.int64)

    def exceeded(self, region: Region, lanes: Lanes) -> bool:
        """Lanes are about to run a region: whether the launch has come to a limit, which is reported."""
        pc = region.start
        self.trail.append((pc, lanes))
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
        return now - self.looked >= self.interval and self.stalls(now)

    def enter(self) -> None:
        for lanes, ran in self.apart.items():
            self.places[lanes.warp_ids[:, None], self.block_at[list(ran)]] = True
        self.apart.clear()

    def stalls(self, now: float) -> bool:
        """Look at the loops: whether nothing has come forward for too long."""
        self.enter()
        nearer = [one for one in self.nearness if one.look(self.values, self.places)]
        for one in nearer:
            for other in self.nearness:
                if one.test.encloses(other.test):
                    other.forget()
        if nearer or self.news or self.exits != self.wave.exits:
            self.progress, self.stalled = now, None
        elif self.stalled is None:
            self.stalled = self.places
        else:
            self.stalled |= self.places
        self.looked, self.news, self.exits = now, False, self.wave.exits
        self.latest, self.places = self.places, self.nowhere()
        if now - self.progress < self.limits.stall_seconds:
            return False
        seconds = f"{self.limits.stall_seconds:g} seconds of processor time (stall_seconds)"
        self.report("endless", f"in {seconds} no loop has come nearer to its end, and the launch goes on{{}}")
        return True

    # -- what is said of it ------------------------------------------------------------------------------------------------------

    def report(self, kind: str, message: str) -> None:
        """A finding at the first load or atomic that the busiest warp has waited on lately, else at the first instruction."""
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
        self.findings.report(kind, said, (loads or round_trip)[0], lanes, int(np.searchsorted(lanes.warp, warp)))

    def loop(self, warp: int) -> str:
        """The smallest loop around all that a warp has run since there was no progress, or else of late, where there is one."""
        self.enter()
        seen = [places[warp] for places in (self.stalled, self.latest, self.places) if places is not None]
        around = [[loop for loop in self.code.loops if not ran[self.outside(loop)].any()] for ran in seen if ran.any()]
        found = next((each[-1] for each in around if each), None)
        if found is None:
            return ""
        body = sorted(found.body)
        return f", in the loop {span([i for start in body for i in self.code.instructions[start : self.code.block_end(start)]])}"


def span(instructions: list[Instruction]) -> str:
    """From where to where code stands in the CUDA source, in the file of most of it; without line information in the PTX."""
    places = [i.inlined_at[-1] if i.inlined_at else i.source for i in instructions]
    lines = [place for place in places if place is not None]
    if not lines:
        return f"of PTX lines {instructions[0].line} to {instructions[-1].line}"
    file = Counter(file for file, _ in lines).most_common(1)[0][0]
    numbers = [line for name, line in lines if name == file]
    first, last = min(numbers), max(numbers)
    return f"at {at_line((file, first))}" + (f" to {last}" if last > first else "")


class Nearness:
    """How near each lane is to let go in one comparison: by how much the two numbers differ."""

    def __init__(self, test: ExitTest, outside: Array):
        self.test = test
        self.outside = outside
        self.before: Array | None = None
        self.best: Array | None = None

    def forget(self) -> None:
        self.before = self.best = None

    def look(self, values: Callable[[Arg], Array], places: Array) -> bool:
        """Whether most of those for whom it changed are nearer than ever."""
        warps = places.any(axis=1) & ~places[:, self.outside].any(axis=1)
        if not warps.any():
            return False
        now = distance(values(self.test.left), values(self.test.right))
        there = np.repeat(warps, WARP)
        if self.before is None or self.best is None:
            self.before, self.best = now, np.where(there, now, math.inf)
            return False
        changed = there & (now != self.before)
        nearer = changed & (now < self.best)
        self.before, self.best = now, np.where(changed, np.minimum(self.best, now), self.best)
        count = np.count_nonzero(changed)
        return bool(count > 0 and 2 * np.count_nonzero(nearer) >= count)


def distance(left: Array, right: Array) -> Array:
    """How far numbers of one type are apart, as float64: infinitely far where one is none."""
    if left.dtype.kind == "f":
        apart = np.abs(left.astype(np.float64) - right.astype(np.float64))
        return np.asarray(np.where(np.isnan(apart), math.inf, apart))
    low, high = np.minimum(left, right), np.maximum(left, right)
    unsigned = np.dtype(f"u{low.dtype.itemsize}")
    return np.asarray(np.subtract(high.view(unsigned), low.view(unsigned)).astype(np.float64))
