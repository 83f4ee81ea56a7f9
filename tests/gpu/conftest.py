"""Everything here needs a GPU, and is skipped, saying so, where there is none; or runs on the stand-in (CUPYFLASH_STAND_IN=1)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from cupyflash import Device

if device := os.environ.get("CUPYFLASH_STAND_IN"):
    import stand_in_cupy

    stand_in_cupy.install(device)

# What killed this process' GPU context, after which every call fails.
_dead: list[str] = []


@cache
def _lack() -> str | None:
    """The reason why nothing here can run."""
    try:
        Device.current()
    except (ImportError, RuntimeError) as error:
        return f"needs a GPU: {error}"
    return None


class _Skipped(pytest.Item):
    def runtest(self) -> None:
        pytest.skip(_lack() or "")


class _WithoutAGpu(pytest.File):
    """A test file that is not even imported: one skipped item."""

    def collect(self) -> Iterable[pytest.Item]:
        return [_Skipped.from_parent(self, name="every test")]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.File | None:
    return _WithoutAGpu.from_parent(parent, path=module_path) if _lack() else None


@pytest.fixture(autouse=True)
def _what_the_gpu_can(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skips what this GPU cannot do, and has a test's asynchronous errors be its own."""
    import cupy

    if _dead:
        pytest.skip(f"{_dead[0]} ended this process' use of the GPU")
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    capability = Device.current().compute_capability
    if params.get("dtype") == "bfloat16" and capability < (8, 0):
        pytest.skip("bfloat16 needs compute capability 8.0, this GPU has {}.{}".format(*capability))
    yield
    try:
        cupy.cuda.Device().synchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        _dead.append(request.node.name)
        raise
