"""Options with a number for each head: in every algorithm that takes one the three counts and the numbers, and seeded faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_backward
from hypothesis import strategies as st

import mutants
from cupyflash import Device, Problem, plan
from cupyflash.request.options import OPTIONS, VECTORS
from cupyflash.schedules import BackwardSchedule, TileSchedule, plan_backward
from cupyflash.sim import execute, replay
from cupyflash.sim.execution import BackwardExecution, Execution
from cupyflash.sim.numbers.yardstick import draw_gradient, drawn, measure
from cupyflash.sim.verification import verify
from mutants import Mutant
from problems import any_problems, longest
from suites import sample, sweep

A100 = Device.named("A100-40GB")
PASSES = [*("fa1", "fa2", "standard"), *(f"{name} backward" for name in ("fa1", "fa2", "standard"))]
TAKEN = [(name, by) for name in VECTORS for by in PASSES if by in OPTIONS[name].takers]
DTYPES = ("float16", "bfloat16", "float32")


def planned(problem: Problem, by: str, tiling: Any = None, **more: Any) -> TileSchedule:
    """The schedule of an algorithm, or of its backward."""
    algorithm, _, backward = by.partition(" ")
    return (plan_backward if backward else plan)(problem, A100, algorithm, tiling, **more)


@pytest.mark.parametrize(
    ("name", "algorithm", "dtype"),
    sample(
        [(*each, dtype) for each in TAKEN for dtype in DTYPES if "backward" not in each[1]],
        [(name, "fa2", "float16") for name in VECTORS],
    ),
)
@sweep(1, 2)
def test_random_problems(name: str, algorithm: str, dtype: str, data: st.DataObject) -> None:
    """Theory == replay == execution, numbers by the 2x rule, nothing found; beside every other mask."""
    lse, tiling = data.draw(st.booleans()), data.draw(st.sampled_from([None, (16, 16), (48, 32)]))
    for problem in data.draw(any_problems(dtype, most=longest(tiling, 80))):
        schedule = planned(problem.asking(**{name: True}), algorithm, tiling, lse=lse)
        assert verify(schedule).good
        assert replay(schedule) == replay(schedule, literal=True)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "by", "dtype", "deterministic"),
    [
        (*each, dtype, deterministic)
        for each in TAKEN
        if "backward" in each[1]
        for dtype, deterministic in (("float16", False), ("float16", True), ("float32", each[1] == "fa2 backward"))
        if not deterministic or each[1] == "fa2 backward"
    ],
)
@sweep(1, 2)
def test_random_gradients(name: str, by: str, dtype: str, deterministic: bool, data: st.DataObject) -> None:
    for problem in data.draw(any_problems(dtype, 1, most=60)):
        found = verify(planned(problem.asking(**{name: True}), by, deterministic=deterministic))
        assert found.good and (name != "sinks" or all("dsinks" in numbers for numbers in found.numbers))


# By option, and the passes that find them.
MUTANTS = {
    ("sinks", ("fa2", "fa1")): {
        "the keys keep their weights": Mutant(
            "sinks.cuh", "return (of_keys < sink ? smaller : 1.f) / (1.f + smaller);", "return 1.f;", "numbers"
        ),
        "L has no sink": Mutant("sinks.cuh", "L = fmaxf(of_keys, sink) + log1pf(smaller);", "", "numbers"),
        "every lane reads the sink": Mutant("sinks.cuh", "wanted && threadIdx.x % LANES == 0 ?", "true ?", "bytes"),
        "the head's neighbour": Mutant("sinks.cuh", "p.sinks + head", "p.sinks + head + 1", "out of bounds", ("ld.global.f32",)),
    },
    ("sinks", ("fa2 backward",)): {
        "dsinks has the wrong sign": Mutant("fa2_backward_rows.cuh", "-sum * sink_weight(", "sum * sink_weight(", "numbers"),
    },
}
CASES = {
    f"{fault}, {by}": (option, by, mutant)
    for (option, passes), faults in MUTANTS.items()
    for by in passes
    for fault, mutant in faults.items()
}


def forward_or_backward(schedule: TileSchedule, seed: int | None) -> tuple[Execution | BackwardExecution, bool]:
    inputs = drawn(schedule.problem, v_mean=1.0)
    if not isinstance(schedule, BackwardSchedule):
        execution = execute(schedule, *inputs.qkv, **inputs.beside, seed=seed)
        return execution, all(each.good for each in measure(execution.out, execution.lse, inputs).values())
    made, numbers = test_backward.backward_with_errors(schedule, inputs, draw_gradient(schedule.problem), seed)
    return made, all(each.good for each in numbers.values())


@pytest.mark.parametrize("case", sample(CASES, {"the keys keep their weights, fa2"}))
def test_mutant(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    option, by, mutant = CASES[case]
    schedule = planned(Problem(1, 2, 2, 40, 50, 16, "float16", **{option: True}), by, **({} if "backward" in by else {"lse": True}))
    mutants.check_mutant(mutant, schedule, forward_or_backward, tmp_path, monkeypatch)
