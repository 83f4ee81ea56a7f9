"""The gradients of arrays that a score function has captured: by the 2x rule, by differences; bytes by all three witnesses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from test_varlen import packed

import cupyflash
import mutants
from cupyflash import Device, Problem, Score
from cupyflash.request.options import BlockMask
from cupyflash.request.score_sums import LARGEST, finished, sum_field, summed
from cupyflash.schedules import BackwardSchedule, plan_backward, plan_varlen_backward
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.sim import replay, theory
from cupyflash.sim.execution import BackwardExecution, execute_backward, execute_varlen_backward
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import backward, forward, to_captured
from cupyflash.sim.numbers.yardstick import Numbers, draw_gradient, drawn, handed_on, measure_gradients
from mutants import Mutant
from problems import sparse_problems
from suites import sweep

A100 = Device.named("A100-40GB")
RNG = np.random.default_rng(36)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


# Elements for a score, by way of another array, and more than one of an array; for a head, a row, a key; an array without axes.
EVERY = Score(
    "cap * tanh(s * gain[h] / cap) + table[h, q - k] + learned[bucket[q - k], h] * near[k % 9] - near[h + 1] * of_row[row]",
    cap=np.array(2.5, np.float32),
    gain=(1 + floats(4) / 4)[::2],
    table=floats(2, 17),
    learned=floats(5, 2).astype(np.float16),
    bucket=np.sort(RNG.integers(0, 5, 40)).astype(np.int8),
    near=floats(9),
    of_row=floats(36),
)
FLOATS = ("cap", "gain", "learned", "near", "of_row", "table")


def run(
    schedule: BackwardSchedule, inputs: Inputs, seed: int | None = None
) -> tuple[BackwardExecution, dict[str, np.ndarray], dict[str, Numbers]]:
    """An execution, its gradients of captured arrays, and all gradients' errors."""
    assert inputs.score is not None
    dout = draw_gradient(schedule.problem)
    dscore = {name: np.zeros(inputs.score.arrays[name].shape, np.float32) for name in schedule.dscore}
    dbias = {"dbias": np.zeros(inputs.beside["bias"].shape, np.float32)} if schedule.dbias else {}
    asked: dict[str, Any] = {"score": inputs.score, "dropout": inputs.dropout, **inputs.beside}
    made = execute_backward(schedule, dout, *inputs.qkv, *handed_on(inputs, "fa2"), dscore=dscore, **dbias, **asked, seed=seed)
    sums = {sum_field(name): gradient for name, gradient in dscore.items()}
    return made, sums, measure_gradients(made.gradients | dbias | sums, dout, inputs)


def check(schedule: BackwardSchedule, score: Score, blocks: tuple[int, int] | None = None) -> dict[str, np.ndarray]:
    """All that must hold of one execution."""
    made, sums, numbers = run(schedule, replace(drawn(schedule.problem, 0, 1.0, blocks), score=score))
    assert made.findings == ()
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True) == made.traffic
    assert all(each.good for each in numbers.values()), numbers
    return sums


def test_numbers_and_bytes() -> None:
    score = Score("s * gain[h] + table[h, q - k] + learned[bucket[q - k], h]", **{name: EVERY.arrays[name] for name in OF_THESE})
    problem = Problem(1, 2, 1, 20, 20, 16, "float16", causal=True, score=score.form)
    check(plan_backward(problem, A100, "fa2", (16, 16), dscore=("gain", "learned", "table")), score)


OF_THESE = ("gain", "table", "learned", "bucket")
MASKED: dict[str, Any] = {"window": (20, 9), "mask": True, "bias": True, "padded": True, "key_lengths": (35,), "sinks": True}


@pytest.mark.wide
@pytest.mark.parametrize(("d", "dtype", "deterministic"), [(24, "float16", False), (16, "float32", True), (264, "bfloat16", False)])
def test_with_all_else(d: int, dtype: str, deterministic: bool) -> None:
    """Masked scores add nothing; a bias has its own gradient beside."""
    problem = Problem(1, 2, 1, 36, 40, d, dtype, score=EVERY.form, **MASKED if d == 24 else {"dropout": dtype == "float32"})
    if d == 24:
        problem = problem.asking(block_mask=BlockMask.of(np.array([[[1, 0], [1, 1], [0, 1]]], bool)))
    bias = problem.options.bias
    schedule = plan_backward(problem, A100, "fa2", (16, 32), deterministic=deterministic, dbias=bias, dscore=FLOATS)
    check(schedule, EVERY, (16, 32))


# Scores of -inf and infinite derivatives; a function without the score, or with no derivative by an array.
EDGES = {
    "masked": Score("-far * a[k] if k % 5 == 0 else s * a[k]", far=np.inf, a=1 + floats(20) / 8),
    "steps": Score("s + floor(a[h]) + (a[k % 2] > 0) + where(a[h] > 0, c[h], c[1 - h] * s)", a=floats(2), c=floats(2)),
    "all alike": Score("s + a[0] + a[h % 1]", a=floats(1)),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    score = EDGES[name]
    problem = Problem(1, 2, 1, 20, 20, 16, "float16", score=score.form)
    names = tuple(score.arrays)
    sums = check(plan_backward(problem, A100, "fa2", (16, 16), deterministic=name == "steps", dscore=names), score)
    if name == "masked":
        assert not sums["dscore_a"][::5].any() and sums["dscore_a"][1:5].all()
    if name == "all alike":  # a softmax does not see what all its scores have in common
        assert abs(sums["dscore_a"][0]) < 0.1


@pytest.mark.wide
def test_sums_of_integers_do_not_depend_on_an_order() -> None:
    """The same bits in orders in which float32 gives others, which is why there are integers."""
    problem = Problem(1, 1, 1, 32, 32, 16, "float16", score=TABLE.form)
    found = {}
    for deterministic in (False, True):
        schedule = plan_backward(problem, A100, "fa2", (16, 16), deterministic=deterministic, dscore=("table",))
        inputs = replace(drawn(problem, 0, 1.0), score=TABLE)
        found[deterministic] = [run(schedule, inputs, seed)[1]["dscore_table"].tobytes() for seed in (1, 2)]
    assert found[True][0] == found[True][1] and found[False][0] != found[False][1]


TABLE = Score("s + table[q - k]", table=floats(5))


def test_what_integers_become() -> None:
    """2^exponent is beyond the largest term, and all terms together are below 2^62; an infinite or undefined term leaves NaN."""
    terms, largest = 1000, np.array([3.0, np.inf, np.nan, 0, 1e-42], np.float32)
    unit = 2.0 ** (62 - terms.bit_length())
    sums = [np.array([int(x * unit / 4)]) for x in (3, 1, 1, 0)] + [np.array([int(1e-42 * unit * 2.0**126)])]
    names = ("a", "b", "c", "d", "e")
    arrays = {LARGEST: largest.view(np.uint32), **{sum_field(name): each for name, each in zip(names, sums, strict=True)}}
    made = finished(arrays, names, terms)
    assert made["a"] == 3 and np.isnan(made["b"]) and np.isnan(made["c"]) and made["d"] == 0
    np.testing.assert_allclose(made["e"], 1e-42, rtol=1e-2)


@sweep(2, 6, data=st.data(), deterministic=st.booleans(), tiling=st.sampled_from([(16, 16), (48, 32)]))
def test_theory_is_replay_is_literal_replay(data: st.DataObject, deterministic: bool, tiling: tuple[int, int]) -> None:
    score = Score("s * a[h + 0] + c[bucket[q - k] + 0] + a[h + 0] * c[k % 3]", a=floats(8), c=floats(3), bucket=np.arange(3))
    for problem in data.draw(sparse_problems(tiling)):
        asked = problem.asking(score=score.form)
        schedule = plan_backward(asked, A100, "fa2", tiling, deterministic=deterministic, dscore=("a", "c"))
        assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)


def test_what_scores_add_and_load_again() -> None:
    """A T5 table by its buckets: each score loads its bucket twice, and adds to one element; a slope is added to once a block."""
    buckets = Score("s * slope[h] + table[bucket[q - k], h]", slope=floats(2), table=floats(5, 2), bucket=np.arange(9) % 5)
    problem = Problem(3, 2, 1, 40, 70, 16, "float16", score=buckets.form)
    found = summed(buckets.form, ("slope", "table"))
    assert [load.name for load, _ in found.head] == ["slope"] and [load.name for load in found.again] == ["bucket"]
    own, none = (plan_backward(problem, A100, "fa2", (16, 32), dscore=names) for names in (("slope", "table"), ()))
    counts, before = theory.traffic(own), theory.traffic(none)
    assert isinstance(own, Fa2BackwardSchedule) and own.sums is not None
    scores, blocks = 3 * 2 * 40 * 70, 3 * 2 * own.sums.row_blocks
    assert counts["dscore_table"] == (4 * scores, 4 * scores) and counts["dscore_slope"] == (4 * blocks, 4 * blocks)
    assert counts["score_bucket"].read_bytes == before["score_bucket"].read_bytes + 2 * 8 * scores
    assert "dscore_table" not in before and counts["dQ"] == before["dQ"]


@sweep(2, 10, seed=st.integers(0, 2**32))
def test_the_reference_is_that_of_differences(seed: int) -> None:
    """In float64: single elements are moved both ways."""
    random = np.random.default_rng(seed)
    inputs = replace(drawn(Problem(2, 2, 1, 36, 20, 16, "float32", score=EVERY.form), seed % 1000), score=EVERY)
    dout = random.standard_normal(inputs.q.shape)
    dS = backward(dout, inputs).gradients["dbias"]
    name = str(random.choice(FLOATS))
    array = EVERY.arrays[name]
    place, sums = random.integers(array.size), []
    for way in (-1, 1):
        moved = array.astype(np.float64).copy()
        moved.flat[place] += way * 2.0**-12
        given = EVERY.of(EVERY.form, EVERY.arrays | {name: moved}, EVERY.numbers)
        sums.append((forward(replace(inputs, score=given)).O * dout).sum())
    want = np.diff(sums)[0] * 2.0**11
    np.testing.assert_allclose(to_captured(inputs, dS, name).flat[place], want, rtol=1e-4, atol=1e-4)


SEQLENS = ((9, 12), (0, 5), (18, 17), (7, 0))
OF_ANY_LENGTH = Score(
    "cap * tanh(s * gain[h] / cap) + table[h, q - k] + learned[bucket[q - k], h] * near[k % 9]",
    **{name: EVERY.arrays[name] for name in ("cap", "gain", "table", "learned", "bucket", "near")},
)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "deterministic", "algorithm"), [("float16", False, "fa2"), ("float32", True, "fa2"), ("float16", True, "fa3")]
)
def test_packed_sequences(dtype: str, deterministic: bool, algorithm: str) -> None:
    """Sums over all sequences, whose errors add up; and the bounds by which each launch finds its rows."""
    names, form = ("cap", "gain", "learned", "near", "table"), OF_ANY_LENGTH.form
    problem = Problem(4, 2, 1, 18, 17, 16, dtype, packed=True, causal=True, score=form)
    device = A100 if algorithm == "fa2" else Device.named("H100-SXM")
    schedule = plan_varlen_backward(problem, device, SEQLENS, algorithm=algorithm, deterministic=deterministic, dscore=names)
    q, k, v, cu_q, cu_k = packed(SEQLENS, 2, 1, 16, 16, dtype)
    dout = RNG.standard_normal(q.shape).astype(np.float32).astype(q.dtype)
    asked: dict[str, Any] = {"causal": True, "score": OF_ANY_LENGTH}
    out, lse = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **asked)
    dscore = {name: np.zeros(OF_ANY_LENGTH.arrays[name].shape, np.float32) for name in names}
    made = execute_varlen_backward(schedule, dout, q, k, v, out, lse, dscore=dscore, score=OF_ANY_LENGTH)
    assert made.findings == ()
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True) == made.traffic
    exact, allowed = {name: np.zeros(each.shape) for name, each in dscore.items()}, dict.fromkeys(names, 0.0)
    for number in (0, 2):
        rows, keys = (slice(bounds[number], bounds[number + 1]) for bounds in (cu_q, cu_k))
        *sides, of_out = (each.swapaxes(0, 1) for each in (q[rows], k[keys], v[keys], dout[rows]))
        inputs = Inputs.of(*sides, **asked)
        dS = backward(of_out, inputs).gradients["dbias"]
        own = {sum_field(name): to_captured(inputs, dS, name) for name in names}
        numbers = measure_gradients({name: each.astype(np.float32) for name, each in own.items()}, of_out, inputs)
        for name in names:
            exact[name] += own[sum_field(name)]
            allowed[name] += numbers[sum_field(name)].allowed
    for name in names:
        assert np.abs(dscore[name] - exact[name]).max() <= allowed[name], name
    how: dict[str, Any] = {"return_dscore": True, "deterministic": deterministic, **asked}
    *_, found = cupyflash.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, **how)
    assert all(np.allclose(found[name], dscore[name], rtol=2e-3, atol=1e-5) for name in names)


@pytest.mark.wide
def test_calls() -> None:
    """By name, of the captured arrays' shapes and dtypes, behind other gradients; all arrays of floats, or those that are named."""
    q, k, v, dout = RNG.standard_normal((4, 2, 20, 16)).astype(np.float32)
    table, gain, bias = floats(2, 9).astype(np.float16), floats(2), floats(2, 20, 20)
    score = Score(lambda s, h, q, k: s * gain[h] + table[h, q - k + 4])
    asked: dict[str, Any] = {"score": score, "bias": bias, "causal": True}
    sides = (each.swapaxes(0, 1) for each in (q, k, v))
    how: dict[str, Any] = {"return_dbias": True, "return_dscore": True, "layout": "bnhd", "deterministic": True}
    *_, dbias, dscore = cupyflash.attention_vjp(*sides, **asked, **how)[1](dout.swapaxes(0, 1))
    shapes = {name: (each.shape, each.dtype) for name, each in dscore.items()}
    assert shapes == {"gain": ((2,), np.float32), "table": ((2, 9), np.float16)}
    inputs = Inputs.of(q, k, v, **asked)
    exact = backward(dout, inputs).gradients["dbias"]
    np.testing.assert_allclose(dbias, exact, atol=1e-5)
    for name, each in dscore.items():
        np.testing.assert_allclose(each, to_captured(inputs, exact, name), rtol=2e-3, atol=2e-3)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"return_dscore": True}, ValueError, "return_dscore is for a score function that has captured arrays of floats"),
    (
        {"return_dscore": True, "score": Score("s * n[h]", n=np.arange(2))},
        ValueError,
        "captured arrays of floats, and there is none",
    ),
    ({"return_dscore": ("a",), "score": TABLE}, ValueError, "must name captured arrays of floats, table, got 'a'"),
    (
        {"return_dscore": "table", "score": TABLE},
        TypeError,
        "must be True, False or a tuple of names of captured arrays, got 'table'",
    ),
    ({"return_dscore": 1, "score": TABLE}, TypeError, "must be True, False or a tuple"),
    (
        {"return_dscore": True, "score": TABLE, "algorithm": "fa1"},
        ValueError,
        "algorithm 'fa1', which has no gradients of captured arrays",
    ),
]


@pytest.mark.parametrize(("asked", "error", "said"), REFUSED)
def test_what_is_refused(asked: dict[str, Any], error: type[Exception], said: str) -> None:
    q = np.zeros((2, 20, 16), np.float32)
    with pytest.raises(error, match=said):
        cupyflash.attention_vjp(q, q, q, **asked)
    with pytest.raises(error, match=said):
        cupyflash.attention_backward(q, q, q, q, q, np.zeros((2, 20), np.float32), **asked)


FAULTS = {
    "what is added is not atomic": Mutant(
        "score_sums.cuh",
        "atomicAdd(const_cast<float*>(array) + place, value)",
        "const_cast<float*>(array)[place] += value",
        "race",
        ("const_cast<float*>(array)[place]",),
    ),
    "scores that no row sees": Mutant(
        "score_sums.cuh", "if (key < end && (!WINDOW", "if (key < masks.keys && row < Nq && (!WINDOW", "bytes"
    ),
    "the derivative by s comes first": Mutant(
        "fa2_backward_queries.cu", "if constexpr (SCORE && !DROPOUT && !SCORE_SUMS)", "if constexpr (SCORE && !DROPOUT)", "numbers"
    ),
    "a head has the sums of its first warp": Mutant(
        "score_sums.cuh", "own[word] += scratch[beside];", "own[word] += 0.f;", "numbers"
    ),
}
OF_INTEGERS = {
    "a size is not the largest of a warp": Mutant(
        "score_sums.cuh", "__shfl_xor_sync(~0u, sums.largest[n], other));", "sums.largest[n]);", "numbers"
    ),
}
# Of a row in the middle of its warp, and not of the first warp, terms are larger by far.
FAULTY = Score(
    "s * gain[h] * 4 + table[h, q - k] * size[row]",
    gain=1 + floats(2) / 4,
    table=np.zeros((2, 8), np.float32),
    size=np.where(np.arange(40) == 27, 2.0**40, 1).astype(np.float32),
)


def of_faults(deterministic: bool) -> BackwardSchedule:
    problem = Problem(1, 2, 1, 40, 36, 16, "float16", causal=True, score=FAULTY.form)
    return plan_backward(problem, A100, "fa2", (32, 16), deterministic=deterministic, dscore=("gain", "table"))


def run_fault(schedule: BackwardSchedule, seed: int | None) -> tuple[BackwardExecution, bool]:
    made, _, numbers = run(schedule, replace(drawn(schedule.problem, 0, 1.0), score=FAULTY), seed)
    return made, all(each.good for each in numbers.values())


@pytest.mark.wide
@pytest.mark.parametrize("name", [*FAULTS, *OF_INTEGERS])
def test_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.check_mutant((FAULTS | OF_INTEGERS)[name], of_faults(name in OF_INTEGERS), run_fault, tmp_path, monkeypatch)
