"""Tensor maps of arrays: which ones TMA takes and why not, their place in a kernel's struct, and copies through them."""

from __future__ import annotations

import ctypes
import math
import os
import re
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tile_copy import ROWS, TileCopy, doubled, prepared

from cupyflash import Device, Problem, calls
from cupyflash.arrays import ArrayLayout, numpy_dtype
from cupyflash.launch import compiler, cubins, driver, first_use, launcher
from cupyflash.launch.binding import argument_values
from cupyflash.launch.driver import aligned
from cupyflash.launch.nvrtc import CompileError
from cupyflash.launch.params import Params, arrays, maps, numbers
from cupyflash.launch.simulated import Simulation
from cupyflash.launch.tensor_maps import ALIGNMENT, WORDS, Box, first_refusal, refusal
from cupyflash.schedules import TileSchedule
from cupyflash.sim.execution import machine_value, run_kernels
from cupyflash.sim.ptx.memory.swizzles import FILLS, INTERLEAVES, PROMOTIONS, SWIZZLES, TYPES, Description, decode
from cupyflash.sim.traffic import TensorTraffic

HALF = np.dtype(np.float16)


def layout(*shape: int, strides: tuple[int, ...] | None = None, offset: int = 0) -> ArrayLayout:
    made = ArrayLayout.contiguous(shape, HALF)
    return made._replace(strides=strides or made.strides, offset=offset)


# -- which arrays ---------------------------------------------------------------------------------------------------------

TAKEN = {
    "contiguous": layout(2, 3, 100, 64),
    "(b, n, h, d), seen as (b, h, n, d)": layout(2, 100, 3, 64).swapaxes(1, 2),
    "packed sequences, heads first": layout(100, 3, 64).swapaxes(0, 1),
    "one head": layout(100, 64),
    "a few columns of a wider array": layout(100, 40, strides=(1024, 2)),
    "one row, whatever its stride": layout(2, 3, 1, 41, strides=(-6, 0, 7, 2))._replace(shape=(1, 1, 1, 41)),
    "the longest stride": layout(2, 64, strides=((1 << 40) - 16, 2)),
    "one column, whose stride is nobody's": layout(4, 1, strides=(16, 99)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_array_that_tma_takes_and_its_map(name: str) -> None:
    array = TAKEN[name]
    assert refusal("Q", array) is None
    made = Box("Q", rows=128, columns=64, swizzle=128).of(array)
    whole = (1,) * (4 - array.ndim) + array.shape
    assert made.dims == whole[::-1] and made.box == (64, 128, 1, 1) and made.dtype == "float16" and len(made.strides) == 3
    steps = dict(zip(range(3), made.strides, strict=True))
    for axis, (length, stride) in enumerate(zip(array.shape[-2::-1], array.strides[-2::-1], strict=True)):
        assert steps[axis] == stride or length == 1
    assert all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in made.strides)


REFUSED = {
    "an address between": (layout(100, 64, offset=8), "takes addresses that are multiples of 16 bytes, and K's is 8 bytes off"),
    "rows between": (
        layout(100, 60),
        "strides that are positive multiples of 16 bytes below 2**40, and K's from row to row is 120",
    ),
    "heads between": (layout(2, 100, 64, strides=(12808, 128, 2)), "from head to head is 12,808"),
    "one for all": (layout(4, 2, 100, 64, strides=(0, 12800, 128, 2)), "from batch to batch is 0"),
    "backwards": (layout(100, 64, strides=(-128, 2)), "from row to row is -128"),
    "too far": (layout(2, 64, strides=(1 << 40, 2)), "from row to row is 1,099,511,627,776"),
    "too long": (layout(1, 64, strides=(128, 2))._replace(shape=((1 << 32) + 1, 64)), "at most 2**32 elements, and K's row has"),
    "nothing": (layout(2, 0, 64), "tensors with elements, and K has shape (2, 0, 64)"),
    "columns apart": (layout(100, 64, strides=(256, 4)), "rows of neighbours, and K's last axis has a stride of 4 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_why_tma_takes_no_such_array(name: str) -> None:
    array, says = REFUSED[name]
    reason = refusal("K", array)
    assert reason and reason.startswith("TMA ") and says in reason and "\n" not in reason and ". " not in reason
    assert first_refusal({"Q": TAKEN["contiguous"], "mask": None, "K": array, "V": layout(2, 0, 64)}) == reason
    with pytest.raises(ValueError, match=re.escape(says)):
        Box("K", 64, 64, 128).of(array)
    assert first_refusal({"Q": TAKEN["contiguous"], "mask": None}) is None


# -- the struct -----------------------------------------------------------------------------------------------------------


def test_maps_lie_first_at_multiples_of_their_own_size_as_in_c() -> None:
    made = Params((*maps("Q_map", "K_map"), *arrays("const Element", ("batch", "head", "row"), "Q"), *numbers("int", "n")))
    assert [made.dtype.fields[name][1] for name in ("Q_map", "K_map", "Q", "n")] == [0, 128, 256, 288]  # type: ignore[index]
    assert made.dtype.itemsize == 384
    assert dict(made.constants)["PARAMS"] == "TensorMap Q_map; TensorMap K_map; Rows<const Element> Q; int n;"
    q = np.zeros((2, 3, 32, 64), np.float16)
    boxes = {f"{name}_map": Box(name, 32, 64, 128).of(q) for name in "QK"}
    words, places = made.packed(made.values({"Q": q, "n": 7, **boxes}, "float16"))
    assert len(words) == 48 and places == {"Q_map": 0, "K_map": 16, "Q": 32} and not words[:33].any()
    assert words[33:37].tolist() == [3 * 32 * 64, 32 * 64, 64, 7]
    with pytest.raises(ValueError, match="tensor maps come first in a struct, got n, Q_map"):
        Params((*numbers("int", "n"), *maps("Q_map"))).dtype  # noqa: B018


def test_the_compiler_holds_the_places_of_maps_to_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupyflash.launch.compiler import ptx

    (kernel,) = TileCopy.of(Problem(1, 1, 1, 16, 16, 64, "float16")).kernels()
    assert ".target sm_90a" in ptx(kernel, (9, 0))
    wrong = np.dtype([(field.name, np.dtype(field.dtype, align=True)) for field in kernel.params.fields], align=True)
    params = Params(kernel.params.fields)
    monkeypatch.setitem(params.__dict__, "dtype", wrong)  # without the padding to 128 bytes
    with pytest.raises(CompileError, match="C and Python lay the struct out differently"):
        ptx(type(kernel)(**{**kernel.__dict__, "params": params}), (9, 0))


# -- copies on the machine ------------------------------------------------------------------------------------------------


def copied(schedule: TileSchedule, q: np.ndarray, out: np.ndarray, seed: int | None = None) -> Any:
    values = argument_values(schedule, {"Q": q, "K": q, "V": q, "O": out})
    return run_kernels(schedule, values, ("O",), seed=seed)


def drawn(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


SHAPES = {"plain": (2, 3, 37, 64), "swapped": (2, 37, 3, 64), "packed": (37, 3, 64), "one head": (37, 64), "narrow": (2, 3, 16, 64)}


@pytest.mark.parametrize("seed", [None, pytest.param(0, marks=pytest.mark.wide), pytest.param(1, marks=pytest.mark.wide)])
@pytest.mark.parametrize("name", SHAPES)
def test_a_kernel_copies_by_the_maps_of_its_struct(name: str, seed: int | None) -> None:
    """The numbers, the bytes in bounds under the tensors' own names, and nothing found."""
    q = drawn(*SHAPES[name])
    if name in ("swapped", "packed"):
        q = q.swapaxes(-3, -2)
    if name == "narrow":
        q = q[..., :40]
    out = np.empty_like(q)
    schedule = TileCopy.of(Problem.from_arrays(q, q, q))
    traffic, counters, findings = copied(schedule, q, out, seed)
    assert findings == () and (out == 2 * q).all()
    assert dict(traffic) == {"Q": TensorTraffic(q.nbytes, 0), "O": TensorTraffic(0, q.nbytes)}
    assert counters["copy_tiles"] and q.shape[-2] % ROWS in (0, 5)


def test_a_prepared_simulation_copies_by_the_maps_of_each_calls_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyflash.sim.estimate.refuse_slow", lambda *_: None)  # which knows no such algorithm
    q = drawn(2, 37, 64)
    copy = prepared(q, Simulation(Device.named("H100-SXM"), math.inf))
    for turn in range(2):
        assert (doubled(q + turn, copy) == 2 * (q + turn)).all()


def test_what_nobody_wrote_is_seen_through_a_map() -> None:
    """O that is read before it is stored, through the map of another field."""
    q, out = drawn(37, 64), np.empty((37, 64), np.float16)
    schedule = TileCopy.of(Problem.from_arrays(q, q, q))
    values = argument_values(schedule, {"Q": q, "K": q, "V": q, "O": out})
    values["Q_map"] = Box("O", ROWS, 64, 128).of(out)
    _, _, findings = run_kernels(schedule, values, ("O",))
    assert {finding.kind for finding in findings} == {"uninitialised"}


# -- encoded by the driver ------------------------------------------------------------------------------------------------


class Driver:
    """The driver's two functions as ctypes has them: they write down what they are given, and answer with `statuses`, then 0."""

    def __init__(self) -> None:
        self.encoded: list[tuple[int, Description]] = []
        self.replaced: list[int] = []
        self.statuses: list[int] = []
        self.functions = driver.Functions(driver.ENCODE(self.encode), driver.REPLACE_ADDRESS(self.replace_address))

    def encode(self, at: int, kind: int, rank: int, address: int, *rest: Any) -> int:
        (dims, strides, box, steps), (interleave, swizzle, promotion, fill) = rest[:4], rest[4:]
        numbers = [
            tuple((kind_ * count).from_address(place))
            for kind_, count, place in (
                (ctypes.c_uint64, rank, dims),
                (ctypes.c_uint64, rank - 1, strides),
                (ctypes.c_uint32, rank, box),
                (ctypes.c_uint32, rank, steps),
            )
        ]
        names = tuple(TYPES)[kind], *numbers, INTERLEAVES[interleave], SWIZZLES[swizzle], PROMOTIONS[promotion], FILLS[fill]
        self.encoded.append((address, Description(*names)))
        assert at % ALIGNMENT == 0
        ctypes.memset(at, len(self.encoded), 8 * WORDS)
        return self.statuses.pop(0) if self.statuses else 0

    def replace_address(self, at: int, address: int) -> int:
        self.replaced.append(address)
        assert at % ALIGNMENT == 0 and ctypes.string_at(at, 128) == bytes([ctypes.string_at(at)[0]] * 128)
        return self.statuses.pop(0) if self.statuses else 0


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "functions", lambda: made.functions)
    return made


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_the_driver_is_told_what_the_machine_is(recorded: Driver, dtype: str, swizzle: int) -> None:
    for array in (drawn(2, 3, 37, 64), drawn(2, 37, 3, 64).swapaxes(1, 2), drawn(1, 1, 1, 40), drawn(37, 3, 64).swapaxes(0, 1)):
        array = array.astype(numpy_dtype(dtype))
        columns = (swizzle or 128) // array.itemsize
        made = Box("K", rows=80, columns=columns, swizzle=swizzle).of(array)
        room, start = aligned()
        driver.encode(made, 0x7F00_0000_1000, start)
        assert recorded.encoded.pop() == (0x7F00_0000_1000, machine_value(made).description)
        assert room and ctypes.string_at(start, 8 * WORDS) == b"\1" * 128


def test_what_the_driver_refuses_is_one_error(recorded: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made, (_room, start) = Box("K", 64, 64, 128).of(drawn(37, 64)), aligned()
    recorded.statuses = [1]
    with pytest.raises(RuntimeError, match=r"refuses a map of K at 0x1000: float16, dims=\(64, 37, 1, 1\).*INVALID_VALUE"):
        driver.encode(made, 0x1000, start)
    recorded.statuses = [1, 1]
    with pytest.raises(RuntimeError, match=r"refuses the address 0x2000 in a map of K: CUDA_ERROR_INVALID_VALUE"):
        driver.replace_address(made, 0x2000, start)
    set_devices: list[int] = []
    runtime = types.SimpleNamespace(getDevice=lambda: 1, setDevice=set_devices.append)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime)))
    for status in (201, 3):  # a thread that has not used CUDA yet
        recorded.statuses = [status]
        driver.encode(made, 0x1000, start)
        recorded.statuses = [status, status]
        driver.replace_address(made, 0x1000, start)
    assert set_devices == [1] * 4
    recorded.statuses = [201, 201]
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_CONTEXT"):
        driver.encode(made, 0x1000, start)
    recorded.statuses = [999]
    with pytest.raises(RuntimeError, match="error 999"):
        driver.encode(made, 0x1000, start)


def test_another_threads_first_map_may_come_between(recorded: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on an H100: an address set in a map of zeros, which the kernel that got it called an illegal instruction."""
    encoded = driver.EncodedMap(Box("K", 64, 64, 128).of(drawn(37, 64)))

    def between(words: bytes = b"") -> tuple[Any, int]:
        monkeypatch.undo()
        monkeypatch.setattr(driver, "functions", lambda: recorded.functions)
        encoded.of(0x2000)
        return aligned(words)

    monkeypatch.setattr(driver, "aligned", between)
    assert all(encoded.of(0x1000))
    assert [address for address, _ in recorded.encoded] == [0x2000, 0x1000]


def test_without_a_driver_only_the_first_map_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda.so.none")
    driver.functions.cache_clear()
    with pytest.raises(RuntimeError, match=r"tensor maps need the driver of CUDA 12 or later \(libcuda.so.none\)"):
        driver.encode(Box("K", 64, 64, 128).of(drawn(37, 64)), 0x1000, 0)
    monkeypatch.setattr(driver, "LIBRARY", None)  # this process itself, which has no such function
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled"):
        driver.functions()
    code = "import ctypes; ctypes.CDLL = None; import cupyflash, cupyflash.launch.launcher, cupyflash.launch.cubins"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- launched on a GPU's stand-in -----------------------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    pytest.importorskip("cupy.cuda._compiler_cache")  # of CuPy 14, whose classes the stand-in takes
    import stand_in_cupy

    hopper = Device.named("H100-SXM")
    monkeypatch.setenv(first_use.FOLDER, str(tmp_path))
    monkeypatch.setattr(cubins, "compiled", stand_in_cupy.machine_code)
    monkeypatch.setattr(cubins, "compiler", stand_in_cupy.compiler)
    monkeypatch.setattr(driver, "functions", lambda: stand_in_cupy.functions)
    monkeypatch.setattr(stand_in_cupy.runtime, "figures", hopper)
    monkeypatch.setattr("cupyflash.launch.dispatch.current_gpu", lambda ordinal: hopper)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setitem(sys.modules, "cupy", stand_in_cupy)
    return stand_in_cupy


def test_a_map_is_encoded_once_a_layout_and_brings_each_calls_address(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def told(name: str, function: Any) -> Any:
        return lambda *values: asked.append(name) or function(*values)

    named = zip(driver.Functions._fields, cupy.functions, strict=True)
    noted = driver.Functions(*(told(name, function) for name, function in named))
    monkeypatch.setattr(driver, "functions", lambda: noted)
    arrays = [cupy.asarray(drawn(2, 37, 64) + turn) for turn in range(3)]
    copy = prepared(arrays[0])
    outs = [doubled(array, copy) for array in arrays]
    assert asked == ["encode"] * 2 + ["replace_address"] * 4
    assert all((out.get() == 2 * array.get()).all() for out, array in zip(outs, arrays, strict=True))
    (cubin,) = [path for path in Path(os.environ[first_use.FOLDER]).iterdir() if path.suffix == ".cubin"]
    assert ".target sm_90a" in cubin.read_text()


def test_threads_streams_and_graphs_have_their_own_addresses(cupy: Any) -> None:
    """All through one prepared call, whose first launch may be anyone's."""
    hosts = [drawn(37, 64) + turn for turn in range(8)]
    copy = prepared(cupy.asarray(hosts[0]))

    def work(host: np.ndarray) -> bool:
        with cupy.cuda.Stream(non_blocking=True):
            q = cupy.asarray(host)
            return bool((doubled(q, copy).get() == 2 * host).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, hosts))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        there = [cupy.asarray(host) for host in hosts[:2]]
        stream.begin_capture()
        outs = [doubled(q, copy) for q in there]
        graph = stream.end_capture()
        for _ in range(2):
            graph.launch()
            assert all((out.get() == 2 * q.get()).all() for out, q in zip(outs, there, strict=True))
            there[0][...] = there[0] + there[0]


def test_the_struct_of_a_launch_is_as_prepared_and_its_maps_first(cupy: Any) -> None:
    given: list[Any] = []
    q = cupy.asarray(drawn(37, 64))
    copy = prepared(q)
    ((function, *launch),) = copy._functions
    copy._functions = [(lambda grid, block, args, **rest: given.append((args, rest)), *launch)]
    doubled(q, copy)
    ((struct,), rest) = given[0]
    assert struct.dtype == TileCopy.params.dtype and rest == {"shared_mem": ROWS * 128} and function
    assert decode(struct["Q_map"].tobytes())[1] == q.data.ptr  # type: ignore[index]


def test_a_key_depends_on_layouts_and_alignment_only(cupy: Any) -> None:
    """Arrays at other addresses find what was prepared; one that begins between 16 bytes does not, and has no map."""
    room = cupy.zeros(4096, np.float16)
    arrays = [room[start : start + 1024].reshape(16, 64) for start in (0, 1024, 1028)]
    first, second, between = (launcher.read(calls.FORWARD, {"q": each})[0] for each in arrays)
    assert None is not first == second != between
    with pytest.raises(ValueError, match="Q's is 8 bytes off"):
        Box("Q", ROWS, 64, 128).of(arrays[2])
