"""The demo: the main job end to end, as a newcomer runs it."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cupyflash.sim.cli import main
from suites import wide


@pytest.mark.parametrize("options", [wide([]), wide(["--device", "T4", "--sram", "16KB"])])
def test_demo_in_json(options: list[str]) -> None:
    result = CliRunner().invoke(main, ["demo", "--seqlen", "200", "--heads", "2", "--json", *options])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    for algorithm in ("standard", "fa1"):
        part = report[algorithm]
        assert part["agree"] and part["theory"] == part["replay"] == part["executed"]
        assert part["findings"] == [] and 0 < part["error"] < 5e-3
    backward = report["backward"]
    assert backward["agree"] and backward["theory"] == backward["replay"] == backward["executed"]
    assert backward["findings"] == [] and set(backward["errors"]) == {"dQ", "dK", "dV"}
    assert all(0 < error < 1e-2 for error in backward["errors"].values())
    assert backward["ratio_to_ideal"] == backward["standard_ideal_bytes"] / part_total(backward)
    assert report["ratio"] == part_total(report["standard"]) / part_total(report["fa1"])
    assert {"paper", "fitted", "used"} == set(report["fa1"]["tiling"])
    assert "executing" in result.stderr


def part_total(part: dict[str, dict[str, dict[str, int]]]) -> int:
    return sum(part["executed"]["total"].values())


def test_demo_as_text_shows_the_three_witnesses() -> None:
    result = CliRunner().invoke(main, ["demo", "--seqlen", "128", "--heads", "1", "--device", "T4", "--sram", "16KB"])
    assert result.exit_code == 0, result.stderr
    for word in ("theory", "replay", "executed", "O_acc", "paper", "fitted", "used", "float64", "yes", "dQ", "gradients"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("options", "says"), [(["--seqlen", "0"], "--seqlen"), (["--heads", "-1"], "--heads"), (["--seqlen", "99999"], "estimated")]
)
def test_what_the_demo_cannot_do_is_refused_before_any_work(options: list[str], says: str) -> None:
    result = CliRunner().invoke(main, ["demo", *options])
    assert result.exit_code == 2 and result.stdout == ""
    assert says in result.stderr and "executing" not in result.stderr and isinstance(result.exception, SystemExit)
