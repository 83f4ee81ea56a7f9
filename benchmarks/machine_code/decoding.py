"""Decoding's machine code: what a steady turn of the main loop copies and what it issues for that, beside what memory lets it take.

A turn is a block of K and V. What some turns only do, looking up pages' places and appending new keys, is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from cupyflash.multiprocessor import PARTITIONS, WARP
from cupyflash.schedules import DecodeSchedule, decode_tiles
from cupyflash.schedules.base import padded_dim
from machine_code.flow import NOTHING_MASKED, STRAIGHT_ON, Decision, Trace, Tracer
from machine_code.ours import MOST_INNER_LOOPS, MOST_TURNS, Code, read
from machine_code.rates import group, products
from machine_code.whole import clock_rate

COPY = 16  # bytes
# Groups of instructions, as rates.GROUPS has them, that stand together.
SHARED = ("LDSM", "LDS", "STS")
ADDRESSES = ("integer", "uniform", "branch")


class _Steady(Tracer):
    """The tracer of a warp in whose turn there are no new keys, and no pages left to look up."""

    def decide(self, at: int, end: int, avoid: int | None, voted: Collection[str]) -> Decision:
        found = super().decide(at, end, avoid, voted)
        if found.rule not in (STRAIGHT_ON, NOTHING_MASKED):
            return found
        target = self.place[self.code[at].target]  # type: ignore[index]
        through, beyond = self.reach(at + 1, end), self.reach(target, end)
        only = {False: through - beyond, True: beyond - through}
        rare = {side: any(self.code[each].opcode in ("LDG", "STG") for each in only[side]) for side in only}
        if rare[False] == rare[True]:
            return found
        return Decision(found.address, rare[False], "few turns look up pages or append", len(only[rare[True]]))


@dataclass(frozen=True)
class Turn:
    """A turn of a decoding schedule's main loop."""

    schedule: DecodeSchedule

    @cached_property
    def code(self) -> Code:
        return read(self.schedule.kernels()[0], self.schedule.device)

    @cached_property
    def trace(self) -> Trace:
        for turns in range(1, MOST_TURNS + 1):  # of loops within it whose number is not in the code: what makes its products
            trace = _Steady(self.code.instructions, (turns,) * MOST_INNER_LOOPS).steady()
            if sum(products(each) for each in trace.instructions if each.opcode == "HMMA") == self.products:
                return trace
        raise ValueError(f"no trace of {self.code.name} makes the {self.products:,} products of a turn")

    @property
    def products(self) -> int:
        """FMAs of a warp in a turn, with the columns that the tensor core pads d and d_v to."""
        config, p = self.schedule.config, self.schedule.problem
        scores = config.block_rows * config.block_cols // (config.threads // WARP)
        return scores * (padded_dim(p.head_dim) + padded_dim(p.head_dim_v))

    @cached_property
    def counts(self) -> Counter[str]:
        """Instructions of a warp by group."""
        return Counter(group(each) for each in self.trace.instructions)

    @property
    def issued(self) -> int:
        return len(self.trace.instructions)

    @property
    def copies(self) -> int:
        """Asynchronous copies of 16 bytes that a warp issues."""
        return sum(each.opcode == "LDGSTS" and "128" in each.modifiers for each in self.trace.instructions)

    @property
    def planned(self) -> int:
        """Copies of 16 bytes of a lane that a block of K and V comes to."""
        return copies(self.schedule)

    @property
    def stalls(self) -> int:
        """Clocks of a warp by itself by its stall counts alone: what it waits for beyond is not in them."""
        return sum(max(each.control.stall, 1) for each in self.trace.instructions)

    @property
    def issue_clocks(self) -> float:
        """Clocks in which a multiprocessor's blocks together issue a turn each."""
        held = self.code.residents
        return self.issued * held.warps * held.blocks / PARTITIONS

    @property
    def memory_clocks(self) -> float:
        """Clocks in which memory gives a multiprocessor what its blocks read in a turn each."""
        s = self.schedule
        share = (s.device.hbm_bandwidth or math.inf) / s.device.sm_count / clock_rate(s.device)
        return self.code.residents.blocks * block_bytes(s) / share

    def lines(self) -> Iterator[str]:
        """The lines for a reader."""
        s, held, used = self.schedule, self.code.residents, self.code.resources
        shared, addresses = (sum(self.counts[name] for name in names) for names in (SHARED, ADDRESSES))
        yield (
            f"{s.config}; {held.warps} warps x {held.blocks} blocks (planned: {s.candidate.resident}), {used['REG']} registers, "
            f"{used['STACK']} bytes of stack"
        )
        yield (
            f"a turn of a warp: {self.copies} copies of 16 bytes (the schedule: {self.planned}), {self.issued} instructions, "
            f"{self.issued / max(1, self.copies):.0f} a copy; {self.counts['HMMA']} HMMA, {shared} of shared memory, "
            f"{addresses} of addresses and branches, {self.counts['LDL/STL']} of spills"
        )
        yield (
            f"a turn of all blocks: {self.issue_clocks:,.0f} clocks to issue, {self.memory_clocks:,.0f} of memory "
            f"({self.issue_clocks / self.memory_clocks:.0%}); a warp's stall counts {self.stalls:,}"
        )


def block_bytes(schedule: DecodeSchedule) -> int:
    """Bytes of a block of K and V."""
    return schedule.block_cols * decode_tiles.key_bytes(schedule.problem)


def copies(schedule: DecodeSchedule) -> int:
    """Copies of 16 bytes that a thread makes of a block."""
    return -(-block_bytes(schedule) // COPY // schedule.config.threads)
