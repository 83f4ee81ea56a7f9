"""Launches: a kernel's parameters are read from the program, the kernel runs on the machine, findings go to the report."""

from __future__ import annotations

import contextlib
import hashlib
import io
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from cupyflash.basics import Shape
from cupyflash.sim import ptx
from cupyflash.sim.program.children import LAUNCH, DynamicLaunches
from cupyflash.sim.program.errors import CudaError, ErrorCode
from cupyflash.sim.program.lines import Call
from cupyflash.sim.program.memory import HOST, MANAGED, Contents, MovedRange, ProgramMemory
from cupyflash.sim.program.streams import KERNEL
from cupyflash.sim.program.symbols import LaunchRequest, ProgramKernel, SymbolCalls
from cupyflash.sim.program.textures import ArrayCalls
from cupyflash.sim.ptx.memory.texels import texels_of
from cupyflash.sim.ptx.order.past import Touched
from cupyflash.sim.ptx.parameters import parameter_offsets
from cupyflash.sim.ptx.state.findings import asked, at_line, comments, source_text
from cupyflash.sim.ptx.text.syntax import parameters, source_name
from cupyflash.words import plural

HEAP = 2
"""cudaLimitMallocHeapSize."""

COOPERATIVE, CLUSTER, PROGRAMMATIC = 2, 4, 6
"""cudaLaunchAttributeID."""

FATAL = {
    **dict.fromkeys(("out of bounds", "null pointer", "bad texture"), ErrorCode.ILLEGAL_ADDRESS),
    **dict.fromkeys(("deadlock", "endless", "bad call", "stack overflow"), ErrorCode.LAUNCH_FAILURE),
    "trap": ErrorCode.ASSERT,
    "budget": ErrorCode.LAUNCH_TIMEOUT,
}
"""The error that a device would end with, by the kind of a finding."""


@dataclass
class KernelRecord:
    """The launches of a kernel: their number, those that repeated an earlier one, seconds, and findings, the first of each text."""

    name: str
    launches: int = 0
    repeated: int = 0
    seconds: float = 0.0
    instructions: int = 0
    unfinished: bool = False
    """True if its last launch was ended for the program's time."""
    estimate: ptx.Estimate | None = None
    """The last estimate that was said of a launch, which is one of 10 s or more; of its processor time."""
    findings: dict[str, ptx.Finding] = field(default_factory=dict)
    notes: dict[str, ptx.Finding] = field(default_factory=dict)
    suppressed: dict[ptx.Suppression, dict[str, ptx.Finding]] = field(default_factory=dict)


@dataclass
class Repeats:
    """A launch that was executed: the allocations that it `touched`, and its writes by the state of those before it."""

    touched: frozenset[str]
    results: dict[bytes, dict[str, Contents]] = field(default_factory=dict)

    def state(self, memory: ProgramMemory) -> bytes | None:
        """Returns a digest of the touched allocations; None if one of them is gone."""
        found = memory.named(self.touched)
        if len(found) < len(self.touched):
            return None
        parts = (f"{name} {block.address} ".encode() + block.digest() for name, block in sorted(found.items()))
        return hashlib.blake2b(b"".join(parts)).digest()


class BudgetSpent(Exception):
    """Raised when the launches have taken all the time that they may take."""


class LaunchCalls(SymbolCalls, ArrayCalls):
    """The functions that launch kernels."""

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        self.records: dict[str, KernelRecord] = {}
        self._configured: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        """The configurations that each thread has pushed and not yet taken."""
        self._repeats: dict[LaunchRequest, Repeats] = {}
        self._streams: set[int] = set()
        """The streams in which kernels were launched."""
        self._foretold: set[tuple[object, ...]] = set()
        """The launches of which an estimate was said."""

    limits: dict[int, int]

    @cached_property
    def services(self) -> DynamicLaunches:
        """The functions that kernels may call, with the heap of the size that the program wants by its first launch."""
        return DynamicLaunches(self, self.limits[HEAP])

    def _cudaPushCallConfiguration(self, grid: int, grid_z: int, block: int, block_z: int, shared: int, stream: int) -> int:
        self._configured[self.thread].append((grid, grid_z, block, block_z, shared, stream))
        return 0

    def _cudaPopCallConfiguration(self, grid: int, block: int, shared: int, stream: int) -> None:
        if not self._configured[self.thread]:
            raise CudaError(ErrorCode.INVALID_CONFIGURATION)
        xy, z, block_xy, block_z, size, number = self._configured[self.thread].pop()
        self.channel.write(grid, struct.pack("<QI", xy, z & 0xFFFFFFFF))
        self.channel.write(block, struct.pack("<QI", block_xy, block_z & 0xFFFFFFFF))
        self.channel.write_word(shared, size)
        self.channel.write_word(stream, number)

    def cudaLaunchKernel(
        self, function: int, grid: int, grid_z: int, block: int, block_z: int, arguments: int, shared: int, stream: int
    ) -> None:
        self.launch(function, dim3(grid, grid_z), dim3(block, block_z), arguments, shared, stream)

    _cudaLaunchKernel = cudaLaunchKernel
    cudaLaunchCooperativeKernel = cudaLaunchKernel

    def cudaLaunchKernelExC(self, config: int, function: int, arguments: int) -> None:
        *sizes, shared, stream, attributes, count = struct.unpack("<6IQQQI", self.channel.read(config, 52))
        cluster, programmatic = None, False
        for number in range(count):
            kind, x, y, z = struct.unpack_from("<I4x3I", self.channel.read(attributes + 72 * number, 72))
            if kind == CLUSTER:
                cluster = (x, y, z)
            programmatic |= kind == PROGRAMMATIC and bool(x)
        self.launch(function, tuple(sizes[:3]), tuple(sizes[3:]), arguments, shared, stream, cluster, programmatic)

    def launch(
        self,
        function: int,
        grid: Shape,
        block: Shape,
        arguments: int,
        shared: int,
        stream: int,
        cluster: tuple[int, ...] | None = None,
        programmatic: bool = False,
    ) -> None:
        """Launches a kernel with the values that `arguments` points to, an address each."""
        self.check_sticky()
        kernel = self.kernel(function)
        request = LaunchRequest(kernel, grid, block, shared, b"", cluster, programmatic)
        self.check_request(request)
        request = replace(request, data=self.packed(kernel, arguments))
        self.issue(stream, KERNEL, lambda there: self.run(request, there))

    most_dynamic: dict[int, int]

    def check_request(self, request: LaunchRequest) -> None:
        """Raises CudaError for a launch that a device would refuse."""
        x, y, z = request.block
        if not all(request.grid) or not x * y * z or x * y * z > 1024 or z > 64:
            raise CudaError(ErrorCode.INVALID_CONFIGURATION)
        asked = (most for function, most in self.most_dynamic.items() if self.kernels[function] == request.kernel)
        most = max([48 << 10, *asked])
        if request.shared > most:
            raise CudaError(ErrorCode.INVALID_VALUE, f"{request.shared} bytes of dynamic shared memory, {most} are allowed")

    def packed(self, kernel: ProgramKernel, arguments: int) -> bytes:
        """Returns the bytes of all parameters; `arguments` is an array of their addresses."""
        try:
            params = kernel.image.module.code(kernel.name).params
        except ptx.UnsupportedPTX as error:
            raise CudaError(ErrorCode.NOT_SUPPORTED, str(error)) from None
        offsets, size = parameter_offsets(params)
        data = bytearray(size)
        places = struct.unpack(f"<{len(params)}Q", self.channel.read(arguments, 8 * len(params)))
        for param, address in zip(params, places, strict=True):
            at = offsets[param.name]
            data[at : at + param.size] = self.channel.read(address, param.size)
        return bytes(data)

    def run(self, request: LaunchRequest, stream: ptx.Stream) -> None:
        """Runs a launch on the machine, or repeats its writes if it has run from the same memory before.

        A fault that a device would notice is the error of all later calls.
        """
        record = self.record(request)
        self.device_time.work.append(request)
        self._streams.add(stream.number)
        calls = self.services.calls
        earlier = self._repeats.get(request) if len(self._streams) == 1 else None
        state = earlier.state(self.memory) if earlier is not None else None
        if earlier is not None and state is not None and state in earlier.results:
            results = earlier.results[state]
            for name, block in self.memory.named(results).items():
                block.restore(results[name])
            if self.concurrent:
                stream.begin(request.kernel.name, request.programmatic)
            record.repeated += 1
            return
        self.services.begin(request, stream, child=False)
        done, printed = self.execute(request, stream, record)
        self.run_children()
        if printed or self.services.calls != calls:
            return
        touched = frozenset(name for name, moved in done.counters.traffic.items() if moved.read_bytes or moved.write_bytes)
        if earlier is None or not touched <= earlier.touched:
            self._repeats[request] = Repeats(touched)
        elif state is not None and not done.findings:
            wrote = [name for name, moved in done.counters.traffic.items() if moved.write_bytes]
            earlier.results = {state: {name: block.contents() for name, block in self.memory.named(wrote).items()}}

    def record(self, request: LaunchRequest) -> KernelRecord:
        """Returns the record of a launch that begins. Raises BudgetSpent."""
        record = self.records.setdefault(request.kernel.name, KernelRecord(request.kernel.name))
        if self.settings.max_seconds is not None and self.spent >= self.settings.max_seconds:
            raise BudgetSpent
        record.launches += 1
        return record

    @property
    def left(self) -> float | None:
        """The seconds that all launches from now on may take together; None: any."""
        return None if self.settings.max_seconds is None else self.settings.max_seconds - self.spent

    def foretell(self, request: LaunchRequest, record: KernelRecord, estimate: ptx.Estimate) -> None:
        """Says how long a launch will take, once for launches of one size, and whenever the program's time is too short for it."""
        record.estimate, left = estimate, self.left
        enough = left is None or estimate.seconds <= left
        key = request.kernel, request.grid, request.block, estimate.done > 0
        if self.settings.say is None or (enough and key in self._foretold):
            return
        self._foretold.add(key)
        grid, block = ("x".join(map(str, one)) for one in (request.grid, request.block))
        budget = "" if left is None else f"; --max-seconds leaves {max(left, 0):,.0f} s"
        budget += "" if enough else ", so it will not be run to its end"
        self.settings.say(f"{source_name(request.kernel.name)}, grid {grid}, block {block}: {estimated(estimate)}{budget}")

    def run_children(self) -> None:
        """Runs what the threads of the launch have issued, each launch with all that follows from it before the next."""
        steps = self.services.issued()
        while steps and not self.sticky:
            steps.pop()()
            steps += self.services.issued()

    def run_child(self, request: LaunchRequest, stream: ptx.Stream) -> None:
        """Runs a launch by a thread of another."""
        record = self.record(request)
        self.device_time.work.append(None)
        self.services.begin(request, stream, child=True)
        self.execute(request, stream, record)

    def execute(self, request: LaunchRequest, stream: ptx.Stream, record: KernelRecord) -> tuple[ptx.Launch, str]:
        began = time.process_time()
        kernel, variables = request.kernel, [id(block) for block in request.kernel.image.variables.values()]
        others = [block.opened() for block in self.memory.blocks.values() if id(block) not in variables]
        printed = io.StringIO()
        try:
            # Children are concurrent with much: from now on the history of launches is kept.
            self.concurrent |= LAUNCH in kernel.image.module.code(kernel.name).builtins
            with contextlib.redirect_stdout(printed):
                done = kernel.image.module.launch(
                    kernel.name,
                    request.grid,
                    request.block,
                    ptx.RawArguments(request.data, others, self.objects()),
                    shared_bytes=request.shared,
                    seed=self.settings.seed,
                    races=self.settings.races,
                    max_seconds=self.left,
                    on_long=lambda estimate: self.foretell(request, record, estimate),
                    cluster=request.cluster,
                    suppressions=self.settings.suppressions,
                    stream=stream if self.concurrent else None,
                    programmatic=request.programmatic and self.concurrent,
                    runtime=self.services,
                )
        except ptx.UnsupportedPTX as error:
            raise CudaError(ErrorCode.NOT_SUPPORTED, str(error)) from None
        except (ValueError, TypeError) as error:
            raise CudaError(ErrorCode.INVALID_CONFIGURATION, str(error)) from None
        finally:
            seconds = time.process_time() - began
            self.spent += seconds
            record.seconds += seconds
            self.channel.print(printed.getvalue())
        record.instructions += done.counters.instructions
        self.check_progress(done, request)
        if self.concurrent and self.settings.races:
            used = {name for name, moved in done.counters.traffic.items() if moved.read_bytes or moved.write_bytes}
            self.guard.close(self.memory.named(used).values())
        for kept, found in ((record.findings, done.findings), (record.notes, done.notes)):
            for finding in self.named(found, request):
                kept.setdefault(str(finding), finding)
        for one in done.suppressed:
            record.suppressed.setdefault(one.by, {}).update({str(finding): finding for finding in one.findings})
        self.sticky = next((FATAL[one.kind] for one in done.findings if one.kind in FATAL), self.sticky)
        if done.unfinished:
            record.unfinished = True
            raise BudgetSpent
        return done, printed.getvalue()

    def check_progress(self, done: ptx.Launch, request: LaunchRequest) -> None:
        """Raises CudaError for a launch that waits for the host: its loop reads memory that the host shares and the launch does not
        write. Here the host goes on only behind a launch.
        """
        for finding in done.findings:
            block = None if finding.address is None else self.memory.find(finding.address)
            if finding.kind != "endless" or block is None or block.kind not in (HOST, MANAGED):
                continue
            name = block.allocation.name
            if not done.counters.traffic[name].write_bytes:
                (what,) = self.named([replace(finding, tensor=name, message=repr(name))], request)
                why = f"waits for the host: {at_line(finding.places[0])} reads {what.message} until the host has written there"
                why = f"{source_name(request.kernel.name)} {why}, and here the host goes on only behind a launch"
                self.sticky = ErrorCode.NOT_SUPPORTED  # else each such launch would take as long
                raise CudaError(self.sticky, why)

    def moved(self, moves: list[MovedRange], stream: ptx.Stream, call: Call) -> None:
        """Records what work of a stream has copied, filled or freed; races are findings under the function's name."""
        self.device_time.work.append(None)
        if not self.concurrent or not self.settings.races:
            return
        ranges: dict[tuple[int, str], list[tuple[int, int]]] = {}
        blocks = {id(one.block): one.block.allocation for one in moves}
        for one in moves:
            ranges.setdefault((id(one.block), one.verb), []).append((one.start, one.end))
        touched = [Touched(blocks[block].name, blocks[block].memory, verb, tuple(those)) for (block, verb), those in ranges.items()]
        self.found(stream.transfer(call.function, touched, lambda: self.lines.of(call)))
        self.guard.close({id(one.block): one.block for one in moves}.values())

    def found(self, findings: Sequence[ptx.Finding]) -> None:
        """Adds findings about what no kernel does, each under the name of the function that does it."""
        for finding in findings:
            record = self.records.setdefault(finding.kernel, KernelRecord(finding.kernel))
            by = next((one for one in self.allowed(finding) if one.matches(finding)), None)
            kept = record.findings if by is None else record.suppressed.setdefault(by, {})
            kept.setdefault(str(finding), finding)

    def allowed(self, finding: ptx.Finding) -> Sequence[ptx.Suppression]:
        """Returns the suppressions that may hold for a finding of the host's code: the given ones, and comments on its line."""
        file, line = finding.source or ("", 0)
        return *asked(self.settings.suppressions), *(one.read() for one in comments(source_text(file), file) if one.at[1] == line)

    def named(self, findings: Sequence[ptx.Finding], request: LaunchRequest) -> list[ptx.Finding]:
        """Returns findings that call an allocation by the parameter that points into it, if the source is there to read."""
        kernel, out, shown = request.kernel, [], self.objects()
        params = kernel.image.module.code(kernel.name).params
        offsets, _ = parameter_offsets(params)
        for finding in findings:
            block = next((one for one in self.memory.blocks.values() if one.allocation.name == finding.tensor), None)
            if block is not None and finding.source is not None:
                files = dict.fromkeys(line[0] for line in (*finding.inlined_at[::-1], finding.source))
                signatures = (parameters(source_text(file), kernel.name, len(params)) for file in files)
                names = next((each for each in signatures if each and each[0][1] != "arg0"), [])
                for (_, name), param in zip(names, params, strict=False):
                    word = int.from_bytes(request.data[offsets[param.name] :][:8], "little") if param.size == 8 else 0
                    word = texels_of(shown[word]).address if word in shown else word
                    if 0 <= word - block.address < block.allocation.memory.nbytes:
                        finding = finding.called(name)
                        break
            out.append(finding)
        return out


def estimated(estimate: ptx.Estimate) -> str:
    """Returns an estimate in words."""
    if estimate.done:
        why = f"{estimate.done:,} of {plural(estimate.waves, 'group')} of blocks have run"
    elif estimate.at_least:
        why = f"the first of {plural(estimate.waves, 'group')} of blocks goes on"
    else:
        why = "as the last launch of this kernel"
    return f"estimated to take {'at least ' if estimate.at_least else ''}{estimate.seconds:,.0f} s of processor time ({why})"


def dim3(xy: int, z: int) -> tuple[int, int, int]:
    """Returns a dim3 that was passed in two words."""
    return xy & 0xFFFFFFFF, xy >> 32, z & 0xFFFFFFFF
