"""Benchmarks of the forward and of the backward without a GPU: on the simulated device, on scripted ones, on a CuPy of NumPy's."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash import Device
from cupyflash.sim.yardstick import DTYPES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
accuracy, ahead, cases, command, machine, records, report, timing = (
    importlib.import_module(name) for name in ("accuracy", "ahead", "cases", "command", "machine", "records", "report", "timing")
)
forward, backward = importlib.import_module("forward"), importlib.import_module("backward")
CASE = cases.Case("float16", 16, 16, False, 1, 1)
A100 = Device.named("A100-40GB")


@pytest.fixture(autouse=True)
def _few_host_calls(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [(case.dtype, case.d, case.n) for case in every[:2]] == [("float16", 128, 4096)] * 2
    full = next(case for case in every if (case.d, case.n, case.causal) == (128, 16384, False))
    assert full.flops == 4 * 16 * 16384**2 * 128 == full.problem.flops and 2.5 * full.flops == full.problem.backward_flops
    quick = cases.chosen(Device.named("H100-SXM"), quick=True)
    assert len(quick) == 12 and {case.dtype for case in quick} == {"float16"}


def test_a_device_without_bfloat16_is_not_asked_for_it() -> None:
    assert {case.dtype for case in cases.chosen(Device.named("T4"), quick=False)} == {"float16", "float32"}


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
    return status, list(records.read(file.path))


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
    assert [line["kind"] for line in lines] == ["run", "measurement", "extra", "end"]


def test_a_program_that_is_killed_leaves_whole_lines(tmp_path: Path) -> None:
    code = (
        f"import sys, os, pathlib; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import records\n"
        f"file = records.Records(pathlib.Path({str(tmp_path)!r}), 'killed')\n"
        "file.write('extra', {'name': 'x', 'value': float('nan')}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    (path,) = tmp_path.iterdir()
    assert list(records.read(path)) == [{"kind": "extra", "name": "x", "value": None}]
    path.write_text(path.read_text() + '{"kind": "extra", "na')
    assert len(list(records.read(path))) == 1
    path.write_text("{broken\n" + path.read_text())
    with pytest.raises(ValueError, match="line 1: no JSON"):
        list(records.read(path))


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
    lines = list(records.read(file.path))
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
    (line,) = records.read(file.path)
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
    assert [line["name"] for line in records.read(paths[0])] == ["x", "y"]


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


# --- the GPU's own code


def test_one_stream_of_both_libraries_or_a_clear_error() -> None:
    machine.require_one_stream(0x7F00, 0x7F00)
    for ours, theirs in ((0, 0), (0, 0x5), (0x5, 0), (0x5, 0x6)):
        with pytest.raises(RuntimeError, match=f"CuPy's stream is {ours:#x} and PyTorch's {theirs:#x}"):
            machine.require_one_stream(ours, theirs)


class Cupy(types.ModuleType):
    """CuPy as far as machine.py needs it, on NumPy's arrays; PyTorch beside it, whose ExternalStream(0) is a stream of its own."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.__version__, self.streams, self.recorded = "0", [0], itertools.count()
        self.cuda = types.SimpleNamespace(
            runtime=types.SimpleNamespace(getDevice=lambda: 0),
            Stream=self.stream,
            Event=self.event,
            get_elapsed_time=lambda start, end: 1000.0 * (end.at - start.at),  # ms
            get_current_stream=lambda: types.SimpleNamespace(ptr=self.streams[-1]),
        )
        self.get_default_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
        self.theirs = [0]

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @contextlib.contextmanager
    def entered(self, streams: list[int], ptr: int) -> Iterator[Any]:
        streams.append(ptr)
        yield types.SimpleNamespace(ptr=ptr, synchronize=lambda: None)
        streams.pop()

    def stream(self, non_blocking: bool) -> Any:
        assert non_blocking
        return self.entered(self.streams, 0x51)

    def event(self) -> Any:
        event = types.SimpleNamespace(at=0, synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", next(self.recorded))
        return event

    def RawKernel(self, code: str, name: str) -> Any:
        def launch(grid: Any, block: Any, arguments: Any) -> None:
            array, size, seed = arguments
            assert self.streams[-1] == 0x51 and size == array.size
            array[...] = np.random.default_rng(int(seed)).standard_normal(array.shape, np.float32)

        return launch

    def from_dlpack(self, tensor: Any) -> Any:
        return np.asarray(tensor)

    def torch(self) -> Any:
        """Its `cuda`."""
        return types.SimpleNamespace(
            ExternalStream=lambda ptr, device: ptr or 0x99,
            stream=lambda ptr: self.entered(self.theirs, ptr),
            current_stream=lambda device: types.SimpleNamespace(cuda_stream=self.theirs[-1]),
            empty_cache=lambda: None,
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Gpu on NumPy's arrays."""
    cupy = Cupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(machine.Device, "current", lambda: dataclasses.replace(A100, l2_bytes=64))
    monkeypatch.setattr(machine, "FILL_BYTES", 64)
    monkeypatch.setattr(machine, "_torch", lambda: (types.SimpleNamespace(cuda=cupy.torch()), None))
    monkeypatch.setenv("CUPY_TF32", "1")
    return machine.Gpu()


def test_everything_on_a_gpu_is_on_one_stream_of_its_own(gpu: Any) -> None:
    assert os.environ["CUPY_TF32"] == "0"
    with gpu:
        assert gpu.cupy.streams[-1] == gpu.cupy.theirs[-1] == 0x51 and gpu.fill_seconds == 1
        sample = gpu.sample(lambda: None)
        assert sample.seconds == 1 and sample.host_seconds < 1
        for dtype in ("float16", "bfloat16", "float32"):
            case = cases.Case(dtype, 16, 64, False, 1, 2)
            q, k = gpu.draw(case, 0, 2)
            assert q.dtype.name == dtype and q.shape == case.shape and not np.array_equal(q, k)
            assert np.array_equal(gpu.as_float32(q), q.astype(np.float32)) and abs(gpu.as_float32(q).std() - 1) < 0.1
            assert np.array_equal(gpu.draw(case, 0, 2)[1], k) and not np.array_equal(gpu.draw(case, 1, 2)[0], k)
        gpu.cupy.theirs.append(0x99)
        with pytest.raises(RuntimeError, match="PyTorch's 0x99"):
            gpu.torch(q)
        gpu.cupy.theirs.pop()
        gpu.release()
    assert gpu.cupy.streams == [0]


def test_the_whole_command_runs_on_a_gpu_of_numpy_s_arrays(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = dataclasses.replace(scripted([Scenario("ours")], RuntimeError("PyTorch")), name="forward", kernels=forward.kernels)
    monkeypatch.setattr(command, "Gpu", lambda: gpu)
    monkeypatch.setattr(command, "chosen", lambda device, quick: [CASE])
    monkeypatch.setattr(command.ahead, "processes", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(command.ahead.compile_all, "__defaults__", (lambda kernel: None,))
    assert command.main("", what, ["--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    lines = list(records.read(path))
    assert lines[0]["quick"] and not lines[0]["simulated"] and lines[0]["fill_seconds"] == 1
    ahead_of, _, row, *_ = lines[1:]
    assert ahead_of["value"]["kernels"] == ahead_of["value"]["compiled"] > 3
    assert row["right"] and row["clocks"]["before"]["error"]  # NumPy has no PCI bus
    assert "RuntimeError: PyTorch" in capsys.readouterr().out


def test_kernels_are_compiled_ahead_once_each_and_what_fails_is_told() -> None:
    bench = types.SimpleNamespace(device=A100)
    for what, files in ((forward.FORWARD, {"fa1_forward.cu", "fa2_forward.cu"}), (backward.BACKWARD, {"fa2_backward.cu"})):
        kernels = list(command.distinct(what, bench, cases.chosen(A100, quick=True)))
        assert len({(kernel.source, kernel.constants) for kernel in kernels}) == len(kernels) > 6
        assert files <= {kernel.source for kernel in kernels}

    def compile_one(kernel: Any) -> None:
        if kernel.source.startswith("standard"):
            raise RuntimeError("nvrtc")

    found = ahead.compile_all(kernels, 10, ThreadPoolExecutor(2), compile_one)
    assert found["kernels"] == len(kernels) == found["compiled"] + found["errors"] and found["first_error"] == "RuntimeError: nvrtc"


def test_clocks_are_read_from_the_driver_s_library() -> None:
    def clock(handle: Any, kind: int, answer: Any) -> int:
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_uint))[0] = 1000 * kind
        return 0

    def power(handle: Any, answer: Any) -> int:
        ctypes.cast(answer, ctypes.POINTER(ctypes.c_uint))[0] = 250_500
        return 0

    library = types.SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByPciBusId_v2=lambda bus, handle: 0,
        nvmlDeviceGetClockInfo=clock,
        nvmlDeviceGetTemperature=lambda handle, sensor, answer: 3,  # not supported
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle, answer: 0,
    )
    found = machine.Nvml("0000:01:00.0", library).read()
    assert found == {"sm_mhz": 1000, "memory_mhz": 2000, "celsius": None, "watts": 250.5, "throttle": 0}
    library.nvmlInit_v2 = lambda: 9
    with pytest.raises(OSError, match="NVML answers 9"):
        machine.Nvml("0000:01:00.0", library)


def test_peers_of_pytorch_compute_the_same_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    peers = importlib.import_module("peers")
    arrays = drawn(64, "float16")
    wide = [array.astype(np.float32) for array in arrays]
    for causal in (False, True):
        tensors = [torch.from_numpy(array.copy()) for array in arrays]
        (out,) = accuracy.forward(np, wide[:3], causal)
        forwards = dict(peers.Torch(torch, tensors[:3]).forward(causal, scores=1))
        assert list(forwards) == ["torch flash", "torch cudnn", "torch efficient", "torch math"]
        for name in ("torch flash", "torch math"):
            assert accuracy.relative_rms(np, forwards[name]().float().numpy(), out) < accuracy.bound("float16")
        gradients = dict(peers.Torch(torch, tensors).backward(causal))
        assert list(gradients) == ["torch flash", "torch cudnn", "torch efficient"]
        for _ in range(2):  # may be called again
            for ours, right in zip(gradients["torch flash"](), accuracy.gradients(np, wide, causal), strict=True):
                assert accuracy.relative_rms(np, ours.float().numpy(), right) < accuracy.bound("float16")


# --- dry runs: the benchmarks themselves


def test_the_model_s_clocks_stand_beside_each_tile_that_it_chooses_between() -> None:
    case = cases.Case("float16", 128, 4096, False, 4, 16)
    arrays = [np.empty((0,), np.float16)] * 3
    found = {each.name: each.facts for each in forward.ours(types.SimpleNamespace(device=A100), case, arrays)}
    assert next(iter(found)) == "fa2" and list(found)[-2:] == ["fa1", "standard"] and len(found) == 5
    clocks = [facts["model_clocks"] for facts in found.values() if facts]
    assert clocks == sorted(clocks) and all(0 < each < math.inf for each in clocks)
    assert {facts["tile"] for name, facts in found.items() if facts and name != "fa2"} == {
        name.removeprefix("fa2 ") for name in found if name.startswith("fa2 ")
    }


def dry(benchmark: Any, out: Path | None, without: Sequence[str]) -> list[dict[str, Any]]:
    flags = [flag for name in without for flag in ("--without", name)]
    assert benchmark.main(["--dry-run", *flags, *(["--out", str(out)] if out else [])]) == 0
    (path,) = (path for path in (out or Path(tempfile.gettempdir())).rglob("simulated-A100-40GB-*.jsonl"))
    return list(records.read(path))


def rows_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {line["implementation"]: line for line in lines if line["kind"] == "measurement"}


def test_a_dry_run_measures_and_writes_nothing_into_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(forward, "first_calls", lambda code, seconds: {"cold": 1, "warm": 0})
    before = set((ROOT / "benchmarks").rglob("*.json*"))
    tiles = [f"fa2 {size}" for size in ("64x128", "128x64", "16x128")]
    lines = dry(forward, None, ["fa1", "standard", *tiles])
    assert set((ROOT / "benchmarks").rglob("*.json*")) == before
    rows = rows_of(lines)
    assert list(rows) == ["fa2", "numpy"] and rows["fa2"]["right"] and rows["fa2"]["repeats"] == 2
    row = rows["fa2"]
    assert row["tflops"] == pytest.approx(4 * 2 * 32**2 * 16 / 2 / row["seconds"] / 1e12) and row["model_clocks"] > 0
    assert {line["name"] for line in lines if line["kind"] == "extra"} == {"warm call, host", "first call"}
    assert lines[0]["simulated"] and lines[0]["versions"]["numpy"] == np.__version__ and lines[-1]["reason"] == "done"


def test_first_calls_are_those_of_new_processes_with_a_cache_of_their_own() -> None:
    code = "import os, json; print('x'); print(json.dumps({'new': not os.listdir(os.environ['CUPY_CACHE_DIR'])}));"
    found = forward.first_calls(code + "open(os.environ['CUPY_CACHE_DIR'] + '/k', 'w')", 60)
    assert found == {"cold": {"new": True}, "warm": {"new": False}}
    with pytest.raises(RuntimeError, match="exit status 3"):
        forward.first_calls("exit(3)", 60)


def test_ncu_s_figures_are_read_from_among_its_messages() -> None:
    text = (
        '==PROF== Connected to process 7\n"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","fa2_forward","dram__bytes_read.sum","byte","1,048,576"\n"0","fa2_forward","lts__t_bytes.sum","byte","4194304"\n'
        '"0","fa2_forward","launch__waves","","1"\n'
    )
    assert forward.ncu_metrics(text) == {"dram__bytes_read.sum": 1048576.0, "lts__t_bytes.sum": 4194304.0}
    assert forward.ncu_metrics("==ERROR== ERR_NVGPUCTRPERM") == {}
