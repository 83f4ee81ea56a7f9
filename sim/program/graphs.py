"""CUDA graphs: captured from streams or built node by node.

A launch does the work of the nodes, each in a stream of its own, so that a race between nodes that nothing orders is found.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from cupyflash.sim import ptx
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.launches import LaunchCalls
from cupyflash.sim.program.memory import DEVICE
from cupyflash.sim.program.streams import (
    ALLOCATE,
    CHILD,
    EMPTY,
    FREE,
    HOST_FUNCTION,
    KERNEL,
    MEMCPY,
    MEMSET,
    Graph,
    Node,
    ProgramEvent,
    ProgramStream,
)
from cupyflash.sim.program.symbols import LaunchRequest

Work = Callable[[ptx.Stream], None]


@dataclass
class GraphExec:
    """A graph that can be launched: its nodes in order, and what replaces the work of some of them."""

    graph: Graph
    instead: dict[int, Work] = field(default_factory=dict)
    streams: list[ptx.Stream] = field(default_factory=list)


class GraphCalls(LaunchCalls):
    """Capture, nodes, launches."""

    # -- capture --------------------------------------------------------------------------------------------------------

    def captured(self, graph: Graph) -> list[ProgramStream]:
        return [one for one in self.handles.values() if isinstance(one, ProgramStream) and one.graph is graph]

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> None:
        one = self.stream(stream)
        if one is self.legacy or one.graph is not None:
            raise CudaError(ErrorCode.STREAM_CAPTURE_UNSUPPORTED)
        one.graph, one.ends, one.origin = Graph(), [], True

    def cudaStreamEndCapture(self, stream: int, out: int) -> None:
        one = self.stream(stream)
        if one.graph is None or not one.origin:
            raise CudaError(ErrorCode.ILLEGAL_STATE)
        graph = one.graph
        for other in self.captured(graph):
            other.graph, other.ends, other.origin = None, [], False
        for event in self.handles.values():
            if isinstance(event, ProgramEvent) and event.graph is graph:
                event.graph, event.ends = None, []
        self.channel.write_word(out, self.handle(graph))

    def cudaStreamIsCapturing(self, stream: int, out: int) -> None:
        self.channel.write_int(out, int(self.stream(stream).graph is not None))

    def cudaThreadExchangeStreamCaptureMode(self, mode: int) -> None:
        pass

    # -- nodes ----------------------------------------------------------------------------------------------------------

    def cudaGraphCreate(self, out: int, flags: int) -> None:
        self.channel.write_word(out, self.handle(Graph()))

    def add(self, out: int, graph: int, after: int, count: int, kind: int, work: Work) -> None:
        """Adds a node behind `count` others, whose handles lie at `after`."""
        handles = struct.unpack(f"<{count}Q", self.channel.read(after, 8 * count))
        node = Node(kind, work, [self.find(one, Node) for one in handles])
        self.find(graph, Graph).nodes.append(node)
        self.channel.write_word(out, self.handle(node))

    def kernel_request(self, parameters: int) -> LaunchRequest:
        """Returns the launch that a cudaKernelNodeParams describes."""
        function, *sizes, shared, arguments = struct.unpack("<Q6IIxxxxQ", self.channel.read(parameters, 48))
        kernel = self.kernel(function)
        return LaunchRequest(kernel, tuple(sizes[:3]), tuple(sizes[3:]), shared, self.packed(kernel, arguments))

    def cudaGraphAddKernelNode(self, out: int, graph: int, after: int, count: int, parameters: int) -> None:
        request = self.kernel_request(parameters)
        self.add(out, graph, after, count, KERNEL, lambda stream: self.run(request, stream))

    def cudaGraphAddMemcpyNode(self, out: int, graph: int, after: int, count: int, parameters: int) -> None:
        copy = self.box(parameters)
        self.add(out, graph, after, count, MEMCPY, lambda _: copy())

    def cudaGraphAddMemcpyNode1D(
        self, out: int, graph: int, after: int, count: int, target: int, source: int, size: int, kind: int
    ) -> None:
        self.add(out, graph, after, count, MEMCPY, self.work_of_copy(target, source, size))

    def memset_of(self, parameters: int) -> Work:
        """Returns the fill that a cudaMemsetParams describes."""
        address, pitch, value, element, width, height = struct.unpack("<QQIIQQ", self.channel.read(parameters, 40))
        row = (value & ((1 << 8 * element) - 1)).to_bytes(element, "little") * width

        def fill(_: ptx.Stream) -> None:
            for number in range(height):
                self.memory.write(address + number * pitch, row)

        return fill

    def cudaGraphAddMemsetNode(self, out: int, graph: int, after: int, count: int, parameters: int) -> None:
        self.add(out, graph, after, count, MEMSET, self.memset_of(parameters))

    def cudaGraphAddHostNode(self, out: int, graph: int, after: int, count: int, parameters: int) -> None:
        function, data = struct.unpack("<QQ", self.channel.read(parameters, 16))
        self.add(out, graph, after, count, HOST_FUNCTION, lambda _: self.channel.call(function, data))

    def cudaGraphAddEmptyNode(self, out: int, graph: int, after: int, count: int) -> None:
        self.add(out, graph, after, count, EMPTY, lambda _: None)

    def cudaGraphAddChildGraphNode(self, out: int, graph: int, after: int, count: int, child: int) -> None:
        inner = GraphExec(self.find(child, Graph))
        self.add(out, graph, after, count, CHILD, lambda stream: self.launch_graph(inner, stream))

    def cudaGraphAddMemAllocNode(self, out: int, graph: int, after: int, count: int, parameters: int) -> None:
        size = self.channel.read_word(parameters + 104)
        address = self.memory.allocate(size, DEVICE).address
        self.channel.write_word(parameters + 112, address)
        self.add(out, graph, after, count, ALLOCATE, lambda _: None)

    def cudaGraphAddMemFreeNode(self, out: int, graph: int, after: int, count: int, address: int) -> None:
        self.add(out, graph, after, count, FREE, lambda _: None)

    def cudaGraphAddDependencies(self, graph: int, first: int, second: int, data: int, count: int) -> None:
        ends = [struct.unpack(f"<{count}Q", self.channel.read(one, 8 * count)) for one in (first, second)]
        for before, after in zip(*ends, strict=True):
            self.find(after, Node).after.append(self.find(before, Node))

    def cudaGraphGetNodes(self, graph: int, out: int, count: int) -> None:
        nodes = self.find(graph, Graph).nodes
        if out:
            known = {id(one): handle for handle, one in self.handles.items()}
            for number, node in enumerate(nodes[: self.channel.read_word(count)]):
                self.channel.write_word(out + 8 * number, known.get(id(node)) or self.handle(node))
        self.channel.write_word(count, len(nodes))

    def cudaGraphNodeGetType(self, node: int, out: int) -> None:
        self.channel.write_int(out, self.find(node, Node).kind)

    def cudaGraphKernelNodeSetParams(self, node: int, parameters: int) -> None:
        request = self.kernel_request(parameters)
        self.find(node, Node).work = lambda stream: self.run(request, stream)

    def cudaGraphClone(self, out: int, graph: int) -> None:
        self.channel.write_word(out, self.handle(Graph(list(self.find(graph, Graph).nodes))))

    def cudaGraphDestroy(self, graph: int) -> None:
        self.find(graph, Graph)
        del self.handles[graph]

    # -- launches -------------------------------------------------------------------------------------------------------

    def cudaGraphInstantiate(self, out: int, graph: int, flags: int) -> None:
        self.channel.write_word(out, self.handle(GraphExec(Graph(list(self.find(graph, Graph).nodes)))))

    cudaGraphInstantiateWithFlags = cudaGraphInstantiate

    def cudaGraphExecDestroy(self, run: int) -> None:
        self.find(run, GraphExec)
        del self.handles[run]

    def cudaGraphExecKernelNodeSetParams(self, run: int, node: int, parameters: int) -> None:
        request = self.kernel_request(parameters)
        self.find(run, GraphExec).instead[id(self.find(node, Node))] = lambda stream: self.run(request, stream)

    def cudaGraphExecMemcpyNodeSetParams1D(self, run: int, node: int, target: int, source: int, size: int, kind: int) -> None:
        self.find(run, GraphExec).instead[id(self.find(node, Node))] = self.work_of_copy(target, source, size)

    def cudaGraphExecUpdate(self, run: int, graph: int, result: int) -> None:
        one = self.find(run, GraphExec)
        one.graph, one.instead = Graph(list(self.find(graph, Graph).nodes)), {}
        if result:
            self.channel.write(result, bytes(24))

    def cudaGraphUpload(self, run: int, stream: int) -> None:
        self.find(run, GraphExec)

    def cudaGraphLaunch(self, run: int, stream: int) -> None:
        one = self.find(run, GraphExec)
        self.issue(stream, CHILD, lambda there: self.launch_graph(one, there))

    def launch_graph(self, run: GraphExec, stream: ptx.Stream) -> None:
        """Does the work of all nodes; the stream goes on behind the last."""
        begin = stream.record()
        done: dict[int, ptx.Event] = {}
        waiting = list(run.graph.nodes)
        while waiting:
            node = next((one for one in waiting if all(id(before) in done for before in one.after)), None)
            if node is None:
                raise CudaError(ErrorCode.INVALID_VALUE, "the nodes of a graph wait for each other")
            waiting.remove(node)
            if len(run.streams) < len(done) + 1:
                run.streams.append(self.history.stream())
            own = run.streams[len(done)]
            for event in (begin, *(done[id(before)] for before in node.after)):
                own.wait(event)
            run.instead.get(id(node), node.work)(own)
            done[id(node)] = own.record()
        for event in done.values():
            stream.wait(event)
