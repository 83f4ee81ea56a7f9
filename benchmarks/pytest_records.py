"""A pytest plugin that writes failures as lines of JSON as they come, and the counts at the end:

PYTHONPATH=benchmarks python -m pytest -p pytest_records --records FILE.jsonl
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from records import Records, anonymous


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--records", type=Path, metavar="FILE", help="add failures and counts to this .jsonl file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--records")
    if path and not hasattr(config, "workerinput"):  # of pytest-xdist's processes, only the one that all report to
        config.pluginmanager.register(Reporter(Records(path, "")))


class Reporter:
    """Counts outcomes, and writes what failed."""

    def __init__(self, records: Records) -> None:
        self._records, self._start = records, time.monotonic()
        self._counts: Counter[str] = Counter()
        self._skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(report, "failed" if report.when == "call" else "error")
        elif report.skipped:
            xfailed = hasattr(report, "wasxfail")
            self._counts["xfailed" if xfailed else "skipped"] += 1
            if not xfailed and isinstance(report.longrepr, tuple):
                self._skips[anonymous(report.longrepr[2], 120)] += 1
        elif report.when == "call":
            self._counts["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report, "error")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        found = {"counts": dict(self._counts), "skips": dict(self._skips)}
        self._records.write("tests", found | {"seconds": time.monotonic() - self._start, "exit_status": int(exitstatus)})

    def _write(self, report: Any, outcome: str) -> None:
        self._counts[outcome] += 1
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr)
        self._records.write("test", {"outcome": outcome, "test": report.nodeid, "text": anonymous(text)})
