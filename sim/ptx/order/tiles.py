"""Reads of shared memory by products of warpgroups (wgmma), in the race detector.

A product reads its tiles at any time from its issue until its warps have waited for it. A later writer must be ordered behind
the wait of one of the four warps: they run the product together, and pipelines let one of them release a stage. An earlier
write must be over for each of the four, and be visible to the asynchronous proxy (`order.moments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from ..state.findings import ERROR, WARNING, Verdict, at_line, kernel_line, source, thread_name
from ..state.lane_sets import GROUP, WARP
from ..state.segments import Pages
from ..text.syntax import Array, PtxInstruction
from .detector import Detector
from .moments import LANE, LANES, LOW, ONE, STAMP, lanes_of, levels_of, stamps_of
from .shadow import Touch, is_async

UNIT = 16
REMEMBERED = 1 << 16
"""Most pairs of a reader and a write that are remembered as ordered."""

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
        self.units = wave.blocks * races.shared_stride // UNIT
        self.log: list[tuple[TileOperand, Array, Array]] = []
        """Readings that `by_unit` does not have yet: (operand, column, number)."""
        self.waited, self.readers = np.zeros((64, GROUP), np.int64), np.zeros(64, np.int64)
        self.by: list[PtxInstruction] = []
        self.count = 1
        self.over: set[tuple[int, int]] = set()
        """Pairs of a warpgroup (its first warp) and an entry that have been checked."""

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
        if not self.races.shared.writes.used:
            return
        units = operand.units()
        table = self.races.shared.writes
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
    starts = np.flatnonzero(pairs[1:] != pairs[:-1]) + 1
    found = np.unique(np.concatenate((pairs[:1], pairs[starts])))
    found = found[found & 0xFFFFFFFF != 0]
    return found >> 32, found & 0xFFFFFFFF
