"""Mask functions of sequences of their own lengths: packed ones, which skip tiles, and decoding's, which ask for every score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from test_prepared import array
from test_varlen import UNEVEN, packed

import cupyflash
from cupyflash import Device, Mask, Problem
from cupyflash.request.options import EMPTY, MIXED, WHOLE, Pattern
from cupyflash.schedules import (
    Cache,
    VarlenBackwardSchedule,
    VarlenSchedule,
    mask_tiles,
    patterns_of,
    plan_decode,
    plan_varlen,
    plan_varlen_backward,
)
from cupyflash.schedules.varlen import Seqlens
from cupyflash.sim import execute_decode, execute_varlen, execute_varlen_backward, replay, theory
from cupyflash.sim.execution import BackwardExecution, Execution
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import forward
from cupyflash.sim.numbers.yardstick import draw_decode, measure, measure_decode, measure_gradients
from mutants import Mutant, check_mutant
from recorded_cupy import Recorded
from suites import sweep, wide

A100, H100 = (Device.named(name) for name in ("A100-40GB", "H100-SXM"))
B, H, HKV, N, D, TILES = len(UNEVEN), 4, 2, 130, 24, (32, 16)
RNG = np.random.default_rng(26)
# Of each head another condition; what is captured is indexed by sequence, row and key.
MASK = Mask(
    "h == 0 and document[b, q] == document[b, k] and k <= q or h == 1 and (k <= q and q - k < width or k < prefix[b])"
    " or h == 2 and seen[row, k] or h == 3 and (k < n_k - 20 or kv_h == b)",
    document=np.sort(RNG.integers(0, 3, (B, N)), axis=1),
    prefix=np.array([3, 50, 0, 0, 0, 20], np.int32),
    seen=RNG.random((N, N)) < 0.9,
    width=40,
)


def problem_of(mask: Mask, **asked: Any) -> Problem:
    return Problem(B, H, HKV, N, N, D, "float16", mask_function=mask.form, **asked)


def planned(kind: Any, seqlens: Seqlens, mask: Mask = MASK, algorithm: str = "fa2", **how: Any) -> Any:
    """The schedule of `plan_varlen`, or its backward, that knows what the mask says: of small tiles, or of `fa3`'s own."""
    problem = problem_of(mask)
    device, tiling = (A100, TILES) if algorithm == "fa2" else (H100, None)
    patterns = patterns_of(problem, seqlens, mask.arrays | mask.numbers)
    return kind(problem, device, seqlens, tiling, patterns=patterns, algorithm=algorithm, **how)


def each_of(
    schedule: VarlenSchedule | VarlenBackwardSchedule, arrays: tuple[np.ndarray, ...]
) -> Iterator[tuple[slice, slice, Inputs]]:
    """The rows and keys of each sequence, and it as a call with an array of what the mask says of it."""
    assert schedule.seqlens is not None and schedule.patterns is not None
    first_q = first_k = 0
    for (n_q, n_k), pattern in zip(schedule.seqlens, schedule.patterns, strict=True):
        rows, keys = slice(first_q, first_q + n_q), slice(first_k, first_k + n_k)
        first_q, first_k = rows.stop, keys.stop
        seen = np.broadcast_to(pattern.kept, (1, H, n_q, n_k))[0]
        qkv = (x[at].swapaxes(0, 1) for x, at in zip(arrays, (rows, keys, keys), strict=True))
        yield rows, keys, Inputs(*qkv, beside={"mask": seen})


def check(schedule: VarlenSchedule, seed: int = 0) -> Execution:
    """Three counts, and the numbers of each sequence by the 2x rule."""
    assert schedule.seqlens is not None
    q, k, v, _, _ = packed(schedule.seqlens, H, HKV, D, D, seed=seed)
    found = execute_varlen(schedule, q, k, v, mask=MASK)
    assert found.findings == ()
    assert found.traffic == theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)
    assert found.lse is not None
    for rows, _, inputs in each_of(schedule, (q, k, v)):
        numbers = measure(found.out[rows].swapaxes(0, 1), found.lse[:, rows], inputs)
        assert all(each.good for each in numbers.values()), numbers
    return found


def check_backward(schedule: VarlenBackwardSchedule) -> BackwardExecution:
    assert schedule.seqlens is not None
    q, k, v, _, _ = packed(schedule.seqlens, H, HKV, D, D)
    dout = np.random.default_rng(7).standard_normal(q.shape).astype(q.dtype)
    out, lse, places = np.zeros_like(q), np.zeros(q.shape[1::-1], np.float32), [*each_of(schedule, (q, k, v))]
    for rows, _, inputs in places:
        made = forward(inputs)
        out[rows], lse[:, rows] = made.O.swapaxes(0, 1), made.L
    found = execute_varlen_backward(schedule, dout, q, k, v, out, lse, mask=MASK)
    assert found.findings == ()
    assert found.traffic == theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)
    for rows, keys, inputs in places:
        own = {"dQ": found.dq[rows], "dK": found.dk[keys], "dV": found.dv[keys]}
        numbers = measure_gradients({name: x.swapaxes(0, 1) for name, x in own.items()}, dout[rows].swapaxes(0, 1), inputs)
        assert all(each.good for each in numbers.values()), numbers
    return found


LENGTHS = st.lists(st.tuples(*[st.integers(0, N) | st.sampled_from([0, 1, 32, 64])] * 2), min_size=B, max_size=B)


def test_sequences_have_tiles_of_their_own() -> None:
    schedule = planned(plan_varlen, UNEVEN, lse=True)
    check(schedule)
    states = [one.mask_tiles[0].states for one in schedule.sequences()]
    assert all(any((each == state).any() for each in states) for state in (EMPTY, MIXED, WHOLE))
    # Row blocks of all sequences, one behind the other; the host need not know where they begin.
    blocks = sum(n for n, _ in UNEVEN) // 32 + B
    assert [(each.shape, each.states) for each in schedule.mask_tiles] == [((1, H, blocks, 9), None)]


@sweep(1, 3, seqlens=LENGTHS)
def test_random_sequences(seqlens: list[tuple[int, int]]) -> None:
    check(planned(plan_varlen, tuple(seqlens), lse=True), seed=len(seqlens))


@pytest.mark.wide
def test_gradients() -> None:
    check_backward(planned(plan_varlen_backward, UNEVEN, deterministic=True))


@pytest.mark.wide
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_on_a_hopper(deterministic: bool) -> None:
    check_backward(planned(plan_varlen_backward, UNEVEN, algorithm="fa3", deterministic=deterministic))


@pytest.mark.wide
def test_too_many_tiles_are_asked_for_every_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the longest sequence's tiles have no room, none are skipped, not even in short ones."""
    monkeypatch.setattr(mask_tiles, "MOST_STATE_BYTES", 8 * 2)  # 64 tiles
    schedule, short = planned(plan_varlen, UNEVEN, lse=True), Problem(B, H, HKV, N, 100 * 16, D, "float16")
    assert schedule.mask_tiles
    long = replace(schedule, problem=replace(short, options=schedule.problem.options))
    assert long.mask_tiles == () and not any(one.mask_tiles for one in long.sequences())
    check_backward(planned(plan_varlen_backward, UNEVEN, deterministic=True))


@pytest.mark.parametrize(("queries", "keys", "skip"), [(600, 100, (False, True)), (100, 9000, (True, False))])
def test_a_sequence_skips_tiles_where_the_longest_does(
    queries: int, keys: int, skip: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main kernel of the backward and dQ's each by itself: one may have room for the states, the other not."""
    monkeypatch.setattr(mask_tiles, "MOST_STATE_BYTES", 8 * 2)
    problem = Problem(2, 2, 1, queries, keys, D, "float16", mask_function=MASK.form)
    schedule = plan_varlen_backward(problem, A100, ((queries, keys), (20, 30)), (16, 16), deterministic=True)
    for one in (schedule, *schedule.sequences()):
        assert (bool(one.mask_tiles), bool(one.by_rows.mask_tiles)) == skip


@pytest.mark.wide
def test_the_call_and_tiles_that_are_found_once() -> None:
    """Each sequence as a call of its own, to the bit with the same blocks."""
    seqlens: Seqlens = ((20, 30), (0, 5), (33, 10))
    q, k, v, cu_q, cu_k = packed(seqlens, 2, 1, 16, 16)
    mask = Mask("k <= q and q - k < width or k < prefix[b]", width=7, prefix=np.array([3, 0, 1], np.int32))
    tiled = cupyflash.block_mask(mask, q, k, cu_q, cu_k)
    out = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, mask=mask, tiling=(16, 16))
    for _ in range(2):
        assert np.array_equal(out, cupyflash.attention_varlen(q, k, v, cu_q, cu_k, mask=tiled, tiling=(16, 16)))
        assert len(tiled._found) == 1
    one = Mask("k <= q and q - k < width or k < 3", width=7)
    alone = cupyflash.attention(*(x[:n].swapaxes(0, 1) for x, n in ((q, 20), (k, 30), (v, 30))), mask=one, tiling=(16, 16))
    assert np.array_equal(out[:20], alone.swapaxes(0, 1))
    for bad, kind, said in (
        ({"mask": np.ones((3, 3), bool)}, TypeError, "mask must be a cupyflash.Mask or a block_mask of one here, .* got ndarray"),
        ({"mask": "k <= q"}, TypeError, "mask must be a cupyflash.Mask or a block_mask of one here"),
        ({"mask": cupyflash.block_mask(mask, q, k)}, ValueError, "block_mask for a call without packed sequences"),
        ({"mask": tiled, "cu_seqlens_k": cu_k[[0, 1, 1, 3]]}, ValueError, "block_mask for another cu_seqlens_k"),
        ({"mask": Mask("f[k]", f=np.ones(5, bool))}, ValueError, "f must have length 30 along axis 0"),
    ):
        with pytest.raises(kind, match=said):
            cupyflash.attention_varlen(**{"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k} | bad)


def test_what_masks_of_sequences_are_refused() -> None:
    q, k, v, cu_q, cu_k = packed(((20, 30), (0, 5), (33, 10)), 2, 1, 16, 16)
    mask = Mask("k <= q")
    tiled = cupyflash.block_mask(mask, q, k, cu_q, cu_k)
    for refused, kind, said in (
        (lambda: cupyflash.block_mask(np.ones((3, 3), bool), q, k, cu_q, cu_k), TypeError, "a cupyflash.Mask here, which speaks"),
        (lambda: cupyflash.block_mask(mask, q, k, cu_q), ValueError, "must be given together, got cu_seqlens_q alone"),
        (lambda: cupyflash.attention(q[None], k[None], v[None], mask=tiled), ValueError, "block_mask for packed sequences"),
        (lambda: planned(plan_varlen, UNEVEN[:5]), ValueError, "seqlens must be 6 pairs"),
        (lambda: plan_varlen(problem_of(mask), A100, UNEVEN, patterns=()), ValueError, "patterns must be those of"),
        (lambda: plan_varlen(problem_of(mask), A100, UNEVEN, patterns=[]), TypeError, "patterns must be a tuple"),  # type: ignore[arg-type]
        (lambda: plan_varlen(problem_of(mask).asking(pattern=Pattern((1, 1, 1, 1))), A100), ValueError, "no place for a mask's"),
    ):
        with pytest.raises(kind, match=said):
            refused()


def test_bounds_on_a_gpu_are_not_looked_at(cupy: Recorded) -> None:
    """States have room for as many row blocks as any bounds need, and keys of the longest sequence."""
    q, k, v = (array(cupy, 300, heads, 64) for heads in (4, 2, 2))
    bounds = array(cupy, 4, dtype=np.int32)
    mask = Mask("k <= q + by[h]", by=array(cupy, 4, dtype=np.int32))
    tiled, asked = cupyflash.block_mask(mask, q, k, bounds, bounds), {"max_seqlen_q": 200, "max_seqlen_k": 200, "tiling": (64, 32)}
    launches = []
    for given in (mask, tiled, tiled):
        before = len(cupy.launches)
        cupyflash.attention_varlen(q, k, v, bounds, bounds, mask=given, **asked)
        launches.append(len(cupy.launches) - before)
    assert launches == [2, 2, 1] and cupy.looked_at == 0
    assert [states.shape for states in tiled._found.values()] == [(1, 4, 300 // 64 + 3, 7)]


DECODED = Mask(
    "h == 0 and document[b, q] == document[b, k] or h == 1 and q - k < width or h == 2 and (k < prefix[b]) == (row == 1)"
    " or h == 3 and seen[row, k]",
    document=np.sort(RNG.integers(0, 4, (3, 160)), axis=1),
    prefix=np.array([3, 150, 0], np.int32),
    seen=RNG.random((3, 160)) < 0.2,
    width=40,
)


@pytest.mark.wide
@pytest.mark.parametrize(("splits", "cache"), [(4, Cache(2, 16, 40, True)), wide(7, Cache(page_size=48, pages=12))])
def test_decoding(splits: int, cache: Cache) -> None:
    """Splits and sequences of which some rows see nothing; a head's part is one of each row of a tile."""
    lengths = (140, 37, 0)
    room = 160 if cache.page_size != 48 else 144
    problem = Problem(3, 4, 2, 3, room, 32, "float16", window=(120, 0), padded=True, key_lengths=lengths)
    mask = DECODED if room == 160 else Mask(DECODED.text, **DECODED.numbers, **_first(room))
    problem = problem.asking(mask_function=mask.form)
    schedule = plan_decode(problem, A100, cache, num_splits=splits, lse=True)
    drawn = replace(draw_decode(problem, cache), mask=mask)
    given: dict[str, Any] = {**drawn.arrays, "mask": mask}
    if cache.tree:
        given["tree_mask"] = drawn.arrays["tree_mask"][:, None]
    sequences = drawn.sequences  # of the caches as they are before
    found = execute_decode(schedule, **given)
    assert found.findings == ()
    assert found.traffic == theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)
    numbers = measure_decode(found.out, found.lse, sequences)
    assert all(each.good for each in numbers.values()), numbers
    assert found.lse is not None and np.isneginf(found.lse[0]).any() and np.isfinite(found.lse[0]).any()


def _first(room: int) -> dict[str, Any]:
    """The captured values of DECODED, for sequences with less room."""
    return DECODED.arrays | {"document": DECODED.arrays["document"][:, :room], "seen": DECODED.arrays["seen"][:, :room]}


@pytest.mark.wide
def test_decoding_of_calls() -> None:
    """attention_decode gives the result of a call with an array; attention itself splits keys on request."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, heads, n, 32)).astype(np.float16) for heads, n in ((4, 2), (2, 90), (2, 90)))
    mask = Mask("q - k < 30 or k < first[h]", first=np.array([0, 5, 9, 90], np.int32))
    seen = np.stack([[(i + 88 - np.arange(90) < 30) | (np.arange(90) < first) for i in range(2)] for first in (0, 5, 9, 90)])
    plain = cupyflash.attention(q, k, v, mask=seen & (np.arange(90) <= np.arange(2)[:, None] + 88))
    out = cupyflash.attention_decode(q, k, v, [90], mask=mask, num_splits=3)
    split = cupyflash.attention(q, k, v, mask=mask, causal=True, algorithm="decode")
    assert np.allclose(out, plain, atol=2e-3) and np.allclose(split, plain, atol=2e-3)


MUTANTS = {
    "another sequence's tiles": Mutant("sequence.cuh", "first_query / SIZE + sequence", "first_query / SIZE", "numbers"),
    "the longest sequence's rows": Mutant("mask_tiles.cu", "Nq = sequence.queries, Nk", "Nk", "numbers"),
    "the longest sequence's keys": Mutant("mask_tiles.cu", "Nk = sequence.keys;", "Nk = p.Nk;", "numbers"),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", MUTANTS)
def test_seeded_faults(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _, _ = packed(UNEVEN, H, HKV, D, D)

    def run(schedule: Any, seed: int | None) -> tuple[Execution, bool]:
        found = execute_varlen(schedule, q, k, v, mask=MASK, seed=seed)
        assert found.lse is not None
        places = each_of(schedule, (q, k, v))
        numbers = [measure(found.out[rows].swapaxes(0, 1), found.lse[:, rows], inputs) for rows, _, inputs in places]
        return found, all(each.good for one in numbers for each in one.values())

    check_mutant(MUTANTS[name], planned(plan_varlen, UNEVEN, lse=True), run, tmp_path, monkeypatch)
