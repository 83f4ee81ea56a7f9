"""What decoding saves: the bytes that a call of `attention` would move for the same queries, of keys that are gathered first."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cupyflash.schedules import DecodeSchedule, TileSchedule, plan
from cupyflash.sim import theory
from cupyflash.sim.traffic import TensorTraffic, Traffic

KEYS = ("K", "V", "K_new", "V_new")
PARTS = ("O_part", "m_part", "l_part")
PAGES = ("block_table",)


def bytes_of(traffic: Traffic, tensors: tuple[str, ...]) -> int:
    """All that is read from and written to some tensors."""
    return sum(traffic[name].total_bytes for name in tensors)


def gathered(schedule: DecodeSchedule, algorithm: str = "fa2") -> tuple[TileSchedule, ...]:
    """Schedules of ordinary calls that do what decoding does, one for all sequences of a length, whose keys, the new ones among
    them, are one array. They have no tree mask. Raises as `plan` does."""
    p, new = schedule.problem, schedule.cache.appended
    options = replace(p.options, padded=False, key_lengths=None)
    asked = [replace(p, batch=batches, seqlen_k=cached + new, options=options) for cached, batches in schedule.lengths().items()]
    return tuple(plan(each, schedule.device, algorithm, lse=schedule.lse) for each in asked)


def together(schedules: tuple[TileSchedule, ...]) -> Traffic:
    """The closed forms' traffic of all of them."""
    total: Counter[tuple[str, bool]] = Counter()
    for schedule in schedules:
        for name, moved in theory.traffic(schedule).items():
            total[name, False] += moved.read_bytes
            total[name, True] += moved.write_bytes
    return Traffic({name: TensorTraffic(total[name, False], total[name, True]) for name, _ in total})
