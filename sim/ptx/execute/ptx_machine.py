"""The machine: runs a kernel's warps wave by wave, in groups that are at the same instruction; and the waves of a launch in
several processes, each of which runs some of them on its own copy of memory, and returns its results.

The race detector's record shows afterwards if waves were independent: if no process touched what another one wrote, all of them
together did what one process does, wave after wave. Otherwise, or if there is anything to report, their results are discarded,
and the caller runs the launch by itself. So the outcome is the same for any number of processes.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..decode.code import Code, CodeRegion
from ..decode.registry import (
    ENVIRONMENT,
    KEEP,
    WHOLE_WARP,
    Arg,
    Barrier,
    Branch,
    ClusterBarrier,
    Exit,
    FunctionCall,
    Multiply,
    MultiplyWait,
    PhaseWait,
    RegisterCount,
    Return,
    WarpBarrier,
)
from ..memory.async_copies import Bulks, Copies
from ..memory.mbarriers import MBarriers, PhaseWaiting
from ..memory.regions import Maps
from ..memory.spaces import LaunchMemory, WaitingSums
from ..memory.texels import Textures
from ..state.counters import LaunchTally
from ..state.findings import Findings, Stuck, report_deadlock
from ..state.lane_sets import WARP, LaneSet, Wave, merged, warp_bits
from ..state.segments import UNWRITTEN, WRITTEN, Segment
from ..text.syntax import Array, PtxInstruction
from .barriers import Barriers, ClusterBarriers, WarpBarriers
from .call_stack import DeviceFunctions
from .register_followers import Flights, Shadows
from .registers import FILE_DTYPES, RegisterFiles, RegisterFrame, Setup, Stop
from .scheduler import Budgets, make_ready
from .warpgroups import RegisterPools, Warpgroups

WAVE_LANES = 4096
"""Lanes of a wave, as far as whole blocks allow: enough to spread the cost of a NumPy call, few enough for the caches."""

PRODUCT_LANES = 1 << 15
"""Lanes of a wave of a kernel with wgmma: the cost of products grows with instructions more than with lanes."""

COMMUNICATING_LANES = 1 << 16
"""Lanes of a wave of a kernel whose blocks may wait for each other: such blocks must be resident together."""

GRID_LANES = 1 << 19
"""Lanes of a wave of a kernel whose whole grid meets: all that fit a chip of 256 multiprocessors."""

WAVE_BYTES = 1 << 28
"""Most memory that the shared memory of a wave's blocks may take."""


class Waiting(Protocol):
    """A place where lanes wait; true while some do."""

    def __bool__(self) -> bool: ...

    def stuck(self) -> list[Stuck]:
        """Returns the waiting lanes, and what they wait for."""


class PtxMachine(RegisterFiles):
    """One launch of one kernel."""

    warpgroups: Warpgroups

    def __init__(self, code: Code, setup: Setup, memory: LaunchMemory, findings: Findings, tally: LaunchTally):
        super().__init__(code, setup, memory)
        self.tally = tally
        self.random = None if setup.seed is None else np.random.default_rng(setup.seed)
        self.maps = Maps(memory)
        self.textures = Textures(memory, setup.textures)
        self.shadows = Shadows(code, findings, memory.early)
        self.flights = Flights(code, findings)
        self.followers = [self.flights, self.shadows]
        self.budgets = Budgets(code, findings, setup.limits, self.everywhere, self.waves)

    # -- waves ----------------------------------------------------------------------------------------------------------

    def wave_size(self) -> int:
        """Returns the blocks of a wave; the last one may have fewer."""
        geometry = self.setup.geometry
        lanes_per_block = -(-geometry.threads // WARP) * WARP
        lanes = COMMUNICATING_LANES if self.code.communicates else PRODUCT_LANES if self.code.in_flight else WAVE_LANES
        if self.code.whole_grid:
            lanes = GRID_LANES
        together, clusters = geometry.cluster_blocks, geometry.blocks // geometry.cluster_blocks
        most = max(1, min(lanes // lanes_per_block, WAVE_BYTES // (2 * self.memory.shared_stride)) // together)
        waves = -(-clusters // most)
        return -(-clusters // waves) * together

    @property
    def waves(self) -> int:
        return -(-self.setup.geometry.blocks // self.wave_size())

    def clean(self) -> bool:
        """True if there is nothing to report so far."""
        return self.findings.clean

    def run(self, part: int = 0, of: int = 1) -> bool:
        """Runs all blocks; returns False if a fault ended the launch. Findings and counts are then in `findings` and `tally`.

        In several processes: runs the waves of number `part` of `of`, up to the first one with something to report. Waves are dealt
        to and fro, as earlier blocks often have more to do.
        """
        geometry, size = self.setup.geometry, self.wave_size()
        turn = [*range(of), *reversed(range(of))]
        self.code.forget_counts()
        if self.code.open_sums and self.random is None and self.on_barrier is None:
            self.memory.sums = WaitingSums(self.code.open_sums, self.kept, lambda: self.barriers.completed)
        with np.errstate(all="ignore"):
            try:
                ENVIRONMENT.setter(self.code.base_mode)()
                for number, first in enumerate(range(0, geometry.blocks, size)):
                    if turn[number % len(turn)] != part:
                        continue
                    if of > 1 and not self.clean():
                        return False
                    self.tally.waves += 1
                    self.wave = self.new_wave(first, min(size, geometry.blocks - first))
                    try:
                        self.run_wave()
                    finally:
                        if self.memory.sums is not None:
                            self.memory.sums.finish_all()
                        self.wave.release()
            except Stop:
                return False
            finally:
                ENVIRONMENT.setter(KEEP)()
                # Bound code refers to its frame: without this the arrays would live until the next garbage collection.
                for frame in (*self._compact.values(), *self._full_frames.values()):
                    frame.release()
        return True

    def kept(self, addition: Callable[[], None]) -> None:
        """Runs an atomic addition, which flushes nothing."""
        ENVIRONMENT.setter(KEEP)()
        addition()
        ENVIRONMENT.setter(self.code.base_mode)()

    def new_wave(self, first_block: int, blocks: int) -> Wave:
        geometry, strides = self.setup.geometry, (self.memory.shared_stride, self.memory.local_stride)
        wave = Wave(first_block, blocks, geometry.threads, *strides, geometry.cluster_blocks)
        if geometry.cluster[1:] != (1, 1):
            wave.number = geometry.number
        return wave

    def run_wave(self) -> None:
        memory = self.memory
        memory.begin_wave(self.wave)
        self.copies = Copies(self.wave, memory, self.random)
        frame = self._full_frames.get(self.wave.size)
        if frame is None:
            self._full_frames.clear()
            frame = self._full_frames[self.wave.size] = RegisterFrame(self, self.wave.size)
        self.full = self.frame = frame
        self.current = None
        self.fill_special_registers()
        self.shadows.begin_wave(self.wave)
        self.flights.begin_wave(self.wave)
        self.budgets.begin_wave(self.wave)
        self.ready = make_ready(self.random, self.wave, self.code)
        self.parked = {}
        self.functions = DeviceFunctions(self, self.shadows)
        self.barriers = Barriers(self)
        self.warp_barriers = WarpBarriers(self)
        self.cluster_barriers = ClusterBarriers(self)
        self.mbarriers = MBarriers(memory)
        self.bulks = Bulks(self.wave, memory, self.mbarriers, self.maps)
        self.warpgroups = Warpgroups(self, self.flights, self.random)
        self.pools = RegisterPools(self, self.warpgroups.agreement)
        self.controls: dict[type, Callable[[int, Any, LaneSet], None]] = {
            Branch: self.branch,
            Exit: self.exit,
            Return: self.give_back,
            FunctionCall: self.functions.call,
            Barrier: self.barriers.arrive,
            WarpBarrier: self.warp_barriers.arrive,
            ClusterBarrier: self.cluster_barriers.come,
            PhaseWait: self.wait_for_phase,
            Multiply: self.warpgroups.arrive,
            MultiplyWait: self.warpgroups.wait,
            RegisterCount: self.pools.arrive,
        }
        self.ready.push(0, self.wave.lanes(np.flatnonzero(self.wave.alive)))
        while True:
            while self.ready or self.mbarriers.answers:
                if self.mbarriers.answers:
                    self.answer()
                self.step(*self.ready.pop())
                if self.random is not None and self.asynchronous() and self.random.random() < 0.2:
                    self.copies.stir()
                    self.mbarriers.stir(self.random)
                    self.bulks.stir(self.random)
                if self.random is not None and self.warpgroups.products:
                    self.warpgroups.stir()
            if self.mbarriers.give_up():
                continue
            if not (self.parked or any(self.waiting())):
                return
            self.deadlock()

    def asynchronous(self) -> bool:
        """True if asynchronous copies, phases of mbarriers or bulk stores may be pending."""
        return bool(self.copies.pending or self.mbarriers.objects or self.bulks.stores)

    def fill_special_registers(self) -> None:
        lane = np.arange(self.wave.size)
        values = self.places(lane % self.wave.lanes_per_block, self.wave.first_block + lane // self.wave.lanes_per_block)
        for name, value in values.items():
            slot = self.code.slots.get(name)
            if slot is not None:
                self.full.files[slot[0]][slot[1]] = value

    def places(self, thread: Array, block: Array | int = 0) -> dict[str, Array]:
        """Returns the special registers that differ between threads, which are numbers in blocks that run in this order."""
        geometry = self.setup.geometry
        x, y, _ = geometry.block
        where, inside = geometry.position(np.asarray(block))
        lane = thread % WARP
        bit = np.uint64(1) << lane.astype(np.uint64)
        full = np.uint64(0xFFFFFFFF)
        values = {
            "%tid.x": thread % x,
            "%tid.y": thread // x % y,
            "%tid.z": thread // (x * y),
            "%cluster_ctarank": block % geometry.cluster_blocks,
            "%laneid": lane,
            "%warpid": thread // WARP,
            "%lanemask_eq": bit,
            "%lanemask_lt": bit - np.uint64(1),
            "%lanemask_le": bit * np.uint64(2) - np.uint64(1),
            "%lanemask_gt": full - (bit * np.uint64(2) - np.uint64(1)),
            "%lanemask_ge": full - (bit - np.uint64(1)),
        }
        for axis, cluster, at, count in zip("xyz", where, inside, geometry.cluster, strict=True):
            values |= {f"%ctaid.{axis}": cluster * count + at, f"%clusterid.{axis}": cluster, f"%cluster_ctaid.{axis}": at}
        return {name: np.broadcast_to(value, thread.shape) for name, value in values.items()}

    # -- one step -------------------------------------------------------------------------------------------------------

    def step(self, pc: int, lanes: LaneSet) -> None:
        """Runs `lanes` from `pc` to the end of the straight code, and decides where they go on."""
        code = self.code
        converged = lanes.converged
        if not converged and code.plans[pc].collective is not None:
            together = self.gathered(pc, lanes)
            if together is None:
                return
            lanes = together
        region = code.region(pc, converged)
        if self.budgets.exceeded(region, lanes):
            raise Stop
        frame = self.activate(lanes)
        if frame is not self.full:
            frame.load(region.uses, self.full)
            frame.live = region.live
            frame.dirty |= region.defs
            frame.valid |= region.defs
        for thunk in frame.thunks(region):
            thunk()
        region.executed += lanes.warps
        region.threads += lanes.n
        if region.tells:
            self.ready.told()
        if region.ends is None:
            if region.end >= len(code.plans):
                self.leave(lanes)
            else:
                self.push(region.end, lanes)
        else:
            self.control(region, lanes, frame)

    def gathered(self, pc: int, lanes: LaneSet) -> LaneSet | None:
        """Returns the lanes at a warp-wide instruction whose partners are all there; parks the others."""
        plan = self.code.plans[pc]
        needed = warp_bits(self.wave.alive)[lanes.warp]
        if plan.collective != WHOLE_WARP:
            assert plan.collective is not None
            needed = needed & self.read(lanes, plan.reads[plan.collective])
        complete = (needed & ~lanes.bits()[lanes.warp]) == 0
        if complete.all():
            return lanes
        waiting = lanes.where(~complete)
        before = self.parked.get(pc)
        self.parked[pc] = waiting if before is None else merged([before, waiting])
        return lanes.where(complete) if complete.any() else None

    def control(self, region: CodeRegion, lanes: LaneSet, frame: RegisterFrame) -> None:
        assert region.ends is not None
        pc = region.ends
        plan, instruction = self.code.plans[pc], self.code.instructions[pc]
        if plan.collective is not None and pc != region.start and not lanes.converged:
            self.push(pc, lanes)
            return
        if pc in self.code.doubtful.watched:
            self.shadows.control(pc, lanes, frame)
        if instruction.predicate is not None:
            register, negated = instruction.predicate
            holds = frame.array(Arg(register, FILE_DTYPES[1]))
            count = int(np.count_nonzero(holds))
            if negated:
                count = lanes.n - count
            if count < lanes.n:
                self.tally.predicated_off[instruction] += lanes.n - count
            if count == 0:
                self.push(pc + 1, lanes)
                return
            if count < lanes.n:
                mask = ~holds if negated else holds.copy()
                stay, everyone = lanes.where(~mask), lanes
                self.push(pc + 1, stay)
                lanes = lanes.where(mask)
                self.tally.divergent[instruction] += stay.warps + lanes.warps - everyone.warps
        self.controls[type(plan.control)](pc, plan.control, lanes)

    def branch(self, pc: int, control: Branch, lanes: LaneSet) -> None:
        """Sends lanes to a label, or each to its own in a table, the last one if its index is too large."""
        if not control.table:
            target = self.code.target(control.target)
            if pc in self.code.looks:
                self.ready.look_again(target, lanes)
            else:
                self.push(target, lanes)
            return
        targets = self.code.tables[control.table]
        ways = lanes.split(np.minimum(self.read(lanes, self.code.plans[pc].reads[0]), len(targets) - 1))
        for number, some in ways:
            self.push(targets[number], some)
        if len(ways) > 1:
            self.tally.divergent[self.code.instructions[pc]] += sum(some.warps for _, some in ways) - lanes.warps

    def wait_for_phase(self, pc: int, control: PhaseWait, lanes: LaneSet) -> None:
        addresses, wanted = (self.read(lanes, arg) for arg in self.code.plans[pc].reads)
        wait = PhaseWaiting(pc, self.code.instructions[pc], control.space, control.parity, control.blocking)
        self.mbarriers.wait(wait, lanes, addresses + addresses.dtype.type(control.offset), wanted.astype(np.uint64))

    def exit(self, pc: int, control: Exit, lanes: LaneSet) -> None:
        if control.trap:
            self.stop("trap", "the kernel trapped", pc, lanes)
        self.leave(lanes)

    def give_back(self, pc: int, control: Return, lanes: LaneSet) -> None:
        if self.code.function_at[pc] == self.code.kernel:
            self.leave(lanes)
        else:
            self.functions.give_back(pc, lanes)

    def answer(self) -> None:
        """Tells lanes that waited for phases of mbarriers the answer, and lets them go on."""
        self.deactivate()
        self.ready.in_front = False
        for wait, lanes, done in self.mbarriers.answer():
            self.write(lanes, self.code.plans[wait.pc].writes[0], done)
            self.push(wait.pc + 1, lanes)

    def leave(self, lanes: LaneSet) -> None:
        """Ends the threads; those that wait for the warp or the block check again."""
        self.mbarriers.leave(lanes)
        self.bulks.leave(lanes)
        self.copies.leave(lanes)
        self.wave.exit(lanes)
        self.warpgroups.leave()
        parked, self.parked = self.parked, {}
        for pc, waiting in parked.items():
            self.ready.push(pc, waiting)
        if self.memory.lifetimes is not None:
            self.memory.lifetimes.leave(lanes)
        self.barriers.recheck()
        self.warp_barriers.recheck()
        self.cluster_barriers.recheck()

    # -- deadlock ---------------------------------------------------------------------------------------------------------

    def waiting(self) -> tuple[Waiting, ...]:
        """Returns the places in which lanes may wait, besides waiting for other lanes of their warp."""
        return self.barriers, self.warp_barriers, self.cluster_barriers, self.mbarriers, self.warpgroups, self.pools

    def deadlock(self) -> None:
        """Reports a deadlock, with all waiting lanes and what they wait for, and stops the launch."""
        parked = [(self.code.instructions[pc], lanes) for pc, lanes in self.parked.items()]
        groups = [Stuck(i, lanes, f"in {i.text!r} for other lanes of their warp") for i, lanes in parked]
        for who in self.waiting():
            groups += who.stuck()
        report_deadlock(self.findings, groups)
        raise Stop


# -- several processes -------------------------------------------------------------------------------------------------------

VARIABLE = "CUPYFLASH_PROCESSES"
"""Environment variable: the number of processes for launches that give none."""

TABLES = ("traffic", "shared", "distributed")
COUNTS = ("predicated_off", "divergent")


@dataclass
class Done:
    """The results of a process. By segment number: `contents` of those that it wrote, and `unwritten`, masks of unwritten bytes.

    `touched`: masks of the granules of a tensor, by its address: those that were written, and those that anybody touched.
    `executed`: warps and threads of each region. `tally`: the tables of the tally, by name.
    """

    executed: dict[tuple[int, bool], tuple[int, int]]
    tally: dict[str, dict[Any, Any]]
    barriers: int
    touched: dict[int, tuple[Array, Array]]
    contents: dict[int, Array]
    unwritten: dict[int, Array]


def run_apart(machine: PtxMachine, processes: int) -> bool:
    """Runs a launch in up to so many processes; False: nothing has happened, it must be run in this one."""
    count = min(processes, machine.waves, cores())
    if count < 2 or not may_run_apart(machine):
        return False
    found = results(machine, count)
    if found is None or not independent(found):
        return False
    changes = [change for number in machine.memory.segments for change in changed(machine.memory.segments[number], number, found)]
    if any(meet(view, [at for at, _ in parts]) for view, parts in changes):
        return False
    for view, parts in changes:
        for at, values in parts:
            view[at] = values
    machine.code.forget_counts()
    for done in found:
        add(machine, done)
    machine.tally.waves = machine.waves
    return True


def processes_asked(processes: int | None) -> int:
    """Returns the number of an argument, or of the environment. Raises ValueError for a wrong one."""
    name, value = ("processes", processes) if processes is not None else (VARIABLE, os.environ.get(VARIABLE, "1"))
    if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
    return int(value)


def cores() -> int:
    """Returns the processors that this process may use; 1 if it cannot be copied safely."""
    alone = threading.active_count() == 1 and not multiprocessing.current_process().daemon
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" and alone else 1


def may_run_apart(machine: PtxMachine) -> bool:
    """True if waves may run apart: there is no observer, and no block of one can wait for a block of another."""
    code, memory = machine.code, machine.memory
    looks_on = machine.on_barrier is not None or memory.observer is not None
    limits = machine.setup.limits
    limited = (limits.max_instructions, limits.max_seconds, limits.forecast) != (None, None, None)
    if machine.random is not None or looks_on or memory.races is None or limited:
        return False
    if memory.races.launches is not None:
        return False
    if any_shared([(one.address, one.address + one.size) for one in memory.segments.values()]):
        return False
    return not (
        code.communicates
        or any(i.opcode == "red" or (i.opcode == "cp" and "reduce" in i.mods) for i in code.instructions)
        or any(isinstance(plan.control, FunctionCall) and plan.control.builtin for plan in code.plans)
    )


def any_shared(ranges: list[tuple[int, int]]) -> bool:
    """True if any of these addresses is of memory that processes share after a fork, as a mapped file is (Linux)."""
    mappings = (line.split(maxsplit=2)[:2] for line in Path("/proc/self/maps").read_text().splitlines())
    shared = [[int(end, 16) for end in place.split("-")] for place, permissions in mappings if permissions.endswith("s")]
    return any(low < end and begin < high for low, high in ranges for begin, end in shared)


# -- in the other processes ------------------------------------------------------------------------------------------------------


def work(machine: PtxMachine, part: int, of: int, pipe: connection.Connection) -> None:
    """Runs the waves of one process, and sends the results; an empty message if nobody may use them."""
    names = {id(i): ("instruction", k) for k, i in enumerate(machine.code.instructions)}
    names |= {id(segment): ("segment", number) for number, segment in machine.memory.segments.items()}

    class Out(pickle.Pickler):
        def persistent_id(self, item: object) -> tuple[str, int] | None:
            return names[id(item)] if isinstance(item, PtxInstruction | Segment) else None

    message = io.BytesIO()
    try:
        if machine.run(part, of) and machine.clean():
            Out(message, pickle.HIGHEST_PROTOCOL).dump(done_by(machine))
    except (Exception, KeyboardInterrupt):
        message = io.BytesIO()  # the caller's own run will say what is wrong
    pipe.send_bytes(message.getbuffer())
    pipe.close()


def done_by(machine: PtxMachine) -> Done:
    tally, memory, races = machine.tally, machine.memory, machine.memory.races
    assert races is not None
    if machine.asked_time:
        raise RuntimeError("clocks go on from wave to wave")
    wrote = {number: one for number, one in memory.segments.items() if tally.wrote(one)}
    return Done(
        {key: (region.executed, region.threads) for key, region in machine.code.regions.items() if region.executed},
        {name: dict(getattr(tally, name)) for name in (*TABLES, *COUNTS)},
        tally.barriers,
        {area.low: area.shadow.touched() for _, area in races.touched()},
        {number: one.window(1)[0] for number, one in wrote.items()},
        {number: one.state for number, one in wrote.items() if one.state is not None},
    )


# -- in this one -----------------------------------------------------------------------------------------------------------------


def results(machine: PtxMachine, count: int) -> list[Done] | None:
    """Returns the results of `count` processes; None if any has something to report, could not begin, or did not end."""
    instructions, segments = machine.code.instructions, machine.memory.segments

    class In(pickle.Unpickler):
        def persistent_load(self, name: tuple[str, int]) -> object:
            return (instructions if name[0] == "instruction" else segments)[name[1]]

    context = multiprocessing.get_context("fork")
    children, pipes = [], []
    found: dict[Any, Done] = {}
    try:
        for part in range(count):
            mine, theirs = context.Pipe(duplex=False)
            child = context.Process(target=work, args=(machine, part, count, theirs), daemon=True)
            with warnings.catch_warnings():
                # The warning is about threads of a BLAS, which handles forks; there are no others (`cores`).
                warnings.simplefilter("ignore", DeprecationWarning)
                child.start()
            theirs.close()
            children.append(child)
            pipes.append(mine)
        while len(found) < count:
            for pipe in connection.wait([one for one in pipes if one not in found]):
                try:
                    message = pipe.recv_bytes()  # type: ignore[union-attr]
                except EOFError:
                    message = b""
                if not message:
                    return None
                found[pipe] = In(io.BytesIO(message)).load()
        return [found[pipe] for pipe in pipes]
    except OSError:  # no process or pipe more, or one that was killed within its message
        return None
    finally:
        for child in children:
            child.kill()
            child.join()
        for pipe in pipes:
            pipe.close()


def independent(found: list[Done]) -> bool:
    """True if no process touched what another one wrote."""
    for one, other in combinations(found, 2):
        for low in one.touched.keys() & other.touched.keys():
            (wrote, touched), (wrote_too, touched_too) = one.touched[low], other.touched[low]
            if (wrote & touched_too).any() or (wrote_too & touched).any():
                return False
    return True


def meet(view: Array, places: list[Array]) -> bool:
    """True if two of these sets of places have one in common."""
    count = np.zeros(len(view), np.uint8)
    for at in places:
        count[at] += 1
    return bool((count > 1).any())


Change = tuple[Array, list[tuple[Array, Array]]]
"""Bytes, and for each process the places where it changed them, and the new values."""


def changed(segment: Segment, number: int, found: list[Done]) -> list[Change]:
    """Returns the processes' changes of a tensor, and of the states of its bytes; the tensor itself is as it was."""
    view = segment.window(1)[0]
    parts = [(np.flatnonzero(new != view), new) for done in found if (new := done.contents.get(number)) is not None]
    out: list[Change] = [(view, [(at, new[at]) for at, new in parts])]
    if segment.state is not None:
        states = [done.unwritten[number] for done in found if number in done.unwritten]
        now = [np.flatnonzero((state == WRITTEN) & (segment.state == UNWRITTEN)) for state in states]
        out.append((segment.state, [(at, np.full(len(at), WRITTEN, np.uint8)) for at in now]))
    return out


def add(machine: PtxMachine, done: Done) -> None:
    """Adds the results of a process to the counts of the launch."""
    tally = machine.tally
    for key, (warps, threads) in done.executed.items():
        region = machine.code.region(*key)
        region.executed += warps
        region.threads += threads
    for name in TABLES:
        mine = getattr(tally, name)
        for key, counts in done.tally[name].items():
            mine[key].add(counts)
    for name in COUNTS:
        mine = getattr(tally, name)
        for key, number in done.tally[name].items():
            mine[key] += number
    tally.barriers += done.barriers
