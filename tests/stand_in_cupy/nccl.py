"""NCCL of the stand-in, between threads: the names and refusals of CuPy's binding and of nccl4py.

A group looks for its streams' work first, then hands over what it sends, and waits for what it receives, which is written when
somebody waits for the stream. Messages that do not pair up wait for ever, as NCCL's do: a group's sends and receives are one.
"""

from __future__ import annotations

import itertools
import queue
import threading
import types
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .array import Memory, MemoryPointer, ndarray
from .streams import Stream, enqueue, runtime, wait_for

NCCL_UINT8 = 1
SECONDS = 60
_numbers = itertools.count()
_boxes: defaultdict[Any, queue.Queue[np.ndarray]] = defaultdict(queue.Queue)


class _Group(threading.local):
    depth = 0

    def __init__(self) -> None:
        self.sends: list[Any] = []
        self.receives: list[Any] = []


_group = _Group()


def get_unique_id() -> int:
    return next(_numbers)


def groupStart() -> None:
    _group.depth += 1


def groupEnd() -> None:
    _group.depth -= 1
    if _group.depth:
        return
    sends, receives = _group.sends[:], _group.receives[:]
    _group.sends.clear()
    _group.receives.clear()
    for stream in {stream for *_, stream in (*sends, *receives)}:
        wait_for(stream)
    for box, array, _ in sends:
        _boxes[box].put(array.host.copy())
    for box, array, stream in receives:
        came = _boxes[box].get(timeout=SECONDS)
        if came.nbytes != array.nbytes:
            raise AssertionError(f"{came.nbytes} bytes were sent, and {array.nbytes} are expected")
        with stream:
            enqueue(lambda out, came=came: np.copyto(out, came), array)


class NcclCommunicator:
    """The stand-in of `cupy.cuda.nccl.NcclCommunicator`; it takes memory of the rank's own device only."""

    def __init__(self, ndev: int, commId: int, rank: int) -> None:
        self._size, self._id, self._rank, self._device = ndev, commId, rank, runtime.getDevice()

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def device_id(self) -> int:
        return self._device

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._add(_group.sends, (self._id, self._rank, peer), sendbuf, count, datatype, stream)

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._add(_group.receives, (self._id, peer, self._rank), recvbuf, count, datatype, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        groupStart()
        for rank in range(self._size):
            self._add(_group.sends, (self._id, self._rank, rank, "all"), sendbuf, count, datatype, stream)
            self._add(_group.receives, (self._id, rank, self._rank, "all"), recvbuf + rank * count, count, datatype, stream)
        groupEnd()

    def _add(self, operations: list[Any], box: Any, pointer: int, count: int, datatype: int, stream: int) -> None:
        if datatype != NCCL_UINT8 or not count:
            raise AssertionError(f"the stand-in sends bytes, got {count} of type {datatype}")
        memory = Memory.at(pointer)
        if memory.device_id != self._device or memory.bytes.ctypes.data + memory.bytes.size < pointer + count:
            raise AssertionError(f"{count} bytes at {pointer:#x} are not in one allocation of GPU {self._device}")
        array = ndarray(count, np.uint8, MemoryPointer(memory, pointer - memory.bytes.ctypes.data))
        groupStart()
        operations.append((box, array, Stream.at(stream)))
        groupEnd()


class Communicator:
    """The stand-in of `nccl.core.Communicator`, whose calls take arrays, and handles of streams."""

    def __init__(self, comm: NcclCommunicator) -> None:
        self._comm, self.rank, self.nranks, self.cuda_dev = comm, comm.rank_id(), comm.size(), comm.device_id()

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: int) -> Communicator:
        return cls(NcclCommunicator(nranks, unique_id, rank))

    def send(self, sendbuf: ndarray, peer: int, *, stream: int) -> None:
        self._comm.send(*self._bytes(sendbuf), peer, stream)

    def recv(self, recvbuf: ndarray, peer: int, *, stream: int) -> None:
        self._comm.recv(*self._bytes(recvbuf), peer, stream)

    def allgather(self, sendbuf: ndarray, recvbuf: ndarray, *, stream: int) -> None:
        if recvbuf.size != sendbuf.size * self.nranks:
            raise AssertionError(f"{recvbuf.size} elements for {self.nranks} times {sendbuf.size}")
        self._comm.allGather(sendbuf.data.ptr, recvbuf.data.ptr, sendbuf.nbytes, NCCL_UINT8, stream)

    @staticmethod
    def _bytes(array: ndarray) -> tuple[int, int, int]:
        return array.data.ptr, array.nbytes, NCCL_UINT8


Communicator.__module__ = "nccl.core.communicator"


@contextmanager
def group() -> Iterator[None]:
    groupStart()
    yield
    groupEnd()


nccl4py = types.SimpleNamespace(Communicator=Communicator, get_unique_id=get_unique_id, group=group)
