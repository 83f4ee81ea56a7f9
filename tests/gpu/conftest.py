"""Everything here needs a GPU, and is skipped, saying so, where there is none; or runs on the stand-in (CUPYFLASH_STAND_IN=1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyflash import Device

HERE = Path(__file__).parent
STAND_IN = os.environ.get("CUPYFLASH_STAND_IN")

if STAND_IN:
    import stand_in_cupy

    stand_in_cupy.install(STAND_IN)

# What killed this process' GPU context, after which every call fails.
_dead: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    try:
        Device.current()
    except (ImportError, RuntimeError) as error:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {error}"))


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
