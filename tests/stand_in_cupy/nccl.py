"""NCCL of the stand-in, between threads: CuPy's binding's names and refusals.

A group looks for its streams' work first, then hands over what it sends, and waits for what it receives, which is written when
somebody waits for the stream. Messages that do not pair up wait for ever, as NCCL's do: a group's sends and receives are one.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
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
    """As `cupy.cuda.nccl.NcclCommunicator`; memory of the rank's own device only."""

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
