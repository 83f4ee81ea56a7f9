"""Graphs under the runtime of `cupyflash run`: conditional nodes, captures into them, memory of graphs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_ptx_harness import compile_cuda

from cupyflash.device import Device
from cupyflash.sim.program.channel import Channel
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.runtime import Runtime
from cupyflash.sim.program.streams import ALLOCATE, CONDITIONAL, EMPTY, FREE, KERNEL, Settings
from cupyflash.sim.program.symbols import Image, ProgramKernel

KERNELS = """
extern "C" __device__ void cudaGraphSetConditional(unsigned long long, unsigned);
extern "C" __global__ void choose(int* x, unsigned long long handle) { cudaGraphSetConditional(handle, x[0]); }
extern "C" __global__ void count(int* x, unsigned long long handle) { x[1] += 1; cudaGraphSetConditional(handle, --x[0]); }
extern "C" __global__ void add(int* x, unsigned long long value) { x[1] += value; }
"""
IF, WHILE, SWITCH = range(3)
DEFAULT = 1


class HostMemory(Channel):
    """The memory of a program without a process: what is kept lies in it, one behind the other."""

    def __init__(self) -> None:
        self.bytes = bytearray(16)

    def keep(self, data: bytes) -> int:
        self.bytes += bytes(-len(self.bytes) % 16) + data + bytes(8)
        return len(self.bytes) - len(data) - 8

    def read(self, address: int, size: int) -> bytes:
        return bytes(self.bytes[address : address + size])

    def write(self, address: int, data: bytes) -> None:
        self.bytes[address : address + len(data)] = data

    def print(self, text: str) -> None:
        assert not text


class Graphs:
    """A runtime with the kernels, and 8 bytes x of the device."""

    def __init__(self) -> None:
        self.host = HostMemory()
        self.runtime = Runtime(self.host, Device.named("A100-40GB"), 13, [], set(), Settings())
        image = Image([], 80, self.runtime.memory)
        image.__dict__["module"] = compile_cuda(KERNELS)
        self.kernels = {name: number for number, name in enumerate(("choose", "count", "add"), 1)}
        self.runtime.kernels |= {number: ProgramKernel(image, name) for name, number in self.kernels.items()}
        self.x = self.runtime.memory.allocate(8).address

    def made(self, function: str, *words: int) -> int:
        """Returns the handle that a function writes to its first argument."""
        out = self.host.keep(bytes(8))
        getattr(self.runtime, function)(out, *words)
        return self.host.read_word(out)

    def node(self, graph: int, kind: int, parameters: bytes, *after: int) -> tuple[int, int]:
        """Adds a node by its cudaGraphNodeParams; returns it, and the address of its own parameters."""
        place = self.host.keep(struct.pack("<I12x", kind) + parameters.ljust(240, b"\0"))
        before = self.host.keep(struct.pack(f"<{len(after)}Q", *after))
        return self.made("cudaGraphAddNode", graph, before, 0, len(after), place), place + 16

    def kernel(self, graph: int, name: str, word: int, *after: int) -> int:
        values = [self.host.keep(struct.pack("<Q", value)) for value in (self.x, word)]
        arguments = self.host.keep(struct.pack("<2Q", *values))
        parameters = struct.pack("<Q6IIxxxxQ", self.kernels[name], *(1,) * 6, 0, arguments)
        return self.node(graph, KERNEL, parameters, *after)[0]

    def conditional(self, graph: int, condition: int, kind: int, size: int, *after: int) -> list[int]:
        """Adds a conditional node; returns its graphs."""
        _, place = self.node(graph, CONDITIONAL, struct.pack("<QII", condition, kind, size), *after)
        return list(struct.unpack(f"<{size}Q", self.host.read(self.host.read_word(place + 16), 8 * size)))

    def launched(self, run: int, first: int) -> list[int]:
        """Returns x after a launch that began with (first, 0)."""
        self.runtime.memory.write(self.x, struct.pack("<2i", first, 0))
        self.runtime.cudaGraphLaunch(run, 0)
        return np.frombuffer(self.runtime.memory.read(self.x, 8), np.int32).tolist()


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    made = Graphs()
    yield made
    made.runtime.memory.close()
    assert not [one for record in made.runtime.records.values() for one in record.findings]


@pytest.mark.parametrize(
    ("kind", "size", "wanted"),
    [(IF, 1, {0: 0, 1: 10, 5: 10}), (IF, 2, {0: 11, 1: 10}), (SWITCH, 3, {0: 10, 2: 12, 3: 0})],
)
def test_a_condition_chooses_a_graph(graphs: Graphs, kind: int, size: int, wanted: dict[int, int]) -> None:
    graph = graphs.made("cudaGraphCreate", 0)
    condition = graphs.made("cudaGraphConditionalHandleCreate", graph, 0, 0)
    bodies = graphs.conditional(graph, condition, kind, size, graphs.kernel(graph, "choose", condition))
    for number, body in enumerate(bodies):
        graphs.kernel(body, "add", 10 + number)
    run = graphs.made("cudaGraphInstantiate", graph, 0)
    assert {first: graphs.launched(run, first)[1] for first in wanted} == wanted


def test_a_loop_begins_with_its_default_and_its_graph_may_be_captured(graphs: Graphs) -> None:
    graph = graphs.made("cudaGraphCreate", 0)
    condition = graphs.made("cudaGraphConditionalHandleCreate", graph, 1, DEFAULT)
    (body,) = graphs.conditional(graph, condition, WHILE, 1)
    stream = graphs.made("cudaStreamCreate")
    graphs.runtime.cudaStreamBeginCaptureToGraph(stream, body, 0, 0, 0, 0)
    values = [graphs.host.keep(struct.pack("<Q", value)) for value in (graphs.x, condition)]
    graphs.runtime.launch(graphs.kernels["count"], (1, 1, 1), (1, 1, 1), graphs.host.keep(struct.pack("<2Q", *values)), 0, stream)
    graphs.runtime.cudaStreamEndCapture(stream, 0)
    run = graphs.made("cudaGraphInstantiate", graph, 0)
    assert graphs.launched(run, 4) == [0, 4] and graphs.launched(run, 2) == [0, 2]


def test_a_capture_tells_its_graph_and_goes_on_behind_other_nodes(graphs: Graphs) -> None:
    stream = graphs.made("cudaStreamCreate")
    graphs.runtime.cudaStreamBeginCapture(stream, 0)
    status, number, graph, ends, count = (graphs.host.keep(bytes(8)) for _ in range(5))
    graphs.runtime.cudaStreamGetCaptureInfo(stream, status, number, graph, ends, 0, count)
    assert [graphs.host.read_word(place) for place in (status, count)] == [1, 0]
    whole = graphs.host.read_word(graph)
    node, _ = graphs.node(whole, EMPTY, b"")
    graphs.runtime.cudaStreamUpdateCaptureDependencies(stream, graphs.host.keep(struct.pack("<Q", node)), 0, 1, 1)
    graphs.runtime.cudaStreamGetCaptureInfo(stream, status, number, graph, ends, 0, count)
    assert graphs.host.read_word(count) == 1 and graphs.host.read_word(graphs.host.read_word(ends)) == node
    out = graphs.host.keep(bytes(8))
    graphs.runtime.cudaStreamEndCapture(stream, out)
    assert graphs.host.read_word(out) == whole


def test_memory_of_graphs_is_counted_and_used_again(graphs: Graphs) -> None:
    def attributes() -> list[int]:
        out = graphs.host.keep(bytes(8))
        found = []
        for number in range(4):
            graphs.runtime.cudaDeviceGetGraphMemAttribute(0, number, out)
            found.append(graphs.host.read_word(out))
        return found

    def allocated(graph: int, *after: int) -> tuple[int, int]:
        node, place = graphs.node(graph, ALLOCATE, bytes(104) + struct.pack("<Q", 4096), *after)
        return node, graphs.host.read_word(place + 112)

    graph = graphs.made("cudaGraphCreate", 0)
    node, first = allocated(graph)
    freed, _ = graphs.node(graph, FREE, struct.pack("<Q", first), node)
    (_, second), (_, beside) = allocated(graph, freed), allocated(graph)
    assert second == first != beside
    run = graphs.made("cudaGraphInstantiate", graph, 0)
    assert attributes() == [0, 0, 0, 0]
    graphs.runtime.cudaGraphLaunch(run, 0)
    assert attributes() == [8192, 8192, 8192, 8192]
    for address in (first, beside):
        graphs.runtime.cudaFree(address)
    assert attributes() == [0, 8192, 8192, 8192]
    graphs.runtime.cudaDeviceGraphMemTrim(0)
    assert attributes() == [0, 8192, 0, 8192]
    graphs.runtime.cudaGraphLaunch(run, 0)
    assert attributes()[0] == 8192


def test_a_conditional_node_has_as_many_graphs_as_its_type_allows(graphs: Graphs) -> None:
    graph: Any = graphs.made("cudaGraphCreate", 0)
    condition = graphs.made("cudaGraphConditionalHandleCreate", graph, 0, 0)
    for kind, size in ((IF, 3), (WHILE, 2), (SWITCH, 0), (3, 1)):
        with pytest.raises(CudaError) as error:
            graphs.conditional(graph, condition, kind, size)
        assert error.value.code == ErrorCode.INVALID_VALUE
