"""The runtime's functions of memory: allocations, copies, fills."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from cupyflash.sim import ptx
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.lines import Call
from cupyflash.sim.program.memory import DEVICE, HOST, MANAGED, PAGE, TOTAL, VARIABLE, MovedRange
from cupyflash.sim.program.streams import ALLOCATE, FREE, MEMCPY, MEMSET, StreamCalls, tells
from cupyflash.sim.ptx.order import past

PITCH = 512
"""Bytes that the rows of pitched memory are multiples of."""

UNREGISTERED, PINNED, OF_DEVICE, OF_MANAGED = range(4)
"""cudaMemoryType."""

Copy = Callable[[], None]


@dataclass(frozen=True)
class Side:
    """One end of a copy of a box: its address, bytes from row to row, rows from plane to plane, bytes of an element; `planes` of an
    array."""

    address: int
    pitch: int
    rows: int
    element: int = 1
    planes: int | None = None

    def start(self, x: int, y: int, z: int, width: int, height: int, depth: int) -> int:
        """Returns the address of a box's first byte; `x` and `width` in bytes. Raises CudaError if an array has not all of it."""
        if self.planes is not None and (x + width > self.pitch or y + height > self.rows or z + depth > self.planes):
            raise CudaError(ErrorCode.INVALID_VALUE)
        return self.address + (z * self.rows + y) * self.pitch + x


def copies(of: Callable[..., Copy], stream: int, kind: int = MEMCPY) -> tuple[Callable[..., None], Callable[..., None]]:
    """Returns two functions of the runtime: one copies or fills in the default stream, one in the stream that its word number
    `stream` names.

    `of` returns the copy or fill that their first words describe.
    """
    count = of.__code__.co_argcount - 1

    def now(self: CopyCalls, *words: int) -> None:
        self.now(of(self, *words[:count]), kind)

    def later(self: CopyCalls, *words: int) -> None:
        self.later(words[stream], of(self, *words[:count]), kind)

    return now, later


class CopyCalls(StreamCalls):
    """Allocation, copies and fills."""

    # -- allocation -----------------------------------------------------------------------------------------------------

    def give(self, out: int, size: int, kind: str) -> None:
        self.check_sticky()
        self.channel.write_word(out, self.memory.allocate(size, kind).address if size else 0)

    def cudaMalloc(self, out: int, size: int) -> None:
        self.give(out, size, DEVICE)

    def cudaMallocManaged(self, out: int, size: int) -> None:
        self.give(out, size, MANAGED)

    def cudaMallocHost(self, out: int, size: int) -> None:
        self.give(out, size, HOST)

    cudaHostAlloc = cudaMallocHost

    def cudaMallocPitch(self, out: int, pitch: int, width: int, height: int) -> None:
        row = -(-width // PITCH) * PITCH
        self.give(out, row * height, DEVICE)
        self.channel.write_word(pitch, row)

    def cudaMalloc3D(self, out: int, *words: int) -> None:
        width, height, depth = words[5:8]
        row = -(-width // PITCH) * PITCH
        self.give(out, row * height * depth, DEVICE)
        self.channel.write(out + 8, struct.pack("<3Q", row, width, height))

    def cudaMallocAsync(self, out: int, size: int, stream: int) -> None:
        self.give(out, size, DEVICE)
        self.issue(stream, ALLOCATE, lambda _: None)

    def cudaMallocFromPoolAsync(self, out: int, size: int, pool: int, stream: int) -> None:
        self.cudaMallocAsync(out, size, stream)

    def release_in(self, address: int, stream: ptx.Stream, call: Call) -> None:
        """Frees memory in a stream: nothing that is not over before may use it."""
        block = self.memory.find(address)
        if block is not None and block.address == address:
            self.moved([MovedRange(block, past.FREE, 0, block.size)], stream, call)
        self.release(address)

    def release(self, address: int) -> None:
        self.memory.free(address, (DEVICE, MANAGED))

    def cudaFree(self, address: int) -> None:
        self.release(address)
        self.wait_for_all()

    def cudaFreeHost(self, address: int) -> None:
        self.memory.free(address, (HOST,))

    def cudaFreeAsync(self, address: int, stream: int) -> None:
        call = self.call
        self.issue(stream, FREE, lambda there: self.release_in(address, there, call))

    def cudaHostRegister(self, address: int, size: int) -> None:
        start, end = address // PAGE * PAGE, -(-(address + size) // PAGE) * PAGE
        if self.memory.taken(start):
            raise CudaError(ErrorCode.NOT_SUPPORTED, "two registered ranges of host memory lie too near each other")
        self.memory.allocate(end - start, HOST, "registered host memory", start)

    def cudaHostUnregister(self, address: int) -> None:
        self.memory.unregister(address)

    def cudaHostGetDevicePointer(self, out: int, address: int) -> None:
        block = self.memory.find(address)
        if block is None or block.kind != HOST:
            raise CudaError(ErrorCode.INVALID_VALUE)
        self.channel.write_word(out, address)

    cudaHostGetFlags = tells(2)  # mapped

    def cudaMemGetInfo(self, free: int, total: int) -> None:
        self.channel.write_word(free, TOTAL - self.memory.used)
        self.channel.write_word(total, TOTAL)

    def cudaPointerGetAttributes(self, out: int, address: int) -> None:
        block = self.memory.find(address)
        types = {None: UNREGISTERED, HOST: PINNED, DEVICE: OF_DEVICE, VARIABLE: OF_DEVICE, MANAGED: OF_MANAGED}
        kind = None if block is None else block.kind
        device, host = 0 if block is None else address, 0 if kind in (DEVICE, VARIABLE) else address
        self.channel.write(out, struct.pack("<iiQQ", types[kind], -1 if block is None else 0, device, host))

    def cudaMemAdvise(self, address: int, size: int) -> None:
        self.memory.part(address, size)

    cudaMemPrefetchAsync = cudaMemAdvise

    # -- copies -----------------------------------------------------------------------------------------------------------

    def now(self, copy: Copy, kind: int = MEMCPY) -> None:
        """Copies or fills in the default stream; the host waits for a copy."""
        self.later(0, copy, kind)
        if kind == MEMCPY:
            self.stream(0).stream.synchronize()

    def later(self, stream: int, copy: Copy, kind: int = MEMCPY) -> None:
        self.check_sticky()
        self.issue(stream, kind, lambda _: copy())

    def plain(self, target: int, source: int, size: int) -> Copy:
        return lambda: self.memory.copy(target, source, size)

    def peer(self, target: int, _: int, source: int, __: int, size: int) -> Copy:
        """Returns a copy between two devices, which are one."""
        return self.plain(target, source, size)

    def rows(self, target: int, pitch: int, source: int, from_pitch: int, width: int, height: int) -> Copy:
        """Returns a copy of `height` rows of `width` bytes."""
        if width > pitch or width > from_pitch:
            raise CudaError(ErrorCode.INVALID_VALUE)

        def copy() -> None:
            for row in range(height):
                self.memory.copy(target + row * pitch, source + row * from_pitch, width)

        return copy

    def box(self, parameters: int) -> Copy:
        """Returns the copy that a cudaMemcpy3DParms describes."""
        words = struct.unpack("<20Q", self.channel.read(parameters, 160))
        width, height, depth = words[16:19]
        ends = [
            self.side(array) if array else Side(address, pitch, high)
            for array, _, _, _, address, pitch, _, high in (words[:8], words[8:16])
        ]
        # Sizes and places are in elements: an array's texels, else bytes. The size is in those of an array if one takes part.
        width *= max(end.element for end in ends)
        starts = []
        for end, (x, y, z) in zip(ends, (words[1:4], words[9:12]), strict=True):
            starts.append(end.start(x * end.element, y, z, width, height, depth))
        (source, target), (from_, to) = starts, ends
        if len({end.element for end in ends if end.planes is not None}) > 1 or max(width, 1) > min(from_.pitch, to.pitch) > 0:
            raise CudaError(ErrorCode.INVALID_VALUE)

        def copy() -> None:
            for plane in range(depth):
                for row in range(height):
                    there = source + (plane * from_.rows + row) * from_.pitch
                    self.memory.copy(target + (plane * to.rows + row) * to.pitch, there, width)

        return copy

    def side(self, array: int) -> Side:
        """Returns an array as one end of a copy of a box."""
        raise NotImplementedError

    cudaMemcpy, cudaMemcpyAsync = copies(plain, 4)
    cudaMemcpyPeer, cudaMemcpyPeerAsync = copies(peer, 5)
    cudaMemcpy2D, cudaMemcpy2DAsync = copies(rows, 7)
    cudaMemcpy3D, cudaMemcpy3DAsync = copies(box, 1)

    # -- fills ------------------------------------------------------------------------------------------------------------

    def fill(self, address: int, value: int, size: int) -> Copy:
        return self.fill_rows(address, 0, value, size, 1)

    def fill_rows(self, address: int, pitch: int, value: int, width: int, height: int) -> Copy:
        """Returns a fill of `height` rows of `width` bytes."""

        def fill() -> None:
            for start in (address + row * pitch for row in range(height)):
                if self.memory.owns(start):
                    self.memory.fill(start, value, width)
                else:
                    self.channel.write(start, bytes([value & 0xFF]) * width)

        return fill

    cudaMemset, cudaMemsetAsync = copies(fill, 3, MEMSET)
    cudaMemset2D, cudaMemset2DAsync = copies(fill_rows, 5, MEMSET)

    def work_of_copy(self, target: int, source: int, size: int) -> Callable[[ptx.Stream], None]:
        """Returns a copy as the work of a graph's node."""
        return lambda _: self.memory.copy(target, source, size)
