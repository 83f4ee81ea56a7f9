"""Decoding's traffic along the length of the cache, by the closed forms alone, beside fa2's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cupyflash.device import Device
from cupyflash.request.problem import Problem
from cupyflash.schedules import Cache, plan_decode
from cupyflash.sim import theory
from cupyflash.sim.numbers.gathered import PAGES, PARTS, bytes_of, gathered, together

# Lengths that show the axis well: from a few blocks to a long context, each twice the one before.
DEFAULT_RANGE = (1024, 131072, 8, True)


@dataclass(frozen=True)
class CachePoint:
    """One point: a full cache with a number of keys a sequence, the last of which are new if the call appends any.

    `part_bytes` are those of partial results, `page_bytes` of the block table, `fa2_bytes` of fa2 calls with the same queries on
    gathered keys (None if fa2 does not fit the device), `seconds` the time by the planner's model.
    """

    value: int
    splits: int
    thread_blocks: int
    read_bytes: int
    write_bytes: int
    part_bytes: int
    page_bytes: int
    fa2_bytes: int | None
    seconds: float

    @property
    def total_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def part_share(self) -> float:
        """The share of all bytes that are partial results'."""
        return self.part_bytes / self.total_bytes

    @property
    def fa2_ratio(self) -> float | None:
        """fa2's bytes over decoding's."""
        return None if self.fa2_bytes is None else self.fa2_bytes / self.total_bytes


def sweep_cache(
    problem: Problem,
    device: Device,
    cache: Cache,
    values: Iterable[int],
    *,
    num_splits: int | None = None,
    lse: bool = False,
) -> tuple[CachePoint, ...]:
    """Decode `problem`'s queries against full caches of `values` keys; `problem`, `device` and `cache` give everything else.

    Lengths are rounded up to whole pages, and to room for the new keys; the number of pages changes nothing. Raises as
    `plan_decode` does.
    """
    page, points = cache.page_size or 1, []
    for value in sorted({-(-max(value, cache.appended) // page) * page for value in values}):
        posed = replace(problem.asking(padded=True, key_lengths=None), seqlen_k=value)
        schedule = plan_decode(posed, device, cache, num_splits=num_splits, lse=lse)
        traffic = theory.traffic(schedule)
        try:
            fa2 = together(gathered(schedule)).total_bytes
        except ValueError:  # none of its blocks fits
            fa2 = None
        parts, pages = bytes_of(traffic, PARTS), bytes_of(traffic, PAGES)
        moved = traffic.read_bytes, traffic.write_bytes
        points.append(CachePoint(value, schedule.splits, schedule.grid, *moved, parts, pages, fa2, schedule.candidate.seconds))
    return tuple(points)
