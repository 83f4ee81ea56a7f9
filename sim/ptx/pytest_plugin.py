"""A pytest plugin: tests of CuPy's raw kernels run without a GPU, and a kernel's faults are the test's.

    pytest -p cupyflash.sim.ptx.pytest_plugin  # or, in the root conftest.py: pytest_plugins = ["cupyflash.sim.ptx.pytest_plugin"]

A test that asks for the fixture `simulated_cupy` runs with the module `cupy` replaced (`device_names.simulated_cupy`). Its
kernels run to their end whatever they do; a test whose launches had findings fails, with each finding's line and text.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from .device_names import simulated_cupy as replaced
from .module import Launch
from .simulation import fault_text, simulation

_LAUNCHES = pytest.StashKey[list[Launch]]()


@pytest.fixture
def simulated_cupy(request: pytest.FixtureRequest) -> Iterator[list[Launch]]:
    """CuPy without a GPU for this test; the value is the list of its launches so far.

    Launches in a `ptx.simulation(findings=...)` of the test's own are not judged.
    """
    with replaced(), simulation(findings="keep") as launches:
        request.node.stash[_LAUNCHES] = launches
        yield launches


def _faults(item: pytest.Item) -> str:
    faulty = [launch.findings for launch in item.stash.get(_LAUNCHES, []) if launch.findings]
    return "\n".join(fault_text(findings[0].kernel, findings) for findings in faulty)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        yield
    except BaseException:
        if text := _faults(item):
            item.add_report_section("call", "PTX machine", text)
        raise
    if text := _faults(item):
        pytest.fail(text, pytrace=False)
