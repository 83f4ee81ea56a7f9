"""Data races by happens-before, in whatever order the machine ran the warps: of threads, scopes, blocks that exit, bulk copies.

Two accesses to the same bytes, one of them writing, race unless one happens before the other (`order.clocks` decides that).
Atomics and strong accesses (volatile, relaxed, acquire, release) do not race with each other, as long as each is in the scope of
the other (PTX ISA, "Morally strong operations"): `.cta` of one excludes all threads of other blocks, `.cluster` those of other
clusters, whatever the scope of the other one.

Other blocks of a cluster may access a block's shared memory only after it has begun, and it may not exit before they are done
(CUDA C++ Programming Guide, "Distributed Shared Memory"). Both must follow from the order of the threads, whatever the machine
ran first.

Bulk copies are accesses of many bytes each. A copy reads its source and writes its destination at any moment from its issue
until its wait. A granule belongs to the copy that has its first byte: rows of a tensor may begin and end anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..report.findings import ERROR, WARNING, Findings, Verdict, place_of, source_and_call
from ..state.lanes import WARP, Lanes, Wave
from ..state.segments import Segment
from ..text.syntax import Array, Instruction
from . import accesses
from .accesses import (
    SAME,
    Area,
    Boxes,
    Contents,
    Rows,
    Shadow,
    ShadowAccess,
    Sharing,
    Table,
    TileAccess,
    Touch,
    Who,
    is_async,
    is_phase,
    is_strong,
    same_for_warps,
    windows,
)
from .asynchronous import CopyRaces, TileRaces
from .clocks import BLOCKS, CLUSTER, CLUSTERS, DEVICE, LANE, LANES, LEVEL, LOW, ONE, STAMP, WARPS, Order, highest, scope_of
from .history import Launches

LEFT_OUT = "are in blocks that the scope of one of them leaves out: they are neither ordered nor atomic to each other"


class ScopeDetector(Protocol):
    """The race detector, as checks of scopes use it."""

    wave: Wave
    per: int
    numbers: np.dtype

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Returns a mask of the accesses `entries` that did not happen before the current ones of the grid-wide lanes `mine`."""

    def note(self, access: Touch, table: Table) -> None:
        """Adds the access to a table."""

    def report(self, access: Touch, where: Array, entries: Array, by: Array, verbs: tuple[str, str], what: str) -> None:
        """Reports the access with those of `entries`, by these instructions; `what`: the outcome."""


def look(races: ScopeDetector, access: Touch, writes: bool) -> None:
    """Reports the strong accesses that this one is neither ordered behind nor morally strong with; then adds it to them."""
    shadow, scope = access.shadow, scope_of(access.instruction.mods)
    for (theirs, wrote), table in shadow.scoped.items():
        if (writes or wrote) and max(scope, theirs) != DEVICE:
            judge(races, access, table, max(scope, theirs))
    kept = shadow.scoped.get((scope, writes))
    if kept is None:
        kept = shadow.scoped[scope, writes] = Table(shadow.writes.rows, 1, races.numbers)
    if isinstance(access, ShadowAccess):
        access = replace(access, columns=None, last=None)
    races.note(access, kept)
    if writes and scope != DEVICE:
        judge(races, access, kept, scope, at_once=True)


def judge(races: ScopeDetector, access: Touch, table: Table, scope: int, at_once: bool = False) -> None:
    """Reports the entries of other blocks, or of other clusters; `at_once`: those of this very access."""
    entries, lane = table.entries.reshape(-1).take(access.rows), access.who.lane
    low = (entries & LOW).astype(np.int64)
    near, several = (races.per, CLUSTERS) if scope == CLUSTER else (races.wave.lanes_per_block, BLOCKS)
    apart = (low & LANE) // near != lane // near
    if not at_once:
        apart |= low & LEVEL >= several
    where = np.flatnonzero(apart & (entries != 0))
    where = where[races.unordered(lane[where], entries[where], False)]
    if len(where):
        by = table.by.reshape(-1)[access.rows[where]]
        races.report(access, where, entries[where], by, ("atomic access", "atomic access"), LEFT_OUT)


WARP_BITS = np.uint64(((1 << STAMP) - 1) & ~(LANES | WARP - 1))
"""Bits of an entry that are equal in two entries of the same warp, be it one lane or some."""

COPY, LANDING = "asynchronous copy", "write of an asynchronous copy"

NOT_ORDERED = "are not ordered"
LOCKSTEP = "work only in lockstep: both are volatile, but nothing lets the lanes of the warp wait for each other (__syncwarp would)"


class Races(Order):
    """The race detector of one launch: the order of its events, and a shadow of memory with the accesses to it."""

    def __init__(self, sharing: Sharing, size: int, segments: list[Segment], shared_stride: int, findings: Findings, blocks: int):
        """`size`: instructions of the kernel; `shared_stride`: bytes from one block's shared memory to the next one's."""
        super().__init__(blocks, sharing.proxies)
        self.findings = findings
        self.shared_stride = shared_stride
        self.instructions: list[Instruction] = []
        self._numbers: dict[int, int] = {}
        self.sharing = sharing
        self.shared_shift = sharing.shared_granule.bit_length() - 1
        self.numbers = np.min_scalar_type(size)
        self.has_atomics, self.fences = sharing.atomics, sharing.releases
        self.segments = segments
        self._areas: dict[int, Area | None] = {}
        self.copies = CopyRaces(self)
        self.contents: Contents | None = None
        """The contents of memory, and of a store that is about to be made."""
        self.launches: Launches | None = None
        """The history that the launch is part of."""

    def begin_wave(self, wave: Wave) -> None:
        super().begin_wave(wave)
        self.granules = self.shared_stride >> self.shared_shift
        self.shared = Shadow.of(wave.blocks * self.granules, self.warps, True, self.numbers, self.sharing.proxies)
        self.tiles = TileRaces(self) if self.sharing.products else None

    def fence(self, lanes: Lanes, scope: int) -> None:
        super().fence(lanes, scope)
        if self.launches is not None and scope == DEVICE:
            self.launches.fence(lanes)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def number(self, instruction: Instruction) -> int:
        found = self._numbers.get(id(instruction))
        if found is None:
            found = self._numbers[id(instruction)] = len(self.instructions)
            self.instructions.append(instruction)
        return found

    def who(self, lanes: Lanes, count: int) -> Who:
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
        if self.launches is not None or any(one.writable and self.sharing.writes(one.place) for one in group):
            shift = self.sharing.global_granule([one.place for one in group]).bit_length() - 1
            low = low >> shift << shift
            area = Area(low, shift, Shadow.of(((high - low - 1) >> shift) + 1, 1, False, self.numbers))
        self._areas |= {id(one): area for one in group}
        return area

    def areas(self) -> list[Area]:
        """Returns the shadows of tensors that anybody has accessed."""
        return [area for _, area in self.touched()]

    def touched(self) -> list[tuple[Segment, Area]]:
        """Returns the same, each with one of its segments."""
        found = {id(one): one for one in self.segments}
        pairs = {id(area): (found[key], area) for key, area in self._areas.items() if area is not None}
        return list(pairs.values())

    def access(
        self, space: str, segment: Segment | None, lanes: Lanes, addresses: Array, size: int | Array, kind: str, i: Instruction
    ) -> None:
        """Checks an access that is in bounds and aligned. In "shared::cluster" addresses are places in the wave's shared memory."""
        found = self.tensor_rows(segment, lanes, addresses, size) if segment else self.shared_rows(space, lanes, addresses, size)
        if found is None:
            return
        shadow, rows, columns, who = found
        access = ShadowAccess(i, lanes, addresses, segment, shadow, rows, columns, who, kind in ("ldmatrix", "stmatrix"))
        if columns is not None and not access.collective:
            access.last = same_for_warps(lanes, rows)
        self.judge(access, kind)

    def tensor_rows(self, segment: Segment, lanes: Lanes, addresses: Array, size: int | Array) -> Rows | None:
        """Returns the granules of an access to a tensor, if somebody may write it."""
        area = self.area(segment) if segment.space == "global" else None
        if area is None:
            return None
        shift = area.shift
        rows = (addresses.astype(np.int64) + (segment.address - segment.start - area.low)) >> shift
        if isinstance(size, int):
            who = self.who(lanes, max(1, size >> shift))
            if size >> shift > 1:
                rows = rows[who.position] + (who.row - lanes.block[who.position] * self.granules)
        else:
            count = (size.astype(np.int64) + (1 << shift) - 1) >> shift
            position = np.repeat(np.arange(lanes.n), count)
            start = np.cumsum(count) - count
            rows = rows[position] + np.arange(len(position)) - start[position]
            who = Who(lanes.index[position] + self.first, position, position, position)
        return area.shadow, rows, None, who

    def shared_rows(self, space: str, lanes: Lanes, addresses: Array, size: int | Array) -> Rows | None:
        """Returns the granules of an access to shared memory; local memory is a thread's own."""
        if space not in ("shared", "shared::cluster"):
            return None
        assert isinstance(size, int)
        shift = self.shared_shift
        who = self.who(lanes, max(1, size >> shift))
        rows = (addresses >> shift).astype(np.int64)
        if space == "shared::cluster":
            rows -= lanes.block * self.granules
        rows = (rows if len(who.row) == lanes.n else rows[who.position]) + who.row
        return self.shared, rows, who.column, who

    def judge(self, access: Touch, kind: str) -> None:
        """Reports earlier accesses that this one is not ordered behind; then adds it to the shadow."""
        i, lanes, shadow, segment, rows = access.instruction, access.lanes, access.shadow, access.segment, access.rows
        if self.launches is not None and isinstance(access, ShadowAccess) and segment is not None:
            strong = self.has_atomics and (kind == "atom" or is_strong(i))
            if strong and (kind == "ld" or i.opcode == "atom"):
                self.launches.hear(access, kind != "ld")
            self.launches.look(access, kind not in ("ld", "ldmatrix"), strong)
        if shadow.landing is not None:
            self.look(access, shadow.landing, "read" if kind in ("ld", "ldmatrix") else "write", LANDING)
        if self.has_atomics and (kind == "atom" or is_strong(i)):
            self.look_at_writers(access, "atomic access")
            self.look(access, shadow.reads, "atomic access", "read")
            if shadow.copies is not None:
                self.look(access, shadow.copies, "atomic access", COPY)
            if shadow.shared and i in self.sharing.lockstep:
                self.lockstep(access)
            if self.tiles is not None and shadow.shared:
                self.tiles.look(access, "atomic access")
            self.note(access, shadow.atomics)
            if self.sharing.narrow and not is_phase(i) and not (shadow.shared and self.wave.cluster == 1):
                look(self, access, kind != "ld")
            if self.fences and not is_phase(i) and i.opcode != "cp":
                where = rows.reshape(lanes.n, -1)[:, 0] if len(rows) != lanes.n else rows
                reads = kind in ("ld", "atom") and i.opcode != "st"
                area_key = -1 if segment is None else self._area_number(segment)
                self.strong(lanes, where, area_key, reads, kind != "ld", frozenset(i.mods))
        elif kind in ("ld", "ldmatrix"):
            self.look_at_writers(access, "read")
            if i in self.sharing.guesses:
                self.note(access, shadow.atomics)
                return
            if self.has_atomics:
                self.look(access, shadow.atomics, "read", "atomic access")
            if self.proxy is not None and is_async(i):
                self.through_proxy(access)
            self.note(access, shadow.reads)
            if i.opcode == "cp":
                self.copies.issue(access)
        else:
            self.look_at_writers(access, "write")
            if shadow.copies is not None:
                self.look(access, shadow.copies, "write", COPY)
            self.look(access, shadow.reads, "write", "read")
            if self.tiles is not None and shadow.shared:
                self.tiles.look(access, "write")
            if self.has_atomics:
                self.look(access, shadow.atomics, "write", "atomic access")
            self.overwrite(access)
            accesses.remember(self, access)

    def look_at_writers(self, access: Touch, verb: str) -> None:
        """Reports the plain writes that an access is not ordered behind."""
        if access.shadow.agreeing is not None:
            self.look(access, access.shadow.agreeing, verb, "write")
        self.look(access, access.shadow.writes, verb, "write")

    def lockstep(self, access: Touch) -> None:
        """Checks a volatile access to shared memory: it sees the write of another lane of the warp only if the lanes have met."""
        shadow, who = access.shadow, access.who
        if shadow.volatile is None:
            shadow.volatile = Table(shadow.writes.rows, 1, self.numbers)
        entries, by = shadow.volatile.entries.reshape(-1), shadow.volatile.by.reshape(-1)
        if access.instruction.opcode == "st":
            entries[access.rows], by[access.rows] = self.values(who, ONE), self.number(access.instruction)
            return
        written = entries[access.rows]
        other = (written & np.uint64(LANE)).astype(np.int64)
        where = np.flatnonzero((written != 0) & (other >> 5 == who.lane >> 5) & (other != who.lane))
        where = where[self.unordered(who.lane[where], written[where], False)]
        if len(where):
            self.report(access, where, written[where], by[access.rows[where]], ("read", "write"), LOCKSTEP)

    def overwrite(self, access: Touch) -> None:
        """Makes the access the last writer of its granules."""
        table = access.shadow.writes
        table.used = True
        if access.boxes is not None:
            assert isinstance(access, TileAccess)
            self.stamp(access)
            windows(table.by, access.boxes.count)[access.boxes.starts] = self.number(access.instruction)
            return
        if self.tiles is not None and access.shadow.shared:
            self.tiles.wrote(access.different)
        if access.shadow.mixed is not None:
            access.shadow.mixed[access.rows] = False
        who = access.who
        values = self.values(who, LANES if access.collective else ONE)
        entries = table.entries.reshape(-1)
        entries[access.rows] = values
        table.by.reshape(-1)[access.rows] = number = self.number(access.instruction)
        won = entries[access.rows]
        if np.count_nonzero(won != values):
            # Several lanes wrote there at once: within a warp one of them wins, between warps that is a race.
            lost = np.flatnonzero(won != values)
            winner = (won[lost] & np.uint64(LANE)).astype(np.int64)
            same, apart = accesses.same_at_once(self, access, lost, winner), winner >> 5 != who.lane[lost] >> 5
            self.report_writers(access, lost[apart], won[lost[apart]], np.full(np.count_nonzero(apart), number), same[apart])
            beside = lost[same & apart]
            accesses.join(self, access, beside, values[beside], np.full(len(beside), number))
            accesses.mix(access.shadow, access.rows[lost[~same & ~apart]])

    def stamp(self, access: TileAccess) -> None:
        """Makes the lanes of an access write now, each alone."""
        table = access.shadow.writes
        boxes = access.boxes
        if boxes is None:
            table.entries.reshape(-1)[access.rows] = self.values(access.who, ONE)
            if self.tiles is not None:
                self.tiles.wrote(access.rows)
            return
        entries = self.entries(boxes.lane, ONE)
        windows(table.entries, boxes.count)[boxes.starts] = entries[:, None, None]
        if self.tiles is not None:
            self.tiles.wrote_ranges(boxes, entries)

    def _area_number(self, segment: Segment) -> int:
        area = self.area(segment)
        assert area is not None
        return area.low

    def values(self, who: Who, level: int) -> Array:
        return self.entries(who.lane, level)

    def entries(self, lane: Array, level: int) -> Array:
        """Returns the entries of lanes of the grid at this moment."""
        return (lane | (self.now << STAMP | level)).view(np.uint64)

    def look(self, access: Touch, table: Table, verb: str, other: str) -> None:
        """Reports earlier accesses that an access is not ordered behind. A copy in flight is over for no lane, its own included."""
        if not table.used or (access.boxes is not None and self.clear(access, access.boxes, table, other)):
            return
        lanes, who, rows = access.lanes, access.who, access.rows
        collective = access.collective or other in (COPY, LANDING)
        width = table.columns
        if access.last is not None and not self.recent(access, table):
            return
        entries = table.entries.reshape(-1).take(rows) if width == 1 else table.entries.take(rows, 0)
        if access.shadow.shared and other not in (COPY, LANDING):
            floor, synced = self.floors(lanes)
            if not len(entries) or int(entries.max()) >> STAMP <= floor:
                return
            stamps = entries >> np.uint64(STAMP)
            maybe = stamps > floor
            if synced > floor and width == 1:
                # Most often the warp itself wrote what it reads, before it last met.
                maybe &= ((entries ^ who.lane.view(np.uint64)) & WARP_BITS != 0) | (stamps > synced)
        else:
            if not np.count_nonzero(entries):
                return
            maybe = entries != 0
        if not collective:
            mine = who.lane.astype(np.uint64)
            maybe &= (entries & LOW) != (mine if width == 1 else mine[:, None])
        if not np.count_nonzero(maybe):
            return
        at = np.flatnonzero(maybe) if width == 1 else np.nonzero(maybe)
        where = at if width == 1 else at[0]
        chosen = entries[at]
        race = self.unordered(who.lane[where], chosen, collective)
        if race.any():
            where, chosen = where[race], chosen[race]
            by = table.by[rows[where], 0 if width == 1 else at[1][race]]
            if (verb, other) != ("write", "write"):
                self.report(access, where, chosen, by, (verb, other))
                return
            same = accesses.same_as_before(self, access, where, by)
            self.report_writers(access, where, chosen, by, same)
            if table is access.shadow.writes:
                accesses.join(self, access, where[same], chosen[same], by[same])

    def clear(self, access: Touch, boxes: Boxes, table: Table, other: str) -> bool:
        """True if `look` would find everything in some ranges in order."""
        if table.columns > 1 and not windows(table.touched, boxes.count)[boxes.starts].any():
            return True
        found = windows(table.entries, boxes.count)[boxes.starts]
        shared = access.shadow.shared and other not in (COPY, LANDING)
        if int(found.max()) >> STAMP <= (self.floors(access.lanes)[0] if shared else 0):
            return True
        # One or two copies wrote most ranges: look at one entry for each run of equal rows.
        flat = found.transpose(0, 2, 1).reshape(-1)
        heads = flat[1:] != flat[:-1]
        heads[boxes.count - 1 :: boxes.count] = True
        at = np.concatenate(([0], np.flatnonzero(heads) + 1))
        entries, lane = flat[at], boxes.lane[at // (boxes.count * table.columns)]
        some = entries != 0
        if other not in (COPY, LANDING):
            some &= (entries & LOW) != lane.astype(np.uint64)
        return not self.unordered(lane[some], entries[some], other in (COPY, LANDING)).any()

    def recent(self, access: Touch, table: Table) -> bool:
        """True if somebody touched the granules of an access to shared memory since all of the cluster last met."""
        rows = access.different
        entries = table.entries.reshape(-1).take(rows) if table.columns == 1 else table.entries.take(rows, 0)
        return int(entries.max()) >> STAMP > self.floors(access.lanes)[0]

    def note(self, access: Touch, table: Table) -> None:
        """Adds readers (or atomics) to the summaries of their granules."""
        number = self.number(access.instruction)
        table.used = True
        if access.boxes is not None and self.note_ranges(access, access.boxes, table, number):
            return
        who, columns = access.who, access.columns
        flat, by = table.entries.reshape(-1), table.by.reshape(-1)
        at = access.rows if columns is None else access.rows * table.columns + columns
        if columns is not None and self.sharing.proxies:
            table.touched[access.different] = True
        if access.collective:
            flat[at] = self.values(who, LANES)
            by[at] = number
            return
        if access.last is not None and columns is not None:
            # A warp has its own summary, which now gets this moment and several lanes, whatever it was before.
            at = at[access.last]
            flat[at] = (who.lane[access.last] | (self.now << STAMP | LANES)).view(np.uint64)
            by[at] = number
            return
        floor, synced = self.floors(access.lanes)
        values = self.values(who, ONE)
        before = flat.take(at)
        apart = (before & LOW) != (values & LOW)
        if columns is not None:
            apart &= before >> np.uint64(STAMP) > (floor if self.partial else synced)
        else:
            apart &= before != 0
        merged = np.flatnonzero(apart) if np.count_nonzero(apart) else None
        if merged is not None:
            merged = merged[self.unordered(who.lane[merged], before[merged], False)]
            levels = np.maximum(self.relation(who.lane[merged], before[merged]), before[merged] & np.uint64(LEVEL))
            values[merged] = (values[merged] & ~np.uint64(LEVEL)) | levels
        flat[at] = values
        by[at] = number
        after = flat.take(at)
        many = np.flatnonzero(after != values)
        if len(many) and columns is not None:
            flat[at[many]] = np.maximum(after[many] & np.uint64(LEVEL), np.uint64(LANES)) | (after[many] & ~np.uint64(LEVEL))
        elif len(many):
            told = np.maximum(values[many] & np.uint64(LEVEL), after[many] & np.uint64(LEVEL))
            levels = np.maximum(self.relation(who.lane[many], after[many]), told)
            order = np.argsort(levels, kind="stable")
            many, levels = many[order], levels[order]
            flat[at[many]] = (after[many] & ~np.uint64(LEVEL)) | levels

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

    def through_proxy(self, access: Touch) -> None:
        """Reports bytes that the asynchronous proxy reads and ordinary instructions wrote, with no fence between the two."""
        shadow, who, rows = access.shadow, access.who, access.rows
        for table in (shadow.writes, shadow.atomics):
            if not table.used:
                continue
            flat, by = table.entries[rows].reshape(-1), table.by[rows].reshape(-1)
            at = np.flatnonzero(flat)
            ordinary = np.array([not is_async(one) for one in self.instructions])
            at = at[ordinary[by[at]]]
            if len(at):
                where = at // table.columns
                self.judge_proxy(access, where, flat[at], by[at], who.lane[where])

    def judge_proxy(self, access: Touch, where: Array, entries: Array, by: Array, reader: Array) -> None:
        """Reports a finding for each instruction that wrote some of `entries` without a fence on the way to these readers."""
        assert self.proxy is not None
        stamp, low = (entries >> np.uint64(STAMP)).astype(np.int64), (entries & LOW).astype(np.int64)
        space = "shared" if access.segment is None else access.segment.space
        bad = self.proxy.unfenced(space, reader, low & LANE, stamp, (low & ~LANE) != ONE)
        # Accesses that are not even ordered are a race, and reported as one.
        bad &= ~self.unordered(reader, entries, False)
        for number in np.unique(by[bad]).tolist():
            at = int(np.flatnonzero(bad & (by == number))[0])
            position, i, theirs = int(access.who.position[where[at]]), access.instruction, self.instructions[number]
            block, thread = divmod(int(low[at]) & LANE, self.wave.lanes_per_block)
            name = f"{access.segment.name!r}" if access.segment is not None else "shared memory"
            address = int(access.addresses[position])
            message = (
                f"{i.name} reads {name} through the asynchronous proxy; what {source_and_call(theirs)} wrote there, "
                f"by block {block}, warp {thread // WARP}, lane {thread % WARP}, has no fence.proxy.async behind it"
            )
            key = ("proxy", place_of(i), place_of(theirs), access.segment.name if access.segment is not None else None)
            count = int(np.count_nonzero(bad & (by == number)))
            tensor = access.segment.name if access.segment is not None else None
            place = access.lanes.place(position)
            self.findings.record("proxy", message, (i, theirs), place, key, count=count, address=address, tensor=tensor)

    def relation(self, mine: Array, entries: Array) -> Array:
        """Returns the level of an entry that stands for both: LANES of a warp, WARPS of a block, BLOCKS of a cluster, CLUSTERS."""
        other = (entries & np.uint64(LANE)).astype(np.int64)
        per = self.wave.lanes_per_block
        levels = np.where(other // per != mine // per, BLOCKS, np.where(other >> 5 != mine >> 5, WARPS, LANES))
        levels = np.where(other // self.per != mine // self.per, CLUSTERS, levels)
        return np.where(other == mine, ONE, levels).astype(np.uint64)

    # -- findings -----------------------------------------------------------------------------------------------------

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
        lanes, segment, i = access.lanes, access.segment, access.instruction
        for number in np.unique(by).tolist():
            at = int(np.flatnonzero(by == number)[0])
            position, first = int(access.who.position[where[at]]), int(entries[at])
            theirs = self.instructions[number]
            place = lanes.place(position)
            block, thread = divmod(first & LANE, self.wave.lanes_per_block)
            their_place = (self.wave.number(block), thread // WARP, thread % WARP)
            address = int(access.addresses[position])
            if segment is None:
                address = offset = address % self.shared_stride
                name = self.shared_name(int(access.rows[where[at]]) // self.granules)
            else:
                offset, name = address - segment.start, repr(segment.name)
            sides = [(i.line, verbs[0], i, place), (theirs.line, verbs[1], theirs, their_place)]
            sides.sort(key=lambda side: -side[0])
            (_, did, at_fault, main), (_, had, second, rest) = sides
            crowd = ("", " and other lanes", " and other warps", *[" and other blocks"] * 2)[(first & LEVEL) >> 29]
            message = (
                f"{told(did, at_fault)} at offset {offset:#x} of {name} and {told(had, second)} at {source_and_call(second)} "
                f"by block {rest[0]}, warp {rest[1]}, lane {rest[2]}{crowd} {what}"
            )
            key = ("race", *sorted((place_of(i), place_of(theirs)), key=str), segment.name if segment else None)
            self.findings.record(
                Verdict("race", severity),
                message,
                (at_fault, second),
                main,
                key,
                count=int(np.count_nonzero(by == number)),
                address=address,
                tensor=segment.name if segment is not None else None,
            )


def told(verb: str, i: Instruction) -> str:
    """Returns the verb for an instruction; a copy's has its name."""
    if i.opcode != "cp":
        return verb
    return i.name if verb == COPY else f"{verb.removesuffix(f' of an {COPY}')} of {i.name}"


@dataclass
class Touches:
    """The last access of each lane of the cluster to a block's shared memory from another block, and its instruction."""

    stamps: Array
    by: Array


class Lifetimes:
    """The lifetimes of a wave's blocks in clusters."""

    def __init__(self, races: Races, wave: Wave, findings: Findings):
        self.races, self.wave, self.findings = races, wave, findings
        self.touched: dict[int, Touches] = {}
        self.over: dict[int, Array] = {}
        """Moments, for each lane of the cluster, until which its accesses were over for a thread of the block that has exited."""

    def touch(self, lanes: Lanes, blocks: Array, i: Instruction) -> None:
        """Notes that the lanes access the shared memory of these blocks of the wave, one a lane, none its own."""
        races, place = self.races, lanes.index % self.races.per
        early = ~races.begun(lanes, blocks)
        if early.any():
            first = int(np.flatnonzero(early)[0])
            block = self.number(int(blocks[first]))
            message = f"access to the shared memory of block {block}, which may not have begun: no cluster barrier is before it"
            self.findings.report("not begun", message, i, lanes, first, count=int(early.sum()))
        if is_phase(i) and "arrive" not in i.mods:
            return  # a phase is not complete without the bytes that are expected: who waits for it waits for this
        for block in np.unique(blocks).tolist():
            found = self.touched.get(block)
            if found is None:
                found = self.touched[block] = Touches(np.zeros(races.per, np.int64), np.zeros(races.per, np.int64))
            at = place[blocks == block]
            found.stamps[at], found.by[at] = races.now, races.number(i)

    def leave(self, lanes: Lanes) -> None:
        """Checks blocks whose last thread is among these, which have exited: every access to their memory must be over."""
        races, per = self.races, self.races.per
        for block in lanes.block_ids.tolist():
            part = lanes.subset(np.flatnonzero(lanes.block == block))
            start = int(part.index[0]) // per * per + races.first
            learnt = [races.learnt(lane) for lane in (part.index + races.first).tolist()]
            known = [one[start : start + per] for one in learnt if one is not None]
            self.over[block] = highest([races.heard.released(part)[:per], *known, self.over.get(block)])
            if block in self.touched and not self.wave.alive_by_block[block]:
                self.check(block)

    def check(self, block: int) -> None:
        touched, per = self.touched[block], self.wave.lanes_per_block
        late = np.flatnonzero(touched.stamps > self.over[block])
        for number in np.unique(touched.by[late]).tolist():
            lanes = late[touched.by[late] == number]
            i = self.races.instructions[number]
            other, thread = divmod(block // self.wave.cluster * self.races.per + int(lanes[0]), per)
            key = ("exited block", i.line, i.text, None)
            place = self.number(other), thread // WARP, thread % WARP
            count = len(lanes)
            self.findings.record("exited block", self.message(block), (i,), place, key, count=count, address=None, tensor=None)

    def message(self, block: int) -> str:
        number = self.number(block)
        return f"access to the shared memory of block {number}, which may have exited: nothing makes its threads wait for this"

    def number(self, block: int) -> int:
        return self.wave.number(self.wave.first_block + block)


def tile_access(races: Races, lanes: Lanes, row: Array, chunks: Array, offsets: Array, i: Instruction) -> TileAccess:
    """Returns tiles of shared memory, the k-th by lane row[k]: `chunks` (tiles, n), 16-byte elements of the wave; `offsets`."""
    addresses = np.zeros(lanes.n, np.int64)
    addresses[row] = offsets
    lane, column = lanes.index[row] + races.first, lanes.warp[row] % races.warps
    return TileAccess(i, lanes, addresses, races.shared, chunks, 4 - races.shared_shift, row, lane, column)


def piece_access(
    races: Races, lanes: Lanes, segment: Segment, starts: Array, lengths: Array, row: Array, i: Instruction
) -> ShadowAccess | None:
    """Returns ranges of bytes of a tensor, the k-th by lane row[k]; None if no store of the kernel reaches the tensor."""
    area = races.area(segment) if segment.space == "global" else None
    if area is None:
        return None
    up = (1 << area.shift) - 1
    begin = starts + (segment.address - segment.start - area.low)
    area.shadow.ragged |= bool(((begin | begin + lengths) & up).any())
    first = (begin + up) >> area.shift
    count = ((begin + lengths + up) >> area.shift) - first
    before = np.cumsum(count) - count
    rows = np.repeat(first - before, count) + np.arange(int(count.sum()))
    position = np.repeat(row, count)
    addresses = np.zeros(lanes.n, np.int64)
    addresses[row[::-1]] = starts[::-1]
    who = Who(lanes.index[position] + races.first, position, position, position)
    return ShadowAccess(i, lanes, addresses, segment, area.shadow, rows, None, who)


def bulk_read(races: Races, access: ShadowAccess) -> None:
    """Checks the read of a tensor map: by a proxy of its own, at once."""
    if races.launches is not None:
        races.launches.look(access, False, False)
    races.look_at_writers(access, "read")
    if races.has_atomics:
        races.look(access, access.shadow.atomics, "read", "atomic access")
    races.note(access, access.shadow.reads)


def bulk_writing(races: Races, access: ShadowAccess) -> None:
    """Begins a copy to a tensor: it writes at any time until its thread waits; no lane is ordered behind that, its own included."""
    shadow = access.shadow
    if shadow.landing is None:
        shadow.landing = Table(shadow.writes.rows, 1, races.numbers)
    races.copies.pending(access, shadow.landing)


def bulk_written(races: Races, access: ShadowAccess, lanes: Array) -> None:
    """Turns the parts of such a copy for which these lanes of the wave have waited into writes at this moment."""
    assert access.shadow.landing is not None
    mine = np.isin(access.who.lane, lanes + races.first)
    rows = access.rows[mine]
    access.shadow.landing.entries[rows] = 0
    who = access.who
    values = races.values(Who(who.lane[mine], who.position, who.row, who.column), ONE)
    access.shadow.writes.entries.reshape(-1)[rows] = values


def last_write(races: Races, access: ShadowAccess) -> tuple[int, int]:
    """Returns (moment, block of the grid) of the last plain write to the bytes of an access; moment 0: nobody wrote there."""
    if not access.shadow.writes.used or not len(access.rows):
        return 0, 0
    entry = int(access.shadow.writes.entries[access.rows].max())
    return entry >> STAMP, (entry & LANE) // races.wave.lanes_per_block
