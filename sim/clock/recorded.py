"""Traces of blocks whose warps wait for each other's copies: recorded whole, and shortened where a ring of buffers turns alike.

Warps with different roles have different loops, but the mbarriers of a ring tie them: between two phases of one mbarrier every role
goes once around the ring. So a stretch of revolutions in which the warp with the most products does the same each time is left out
of all warps of its block, from the first one's phase to the last one's, and their time is that of the revolutions before them.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from .bulk import BULK, Bulk
from .execution import Index, IssueEvent
from .memory import SPACES, tensor_of
from .multiprocessor import IDLE, WAVEFRONT, Cost, Issue, Meets
from .sass import Instruction
from .steps import PRODUCTS
from .traces import BRANCHES, Tracer
from .waits import PHASE, Key

BEFORE, BEHIND, MEASURED, PERIODS = 4, 2, 2, 4
"""Revolutions of a ring that are kept before those left out and behind them, those before whose time they take, and the most
that a loop's body may have."""


@dataclass
class Recording:
    """The instructions that a warp issued: their numbers, and by position in them the cost, the signals."""

    at: array[int] = field(default_factory=lambda: array("i"))
    costs: dict[int, Cost] = field(default_factory=dict)
    signals: dict[int, Meets] = field(default_factory=dict)

    def touches(self, key: Key) -> int | None:
        """Returns the position of the first signal for a meeting."""
        for position, signals in self.signals.items():
            if any(each == key for each, _, _ in signals):
                return position
        return None

    def stretch_of(self, gone: Set[Key]) -> tuple[int | None, int | None]:
        """Returns the position of the first signal for some of these meetings, and that at which the same instruction comes again
        behind all of them."""
        inside = [position for position, signals in self.signals.items() if any(key in gone for key, _, _ in signals)]
        if not inside:
            return None, None
        again = (k for k in range(inside[-1] + 1, len(self.at)) if self.at[k] == self.at[inside[0]])
        return inside[0], next(again, None)


@dataclass(frozen=True)
class Cut:
    """A stretch that is left out: from the phase of a ring's mbarrier to another one, so many revolutions.

    `mark`: the number of the mark at its end; `measured`: how many marks before it have the revolutions whose time they take.
    """

    begin: Key
    end: Key
    revolutions: int
    mark: int
    measured: int


@dataclass
class Shortened:
    """Traces of a block's warps, the stretches that are left out of them, and what warps issue there, with how often."""

    traces: list[list[Issue]]
    cuts: list[Cut]
    left: list[tuple[Issue, int]]


class RevolutionRecorder:
    """Records the blocks of a multiprocessor; of a cluster's blocks the first one, which others' copies reach as its own do, and
    whose share of the L2 is that of all of them."""

    def __init__(self, tracer: Tracer, cluster: int) -> None:
        self.tracer, self.cluster = tracer, cluster
        self.code: Sequence[Instruction] = tracer.launch.kernel.instructions

    def shortened(self, blocks: Sequence[Index]) -> list[Shortened]:
        """Runs blocks, whole clusters, together; returns each cluster's first block."""
        warps = self.tracer.launch.warps
        recordings = self.recorded(blocks)
        return [self.shorten(recordings[k : k + warps], k // warps) for k in range(0, len(recordings), warps * self.cluster)]

    def recorded(self, blocks: Sequence[Index]) -> list[Recording]:
        warps = self.tracer.launch.warps
        kept = {warp for warp in range(warps * len(blocks)) if warp // warps % self.cluster == 0}
        found = [Recording() for _ in range(warps * len(blocks))]
        beside: defaultdict[Key, int] = defaultdict(int)  # bytes that other blocks' copies bring
        asked = [0, 0]  # bytes that all blocks' copies load from the L2, and those kept
        for event in self.tracer.launch.run(*blocks):
            mine = [warp for warp in event.warps if warp in kept]
            for bulk in event.bulk:
                if bulk.keys:
                    asked[0] += bulk.rows.size * bulk.length
                    asked[1] += bulk.rows.size * bulk.length * (bulk.warp in kept)
                if bulk.warp not in kept:
                    for block, key in bulk.keys.items():
                        if block % self.cluster == 0:
                            beside[key] += bulk.size
            if not mine:
                continue
            self.note(event, mine, found)
        share = asked[0] / (asked[1] * self.cluster) if asked[1] else 1.0
        for recording in found:
            for position, signals in recording.signals.items():
                if self.code[recording.at[position]].opcode in BULK:
                    brought = sum(beside.pop(key, 0) for key, _, _ in signals)
                    cost = recording.costs[position]
                    recording.costs[position] = cost._replace(
                        pipe=cost.pipe + brought / WAVEFRONT,
                        l2_bytes=cost.l2_bytes * share,
                        dram_bytes=cost.dram_bytes * share,
                        asked=cost.asked + brought,
                    )
        return found

    def note(self, event: IssueEvent, warps: Sequence[int], found: Sequence[Recording]) -> None:
        costs: Mapping[int, Cost] = self.tracer.costs(event) if event.access is not None else {}
        idle = self.code[event.at].opcode in SPACES
        for warp in warps:
            recording = found[warp]
            if costs or idle:
                recording.costs[len(recording.at)] = costs.get(warp, IDLE)
            recording.at.append(event.at)
        for signal in event.signals:
            if warps and signal.warp in warps:
                recording = found[signal.warp]
                position = len(recording.at) - 1
                key = signal.key._replace(block=signal.key.block // self.cluster * self.cluster)
                recording.signals[position] = (*recording.signals.get(position, ()), (key, signal.counts, signal.waits))
        for bulk in event.bulk:
            if bulk.warp in warps:
                self.note_bulk(event.at, bulk, found[bulk.warp])

    def note_bulk(self, at: int, bulk: Bulk, recording: Recording) -> None:
        position = len(recording.at) - 1
        asked = bulk.rows.size * bulk.length
        share = self.tracer.reach.get(at, 1.0)
        tensor = tensor_of(bulk.rows[0]) if bulk.rows.size else -1
        merged = self.tracer.merged(at) if bulk.keys else 0.0
        recording.costs[position] = Cost(bulk.size / WAVEFRONT, asked, asked * share, asked, tensor, merged)
        keys = {key._replace(block=block // self.cluster * self.cluster) for block, key in bulk.keys.items()}
        if keys:
            recording.signals[position] = tuple((key, True, False) for key in keys)

    def shorten(self, recordings: Sequence[Recording], block: int) -> Shortened:
        """Leaves stretches of alike revolutions out of a block's recordings."""
        products = [sum(self.code[at].opcode in PRODUCTS for at in set(each.at)) * len(each.at) for each in recordings]
        first = int(np.argmax(products)) if any(products) else int(np.argmax([len(each.at) for each in recordings]))
        cuts, marks = ring_cuts(recordings[first])
        traces, left = [], Counter[Issue]()
        for number, (recording, out) in enumerate(zip(recordings, left_out(recordings, cuts), strict=True)):
            traces.append(self.trace(recording, out, marks if number == first and block == 0 else frozenset()))
            for begin, end in out:
                rest = Counter(recording.at[begin:end])
                for position, cost in recording.costs.items():
                    if begin <= position < end:
                        left[Issue(recording.at[position], cost)] += 1
                        rest[recording.at[position]] -= 1
                for at, times in rest.items():
                    left[Issue(at)] += times
        return Shortened(traces, cuts, list(left.items()))

    def trace(self, recording: Recording, out: Sequence[tuple[int, int]], marks: frozenset[int]) -> list[Issue]:
        found: list[Issue] = []
        skip = iter((*out, (len(recording.at), len(recording.at))))
        begin, end = next(skip)
        at, costs, signals = recording.at, recording.costs, recording.signals
        plain = [Issue(k) for k in range(len(self.code))]
        position = 0
        while position < len(at):
            if position == begin:
                position = end
                begin, end = next(skip)
                continue
            number = at[position]
            if position in costs or position in signals or position in marks:
                issue = Issue(number, costs.get(position), False, position in marks, signals.get(position, ()))
            else:
                issue = plain[number]
            position += 1
            if position < len(at) and self.code[number].opcode in BRANCHES and at[position] != number + 1:
                issue = issue._replace(taken=True)
            found.append(issue)
        return found


def left_out(recordings: Sequence[Recording], cuts: Sequence[Cut]) -> list[list[tuple[int, int]]]:
    """Returns for each warp of a block the positions in its recording that cuts leave out.

    They are those between a cut's two phases. A warp that has no part in these, as one that fills another ring, goes around from
    the first of the meetings that the others leave out.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in recordings]
    for cut in cuts:
        gone: set[Key] = set()
        between = [(recording.touches(cut.begin), recording.touches(cut.end)) for recording in recordings]
        for others in (False, True):
            for out, recording, phases in zip(found, recordings, between, strict=True):
                if (phases == (None, None)) is not others:
                    continue
                begin, end = recording.stretch_of(gone) if others else phases
                if begin is not None and end is not None and begin < end:
                    out.append((begin, end))
                    signals = (each for position, each in recording.signals.items() if begin <= position < end)
                    gone.update(key for each in signals for key, _, _ in each)
    return [sorted(out) for out in found]


def ring_cuts(recording: Recording) -> tuple[list[Cut], frozenset[int]]:
    """Returns the cuts that a warp's way allows, and the positions of the ring's phases, by which time is measured."""
    waits: defaultdict[int, list[tuple[int, Key]]] = defaultdict(list)
    for position, signals in recording.signals.items():
        for key, comes, waits_for in signals:
            if key.kind == PHASE and waits_for and not comes:
                waits[key.number].append((position, key))
    if not waits:
        return [], frozenset()
    ring = max(waits.values(), key=len)
    at = np.frombuffer(recording.at, np.int32)
    alike = [hash(at[begin:end].tobytes()) for (begin, _), (end, _) in pairwise(ring)]
    cuts: list[Cut] = []
    k = gone = 0
    while k < len(alike):
        end, period = stretch(alike, k)
        before = -(-BEFORE // period) * period
        left = (end - k - before - BEHIND) // period * period
        if left > 0:
            begin = k + before
            measured = -(-MEASURED // period) * period
            cuts.append(Cut(ring[begin][1], ring[begin + left][1], left, begin - gone, measured))
            gone += left
        k = max(end, k + 1)
    return cuts, frozenset(position for position, _ in ring)


def stretch(alike: Sequence[int], begin: int) -> tuple[int, int]:
    """Returns the end of the revolutions from one on that repeat themselves, and after how many: a loop may be unrolled."""
    best = begin + 1, 1
    for period in range(1, PERIODS + 1):
        end = begin + period
        while end < len(alike) and alike[end] == alike[end - period]:
            end += 1
        if min(end, len(alike)) > max(best[0], begin + period + 1):
            best = min(end, len(alike)), period
    return best
