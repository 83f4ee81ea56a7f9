"""Moves of a schedule: counted and turn by turn the same, and all that a kernel needs to be replayed and drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from tile_copy import TileCopy

from cupyflash import Device, Problem, plan
from cupyflash.launch.binding import argument_values
from cupyflash.schedules import TileSchedule, plan_backward
from cupyflash.schedules.moves import BEGIN, END, MIXED, SEEN, SPANNED, VISIT, Move, Of, Room, Tensor, Walk, When
from cupyflash.schedules.parts import Axis, Part, Tiles
from cupyflash.sim import SramOverflow, l2, replay
from cupyflash.sim.execution import run_kernels
from cupyflash.sim.trace import Recorder, Trace, rooms_of
from cupyflash.sim.trace.page import report
from cupyflash.sim.two_level.machine import Literal, Machine, Tally
from cupyflash.sim.two_level.steps import Heads, Steps, distinct
from suites import sweep

A100 = Device.named("A100-40GB")
EVENTS = (
    *(BEGIN, END, SEEN, VISIT, MIXED, SPANNED, When("gi", "unseen", "begin"), When("gi", "visited", "begin")),
    *(When(axes, "visited", at) for axes in ("j", "gj", "gi") for at in ("first", "last")),
    *(When("gi", "every", "begin"), When(tiles="earlier")),
)
NESTS = (("gI", "J"), ("j", "gI"), ("g", "ji"), ("", "jgi"), ("g", "ij"))


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    """A walk through one key head with two query heads, by any nest of loops; masks leave any tiles."""
    block, loop = draw(st.sampled_from(NESTS))
    n_q, n_k = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    options = {"causal": True} if draw(st.booleans()) else {"window": (draw(st.integers(0, 40)), draw(st.integers(0, 40)))}
    schedule = plan(Problem(1, 2, 1, n_q, n_k, 16, "float16", **options), A100, "fa2", (16, 16))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    kept = rng.random((2, schedule.row_blocks, schedule.col_blocks)) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    tiles = Tiles(kept, kept & (rng.random(kept.shape) < 0.5)) if draw(st.booleans()) else None
    part = Part(0, schedule, Axis(0, n_q, 0, n_q, n_q), Axis(0, n_k, 0, n_k, n_k), tiles)
    kinds: tuple[Of, ...] = ("query", "key", "scores", "batch")
    of = draw(st.sampled_from(kinds))
    of_rows = ("unseen", "earlier") if block == "j" or of == "key" else ()  # of whole row blocks
    events = [when for when in EVENTS if (of != "scores" or when == VISIT) and when.tiles not in of_rows]
    moves = tuple(Move(Tensor(of, of, 1, 1), when) for when in events)
    return Walk("any", schedule, (part,), block, loop, moves)


def played(walk: Walk, heads: Heads, when: When) -> list[tuple[Any, int, Any]]:
    """The thread block, the turn and the tile of each move, by plain loops."""
    (part,), (rows, cols) = walk.parts, (np.arange(n.size) for n in walk.parts[0].extents(walk.blocks))
    axes, own, every = walk.axes(when), walk.block.lower(), list(product(range(2), rows.tolist(), cols.tolist()))

    def along(tile: tuple[int, ...], axes: str) -> tuple[int, ...]:
        return tuple(tile["gij".index(axis)] for axis in axes)

    def by_loop(tile: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-tile["gij".index(axis.lower())] if axis.isupper() else tile["gij".index(axis)] for axis in walk.loop)

    def among(tile: tuple[int, ...], tiles: str) -> bool:
        visited = heads.each[tile[0]]
        spanned = bool(visited.first[tile[1]] <= tile[2] < visited.end[tile[1]])
        kept = spanned and (part.kept is None or bool(part.kept.kept[tile]))
        mixed = kept and (part.kept is None or bool(part.kept.mixed[tile]))
        return {"visited": kept, "mixed": mixed, "spanned": spanned, "every": True}.get(tiles, True)

    blocks: dict[Any, list[Any]] = {along(tile, own): [] for tile in every}
    for tile in every:
        if among(tile, "visited"):
            blocks[along(tile, own)].append(tile)
    found = []
    for block, visits in blocks.items():
        visits.sort(key=by_loop)
        chosen = visits if when.tiles == "visited" else [t for t in every if along(t, own) == block and among(t, when.tiles)]
        if when.tiles == "unseen":
            chosen = [tile for tile in chosen if all(tile[:2] != other[:2] for other in visits)]
        if when.tiles == "mixed":
            chosen = [tile for tile in visits if tile in set(chosen)]
        if when.tiles == "earlier":
            chosen = [tile for at, tile in enumerate(visits) if any(tile[:2] == other[:2] for other in visits[at + 1 :])]
        seen: dict[Any, int] = {}
        for tile in chosen:
            place, turn = along(tile, axes), visits.index(tile) if tile in visits else 0
            turn = {"begin": 0, "end": max(1, len(visits)) - 1}.get(when.at, turn)
            seen[place] = max(seen.get(place, 0), turn) if when.at == "last" else min(seen.get(place, turn), turn)
        found += [(block, turn, place) for place, turn in seen.items()]
    return found


@sweep(12, 60, walk=walks())
def test_moves_are_those_of_plain_loops(walk: Walk) -> None:
    """Counted, turn by turn, and each in its turn."""
    for _, part, heads in distinct(walk):
        steps = Steps(walk, part, heads)
        counted, literal = Tally(walk, part, heads), Literal(walk, part, heads)
        rows, cols = part.extents(walk.blocks)
        for move in walk.moves:
            events, moves = steps.events(move.when), played(walk, heads, move.when)
            axes = [axis for axis in "gij" if axis in walk.axes(move.when)]
            told = zip(events.turn.tolist(), *(getattr(events, axis).tolist() for axis in axes), strict=True)
            order = list(walk.axes(move.when))
            assert Counter(told) == Counter((turn, *(place[order.index(axis)] for axis in axes)) for _, turn, place in moves)
            elements = 0
            for _, _, place in moves:
                at = dict(zip(order, place, strict=True))
                tall = int(rows[at["i"]] if "i" in at else rows.sum()) if "i" in move.tensor.along else 1
                wide = int(cols[at["j"]] if "j" in at else cols.sum()) if "j" in move.tensor.along else 1
                elements += tall * wide * (2 if move.tensor.of in ("query", "scores") and "g" not in at else 1)
            assert counted.elements(move) == literal.elements(move) == elements


def test_a_schedule_of_which_nothing_else_knows() -> None:
    """A kernel that only this folder has: its bytes, what DRAM sees of them, its rooms and its page come from its walk."""
    q = np.random.default_rng(0).standard_normal((1, 2, 37, 64)).astype(np.float16)
    out = np.empty_like(q)
    schedule = TileCopy.of(Problem.from_arrays(q, q, q))
    recorder = Recorder(schedule)
    values = argument_values(schedule, {"Q": q, "K": q, "V": q, "O": out})
    traffic, _, findings = run_kernels(schedule, values, ("O",), watch=recorder.watch)
    behind = l2.run(schedule)
    assert not findings and traffic == replay(schedule) == replay(schedule, literal=True) == behind.asked == behind.dram
    assert behind.blocks == (6,)
    made = Trace(schedule, schedule.kernels(), recorder.tensors, tuple(recorder.moves()), traffic)
    assert made.traffic == traffic and rooms_of(made, 0) == ((Room("Q", 2048),), {"Q": "Q", "O": "Q"})
    (player,) = report([made], ["copy"], "t")["players"]
    assert player["total_bytes"] == traffic.total_bytes and len(player["moves"]) == 12
    assert player["launches"][0]["inside"] == {"Q": ["Q", 1], "O": ["Q", 1]} and player["lines"] == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_rooms_of_a_kernel_are_its_shared_memory(dtype: str) -> None:
    """For every launch, walk by walk; for half types `row_bases` only looks at L, and holds nothing."""
    p = Problem(1, 4, 2, 200, 300, 64, dtype, causal=True)
    masked = p.asking(mask=True)
    made: list[TileSchedule] = [plan(each, A100, name) for each in (p, masked) for name in ("fa1", "fa2", "standard")]
    made += [plan_backward(p, A100, name) for name in ("fa1", "standard")]
    made += [plan_backward(masked, A100, deterministic=how) for how in (False, True)]
    made.append(plan(replace(p, seqlen_q=2), A100, "decode"))
    if dtype == "float16":
        made.append(plan(p, Device.named("H100-SXM"), "fa3"))
    for schedule in made:
        for walk, kernel in zip(schedule.walks(), schedule.kernels(), strict=True):
            assert walk.kernel == kernel.name
            if (walk.kernel, dtype) != ("row_bases", "float16"):
                assert sum(room.nbytes for room in walk.rooms) == kernel.shared_bytes, kernel.name


def test_what_does_not_fit_its_tile_is_refused() -> None:
    schedule = plan(Problem(1, 1, 1, 40, 40, 64, "float16"), A100, "fa2", (32, 32))
    (walk,) = schedule.walks()
    smaller = tuple(room if room.name != "Q" else Room("Q", 32 * 64 * 2 - 1) for room in walk.rooms)
    for literal in (False, True):
        with pytest.raises(SramOverflow, match=r"4,096 bytes of Q do not fit tile Q of 4,095 bytes"):
            Machine(1 << 20).run(replace(walk, rooms=smaller), literal)
