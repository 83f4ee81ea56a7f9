"""A pytest plugin: tests of CuPy's raw kernels and of Triton's run without a GPU, and a test fails if its kernels have faults.

    pytest -p cupyflash.sim.ptx.pytest_plugin  # or, in the root conftest.py: pytest_plugins = ["cupyflash.sim.ptx.pytest_plugin"]

A test that asks for the fixture `simulated_cupy` runs with the module `cupy` replaced (`cupy_module.simulated_cupy`), one that
asks for `simulated_triton` with Triton's driver (`cupyflash.sim.triton`, for the device of CUPYFLASH_DEVICE). Its
kernels always run to their end; a test whose launches had findings fails, with each finding's line and text. In the
ini file, `cupyflash_suppressions` names files of findings to let pass, and `cupyflash_fail_on = error` lets warnings pass; the
summary lists the findings that were let pass, and the suppressions that let nothing pass.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import pytest

from .cupy_module import simulated_cupy as replaced
from .module import Launch
from .rawkernel import fault_text, simulation
from .state.findings import FAIL_ON, WARNING, Finding, Suppression, shorten, told

_LAUNCHES = pytest.StashKey[list[Launch]]()
_FATAL = pytest.StashKey[tuple[str, ...]]()
_ALLOWED = pytest.StashKey[Sequence[Suppression]]()
_PASSED, _USED, _IDLE = "cupyflash_passed", "cupyflash_suppression", "cupyflash_unmatched_suppression"
"""Properties of a test's report, so that they come from pytest-xdist's workers too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("cupyflash_suppressions", "Files of findings of the PTX machine to let pass.", type="paths", default=[])
    parser.addini("cupyflash_fail_on", f"The least severity that fails a test: {', '.join(FAIL_ON)}.", default=WARNING)


def pytest_configure(config: pytest.Config) -> None:
    fail_on = config.getini("cupyflash_fail_on")
    if fail_on not in FAIL_ON:
        raise pytest.UsageError(f"cupyflash_fail_on must be one of {', '.join(FAIL_ON)}, got {fail_on!r}")
    config.stash[_FATAL] = FAIL_ON[fail_on]
    try:
        files = [Suppression.read(path) for path in config.getini("cupyflash_suppressions")]
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"cupyflash_suppressions: {error}") from error
    config.stash[_ALLOWED] = tuple(one for found in files for one in found)
    config.pluginmanager.register(Summary(config.stash[_ALLOWED]), "cupyflash_summary")


@pytest.fixture
def simulated_cupy(request: pytest.FixtureRequest) -> Iterator[list[Launch]]:
    """CuPy without a GPU for this test; the value is the list of its launches so far.

    Launches in a `ptx.simulation(findings=...)` of the test's own cannot fail the test.
    """
    with replaced(), simulation(findings="keep", suppressions=request.config.stash.get(_ALLOWED, ())) as launches:
        request.node.stash[_LAUNCHES] = launches
        yield launches


@pytest.fixture
def simulated_triton(request: pytest.FixtureRequest) -> Iterator[list[Launch]]:
    """Triton without a GPU for this test, as `simulated_cupy`. Skips it where Triton is not installed."""
    from cupyflash.sim.triton import simulated_triton as replaced_driver

    pytest.importorskip("triton", reason="Triton is not installed: pip install 'cupyflash[triton]'")
    with replaced_driver(findings="keep", suppressions=request.config.stash.get(_ALLOWED, ())) as launches:
        request.node.stash[_LAUNCHES] = launches
        yield launches


def _faults(item: pytest.Item) -> str:
    """Returns the text of the faults that fail a test; adds findings that do not fail it to its report."""
    launches, fatal = item.stash.get(_LAUNCHES, []), item.config.stash.get(_FATAL, FAIL_ON[WARNING])
    faulty: list[tuple[Finding, ...]] = []
    for launch in launches:
        faults = tuple(one for one in (*launch.findings, *launch.notes) if one.severity in fatal)
        faulty += [faults] * bool(faults)
        passed = [one for one in (*launch.findings, *launch.notes) if one.severity not in fatal]
        item.user_properties += [(_PASSED, line) for line in (*map(str, passed), *told(launch.suppressed, ()))]
        item.user_properties += [(_IDLE, str(one)) for one in launch.unmatched]
        item.user_properties += [(_USED, str(one.by)) for one in launch.suppressed]
    texts = [fault_text(findings[0].kernel, findings) for findings in faulty]
    # The first line is what pytest's short summary shows.
    more = f" (and {len(found) - 1} more)" if len(found := [one for findings in faulty for one in findings]) > 1 else ""
    return "\n".join([f"{shorten(found[0])}{more}", *texts] if found else [])


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


class Summary:
    """The findings that launches of the whole session let pass, and the suppressions that let nothing pass."""

    def __init__(self, allowed: Sequence[Suppression]):
        self.passed: dict[str, int] = {}
        self.idle = dict.fromkeys(map(str, allowed))
        self.used: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "call" else ():
            text = str(value)
            if name == _PASSED:
                self.passed[text] = self.passed.get(text, 0) + 1
            elif name == _IDLE:
                self.idle[text] = None
            elif name == _USED:
                self.used.add(text)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        idle = [text for text in self.idle if text not in self.used]
        if not (self.passed or idle):
            return
        terminalreporter.section("PTX machine")
        for text, launches in self.passed.items():
            terminalreporter.write_line(text + (f" ({launches} launches)" if launches > 1 else ""))
        for text in idle:
            terminalreporter.write_line(f"nothing to suppress for {text}")
