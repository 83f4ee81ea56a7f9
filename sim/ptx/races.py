"""Data races by happens-before, whatever order the machine ran the warps in.

Two accesses to the same bytes, one of them writing, race unless one happens before the other. What orders: a lane its own
accesses; barriers their threads; bar.warp.sync its members; a fence and then an atomic (or a store that is volatile,
relaxed or release) with a later atomic (or such a load, and then a fence) on the same address. Shuffles, mma and
ldmatrix order nothing. Atomics and the strong accesses named above do not race with each other.

The order of execution is one legal interleaving, so a single clock `now` stamps every access, and ticks when somebody
synchronises. What a warp knows are then moments: `base` of its block (what the block did until then is over for all of
it: the last barrier), `synced` of the warp (bar.warp.sync), `known[w, v]` (warp w has heard of what warp v did until
then: barriers with a thread count). An access is ordered behind an earlier one whose stamp is not above such a moment.

Memory is looked at in granules: the smallest width that the kernel accesses in that space, so that an access of 16 bytes is
often one entry. An entry is stamp << 32 | who << 30 | lane: the last writer of a granule, and a summary of who read it
(who: one lane, LANES of a warp, WARPS of a block, BLOCKS). In shared memory each warp has its own summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .findings import Findings
from .heard import Heard
from .lanes import WARP, Lanes, Wave
from .sharing import is_phase, is_strong
from .syntax import Instruction
from .types import Array

if TYPE_CHECKING:
    from .code import Code
    from .memory import Segment

STAMP = 32
ONE, LANES, WARPS, BLOCKS = (k << 30 for k in range(4))
LANE = (1 << 30) - 1
LOW = np.uint64((1 << STAMP) - 1)
WARP_BITS = np.uint64(((1 << STAMP) - 1) & ~(LANES | WARP - 1))
"""Of an entry: zero where two are of the same warp, be it one lane or some."""


@dataclass
class Table:
    """Entries of all granules, one row a granule, with the instruction of each entry."""

    entries: Array
    by: Array
    used: bool = False

    @classmethod
    def of(cls, rows: int, columns: int) -> Table:
        return cls(np.zeros((rows, columns), np.uint64), np.zeros((rows, columns), np.uint32))


@dataclass
class Shadow:
    """Who touched each granule: the last plain writer, the plain readers, the atomics."""

    writes: Table
    reads: Table
    atomics: Table
    shared: bool

    @classmethod
    def of(cls, granules: int, columns: int, shared: bool) -> Shadow:
        return cls(Table.of(granules, 1), Table.of(granules, columns), Table.of(granules, columns), shared)


@dataclass
class Who:
    """The lanes of an access, one entry for each granule: grid-wide lane, position in the `Lanes`, shared row, column."""

    lane: Array
    position: Array
    row: Array
    column: Array


@dataclass(frozen=True)
class Area:
    """Tensors that share memory have one shadow: granules from host address `low` on."""

    low: int
    shadow: Shadow


class Races:
    """The race detector of one launch."""

    def __init__(self, code: Code, segments: list[Segment], shared_stride: int, findings: Findings, blocks: int):
        self.findings = findings
        self.shared_stride = shared_stride
        self.blocks = blocks
        self.now = 1
        self.instructions: list[Instruction] = []
        self._numbers: dict[int, int] = {}
        sharing = code.sharing
        self.shared_shift, self.global_shift = sharing.shared_granule.bit_length() - 1, sharing.global_granule.bit_length() - 1
        self.has_atomics, self.fences, self.written = sharing.atomics, sharing.releases, sharing.written
        self.segments = segments
        self._areas: dict[int, Area | None] = {}
        # What lanes have learnt of other lanes through atomics: stamps over the lanes of the grid.
        self._lane_knows: dict[int, Array] = {}
        self._block_knows: dict[int, Array] = {}
        self._heard: dict[int, Array] = {}
        self._messages: dict[tuple[int, int, int], Array] = {}
        # When each lane of the grid last fenced: for the whole device; for its block.
        self._fenced: tuple[Array, Array] | None = None

    def begin_wave(self, wave: Wave) -> None:
        self.wave = wave
        blocks, warps = wave.blocks, wave.warps_per_block
        self.first = wave.first_block * wave.lanes_per_block
        self.granules = self.shared_stride >> self.shared_shift
        self.shared = Shadow.of(blocks * self.granules, warps, True)
        self.now += 1
        start = self.now - 1
        self.base = np.full(blocks, start, np.int64)
        self.floor = self.synced_floor = start
        self.synced = np.full(blocks * warps, start, np.int64)
        self.known = np.full((blocks, warps, warps), start, np.int64)
        self.heard = Heard(self)
        # Only after bar.warp.sync of some lanes: moments between the lanes of a warp.
        self.partial: dict[int, Array] = {}

    # -- who is ordered behind whom -----------------------------------------------------------------------------------

    def block_barrier(self, blocks: Array) -> None:
        """All threads of these blocks have met."""
        moment = self.now
        self.base[blocks] = moment
        self.synced.reshape(self.wave.blocks, -1)[blocks] = moment
        self.known[blocks] = moment
        for block in blocks.tolist():
            self.heard.rows.pop(block, None)
        self.floor = int(self.base[self.wave.alive_by_block > 0].min(initial=moment))
        self.find_synced_floor()
        self.now += 1
        if self._lane_knows:
            per = self.wave.lanes_per_block
            for block in blocks.tolist():
                number = block + self.wave.first_block
                lanes = [lane for lane in self._lane_knows if lane // per == number]
                if lanes:
                    learnt = [self._lane_knows.pop(lane) for lane in lanes]
                    self._block_knows[number] = highest([*learnt, self._block_knows.get(number)])

    def find_synced_floor(self) -> None:
        """Who has exited accesses nothing more, and holds nobody back."""
        self.synced_floor = int(self.synced[self.wave.alive_by_warp > 0].min(initial=self.now))

    def arrive(self, lanes: Lanes) -> tuple[int, Array]:
        """Lanes of one block come to a barrier with a thread count: what they release, at this moment."""
        block = int(lanes.block[0])
        warps = lanes.warp_ids % self.wave.warps_per_block
        released = self.known[block, warps].max(axis=0)
        released[warps] = self.now
        self.now += 1
        return block, released

    def depart(self, lanes: Lanes, released: list[tuple[int, Array]]) -> None:
        """Lanes of one block have waited for the arrivals that released this."""
        block = int(lanes.block[0])
        heard = np.maximum.reduce([moments for _, moments in released])
        warps = lanes.warp_ids % self.wave.warps_per_block
        self.known[block, warps] = np.maximum(self.known[block, warps], heard)
        self.synced[lanes.warp_ids] = np.maximum(self.synced[lanes.warp_ids], heard[warps])

    def warp_sync(self, warps: Array) -> None:
        """All lanes of these warps of the wave have met."""
        self.synced[warps] = self.now
        self.find_synced_floor()
        self.now += 1
        if self.heard.rows:
            for warp in warps.tolist():
                self.heard.share(warp, np.arange(WARP))
        if self._lane_knows:
            for warp in warps.tolist():
                self._share(range(self.first + warp * WARP, self.first + (warp + 1) * WARP))

    def lanes_sync(self, warp: int, mask: int) -> None:
        """Some lanes of a warp have met."""
        members = np.array([lane for lane in range(WARP) if mask >> lane & 1])
        moments = self.partial.setdefault(warp, np.zeros((WARP, WARP), np.int64))
        heard = moments[members].max(axis=0)
        heard[members] = self.now
        moments[members] = heard
        self.heard.share(warp, members)
        self.now += 1
        if self._lane_knows:
            self._share((members + self.first + warp * WARP).tolist())

    def _share(self, lanes: list[int] | range) -> None:
        learnt = [self._lane_knows[lane] for lane in lanes if lane in self._lane_knows]
        if learnt:
            together = highest(learnt)
            self._lane_knows |= dict.fromkeys(lanes, together)

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Which of the accesses `entries` did not happen before what the grid-wide lanes `mine` do now."""
        stamp = (entries >> np.uint64(STAMP)).astype(np.int64)
        low = (entries & LOW).astype(np.int64)
        other, who = low & LANE, low & ~LANE
        per, warps = self.wave.lanes_per_block, self.wave.warps_per_block
        near = (other // per == mine // per) & (who != BLOCKS)
        ours = near & (other >> 5 == mine >> 5) & (who <= LANES)
        block = np.where(near, mine // per - self.wave.first_block, 0)
        known = self.known[block, mine % per >> 5]
        moment = np.where(who == WARPS, known.min(axis=1), known[np.arange(len(mine)), np.where(near, other % per >> 5, 0)])
        moment = np.where(ours, self.synced[block * warps + (mine % per >> 5)], moment)
        race = (stamp > 0) & ~(near & (stamp <= moment))
        if not collective:
            race &= ~((other == mine) & (who == ONE))
        if self.partial:
            for at in np.flatnonzero(race & ours & (who == ONE)):
                moments = self.partial.get(int(mine[at] - self.first) >> 5)
                race[at] &= moments is None or stamp[at] > moments[mine[at] & 31, other[at] & 31]
        if self.heard.rows and race.any():
            race &= stamp > self.heard.moments(mine, other, (who == LANES) | (who == WARPS), who == WARPS)
        if (self._lane_knows or self._block_knows) and race.any():
            for lane in np.unique(mine[race]):
                learnt = self.learnt(int(lane))
                if learnt is None:
                    continue
                heard = race & (mine == lane)
                found = learnt[other]
                found[who == LANES] = learnt.reshape(-1, WARP).min(axis=1)[other[who == LANES] // WARP]
                found[who == WARPS] = learnt.reshape(-1, per).min(axis=1)[other[who == WARPS] // per]
                # Readers in many blocks are not told apart: whoever has heard of other blocks is believed.
                found[who == BLOCKS] = self.now
                race &= ~(heard & (stamp <= found))
        return np.asarray(race)

    # -- atomics and fences: what a lane has heard -------------------------------------------------------------------------

    def learnt(self, lane: int) -> Array | None:
        """For each lane of the grid until when this one has heard of it through atomics; None: of nobody."""
        mine, block = self._lane_knows.get(lane), self._block_knows.get(lane // self.wave.lanes_per_block)
        return highest([mine, block]) if mine is not None or block is not None else None

    def fence(self, lanes: Lanes, block_only: bool) -> None:
        if self._fenced is None:
            size = self.blocks * self.wave.lanes_per_block
            self._fenced = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._fenced[1][lanes.index + self.first] = self.now
        if not block_only:
            self._fenced[0][lanes.index + self.first] = self.now
        self.now += 1
        if self._heard:
            for lane in (lanes.index + self.first).tolist():
                heard = self._heard.pop(lane, None)
                if heard is not None:
                    self._lane_knows[lane] = highest([heard, self._lane_knows.get(lane)])

    def strong(self, lanes: Lanes, where: Array, area: int, reads: bool, writes: bool, mods: frozenset[str]) -> None:
        """Atomics and strong accesses at `where`, one a lane: they carry what their lanes knew at their last fence."""
        releases, acquires = bool(mods & {"release", "acq_rel"}), bool(mods & {"acquire", "acq_rel"})
        per = self.wave.lanes_per_block
        for lane, at in zip((lanes.index + self.first).tolist(), where.tolist(), strict=True):
            # What was fenced for the block only is heard in the block only; shared memory is the block's anyway.
            for block_only in (False, True) if area >= 0 else (True,):
                key = (area, 1 + lane // per if block_only else 0, at)
                message = self._messages.get(key)
                if reads and message is not None:
                    # An atomic is taken to acquire at once, as the code that counts finished blocks relies on.
                    into = self._lane_knows if acquires or writes else self._heard
                    into[lane] = highest([message, into.get(lane)])
                fences = None if self._fenced is None else self._fenced[block_only]
                moment = self.now if releases else 0 if fences is None else int(fences[lane])
                if writes and moment:
                    self._messages[key] = highest([self._release(lane, moment, fences), message])
        self.now += 1

    def _release(self, lane: int, moment: int, fences: Array | None) -> Array:
        """What a lane hands on that fenced at `moment`: its own past, what it heard of, its block as far as it fenced too."""
        per, warps = self.wave.lanes_per_block, self.wave.warps_per_block
        out = np.zeros(self.blocks * per, np.int64)
        block = lane // per
        local, mine = block - self.wave.first_block, lane % per >> 5
        moments = np.repeat(self.known[local, mine], WARP)
        moments[mine * WARP : (mine + 1) * WARP] = self.synced[local * warps + mine]
        if local in self.heard.rows:
            moments = np.maximum(moments, self.heard.rows[local][lane % per])
        limit = np.full(per, moment)
        if fences is not None:
            limit = np.maximum(limit, fences[block * per : (block + 1) * per])
        out[block * per : (block + 1) * per] = np.minimum(moments, limit)
        out[lane] = moment
        return highest([out, self.learnt(lane)])

    # -- accesses -----------------------------------------------------------------------------------------------------

    def number(self, instruction: Instruction) -> int:
        found = self._numbers.get(id(instruction))
        if found is None:
            found = self._numbers[id(instruction)] = len(self.instructions)
            self.instructions.append(instruction)
        return found

    def who(self, lanes: Lanes, count: int) -> Who:
        """The lanes, each repeated for the `count` granules of its access."""
        found = lanes.repeated.get(count)
        if found is None:
            position = np.repeat(np.arange(lanes.n), count)
            lane = lanes.index[position] + self.first
            row = lanes.block[position] * self.granules + np.tile(np.arange(count), lanes.n)
            found = lanes.repeated[count] = Who(lane, position, row, lanes.warp[position] % self.wave.warps_per_block)
        assert isinstance(found, Who)
        return found

    def area(self, segment: Segment) -> Area | None:
        """The shadow of a tensor; None where no store of the kernel can reach it or an array that shares its memory."""
        if id(segment) in self._areas:
            return self._areas[id(segment)]
        group, low, high = [segment], segment.address, segment.address + segment.size
        for _ in self.segments:
            for one in self.segments:
                if one not in group and one.size and one.address < high and low < one.address + one.size:
                    group.append(one)
                    low, high = min(low, one.address), max(high, one.address + one.size)
        area = None
        if any(one.writable and (self.written is None or one.parameter in self.written) for one in group):
            low = low >> self.global_shift << self.global_shift
            area = Area(low, Shadow.of(((high - low - 1) >> self.global_shift) + 1, 1, False))
        self._areas |= {id(one): area for one in group}
        return area

    def access(
        self, space: str, segment: Segment | None, lanes: Lanes, addresses: Array, size: int | Array, kind: str, i: Instruction
    ) -> None:
        """One access that is in bounds and aligned."""
        strong = self.has_atomics and (kind == "atom" or is_strong(i))
        if segment is not None:
            if segment.space != "global":
                return
            area = self.area(segment)
            if area is None:
                return
            shift, shadow = self.global_shift, area.shadow
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
            columns = None
        elif space == "shared":
            assert isinstance(size, int)
            shift, shadow = self.shared_shift, self.shared
            who = self.who(lanes, max(1, size >> shift))
            rows = (addresses >> shift).astype(np.int64)
            rows = (rows if len(who.row) == lanes.n else rows[who.position]) + who.row
            columns = who.column
        else:
            return
        if strong:
            self.look(shadow.writes, rows, who, lanes, "atomic access", "write", i, addresses, segment, False, shadow.shared)
            self.look(shadow.reads, rows, who, lanes, "atomic access", "read", i, addresses, segment, False, shadow.shared)
            self.note(shadow.atomics, rows, columns, who, i, False)
            if self.fences and not is_phase(i):
                where = rows.reshape(lanes.n, -1)[:, 0] if len(rows) != lanes.n else rows
                reads = kind in ("ld", "atom") and i.opcode != "st"
                area_key = -1 if segment is None else self._area_number(segment)
                self.strong(lanes, where, area_key, reads, kind != "ld", frozenset(i.mods))
            return
        collective = kind in ("ldmatrix", "stmatrix")
        if kind in ("ld", "ldmatrix"):
            self.look(shadow.writes, rows, who, lanes, "read", "write", i, addresses, segment, collective, shadow.shared)
            if self.has_atomics:
                self.look(
                    shadow.atomics, rows, who, lanes, "read", "atomic access", i, addresses, segment, collective, shadow.shared
                )
            self.note(shadow.reads, rows, columns, who, i, collective)
            return
        self.look(shadow.writes, rows, who, lanes, "write", "write", i, addresses, segment, collective, shadow.shared)
        self.look(shadow.reads, rows, who, lanes, "write", "read", i, addresses, segment, collective, shadow.shared)
        if self.has_atomics:
            self.look(shadow.atomics, rows, who, lanes, "write", "atomic access", i, addresses, segment, collective, shadow.shared)
        values = self.values(who, ONE if not collective else LANES)
        table = shadow.writes
        table.used = True
        entries = table.entries.reshape(-1)
        entries[rows] = values
        table.by.reshape(-1)[rows] = self.number(i)
        won = entries[rows]
        if np.count_nonzero(won != values):
            # Several lanes wrote there at once: within a warp one of them wins, between warps that is a race.
            winner = (won & np.uint64(LANE)).astype(np.int64)
            lost = np.flatnonzero((won != values) & (winner >> 5 != who.lane >> 5))
            if len(lost):
                self.report(
                    lost, won[lost], np.full(len(lost), self.number(i)), who, lanes, "write", "write", i, addresses, segment
                )

    def _area_number(self, segment: Segment) -> int:
        area = self.area(segment)
        assert area is not None
        return area.low

    def values(self, who: Who, level: int) -> Array:
        return (who.lane | (self.now << STAMP | level)).view(np.uint64)

    def look(
        self,
        table: Table,
        rows: Array,
        who: Who,
        lanes: Lanes,
        verb: str,
        other: str,
        i: Instruction,
        addresses: Array,
        segment: Segment | None,
        collective: bool,
        shared: bool,
    ) -> None:
        """Find and report what an access is not ordered behind."""
        if not table.used:
            return
        width = table.entries.shape[1]
        entries = table.entries.reshape(-1).take(rows) if width == 1 else table.entries.take(rows, 0)
        if shared:
            if not len(entries) or int(entries.max()) >> STAMP <= self.floor:
                return
            stamps = entries >> np.uint64(STAMP)
            maybe = stamps > self.floor
            if self.synced_floor > self.floor and width == 1:
                # Most often the warp itself wrote what it reads, before it last met.
                maybe &= ((entries ^ who.lane.view(np.uint64)) & WARP_BITS != 0) | (stamps > self.synced_floor)
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
            column = 0 if width == 1 else at[1][race]
            self.report(where, chosen, table.by[rows[where], column], who, lanes, verb, other, i, addresses, segment)

    def note(self, table: Table, rows: Array, columns: Array | None, who: Who, i: Instruction, collective: bool) -> None:
        """Add readers (or atomics) to the summaries of their granules."""
        table.used = True
        flat, by = table.entries.reshape(-1), table.by.reshape(-1)
        at = rows if columns is None else rows * table.entries.shape[1] + columns
        if collective:
            flat[at] = self.values(who, LANES)
            by[at] = self.number(i)
            return
        values = self.values(who, ONE)
        before = flat.take(at)
        apart = (before & LOW) != (values & LOW)
        if columns is not None:
            apart &= before >> np.uint64(STAMP) > (self.floor if self.partial else max(self.floor, self.synced_floor))
        else:
            apart &= before != 0
        merged = np.flatnonzero(apart) if np.count_nonzero(apart) else None
        if merged is not None:
            merged = merged[self.unordered(who.lane[merged], before[merged], False)]
            levels = np.maximum(self.relation(who.lane[merged], before[merged]), before[merged] & np.uint64(BLOCKS))
            values[merged] = (values[merged] & ~np.uint64(BLOCKS)) | levels
        flat[at] = values
        by[at] = self.number(i)
        after = flat.take(at)
        many = np.flatnonzero(after != values)
        if len(many) and columns is not None:
            flat[at[many]] = after[many] | np.uint64(LANES)
        elif len(many):
            levels = np.maximum(self.relation(who.lane[many], after[many]), (values | after)[many] & np.uint64(BLOCKS))
            order = np.argsort(levels, kind="stable")
            many, levels = many[order], levels[order]
            flat[at[many]] = (after[many] & ~np.uint64(BLOCKS)) | levels

    def relation(self, mine: Array, entries: Array) -> Array:
        """What one entry must say to stand for both: LANES of a warp, WARPS of a block, BLOCKS."""
        other = (entries & np.uint64(LANE)).astype(np.int64)
        per = self.wave.lanes_per_block
        levels = np.where(other // per != mine // per, BLOCKS, np.where(other >> 5 != mine >> 5, WARPS, LANES))
        return np.where(other == mine, ONE, levels).astype(np.uint64)

    # -- asynchronous copies ----------------------------------------------------------------------------------------------

    def landed(self, lanes: Lanes, size: int, elements: Array) -> None:
        """The lanes have waited for their copies into `elements` of `size` bytes: a write at this moment."""
        count = max(1, size >> self.shared_shift)
        rows = elements.astype(np.int64) * count
        who = self.who(lanes, count)
        if count > 1:
            rows = rows[who.position] + np.tile(np.arange(count), lanes.n)
        self.shared.writes.entries.reshape(-1)[rows] = self.values(who, ONE)

    def issue_ordered(self, lanes: Lanes, size: int, elements: Array) -> Array:
        """Whether each lane is behind the issue of the copy that is in flight to its element."""
        count = max(1, size >> self.shared_shift)
        rows = elements.astype(np.int64) * count
        entries = self.shared.writes.entries.reshape(-1)
        race = np.zeros(lanes.n, np.bool_)
        for k in range(count):
            race |= self.unordered(lanes.index + self.first, entries[rows + k], False)
        return ~race

    # -- findings -----------------------------------------------------------------------------------------------------

    def report(
        self,
        where: Array,
        entries: Array,
        by: Array,
        who: Who,
        lanes: Lanes,
        verb: str,
        other: str,
        i: Instruction,
        addresses: Array,
        segment: Segment | None,
    ) -> None:
        """One finding for each pair of instructions, at the later one in the code."""
        for number in np.unique(by).tolist():
            at = int(np.flatnonzero(by == number)[0])
            position, first = int(who.position[where[at]]), int(entries[at])
            theirs = self.instructions[number]
            place = lanes.place(position)
            block, thread = divmod(first & LANE, self.wave.lanes_per_block)
            their_place = (block, thread // WARP, thread % WARP)
            address = int(addresses[position])
            name = f"{segment.name!r}" if segment is not None else "shared memory"
            offset = address - segment.start if segment is not None else address
            sides = [(i.line, verb, i, place), (theirs.line, other, theirs, their_place)]
            sides.sort(key=lambda side: -side[0])
            (_, did, at_fault, main), (_, had, second, rest) = sides
            crowd = ("", " and other lanes", " and other warps", " and other blocks")[first >> 30 & 3]
            message = (
                f"{did} at offset {offset:#x} of {name} and {had} at {source(second)} "
                f"by block {rest[0]}, warp {rest[1]}, lane {rest[2]}{crowd} are not ordered"
            )
            self.findings.record(
                "race",
                message,
                at_fault,
                main,
                ("race", *sorted((i.line, theirs.line)), segment.name if segment else None),
                count=int(np.count_nonzero(by == number)),
                address=address,
                tensor=segment.name if segment is not None else None,
            )


def source(i: Instruction) -> str:
    return f"{i.source[0].rpartition('/')[2]}:{i.source[1]}" if i.source else f"PTX line {i.line} ({i.text})"


def highest(arrays: Sequence[Array | None]) -> Array:
    highest: Array = np.maximum.reduce([a for a in arrays if a is not None])
    return highest
