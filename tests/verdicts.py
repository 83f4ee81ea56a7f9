"""The verdict on a mutant: a process of its own runs killers.toml's problems on it until one fails.

A kernel's mutant is compiled for each problem; if that gives the same program as without the change, there is nothing to run. A
schedule's is imported anew; theory and replay are compared for all problems first, then the problems whose launches have changed
are executed.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import compiled
import killers
from cupyflash import kernels_cu
from cupyflash.launch import compiler
from cupyflash.launch.nvrtc import CompileError, compile_to_ptx
from cupyflash.schedules import Kernel
from cupyflash.sim import execution
from cupyflash.sim.ptx import Module
from mutator import ROOT, VARIABLE, Mutant, use

# Of processor time, for one problem: an endless loop
LONGEST = 8
# The check of what is written down of choices
CHOICES = "choices"
# Quick tests of what schedules refuse and say: of all, and of files whose names begin so
QUICK: dict[str, tuple[str, ...]] = {
    "": ("schedule", "balance", "refusals", "resources"),
    "decode": ("decode_refusals", "decode_commands"),
    "fa3": ("fa3", "fa3_commands"),
    "varlen": ("varlen", "masks_sequences"),
    "packed": ("varlen",),
    "softmax": ("softmax",),
    "rows": ("softmax",),
    "mask_tiles": ("masks",),
    "tiled_mask": ("masks", "masks_sequences"),
    "tiling": ("paper", "theorem2", "device"),
    "base": ("sparse", "problem"),
    "__init__": ("varlen", "sparse", "problem"),
    "add_state": ("ring_sums",),
    "dropout_mask": ("dropout",),
    "multiprocessor": ("timeline", "explain"),
}


@dataclass(frozen=True)
class Verdict:
    """killed, survives, equivalent, or no program; why; the problem or test it died `by`; seconds of processor time."""

    verdict: str
    why: str = ""
    by: str = ""
    seconds: float = 0.0


class Endless(Exception):
    """More than the seconds that something has."""


def in_time(act: Callable[[], Any], seconds: int = LONGEST) -> Any:
    """The result of `act`. Raises Endless if it takes too long."""

    def stop(*_: object) -> None:
        raise Endless(f"more than {seconds} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return act()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def same_program(one: str, other: str) -> bool:
    """True if two texts of PTX differ in line numbers only."""
    return _bare(one) == _bare(other)


def _bare(ptx: str) -> str:
    return re.sub(r"^\s*\.(loc|file)\b.*\n", "", ptx.partition(".section")[0], flags=re.MULTILINE)


class Broken:
    """Our kernels with one file changed."""

    def __init__(self, mutant: Mutant, folder: Path) -> None:
        self.name, self.folder = Path(mutant.file).name, folder
        for path in kernels_cu.DIRECTORY.glob("*.cu*"):
            shutil.copyfile(path, folder / path.name)
        (folder / self.name).write_text(mutant.text())
        self.ours = execution.module
        self.texts: dict[tuple[str, ...], str] = {}
        self.modules: dict[str, Module] = {}

    def touches(self, kernel: Kernel) -> bool:
        return self.name in killers.closure(kernel.source)

    def ptx(self, kernel: Kernel, capability: tuple[int, int]) -> str:
        options = [each.replace(str(kernels_cu.DIRECTORY), str(self.folder)) for each in compiler.options(kernel)]
        key = kernel.source, f"-arch=compute_{compiler.architecture(kernel, capability)}", compiler.FLUSH_DENORMALS, *options
        if key not in self.texts:
            source = (self.folder / kernel.source).read_text()
            self.texts[key] = compile_to_ptx(source, key[1:], kernel.source)
        return self.texts[key]

    def changes(self, kernel: Kernel, capability: tuple[int, int]) -> bool:
        """True if another program comes of it."""
        return self.touches(kernel) and not same_program(self.ptx(kernel, capability), compiler.ptx(kernel, capability))

    def module(self, kernel: Kernel, capability: tuple[int, int]) -> Module:
        if not self.touches(kernel):
            return self.ours(kernel, capability)
        text = self.ptx(kernel, capability)
        if text not in self.modules:
            self.modules[text] = Module.from_ptx(text)
        return self.modules[text]


def last_line(error: BaseException) -> str:
    return " ".join(traceback.format_exception_only(error)[-1].split())[:240]


def named(by: str) -> list[killers.Killer]:
    """The problem of that name, if it is one's."""
    return [each for each in killers.killers() if each.name == by]


def of_kernel(mutant: Mutant, by: str = "") -> Iterator[Verdict]:
    """Runs the problems of a broken kernel, or only the one named `by`."""
    changed = 0
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        broken = Broken(mutant, Path(folder))
        problems = named(by) or sorted(killers.of_source(broken.name), key=lambda each: not reaches(each, mutant))
        reached = 0
        for problem in problems:
            capability = problem.schedule.device.compute_capability
            try:
                differs = [broken.changes(kernel, capability) for kernel in problem.kernels]
            except CompileError as error:
                yield Verdict("killed", "does not compile") if reached else Verdict("no program", error.log.strip()[-200:])
                return
            reached += 1
            if not any(differs):
                continue
            changed += 1
            execution.module = broken.module  # type: ignore[assignment]
            try:
                in_time(problem.check)
            except BaseException as error:
                yield Verdict("killed", last_line(error), problem.name)
                return
            finally:
                execution.module = broken.ours  # type: ignore[assignment]
    yield Verdict("survives", f"{changed} of {len(problems)} problems have another program")


_lines: dict[str, set[tuple[str, int]]] = {}


def reaches(problem: killers.Killer, mutant: Mutant) -> bool:
    """True if the mutant's line is among the source lines of a problem's programs."""
    if problem.name not in _lines:
        found = _lines[problem.name] = set()
        for kernel in problem.kernels:
            ptx = compiler.ptx(kernel, problem.schedule.device.compute_capability)
            names = {number: Path(name).name for number, name in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx)}
            found |= {(names.get(file, ""), int(line)) for file, line in re.findall(r"\.loc\s+(\d+) (\d+)", ptx)}
    first = mutant.line
    lines = range(first, first + 1 + mutant.old.count("\n"))
    return any((Path(mutant.file).name, line) in _lines[problem.name] for line in lines)


def said(problem: Any) -> str:
    """Everything that decides a problem's execution: its kernels, workspaces and counts."""
    schedule = problem.schedule
    spaces = schedule.workspaces() if hasattr(schedule, "workspaces") else {}
    from cupyflash.sim import theory

    return repr((schedule.kernels(), spaces, dict(theory.traffic(schedule))))


def of_schedule(mutant: Mutant, right: dict[str, str], by: str = "") -> Iterator[Verdict]:
    """Plans, counts and runs the problems by a broken schedule, then other checks; or only what is named `by`."""
    if "::" in by:
        yield from by_tests(mutant, by, 0)
        return
    for name in [*sys.modules]:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if name.split(".")[0] == "cupyflash" or (
            Path(path).parent == ROOT / "tests" and name not in ("verdicts", "mutator", "compiled")
        ):
            del sys.modules[name]
    use(mutant)
    for name, failed in ((mutant.module, Verdict("no program")), ("killers", Verdict("killed"))):
        try:
            in_time(lambda name=name: importlib.import_module(name))
        except BaseException as error:
            yield replace(failed, why=last_line(error))
            return
    compiled.share(compiled.shared[0])
    # Outside of a try: a problem that was added after `right` was made is no death
    again = [(each, right[each.name]) for each in sys.modules["killers"].killers() if by in ("", each.name)]
    changed = []
    for problem, before in again:
        try:
            now = in_time(lambda problem=problem: said(problem))
            in_time(problem.counts)
            if now != before:
                changed.append(problem)
        except BaseException as error:
            yield Verdict("killed", last_line(error), problem.name)
            return
    for problem in changed:
        try:
            in_time(problem.check)
        except BaseException as error:
            yield Verdict("killed", last_line(error), problem.name)
            return
    if by in ("", CHOICES) and (found := by_choices()):
        yield Verdict("killed", found, CHOICES)
    elif by:
        yield Verdict("survives", f"not by {by}")
    else:
        yield from by_tests(mutant, by, len(changed))


def by_choices() -> str:
    """The choices and models that differ from .ci/accounts."""
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        choices = in_time(lambda: importlib.import_module("choices"))
        for name in ("drawn.txt", "modelled.txt", "planned.txt"):
            if found := in_time(lambda name=name: next(choices.differences(name), ""), 5 * LONGEST):
                return f"{name}: {found}"
    except BaseException as error:
        return last_line(error)
    return ""


def by_tests(mutant: Mutant, by: str, ran: int) -> Iterator[Verdict]:
    """The quick tests of what schedules say."""
    environment = {**os.environ, VARIABLE: json.dumps(asdict(mutant)), "CUPYFLASH_TEST_PROGRAMS": str(compiled.shared[0])}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    chosen = [names for begin, names in QUICK.items() if mutant.path.stem.startswith(begin)]
    names = [f"tests/test_{each}.py" for some in reversed(chosen) for each in some]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "mutator",
        "-p",
        "no:cacheprovider",
        *([by] if "::" in by else names),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)(.*)", done.stdout, re.MULTILINE)
    if done.returncode:
        yield Verdict("killed", failed[2][:200] if failed else done.stdout[-200:], failed[1] if failed else "tests")
    else:
        yield Verdict("survives", f"{ran} problems launch or move something else; the quick tests pass")


def write_spent(pattern: str) -> None:
    """Runs the problems of kernels whose names have `pattern` in them, as they are, and writes down what each takes."""
    folder = os.environ.get("CUPYFLASH_TEST_PROGRAMS")
    if folder:
        compiled.share(Path(folder))
    then, known = killers.written(), [problem.name for problem in killers.killers()]
    killers.written = dict  # type: ignore[assignment]
    for problem in killers.killers():
        if pattern in problem.kernel:
            problem.check()
    now = {**then, **killers.OBSERVED}
    lines = [
        f'"nvrtc": "{killers.nvrtc_version()}"',
        *(f"{json.dumps(name)}: {json.dumps(now[name])}" for name in known if name in now),
    ]
    killers.SPENT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


class Examiner:
    """Says what becomes of mutants, each in a forked process; programs are kept in a folder."""

    def __init__(self, folder: str | None) -> None:
        self.kept = folder or tempfile.mkdtemp(prefix="mutator-")
        Path(self.kept).mkdir(exist_ok=True)
        compiled.share(Path(self.kept))
        killers.nvrtc_version()  # without a compiler every mutant would seem to die
        self.right: dict[str, str] = {}

    def examine(self, mutant: Mutant, by: str = "") -> Verdict:
        """The verdict by all checks, or only by those named `by`."""
        if mutant.is_kernel:
            for problem in killers.of_source(Path(mutant.file).name) if not by else ():
                reaches(problem, mutant)  # once for all mutants
        else:
            for problem in killers.killers():
                if by in ("", problem.name) and problem.name not in self.right:
                    self.right[problem.name] = said(problem)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _leave(write, lambda: next(of_kernel(mutant, by) if mutant.is_kernel else of_schedule(mutant, self.right, by)))
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        _, status, used = os.wait4(child, 0)
        seconds = used.ru_utime + used.ru_stime
        if not text:
            return Verdict("killed", f"the process ended with {status}", "memory or time", seconds)
        return Verdict(**json.loads(text) | {"seconds": round(seconds, 2)})


def _leave(write: int, act: Callable[[], Verdict]) -> None:
    """Ends this process with a verdict in the pipe."""
    resource.setrlimit(resource.RLIMIT_CPU, (1200, 1200))  # a survivor of what all kernels include takes 300 s
    # What is mapped already, as the memory of a simulated program, counts too.
    most = (12 << 30) + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            found = act()
    except BaseException as error:
        traceback.print_exc()
        found = Verdict("broken", last_line(error))
    os.write(write, json.dumps(asdict(found)).encode())
    os.close(write)
    os._exit(0)
