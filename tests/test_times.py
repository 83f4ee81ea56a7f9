"""`predict --time` and `--roofline`: the parts add up from the planner's clocks and the bytes, and are labelled a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash.multiprocessor import clock_rate
from cupyflash.schedules import Cache, plan_backward, plan_decode
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.sim import l2
from cupyflash.sim.cli import main
from cupyflash.sim.clock.measured import measured
from cupyflash.sim.clock.roofline import draw_roofline
from cupyflash.sim.clock.times import DRAM, times

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
    assert "Times by a model. What each part" in result.stdout and "busiest: tensor" in result.stdout
    assert "time" not in json.loads(predicted("--json").stdout)


def test_the_picture_has_the_ridges_and_the_points() -> None:
    found = times(plan(PROBLEM, A100))
    axes = draw_roofline(found, "a problem", "A100-40GB").axes[0]
    drawn = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if len(line.get_xdata()) == 1]
    for intensity in found.intensities.values():
        assert (intensity, found.rate) in drawn
    assert (found.ridge, 312e12) in drawn and found.ridge == pytest.approx(312e12 / 1555.2e9)


CASE = {"pass": "forward", "dtype": "float16", "d": 128, "n": 2048, "causal": False, "batch": 1, "heads": 4}

MEASURED = {"kind": "measurement", **CASE, "implementation": "fa2", "seconds": 1e-4, "spread_s": 1e-6, "right": True}


def results(folder: Path, *rows: dict[str, Any], device: str = "NVIDIA A100-SXM4-40GB", simulated: bool = False) -> None:
    """A benchmark's file of the 108 multiprocessors of an A100."""
    chip = {"name": device, "sm_count": 108}
    run = {"kind": "run", "device": chip, "date": "2026-12-01", "commit": "abc", "simulated": simulated}
    text = "".join(json.dumps(line) + "\n" for line in (run, *(MEASURED | row for row in rows)))
    (folder / f"{len(list(folder.iterdir()))}.jsonl").write_text(text + '{"kind": "cut o')


def test_what_was_measured_stands_beside_the_model_with_its_error(tmp_path: Path) -> None:
    size = "{}x{}".format(*(plan(PROBLEM, A100).tiling.used.block_rows, plan(PROBLEM, A100).block_cols))
    results(tmp_path, {"tile": size}, {"tile": "16x16"})
    told = json.loads(predicted("--time", "--json", "--results", str(tmp_path)).stdout)["time"]
    (row,) = told["measured"]
    assert row["model_error"] == told["seconds"] / 1e-4 - 1 and row["file"] == "0.jsonl" and row["date"] == "2026-12-01"
    text = " ".join(predicted("--time", "--results", str(tmp_path)).stdout.split())
    assert "measured: 100.0 microseconds (quartiles 1.0 apart) by fa2 on 2026-12-01, commit abc (0.jsonl)" in text
    assert f"the model's are {row['model_error']:+.0%} from that" in text


def test_only_right_figures_of_the_same_case_and_chip_are_taken(tmp_path: Path) -> None:
    wrong = ({"right": False}, {"invalid": "too fast"}, {"d": 64}, {"causal": True}, {"heads": 8}, {"implementation": "torch"})
    results(tmp_path, *wrong, {"pass": "backward"}, {"tile": "1x1"})
    results(tmp_path, {}, device="NVIDIA H200")
    results(tmp_path, {}, simulated=True)
    assert measured(plan(PROBLEM, A100), tmp_path) == ()
    results(tmp_path, {"exposed": True})
    (found,) = measured(plan(PROBLEM, A100), tmp_path)
    assert found.exposed and found.seconds == 1e-4
    assert measured(plan(PROBLEM.asking(sinks=True), A100), tmp_path) == () == measured(plan(PROBLEM, H100), tmp_path)
    told = predicted("--time", "--seqlen-k", "1024", "--results", str(tmp_path)).stdout
    assert "nothing was measured of this problem" in " ".join(told.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--results", "."), "--results is for --time and --roofline"),
        (("--algorithm", "fa1", "--time"), "times are modelled for the forward of 'fa2' and 'fa3'"),
        (("--algorithm", "fa1", "--backward", "--time"), "got 'fa1', backward"),
        (("--seqlen-k", "0", "--roofline", "picture.svg"), "this one computes nothing"),
        (("--roofline", "picture.txt"), "must end in .png or .svg or .pdf"),
    ],
)
def test_what_has_no_times_is_refused(options: tuple[str, ...], said: str) -> None:
    result = predicted(*options)
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_s_parts_are_those_of_all_its_tiles(deterministic: bool) -> None:
    """S, dP, dV, dK and dQ: five products a tile, or with dQ's own kernel four and three; each at the device's peak."""
    schedule = plan_backward(PROBLEM, A100, deterministic=deterministic)
    found, tiles = times(schedule), 4 * 2048 * 2048
    assert found.flops == 2 * tiles * 128 * (7 if deterministic else 5)
    assert found.busy["tensor"] == pytest.approx(found.flops / 312e12, rel=1e-3)
    assert found.busy["exp"] == pytest.approx((2 if deterministic else 1) * tiles / (16 * 108 * clock_rate(A100)))
    assert found.busy[DRAM] == found.behind.dram.total_bytes / 1555.2e9
    assert found.kernel > max(found.busy[part] for part in ("tensor", "shared", "exp", "issue"))


def test_two_launches_of_gradients_make_s_twice() -> None:
    wide = times(plan_backward(Problem(1, 1, 1, 512, 512, 256, "float16"), A100))
    assert wide.flops == 2 * 512 * 512 * 256 * (2 + 4)


def test_decoding_is_what_its_splits_were_chosen_by() -> None:
    told = json.loads(predicted("--decode", "--seqlen", "1", "--seqlen-k", "512", "--time", "--json").stdout)["time"]
    found = times(plan_decode(Problem(1, 32, 8, 1, 8192, 128, "float16", causal=True, padded=True), A100, Cache()))
    assert found.bound == DRAM and found.flops == 4 * 16 * 8 * 8192 * 128  # four query heads share a tile of 16 rows
    assert told["modelled"] and set(told["busy_seconds"]) == set(found.busy)


def test_what_masks_skip_takes_no_time() -> None:
    """A mask that keeps half of the keys leaves half of the tiles."""
    whole = plan(PROBLEM, A100)
    kept = np.arange(whole.row_blocks * whole.col_blocks).reshape(whole.row_blocks, -1) % 2 == 0
    less = times(plan(PROBLEM.asking(block_mask=kept), A100, "fa2", (whole.block_rows, whole.block_cols)))
    all_ = times(whole)
    assert less.flops == all_.flops / 2 and less.kernel == pytest.approx(all_.kernel / 2, rel=0.1)


def test_keys_that_there_are_not_take_no_time() -> None:
    """Key lengths, lengths of a cache, no keys at all."""
    short = PROBLEM.asking(padded=True, key_lengths=(64,))
    for algorithm, device in (("fa2", A100), ("fa3", H100)):
        whole, few = (times(plan(p, device, algorithm)) for p in (PROBLEM, short))
        assert few.kernel < whole.kernel / 4 and few.flops < whole.flops / 8
    caches = [Problem(1, 32, 8, 1, 8192, 128, "float16", causal=True, padded=True, key_lengths=(n,)) for n in (8192, 100, 0)]
    full, some, none = (times(plan_decode(p, A100, Cache(), num_splits=8)) for p in caches)
    assert full.kernel > 2 * some.kernel >= 2 * none.kernel > 0
    assert times(plan_backward(Problem(1, 1, 1, 64, 0, 64, "float16"), A100)).flops == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{}", "line 1: not a benchmark's record"),
        ("[]", "line 1: not a benchmark's record"),
        ("3", "line 1: not a benchmark's record"),
        ("", "line 1: not JSON: ''"),
        (json.dumps(MEASURED | {"seconds": 0}), "line 2: not a benchmark's measurement: ValueError('seconds = 0.0')"),
        (json.dumps(MEASURED | {"seconds": None}), "line 2: not a benchmark's measurement"),
        (json.dumps({"kind": "measurement", **CASE, "seconds": 1}), "line 2: not a benchmark's measurement: KeyError"),
    ],
)
def test_a_file_of_another_kind_is_told_with_its_line(line: str, said: str, tmp_path: Path) -> None:
    chip = {"name": "A100-40GB", "sm_count": 108}
    run = {"kind": "run", "device": chip, "date": "2026-12-01", "commit": "abc", "simulated": False}
    first = json.dumps(run) + "\n" if "measurement" in line else ""
    (tmp_path / "a.jsonl").write_text(f"{first}{line}\n" + '{"kind": "end"}\n')
    result = predicted("--time", "--results", str(tmp_path))
    assert result.exit_code == 2 and f"a.jsonl, {said}" in result.stderr and result.stderr.count("\n") == 1
