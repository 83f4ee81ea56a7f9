"""Launches by compiled code: straight runs of arithmetic, loads and stores of a kernel become functions that LLVM makes.

The machine stays as it is: its scheduler, barriers and registers. Where it would run the NumPy thunks of a region it calls a
function over the same registers. The function is exact for a launch without fault, and gives up at anything else: an address out of
bounds or not aligned, a byte that nobody wrote, two threads at one word of which one writes without a barrier of the
block between them, a NaN as a result (its payload is NumPy's). Then the launch's writes are undone, and it runs from its start
without compiled code, which finds and says everything. So a finding has one origin.

Arithmetic is made from the rows of the opcodes (`decode.table_rows`), as NumPy's evaluation is. An instruction without a
translation runs by its thunk between compiled ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from cupyflash.launch import first_use, own_files

from ..decode.access import CACHE
from ..decode.code import Code, CodeRegion
from ..decode.registry import Arg, Barrier, Branch, Exit, Return, Thunk, WarpBarrier
from ..order import moments
from ..order.history import Launches
from ..order.races import Races
from ..order.shadow import WIDEST
from ..state.lane_sets import AddressPattern, LaneSet
from ..state.segments import WINDOW_BITS, Segment
from ..text.syntax import Array, PtxInstruction, Unsupported
from .registers import Follower, RegisterFrame, Stop
from .translation import (
    ADDRESSES,
    ATOMICS,
    BLOCK_CROWD,
    BY,
    COUNTS,
    DISTINCT,
    EPOCH_BITS,
    FIRST,
    GRID_CROWD,
    HIGHEST,
    HOST,
    KINDS,
    LAST,
    LIST,
    LOWEST,
    NUMBER,
    PHASES,
    READ,
    RELATIVE,
    SHADOW,
    SHADOWED_FROM,
    STATE,
    STREWN,
    STREWN_LIST,
    THREAD_BITS,
    UNIQUE,
    UPDATED,
    WARP_CROWD,
    WARPS,
    WROTE,
    FunctionText,
    NoCode,
    ShadowRow,
    StrewnText,
    target,
)

if TYPE_CHECKING:
    from .ptx_machine import PtxMachine

SAFE = frozenset({"shfl", "vote", "activemask", "match", "redux"})
"""Opcodes that are not pure and touch no memory: their thunks run between compiled stretches."""

DIGEST = hashlib.sha256().digest_size

PRIVATE = ("param", "const", "local")
"""Spaces that no two threads write: their accesses run by their thunks."""


MISSES = 4
"""Accesses of an instruction with new patterns of addresses, after which patterns are not looked for."""

MOST_LISTS = 1 << 10
"""Most patterns of addresses that are remembered with their distinct ones."""

MOST_BYTES = 1 << 30
"""Most memory that a launch may take for shadows of segments and what they held before; compiled code gives up at more."""


class Compiler:
    """LLVM in this process. Machine code is kept in the folder of CuPy's kernel cache, as cubins are (`launch.cubins`)."""

    def __init__(self) -> None:
        try:
            import llvmlite
            import llvmlite.binding as llvm
        except ImportError:
            raise ImportError("CUPYFLASH_ENGINE=llvm needs llvmlite: pip install 'cupyflash[llvm]'") from None
        from cupyflash.launch import cubins

        self.llvm: Any = llvm
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        cpu = target.triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        self.machine = target.create_target_machine(cpu=cpu[1], features=cpu[2], opt=2)
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self.machine)
        self.version = repr((llvmlite.__version__, llvm.llvm_version_info, cpu))
        self.folder = None if cubins.asked(cubins.IN_MEMORY) else first_use.cache_folder() / "cupyflash_stretches"

    def function(self, text: str) -> int:
        """Compiles a function, or takes its kept machine code; returns its address."""
        key = hashlib.sha256(f"{self.version}\n{text}".encode()).hexdigest()[:40]
        name, path = f"stretch_{key}", None if self.folder is None else self.folder / f"{key}.o"
        code = None if path is None else kept(path)
        if code is None:
            code = self.compiled(text.replace("@stretch(", f"@{name}("))
            if path is not None:
                keep(path, code)
        self.engine.add_object_file(self.llvm.ObjectFileRef.from_data(code))
        self.engine.finalize_object()
        found: int = self.engine.get_function_address(name)
        return found

    def compiled(self, text: str) -> bytes:
        """Returns the object file of a module."""
        llvm = self.llvm
        module = llvm.parse_assembly(text)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = True
        builder = llvm.create_pass_builder(self.machine, options)
        builder.getModulePassManager().run(module, builder)
        found: bytes = self.machine.emit_object(module)
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


@cache
def compiled(text: str) -> int:
    return compiler().function(text)


DRIVER = """
define i32 @stretch(i64 %n, ptr %phases, i64 %count, ptr %tags, ptr %bases) {
start:
  br label %loop
loop:
  %k = phi i64 [0, %start], [%next, %more]
  %at = mul i64 %k, 3
  %place = getelementptr i64, ptr %phases, i64 %at
  %place1 = getelementptr i64, ptr %place, i64 1
  %place2 = getelementptr i64, ptr %place, i64 2
  %code = load ptr, ptr %place
  %table = load ptr, ptr %place1
  %offs = load ptr, ptr %place2
  %gives = call i32 %code(i64 %n, ptr %table, ptr %tags, ptr %bases, ptr %offs)
  %wrong = icmp ne i32 %gives, 0
  br i1 %wrong, label %end, label %more
more:
  %next = add i64 %k, 1
  %over = icmp eq i64 %next, %count
  br i1 %over, label %end, label %loop
end:
  ret i32 %gives
}
"""
"""Calls the functions of a stretch one after the other, until one gives up: few texts differ, so that few are compiled."""


@cache
def driver() -> Callable[..., int]:
    return ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 5)(compiled(DRIVER))


RESOLVE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)


class BoundAccess:
    """A load, store or atomic bound to a frame: its table, and the pattern of addresses for which that holds."""

    def __init__(self, stretches: Stretches, frame: RegisterFrame, i: PtxInstruction):
        self.stretches, self.frame, self.instruction = stretches, frame, i
        self.space, type_, registers, self.base, self.offset = target(i)
        self.size = len(registers) * type_.bytes
        self.relative = np.zeros(frame.n, np.int64)
        self.table = np.zeros(COUNTS + PHASES, np.int64)
        self.table[RELATIVE] = self.relative.ctypes.data
        self.addresses, listed = stretches.scratch(frame.n)
        self.table[ADDRESSES], self.table[STREWN_LIST] = self.addresses.ctypes.data, listed.ctypes.data
        self.pattern: AddressPattern | None = None
        self.segment: Segment | None = None
        self.misses = 0
        self.forget()

    def forget(self) -> None:
        """Makes the next access ask again where it is."""
        self.table[FIRST], self.table[LAST] = 1, 0
        self.table[LOWEST], self.table[HIGHEST] = 1, 0

    def guarded(self, what: int) -> int:
        """Answers compiled code, through which no exception can pass: after one the launch starts anew.

        `what`: 0 resolves an access, 1 finds the memory of one without a pattern. Returns 0; 1 if anything is wrong; 2 if an access
        shall be taken as one without a pattern.
        """
        try:
            if what:
                return int(not self.locate())
            self.misses += 1
            if self.misses > MISSES:
                self.table[STREWN] = 1
                return 2
            return int(not self.resolve())
        except Exception:
            return 1

    def resolve(self) -> bool:
        """Finds the pattern of the lanes' addresses and their memory; returns False if anything is wrong with them."""
        self.flush()
        frame = self.frame
        base = frame.array(self.base)
        delta = np.array(self.offset & ((1 << 8 * base.dtype.itemsize) - 1), base.dtype)
        addresses = np.ascontiguousarray(np.broadcast_to(base + delta, frame.n))
        first, pattern = frame.lanes.pattern(addresses, self.size)
        room = self.room(first)
        if room is None:
            return False
        low, high = room[0] - pattern.low, room[1] - pattern.high
        if not pattern.aligned or first & (self.size - 1) or not low <= first <= high:
            return False
        self.table[FIRST], self.table[LAST] = low, high
        self.relative[:] = pattern.relative
        self.distinct = self.stretches.distinct(pattern, self.space)
        if self.instruction.opcode == "st" and len(self.distinct) < frame.n:
            return False
        self.table[DISTINCT], self.table[LIST] = len(self.distinct), self.distinct.ctypes.data
        self.pattern = pattern
        return True

    def locate(self) -> bool:
        """Finds the memory of addresses without a pattern; returns False if there is none."""
        self.flush()
        some = self.addresses[self.addresses != -1]
        room = self.room(int(some[0]))
        if room is None:
            return False
        self.table[LOWEST], self.table[HIGHEST] = room
        return True

    def room(self, address: int) -> tuple[int, int] | None:
        """Returns the smallest and largest address in the memory that has this one, which it enters in the table, or None."""
        memory, table, write = self.stretches.machine.memory, self.table, self.instruction.opcode != "ld"
        # What the table has of the earlier memory holds no longer.
        self.forget()
        table[NUMBER] = self.stretches.number(self.instruction)
        if self.space == "shared":
            home = memory.homes.get(self.instruction)
            start, end = (0, None) if home is None else home[1:]
            table[HOST] = memory.shared[1].ctypes.data
            table[STATE] = memory.states[1].ctypes.data
            table[SHADOWED_FROM], table[SHADOW] = 0, self.stretches.shared_shadow.ctypes.data
            return start, (memory.shared_size if end is None else end) - self.size
        segment = memory.segments.get(address >> WINDOW_BITS)
        if segment is None or segment.space not in ("global", "const") or (write and not segment.writable):
            return None
        view, at, limit = segment.window(self.size)
        if not len(view):
            return None
        if write:
            self.stretches.keep(segment)
        self.segment = segment
        table[HOST] = segment.address - segment.start
        table[STATE] = 0 if segment.state is None else segment.state.ctypes.data - segment.start
        table[SHADOWED_FROM] = segment.start & -WIDEST
        table[SHADOW] = self.stretches.shadow(segment).ctypes.data if self.stretches.followed(segment) else 0
        return int(at), int(at) + int(limit)

    def flush(self) -> None:
        """Adds what was executed in the memory that the table has to the counts of the launch."""
        counts, pattern = self.table[COUNTS:], self.pattern
        for phase in np.flatnonzero(counts).tolist():
            assert pattern is not None
            times, lanes = int(counts[phase]), pattern.lanes
            each = pattern.wavefronts(phase) if self.space == "shared" else (pattern.sectors(phase), pattern.unique_bytes)
            self.count(lanes.warps * times, lanes.n * times, *(number * times for number in each))
        counts[:] = 0
        warps, n, passes, ideal, sectors, unique = self.table[WARPS : UNIQUE + 1].tolist()
        if n:
            self.count(warps, n, *((passes, ideal) if self.space == "shared" else (sectors, unique * self.size)))
        self.table[WARPS : UNIQUE + 1] = 0

    def count(self, warps: int, lanes: int, *more: int) -> None:
        """Counts accesses; `more`: wavefronts and those without conflicts, or sectors and distinct bytes."""
        tally, i, nbytes = self.stretches.machine.tally, self.instruction, lanes * self.size
        if self.space == "shared":
            tally.shared[i, "atom" if i.opcode == "red" else i.opcode, self.size].count(warps, nbytes, *more)
            return
        assert self.segment is not None
        for write in {"ld": (False,), "st": (True,)}.get(i.opcode, (False, True)):
            tally.traffic[i, self.segment].count_side(write, nbytes, warps, *more)


class Phase(NamedTuple):
    """A compiled function of a stretch: its address, the entries of its table, instructions with counts of lanes that are off,
    and the access that it is.
    """

    address: int
    table: list[tuple[str, Any]]
    off: list[PtxInstruction]
    accessed: PtxInstruction | None

    @classmethod
    def of(cls, text: FunctionText) -> Phase:
        return cls(compiled(text.text()), text.table, text.off, text.accessed)


STRETCHES: WeakKeyDictionary[Code, dict[tuple[int, int, ShadowRow], list[tuple[int, list[Phase]]]]] = WeakKeyDictionary()
"""By start, end and shadow of a region: its `pieces`, which stay from launch to launch."""


class Stretches:
    """The compiled code of a launch, and who has touched which word of memory since which barrier."""

    def __init__(self, machine: PtxMachine, launches: Launches | None = None):
        """`launches`: the launch as one of a history."""
        self.machine, self.launches = machine, launches
        self.shadows: dict[Segment, Array] = {}
        self.kept: dict[Segment, tuple[Array, Array | None]] = {}
        """The contents and states that segments had before they were written."""
        self.row = ShadowRow.of(machine.code, launches is not None)
        self.shared_shadow = np.zeros((1, self.row.words), np.uint64)
        self.instructions: list[PtxInstruction] = []
        self.numbers: dict[int, int] = {}
        self.epochs = np.ones(0, np.uint64)
        """One for each block of the wave."""
        self.bound: list[BoundAccess] = []
        self.offs: list[tuple[list[PtxInstruction], Array]] = []
        self.lists: dict[tuple[str, int, bytes, bytes], Array] = {}
        self.scratches: dict[int, tuple[Array, Array]] = {}
        self.tagged: tuple[LaneSet | None, int, Array] = None, 0, np.zeros(0, np.uint64)
        """The last lanes, moment and tags: many stretches run between two barriers."""
        self.taken = 0
        """Bytes of shadows and kept contents."""
        self.moment = 0
        """Grows with every barrier and wave, so that tags are made anew."""

    def begin_wave(self) -> None:
        wave = self.machine.wave
        granules = wave.blocks * wave.shared_stride // self.row.shared_granule
        if len(self.shared_shadow) != granules:
            self.shared_shadow = np.zeros((granules, self.row.words), np.uint64)
        else:
            self.shared_shadow[:] = 0
        if len(self.epochs) != wave.blocks:
            # Shared memory is elsewhere now.
            for access in self.bound:
                access.forget()
        self.epochs = np.ones(wave.blocks, np.uint64)
        self.moment += 1

    def barrier(self, block: int, count: int) -> None:
        """Notes that a block has met at a barrier."""
        self.epochs[block - self.machine.wave.first_block] += np.uint64(1)
        self.moment += 1

    def tags(self, lanes: LaneSet) -> Array:
        """Returns block, epoch and thread of each lane as one number, in which later bits decide first."""
        if self.tagged[:2] == (lanes, self.moment):
            return self.tagged[2]
        block = lanes.block
        if self.epochs.max() >> np.uint64(EPOCH_BITS):
            raise Stop
        number = (block + lanes.wave.first_block + 1).astype(np.uint64) << np.uint64(32)
        thread = (lanes.index % lanes.wave.lanes_per_block).astype(np.uint64)
        self.tagged = lanes, self.moment, number | self.epochs[block] << np.uint64(THREAD_BITS) | thread
        return self.tagged[2]

    def scratch(self, n: int) -> tuple[Array, Array]:
        """Returns memory for the addresses of `n` lanes and a `STREWN_LIST`, until the next access."""
        found = self.scratches.get(n)
        if found is None:
            found = self.scratches[n] = np.zeros(n, np.int64), np.zeros((n, 3), np.int64)
        return found

    def take(self, nbytes: int) -> None:
        """Counts memory. Raises Stop if it is too much."""
        self.taken += nbytes
        if self.taken > MOST_BYTES:
            raise Stop

    def keep(self, segment: Segment) -> None:
        """Keeps the contents of a segment that is about to be written for the first time."""
        if segment not in self.kept:
            self.take(2 * segment.size)
            state = segment.state
            self.kept[segment] = segment.window(1)[0].copy(), None if state is None else state.copy()

    def restore(self) -> None:
        """Undoes all writes to segments."""
        for segment, (contents, state) in self.kept.items():
            segment.window(1)[0][:] = contents
            if state is not None and segment.state is not None:
                segment.state[:] = state

    def followed(self, segment: Segment) -> bool:
        """True if the accesses to a segment must be known: somebody may write it, now or in another launch."""
        writes = segment.writable and any(map(self.machine.code.sharing.writes, segment.places))
        return writes or self.launches is not None

    def shadow(self, segment: Segment) -> Array:
        found = self.shadows.get(segment)
        if found is None:
            granules = (segment.size + 2 * WIDEST) // self.row.granule
            self.take(8 * self.row.words * granules)
            found = self.shadows[segment] = np.zeros((granules, self.row.words), np.uint64)
        return found

    def number(self, instruction: PtxInstruction) -> int:
        """Returns the number of an instruction among those that have accessed memory, in the order of their first accesses."""
        found = self.numbers.setdefault(id(instruction), len(self.numbers))
        if found == len(self.instructions):
            self.instructions.append(instruction)
        return found

    def distinct(self, pattern: AddressPattern, space: str) -> Array:
        """Returns the distinct addresses of a pattern as a `LIST`."""
        lanes, n = pattern.lanes, pattern.lanes.n
        key = space, pattern.size, pattern.key, lanes.index.tobytes()
        found = self.lists.get(key)
        if found is None:
            places = pattern.relative.astype(np.int64)
            if space == "shared":
                places = places + lanes.block * lanes.wave.shared_stride
            _, at, which = np.unique(places[::-1], return_index=True, return_inverse=True)
            last = n - 1 - at
            theirs = last[which[::-1]]
            crowd = np.where(lanes.warp[theirs] != lanes.warp, BLOCK_CROWD, WARP_CROWD)
            crowd = np.where(lanes.block[theirs] != lanes.block, GRID_CROWD, crowd)
            crowds = np.zeros(len(last), np.int64)
            np.bitwise_or.at(crowds, which[::-1], np.where(theirs == np.arange(n), 0, crowd))
            if len(self.lists) > MOST_LISTS:
                self.lists.clear()
            self.lists[key] = found = np.ascontiguousarray(np.stack([places[last], last, crowds], axis=1), np.int64)
        return found

    # -- a launch of a history ------------------------------------------------------------------------------------------

    def tell(self, races: Races) -> bool:
        """Enters all accesses into the tables of a race detector, as if it had seen them.

        Returns False if an earlier launch that is not over has touched some of the same granules, of which one writes.
        """
        races.wave, races.instructions = self.machine.wave, self.instructions
        for segment, shadow in self.shadows.items():
            area = races.area(segment) if segment.space == "global" else None
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

    def finish(self) -> None:
        """Adds the last counts."""
        for access in self.bound:
            access.flush()
        for instructions, off in self.offs:
            for i, count in zip(instructions, off.tolist(), strict=False):
                if count:
                    self.machine.tally.predicated_off[i] += count

    def forget(self) -> None:
        """Gives the memory of shadows and kept contents back, which objects that refer to each other would keep for a while."""
        self.shadows.clear()
        self.kept.clear()

    # -- code -----------------------------------------------------------------------------------------------------------

    def thunks(self, frame: RegisterFrame, region: CodeRegion) -> list[Thunk]:
        """Returns the thunks of a region: compiled stretches, and what is between them."""
        known = STRETCHES.setdefault(frame.code, {})
        key = region.start, region.end, self.row
        if key not in known:
            known[key] = self.pieces(frame, region)
        found: list[Thunk] = []
        for pc, phases in known[key]:
            if not phases:
                found += frame.plain(pc, pc + 1)
                continue
            thunk = self.bind(frame, phases)
            for follower in self.watching(pc):
                thunk = follower.watch(frame, pc, thunk)
            found.append(thunk)
        return found

    def watching(self, pc: int) -> list[Follower]:
        return [follower for follower in self.machine.followers if pc in follower.watched]

    def pieces(self, frame: RegisterFrame, region: CodeRegion) -> list[tuple[int, list[Phase]]]:
        """Returns a region as stretches with their first instructions; instructions without translation have no phases.

        An access that is watched is a stretch of its own.
        """
        found: list[tuple[int, list[FunctionText]]] = []
        phases: list[FunctionText] = []
        for pc in range(region.start, region.end):
            plan, i = frame.code.plans[pc], frame.code.instructions[pc]
            loads, watched = i.opcode in KINDS and space(i) not in PRIVATE, bool(self.watching(pc))
            try:
                if watched and not loads:
                    raise NoCode
                if not loads and phases and phases[-1].accessed is None:
                    phases[-1] = phases[-1].followed(plan, i)
                    continue
                text = FunctionText(frame, self.row)
                if loads:
                    text.access(plan, i)
                else:
                    text = text.followed(plan, i)
            except NoCode:
                found.append((pc, []))
                phases = []
                continue
            if watched or not phases:
                phases = []
                found.append((pc, phases))
            phases.append(text)
            if watched:
                phases = []
        return [(pc, [Phase.of(text) for text in texts]) for pc, texts in found]

    def bind(self, frame: RegisterFrame, phases: list[Phase]) -> Thunk:
        """Returns the thunk that calls compiled code for a frame."""
        call, kept, accesses = driver(), [], []
        listed = np.zeros((len(phases), 3), np.int64)
        for number, phase in enumerate(phases):
            table, off = np.zeros(max(1, len(phase.table)), np.int64), np.zeros(max(1, len(phase.off)), np.int64)
            callback: Any = None
            if phase.accessed is not None:
                access = BoundAccess(self, frame, phase.accessed)
                callback = RESOLVE(access.guarded)
                accesses.append(access)
            for at, (kind, key) in enumerate(phase.table):
                if kind == "row":
                    table[at] = frame.files[key[0]][key[1]].ctypes.data
                elif kind == "access":
                    table[at] = access.table.ctypes.data
                elif kind == "resolve":
                    table[at] = ctypes.cast(callback, ctypes.c_void_p).value or 0
                elif kind == "strewn":
                    table[at] = compiled(StrewnText(*key).text())
                elif kind == "number":
                    table[at] = np.uint64(key).view(np.int64)
                else:
                    raw = frame.array(Arg(*key))
                    table[at] = int(raw.view(f"i{raw.itemsize}"))
            listed[number] = phase.address, table.ctypes.data, off.ctypes.data
            kept.append((table, callback))
            self.offs.append((phase.off, off))
        self.bound += accesses
        moment, seen = -1, None
        tags = bases = np.zeros(1, np.int64)
        places = [frame.n, listed.ctypes.data, len(phases), 0, 0]

        def run(keep: Any = (kept, listed)) -> None:
            nonlocal moment, seen, tags, bases
            lanes = frame.lanes
            if lanes is not seen or moment != self.moment:
                if seen is None or (lanes is not seen and not np.array_equal(lanes.index, seen.index)):
                    for access in accesses:
                        access.forget()
                    bases = lanes.block * lanes.wave.shared_stride
                    places[4] = bases.ctypes.data
                seen = lanes
                tags, moment = self.tags(lanes), self.moment
                places[3] = tags.ctypes.data
            if call(*places):
                raise Stop

        return run


def space(i: PtxInstruction) -> str:
    """Returns the space of a load or store; one with a window is generic."""
    return next((mod.partition("::")[0] for mod in i.mods if mod.partition("::")[0] in ("global", "shared", *PRIVATE)), "generic")


def plain(i: PtxInstruction) -> bool:
    """True for a load, store or atomic access that compiled code knows."""
    try:
        place, type_, registers, _, _ = target(i)
    except Unsupported:
        return False
    known = {"weak", *CACHE, "global", "shared", "v2", "v4", type_.name, "shared::cta"}
    if i.opcode in ("atom", "red"):
        known = {"relaxed", "gpu", "sys", *ATOMICS, "global", "shared", type_.name, "shared::cta"}
        if type_.bits < 32 or (type_.kind == "f" and "add" not in i.mods):
            return False
    return place in ("global", "shared") and not set(i.mods) - known and len(registers) * type_.bytes <= 16


def covers(machine: PtxMachine) -> bool:
    """True if compiled code can run a kernel: it has only what `Stretches` follows."""
    code = machine.code
    if code.sharing.guesses or code.sharing.narrow:
        return False
    for plan, i in zip(code.plans, code.instructions, strict=True):
        if plan.control is not None:
            control = plan.control
            simple = isinstance(control, Branch | Return | WarpBarrier) or (isinstance(control, Exit) and not control.trap)
            if not simple and not (isinstance(control, Barrier) and control.waits and not control.counted):
                return False
        elif i.opcode in KINDS and space(i) not in PRIVATE:
            if not plain(i):
                return False
        elif not plan.pure and i.opcode not in SAFE and i.opcode not in ("ld", "st"):
            return False
    return True


def knows_order(code: Code, launches: Launches, segments: list[Segment]) -> bool:
    """True if barriers of blocks are all that orders a launch's accesses, so that the tags are those of a race detector."""
    warps = any(isinstance(plan.control, WarpBarrier) for plan in code.plans)
    aligned = all((one.address - one.start) % WIDEST == 0 for one in segments)
    messages = code.sharing.atomics and launches.past.messages
    return launches.run.behind is None and aligned and not (warps or messages or code.sharing.releases or len(code.plans) >> 16)


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

COMPILING_SECONDS, BOUND_SECONDS = 0.5, 0.1
"""Processor time of NumPy from which on compiled code pays: if it has to be compiled, and if it has been."""


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
    return a_wave * waves > (BOUND_SECONDS if code.was_compiled else COMPILING_SECONDS)


def run_compiled(machine: PtxMachine, segments: list[Segment], races: Races | None = None) -> bool:
    """Runs a launch by compiled code. Returns False, with memory as it was, if that cannot run it, or gave up.

    `races`: the detector, in a launch of a history, to which all accesses are told. Raises ImportError without llvmlite.
    """
    setup = machine.setup
    plain = setup.seed is None and setup.on_barrier is None and setup.limits.max_instructions is None
    memory = machine.memory
    if not plain or memory.observer is not None or setup.geometry.cluster_blocks > 1 or memory.reserved or machine.code.whole_grid:
        return False
    launches = None if races is None else races.launches
    if launches is not None and not knows_order(machine.code, launches, segments):
        return False
    if not covers(machine):
        machine.code.gave_up = True
        return False
    if not apart(segments):
        return False
    compiler()
    stretches = machine.stretches = Stretches(machine, launches)
    machine.on_barrier = stretches.barrier
    try:
        done = machine.run() and machine.findings.clean and (races is None or stretches.tell(races))
    except BaseException:
        stretches.restore()
        raise
    machine.code.was_compiled = True
    if done:
        stretches.finish()
    else:
        machine.code.gave_up = True
        stretches.restore()
    stretches.forget()
    return done
