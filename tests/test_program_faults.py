"""Faults seeded in small programs of the kind that people write: found at their line, while the programs without them are clean."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from test_program import PROGRAMS, built, ran
from test_program_graphs import Graphs

from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.report import report, summary
from cupyflash.sim.ptx.report.findings import Finding

SOURCE = PROGRAMS / "faults.cu"
TEXT = SOURCE.read_text(encoding="utf-8")
NAMES = re.findall(r'^    \{"(.*)", \w+\},$', TEXT, re.MULTILINE)


def marks(what: str) -> dict[str, int]:
    """Returns the lines of the source with marks of a kind, by the programs' names."""
    lines = enumerate(TEXT.splitlines(), 1)
    return {name: number for number, line in lines for name in re.findall(rf"\b{what}: ([a-z -]+)", line)}


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built([SOURCE], tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="session")
def children(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built([SOURCE], tmp_path_factory.mktemp("children"), "-DCHILDREN", "-rdc=true")


def check(program: Path, name: str) -> None:
    """Checks that a program is clean and right, and its wrong form found at the marked lines."""
    right = ran(program, name)
    assert right.status == 0 and not right.findings and not right.missing and not right.failed, report(right)
    wrong = ran(program, name, "wrong")
    sides = [[number for file, number in one.places if file == str(SOURCE)] for one in wrong.findings]
    expected = [mark for mark in (marks("found").get(name), marks("other").get(name)) if mark is not None]
    assert expected and expected in [[*dict.fromkeys(each)] for each in sides], report(wrong)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "early child"])
def test_a_seeded_fault_is_found_at_its_line(faults: Path, name: str) -> None:
    check(faults, name)


@pytest.mark.wide
def test_a_child_that_is_launched_too_early_is_found(children: Path) -> None:
    check(children, "early child")
