"""Seeded faults: what is changed in a kernel, what must be found, and whether it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import pytest

from cupyflash import kernels_cu
from cupyflash.launch import compiler
from cupyflash.launch.nvrtc import compile_to_ptx
from cupyflash.schedules import Kernel, Schedule
from cupyflash.sim import execution, theory
from cupyflash.sim.execution import BackwardExecution, Execution
from cupyflash.sim.ptx import Finding, Module
from cupyflash.sim.verification import VerifiedRun

AnySchedule = TypeVar("AnySchedule", bound=Schedule)
Run = Callable[[AnySchedule, int | None], tuple[Execution | BackwardExecution | VerifiedRun, bool]]
"""Executes a schedule's kernels in the order of a seed: the execution, and whether its numbers are right."""


@dataclass(frozen=True)
class Mutant:
    """`old` in `file` becomes `new`. Expected: findings of the kinds in `finds` (words), one of them at a line that holds a
    text of `lines`; where "bytes" is among them, or traffic that is not the theory's, "numbers", or an error over the yardstick."""

    file: str
    old: str
    new: str
    finds: str
    lines: tuple[str, ...] = ()
    problem: str = ""

    def apply(self, directory: Path) -> None:
        """Break the file in `directory`."""
        text = (directory / self.file).read_text()
        assert text.count(self.old) >= 1, f"{self.file} has no {self.old!r}"
        (directory / self.file).write_text(text.replace(self.old, self.new))

    def is_found(self, findings: Sequence[Finding], directory: Path) -> bool:
        """True if one of the findings is of an expected kind and at an expected line of the sources in `directory`."""
        places = set()
        for path in directory.glob("*.cu*"):
            text = path.read_text().splitlines()
            for number, line in enumerate(text, 1):
                if any(part in line for part in self.lines):
                    places.add((path.name, number))
                    while "asm volatile" in line and number < len(text) and not text[number - 1].endswith((";", "}", "\\")):
                        number += 1  # NVRTC 13.0 gives an asm statement the line that it ends on
                    places.add((path.name, number))
        kinds = self.finds.split("|")
        lines = [line for f in findings if f.kind in kinds for line in (f.source, *f.also) if line is not None]
        return any((Path(file).name, number) in places for file, number in lines)


@lru_cache(maxsize=4)  # of one fault, whose kernels may share a source
def _patched(directory: Path, source: str, options: tuple[str, ...]) -> Module:
    """The module of other sources than ours."""
    return Module.from_ptx(compile_to_ptx((directory / source).read_text(), options, source))


def compile_time(mutant: Mutant, kernel: Kernel) -> tuple[str, ...]:
    """NVRTC's options that halve the time of compiling.

    A value that is not there is optimised in other ways, so that a fault of that kind is compiled as our kernels are; so is a
    kernel with wgmma, whose accumulators would be moved while products are in flight.
    """
    from cupy.cuda import nvrtc

    able = nvrtc.getVersion() >= (13, 0) and not kernel.accelerated and "uninitialised" not in mutant.finds
    return ("--Ofast-compile=mid",) if able else ()


def check_mutant(
    mutant: Mutant, schedule: AnySchedule, run: Run[AnySchedule], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule's kernels with the fault: it is found."""
    for path in kernels_cu.DIRECTORY.glob("*.cu*"):
        (directory / path.name).write_text(path.read_text())
    mutant.apply(directory)
    ours = execution.module

    def module(kernel: Kernel, capability: tuple[int, int]) -> Module:
        if mutant.file.endswith(".cu") and kernel.source != mutant.file:
            return ours(kernel, capability)
        includes = (o.replace(str(kernels_cu.DIRECTORY), str(directory)) for o in compiler.options(kernel))
        arch = f"-arch=compute_{compiler.architecture(kernel, capability)}"
        return _patched(directory, kernel.source, (arch, compiler.FLUSH_DENORMALS, *includes, *compile_time(mutant, kernel)))

    monkeypatch.setattr(execution, "module", module)
    found, good = run(schedule, None)
    kinds = mutant.finds.split("|")
    wrong = ("numbers" in kinds and not good) or ("bytes" in kinds and found.traffic != theory.traffic(schedule))
    assert wrong or mutant.is_found(found.findings, directory), [str(f) for f in found.findings]


def check_unbroken(schedule: AnySchedule, run: Run[AnySchedule], seeds: range) -> None:
    """A schedule's kernels as they are: nothing is found under any of the orders."""
    for seed in [None, *seeds]:
        found, good = run(schedule, seed)
        assert found.findings == () and good and found.traffic == theory.traffic(schedule)
