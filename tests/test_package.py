"""The package as it is installed: what its import brings, what it does without CuPy, what it says then."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import cupyflash
from cupyflash import kernels_cu


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=3600).stdout


IMPORT = """
import json, sys
import numpy
before, calls = set(sys.modules), 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
import cupyflash
sys.setprofile(None)
print(json.dumps([sorted(set(sys.modules) - before), calls]))
"""


def test_an_import_beyond_numpy_is_small() -> None:
    """What a user waits for, in counts: which modules come along, and how many functions run (18,000 when this was written)."""
    modules, calls = json.loads(run(IMPORT))
    others = {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert "cupyflash" in others and others <= {"cupyflash", "ml_dtypes"}
    assert not [name for name in modules if name.startswith("cupyflash.sim.")]
    assert not {"asyncio", "concurrent", "email", "http", "multiprocessing", "subprocess", "unittest"} & set(modules)
    assert 1000 < calls < 100_000


def test_what_needs_no_compiler_imports_no_cupy_and_runs_without_it() -> None:
    run(
        "import sys; sys.modules['cupy'] = None\n"
        "import cupyflash\n"
        "from cupyflash.sim import theory, replay\n"
        "s = cupyflash.plan(cupyflash.Problem(1, 1, 1, 64, 64, 64, 'float16'), cupyflash.Device.named('T4'))\n"
        "assert theory.traffic(s) == replay(s)\n"
        "from click.testing import CliRunner; from cupyflash.sim.cli import main\n"
        "assert CliRunner().invoke(main, ['predict', '--seqlen', '64', '--head-dim', '64']).exit_code == 0\n"
        "assert CliRunner().invoke(main, ['devices']).exit_code == 0\n"
    )


def test_what_needs_a_compiler_says_what_to_install() -> None:
    out = run(
        "import sys; sys.modules['cupy'] = None; sys.modules['cupy.cuda'] = None; import numpy, cupyflash\n"
        "q = numpy.zeros((16, 64), numpy.float16)\n"
        "try: cupyflash.attention(q, q, q)\n"
        "except ImportError as error: print(error)\n"
    )
    assert "pip install 'cupyflash[sim]'" in out


def test_kernels_are_beside_the_package() -> None:
    assert "fa1_forward" in kernels_cu.source("fa1_forward.cu")
    assert len(kernels_cu.fingerprint()) == 16


@pytest.mark.parametrize("name", cupyflash.__all__)
def test_public_names_exist_and_are_documented(name: str) -> None:
    assert getattr(cupyflash, name).__doc__
