"""The backward pass: theory == replay == execution, tensor by tensor, and gradients by the 2x rule, on the kernels' own PTX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from cupyflash import Device, Problem
from cupyflash.schedules import BackwardSchedule, plan_backward
from cupyflash.schedules import fa2_backward_tiles as tiles
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.sim import replay, theory
from cupyflash.sim.execution import BackwardExecution, execute_backward
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import NOTHING_GIVEN, Numbers, draw_gradient, drawn, handed_on, knowing_mask, measure_gradients
from problems import any_problems, longest, orders
from suites import sample, sweep, wide

A100 = Device.named("A100-40GB")
ALGORITHMS = ("fa1", "fa2", "standard")


def backward_with_errors(
    schedule: BackwardSchedule,
    inputs: Inputs,
    dout: np.ndarray,
    schedule_seed: int | None = None,
    given: Mapping[str, Any] = NOTHING_GIVEN,
) -> tuple[BackwardExecution, dict[str, Numbers]]:
    """An execution, and its gradients' errors; `given` takes the place of what comes beside q, k and v."""
    dbias = {"dbias": np.zeros(inputs.beside["bias"].shape, np.float32)} if schedule.dbias else {}
    arrays = (dout, *inputs.qkv, *handed_on(inputs, schedule.algorithm))
    asked = {"score": inputs.score, "dropout": inputs.dropout, **inputs.beside, **given}
    execution = execute_backward(schedule, *arrays, **dbias, **asked, seed=schedule_seed)
    gradients = execution.gradients | dbias
    return execution, measure_gradients(gradients, dout, inputs)


def check_backward(
    schedule: BackwardSchedule,
    seed: int = 0,
    v_mean: float = 0.0,
    schedule_seed: int | None = None,
    blocks: tuple[int, int] | None = None,
) -> BackwardExecution:
    """All that must hold of one execution; `blocks` are a block mask's."""
    schedule = knowing_mask(schedule, seed)
    inputs = drawn(schedule.problem, seed, v_mean, blocks)
    execution, numbers = backward_with_errors(schedule, inputs, draw_gradient(schedule.problem, seed), schedule_seed)
    assert execution.findings == ()
    assert theory.traffic(schedule) == replay(schedule) == execution.traffic
    assert all(each.good for each in numbers.values()), numbers
    return execution


@pytest.mark.wide
@pytest.mark.parametrize(
    ("d", "causal", "dtype", "algorithm"),
    sample(
        [
            (*one, *each)
            for one, each in product([(16, False), (64, True), (128, True)], product(["float16", "float32"], ALGORITHMS))
        ],
        [(16, False, "float32", "fa2")],
    ),
)
def test_every_kind_of_kernel(algorithm: str, causal: bool, dtype: str, d: int) -> None:
    """Ragged lengths, several blocks each way, V away from zero; Algorithm 4 runs a head in one thread block, which takes long."""
    lengths = (40, 70) if dtype == "float32" and (algorithm == "fa1" or d == 128) else (75, 101)
    problem = Problem(1, 2, 1, *lengths, d, dtype, causal=causal)
    sram = "140KB" if algorithm == "fa1" and d == 128 else "64KB"
    check_backward(plan_backward(problem, A100.with_sram(sram), algorithm), v_mean=1.0)


LENGTHS = ((1, 1), (1, 200), (200, 1), (64, 64), (33, 97), (97, 33), (128, 320))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("d", "deterministic", "place"),
    sample([(16, False, 2), (64, True, 0), (128, True, 1), (128, False, 2)], [(16, False, 2)]),
)
def test_what_runs_where_a_compiler_has_no_registers_does_the_same(d: int, deterministic: bool, place: int) -> None:
    """The main kernel's and dQ's: all but how the warps share a block stays, so the traffic does as well."""
    kept = plan_backward(Problem(1, 2, 1, 75, 101, d, "float16", causal=True), A100, deterministic=deterministic)
    assert isinstance(kept, Fa2BackwardSchedule)
    schedule = replace(kept)
    expected = theory.traffic(schedule)
    for each in (schedule, schedule.queries) if schedule.queries else (schedule,):
        ways = tiles.narrower(each.warps, each.block_rows if each is schedule else each.block_cols)
        kernel = next(kernel for kernel in each.kernels() if kernel.instead)
        vars(each)["warps"] = ways[place]
        assert kernel.instead[place] in each.kernels() and kernel not in each.kernels()
    assert check_backward(schedule, v_mean=1.0).traffic == expected


@pytest.mark.wide
@pytest.mark.parametrize(
    ("n_q", "n_k", "causal", "algorithm"),
    sample(
        [
            (*lengths, causal, algorithm)
            for lengths, (causal, algorithm) in product(LENGTHS, product([False, True], ALGORITHMS))
            if causal or algorithm == "fa2"
        ],
        [(97, 33, True, "fa2")],
    ),
)
def test_any_lengths(n_q: int, n_k: int, causal: bool, algorithm: str) -> None:
    problem = Problem(1, 1, 1, n_q, n_k, 64, "float16", causal=causal)
    check_backward(plan_backward(problem, A100, algorithm), v_mean=1.0)


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window": (5, 3)}])
def test_without_queries_gradients_are_zeros_written_once(algorithm: str, asked: dict[str, Any]) -> None:
    problem = Problem(1, 2, 1, 0, 50, 32, "float16", **asked)
    traffic = check_backward(plan_backward(problem, A100, algorithm)).traffic
    assert traffic["dK"].write_bytes == traffic["dV"].write_bytes == 50 * 32 * 2
    assert not any(each.read_bytes for each in traffic.values())


@pytest.mark.parametrize("d", [wide(1), 8, wide(17)])
def test_narrow_heads(d: int) -> None:
    """Padding is most of what narrow heads sum."""
    check_backward(plan_backward(Problem(1, 2, 1, 34, 34, d, "float16", alignment=16 if d == 8 else 2), A100), v_mean=1.0)


@pytest.mark.parametrize(
    ("d", "device"), [wide(64, "T4"), wide(256, "T4"), wide(256, "A100-40GB"), wide(64, "H100-SXM"), wide(64, "RTX 4090")]
)
def test_every_generation_compiles_and_agrees(device: str, d: int) -> None:
    check_backward(plan_backward(Problem(1, 2, 2, 130, 150, d, "float16", causal=True), Device.named(device)))


@pytest.mark.wide
@pytest.mark.parametrize(("algorithm", "dtype"), [*product(ALGORITHMS, ["float16", "bfloat16", "float32"])])
@sweep(1, 2)
def test_random_problems(algorithm: str, dtype: str, data: st.DataObject) -> None:
    """In the wide suite eighty; as many again are sparse or packed, or have sinks."""
    tiling = data.draw(st.sampled_from([None, (16, 16), (32, 48)]))
    device = Device.named(data.draw(st.sampled_from(["A100-40GB", "H100-SXM"])))
    # In ordinary FMAs, and fa1 in one thread block a head, long ones take long to execute.
    most = 150 if dtype != "float32" else 40 if algorithm == "fa1" else 60
    for problem in data.draw(any_problems(dtype, 1, longest(tiling, most))):
        v_mean, schedule_seed = data.draw(st.sampled_from([0.0, 1.0])), data.draw(orders(problem))
        check_backward(plan_backward(problem, device, algorithm, tiling), data.draw(st.integers(0, 99)), v_mean, schedule_seed)
