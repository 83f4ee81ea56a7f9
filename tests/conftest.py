"""What the tests share: random problems as hypothesis strategies, fixed seeds in CI."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("wide", max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("CUPYFLASH_TEST_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's settings for the simulated device must not reach the tests."""
    for name in ("CUPYFLASH_DEVICE", "CUPYFLASH_MAX_SECONDS"):
        monkeypatch.delenv(name, raising=False)
