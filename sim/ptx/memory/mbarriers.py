"""mbarrier objects: barriers in shared memory with phases, counts of arrivals and bytes of asynchronous copies.

PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". An object counts down the arrivals and the
bytes that its phase waits for; when both are zero the phase completes and the next one begins. The machine keeps the
counts beside the memory: the ISA says that the 64 bits of an object are opaque.

A thread that waits is put aside until the phase completes. Where only test_wait could go on, it answers "not yet".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cupyflash.words import plural

from ..order.shadow import BLOCK, CLUSTER
from ..state.findings import ERROR, WARNING, Stuck, Verdict
from ..state.lane_sets import LaneSet, by_value, merged
from ..state.segments import WRITTEN
from ..text.syntax import Array, PtxInstruction
from .ports import PORTS, element
from .spaces import LaunchMemory, MemoryUnit

MOST = (1 << 20) - 1
"""Arrivals, and bytes, that a phase can wait for (PTX ISA, "mbarrier", "Contents of the mbarrier object")."""

PATIENCE = 100
"""Most refusals of test_wait to everybody, with nothing else happening to an mbarrier, before that is a deadlock."""


@dataclass
class Deferred:
    """An asynchronous copy's effect on a phase when it lands: `run` applies it."""

    lanes: LaneSet
    run: Callable[[], None]


@dataclass
class Phases:
    """One mbarrier object. `phase` counts completed phases; `heard`: the clock that their arrivals released, `told`: this one's."""

    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0
    told: Array | None = None
    heard: Array | None = None
    deferred: list[Deferred] = field(default_factory=list)
    unseen: list[tuple[int, int, Array]] = field(default_factory=list)
    """(phase, size, elements of that size of shared memory) of copies that are over, though nobody has seen the phase complete."""


@dataclass(frozen=True)
class PhaseWaiting:
    """A test_wait or, `blocking`, a try_wait: at the objects at these addresses for the wanted state or `parity`."""

    pc: int
    instruction: PtxInstruction
    space: str
    parity: bool
    blocking: bool


@dataclass
class Waiter:
    """Lanes that wait for one object, until its phase is not `value`: a state, or its parity."""

    wait: PhaseWaiting
    lanes: LaneSet
    key: int
    value: int


@dataclass(frozen=True)
class Arrivals:
    """Lanes that arrive `counts` times each at the objects `keys`: those in a row at one object from `starts` on, `sums` in all."""

    lanes: LaneSet
    keys: Array
    counts: Array
    starts: Array
    sums: Array


@dataclass(frozen=True)
class Relaxed:
    """Lanes whose relaxed wait has seen `phase` phases complete, and the clock that their arrivals handed on, heard at a fence."""

    lanes: LaneSet
    barrier: Phases
    phase: int
    heard: Array | None


Answer = tuple[PhaseWaiting, LaneSet, bool]
"""Lanes, and the answer to their wait: True if the phase is complete."""


class MBarriers(MemoryUnit):
    """The mbarrier objects of a wave, by index of their 8 bytes in its shared memory."""

    def __init__(self, memory: LaunchMemory):
        super().__init__(memory)
        self.objects: dict[int, Phases] = {}
        self.waiting: dict[int, list[Waiter]] = {}
        """Waiters by object."""
        self.answers: list[tuple[Waiter, Phases | None, bool]] = []
        """Answers that the run loop fetches between two steps: within a step registers of lanes may be in several frames."""
        self.relaxed: list[Relaxed] = []
        """Waits that order nothing until their lanes fence."""
        self.refusals = 0
        self.unfenced: dict[int, int] = {}
        """Objects whose initialisation no fence has made visible to asynchronous copies, and when that was."""

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def init(self, lanes: LaneSet, keys: Array, counts: Array, i: PtxInstruction) -> None:
        wrong = np.flatnonzero((counts < 1) | (counts > MOST))
        if len(wrong):
            message = f"mbarrier for {plural(int(counts[wrong[0]]), 'arrival')}; it counts 1 to {MOST}"
            self.findings.report("bad arrival", message, i, lanes, wrong)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            self.objects[key] = Phases(count, count)
            self.unfenced[key] = 0 if self.races is None else self.races.now

    def fence(self, lanes: LaneSet) -> None:
        """Runs fence.mbarrier_init, or fence.proxy.async, for threads of these blocks."""
        if self.unfenced:
            per, blocks = self.memory.shared_stride >> 3, set(lanes.block_ids.tolist())
            self.unfenced = {key: moment for key, moment in self.unfenced.items() if key // per not in blocks}

    def used_by_copy(self, keys: Array, lanes: LaneSet, row: Array, i: PtxInstruction) -> None:
        """Checks that asynchronous copies of lanes `row` may arrive at these objects.

        For plain bytes a barrier of the block counts as a fence, too: NVIDIA's cuda::memcpy_async relies on that.
        """
        at = [k for k, key in enumerate(keys.tolist()) if key in self.unfenced] if self.unfenced else []
        races, per = self.races, self.memory.shared_stride >> 3
        if at and "tensor" not in i.mods:
            at = [k for k in at if races is not None and races.base[int(keys[k]) // per] < self.unfenced[int(keys[k])]]
        if at:
            # A barrier of the block suffices on every known chip, and some compilers emit nothing else.
            met = races is not None and all(
                key // per == block and races.base[block] >= self.unfenced[key]
                for key, block in zip(keys[at].tolist(), lanes.block[row[at]].tolist(), strict=True)
            )
            what = f"the mbarrier at {self.name(int(keys[at[0]]))} is used by {i.name}"
            message = f"{what}, but no fence.mbarrier_init (or fence.proxy.async) is behind its mbarrier.init"
            mend = "fence.mbarrier_init behind mbarrier.init, by the thread that made it"
            verdict = Verdict("proxy", WARNING if met else ERROR, mend=mend)
            self.findings.report(verdict, message, i, lanes, row[at])

    def invalidate(self, lanes: LaneSet, keys: Array, i: PtxInstruction) -> None:
        for key, at in self.each(keys):
            if self.find(key, lanes.subset(at), i) is not None:
                del self.objects[key]

    def find(self, key: int, lanes: LaneSet, i: PtxInstruction) -> Phases | None:
        found = self.objects.get(key)
        if found is None:
            self.findings.report("uninitialised", "mbarrier that nobody has initialised", i, lanes)
        return found

    def each(self, keys: Array) -> list[tuple[int, Array]]:
        """Returns (object, positions of its lanes) for each object."""
        starts = runs(keys)
        if starts is None:
            return list(by_value(keys))
        return [(int(keys[a]), np.arange(a, b)) for a, b in pairwise([*starts.tolist(), len(keys)])]

    # -- arrivals ---------------------------------------------------------------------------------------------------------

    def arrive(self, lanes: LaneSet, keys: Array, counts: Array, drop: bool, i: PtxInstruction) -> Array:
        """Makes each lane arrive `counts` times; returns the states before, phase << 32 | pending. `drop`: for all later phases."""
        starts = runs(keys)
        if starts is not None and "relaxed" not in i.mods:
            sums = np.add.reduceat(counts, starts)
            found = [self.objects.get(key) for key in keys[starts].tolist()]
            if all(barrier is not None and count <= barrier.pending for barrier, count in zip(found, sums.tolist(), strict=True)):
                barriers = [barrier for barrier in found if barrier is not None]
                return self.arrive_at(barriers, Arrivals(lanes, keys, counts, starts, sums), drop)
        states = np.zeros(lanes.n, np.uint64)
        for key, at in self.each(keys):
            barrier = self.find(key, lanes.subset(at), i)
            if barrier is None:
                continue
            # All at once, unless the phase completes in between.
            together = int(counts[at].sum()) <= barrier.pending
            for some in [at] if together else at.reshape(-1, 1):
                count = int(counts[some].sum())
                if count > barrier.pending:
                    message = f"{plural(count, 'arrival')} at an mbarrier whose phase waits for {barrier.pending}"
                    self.findings.report("bad arrival", message, i, lanes, some)
                    continue
                before = barrier.pending - np.concatenate(([0], np.cumsum(counts[some])[:-1])).astype(np.int64)
                states[some] = (barrier.phase << 32) + before
                if drop:
                    barrier.expected -= count
                self.arrived(key, barrier, self.told(lanes.subset(some), key, i), count)
        return states

    def told(self, lanes: LaneSet, key: int, i: PtxInstruction) -> Array | None:
        """Returns the clock that an arrival of lanes of one cluster hands on: if relaxed, only their fences and their begin."""
        races = self.races
        if races is None or "relaxed" not in i.mods:
            return None if races is None else races.released(races.groups(lanes))[0]
        near = (lanes.block_ids == key // (self.memory.shared_stride >> 3)).all()
        told = races.fenced(lanes, BLOCK if near else CLUSTER)
        mine = lanes.index % races.per
        told[mine] = np.maximum(told[mine], races.start)
        return told

    def arrive_at(self, barriers: list[Phases], many: Arrivals, drop: bool) -> Array:
        """Makes arrivals at several objects, of which each completes one phase at most: they release together."""
        lanes, starts, sums, races = many.lanes, many.starts, many.sums, self.races
        sizes = np.diff(starts, append=lanes.n)
        earlier = np.cumsum(many.counts) - many.counts
        pending = np.array([barrier.pending for barrier in barriers]) + earlier[starts]
        phase = np.array([barrier.phase << 32 for barrier in barriers])
        states = np.repeat(phase + pending, sizes) - earlier
        told = None if races is None else races.released(races.groups(lanes, starts))
        for k, (key, barrier, count) in enumerate(zip(many.keys[starts].tolist(), barriers, sums.tolist(), strict=True)):
            if drop:
                barrier.expected -= count
            self.arrived(key, barrier, None if told is None else told[k], count)
        return states.astype(np.uint64)

    def must_stay(self, lanes: LaneSet, keys: Array, counts: Array, i: PtxInstruction) -> None:
        """Checks arrivals that must not complete a phase (.noComplete)."""
        for key, at in self.each(keys):
            barrier = self.objects.get(key)
            if barrier is not None and int(counts[at].sum()) >= barrier.pending:
                message = (
                    f".noComplete at the mbarrier at {self.name(key)}, whose phase waits for {plural(barrier.pending, 'arrival')}"
                )
                self.findings.report("bad arrival", message, i, lanes, at)

    def arrived(self, key: int, barrier: Phases, told: Array | None, count: int) -> None:
        """Counts `count` arrivals, and keeps the clock that they hand on."""
        if told is not None:
            barrier.told = told if barrier.told is None else np.maximum(barrier.told, told)
        self.refusals = 0
        barrier.pending -= count
        self.check(key, barrier)

    def expect(self, lanes: LaneSet, keys: Array, amounts: Array, i: PtxInstruction) -> None:
        """Makes the phase wait for so many more bytes (complete_tx: negative ones)."""
        for key, at in self.each(keys):
            barrier = self.find(key, lanes.subset(at), i)
            if barrier is not None:
                self.refusals = 0
                barrier.transactions += int(amounts[at].sum())
                if abs(barrier.transactions) > MOST:
                    message = f"the mbarrier at {self.name(key)} would count {plural(barrier.transactions, 'byte')}, at most {MOST}"
                    self.findings.report("bad arrival", message, i, lanes, at)
                self.check(key, barrier)

    def brought(self, key: int, size: int, lane: LaneSet, i: PtxInstruction) -> None:
        """Records that a copy of this lane has brought its bytes."""
        barrier = self.find(key, lane, i)
        if barrier is not None:
            self.refusals = 0
            barrier.transactions -= size
            self.check(key, barrier)

    def check(self, key: int, barrier: Phases) -> None:
        if barrier.pending or barrier.transactions:
            return
        barrier.phase += 1
        barrier.pending = barrier.expected
        if barrier.told is not None:
            barrier.heard = barrier.told if barrier.heard is None else np.maximum(barrier.heard, barrier.told)
            barrier.told = None
        self.answers += [(waiter, barrier, True) for waiter in self.waiting.pop(key, ())]

    # -- asynchronous copies ----------------------------------------------------------------------------------------------

    def defer(self, lanes: LaneSet, key: int, run: Callable[[], None], i: PtxInstruction) -> None:
        """Runs `run` on this object at some later time, at the latest when somebody waits for it."""
        barrier = self.find(key, lanes, i)
        if barrier is not None:
            barrier.deferred.append(Deferred(lanes, run))
            if key in self.waiting:
                self.land(barrier)

    def land(self, barrier: Phases) -> None:
        while barrier.deferred:
            barrier.deferred.pop(0).run()

    def stir(self, random: np.random.Generator) -> None:
        for barrier in list(self.objects.values()):
            if barrier.deferred and random.random() < 0.25:
                barrier.deferred.pop(0).run()

    def leave(self, lanes: LaneSet) -> None:
        """Ends the threads: their copies on the way land."""
        for barrier in list(self.objects.values()):
            mine = [d for d in barrier.deferred if np.isin(d.lanes.index, lanes.index).any()]
            for one in mine:
                barrier.deferred.remove(one)
                one.run()

    # -- waits --------------------------------------------------------------------------------------------------------------

    def wait(self, wait: PhaseWaiting, lanes: LaneSet, addresses: Array, wanted: Array) -> None:
        """Makes lanes wait at these addresses, for the states or parities `wanted`."""
        port = PORTS[wait.space](self.memory, wait.instruction, lanes.n, 8, "atom")
        left = np.ones(lanes.n, bool)
        for _, index, positions in port.resolve(lanes, addresses):
            where = np.arange(lanes.n) if positions is None else positions
            remote = index.astype(np.int64) * 8 // self.memory.shared_stride != lanes.block[where]
            if remote.any():
                message = "wait for an mbarrier of another block: a thread can only wait for its own block's"
                self.findings.report("out of bounds", message, wait.instruction, lanes, where[remote])
            left[where] = False
            keys, values = index.astype(np.int64), wanted[where]
            # Contiguous lanes that wait for the same phase.
            ends = np.flatnonzero((keys[1:] != keys[:-1]) | (values[1:] != values[:-1])) + 1
            for a, b in pairwise([0, *ends.tolist(), len(keys)]):
                self.look(Waiter(wait, lanes.subset(where[a:b]), int(keys[a]), int(values[a])))
        if left.any():
            self.answers.append((Waiter(wait, lanes.subset(np.flatnonzero(left)), -1, 0), None, True))

    def look(self, waiter: Waiter) -> None:
        barrier, value = self.find(waiter.key, waiter.lanes, waiter.wait.instruction), waiter.value

        def complete() -> bool:
            return barrier is None or (barrier.phase & 1 != value & 1 if waiter.wait.parity else barrier.phase != value >> 32)

        if not complete() and barrier is not None:
            self.land(barrier)
        if complete():
            self.answers.append((waiter, barrier, True))
        else:
            self.waiting.setdefault(waiter.key, []).append(waiter)

    def answer(self) -> list[Answer]:
        """Returns the lanes that go on, with their answers; they have then heard what the phase's arrivals released."""
        races = self.races
        answers, self.answers = self.answers, []
        # Lanes that hear the same are one group: moments of whole warps take a row, of others one a lane.
        news: dict[int, tuple[list[LaneSet], Array]] = {}
        groups: dict[tuple[int, bool], tuple[PhaseWaiting, list[LaneSet]]] = {}
        for waiter, barrier, done in answers:
            groups.setdefault((waiter.wait.pc, done), (waiter.wait, []))[1].append(waiter.lanes)
            if not done or barrier is None:
                continue
            heard = barrier.heard
            if "relaxed" not in waiter.wait.instruction.mods:
                self.see(barrier, barrier.phase)
            else:
                self.relaxed.append(Relaxed(waiter.lanes, barrier, barrier.phase, heard))
                # The begin of the arrived lanes is known even if nothing is ordered.
                heard = None if heard is None or races is None else np.minimum(heard, races.start)
            if heard is not None:
                news.setdefault(id(heard), ([], heard))[0].append(waiter.lanes)
        if races is not None and news:
            sets = tuple(some[0] if len(some) == 1 else merged(some) for some, _ in news.values())
            races.hear(races.joined(sets), np.stack([told for _, told in news.values()]))
        return [(wait, merged(some), done) for (_, done), (wait, some) in groups.items()]

    def acquire(self, lanes: LaneSet) -> None:
        """Makes lanes that fence hear what the arrivals handed on of phases that they saw complete by relaxed waits."""
        pending, self.relaxed = self.relaxed, []
        for one in pending:
            here = np.isin(one.lanes.index, lanes.index)
            if here.any():
                self.see(one.barrier, one.phase)
                if self.races is not None and one.heard is not None:
                    self.races.hear(self.races.groups(one.lanes.subset(np.flatnonzero(here))), one.heard[None])
            if not here.all():
                self.relaxed.append(Relaxed(one.lanes.subset(np.flatnonzero(~here)), one.barrier, one.phase, one.heard))

    def see(self, barrier: Phases, now: int) -> None:
        """Records that somebody has seen all phases before `now` complete: the bytes of their copies are there."""
        over = [(size, elements) for phase, size, elements in barrier.unseen if phase < now]
        if over:
            barrier.unseen = [one for one in barrier.unseen if one[0] >= now]
            self.memory.landing -= len(over)
            for size, elements in over:
                self.memory.states[size][elements] = element(WRITTEN, size)

    def give_up(self) -> bool:
        """Tells lanes that only test, when no lane can go on, that the phase is not complete. Returns False if there are none."""
        if self.refusals >= PATIENCE:
            return False
        self.refusals += 1
        every = [w for waiters in self.waiting.values() for w in waiters]
        self.answers += [(w, None, False) for w in every if not w.wait.blocking]
        self.waiting = {}
        for waiter in every:
            if waiter.wait.blocking:
                self.waiting.setdefault(waiter.key, []).append(waiter)
        return bool(self.answers)

    def stuck(self) -> list[Stuck]:
        out = []
        for waiter in (w for waiters in self.waiting.values() for w in waiters):
            barrier, lanes = self.objects[waiter.key], waiter.lanes
            number = plural(abs(barrier.transactions), "byte")
            state = f"{plural(barrier.pending, 'arrival')} and {number if barrier.transactions >= 0 else f'has {number} too many'}"
            parity = f" (parity {barrier.phase & 1})" if waiter.wait.parity else ""
            what = f"for phase {barrier.phase}{parity} of the mbarrier at {self.name(waiter.key)} that lacks {state}"
            out.append(Stuck(waiter.wait.instruction, lanes, what))
        return out

    def name(self, key: int) -> str:
        """Returns the place of an object: its offset, and the variable there."""
        return self.memory.shared_name(key * 8 % self.memory.shared_stride)


def runs(keys: Array) -> Array | None:
    """Returns the start of each object's lanes if they are contiguous and in the order of the objects, as they are most often."""
    steps = keys[1:] - keys[:-1]
    return None if (steps < 0).any() else np.concatenate(([0], np.flatnonzero(steps) + 1))
