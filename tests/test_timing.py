"""The benchmarks of the forward and of the backward: how they measure, judge and keep results, on scripted implementations."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.sim.clock.measured import read
from cupyflash.sim.numbers.yardstick import DTYPES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
accuracy, ahead, cases, command, machine, records, report, timing = (
    importlib.import_module(name) for name in ("accuracy", "ahead", "cases", "command", "machine", "records", "report", "timing")
)
forward, backward = importlib.import_module("forward"), importlib.import_module("backward")
CASE = cases.Case("float16", 16, 16, False, 1, 1)
A100 = Device.named("A100-40GB")


@pytest.fixture(autouse=True)
def few_host_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "HOST_CALLS", 2)
    monkeypatch.setattr(command, "SMALL", CASE)


def drawn(n: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    """Q, K, V and dO, (1, 2, n, 32)."""
    random = np.random.default_rng(seed)
    return [random.standard_normal((1, 2, n, 32)).astype(np.float32).astype(DTYPES[dtype]) for _ in range(4)]


# --- cases


def test_the_grid_is_sixteen_thousand_tokens_each_and_begins_with_what_matters() -> None:
    every = cases.chosen(Device.named("H100-SXM"), quick=False)
    assert len(set(every)) == len(every) == 3 * 3 * 6 * 2
    assert all(case.batch * case.n == 16384 and case.heads * case.d == 2048 for case in every)
    assert [(case.dtype, case.d, case.n) for case in every[:2]] == [("bfloat16", 128, 4096)] * 2
    full = next(case for case in every if (case.d, case.n, case.causal) == (128, 16384, False))
    assert full.flops == 4 * 16 * 16384**2 * 128 == full.problem.flops and 2.5 * full.flops == full.problem.backward_flops
    quick = cases.chosen(Device.named("H100-SXM"), quick=True)
    assert len(quick) == 12 and {case.dtype for case in quick} == {"bfloat16"}


def test_a_device_without_bfloat16_is_not_asked_for_it() -> None:
    assert {case.dtype for case in cases.chosen(Device.named("T4"), quick=False)} == {"float16", "float32"}
    assert {case.dtype for case in cases.chosen(Device.named("T4"), quick=True)} == {"float16"}


# --- turns, figures


def test_implementations_take_turns_and_the_slow_ones_are_spread_over_all_of_the_time() -> None:
    assert list(timing.turns({"a": 3, "b": 3})) == ["a", "b"] * 3
    order = list(timing.turns({"quick": 8, "slow": 2}))
    assert order.count("quick") == 8 and [at for at, name in enumerate(order) if name == "slow"] == [4, 9]
    assert list(timing.turns({})) == []


@pytest.mark.parametrize("times", [1.01, 0.99])
def test_a_figure_above_the_device_s_peak_is_refused(times: float) -> None:
    case = cases.Case("float16", 128, 4096, False, 4, 16)
    seconds = case.flops / A100.tensor_peak["float16"] / times
    reason = timing.refused(A100, forward.FORWARD, case, seconds)
    assert (reason is None) == (times < 1)
    assert reason is None or "are above the device's peak of 312.0" in reason
    assert (timing.refused(A100, backward.BACKWARD, case, 2.5 * seconds) is None) == (times < 1)
    assert timing.refused(dataclasses.replace(A100, tensor_peak={}), forward.FORWARD, case, seconds) is None  # a peak not known


def test_inputs_read_faster_than_memory_gives_them_are_refused_and_so_is_no_time_at_all() -> None:
    case = cases.Case("float16", 16, 64, False, 1024, 16)
    seconds = 3 * case.tensor_bytes / A100.hbm_bandwidth
    assert "GB/s" in str(timing.refused(A100, forward.FORWARD, case, seconds / 1.01))
    assert timing.refused(A100, forward.FORWARD, case, seconds * 1.01) is None
    assert timing.refused(A100, forward.FORWARD, case, 0.0) == "0 s"


def test_float32_may_be_as_fast_as_tf32() -> None:
    case = cases.Case("float32", 128, 4096, False, 4, 16)
    assert timing.refused(A100, forward.FORWARD, case, case.flops / 150e12) is None
    assert timing.refused(A100, forward.FORWARD, case, case.flops / 160e12) is not None


class Scripted:
    """A machine on which a call takes what it says, and that is asked for nothing else."""

    def __init__(self, fill_seconds: float | None = 1e-3) -> None:
        self.device, self.xp, self.fill_seconds = A100, np, fill_seconds
        self.log: list[str] = []
        self.lost, self.now = False, 0.0

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *raised: Any) -> None: ...

    def draw(self, case: Any, seed: int, count: int) -> list[Any]:
        return list(np.random.default_rng(seed).standard_normal((count, *case.shape)).astype(case.dtype))

    def sample(self, call: Any) -> Any:
        self.log.append(call.name)
        self.now += call.seconds
        if call.at_turn is not None and self.log.count(call.name) == call.at_turn:
            raise call.raises
        return machine.Sample(call.seconds, call.host)

    def as_float32(self, out: Any) -> Any:
        return np.asarray(out, np.float32)

    def wait(self) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def release(self) -> None: ...

    def torch(self, *arrays: Any) -> None:
        return None

    def clocks(self) -> dict[str, Any]:
        self.log.append("clocks")
        return {"sm_mhz": 1000 + self.log.count("clocks")}

    def versions(self) -> dict[str, Any]:
        return {}


@dataclasses.dataclass
class Scenario:
    """A call: what it takes, what it gives, and when it raises instead (at its first call, or at a turn)."""

    name: str
    arrays: Any = None
    seconds: float = 0.06
    host: float = 1e-5
    factor: float = 1.0
    raises: BaseException | None = None
    at_turn: int | None = None

    def __call__(self) -> Any:
        if self.raises and self.at_turn is None:
            raise self.raises
        return accuracy.forward(np, [array.astype(np.float32) for array in self.arrays], False)[0] * np.float32(self.factor)


def scripted(ours: Sequence[Scenario], peers: Sequence[Scenario] | Exception = ()) -> Any:
    def made(scenarios: Any) -> Any:
        def implementations(_: Any, case: Any, arrays: Any) -> Iterator[Any]:
            if isinstance(scenarios, Exception):
                raise scenarios
            for each in scenarios:
                call = dataclasses.replace(each, arrays=arrays)
                yield timing.Implementation(each.name, call, ours=scenarios is ours)

        return implementations

    return timing.Pass("some", 1, 3, ("O",), ours[0].name, made(ours), made(peers), accuracy.forward, lambda *_: ())


def measured(
    folder: Path, what: Any, bench: Any = None, budget: Any = None, given: Sequence[Any] = (CASE,), extras: Mapping[str, Any] = {}
) -> tuple[int, list[dict[str, Any]]]:
    """The exit status and the lines of a whole run."""
    with records.Records(folder, "scripted") as file:
        effort = timing.Effort(sets=2, seconds=0.3, least=3, most=6)
        session = timing.Session(bench or Scripted(), what, file, budget or records.Budget(100), effort)
        status = command.run(session, given, {"what": "some", "simulated": True, "default": what.default}, extras)
    return status, list(read(file.path))


def test_each_implementation_is_judged_by_itself_and_a_wrong_one_does_not_win(tmp_path: Path) -> None:
    ours = [Scenario("ours"), Scenario("ours, rounded", factor=1 + 1e-3)]
    peers = [
        Scenario("absent", raises=RuntimeError("No available kernel.\nAborting execution.")),
        Scenario("wrong", factor=1.01, seconds=0.01),
        Scenario("right", seconds=0.03),
    ]
    status, lines = measured(tmp_path, scripted(ours, peers))
    rows = {line["implementation"]: line for line in lines if line["kind"] == "measurement"}
    assert status == 0
    assert rows["absent"]["error"] == "RuntimeError: No available kernel. Aborting execution." and "tflops" not in rows["absent"]
    assert {name: row["right"] for name, row in rows.items() if name != "absent"} == {
        "ours": True, "ours, rounded": True, "wrong": False, "right": True,
    }  # fmt: skip
    assert rows["wrong"]["rms"]["O"] == pytest.approx(0.01, rel=1e-3) and rows["ours"]["bound"] == accuracy.bound("float16")
    assert rows["ours"]["tflops"] == pytest.approx(CASE.flops / 0.06 / 1e12) and rows["ours"]["ours"] and not rows["right"]["ours"]
    assert list(report.ratios(list(rows.values()), "ours")) == ["float16, d 16, N 16: ours has 0.50 of the TFLOP/s of right"]
    text = "\n".join(report.summary(lines))
    assert "No available kernel" in text and text.count("WRONG (at most 2.0e-03)") == 1


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_each_gradient_is_judged_by_itself(wrong: int | None) -> None:
    arrays = [array.astype(np.float32) for array in drawn(32, "float16")]
    expected = accuracy.gradients(np, arrays, True)
    out = tuple(array * np.float32(1.01 if at == wrong else 1) for at, array in enumerate(expected))
    found = timing.judged(Scripted(), backward.BACKWARD, CASE, out, expected)
    assert found["right"] == (wrong is None) and list(found["rms"]) == ["dQ", "dK", "dV"]
    assert [error > found["bound"] for error in found["rms"].values()] == [at == wrong for at in range(3)]


def test_ours_being_wrong_is_no_fault_of_the_peers_and_a_failure(tmp_path: Path) -> None:
    status, lines = measured(tmp_path, scripted([Scenario("ours", factor=1.1)], [Scenario("theirs")]))
    assert status == 1 and [line["right"] for line in lines if line["kind"] == "measurement"] == [False, True]


def test_turns_clocks_and_what_the_host_takes_are_in_the_lines(tmp_path: Path) -> None:
    bench = Scripted(fill_seconds=1e-3)
    what = scripted([Scenario("a"), Scenario("b", host=2e-3)], [Scenario("c", seconds=0.1)])
    _, lines = measured(tmp_path, what, bench)
    rows = {line["implementation"]: line for line in lines if line["kind"] == "measurement"}
    # Once each, to know how often; then 0.3 s are 5 times 0.06 and 3 times 0.1, in five rounds.
    first_half, second_half = ["a", "b", "a", "b", "c", "a"], ["b", "a", "b", "c", "a", "b", "c"]
    assert bench.log == ["clocks", "a", "b", "c", *first_half, "clocks", *second_half, "clocks"]
    read = {"before": {"sm_mhz": 1001}, "between": {"sm_mhz": 1002}, "after": {"sm_mhz": 1003}}
    assert all(row["clocks"] == read for row in rows.values())
    assert {name: (row["host_seconds"], row["exposed"]) for name, row in rows.items()} == {
        "a": (1e-5, False), "b": (2e-3, True), "c": (1e-5, False),
    }  # fmt: skip
    assert "host not hidden (2000 us)" in report.line(rows["b"]) and "host not" not in report.line(rows["a"])


def test_a_refused_figure_has_no_tflops_and_says_so(tmp_path: Path) -> None:
    _, lines = measured(tmp_path, scripted([Scenario("ours")], [Scenario("too fast", seconds=1e-12)]))
    row = next(line for line in lines if line.get("implementation") == "too fast")
    assert "tflops" not in row and row["seconds"] == 1e-12 and "INVALID: " in report.line(row)
    assert not list(report.ratios([line for line in lines if line["kind"] == "measurement"], "ours"))


# --- what goes wrong


def test_what_raises_takes_nothing_else_along(tmp_path: Path) -> None:
    def broken(seconds: float) -> None:
        raise OSError("nvidia-smi is not there")

    ours = [Scenario("ours"), Scenario("dies", raises=ValueError("boom"), at_turn=3)]
    extras = {"bad": broken, "good": lambda seconds: {"answer": 42}}
    status, lines = measured(tmp_path, scripted(ours, RuntimeError("no PyTorch")), extras=extras)
    rows = {line["implementation"]: line for line in lines if line["kind"] == "measurement"}
    assert rows["ours"]["repeats"] == 5 and rows["dies"]["error"] == "ValueError: boom" and rows["dies"]["right"]
    assert rows["peers"]["error"] == "RuntimeError: no PyTorch" and not rows["peers"]["ours"]
    extra = {line["name"]: line for line in lines if line["kind"] == "extra"}
    assert extra["bad"]["error"] == "OSError: nvidia-smi is not there" and extra["good"]["value"] == {"answer": 42}
    assert status == 1 and lines[0]["kind"] == "run" and lines[-1]["kind"] == "end" and lines[-1]["reason"] == "done"


def test_memory_that_ends_is_told_and_no_failure(tmp_path: Path) -> None:
    status, lines = measured(tmp_path, scripted([Scenario("ours"), Scenario("large", raises=MemoryError("34 GB"))]))
    assert status == 0 and "MemoryError: 34 GB" in json.dumps(lines)


def test_an_interruption_leaves_every_line_that_was_known(tmp_path: Path) -> None:
    """In the second case; of that, what was timed until then is there too."""
    stop = Scenario("stops", raises=KeyboardInterrupt(), at_turn=10)
    status, lines = measured(tmp_path, scripted([Scenario("ours"), stop]), given=[CASE, CASE, CASE])
    assert status == command.INTERRUPTED and lines[-1]["reason"] == "interrupted"
    assert [(line["implementation"], line.get("repeats")) for line in lines if line["kind"] == "measurement"] == [
        ("ours", 5), ("stops", 5), ("ours", 3), ("stops", 2),
    ]  # fmt: skip


def test_an_extra_that_is_interrupted_ends_the_run_behind_the_measurements(tmp_path: Path) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    status, lines = measured(tmp_path, scripted([Scenario("ours")]), extras={"stop": stop, "never": lambda seconds: 1})
    assert status == command.INTERRUPTED and lines[-1]["reason"] == "interrupted"
    assert [line["kind"] for line in lines] == ["run", "extra", "measurement", "extra", "end"]


def test_a_program_that_is_killed_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        f"import sys, os, pathlib; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import records\n"
        f"file = records.Records(pathlib.Path({str(tmp_path)!r}), 'killed')\n"
        "file.write('extra', {'name': 'x', 'value': float('nan')}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    (path,) = tmp_path.iterdir()
    assert list(read(path)) == [{"kind": "extra", "name": "x", "value": None}]
    path.write_text(path.read_text() + '{"kind": "extra", "na')
    assert len(list(read(path))) == 1
    path.write_text("{broken\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1: not JSON"):
        list(read(path))


def test_a_lost_device_ends_the_run_at_once_and_names_what_it_did(tmp_path: Path) -> None:
    bench = Scripted()

    class Fatal(Scenario):
        def __call__(self) -> Any:
            bench.lost = True
            raise RuntimeError("illegal memory access")

    status, lines = measured(tmp_path, scripted([Scenario("ours"), Fatal("fatal")]), bench, given=[CASE, CASE])
    assert status == 1 and lines[-1]["reason"].startswith("the device does not answer any more, since fatal on float16, d 16, N 16")
    assert [line["implementation"] for line in lines if line["kind"] == "measurement"] == ["fatal", "ours"]


def test_a_reference_that_cannot_be_had_leaves_the_times(tmp_path: Path) -> None:
    def none(*_: Any) -> Any:
        raise ImportError("libcublas.so.13")

    what = dataclasses.replace(scripted([Scenario("ours")]), reference=none)
    status, lines = measured(tmp_path, what)
    row = next(line for line in lines if line["kind"] == "measurement")
    assert status == 0 and row["right"] is None and row["no_reference"] == "ImportError: libcublas.so.13" and row["tflops"] > 0


def test_a_budget_stops_in_time_and_says_what_it_left_out(tmp_path: Path) -> None:
    """A case takes 30 s: 3 of 10 are done in 100, since the fourth would not be."""
    bench = Scripted()
    with records.Records(tmp_path, "scripted") as file:
        effort, budget = timing.Effort(sets=1, least=2, most=2), records.Budget(100, lambda: bench.now)
        session = timing.Session(bench, scripted([Scenario("ours", seconds=10.0)]), file, budget, effort)
        session.measure([dataclasses.replace(CASE, n=n) for n in range(1, 11)])
    lines = list(read(file.path))
    assert [line["n"] for line in lines if line["kind"] == "measurement"] == [1, 2, 3]
    (left,) = (line for line in lines if line["kind"] == "left_out")
    assert left["reason"] == "no time left" and [case["n"] for case in left["cases"]] == [4, 5, 6, 7, 8, 9, 10]
    assert "left out, since no time left: 7 cases" in list(report.summary(lines))


@pytest.mark.parametrize(("seconds", "found"), [(10.0, {"repeats": 2}), (40.0, {"error": "not timed"})])
def test_a_budget_that_ends_within_a_case_leaves_what_was_timed_of_it(seconds: float, found: Any, tmp_path: Path) -> None:
    """Once to know how often, at least 3 times in all; 25 s allow two more of 10, none of 40."""
    bench = Scripted()
    with records.Records(tmp_path, "scripted") as file:
        budget = records.Budget(25, lambda: bench.now)
        session = timing.Session(bench, scripted([Scenario("ours", seconds=seconds)]), file, budget, timing.Effort(sets=1, least=3))
        session.measure([CASE])
    (line,) = read(file.path)
    assert found.items() <= line.items() and line["right"] and bench.now == {10.0: 30, 40.0: 40}[seconds]


# --- the file


def test_a_second_run_of_a_day_has_a_file_of_its_own_and_a_file_can_be_added_to(tmp_path: Path) -> None:
    paths = []
    for _ in range(2):
        with records.Records(tmp_path, "NVIDIA H100 forward") as file:
            file.write("extra", {"name": "x"})
        paths.append(file.path)
    assert paths[1].stem == paths[0].stem + "-2" and paths[0].name.startswith("NVIDIA-H100-forward-2")
    with records.Records(paths[0], "whatever") as file:
        file.write("extra", {"name": "y"})
    assert [line["name"] for line in read(paths[0])] == ["x", "y"]


def test_no_line_names_the_user_the_machine_or_a_folder_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records.getpass, "getuser", lambda: "alice")
    monkeypatch.setattr(records.platform, "node", lambda: "gpu-box-7")
    monkeypatch.setattr(records.Path, "home", lambda: Path("/data/alice"))
    text = f"no /data/alice/x.cu, /home/bob/y, {ROOT}/tests, /tmp/pytest-of-alice/0 on gpu-box-7;\n malice is another word"
    told = records.anonymous(text)
    assert told == "no ~/x.cu, /home/-/y, ./tests, /tmp/pytest-of--/0 on -; malice is another word"
    assert len(records.anonymous("x" * 1000)) == records.LONGEST_TEXT


def test_what_is_measured_is_said_and_nothing_of_whose_it_is() -> None:
    told = command.surroundings(A100, lambda: {"cupy": "14"})
    assert set(told) == {"device", "date", "cupyflash", "commit", "python", "system", "versions"}
    assert told["device"]["tensor_peak"]["float16"] == 312e12 and told["versions"] == {"cupy": "14"}
    assert os.uname().nodename not in told["system"]

    def fails() -> Any:
        raise RuntimeError("no driver")

    assert command.surroundings(A100, fails)["versions"] == "RuntimeError: no driver"
