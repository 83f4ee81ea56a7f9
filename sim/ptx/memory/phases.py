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

from ..report.findings import Stuck
from ..state.lanes import Lanes
from ..state.segments import WRITTEN
from ..text.syntax import Instruction
from ..text.types import Array
from .memory import Memory
from .ports import PORTS, element

MOST = (1 << 20) - 1
"""Arrivals, and bytes, that a phase can wait for (PTX ISA, "mbarrier", "Contents of the mbarrier object")."""

PATIENCE = 100
"""How often test_wait may say "not yet" to everybody, with nothing else happening to an mbarrier, before that is a deadlock."""


@dataclass
class Deferred:
    """What an asynchronous copy brings to a phase when it lands: `run` does it."""

    lanes: Lanes
    run: Callable[[], None]


@dataclass
class Phases:
    """One mbarrier object. `phase` counts completed phases; `heard` is what their arrivals released, `told` those of this one."""

    expected: int
    pending: int
    transactions: int = 0
    phase: int = 0
    told: Array | None = None
    heard: Array | None = None
    deferred: list[Deferred] = field(default_factory=list)
    unseen: list[tuple[int, Array]] = field(default_factory=list)
    """(phase, 16-byte elements of shared memory) of copies that are over, though nobody has seen the phase complete."""


@dataclass(frozen=True)
class Wait:
    """A test_wait or, `blocking`, a try_wait: at the objects at these addresses for the state or `parity` that is wanted."""

    pc: int
    instruction: Instruction
    space: str
    parity: bool
    blocking: bool


@dataclass
class Waiter:
    """Lanes that wait for one object, until its phase is not `value`: a state, or its parity."""

    wait: Wait
    lanes: Lanes
    key: int
    value: int


Answer = tuple[Wait, Lanes, bool]
"""Lanes that are told at their wait whether the phase is complete."""


class MBarriers:
    """The mbarrier objects of a wave, by index of their 8 bytes in its shared memory."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.objects: dict[int, Phases] = {}
        self.waiting: list[Waiter] = []
        self.answers: list[tuple[Waiter, Phases | None, bool]] = []
        """What the run loop will fetch between two steps: within one the registers of lanes are somewhere on the way."""
        self.refusals = 0
        self.unfenced: dict[int, int] = {}
        """Objects whose initialisation no fence has made visible to asynchronous copies, and when that was."""

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def init(self, lanes: Lanes, keys: Array, counts: Array, i: Instruction) -> None:
        wrong = np.flatnonzero((counts < 1) | (counts > MOST))
        if len(wrong):
            message = f"mbarrier for {plural(int(counts[wrong[0]]), 'arrival')}; it counts 1 to {MOST}"
            self.memory.findings.report("bad arrival", message, i, lanes, int(wrong[0]), count=len(wrong))
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            self.objects[key] = Phases(count, count)
            self.unfenced[key] = 0 if self.memory.races is None else self.memory.races.now

    def fence(self, lanes: Lanes) -> None:
        """fence.mbarrier_init, or fence.proxy.async, by threads of these blocks."""
        if self.unfenced:
            per, blocks = self.memory.shared_stride >> 3, set(lanes.block_ids.tolist())
            self.unfenced = {key: moment for key, moment in self.unfenced.items() if key // per not in blocks}

    def used_by_copy(self, keys: Array, lanes: Lanes, row: Array, i: Instruction) -> None:
        """Asynchronous copies of lanes `row` are to arrive at these objects.

        For plain bytes a barrier of the block is taken to do as well as a fence: NVIDIA's cuda::memcpy_async relies on that.
        """
        at = [k for k, key in enumerate(keys.tolist()) if key in self.unfenced] if self.unfenced else []
        races, per = self.memory.races, self.memory.shared_stride >> 3
        if at and "tensor" not in i.mods:
            at = [k for k in at if races is not None and races.base[int(keys[k]) // per] < self.unfenced[int(keys[k])]]
        if at:
            what = f"the mbarrier at {self.name(int(keys[at[0]]))} is used by an asynchronous copy"
            message = f"{what}, but no fence.mbarrier_init (or fence.proxy.async) is behind its mbarrier.init"
            self.memory.findings.report("proxy", message, i, lanes, int(row[at[0]]), count=len(at))

    def invalidate(self, keys: Array) -> None:
        for key in keys.tolist():
            self.objects.pop(key, None)

    def find(self, key: int, lanes: Lanes, i: Instruction) -> Phases | None:
        found = self.objects.get(key)
        if found is None:
            self.memory.findings.report("uninitialised", "mbarrier that nobody has initialised", i, lanes, 0, count=lanes.n)
        return found

    def each(self, keys: Array) -> list[tuple[int, Array]]:
        """(object, positions of its lanes)."""
        steps = keys[1:] - keys[:-1]
        if (steps < 0).any():
            return [(key, np.flatnonzero(keys == key)) for key in np.unique(keys).tolist()]
        # Most often the lanes of a block are at one object, and blocks in their order.
        bounds = [0, *(np.flatnonzero(steps) + 1).tolist(), len(keys)]
        return [(int(keys[a]), np.arange(a, b)) for a, b in pairwise(bounds)]

    # -- arrivals ---------------------------------------------------------------------------------------------------------

    def arrive(self, lanes: Lanes, keys: Array, counts: Array, drop: bool, i: Instruction) -> Array:
        """Each lane arrives `counts` times; the states before, phase << 32 | pending. With `drop` for all phases to come."""
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
                    self.memory.findings.report("bad arrival", message, i, lanes, int(some[0]), count=len(some))
                    continue
                before = barrier.pending - np.concatenate(([0], np.cumsum(counts[some])[:-1])).astype(np.int64)
                states[some] = (barrier.phase << 32) + before
                if drop:
                    barrier.expected -= count
                self.arrived(key, barrier, lanes.subset(some), count)
        return states

    def must_stay(self, lanes: Lanes, keys: Array, counts: Array, i: Instruction) -> None:
        """Arrivals that say they complete no phase (.noComplete)."""
        for key, at in self.each(keys):
            barrier = self.objects.get(key)
            if barrier is not None and int(counts[at].sum()) >= barrier.pending:
                message = (
                    f".noComplete at the mbarrier at {self.name(key)}, whose phase waits for {plural(barrier.pending, 'arrival')}"
                )
                self.memory.findings.report("bad arrival", message, i, lanes, int(at[0]), count=len(at))

    def arrived(self, key: int, barrier: Phases, lanes: Lanes, count: int) -> None:
        races = self.memory.races
        if races is not None:
            told = races.heard.released(lanes)
            barrier.told = told if barrier.told is None else np.maximum(barrier.told, told)
        self.refusals = 0
        barrier.pending -= count
        self.check(key, barrier)

    def expect(self, lanes: Lanes, keys: Array, amounts: Array, i: Instruction) -> None:
        """The phase waits for so many more bytes (complete_tx: negative ones)."""
        for key, at in self.each(keys):
            barrier = self.find(key, lanes.subset(at), i)
            if barrier is not None:
                self.refusals = 0
                barrier.transactions += int(amounts[at].sum())
                if abs(barrier.transactions) > MOST:
                    message = f"the mbarrier at {self.name(key)} would count {plural(barrier.transactions, 'byte')}, at most {MOST}"
                    self.memory.findings.report("bad arrival", message, i, lanes, int(at[0]), count=len(at))
                self.check(key, barrier)

    def brought(self, key: int, size: int, lane: Lanes, i: Instruction) -> None:
        """A copy of this lane has brought its bytes."""
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
        ready, self.waiting = [w for w in self.waiting if w.key == key], [w for w in self.waiting if w.key != key]
        self.answers += [(waiter, barrier, True) for waiter in ready]

    # -- asynchronous copies ----------------------------------------------------------------------------------------------

    def defer(self, lanes: Lanes, key: int, run: Callable[[], None], i: Instruction) -> None:
        """Somewhen `run` happens to this object: when somebody waits for it at the latest."""
        barrier = self.find(key, lanes, i)
        if barrier is not None:
            barrier.deferred.append(Deferred(lanes, run))
            if any(w.key == key for w in self.waiting):
                self.land(barrier)

    def land(self, barrier: Phases) -> None:
        while barrier.deferred:
            barrier.deferred.pop(0).run()

    def stir(self, random: np.random.Generator) -> None:
        for barrier in list(self.objects.values()):
            if barrier.deferred and random.random() < 0.25:
                barrier.deferred.pop(0).run()

    def leave(self, lanes: Lanes) -> None:
        """The threads exit: what they still have on the way lands."""
        for barrier in list(self.objects.values()):
            mine = [d for d in barrier.deferred if np.isin(d.lanes.index, lanes.index).any()]
            for one in mine:
                barrier.deferred.remove(one)
                one.run()

    # -- waits --------------------------------------------------------------------------------------------------------------

    def wait(self, wait: Wait, lanes: Lanes, addresses: Array, wanted: Array) -> None:
        """Lanes come to a wait at these addresses, for the states or parities `wanted`."""
        port = PORTS[wait.space](self.memory, wait.instruction, lanes.n, 8, "atom")
        left = np.ones(lanes.n, np.bool_)
        for _, index, positions in port.resolve(lanes, addresses):
            where = np.arange(lanes.n) if positions is None else positions
            remote = index.astype(np.int64) * 8 // self.memory.shared_stride != lanes.block[where]
            if remote.any():
                message = "wait for an mbarrier of another block: a thread can only wait for its own block's"
                place, count = int(where[remote][0]), int(remote.sum())
                self.memory.findings.report("out of bounds", message, wait.instruction, lanes, place, count=count)
            for key, at in self.each(index.astype(np.int64)):
                at = where[at]
                left[at] = False
                for value in np.unique(wanted[at]).tolist():
                    self.look(Waiter(wait, lanes.subset(at[wanted[at] == value]), key, value))
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
            self.waiting.append(waiter)

    def answer(self) -> list[Answer]:
        """Who goes on, and with which answer; they have then heard of what the phase's arrivals released."""
        races = self.memory.races
        answers, self.answers = self.answers, []
        for waiter, barrier, done in answers:
            if not done or barrier is None:
                continue
            self.see(barrier)
            if races is not None and barrier.heard is not None:
                races.heard.hear(waiter.lanes, barrier.heard)
        return [(waiter.wait, waiter.lanes, done) for waiter, _, done in answers]

    def see(self, barrier: Phases) -> None:
        """Somebody has seen the last phase complete: what its copies brought is there."""
        over = [chunks for phase, chunks in barrier.unseen if phase < barrier.phase]
        if over:
            barrier.unseen = [(phase, chunks) for phase, chunks in barrier.unseen if phase >= barrier.phase]
            self.memory.landing -= len(over)
            for chunks in over:
                self.memory.state_view(16)[chunks] = element(WRITTEN, 16)

    def give_up(self) -> bool:
        """Nobody else can go on: who only tests is told that the phase is not complete. False: nobody does."""
        if self.refusals >= PATIENCE:
            return False
        self.refusals += 1
        self.answers += [(w, None, False) for w in self.waiting if not w.wait.blocking]
        self.waiting = [w for w in self.waiting if w.wait.blocking]
        return bool(self.answers)

    def stuck(self) -> list[Stuck]:
        out = []
        for waiter in self.waiting:
            barrier, lanes = self.objects[waiter.key], waiter.lanes
            number = plural(abs(barrier.transactions), "byte")
            state = f"{plural(barrier.pending, 'arrival')} and {number if barrier.transactions >= 0 else f'has {number} too many'}"
            parity = f" (parity {barrier.phase & 1})" if waiter.wait.parity else ""
            what = f"for phase {barrier.phase}{parity} of the mbarrier at {self.name(waiter.key)} that lacks {state}"
            out.append(Stuck(waiter.wait.instruction, lanes, what))
        return out

    def name(self, key: int) -> str:
        """Where an object lies: its offset, and the variable there."""
        return self.memory.shared_name(key * 8 % self.memory.shared_stride)
