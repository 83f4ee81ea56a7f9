"""The closed forms' sums: equal to going through every tile, exact and of constant cost at any length that is allowed."""

from __future__ import annotations

import json
import math
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import Device, Problem, plan
from cupyflash.request.options import MAX_LENGTH, BlockMask
from cupyflash.schedules import TileSchedule, plan_backward, plan_varlen, plan_varlen_backward
from cupyflash.sim import replay, theory
from cupyflash.sim.cli import main
from cupyflash.sim.estimate import seconds
from cupyflash.sim.pictures.sweep import sweep
from cupyflash.sim.theory.sums import clipped_sum, count_below, floor_sum
from cupyflash.sim.theory.visits import columns_of, scores_of, seen_blocks, span, visits_of
from cupyflash.sim.two_level.machine import TooLong
from cupyflash.tiling import TileSize
from problems import reach

A100 = Device.named("A100-40GB")
POSITIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"window": (100, 40), "mask": True},
    {"window": (None, 70), "bias": True, "padded": True},
    {"window": (33, None), "mask": True, "bias": True},
)
PASSES: tuple[tuple[Callable[..., TileSchedule], dict[str, Any]], ...] = (
    (plan, {"lse": True}),
    (plan_backward, {}),
    (plan_backward, {"deterministic": True}),
)
numbers = st.integers(-60, 60)


@settings(max_examples=120)
@given(n=st.integers(0, 40), slope=numbers, start=numbers, divisor=st.integers(1, 30))
def test_the_sum_of_floors(n: int, slope: int, start: int, divisor: int) -> None:
    assert floor_sum(n, slope, start, divisor) == sum((slope * i + start) // divisor for i in range(n))


@settings(max_examples=120)
@given(
    n=st.integers(0, 40),
    slope=st.integers(1, 30),
    start=st.integers(-300, 300),
    most=st.integers(0, 200),
    divisor=st.integers(1, 30),
    data=st.data(),
)
def test_the_sum_of_clipped_floors(n: int, slope: int, start: int, most: int, divisor: int, data: st.DataObject) -> None:
    add = data.draw(st.integers(0, divisor - 1))
    values = [slope * i + start for i in range(n)]
    assert clipped_sum(n, slope, start, most, divisor, add) == sum((min(max(x, 0), most) + add) // divisor for x in values)
    assert count_below(n, slope, start, most) == sum(x < most for x in values)


def in_blocks(problem: Problem, block_rows: int, block_cols: int) -> TileSchedule:
    """Algorithm 1 in blocks to count with, which no kernel need run."""
    fitted = plan(problem.asking(block_mask=None), A100, "fa1")
    return replace(fitted, problem=problem, tiling=replace(fitted.tiling, used=TileSize(block_rows, block_cols, "to count with")))


sides = st.none() | st.integers(0, 5) | st.integers(0, 90)


@settings(max_examples=120)
@given(
    lengths=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    tiling=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    window=st.tuples(sides, sides),
    causal=st.booleans(),
    kept=st.none() | st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    data=st.data(),
)
def test_the_sums_are_those_of_every_tile(
    lengths: tuple[int, int],
    tiling: tuple[int, int],
    window: tuple[int | None, int | None],
    causal: bool,
    kept: float | None,
    data: st.DataObject,
) -> None:
    """Against the definition: a matrix of which scores are seen, and its tiles one by one."""
    (n_q, n_k), (br, bc) = lengths, tiling
    keys = data.draw(st.integers(0, n_k))
    problem = Problem(1, 1, 1, n_q, n_k, 16, "float16", causal=causal, mask=True, window=reach(causal, *window))
    schedule = in_blocks(problem, *tiling)
    r, c = np.arange(n_q)[:, None] + n_k - n_q, np.arange(n_k)
    left, right = problem.options.left, problem.options.right
    seen = np.broadcast_to(c < keys, (n_q, n_k)).copy()
    seen &= (right is None) | (c <= r + (right or 0))
    seen &= (left is None) | (c >= r - (left or 0))
    tiles = np.zeros((-(-n_q // br), -(-n_k // bc)), bool)
    for i, j in np.ndindex(*tiles.shape):
        tiles[i, j] = seen[i * br : (i + 1) * br, j * bc : (j + 1) * bc].any()
    mask = None if kept is None else np.random.default_rng(n_q).random(tiles.shape) < kept
    visited = tiles if mask is None else tiles & mask

    rows = np.array([min(br, n_q - i) for i in range(0, n_q, br)], int)
    cols = np.array([max(0, min(bc, keys - j)) for j in range(0, n_k, bc)], int)
    found = visits_of(schedule, keys, mask)
    assert found.row_visits == (rows[:, None] * visited).sum()
    assert found.rows == rows[visited.any(axis=1)].sum()
    assert found.keys == (visited * cols).sum()
    assert found.blocks == tiles.sum()
    assert columns_of(schedule, keys, mask) == cols[visited.any(axis=0)].sum()
    whole = np.repeat(np.repeat(visited, br, axis=0), bc, axis=1)[:n_q, :n_k]
    assert scores_of(problem, keys, mask, tiling) == (seen & whole).sum()
    assert list(seen_blocks(schedule, keys)) == np.flatnonzero(tiles.any(axis=1)).tolist()
    for i in seen_blocks(schedule, keys):
        assert np.arange(*span(schedule, keys, i)).tolist() == np.flatnonzero(tiles[i]).tolist()


def posed(n: int, position: dict[str, Any]) -> Problem:
    """N keys and five queries fewer; 2 x 4 heads, two of K and V; one batch with some keys fewer where padded."""
    padded = {"key_lengths": (n, n - 21)} if position.get("padded") else {}
    return Problem(2, 4, 2, n - 5, n, 16, "float16", **position, **padded)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_the_longest_counts_continue_those_of_small_replays(algorithm: str, position: dict[str, Any]) -> None:
    """Replays of N, N + L, ..., with L a multiple of all block sizes, lie on polynomials of degree two; so does the longest."""
    # A longer mask has so many tiles that none are skipped.
    most = 2**18 if algorithm == "fa2" and "mask" in position else MAX_LENGTH
    for planned, options in PASSES:

        def schedule(n: int, planned: Any = planned, options: dict[str, Any] = options) -> TileSchedule:
            made: TileSchedule = planned(posed(n, position), A100, algorithm, (48, 32), **options)
            return made

        one = schedule(1000)
        parts = [one, *([queries] if (queries := getattr(one, "queries", None)) else [])]
        step = math.lcm(*(size for part in parts for size in (part.block_rows, part.block_cols)))
        first = 240 + (most - 240) % step
        at = [replay(schedule(first + k * step)) for k in range(4)]
        longest, k = theory.traffic(schedule(most)), (most - first) // step
        for tensor in longest:
            for side in ("read_bytes", "write_bytes"):
                f = [getattr(small[tensor], side) for small in at]
                slope, bend = f[1] - f[0], f[2] - 2 * f[1] + f[0]
                assert f[3] == f[0] + 3 * slope + 3 * bend  # a parabola indeed
                assert getattr(longest[tensor], side) == f[0] + k * slope + k * (k - 1) // 2 * bend, (tensor, side)
        assert longest.total_bytes > (2**53 if algorithm == "standard" or "window" not in position else 0)


def peak(work: Callable[[], Any]) -> int:
    """Bytes of memory that are taken at most."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def lines(work: Callable[[], Any]) -> int:
    """Lines of Python that are run; fails at once where there are very many."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        assert count < 10**6, "it goes on and on"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def no_dearer_when_long(work: Callable[[int], Any]) -> None:
    """The same memory and lines at the greatest length as at a small one, but for a few more steps of Euclid's algorithm."""
    work(600)  # imports
    assert peak(lambda: work(MAX_LENGTH)) < 200_000
    few, many = (lines(lambda n=n: work(n)) for n in (601, MAX_LENGTH - 1))  # type: ignore[misc]
    assert many < 1.5 * few + 500, (few, many)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_length_costs_nothing(algorithm: str, position: dict[str, Any]) -> None:
    def work(n: int) -> None:
        for planned, options in PASSES:
            schedule = planned(posed(n, position), A100, algorithm, (48, 32), **options)
            theory.traffic(schedule), schedule.workspace_bytes
        theory.standard_ideal(schedule.problem), theory.standard_backward_ideal(schedule.problem)

    no_dearer_when_long(work)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_nor_to_plan_and_estimate(algorithm: str) -> None:
    def work(n: int) -> None:
        problem = posed(n, {"window": (1 << 20, 1 << 16)})
        seconds(plan(problem, A100, algorithm)), seconds(plan_backward(problem, A100, algorithm))

    no_dearer_when_long(work)


def test_length_costs_nothing_packed() -> None:
    def work(n: int) -> None:
        problem, lengths = Problem(3, 4, 2, n, n, 64, "float16", causal=True), ((n, n), (n // 2, n - 3), (0, n))
        forward = plan_varlen(problem, A100, lengths, (48, 32))
        for made in (forward, plan_varlen_backward(problem, A100, lengths, (48, 32), deterministic=True)):
            theory.traffic(made)

    no_dearer_when_long(work)


def test_a_block_mask_costs_its_own_size() -> None:
    """Four blocks of half a billion rows and keys, with a mask element and a bias for each score."""
    n, size = 2**30, 2**29
    mask = BlockMask.of(np.array([[True, False], [True, True]]))
    problem = Problem(1, 2, 2, n, n, 64, "float16", causal=True, mask=True, bias=True, block_mask=mask)
    schedule = in_blocks(problem, size, size)
    counted = theory.traffic(schedule)
    triangle = size * (size + 1) // 2
    assert counted["mask"].read_bytes == 2 * (2 * triangle + size**2)
    assert counted["Q"].read_bytes == 2 * 2 * 64 * 3 * size and counted["block_mask"].read_bytes == 2 * 3
    assert peak(lambda: theory.traffic(schedule)) < 200_000


@pytest.mark.parametrize(
    "options", [(), ("--backward",), ("--causal",), ("--window", "100,40", "--mask"), ("--backward", "--deterministic")]
)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_predict_at_the_greatest_length(algorithm: str, options: tuple[str, ...]) -> None:
    """It counts, and says why it does not replay."""
    arguments = ("predict", "--seqlen", str(MAX_LENGTH), "--head-dim", "64", "--algorithm", algorithm, "--json", *options)
    found: list[Any] = []
    taken = peak(lambda: found.append(CliRunner().invoke(main, arguments)))
    assert found[0].exit_code == 0, found[0].output
    report = json.loads(found[0].stdout)
    assert report["replay_agrees"] is None and "at most 4,194,304 queries and keys" in report["replay_refused"]
    assert report["traffic"]["total"]["read_bytes"] >= 64 * 2 * MAX_LENGTH and taken < 4_000_000


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_a_sweep_to_the_greatest_length(algorithm: str) -> None:
    values, problem, found = [2**20, 2**28, MAX_LENGTH], Problem(1, 1, 1, 64, 64, 64, "float16", causal=True), []
    assert peak(lambda: found.append(sweep(problem, A100, "seqlen", values, algorithm, None))) < 1_000_000
    assert [point.value for point in found[0].points] == values


@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
def test_a_replay_of_too_many_rows_is_refused(algorithm: str) -> None:
    problem = Problem(1, 1, 1, 64, 1 << 23, 64, "float16")
    for schedule in (plan(problem, A100, algorithm), plan_backward(problem, A100, algorithm)):
        with pytest.raises(TooLong, match=r"at most 4,194,304 queries and keys a head, got 64 and 8,388,608"):
            replay(schedule)
