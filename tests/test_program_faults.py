"""Faults seeded in small programs of the kind that people write: found at their line, while the programs without them are clean."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from test_program import A100, PROGRAMS, built, ran
from test_program_graphs import Graphs

from cupyflash.sim import ptx
from cupyflash.sim.program import build
from cupyflash.sim.program.memory import PAGE
from cupyflash.sim.program.report import report
from cupyflash.sim.program.session import run_program
from cupyflash.sim.program.streams import Settings
from cupyflash.sim.ptx.order.past import FREE, READ, WRITE, Touched

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


def test_a_fault_of_a_copy_is_told_and_may_be_allowed(faults: Path, tmp_path: Path) -> None:
    """The report has it under the function's name; a file of suppressions lets it pass, as any finding."""
    assert "\ncudaMemcpyAsync: 1 error\n" in report(ran(faults, "early copy", "wrong"))
    file = tmp_path / "known.supp"
    file.write_text("race cudaMemcpyAsync faults.cu for the test\n")
    result = run_program(faults, ["early copy", "wrong"], device=A100, settings=Settings(suppressions=file))
    assert not result.findings and "1 error suppressed by" in report(result)
    assert not ran(faults, "early copy", "wrong", races=False).findings


@pytest.mark.wide
def test_without_lines_of_the_host_a_fault_names_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "NVCC_FLAGS", tuple(flag for flag in build.NVCC_FLAGS if flag != "-g"))
    (finding,) = ran(built([SOURCE], tmp_path), "early copy", "wrong").findings
    assert finding.source is None and str(finding).startswith("cudaMemcpyAsync: race: read at offset 0x0")


# -- copies in a history ------------------------------------------------------------------------------------------------------


def moved(stream: ptx.Stream, memory: np.ndarray, verb: str, *ranges: tuple[int, int]) -> list[str]:
    """Returns the hazards of a copy that touches these ranges."""
    found = stream.transfer("copy", [Touched("x", memory, verb, ranges)], lambda: ("main.cu", 1))
    return [one.hazard for one in found]


def test_copies_meet_where_they_touch_the_same_bytes() -> None:
    """Columns of rows of 64 bytes, halves of them in two streams; then one byte more."""
    memory, first = np.zeros(640, np.uint8), ptx.Stream()
    second = first.history.stream()
    left, right = ([(64 * row + start, 64 * row + start + 32) for row in range(10)] for start in (0, 32))
    assert not moved(first, memory, WRITE, *left) and not moved(second, memory, WRITE, *right)
    assert moved(second, memory, READ, (0, 33)) == ["read after write"]
    assert moved(first, memory, READ, (600, 609)) == ["read after write"]
    third = first.history.stream()
    assert not moved(third, memory, READ, (640, 641))
    third.wait(first.record())
    assert moved(third, memory, WRITE, (96, 97)) == ["write after write"]
    third.wait(second.record())
    assert not moved(third, memory, FREE, (0, 640))


def test_readers_are_no_race_and_all_count_for_a_writer() -> None:
    memory, streams = np.zeros(64, np.uint8), [ptx.Stream()]
    streams += [streams[0].history.stream() for _ in range(2)]
    assert not moved(streams[0], memory, READ, (0, 64)) and not moved(streams[1], memory, READ, (0, 32))
    streams[2].wait(streams[0].record())
    assert moved(streams[2], memory, WRITE, (0, 8)) == ["write after read"]
    assert not moved(streams[2], memory, WRITE, (32, 40))


def test_a_copy_stands_for_those_that_it_covers() -> None:
    """A loop that never waits for its copies keeps as few of them as are needed."""
    memory, stream = np.zeros(64, np.uint8), ptx.Stream()
    for turn in range(100):
        assert not moved(stream, memory, WRITE, (0, 64)) and not moved(stream, memory, READ, (turn % 8, 64))
    assert len(stream.history.past.transfers) <= 1 + 8
    stream.synchronize()
    assert not stream.history.past.transfers


def test_the_host_must_wait_and_pages_in_use_are_told() -> None:
    """Only pages of which every byte is in use are closed; the end of an allocation fills its page."""
    memory, stream = np.zeros(3 * PAGE - 100, np.uint8), ptx.Stream()
    moved(stream, memory, WRITE, (8, 3 * PAGE - 100))
    moved(stream, memory, READ, (0, PAGE))
    wrote, read = stream.history.in_use(memory, PAGE)
    assert wrote.tolist() == [False, True, True] and read.tolist() == [True, False, False]
    hazards = {
        (verb, at): [
            one.hazard for one in stream.history.touched("host", Touched("x", memory, verb, ((at, at + 1),)), lambda: None)
        ]
        for verb in (READ, WRITE)
        for at in (0, 8)
    }
    assert hazards == {(READ, 0): [], (WRITE, 0): ["write after read"], (READ, 8): ["read after write"]} | {
        (WRITE, 8): ["write after write", "write after read"]
    }
    stream.synchronize()
    assert not any(map(np.any, stream.history.in_use(memory, PAGE)))


def test_memory_that_is_freed_is_forgotten() -> None:
    memory, first = np.zeros(64, np.uint8), ptx.Stream()
    moved(first, memory, WRITE, (0, 64))
    first.history.forget(memory)
    assert not moved(first.history.stream(), memory, WRITE, (0, 64))


def test_threads_of_a_program_configure_their_own_launches() -> None:
    """Two threads at `<<<>>>` at once: each takes what it has pushed."""
    one, sizes = Graphs(), {1: (4, 128), 2: (8, 256)}
    try:
        for thread, (grid, block) in sizes.items():
            one.runtime.thread = thread
            one.runtime._cudaPushCallConfiguration(grid | 1 << 32, 1, block | 1 << 32, 1, 0, thread)
        for thread, wanted in sizes.items():
            one.runtime.thread = thread
            grid, block, shared, stream = (one.host.keep(bytes(16)) for _ in range(4))
            one.runtime._cudaPopCallConfiguration(grid, block, shared, stream)
            found = [struct.unpack("<I", one.host.read(at, 4))[0] for at in (grid, block, stream)]
            assert found == [*wanted, thread]
    finally:
        one.runtime.memory.close()
