"""Streams, events and the order of a program's work; the state that all runtime functions share.

Work is done as it is issued, in the order of the program. What no stream or event orders counts as concurrent all the same: the
machine's history of launches (`ptx.Stream`) finds races between launches. A stream that is being captured does nothing: its work
becomes nodes of a graph.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cupyflash.device import Device
from cupyflash.sim import ptx
from cupyflash.sim.program.channel import Channel
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.guard import HostGuard
from cupyflash.sim.program.lines import Call, ProgramLines
from cupyflash.sim.program.memory import Block, MovedRange, ProgramMemory
from cupyflash.sim.program.predicted import DeviceTime

LEGACY, PER_THREAD = 1, 2
"""cudaStreamLegacy and cudaStreamPerThread; 0 is the one or the other, as the program was compiled."""
NON_BLOCKING = 1
Thing = TypeVar("Thing")


@dataclass
class Settings:
    """Settings of a run: as of `ptx.Module.launch`; `max_seconds` is processor time for all launches together.

    `say` is called with a line of text before launches that will take long, with an estimate. `clock`: events give the time that
    the clock predicts, where it knows all work between them; `max_seconds` counts its time, too.
    """

    seed: int | None = None
    races: bool = True
    max_seconds: float | None = None
    suppressions: Any = ()
    say: Callable[[str], None] | None = None
    clock: bool = True


@dataclass
class Node:
    """One piece of work of a graph, which begins when the nodes `after` have ended; `call` made it."""

    kind: int
    work: Callable[[ptx.Stream], None]
    after: list[Node]
    call: Call


@dataclass
class Condition:
    """The value on which conditional nodes of a graph depend; `default`: that with which each launch begins."""

    value: int
    default: int | None = None


@dataclass
class Graph:
    """The nodes of a graph, in the order in which they were added; its conditions; (node, address) of what it frees."""

    nodes: list[Node] = field(default_factory=list)
    conditions: list[Condition] = field(default_factory=list)
    freed: list[tuple[Node, int]] = field(default_factory=list)

    def instance(self) -> Graph:
        """Returns the graph as it is now; its conditions are the same ones."""
        return Graph(list(self.nodes), self.conditions)


@dataclass
class ProgramStream:
    """A stream; while it is captured, `graph` gets its work behind the nodes `ends`."""

    stream: ptx.Stream
    blocking: bool
    graph: Graph | None = None
    ends: list[Node] = field(default_factory=list)
    origin: bool = False


@dataclass
class ProgramEvent:
    """An event, with the moment at which it was recorded last, and the number of pieces of work before it."""

    event: ptx.Event | None = None
    seconds: float = 0.0
    work: int = 0
    graph: Graph | None = None
    ends: list[Node] = field(default_factory=list)


KERNEL, MEMCPY, MEMSET, HOST_FUNCTION, CHILD, EMPTY, WAIT, RECORD, ALLOCATE, FREE, CONDITIONAL = 0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 13
"""cudaGraphNodeType."""


def tells(value: int, size: int = 4) -> Callable[[StreamCalls, int], None]:
    """Returns a function of the runtime that writes a number to the address in its first word."""
    return lambda self, out: self.channel.write(out, value.to_bytes(size, "little"))


def destroys(kind: type) -> Callable[[StreamCalls, int], None]:
    """Returns a function of the runtime that destroys what a handle is of."""

    def destroy(self: StreamCalls, handle: int) -> None:
        self.find(handle, kind)
        del self.handles[handle]

    return destroy


class StreamCalls:
    """The state of a program's runtime, and its functions of streams, events and errors."""

    def __init__(self, channel: Channel, device: Device, version: int, settings: Settings):
        self.channel, self.device, self.version, self.settings = channel, device, version, settings
        self.history = ptx.History()
        self.memory = ProgramMemory(channel, self.forget)
        self.guard = HostGuard(channel, self.memory, self.history)
        channel.open = self.guard.open
        self.thread = 0
        self.call = Call("")
        """The call that is being answered."""
        self.lines = ProgramLines()
        self.default = LEGACY
        """The stream 0 of the call: PER_THREAD in functions whose names say so."""
        self.sticky = ErrorCode.SUCCESS
        """The error of a kernel that failed: every later call returns it."""
        self.handles: dict[int, object] = {}
        self.legacy = ProgramStream(self.history.stream(), True)
        self.concurrent = True
        """False if all launches are in one stream: then no history is kept."""
        self.timed = False
        """True once the program has asked how long something took, and got the simulation's time."""
        self.predicted = False
        """True once it got the time that the clock predicts."""
        self.spent = 0.0
        """Seconds of processor time that launches and the clock have taken."""
        self.device_time = DeviceTime(device, settings.say or (lambda line: None))
        self._texts: dict[str, int] = {}
        self._threads: dict[int, ProgramStream] = {}
        self._next = 0x1000

    def kept(self, text: str) -> int:
        """Returns the address of a text in the program."""
        if text not in self._texts:
            self._texts[text] = self.channel.keep(text.encode())
        return self._texts[text]

    def handle(self, thing: object) -> int:
        """Returns a new handle for a thing."""
        self._next += 16
        self.handles[self._next] = thing
        return self._next

    def handle_of(self, thing: object) -> int:
        """Returns the handle of a thing, a new one if it has none."""
        return next((handle for handle, one in self.handles.items() if one is thing), 0) or self.handle(thing)

    # -- the order of work --------------------------------------------------------------------------------------------------

    def issue(self, stream: int, kind: int, work: Callable[[ptx.Stream], None]) -> None:
        """Does work in a stream now, or adds it to the graph that the stream is being captured into."""
        one = self.stream(stream)
        if one.graph is not None:
            node = Node(kind, work, list(one.ends), self.call)
            one.graph.nodes.append(node)
            one.ends = [node]
            return
        self.order(one)
        self.act(work, one.stream, self.call)

    def act(self, work: Callable[[ptx.Stream], None], stream: ptx.Stream, call: Call) -> None:
        """Does work, which a call asked for, in a stream of which all that it copies and fills is part."""
        moves: list[MovedRange] = []
        before, self.memory.moves = self.memory.moves, moves
        try:
            work(stream)
        finally:
            self.memory.moves = before
        if moves:
            self.moved(moves, stream, call)

    def forget(self, block: Block) -> None:
        """Forgets all about an allocation that is freed."""
        self.history.forget(block.allocation.memory)
        self.guard.modes.pop(block.address, None)

    def moved(self, moves: list[MovedRange], stream: ptx.Stream, call: Call) -> None:
        """Records what work of a stream has copied, filled or freed, and its races with what nothing orders before it."""
        raise NotImplementedError

    def order(self, one: ProgramStream) -> None:
        """The legacy stream waits for all blocking ones, and these for it."""
        if one is self.legacy:
            for other in self.blocking():
                one.stream.wait(other.stream.record())
        elif one.blocking:
            one.stream.wait(self.legacy.stream.record())

    def blocking(self) -> list[ProgramStream]:
        known = [*self.handles.values(), *self._threads.values()]
        return [one for one in known if isinstance(one, ProgramStream) and one.blocking and one.graph is None]

    def stream(self, handle: int) -> ProgramStream:
        """Returns a stream by its handle. Raises CudaError if there is none."""
        handle = handle or self.default
        if handle == LEGACY:
            return self.legacy
        if handle == PER_THREAD:
            if self.thread not in self._threads:
                self._threads[self.thread] = ProgramStream(self.history.stream(), True)
            return self._threads[self.thread]
        return self.find(handle, ProgramStream)

    def find(self, handle: int, kind: type[Thing]) -> Thing:
        """Returns what a handle is of. Raises CudaError if it is of nothing of this kind."""
        found = self.handles.get(handle)
        if not isinstance(found, kind):
            raise CudaError(ErrorCode.INVALID_RESOURCE_HANDLE)
        return found

    def check_sticky(self) -> None:
        """Raises the error of a kernel that failed."""
        if self.sticky:
            raise CudaError(self.sticky)

    def wait_for_all(self) -> None:
        """Records that the host waits for everything."""
        self.history.synchronize()
        self.check_sticky()

    # -- streams ------------------------------------------------------------------------------------------------------------

    def cudaStreamCreate(self, out: int) -> None:
        self.cudaStreamCreateWithFlags(out, 0)

    def cudaStreamCreateWithFlags(self, out: int, flags: int) -> None:
        stream = ProgramStream(self.history.stream(), not flags & NON_BLOCKING)
        self.channel.write_word(out, self.handle(stream))

    cudaStreamCreateWithPriority = cudaStreamCreateWithFlags
    cudaStreamDestroy = destroys(ProgramStream)

    def cudaStreamSynchronize(self, stream: int) -> None:
        one = self.stream(stream)
        if one.graph is not None:
            raise CudaError(ErrorCode.STREAM_CAPTURE_UNSUPPORTED)
        self.order(one)
        one.stream.synchronize()
        self.check_sticky()

    cudaStreamQuery = cudaStreamSynchronize

    def cudaStreamWaitEvent(self, stream: int, event: int) -> None:
        one, what = self.stream(stream), self.find(event, ProgramEvent)
        if what.graph is not None:
            one.graph, one.ends = what.graph, [*one.ends, *what.ends]
        elif what.event is not None:
            one.stream.wait(what.event)

    def cudaStreamGetPriority(self, stream: int, out: int) -> None:
        self.channel.write_int(out, 0)

    def cudaStreamGetFlags(self, stream: int, out: int) -> None:
        self.channel.write_int(out, 0 if self.stream(stream).blocking else NON_BLOCKING)

    def cudaStreamSetAttribute(self, stream: int) -> None:
        self.stream(stream)

    cudaStreamAttachMemAsync = cudaStreamSetAttribute

    def cudaLaunchHostFunc(self, stream: int, function: int, data: int) -> None:
        self.issue(stream, HOST_FUNCTION, lambda there: self.call_host(there, function, data))

    def cudaStreamAddCallback(self, stream: int, function: int, data: int) -> None:
        self.issue(stream, HOST_FUNCTION, lambda there: self.call_host(there, function, stream, data))

    def call_host(self, stream: ptx.Stream, function: int, first: int, third: int = 0) -> None:
        """Calls a function of the program behind the work of a stream. The host knows from then on that this is over."""
        stream.synchronize()
        self.guard.waited()
        self.channel.call(function, first, third)

    # -- events -------------------------------------------------------------------------------------------------------------

    def cudaEventCreate(self, out: int) -> None:
        self.channel.write_word(out, self.handle(ProgramEvent()))

    cudaEventCreateWithFlags = cudaEventCreate
    cudaEventDestroy = destroys(ProgramEvent)

    def cudaEventRecord(self, event: int, stream: int) -> None:
        what, one = self.find(event, ProgramEvent), self.stream(stream)
        what.graph, what.ends = one.graph, list(one.ends)
        if one.graph is None:
            self.order(one)
            what.event, what.seconds = one.stream.record(), time.perf_counter()
            what.work = len(self.device_time.work)

    cudaEventRecordWithFlags = cudaEventRecord

    def cudaEventSynchronize(self, event: int) -> None:
        what = self.find(event, ProgramEvent)
        if what.event is not None:
            what.event.synchronize()
        self.check_sticky()

    cudaEventQuery = cudaEventSynchronize

    def cudaEventElapsedTime(self, out: int, start: int, end: int) -> None:
        first, last = self.find(start, ProgramEvent), self.find(end, ProgramEvent)
        if first.event is None or last.event is None:
            raise CudaError(ErrorCode.INVALID_RESOURCE_HANDLE)
        seconds = None
        if self.settings.clock:
            began = time.process_time()
            seconds = self.device_time.seconds(first.work, last.work, list(self.memory.blocks.values()))
            self.spent += time.process_time() - began
        if seconds is not None:
            self.predicted = True
        else:
            self.timed, seconds = True, last.seconds - first.seconds
        self.channel.write(out, struct.pack("<f", 1e3 * max(seconds, 1e-6)))
