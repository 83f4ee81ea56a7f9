"""Launches that repeat, under the runtime of `cupyflash run`: a block's digest is kept until something may have written it."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from test_program_graphs import Graphs
from test_ptx_harness import compile_cuda

from cupyflash.sim.program.memory import ARRAY, DEVICE, VARIABLE
from cupyflash.sim.program.streams import ALLOCATE
from cupyflash.sim.program.symbols import Image, LaunchRequest, ProgramKernel
from cupyflash.sim.program.textures import LOAD_STORE

SIZE = 64
KERNELS = """
extern "C" __global__ void store(int* x) { x[3] = 7; }
extern "C" __global__ void atomic(int* x) { atomicAdd(x + 3, 1); }
extern "C" __global__ void surface(unsigned long long to) {
    asm volatile("sust.b.1d.b32.trap [%0, {%1}], {%2};" :: "l"(to), "r"(12), "r"(7));
}
extern "C" __device__ int __cudaCDP2MemsetAsync(void*, int, size_t, size_t);
extern "C" __device__ int __cudaCDP2MemcpyAsync(void*, const void*, size_t, int, size_t);
extern "C" __global__ void fills(int* x) { __cudaCDP2MemsetAsync(x + 3, 7, 4, 0); }
extern "C" __global__ void copies(int* x) { __cudaCDP2MemcpyAsync(x + 3, x + 4, 4, 3, 0); }
"""


class Written(Graphs):
    """A runtime with these kernels, and 64 bytes each: `block` and `other` of the device, `texels` of an array."""

    def __init__(self) -> None:
        super().__init__()
        self.image = Image([], 80, self.runtime.memory)
        self.image.__dict__["module"] = compile_cuda(KERNELS)
        channels = self.host.keep(struct.pack("<5i", 32, 0, 0, 0, 0))
        self.array = self.made("cudaMallocArray", channels, SIZE // 4, 0, LOAD_STORE)
        self.texels = self.runtime.array(self.array).block
        self.block, self.other = (self.runtime.memory.allocate(SIZE) for _ in range(2))
        for number, block in enumerate((self.block, self.other, self.texels)):
            self.runtime.memory.write(
                block.address, np.arange(100 * number + 1, 100 * number + 1 + SIZE // 4, dtype=np.float32).tobytes()
            )

    def digests(self) -> list[bytes]:
        return [self.block.digest(), self.texels.digest()]

    def look(self) -> None:
        self.before = self.digests()

    def launch(self, name: str, word: int) -> None:
        request = LaunchRequest(ProgramKernel(self.image, name), (1, 1, 1), (1, 1, 1), 0, struct.pack("<Q", word))
        self.runtime.run(request, self.runtime.legacy.stream)

    def store_to_surface(self) -> None:
        resource = self.host.keep(struct.pack("<i4xQ", 0, self.array).ljust(144, b"\0"))
        self.launch("surface", self.made("cudaCreateSurfaceObject", resource))

    def multiply(self) -> None:
        """Asks cuBLAS for block[3] = other[0] other[1]."""
        handle, numbers = self.made("cublasCreate_v2"), self.host.keep(struct.pack("<2f", 1, 0))
        a, c = self.other.address, self.block.address + 12
        self.runtime.cublasSgemm_v2(handle, 0, 0, 1, 1, 1, numbers, a, 1, a + 4, 1, numbers + 4, c, 1)

    def copy_rows(self) -> None:
        self.runtime.cudaMemcpy2D(self.block.address + 8, 8, self.other.address, 8, 4, 2)

    def copy_box(self, to: int) -> None:
        """Copies 4 bytes into the third element of linear memory, or of an array."""
        source = (0, 0, 0, 0, self.other.address, SIZE, SIZE, 1)
        x, extent = (3, 1) if to else (12, 4)
        target = (to, x, 0, 0, 0 if to else self.block.address, 0 if to else SIZE, SIZE, 1)
        self.runtime.cudaMemcpy3D(self.host.keep(struct.pack("<20Q", *source, *target, extent, 1, 1, 3)))

    def allocate_again(self) -> None:
        """Launches a graph that allocates `block`, as an earlier launch has: nobody has written it since."""
        graph = self.made("cudaGraphCreate", 0)
        _, place = self.node(graph, ALLOCATE, bytes(104) + struct.pack("<Q", SIZE))
        self.block = self.runtime.memory.part(self.host.read_word(place + 112), SIZE)[0]
        run = self.made("cudaGraphInstantiate", graph, 0)
        self.runtime.cudaGraphLaunch(run, 0)
        self.runtime.memory.write(self.block.address, bytes(SIZE))
        self.look()
        self.runtime.cudaGraphLaunch(run, 0)

    def restore(self) -> None:
        """Makes the bytes what they were at another time."""
        self.runtime.memory.fill(self.block.address, 1, SIZE)
        other = self.block.contents()
        self.runtime.memory.write(self.block.address, bytes(SIZE))
        self.look()
        self.block.restore(other)


WRITES: dict[str, Callable[[Written], None]] = {
    "write": lambda one: one.runtime.memory.write(one.block.address + 3, b"x"),
    "fill": lambda one: one.runtime.cudaMemset(one.block.address + 3, 9, 1),
    "fill rows": lambda one: one.runtime.cudaMemset2D(one.block.address + 3, 8, 9, 1, 2),
    "copy": lambda one: one.runtime.cudaMemcpy(one.block.address + 3, one.host.keep(b"x"), 1, 1),
    "copy of the device": lambda one: one.runtime.cudaMemcpy(one.block.address + 4, one.other.address, 4, 3),
    "copy of what nobody wrote": lambda one: one.runtime.cudaMemcpy(
        one.block.address, one.runtime.memory.allocate(4).address, 4, 3
    ),
    "copy of rows": Written.copy_rows,
    "copy of a box": lambda one: one.copy_box(0),
    "copy to an array": lambda one: one.runtime.cudaMemcpyToArray(one.array, 4, 0, one.other.address, 4, 3),
    "copy of a box to an array": lambda one: one.copy_box(one.array),
    "surface": Written.store_to_surface,
    "product": Written.multiply,
    "allocation of a graph": Written.allocate_again,
    "what it was": Written.restore,
    **{name: lambda one, name=name: one.launch(name, one.block.address) for name in ("store", "atomic", "fills", "copies")},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_of_any_kind_is_seen(name: str) -> None:
    one = Written()
    try:
        one.look()
        WRITES[name](one)
        kept = one.digests()
        assert kept != one.before
        for block in (one.block, one.texels):
            block.opened()
        assert one.digests() == kept
        assert not [found for record in one.runtime.records.values() for found in record.findings]
    finally:
        one.runtime.memory.close()


def test_bytes_can_be_written_by_no_other_way() -> None:
    """Whoever does not open a block has arrays that NumPy does not let him write to; a digest of what the host sees is not kept."""
    one = Written()
    try:
        for kind in (DEVICE, ARRAY, VARIABLE):
            block = one.runtime.memory.allocate(SIZE, kind)
            for array in filter(lambda array: array is not None, (block.allocation.memory, block.allocation.state)):
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 1
        before, held = block.digest(), block.opened().memory
        assert block.kind == VARIABLE and block.digest() == before
        held[0] = 1
        assert block.digest() != before
    finally:
        one.runtime.memory.close()
