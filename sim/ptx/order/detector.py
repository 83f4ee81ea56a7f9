"""The accesses of a launch, in tables, and the findings of those that nothing orders.

Two accesses to the same bytes, one of them writing, race unless one happens before the other (`order.happens_before`).

Reads of shared memory by products of warpgroups (wgmma): a product reads its tiles at any time from its issue until its warps have
waited for it. A later writer must be ordered behind the wait of one of the four warps: they run the product together, and pipelines
let one of them release a stage. An earlier write must be over for each of the four, and be visible to the asynchronous proxy
(`order.moments`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from ..state.findings import (
    ERROR,
    WARNING,
    WARP_ONLY,
    Findings,
    Key,
    Verdict,
    at_line,
    kernel_line,
    place_of,
    source,
    source_and_call,
    thread_name,
)
from ..state.lane_sets import GROUP, WARP, LaneSet, Wave, by_value, run_starts
from ..state.segments import Pages, Segment
from ..text.syntax import Array, Imm, Line, PtxInstruction
from .happens_before import Order
from .moments import BLOCKS, CLUSTERS, CROWD, LANE, LANES, LEVEL, LOW, ONE, STAMP, WARPS, lanes_of, levels_of, raised, stamps_of
from .shadow import SAME, STORES, Area, Boxes, Shadow, Sharing, Stored, Table, Touch, Who, is_async, windows

WARP_BITS = np.uint64(((1 << STAMP) - 1) & ~(LANES | WARP - 1))
"""Bits of an entry that are equal in two entries of the same warp, be it one lane or some."""

COPY, LANDING = "asynchronous copy", "write of an asynchronous copy"

NOT_ORDERED = "are not ordered"
LEFT_OUT = "are in blocks that the scope of one of them leaves out: they are neither ordered nor atomic to each other"
OTHER_MENDS = {SAME: "one thread alone writes it", LEFT_OUT: "the device's scope on both sides (.gpu, thread_scope_device)"}
"""Likely mends by what a race comes of, where that is not the order alone."""


class Detector(Order):
    """The order of a launch's events, and a shadow of memory with the accesses to it."""

    def __init__(self, sharing: Sharing, size: int, segments: list[Segment], shared_stride: int, findings: Findings, blocks: int):
        """`size`: instructions of the kernel; `shared_stride`: bytes from one block's shared memory to the next one's."""
        super().__init__(blocks, sharing.proxies)
        self.findings = findings
        self.shared_stride = shared_stride
        self.instructions: list[PtxInstruction] = []
        self._numbers: dict[int, int] = {}
        self._asynchronous = np.zeros(0, bool)
        self.sharing = sharing
        self.shared_shift = sharing.shared_granule.bit_length() - 1
        self.granules = shared_stride >> self.shared_shift
        self.numbers = np.min_scalar_type(size)
        self.shared = Shadow(0, 1, True, self.numbers)
        self.segments = segments
        self._areas: dict[int, Area | None] = {}
        self.in_history = False
        """True if the launch is part of a history: others may write what it only reads."""
        self.offset_name: Callable[[int], str] = hex
        """Names an offset in shared memory."""
        self.storing: Stored | None = None
        """The store that is being made; None while something else accesses memory."""

    def begin_wave(self, wave: Wave) -> None:
        super().begin_wave(wave)
        self.shared = Shadow(wave.blocks * self.granules, self.warps, True, self.numbers, self.sharing.proxies)

    def number(self, instruction: PtxInstruction) -> int:
        found = self._numbers.get(id(instruction))
        if found is None:
            found = self._numbers[id(instruction)] = len(self.instructions)
            self.instructions.append(instruction)
        return found

    def who(self, lanes: LaneSet, count: int) -> Who:
        """Returns the lanes, each repeated for the `count` granules of its access."""
        found = lanes.repeated.get(count)
        if found is None:
            position = np.repeat(np.arange(lanes.n), count)
            lane = lanes.index[position] + self.first
            row = lanes.block[position] * self.granules + np.tile(np.arange(count), lanes.n)
            found = lanes.repeated[count] = Who(lane, position, row, lanes.warp[position] % self.warps)
        assert isinstance(found, Who)
        return found

    def area(self, segment: Segment) -> Area | None:
        """Returns the shadow of a tensor; None if no store of the kernel, nor another launch of its history, can reach it or an
        array that shares its memory.
        """
        if id(segment) in self._areas:
            return self._areas[id(segment)]
        group, low, high = segment.neighbours(self.segments)
        area = None
        if self.in_history or any(one.writable and any(map(self.sharing.writes, one.places)) for one in group):
            widest = self.sharing.global_granule([place for one in group for place in one.places])
            shift = min(widest, *(one.narrowest for one in group)).bit_length() - 1
            low = low >> shift << shift
            area = Area(low, shift, Shadow(((high - low - 1) >> shift) + 1, 1, False, self.numbers))
        self._areas |= {id(one): area for one in group}
        return area

    def forget(self) -> None:
        """Gives the memory of all shadows back, which objects that refer to each other would keep until the garbage collection."""
        for shadow in (self.shared, *(area.shadow for _, area in self.touched())):
            vars(shadow).clear()
        self._areas.clear()

    def touched(self) -> list[tuple[Segment, Area]]:
        """Returns the shadows of tensors that anybody has accessed, each with one of its segments."""
        found = {id(one): one for one in self.segments}
        pairs = {id(area): (found[key], area) for key, area in self._areas.items() if area is not None}
        return list(pairs.values())

    def entries(self, lane: Array, level: int) -> Array:
        """Returns the entries of lanes of the grid at this moment."""
        return (lane | (self.now << STAMP | level)).view(np.uint64)

    def asynchronous(self) -> Array:
        """Returns a mask of the numbered instructions that access memory through the asynchronous proxy."""
        if len(self._asynchronous) != len(self.instructions):
            self._asynchronous = np.array([is_async(one) for one in self.instructions], bool)
        return self._asynchronous

    # -- earlier accesses ---------------------------------------------------------------------------------------------

    def look(self, access: Touch, table: Table, verb: str, other: str) -> None:
        """Reports earlier accesses that an access is not ordered behind. A copy in flight is over for no lane, its own included."""
        if not table.used or (access.boxes is not None and self.clear(access, access.boxes, table, other)):
            return
        if access.last is not None and not self.recent(access, table):
            return
        lanes, lane, rows, in_flight = access.lanes, access.who.lane, access.rows, other in (COPY, LANDING)
        some: Array | None = None
        if table.columns > 1 and self.sharing.proxies:
            # A row has an entry for each warp, and of most rows that anybody looks at nobody has touched one.
            touched = table.touched.take(rows)
            count = np.count_nonzero(touched)
            if not count:
                return
            if count < len(rows):
                some = np.flatnonzero(touched)
                lane, rows = lane[some], rows[some]
        entries = table.entries.take(rows, 0)
        if access.shadow.shared and not in_flight:
            floor, synced = self.floors(lanes)
            if not len(entries) or int(entries.max()) >> STAMP <= floor:
                return
            stamps = entries >> np.uint64(STAMP)
            maybe = stamps > floor
            if synced > floor and table.columns == 1:
                # Most often the warp itself wrote what it reads, before it last met.
                maybe &= ((entries ^ lane.view(np.uint64)[:, None]) & WARP_BITS != 0) | (stamps > synced)
        else:
            maybe = entries != 0
        collective = access.collective or in_flight
        if not collective and np.count_nonzero(maybe):
            maybe &= (entries & LOW) != lane.astype(np.uint64)[:, None]
        if not np.count_nonzero(maybe):
            return
        where, column = np.nonzero(maybe)
        chosen = entries[where, column]
        race = self.unordered(lane[where], chosen, collective)
        if race.any():
            where, chosen, by = where[race], chosen[race], table.by[rows[where[race]], column[race]]
            where = where if some is None else some[where]
            if (verb, other) != ("write", "write"):
                self.report(access, where, chosen, by, (verb, other))
                return
            same = self.same_as_before(access, where, by)
            self.report_writers(access, where, chosen, by, same)
            if table is access.shadow.writes:
                self.agree(access, where[same], chosen[same], by[same])

    def clear(self, access: Touch, boxes: Boxes, table: Table, other: str) -> bool:
        """True if `look` would find everything in some ranges in order."""
        if table.columns > 1 and not windows(table.touched, boxes.count)[boxes.starts].any():
            return True
        found, in_flight = windows(table.entries, boxes.count)[boxes.starts], other in (COPY, LANDING)
        if int(found.max()) >> STAMP <= (self.floors(access.lanes)[0] if access.shadow.shared and not in_flight else 0):
            return True
        # One or two copies wrote most ranges: look at one entry for each run of equal rows.
        flat = found.transpose(0, 2, 1).reshape(-1)
        heads = flat[1:] != flat[:-1]
        heads[boxes.count - 1 :: boxes.count] = True
        at = np.concatenate(([0], np.flatnonzero(heads) + 1))
        entries, lane = flat[at], boxes.lane[at // (boxes.count * table.columns)]
        some = entries != 0
        if not in_flight:
            some &= (entries & LOW) != lane.astype(np.uint64)
        return not self.unordered(lane[some], entries[some], in_flight).any()

    def recent(self, access: Touch, table: Table) -> bool:
        """True if somebody touched the granules of an access to shared memory since all of the cluster last met."""
        return int(table.entries.take(access.different, 0).max()) >> STAMP > self.floors(access.lanes)[0]

    # -- later accesses -----------------------------------------------------------------------------------------------

    def note(self, access: Touch, table: Table) -> None:
        """Adds readers (or atomics) to the summaries of their granules."""
        number = self.number(access.instruction)
        table.used = True
        if access.boxes is not None and self.note_ranges(access, access.boxes, table, number):
            return
        lane, columns = access.who.lane, access.columns
        flat, by = table.entries.reshape(-1), table.by.reshape(-1)
        at = access.rows if columns is None else access.rows * table.columns + columns
        if columns is not None and self.sharing.proxies:
            table.touched[access.different] = True
        if access.collective or access.last is not None:
            # A warp has its own summary, which now gets this moment and several lanes, whatever it was before.
            some = slice(None) if access.last is None else access.last
            flat[at[some]] = self.entries(lane[some], LANES)
            by[at[some]] = number
            return
        floor, synced = self.floors(access.lanes)
        values = self.entries(lane, ONE)
        before = flat.take(at)
        apart = (before & LOW) != (values & LOW)
        if columns is not None:
            apart &= before >> np.uint64(STAMP) > (floor if self.partial else synced)
        else:
            apart &= before != 0
        if np.count_nonzero(apart):
            merged = np.flatnonzero(apart)
            merged = merged[self.unordered(lane[merged], before[merged], False)]
            levels = np.maximum(self.relation(lane[merged], before[merged]), levels_of(before[merged]))
            values[merged] = raised(values[merged], levels)
        flat[at] = values
        by[at] = number
        after = flat.take(at)
        many = np.flatnonzero(after != values)
        if not len(many):
            return
        if columns is not None:
            flat[at[many]] = raised(after[many], np.maximum(levels_of(after[many]), np.uint64(LANES)))
        else:
            levels = np.maximum(levels_of(values[many]), levels_of(after[many]))
            np.maximum.at(flat, at[many], raised(after[many], np.maximum(self.relation(lane[many], after[many]), levels)))

    def note_ranges(self, access: Touch, boxes: Boxes, table: Table, number: int) -> bool:
        """Runs `note` if nobody else of their warps has read these ranges since they met; else returns False."""
        floor, synced = self.floors(access.lanes)
        places, values = boxes.column, self.entries(boxes.lane, ONE)
        entries, by = windows(table.entries, boxes.count), windows(table.by, boxes.count)
        before = entries[boxes.starts, :, places]
        if int(before.max()) >> STAMP > (floor if self.partial else synced):
            return False
        entries[boxes.starts, :, places] = values[:, None]
        by[boxes.starts, :, places] = number
        if table.columns > 1 and self.sharing.proxies:
            windows(table.touched, boxes.count)[boxes.starts] = True
        return True

    def relation(self, mine: Array, entries: Array) -> Array:
        """Returns the level of an entry that stands for both: LANES of a warp, WARPS of a block, BLOCKS of a cluster, CLUSTERS."""
        other, per = lanes_of(entries), self.wave.lanes_per_block
        levels = np.where(other // per != mine // per, BLOCKS, np.where(other >> 5 != mine >> 5, WARPS, LANES))
        levels = np.where(other // self.per != mine // self.per, CLUSTERS, levels)
        return np.where(other == mine, ONE, levels).astype(np.uint64)

    # -- writers of the same value ------------------------------------------------------------------------------------

    def store_of(self, access: Touch) -> Stored | None:
        """Returns the store that an access is a part of, if it is one whose values are known."""
        return self.storing if access.boxes is None and access.instruction.opcode in STORES else None

    def same_as_before(self, access: Touch, where: Array, by: Array) -> Array:
        """Returns a mask of the granules where an access is about to store what plain stores, the instructions `by`, left there."""
        store = self.store_of(access)
        if store is None:
            return np.zeros(len(where), bool)
        values = store.written(access, where)
        stores = np.array([one.opcode in STORES for one in self.instructions], bool)[by]
        if access.shadow.mixed is not None:
            stores &= ~access.shadow.mixed[access.rows[where]]
        return stores & (values == store.there(access, where, values.shape[1])).all(axis=1)

    def agree(self, access: Touch, where: Array, entries: Array, by: Array) -> None:
        """Keeps writers, which are in the writers' table or lanes of the access, beside the one that takes their place."""
        if not len(where):
            return
        table = access.shadow.agreeing
        table.used = True
        at, lane = access.rows[where], lanes_of(entries)
        if table.columns > 1:
            table.touched[at] = True
            at = at * table.columns + lane // WARP % self.warps
        flat, numbers = table.entries.reshape(-1), table.by.reshape(-1)
        before = flat[at]
        # A writer that precedes this access needs no place of its own: all that is ordered behind the access is behind it, too.
        apart = np.flatnonzero(before)
        apart = apart[self.unordered(access.who.lane[where[apart]], before[apart], False)]
        flat[at], numbers[at] = entries, by
        newest = flat[at]
        levels = np.maximum(self.relation(lane, newest), levels_of(entries))
        wider = np.maximum(self.relation(lane[apart], before[apart]), levels_of(before[apart]))
        levels[apart] = np.maximum(levels[apart], wider)
        np.maximum.at(flat, at, raised(newest, levels))

    # -- findings -----------------------------------------------------------------------------------------------------

    def place(self, lane: int) -> tuple[int, int, int]:
        """Returns (linear block index in the grid, warp in the block, lane in the warp) of a lane of the grid."""
        return self.wave.place(lane - self.first)

    def shared_name(self, block: int) -> str:
        """Returns the name of the shared memory of a block of the wave, for messages."""
        if self.wave.cluster == 1:
            return "shared memory"
        return f"the shared memory of block {self.wave.number(block + self.wave.first_block)}"

    def report_writers(self, access: Touch, where: Array, entries: Array, by: Array, same: Array) -> None:
        """Reports plain writes that are not ordered; `same`: a mask of those that write the same."""
        for which, what, severity in ((~same, NOT_ORDERED, ERROR), (same, SAME, WARNING)):
            self.report(access, where[which], entries[which], by[which], ("write", "write"), what, severity)

    def report(
        self,
        access: Touch,
        where: Array,
        entries: Array,
        by: Array,
        verbs: tuple[str, str],
        what: str = NOT_ORDERED,
        severity: str = ERROR,
    ) -> None:
        """Reports a finding for each pair of instructions, at the later one in the code; `verbs`: their acts; `what`: outcome."""
        segment, i = access.segment, access.instruction
        for number, places in by_value(by):
            at = int(places[0])
            position, first = int(access.who.position[where[at]]), int(entries[at])
            theirs = self.instructions[number]
            address = int(access.addresses[position])
            if segment is None:
                address %= self.shared_stride
                offset, name = self.offset_name(address), self.shared_name(int(access.rows[where[at]]) // self.granules)
            else:
                offset, name = f"{address - segment.start:#x}", repr(segment.name)
            their_place = self.place(first & LANE)
            sides = [(i.line, verbs[0], i, access.lanes.place(position)), (theirs.line, verbs[1], theirs, their_place)]
            sides.sort(key=lambda side: -side[0])
            (_, did, at_fault, main), (_, had, second, rest) = sides
            message = (
                f"{told(did, at_fault)} at offset {offset} of {name} and {told(had, second)} at {source_and_call(second)} "
                f"by {thread_name(rest)}{CROWD[(first & LEVEL) >> 29]} {what}"
            )
            tensor = None if segment is None else segment.name
            key: Key = ("race", *sorted((place_of(i), place_of(theirs)), key=str), tensor)
            count = len(places)
            lanes, those = access.who.lane[where[places]], entries[places]
            level = int(np.maximum(self.relation(lanes, those), levels_of(those)).max())
            hazard, mend = self.remedy((did, had), (at_fault, second), level, segment is None)
            told_of = severity
            if segment is None and level <= LANES and (did, had) == ("write", "read") and self.sharing.shuffled(second, at_fault):
                message += "; what is written comes from what all lanes read, by shuffles"
                told_of = WARNING
            verdict = Verdict("race", told_of, hazard, mend if what == NOT_ORDERED else OTHER_MENDS.get(what, ""))
            self.findings.record(verdict, message, (at_fault, second), main, key, count=count, address=address, tensor=tensor)

    def remedy(
        self, verbs: tuple[str, str], sides: tuple[PtxInstruction, PtxInstruction], level: int, shared: bool
    ) -> tuple[str, str]:
        """Returns the hazard and likely mend of a race. The first side is the later one in the code; `level` has both."""
        later, earlier = sides
        did, had = (ACTS.get(verb, verb) for verb in verbs)
        a, b = lines_apart(earlier, later)
        at, to = (f"line {line[1]}" if line[0] == later.place[0] else at_line(line) for line in (a, b))
        turns = a != b and level < BLOCKS and self.sharing.turns(earlier, later)  # their barrier orders no other block
        hazard = f"{had} after {did}, of a loop's next turn" if turns else f"{did} after {had}"
        where = f"between {to} and {at} of the next turn" if turns else f"between {at} and {to}"
        if a == b:
            hazard = f"{' and '.join(sorted((had, did)))} of one line" if did != had else hazard
            where = f"between the accesses of {at}"
        if {COPY, LANDING} & set(verbs):
            return hazard, f"a wait for the copy and a barrier {where}"
        if level >= BLOCKS:
            if shared:
                return hazard, f"cluster.sync() {where}"
            if a == b or {did, had} == {"write"}:
                return hazard, "atomics (atomicAdd), or one block alone writes there"
            return hazard, f"a launch of its own for one of them, or __threadfence() and an atomic flag {where}"
        if level <= LANES:
            return hazard, f"{WARP_ONLY} {where}"
        whole = all(operand == Imm(0) for i in self.sharing.barriers for operand in i.operands[:1])
        return hazard, f"{'__syncthreads()' if whole else 'a barrier of these warps'} {where}"


def lines_apart(one: PtxInstruction, other: PtxInstruction) -> tuple[Line, Line]:
    """Returns the lines of two instructions, or of the calls that they are inlined at, in the innermost function that has both."""
    if not (one.source and other.source):
        return kernel_line(one), kernel_line(other)
    a, b = [one.source, *one.inlined_at], [other.source, *other.inlined_at]
    while len(a) > 1 and len(b) > 1 and a[-1] == b[-1]:
        a.pop()
        b.pop()
    return a[-1], b[-1]


ACTS = {COPY: "read", LANDING: "write"}


def told(verb: str, i: PtxInstruction) -> str:
    """Returns the verb for an instruction; a copy's has its name."""
    if i.opcode != "cp":
        return verb
    return i.name if verb == COPY else f"{verb.removesuffix(f' of an {COPY}')} of {i.name}"


# -- reads by wgmma --------------------------------------------------------------------------------------------------------

UNIT = 16
REMEMBERED = 1 << 16
"""Most pairs of a reader and a write that are remembered as ordered."""

SEVERAL = np.uint64((1 << 64) - 1)
"""No entry of a writer."""

LOGGED = 1 << 12
"""Readings kept by page and operand before they are noted unit by unit."""


class TileOperand(Protocol):
    """A matrix for each warpgroup: its pages and its 16-byte units, a row each, of the wave (`execute.products`)."""

    @property
    def pages(self) -> Array: ...

    def units(self) -> Array: ...


class TileReads:
    """The readings of a wave: their numbers by page, a column for each warpgroup of a block; by 16-byte unit on demand.

    `waited[number]`: when each of the four warps waited, 0 before; `readers`: the first warp of the wave, `by`: the instruction.
    """

    def __init__(self, races: Detector):
        wave = races.wave
        self.races = races
        self.columns = -(-wave.warps_per_block // GROUP)
        self.pages = Pages(races.shared_stride, wave.blocks)
        self.newest = np.zeros((self.pages.count, self.columns), np.int32)
        self.wrote = np.zeros(self.pages.count, np.uint64)
        """The entry of a page's last writer; SEVERAL: it has others, too."""
        self.units = wave.blocks * races.shared_stride // UNIT
        self.log: list[tuple[TileOperand, Array, Array]] = []
        """Readings that `by_unit` does not have yet: (operand, column, number)."""
        self.waited, self.readers = np.zeros((64, GROUP), np.int64), np.zeros(64, np.int64)
        self.by: list[PtxInstruction] = []
        self.count = 1
        self.over: set[tuple[int, int]] = set()
        """Pairs of a warpgroup (its first warp) and an entry that have been checked."""

    def mix(self, rows: Array) -> None:
        """Notes writes to these granules."""
        self.wrote[self.pages.of(rows << self.races.shared_shift)] = SEVERAL

    def fill(self, boxes: Boxes, entries: Array) -> None:
        """Notes writes to ranges, with an entry for each."""
        shift = self.races.shared_shift
        pages, whole = self.pages.of_ranges(boxes.starts << shift, boxes.count << shift)
        self.wrote[pages] = entries[:, None] if whole else SEVERAL

    @cached_property
    def latest(self) -> Array:
        return np.zeros((self.units, self.columns), np.int32)

    def by_unit(self) -> Array:
        """Returns the newest reading of each unit, by column."""
        for operand, column, numbers in self.log:
            units = operand.units().reshape(len(column), -1)
            self.latest.reshape(-1)[units * self.columns + column[:, None]] = numbers[:, None]
        self.log.clear()
        return self.latest

    def issue(self, i: PtxInstruction, first: Array, operands: Sequence[TileOperand]) -> Array:
        """Records that products of warpgroups with these first warps read their operands. Returns the readings' numbers."""
        column = first % self.races.wave.warps_per_block // GROUP
        for one in operands:
            self.look_back(i, first, one)
        numbers = np.arange(self.count, self.count + len(first))
        self.count += len(first)
        while self.count > len(self.readers):
            self.waited, self.readers = np.concatenate((self.waited, 0 * self.waited)), np.concatenate((self.readers, self.readers))
        self.readers[numbers] = first
        self.by += [i] * len(first)
        for one in operands:
            self.newest[one.pages, column[:, None]] = numbers[:, None]
            self.log.append((one, column, numbers))
        if len(self.log) > LOGGED:
            self.by_unit()
        return numbers

    # -- waits -----------------------------------------------------------------------------------------------------

    def wait(self, numbers: Array, over: Array) -> None:
        """Records that the warps of `over` have now waited for these readings (product by product)."""
        self.waited[numbers] = np.where(over, self.races.now, self.waited[numbers])

    def of_tensor_copies(self, units: Array) -> Array:
        """Returns a mask of the units that a tensor copy wrote last."""
        races = self.races
        if not races.shared.writes.used or not races.instructions:
            return np.zeros(len(units), bool)
        by = races.shared.writes.by.reshape(-1)[units * (UNIT >> races.shared_shift)]
        return np.array([is_async(one) and "tensor" in one.mods for one in races.instructions])[by]

    def floor(self, blocks: Array) -> Array:
        """Returns until when all accesses to these blocks' memory are over for all of each block: 0 (unknown) in clusters."""
        return self.races.base[blocks] if self.races.wave.cluster == 1 else np.zeros(len(blocks), np.int64)

    # -- earlier writes -------------------------------------------------------------------------------------------------------

    def look_back(self, i: PtxInstruction, first: Array, operand: TileOperand) -> None:
        """Reports writes that are not over for all of the warps, or that the asynchronous proxy may not see."""
        table, pages = self.races.shared.writes, self.wrote[operand.pages]
        if not table.used:
            return
        one = pages[:, 0]
        alike = not np.count_nonzero((pages != one[:, None]) | (pages == SEVERAL))
        if alike and self.over.issuperset(zip(first.tolist(), one.tolist(), strict=True)):
            return
        units = operand.units()
        wide = UNIT >> self.races.shared_shift
        entries = table.entries.reshape(-1, wide).take(units.reshape(-1), 0).reshape(len(first), -1)
        head, end = entries[:, 0], entries[:, -1]
        if not np.count_nonzero((entries != head[:, None]) & (entries != end[:, None])):
            # A tile that one or two copies wrote: the entries at its ends stand for all.
            who, found = np.tile(np.arange(len(first)), 2), np.concatenate((head, end))
            where = np.repeat([0, entries.shape[1] - 1], len(first))
        else:
            parts = [np.unique(row, return_index=True) for row in entries]
            who = np.repeat(np.arange(len(first)), [len(values) for values, _ in parts])
            found, where = np.concatenate([values for values, _ in parts]), np.concatenate([at for _, at in parts])
        pairs = list(zip(first[who].tolist(), found.tolist(), strict=True))
        some = np.array([entry != 0 and (one, entry) not in self.over for one, entry in pairs], bool)
        if not some.any():
            return
        # Order behind a write is never lost.
        if len(self.over) > REMEMBERED:
            self.over.clear()
        self.over.update(pairs)
        who, found, where = who[some], found[some], where[some]
        rows = units.reshape(len(first), -1)[who, where // wide] * wide + where % wide
        self.judge(i, first[who], found, rows)

    def judge(self, i: PtxInstruction, first: Array, entries: Array, rows: Array) -> None:
        """Judges the entries at these granules, each read by the warpgroup of a first warp."""
        races = self.races
        by = races.shared.writes.by.reshape(-1)[rows]
        race, bad = self.verdicts(first, entries, by)
        for kind, which in (("race", race), ("proxy", bad)):
            for number in np.unique(by[which]).tolist():
                mine = np.flatnonzero(which & (by == number))
                theirs, who = races.instructions[number], f"by {thread_name(races.place(int(entries[mine[0]]) & LANE))}"
                address = int(rows[mine[0]] << races.shared_shift) % races.shared_stride
                at = races.offset_name(address)
                message = (
                    f"read at offset {at} of shared memory and write at {source(theirs)} {who} are not ordered"
                    if kind == "race"
                    else f"wgmma reads shared memory through the asynchronous proxy; what {source(theirs)} wrote at offset "
                    f"{at}, {who}, has no fence.proxy.async behind it"
                )
                # Triton compiles its kernels for 9.0 without a fence behind cp.async, and all H100s have run them so.
                severity = WARNING if kind == "proxy" and theirs.opcode == "cp" else ERROR
                verdict = Verdict(kind, severity, "read after write" if kind == "race" else "")
                self.record(verdict, message, (i, theirs), races.wave.place(int(first[mine[0]]) * WARP), (len(mine), address))

    def verdicts(self, first: Array, entries: Array, by: Array) -> tuple[Array, Array]:
        """Returns masks of the writes `entries`, by instructions `by`: not over for all warps of a group; not visible to one."""
        races = self.races
        readers = (first[:, None] + np.arange(GROUP)) * WARP + races.first
        stamps = stamps_of(entries)
        race = stamps > self.floor(first // races.wave.warps_per_block)
        if race.any():
            at = np.flatnonzero(race)
            four = races.unordered(readers[at].reshape(-1), np.repeat(entries[at], GROUP), True)
            race[at] = four.reshape(-1, GROUP).any(axis=1)
        bad = np.zeros(len(first), bool)
        if races.proxy is not None:
            ordinary = ~races.asynchronous()[by] & ~race
            at = np.flatnonzero(ordinary)
            if len(at):
                lane, several = np.repeat(lanes_of(entries[at]), GROUP), np.repeat(levels_of(entries[at]) != ONE, GROUP)
                four = races.proxy.unfenced("shared", readers[at].reshape(-1), lane, np.repeat(stamps[at], GROUP), several)
                bad[at] = four.reshape(-1, GROUP).any(axis=1)
        return race, bad

    # -- later writes ---------------------------------------------------------------------------------------------------------

    def look(self, access: Touch, verb: str) -> None:
        """Reports products that may still read what this access writes."""
        if self.count == 1:
            return
        shift, lanes = self.races.shared_shift, access.lanes
        if access.boxes is not None:
            pages, _ = self.pages.of_ranges(access.boxes.starts << shift, access.boxes.count << shift)
            if self.clear(access.boxes.lane, self.newest[pages]):
                return
        else:
            near = self.newest[self.pages.of(access.different << shift)]
            if not near.any():
                return
            by_warps = lanes.whole_warps and len(near) % lanes.warps == 0 and self.races.alike(lanes)
            if by_warps and self.clear(lanes.warp_ids * WARP + self.races.first, near.reshape(lanes.warps, -1, self.columns)):
                return
        found = self.by_unit()[access.rows * (1 << shift) // UNIT]
        if not found.any():
            return
        for mine, number in self.open(*distinct_pairs(access.who.lane, found)):
            self.report(access, verb, mine, number)

    def clear(self, mine: Array, found: Array) -> bool:
        """True if none of these readings (lanes, any, columns) is open for its lane of the grid. A warp waits for its products in
        order, so that the newest of a column decides for all.
        """
        newest = found.max(axis=1)
        at, column = np.nonzero(newest)
        return not self.open(mine[at], newest[at, column].astype(np.int64))

    def open(self, mine: Array, number: Array) -> list[tuple[int, int]]:
        """Returns the pairs of a lane of the grid and a reading that are not known to be in order."""
        races = self.races
        moments = self.waited[number]
        floor = self.floor((mine - races.first) // races.wave.lanes_per_block)
        race = moments.max(axis=1) == 0
        race |= ~((moments > 0) & (moments <= floor[:, None])).any(axis=1)
        open_ = np.flatnonzero(race & (moments.max(axis=1) > 0))
        if len(open_):
            warps = self.readers[number[open_]][:, None] + np.arange(GROUP)
            lane = warps * WARP + races.first
            entries = (lane | LANES | (moments[open_] << STAMP)).astype(np.uint64)
            entries[moments[open_] == 0] = (LOW << np.uint64(STAMP)) | np.uint64(LANES)
            four = races.unordered(np.repeat(mine[open_], GROUP), entries.reshape(-1), True).reshape(-1, GROUP)
            # A warp that has waited is behind its own wait.
            four &= (moments[open_] == 0) | (lane >> 5 != mine[open_][:, None] >> 5)
            race[open_] = four.all(axis=1)
        return list(zip(mine[race].tolist(), number[race].tolist(), strict=True))

    def report(self, access: Touch, verb: str, mine: int, number: int) -> None:
        i, theirs = access.instruction, self.by[number - 1]
        position = int(access.who.position[np.flatnonzero(access.who.lane == mine)[0]])
        block, warp, _ = self.races.wave.place(int(self.readers[number]) * WARP)
        address = int(access.addresses[position])
        over = "has not been waited for" if not self.waited[number].any() else "is not known to be over"
        message = (
            f"{verb} at offset {self.races.offset_name(address)} of shared memory, which {source(theirs)} of block {block}, "
            f"warps {warp} to {warp + GROUP - 1}, reads and which {over}"
        )
        verdict = Verdict(
            "race", ERROR, f"{verb} after read", f"wgmma.wait_group, then a barrier, before {at_line(kernel_line(i))}"
        )
        self.record(verdict, message, (i, theirs), access.lanes.place(position), (1, address))

    def record(
        self,
        verdict: Verdict,
        message: str,
        pair: tuple[PtxInstruction, PtxInstruction],
        place: tuple[int, int, int],
        size: tuple[int, int],
    ) -> None:
        """Records a finding at the first instruction of a pair; (count, address)."""
        key = (verdict.kind, *sorted(one.line for one in pair), None)
        count, address = size
        self.races.findings.record(verdict, message, pair, place, key, count=count, address=address, tensor=None)


def distinct_pairs(lanes: Array, numbers: Array) -> tuple[Array, Array]:
    """Returns the different pairs of a lane and a reading other than 0 in `numbers` (lanes, columns)."""
    pairs = (lanes.astype(np.int64)[:, None] << 32 | numbers).T.reshape(-1)
    found = np.unique(pairs[run_starts(pairs)])
    found = found[found & 0xFFFFFFFF != 0]
    return found >> 32, found & 0xFFFFFFFF
