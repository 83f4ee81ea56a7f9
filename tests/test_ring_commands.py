"""`predict --ranks` and `sweep --over ranks`: what they say is what counts and models say."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cupyflash import Device, Problem
from cupyflash.sim.cli import main
from cupyflash.sim.cli.over_ranks import COLUMNS
from cupyflash.sim.clock.ring_model import RingModel, ring_of
from cupyflash.sim.pictures.plot_ring import WAYS, draw_ranks
from cupyflash.sim.theory.ring import link_bytes

H100 = Device.named("H100-SXM")
SIZES = ("--seqlen", "16384", "--head-dim", "128", "--heads", "8", "--kv-heads", "2", "--causal", "--device", "H100-SXM")
PROBLEM = Problem(1, 8, 2, 16384, 16384, 128, "float16", causal=True)


def run(command: str, *options: str) -> Result:
    return CliRunner().invoke(main, [*command.split(), *options])


def report(command: str, *options: str) -> dict[str, Any]:
    result = run(command, *options, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "layout", "gather", "backward", "link"),
    [
        ((), "zigzag", False, False, 450e9),
        (("--backward", "--layout", "contiguous", "--link", "400Gb/s"), "contiguous", False, True, 50e9),
        (("--gather-kv", "--link", "1.5 TB/s", "--backward"), "zigzag", True, True, 1.5e12),
    ],
)
def test_a_prediction_is_what_is_counted(options: tuple[str, ...], layout: str, gather: bool, backward: bool, link: float) -> None:
    found = report("predict --ranks 4", *SIZES, *options)
    model = RingModel(ring_of(PROBLEM, 4, layout, gather), PROBLEM, H100, link, backward)
    carried = link_bytes(model.ring, PROBLEM, backward=backward)
    assert [row["rank"] for row in found["by_rank"]] == [0, 1, 2, 3]
    for rank, row in enumerate(found["by_rank"]):
        assert row["link"] == {
            name: {"sent_bytes": each.sent[rank], "received_bytes": each.received[rank]} for name, each in carried.items()
        }
        assert row["hbm"] == model.hbm(rank).as_dict() and row["scores"] == 8 * model.work[rank]
        assert row["memory_bytes"] == sum(row["memory"].values())
    assert found["link_bytes_a_second"] == link and found["seconds"] == sum(step["seconds"] for step in found["timeline"])
    assert found["seconds"] == model.seconds and found["efficiency"] == model.efficiency
    assert found["beside"]["gather_kv"] is not gather and (found["hidden_from"] is None) is gather
    faster = gather if found["seconds"] < found["beside"]["seconds"] else not gather
    assert found["better"]["way"] == ("gather" if faster else "ring")


def test_the_text_says_what_the_json_says() -> None:
    found, shown = report("predict --ranks 3", *SIZES), " ".join(run("predict --ranks 3", *SIZES).stdout.split())
    for row in found["by_rank"]:
        assert f"{row['rank']} {row['scores']:,} {row['calls']:,} {row['link']['K']['sent_bytes'] * 2:,}" in shown
    assert f"N = P b F / (f w B) = {found['hidden_from']['length']:,.0f} on" in shown
    assert f"{found['efficiency_by_count']:.1%} by count" in shown and f"better: {found['better']['way']}" in shown
    assert "of K and V" in shown and "all steps:" in shown and "3 ranks, zigzag, 3 steps" in shown


@pytest.mark.parametrize(
    "options",
    [
        ("--ranks", "1"),
        ("--ranks", "5", "--seqlen", "0"),
        ("--ranks", "40", "--seqlen", "100"),
        ("--ranks", "4", "--window", "100,-", "--alibi"),
        ("--ranks", "9", "--seqlen-k", "300", "--sinks", "--backward", "--gather-kv"),
    ],
)
def test_what_is_small_or_empty_is_told_too(options: tuple[str, ...]) -> None:
    sizes = [] if "--seqlen" in options else ["--seqlen", "2000"]
    for kind in ((), ("--json",)):
        result = run("predict --head-dim 64 --causal", *sizes, *options, *kind)
        assert result.exit_code == 0, result.output
        assert result.stdout and "nan" not in result.stdout.lower() and "inf " not in result.stdout


@pytest.mark.wide
def test_many_ranks_are_told_by_some() -> None:
    command = "predict --ranks 1024 --seqlen 1048576 --head-dim 64 --causal"
    found = report(command)
    assert [row["rank"] for row in found["by_rank"]] == [0, 1, 512, 1022, 1023] and len(found["timeline"]) == 1024
    assert len(run(command).stdout.splitlines()) < 40


def test_a_sweep_is_the_predictions_of_each_number_of_ranks() -> None:
    found = report("sweep --over ranks --to 16 --points 5", *SIZES)
    assert found["over"] == "ranks" and [point["ranks"] for point in found["points"]] == [1, 2, 4, 8, 16]
    one = report("predict --ranks 8", *SIZES)
    point, row = found["points"][3], one["by_rank"][one["busiest_rank"]]
    assert point["sent_bytes"] == sum(each["sent_bytes"] for each in row["link"].values())
    assert point["hbm_bytes"] == sum(row["hbm"]["total"].values()) and point["memory_bytes"] == row["memory_bytes"]
    assert point["seconds"] == one["seconds"] and point["other_efficiency"] == one["beside"]["efficiency"]
    rows = list(csv.DictReader(io.StringIO(run("sweep --over ranks --to 16 --points 5 --format csv", *SIZES).stdout)))
    assert [row["sent_bytes"] for row in rows] == [str(each["sent_bytes"]) for each in found["points"]]
    shown = run("sweep --over ranks --to 16 --points 5", *SIZES).stdout
    assert all(column.heading in shown for column in COLUMNS.values()) and f"{point['received_bytes']:,}" in shown
    own = report("sweep --over ranks --from 2 --to 2")["problem"]  # sizes of its own where none are given
    assert (own["seqlen_q"], own["heads"], own["kv_heads"], own["head_dim"], own["causal"]) == (131072, 32, 8, 128, True)


def test_the_picture_has_the_counts() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_ranks(PROBLEM, H100, 450e9, [1, 2, 4], "a title")
    share, counts = ({str(line.get_label()): list(line.get_ydata()) for line in axes.lines} for axes in figure.axes)
    models = [RingModel(ring_of(PROBLEM, ranks), PROBLEM, H100, 450e9) for ranks in (1, 2, 4)]
    assert share["ring, zigzag"] == [100 * (model.efficiency or 0) for model in models]
    assert counts["HBM, ring, zigzag"] == [model.hbm(model.busiest).total_bytes for model in models]
    assert counts["received, whichever way"] == [model.link_bytes[model.busiest][1] for model in models[1:]]
    assert all(label in share for label, *_ in WAYS)


@pytest.mark.wide
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "ranks.png"
    assert run("sweep --over ranks --to 4 --plot", str(path), *SIZES).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("predict --ranks 0", "--ranks"),
        ("predict --ranks 2 --link 0GB/s", "a rate above zero such as 450GB/s, or in bits 400Gb/s, got '0GB/s'"),
        ("predict --ranks 2 --link 450", "--link"),
        ("predict --ranks 2 --layout striped", "--layout"),
        ("predict --ranks 2 --tiling 64x64", "--tiling cannot go with --ranks"),
        ("predict --ranks 2 --algorithm fa2", "--algorithm cannot go with --ranks: each rank's calls are planned as `attention`"),
        ("predict --ranks 2 --key-lengths 9", "--key-lengths cannot go with --ranks"),
        ("predict --ranks 2 --results .", "--results are of one device: they cannot go with --ranks"),
        ("predict --ranks 2 --bias", "--bias cannot go with --ranks"),
        ("predict --ranks 2 --decode", "--decode cannot go with --ranks"),
        ("predict --ranks 2 --sram 1KB", "SRAM"),
        ("predict --link 450GB/s", "--link is for --ranks"),
        ("predict --gather-kv", "--gather-kv is for --ranks"),
        ("sweep --over sram --layout zigzag", "--layout is for --over ranks"),
        ("sweep --over ranks --from 0", "ranks from 1 to 65,536, got 0"),
        ("sweep --over ranks --mask", "--mask cannot go with --over ranks"),
        ("sweep --over ranks --tiling paper", "--tiling cannot go with --over ranks"),
    ],
)
def test_wrong_input_is_one_line(command: str, says: str) -> None:
    refused = run(command, *(["--seqlen", "64", "--head-dim", "64"] if command.startswith("predict") else []))
    assert refused.exit_code == 2 and refused.stdout == "" and refused.stderr.count("\n") == 1
    assert says in refused.stderr and refused.stderr.startswith("Error: ")


@pytest.mark.parametrize("command", ["predict --ranks 40 --seqlen 65536 --head-dim 64 --backward", "sweep --over ranks --to 8"])
def test_nothing_is_wider_than_the_terminal(command: str) -> None:
    for columns in (50, 80, 160):
        result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, command.split())
        assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= columns
