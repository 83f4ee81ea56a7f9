"""The plan of a ring: who holds what, which calls each rank makes, and that these are all of attention, once."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from cupyflash.distributed import layout, parts
from cupyflash.distributed.layout import LAYOUTS, UNIT, part_length
from cupyflash.distributed.plan import Piece, RingPlan, plan_ring
from cupyflash.request.options import Options
from cupyflash.request.problem import Problem
from cupyflash.sim.theory import ring as theory
from suites import sweep

side = st.none() | st.integers(0, 60) | st.integers(0, 400)
rings = st.builds(
    lambda *sizes, seen, **asked: plan_ring(*sizes, **seen, **asked),
    *(st.integers(0, 400),) * 2,
    st.integers(1, 9),
    st.sampled_from(LAYOUTS),
    seen=st.one_of(
        st.fixed_dictionaries({"window": st.none() | st.tuples(side, side)}),
        st.fixed_dictionaries({"causal": st.just(True), "window": st.none() | st.tuples(side, st.none())}),
    ),
    gather=st.booleans(),
    by_position=st.booleans(),
)


def seen(ring: RingPlan) -> np.ndarray:
    """The keys that each row sees, by `Options`."""
    row, key = np.arange(ring.n_q)[:, None] + ring.n_k - ring.n_q, np.arange(ring.n_k)
    asked = Options(causal=ring.causal, window=ring.window)
    near = True if asked.left is None else key >= row - asked.left
    return near & (True if asked.right is None else key <= row + asked.right) & np.ones((ring.n_q, ring.n_k), bool)


def seen_within(piece: Piece) -> np.ndarray:
    """The same of a piece, as the call that it is."""
    call = Problem(1, 1, 1, len(piece.rows), len(piece.keys), 8, "float16", causal=piece.causal, window=piece.window)
    return call.sees(np.arange(call.seqlen_q), call.seqlen_k)


def positions(part: tuple[range, ...]) -> np.ndarray:
    return np.array(list(chain(*part)), int)


@sweep(60, 600, ring=rings)
def test_pieces_are_what_is_seen_once_and_nothing_else(ring: RingPlan) -> None:
    counted = np.zeros((ring.n_q, ring.n_k), int)
    for rank in range(ring.ranks):
        rows = positions(ring.q_parts[rank])
        for step in ring.steps(rank):
            keys = np.arange(ring.n_k) if ring.gather else positions(ring.k_parts[step.source])
            for piece in step.pieces:
                at, against = rows[piece.rows.start : piece.rows.stop], keys[piece.keys.start : piece.keys.stop]
                assert (len(at), len(against)) == (len(piece.rows), len(piece.keys))
                assert (piece.row, piece.key) == (at[0], against[0])
                if ring.by_position:
                    assert np.all(np.diff(at) == 1) and np.all(np.diff(against) == 1)
                within = seen_within(piece)
                assert within.sum() == piece.scores and within.any(axis=0).all() and within.any(axis=1).all() and within[-1, -1]
                counted[np.ix_(at, against)] += within
    np.testing.assert_array_equal(counted, seen(ring))


@sweep(60, 600, ring=rings)
def test_every_rank_s_steps_follow_the_same_shifts(ring: RingPlan) -> None:
    steps = [ring.steps(rank) for rank in range(ring.ranks)]
    assert {len(each) for each in steps} == {len(ring.shifts)}
    assert ring.shifts[0] == 0 and all(a < b < ring.ranks for a, b in pairwise(ring.shifts))
    for number, shift in enumerate(ring.shifts):
        assert [each[number].source for each in steps] == [(rank - shift) % ring.ranks for rank in range(ring.ranks)]
        assert number == 0 or any(each[number].pieces for each in steps)  # else it need not be
    if not ring.gather:
        assert theory.shifts(ring) == ring.shifts


@sweep(60, 600, ring=rings)
def test_scores_by_rank_are_counted_without_steps(ring: RingPlan) -> None:
    counted = [sum(piece.scores for step in ring.steps(rank) for piece in step.pieces) for rank in range(ring.ranks)]
    assert list(theory.scores(ring)) == counted


@sweep(40, 300, length=st.integers(0, 5000), ranks=st.integers(1, 40), name=st.sampled_from(LAYOUTS))
def test_parts_are_all_positions_in_even_chunks(length: int, ranks: int, name: str) -> None:
    held = parts(length, ranks, name)
    assert sorted(chain(*map(positions, held))) == list(range(length))
    for part in held:
        assert len(part) == (2 if name == "zigzag" else 1) and np.all(np.diff(positions(part)) > 0)
    chunks = sorted((chunk for part in held for chunk in part if chunk), key=lambda chunk: chunk.start)
    assert all(chunk.start % UNIT == 0 for chunk in chunks)
    units = [-(-len(chunk) // UNIT) for chunk in chain(*held)]
    assert max(units) - min(units) <= 1
    assert list(theory.part_lengths(length, ranks, name)) == [part_length(part) for part in held]


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_zigzag_gives_all_ranks_the_same_causal_work(ranks: int) -> None:
    work = np.array(theory.scores(plan_ring(100_000, 100_000, ranks, "zigzag", causal=True)), float)
    assert abs(work / work.mean() - 1).max() < 0.05
    contiguous = np.array(theory.scores(plan_ring(100_000, 100_000, ranks, "contiguous", causal=True)), float)
    assert contiguous.max() / contiguous.mean() > 1.3


def calls(**asked: Any) -> list[list[tuple[int, int, bool]]]:
    """Rows, keys and `causal` of the calls of each step of rank 1 of 4, for 1,024 rows and keys."""
    ring = plan_ring(1024, 1024, 4, **asked)
    assert all(piece.window is None for step in ring.steps(1) for piece in step.pieces)
    return [[(len(piece.rows), len(piece.keys), piece.causal) for piece in step.pieces] for step in ring.steps(1)]


def test_calls_are_few() -> None:
    own, whole = (256, 256, True), (256, 256, False)
    assert calls() == [[whole]] * 4
    assert calls(causal=True) == [[own], [(256, 128, False)], [(128, 256, False)], [(128, 256, False)]]
    assert calls(causal=True, layout="contiguous") == [[own], [whole], [], []]
    assert calls(causal=True, gather=True) == [[(128, 256, True), (128, 896, True)]]
    by_position = calls(causal=True, by_position=True)
    assert by_position[0] == [(128, 128, True), (128, 128, False), (128, 128, True)] and len(by_position[1]) == 2


def test_a_window_ends_the_ring_early() -> None:
    assert plan_ring(4096, 4096, 16, "contiguous", window=(200, 0)).shifts == (0, 1)
    assert plan_ring(4096, 4096, 16, "contiguous", window=(200, 200)).shifts == (0, 1, 15)
    assert plan_ring(4096, 4096, 16, "zigzag", window=(100, 0)).shifts == (0, 1, 15)  # the second chunks go the other way
    assert plan_ring(4096, 4096, 16, "zigzag", causal=True).shifts == tuple(range(16))
    assert plan_ring(0, 4096, 16).shifts == (0,)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"ranks": 0}, "ranks must be between 1 and 65,536, got 0"),
        ({"ranks": True}, "ranks must be an integer, got True"),
        ({"n_q": -1}, "n_q must be between 0 and"),
        ({"n_k": 1.5}, "n_k must be an integer, got 1.5"),
        ({"layout": "striped"}, "layout must be one of zigzag, contiguous, got 'striped'"),
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"window": (-1, 0)}, "window must be (left, right) of at least 0"),
        ({"gather": None}, "gather must be True or False, got None"),
        ({"by_position": 0}, "by_position must be True or False, got 0"),
    ],
)
def test_wrong_input_is_named(asked: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        plan_ring(**{"n_q": 64, "n_k": 64, "ranks": 2, **asked})
    assert says in str(refused.value)


def test_a_rank_that_is_not_there_has_no_steps() -> None:
    with pytest.raises(ValueError, match="rank must be between 0 and 1, got 2"):
        plan_ring(64, 64, 2).steps(2)
    with pytest.raises(ValueError, match="length must be between"):
        layout.parts(-1, 2, "zigzag")
