"""A model of the DRAM traffic behind the L2, from the requests of thread blocks, launch order, residency and the cache.

Thread blocks run in launch order, as many at a time as the device's multiprocessors hold, in lockstep turns: in each, every running
one takes a step of its loop (a column block of K and V, say; Q with the first, O with the last). When one ends, the next takes its
place. All their requests go through one `L2`, cold at the start; written bytes go to DRAM in the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cupyflash.basics import Array, Report
from cupyflash.request.options import require_choice
from cupyflash.schedules import (
    DecodeSchedule,
    TileSchedule,
    VarlenBackwardSchedule,
    VarlenSchedule,
    Walk,
    require_schedule,
)
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.sim.l2.cache import L2, LINE, SECTOR, WAYS, CacheCounts, SectoredCache
from cupyflash.sim.l2.decoding import PlayedDecoding
from cupyflash.sim.l2.given import require_given
from cupyflash.sim.l2.launch import FEW_REGISTERS, MOST_REGISTERS, DeviceMemory, LaunchedBlocks, PlayedLaunch, resident
from cupyflash.sim.l2.played import PlayedWalk
from cupyflash.sim.l2.queue import PlayedQueue
from cupyflash.sim.l2.reads import Given
from cupyflash.sim.l2.works import ORDERS, Order
from cupyflash.sim.traffic import TOTAL, Traffic, row_of
from cupyflash.sim.two_level.machine import TooLong

__all__ = ["L2", "LINE", "ORDERS", "SECTOR", "WAYS", "Behind", "Given", "Order", "TooLong", "balance", "run"]

# Some 20 s of either
MOST_TURNS = 1 << 24
MOST_RUNS = 1 << 28


@dataclass(frozen=True)
class Behind:
    """The results of a run, for each tensor: bytes that thread blocks `asked` for, bytes of `dram`, and the share of the sectors
    requested by reads that the L2 had.

    `slots` thread blocks run at a time, `blocks` in all, of each kernel.
    """

    asked: Traffic
    dram: Traffic
    hit_rates: Mapping[str, float]
    hit_rate: float | None
    slots: tuple[int, ...]
    blocks: tuple[int, ...]

    def as_dict(self) -> Report:
        """The results for JSON."""
        rates = {row_of(name): rate for name, rate in self.hit_rates.items()} | {TOTAL: self.hit_rate}
        asked, dram = self.asked.as_dict(), self.dram.as_dict()
        zero = {"read_bytes": 0, "write_bytes": 0}
        tensors = {
            name: {**row, **{f"dram_{key}": value for key, value in dram.get(name, zero).items()}, "hit_rate": rates.get(name)}
            for name, row in asked.items()
        }
        return {"tensors": tensors, "resident_blocks": list(self.slots), "thread_blocks": list(self.blocks)}


def run(schedule: TileSchedule, *, order: Order = "rows", l2: L2 | None = None, given: Given | None = None) -> Behind:
    """Play a schedule's launches through an L2, by default the device's.

    `order` is the grid's, of FlashAttention-2's forward; other kernels have one. `given` are arrays of the call that a schedule
    knows by name only, and captured numbers of its functions, by the names of the kernels' struct: "mask", "bias", "dbias",
    "score_NAME" and "mask_NAME" for the captured values of functions, decoding's "block_table" and "tree_mask". The arrays' shapes
    and strides count and, if they hold indices, in NumPy, their contents. An array that is not given has the largest shape that it
    may have, is contiguous, and holds zeros; pages follow one another.

    Raises ValueError for a schedule that the model does not cover, TypeError or ValueError for a given value that is not read, or
    that no call has, and `TooLong` for more than 16,777,216 turns (a tile that reads something for each score counts as several) or
    268,435,456 runs of lines.
    """
    require_schedule(schedule, TileSchedule, "plan")
    require_choice("order", order, ORDERS)
    if l2 is not None and not isinstance(l2, L2):
        raise TypeError(f"l2 must be an L2 or None, got {l2!r}")
    require_followed(schedule, order)
    require_given(schedule, {} if given is None else given)
    memory = DeviceMemory()
    launches = launches_of(schedule, order, memory, given)
    names, bases = list(memory.bases), list(memory.bases.values())
    unit = int(np.gcd.reduce([launch.unit for launch in launches]))
    cache = SectoredCache(l2 or L2.of(schedule.device), bases, unit, [name in memory.of_words for name in names])
    if (turns := sum(launch.heft * int(launch.turns.sum()) for launch in launches)) > MOST_TURNS:
        raise TooLong(f"the L2 model plays at most {MOST_TURNS:,} turns of thread blocks, this takes {turns:,}")
    for launch in launches:
        before = cache.looked_up
        for played, requests in launch.played():
            cache.serve(requests)
            # What it will be at the end, if the rest is like what was played
            if before + (cache.looked_up - before) / played > MOST_RUNS:
                raise TooLong(f"the L2 model looks up at most {MOST_RUNS:,} runs of lines, of {cache.run * LINE:,} bytes here")
    return behind(names, cache.counts, launches)


def launches_of(schedule: TileSchedule, order: Order, memory: DeviceMemory, given: Given | None = None) -> list[PlayedLaunch]:
    """The schedule's kernels, in order, with their tensors placed in memory."""
    made: list[PlayedLaunch] = []
    for walk, kernel in zip(schedule.walks(), schedule.kernels(), strict=True):
        if not isinstance(walk, Walk):
            assert isinstance(schedule, Fa3Schedule)
            made.append(PlayedQueue(schedule, memory))
            continue
        registers = FEW_REGISTERS if walk.few else MOST_REGISTERS
        slots = resident(schedule.device, kernel.threads, kernel.shared_bytes, registers)
        if (sharing := schedule.sharing(walk.kernel)) is not None:
            slots = schedule.device.sm_count * sharing
        kind = PlayedDecoding if isinstance(schedule, DecodeSchedule) else PlayedWalk
        made.append(kind(walk, kernel, slots, memory, given or {}, order if walk.any_order else "rows"))
    return made


def balance(schedule: TileSchedule, given: Given | None = None) -> float:
    """Turns of the busiest place for a thread block over the mean of all, for the launch with the most turns.

    ValueError for a schedule that the model does not cover.
    """
    require_followed(schedule, "rows")
    launches = launches_of(schedule, "rows", DeviceMemory(), given)
    return max(launches, key=lambda launch: int(launch.turns.sum())).balance


def require_followed(schedule: TileSchedule, order: Order) -> None:
    """ValueError for a schedule or order that the model does not cover, with those that it does."""
    p = schedule.problem
    own_order = not isinstance(schedule, Fa2Schedule) or isinstance(schedule, Fa3Schedule | VarlenSchedule)
    if order != "rows" and own_order:
        what = f"{schedule.algorithm} of packed sequences" if p.options.packed else schedule.algorithm
        raise ValueError(f"order = {order!r}: {what} has an order of its own, allowed is 'rows'")
    if isinstance(schedule, VarlenSchedule | VarlenBackwardSchedule) and schedule.seqlens is None:
        full = p.batch * p.seqlen_q, p.batch * p.seqlen_k
        if (schedule.packed.total_q, schedule.packed.total_k) != full:
            raise ValueError("the L2 model needs the lengths of packed sequences (seqlens), unless all are the longest")
    if min(p.head_count, p.seqlen_q) == 0:
        raise ValueError("the L2 model needs a row: batch, heads and seqlen_q of at least 1")


def behind(names: list[str], counts: CacheCounts, launches: Sequence[LaunchedBlocks]) -> Behind:
    def traffic(read: Array, written: Array) -> Traffic:
        return Traffic.of(*(dict(zip(names, each.tolist(), strict=True)) for each in (read, written)))

    def rate(missed: int, sectors: int) -> float:
        return 1 - missed / sectors

    rates = {name: rate(int(counts.missed[n]), int(counts.sectors[n])) for n, name in enumerate(names) if counts.sectors[n]}
    sectors = int(counts.sectors.sum())
    return Behind(
        traffic(counts.read_bytes, counts.write_bytes),
        traffic(SECTOR * counts.missed, SECTOR * counts.returned),
        rates,
        rate(int(counts.missed.sum()), sectors) if sectors else None,
        tuple(launch.slots for launch in launches),
        tuple(launch.grid for launch in launches),
    )
