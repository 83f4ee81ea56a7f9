"""Sums of floating-point numbers in global memory by atomics without a result: CUDA leaves their order open.

Addends of a wave wait until its end, or until anything else looks at their tensor. Then they are added block after block; in a
block those between two barriers before later ones, warp after warp; in a warp as it made them, lane after lane. So bytes do not
depend on how many warps the machine runs together, and compiled code, which runs blocks one by one, has the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..state.segments import Segment
from ..text.syntax import Array, PtxInstruction

MOST_WAITING = 1 << 23
"""Addends that may wait together: when more come in a wave, all so far are added."""


class Addends(NamedTuple):
    """One addition of some lanes: places in a view of the tensor, numbers, and the order of the lanes."""

    places: Array
    values: Array
    order: Array


class WaitingSums:
    """The addends that wait, by tensor and the floating-point view of it.

    `own`: the instructions that make them; `around` runs an addition in the environment of floating point that it needs; `barriers`
    returns how many barriers each block of the wave has behind it.
    """

    def __init__(
        self,
        own: frozenset[PtxInstruction],
        around: Callable[[Callable[[], None]], None],
        barriers: Callable[[], Array],
    ):
        self.own, self.around, self.barriers = own, around, barriers
        self.waiting: defaultdict[Segment, list[tuple[Array, Addends]]] = defaultdict(list)
        self.count = 0

    def add(self, segment: Segment, view: Array, addends: Addends) -> None:
        """Notes addends to places of `view`, a tensor seen as floating-point numbers."""
        kept = self.waiting[segment]
        if kept and kept[0][0].dtype != view.dtype:
            self.finish(segment)
        self.waiting[segment].append((view, addends))
        self.count += len(addends.places)
        if self.count > MOST_WAITING:
            self.finish_all()

    def finish(self, segment: Segment) -> None:
        """Adds what waits for a tensor."""
        kept = self.waiting.pop(segment, None)
        if not kept:
            return
        view = kept[0][0]
        index, values, order = (np.concatenate(parts) for parts in zip(*(addends for _, addends in kept), strict=True))
        self.count -= len(index)
        at = np.argsort(order, kind="stable")
        self.around(lambda: np.add.at(view, index[at], values[at]))

    def finish_all(self) -> None:
        for segment in list(self.waiting):
            self.finish(segment)
