"""Data races by happens-before, in whatever order the machine ran the warps: of threads, scopes and launches.

Atomics and strong accesses (volatile, relaxed, acquire, release) do not race with each other, as long as each is in the scope of
the other (PTX ISA, "Morally strong operations"): `.cta` of one excludes all threads of other blocks, `.cluster` those of other
clusters, whatever the scope of the other one.

Bulk copies are accesses of many bytes each. A copy reads its source and writes its destination at any moment from its issue
until its wait, from when on it is an ordinary access. A granule belongs to the copy that has its first byte: rows of a tensor may
begin and end anywhere.

Other blocks of a cluster may access a block's shared memory only after it has begun, and it may not exit before they are done
(CUDA C++ Programming Guide, "Distributed Shared Memory"). Both must follow from the order of the threads, whatever the machine
ran first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cupyflash.sim.ranges import ranges

from ..state.findings import LOCKSTEP, Findings, Key, place_of, source_and_call, thread_name
from ..state.lane_sets import LaneSet, Wave, by_value
from ..state.segments import Access, Segment
from ..text.syntax import Array, PtxInstruction
from .detector import COPY, LANDING, LEFT_OUT, Detector, TileReads
from .history import Launches, Stream
from .moments import BLOCKS, CLUSTERS, LANES, LOW, ONE, STAMP, OrderedLaunch, highest, lanes_of, levels_of, stamps_of
from .shadow import (
    CLUSTER,
    DEVICE,
    Rows,
    ShadowAccess,
    Table,
    TileAccess,
    Touch,
    Who,
    is_async,
    is_phase,
    is_strong,
    same_for_warps,
    scope_of,
    windows,
)

LATEST = LOW << np.uint64(STAMP)
"""The stamp of an entry that no access is ordered behind."""

IN_LOCKSTEP = f"{LOCKSTEP}: both are volatile, but nothing lets the lanes of the warp wait for each other (__syncwarp would)"


class Races(Detector):
    """The race detector of one launch."""

    launches: Launches | None = None
    """The launch among those of its history."""

    def begin_wave(self, wave: Wave) -> None:
        super().begin_wave(wave)
        self._readings: list[Touch] = []
        self.tiles = TileReads(self) if self.sharing.products else None

    def join_history(self, stream: Stream, run: OrderedLaunch) -> None:
        """Makes the launch, `run` of a stream, part of the stream's history."""
        self.launches, self.in_history = Launches(self, stream.history.past, run), True

    def fence(self, lanes: LaneSet, scope: int) -> None:
        super().fence(lanes, scope)
        if self.launches is not None and scope == DEVICE:
            self.launches.fence(lanes)

    # -- accesses -----------------------------------------------------------------------------------------------------

    def access(self, seen: Access) -> None:
        """Checks an access that is in bounds and aligned."""
        found = self.shared_rows(seen) if seen.segment is None else self.tensor_rows(seen, seen.segment)
        if found is None:
            return
        shadow, rows, columns, who = found
        collective = seen.kind in ("ldmatrix", "stmatrix")
        place = seen.instruction, seen.lanes, seen.addresses, seen.segment
        access = ShadowAccess(*place, shadow, rows, columns, who, collective)
        if columns is not None and not collective:
            access.last = same_for_warps(seen.lanes, rows)
        self.judge(access, seen.kind)

    def tensor_rows(self, seen: Access, segment: Segment) -> Rows | None:
        """Returns the granules of an access to a tensor, if somebody may write it: constants, between launches."""
        area = self.area(segment) if segment.space in (("global", "const") if self.in_history else ("global",)) else None
        if area is None:
            return None
        lanes, size, shift = seen.lanes, seen.size, area.shift
        rows = (seen.addresses.astype(np.int64) + (segment.address - segment.start - area.low)) >> shift
        if isinstance(size, int):
            who = self.who(lanes, max(1, size >> shift))
            if size >> shift > 1:
                rows = rows[who.position] + (who.row - lanes.block[who.position] * self.granules)
        else:
            count = (size.astype(np.int64) + (1 << shift) - 1) >> shift
            position = np.repeat(np.arange(lanes.n), count)
            rows = ranges(rows, count)
            who = Who(lanes.index[position] + self.first, position, position, position)
        return area.shadow, rows, None, who

    def shared_rows(self, seen: Access) -> Rows | None:
        """Returns the granules of an access to shared memory; local memory is a thread's own."""
        if seen.space == "local":
            return None
        assert isinstance(seen.size, int)
        who = self.who(seen.lanes, max(1, seen.size >> self.shared_shift))
        rows = (seen.addresses >> self.shared_shift).astype(np.int64)
        if seen.space == "shared::cluster":
            rows -= seen.lanes.block * self.granules
        rows = (rows if len(who.row) == seen.lanes.n else rows[who.position]) + who.row
        return self.shared, rows, who.column, who

    def judge(self, access: Touch, kind: str) -> None:
        """Reports earlier accesses that this one is not ordered behind; then adds it to the shadow."""
        i, shadow, reads = access.instruction, access.shadow, kind in ("ld", "ldmatrix")
        strong = self.sharing.atomics and (kind == "atom" or is_strong(i))
        if self.launches is not None and isinstance(access, ShadowAccess) and access.segment is not None:
            if strong and (kind == "ld" or i.opcode == "atom"):
                self.launches.hear(access, kind != "ld")
            self.launches.look(access, not reads, strong)
        self.look(access, shadow.landing, "read" if reads else "write", LANDING)
        verb = "atomic access" if strong else "read" if reads else "write"
        self.look(access, shadow.agreeing, verb, "write")
        self.look(access, shadow.writes, verb, "write")
        if strong or not reads:
            self.look(access, shadow.copies, verb, COPY)
            self.look(access, shadow.reads, verb, "read")
            if self.tiles is not None and shadow.shared:
                self.tiles.look(access, verb)
        if strong:
            self.judge_strong(access, kind)
        elif i in self.sharing.guesses:
            self.note(access, shadow.atomics)
        else:
            self.look(access, shadow.atomics, verb, "atomic access")
            if reads:
                self.read(access)
            else:
                self.overwrite(access)
                store = self.store_of(access)
                if store is not None:
                    store.earlier.append(access)

    def read(self, access: Touch) -> None:
        """Adds plain reads to the shadow."""
        if self.proxy is not None and is_async(access.instruction):
            self.through_proxy(access)
        self.note(access, access.shadow.reads)
        if access.instruction.opcode == "cp":
            self.issue(access, access.shadow.copies)
            self._readings.append(access)

    def issued(self) -> list[Touch]:
        """Returns the reads of the copies that have just been issued."""
        readings, self._readings = self._readings, []
        return readings

    def read_map(self, access: ShadowAccess) -> None:
        """Checks the read of a tensor map: by a proxy of its own, at once."""
        if self.launches is not None:
            self.launches.look(access, False, False)
        shadow = access.shadow
        for table, other in ((shadow.agreeing, "write"), (shadow.writes, "write"), (shadow.atomics, "atomic access")):
            self.look(access, table, "read", other)
        self.note(access, shadow.reads)

    def overwrite(self, access: Touch) -> None:
        """Makes the access the last writer of its granules."""
        table, number = access.shadow.writes, self.number(access.instruction)
        table.used = True
        if access.boxes is not None:
            assert isinstance(access, TileAccess)
            self.stamp(access)
            windows(table.by, access.boxes.count)[access.boxes.starts] = number
            return
        if access.shadow.mixed is not None:
            access.shadow.mixed[access.rows] = False
        lane, entries = access.who.lane, table.entries.reshape(-1)
        values = self.entries(lane, LANES if access.collective else ONE)
        entries[access.rows] = values
        if self.tiles is not None and access.shadow.shared:
            self.tiles.mix(access.different)
        table.by.reshape(-1)[access.rows] = number
        won = entries[access.rows]
        lost = np.flatnonzero(won != values)
        if len(lost):
            # Several lanes wrote there at once: within a warp one of them wins, between warps that is a race.
            winner, store = lanes_of(won[lost]), self.store_of(access)
            same = np.zeros(len(lost), bool) if store is None else store.same_at_once(access, lost, winner)
            apart = winner >> 5 != lane[lost] >> 5
            self.report_writers(access, lost[apart], won[lost[apart]], np.full(np.count_nonzero(apart), number), same[apart])
            beside = lost[same & apart]
            self.agree(access, beside, values[beside], np.full(len(beside), number))
            access.shadow.mix(access.rows[lost[~same & ~apart]])

    # -- atomics and strong accesses ----------------------------------------------------------------------------------

    def judge_strong(self, access: Touch, kind: str) -> None:
        """Judges an atomic or strong access among others; adds it to the shadow, and lets it carry clocks."""
        i, lanes, rows, shadow = access.instruction, access.lanes, access.rows, access.shadow
        if shadow.shared and i in self.sharing.lockstep:
            self.lockstep(access)
        self.note(access, shadow.atomics)
        if is_phase(i):
            return
        if self.sharing.narrow and not (shadow.shared and self.wave.cluster == 1):
            self.judge_scopes(access, kind != "ld")
        if self.sharing.releases and i.opcode != "cp":
            area = None if access.segment is None else self.area(access.segment)
            reads = kind in ("ld", "atom") and i.opcode != "st"
            where = rows.reshape(lanes.n, -1)[:, 0]
            self.strong(lanes, where, -1 if area is None else area.low, reads, kind != "ld", frozenset(i.mods))

    def lockstep(self, access: Touch) -> None:
        """Checks a volatile access to shared memory: it sees the write of another lane of the warp only if the lanes have met."""
        table, lane, rows = access.shadow.volatile, access.who.lane, access.rows
        if access.instruction.opcode == "st":
            table.entries[rows, 0], table.by[rows, 0] = self.entries(lane, ONE), self.number(access.instruction)
            return
        written = table.entries[rows, 0]
        other = lanes_of(written)
        where = np.flatnonzero((written != 0) & (other >> 5 == lane >> 5) & (other != lane))
        where = where[self.unordered(lane[where], written[where], False)]
        self.report(access, where, written[where], table.by[rows[where], 0], ("read", "write"), IN_LOCKSTEP)

    def judge_scopes(self, access: Touch, writes: bool) -> None:
        """Reports the strong accesses that this one is neither ordered behind nor morally strong with; then adds it to them."""
        shadow, scope = access.shadow, scope_of(access.instruction.mods)
        for (theirs, wrote), table in shadow.scoped.items():
            if (writes or wrote) and max(scope, theirs) != DEVICE:
                self.judge_scope(access, table, max(scope, theirs))
        kept = shadow.scoped.get((scope, writes))
        if kept is None:
            kept = shadow.scoped[scope, writes] = Table(shadow.writes.rows, 1, self.numbers)
        self.note(replace(access, columns=None, last=None) if isinstance(access, ShadowAccess) else access, kept)
        if writes and scope != DEVICE:
            self.judge_scope(access, kept, scope, at_once=True)

    def judge_scope(self, access: Touch, table: Table, scope: int, at_once: bool = False) -> None:
        """Reports the entries of other blocks, or of other clusters; `at_once`: those of this very access."""
        entries, lane = table.entries[access.rows, 0], access.who.lane
        near, several = (self.per, CLUSTERS) if scope == CLUSTER else (self.wave.lanes_per_block, BLOCKS)
        apart = lanes_of(entries) // near != lane // near
        if not at_once:
            apart |= levels_of(entries) >= several
        where = np.flatnonzero(apart & (entries != 0))
        where = where[self.unordered(lane[where], entries[where], False)]
        by = table.by[access.rows[where], 0]
        self.report(access, where, entries[where], by, ("atomic access", "atomic access"), LEFT_OUT)

    # -- the asynchronous proxy ---------------------------------------------------------------------------------------

    def through_proxy(self, access: Touch) -> None:
        """Reports bytes that the asynchronous proxy reads and ordinary instructions wrote, with no fence between the two."""
        for table in (access.shadow.writes, access.shadow.atomics):
            if table.used:
                entries, by = table.entries[access.rows], table.by[access.rows]
                where, column = np.nonzero(entries)
                entries, by = entries[where, column], by[where, column]
                ordinary = ~self.asynchronous()[by]
                self.judge_proxy(access, where[ordinary], entries[ordinary], by[ordinary])

    def judge_proxy(self, access: Touch, where: Array, entries: Array, by: Array) -> None:
        """Reports a finding for each instruction that wrote some of `entries` without a fence on the way to these readers."""
        assert self.proxy is not None
        reader, tensor = access.who.lane[where], None if access.segment is None else access.segment.name
        space = "shared" if access.segment is None else access.segment.space
        bad = self.proxy.unfenced(space, reader, lanes_of(entries), stamps_of(entries), levels_of(entries) != ONE)
        # Accesses that are not even ordered are a race, and reported as one.
        bad &= ~self.unordered(reader, entries, False)
        for number in np.unique(by[bad]).tolist():
            mine = np.flatnonzero(bad & (by == number))
            position, i, theirs = int(access.who.position[where[mine[0]]]), access.instruction, self.instructions[number]
            message = (
                f"{i.name} reads {'shared memory' if tensor is None else repr(tensor)} through the asynchronous proxy; what "
                f"{source_and_call(theirs)} wrote there, by {thread_name(self.place(int(lanes_of(entries[mine[0]]))))}, has no "
                "fence.proxy.async behind it"
            )
            key: Key = ("proxy", place_of(i), place_of(theirs), tensor)
            address, place = int(access.addresses[position]), access.lanes.place(position)
            self.findings.record("proxy", message, (i, theirs), place, key, count=len(mine), address=address, tensor=tensor)

    # -- asynchronous copies -----------------------------------------------------------------------------------------------

    def tile_access(self, lanes: LaneSet, row: Array, chunks: Array, offsets: Array, i: PtxInstruction) -> TileAccess:
        """Returns tiles of shared memory, the k-th by lane row[k]: `chunks` (tiles, n), 16-byte elements of the wave; `offsets`."""
        addresses = np.zeros(lanes.n, np.int64)
        addresses[row] = offsets
        lane, column = lanes.index[row] + self.first, lanes.warp[row] % self.warps
        return TileAccess(i, lanes, addresses, self.shared, chunks, 4 - self.shared_shift, row, lane, column)

    def piece_access(
        self, lanes: LaneSet, segment: Segment, starts: Array, lengths: Array, row: Array, i: PtxInstruction
    ) -> ShadowAccess | None:
        """Returns ranges of bytes of a tensor, the k-th by lane row[k]; None if no store of the kernel reaches the tensor."""
        area = self.area(segment) if segment.space == "global" else None
        if area is None:
            return None
        up = (1 << area.shift) - 1
        begin = starts + (segment.address - segment.start - area.low)
        area.shadow.ragged |= bool(((begin | begin + lengths) & up).any())
        first = (begin + up) >> area.shift
        count = ((begin + lengths + up) >> area.shift) - first
        rows, position = ranges(first, count), np.repeat(row, count)
        addresses = np.zeros(lanes.n, np.int64)
        addresses[row[::-1]] = starts[::-1]
        who = Who(lanes.index[position] + self.first, position, position, position)
        return ShadowAccess(i, lanes, addresses, segment, area.shadow, rows, None, who)

    # -- reads --------------------------------------------------------------------------------------------------------

    def issue(self, access: Touch, table: Table) -> None:
        """Enters copies that read or write until their threads have waited: no access can be ordered behind that yet, those of
        their own lanes included.
        """
        table.used, number, boxes = True, self.number(access.instruction), access.boxes
        if boxes is None:
            table.entries[access.rows, 0] = access.who.lane.astype(np.uint64) | LATEST
            table.by[access.rows, 0] = number
        else:
            windows(table.entries, boxes.count)[boxes.starts] = (boxes.lane.astype(np.uint64) | LATEST)[:, None, None]
            windows(table.by, boxes.count)[boxes.starts] = number

    def copied(self, lanes: LaneSet, readings: list[Touch]) -> None:
        """Notes readings of copies, for which the lanes have waited, as reads at this moment."""
        for reading in readings:
            copies = reading.shadow.copies
            mine = np.isin(reading.lane if isinstance(reading, TileAccess) else reading.who.lane, lanes.index + self.first)
            if not mine.any():
                continue
            some: Touch
            if isinstance(reading, TileAccess):
                some = reading.take(np.flatnonzero(mine), lanes)
            else:
                columns, lane = None if reading.columns is None else reading.columns[mine], reading.who.lane[mine]
                some = replace(reading, lanes=lanes, rows=reading.rows[mine], columns=columns, who=Who(lane, lane, lane, lane))
            if some.boxes is None:
                copies.entries[some.rows] = 0
            else:
                windows(copies.entries, some.boxes.count)[some.boxes.starts] = 0
            self.note(some, reading.shadow.reads)

    # -- writes -------------------------------------------------------------------------------------------------------

    def landed(self, lanes: LaneSet, size: int, elements: Array) -> None:
        """Notes copies into `elements` of `size` bytes, for which the lanes have waited, as writes at this moment."""
        count = max(1, size >> self.shared_shift)
        rows, who = elements.astype(np.int64) * count, self.who(lanes, count)
        rows = rows[who.position] + np.tile(np.arange(count), lanes.n)
        self.shared.writes.entries.reshape(-1)[rows] = self.entries(who.lane, ONE)
        if self.tiles is not None:
            self.tiles.mix(rows)

    def issue_ordered(self, lanes: LaneSet, size: int, elements: Array) -> Array:
        """Returns a mask of the lanes that are ordered behind the issue of the copy in flight to their element."""
        count = max(1, size >> self.shared_shift)
        rows = elements.astype(np.int64)[:, None] * count + np.arange(count)
        entries = self.shared.writes.entries.reshape(-1)[rows.reshape(-1)]
        race = self.unordered(np.repeat(lanes.index + self.first, count), entries, False)
        return np.asarray(~race.reshape(lanes.n, count).any(axis=1))

    def stamp(self, access: TileAccess) -> None:
        """Makes the lanes of an access write now, each alone."""
        table, boxes = access.shadow.writes, access.boxes
        if boxes is None:
            table.entries.reshape(-1)[access.rows] = self.entries(access.who.lane, ONE)
            if self.tiles is not None:
                self.tiles.mix(access.rows)
        else:
            values = self.entries(boxes.lane, ONE)
            windows(table.entries, boxes.count)[boxes.starts] = values[:, None, None]
            if self.tiles is not None:
                self.tiles.fill(boxes, values)

    def written(self, access: ShadowAccess, lanes: Array) -> None:
        """Turns the parts of a copy to a tensor for which these lanes of the wave have waited into writes at this moment."""
        mine = np.isin(access.who.lane, lanes + self.first)
        rows = access.rows[mine]
        access.shadow.landing.entries[rows] = 0
        access.shadow.writes.entries.reshape(-1)[rows] = self.entries(access.who.lane[mine], ONE)

    def last_write(self, access: ShadowAccess) -> tuple[int, int]:
        """Returns (moment, block of the grid) of the last plain write to the bytes of an access; moment 0: nobody wrote there."""
        if not access.shadow.writes.used or not len(access.rows):
            return 0, 0
        entry = access.shadow.writes.entries[access.rows].max()
        return int(entry) >> STAMP, int(lanes_of(entry)) // self.wave.lanes_per_block


# -- lifetimes of blocks ------------------------------------------------------------------------------------------


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

    def touch(self, lanes: LaneSet, blocks: Array, i: PtxInstruction) -> None:
        """Notes that the lanes access the shared memory of these blocks of the wave, one a lane, none its own."""
        races, place = self.races, lanes.index % self.races.per
        early = ~races.begun(lanes, blocks)
        if early.any():
            block = self.number(int(blocks[early][0]))
            message = f"access to the shared memory of block {block}, which may not have begun: no cluster barrier is before it"
            self.findings.report("not begun", message, i, lanes, np.flatnonzero(early))
        if is_phase(i) and "arrive" not in i.mods:
            return  # a phase is not complete without the bytes that are expected: who waits for it waits for this
        for block in np.unique(blocks).tolist():
            found = self.touched.get(block)
            if found is None:
                found = self.touched[block] = Touches(np.zeros(races.per, np.int64), np.zeros(races.per, np.int64))
            at = place[blocks == block]
            found.stamps[at], found.by[at] = races.now, races.number(i)

    def leave(self, lanes: LaneSet) -> None:
        """Checks blocks whose last thread is among these, which have exited: every access to their memory must be over."""
        races, per = self.races, self.races.per
        for block in lanes.block_ids.tolist():
            part = lanes.subset(np.flatnonzero(lanes.block == block))
            start = int(part.index[0]) // per * per + races.first
            learnt = [races.learnt(lane) for lane in (part.index + races.first).tolist()]
            known = [one.row(start // per, per) for one in learnt if one is not None]
            self.over[block] = highest([races.released(races.groups(part))[0, :per], *known, self.over.get(block)])
            if block in self.touched and not self.wave.alive_by_block[block]:
                self.check(block)

    def check(self, block: int) -> None:
        touched = self.touched[block]
        late = np.flatnonzero(touched.stamps > self.over[block])
        for number, at in by_value(touched.by[late]):
            lanes = late[at]
            i = self.races.instructions[number]
            place = self.wave.place(block // self.wave.cluster * self.races.per + int(lanes[0]))
            message = (
                f"access to the shared memory of block {self.number(block)}, which may have exited: nothing makes its threads "
                "wait for this"
            )
            key = ("exited block", i.line, i.text, None)
            self.findings.record("exited block", message, (i,), place, key, count=len(lanes), address=None, tensor=None)

    def number(self, block: int) -> int:
        return self.wave.number(self.wave.first_block + block)
