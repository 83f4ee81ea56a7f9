"""`cupyflash sweep`: every point is the theory's, 10,000 of them are quick, and the picture is drawn."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem, plan
from cupyflash.schedules import fa2_tiles
from cupyflash.sim import theory
from cupyflash.sim.cli import main
from cupyflash.sim.cli.sweep import COLUMNS
from cupyflash.sim.pictures import sweep as sweeping
from cupyflash.sim.pictures.plot import NOTE, draw
from cupyflash.sim.pictures.sweep import AXES, at, default_range, spaced, sweep
from cupyflash.sim.theory import forms, forward

A100 = Device.named("A100-40GB")
PROBLEM = Problem(1, 1, 1, 4096, 4096, 64, "float16")


def swept(*options: str) -> Result:
    return CliRunner().invoke(main, ["sweep", *options])


def report(*options: str) -> dict[str, Any]:
    result = swept(*options, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("over", AXES)
@pytest.mark.parametrize("algorithm", ["fa1", "fa2", "standard"])
@pytest.mark.parametrize("tiling", ["paper", "fitted"])
def test_every_point_is_the_theory_s(over: str, algorithm: str, tiling: str) -> None:
    options = ("--algorithm", algorithm, "--tiling", tiling, "--dtype", "float32", "--causal", "--heads", "3")
    points = report("--over", over, *([] if over == "seqlen" else ["--seqlen", "2048"]), *options)["points"]
    assert len(points) > 5
    for point in points:
        problem, device = Problem(1, 3, 3, 2048, 2048, 64, "float32", causal=True), A100
        value = point[COLUMNS[over]]
        if over == "sram":
            device = A100.with_sram(value)
        elif over == "seqlen":
            problem = replace(problem, seqlen_q=value, seqlen_k=value)
        elif over == "head-dim":
            problem = Problem(1, 3, 3, 2048, 2048, value, "float32", causal=True)
        else:
            device = A100.with_sram(value * 4 * 64 * 4)
        size = "paper" if tiling == "paper" else None
        if (algorithm, tiling) == ("fa2", "fitted"):  # the tile that long rows have
            long = plan(replace(problem, seqlen_q=1 << 22, seqlen_k=1 << 22), device).tiling.used
            size = long.block_rows, long.block_cols
        schedule = plan(problem, device, algorithm, size)
        form, ideal = theory.traffic(schedule), theory.standard_ideal(problem).total_bytes
        N, d, M = problem.seqlen_q, problem.head_dim, device.sram_per_block // 4
        assert (point["read_bytes"], point["write_bytes"]) == (form.read_bytes, form.write_bytes)
        assert point["total_bytes"] == form.total_bytes and point["ratio_to_standard"] == form.total_bytes / ideal
        assert (point["sram_elements"], point["block_rows"], point["block_cols"]) == (M, schedule.block_rows, schedule.block_cols)
        assert point["standard_ideal_bytes"] == ideal
        assert point["theorem2_elements"] == pytest.approx(3 * theory.theorem2_flash(N, d, M))


def test_writing_l_is_counted() -> None:
    without, with_l = (report("--over", "seqlen", "--from", "64", "--to", "64", *more)["points"][0] for more in ([], ["--lse"]))
    assert with_l["write_bytes"] - without["write_bytes"] == 64 * 4


def test_block_cols_is_the_sram_that_the_formula_asks_for_it() -> None:
    points = report("--over", "block-cols", "--from", "1", "--to", "300", "--linear", "--points", "300")["points"]
    assert [point["block_cols"] for point in points] == list(range(1, 301))
    assert all(point["block_rows"] == min(point["block_cols"], 64) for point in points)


def test_the_slopes_that_the_picture_shows() -> None:
    for over, slope in (("sram", -1), ("seqlen", 2), ("head-dim", 2), ("block-cols", -1)):
        problem = replace(PROBLEM, seqlen_q=65536, seqlen_k=65536)
        first, last, points, log = {"seqlen": (8192, 1 << 20, 15, True)}.get(over) or default_range(problem, over)
        if over in ("sram", "block-cols"):
            first, last = first * 32, last // 16  # away from the rounding of Bc, and from what is linear in N
        found = sweep(problem, A100, over, spaced(first, last, points, log)).points
        fit = np.polyfit(np.log([p.value for p in found]), np.log([p.total_bytes for p in found]), 1)
        assert fit[0] == pytest.approx(slope, abs=0.08), over


class Calls:
    """A function that counts how often it is called."""

    def __init__(self, function: Any) -> None:
        self.function, self.count = function, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        return self.function(*arguments, **named)


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Calls:
    calls = Calls(getattr(module, name))
    monkeypatch.setattr(module, name, calls)
    return calls


@pytest.mark.parametrize("over", ["sram", "seqlen"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_thousand_points_are_planned_and_counted_once_each(over: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan, one closed form, and the sums that this takes: the same for the first point and the last."""
    planned, formed = counted(monkeypatch, sweeping, "plan"), counted(monkeypatch, theory, "traffic")
    visited, summed = counted(monkeypatch, forward, "visits_of"), counted(monkeypatch, forms, "clipped_sum")
    first, last, _, _ = default_range(PROBLEM, over)
    values = spaced(first, last, 1000, log=False)
    found = sweep(replace(PROBLEM, causal=causal), A100, over, values)
    assert len(found.points) == 1000
    assert (planned.count, formed.count, visited.count, summed.count) == (1000, 1000, 1000, 2000)


def test_long_rows_tile_is_found_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of FlashAttention-2's tiles looks at each of them once a sweep over lengths, once a point over the SRAM."""
    problem = replace(PROBLEM, head_dim=72, head_dim_v=72)  # of no other test, which would have left its plan behind
    every, looked = len(list(fa2_tiles.configs(problem, None))), counted(monkeypatch, fa2_tiles, "candidate")
    assert len(sweep(problem, A100, "seqlen", range(100, 600, 10), "fa2", None).points) == 50
    assert looked.count == every
    sweep(problem, A100, "sram", [65536, 98304, 131072], "fa2", None)
    assert looked.count == 4 * every


@pytest.mark.parametrize("over", AXES)
def test_the_default_picture_speaks_for_flash_attention_2(over: str) -> None:
    """It moves less than standard attention wherever the SRAM holds more than tiles of 16 rows, as every GPU's does."""
    points = sweep(PROBLEM, A100, over, spaced(*default_range(PROBLEM, over)), "fa2", None).points
    least = min(device.sram_per_block for device in Device.catalogue()) // PROBLEM.itemsize
    assert all(point.block_rows > 16 for point in points if point.sram_elements >= least)
    below = [point.ratio is not None and point.ratio < 1 for point in points if point.block_rows > 16]
    assert len(below) > 10 and all(below)


def test_a_tile_that_is_asked_for_is_taken() -> None:
    points = report("--over", "seqlen", "--algorithm", "fa2", "--tiling", "16x64")["points"]
    assert {(point["block_rows"], point["block_cols"]) for point in points} == {(16, 64)}


def test_csv_and_table_show_what_json_says(tmp_path: Path) -> None:
    options = ("--over", "seqlen", "--from", "100", "--to", "400", "--points", "4", "--linear", "--sram", "100KB")
    points = report(*options)["points"]
    rows = list(csv.DictReader(io.StringIO(swept(*options, "--format", "csv").stdout)))
    assert [{name: float(value) for name, value in row.items()} for row in rows] == points
    assert [int(row["seqlen"]) for row in rows] == [100, 200, 300, 400]
    text = swept(*options).stdout
    for word in (f"{points[-1]['total_bytes']:,}", f"{points[-1]['ratio_to_standard']:.3f}", "N^2 d^2 / M", "M = 102,400 bytes"):
        assert word in text
    result = swept(*options, "--format", "csv", "--output", str(tmp_path / "points.csv"))
    assert result.exit_code == 0 and result.stdout == "" and "wrote" in result.stderr
    assert (tmp_path / "points.csv").read_text() == swept(*options, "--format", "csv").stdout


def test_points_where_nothing_fits_are_skipped_with_a_note() -> None:
    options = ("--over", "sram", "--from", "4KB", "--to", "16KB", "--points", "4", "--linear", "--tiling", "fitted")
    result = swept(*options)
    assert result.exit_code == 0 and "skipped 1 of 4 points, the first at 4,096" in result.stderr and "6,912 bytes" in result.stderr
    found = report(*options)
    assert [point["sram_bytes"] for point in found["points"]] == [8192, 12288, 16384]
    assert [skipped["value"] for skipped in found["skipped"]] == [4096]


def test_keys_follow_the_queries_unless_they_were_given() -> None:
    problem, _ = at(PROBLEM, A100, "seqlen", 100)
    assert (problem.seqlen_q, problem.seqlen_k) == (100, 100)
    problem, _ = at(replace(PROBLEM, seqlen_k=77), A100, "seqlen", 100)
    assert (problem.seqlen_q, problem.seqlen_k) == (100, 77)
    problem, _ = at(replace(PROBLEM, head_dim_v=32), A100, "head-dim", 80)
    assert (problem.head_dim, problem.head_dim_v) == (80, 32)


def test_sizes_that_were_given_do_not_follow_though_they_are_the_default() -> None:
    for given, axis in (("--seqlen-k", "seqlen"), ("--head-dim-v", "head-dim")):
        size = "4096" if axis == "seqlen" else "64"
        following, fixed = (
            report("--over", axis, "--from", "16", "--to", "16", *more)["points"][0] for more in ([], [given, size])
        )
        assert fixed["total_bytes"] > following["total_bytes"]
        kept = report("--over", axis, "--from", "16", "--to", "16", given, size)["problem"]
        assert (kept["seqlen_k"], kept["head_dim_v"]) == (4096, 64)


def test_a_swept_size_is_not_in_the_title() -> None:
    shown = swept("--over", "seqlen", "--from", "100", "--to", "100").stdout
    assert "4,096" not in shown and "batch 1, heads 1, d 64, float16" in shown
    assert "heads 1, Nk 77, d 64" in swept("--over", "seqlen", "--to", "100", "--seqlen-k", "77").stdout
    assert "Nk 4,096, float16" in swept("--over", "head-dim").stdout
    found = report("--over", "head-dim")["problem"]
    assert found["head_dim"] is found["head_dim_v"] is None and found["seqlen_q"] == 4096


def test_what_is_the_same_at_every_point_is_told_once() -> None:
    shown = swept("--over", "sram").stdout
    assert shown.count("136,314,880") == 1 and "the same at every point: standard 136,314,880" in shown


@pytest.mark.parametrize("over", AXES)
def test_the_picture_has_every_line_and_says_what_a_second_reading_costs(over: str) -> None:
    pytest.importorskip("matplotlib")
    figure = draw(PROBLEM, A100, over, spaced(*default_range(PROBLEM, over)[:2], 4, log=True))
    (axes,), (legend,) = figure.axes, figure.legends
    labels = [line.get_label() for line in axes.lines if not str(line.get_label()).startswith("_")]
    assert labels == [text.get_text() for text in legend.get_texts()] and len(labels) == 6
    assert legend.get_title().get_text() == NOTE and "L2" in NOTE and "again for each row block" in NOTE
    least = next(line for line in axes.lines if line.get_label() == "Q, K, V and O once")
    for line in axes.lines:
        if str(line.get_label()).startswith(("standard", "FlashAttention")):
            assert min(np.array(line.get_ydata())) >= min(np.array(least.get_ydata()))


def test_the_picture_of_wide_heads_is_of_those_that_run_them() -> None:
    """Heads wider than 256 are fa2's alone, and the theorem's slope is of FlashAttention's bytes."""
    pytest.importorskip("matplotlib")
    axes = draw(Problem(1, 1, 1, 256, 256, 512, "float16"), A100, "seqlen", [256, 512]).axes[0]
    labels = [str(line.get_label()) for line in axes.lines]
    assert any(label.startswith("FlashAttention-2") for label in labels) and not any("standard" in label for label in labels)


@pytest.mark.parametrize(
    ("over", "more"),
    [
        ("sram", []),
        *[pytest.param(over, [], marks=pytest.mark.wide) for over in AXES if over != "sram"],
        *[pytest.param(over, ["--causal", "--dtype", "float32", "--points", "200"], marks=pytest.mark.wide) for over in AXES],
    ],
)
def test_the_picture_is_drawn(over: str, more: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    result = swept("--over", over, "--format", "csv", "--plot", str(path), *more)
    assert result.exit_code == 0, result.stderr
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000


@pytest.mark.wide
@pytest.mark.parametrize(
    ("given", "written", "begins"), [("a.svg", "a.svg", b"<?xml"), ("b", "b.png", b"\x89PNG"), ("c.PDF", "c.PDF", b"%PDF")]
)
def test_the_picture_is_where_it_is_said_to_be(given: str, written: str, begins: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = swept("--over", "sram", "--points", "2", "--plot", str(tmp_path / given))
    assert result.exit_code == 0 and result.stderr == f"wrote {tmp_path / written}\n"
    assert [path.name for path in tmp_path.iterdir()] == [written] and (tmp_path / written).read_bytes().startswith(begins)


@pytest.mark.parametrize("file", ["", ".", "..", "folder/", "folder.png", "folder", "a.txt", "none/a.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_any_work(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules["cupyflash.sim.pictures.sweep"], "sweep", lambda *arguments, **more: pytest.fail("work was done")
    )
    monkeypatch.chdir(tmp_path)
    Path("folder.png").mkdir()
    result = swept("--over", "sram", "--plot", file)
    assert result.exit_code == 2 and "--plot" in result.stderr and result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = swept("--over", "sram", "--plot", str(tmp_path / "sweep.png"))
    assert result.exit_code == 2 and "pip install 'cupyflash[plot]'" in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--over"),
        (["--over", "time"], "time"),
        (["--over", "sram", "--from", "much"], "much"),
        (["--over", "seqlen", "--from", "-3"], "--from"),
        (["--over", "seqlen", "--from", "0"], "a positive value"),
        (["--over", "seqlen", "--from", "100", "--to", "50"], "from a positive value up, got 100 to 50"),
        (["--over", "head-dim", "--to", "300"], "head_dim must be between 1 and 256"),
        (["--over", "block-cols", "--tiling", "16x16"], "--tiling can be paper or fitted"),
        (["--over", "sram", "--to", "4KB", "--tiling", "fitted"], "needs at least 6,912 bytes"),
        (["--over", "sram", "--plot", "/nowhere/at/all.png"], "/nowhere"),
        (["--over", "sram", "--plot", "sweep.txt"], "txt"),
        (["--over", "sram", "--output", "/nowhere/at/all.csv"], "/nowhere"),
        (["--over", "sram", "--output", ""], "--output"),
        (["--over", "sram", "--json", "--format", "csv"], "--json is --format json"),
        (["--over", "sram", "--format", "table", "--json"], "--json is --format json"),
        (["--over", "sram", "--sram", "64KB"], "without --sram"),
        (["--over", "block-cols", "--sram", "64KB"], "without --sram"),
        (["--over", "seqlen", "--seqlen", "4096"], "without --seqlen"),
        (["--over", "head-dim", "--head-dim", "64"], "without --head-dim"),
        (["--over", "sram", "--points", "1000000000"], "--points"),
    ],
)
def test_wrong_input_is_one_line(options: list[str], says: str) -> None:
    if "--plot" in options:
        pytest.importorskip("matplotlib")
    result = swept(*options)
    assert result.exit_code == 2 and says in result.stderr
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1 and result.stdout == ""
