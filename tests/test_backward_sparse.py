"""The backward pass with windows, block masks, packed sequences and a bias's gradient, and what `deterministic` says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from test_backward import A100, check_backward
from test_varlen import any_schedule, dropout_of, packed

import cupyflash
from cupyflash import Problem, Score
from cupyflash.request.options import BlockMask
from cupyflash.schedules import VarlenBackwardSchedule, plan_backward, plan_varlen_backward
from cupyflash.sim import execute_backward, execute_varlen_backward, replay, theory
from cupyflash.sim.execution import BackwardExecution
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import forward, reference, reference_gradients
from cupyflash.sim.numbers.yardstick import Numbers, draw_gradient, measure_gradients
from problems import TILINGS, longest, sparse_problems
from suites import sweep, wide
from yardstick import draw, draw_masks

KINDS = [("fa1", False), ("fa2", False), ("fa2", True)]


@sweep(8, 40, data=st.data(), kind=st.sampled_from(KINDS), tiling=st.sampled_from(TILINGS))
def test_theory_is_replay_is_literal_replay(data: st.DataObject, kind: tuple[str, bool], tiling: tuple[int, int]) -> None:
    algorithm, deterministic = kind
    for problem in data.draw(sparse_problems(tiling)):
        schedule = plan_backward(problem, A100, algorithm, tiling, deterministic=deterministic)
        assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)


@pytest.mark.parametrize(("algorithm", "deterministic"), [wide("fa1", False), wide("fa2", False), ("fa2", True)])
@sweep(1, 2)
def test_random_problems(algorithm: str, deterministic: bool, data: st.DataObject) -> None:
    tiling = data.draw(st.sampled_from(TILINGS))
    for problem in data.draw(sparse_problems(tiling, longest(tiling, 120))):
        check_backward(plan_backward(problem, A100, algorithm, tiling, deterministic=deterministic), blocks=tiling, v_mean=1.0)


@pytest.mark.wide
def test_a_block_mask_has_the_forwards_blocks() -> None:
    """Without an own choice of blocks, mask and kernels are those of the forward call; a mask that keeps nothing has no
    gradient."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 300, 32)).astype(np.float16)
    masked = Problem(1, 1, 1, 300, 300, 32, "float16", block_mask=BlockMask((1, 1, 1, 1)))
    forward = cupyflash.plan(masked, A100)
    kept = np.zeros((forward.row_blocks, forward.col_blocks), bool)
    kept[0] = True
    out, lse = cupyflash.attention(q, k, v, block_mask=kept, return_lse=True)
    dq, dk, dv = cupyflash.attention_backward(dout, q, k, v, out, lse, block_mask=kept)
    first = forward.block_rows
    whole = cupyflash.attention_backward(dout[:, :first], q[:, :first], k, v, out[:, :first], lse[:, :first], deterministic=True)
    assert not dq[:, first:].any() and np.allclose(dq[:, :first], whole[0], atol=2e-3)
    assert np.allclose(dk, whole[1], atol=2e-3) and np.allclose(dv, whole[2], atol=2e-3)
    with pytest.raises(ValueError, match="block_mask must be"):
        cupyflash.attention_backward(dout, q, k, v, out, lse, block_mask=kept[:, :1][:, [0] * 9])


def run_packed(
    schedule: VarlenBackwardSchedule, seed: int | None = None, score: Score | None = None
) -> tuple[BackwardExecution, list[Numbers]]:
    """An execution, and the errors of each sequence's gradients, by the 2x rule on its own."""
    p, seqlens = schedule.problem, schedule.seqlens
    assert seqlens is not None
    q, k, v, cu_q, cu_k = packed(seqlens, p.heads, p.kv_heads, p.head_dim, p.head_dim_v, p.dtype)
    dout = np.random.default_rng(7).standard_normal((*q.shape[:-1], p.head_dim_v)).astype(np.float32).astype(q.dtype)
    out, lse = np.zeros_like(dout), np.full(q.shape[1::-1], -np.inf, np.float32)
    asked = replace(p.options, packed=False)
    places = [(slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])) for n in range(p.batch)]
    of_each = []
    for n, (rows, cols) in enumerate(places):
        qkv = (array.swapaxes(0, 1) for array in (q[rows], k[cols], v[cols]))
        of_each.append(Inputs(*qkv, asked, score=score, sequence=n, dropout=dropout_of(asked, n)))
        one = forward(of_each[-1])
        out[rows], lse[:, rows] = one.O.swapaxes(0, 1).astype(q.dtype), one.L
    execution = execute_varlen_backward(schedule, dout, q, k, v, out, lse, seed=seed, score=score, dropout=dropout_of(asked))
    numbers: list[Numbers] = []
    for (rows, cols), inputs in zip(places, of_each, strict=True):
        gradients = {"dQ": execution.dq[rows], "dK": execution.dk[cols], "dV": execution.dv[cols]}
        made = {name: each.swapaxes(0, 1) for name, each in gradients.items()}
        numbers += measure_gradients(made, dout[rows].swapaxes(0, 1), inputs).values()
    return execution, numbers


def check_packed(schedule: VarlenBackwardSchedule, score: Score | None = None) -> BackwardExecution:
    """All that must hold of one execution."""
    execution, numbers = run_packed(schedule, score=score)
    assert execution.findings == ()
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True) == execution.traffic
    assert all(each.good for each in numbers), numbers
    return execution


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@sweep(2, 3, data=st.data(), deterministic=st.booleans())
def test_packed_sequences(dtype: str, data: st.DataObject, deterministic: bool) -> None:
    forward = data.draw(any_schedule(dtype))
    p, seqlens = forward.problem, forward.seqlens
    assert seqlens is not None
    check_packed(plan_varlen_backward(p, A100, seqlens, deterministic=deterministic))


@pytest.mark.wide
def test_the_packed_call() -> None:
    q, k, v, cu_q, cu_k = packed(((10, 20), (0, 5), (50, 40), (33, 0)), 4, 2, 16, 16, "float32")
    out, lse = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
    dout = np.random.default_rng(0).standard_normal(out.shape).astype(np.float32)
    given = cupyflash.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, causal=True)
    one = (array[:10].swapaxes(0, 1) for array in (dout, q))
    expected = reference_gradients(*one, *(array[:20].swapaxes(0, 1) for array in (k, v)), causal=True)
    assert np.allclose(given[0][:10].swapaxes(0, 1), expected["dQ"], atol=1e-5)
    with pytest.raises(ValueError, match="lse must have shape"):
        cupyflash.attention_varlen_backward(dout, q, k, v, out, lse.T, cu_q, cu_k)
    with pytest.raises(TypeError, match="deterministic must be"):
        cupyflash.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, deterministic=1)  # type: ignore[arg-type]


@pytest.mark.wide
@pytest.mark.parametrize("shape", [wide((2, 3, 40, 50)), (1, 3, 40, 50), wide((3, 1, 50)), wide((50,))])
@pytest.mark.parametrize("causal", [wide(False), True])
def test_the_gradient_of_a_bias(shape: tuple[int, ...], causal: bool) -> None:
    """The gradient has the bias's shape: broadcast elements add up."""
    p = Problem(2, 3, 3, 40, 50, 16, "float32", causal=causal)
    (q, k, v), dout = draw(p, v_mean=1.0), draw_gradient(p)
    bias = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    out, lse = cupyflash.attention(q, k, v, causal=causal, bias=bias, return_lse=True)
    *_, dbias = cupyflash.attention_backward(dout, q, k, v, out, lse, causal=causal, bias=bias, return_dbias=True)
    expected = reference_gradients(dout, q, k, v, causal=causal, bias=bias)["dbias"]
    expected = expected.sum(axis=tuple(range(4 - len(shape))))
    expected = expected.sum(axis=tuple(n for n, length in enumerate(shape) if length == 1), keepdims=True)
    assert dbias.shape == shape and np.allclose(dbias, expected, atol=2e-5)
    if shape != (2, 3, 40, 50):
        with pytest.raises(ValueError, match="deterministic=True cannot sum"):
            cupyflash.attention_backward(dout, q, k, v, out, lse, bias=bias, return_dbias=True, deterministic=True)


@pytest.mark.wide
def test_a_bias_gradients_bytes() -> None:
    p = Problem(2, 4, 2, 40, 90, 32, "float16", causal=True, bias=True)
    schedule = plan_backward(p, A100, dbias=True)
    (q, k, v), masks, dout = draw(p), draw_masks(p), draw_gradient(p)
    out, lse = reference(q, k, v, causal=True, **masks)
    dbias = np.zeros((2, 4, 40, 90), np.float32)
    execution = execute_backward(schedule, dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), **masks, dbias=dbias)
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True) == execution.traffic
    scores = 8 * sum(min(90, 50 + row + 1) for row in range(40))
    assert execution.traffic["dbias"].read_bytes == execution.traffic["dbias"].write_bytes == 4 * scores


@pytest.mark.parametrize(("dtype", "orders"), [wide("float16", 8), wide("float32", 2)])
def test_deterministic_gives_the_same_bits(dtype: str, orders: int) -> None:
    """Under many orders of execution. What atomics sum is dq alone."""
    p = Problem(1, 4, 2, 30, 40, 16, dtype, causal=True)
    fixed, free = (plan_backward(p, A100, "fa2", (16, 16), deterministic=each) for each in (True, False))
    first, loose = check_backward(fixed), check_backward(free)
    assert (loose.dk.tobytes(), loose.dv.tobytes()) == (first.dk.tobytes(), first.dv.tobytes())
    for seed in range(orders):
        again = check_backward(fixed, schedule_seed=seed)
        assert [g.tobytes() for g in (again.dq, again.dk, again.dv)] == [g.tobytes() for g in (first.dq, first.dk, first.dv)]


def test_what_deterministic_costs() -> None:
    """A workspace less, the atomics' bytes less, and K and V once more for each row block."""
    p = Problem(1, 1, 1, 1024, 1024, 64, "float16")
    fixed, free = (plan_backward(p, A100, deterministic=each) for each in (True, False))
    assert free.workspace_bytes == 1024 * 4 * (64 + 3) and fixed.workspace_bytes == 1024 * 4 * 3
    assert theory.traffic(fixed)["dQ_acc"].total_bytes == 0
    assert fixed.queries is not None
    again = theory.traffic(fixed)["K"].read_bytes - theory.traffic(free)["K"].read_bytes
    assert again == fixed.queries.row_blocks * 1024 * 64 * 2


@sweep(5, 35, data=st.data(), tiling=st.none() | st.sampled_from(TILINGS) | st.just("paper"))
def test_standard_theory_is_replay_is_literal_replay(data: st.DataObject, tiling: Any) -> None:
    """All options that restrict scores, except block masks; an SRAM that has room for the paper's one tile."""
    for problem in data.draw(sparse_problems((16, 16), blocks=False)):
        schedule = plan_backward(problem, A100.with_sram("1MB"), "standard", tiling)
        assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)


@pytest.mark.wide
@sweep(2, 3)
def test_a_window_in_the_standard_backward(data: st.DataObject) -> None:
    for problem in data.draw(sparse_problems((16, 16), most=80, blocks=False)):
        check_backward(plan_backward(problem, A100, "standard", (32, 48)), data.draw(st.integers(0, 99)), v_mean=1.0)
