"""The benchmark of several devices: what it tells where no GPU is, and what it writes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from cupyflash import Device
from cupyflash.sim.clock.known import PLANNER, own_error
from cupyflash.sim.clock.measured import read

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
ring, report = (importlib.import_module(name) for name in ("ring", "report"))
H100 = Device.named("H100-SXM")


def test_what_is_planned_is_told_for_a_device_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert ring.main(["--plan", "H100-SXM", "--quick", "--ranks", "8", "--link", "400Gb/s"]) == 0
    head, known, columns, *rows = capsys.readouterr().out.splitlines()
    assert all(str(own_error(PLANNER, each)) in known for each in ("forward", "backward"))
    assert head.startswith("H100-SXM, 50 GB/s each way") and columns == ring.PLAN_HEAD
    assert len(rows) == len(ring.cases(True)) * len(ring.WAYS) * 2
    found = ring.model(ring.cases(True)[0], 8, ring.WAYS[0], H100, 50e9, False)
    assert rows[0] == ring.plan_line(found, ring.WAYS[0]) and rows[0].split()[-2:] == [
        f"{share:.1%}" for share in (found.efficiency_by_count, found.efficiency)
    ]


@pytest.mark.wide
def test_a_dry_run_writes_every_way_and_pass(tmp_path: Path) -> None:
    path = tmp_path / "dry.jsonl"
    assert ring.main(["--dry-run", "--out", str(path)]) == 0
    head, *lines, end = read(path)
    assert head["kind"] == "run" and head["simulated"] and (head["ranks"], head["transport"]) == (2, "threads")
    assert end["kind"] == "end" and [line["kind"] for line in lines] == ["ring"] * 6
    assert {(line["way"], line["pass"]) for line in lines} == {
        (str(way), name) for way in ring.WAYS for name in ("forward", "backward")
    }
    assert all(line["right"] and line["apart"] < 2e-3 and line["seconds"] > 0 for line in lines)
    assert len([line for line in report.summary(read(path)) if "of ideal" in line]) == 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--link", "fast"], "--link: a rate above zero such as 450GB/s"),
        (["--ranks", "2"], "--ranks is for --plan"),
    ],
)
def test_wrong_input_is_told(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ring.main(options)
    assert ended.value.code == 2 and says in capsys.readouterr().err
