"""The accesses of a launch, in tables, and the findings of those that nothing orders.

Two accesses to the same bytes, one of them writing, race unless one happens before the other (`order.happens_before`).
"""

from __future__ import annotations

from collections.abc import Callable

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
    source_and_call,
    thread_name,
)
from ..state.lane_sets import WARP, LaneSet, Wave, by_value
from ..state.segments import Segment
from ..text.syntax import Array, Imm, PtxInstruction
from .happens_before import Order
from .moments import BLOCKS, CLUSTERS, CROWD, LANE, LANES, LEVEL, LOW, ONE, STAMP, WARPS, lanes_of, levels_of, raised
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
        for _, area in self.touched():
            vars(area.shadow).clear()
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
        lanes, who, rows, in_flight = access.lanes, access.who, access.rows, other in (COPY, LANDING)
        if access.last is not None and not self.recent(access, table):
            return
        entries = table.entries.take(rows, 0)
        if access.shadow.shared and not in_flight:
            floor, synced = self.floors(lanes)
            if not len(entries) or int(entries.max()) >> STAMP <= floor:
                return
            stamps = entries >> np.uint64(STAMP)
            maybe = stamps > floor
            if synced > floor and table.columns == 1:
                # Most often the warp itself wrote what it reads, before it last met.
                maybe &= ((entries ^ who.lane.view(np.uint64)[:, None]) & WARP_BITS != 0) | (stamps > synced)
        else:
            maybe = entries != 0
        collective = access.collective or in_flight
        if not collective and np.count_nonzero(maybe):
            maybe &= (entries & LOW) != who.lane.astype(np.uint64)[:, None]
        if not np.count_nonzero(maybe):
            return
        where, column = np.nonzero(maybe)
        chosen = entries[where, column]
        race = self.unordered(who.lane[where], chosen, collective)
        if race.any():
            where, chosen, by = where[race], chosen[race], table.by[rows[where[race]], column[race]]
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
            verdict = Verdict("race", severity, hazard, mend if what == NOT_ORDERED else OTHER_MENDS.get(what, ""))
            self.findings.record(verdict, message, (at_fault, second), main, key, count=count, address=address, tensor=tensor)

    def remedy(
        self, verbs: tuple[str, str], sides: tuple[PtxInstruction, PtxInstruction], level: int, shared: bool
    ) -> tuple[str, str]:
        """Returns the hazard and likely mend of a race. The first side is the later one in the code; `level` has both."""
        later, earlier = sides
        did, had = (ACTS.get(verb, verb) for verb in verbs)
        a, b = kernel_line(earlier), kernel_line(later)
        if earlier.source and later.source and earlier.inlined_at == later.inlined_at:
            a, b = earlier.source, later.source  # of one call of a function
        at, to = (f"line {line[1]}" if line[0] == later.place[0] else at_line(line) for line in (a, b))
        turns = a != b and self.sharing.turns(earlier, later)
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


ACTS = {COPY: "read", LANDING: "write"}


def told(verb: str, i: PtxInstruction) -> str:
    """Returns the verb for an instruction; a copy's has its name."""
    if i.opcode != "cp":
        return verb
    return i.name if verb == COPY else f"{verb.removesuffix(f' of an {COPY}')} of {i.name}"
