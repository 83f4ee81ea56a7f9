"""docs/ring_traffic.md: its table is what the commands tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cupyflash.sim.cli import main

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "ring_traffic.md").read_text()


def table() -> Iterator[str]:
    found = CliRunner().invoke(main, ["sweep", "--over", "ranks", "--device", "H100-SXM", "--json"])
    for row in json.loads(found.stdout)["points"]:
        if row["ranks"] in (1, 2, 4, 8, 16, 64, 256, 1024):
            sizes = f"{row['received_bytes'] / 1e6:,.0f} | {row['hbm_bytes'] / 1e9:,.1f} | {row['memory_bytes'] / 1e6:,.0f}"
            times = f"{row['step_seconds'] * 1e6:,.0f} | {row['transfer_seconds'] * 1e6:,.0f} | {row['seconds'] * 1e3:,.1f}"
            shares = " | ".join(f"{row[name]:.1%}" for name in ("efficiency_by_count", "efficiency", "other_efficiency"))
            yield f"| {row['ranks']:,} | {row['steps']:,} | {sizes} | {times} | {shares} |"


@pytest.mark.wide
def test_the_table_is_the_sweep() -> None:
    shown = PAGE.split("<!-- ranks -->\n")[1].split("\n<!-- end -->")[0].splitlines()[2:]
    assert shown == list(table())
