"""Copies, fills and frees among the launches of a history: each touches ranges of bytes, by no thread of a kernel.

They have their places in streams as launches have, so that clocks (`order.launch_clocks`) say what is over before them. Ranges are
kept as they are, not by granules: a copy of gigabytes is one entry. A later copy takes the place of those that are over for it and
whose ranges it covers, unless it only reads what they wrote: who does not know of those does not know of it, either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..report.findings import ERROR, Finding, at_line
from ..text.syntax import Array, Line, PtxInstruction
from .launch_clocks import OrderedLaunch

READ, WRITE, FREE = "read", "write", "free"

ELSEWHERE = "it is in another stream, and no event is between them"
"""The reason why nothing orders the work of two streams."""


class Touched(NamedTuple):
    """Memory, as a tensor with a name, of which a copy touches ranges: (first byte, behind the last one).

    `verb` is READ, WRITE or FREE.
    """

    tensor: str
    memory: Array
    verb: str
    ranges: tuple[tuple[int, int], ...]


UNAWAITED = "the host has not waited for it"
"""The reason why nothing orders the host's access."""

HOST = -2
"""The stream of the host."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """A copy, fill or free, as the launch `run` of no kernel but a function, or an access of the host; `line`: its line in the
    program, if it is known.
    """

    run: OrderedLaunch
    touched: Touched
    line: Callable[[], Line | None]

    @property
    def writes(self) -> bool:
        return self.touched.verb != READ

    @property
    def by_host(self) -> bool:
        return self.run.launch[0] == HOST

    @cached_property
    def base(self) -> int:
        """Host address of the tensor's first byte."""
        return byte_bounds(self.touched.memory)[0]

    @cached_property
    def bounds(self) -> tuple[Array, Array]:
        """Host addresses: where ranges begin, in order, and where they end; those that meet are one."""
        starts, ends = np.array(sorted(self.touched.ranges), np.int64).reshape(-1, 2).T + self.base
        ends = np.maximum.accumulate(ends)
        heads = np.flatnonzero(np.concatenate(([True], starts[1:] > ends[:-1])))
        return starts[heads], ends[np.append(heads[1:], len(starts)) - 1]

    @property
    def low(self) -> int:
        return int(self.bounds[0][0])

    @property
    def high(self) -> int:
        return int(self.bounds[1][-1])

    def meets(self, low: Array, high: Array) -> Array:
        """Returns a mask of the ranges (low, high) of host addresses that overlap one of these."""
        starts, ends = self.bounds
        before = np.searchsorted(starts, high)
        return (before > 0) & (ends[before - 1] > low)

    def covers(self, other: Transfer) -> bool:
        """True if every byte of another is in this one."""
        (starts, ends), (low, high) = self.bounds, other.bounds
        before = np.searchsorted(starts, low, "right")
        return bool(((before > 0) & (ends[before - 1] >= high)).all())

    def stands_for(self, other: Transfer) -> bool:
        """True if nobody need know of another any more who knows of this."""
        return self.run.start.knows(other.run.launch) and (self.writes or not other.writes) and self.covers(other)

    @cached_property
    def instruction(self) -> PtxInstruction:
        """The call, as something that has a line."""
        return PtxInstruction(self.run.kernel, (), (), None, 0, self.line(), "")

    @property
    def told(self) -> str:
        """The call in words."""
        line = self.instruction.source
        return self.run.kernel + (f" at {at_line(line)}" if line else "")

    def race(self, verb: str, address: int, theirs: str, other: PtxInstruction) -> Finding:
        """Returns the finding that this comes later than an access, `verb`, which nothing orders before it."""
        own, call, why = self.touched, self.instruction, UNAWAITED if self.by_host else ELSEWHERE
        at = f"at offset {address - self.base:#x} of {own.tensor!r}"
        message = f"{own.verb} {at} and {verb} {theirs} are not ordered: {why}"
        place, hazard = (self.run.kernel, call.source, 0, -1, -1, -1), f"{own.verb} after {verb}"
        return Finding("race", message, *place, None, own.tensor, other=other.place, severity=ERROR, hazard=hazard)
