"""Barriers: of blocks (bar.sync, bar.arrive, bar.red), of warps (bar.warp.sync) and of clusters (barrier.cluster).

PTX ISA, "Parallel Synchronization and Communication: bar, barrier". A barrier of the whole block completes when all
threads of the block that have not exited have arrived, as the hardware does since sm_70. One with a thread count
completes when that many threads have: a warp counts 32 each time that all its living lanes have arrived, twice if it
arrives (bar.arrive) and then waits.

At the barrier of a cluster (PTX ISA, "barrier.cluster") all its threads arrive, which does not block, and wait. A phase is
complete when all threads of the cluster that have not exited have arrived. No thread can arrive at the next phase before it
has waited for this one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..decode.registry import ENVIRONMENT, KEEP, Barrier, ClusterBarrier, WarpBarrier
from ..order.happens_before import Released
from ..order.moments import highest
from ..state.findings import WARNING, Stuck, Verdict, crowd
from ..state.lane_sets import WARP, LaneSet, by_value
from ..text.syntax import Array
from .registers import RegisterFiles, WaveUnit


@dataclass
class BarrierArrival:
    """Lanes that came to `barrier` of their blocks at `pc`, the `number`-th to come to any; `values` are predicates for bar.red.

    `released`: the clocks that they hand on, a row a block; None if a barrier of the whole block orders everything.
    """

    number: int
    barrier: int
    pc: int
    lanes: LaneSet
    waits: bool
    values: Array | None = None
    released: Released | None = None

    def of(self, chosen: Array) -> BarrierArrival | None:
        """Returns the arrivals in the chosen blocks (booleans, one a block of the wave), if there are any."""
        mine = chosen[self.lanes.block_ids]
        if mine.all():
            return self
        if not mine.any():
            return None
        at = np.flatnonzero(chosen[self.lanes.block])
        values = None if self.values is None else self.values[at]
        released = None if self.released is None else self.released.of(np.flatnonzero(mine))
        return replace(self, lanes=self.lanes.subset(at), values=values, released=released)


class Meeting:
    """The arrivals at one barrier, in all blocks of a wave.

    For each block: `arrived`, the number of arrived threads; `expected` threads, 0 for all that live; `apart`: True if each arrival
    hands on a clock of its own (with a thread count, or for a reduction).
    """

    def __init__(self, blocks: int):
        self.arrived, self.expected = np.zeros(blocks, np.int64), np.zeros(blocks, np.int64)
        self.apart = np.zeros(blocks, bool)
        self.arrivals: list[BarrierArrival] = []

    def add(self, arrival: BarrierArrival, expected: Array, apart: bool) -> None:
        """Adds lanes, with `expected` (one a block of them) for blocks in which they are the first."""
        blocks = arrival.lanes.block_ids
        fresh = self.arrived[blocks] == 0
        self.expected[blocks[fresh]] = expected[fresh]
        self.apart[blocks[fresh]] = apart
        self.arrived += np.bincount(arrival.lanes.block, minlength=len(self.arrived))
        self.arrivals.append(arrival)

    def take(self, blocks: Array) -> list[BarrierArrival]:
        """Removes and returns the arrivals in these blocks."""
        chosen = self.chosen(blocks)
        every = self.arrivals
        self.arrivals = [left for arrival in every if (left := arrival.of(~chosen)) is not None]
        self.arrived[blocks] = 0
        return parts_of(every, chosen)

    def chosen(self, blocks: Array) -> Array:
        """Returns a mask of these blocks."""
        return mask_of(blocks, len(self.arrived))


def mask_of(places: Array, count: int) -> Array:
    found = np.zeros(count, bool)
    found[places] = True
    return found


def parts_of(arrivals: list[BarrierArrival], chosen: Array) -> list[BarrierArrival]:
    return [mine for arrival in arrivals if (mine := arrival.of(chosen)) is not None]


class Barriers(WaveUnit):
    """The sixteen barriers of each block of a wave: `meetings`, by number, with arrivals."""

    def __init__(self, machine: RegisterFiles):
        super().__init__(machine)
        self.meetings: dict[int, Meeting] = {}
        self.completed = np.zeros(self.wave.blocks, np.int64)
        self.arrivals = 0

    def __bool__(self) -> bool:
        return any(arrival.waits for meeting in self.meetings.values() for arrival in meeting.arrivals)

    # -- arrivals ---------------------------------------------------------------------------------------------------------

    def arrive(self, pc: int, control: Barrier, lanes: LaneSet) -> None:
        plan, read = self.code.plans[pc], self.machine.read
        number = read(lanes, plan.reads[0])
        expected = values = None
        if control.counted:
            expected = read(lanes, plan.reads[1]).copy()
        if control.reduction:
            values = read(lanes, plan.reads[-1]).copy()
            values = ~values if control.negated else values
        self.arrivals += 1
        arrival = BarrierArrival(self.arrivals, int(number[0]), pc, lanes, control.waits, values)
        if lanes.n == 1 or not np.count_nonzero(number != number[0]):
            self.come(arrival, expected)
            return
        for barrier, at in by_value(number.copy()):
            part = replace(arrival, barrier=barrier, lanes=lanes.subset(at), values=None if values is None else values[at])
            self.come(part, None if expected is None else expected[at])

    def come(self, arrival: BarrierArrival, expected: Array | None) -> None:
        """Adds lanes that come to a barrier: for so many threads (one number a lane), or for all of the block (None)."""
        lanes, barrier = arrival.lanes, arrival.barrier
        meeting = self.meetings.get(barrier)
        plain = arrival.waits and arrival.values is None and expected is None
        if meeting is None:
            if plain and lanes.whole_blocks:
                self.release(lanes.block_ids, [arrival])
                return
            meeting = self.meetings[barrier] = Meeting(self.wave.blocks)
        every = np.zeros(len(lanes.block_ids), np.int64) if expected is None else expected[lanes.block_starts].astype(np.int64)
        apart = arrival
        if plain:
            chosen = meeting.apart & (meeting.arrived > 0)
            simple, rest = arrival.of(~chosen), arrival.of(chosen)
            if simple is not None:
                meeting.add(simple, every, False)
                self.check(barrier, simple.lanes.block_ids)
            if rest is None:
                return
            apart = rest
        self.come_apart(barrier, meeting, apart, every)

    def come_apart(self, barrier: int, meeting: Meeting, arrival: BarrierArrival, expected: Array) -> None:
        """Adds lanes that come and hand on a clock of their own."""
        lanes = arrival.lanes
        blocks = lanes.block_ids
        self.tell_apart(meeting, blocks[(meeting.arrived[blocks] > 0) & ~meeting.apart[blocks]])
        meeting.add(replace(arrival, released=self.released(lanes)), expected, True)
        if not arrival.waits:
            self.push(arrival.pc + 1, lanes)
        self.check(barrier, blocks)

    def tell_apart(self, meeting: Meeting, blocks: Array) -> None:
        """Makes arrivals in these blocks that wait for all of the block hand on clocks of their own, too."""
        if not len(blocks):
            return
        meeting.apart[blocks] = True
        chosen, every = meeting.chosen(blocks), meeting.arrivals
        meeting.arrivals = []
        for arrival in every:
            mine = arrival.of(chosen) if arrival.released is None else None
            left = arrival if mine is None else arrival.of(~chosen)
            meeting.arrivals += [] if left is None else [left]
            meeting.arrivals += [] if mine is None else [replace(mine, released=self.released(mine.lanes))]

    def mask(self, blocks: Array) -> Array:
        """Returns a mask of these blocks among those of the wave."""
        return mask_of(blocks, self.wave.blocks)

    def released(self, lanes: LaneSet) -> Released | None:
        races = self.races
        return None if races is None else races.arrive(races.groups(lanes, lanes.block_starts))

    # -- completion -------------------------------------------------------------------------------------------------------

    def recheck(self) -> None:
        """Checks barriers after threads have exited: they may be complete without them."""
        for barrier in list(self.meetings):
            self.check(barrier, np.flatnonzero(self.meetings[barrier].arrived))

    def check(self, barrier: int, blocks: Array) -> None:
        """Lets threads go on in those of `blocks` where enough have come."""
        meeting = self.meetings[barrier]
        here = blocks[meeting.arrived[blocks] > 0]
        over = meeting.arrived[here] >= self.wave.alive_by_block[here]
        counted = meeting.expected[here] > 0
        if counted.any():
            over[counted] = self.counted(meeting, here[counted]) >= meeting.expected[here[counted]]
        done = here[over]
        if not len(done):
            return
        arrivals, apart = meeting.take(done), meeting.apart[done]
        if not meeting.arrivals:
            del self.meetings[barrier]
        if not apart.all():
            self.release(done[~apart], parts_of(arrivals, meeting.chosen(done[~apart])))
            done = done[apart]
            arrivals = parts_of(arrivals, meeting.chosen(done))
        # Handles together blocks in which the same arrivals met.
        present = np.array([meeting.chosen(arrival.lanes.block_ids)[done] for arrival in arrivals])
        while len(done):
            alike = (present == present[:, :1]).all(axis=0)
            mine = meeting.chosen(done[alike])
            self.release_apart(done[alike], parts_of(arrivals, mine), meeting.expected[done[alike]])
            done, present = done[~alike], present[:, ~alike]

    def counted(self, meeting: Meeting, blocks: Array) -> Array:
        """Returns the arrived threads of these blocks at a barrier with a thread count: 32 for each arrival of a warp."""
        wave = self.wave
        times = np.zeros((wave.blocks, wave.warps_per_block, WARP), np.int64)
        for arrival in meeting.arrivals:
            times.reshape(-1)[arrival.lanes.index] += 1
        times, alive = times[blocks], wave.alive.reshape(times.shape)[blocks]
        living = np.where(alive, times, len(meeting.arrivals)).min(axis=2)
        return WARP * np.where(alive.any(axis=2), living, times.max(axis=2)).sum(axis=1)

    def release(self, blocks: Array, arrivals: list[BarrierArrival]) -> None:
        """Lets the threads of these blocks go on: all have met."""
        if self.races is not None:
            self.races.block_barrier(blocks)
        left = self.mask(blocks)
        for arrival in arrivals:
            first = arrival.lanes.block_ids[left[arrival.lanes.block_ids]]
            left[first] = False
            self.complete(first, arrival)
            self.push(arrival.pc + 1, arrival.lanes)

    def release_apart(self, blocks: Array, arrivals: list[BarrierArrival], expected: Array) -> None:
        """Lets the waiting threads of these blocks, with the same arrivals, go on behind all accesses before the arrivals."""
        waiting = [arrival for arrival in arrivals if arrival.waits]
        self.reduce(blocks, arrivals)
        if self.races is not None:
            counted = (expected > 0) | (len(waiting) < len(arrivals))
            if not counted.all():
                self.races.block_barrier(blocks[~counted])
            if counted.any():
                parts = parts_of(arrivals, self.mask(blocks[counted]))
                released = [arrival.released for arrival in parts if arrival.released is not None]
                for lanes in (arrival.lanes for arrival in parts if arrival.waits):
                    self.races.depart(self.races.groups(lanes, lanes.block_starts), released)
        if waiting:
            self.complete(blocks, waiting[0])
        for arrival in waiting:
            self.push(arrival.pc + 1, arrival.lanes)

    def reduce(self, blocks: Array, arrivals: list[BarrierArrival]) -> None:
        """bar.red: gives every waiting lane the reduction over all arrived ones of its block."""
        if all(arrival.values is None for arrival in arrivals):
            return
        for block in blocks:
            here = parts_of(arrivals, self.mask(block))
            everyone = np.concatenate([arrival.values for arrival in here if arrival.values is not None])
            for arrival in here:
                plan = self.code.plans[arrival.pc]
                assert isinstance(plan.control, Barrier)
                result: object = {"popc": everyone.sum(), "and": everyone.all(), "or": everyone.any()}[plan.control.reduction]
                # Write into the registers of the wave: no frame may hold these lanes meanwhile.
                self.machine.deactivate()
                self.machine.write(arrival.lanes, plan.writes[0], result)

    def complete(self, blocks: Array, arrival: BarrierArrival) -> None:
        """Completes a barrier of each of these blocks, at which this arrival waited."""
        lanes, on_barrier = arrival.lanes, self.machine.on_barrier
        self.memory.tally.barriers += len(blocks)
        self.completed[blocks] += 1
        control = self.code.plans[arrival.pc].control
        missing = self.wave.threads - self.wave.alive_by_block[blocks]
        if isinstance(control, Barrier) and not control.counted and missing.any():
            for block, count in zip(blocks[missing > 0].tolist(), missing[missing > 0].tolist(), strict=True):
                first = int(np.flatnonzero(lanes.block == block)[0])
                message = f"{count} of {self.wave.threads} threads of the block had exited before this barrier"
                i = self.code.instructions[arrival.pc]
                # PTX promises nothing; CUDA does from Volta on ("until reached by all non-exited threads in the block").
                self.findings.report(Verdict("partial barrier", WARNING), message, i, lanes, first)
        if on_barrier is not None:
            # The callback is not part of the kernel: it computes in the ordinary floating-point environment.
            ENVIRONMENT.setter(KEEP)()
            for block in blocks.tolist():
                on_barrier(self.wave.number(self.wave.first_block + block), int(self.completed[block]))
            ENVIRONMENT.setter(self.code.base_mode)()

    def stuck(self) -> list[Stuck]:
        """Returns the waiting lanes of each block, at barriers of the whole block last."""
        wave = self.wave
        found: dict[tuple[bool, int, int], list[BarrierArrival]] = {}
        every = [(arrival, barrier) for barrier, meeting in self.meetings.items() for arrival in meeting.arrivals]
        for arrival, barrier in sorted(every, key=lambda pair: pair[0].number):
            for block in arrival.lanes.block_ids.tolist():
                key = not self.meetings[barrier].apart[block], block, barrier
                found.setdefault(key, []).extend(parts_of([arrival], self.mask(np.array(block))))
        out = []
        for (plain, block, barrier), arrivals in sorted(found.items(), key=lambda item: item[0][0]):
            alive, meeting = int(wave.alive_by_block[block]), self.meetings[barrier]
            expected = 0 if plain else int(meeting.expected[block])
            what = (
                f"at barrier {barrier}: {int(meeting.arrived[block])} of {expected or alive} have arrived, "
                f"{alive} of {wave.threads} threads of the block are alive"
            )
            out += [Stuck(self.code.instructions[a.pc], a.lanes, what) for a in arrivals if a.waits]
        return out


class WarpBarriers(WaveUnit):
    """bar.warp.sync: lanes with the same member mask meet, at whatever instruction they are."""

    def __init__(self, machine: RegisterFiles):
        super().__init__(machine)
        self.waiting: dict[tuple[int, int], list[tuple[int, LaneSet]]] = {}

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def arrive(self, pc: int, control: WarpBarrier, lanes: LaneSet) -> None:
        mask = self.machine.read(lanes, self.code.plans[pc].reads[0])
        if lanes.converged and (self.races is None or not np.count_nonzero(mask != 0xFFFFFFFF)):
            if self.races is not None:
                self.races.warp_sync(lanes.warp_ids)
            self.push(pc + 1, lanes)
            return
        for key, part in lanes.split((lanes.warp << 32) + mask.astype(np.int64)):
            warp, value = divmod(key, 1 << 32)
            self.waiting.setdefault((warp, value), []).append((pc, part))
            self.check(warp, value)

    def recheck(self) -> None:
        for warp, mask in list(self.waiting):
            self.check(warp, mask)

    def check(self, warp: int, mask: int) -> None:
        alive = self.wave.alive[warp * WARP : (warp + 1) * WARP]
        here = np.zeros(WARP, bool)
        for _, lanes in self.waiting[warp, mask]:
            here[lanes.lane] = True
        named = np.array([mask >> lane & 1 for lane in range(WARP)], bool)
        if not (named & alive & ~here).any():
            if self.races is not None and (named | ~alive).all():
                self.races.warp_sync(np.array([warp]))
            elif self.races is not None:
                self.races.lanes_sync(warp, mask)
            for pc, lanes in self.waiting.pop((warp, mask)):
                self.push(pc + 1, lanes)

    def stuck(self) -> list[Stuck]:
        return [
            Stuck(self.code.instructions[pc], lanes, f"in bar.warp.sync for the lanes of mask {mask:#010x}")
            for (_, mask), groups in self.waiting.items()
            for pc, lanes in groups
        ]


@dataclass
class Told:
    """The clocks that the arrivals of a phase hand on: of whole warps, and moments of the other lanes (`order.happens_before`)."""

    warps: list[Released] = field(default_factory=list)
    lanes: Array | None = None
    relaxed: bool = False
    split: bool = False
    """True if a thread may have done something between its arrival and its wait."""


@dataclass
class ClusterPhases:
    """The barrier of one cluster: the number of complete phases, and the clocks of this one's and the last one's arrivals."""

    completed: int = 0
    told: Told = field(default_factory=Told)
    heard: Told = field(default_factory=Told)


class ClusterBarriers(WaveUnit):
    """The barriers of the clusters of a wave."""

    def __init__(self, machine: RegisterFiles):
        super().__init__(machine)
        self.per = self.wave.cluster * self.wave.lanes_per_block
        self.phases: dict[int, ClusterPhases] = {}
        self.owed = np.full(self.wave.size, -1, np.int64)
        """The phase for which each lane has arrived and not yet waited."""
        self.waiting: list[tuple[int, LaneSet]] = []

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def come(self, pc: int, control: ClusterBarrier, lanes: LaneSet) -> None:
        for cluster, some in lanes.split(lanes.index // self.per):
            phases = self.phases.setdefault(cluster, ClusterPhases())
            arrived = self.owed[some.index] >= 0
            wrong = arrived != control.waits
            if wrong.any():
                self.complain(pc, some, wrong, control.waits)
            if not wrong.all():
                right = some.where(~wrong)
                if control.waits:
                    self.wait(pc, phases, right)
                else:
                    self.arrive(pc, phases, right, control.relaxed)
                    self.check(cluster)
        if not control.waits:
            self.push(pc + 1, lanes)

    def complain(self, pc: int, lanes: LaneSet, wrong: Array, waits: bool) -> None:
        """Reports wrong threads: those that wait without having arrived go on at once; an arrival too many is not counted."""
        message = (
            "wait at the barrier of the cluster without an arrival before"
            if waits
            else ("second arrival at the barrier of the cluster without a wait for the first")
        )
        self.findings.report("cluster barrier", message, self.code.instructions[pc], lanes, np.flatnonzero(wrong))
        if waits:
            self.push(pc + 1, lanes.where(wrong))

    def arrive(self, pc: int, phases: ClusterPhases, lanes: LaneSet, relaxed: bool) -> None:
        self.owed[lanes.index] = phases.completed
        if not relaxed:
            # A release for the cluster, so no less than fence.mbarrier_init.
            self.machine.mbarriers.fence(lanes)
        races, told, code = self.races, phases.told, self.code
        if races is None:
            return
        then = code.plans[pc + 1].control if code.instructions[pc + 1].predicate is None else None
        told.split |= not (isinstance(then, ClusterBarrier) and then.waits)
        if not relaxed and lanes.converged:
            told.warps.append(races.arrive(races.groups(lanes)))
            return
        told.relaxed |= relaxed
        released = races.fenced(lanes) if relaxed else races.released(races.groups(lanes))[0]
        told.lanes = released if told.lanes is None else np.maximum(told.lanes, released)

    def wait(self, pc: int, phases: ClusterPhases, lanes: LaneSet) -> None:
        over = self.owed[lanes.index] < phases.completed
        if over.any():
            self.go(pc, phases, lanes.where(over))
        if not over.all():
            self.waiting.append((pc, lanes.where(~over)))

    def go(self, pc: int, phases: ClusterPhases, lanes: LaneSet) -> None:
        """Lets these lanes go on: their phase is complete."""
        self.owed[lanes.index] = -1
        races, heard = self.races, phases.heard
        if races is not None:
            # All threads of the cluster have begun, even if the barrier orders nothing.
            begun = np.full((1, races.warps), races.start)
            moments = [*heard.warps, Released(begun, None)]
            together = races.groups(lanes)
            if lanes.converged:
                races.depart(together, moments)
            else:
                races.hear(together, np.repeat(highest([each.moments for each in moments]), WARP, axis=1))
                for each in heard.warps:
                    if each.rows is not None:
                        races.hear(together, each.rows)
                    if each.fenced is not None and races.proxy is not None:
                        races.proxy.hear(together, each.fenced)
            if heard.lanes is not None:
                races.hear(together, heard.lanes[None])
        self.push(pc + 1, lanes)

    def missing(self, cluster: int) -> Array:
        """Returns a mask of the cluster's lanes for which the phase still waits."""
        part = slice(cluster * self.per, (cluster + 1) * self.per)
        return self.wave.alive[part] & (self.owed[part] != self.phases[cluster].completed)

    def check(self, cluster: int) -> None:
        phases = self.phases[cluster]
        if self.missing(cluster).any():
            return
        phases.completed += 1
        phases.heard, phases.told = phases.told, Told()
        races = self.races
        if races is not None:
            races.cluster_barrier(cluster, phases.heard.relaxed, phases.heard.split)
        ready = [one for one in self.waiting if int(one[1].index[0]) // self.per == cluster]
        self.waiting = [one for one in self.waiting if int(one[1].index[0]) // self.per != cluster]
        for pc, lanes in ready:
            self.go(pc, phases, lanes)

    def recheck(self) -> None:
        """Checks phases with waiting lanes after threads have exited: they may be complete without them."""
        for cluster in {int(lanes.index[0]) // self.per for _, lanes in self.waiting}:
            self.check(cluster)

    def stuck(self) -> list[Stuck]:
        out = []
        for pc, lanes in self.waiting:
            cluster = int(lanes.index[0]) // self.per
            missing = self.wave.lanes(np.flatnonzero(self.missing(cluster)) + cluster * self.per)
            what = f"at the barrier of the cluster, at which {crowd(missing)} have not arrived"
            out.append(Stuck(self.code.instructions[pc], lanes, what))
        return out
