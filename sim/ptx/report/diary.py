"""The diary of one thread block: what its warps did, in the order executed: instructions, copies, products, arrivals, waits.

A row is a warp; lanes that diverge share it, their stretches one after the other. Each arrival, copy and product of a warpgroup,
for which others may wait, has a number. A wait names those that had to come before it. It is recorded when it is over, so that
in the order executed it follows everything that it waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..state.lanes import GROUP, WARP, LaneSet, Wave, run_starts, wavefronts
from ..state.segments import Access, Segment
from ..text.syntax import Array, PtxInstruction
from .counters import copies_by_lanes

WORD = 4


class Written(NamedTuple):
    """The writers of a word: numbers of the block's own stores and atomics, and whether other blocks wrote, too."""

    by: tuple[int, ...]
    outside: bool


class Writers:
    """The last store of each word, and the atomics since. `rows` maps each number to its warp."""

    def __init__(self, wave: Wave, rows: Mapping[int, int]):
        self.rows = rows
        self.shared = wave.blocks * wave.shared_stride
        self.every = [Written((), False), Written((), True)]
        """The values that tables refer to by index: nobody, another block, and so on."""
        self.tables: dict[Segment | None, Array] = {}

    def table(self, segment: Segment | None) -> Array:
        """Returns the table of a tensor, or (None) of the wave's shared memory."""
        found = self.tables.get(segment)
        if found is None:
            nbytes = self.shared if segment is None else segment.size
            found = self.tables[segment] = np.zeros(nbytes // WORD + 1, np.int32)
        return found

    def stored(self, segment: Segment | None, words: Array, numbers: Array) -> None:
        """Records that lanes (rows of `words`) store; `numbers`: the store of each lane, 0 for lanes of other blocks."""
        places = np.ones(len(numbers), np.int32)
        for number in np.unique(numbers[numbers > 0]).tolist():
            places[numbers == number] = len(self.every)
            self.every.append(Written((number,), False))
        self.table(segment)[words] = places[:, None]

    def added(self, segment: Segment | None, words: Array, numbers: Array) -> None:
        """Adds updates by lanes: their numbers join those of others, the last one of each warp."""
        table, each = self.table(segment), np.repeat(numbers, words.shape[1])
        order = np.argsort(words, axis=None, kind="stable")
        found, each = words.reshape(-1)[order], each[order]
        for a, b in pairwise([*run_starts(found).tolist(), len(found)]):
            before, mine = self.every[table[found[a]]], np.unique(each[a:b]).tolist()
            rows = {self.rows[number] for number in mine if number}
            kept = [number for number in before.by if self.rows[number] not in rows]
            table[found[a]] = len(self.every)
            self.every.append(Written((*kept, *(number for number in mine if number)), before.outside or 0 in mine))

    def of(self, segment: Segment | None, words: Array) -> Written:
        """Returns the writers of all these words together."""
        some = [self.every[place] for place in sorted(set(self.table(segment)[words].ravel().tolist()))]
        return Written(tuple(dict.fromkeys(n for one in some for n in one.by)), any(one.outside for one in some))


MOST_KEPT = 1_000_000
"""Most stretches and acts of all warps together. Beyond it a diary is given up, since they take some 300 and 150 bytes each."""

WRITES = frozenset({"st", "stmatrix", "atom", "red"})
"""Opcodes by which threads write memory that others may read."""

REMEMBERED = 1024
"""Most sets of lanes for which the block's warps are remembered."""


class Shared(NamedTuple):
    """An access to shared or local memory: its wavefronts."""

    passes: int


class Global(NamedTuple):
    """An ordinary access to global memory: sectors of 32 bytes."""

    sectors: int


class Sign(NamedTuple):
    """An arrival, or registers given back: complete once it is issued."""

    number: int


class Promise(NamedTuple):
    """An arrival that completes when these copies have landed, and those of the promise before it."""

    number: int
    after: tuple[int, ...]


class Start(NamedTuple):
    """A copy starts."""

    number: int


class MultiplyIssue(NamedTuple):
    """A warp's part of a product of its warpgroup, which begins when the last of the four warps has come."""

    number: int


class WaitSpan(NamedTuple):
    """A wait: over when all of `on` have come. `read`: waits for copies to global memory only until they have read their source.

    kind: barrier, cluster, phase (mbarrier), memory (a loop that reads it), copies (cp.async), stores (bulk groups), products,
    registers. what: which one, in words. meeting: a number that waits share which are over together, -1 for none.
    outside: another block had a part in it.
    """

    kind: str
    what: str
    on: tuple[int, ...]
    meeting: int = -1
    read: bool = False
    outside: bool = False


Act = Shared | Global | Sign | Promise | Start | MultiplyIssue | WaitSpan


@dataclass(slots=True)
class CodeSpan:
    """Instructions from `first` to `end` (exclusive), and the acts with the instruction they belong to, in order."""

    first: int
    end: int
    acts: list[tuple[int, Act]] = field(default_factory=list)


@dataclass(slots=True)
class CopySpan:
    """An asynchronous copy: by warp `row`, with instruction `pc`; it moves `nbytes` of `tensor` to `where`.

    how: cp.async, bulk, TMA or DSMEM. group: groups that its warp had closed before (cp.async). inward: into the block's shared
    memory. across: into another block's.
    """

    row: int
    pc: int
    how: str
    tensor: str
    where: str
    nbytes: int
    group: int
    inward: bool
    across: bool = False


@dataclass(frozen=True, slots=True)
class ProductSpan:
    """A product of a warpgroup, the first of whose warps is `row`: FMAs, and the bits of an element of its operands."""

    row: int
    pc: int
    fmas: int
    bits: int


@dataclass(slots=True)
class Row:
    """A warp. `flying`: its cp.async that no promise covers; `groups`: how many it has closed; `promised`: its last promise."""

    stretches: list[CodeSpan] = field(default_factory=list)
    flying: list[int] = field(default_factory=list)
    groups: int = 0
    promised: int = -1
    stuck: list[tuple[int, str]] = field(default_factory=list)
    """Position of its stopped lanes at the end of the launch: an instruction (-1: none), and what they waited for."""
    spin: tuple[int, int, int, int] | None = None
    """Last arrival at the head of a loop that only waits: head, stretches, and end and acts of the last of these at that time."""


class DiaryPart(NamedTuple):
    """Lanes of one of the block's warps in a set of lanes, from position `start` to `end`."""

    row: int
    start: int
    end: int
    lanes: LaneSet


@dataclass(frozen=True)
class Listing:
    """The code: its instructions, and the registers that each reads and writes, as bits.

    flops: tensor-core FLOPs of a warp. spins: loops that only wait, from the head to the last instruction.
    """

    instructions: Sequence[PtxInstruction]
    reads: Sequence[int]
    writes: Sequence[int]
    flops: Sequence[int]
    spins: Mapping[int, int]

    @cached_property
    def asks(self) -> frozenset[int]:
        """The instructions that read memory in loops that only wait."""
        every = {pc for first, last in self.spins.items() for pc in range(first, last + 1)}
        return frozenset(pc for pc in every if self.instructions[pc].opcode in ("ld", "atom"))

    @cached_property
    def heads(self) -> frozenset[int]:
        """The heads of loops that only wait and read memory."""
        return frozenset(first for first, last in self.spins.items() if not self.asks.isdisjoint(range(first, last + 1)))


class Diary:
    """The diary of thread block `block` (linear index in the grid) of one launch: `Module.launch(..., diary=Diary(0))`.

    Raises ValueError for a block that is not a whole number from 0.
    """

    def __init__(self, block: int = 0):
        if isinstance(block, bool) or not isinstance(block, int | np.integer) or block < 0:
            raise ValueError(f"block must be a whole number from 0, got {block!r}")
        self.block = int(block)
        self.kernel = ""
        self.blocks = 0
        self.listing: Listing
        self.rows: list[Row] = []
        self.copies: dict[int, CopySpan] = {}
        self.products: dict[int, ProductSpan] = {}
        self.signs: dict[int, int] = {}
        """Rows of arrivals and promises, by number."""
        self.too_long = False
        """True if it was given up, and is empty: it had more than MOST_KEPT entries."""
        self._numbers = 0
        self._meetings = 0
        self._size = 0

    # -- beginning --------------------------------------------------------------------------------------------------------

    def open(self, kernel: str, blocks: int) -> None:
        """Begins with a launch. Raises ValueError for a grid without the block, or for a second launch."""
        if self.kernel:
            raise ValueError(f"diary must be a new one for each launch: this one is of {self.kernel}")
        if self.block >= blocks:
            raise ValueError(f"block {self.block} of the diary is not in the grid: {kernel} has {blocks}, from 0")
        self.kernel, self.blocks = kernel, blocks

    def of_wave(self, wave: Wave) -> bool:
        """True if the block is in a wave."""
        return any(wave.number(wave.first_block + k) == self.block for k in range(wave.blocks))

    def begin(self, wave: Wave, listing: Listing, name: Callable[[int], str]) -> None:
        """Begins the wave with the block; `name` describes an offset in shared memory in words."""
        self.listing, self.name = listing, name
        self.at = {i: pc for pc, i in enumerate(listing.instructions)}
        # The block's place in the wave.
        self.local = next(k for k in range(wave.blocks) if wave.number(wave.first_block + k) == self.block)
        self._first, self._end = self.local * wave.lanes_per_block, (self.local + 1) * wave.lanes_per_block
        self.rows = [Row() for _ in range(wave.warps_per_block)]
        self._parts: dict[LaneSet, list[DiaryPart]] = {}
        self._met: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        self._over: dict[str, tuple[int, tuple[int, ...]]] = dict.fromkeys(("barrier", "cluster"), (-1, ()))
        self._phases: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self._outside: set[tuple[int, int, int]] = set()
        self._lives: defaultdict[int, int] = defaultdict(int)
        self._issued: dict[int, int] = {}
        self._kept: dict[int, int] | None = None
        self._given: list[int] = []
        self._writers = Writers(wave, self.signs) if listing.asks else None

    def close(self, alive: Array) -> None:
        """Ends the wave; `alive`: threads of each warp still alive, none unless a fault or a deadlock stopped it.
        Drops state that only recording needed, and with it the memory that it refers to.
        """
        for row, left in zip(self.rows, alive.reshape(-1, len(self.rows))[self.local], strict=True):
            if left and not row.stuck:
                row.stuck.append((row.stretches[-1].end - 1 if row.stretches else -1, "the launch was stopped"))
        self._parts.clear()
        self._writers = None
        del self.name

    def parts(self, lanes: LaneSet) -> list[DiaryPart]:
        """Returns the block's warps in a set of lanes."""
        found = [] if self.too_long else self._parts.get(lanes)
        if found is None:
            if len(self._parts) >= REMEMBERED:
                self._parts.clear()
            first, end = (int(n) for n in np.searchsorted(lanes.index, (self._first, self._end)))
            rows = (lanes.index[first:end] - self._first) // WARP
            starts = run_starts(rows).tolist()
            found = self._parts[lanes] = [
                DiaryPart(int(rows[a]), first + a, first + b, lanes.subset(np.arange(first + a, first + b)))
                for a, b in pairwise([*starts, end - first])
            ]
        return found

    # -- instructions -----------------------------------------------------------------------------------------------------

    def ran(self, lanes: LaneSet, first: int, end: int) -> None:
        """Records that lanes run instructions from `first` to `end`; their acts are recorded after this call."""
        for part in self.parts(lanes):
            row = self.rows[part.row]
            if row.spin is not None or first in self.listing.spins:
                self._turn(row, first)
            last = row.stretches[-1] if row.stretches else None
            if last is not None and last.end == first and first not in self.listing.heads:
                last.end = end
            else:
                row.stretches.append(CodeSpan(first, end))
                self._size += 1
        if self._size > MOST_KEPT and not self.too_long:
            self.too_long, self._writers = True, None
            for numbered in (self.copies, self.products, self.signs, self._phases):
                numbered.clear()
            for row in self.rows:
                row.stretches.clear()

    def _turn(self, row: Row, first: int) -> None:
        """Keeps only the last turn of a loop that only waits: the number of turns depends on the machine."""
        if row.spin is not None:
            head, count, end, acts = row.spin
            if first == head:
                self._size -= sum(1 + len(stretch.acts) for stretch in row.stretches[count:])
                del row.stretches[count:]
                if row.stretches:
                    self._size -= len(row.stretches[-1].acts) - acts
                    row.stretches[-1].end = end
                    del row.stretches[-1].acts[acts:]
            elif not head < first <= self.listing.spins[head]:
                row.spin = None
        if first in self.listing.spins:
            last = row.stretches[-1] if row.stretches else None
            row.spin = first, len(row.stretches), last.end if last else 0, len(last.acts) if last else 0

    def note(self, row: int, pc: int, act: Act) -> None:
        """Records an act of instruction `pc`, the last that the row has run, or one of its stretch."""
        stretches = self.rows[row].stretches
        if not isinstance(act, Shared | Global) and not (isinstance(act, WaitSpan) and act.kind == "memory"):
            self.rows[row].spin = None  # what is behind it stays
        last = stretches[-1]
        if not last.first <= pc < last.end or (last.acts and last.acts[-1][0] > pc):
            last = CodeSpan(pc + 1, pc + 1)  # other lanes have run since
            stretches.append(last)
            self._size += 1
        last.acts.append((pc, act))
        self._size += 1

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def signs_of(self, lanes: LaneSet, pc: int) -> list[int]:
        """Returns the arrivals of the block's warps, one each."""
        found = []
        for part in self.parts(lanes):
            found.append(self.number())
            self.signs[found[-1]] = part.row
            self.note(part.row, pc, Sign(found[-1]))
        return found

    def stuck(self, lanes: LaneSet, instruction: PtxInstruction, what: str) -> None:
        """Records that lanes wait at an instruction for what never comes."""
        for part in self.parts(lanes):
            self.rows[part.row].stuck.append((self.at[instruction], f"{what}; it is never over"))

    # -- memory -----------------------------------------------------------------------------------------------------------

    def access(self, access: Access) -> None:
        """Records a checked access."""
        lanes, space, segment, addresses, size, *_, i = access
        if segment is not None and segment.space != "global":
            return
        pc, copies = self.at[i], copies_by_lanes(i)
        if self._writers is not None and space != "local" and pc in self.listing.asks:
            self._asked(access, pc)
        for part in self.parts(lanes):
            at = addresses[part.start : part.end]
            if segment is None:
                assert isinstance(size, int)
                if copies and space == "shared":
                    self._copy(part.row, pc, int(at[0]))
                passes = wavefronts(part.lanes, at, size)[0] if space == "shared" else -(-size * part.lanes.n // 128)
                self.note(part.row, pc, Shared(passes))
            elif copies:
                if part.row not in self._issued:
                    continue  # its destination is nowhere
                copy = self.copies[self._issued[part.row]]
                copy.tensor = segment.name
                copy.nbytes += size * part.lanes.n if isinstance(size, int) else int(size[part.start : part.end].sum())
            else:
                assert isinstance(size, int)
                first, pattern = part.lanes.pattern(at, size)
                self.note(part.row, pc, Global(pattern.sectors(first)))
        if self._writers is not None and space != "local" and i.opcode in WRITES and pc not in self.listing.asks:
            self._wrote(access)

    def _words(self, access: Access) -> Array:
        """Returns the words of memory that lanes access, (lanes, words of each)."""
        assert isinstance(access.size, int)
        start = access.addresses.astype(np.int64) - (0 if access.segment is None else access.segment.start)
        if access.space == "shared":
            start = start + access.lanes.block * access.lanes.wave.shared_stride
        return (start // WORD)[:, None] + np.arange(max(1, access.size // WORD))

    def _asked(self, access: Access, pc: int) -> None:
        """Records that a loop that only waits reads memory: it waits for the last writer there."""
        assert self._writers is not None
        words, segment = self._words(access), access.segment
        for part in self.parts(access.lanes):
            by, outside = self._writers.of(segment, words[part.start : part.end])
            if by or outside:
                at = int(access.addresses[part.start]) % access.lanes.wave.shared_stride if segment is None else 0
                what = f"shared memory at {self.name(at)}" if segment is None else segment.name
                self.note(part.row, pc, WaitSpan("memory", what, by, outside=outside))

    def _wrote(self, access: Access) -> None:
        """Records that lanes write memory, for which a loop may wait."""
        assert self._writers is not None
        lanes, i = access.lanes, access.instruction
        numbers = np.zeros(lanes.n, np.int64)
        for part, number in zip(self.parts(lanes), self.signs_of(lanes, self.at[i]), strict=True):
            numbers[part.start : part.end] = number
        adds = i.opcode in ("atom", "red") and "exch" not in i.mods
        note = self._writers.added if adds else self._writers.stored
        note(access.segment, self._words(access), numbers)

    def _copy(self, row: int, pc: int, offset: int) -> None:
        number = self._issued[row] = self.number()
        warp = self.rows[row]
        self.copies[number] = CopySpan(row, pc, "cp.async", "", self.name(offset), 0, warp.groups, True)
        warp.flying.append(number)
        self.note(row, pc, Start(number))

    # -- cp.async ---------------------------------------------------------------------------------------------------------

    def issued(self, lanes: LaneSet) -> dict[int, int]:
        """Returns the copies of an instruction by row; the instruction is over."""
        return {part.row: self._issued.pop(part.row) for part in self.parts(lanes) if part.row in self._issued}

    def committed(self, lanes: LaneSet) -> None:
        for part in self.parts(lanes):
            self.rows[part.row].groups += 1

    def waited(self, lanes: LaneSet, i: PtxInstruction, kind: str, on: Mapping[int, Iterable[int]], read: bool = False) -> None:
        """Records that warps have waited for their entries in `on`, by row."""
        for part in self.parts(lanes):
            mine = tuple(dict.fromkeys(on.get(part.row, ())))
            if kind == "copies":
                row = self.rows[part.row]
                row.flying = [number for number in row.flying if number not in mine]
            self.note(part.row, self.at[i], WaitSpan(kind, "", mine, read=read))

    def promised(self, lanes: LaneSet, instruction: PtxInstruction) -> dict[int, int]:
        """Records that warps will arrive when their copies have landed; returns the promises by row."""
        found = {}
        for part in self.parts(lanes):
            row, number = self.rows[part.row], self.number()
            self.signs[number] = part.row
            before = (row.promised,) if row.promised >= 0 else ()
            self.note(part.row, self.at[instruction], Promise(number, (*before, *row.flying)))
            row.flying, row.promised, found[part.row] = [], number, number
            row.groups += 1
        return found

    def keep(self, promise: dict[int, int] | None) -> None:
        """Makes arrivals, until the next such call, those of a promise."""
        self._kept = promise

    # -- bulk copies ------------------------------------------------------------------------------------------------------

    def bulk(
        self, lanes: LaneSet, tensor: str, where: Sequence[str], nbytes: Array, i: PtxInstruction, inward: bool, across: Array
    ) -> list[int]:
        """Starts copies, one a lane; returns their numbers, -1 in other blocks. `across`: from shared memory to another block's."""
        found = [-1] * lanes.n
        how = "TMA" if "tensor" in i.mods else "bulk" if "global" in i.mods else "DSMEM"
        for part in self.parts(lanes):
            for k in range(part.start, part.end):
                number, out = self.number(), bool(across[k])
                found[k] = number
                place = part.row, self.at[i], how, tensor, where[k]
                self.copies[number] = CopySpan(*place, int(nbytes[k]), -1, inward and not out, out)
                self.note(part.row, self.at[i], Start(number))
        return found

    # -- barriers ---------------------------------------------------------------------------------------------------------

    def came(self, kind: str, number: int, lanes: LaneSet, pc: int) -> None:
        """Records that warps arrive at a barrier of the block or of its cluster."""
        self._met[kind, number] += self.signs_of(lanes, pc)

    def met(self, kind: str, number: int, waits: Iterable[tuple[LaneSet, int]], outside: bool = False) -> None:
        """Completes a barrier: the lanes that wait, at an instruction each, go on; a cluster's may do so one after the other."""
        if (kind, number) in self._met:
            self._meetings += 1
            self._over[kind] = self._meetings, tuple(self._met.pop((kind, number)))
        meeting, on = self._over[kind]
        what = f"barrier {number}" if kind == "barrier" else "the cluster's barrier"
        for lanes, pc in waits:
            for part in self.parts(lanes):
                self.note(part.row, pc, WaitSpan(kind, what, on, meeting, outside=outside))

    # -- mbarriers --------------------------------------------------------------------------------------------------------

    def made(self, key: int, per: int) -> None:
        """Initialises an mbarrier; a block's shared memory has `per` places for them."""
        self._per = per
        self._lives[key] += 1

    def arrived(self, key: int, phase: int, lanes: LaneSet, instruction: PtxInstruction) -> None:
        """Records that lanes arrive at a phase of an mbarrier, or count bytes down."""
        if key // self._per != self.local:
            return
        at = key, self._lives[key], phase
        if self._kept is not None:
            self._phases[at] += [self._kept[part.row] for part in self.parts(lanes) if part.row in self._kept]
            return
        signs = self.signs_of(lanes, self.at[instruction])
        self._phases[at] += signs
        if lanes.index[0] < self._first or lanes.index[-1] >= self._end:
            self._outside.add(at)

    def brought(self, key: int, phase: int, number: int) -> None:
        """Records that a bulk copy has brought its bytes to a phase."""
        at = key, self._lives[key], phase
        if key // self._per == self.local:
            self._phases[at] += [number] if number >= 0 else []
            self._outside |= {at} if number < 0 else set()

    def saw(self, lanes: LaneSet, key: int, phase: int, pc: int) -> None:
        """Records that lanes have waited until a phase was complete; a negative one is before the first."""
        at = key, self._lives[key], phase
        which = f"phase {phase}" if phase >= 0 else "the phase before the first"
        what = f"{which} of the mbarrier at {self.name(key % self._per * 8)}"
        wait = WaitSpan("phase", what, tuple(self._phases.get(at, ())), outside=at in self._outside)
        for part in self.parts(lanes):
            self.note(part.row, pc, wait)

    # -- warpgroups, registers --------------------------------------------------------------------------------------------

    def multiplied(self, lanes: LaneSet, pc: int, size: tuple[int, int]) -> dict[int, int]:
        """Records a product of whole warpgroups (FMAs of each, bits of an element); returns its number by the first row of each."""
        found: dict[int, int] = {}
        for part in self.parts(lanes):
            first = part.row - part.row % GROUP
            if first not in found:
                found[first] = self.number()
                self.products[found[first]] = ProductSpan(first, pc, *size)
            self.note(part.row, pc, MultiplyIssue(found[first]))
        return found

    def resized(self, lanes: LaneSet, pc: int, more: bool) -> None:
        """Records that a warp has the registers that it asked for; if it gives some back, others may have them from then on."""
        if more:
            for part in self.parts(lanes):
                self.note(part.row, pc, WaitSpan("registers", "", tuple(self._given)))
        else:
            self._given += self.signs_of(lanes, pc)
