"""What the README shows is what happens: its Python runs, and its values are the values that it claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import cupyflash

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_examples_without_a_gpu_run_and_claim_the_truth() -> None:
    names: dict[str, object] = {"cupyflash": cupyflash}
    claims = 0
    for block in BLOCKS:
        if "import cupy," in block:
            continue
        exec(compile(block, "README.md", "exec"), names)
        for expression, value in re.findall(r"^(\S.*?)  # (True|False|\(.*\)|[\d_]+)$", block, re.MULTILINE):
            assert eval(expression, names) == eval(value), expression
            claims += 1
    assert claims >= 2


def test_the_example_for_a_gpu_runs_on_one() -> None:
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"needs a GPU: {error}")
    exec(compile(BLOCKS[0], "README.md", "exec"), {})


@pytest.mark.wide
def test_the_demo_output_is_the_demo_s() -> None:
    """Every count; errors may differ in the last digit between machines' NumPy."""
    from click.testing import CliRunner

    from cupyflash.sim.cli import main

    shown = README.split("```text\n")[1].split("```")[0]
    printed = CliRunner().invoke(main, ["demo"]).stdout
    counted = [line for line in shown.splitlines() if "e-0" not in line]
    assert [line for line in printed.splitlines() if "e-0" not in line] == counted


def test_the_tiles_beside_the_paper_s_are_those_that_are_planned() -> None:
    device = cupyflash.Device.named("A100-40GB")
    shown = re.findall(r"^\| (the paper's formula|`algorithm=\"(\w+)\"`.*?) \| (\d+) \| (\d+) \|", README, re.MULTILINE)
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
