"""Barriers of blocks (bar.sync, bar.arrive, bar.red) and of warps (bar.warp.sync).

PTX ISA, "Parallel Synchronization and Communication: bar, barrier". A barrier of the whole block completes when all
threads of the block that have not exited have arrived, as the hardware does since sm_70. One with a thread count
completes when that many threads have: a warp counts 32 each time that all its living lanes have arrived, twice if it
arrives (bar.arrive) and then waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..decode.registry import Arg, Barrier
from ..order.order import Released
from ..report.findings import Stuck
from ..state.fpenv import ENVIRONMENT, KEEP
from ..state.lanes import WARP, Lanes
from ..text.types import Array
from .host import Host


@dataclass
class Arrival:
    """Lanes of one block that came to a barrier at `pc`; `values` are their predicates for bar.red."""

    pc: int
    lanes: Lanes
    waits: bool
    values: Array | None
    released: Released | None = None


@dataclass
class Pending:
    """A barrier of a block that is not complete. `expected` threads, 0 for all that live."""

    expected: int
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass
class Meeting:
    """Threads that wait for all others of their blocks at one barrier: how many of each block of the wave, and who where."""

    arrived: Array
    groups: list[tuple[int, Lanes]] = field(default_factory=list)


class Barriers:
    """The sixteen barriers of each block of a wave.

    `meetings`: by number, those at which nobody does anything but wait for the whole block; `pending`: by block and number,
    those with a thread count or a reduction.
    """

    def __init__(self, machine: Host):
        self.machine = machine
        self.pending: dict[tuple[int, int], Pending] = {}
        self.meetings: dict[int, Meeting] = {}
        self.completed = np.zeros(machine.wave.blocks, np.int64)

    def __bool__(self) -> bool:
        return bool(self.meetings) or any(a.waits for p in self.pending.values() for a in p.arrivals)

    def arrive(self, pc: int, lanes: Lanes) -> None:
        machine = self.machine
        plan = machine.code.plans[pc]
        control = plan.control
        assert isinstance(control, Barrier)
        number = machine.read(lanes, plan.reads[0])
        same = lanes.n == 1 or not np.count_nonzero(number != number[0])
        if same and not control.counted and control.waits and not control.reduction:
            if not self.pending:
                self.meet(pc, lanes, int(number[0]))
                return
            blocks = [block for block, barrier in self.pending if barrier == number[0]]
            here = np.isin(lanes.block, blocks)
            if not here.all():
                self.meet(pc, lanes.subset(np.flatnonzero(~here)), int(number[0]))
            if not here.any():
                return
            lanes = lanes.subset(np.flatnonzero(here))
        for barrier in np.unique(number).tolist():
            self.tell_apart(barrier, lanes.block_ids)
        expected = machine.read(lanes, plan.reads[1]).copy() if control.counted else np.zeros(lanes.n, np.int64)
        values = None
        if control.reduction:
            values = machine.read(lanes, plan.reads[-1]).copy()
            values = ~values if control.negated else values
        number = number.copy()[: lanes.n]
        for block in lanes.block_ids:
            for barrier in np.unique(number[lanes.block == block]):
                at = np.flatnonzero((lanes.block == block) & (number == barrier))
                part = lanes.subset(at)
                pending = self.pending.setdefault((int(block), int(barrier)), Pending(int(expected[at[0]])))
                arrival = Arrival(pc, part, control.waits, None if values is None else values[at])
                if machine.memory.races is not None:
                    arrival.released = machine.memory.races.arrive(part)
                pending.arrivals.append(arrival)
                if not control.waits:
                    machine.push(pc + 1, part)
                self.check(int(block), int(barrier))

    def meet(self, pc: int, lanes: Lanes, barrier: int) -> None:
        """Lanes come to a barrier at which they wait for all of their blocks."""
        meeting = self.meetings.get(barrier)
        if meeting is None:
            if lanes.whole_blocks:
                self.release(lanes.block_ids, [(pc, lanes)])
                return
            meeting = self.meetings[barrier] = Meeting(np.zeros(self.machine.wave.blocks, np.int64))
        meeting.arrived += np.bincount(lanes.block, minlength=len(meeting.arrived))
        meeting.groups.append((pc, lanes))
        self.recheck_meeting(barrier, lanes.block_ids)

    def recheck_meeting(self, barrier: int, blocks: Array) -> None:
        """Let those of `blocks` go on of which all threads that live have come."""
        meeting = self.meetings[barrier]
        here = meeting.arrived[blocks]
        done = blocks[(here > 0) & (here >= self.machine.wave.alive_by_block[blocks])]
        if len(done):
            self.release(done, self.taken(barrier, done))

    def taken(self, barrier: int, blocks: Array) -> list[tuple[int, Lanes]]:
        """Who waits at a barrier in these blocks, and no longer does."""
        meeting = self.meetings[barrier]
        out, kept = [], []
        chosen = np.zeros(len(meeting.arrived), np.bool_)
        chosen[blocks] = True
        for pc, lanes in meeting.groups:
            mine = chosen[lanes.block]
            if mine.any():
                out.append((pc, lanes if mine.all() else lanes.subset(np.flatnonzero(mine))))
            if not mine.all():
                kept.append((pc, lanes.subset(np.flatnonzero(~mine)) if mine.any() else lanes))
        meeting.arrived[blocks], meeting.groups = 0, kept
        if not kept:
            del self.meetings[barrier]
        return out

    def release(self, blocks: Array, groups: list[tuple[int, Lanes]]) -> None:
        """All of these blocks have met: their threads go on."""
        if self.machine.memory.races is not None:
            self.machine.memory.races.block_barrier(blocks)
        left = set(blocks.tolist())
        for pc, lanes in groups:
            for block in lanes.block_ids.tolist():
                if block in left:
                    left.remove(block)
                    self.complete(block, pc, lanes)
            self.machine.push(pc + 1, lanes)

    def tell_apart(self, barrier: int, blocks: Array) -> None:
        """What waits at a barrier in these blocks becomes arrivals, each at its own block's."""
        if barrier not in self.meetings:
            return
        races = self.machine.memory.races
        for pc, lanes in self.taken(barrier, blocks):
            for block in lanes.block_ids.tolist():
                part = lanes.subset(np.flatnonzero(lanes.block == block))
                arrival = Arrival(pc, part, True, None, None if races is None else races.arrive(part))
                self.pending.setdefault((block, barrier), Pending(0)).arrivals.append(arrival)

    def recheck(self) -> None:
        """Threads have exited: barriers may be complete without them."""
        for barrier in list(self.meetings):
            self.recheck_meeting(barrier, np.flatnonzero(self.meetings[barrier].arrived))
        for block, barrier in list(self.pending):
            self.check(block, barrier)

    def arrived(self, block: int, pending: Pending) -> int:
        """Threads that count as arrived at a barrier with a thread count: 32 each time that a warp arrives, be it the same one."""
        wave = self.machine.wave
        first = block * wave.lanes_per_block
        times = np.zeros(wave.lanes_per_block, np.int64)
        for arrival in pending.arrivals:
            times[arrival.lanes.index - first] += 1
        by_warp, alive = times.reshape(-1, WARP), wave.alive[first : first + wave.lanes_per_block].reshape(-1, WARP)
        living = np.where(alive, by_warp, len(pending.arrivals)).min(axis=1)
        return WARP * int(np.where(alive.any(axis=1), living, by_warp.max(axis=1)).sum())

    def check(self, block: int, barrier: int) -> None:
        pending = self.pending[block, barrier]
        if pending.expected:
            done = self.arrived(block, pending) >= pending.expected
        else:
            done = sum(a.lanes.n for a in pending.arrivals) >= self.machine.wave.alive_by_block[block]
        if done:
            del self.pending[block, barrier]
            waiting = [a for a in pending.arrivals if a.waits]
            self.reduce(pending)
            self.order(block, pending, waiting)
            if waiting:
                self.complete(block, waiting[0].pc, waiting[0].lanes)
            for arrival in waiting:
                self.machine.push(arrival.pc + 1, arrival.lanes)

    def order(self, block: int, pending: Pending, waiting: list[Arrival]) -> None:
        """Who waited is behind what everybody did before arriving."""
        races = self.machine.memory.races
        if races is None:
            return
        if not pending.expected and len(waiting) == len(pending.arrivals):
            races.block_barrier(np.array([block]))
            return
        released = [a.released for a in pending.arrivals if a.released is not None]
        for arrival in waiting:
            races.depart(arrival.lanes, released)

    def reduce(self, pending: Pending) -> None:
        """bar.red: every waiting lane gets the reduction over all arrived ones."""
        values = [a.values for a in pending.arrivals if a.values is not None]
        if not values:
            return
        everyone = np.concatenate(values)
        machine = self.machine
        for arrival in pending.arrivals:
            plan = machine.code.plans[arrival.pc]
            assert isinstance(plan.control, Barrier)
            result: object = {"popc": everyone.sum(), "and": everyone.all(), "or": everyone.any()}[plan.control.reduction]
            # Straight into the registers of the wave: no frame may hold these lanes meanwhile.
            machine.deactivate()
            target: Arg = plan.writes[0]
            machine.full.array(target)[arrival.lanes.index] = result
            machine.rewritten(-1)

    def complete(self, block: int, pc: int, lanes: Lanes) -> None:
        machine = self.machine
        machine.memory.tally.barriers += 1
        control = machine.code.plans[pc].control
        alive = int(machine.wave.alive_by_block[block])
        if isinstance(control, Barrier) and not control.counted and alive < machine.wave.threads:
            first = int(np.flatnonzero(lanes.block == block)[0])
            missing = machine.wave.threads - alive
            message = f"{missing} of {machine.wave.threads} threads of the block had exited before this barrier"
            machine.memory.findings.report("partial barrier", message, machine.code.instructions[pc], lanes, first)
        self.completed[block] += 1
        if machine.on_barrier is not None:
            # The callback is not part of the kernel: it computes in the ordinary floating-point environment.
            ENVIRONMENT.setter(KEEP)()
            machine.on_barrier(machine.wave.number(machine.wave.first_block + block), int(self.completed[block]))
            ENVIRONMENT.setter(machine.code.base_mode)()

    def stuck(self) -> list[Stuck]:
        machine, out = self.machine, []
        for barrier in list(self.meetings):
            self.tell_apart(barrier, np.arange(machine.wave.blocks))
        for (block, barrier), pending in self.pending.items():
            for arrival in pending.arrivals:
                if not arrival.waits:
                    continue
                alive = int(machine.wave.alive_by_block[block])
                here = sum(a.lanes.n for a in pending.arrivals)
                what = (
                    f"at barrier {barrier}: {here} of {pending.expected or alive} have arrived, "
                    f"{alive} of {machine.wave.threads} threads of the block are alive"
                )
                out.append(Stuck(machine.code.instructions[arrival.pc], arrival.lanes, what))
        return out


class WarpBarriers:
    """bar.warp.sync: lanes with the same member mask meet, at whatever instruction they are."""

    def __init__(self, machine: Host):
        self.machine = machine
        self.waiting: dict[tuple[int, int], list[tuple[int, Lanes]]] = {}

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def arrive(self, pc: int, lanes: Lanes) -> None:
        races = self.machine.memory.races
        mask = self.machine.read(lanes, self.machine.code.plans[pc].reads[0])
        if lanes.converged and (races is None or not np.count_nonzero(mask != 0xFFFFFFFF)):
            if races is not None:
                races.warp_sync(lanes.warp_ids)
            self.machine.push(pc + 1, lanes)
            return
        mask = mask.copy()
        for warp in lanes.warp_ids:
            for value in np.unique(mask[lanes.warp == warp]):
                part = lanes.subset(np.flatnonzero((lanes.warp == warp) & (mask == value)))
                self.waiting.setdefault((int(warp), int(value)), []).append((pc, part))
                self.check(int(warp), int(value))

    def recheck(self) -> None:
        for warp, mask in list(self.waiting):
            self.check(warp, mask)

    def check(self, warp: int, mask: int) -> None:
        alive = self.machine.wave.alive[warp * WARP : (warp + 1) * WARP]
        here = np.zeros(WARP, np.bool_)
        for _, lanes in self.waiting[warp, mask]:
            here[lanes.lane] = True
        named = np.array([mask >> lane & 1 for lane in range(WARP)], np.bool_)
        if not (named & alive & ~here).any():
            races = self.machine.memory.races
            if races is not None and (named | ~alive).all():
                races.warp_sync(np.array([warp]))
            elif races is not None:
                races.lanes_sync(warp, mask)
            for pc, lanes in self.waiting.pop((warp, mask)):
                self.machine.push(pc + 1, lanes)

    def stuck(self) -> list[Stuck]:
        return [
            Stuck(self.machine.code.instructions[pc], lanes, f"in bar.warp.sync for the lanes of mask {mask:#010x}")
            for (_, mask), groups in self.waiting.items()
            for pc, lanes in groups
        ]
