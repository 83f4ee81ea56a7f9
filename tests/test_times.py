"""`predict --time` and `--roofline`: the parts add up from the planner's clocks and the bytes, and are labelled a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash.multiprocessor import clock_rate
from cupyflash.schedules import plan_backward
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.sim import l2
from cupyflash.sim.cli import main
from cupyflash.sim.roofline import draw_roofline
from cupyflash.sim.times import DRAM, times

A100, H100 = (Device.named(name) for name in ("A100-40GB", "H100-SXM"))
PROBLEM = Problem(1, 4, 4, 2048, 2048, 128, "float16")


def predicted(*options: str) -> Result:
    return CliRunner().invoke(main, ["predict", "--seqlen", "2048", "--head-dim", "128", "--heads", "4", *options])


def test_the_parts_are_the_planner_s_clocks_and_the_bytes() -> None:
    schedule = plan(PROBLEM, A100)
    assert isinstance(schedule, Fa2Schedule)
    found, behind, best = times(schedule), l2.run(schedule), schedule.candidate
    tiles = 4 * schedule.row_blocks * schedule.col_blocks
    clocks = A100.sm_count * clock_rate(A100)
    for part, of_tile in best.parts:
        if part != "L2":
            assert found.busy[part] == pytest.approx(tiles * of_tile / clocks)
    assert found.busy["L2"] == pytest.approx(behind.asked.total_bytes / (64 * clocks))
    assert found.busy[DRAM] == behind.dram.total_bytes / 1555.2e9
    assert found.kernel == pytest.approx(best.clocks / clock_rate(A100)) and found.seconds == found.kernel
    assert found.waves == pytest.approx(4 * schedule.row_blocks / (108 * best.config.blocks)) == pytest.approx(best.waves)
    assert found.flops == 4 * tiles * schedule.block_rows * schedule.block_cols * 128
    assert found.busy["tensor"] == pytest.approx(found.flops / 312e12, rel=1e-3) and found.rate < 312e12
    assert found.intensities[DRAM] == found.flops / behind.dram.total_bytes


def test_the_tail_is_what_is_left_empty() -> None:
    """One wave of as many thread blocks as there is place for leaves none; one thread block more leaves nearly half."""
    schedule = plan(Problem(1, 1, 1, 128 * 64, 1024, 64, "float16"), A100, "fa2", (64, 64))
    assert isinstance(schedule, Fa2Schedule)
    places = schedule.candidate.config.blocks
    full = replace(schedule, device=replace(A100, sm_count=128 // places))
    assert places > 1 and 128 % places == 0 and times(full).idle == 0 and times(full).waves == 1
    longer = replace(full, problem=replace(full.problem, seqlen_q=128 * 64 + 1))
    assert times(longer).idle == pytest.approx(1 - 129 / 256)


def test_dram_binds_where_it_takes_longer_than_the_kernel() -> None:
    found = times(plan(PROBLEM, replace(A100, hbm_bandwidth=1e9)))
    assert found.bound == DRAM and found.seconds == found.busy[DRAM] > found.kernel
    unknown = times(plan(PROBLEM, replace(A100, hbm_bandwidth=None)))
    assert DRAM not in unknown.busy and unknown.ridge is None
    with pytest.raises(ValueError, match="are not known"):
        draw_roofline(unknown, "a problem", "a device")


def test_predict_tells_them_and_draws_the_roofline(tmp_path: Path) -> None:
    told = json.loads(predicted("--time", "--json").stdout)["time"]
    found = times(plan(PROBLEM, A100))
    assert told["busy_seconds"] == found.busy and told["seconds"] == found.seconds and told["modelled"] is True
    file = tmp_path / "roofline.svg"
    result = predicted("--time", "--roofline", str(file), "--algorithm", "fa3", "--device", "H100-SXM")
    assert result.exit_code == 0 and file.stat().st_size > 1000
    assert "Times by a model; nothing here is measured" in result.stdout and "busiest: tensor" in result.stdout
    assert "time" not in json.loads(predicted("--json").stdout)


def test_the_picture_has_the_ridges_and_the_points() -> None:
    found = times(plan(PROBLEM, A100))
    axes = draw_roofline(found, "a problem", "A100-40GB").axes[0]
    drawn = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if len(line.get_xdata()) == 1]
    for intensity in found.intensities.values():
        assert (intensity, found.rate) in drawn
    assert (found.ridge, 312e12) in drawn and found.ridge == pytest.approx(312e12 / 1555.2e9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--backward", "--time"), "--time and --roofline cannot go with --backward"),
        (("--algorithm", "fa1", "--time"), "times are modelled of the forward of 'fa2' and 'fa3', got 'fa1'"),
        (("--seqlen-k", "0", "--roofline", "picture.svg"), "nothing is computed here"),
        (("--roofline", "picture.txt"), "must end in .png or .svg or .pdf"),
    ],
)
def test_what_has_no_times_is_refused(options: tuple[str, ...], said: str) -> None:
    result = predicted(*options)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1


def test_a_backward_schedule_has_no_times() -> None:
    with pytest.raises(ValueError, match="got 'fa2' \\(Fa2BackwardSchedule\\)"):
        times(plan_backward(PROBLEM, H100))
