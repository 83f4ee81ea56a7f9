"""Everything here needs a GPU, and is skipped, saying so, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupyflash import Device

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        Device.current()
    except (ImportError, RuntimeError) as error:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {error}"))
