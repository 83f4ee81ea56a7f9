"""Ranks of NCCL, by CuPy's binding or by nccl4py. Messages go on a stream of their own, in order by events: no host waits."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from cupyflash.distributed.streams import own_stream, queued, wait_for

# Of a gathered message goes so much at once, with its length before it; what is longer, in a second round.
FIRST_BYTES, LENGTH_BYTES = 4096, 8


class Binding(Protocol):
    """NCCL's calls by one of its bindings; arrays are contiguous, of CuPy and not empty."""

    rank: int
    size: int
    device: int

    def group(self) -> AbstractContextManager[object]: ...
    def send(self, array: Any, to: int, stream: Any) -> None: ...
    def receive(self, array: Any, source: int, stream: Any) -> None: ...
    def all_gather(self, own: Any, every: Any, stream: Any) -> None: ...


class CupyNccl:
    """A `cupy.cuda.nccl.NcclCommunicator`."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._nccl = comm, sys.modules[type(comm).__module__]
        self.rank, self.size, self.device = comm.rank_id(), comm.size(), comm.device_id()

    @contextmanager
    def group(self) -> Any:
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def send(self, array: Any, to: int, stream: Any) -> None:
        self._comm.send(array.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, to, stream.ptr)

    def receive(self, array: Any, source: int, stream: Any) -> None:
        self._comm.recv(array.data.ptr, array.nbytes, self._nccl.NCCL_UINT8, source, stream.ptr)

    def all_gather(self, own: Any, every: Any, stream: Any) -> None:
        self._comm.allGather(own.data.ptr, every.data.ptr, own.nbytes, self._nccl.NCCL_UINT8, stream.ptr)


class Nccl4py:
    """A `nccl.core.Communicator`."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._nccl = comm, importlib.import_module("nccl.core")
        self.rank, self.size, self.device = comm.rank, comm.nranks, comm.cuda_dev

    def group(self) -> AbstractContextManager[object]:
        made: AbstractContextManager[object] = self._nccl.group()
        return made

    def send(self, array: Any, to: int, stream: Any) -> None:
        self._comm.send(_bytes(array), to, stream=stream.ptr)

    def receive(self, array: Any, source: int, stream: Any) -> None:
        self._comm.recv(_bytes(array), source, stream=stream.ptr)

    def all_gather(self, own: Any, every: Any, stream: Any) -> None:
        self._comm.allgather(_bytes(own), _bytes(every), stream=stream.ptr)


def _bytes(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)


class NcclTransport:
    """A `Communicator` of NCCL's: for CuPy's arrays."""

    def __init__(self, binding: Binding) -> None:
        self._nccl, self.rank, self.size = binding, binding.rank, binding.size

    def exchange(self, send: Sequence[Any], to: int, receive: Sequence[Any], source: int) -> NcclExchange:
        if any(isinstance(array, np.ndarray) for array in (*send, *receive)):
            raise TypeError("arrays must be CuPy's over NCCL, got NumPy's")
        stream = own_stream(self._nccl.device)
        stream.wait_event(queued())
        with self._nccl.group():
            for call, arrays, rank in ((self._nccl.send, send, to), (self._nccl.receive, receive, source)):
                for array in arrays:
                    if array.size:
                        call(array, rank, stream)
        return NcclExchange(stream.record())

    def gather(self, message: bytes) -> list[bytes]:
        """Gather a text from all ranks. It waits for the messages in flight, too, which use the same stream."""
        head = len(message).to_bytes(LENGTH_BYTES, "little") + message
        every = self._all_gather(head[:FIRST_BYTES], FIRST_BYTES)
        lengths = [LENGTH_BYTES + int.from_bytes(each[:LENGTH_BYTES], "little") for each in every]
        if max(lengths) > FIRST_BYTES:
            every = self._all_gather(head, max(lengths))
        return [each[LENGTH_BYTES:length] for each, length in zip(every, lengths, strict=True)]

    def _all_gather(self, message: bytes, size: int) -> list[bytes]:
        cupy, stream = sys.modules["cupy"], own_stream(self._nccl.device)
        with cupy.cuda.Device(self._nccl.device), stream:
            own = cupy.asarray(np.frombuffer(message.ljust(size, b"\0"), np.uint8))
            every = cupy.empty(size * self.size, np.uint8)
            self._nccl.all_gather(own, every, stream)
            told = every.get().tobytes()
        return [told[rank * size : (rank + 1) * size] for rank in range(self.size)]


class NcclExchange:
    """Messages that `done` is behind."""

    def __init__(self, done: Any) -> None:
        self._done = done

    def wait(self) -> None:
        wait_for(self._done)
