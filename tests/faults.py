"""Faults on order: the n-th event of a kind fails, as memory, disks, kernels and messages do."""

from __future__ import annotations

import builtins
import contextvars
import errno
import gc
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyflash.distributed.communicator import Communicator


class Nth:
    """Counts events, each at a place. The `failing`-th raises `error`."""

    def __init__(self, error: Callable[[], BaseException], failing: int = 0) -> None:
        self.error, self.failing = error, failing
        self.places: list[Hashable] = []

    def event(self, place: Hashable) -> None:
        self.places.append(place)
        if len(self.places) == self.failing:
            raise self.error()


def drawn(places: Sequence[Hashable], most: int) -> list[int]:
    """The numbers of the events to make fail, from 1 on: the first and the last at each place, fewer if they are more than `most`;
    the others spread evenly."""
    assert places, "nothing has happened"
    first = {place: number for number, place in reversed([*enumerate(places, 1)])}
    last = {place: number for number, place in enumerate(places, 1)}
    chosen = sorted({*first.values(), *last.values()})
    if len(chosen) < most:
        others = sorted(set(range(1, len(places) + 1)) - set(chosen))
        return sorted([*chosen, *_evenly(others, most - len(chosen))])
    return _evenly(chosen, most)


def _evenly(numbers: Sequence[int], most: int) -> list[int]:
    return [numbers[round(at)] for at in np.linspace(0, len(numbers) - 1, min(most, len(numbers)))]


@contextmanager
def left_as_found(folder: Path) -> Iterator[None]:
    """Check that the block within leaves no lock held, no thread, no file in `folder`, and the process' settings unchanged."""

    def state() -> tuple[object, ...]:
        return {*threading.enumerate()}, sorted(folder.rglob("*")), gc.isenabled(), np.geterr(), os.environ.copy()

    before = state()
    yield
    assert state() == before and not held()


def held() -> list[str]:
    """The locks of the package's modules that somebody holds."""
    ours = [(name, module) for name, module in sys.modules.items() if name.partition(".")[0] == "cupyflash"]
    locks = [(f"{name}.{each}", getattr(value, "lock", value)) for name, module in ours for each, value in vars(module).items()]
    known = [(name, lock) for name, lock in locks if isinstance(lock, type(threading.Lock()))]
    assert known
    return [name for name, lock in known if lock.locked()]


@pytest.fixture(name="temporary")
def temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of temporary files, which is empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result or error of `work`; AssertionError if it does not end in time."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
    return found[0]


class Disk:
    """Opening, writing, closing, renaming and making folders below a folder, of which the n-th fails."""

    def __init__(self, nth: Nth, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nth, self.folder = nth, folder
        for module in (io, builtins):
            monkeypatch.setattr(module, "open", self._opening(io.open))
        for name in ("open", "replace", "mkdir"):
            monkeypatch.setattr(os, name, self._asking(name, getattr(os, name)))
        self._descriptors: set[int] = set()

    def _ours(self, path: Any) -> bool:
        return not isinstance(path, int) and Path(os.fsdecode(path)).is_relative_to(self.folder)

    def _asking(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def asked(path: Any, *arguments: Any, **options: Any) -> Any:
            writes = name != "open" or arguments[0] & (os.O_WRONLY | os.O_RDWR)
            if writes and self._ours(path):
                self.nth.event(name)
            made = act(path, *arguments, **options)
            if name == "open" and writes and self._ours(path):
                self._descriptors.add(made)
            return made

        return asked

    def _opening(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            ours = file in self._descriptors if isinstance(file, int) else self._ours(file)
            if not ours or not set(mode) & set("wax+"):
                return act(file, mode, *arguments, **options)
            if not isinstance(file, int):
                self.nth.event("open")
            return _Written(act(file, mode, *arguments, **options), self.nth)

        return opened


class _Written:
    """A file that is written, as far as it is used."""

    def __init__(self, file: Any, nth: Nth) -> None:
        self._file, self._nth = file, nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, data: Any) -> Any:
        """Half of it is there where it fails."""
        try:
            self._nth.event("write")
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise
        return self._file.write(data)

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._nth.event("close")  # which writes what is buffered


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_right() -> OSError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class Killed(BaseException):
    """The end of a rank, which nobody catches on the way."""


class Lossy:
    """A communicator whose rank fails at its n-th step: the beginning or the end of a message, or what all say to each other."""

    def __init__(self, comm: Communicator, nth: Nth) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._nth = comm, nth

    def exchange(self, *arguments: Any) -> Any:
        self._nth.event("exchange")
        return _Lossy(self._comm.exchange(*arguments), self._nth)

    def gather(self, message: bytes) -> list[bytes]:
        self._nth.event("gather")
        return self._comm.gather(message)


class _Lossy:
    def __init__(self, request: Any, nth: Nth) -> None:
        self._request, self._nth = request, nth

    def wait(self) -> None:
        self._nth.event("wait")
        self._request.wait()


def same(found: Iterable[Any], expected: Iterable[Any]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
