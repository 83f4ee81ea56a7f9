"""Launches by compiled code: a kernel becomes a function that LLVM makes, which runs whole warps and counts what they do.

It is exact for a launch without fault, and gives up at anything else: an address out of bounds or not aligned, a byte that
nobody wrote, two threads at one word of which one writes without a barrier between them, a NaN as a result (its payload is
NumPy's), lanes that wait for others. Then the launch's writes are undone, and it runs from its start without compiled code,
which finds and says everything. So a finding has one origin. Blocks run one after the other, which no launch without fault can
tell.

Arithmetic is made from the rows of the opcodes (`decode.table_rows`), as NumPy's evaluation is. A kernel with an instruction
that has no translation is NumPy's.

LLVM makes machine code of texts in this process; it is kept on disk, beside CuPy's kernels, as cubins are (`launch.cubins`). A
kernel's own text is a unit, and so is each of the functions that many kernels call. Such a function's name ends with a digest of
its text, so that it is compiled once for all kernels, and known by its name.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from cupyflash.launch import first_use, own_files

from ..decode import elementwise
from ..decode.access import CACHE
from ..decode.code import Code
from ..decode.registry import ENVIRONMENT, KEEP, Arg, WarpBarrier
from ..memory.spaces import MOST_WAITING
from ..order import moments
from ..order.history import Launches
from ..order.races import Races
from ..order.shadow import WIDEST
from ..state.lane_sets import WARP
from ..state.segments import Segment
from ..text.syntax import Array, PtxInstruction, Unsupported
from .translation import KernelText
from .vectors import NoCode
from .warp_instructions import OPCODES, space_of, target
from .warp_text import (
    ATOMICS,
    BLOCK_CROWD,
    BY,
    COPY_SLOTS,
    COPY_WORDS,
    COUNTS,
    KNOWN,
    LAUNCH,
    READ,
    SEGMENT_WORDS,
    SITE,
    SITE_WORDS,
    UPDATED,
    WARP_CROWD,
    WROTE,
    ShadowRow,
)

if TYPE_CHECKING:
    from .ptx_machine import PtxMachine

SIDES = {"st": (True,), "atom": (False, True)}
"""By kind of access, where it is not a read alone: its sides, True for a write."""

PRIVATE = ("param", "const", "local")
"""Spaces that no two threads write."""

MOST_BYTES = 1 << 30
"""Most memory that a launch may take for shadows of segments and what they held before; compiled code gives up at more."""

BUDGET = 1 << 27
"""Steps back in the code that a part of a launch may make: one that makes more may be endless, and NumPy says so."""

TURN_SECONDS = 0.05
"""Time of a part of a launch, after which its limits are looked at."""


def exp2(asked: int, answer: int) -> None:
    """Raises 2 to the powers of a warp's lanes as NumPy does: float64 at these addresses."""
    powers, found = (np.frombuffer(memoryview((ctypes.c_double * WARP).from_address(at))) for at in (asked, answer))
    np.exp2(powers, out=found)


def log2(asked: int, answer: int) -> None:
    """Stores lg2.approx of a warp's lanes as NumPy has it, before it is rounded."""
    given, found = (np.frombuffer(memoryview((ctypes.c_double * WARP).from_address(at))) for at in (asked, answer))
    with np.errstate(all="ignore"):
        found[:] = elementwise.result(np.log2, elementwise.logarithmic, [given])


LOG2 = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(log2)
EXP2 = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(exp2)


class CompiledKernel:
    """A kernel's function, and what it wants of a launch. Raises `NoCode`."""

    def __init__(self, code: Code, row: ShadowRow):
        text = KernelText(code, row)
        self.state_words, self.local_bytes = text.shape.state_words, text.local_bytes
        self.constants, self.sites, self.off, self.parting = text.constants, text.sites, text.off, text.parting
        self.starts, self.layout, self.within = text.starts, text.layout, text.within()
        self.run = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(compiler().function(*text.texts()))


KERNELS: WeakKeyDictionary[Code, dict[ShadowRow, CompiledKernel]] = WeakKeyDictionary()


def kernel_of(code: Code, row: ShadowRow) -> CompiledKernel:
    known = KERNELS.setdefault(code, {})
    if row not in known:
        known[row] = CompiledKernel(code, row)
    return known[row]


class CompiledLaunch:
    """A launch by compiled code: its tables, and who has touched which word of memory since which barrier. Raises `NoCode`."""

    def __init__(self, machine: PtxMachine, launches: Launches | None = None):
        """`launches`: the launch as one of a history."""
        self.machine, self.launches = machine, launches
        self.row = ShadowRow.of(machine.code, launches is not None)
        self.kernel = kernel_of(machine.code, self.row)
        self.shadows: dict[Segment, Array] = {}
        self.kept: dict[Segment, tuple[Array, Array | None]] = {}
        """The contents and states that segments had before."""
        self.taken = 0
        """Bytes of shadows and kept contents."""
        self.memory: list[Array] = []
        sites = enumerate(self.kernel.sites)
        self.sums = [at for at, site in sites if site.space == "global" and site.instruction in machine.code.open_sums]
        """The sites of floating-point sums whose order is that of `memory.open_sums`."""
        self.added = 0
        self.segments = [one for one in machine.memory.segments.values() if one.space in ("global", "const", "param") and one.size]
        self.table = np.zeros(len(LAUNCH), np.int64)
        self.fill()

    def array(self, shape: int | tuple[int, ...], dtype: Any = np.int64) -> Array:
        """Returns zeros that begin at a multiple of 64 bytes."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.zeros(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.memory.append(raw)
        return raw[start : start + nbytes].view(dtype).reshape(shape)

    def enter(self, **numbers: int | Array) -> None:
        for name, value in numbers.items():
            self.table[LAUNCH[name]] = value.ctypes.data if isinstance(value, np.ndarray) else value

    def fill(self) -> None:
        """Makes the tables of the launch."""
        machine, kernel, memory = self.machine, self.kernel, self.machine.memory
        geometry = machine.setup.geometry
        warps = -(-geometry.threads // WARP)
        self.regions, self.offs = self.array((max(1, len(kernel.starts)), 2)), self.array(max(1, len(kernel.off)))
        self.parted = self.array(max(1, len(kernel.parting)))
        self.sites = self.array((max(1, len(kernel.sites)), SITE_WORDS))
        self.counts = self.array((max(1, len(kernel.sites)), max(1, len(self.segments)), COUNTS))
        table = self.array((max(1, len(self.segments)), SEGMENT_WORDS))
        for number, segment in enumerate(self.segments):
            table[number] = self.placed(segment, number)
        self.sites[:, SITE["segment"]] = table.ctypes.data
        self.sites[:, KNOWN] = -1
        for number, site in enumerate(kernel.sites):
            _, low, high = memory.homes.get(site.instruction, ("", 0, None))
            self.sites[number, SITE["counts"]] = self.counts[number].ctypes.data
            self.sites[number, SITE["low"]], self.sites[number, SITE["high"]] = low, memory.shared_size if high is None else high
            self.sites[number, SITE["number"]] = number
        granules = -(-memory.shared_stride // self.row.shared_granule)
        shadows = {name: self.array(granules, np.uint32) for name in ("written", "read", "updated")}
        alive = np.minimum(np.maximum(geometry.threads - WARP * np.arange(warps), 0), WARP)
        self.living = self.array(warps)
        self.living[:] = (1 << alive) - 1
        self.enter(
            regions=self.regions,
            offs=self.offs,
            parted=self.parted,
            **{"sites": self.sites, "segments": table, **shadows},
            constants=self.constants(),
            registers=self.array(warps * kernel.layout.size, np.uint8),
            warps_memory=self.array((warps, kernel.state_words)),
            template=self.template(warps),
            warps=warps,
            alive=self.living,
            grid_x=geometry.grid[0],
            grid_y=geometry.grid[1],
            shared=self.array(memory.shared_stride, np.uint8),
            shared_bytes=memory.shared_stride,
            states=self.array(memory.shared_stride, np.uint8),
            granules=granules,
            segment_count=len(self.segments),
            local=self.array(max(1, warps * WARP * kernel.local_bytes), np.uint8),
            copies=self.array(warps * COPY_SLOTS * COPY_WORDS if self.row.copies else 1),
            threads=geometry.threads,
            exp2=ctypes.cast(EXP2, ctypes.c_void_p).value or 0,
            log2=ctypes.cast(LOG2, ctypes.c_void_p).value or 0,
        )

    def placed(self, segment: Segment, number: int) -> list[int]:
        """Returns the row of a segment in the table; keeps what the launch may write."""
        writes = segment.writable and any(map(self.machine.code.sharing.writes, segment.places))
        if writes:
            self.take(2 * segment.size)
            states = segment.state
            self.kept[segment] = segment.window(1)[0].copy(), None if states is None else states.copy()
        shadow = 0
        if writes or (self.launches is not None and segment.space != "param"):
            granules = (segment.size + 2 * WIDEST) // self.row.granule
            self.take(8 * self.row.words * granules)
            self.shadows[segment] = np.zeros((granules, self.row.words), np.uint64)
            shadow = self.shadows[segment].ctypes.data
        state = 0 if segment.state is None else segment.state.ctypes.data - segment.start
        distance = segment.address - segment.start
        return [segment.start, segment.size, distance, state, shadow, segment.start & -WIDEST, number, writes]

    def constants(self) -> Array:
        """Returns the numbers that the kernel's text asks for."""
        machine, found = self.machine, self.array(max(1, len(self.kernel.constants)), np.uint64)
        for place, (kind, key) in enumerate(self.kernel.constants):
            if kind == "parameter":
                symbol, offset, size, signed = key
                raw = machine.parameter(symbol, offset, size)
                if raw is None:
                    raise NoCode
                found[place] = int.from_bytes(raw, "little", signed=signed) & (1 << 64) - 1
            else:
                found[place] = machine.number(Arg(*key))
        return found

    def template(self, warps: int) -> Array:
        """Returns the registers with which the warps of each block begin: those that tell a thread's place are set."""
        layout, found = self.kernel.layout, self.array((warps, self.kernel.layout.size), np.uint8)
        values = self.machine.places(np.arange(warps * WARP))
        for name, slot in self.kernel.within:
            start, width = layout.offset(slot), slot[0] // 8
            rows = np.ascontiguousarray(values[name].reshape(warps, WARP).astype(f"u{width}"))
            found[:, start : start + WARP * width] = rows.view(np.uint8)
        return found

    def take(self, nbytes: int) -> None:
        """Counts memory. Raises `NoCode` if it is too much."""
        self.taken += nbytes
        if self.taken > MOST_BYTES:
            raise NoCode

    def restore(self) -> None:
        """Undoes all writes to segments."""
        for segment, (contents, state) in self.kept.items():
            segment.window(1)[0][:] = contents
            if state is not None and segment.state is not None:
                segment.state[:] = state

    def run(self) -> bool:
        """Runs all blocks; returns False if it gave up, or the launch's time is over."""
        machine, blocks = self.machine, self.machine.setup.geometry.blocks
        wave, first = machine.wave_size(), 0
        some = wave
        try:
            ENVIRONMENT.setter(machine.code.base_mode)()
            while first < blocks:
                some = min(some, blocks - first)
                self.table[LAUNCH["budget"]] = BUDGET
                began = time.perf_counter()
                if self.kernel.run(self.table.ctypes.data, first, some) or not self.sums_wait():
                    return False
                first += some
                if machine.budgets.over(-(-some // wave)):
                    return False
                spent = time.perf_counter() - began
                if self.sums:
                    continue
                if spent < TURN_SECONDS / 2:
                    some *= 2
                elif spent > 2 * TURN_SECONDS:
                    some = max(wave, some // 2)
        finally:
            ENVIRONMENT.setter(KEEP)()
        return True

    def sums_wait(self) -> bool:
        """True if NumPy's floating-point sums in a wave would have waited until its end: nothing else looks at their tensors, and
        they are not too many.
        """
        if not self.sums:
            return True
        lanes = self.counts[:, :, 1]
        mine = lanes[self.sums]
        kinds = {self.kernel.sites[at].instruction.type for at in self.sums}
        alone = not np.delete(lanes, self.sums, 0)[:, mine.any(axis=0)].any()
        before, self.added = self.added, int(mine.sum())
        return alone and len(kinds) == 1 and self.added - before <= MOST_WAITING

    def finish(self) -> None:
        """Adds the counts to those of the launch."""
        machine, kernel = self.machine, self.kernel
        code, tally = machine.code, machine.tally
        tally.waves, tally.barriers = machine.waves, int(self.table[LAUNCH["barriers"]])
        code.forget_counts()
        for start, (warps, lanes) in zip(kernel.starts, self.regions.tolist(), strict=True):
            region = code.region(start, True)
            region.executed, region.threads = region.executed + warps, region.threads + lanes
        for counters, counts, listed in (
            (tally.predicated_off, self.offs, kernel.off),
            (tally.divergent, self.parted, kernel.parting),
        ):
            for i, count in zip(listed, counts.tolist(), strict=False):
                if count:
                    counters[i] += count
        for (i, space, kind, size), counts in zip(kernel.sites, self.counts.tolist(), strict=False):
            if space == "shared":
                requests, lanes, passes, ideal = counts[0]
                if requests:
                    tally.shared[i, kind, size].count(requests, lanes * size, passes, ideal)
                continue
            for segment, (requests, lanes, sectors, distinct) in zip(self.segments, counts, strict=True):
                if requests:
                    moved = tally.traffic[i, segment]
                    for write in SIDES.get(kind, (False,)):
                        moved.count_side(write, lanes * size, requests, sectors, distinct * size)

    # -- a launch of a history ------------------------------------------------------------------------------------------

    def tell(self, races: Races) -> bool:
        """Enters all accesses into the tables of a race detector, as if it had seen them.

        Returns False if an earlier launch that is not over has touched some of the same granules, of which one writes.
        """
        self.machine.wave = self.machine.new_wave(0, self.machine.wave_size())
        races.wave, races.instructions = self.machine.wave, [site.instruction for site in self.kernel.sites]
        for segment, shadow in self.shadows.items():
            area = races.area(segment) if segment.space == "global" and shadow.any() else None
            if area is None:
                continue
            first = (area.low - segment.address + segment.start - (segment.start & -WIDEST)) // self.row.granule
            seen = shadow[first :: (1 << area.shift) // self.row.granule][: area.shadow.writes.rows]
            for word, table in ((WROTE, area.shadow.writes), (READ, area.shadow.reads), (UPDATED, area.shadow.atomics)):
                rows = np.flatnonzero(seen[:, word])
                if len(rows):
                    table.used = True
                    table.entries[rows, 0] = self.entries(seen[rows, word])
                    table.by[rows, 0] = seen[rows, BY] >> np.uint64(16 * word) & np.uint64(0xFFFF)
            assert races.launches is not None
            if races.launches.anything and not races.launches.alone(area):
                return False
        return True

    def entries(self, tags: Array) -> Array:
        """Returns tags as entries of a race detector."""
        block = (tags >> np.uint64(32) & np.uint64(0x7FFFFFFF)) - np.uint64(1)
        out = block * np.uint64(self.machine.wave.lanes_per_block) + (tags & np.uint64(WARP_CROWD - 1))
        out |= np.uint64(1 << moments.STAMP | moments.ONE)
        crowds = np.flatnonzero(tags & np.uint64(WARP_CROWD | BLOCK_CROWD | 1 << 63))
        some = tags[crowds]
        level = np.where(some & np.uint64(BLOCK_CROWD), np.uint64(moments.WARPS), np.uint64(moments.LANES))
        out[crowds] = moments.raised(out[crowds], np.where(some >> np.uint64(63), np.uint64(moments.CLUSTERS), level))
        return out

    def forget(self) -> None:
        """Gives the memory of shadows and kept contents back, which objects that refer to each other would keep for a while."""
        self.shadows.clear()
        self.kept.clear()
        self.memory.clear()


def plain(i: PtxInstruction) -> bool:
    """True for a load, store or atomic access that compiled code knows."""
    try:
        place, type_, registers, _, _ = target(i)
    except Unsupported:
        return False
    known = {"weak", *CACHE, "global", "shared", "v2", "v4", type_.name, "shared::cta"}
    if place == "shared":
        known.add("volatile")
    if i.opcode in ("atom", "red"):
        known = {"relaxed", "gpu", "sys", *ATOMICS, "global", "shared", type_.name, "shared::cta"}
        if type_.bits < 32 or (type_.kind == "f" and "add" not in i.mods):
            return False
    return place in ("global", "shared", "const", "generic") and not set(i.mods) - known and len(registers) * type_.bytes <= 16


def covers(machine: PtxMachine) -> bool:
    """True if compiled code may run a kernel, as far as its accesses and registers are concerned."""
    code = machine.code
    if code.sharing.guesses or code.sharing.narrow or code.spins:
        return False
    accesses = (i for i in code.instructions if i.opcode in OPCODES and space_of(i) not in PRIVATE)
    return all(map(plain, accesses))


def knows_order(code: Code, launches: Launches, segments: list[Segment]) -> bool:
    """True if barriers of blocks are all that orders a launch's accesses, so that the tags are those of a race detector; and if
    all that it reads has tags: constants have none.
    """
    warps = any(isinstance(plan.control, WarpBarrier) for plan in code.plans)
    aligned = all((one.address - one.start) % WIDEST == 0 for one in segments)
    messages = code.sharing.atomics and launches.past.messages
    constants = any(i.opcode == "ld" and space_of(i) == "const" for i in code.instructions)
    others = warps or messages or constants or code.sharing.releases or len(code.plans) >> 16
    return launches.run.behind is None and aligned and not others


def apart(segments: list[Segment]) -> bool:
    """True if no two segments share memory."""
    ranges = sorted((one.address, one.address + one.size) for one in segments if one.size)
    return all(a[1] <= b[0] for a, b in pairwise(ranges))


def engine_asked() -> str:
    """Returns the environment's CUPYFLASH_ENGINE: "numpy", "llvm" or, if nothing is asked, "". Raises ValueError for others."""
    name = os.environ.get("CUPYFLASH_ENGINE", "")
    if name not in ("", "numpy", "llvm"):
        raise ValueError(f"CUPYFLASH_ENGINE must be numpy or llvm, got {name!r}")
    return name


WAVE_SECONDS, INSTRUCTION_SECONDS, ATOMIC, TURNS = 4e-4, 15e-6, 100, 8
"""Processor time of NumPy for a wave and for each of its instructions, at least; an atomic, whose lanes may go one by one, is so
many instructions; turns of a loop that are taken for granted.
"""

COMPILING_SECONDS, COMPILING_ONE, BOUND_SECONDS = 0.4, 6e-4, 0.02
"""Processor time of NumPy from which on compiled code pays: if it has to be compiled, and more for each instruction; and if it has
been.
"""


@cache
def installed() -> bool:
    return find_spec("llvmlite") is not None


def pays(code: Code, waves: int) -> bool:
    """True if compiled code is expected to run a launch of `waves` waves in less time than NumPy, the time to compile included.

    An earlier launch of the kernel by NumPy tells its time for a wave; without one it is estimated from the number of instructions.
    A kernel that compiled code does not run faster stays NumPy's.
    """
    if not installed() or code.gave_up or 0 < code.seconds_of_wave <= code.compiled_seconds_of_wave:
        return False
    costs = [ATOMIC if i.opcode in ("atom", "red") else 1 for i in code.instructions]
    turns = sum(costs) + sum(sum(costs[first : last + 1]) for first, last in code.loop_spans) * (TURNS - 1)
    a_wave = code.seconds_of_wave or WAVE_SECONDS + INSTRUCTION_SECONDS * turns
    compiling = COMPILING_SECONDS + COMPILING_ONE * len(code.instructions)
    return a_wave * waves > (BOUND_SECONDS if code.was_compiled else compiling)


def run_compiled(machine: PtxMachine, segments: list[Segment], races: Races | None = None) -> bool:
    """Runs a launch by compiled code. Returns False, with memory as it was, if that cannot run it, or gave up.

    `races`: the detector, in a launch of a history, to which all accesses are told. Raises ImportError without llvmlite.
    """
    setup = machine.setup
    plain = setup.seed is None and setup.on_barrier is None and setup.limits.max_instructions is None and setup.approximate
    memory = machine.memory
    if not plain or memory.observer is not None or setup.geometry.cluster_blocks > 1 or memory.reserved or machine.code.whole_grid:
        return False
    if setup.tensor_cores is not None and any(i.opcode == "mma" for i in machine.code.instructions):
        return False
    launches = None if races is None else races.launches
    if launches is not None and not knows_order(machine.code, launches, segments):
        return False
    compiler()
    if not covers(machine):
        machine.code.gave_up = True
        return False
    if not apart(segments):
        return False
    try:
        launch = CompiledLaunch(machine, launches)
    except NoCode:
        machine.code.gave_up = True
        return False
    try:
        done = launch.run() and (races is None or launch.tell(races))
    except BaseException:
        launch.restore()
        raise
    machine.code.was_compiled = True
    if done:
        launch.finish()
    else:
        machine.code.gave_up = True
        launch.restore()
    launch.forget()
    return done


# -- machine code ------------------------------------------------------------------------------------------------------------

DIGEST = hashlib.sha256().digest_size

DEFINED = re.compile(r"define internal ([^@]*)@([\w.]+)(\([^{]*?\))\s*(noinline|alwaysinline)?\s*\{")
"""A function of a unit: the type of its result, its name, its parameters, and whether it is put in place of its calls."""

NAMED = re.compile(r"@([\w.]+)")


class CompiledUnit(NamedTuple):
    """A text that becomes an object file, and the name by which it is known.

    `optimised`: LLVM takes its time for a function that is compiled once, and is most of what a kernel does; a kernel's own text
    may be long, and gets one pass: it then runs as fast.
    """

    name: str
    text: str
    optimised: bool


def units(own: str, shared: Sequence[str], declared: str) -> Iterator[CompiledUnit]:
    """Yields the units of a kernel, `own` last: `@stretch` becomes its name. Each of the `shared` texts may call those before it;
    `declared` are declarations that all of them need.
    """
    known: dict[str, tuple[str, str]] = {}  # the new name and the declaration of a function of a unit
    placed: dict[str, str] = {}  # the text of one that is put in place of its calls

    def above(text: str) -> Iterator[str]:
        """Yields what a text needs of others: their texts, or declarations."""
        defined = {name for _, name, _, _ in DEFINED.findall(text)}
        for name in dict.fromkeys(NAMED.findall(text)):
            if name in placed and name not in defined:
                yield from above(placed[name])
                yield placed[name]
            elif name in known:
                yield known[name][1]

    def whole(text: str) -> str:
        """Returns a text with what it needs."""
        together = "\n".join([*dict.fromkeys(above(text)), text])
        return NAMED.sub(lambda found: f"@{known[found[1]][0]}" if found[1] in known else found[0], together)

    for text in shared:
        found = DEFINED.findall(text)
        if all(how == "alwaysinline" for *_, how in found):
            placed |= dict.fromkeys((name for _, name, _, _ in found), text)
            continue
        made = whole(text)
        key = hashlib.sha256(made.encode()).hexdigest()[:20]
        for result, name, parameters, how in found:
            if how != "alwaysinline":
                fresh = f"{name}.{key}"
                known[name] = fresh, f"declare {result}@{fresh}{' '.join(parameters.split())}"
                made = re.sub(rf"define internal ([^@]*)@{re.escape(name)}\(", rf"define \1@{fresh}(", made)
                made = re.sub(rf"@{re.escape(name)}\(", f"@{fresh}(", made)
        yield CompiledUnit(key, made + declared, True)
    made = whole(own)
    key = hashlib.sha256(made.encode()).hexdigest()[:40]
    yield CompiledUnit(f"stretch_{key}", made.replace("@stretch(", f"@stretch_{key}(") + declared, False)


class Compiler:
    """LLVM in this process."""

    def __init__(self) -> None:
        try:
            import llvmlite
            import llvmlite.binding as llvm
        except ImportError:
            raise ImportError("CUPYFLASH_ENGINE=llvm needs llvmlite: pip install 'cupyflash[sim]'") from None
        from cupyflash.launch import cubins

        self.llvm: Any = llvm
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        cpu = target.triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        self.machine, self.quick = (target.create_target_machine(cpu=cpu[1], features=cpu[2], opt=level) for level in (2, 0))
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self.machine)
        self.version = repr((llvmlite.__version__, llvm.llvm_version_info, cpu))
        self.folder = None if cubins.asked(cubins.IN_MEMORY) else first_use.cache_folder() / "cupyflash_stretches"
        self.loaded: set[str] = set()

    def function(self, own: str, shared: Sequence[str], declared: str) -> int:
        """Returns the address of a kernel's function. Machine code that is kept is taken, other is compiled."""
        name = ""
        for unit in units(own, shared, declared):
            name = unit.name
            if name not in self.loaded:
                self.engine.add_object_file(self.llvm.ObjectFileRef.from_data(self.code(unit)))
                self.loaded.add(name)
        self.engine.finalize_object()
        found: int = self.engine.get_function_address(name)
        return found

    def code(self, unit: CompiledUnit) -> bytes:
        """Returns the object file of a unit."""
        key = hashlib.sha256(f"{self.version}\n{unit.optimised}\n{unit.text}".encode()).hexdigest()[:40]
        path = None if self.folder is None else self.folder / f"{key}.o"
        found = None if path is None else kept(path)
        if found is None:
            found = self.compiled(unit)
            if path is not None:
                keep(path, found)
        return found

    def compiled(self, unit: CompiledUnit) -> bytes:
        llvm = self.llvm
        module = llvm.parse_assembly(unit.text)
        module.verify()
        machine = self.machine if unit.optimised else self.quick
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = True
        builder = llvm.create_pass_builder(machine, options)
        if unit.optimised:
            passes = builder.getModulePassManager()
        else:
            passes = llvm.create_new_module_pass_manager()
            passes.add_sroa_pass()
        passes.run(module, builder)
        found: bytes = machine.emit_object(module)
        return found


def digest(path: Path, code: bytes) -> bytes:
    return hashlib.sha256(path.stem.encode() + code).digest()


def kept(path: Path) -> bytes | None:
    """Returns the machine code that `keep` stored; None if there is no file, or not the one that this user wrote so."""
    try:
        found = own_files.read(path)
    except OSError:
        return None
    return found[DIGEST:] if found[:DIGEST] == digest(path, found[DIGEST:]) else None


def keep(path: Path, code: bytes) -> None:
    """Stores machine code; warns if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own_files.write(path, digest(path, code) + code)
    except OSError as error:
        first_use.cache_is_unusable(path.parent, error)


@cache
def compiler() -> Compiler:
    found = Compiler()
    if found.folder is not None:
        own_files.sweep(found.folder)
    return found
