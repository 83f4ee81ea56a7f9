"""Atomics and strong accesses of too narrow a scope, for the race detector.

Two of them are no race because each is in the scope of the other (PTX ISA, "Morally strong operations"): `.cta` of one leaves out
all threads of other blocks, `.cluster` those of other clusters, whatever the other one says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from ..state.lanes import Wave
from ..text.types import Array
from .order import BLOCKS, CLUSTER, CLUSTERS, DEVICE, LANE, LEVEL, LOW, scope_of
from .shadow import Access, Table, Touch

LEFT_OUT = "are in blocks that the scope of one of them leaves out: they are neither ordered nor atomic to each other"


class Detector(Protocol):
    """The race detector of which this is a part."""

    wave: Wave
    per: int
    numbers: np.dtype

    def unordered(self, mine: Array, entries: Array, collective: bool) -> Array:
        """Which of the accesses `entries` did not happen before what the grid-wide lanes `mine` do now."""

    def note(self, access: Touch, table: Table) -> None:
        """The access is in a table from now on."""

    def report(self, access: Touch, where: Array, entries: Array, by: Array, verbs: tuple[str, str], what: str) -> None:
        """The access and those of `entries`, by these instructions, end so."""


def look(races: Detector, access: Touch, writes: bool) -> None:
    """Report the strong accesses that this one is neither ordered behind nor strong towards; it is one of them from now on."""
    shadow, scope = access.shadow, scope_of(access.instruction.mods)
    for (theirs, wrote), table in shadow.scoped.items():
        if (writes or wrote) and max(scope, theirs) != DEVICE:
            judge(races, access, table, max(scope, theirs))
    kept = shadow.scoped.get((scope, writes))
    if kept is None:
        kept = shadow.scoped[scope, writes] = Table(shadow.writes.rows, 1, races.numbers)
    if isinstance(access, Access):
        access = replace(access, columns=None, last=None)
    races.note(access, kept)
    if writes and scope != DEVICE:
        judge(races, access, kept, scope, at_once=True)


def judge(races: Detector, access: Touch, table: Table, scope: int, at_once: bool = False) -> None:
    """Report the entries of other blocks, or of other clusters; `at_once`: of those that came with this very access."""
    entries, lane = table.entries.reshape(-1).take(access.rows), access.who.lane
    low = (entries & LOW).astype(np.int64)
    near, several = (races.per, CLUSTERS) if scope == CLUSTER else (races.wave.lanes_per_block, BLOCKS)
    apart = (low & LANE) // near != lane // near
    if not at_once:
        apart |= low & LEVEL >= several
    where = np.flatnonzero(apart & (entries != 0))
    where = where[races.unordered(lane[where], entries[where], False)]
    if len(where):
        by = table.by.reshape(-1)[access.rows[where]]
        races.report(access, where, entries[where], by, ("atomic access", "atomic access"), LEFT_OUT)
