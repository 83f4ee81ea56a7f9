"""Ranks of MPI, by mpi4py. Its wheels' MPI cannot read a GPU's memory, so that CuPy's arrays go by pinned memory of the host."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cupyflash.basics import Array
from cupyflash.distributed.streams import own_stream, queued, wait_for

# Tags of our messages, so that a program's own, of tags below, are not taken for them.
FIRST_TAG, TAGS = 16_384, 16_384
# Of one message: older MPIs count in 32 bits.
MOST_BYTES = 1 << 30


class MpiCommunicator:
    """A `Communicator` of an `mpi4py.MPI.Comm`. Its messages have tags from `FIRST_TAG` on."""

    def __init__(self, comm: Any) -> None:
        if not comm:
            raise ValueError("comm must be a communicator, got MPI.COMM_NULL, or one that has been freed")
        if comm.Is_inter():
            raise ValueError("comm must be one group of ranks, got an intercommunicator: comm.Merge() makes one of its two")
        self._comm, self.rank, self.size, self._begun = comm, comm.Get_rank(), comm.Get_size(), 0
        self._mpi = importlib.import_module("mpi4py.MPI")

    def exchange(self, send: Sequence[Any], to: int, receive: Sequence[Any], source: int) -> MpiMessages | StagedExchange:
        self._begun += 1
        messages = MpiMessages(self._comm, to, source, FIRST_TAG + self._begun % TAGS)
        if not all(isinstance(array, np.ndarray) for array in (*send, *receive)):
            return StagedExchange(messages, send, receive)
        messages.receive([_bytes(array) for array in receive])
        messages.send([_bytes(array) for array in send])
        return messages

    def gather(self, message: bytes) -> list[bytes]:
        mpi, lengths = self._mpi, np.empty(self.size, np.int64)
        _wait(mpi, [self._comm.Iallgather(np.array([len(message)], np.int64), lengths)])
        every, ends = bytearray(int(lengths.sum())), np.cumsum(lengths)
        starts = ends - lengths
        _wait(mpi, [self._comm.Iallgatherv([message, mpi.BYTE], [every, lengths.tolist(), starts.tolist(), mpi.BYTE])])
        return [bytes(every[start:end]) for start, end in zip(starts, ends, strict=True)]

    def abandon(self, end: BaseException) -> None:
        """Stop this rank in the middle of a call, and end the others with it: they would wait for it for ever."""
        if self.size > 1:
            name = f"rank {self.rank} of {self.size}"
            print(
                f"cupyflash: {name} is stopped by {type(end).__name__} in the middle of a call over ranks, and the others with it, "
                "since they would wait for it (MPI_Abort)",
                file=sys.stderr,
                flush=True,
            )
            self._comm.Abort(130 if isinstance(end, KeyboardInterrupt) else 1)


class MpiMessages:
    """MPI's requests of one exchange, of arrays of bytes on the host."""

    def __init__(self, comm: Any, to: int, source: int, tag: int) -> None:
        self._comm, self._to, self._source, self._tag = comm, to, source, tag
        self._mpi, self._requests = importlib.import_module("mpi4py.MPI"), list[Any]()

    def receive(self, arrays: Sequence[Array]) -> None:
        self._requests += [self._comm.Irecv([piece, self._mpi.BYTE], self._source, self._tag) for piece in _pieces(arrays)]

    def send(self, arrays: Sequence[Array]) -> None:
        self._requests += [self._comm.Isend([piece, self._mpi.BYTE], self._to, self._tag) for piece in _pieces(arrays)]

    def wait(self) -> None:
        _wait(self._mpi, self._requests)


def _wait(mpi: Any, requests: Sequence[Any]) -> None:
    """Wait for requests, spinning as MPI itself does, but open to Ctrl-C."""
    while not mpi.Request.Testall(requests):
        pass


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _pieces(arrays: Sequence[Array]) -> Iterator[Array]:
    """Arrays of bytes in messages, none of which is empty."""
    for array in arrays:
        for start in range(0, array.size, MOST_BYTES):
            yield array[start : start + MOST_BYTES]


class StagedExchange:
    """An exchange of CuPy's arrays. What goes is copied to the host on a stream of its own, while the GPU computes; it leaves
    when this is waited for, as does what comes, so that the host need not wait before it has launched what there is to compute."""

    def __init__(self, messages: MpiMessages, send: Sequence[Any], receive: Sequence[Any]) -> None:
        cuda = sys.modules["cupy"].cuda
        self._messages, self._receive = messages, receive
        self._stream = own_stream(cuda.runtime.getDevice())
        self._stream.wait_event(queued())
        self._going, self._coming = ([_pinned(cuda, array.nbytes) for array in arrays] for arrays in (send, receive))
        messages.receive(self._coming)
        for host, array in zip(self._going, send, strict=True):
            if host.size:
                array.data.copy_to_host_async(host.ctypes.data, host.size, self._stream)
        self._copied = self._stream.record()

    def wait(self) -> None:
        self._copied.synchronize()
        self._messages.send(self._going)
        self._messages.wait()
        for host, array in zip(self._coming, self._receive, strict=True):
            if host.size:
                array.data.copy_from_host_async(host.ctypes.data, host.size, self._stream)
        there = self._stream.record()
        wait_for(there)
        _in_use[:] = [(event, hosts) for event, hosts in _in_use if not event.done]
        _in_use.append((there, self._coming))


# Memory of the host from which a GPU may still copy
_in_use: list[tuple[Any, Sequence[Array]]] = []


def _pinned(cuda: Any, size: int) -> Array:
    """`size` bytes of pinned memory, from CuPy's pool."""
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer(cuda.alloc_pinned_memory(size), np.uint8, size)
