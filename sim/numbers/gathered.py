"""The bytes that decoding saves: those that a call of `attention` would move for the same queries, with keys that are gathered
first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cupyflash.basics import Array
from cupyflash.request.problem import Problem
from cupyflash.schedules import DecodeSchedule, TileSchedule, plan
from cupyflash.schedules.decode import seen_keys
from cupyflash.sim import theory
from cupyflash.sim.traffic import Traffic
from cupyflash.words import plural

KEYS = ("K", "V", "K_new", "V_new")
PARTS = ("O_part", "m_part", "l_part")
PAGES = ("block_table",)


def bytes_of(traffic: Traffic, tensors: tuple[str, ...]) -> int:
    """The bytes that are read from and written to some tensors."""
    return sum(traffic[name].total_bytes for name in tensors)


def gathered(schedule: DecodeSchedule, algorithm: str = "fa2") -> tuple[TileSchedule, ...]:
    """Schedules of ordinary calls that do what decoding does, one for all sequences of a length, whose keys, the new ones among
    them, are one array. They have no tree mask. Raises as `plan` does."""
    p, new = schedule.problem, schedule.cache.appended
    options = replace(p.options, padded=False, key_lengths=None)
    asked = [replace(p, batch=batches, seqlen_k=cached + new, options=options) for cached, batches in schedule.lengths().items()]
    return tuple(plan(each, schedule.device, algorithm, lse=schedule.lse) for each in asked)


def one_call(schedule: DecodeSchedule) -> Problem:
    """The problem of a call of `attention` on the same cache, in which each row sees the keys that it does in decoding. ValueError
    where there is none, for the cache or the lengths."""
    p, cache = schedule.problem, schedule.cache
    others = {"pages": cache.page_size, "new keys to append": cache.appended, "a tree mask": cache.tree}
    if other := next((name for name, given in others.items() if given), None):
        raise ValueError(f"attention, beside decoding, takes no {other.removeprefix('a ')}: the cache must be one array of keys")
    lengths = p.keys_of_each
    differ = len(set(lengths)) > 1
    options = replace(p.options, padded=differ, key_lengths=lengths if differ else None)
    call, rows = replace(p, seqlen_k=max(lengths), options=options), np.arange(p.seqlen_q)
    same = all(_same_keys(call.keys_seen(rows, keys), seen_keys(schedule, keys, rows)) for keys in set(lengths))
    function = p.options.transformed or p.options.mask_function is not None
    if differ and (function or not same):
        asked = "a score or mask function" if function else "a window" if p.options.window else "causal"
        raise ValueError(
            f"attention, beside decoding, counts positions from the longest sequence's last key: with {asked} and "
            f"{plural(p.seqlen_q, 'query', 'queries')} all sequences must have as many keys, got {', '.join(map(str, lengths))}"
        )
    return call


def _same_keys(one: tuple[Array, Array], other: tuple[Array, Array]) -> bool:
    """True if the spans (first, end) of each row are the same, or both empty."""
    return all((a, b) == (c, d) or max(b - a, d - c) <= 0 for a, b, c, d in zip(*one, *other, strict=True))


def together(schedules: tuple[TileSchedule, ...]) -> Traffic:
    """The closed forms' traffic of all of them."""
    return Traffic.summed((1, theory.traffic(schedule)) for schedule in schedules)
