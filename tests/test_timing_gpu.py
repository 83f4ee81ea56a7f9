"""The benchmarks' own code for a GPU, on a CuPy of NumPy's arrays, and their dry runs on the simulated device."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import itertools
import math
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_timing import (
    A100,
    CASE,
    ROOT,
    Scenario,
    accuracy,
    ahead,
    backward,
    cases,
    command,
    drawn,
    few_host_calls,  # noqa: F401  # for all tests here, too
    forward,
    machine,
    report,
    scripted,
)

from cupyflash.schedules import fa2_tiles
from cupyflash.sim.clock.measured import read

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
    lines = list(read(path))
    assert lines[0]["quick"] and not lines[0]["simulated"] and lines[0]["fill_seconds"] == 1
    ahead_of, _, _, row, *_ = lines[1:]
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
    others = ["triton"] * (not peers.missing("triton"))
    arrays = drawn(64, "float16")
    wide = [array.astype(np.float32) for array in arrays]
    for causal in (False, True):
        tensors = [torch.from_numpy(array.copy()) for array in arrays]
        (out,) = accuracy.forward(np, wide[:3], causal)
        forwards = dict(peers.Torch(torch, tensors[:3]).forward(causal, scores=1))
        assert list(forwards) == ["torch flash", "torch cudnn", "torch efficient", "torch math", "torch flex", *others]
        for name in ("torch flash", "torch math"):
            assert accuracy.relative_rms(np, forwards[name]().float().numpy(), out) < accuracy.bound("float16")
        gradients = dict(peers.Torch(torch, tensors).backward(causal))
        assert list(gradients) == ["torch flash", "torch cudnn", "torch efficient", "torch flex"]
        for _ in range(2):  # may be called again
            for ours, right in zip(gradients["torch flash"](), accuracy.gradients(np, wide, causal), strict=True):
                assert accuracy.relative_rms(np, ours.float().numpy(), right) < accuracy.bound("float16")


def test_a_peer_that_is_not_there_or_broken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = importlib.import_module("peers")
    peers.missing.cache_clear()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(peers, "MODULES", ("flashinfer", "json"))
    assert list(peers.all_missing()) == ["flashinfer"] and peers.missing("flashinfer").startswith("ModuleNotFoundError: ")
    peers.missing.cache_clear()


def test_flash_attentions_and_flashinfer_are_called_as_they_are_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs of theirs on PyTorch's own products: each takes (b, n, h, d) without copies, and one gives L beside O."""
    torch = pytest.importorskip("torch")
    peers = importlib.import_module("peers")

    def own(q: Any, k: Any, v: Any, causal: bool) -> Any:
        assert q.is_contiguous() and q.shape == (1, 64, 2, 32)
        each = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*each, is_causal=causal).transpose(1, 2)

    class Wrapper:
        def __init__(self, workspace: Any, layout: str) -> None:
            assert layout == "NHD"

        def plan(self, q_starts: Any, k_starts: Any, heads: int, kv_heads: int, d: int, *, causal: bool, **types: Any) -> None:
            assert q_starts.tolist() == k_starts.tolist() == [0, 64] and (heads, kv_heads, d) == (2, 2, 32)
            self.causal = causal

        def run(self, q: Any, k: Any, v: Any) -> Any:
            return own(q[None], k[None], v[None], self.causal)[0]

    cute = types.SimpleNamespace(flash_attn_func=lambda *given, causal: (own(*given, causal), "L"))
    stubs = {
        "flash_attn": types.SimpleNamespace(flash_attn_func=own, cute=cute),
        "flash_attn.cute": cute,
        "flash_attn_interface": types.SimpleNamespace(flash_attn_func=own),
        "flashinfer": types.SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper),
        "triton": None,
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    peers.missing.cache_clear()
    arrays = drawn(64, "float16")
    wide = [array.astype(np.float32) for array in arrays]
    tensors = [torch.from_numpy(array.copy()) for array in arrays]
    forwards = dict(peers.Torch(torch, tensors[:3]).forward(True, scores=1))
    gradients = dict(peers.Torch(torch, tensors).backward(True))
    peers.missing.cache_clear()
    (out,) = accuracy.forward(np, wide[:3], True)
    for name in ("flash_attn", "flash_attn 3", "flash_attn 4", "flashinfer"):
        assert accuracy.relative_rms(np, forwards[name]().float().numpy(), out) < accuracy.bound("float16"), name
    assert list(gradients)[-3:] == ["flash_attn", "flash_attn 3", "flash_attn 4"]
    for ours, right in zip(gradients["flash_attn 4"](), accuracy.gradients(np, wide, True), strict=True):
        assert accuracy.relative_rms(np, ours.float().numpy(), right) < accuracy.bound("float16")


# --- dry runs: the benchmarks themselves


def test_the_model_s_clocks_stand_beside_each_tile_that_it_chooses_between() -> None:
    case = cases.Case("float16", 128, 4096, False, 4, 16)
    arrays = [np.empty((0,), np.float16)] * 3
    found = {each.name: each.facts for each in forward.ours(types.SimpleNamespace(device=A100), case, arrays)}
    assert list(found)[:2] == ["auto", "fa2"] and list(found)[-2:] == ["fa1", "standard"] and len(found) == 6
    assert found.pop("auto") == {"algorithm": "fa2"}
    clocks = [facts["model_clocks"] for facts in found.values() if facts]
    assert clocks == sorted(clocks) and all(0 < each < math.inf for each in clocks)
    assert {facts["tile"] for name, facts in found.items() if facts and name != "fa2"} == {
        name.removeprefix("fa2 ") for name in found if name.startswith("fa2 ")
    }


def test_the_clock_model_is_asked_about_the_same_tiles_and_stands_beside_the_clock() -> None:
    case = cases.Case("float16", 128, 4096, False, 4, 16)
    named = [name for name, _ in forward.variants(A100, [case, dataclasses.replace(case, dtype="float32")])]
    arrays = [np.empty((0,), np.float16)] * 3
    tiles = [each.name for each in forward.ours(types.SimpleNamespace(device=A100), case, arrays) if each.name.startswith("fa2")]
    assert [each["implementation"] for each in named] == tiles
    timed = {"kind": "measurement", "ours": True, "right": True, "seconds": 2e-3, "spread_s": 0, "tflops": 1}
    measured = [{**timed, **each} for each in named]
    modelled = [{**named[1], "model_seconds": 1e-3}, {**named[0], "n": 1, "model_seconds": 1}]
    said = {"kind": "extra", "name": report.MODEL, "value": modelled}
    told = [line for line in report.summary([*measured, said]) if "model" in line]
    assert told == [f"float16, d 128, N 4096: {tiles[1]}: model 1.000 ms, clock 2.000 ms, 2.00 times the model's"]
    refused = {"kind": "extra", "name": report.MODEL, "error": "RuntimeError: no cuobjdump"}
    assert "clock model: RuntimeError: no cuobjdump" in list(report.summary([*measured, refused]))


def dry(benchmark: Any, out: Path | None, without: Sequence[str]) -> list[dict[str, Any]]:
    flags = [flag for name in without for flag in ("--without", name)]
    assert benchmark.main(["--dry-run", *flags, *(["--out", str(out)] if out else [])]) == 0
    (path,) = (path for path in (out or Path(tempfile.gettempdir())).rglob("simulated-A100-40GB-*.jsonl"))
    return list(read(path))


def rows_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {line["implementation"]: line for line in lines if line["kind"] == "measurement"}


def test_a_dry_run_measures_and_writes_nothing_into_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(forward, "first_calls", lambda code, seconds: {"cold": 1, "warm": 0})
    clock = types.SimpleNamespace(time=lambda: types.SimpleNamespace(seconds=1.0))
    monkeypatch.setattr(command, "clocks", lambda schedule: [clock])  # test_clock_planned.py has them
    before = set((ROOT / "benchmarks").rglob("*.json*"))
    tiles = [f"fa2 {rows}x{cols}" for rows in fa2_tiles.BLOCK_ROWS for cols in fa2_tiles.BLOCK_COLS]
    lines = dry(forward, None, ["fa1", "standard", *tiles])
    assert set((ROOT / "benchmarks").rglob("*.json*")) == before
    rows = rows_of(lines)
    assert list(rows) == ["auto", "fa2", "numpy"] and all(row["right"] and row["repeats"] == 2 for row in rows.values())
    assert rows["auto"]["algorithm"] == "fa2"
    row = rows["fa2"]
    assert row["tflops"] == pytest.approx(4 * 2 * 32**2 * 16 / 2 / row["seconds"] / 1e12) and row["model_clocks"] > 0
    extras = {"warm call, host", "first call", "clock model", "peers missing"}
    assert {line["name"] for line in lines if line["kind"] == "extra"} == extras
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
