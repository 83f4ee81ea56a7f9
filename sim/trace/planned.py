"""The moves of a schedule without an execution: turn by turn from its walks, in the order that a thread block has by the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupyflash.basics import Array
from cupyflash.schedules import Kernel, Move, TileSchedule, Walk
from cupyflash.sim.trace import HeldTensor, Span, TileMove, Trace, axes_of, inner_of, with_scores
from cupyflash.sim.two_level.machine import replay
from cupyflash.sim.two_level.steps import Heads, Steps

PLAN = "by the schedule"
"""The source of a move that no kernel's line made."""
ALONG = ("query", "key", "scores")
"""The axes for which the tensors of a planned trace have rows."""


def planned(schedule: TileSchedule) -> Trace:
    """The trace of one head's forward by `standard`, `fa1` or `fa2`, without arrays beside Q, K and V.

    Each move has the thread block, tile and bytes of the executed one (`trace`); what a kernel asks for together may come in
    another order within its block. ValueError for other schedules, or one that no kernel runs.
    """
    kernels, walks = schedule.kernels(), [*schedule.walks()]
    if schedule.problem.head_count != 1 or schedule.algorithm not in ("standard", "fa1", "fa2"):
        raise ValueError(f"the moves of one head's forward are planned, got {schedule.problem.head_count} of {schedule.algorithm}")
    moves: list[TileMove] = []
    tensors: dict[str, HeldTensor] = {}
    for number, kernel in enumerate(kernels):
        walk = next(each for each in walks if each.kernel == kernel.name)
        if not isinstance(walk, Walk) or any(move.tensor.of not in ALONG for move in walk.moves):
            raise ValueError(f"the moves of {kernel.name} are not planned: it has arrays beside Q, K and V, or no order")
        tensors |= {name: held for name, held in map(_held, walk.moves, [schedule] * len(walk.moves)) if name not in tensors}
        for block in _blocks(number, kernel, walk):
            moves += with_scores(inner_of(walk), block, first=walk.inner_first)
    return Trace(schedule, kernels, tensors, tuple(moves), replay(schedule))


def _held(move: Move, schedule: TileSchedule) -> tuple[str, HeldTensor]:
    """A tensor by its name, as it lies in HBM."""
    p, tensor = schedule.problem, move.tensor
    axes = axes_of(tensor.name)
    rows = p.seqlen_k if axes == "j" else p.seqlen_q
    return tensor.name, HeldTensor(tensor.name, (1, rows, p.seqlen_k if axes == "ij" else tensor.width), tensor.itemsize)


def _blocks(number: int, kernel: Kernel, walk: Walk) -> Iterator[list[TileMove]]:
    """The moves of a launch, thread block by thread block."""
    (part,) = walk.parts
    steps = Steps(walk, part, Heads.of(walk, part, 0))
    backwards = walk.block[-1].isupper()  # the last tile's thread block is the first one
    found: list[tuple[tuple[int, int, int], TileMove]] = []
    for place, move in enumerate(walk.moves):
        events = steps.events(move.when)
        spans = [_starts(each) for each in part.extents(walk.blocks, move.room, move.tensor.of)]
        for block, turn, _, i, j in np.stack(events, axis=1).tolist():
            for at, rows, cols in _boxes(walk, move, spans, i, j):
                own = at if at is not None else steps.blocks - 1 - block if backwards else block
                nbytes = (rows.end - rows.first) * (cols.end - cols.first) * move.tensor.itemsize
                made = TileMove(number, own, move.tensor.name, move.write, 0, rows, cols, nbytes, PLAN)
                found.append(((own, turn, place), made))
    found.sort(key=lambda each: each[0])
    blocks: dict[int, list[TileMove]] = {}
    for _, made in found:
        if made.nbytes:
            blocks.setdefault(made.block, []).append(made)
    yield from blocks.values()


def _starts(sizes: Array) -> list[Span]:
    """Blocks of these sizes, one after the other."""
    ends = np.cumsum(sizes).tolist()
    return [Span(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)]


def _boxes(walk: Walk, move: Move, spans: list[list[Span]], i: int, j: int) -> Iterator[tuple[int | None, Span, Span]]:
    """The boxes of a tensor that one event moves, and the thread block of each if rows are streamed through many."""
    p, tensor, axes = walk.schedule.problem, move.tensor, axes_of(move.tensor.name)
    along: Any = tensor.along
    if axes == "j":
        yield None, spans[1][j], Span(0, tensor.width)
        return
    cols = spans[1][j] if "j" in along else Span(0, p.seqlen_k if axes == "ij" else tensor.width)
    if not walk.streamed:
        yield None, spans[0][i], cols
        return
    for first in range(spans[0][i].first, spans[0][i].end, walk.streamed):
        yield first // walk.streamed, Span(first, min(first + walk.streamed, spans[0][i].end)), cols
