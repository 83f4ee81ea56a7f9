"""Streams, events, graphs and devices of the stand-in: work waits in a queue until somebody waits for it."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cupy.cuda.runtime import CUDARuntimeError  # the real one's: streams.py is imported before the stand-in takes CuPy's name

from cupyflash import Device as Figures

# CUDA's numbers (driver_types.h).
CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 900, 901
GPUS = 2

_lock = threading.RLock()


@dataclass(frozen=True)
class Work:
    """Something to do on the device: `act` on the NumPy arrays behind `arrays`."""

    act: Callable[..., object]
    arrays: Sequence[Any]

    def run(self) -> None:
        self.act(*(array.host for array in self.arrays))


@dataclass(eq=False)
class Queued:
    """Work on its stream, the `number`-th that was queued on any."""

    stream: Stream
    work: Work
    number: int


_pending: dict[Queued, None] = {}
_numbers = itertools.count(1)


def _queue(stream: Stream, work: Work) -> None:
    with _lock:
        _pending[Queued(stream, work, next(_numbers))] = None


def enqueue(act: Callable[..., object], *arrays: Any) -> None:
    """Have `act` done to the arrays' contents on the current stream, which may be recording a graph."""
    stream, device_id = get_current_stream(), runtime.getDevice()
    for array in arrays:
        if array.data.device_id != device_id:
            raise AssertionError(f"memory of GPU {array.data.device_id} is used while GPU {device_id} is current")
    work = Work(act, arrays)
    if stream.capture is not None:
        stream.capture.append(work)
        return
    _queue(stream, work)


def wait_for(stream: Stream, last: float = math.inf) -> None:
    """Do all that was queued on a stream, and on those that it is in order with, up to number `last`."""
    if stream.capture is not None:
        stream.invalid = True
        raise CUDARuntimeError(CAPTURE_UNSUPPORTED)
    _run(lambda queued: queued.number <= last and queued.stream.ordered_with(stream))


def _run(which: Callable[[Queued], bool]) -> None:
    with _lock:
        for queued in [queued for queued in _pending if which(queued)]:
            if queued in _pending:  # and was not done for another that had to wait for it
                del _pending[queued]
                queued.work.run()


def waits(stream: Stream, last: int) -> bool:
    """True if any work on a stream remains, up to number `last`."""
    with _lock:
        return any(queued.stream is stream and queued.number <= last for queued in _pending)


class _Local(threading.local):
    """A thread's current device, and its stack of streams on each device, of which the last is current."""

    def __init__(self) -> None:
        self.device = 0
        self.devices: list[int] = []
        self.streams: list[list[Stream]] = [[] for _ in range(GPUS)]


_local = _Local()


class Stream:
    """The stand-in of `cupy.cuda.Stream`. Blocking streams are in order with the default stream and so, here, with each other."""

    null: Stream
    ptds: Stream
    _made = 0
    _living: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()

    @classmethod
    def at(cls, ptr: int) -> Stream:
        """The one with this handle."""
        return cls._living[ptr]

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        Stream._made += 1
        self.ptr = 0 if null else 2 if ptds else 0x1000 * Stream._made
        self.device_id = -1 if null or ptds else runtime.getDevice()
        Stream._living[self.ptr] = self
        self.non_blocking = non_blocking
        self.capture: list[Work] | None = None
        self.invalid = False

    def ordered_with(self, other: Stream) -> bool:
        return self is other or not (self.non_blocking or other.non_blocking)

    def __enter__(self) -> Stream:
        if self.device_id not in (-1, runtime.getDevice()):
            raise RuntimeError(f"the stream is of GPU {self.device_id}, and GPU {runtime.getDevice()} is current")
        _local.streams[runtime.getDevice()].append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _local.streams[runtime.getDevice()].pop()

    def synchronize(self) -> None:
        wait_for(self)

    def is_capturing(self) -> bool:
        return self.capture is not None

    def begin_capture(self) -> None:
        if self.ptr == 0:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        self.capture, self.invalid = [], False

    def end_capture(self) -> Graph:
        captured, self.capture = self.capture, None
        if captured is None or self.invalid:
            raise CUDARuntimeError(CAPTURE_INVALIDATED)
        return Graph(captured)

    def record(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            stream, number = event.stream, event.number  # as it is now
            with self:
                enqueue(lambda: wait_for(stream, number))


class Event:
    """The stand-in of `cupy.cuda.Event`, without times."""

    stream: Stream | None = None
    number = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self.number = get_current_stream() if stream is None else stream, next(_numbers)

    def synchronize(self) -> None:
        if self.stream is not None:
            wait_for(self.stream, self.number)

    @property
    def done(self) -> bool:
        return self.stream is None or not waits(self.stream, self.number)


class Graph:
    """The captured work. It does not keep the memory with which it was captured: whoever replays it must."""

    def __init__(self, captured: list[Work]) -> None:
        self._nodes = [(work.act, [(weakref.ref(array.data.mem), array.host) for array in work.arrays]) for work in captured]

    def launch(self, stream: Stream | None = None) -> None:
        on = get_current_stream() if stream is None else stream
        for act, places in self._nodes:
            for memory, host in places:
                if memory() is None:
                    raise AssertionError(f"the graph works on memory that went back to the pool: an array of shape {host.shape}")
            _queue(on, Work(_replayed(act, [host for _, host in places]), ()))


def _replayed(act: Callable[..., object], hosts: Sequence[Any]) -> Callable[[], object]:
    return lambda: act(*hosts)


def get_current_stream(device_id: int = -1) -> Stream:
    stack = _local.streams[runtime.getDevice() if device_id == -1 else device_id]
    return stack[-1] if stack else Stream.null


class Device:
    """The stand-in of `cupy.cuda.Device`."""

    def __init__(self, device: Any = None) -> None:
        self.id = runtime.getDevice() if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __enter__(self) -> Device:
        _local.devices.append(_local.device)
        _local.device = self.id
        return self

    def __exit__(self, *error: object) -> None:
        _local.device = _local.devices.pop()

    def synchronize(self) -> None:
        for stream in _local.streams[self.id]:
            if stream.is_capturing():
                wait_for(stream)  # refuses
        _run(lambda _: True)

    @property
    def compute_capability(self) -> str:
        return "{}{}".format(*runtime.figures.compute_capability)

    @property
    def attributes(self) -> dict[str, int]:
        figures = runtime.figures
        return {
            "MultiProcessorCount": figures.sm_count,
            "MaxSharedMemoryPerBlockOptin": figures.sram_per_block,
            "MaxSharedMemoryPerMultiprocessor": figures.sram_per_sm,
            "MaxRegistersPerMultiprocessor": figures.registers_per_sm,
            "L2CacheSize": figures.l2_bytes,
        }


class Runtime:
    """The used part of `cupy.cuda.runtime`; both GPUs have `figures`."""

    is_hip = False
    CUDARuntimeError = CUDARuntimeError
    figures = Figures.named("A100-40GB")
    memory = 16 << 30

    def getDeviceCount(self) -> int:
        return GPUS

    def getDevice(self) -> int:
        return _local.device

    def setDevice(self, device_id: int) -> None:
        _local.device = device_id

    def getDeviceProperties(self, device_id: int) -> dict[str, Any]:
        major, minor = self.figures.compute_capability
        return {"name": self.figures.name.encode(), "major": major, "minor": minor}

    def driverGetVersion(self) -> int:
        return 12080

    def memGetInfo(self) -> tuple[int, int]:
        return self.memory, self.memory

    def deviceSynchronize(self) -> None:
        Device().synchronize()


runtime = Runtime()
Stream.null, Stream.ptds = Stream(null=True), Stream(ptds=True)
