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
    CONDITIONAL,
    EMPTY,
    FREE,
    HOST_FUNCTION,
    KERNEL,
    MEMCPY,
    MEMSET,
    Condition,
    Graph,
    Node,
    ProgramEvent,
    ProgramStream,
    destroys,
)
from cupyflash.sim.program.symbols import LaunchRequest
from cupyflash.sim.ptx.state.segments import UNWRITTEN

Work = Callable[[ptx.Stream], None]
IF, WHILE, SWITCH = 0, 1, 2
"""cudaGraphConditionalNodeType."""
UNION = 16
"""Offset in cudaGraphNodeParams of the parameters of the node's type, which begin as those of older functions do."""


@dataclass
class GraphExec:
    """A graph that can be launched: its nodes in order, and what replaces the work of some of them."""

    graph: Graph
    instead: dict[int, Work] = field(default_factory=dict)
    streams: list[ptx.Stream] = field(default_factory=list)


def adds(kind: int) -> Callable[[Callable[..., Work]], Callable[..., None]]:
    """Makes a function of the runtime that adds a node of a kind: its first four words are where its handle goes, the graph and the
    nodes in front of it, and the decorated method returns its work from the words behind these.
    """

    def decorate(work_of: Callable[..., Work]) -> Callable[..., None]:
        count = work_of.__code__.co_argcount - 1

        def add(self: GraphCalls, out: int, graph: int, after: int, nodes: int, *words: int) -> None:
            self.add(out, graph, after, nodes, kind, work_of(self, *words[:count]))

        return add

    return decorate


class GraphCalls(LaunchCalls):
    """Capture, nodes, launches."""

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        self.graph_allocations: set[int] = set()
        """Addresses that alloc nodes have allocated and no free node has freed."""
        self.graph_peak = self.graph_reserved = self.graph_reserved_peak = 0

    # -- capture --------------------------------------------------------------------------------------------------------

    def captured(self, graph: Graph) -> list[ProgramStream]:
        return [one for one in self.handles.values() if isinstance(one, ProgramStream) and one.graph is graph]

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> None:
        one = self.stream(stream)
        if one is self.legacy or one.graph is not None:
            raise CudaError(ErrorCode.STREAM_CAPTURE_UNSUPPORTED)
        one.graph, one.ends, one.origin = Graph(), [], True

    def cudaStreamBeginCaptureToGraph(self, stream: int, graph: int, after: int, data: int, count: int, mode: int) -> None:
        whole, ends = self.find(graph, Graph), self.nodes(after, count)
        self.cudaStreamBeginCapture(stream, mode)
        one = self.stream(stream)
        one.graph, one.ends = whole, ends

    def cudaStreamGetCaptureInfo(self, stream: int, status: int, number: int, graph: int, ends: int, data: int, count: int) -> None:
        one = self.stream(stream)
        self.channel.write_int(status, int(one.graph is not None))
        if one.graph is None:
            return
        handles = [self.handle_of(node) for node in one.ends]
        kept = self.channel.keep(struct.pack(f"<{len(handles)}Q", *handles)) if ends else 0
        words = ((number, id(one.graph)), (graph, self.handle_of(one.graph)), (ends, kept), (data, 0), (count, len(handles)))
        for out, word in words:
            if out:
                self.channel.write_word(out, word)

    def cudaStreamUpdateCaptureDependencies(self, stream: int, after: int, data: int, count: int, flags: int) -> None:
        one = self.stream(stream)
        if one.graph is None:
            raise CudaError(ErrorCode.ILLEGAL_STATE)
        one.ends = ([] if flags & 1 else one.ends) + self.nodes(after, count)

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
        if out:
            self.channel.write_word(out, self.handle_of(graph))

    def cudaStreamIsCapturing(self, stream: int, out: int) -> None:
        self.channel.write_int(out, int(self.stream(stream).graph is not None))

    def cudaThreadExchangeStreamCaptureMode(self, mode: int) -> None:
        pass

    # -- nodes ----------------------------------------------------------------------------------------------------------

    def cudaGraphCreate(self, out: int, flags: int) -> None:
        self.channel.write_word(out, self.handle(Graph()))

    def add(self, out: int, graph: int, after: int, count: int, kind: int, work: Work) -> None:
        """Adds a node behind `count` others, whose handles lie at `after`."""
        node = Node(kind, work, self.nodes(after, count), self.call)
        self.find(graph, Graph).nodes.append(node)
        self.channel.write_word(out, self.handle(node))

    def nodes(self, start: int, count: int) -> list[Node]:
        """Returns the nodes whose handles lie at an address."""
        return [self.find(one, Node) for one in struct.unpack(f"<{count}Q", self.channel.read(start, 8 * count))]

    def cudaGraphAddNode(self, out: int, graph: int, after: int, *words: int) -> None:
        data, count, parameters = words[:3] if self.version >= 13 else (0, *words[:2])
        self.cudaGraphAddNode_v2(out, graph, after, data, count, parameters)

    def cudaGraphAddNode_v2(self, out: int, graph: int, after: int, data: int, count: int, parameters: int) -> None:
        """Adds a node of any kind by its cudaGraphNodeParams."""
        kind, place = self.channel.read_word(parameters) & 0xFFFFFFFF, parameters + UNION
        by_address = {
            KERNEL: self.cudaGraphAddKernelNode,
            MEMSET: self.cudaGraphAddMemsetNode,
            HOST_FUNCTION: self.cudaGraphAddHostNode,
            ALLOCATE: self.cudaGraphAddMemAllocNode,
            CONDITIONAL: self.add_conditional,
        }
        by_word = {CHILD: self.cudaGraphAddChildGraphNode, FREE: self.cudaGraphAddMemFreeNode}
        if kind in by_address:
            by_address[kind](out, graph, after, count, place)
        elif kind in by_word:
            by_word[kind](out, graph, after, count, self.channel.read_word(place))
        elif kind == MEMCPY:
            self.cudaGraphAddMemcpyNode(out, graph, after, count, place + 16)
        elif kind == EMPTY:
            self.cudaGraphAddEmptyNode(out, graph, after, count)
        else:
            raise CudaError(ErrorCode.NOT_SUPPORTED, f"a node of cudaGraphNodeType {kind}")

    # -- conditions -----------------------------------------------------------------------------------------------------

    def cudaGraphConditionalHandleCreate(self, out: int, graph: int, default: int, flags: int) -> None:
        condition = Condition(0, default & 0xFFFFFFFF if flags & 1 else None)
        self.find(graph, Graph).conditions.append(condition)
        self.channel.write_word(out, self.handle(condition))

    @adds(CONDITIONAL)
    def add_conditional(self, place: int) -> Work:
        """Adds a node that chooses among graphs, which the program fills later, by a condition (cudaConditionalNodeParams)."""
        handle, kind, size = struct.unpack("<QII", self.channel.read(place, 16))
        condition, bodies = self.find(handle, Condition), [GraphExec(Graph()) for _ in range(size)]
        if size < 1 or kind > SWITCH or size > {IF: 2, WHILE: 1}.get(kind, size):
            raise CudaError(ErrorCode.INVALID_VALUE, f"a conditional node of type {kind} with {size} graphs")
        graphs = [self.handle(body.graph) for body in bodies]
        self.channel.write_word(place + 16, self.channel.keep(struct.pack(f"<{size}Q", *graphs)))

        def choose(stream: ptx.Stream) -> None:
            if kind == WHILE:
                while condition.value and not self.sticky:
                    self.launch_graph(bodies[0], stream)
                return
            number = condition.value if kind == SWITCH else int(not condition.value)
            if number < size:
                self.launch_graph(bodies[number], stream)

        return choose

    # -- nodes of each kind ---------------------------------------------------------------------------------------------

    def work_of_launch(self, parameters: int) -> Work:
        """Returns the launch that a cudaKernelNodeParams describes."""
        function, *sizes, shared, arguments = struct.unpack("<Q6IIxxxxQ", self.channel.read(parameters, 48))
        kernel = self.kernel(function)
        request = LaunchRequest(kernel, tuple(sizes[:3]), tuple(sizes[3:]), shared, self.packed(kernel, arguments))
        return lambda stream: self.run(request, stream)

    @adds(KERNEL)
    def cudaGraphAddKernelNode(self, parameters: int) -> Work:
        return self.work_of_launch(parameters)

    @adds(MEMCPY)
    def cudaGraphAddMemcpyNode(self, parameters: int) -> Work:
        copy = self.box(parameters)
        return lambda _: copy()

    @adds(MEMCPY)
    def cudaGraphAddMemcpyNode1D(self, target: int, source: int, size: int) -> Work:
        return self.work_of_copy(target, source, size)

    @adds(MEMSET)
    def cudaGraphAddMemsetNode(self, parameters: int) -> Work:
        """Adds the fill that a cudaMemsetParams describes."""
        address, pitch, value, element, width, height = struct.unpack("<QQIIQQ", self.channel.read(parameters, 40))
        row = (value & ((1 << 8 * element) - 1)).to_bytes(element, "little") * width

        def fill(_: ptx.Stream) -> None:
            for number in range(height):
                self.memory.write(address + number * pitch, row)

        return fill

    @adds(HOST_FUNCTION)
    def cudaGraphAddHostNode(self, parameters: int) -> Work:
        function, data = struct.unpack("<QQ", self.channel.read(parameters, 16))
        return lambda there: self.call_host(there, function, data)

    @adds(EMPTY)
    def cudaGraphAddEmptyNode(self) -> Work:
        return lambda _: None

    @adds(CHILD)
    def cudaGraphAddChildGraphNode(self, child: int) -> Work:
        inner = GraphExec(self.find(child, Graph))
        return lambda stream: self.launch_graph(inner, stream)

    def cudaGraphAddMemAllocNode(self, out: int, graph: int, after: int, count: int, parameters: int) -> None:
        size = self.channel.read_word(parameters + 104)
        address = self.reused(self.find(graph, Graph), self.nodes(after, count), size) or self.memory.allocate(size, DEVICE).address
        self.channel.write_word(parameters + 112, address)

        def allocate(_: ptx.Stream) -> None:
            block = self.memory.find(address)
            if block is None:
                raise CudaError(ErrorCode.NOT_SUPPORTED, "a graph allocates what cudaFree has freed")
            state = block.opened().state
            if state is not None:
                state[:] = UNWRITTEN
            self.graph_allocations.add(address)
            self.graph_peak = max(self.graph_peak, self.graph_used())
            self.graph_reserved = max(self.graph_reserved, self.graph_used())
            self.graph_reserved_peak = max(self.graph_reserved_peak, self.graph_reserved)

        self.add(out, graph, after, count, ALLOCATE, allocate)

    def reused(self, graph: Graph, after: list[Node], size: int) -> int:
        """Returns the address of memory of this size that nodes in front of a new one free; 0 if there is none."""
        before: dict[int, Node] = {}
        todo = list(after)
        while todo:
            node = todo.pop()
            if id(node) not in before:
                before[id(node)] = node
                todo += node.after
        for freed in graph.freed:
            block = self.memory.find(freed[1])
            if id(freed[0]) in before and block is not None and block.size == size:
                graph.freed.remove(freed)
                return freed[1]
        return 0

    def cudaGraphAddMemFreeNode(self, out: int, graph: int, after: int, count: int, address: int) -> None:
        self.add(out, graph, after, count, FREE, lambda _: self.graph_allocations.discard(address))
        whole = self.find(graph, Graph)
        whole.freed.append((whole.nodes[-1], address))

    def release(self, address: int) -> None:
        """Frees memory; that of a graph stays for its next launch."""
        if address in self.graph_allocations:
            self.graph_allocations.discard(address)
        else:
            super().release(address)

    def graph_used(self) -> int:
        """Returns the bytes that graphs have allocated and nobody has freed."""
        blocks = map(self.memory.find, self.graph_allocations)
        return sum(block.size for block in blocks if block is not None)

    def cudaDeviceGetGraphMemAttribute(self, device: int, attribute: int, out: int) -> None:
        values = self.graph_used(), self.graph_peak, self.graph_reserved, self.graph_reserved_peak
        if attribute & 0xFFFFFFFF >= len(values):
            raise CudaError(ErrorCode.INVALID_VALUE)
        self.channel.write_word(out, values[attribute & 0xFFFFFFFF])

    def cudaDeviceSetGraphMemAttribute(self, device: int, attribute: int, value: int) -> None:
        self.graph_peak, self.graph_reserved_peak = self.graph_used(), self.graph_reserved

    def cudaDeviceGraphMemTrim(self, device: int) -> None:
        self.graph_reserved = self.graph_used()

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
        self.find(node, Node).work = self.work_of_launch(parameters)

    def cudaGraphClone(self, out: int, graph: int) -> None:
        self.channel.write_word(out, self.handle(self.find(graph, Graph).instance()))

    cudaGraphDestroy = destroys(Graph)

    # -- launches -------------------------------------------------------------------------------------------------------

    def cudaGraphInstantiate(self, out: int, graph: int, flags: int) -> None:
        self.channel.write_word(out, self.handle(GraphExec(self.find(graph, Graph).instance())))

    cudaGraphInstantiateWithFlags = cudaGraphInstantiate

    cudaGraphExecDestroy = destroys(GraphExec)

    def cudaGraphExecKernelNodeSetParams(self, run: int, node: int, parameters: int) -> None:
        self.find(run, GraphExec).instead[id(self.find(node, Node))] = self.work_of_launch(parameters)

    def cudaGraphExecMemcpyNodeSetParams1D(self, run: int, node: int, target: int, source: int, size: int) -> None:
        self.find(run, GraphExec).instead[id(self.find(node, Node))] = self.work_of_copy(target, source, size)

    def cudaGraphExecUpdate(self, run: int, graph: int, result: int) -> None:
        one = self.find(run, GraphExec)
        one.graph, one.instead = self.find(graph, Graph).instance(), {}
        if result:
            self.channel.write(result, bytes(24))

    def cudaGraphUpload(self, run: int) -> None:
        self.find(run, GraphExec)

    def cudaGraphLaunch(self, run: int, stream: int) -> None:
        one = self.find(run, GraphExec)
        self.issue(stream, CHILD, lambda there: self.launch_graph(one, there))

    def launch_graph(self, run: GraphExec, stream: ptx.Stream) -> None:
        """Does the work of all nodes; the stream goes on behind the last."""
        for condition in run.graph.conditions:
            condition.value = condition.value if condition.default is None else condition.default
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
            self.act(run.instead.get(id(node), node.work), own, node.call)
            done[id(node)] = own.record()
        for event in done.values():
            stream.wait(event)
