"""docs/triton.md: its blocks run as they stand, and its table shows the figures on record."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from snippets import ROOT, Block, pages

MARK, PAGE = "run by", "docs/triton.md"
LACK = "Triton or PyTorch is not installed: pip install 'cupyflash[triton]' and PyTorch's CPU build"


def here() -> list[Block]:
    return [block for block in pages()[PAGE] if block.marks.get(MARK) == "tests/test_triton_page.py"]


def run(folder: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "300"} | more
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.wide
def test_the_blocks_run_and_claim_the_truth(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason=LACK)
    pytest.importorskip("torch", reason=LACK)
    test, told, program, manager = here()
    pytest_of = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_double.py")
    (tmp_path / "test_double.py").write_text(test.text)
    assert run(tmp_path, *pytest_of).returncode == 0
    first, second = "tl.load(x + at, mask=at < n)", "tl.load(x + at, mask=at < n + 8)"
    assert test.text.count(first) == 1
    (tmp_path / "test_double.py").write_text(test.text.replace(first, second))
    failed = run(tmp_path, *pytest_of)
    assert failed.returncode == 1 and told.text.strip() in failed.stdout, failed.stdout
    kernel = test.text.partition("\n\ndef test")[0].replace('pytest_plugins = ["cupyflash.sim.ptx.pytest_plugin"]', "")
    made = "x, out = torch.rand(1000), torch.empty(1000)\n"
    (tmp_path / "manager.py").write_text(kernel + "\n\n" + made + manager.text + "assert torch.equal(out, 2 * x)\n")
    ran = run(tmp_path, sys.executable, "manager.py")
    assert ran.returncode == 0 and ran.stdout == "()\n", ran.stderr
    # The first command is test_triton.py's, where the package need not be installed; the second is run here.
    first, second = program.text.splitlines()
    assert first == "CUPYFLASH_TRITON=1 CUPYFLASH_DEVICE=H100-SXM python program.py"
    asks = 'x = torch.rand(1000, device="cuda")\nprint(x.device, torch.cuda.get_device_capability())\n'
    (tmp_path / "program.py").write_text(f"{kernel}\n\n{asks}")
    words = second.partition("#")[0].split()
    ran = run(tmp_path, sys.executable, *words[1:])
    assert words[0] == "python" and ran.stdout == "cuda:0 (8, 0)\n", ran.stderr


@pytest.mark.parametrize("program", ["", "packages.py"])
def test_a_table_has_the_figures_on_record(program: str) -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "triton_kernels" / program), "--table"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert shown.stdout.count("\n") > 5 and shown.stdout in (ROOT / PAGE).read_text(), shown.stdout + shown.stderr
