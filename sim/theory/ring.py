"""Closed forms of a ring: the bytes that each rank sends and receives by tensor, and the scores that it computes.

Counted in rows of K: there are n_k, and rank r holds p(r). In a ring of P ranks that no window cuts short, rank r sends
n_k - p(r + 1) and receives n_k - p(r) rows of each of K and V: all but one part. The backward passes on dK and dV too, in float32,
from the second step on and finally to their owner: it sends n_k - p(r) of each and receives n_k - p(r - 1). In a gather, each rank
sends its own part to all others, (P - 1) p(r), and receives n_k - p(r); gradients go the other way.

Nothing here reads a plan's steps: units and chunks determine which steps remain.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cupyflash.basics import Array
from cupyflash.distributed.layout import UNIT
from cupyflash.distributed.plan import RingPlan
from cupyflash.request.problem import Problem

FLOAT32 = 4
GRADIENTS = {"K": "dK", "V": "dV"}


class Carried(NamedTuple):
    """Bytes of one tensor over the link, by rank."""

    sent: Array
    received: Array


def link_bytes(plan: RingPlan, problem: Problem, *, backward: bool = False) -> dict[str, Carried]:
    """The bytes of each tensor that each rank sends and receives; `problem` is the whole one."""
    held = part_lengths(plan.n_k, plan.ranks, plan.layout)
    keys, gradients = _gathered(held) if plan.gather else _passed_on(plan, held)
    carried = {}
    for name, row in row_elements(problem).items():
        carried[name] = _times(keys, row * problem.itemsize)
        if backward:
            carried[GRADIENTS[name]] = _times(gradients, row * FLOAT32)
    return carried


def row_elements(problem: Problem) -> Mapping[str, int]:
    """The elements of K and V at one position."""
    heads = problem.batch * problem.kv_heads
    return {"K": heads * problem.head_dim, "V": heads * problem.head_dim_v}


def _times(rows: Carried, nbytes: int) -> Carried:
    return Carried(rows.sent * nbytes, rows.received * nbytes)


def _gathered(held: Array) -> tuple[Carried, Carried]:
    """Rows of K (or V) and of its gradient: a rank receives all parts but its own, and sends its own to each other rank."""
    own, others = (len(held) - 1) * held, held.sum() - held
    return Carried(own, others), Carried(others, own)


def _passed_on(plan: RingPlan, held: Array) -> tuple[Carried, Carried]:
    """Rows of K (or V) and of its gradient that are passed on, in a ring whose steps are at the shifts."""
    steps = shifts(plan)
    if len(steps) == 1:
        none = np.zeros_like(held)
        return Carried(none, none), Carried(none, none)
    if len(steps) == plan.ranks:
        whole = held.sum()
        return Carried(whole - np.roll(held, -1), whole - held), Carried(whole - held, whole - np.roll(held, 1))
    computed = np.sum([np.roll(held, shift) for shift in steps[1:]], axis=0)
    at_first, at_second, at_last = held, np.roll(held, steps[1]), np.roll(held, steps[-1])
    return Carried(computed + at_first - at_last, computed), Carried(computed, computed - at_second + at_first)


def part_lengths(length: int, ranks: int, layout: str) -> Array:
    """The number of positions that each rank holds."""
    bounds = chunk_bounds(length, ranks if layout == "contiguous" else 2 * ranks)
    chunks = np.diff(bounds)
    return chunks if layout == "contiguous" else chunks[:ranks] + chunks[: ranks - 1 : -1]


def chunk_bounds(length: int, count: int) -> Array:
    """The start of each of `count` chunks, and the end: chunk c is at unit floor(c U / count) of U = ceil(length / 32)."""
    units = -(-length // UNIT)
    return np.minimum(length, UNIT * (np.arange(count + 1, dtype=np.int64) * units // count))


def shifts(plan: RingPlan) -> tuple[int, ...]:
    """The distances, in ranks, from a rank back to the sources of which any rank sees anything, and 0.

    Unit u of U lies in chunk ceil((u + 1) n / U) - 1 of n. A chunk of rows sees the units from its first row's first key to its
    last row's last key, so it sees the nonempty chunks between those two units.
    """
    if plan.window is None and not plan.causal and plan.n_q and plan.n_k >= UNIT * 2 * plan.ranks:
        return tuple(range(plan.ranks))
    count = plan.ranks if plan.layout == "contiguous" else 2 * plan.ranks
    rows, keys = chunk_bounds(plan.n_q, count), chunk_bounds(plan.n_k, count)
    owner = np.arange(count) if plan.layout == "contiguous" else np.minimum(np.arange(count), count - 1 - np.arange(count))
    filled, units = np.diff(keys) > 0, -(-plan.n_k // UNIT)
    (left, right), own = plan.reach, plan.n_k - plan.n_q
    found = {0}
    for chunk in np.flatnonzero(np.diff(rows)).tolist():
        first = 0 if left is None else max(0, int(rows[chunk]) + own - left)
        last = plan.n_k - 1 if right is None else min(plan.n_k - 1, int(rows[chunk + 1]) - 1 + own + right)
        if first <= last:
            lo, hi = (-(-(key // UNIT + 1) * count // units) - 1 for key in (first, last))
            sources = owner[lo : hi + 1][filled[lo : hi + 1]]
            found.update(((owner[chunk] - sources) % plan.ranks).tolist())
    return tuple(sorted(found))


def scores(plan: RingPlan) -> tuple[int, ...]:
    """The number of scores that each rank computes: those of its rows, whichever rank has the keys.

    Row r sees keys from min(max(r + n_k - n_q - left, 0), n_k) to min(max(r + n_k - n_q + right + 1, 0), n_k).
    """
    count = plan.ranks if plan.layout == "contiguous" else 2 * plan.ranks
    bounds, (left, right), own = chunk_bounds(plan.n_q, count).tolist(), plan.reach, plan.n_k - plan.n_q

    def before(row: int) -> int:
        """The number of scores of all earlier rows, up to a constant."""
        ends = row * plan.n_k if right is None else _clipped(row + own + right + 1, plan.n_k)
        return ends - (0 if left is None else _clipped(row + own - left, plan.n_k))

    each = [before(end) - before(start) for start, end in pairwise(bounds)]
    return tuple(each if plan.layout == "contiguous" else [each[r] + each[-1 - r] for r in range(plan.ranks)])


def _clipped(end: int, most: int) -> int:
    """The sum of min(max(x, 0), most) over all x before `end`."""
    inside = min(max(end, 0), most)
    return inside * (inside - 1) // 2 + most * max(end - most, 0)
