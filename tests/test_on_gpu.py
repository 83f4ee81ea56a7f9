"""One command for a stranger's GPU: its tests, its order, the plugin, the notebook, and the pages about it."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cupyflash import Device, plan
from cupyflash.schedules import plan_backward
from cupyflash.sim.clock.measured import measured, read

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
on_gpu, records, report = (importlib.import_module(name) for name in ("on_gpu", "records", "report"))


def test_a_report_that_failed_is_a_line_at_once_and_the_counts_are_the_last_one(tmp_path: Path) -> None:
    plugin = importlib.import_module("pytest_records")
    with records.Records(tmp_path, "tests") as file:
        reporter = plugin.Reporter(file)

        def tell(outcome: str, when: str = "call", **more: Any) -> None:
            flags = {"passed": False, "failed": False, "skipped": False, "longrepr": None} | {outcome: True}
            reporter.pytest_runtest_logreport(types.SimpleNamespace(when=when, nodeid="t.py::test", **flags | more))

        for when in ("setup", "call", "teardown"):
            tell("passed", when)
        crash = types.SimpleNamespace(reprcrash=types.SimpleNamespace(message="assert 1 == 2\n  where 1 is one"))
        tell("failed", longrepr=crash)
        assert [line["text"] for line in read(file.path)] == ["assert 1 == 2 where 1 is one"]
        tell("failed", "setup", longrepr="OSError: no")
        for _ in range(2):
            tell("skipped", "setup", longrepr=("t.py", 1, "Skipped: needs bfloat16"))
        tell("skipped", wasxfail="known")
        reporter.pytest_sessionfinish(1)
    *failures, counts = read(file.path)
    assert [(line["kind"], line["outcome"]) for line in failures] == [("test", "failed"), ("test", "error")]
    assert counts["kind"] == "tests" and counts["skips"] == {"Skipped: needs bfloat16": 2} and counts["exit_status"] == 1
    assert counts["counts"] == {"passed": 1, "failed": 1, "error": 1, "skipped": 2, "xfailed": 1}


@pytest.mark.wide
def test_failures_and_counts_of_tests_are_lines_as_they_come(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2, 'one is not two'\n"
        "@pytest.mark.skip(reason='needs bfloat16')\ndef test_c(): pass\n"
        "@pytest.fixture\ndef bad(): raise OSError('no')\ndef test_d(bad): pass\n"
    )
    path = tmp_path / "lines.jsonl"
    status = on_gpu.finished(on_gpu.pytest_command(path, [tests], quick=False, parallel=1), 60, tmp_path / "tests.txt")
    failed, error, counts = read(path)
    assert status == 1 and "one is not two" in (tmp_path / "tests.txt").read_text()
    assert failed["test"].endswith("::test_b") and failed["outcome"] == "failed" and "one is not two" in failed["text"]
    assert error["test"].endswith("::test_d") and error["outcome"] == "error" and "OSError" in error["text"]
    assert counts["counts"] == {"passed": 1, "failed": 1, "skipped": 1, "error": 1}
    assert counts["exit_status"] == 1 and list(counts["skips"]) == ["Skipped: needs bfloat16"]
    assert "1 passed, 1 failed, 1 skipped, 1 error" in list(report.summary(read(path)))


Command = tuple[Sequence[str], float]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands, with the seconds that each has, of a run on a T4; those of pytest fail."""
    ran: list[Command] = []

    def finished(command: Sequence[str], seconds: float, log: Path | None = None, **environment: str) -> int:
        ran.append((command, seconds))
        return int("pytest" in command)

    monkeypatch.setattr(on_gpu, "finished", finished)
    monkeypatch.setattr(on_gpu, "processes", lambda: 4)
    monkeypatch.setattr(on_gpu.Device, "current", lambda: Device.named("T4"))
    monkeypatch.setattr(on_gpu.machine, "gpu_versions", lambda: {"cupy": "14"})
    return ran


QUICK = ["correctness", "forward", "backward", "decode", "accuracy", "machine"]


def test_one_command_runs_correctness_first_and_a_step_that_fails_takes_no_other_along(
    ran: list[Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_gpu.main(["--quick", str(tmp_path)]) == 1
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("T4-2") and f"written: {path}; failed: correctness, accuracy, machine" in capsys.readouterr().out
    header, *ends = read(path)
    assert header["device"]["name"] == "T4" and header["versions"] == {"cupy": "14"} and not header["simulated"]
    pytests = ("correctness", "accuracy", "machine")
    assert [end["reason"] for end in ends] == [f"{name}: exit status {int(name in pytests)}" for name in QUICK]
    ahead, first, *others = ran
    assert ahead[0][1].endswith("ahead.py") and str(ROOT / "tests" / "gpu" / "test_gpu_first.py") in first[0]
    for command, _ in ran[2:5]:
        assert str(path) in command and "--quick" in command
    assert all(str(path) in command for command, _ in ran)
    assert sum(on_gpu.SECONDS[name][0] for name in QUICK) + 2 * on_gpu.GRACE < 9 * 60 > 60 + others[0][1]
    ran.clear()
    assert on_gpu.main(["--only", "tests", str(tmp_path)]) == 1
    ((command, _),) = ran
    files = {Path(word).name for word in command if "/tests/gpu/test_" in word}
    every = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert command[command.index("-m", 3) + 1] == "" and files == every - set(on_gpu.FILES.values())


def test_what_a_step_leaves_of_its_time_is_the_next_one_s(ran: list[Command], tmp_path: Path) -> None:
    on_gpu.main(["--quick", str(tmp_path)])
    seconds = [on_gpu.SECONDS[name][0] for name in QUICK]
    assert ran[-1][1] == pytest.approx(sum(seconds), abs=5) and ran[2][1] == pytest.approx(sum(seconds[:2]), abs=5)


def test_a_run_that_was_cut_goes_on_with_the_same_file(ran: list[Command], tmp_path: Path) -> None:
    on_gpu.main(["--quick", "--only", "correctness", "--only", "forward", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('{"kind": "end", "reason": "backward: exit status -9", "seconds": 1}\n')
    ran.clear()
    assert on_gpu.main(["--quick", "--resume", str(tmp_path)]) == 1 and list(tmp_path.iterdir()) == [path]
    assert [Path(command[1]).stem for command, _ in ran[:2]] == ["backward", "decode"] and len(ran) == 4
    assert all("--resume" in command for command, _ in ran[:2])
    assert next(line["resumed"] for line in read(path) if line.get("resumed")) == ["correctness", "forward"]
    ran.clear()
    on_gpu.main(["--quick", "--resume", str(tmp_path / "other")])
    assert len(ran) == 7  # nothing to go on with


def test_a_case_that_the_file_has_is_not_measured_again(tmp_path: Path) -> None:
    command, cases = importlib.import_module("command"), importlib.import_module("cases")
    given = [cases.TINY, cases.SMALL]
    with records.Records(tmp_path / "some.jsonl", "") as file:
        file.write("measurement", {"pass": "forward", **dataclasses.asdict(cases.TINY), "seconds": 1.0})
    forward = importlib.import_module("forward").FORWARD
    assert command.remaining(given, forward, file.path) == [cases.SMALL]
    assert command.remaining(given, importlib.import_module("backward").BACKWARD, file.path) == given
    assert command.remaining(given, forward, tmp_path / "none.jsonl") == given


class Child:
    """Stands in for a process: it ends at the first of its `blows`, signals that it obeys, and has no clock."""

    def __init__(self, obeys: signal.Signals | None) -> None:
        self.pid, self.obeys, self.blows = 4711, obeys, list[int]()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        assert self.obeys is None or self.obeys in self.blows

    def wait(self, patience: float | None = None) -> int:
        if self.obeys is None or self.obeys in self.blows:
            return -(self.obeys or 0)
        raise subprocess.TimeoutExpired("it", patience or 0)

    def send_signal(self, blow: int) -> None:
        self.blows.append(blow)


@pytest.mark.parametrize(
    ("obeys", "blows"), [(None, []), (signal.SIGINT, [signal.SIGINT]), (signal.SIGKILL, [signal.SIGINT, signal.SIGKILL])]
)
def test_a_step_that_takes_too_long_is_asked_to_stop_and_then_killed(
    monkeypatch: pytest.MonkeyPatch, obeys: signal.Signals | None, blows: list[int]
) -> None:
    child = Child(obeys)
    monkeypatch.setattr(on_gpu.subprocess, "Popen", lambda *_, **__: child)
    monkeypatch.setattr(on_gpu.os, "killpg", lambda pid, blow: child.send_signal(blow) if pid == child.pid else None)
    assert on_gpu.finished(["it"], 5) == -(obeys or 0) and child.blows == blows


def gpu_tests(folder: Path, first: str) -> Path:
    """A folder of tests in the place of tests/gpu."""
    folder.mkdir()
    for name in (*on_gpu.FILES.values(), "test_others.py"):
        (folder / name).write_text("import os\ndef test(): assert os.environ['CUPYFLASH_STAND_IN'] == 'A100-40GB'\n")
    (folder / "test_gpu_first.py").write_text(first)
    return folder


@pytest.mark.wide
def test_a_dry_run_in_which_a_test_fails_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYFLASH_STAND_IN", raising=False)
    tests = gpu_tests(tmp_path / "gpu", "def test(): assert False\n")
    only = [word for name in ("correctness", "machine") for word in ("--only", name)]
    assert on_gpu.main(["--dry-run", *only, "--tests", str(tests), str(tmp_path / "out")]) == 1
    (path,) = (tmp_path / "out").glob("*.jsonl")
    assert [line["counts"] for line in read(path) if line["kind"] == "tests"] == [{"failed": 1}, {"passed": 1}]


@pytest.mark.wide
def test_the_one_command_s_dry_run_measures_every_implementation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYFLASH_STAND_IN", raising=False)
    tests = gpu_tests(tmp_path / "gpu", "def test(): pass\n")
    assert on_gpu.main(["--dry-run", "--tests", str(tests), str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("*.jsonl")
    lines = list(read(path))
    assert [line["what"] for line in lines if line["kind"] == "run"] == ["on_gpu", "forward", "backward", "decode"]
    assert all(line["simulated"] for line in lines if line["kind"] == "run")
    assert [line["counts"] for line in lines if line["kind"] == "tests"] == [{"passed": 1}] * 4
    ours = {"forward": {"auto", "fa2", "fa1", "standard"}, "backward": {"auto", "fa1", "fa2", "standard", "fa2 deterministic"}}
    for name, outputs in (("forward", {"O"}), ("backward", {"dQ", "dK", "dV"})):
        rows = {line["implementation"]: line for line in lines if line.get("pass") == name}
        assert {*ours[name], "numpy"} <= set(rows) and all(row["right"] for row in rows.values())
        assert all(set(row["rms"]) == outputs for row in rows.values())
    rows = {line["implementation"]: line for line in lines if line.get("pass") == "decode"}
    assert set(rows) == {"decode", "decode, pages of 16", "numpy"} and all(row["right"] for row in rows.values())
    (first,) = (line["value"] for line in lines if line.get("name") == "first call")
    assert first["cold"]["first_call_s"] > 0 and set(first) == {"cold", "warm"}
    # `predict --time` finds each of them again, once a GPU has taken them.
    cases, device = importlib.import_module("cases"), Device.named("A100-40GB")
    decoding = importlib.import_module("decode").planned(device, cases.TINY_DECODE)
    schedules = [*(plan(cases.TINY.problem, device, name) for name in ours["forward"] - {"auto"}), decoding]
    schedules += [plan_backward(cases.TINY.problem, device, deterministic=each) for each in (False, True)]
    assert not any(measured(schedule, path.parent) for schedule in schedules)
    path.write_text(path.read_text().replace('"simulated": true', '"simulated": false'))
    assert [len(measured(schedule, path.parent)) for schedule in schedules] == [1] * len(schedules)


# --- what is written about it

NOTEBOOK = ROOT / "benchmarks" / "on_gpu.ipynb"


def test_the_notebook_is_one_and_its_cells_compile() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4 and isinstance(notebook["nbformat_minor"], int)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3" and notebook["metadata"]["accelerator"] == "GPU"
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and isinstance(cell["metadata"], dict)
        assert all(isinstance(line, str) for line in cell["source"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            compile("".join(cell["source"]), NOTEBOOK.name, "exec")
        else:
            assert "outputs" not in cell


def test_the_notebook_runs_the_quick_command_on_what_it_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, with commands and the driver's library recorded."""
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(list(map(str, command))))
    monkeypatch.chdir(tmp_path)
    installed: list[str] = []
    names = lambda: [types.SimpleNamespace(metadata={"Name": name}) for name in installed]  # noqa: E731
    monkeypatch.setattr("importlib.metadata.distributions", names)
    for version, present, extra in (
        (12040, ["cupy-cuda12x"], "cuda12"),
        (13000, ["CuPy-cuda12x"], "cuda12"),
        (13000, [], "cuda13"),
    ):

        def told(answer: Any, version: int = version) -> None:
            ctypes.cast(answer, ctypes.POINTER(ctypes.c_int))[0] = version

        library = types.SimpleNamespace(cuInit=lambda flags: 0, cuDriverGetVersion=told)
        monkeypatch.setattr(ctypes, "CDLL", lambda name, library=library: library)
        ran.clear()
        installed[:] = present
        scope: dict[str, Any] = {}
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec("".join(cell["source"]).replace('REPOSITORY = ""', 'REPOSITORY = "https://host/cupyflash"'), scope)
        clone, install, quick, table = ran
        assert clone[:2] == ["git", "clone"] and clone[-2:] == ["https://host/cupyflash", "cupyflash"]
        assert install[-1] == f"{tmp_path / 'cupyflash'}[{extra},test]"
        assert quick[1:3] == [str(tmp_path / "cupyflash" / "benchmarks" / "on_gpu.py"), "--quick"] and table[1].endswith(
            "report.py"
        )


def test_the_pages_name_files_and_options_that_exist() -> None:
    page, contributing = (ROOT / "benchmarks" / "README.md").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "benchmarks").glob("*.py"):
        shown = path.stem not in (
            "accuracy",
            "ahead",
            "cases",
            "checkout",
            "command",
            "machine",
            "peers",
            "pytest_records",
            "rate_chips",
            "rate_measurements",
            "rate_steps",
            "records",
            "timing",
        )
        assert (f"`{path.name}" in page) == shown or path.name == "records.py", path.name
    for command in ("python benchmarks/on_gpu.py --quick", "python -m pytest -m wide", "ruff check .", "`mypy`"):
        assert command in contributing
    for kind in ("run", "measurement", "extra", "left_out", "test", "end"):
        assert f"\n    {kind} " in records.__doc__
