"""Moves by a schedule's plan are the executed ones; the sizes that a page offers; a reason for each move."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from typing import Any

import pytest
from test_trace import SCHEDULES
from test_trace_decode import CALLS

from cupyflash import Device, Problem, plan
from cupyflash.schedules import TileSchedule
from cupyflash.sim import theory
from cupyflash.sim.trace import Trace, trace
from cupyflash.sim.trace.choices import choices
from cupyflash.sim.trace.lines import REASONS, reasons_of
from cupyflash.sim.trace.planned import planned

ALGORITHMS = ("standard", "fa1", "fa2")
PROBLEMS: dict[str, dict[str, Any]] = {"causal": {"causal": True}, "all": {}, "window": {"window": (20, 5)}}


def schedule_of(algorithm: str, n: tuple[int, int] = (70, 90), d: int = 32, sram: str = "8KB", **more: Any) -> TileSchedule:
    return plan(Problem(1, 1, 1, *n, d, "float16", **more), Device.named("A100-40GB", sram=sram), algorithm)


def summed(made: Trace) -> Counter[Any]:
    """The moves without their order and their lines."""
    return Counter((m.launch, m.block, m.tensor, m.write, m.slab, m.rows, m.cols, m.nbytes) for m in made.moves)


@pytest.mark.wide
@pytest.mark.parametrize("options", PROBLEMS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_planned_moves_are_the_executed_ones(algorithm: str, options: str) -> None:
    schedule = schedule_of(algorithm, **PROBLEMS[options])
    made, executed = planned(schedule), trace(schedule)
    assert summed(made) == summed(executed) and made.tensors == executed.tensors and made.kernels == executed.kernels
    assert Counter(tile for m in made.moves for tile in m.scores) == Counter(tile for m in executed.moves for tile in m.scores)
    blocks = [[(m.launch, m.block) for m in each.moves] for each in (made, executed)]
    assert blocks[0] == blocks[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_planned_moves_sum_to_the_closed_form(algorithm: str) -> None:
    for n, d, sram in (((64, 64), 16, "8KB"), ((33, 100), 24, "16KB"), ((128, 1), 64, "32KB"), ((200, 200), 64, "12KB")):
        for options in PROBLEMS.values():
            schedule = schedule_of(algorithm, n, d, sram, **options)
            assert planned(schedule).agrees and planned(schedule).traffic == theory.traffic(schedule)


@pytest.mark.parametrize("options", [{"mask": True}, {"sinks": True}, {"padded": True, "key_lengths": (30,)}])
def test_schedules_with_other_arrays_are_not_planned(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="beside Q, K and V"):
        planned(schedule_of("fa2", **options))


def test_several_heads_are_not_planned() -> None:
    with pytest.raises(ValueError, match="one head"):
        planned(plan(Problem(1, 2, 2, 64, 64, 32, "float16"), Device.named("A100-40GB", sram="8KB"), "fa1"))


def offered(problem: Problem, sram: str = "8KB") -> dict[str, Any] | None:
    names = ("standard", "fa1", "fa2")
    device = Device.named("A100-40GB", sram=sram)
    return choices(problem, device, names, lambda number, *asked: plan(*asked, names[number]), lambda p: f"N {p.seqlen_q}")


@pytest.mark.wide
def test_other_sizes_are_each_what_plan_makes_of_them() -> None:
    found = offered(Problem(1, 1, 1, 48, 48, 32, "float16", causal=True))
    assert found is not None and found["chosen"] == {"N": 48, "d": 32, "M": 8192}
    assert found["axes"] == {"N": [24, 48, 96], "d": [16, 32, 64], "M": [4096, 8192, 16384, 32768]}
    reports = json.loads(gzip.decompress(base64.b64decode(found["packed"])))
    assert len(reports) + len(found["refused"]) == 35 and not reports.keys() & found["refused"].keys()
    for key, told in reports.items():
        n, d, sram = map(int, key.split(","))
        for algorithm, player in zip(ALGORITHMS, told["players"], strict=True):
            schedule = schedule_of(algorithm, (n, n), d, str(sram), causal=True)
            assert player["total_bytes"] == theory.traffic(schedule).total_bytes == sum(move[9] for move in player["moves"])
            assert (player["block_rows"], player["block_cols"]) == (schedule.block_rows, schedule.block_cols)
    for key, why in found["refused"].items():
        n, d, sram = map(int, key.split(","))
        assert "SRAM" in why and d == 64 and sram == 4096


@pytest.mark.parametrize("options", [{"heads": 2}, {"kept": (48, 64)}, {"mask": True}])
def test_what_is_not_planned_has_no_other_sizes(options: dict[str, Any]) -> None:
    heads, (rows, cols) = options.pop("heads", 1), options.pop("kept", (48, 48))
    assert offered(Problem(1, heads, heads, rows, cols, 32, "float16", **options)) is None


def test_each_move_has_a_reason() -> None:
    used = set()
    queued = {"a queue": lambda: plan(Problem(1, 8, 8, 4096, 4096, 128, "float16", causal=True), Device.named("H100-SXM"), "fa3")}
    for name, make in {**SCHEDULES, **CALLS, **queued}.items():
        for walk in make().walks():
            told = reasons_of(walk.kernel)
            for move in walk.moves:
                assert move.tensor.name in told["write" if move.write else "read"], (name, walk.kernel, move)
            used.add(walk.kernel)
    assert set(REASONS) - {"every"} <= used  # none is of a kernel that there is not
    clauses = [why for each in REASONS.values() for side in ("read", "write") for why in each.get(side, {}).values()]
    assert all("." not in why and why[0].islower() for why in clauses)
