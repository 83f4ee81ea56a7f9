"""The set-up that tests share: fixed seeds, and an environment that is the tests' own.

CUPYFLASH_TEST_EXAMPLES=10 tries ten times as many random problems, and other ones each time. `--draw 0.1` takes a tenth of them,
other ones for each CUPYFLASH_TEST_DRAW; `--record FILE` adds a line about the run to a file.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import gc
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

import browsers
import compiled
from recorded_cupy import cupy  # noqa: F401 (a fixture)
from rooms import ROOMS, left_out
from suites import place

# Loaded kernels are kept, a million objects and more: to go through them as often as Python does by itself takes long.
gc.set_threshold(100_000, 50, 1000)

more = os.environ.get("CUPYFLASH_TEST_EXAMPLES")
# A failing problem is shown as it was found: each smaller one to be tried would be compiled anew, for minutes.
phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
settings.register_profile(
    "cupyflash", derandomize=more is None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck)
)
settings.load_profile("cupyflash")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, for a page's tests."""
    if (lack := browsers.lacking()) is not None:
        pytest.skip(lack)
    with browsers.chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A test that asks for bfloat16 (or 8-bit floats) is skipped where the package that has them is not installed."""
    try:
        return (yield)
    except ImportError as error:
        if error.name != "ml_dtypes":
            raise
        pytest.skip(str(error))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draw", type=float, metavar="FRACTION", help="only so many of the tests, drawn by CUPYFLASH_TEST_DRAW")
    parser.addoption("--record", type=Path, metavar="FILE", help="add a line of JSON about the run")
    parser.addoption("--room", action="append", choices=list(ROOMS), help="only the tests of a part, see tests/rooms.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return left_out(collection_path, config.getoption("room")) or None


PROGRAMS = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Workers (of pytest-xdist) share a folder of compiled programs, which goes with the run.

    Runs one after another may share one, too, which is for whoever made it to remove: CUPYFLASH_TEST_PROGRAMS is its name.
    """
    given = getattr(config, "workerinput", {}).get("programs") or os.environ.get("CUPYFLASH_TEST_PROGRAMS")
    folder = given or tempfile.mkdtemp(prefix="cupyflash-tests-")
    config.stash[PROGRAMS] = folder
    if not given:
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    Path(folder).mkdir(parents=True, exist_ok=True)
    compiled.share(Path(folder))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["programs"] = node.config.stash[PROGRAMS]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Unless --dist says otherwise, each worker has a stretch of neighbouring tests, which load the same kernels."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection(session: pytest.Session) -> None:
    """Every second worker imports the files from the last on, so that each rewrites the asserts of half of them for both."""
    worker = getattr(session.config, "workerinput", {}).get("workerid", "gw0")
    if int(worker.removeprefix("gw")) % 2 and session.config.args == ["tests"] and not session.config.getoption("room"):
        for path in sorted(Path(__file__).parent.glob("test_*.py"), reverse=True):
            with contextlib.suppress(Exception, pytest.skip.Exception):  # collection will say it
                importlib.import_module(path.stem)


LONG = frozenset((Path(__file__).parent / "long.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that take long are in the wide suite."""
    if item.nodeid in LONG:
        item.add_marker(pytest.mark.wide)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, in the wide suite, cases with few examples of properties that it checks on many as well; draw some of all tests."""
    items[:] = [item for item in items if not {"few", "wide"} <= {mark.name for mark in item.iter_markers()}]
    fraction = config.getoption("draw")
    if fraction is not None:
        drawn = [item for item in items if place(item.nodeid) < fraction]
        config.hook.pytest_deselected(items=[item for item in items if item not in drawn])
        items[:] = drawn


def pytest_collection_finish() -> None:
    """Freeze the imported and collected objects, so that the garbage collector need not scan them."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """After the whole wide suite a process leaves at once: to take apart what it has kept, object by object, takes minutes."""
    if not hasattr(session.config, "workerinput"):
        if (file := session.config.getoption("record")) is not None:
            record(session, file)
        atexit.register(_leave, int(exitstatus))


def record(session: pytest.Session, file: Path) -> None:
    """Adds a line: the commit, the suite, its results, seconds of processor time of this process and those it has waited for."""
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    stats = session.config.pluginmanager.getplugin("terminalreporter").stats
    times = os.times()
    line = {
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "suite": session.config.option.markexpr,
        **{name: len(stats.get(name, [])) for name in ("passed", "failed", "error", "skipped")},
        "processor_seconds": round(times.user + times.system + times.children_user + times.children_system),
        "machine": f"{os.cpu_count()} x {platform.machine()}",
    }
    with file.open("a") as stream:
        stream.write(json.dumps(line) + "\n")


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's settings for the simulated device, and the width of a terminal, must not reach the tests."""
    for name in ("CUPYFLASH_DEVICE", "CUPYFLASH_MAX_SECONDS", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
