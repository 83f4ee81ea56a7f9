"""What DRAM sees behind the L2 of what thread blocks ask for: a model of launch order, residency and the cache.

Thread blocks run in launch order, as many at a time as the device's multiprocessors hold, in lockstep turns: in each, every one
that runs takes a step of its loop (a column block of K and V, say; Q with the first, O with the last). When one ends, the next
takes its place. All that they ask for goes through one `L2`, cold at the start; what was written goes to DRAM in the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash.options import require_choice
from cupyflash.schedules import (
    BackwardSchedule,
    DecodeSchedule,
    Schedule,
    TileSchedule,
    VarlenBackwardSchedule,
    VarlenSchedule,
    require_schedule,
)
from cupyflash.schedules.fa1 import Fa1Schedule
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.schedules.fa3 import Fa3Schedule
from cupyflash.schedules.standard import StandardSchedule
from cupyflash.sim.l2 import columns, decode, fa1, rows, standard
from cupyflash.sim.l2.cache import L2, LINE, SECTOR, WAYS, Cache, Counts
from cupyflash.sim.l2.launch import Blocks, Launch, Memory
from cupyflash.sim.l2.rows import ORDERS, Order
from cupyflash.sim.traffic import TensorTraffic, Traffic

__all__ = ["L2", "LINE", "ORDERS", "SECTOR", "WAYS", "Behind", "Order", "TooLong", "run"]

# Some 20 s of either
MOST_TURNS = 1 << 24
MOST_RUNS = 1 << 28
# Schedules whose launches it plays
FOLLOWED = (Fa2Schedule, Fa2BackwardSchedule, StandardSchedule, Fa1Schedule, DecodeSchedule)


class TooLong(ValueError):
    """The lengths are more than the model plays through."""


@dataclass(frozen=True)
class Behind:
    """What a run saw, per tensor: bytes that thread blocks `asked` for, bytes of `dram`, and of the sectors that reads asked for
    those that the L2 had, as a share of 1.

    `slots` thread blocks run at a time, `blocks` in all, of each kernel.
    """

    asked: Traffic
    dram: Traffic
    hit_rates: Mapping[str, float]
    hit_rate: float | None
    slots: tuple[int, ...]
    blocks: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = {**self.hit_rates, "total": self.hit_rate}
        asked, dram = self.asked.as_dict(), self.dram.as_dict()
        zero = {"read_bytes": 0, "write_bytes": 0}
        tensors = {
            name: {**row, **{f"dram_{key}": value for key, value in dram.get(name, zero).items()}, "hit_rate": rates.get(name)}
            for name, row in asked.items()
        }
        return {"tensors": tensors, "resident_blocks": list(self.slots), "thread_blocks": list(self.blocks)}


def run(schedule: TileSchedule, *, order: Order = "rows", l2: L2 | None = None) -> Behind:
    """Play a schedule's launches through an L2, the device's where none is given.

    `order` is the grid's, of FlashAttention-2's forward; other kernels have one. Raises ValueError for what the model does not
    follow, and `TooLong` for more than 16,777,216 turns or 268,435,456 runs of lines.
    """
    require_schedule(schedule, Schedule, "plan")
    require_choice("order", order, ORDERS)
    if l2 is not None and not isinstance(l2, L2):
        raise TypeError(f"l2 must be an L2 or None, got {l2!r}")
    require_followed(schedule, order)
    memory = Memory()
    launches = launches_of(schedule, order, memory)
    names, bases = list(memory.bases), list(memory.bases.values())
    cache = Cache(l2 or L2.of(schedule.device), bases, int(np.gcd.reduce([launch.unit for launch in launches])))
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


def launches_of(schedule: TileSchedule, order: Order, memory: Memory) -> list[Launch]:
    """Its kernels, in order, with their tensors placed in memory."""
    if isinstance(schedule, Fa2Schedule):
        return rows.forward(schedule, order, memory)
    if isinstance(schedule, Fa2BackwardSchedule):
        return columns.backward(schedule, memory)
    if isinstance(schedule, StandardSchedule):
        return standard.standard(schedule, memory)
    if isinstance(schedule, DecodeSchedule):
        return decode.decode(schedule, memory)
    assert isinstance(schedule, Fa1Schedule)
    return fa1.algorithm_1(schedule, memory)


def require_followed(schedule: TileSchedule, order: Order) -> None:
    """ValueError for what the model does not follow, with what it does."""
    p, asked = schedule.problem, schedule.problem.options
    if asked.packed or isinstance(schedule, VarlenSchedule | VarlenBackwardSchedule):
        raise ValueError("the L2 model does not follow packed sequences: sequences of one length it does")
    if not isinstance(schedule, FOLLOWED):
        what = f"algorithm {schedule.algorithm!r}" + (" backward" if isinstance(schedule, BackwardSchedule) else "")
        raise ValueError(f"the L2 model does not follow {what}: it does all forwards, and fa2's backward")
    if isinstance(schedule, DecodeSchedule) and (schedule.cache.page_size or schedule.cache.appended or schedule.cache.tree):
        raise ValueError(
            "the L2 model does not follow pages, appended keys and a tree mask: a cache whose sequences lie together it does"
        )
    form = asked.score
    captured = form is not None and any(one.axes is not None for one in form.captured)
    for name, there in (
        ("mask", asked.masked),
        ("bias", asked.bias),
        ("block_mask", asked.block_mask is not None),
        ("score's captured arrays", captured),
    ):
        if there:
            raise ValueError(f"the L2 model does not follow {name}: causal, window and key_lengths it does")
    if asked.sinks and not isinstance(schedule, Fa2Schedule):
        raise ValueError("the L2 model follows sinks in the forward of fa2 and fa3 only")
    if order != "rows" and (isinstance(schedule, Fa3Schedule) or not isinstance(schedule, Fa2Schedule)):
        raise ValueError(f"order = {order!r}: {schedule.algorithm} has an order of its own, allowed is 'rows'")
    if min(p.head_count, p.seqlen_q) == 0:
        raise ValueError("the L2 model needs a row: batch, heads and seqlen_q of at least 1")


def behind(names: list[str], counts: Counts, launches: Sequence[Blocks]) -> Behind:
    def traffic(read: np.ndarray, written: np.ndarray) -> Traffic:
        return Traffic({name: TensorTraffic(int(read[n]), int(written[n])) for n, name in enumerate(names)})

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
