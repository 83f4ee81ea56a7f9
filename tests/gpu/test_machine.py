"""The PTX machine beside a chip: what its opcode tests and galleries launch runs on both, from the same PTX.

The tests are those of tests/test_ptx_*.py, run again with `replay.launch` in place of the machine's own: each launch in which the
machine finds no fault is repeated on the chip, its memory compared bit for bit, and the chip's results left for the test to judge.
"""

from __future__ import annotations

import faulthandler
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import replay
import test_ptx_harness
from chip import choose
from test_ptx_harness import apply

from cupyflash import Device
from cupyflash.sim.ptx import Module

MODULES = choose(
    (
        "control",
        "convert",
        "copy",
        "floating",
        "functions",
        "gallery",
        "gallery_tensor",
        "integer",
        "kernels",
        "memory",
        "structures",
        "warp",
    ),
    ("integer", "copy", "structures"),
)
# Tests whose kernels are wrong on purpose: where the machine is not shown the fault, a chip might hang in it.
WRONG_KERNELS = ("test_fault_is_found", "deadlock", "trap", "stop", "misaligned", "out_of_bounds", "never")
# A kernel that hangs ends the process after so many seconds; pytest-xdist goes on with another.
PATIENCE = choose(120, 3600)

for module in MODULES:
    for name, member in vars(importlib.import_module(f"test_ptx_{module}")).items():
        if name.startswith("test_") and not any(word in name for word in WRONG_KERNELS):
            globals()[f"test_{module}_{name.removeprefix('test_')}"] = member


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.fixture(autouse=True)
def _on_both(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(Module, "launch", replay.launch)
    replay.repeated.clear()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    request.node.user_properties.append(("launches on the chip", len(replay.repeated)))


@pytest.fixture
def _for_this_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX by hand is for sm_80; a T4 has less, and can run what these tests have all the same."""
    major, minor = min(Device.current().compute_capability, (8, 0))
    monkeypatch.setattr(test_ptx_harness, "HEAD", test_ptx_harness.HEAD.replace("sm_80", f"sm_{major}{minor}"))


@pytest.mark.usefixtures("_for_this_chip")
def test_a_launch_is_repeated_and_a_difference_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is wrong in one bit of one element."""
    x = np.arange(100, dtype=np.uint32)
    (d,) = apply("add.u32 %d0, %a0, 7;", [x], [np.uint32])
    assert (d == x + 7).all() and len(replay.repeated) == 1
    right = replay.MACHINE

    def wrong(self: Module, kernel: Any, grid: Any, block: Any, args: Any, **options: Any) -> Any:
        found = right(self, kernel, grid, block, args, **options)
        args[1][70] ^= 4
        return found

    monkeypatch.setattr(replay, "MACHINE", wrong)
    with pytest.raises(AssertionError, match=r"1 of 100 elements differ, the first at \(70,\)"):
        apply("add.u32 %d0, %a0, 7;", [x], [np.uint32])


@pytest.mark.usefixtures("_for_this_chip")
def test_what_is_rounded_otherwise_is_left_to_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chip's results, not the machine's, are what a test sees."""
    x, right = np.linspace(-3, 3, 50, dtype=np.float32), replay.MACHINE

    def wrong(self: Module, kernel: Any, grid: Any, block: Any, args: Any, **options: Any) -> Any:
        found = right(self, kernel, grid, block, args, **options)
        args[1][:] = 9
        return found

    monkeypatch.setattr(replay, "MACHINE", wrong)
    (d,) = apply("ex2.approx.f32 %d0, %a0;", [x], [np.float32])
    assert np.allclose(d, np.exp2(x), rtol=2.0**-21) and len(replay.repeated) == 1
