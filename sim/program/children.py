"""Dynamic parallelism: what threads of a kernel launch and copy, in streams of the device (the functions of the device runtime).

A kernel's children are run once the kernel has been, each with all that it launches in its turn before the next; work in the stream
for tail launches comes last. A child's launch follows what its thread had done or knew of by then: with the rest of the kernel, and
with other children, it is concurrent, and races are findings. (CUDA C++ Programming Guide, "CUDA Dynamic Parallelism".)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cupyflash.sim import ptx
from cupyflash.sim.program.errors import CudaError, ErrorCode, name_of, text_of
from cupyflash.sim.program.lines import Call
from cupyflash.sim.program.properties import attribute
from cupyflash.sim.program.streams import Condition, Thing
from cupyflash.sim.program.symbols import LaunchRequest, ProgramKernel
from cupyflash.sim.ptx.memory.spaces import HEAP_WINDOW, BadCall, Caller, DeviceRuntime, Heap
from cupyflash.sim.ptx.order.moments import LaunchClock
from cupyflash.sim.ptx.parameters import parameter_offsets
from cupyflash.sim.ptx.state.segments import WRITTEN, Segment

if TYPE_CHECKING:
    from cupyflash.sim.program.launches import LaunchCalls

TAIL, FORGET = 3, 4
"""cudaStreamTailLaunch and cudaStreamFireAndForget."""
BUFFERS = 16 << 20
"""Bytes of the parameters of launches that are being prepared."""
PREFIX, LAUNCH = "__cudaCDP2", "__cudaCDP2LaunchDeviceV2"
"""The begin of the device runtime's names, and the function that launches."""

Work = Callable[[ptx.Stream], None]


class DynamicLaunches(DeviceRuntime):
    """The functions that a program's kernels call: heap, and device runtime. Those that return an error return its number."""

    def __init__(self, program: LaunchCalls, heap_bytes: int):
        super().__init__(heap_bytes)
        self.program = program
        self.buffers = Heap(BUFFERS, name="launch parameters", window=HEAP_WINDOW - 1)
        self.prepared: dict[int, tuple[LaunchRequest, int]] = {}
        """Launches whose parameters are being written, by their buffers, with the number of bytes."""
        self.last = ErrorCode.SUCCESS
        self.handles: dict[int, ptx.Stream | ptx.Event | None] = {}
        self._texts: dict[str, int] = {}
        self._pool: defaultdict[int, list[ptx.Stream]] = defaultdict(list)
        self._taken = 0

    def begin(self, request: LaunchRequest, stream: ptx.Stream, child: bool) -> None:
        """Begins a launch, by the host or by a thread, in a stream."""
        self.image, self.stream = request.kernel.image, stream
        self.work: list[tuple[ptx.Stream, Callable[[], None]]] = []
        self.tails: list[Callable[[], None]] = []
        self._own: dict[int, ptx.Stream] = {}
        if not child:
            # What an earlier launch of this stream has launched is over: its streams may be used again.
            self.root, self._taken = stream.number, 0

    def issued(self) -> list[Callable[[], None]]:
        """Returns what the launch's threads have issued and what ends it, the last first."""
        own, streams = self.stream, dict.fromkeys(stream for stream, _ in self.work)

        def join() -> None:
            for stream in streams:
                own.wait(stream.record())

        steps = [*(step for _, step in self.work), join, *self.tails] if self.work or self.tails else []
        self.work, self.tails = [], []
        return steps[::-1]

    def segments(self, called: Collection[str]) -> list[Segment]:
        prepares = any(name.startswith(PREFIX) for name in called)
        return [*super().segments(called), *([self.buffers.segment] if prepares or self.buffers.top else [])]

    def call(self, name: str, caller: Caller, words: Collection[int]) -> int:
        try:
            return super().call(name.removesuffix("_ptsz"), caller, [*words])
        except CudaError as error:
            self.last = error.code
            return int(error.code)

    # -- launches -----------------------------------------------------------------------------------------------------------

    def _cudaCDP2GetParameterBufferV2(self, caller: Caller, function: int, *sizes: int) -> int:
        """Takes the grid's sizes, the block's, and bytes of shared memory."""
        name = caller.functions.get(function, "")
        if name not in self.image.module.kernels:
            raise BadCall(f"launch of {function:#x}, which is no kernel")
        _, size = parameter_offsets(self.image.module.program.functions[name].params)
        address = self.buffers.allocate(max(size, 1))
        if not address:
            self.last = ErrorCode.LAUNCH_OUT_OF_RESOURCES
            return 0
        kernel = ProgramKernel(self.image, name)
        self.prepared[address] = LaunchRequest(kernel, sizes[:3], sizes[3:6], sizes[6], b""), size
        return address

    def _cudaCDP2LaunchDeviceV2(self, caller: Caller, buffer: int, stream: int) -> None:
        if buffer not in self.prepared:
            raise BadCall(f"launch with {buffer:#x}, which cudaGetParameterBuffer did not give")
        request, size = self.prepared.pop(buffer)
        request = replace(request, data=caller.read(buffer, max(size, 1))[:size])
        self.buffers.free(buffer)
        self.program.check_request(request)
        self.issue(caller, stream, lambda there: self.program.run_child(request, there))

    def issue(self, caller: Caller, stream: int, work: Work) -> None:
        """Adds work to a stream of the device, behind what the thread has done."""
        races = caller.memory.races
        before = LaunchClock()
        if races is not None and races.launches is not None:
            before = races.launches.launched(caller.lanes)
        if stream == TAIL:
            self.tails.append(partial(work, self.stream))
            return
        there = self.device_stream(caller, stream)

        def step() -> None:
            there.wait(ptx.Event(there.history, before))
            self.program.act(work, there, Call("a copy or fill by a kernel"))

        self.work.append((there, step))

    def device_stream(self, caller: Caller, handle: int) -> ptx.Stream:
        """Returns the stream of a handle: of 0, that of the thread's block. Raises CudaError if there is none."""
        if handle == FORGET:
            return self.new_stream()
        if not handle:
            block = int(caller.lanes.block[0]) + caller.lanes.wave.first_block
            if block not in self._own:
                self._own[block] = self.new_stream()
            return self._own[block]
        return self.find(handle, ptx.Stream)

    def new_stream(self) -> ptx.Stream:
        pool = self._pool[self.root]
        if self._taken == len(pool):
            pool.append(self.program.history.stream())
        self._taken += 1
        return pool[self._taken - 1]

    def find(self, handle: int, kind: type[Thing]) -> Thing:
        found = self.handles.get(handle)
        if not isinstance(found, kind):
            raise CudaError(ErrorCode.INVALID_RESOURCE_HANDLE)
        return found

    def handle(self, caller: Caller, out: int, thing: ptx.Stream | None) -> None:
        number = 0x10000 + 16 * len(self.handles)
        self.handles[number] = thing
        caller.write(out, number.to_bytes(8, "little"))

    # -- streams, events, copies --------------------------------------------------------------------------------------------

    def _cudaCDP2StreamCreateWithFlags(self, caller: Caller, out: int, flags: int) -> None:
        self.handle(caller, out, self.new_stream())

    def _cudaCDP2StreamDestroy(self, caller: Caller, stream: int) -> None:
        self.find(stream, ptx.Stream)
        self.handles[stream] = None

    def _cudaCDP2EventCreateWithFlags(self, caller: Caller, out: int, flags: int) -> None:
        self.handle(caller, out, None)

    def _cudaCDP2EventRecord(self, caller: Caller, event: int, stream: int) -> None:
        def record(there: ptx.Stream) -> None:
            self.handles[event] = there.record()

        self.issue(caller, stream, record)

    def _cudaCDP2StreamWaitEvent(self, caller: Caller, stream: int, event: int, flags: int) -> None:
        def wait(there: ptx.Stream) -> None:
            found = self.handles.get(event)
            if isinstance(found, ptx.Event):
                there.wait(found)

        self.issue(caller, stream, wait)

    def _cudaCDP2EventDestroy(self, caller: Caller, event: int) -> None:
        pass

    def _cudaCDP2MemcpyAsync(self, caller: Caller, target: int, source: int, size: int, kind: int, stream: int) -> None:
        for address in (target, source):
            self.program.memory.part(address, size)
        self.issue(caller, stream, lambda _: self.program.memory.copy(target, source, size))

    def _cudaCDP2MemsetAsync(self, caller: Caller, target: int, value: int, size: int, stream: int) -> None:
        self.program.memory.part(target, size)
        self.issue(caller, stream, lambda _: self.program.memory.fill(target, value, size))

    # -- graphs -------------------------------------------------------------------------------------------------------------

    def cudaGraphSetConditional(self, caller: Caller, handle: int, value: int) -> None:
        condition = self.program.handles.get(handle)
        if not isinstance(condition, Condition):
            raise BadCall(f"cudaGraphSetConditional with {handle:#x}, which is no condition of a graph")
        condition.value = value

    # -- memory, errors, the device -----------------------------------------------------------------------------------------

    def _cudaCDP2Malloc(self, caller: Caller, out: int, size: int) -> None:
        address = self.heap.allocate(size)
        if not address:
            raise CudaError(ErrorCode.MEMORY_ALLOCATION)
        caller.write(out, address.to_bytes(8, "little"))

    def _cudaCDP2Free(self, caller: Caller, address: int) -> None:
        self.heap.free(address)

    def _cudaCDP2GetLastError(self, caller: Caller) -> int:
        found, self.last = self.last, ErrorCode.SUCCESS
        return found

    def _cudaCDP2PeekAtLastError(self, caller: Caller) -> int:
        return self.last

    def _cudaCDP2GetErrorString(self, caller: Caller, error: int) -> int:
        return self.text(text_of(error))

    def _cudaCDP2GetErrorName(self, caller: Caller, error: int) -> int:
        return self.text(name_of(error))

    def text(self, text: str) -> int:
        """Returns the address of a text that kernels can read."""
        if text not in self._texts:
            data = np.frombuffer(text.encode() + b"\0", np.uint8)
            address = self._texts[text] = self.buffers.allocate(data.size)
            segment = self.buffers.segment
            assert address and segment.state is not None
            where = slice(address - segment.start, address - segment.start + data.size)
            segment.array[where], segment.state[where] = data, WRITTEN
        return self._texts[text]

    def _cudaCDP2GetDevice(self, caller: Caller, out: int) -> None:
        caller.write(out, bytes(4))

    def _cudaCDP2GetDeviceCount(self, caller: Caller, out: int) -> None:
        caller.write(out, (1).to_bytes(4, "little"))

    def _cudaCDP2DeviceGetAttribute(self, caller: Caller, out: int, number: int, device: int) -> None:
        caller.write(out, attribute(self.program.device, number).to_bytes(4, "little", signed=True))
