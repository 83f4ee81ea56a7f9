"""The machine of a benchmark: the GPU at hand, or the simulated device, with the same methods.

On a GPU everything runs on one non-blocking stream, CuPy's and PyTorch's alike. A call's time is taken by events around it, after a
buffer is overwritten: that empties the L2 and keeps the GPU busy until the call is queued.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from cases import Case
from peers import Torch
from records import attempt, told

from cupyflash import Device, simulated_device
from cupyflash.arrays import numpy_dtype
from cupyflash.basics import Report, Shape

Call = Callable[[], Any]
FILL_BYTES = 1 << 29
FILL_SECONDS = 4e-4  # at least, before each call: longer than any implementation takes to be queued


class Sample(NamedTuple):
    """One call: seconds on the device, and of the host until the call was queued."""

    seconds: float
    host_seconds: float


class Machine(ABC):
    """The machine that a benchmark runs on. The defaults suit one without a queue, a cache or PyTorch."""

    device: Device
    xp: Any  # NumPy or CuPy, by which numbers are compared
    fill_seconds: float | None = None  # for which the device is busy before each call; None where a call is not queued

    @abstractmethod
    def __enter__(self) -> Machine: ...
    @abstractmethod
    def __exit__(self, *raised: Any) -> None: ...

    @abstractmethod
    def draw(self, case: Case, seed: int, count: int) -> list[Any]:
        """Draw `count` arrays of the case's shapes, of standard normal numbers."""

    @abstractmethod
    def sample(self, call: Call) -> Sample:
        """Times one call."""

    @abstractmethod
    def as_float32(self, out: Any) -> Any:
        """An array or tensor as an array of `xp`."""

    def wait(self) -> None:  # noqa: B027
        """Until the device has done all that it was given."""

    def release(self) -> None:  # noqa: B027
        """Give cached memory back, so that one library's is there for the other."""

    def memory(self) -> float:
        """Bytes that are free."""
        return math.inf

    def clocks(self) -> Report:
        """MHz, degrees Celsius and watts as they are now."""
        return {}

    def versions(self) -> Report:
        """Driver, CUDA and the libraries that take part."""
        return library_versions()

    def torch(self, *arrays: Any) -> Torch | None:
        """PyTorch on the same memory and stream. RuntimeError where its stream is another one; None where there is none."""
        return None


def require_one_stream(ours: int, theirs: int) -> None:
    """RuntimeError unless CuPy's and PyTorch's current streams are one, and not the null stream.

    torch.cuda.ExternalStream(0) is no null stream but a new one of PyTorch's own (pytorch issue 182960).
    """
    if not ours or ours != theirs:
        raise RuntimeError(f"CuPy's stream is {ours:#x} and PyTorch's {theirs:#x}: one of the two would be timed on the wrong one")


# Standard normal numbers without cuRAND, which not every machine has: two hashes of the place and the seed, by Box and Muller.
NORMAL = r"""
extern "C" __global__ void normal(float* x, unsigned long long n, unsigned long long seed) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        unsigned long long h = (seed + 1) * 0x9E3779B97F4A7C15ull + i * 0xD1B54A32D192ED03ull;
        h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
        h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
        h ^= h >> 31;
        const float u = ((unsigned)(h >> 40) + 1) * 0x1p-24f, turn = (unsigned)(h & 0xFFFFFF) * 0x1p-24f;
        x[i] = sqrtf(-2.0f * logf(u)) * cospif(2.0f * turn);
    }
}
"""


class Gpu(Machine):
    """The current CUDA device, from `with Gpu() as machine` on."""

    def __init__(self) -> None:
        os.environ["CUPY_TF32"] = "0"  # the reference's products are of full float32
        import cupy

        self.cupy = self.xp = cupy
        self.device, self.ordinal = Device.current(), cupy.cuda.runtime.getDevice()
        self._torch, self._without_torch = _torch()
        self._nvml: Nvml | None = None

    def __enter__(self) -> Gpu:
        self._stack = ExitStack()
        self.stream = self._stack.enter_context(self.cupy.cuda.Stream(non_blocking=True))
        if self._torch:
            cuda = self._torch.cuda
            self._stack.enter_context(cuda.stream(cuda.ExternalStream(self.stream.ptr, device=self.ordinal)))
        self._normal = self.cupy.RawKernel(NORMAL, "normal")
        self._events = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        self._flush, self._fills = self.cupy.empty(max(4 * self.device.l2_bytes, FILL_BYTES), self.cupy.uint8), 1
        once = min(self.sample(lambda: self._flush.fill(0)).seconds for _ in range(5))
        self._fills = max(1, math.ceil(FILL_SECONDS / once))
        self.fill_seconds = self._fills * once
        return self

    def __exit__(self, *raised: Any) -> None:
        self._stack.close()

    def draw(self, case: Case, seed: int, count: int) -> list[Any]:
        shapes = enumerate(case.shapes(count))
        return [self._rounded(self._drawn(shape, count * seed + number), case.dtype) for number, shape in shapes]

    def _drawn(self, shape: Shape, seed: int) -> Any:
        array = self.cupy.empty(shape, np.float32)
        self._normal((8 * self.device.sm_count,), (256,), (array, np.uint64(array.size), np.uint64(seed)))
        return array

    def _rounded(self, array: Any, dtype: str) -> Any:
        if dtype != "bfloat16":
            return array.astype(dtype)
        bits = (array.view(np.uint32) >> 16).astype(np.uint16)  # rounded to zero: CuPy may not know the type's arithmetic
        return bits.view(numpy_dtype(dtype))

    def as_float32(self, out: Any) -> Any:
        if hasattr(out, "detach"):
            return self.cupy.from_dlpack(out.detach().float().contiguous())
        if out.dtype.name == "bfloat16":
            return (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return out.astype(np.float32)

    def sample(self, call: Call) -> Sample:
        start, end = self._events
        for _ in range(self._fills):
            self._flush.fill(0)
        begun = time.perf_counter()
        start.record()
        call()
        end.record()
        host = time.perf_counter() - begun
        end.synchronize()
        return Sample(float(self.cupy.cuda.get_elapsed_time(start, end)) / 1e3, host)

    def wait(self) -> None:
        self.stream.synchronize()

    def release(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()
        if self._torch:
            self._torch.cuda.empty_cache()

    def memory(self) -> float:
        return float(self.cupy.cuda.runtime.memGetInfo()[0])

    def clocks(self) -> Report:
        if self._nvml is None:
            self._nvml = Nvml(self.cupy.cuda.Device(self.ordinal).pci_bus_id)
        return self._nvml.read()

    def torch(self, *arrays: Any) -> Torch | None:
        if self._torch is None:
            return None
        theirs = self._torch.cuda.current_stream(self.ordinal).cuda_stream
        require_one_stream(self.cupy.cuda.get_current_stream().ptr, theirs)
        # Through integers, since DLPack of bfloat16 is not everywhere; the same memory all the same.
        bits = {2: np.int16, 4: np.int32}[arrays[0].dtype.itemsize]
        dtype = getattr(self._torch, arrays[0].dtype.name)
        return Torch(self._torch, [self._torch.from_dlpack(array.view(bits)).view(dtype) for array in arrays])

    def versions(self) -> Report:
        versions = gpu_versions()
        return versions | ({"torch": f"{versions['torch']}, not used: {self._without_torch}"} if self._without_torch else {})


def _torch() -> tuple[Any, str | None]:
    """PyTorch where it can be imported and was built for CUDA; else why not, where it is there at all."""
    try:
        import torch
    except ModuleNotFoundError:
        return None, None
    except Exception as error:  # a broken one
        return None, told(error)
    return (torch, None) if torch.cuda.is_available() else (None, "it finds no GPU")


def gpu_versions() -> Report:
    """Versions that can be had without using the GPU."""
    import cupy
    from cupy.cuda import nvrtc

    runtime = cupy.cuda.runtime
    asked: dict[str, Callable[[], Any]] = {
        "driver": runtime.driverGetVersion,
        "runtime": runtime.runtimeGetVersion,
        "nvrtc": lambda: "{}.{}".format(*nvrtc.getVersion()),
    }
    answers = {name: attempt(ask) for name, ask in asked.items()}
    return {name: each.get("value", each.get("error")) for name, each in answers.items()} | library_versions()


def library_versions() -> dict[str, str | None]:
    """The versions of the libraries by name, None if one is not installed; nothing is imported that was not before."""
    found: dict[str, str | None] = {"cupy": sys.modules["cupy"].__version__ if "cupy" in sys.modules else None}
    for name in ("numpy", "torch", "triton", "flash_attn", "flash_attn_3", "flash-attn-4", "flashinfer-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


class NvmlField(ctypes.Structure):
    """NVML's nvmlFieldValue_t."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT
NVML_CLOCKS = {"sm_mhz": 1, "memory_mhz": 2}  # NVML_CLOCK_SM, NVML_CLOCK_MEM


class Nvml:
    """The driver's own library for clocks, power and temperature of the GPU at a PCI bus address. OSError where it is not there."""

    def __init__(self, bus_id: str, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        for status in (
            self._library.nvmlInit_v2(),
            self._library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(self._handle)),
        ):
            if status:
                raise OSError(f"NVML answers {status}")

    @classmethod
    def of_current(cls) -> Nvml | None:
        """Returns the handle of CuPy's current device; None if the library is not there."""
        import cupy

        try:
            return cls(cupy.cuda.Device().pci_bus_id)
        except OSError:
            return None

    def millijoules(self) -> int | None:
        """The energy that the GPU has taken since the driver was loaded."""
        return self._asked(self._library.nvmlDeviceGetTotalEnergyConsumption, ctypes.c_ulonglong())

    def milliwatts(self) -> int | None:
        """The power at once: nvmlDeviceGetPowerUsage tells a mean of a second."""
        field = NvmlField(POWER_INSTANT)
        failed = self._library.nvmlDeviceGetFieldValues(self._handle, 1, ctypes.byref(field)) or field.status
        return None if failed else int(field.value & 0xFFFFFFFF)

    def read(self) -> Report:
        """Figures of the GPU, None for those that it does not report. `throttle`: bits of NVML's reasons for a lower clock."""
        found: Report = {
            name: self._asked(self._library.nvmlDeviceGetClockInfo, ctypes.c_uint(), kind) for name, kind in NVML_CLOCKS.items()
        }
        found["celsius"] = self._asked(self._library.nvmlDeviceGetTemperature, ctypes.c_uint(), 0)
        milliwatts = self._asked(self._library.nvmlDeviceGetPowerUsage, ctypes.c_uint())
        found["watts"] = None if milliwatts is None else milliwatts / 1e3
        found["throttle"] = self._asked(self._library.nvmlDeviceGetCurrentClocksThrottleReasons, ctypes.c_ulonglong())
        return found

    def _asked(self, function: Any, answer: Any, *which: int) -> int | None:
        failed = function(self._handle, *which, ctypes.byref(answer))
        return None if failed else int(answer.value)


def stand_in() -> Device:
    """The device that a dry run rehearses: the one that CUPYFLASH_STAND_IN names, as for tests/gpu; the A100-40GB without it."""
    name = os.environ.get("CUPYFLASH_STAND_IN", "1")
    return Device.named("A100-40GB" if name == "1" else name)


class Simulated(Machine):
    """The simulated device, by a wall clock: figures of no meaning, every line run."""

    xp = np

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.device, self._clock = stand_in(), clock

    def __enter__(self) -> Simulated:
        self._context = simulated_device(self.device)
        self._context.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._context.__exit__(None, None, None)

    def draw(self, case: Case, seed: int, count: int) -> list[Any]:
        random, dtype = np.random.default_rng(seed), numpy_dtype(case.dtype)
        return [random.standard_normal(shape, np.float32).astype(dtype) for shape in case.shapes(count)]

    def sample(self, call: Call) -> Sample:
        begun = self._clock()
        call()
        seconds = self._clock() - begun
        return Sample(seconds, seconds)

    def as_float32(self, out: Any) -> Any:
        return np.asarray(out).astype(np.float32)
