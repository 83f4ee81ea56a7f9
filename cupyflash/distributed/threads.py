"""Ranks that are threads of one process: for tests, for laptops, for a few GPUs of one machine."""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyflash.distributed.communicator import RankFailed
from cupyflash.distributed.layout import checked_ranks
from cupyflash.distributed.streams import queued, wait_for

AGAIN_SECONDS = 1.0
"""Seconds after which ranks are interrupted again: Python ignores an exception that is raised while it destroys an object."""


def threads(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function(comm, *arguments)` on `ranks` ranks, each a thread with a communicator of its own, and return all results.

    A thread begins with the caller's context (the simulated device, say) and the caller's current GPU; for a GPU each, begin with
    `with cupy.cuda.Device(comm.rank)`. If functions raise, the first rank's own error is raised again; ranks that wait for one that
    has returned or failed get a `RankFailed`. Ctrl-C ends all ranks: KeyboardInterrupt is raised in each, and here once they have
    ended. A rank inside a call that is not Python's ends after it; a second Ctrl-C does not wait for that.
    """
    meeting = _Meeting(checked_ranks(ranks))
    results: list[Any] = [None] * ranks
    errors: dict[int, BaseException] = {}
    cupy = sys.modules.get("cupy")
    device = cupy.cuda.Device() if cupy is not None and _has_gpu(cupy) else nullcontext()

    def work(rank: int) -> None:
        try:
            with device:
                results[rank] = function(ThreadCommunicator(rank, meeting), *arguments)
            meeting.leave(rank, "it has returned")
        except BaseException as error:
            errors[rank] = error
            meeting.leave(rank, f"{type(error).__name__}: {error}")

    def begin(rank: int, busy: threading.Lock) -> None:
        try:
            with suppress(KeyboardInterrupt):  # one that comes when all is done
                meeting.come(rank)
                work(rank)
        finally:
            ended.add(rank)
            busy.release()

    ended: set[int] = set()
    started: list[tuple[threading.Thread, threading.Lock]] = []

    def wait() -> None:
        """Wait for a thread without `join`, since a thread whose `join` was interrupted counts as ended (CPython 3.11)."""
        for rank, (thread, busy) in enumerate(started):
            if not _begun(thread):
                continue
            while rank not in ended:
                if not busy.acquire(timeout=AGAIN_SECONDS) and meeting.interrupted:
                    meeting.interrupt()
            thread.join()

    try:
        for rank in range(ranks):
            busy, context = threading.Lock(), contextvars.copy_context()
            busy.acquire()
            thread = threading.Thread(target=context.run, args=(begin, rank, busy), name=f"rank {rank}", daemon=True)
            started.append((thread, busy))  # before: an interrupt in `start` comes when the thread may be there
            thread.start()
        wait()
    except BaseException:  # KeyboardInterrupt, or what a program's own handlers of signals raise
        meeting.interrupt()
        wait()
        raise
    own = [errors[rank] for rank in sorted(errors) if not isinstance(errors[rank], RankFailed)]
    for error in [*own, *errors.values()]:
        raise error
    return results


def _begun(thread: threading.Thread) -> bool:
    """True if the thread is there, which an interrupt in its `start` leaves open. One that does not begin in a while is not."""
    until = time.monotonic() + AGAIN_SECONDS
    while thread.ident is None and time.monotonic() < until:
        time.sleep(0.001)
    return thread.ident is not None


def _has_gpu(cupy: Any) -> bool:
    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


@dataclass
class _Message:
    """Arrays on their way, `ready` on the sender's stream (None: NumPy's, which are at once)."""

    arrays: Sequence[Any]
    ready: Any
    taken: bool = False
    copied: Any = None


@dataclass
class _Meeting:
    """The state that the ranks share."""

    size: int
    lock: threading.RLock = field(default_factory=threading.RLock)
    boxes: dict[tuple[int, int, int], _Message] = field(default_factory=dict)  # by sender, receiver and which of theirs it is
    rounds: dict[int, dict[int, bytes]] = field(default_factory=dict)
    there: dict[int, int] = field(default_factory=dict)  # the threads by rank
    left: dict[int, str] = field(default_factory=dict)
    interrupted: bool = False

    def __post_init__(self) -> None:
        # `with` takes the lock itself, not the condition, whose Python an interrupt may leave with the lock taken.
        self.changed = threading.Condition(self.lock)

    def come(self, rank: int) -> None:
        with self.lock:
            self.require_going_on()
            self.there[rank] = threading.get_ident()

    def leave(self, rank: int, why: str) -> None:
        with self.lock:
            self.there.pop(rank, None)
            if self.interrupted:
                _take_back()  # what `interrupt` may have set going, since this rank knows of it
            self.left[rank] = why
            self.changed.notify_all()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the ranks that are there, whether they wait or compute, and in those that have yet to come."""
        with self.lock:
            self.interrupted = True
            self.changed.notify_all()
            for thread in self.there.values():
                _raise_in(thread, KeyboardInterrupt)

    def require_going_on(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt

    def wait_for(self, there: Callable[[], bool], *ranks: int) -> None:
        """Until something is `there`, which one of `ranks` has yet to do; within `lock`."""
        while not there():
            self.require_going_on()
            gone = [rank for rank in ranks if rank in self.left]
            if gone:
                raise RankFailed(gone[0], self.left[gone[0]])
            self.changed.wait()


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Have a thread raise an error as soon as it runs Python, in place of one that it was to raise."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


class _TakenBack(BaseException):
    """Raised in place of an interrupt that is no longer wanted."""


def _take_back() -> None:
    """Have this thread raise nothing any more.

    To clear the error alone, as PyThreadState_SetAsyncExc(thread, NULL) does, would leave the interpreter's flag for it set forever
    (CPython 3.11): all of Python looks for an error at each call and jump, and a function that a debugger traces never begins.
    """
    try:
        while True:  # again each time: another thread that raises its own error clears the flag
            _raise_in(threading.get_ident(), _TakenBack)
    except _TakenBack:
        pass


class ThreadCommunicator:
    """A rank's communicator among threads. Messages are copied when both sides are there, and at the latest that is possible."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting, self._rounds = meeting, 0
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    def exchange(self, send: Sequence[Any], to: int, receive: Sequence[Any], source: int) -> ThreadExchange:
        message = _Message(send, _mark(send))
        with self._meeting.lock:
            self._meeting.require_going_on()
            self._meeting.boxes[self.rank, to, self._sent[to]] = message
            self._meeting.changed.notify_all()
        box = source, self.rank, self._expected[source]
        self._sent[to] += 1
        self._expected[source] += 1
        return ThreadExchange(self._meeting, message, to, receive, box)

    def gather(self, message: bytes) -> list[bytes]:
        number, meeting = self._rounds, self._meeting
        self._rounds += 1
        with meeting.lock:
            meeting.require_going_on()
            said = meeting.rounds.setdefault(number, {})
            said[self.rank] = message
            meeting.changed.notify_all()
            missing = (rank for rank in range(self.size) if rank not in said)
            for rank in missing:
                meeting.wait_for(lambda rank=rank: rank in said, rank)  # type: ignore[misc]
            meeting.rounds.pop(number - 1, None)  # whoever is here has read the one before
            return [said[rank] for rank in range(self.size)]


@dataclass
class ThreadExchange:
    meeting: _Meeting
    message: _Message
    to: int
    receive: Sequence[Any]
    box: tuple[int, int, int]

    def wait(self) -> None:
        meeting, source = self.meeting, self.box[0]
        with meeting.lock:
            meeting.wait_for(lambda: self.box in meeting.boxes, source)
            coming = meeting.boxes.pop(self.box)
        _after(coming.ready)
        for array, sent in zip(self.receive, coming.arrays, strict=True):
            if array.nbytes != sent.nbytes:
                raise ValueError(f"rank {source} sent {sent.nbytes:,} bytes, expected were {array.nbytes:,}")
            _copy(array, sent)
        with meeting.lock:
            coming.copied, coming.taken = _mark(self.receive), True
            meeting.changed.notify_all()
            meeting.wait_for(lambda: self.message.taken, self.to)
        _after(self.message.copied)


def _copy(to: Any, array: Any) -> None:
    if isinstance(to, np.ndarray):
        to.reshape(-1).view(np.uint8)[...] = array.reshape(-1).view(np.uint8)
    elif to.size:  # from another GPU too
        to.data.copy_from_async(array.data, to.nbytes)


def _mark(arrays: Sequence[Any]) -> Any:
    """An event behind all that is queued on the current stream, if these are arrays of a GPU."""
    if all(isinstance(array, np.ndarray) for array in arrays):
        return None
    return queued()


def _after(event: Any) -> None:
    if event is not None:
        wait_for(event)
