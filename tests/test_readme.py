"""The statements of the README and its tables are true; its blocks are tested by tests/test_snippets.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_example_runs_on_a_gpu() -> None:
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a GPU: {error}")
    exec(compile(BLOCKS[0].replace("import numpy as np", "import cupy as np"), "README.md", "exec"), {})


def test_every_command_is_there() -> None:
    from cupyflash.sim.cli import main

    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == set(main.commands)
    told = (ROOT / "docs" / "commands.md").read_text()
    assert all(f"`cupyflash {name}" in told for name in main.commands)


def test_the_tiles_beside_the_paper_s_are_those_that_are_planned() -> None:
    device, page = cupyflash.Device.named("A100-40GB"), (ROOT / "docs" / "calls.md").read_text()
    shown = re.findall(r"^\| (the paper's formula|`algorithm=\"(\w+)\"`.*?) \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    assert [algorithm for _, algorithm, *_ in shown] == ["", "fa1", "fa2"]
    problem = cupyflash.Problem(1, 1, 1, 1 << 20, 1 << 20, 64, "float16")
    for _, algorithm, rows, cols in shown:
        tiling = cupyflash.plan(problem, device, algorithm or "fa1").tiling
        size = tiling.used if algorithm else tiling.paper
        assert (size.block_rows, size.block_cols) == (int(rows), int(cols))
    assert device.sram_per_block == 166_912 and cupyflash.plan(problem, device).algorithm == "fa2"


def test_the_table_of_opcodes_is_the_code_s() -> None:
    from cupyflash.sim.ptx.__main__ import table

    assert (ROOT / "docs" / "opcodes.md").read_text() == table() + "\n"
