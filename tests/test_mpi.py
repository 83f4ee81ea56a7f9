"""Attention over MPI: real processes under the mpiexec that the test extra brings. They spin while they wait, so they are few."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compiled
from cupyflash.distributed.communicator import as_communicator

TESTS = Path(__file__).parent


def mpiexec() -> str:
    """The one beside this Python, which the test extra's wheel brings whether or not the PATH has it; else the PATH's."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return shutil.which("mpiexec", path=beside) or pytest.skip("needs mpiexec: pip install mpich, or an MPI of the system's")


def under_mpi(ranks: int, *arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """The exit status and output of Python with these arguments under mpiexec."""
    pytest.importorskip("mpi4py")
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # a container's user; Open MPI refuses it
    environment = os.environ | root | {"PYTHONPATH": paths}
    command = [mpiexec(), "-n", str(ranks), sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)


def check_ranks(ranks: int, *arguments: str) -> None:
    """mpi_ranks.py under mpiexec."""
    ran = under_mpi(ranks, str(TESTS / "mpi_ranks.py"), *map(str, compiled.shared), *arguments)
    assert ran.returncode == 0 and ran.stdout == f"{ranks} ranks: all is well\n", ran.stdout + ran.stderr


@pytest.mark.wide
def test_ranks_of_mpi() -> None:
    check_ranks(2)


@pytest.mark.wide
def test_the_example_of_a_long_context() -> None:
    """Two ranks, of which each has room for half of the text: the loss is one device's. With room for less it is refused."""
    examples = TESTS.parent / "examples"
    code = (
        f"import runpy, sys; from pathlib import Path; import compiled; compiled.share(Path({str(compiled.shared[0])!r}))\n"
        f"sys.path.append({str(examples)!r}); runpy.run_path({str(examples / 'long_context.py')!r}, run_name='__main__')"
    )
    length, steps = ["--length", "64", "--budget", "32"], ["--steps", "2", "--check"]
    ran = under_mpi(2, "-c", code, *length, *steps)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = [line.split() for line in ran.stdout.splitlines()]
    assert told[0][-5:] == ["64", "characters", "over", "2", "ranks"] and len(told) == 3
    assert all(line[3] == line[-1] or abs(float(line[3]) - float(line[-1])) < 1e-4 for line in told[1:])
    refused = under_mpi(1, "-c", code, *length)
    assert refused.returncode and "a rank has room for 32 characters, 64 over 1 would take 64 each" in refused.stderr


@pytest.mark.wide
@pytest.mark.parametrize("doing", ["computing", "waiting"])
def test_ctrl_c_in_one_rank_ends_all(doing: str, tmp_path: Path) -> None:
    """Rank 1 is interrupted while it computes, or waits for rank 0, which never comes."""
    said = tmp_path / "said"  # mpiexec may end before it has passed on what a rank says last
    code = (
        "import compiled, os, signal, sys, threading, time; from pathlib import Path\n"
        f"compiled.share(Path({str(compiled.shared[0])!r}))\n"
        "import numpy as np; from mpi4py import MPI; from cupyflash.distributed import ring_attention\n"
        "world, x = MPI.COMM_WORLD, np.ones((2, 64, 16), np.float16)\n"
        "ring_attention(x, x, x, world)\n"
        "if world.rank == 1:\n"
        f"    sys.stderr = open({str(said)!r}, 'w')\n"
        "    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        f"while {doing!r} == 'waiting' and world.rank == 0:\n"
        "    time.sleep(1)\n"
        "while True:\n"
        "    ring_attention(x, x, x, world)\n"
    )
    ran = under_mpi(2, "-c", code, seconds=60)
    assert ran.returncode == 130, ran
    assert "rank 1 of 2 is stopped by KeyboardInterrupt in the middle of a call over ranks" in said.read_text()


@pytest.mark.wide
def test_one_rank_and_intercommunicators() -> None:
    """A communicator of one process needs no mpiexec; one that joins two groups has no ranks of ours."""
    code = (
        "import numpy as np; from mpi4py import MPI; from cupyflash.distributed import shard, unshard\n"
        "x = np.arange(40.0).reshape(20, 2)\n"
        "assert np.array_equal(unshard(shard(x, MPI.COMM_SELF), MPI.COMM_SELF), x)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TESTS.parent)
    with pytest.raises(TypeError, match=r"comm must be an mpi4py\.MPI\.Comm"):
        as_communicator(object())
