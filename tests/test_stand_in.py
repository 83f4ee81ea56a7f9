"""The GPU tests' own code, executed without a GPU, and how strict the CuPy is that stands in for the real one."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy.cuda._compiler_cache")  # of CuPy 14, whose classes stand_in_cupy takes

import stand_in_cupy as cupy

from cupyflash.sim.numbers.yardstick import DTYPES
from cupyflash.sim.ptx.state import segments

ROOT = Path(__file__).parents[1]
GPU_TESTS = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))

TWICE = r"""extern "C" __global__ void twice(const float* x, float* y, int n, float a, const char* nothing) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}"""


def gpu_tests(report: Path, *arguments: str, device: str = "1") -> dict[str, list[tuple[str, str]]]:
    """The results of each test function on the stand-in: ("passed", "") or ("skipped", why), for each of its cases."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", f"--junitxml={report}", *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"CUPYFLASH_STAND_IN": device}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    found: dict[str, list[tuple[str, str]]] = {}
    for case in ET.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        outcome = ("passed", "") if skipped is None else ("skipped", str(skipped.get("message")))
        module, function = case.get("classname", "").rpartition(".")[2], case.get("name", "").partition("[")[0]
        found.setdefault(f"{module}::{function}", []).append(outcome)
    return found


def device_of(file: str) -> str:
    """The device that stands in for the GPU of a file's tests; "1" is the A100-40GB."""
    return "H200" if "hopper" in file or "streams" in file else "1"


def first_cases(device: str) -> list[str]:
    """The first case of each test function of the files that a device stands in for."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "--collect-only", "-o", "addopts=", "-q"]
    listed = subprocess.run(
        [*command, *(f"tests/gpu/{file}" for file in GPU_TESTS if device_of(file) == device)],
        cwd=ROOT,
        env=os.environ | {"CUPYFLASH_STAND_IN": "1"},
        capture_output=True,
        text=True,
    )
    assert listed.returncode == 0, listed.stdout
    return [*{line.partition("[")[0]: line for line in reversed(listed.stdout.splitlines()) if "::" in line}.values()][::-1]


@pytest.mark.wide
@pytest.mark.parametrize("device", ["1", "H200"])
def test_every_gpu_test_runs_on_the_stand_in(device: str, tmp_path: Path) -> None:
    """The first case of each function passes; PyTorch alone needs the chip. All cases
    passed as T4, A100-40GB, H100-SXM, H200 and B200: `CUPYFLASH_STAND_IN=H200 python -m pytest tests/gpu -m ""`, two minutes."""
    found = gpu_tests(tmp_path / "report.xml", *first_cases(device), device=device)
    only_skipped = {name for name, outcomes in found.items() if all(outcome == "skipped" for outcome, _ in outcomes)}
    assert found and only_skipped <= {"test_gpu_foreign::test_tensors_of_pytorch"}


@pytest.mark.wide
def test_what_a_gpu_cannot_do_is_skipped_with_its_reason(tmp_path: Path) -> None:
    found = gpu_tests(tmp_path / "report.xml", "tests/gpu/test_gpu_attention.py", "-k", "test_numbers", device="T4")
    outcomes = found["test_gpu_attention::test_numbers"]
    assert ("passed", "") in outcomes
    assert [why for outcome, why in outcomes if outcome == "skipped"] == ["bfloat16 needs compute capability 8.0, this GPU has 7.5"]


@pytest.mark.wide
def test_without_a_gpu_they_are_skipped_and_say_so() -> None:
    """One skipped item a file, which is not imported."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-rs", "tests/gpu"]
    environment = {name: value for name, value in os.environ.items() if name != "CUPYFLASH_STAND_IN"} | {"CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and f"SKIPPED [{len(GPU_TESTS)}]" in ran.stdout and "needs a GPU: " in ran.stdout, ran.stdout
    assert ran.stdout.splitlines()[-1].startswith(f"{len(GPU_TESTS)} skipped")


def test_memory_is_as_aligned_for_a_kernel_as_it_is_on_a_gpu() -> None:
    """CuPy's is at multiples of 512 bytes, wherever NumPy has put what stands in for it."""
    starts = {segments.Segment("x", 0, cupy.empty(1 << size, np.uint8).host).pointer % 512 for size in range(16)}
    assert starts == {0}


def kernel() -> tuple[Any, Any, Any]:
    """A kernel, its input and where its output goes."""
    return (
        cupy.RawModule(code=TWICE).get_function("twice"),
        cupy.asarray(np.arange(100, dtype=np.float32)),
        cupy.empty(100, np.float32),
    )


def launched(kernel: Any, x: Any, y: Any) -> Any:
    kernel((4,), (32,), (x, y, np.int32(100), np.float32(2), None))
    return y


def test_work_waits_until_it_is_waited_for() -> None:
    """Streams run in order; a stream without a wait has not worked yet, and its memory is NaN."""
    twice, x, y = kernel()
    launched(twice, x, y)
    assert np.isnan(y.host).all() and np.array_equal(y.get(), 2 * np.arange(100))
    x.fill(500)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        launched(twice, x + 1, y)
        assert not (y.host == 1002).any()
    assert not (y.get() == 1002).any()  # on the default stream, which does not wait for this one
    with cupy.cuda.Stream(non_blocking=True):
        cupy.cuda.get_current_stream().wait_event(stream.record())
        assert (y.get() == 1002).all()


def test_a_graph_works_when_it_is_launched_and_on_memory_that_is_still_there() -> None:
    twice, x, y = kernel()
    x.get()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        launched(twice, x, y)
        graph = stream.end_capture()
        assert np.isnan(y.get()).all()
        graph.launch()
        assert (y.get() == 2 * np.arange(100)).all()
        stream.begin_capture()
        launched(twice, x + 1, y)
        graph = stream.end_capture()
    with pytest.raises(AssertionError, match=r"went back to the pool: an array of shape \(100,\)"):
        graph.launch(stream)


@pytest.mark.parametrize("wait", [lambda stream: stream.synchronize(), lambda stream: cupy.cuda.Device().synchronize()])
def test_capture_ends_where_the_host_waits(wait: Callable[[Any], None]) -> None:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        for transfer in (lambda: cupy.asarray(np.ones(3)), cupy.zeros(3).get):
            with pytest.raises(RuntimeError, match="transfers are disallowed"):
                transfer()
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="StreamCaptureUnsupported"):
            wait(stream)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="StreamCaptureInvalidated"):
            stream.end_capture()


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "conversion": (lambda: np.asarray(cupy.ones(3)), TypeError, "Implicit conversion"),
    "NumPy's array first": (lambda: np.ones(3) + cupy.ones(3), TypeError, "Unsupported type"),
    "NumPy's array second": (lambda: cupy.ones(3) + np.ones(3), TypeError, "Unsupported type"),
    "a loop that is not there": (lambda: cupy.empty(3, DTYPES["bfloat16"]) & 1, TypeError, r"Wrong type \(bfloat16\)"),
    "options in a list": (lambda: cupy.RawModule(code=TWICE, options=["-I."]), TypeError, "options"),  # type: ignore[arg-type]
    "arguments by position": (lambda: cupy.RawModule(TWICE), TypeError, "positional"),  # type: ignore[misc]
    "a number for a grid": (lambda: kernel()[0](4, (32,), ()), TypeError, "tuples"),
    "too few arguments": (lambda: kernel()[0]((4,), (32,), ()), AssertionError, "takes 5 arguments"),
    "a wider integer": (lambda: kernel()[0]((4,), (32,), (*kernel()[1:], 100, np.float32(2), None)), AssertionError, "of 8 bytes"),
    "an integer for a float": (
        lambda: kernel()[0]((4,), (32,), (*kernel()[1:], np.int32(1), np.int32(2), None)),
        AssertionError,
        "kind i",
    ),
    "a NumPy array": (lambda: kernel()[0]((4,), (32,), (np.ones(3), *[None] * 4)), TypeError, r"numpy.ndarray of shape \(3,\)"),
    "no scalar": (lambda: kernel()[0]((4,), (32,), ("x", *[None] * 4)), TypeError, "Unsupported type"),
    "shared memory": (lambda: kernel()[0]((4,), (32,), (), shared_mem=49153), AssertionError, "allowed are 49152"),
    "a capsule twice": (lambda: [capsule.taken() for capsule in [cupy.ones(3).__dlpack__()] * 2], ValueError, "multiple times"),
    "another GPU's memory": (lambda: other_gpu() + 1, AssertionError, "memory of GPU 1"),
}


def other_gpu() -> Any:
    with cupy.cuda.Device(1):
        return cupy.ones(3)


@pytest.mark.parametrize("what", REFUSED)
def test_refused_as_cupy_does_or_should(what: str) -> None:
    call, error, says = REFUSED[what]
    with pytest.raises(error, match=says):
        call()


def test_faults_of_a_kernel_are_found() -> None:
    twice, x, y = kernel()
    launched(twice, x[:50], y)
    with pytest.raises(AssertionError, match=r"faults, the first: .*out of bounds"):
        y.get()


def test_views_and_protocols_share_memory() -> None:
    x = cupy.asarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    foreign = type("Foreign", (), {"__cuda_array_interface__": x.swapaxes(0, 2).__cuda_array_interface__})()
    for view in (cupy.asarray(foreign).swapaxes(0, 2), cupy.from_dlpack(x), x.reshape(2, 3, 4), x[:]):
        view[1, 2] = 9
        assert view.data.ptr == x.data.ptr and view.strides == x.strides and (x.get()[1, 2] == 9).all()
        view[1, 2] = 0
    like = cupy.empty_like(x.swapaxes(0, 2))
    assert like.strides == np.empty_like(x.get().swapaxes(0, 2)).strides
