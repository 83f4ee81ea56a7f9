"""Streams and events: what orders launches of one history, as CUDA's streams order those of one device.

    stream = Stream()
    module.launch("produce", grid, block, args, stream=stream)
    module.launch("consume", grid, block, args, stream=stream, programmatic=True)

Launches are executed one after the other, as they are issued; what neither a stream nor an event orders is concurrent all the
same, and a race between two launches is a finding of the later one.
"""

from __future__ import annotations

from dataclasses import dataclass

from .order.history import Clock, Past, Run
from .order.launches import Launches
from .order.races import Races
from .text.names import base_name


class History:
    """The launches of one device: those of its streams, and what the host has waited for.

    It keeps who touched which bytes (about 12 bytes for each 4 that were written, read or updated) until the array is freed, or
    the host has waited.
    """

    def __init__(self) -> None:
        self.past = Past()
        self.host = Clock()
        """Launches that are over for the host, and so for all that it issues from now on."""
        self.streams: list[Stream] = []

    def stream(self) -> Stream:
        """A further stream."""
        return Stream(self)

    def synchronize(self) -> None:
        """Wait for all streams (cudaDeviceSynchronize)."""
        self.wait(*(stream.issued for stream in self.streams))

    def wait(self, *clocks: Clock) -> None:
        """These launches are over for the host."""
        self.host = self.host.join(*clocks)
        self.past.drop(self.host)


@dataclass(frozen=True)
class Event:
    """A moment of a stream: everything that was issued to it before is over."""

    history: History
    clock: Clock

    def synchronize(self) -> None:
        """Wait for it (cudaEventSynchronize)."""
        self.history.wait(self.clock)


class Stream:
    """Launches that run in the order in which they are issued. Without a history it is the first stream of a new one."""

    def __init__(self, history: History | None = None):
        if history is not None and not isinstance(history, History):
            raise TypeError(f"history must be a History (of another stream: stream.history), got {type(history).__name__}")
        self.history = History() if history is None else history
        self.number = len(self.history.streams)
        self.history.streams.append(self)
        self._issued = self._joined = Clock()
        self._count = 0
        self._last: Run | None = None

    @property
    def issued(self) -> Clock:
        """What is over once everything is that was issued so far."""
        return self._issued if self._last is None else self._issued.join(self._last.done)

    def record(self) -> Event:
        """An event behind everything that was issued so far (cudaEventRecord)."""
        return Event(self.history, self.issued)

    def wait(self, event: Event) -> None:
        """What is issued from now on begins once the event has happened (cudaStreamWaitEvent)."""
        if not isinstance(event, Event) or event.history is not self.history:
            raise ValueError("event must be one that a stream of the same history recorded")
        self._joined = self._joined.join(event.clock)
        self._issued = self._issued.join(event.clock)

    def synchronize(self) -> None:
        """Wait for everything that was issued so far (cudaStreamSynchronize)."""
        self.history.wait(self.issued)

    def begin(self, kernel: str, programmatic: bool, races: Races | None) -> None:
        """The next launch, and its race detector. A programmatic one may begin before the one in front of it is over."""
        self._count += 1
        behind = self._last if programmatic else None
        if behind is None:
            start = wait = self.issued.join(self.history.host)
        else:
            start = self._joined.join(self.history.host, behind.told)
            wait = start.join(behind.done)
        self._issued = self.issued.join(Clock({self.number: self._count}))
        if self._last is not None and self._last.behind is not None:
            self._last.behind.forget()
        if self._last is not None and behind is None:
            self._last.forget()
        self._last = run = Run(base_name(kernel), (self.number, self._count), start, wait, behind)
        if races is not None:
            races.launches = Launches(races, self.history.past, run)
