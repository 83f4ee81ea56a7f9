"""Gradients through a score function: by the 2x rule, by differences, where there is none; bytes by all three witnesses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_backward
from hypothesis import strategies as st
from test_backward_sparse import run_packed

import cupyflash
import mutants
from cupyflash import Device, Problem, Score, plan
from cupyflash.request.options import BlockMask
from cupyflash.schedules import BackwardSchedule, plan_backward, plan_varlen_backward
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.sim import execute, replay, theory
from cupyflash.sim.execution import BackwardExecution
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import backward, forward, reference_gradients
from cupyflash.sim.numbers.yardstick import draw_gradient, drawn, measure
from expressions import captured, score, texts
from mutants import Mutant
from problems import sparse_problems
from suites import sample, sweep

A100 = Device.named("A100-40GB")
# Of which any problem has an element: what is not indexed by a position alone is clamped.
ODD = (np.arange(-9, 8) / 8).astype(np.float32)[::-2]
ANY = Score(
    "s * slope[h + 0] + tanh(s) * near[(q - k) % 5] + near[b + 1] + slope[k % 8] - slope[row % 5 + h] * near[k % 4 + h]",
    slope=ODD,
    near=ODD.astype(np.float16)[2:7],
)
# Of a head's scores some are -inf, and their derivatives infinite: every fifth key, and the last tile; or whole rows. Or all scores
# are what they are whatever s is.
KEYS, ROWS = "k % 5 == 0 or k >= 48", "row == 3 or row >= 16"
TEXT = f"-far * s * s if h == 0 and ({KEYS}) or h == 1 and ({ROWS}) else near[(q - k) % 5] if h == 2 else s"
MASKED = Score(TEXT, far=np.inf, near=ODD[2:7])
WAYS = [("fa2", False), ("fa2", True), ("fa1", False), ("standard", False)]


def inputs_of(problem: Problem, score: Score, blocks: tuple[int, int] | None = None) -> Inputs:
    return replace(drawn(problem, 0, 1.0, blocks), score=score)


def check(schedule: BackwardSchedule, inputs: Inputs) -> BackwardExecution:
    """All that must hold of one execution."""
    execution, numbers = test_backward.backward_with_errors(schedule, inputs, draw_gradient(schedule.problem))
    assert execution.findings == ()
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True) == execution.traffic
    assert all(each.good for each in numbers.values()), numbers
    return execution


@pytest.mark.wide
@pytest.mark.parametrize(
    ("algorithm", "dtype", "score"), [("fa2", "float16", ANY), ("fa1", "float16", MASKED), ("standard", "bfloat16", MASKED)]
)
def test_numbers_and_bytes(algorithm: str, dtype: str, score: Score) -> None:
    """With all masks, a bias with its gradient, and grouped heads, whose slopes are their own."""
    fa2, blocks = algorithm == "fa2", (48, 32)
    problem = Problem(2, 2, 1, 50, 70, 24, dtype, window=(40, 9), mask=True, bias=True, padded=True, key_lengths=(60, 33))
    if algorithm != "standard":
        problem = problem.asking(block_mask=BlockMask.of(np.random.default_rng(0).random((2, 2, 3)) < 0.7), sinks=fa2)
    problem = problem.asking(score=score.form)
    schedule = plan_backward(problem, A100, algorithm, blocks, deterministic=fa2, dbias=fa2)
    check(schedule, inputs_of(problem, score, blocks))


@pytest.mark.parametrize(("algorithm", "deterministic"), sample(WAYS[:2], [("fa2", False)]))
def test_what_is_masked_has_no_gradient(algorithm: str, deterministic: bool) -> None:
    """Scores of -inf, whatever their derivative, in some keys of a tile, in all, in whole rows; and scores without a derivative."""
    problem = Problem(1, 3, 3, 30, 70, 16, "float16", score=MASKED.form)
    schedule = plan_backward(problem, A100, algorithm, (16, 16), deterministic=deterministic)
    made = check(schedule, inputs_of(problem, MASKED))
    keys, rows = (np.arange(70) % 5 == 0) | (np.arange(70) >= 48), (np.arange(30) == 3) | (np.arange(30) >= 16)
    assert not made.dk[:, 0, keys].any() and not made.dv[:, 0, keys].any() and made.dk[:, 0, ~keys].any(axis=-1).all()
    assert not made.dq[:, 1, rows].any() and made.dq[:, 1, ~rows].any(axis=-1).all()
    assert not made.dq[:, 2].any() and not made.dk[:, 2].any() and made.dv[:, 2].any(axis=-1).all()


@pytest.mark.wide
def test_packed_sequences() -> None:
    """b is the sequence, whose queries and keys are counted from its beginning."""
    table = np.random.default_rng(0).standard_normal((4, 70)).astype(np.float32)
    tree = Score("s * (1 + near[b] * 0.5) + table[b, k] - abs(table[b, q]) + near[row % 4 + h]", table=table, near=ODD[:4])
    problem = Problem(4, 2, 1, 45, 70, 16, "float16", causal=True, score=tree.form)
    lengths = (5, 40), (0, 9), (45, 70), (33, 0)
    schedule = plan_varlen_backward(problem, A100, lengths, (16, 32), deterministic=True)
    execution, numbers = run_packed(schedule, score=tree)
    assert execution.findings == () and all(each.good for each in numbers), numbers
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True) == execution.traffic


@sweep(2, 20, data=st.data(), way=st.sampled_from(WAYS[:3]), tiling=st.sampled_from([(16, 16), (48, 32)]))
def test_theory_is_replay_is_literal_replay(data: st.DataObject, way: tuple[str, bool], tiling: tuple[int, int]) -> None:
    for problem in data.draw(sparse_problems(tiling)):
        schedule = plan_backward(problem.asking(score=ANY.form), A100, way[0], tiling, deterministic=way[1])
        assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)


SIZES = {"b": 2, "h": 4, "kv_h": 2, "row": 20, "k": 36}
CAPTURED = captured(SIZES)


def random_inputs(seed: int, dtype: Any) -> Inputs:
    """Two expressions, by the head. Scores are odd eighths, exactly: beside them every precision steps at the same ones."""
    random, shape = np.random.default_rng(seed), (2, 2, 36, 16)
    q = (2 * random.integers(-15, 16, (2, 4, 20, 16)) + 1) / 8
    k = np.zeros(shape)
    k[(*np.ogrid[:2, :2, :36], random.integers(0, 16, shape[:3]))] = random.choice([-1, 1], shape[:3])
    of_heads = "".join(f"12 * tanh(({text}) / 12) if h % 2 == {head} else " for head, text in enumerate(texts(seed, 2)))
    arrays = (array.astype(dtype) for array in (q, k, random.standard_normal(shape)))
    return Inputs.of(*arrays, scale=1.0, score=score(f"{of_heads} 0.0", CAPTURED))


@pytest.mark.wide
@sweep(1, 1, seed=st.integers(0, 2**32))
def test_random_expressions(seed: int) -> None:
    inputs = random_inputs(seed, np.float16)
    check(plan_backward(inputs.problem, A100, "fa2", (16, 16)), inputs)
    made = execute(plan(inputs.problem, A100, "fa2", (16, 16), lse=True), *inputs.qkv, score=inputs.score)
    assert made.findings == () and all(each.good for each in measure(made.out, made.lse, inputs).values())


@pytest.mark.wide
def test_scores_that_are_large() -> None:
    """Scores that float32 holds, but not L: what weights are relative to is found once more, with the same function."""
    inputs, dout = random_inputs(0, np.float32), np.random.default_rng(0).standard_normal((2, 4, 20, 16)).astype(np.float32)
    far, near = (Score("s * sign[h] - base", sign=np.array([1, -1, 1, -1], np.int8), base=base) for base in (2**24 - 999, 0))
    inputs = replace(inputs, q=np.round(inputs.q), score=far)
    schedule = plan_backward(inputs.problem, A100, "fa2", (16, 16), deterministic=True)
    made, _ = test_backward.backward_with_errors(schedule, inputs, dout)
    exact = backward(dout, replace(inputs, score=near)).gradients  # a shift is none of the weights
    for name, gradient in made.gradients.items():
        np.testing.assert_allclose(gradient, exact[name], atol=1e-2)


@sweep(2, 10, seed=st.integers(0, 2**32))
def test_the_reference_is_that_of_differences(seed: int) -> None:
    """In float64: single entries of q and k are moved both ways, exactly, away from steps and corners."""
    inputs, step, random, smooth = random_inputs(seed, np.float32), np.float32(2.0**-10), np.random.default_rng(seed), 0
    dout = random.standard_normal(inputs.q.shape).astype(np.float32)
    inputs = replace(inputs, k=inputs.k + random.integers(-64, 65, inputs.k.shape).astype(np.float32) / 4096)
    gradients = backward(dout, inputs).gradients
    for name in "q" * 5 + "k" * 5:
        array = getattr(inputs, name)
        place, sums = random.integers(array.size), []
        for way in (-1, 0, 1):
            moved = array.copy()
            moved.flat[place] += way * step
            sums.append((forward(replace(inputs, **{name: moved})).O * dout).sum())
        left, right = np.diff(sums) / step
        if abs(left - right) <= 1e-2 * (0.1 + abs(left)):
            smooth += 1
            np.testing.assert_allclose(gradients[f"d{name.upper()}"].flat[place], (left + right) / 2, rtol=1e-2, atol=1e-3)
    assert smooth > 1


@pytest.mark.wide
def test_calls() -> None:
    """A pullback gives what the backward call does; another number of the same expression runs the same kernel."""
    q, k, v, dout = np.random.default_rng(3).standard_normal((4, 2, 20, 16)).astype(np.float32)
    for gain in (0.5, 2.0):
        asked: dict[str, Any] = {
            "score": Score("s * gain + slope[h]", gain=gain, slope=ODD[:2]),
            "algorithm": "fa1",
            "tiling": (16, 16),
        }
        out, pullback = cupyflash.attention_vjp(q, k, v, **asked)
        made = pullback(dout)
        lse = cupyflash.attention(q, k, v, return_lse=True, **asked)[1]
        again = cupyflash.attention_backward(dout, q, k, v, out, lse, **asked)
        assert all(np.array_equal(one, other) for one, other in zip(made, again, strict=True))
        scaled = reference_gradients(dout, q, k, v, scale=gain / 4)
        for name, gradient in zip(("dQ", "dK", "dV"), made, strict=True):
            np.testing.assert_allclose(gradient, scaled[name], atol=5e-3)


@pytest.mark.wide
def test_functions_that_have_names() -> None:
    q, k, v, dout = np.random.default_rng(3).standard_normal((4, 1, 20, 16)).astype(np.float16)
    capped = Score("softcap * tanh(s / softcap)", softcap=1.5)
    one, other = (
        cupyflash.attention_vjp(q, k, v, algorithm="fa1", tiling=(16, 16), **asked)[1](dout)
        for asked in ({"softcap": 1.5}, {"score": capped})
    )
    assert all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


def test_what_is_refused() -> None:
    q = np.zeros((2, 20, 16), np.float32)
    lse = np.zeros((2, 20), np.float32)
    for wrong, error, words in (
        ("s", TypeError, "score must be a cupyflash.Score or None, got str"),
        (Score("s * x[h]", x=ODD), ValueError, "x must have length 2 along axis 0, which h indexes"),
    ):
        with pytest.raises(error, match=words):
            cupyflash.attention_backward(q, q, q, q, q, lse, score=wrong)  # type: ignore[arg-type]
        with pytest.raises(error, match=words):
            cupyflash.attention_vjp(q, q, q, score=wrong)


FAULTS = {
    "the derivative is forgotten": Mutant("score.cuh", "{value, slope}", "{value, 1.f}", "numbers"),
    "slopes of masked scores are multiplied": Mutant(
        "score.cuh", "gradient == 0.f ? 0.f : gradient * slope", "gradient * slope", "numbers"
    ),
    "the group's first head's slopes": Mutant(
        "fa1_backward.cu", "score_of_head(p, batch, head,", "score_of_head(p, batch, kv_head * group,", "numbers"
    ),
    "the head's part of a score is used early": Mutant(
        "score.cuh",
        "queries, keys});\n    __syncthreads();",
        "queries, keys});",
        "race|uninitialised",
        ("of_head = *shared",),
    ),
    "every lane reads the head's part": Mutant("score.cuh", "if (threadIdx.x == 0)", "if (threadIdx.x < 2)", "bytes"),
}
SLOPED = Score("-far * s * s if k % 5 == 0 else s * s * slope[h] + near[(q - k) % 5]", far=np.inf, slope=ODD[:4], near=ODD)


def run_fault(schedule: BackwardSchedule, seed: int | None) -> tuple[BackwardExecution, bool]:
    asked = PARTS if schedule.algorithm == "fa2" else SLOPED
    inputs, gradient = inputs_of(schedule.problem, asked), draw_gradient(schedule.problem)
    made, numbers = test_backward.backward_with_errors(schedule, inputs, gradient, seed)
    return made, all(each.good for each in numbers.values())


def of_faults() -> BackwardSchedule:
    return plan_backward(Problem(1, 4, 2, 20, 30, 16, "float16", causal=True, score=SLOPED.form), A100, "fa1", (16, 16))


@pytest.mark.parametrize("name", sample(FAULTS, ["the group's first head's slopes"]))
def test_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.check_mutant(FAULTS[name], of_faults(), run_fault, tmp_path, monkeypatch)


PARTS = Score(
    "where(near[q] == near[k], s, -far) * a[h, k] + a[h, row]",
    far=np.inf,
    near=ODD[:4].repeat(9),
    a=np.linspace(0.5, 1, 72, dtype=np.float32).reshape(2, 36),
)
OF_PARTS = {
    "parts of the next keys are put where these are": Mutant(
        "score_parts.cuh", "this->store(both - at)", "this->store(at)", "race", ("st.shared", "ld.shared")
    ),
    "rows have the parts of the block before": Mutant(
        "fa2_backward.cu", "coming.store(parts_at(which));\n      i", "coming.store(parts_at(which ^ 1));\n      i", "numbers"
    ),
    "parts of rows that there are not": Mutant(
        "fa2_backward.cu", "score_at(masks, i * BR, 0, Nq), rows,", "score_at(masks, i * BR, 0, Nq), BR,", "bytes"
    ),
}


def of_parts() -> BackwardSchedule:
    """Several blocks each way, the last of them short, in both kernels."""
    return plan_backward(Problem(1, 2, 1, 36, 36, 16, "float16", score=PARTS.form), A100, "fa2", (16, 16), deterministic=True)


@pytest.mark.wide
@pytest.mark.parametrize("name", OF_PARTS)
def test_fault_of_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.check_mutant(OF_PARTS[name], of_parts(), run_fault, tmp_path, monkeypatch)


@pytest.mark.wide
def test_parts_without_a_fault() -> None:
    mutants.check_unbroken(of_parts(), run_fault, range(1))


def test_what_is_one_for_a_row_or_a_key_is_read_once_for_a_tile() -> None:
    """Ids in eight bytes, of each query of a tile and of each key of a visit; fa1's scores read both, each."""
    same = Score("where(document[q] == document[k], s, -far)", document=np.zeros(80, np.int64), far=np.inf)
    problem = Problem(1, 4, 2, 50, 80, 32, "float16", score=same.form)
    fa2, fixed = (plan_backward(problem, A100, "fa2", (32, 32), deterministic=fixed) for fixed in (False, True))
    read = [
        theory.traffic(one)["score_document"].read_bytes // 4 // 8 for one in (plan(problem, A100, "fa2", (32, 32)), fa2, fixed)
    ]
    assert read[0] == 50 + 2 * 80  # two row blocks
    assert read[1] == 80 + 3 * 50  # three column blocks
    assert isinstance(fixed, Fa2BackwardSchedule) and fixed.queries is not None
    assert read[2] == read[1] + 50 + fixed.queries.row_blocks * 80
    assert theory.traffic(plan(problem, A100, "fa1", (32, 32)))["score_document"].read_bytes == 4 * 8 * 2 * 50 * 80
