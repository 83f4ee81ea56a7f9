"""What the tests share: fixed seeds, and an environment that is the tests' own.

CUPYFLASH_TEST_EXAMPLES=10 tries ten times as many random problems, and other ones each time.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, Phase, settings

# Loaded kernels are kept, a million objects and more: to go through them as often as Python does by itself takes long.
gc.set_threshold(100_000, 50, 100)

more = os.environ.get("CUPYFLASH_TEST_EXAMPLES")
# A failing problem is shown as it was found: each smaller one to be tried would be compiled anew, for minutes.
phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
settings.register_profile(
    "cupyflash", derandomize=more is None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck)
)
settings.load_profile("cupyflash")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A test that asks for bfloat16 (or 8-bit floats) is skipped where the package that has them is not installed."""
    try:
        return (yield)
    except ImportError as error:
        if error.name != "ml_dtypes":
            raise
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's settings for the simulated device, and the width of a terminal, must not reach the tests."""
    for name in ("CUPYFLASH_DEVICE", "CUPYFLASH_MAX_SECONDS", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
