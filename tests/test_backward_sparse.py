"""Windows and block masks in the backward pass: theory == replay == literal replay == execution, and the gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sparse import TILINGS, sparse_problem

from cupyflash import Device
from cupyflash.schedules import BackwardSchedule, plan_backward
from cupyflash.sim import replay, theory
from cupyflash.sim.execution import execute_backward
from cupyflash.sim.reference import reference
from cupyflash.sim.yardstick import draw_gradient, measure_gradients
from yardstick import draw, draw_masks

A100 = Device.named("A100-40GB")


def check(schedule: BackwardSchedule, seed: int, schedule_seed: int | None) -> None:
    """All that must hold of one execution."""
    p = schedule.problem
    q, k, v = draw(p, seed, v_mean=1.0)
    masks, dout = draw_masks(p, seed), draw_gradient(p, seed)
    plain: dict[str, Any] = {"causal": p.causal, "window": p.window, "scale": p.scale} | masks
    kept = plain.pop("block_mask", None)
    if kept is not None:
        rows, cols = (np.arange(n) // size for n, size in ((p.seqlen_q, schedule.block_rows), (p.seqlen_k, schedule.block_cols)))
        seen = kept[..., rows[:, None], cols]
        plain["mask"] = seen & plain["mask"] if p.mask else seen
    out, lse = (array.astype(dtype) for array, dtype in zip(reference(q, k, v, **plain), (q.dtype, np.float32), strict=True))
    execution = execute_backward(schedule, dout, q, k, v, out, lse, **masks, seed=schedule_seed)
    assert execution.findings == ()
    assert theory.traffic(schedule) == replay(schedule) == execution.traffic
    numbers = measure_gradients({"dQ": execution.dq, "dK": execution.dk, "dV": execution.dv}, dout, q, k, v, **plain)
    assert all(each.good for each in numbers.values()), numbers


@settings(max_examples=300)
@given(data=st.data(), algorithm=st.sampled_from(["fa1"]), tiling=st.sampled_from(TILINGS))
def test_theory_is_replay_is_literal_replay(data: st.DataObject, algorithm: str, tiling: tuple[int, int]) -> None:
    schedule = plan_backward(data.draw(sparse_problem(tiling)), A100, algorithm, tiling)
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)


@pytest.mark.parametrize("algorithm", ["fa1"])
@settings(max_examples=25)
@given(data=st.data())
def test_random_problems(algorithm: str, data: st.DataObject) -> None:
    tiling = data.draw(st.sampled_from(TILINGS))
    schedule = plan_backward(data.draw(sparse_problem(tiling, most=100)), A100, algorithm, tiling)
    check(schedule, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([None, None, 5])))


@settings(max_examples=100)
@given(data=st.data(), tiling=st.none() | st.sampled_from(TILINGS) | st.just("paper"))
def test_standard_theory_is_replay_is_literal_replay(data: st.DataObject, tiling: Any) -> None:
    """All that restricts scores but block masks; an SRAM that has room for the paper's one tile."""
    problem = replace(data.draw(sparse_problem((16, 16))), block_mask=None)
    schedule = plan_backward(problem, A100.with_sram("1MB"), "standard", tiling)
    assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)


@settings(max_examples=12)
@given(data=st.data())
def test_a_window_in_the_standard_backward(data: st.DataObject) -> None:
    problem = replace(data.draw(sparse_problem((16, 16), most=80)), block_mask=None)
    check(plan_backward(problem, A100, "standard", (32, 48)), data.draw(st.integers(0, 99)), None)
