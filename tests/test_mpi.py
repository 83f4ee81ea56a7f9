"""Attention over MPI: real processes under the mpiexec that the test extra brings. They spin while they wait, so they are few."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import compiled
from cupyflash.distributed.communicator import as_communicator
from suites import wide

TESTS = Path(__file__).parent
MPIEXEC = Path(sys.executable).parent / "mpiexec"


def check_ranks(ranks: int, *arguments: str) -> None:
    """mpi_ranks.py under mpiexec."""
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, str(TESTS / "mpi_ranks.py"), *map(str, compiled.shared), *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout == f"{ranks} ranks: all is well\n", ran.stdout + ran.stderr


@pytest.mark.parametrize("ranks", [2, wide(3)])
def test_ranks_of_mpi(ranks: int) -> None:
    check_ranks(ranks)


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
