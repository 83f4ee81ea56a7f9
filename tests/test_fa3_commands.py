"""FlashAttention-3 through the commands, `warmup` and the benchmarks; `explain` is in test_explain.py."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import cupyflash
from cupyflash import Device, Problem, plan
from cupyflash.schedules import choose, choose_backward, fa3_tiles
from cupyflash.sim import theory
from cupyflash.sim.cli import main
from cupyflash.sim.estimate import seconds
from cupyflash.sim.pictures import plot
from cupyflash.sim.pictures.sweep import sweep
from suites import wide

H100, A100 = Device.named("H100-SXM"), Device.named("A100-40GB")
LONG = Problem(1, 16, 16, 4096, 4096, 64, "float16")
TINY = Problem(1, 1, 1, 16, 16, 8, "float16")
SHORT = Problem(1, 1, 1, 256, 256, 64, "float16", causal=True)
ON_H100 = ("--device", "H100-SXM")
WARMUP: Any = importlib.import_module("cupyflash.ahead")


def run(command: str, *options: str) -> Result:
    return CliRunner().invoke(main, [*command.split(), *options])


def report(command: str, *options: str) -> dict[str, Any]:
    result = run(command, *options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


PREDICT = "predict --seqlen 4096 --head-dim 64 --heads 16"


@pytest.mark.parametrize("options", [(), ("--causal", "--lse"), ("--key-lengths", "4000"), ("--window", "100,0", "--sinks")])
def test_predict_is_the_theory_and_the_replay(options: tuple[str, ...]) -> None:
    found = report(PREDICT, *ON_H100, "--algorithm", "fa3", *options)
    problem = Problem(**found["problem"])
    schedule = plan(problem, H100, "fa3", lse="--lse" in options)
    assert found["traffic"] == theory.traffic(schedule).as_dict() and found["replay_agrees"] is True
    kernel = schedule.kernels()[-1]
    assert found["peak_sram_bytes"] == kernel.shared_bytes


def test_auto_is_what_attention_chooses() -> None:
    for options, problem in ((PREDICT, LONG), ("predict --seqlen 16 --head-dim 8", TINY)):
        assert report(options, *ON_H100)["algorithm"] == choose(problem, H100).algorithm
        assert report(options)["algorithm"] == "fa2"
    assert (choose(LONG, H100).algorithm, choose(TINY, H100).algorithm) == ("fa3", "fa2")
    # Blocks that are asked for are fa2's.
    assert report(PREDICT, *ON_H100, "--tiling", "128x64")["algorithm"] == "fa2"
    assert report(PREDICT, *ON_H100, "--backward")["algorithm"] == choose_backward(LONG, H100).algorithm == "fa3"
    assert report("sweep --over seqlen --to 128 --algorithm auto --tiling fitted --heads 16", *ON_H100)["algorithm"] == "fa3"


def test_blocks_that_are_asked_for_can_be_checked_by_lists_too() -> None:
    with cupyflash.simulated_device("H100-SXM"), pytest.raises(ValueError, match="tiling must be"):
        q = importlib.import_module("numpy").zeros((16, 64), "float16")
        cupyflash.attention(q, q, q, tiling=[128, 64])  # type: ignore[arg-type]


def test_predict_has_fa3_beside_the_others_where_it_may_run() -> None:
    beside = report(PREDICT, *ON_H100)["algorithms"]
    assert list(beside) == ["fa3", "fa2", "fa1", "standard", "standard_ideal"]
    for algorithm in ("fa3", "fa2"):
        alone = report(PREDICT, *ON_H100, "--algorithm", algorithm)
        assert beside[algorithm]["total_bytes"] == sum(alone["traffic"]["total"].values())
        assert beside[algorithm]["block_rows"] == alone["tiling"]["used"]["block_rows"]
    waves, why = ("--score", "s + sin(s)"), "fa3 does not run this: the kernel has no stack, and the score function's sin takes one"
    assert report(PREDICT, *ON_H100, *waves)["algorithms"]["fa3"] == {"refused": why}
    assert why in " ".join(run(PREDICT, *ON_H100, *waves).stdout.split())
    shown = " ".join(run(PREDICT, *ON_H100).stdout.split())
    assert "FlashAttention-3 (--algorithm fa3) 192 x 128" in shown and "FlashAttention-2 and 3 read K and V" in shown


def test_predict_elsewhere_has_one_line_of_it() -> None:
    for device in ("A100-40GB", "B200"):
        assert "fa3" not in report(PREDICT, "--device", device)["algorithms"]
        lines = [line for line in run(PREDICT, "--device", device).stdout.splitlines() if "fa3" in line or "-3" in line]
        assert lines == ["FlashAttention-3 (fa3) needs compute capability 9.0"]


def test_the_backward_s_commands_are_of_what_a_hopper_runs() -> None:
    found = report(PREDICT, *ON_H100, "--backward")
    assert found["algorithm"] == "fa3" and list(found["algorithms"])[:2] == ["fa3", "fa2"]
    other = report(PREDICT, *ON_H100, "--backward", "--algorithm", "fa2")
    assert other["algorithms"]["fa2"]["total_bytes"] == found["algorithms"]["fa2"]["total_bytes"]
    assert report(PREDICT, *ON_H100, "--backward", "--score", "2 * s")["algorithm"] == "fa3"
    assert report(PREDICT, *ON_H100, "--backward", "--score", "2 * s", "--bias", "--head-dim", "80")["algorithm"] == "fa2"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("predict --seqlen 64 --head-dim 64 --algorithm fa3", "compute capability 9.0's, and A100-40GB has 8.0"),
        ("predict --seqlen 64 --head-dim 64 --algorithm fa3 --backward", "compute capability 9.0's, and A100-40GB has 8.0"),
        ("verify --algorithm fa3", "compute capability 9.0's"),
        ("inspect --algorithm fa3 --device B200", "compute capability 9.0's, and B200 has 10.0"),
        ("sweep --over sram --algorithm fa3", "compute capability 9.0's"),
        ("demo --algorithm fa3", "compute capability 9.0's"),
        ("demo --algorithm standard", "--algorithm"),
        ("verify --algorithm fa3 --device H100-SXM --dtype float32", "of half types, and this is float32"),
        ("verify --algorithm fa3 --device H100-SXM --tiling 64x64", "blocks of 128 or 192 rows"),
        ("verify --algorithm fa3 --device H100-SXM --seqlen 16384 --heads 8", "estimated to take"),
    ],
)
def test_what_it_does_not_run_is_refused_in_one_line(command: str, says: str) -> None:
    refused = run(command)
    assert refused.exit_code == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1
    assert says in refused.stderr


def test_a_sweep_goes_on_where_blocks_fit() -> None:
    options = "--over sram --algorithm fa3 --tiling fitted --from 16KB --to 227KB --points 8"
    found = report(f"sweep {options}", *ON_H100)
    assert found["algorithm"] == "fa3" and found["skipped"] and found["points"][-1]["block_rows"] == 192
    assert "does not fit H100-SXM" in found["skipped"][0]["reason"]
    problem = replace(LONG, heads=1, kv_heads=1)
    (point,) = sweep(problem, H100, "seqlen", [4096], "fa3", None).points
    assert point.total_bytes == theory.traffic(plan(problem, H100, "fa3")).total_bytes


def test_the_picture_has_it_where_it_runs() -> None:
    assert plot.series(LONG, A100) == plot.SERIES
    assert plot.series(replace(LONG, dtype="float32", alignment=16), H100) == plot.SERIES
    assert [algorithm for _, algorithm, *_ in plot.series(LONG, H100)] == ["standard", "fa1", "fa1", "fa2", "fa3"]


def test_an_estimate_grows_with_what_is_computed() -> None:
    def estimated(problem: Problem, seeded: bool = False) -> float:
        return seconds(plan(problem, H100, "fa3"), seeded=seeded)

    assert 0.01 < estimated(SHORT) < estimated(replace(SHORT, heads=8, kv_heads=8)) < estimated(LONG)
    assert estimated(SHORT) < estimated(SHORT, seeded=True)
    assert 1.5 < estimated(replace(LONG, heads=32, kv_heads=32)) / estimated(LONG) < 2.5


@pytest.mark.parametrize("varlen", [False, True])
def test_warmup_takes_what_auto_chooses_between(varlen: bool) -> None:
    def warmed(device: Device, dtype: str, *more: Any) -> set[tuple[str, int]]:
        problem = Problem(1, 1, 1, 1, 1, 64, dtype, packed=varlen)
        schedules = WARMUP._schedules(problem, device, *(more or ("auto", None)))
        return {(schedule.algorithm, schedule.tiling.used.block_rows) for schedule in schedules}

    fa2 = {("fa2", 16), ("fa2", 64), ("fa2", 128)}
    assert warmed(H100, "float16") == {("fa3", 192), *fa2}
    assert warmed(H100, "float32") == warmed(A100, "float16") == warmed(H100, "float16", "fa2", None) == fa2
    assert warmed(H100, "float16", "auto", (64, 32)) == {("fa2", 64)}
    if not varlen:
        assert warmed(H100, "float16", "fa3", None) == {("fa3", 192)}


def test_the_benchmark_times_it_on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    forward, cases = importlib.import_module("forward"), importlib.import_module("cases")
    case = cases.Case("float16", 128, 4096, True, 4, 16)
    timed = dict(forward.others(H100, case))
    assert list(timed) == ["fa3", "fa1", "standard"]
    assert timed["fa3"]["tile"] == "128x128" and timed["fa3"]["model_clocks"] > 0 and timed["fa3"]["model_bound"] == "tensor"
    for device, other in ((A100, case), (H100, replace(case, dtype="float32"))):
        assert list(dict(forward.others(device, other))) == ["fa1", "standard"]
    assert "fa3_forward" in {kernel.name for kernel in forward.kernels(H100, case)}


def test_the_tiles_in_the_documents_are_those_that_are_planned() -> None:
    text = (Path(__file__).parents[1] / "docs" / "kernels.md").read_text().split("**Tiles**")[1]
    kinds: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"window": (100, 0)}, {"packed": True})
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert [int(d) for d, _ in rows] == [64, 96, 128, 192, 256]
    for d, cells in rows:
        for kind, cell in zip(kinds, cells.split(" | "), strict=True):
            config = fa3_tiles.choose(Problem(1, 1, 1, 4096, 4096, int(d), "float16", **kind), H100).config
            assert cell == f"{config.team.block_rows} x {config.block_cols}, {config.stages}", (d, kind)


EXECUTED = "--head-dim", "64", *ON_H100, "--algorithm", "fa3"


@pytest.mark.wide
@pytest.mark.parametrize("options", [["--seed", "3"], ["--causal", "--lse", "--key-lengths", "150,0", "--batch", "2"]])
def test_verify_executes_it(options: list[str]) -> None:
    pytest.importorskip("cupy")
    found = report("verify --seqlen 200 --heads 2 --kv-heads 1", *EXECUTED, *options)
    assert found["good"] and found["algorithm"] == "fa3" and found["findings"] == []
    assert found["traffic"]["theory"] == found["traffic"]["replay"] == found["traffic"]["executed"]


@pytest.mark.parametrize("options", [wide(["--seqlen", "200", "--heads", "2"])])
def test_the_demo_shows_it_beside_standard_attention(options: list[str]) -> None:
    pytest.importorskip("cupy")
    result = run("demo --algorithm fa3", *ON_H100, *options)
    assert result.exit_code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    for told in (
        "FlashAttention-3's tiling",
        "standard / FlashAttention-3:",
        "Theorem 2, of FlashAttention (fa1), to leading order",
    ):
        assert told in shown
    assert shown.count("theory == replay == executed, tensor by tensor: yes") == 2 and "FlashAttention-3 " in shown


@pytest.mark.wide
def test_inspect_tells_registers_at_launch_and_of_the_roles() -> None:
    pytest.importorskip("cupy")
    found = report("inspect --head-dim 64 --algorithm fa3", *ON_H100)
    (row,) = found["kernels"]
    assert (row["registers"], row["threads"], row["blocks_per_sm"], row["spill_bytes"]) == (128, 512, 1, 0)
    assert {role: each["threads"] for role, each in found["roles"].items()} == {"producer": 128, "consumers": 384}
    assert "which setmaxnreg then moves between the roles" in " ".join(
        run("inspect --head-dim 64 --algorithm fa3", *ON_H100).stdout.split()
    )
