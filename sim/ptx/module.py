"""The public interface: loads PTX (or compiles CUDA C to it) and launches kernels on NumPy arrays, alone or in streams.

Streams and events order the launches of one history, as CUDA's order those of one device.

    stream = Stream()
    module.launch("produce", grid, block, args, stream=stream)
    module.launch("consume", grid, block, args, stream=stream, programmatic=True)

The machine executes launches one after the other, as they are issued. Launches that neither a stream nor an event orders still
count as concurrent, and a race between two launches is a finding of the later one.
"""

from __future__ import annotations

import gc
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode.code import Code, decode_all, function_addresses
from .decode.matrices import tensor_cores_asked
from .execute.compiled import engine_asked, pays, run_compiled
from .execute.ptx_machine import PtxMachine, processes_asked, run_apart
from .execute.registers import Setup
from .execute.scheduler import Estimate, Limits
from .memory.spaces import PARAM_START, PARAM_WINDOW, DeviceRuntime, LaunchMemory, Observer
from .memory.texels import placed, texels_of
from .order.history import Stream
from .order.races import Races
from .parameters import POINTER_BYTES, BoundArguments, BoundTensor, RawArguments, bind
from .state.counters import Counters, LaunchTally, TensorCounts
from .state.findings import (
    Comment,
    Finding,
    Findings,
    Suppressed,
    Suppression,
    asked,
    by_cause,
    comments,
    of_line,
    of_thread,
    source_text,
)
from .state.lane_sets import Geometry
from .state.segments import UNWRITTEN, Segment, mark_unwritten, may_hold_nan
from .text.parser import parse
from .text.syntax import (
    Array,
    Function,
    Line,
    PtxError,
    PtxInstruction,
    PtxProgram,
    Refusal,
    UnsupportedPTX,
    Variable,
    brief,
    find_kernel,
    parameters,
    variable_name,
)

if TYPE_CHECKING:
    from cupyflash.device import Device
    from cupyflash.sim.clock.loaded import MachineCode
    from cupyflash.sim.clock.timed import Timed

_NUMBERED = re.compile(r"arg(\d+)")
"""The names of tensors in a launch whose arguments have none."""


@dataclass(frozen=True)
class Launch:
    """The result of a launch. `traffic`: counts of tensor arguments by name (`counters.traffic` has the module's variables, too).

    `findings` are errors and warnings, the first of each kind and place; `findings_total` counts all lanes. `notes` are violations
    of the PTX ISA that had no effect: matrices that were loaded whole (ldmatrix) with rows that nobody wrote. `suppressed` are the
    findings and notes that a suppression let pass, by suppression; `unmatched` are the suppressions for this kernel that let
    nothing pass. `unfinished`: it was ended for its time (`max_seconds`), and the findings are those so far.

    `unwritten` maps arrays that nobody had written before, by name, to a mask of the bytes still unwritten after the launch: bool,
    an element's bytes are the last axis; arrays without such bytes are left out. It may be given to the next launch.
    """

    counters: Counters
    traffic: Mapping[str, TensorCounts]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    findings_total: int
    unwritten: Mapping[str, Array]
    suppressed: tuple[Suppressed, ...] = ()
    unmatched: tuple[Suppression, ...] = ()
    unfinished: bool = False


LIMITS = {"grid": ((1 << 31) - 1, 65535, 65535), "block": (1024, 1024, 64), "cluster": (16, 16, 16)}
"""The largest x, y and z of every architecture (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""


def triple(value: int | Sequence[int], what: str) -> tuple[int, int, int]:
    """Returns grid, block or cluster as (x, y, z)."""
    numbers = [value] if isinstance(value, (int, np.integer)) else list(value) if isinstance(value, Sequence | np.ndarray) else []
    if not 1 <= len(numbers) <= 3 or not all(isinstance(v, (int, np.integer)) and v >= 1 for v in numbers):
        raise ValueError(f"{what} must be one to three positive whole numbers, got {value!r}")
    x, y, z = (*(int(v) for v in numbers), 1, 1)[:3]
    for axis, number, limit in zip("xyz", (x, y, z), LIMITS[what], strict=True):
        if number > limit:
            raise ValueError(f"{what} {axis} is at most {limit}, got {value!r}")
    return x, y, z


RESERVED_BYTES = 1024
"""Bytes of a block's shared memory that the system reserves (CUDA C++ Programming Guide, "Compute Capability 9.0: Shared Memory").
The machine places them behind the kernel's, and only for kernels that ask where they are.
"""

WORKSPACE = (1 << 15) - 1
"""The number of the segment in which the blocks of a cooperative launch meet: above those of all tensors."""

MOST_BLOCKS = 16
"""Most blocks of a cluster. Every device can run 8; more need a kernel that allows a non-portable cluster size."""


def geometry_of(
    program: PtxProgram, kernel: Function, grid: tuple[int, int, int], block: tuple[int, int, int], cluster: Any
) -> Geometry:
    """Returns grid, block and cluster; `cluster` defaults to the kernel's own. Raises ValueError for what the chip would refuse."""
    if block[0] * block[1] * block[2] > 1024:
        raise ValueError(f"a block has at most 1024 threads, got {block}")
    if kernel.block not in (None, block):
        raise ValueError(f"block must be {kernel.block}, as {kernel.name} is compiled for (.reqntid), got {block}")
    if kernel.most_threads is not None and math.prod(block) > kernel.most_threads:
        raise ValueError(
            f"a block of {kernel.name} has at most {kernel.most_threads} threads (.maxntid, __launch_bounds__), got {block}"
        )
    if cluster is None and kernel.cluster is None:
        return Geometry(grid, block)
    if cluster is None and not kernel.cluster:
        raise ValueError(f"{kernel.name} has __cluster_dims__ without a size: say cluster=(x, y, z)")
    size = triple(kernel.cluster if cluster is None and kernel.cluster else cluster, "cluster")
    if kernel.cluster and size != kernel.cluster:
        raise ValueError(f"cluster must be {kernel.cluster}, as {kernel.name} is compiled for, got {size}")
    blocks, most = size[0] * size[1] * size[2], min(kernel.most_blocks or MOST_BLOCKS, MOST_BLOCKS)
    if blocks > most:
        why = f" ({kernel.name} says so)" if most < MOST_BLOCKS else ", on every device at most 8"
        raise ValueError(f"cluster has at most {most} blocks{why}, got {size}")
    if any(g % c for g, c in zip(grid, size, strict=True)):
        raise ValueError(f"grid must be whole clusters of {size} blocks, got {grid}")
    architecture = re.match(r"sm_(\d+)", program.target)
    if blocks > 1 and architecture and int(architecture[1]) < 90:
        raise ValueError(f"cluster needs PTX for sm_90 or newer, this is for {program.target}")
    return Geometry(grid, block, size, explicit=True)


def contents(variable: Variable) -> Array:
    """Returns a variable's initial bytes; those without an initialiser take memory once they are touched."""
    try:
        found = np.zeros(variable.size, np.uint8)
    except MemoryError:
        raise PtxError(f"there is no memory for the {variable.size:,} bytes of {brief(variable.name)}") from None
    found[: len(variable.init)] = np.frombuffer(variable.init, np.uint8)
    return found


@dataclass(frozen=True)
class Recipe:
    """The compilation that made a module: CUDA C, NVRTC's options, a name for messages, C++ names of templates' kernels."""

    text: str
    options: tuple[str, ...]
    name: str
    expressions: tuple[str, ...] = ()


class Module:
    """A loaded PTX module. Variables in global memory keep their values between launches, as on a device.

    `refused` maps each kernel that cannot be launched to the statements, in it or in functions that it can reach, that the machine
    does not execute: (line of the PTX, text, reason). `sources` maps file names in the PTX to source texts; other files are read
    from disk, for the comments that suppress findings.
    """

    def __init__(self, program: PtxProgram, text: str, sources: Mapping[str, str]):
        self.program = program
        self.recipe: Recipe | None = None
        self.text = text
        self.sources = dict(sources)
        self._comments: dict[str, tuple[Comment, ...]] = {}
        self._decoded = decode_all(program)
        found = {kernel: tuple(self._decoded.refusals(kernel)) for kernel in program.kernels}
        self.refused: Mapping[str, tuple[Refusal, ...]] = {kernel: items for kernel, items in found.items() if items}
        self._codes: dict[str, Code] = {}
        self._starts: dict[str, int] = {}
        """Addresses of the variables that `place` moved."""

    @classmethod
    def from_ptx(cls, text: str | bytes, *, sources: Mapping[str, str] = MappingProxyType({})) -> Module:
        """Loads PTX text. A kernel with statements that the machine does not execute is in `refused`, and the others run.

        Raises `UnsupportedPTX`, which lists all such statements, if no kernel is left to run, `PtxError` for text that is not PTX.
        """
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        if not isinstance(text, str):
            raise TypeError(f"text must be PTX as text (of a file: Path.read_text), got {type(text).__name__}")
        with collection_paused():
            return cls(parse(text), text, sources)

    @classmethod
    def from_source(cls, cuda: str, options: Sequence[str] = (), *, name: str = "kernel.cu") -> Module:
        """Compiles CUDA C with NVRTC (default -arch=compute_80, C++17, line information) and loads the PTX.

        Raises `cupyflash.launch.nvrtc.CompileError` with the compiler's log, ImportError where CuPy or NVRTC is missing.
        """
        if not isinstance(cuda, str):
            raise TypeError(f"cuda must be CUDA C as text (of a file: Path.read_text), got {type(cuda).__name__}")
        if not isinstance(options, Sequence) or isinstance(options, str) or not all(isinstance(each, str) for each in options):
            raise TypeError(f"options must be a sequence of texts, as ('-arch=compute_90',), got {options!r}")
        if not isinstance(name, str):
            raise TypeError(f"name must be text, got {name!r}")
        from cupyflash.launch.nvrtc import compile_to_ptx

        made = cls.from_ptx(compile_to_ptx(str(cuda), options, name), sources={name: str(cuda)})
        made.recipe = Recipe(str(cuda), tuple(options), name)
        return made

    @cached_property
    def _variables(self) -> dict[str, Array]:
        return {v.name: contents(v) for v in self.program.variables.values() if v.space in ("global", "const") and v.size}

    @cached_property
    def _runtime(self) -> DeviceRuntime:
        return DeviceRuntime()

    @property
    def variables(self) -> dict[str, int]:
        """Returns the variables in global and constant memory with their sizes in bytes."""
        return {name: data.size for name, data in self._variables.items()}

    def place(self, name: str, memory: Array, address: int) -> None:
        """Moves a variable to `memory` (uint8, of the variable's size), which gets its contents, and to a virtual address."""
        memory[:] = self._variables[name]
        self._variables[name] = memory
        self._starts[name] = address

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels (`.entry`), as they stand in the PTX."""
        return self.program.kernels

    def variable(self, name: str) -> Array:
        """Returns the bytes (uint8) of a variable in global or constant memory; writing to them sets the variable."""
        return self._variables[name]

    def launch(
        self,
        kernel: str | None,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Mapping[str, Any] | Sequence[Any] | RawArguments,
        *,
        shared_bytes: int = 0,
        seed: int | None = None,
        on_barrier: Callable[[int, int], None] | None = None,
        observer: Observer | None = None,
        races: bool = True,
        unwritten: Collection[str] | Mapping[str, Array] = (),
        max_instructions: int | None = None,
        stall_seconds: float | None = None,
        max_seconds: float | None = None,
        on_long: Callable[[Estimate], None] | None = None,
        long_seconds: float | None = None,
        approximate: bool = True,
        tensor_cores: str | None = None,
        cluster: int | Sequence[int] | None = None,
        processes: int | None = None,
        suppressions: str | os.PathLike[str] | Sequence[Suppression] = (),
        stream: Stream | None = None,
        programmatic: bool = False,
        runtime: DeviceRuntime | None = None,
    ) -> Launch:
        """Runs a kernel to its end.

        kernel: its name in the PTX, or that in the source if only one kernel has it; None is the only one of the module.
        grid, block: a number or up to three (x, y, z). args: values in the order of the kernel's parameters; a mapping
        names them, a sequence names them arg0, arg1, ... NumPy arrays are tensors in global memory, written in place
        (a non-writeable one may only be read); the valid range of a tensor is its byte extent, from its lowest to its
        highest byte. None is a null pointer; numbers, NumPy scalars and bytes are packed by the parameter's type.
        A structure is a mapping from field names to arrays (pointers), None, NumPy scalars of the fields' own types, bytes,
        mappings (structures) and lists of those (arrays), laid out as C does: {"p": {"Q": q, "O": o, "n": np.int32(5)}}. Or it is a
        NumPy structured scalar, at its own offsets; fields of objects in it are pointers. A tensor's name, in all reports and in
        `unwritten`, is its field's ("Q"), or its path ("p.Q") if several tensors of the launch have that field name.
        A `Texture` of an array's texels (`Texels.of`) is a texture object, such texels are a surface object.
        Or args are `RawArguments`: the parameters' bytes, as a driver is given them, and memory at the addresses that they hold.
        shared_bytes: dynamic shared memory of a block, in bytes. seed: None runs warps in lock step where they agree, a number
        runs them in a random order. on_barrier(block, count) is called when a block has completed its count-th barrier.
        observer is called with every memory access. races: True looks for data races. unwritten: names of the arrays in args whose
        contents nobody wrote (outputs, workspaces): reading them before this launch has stored there is a finding. A mapping gives
        for each array a mask of such bytes, as `Launch.unwritten` does.
        max_instructions: warp instructions that the launch may execute before it ends with a "budget" finding (None: the
        environment's CUPYFLASH_MAX_INSTRUCTIONS, else no limit). stall_seconds: processor time, in seconds, without progress of any
        loop towards its end, after which the launch ends with an "endless" finding (`execute.scheduler`; None: the environment's
        CUPYFLASH_STALL_SECONDS, else 20). max_seconds: processor time, in seconds, after which the launch ends without such a
        finding (`Launch.unfinished`; None: no limit). on_long: called with an `Estimate` if the launch is expected to take
        `long_seconds` (None: 10) of processor time or more: before it, if its kernel ran before, else once some waves of its blocks
        have run; and again if it turns out to take twice as long. approximate: True gives approximate instructions (ex2.approx and
        so on) an error of the size that the PTX ISA allows; False rounds their exact results to nearest. tensor_cores: "H100" sums
        products of float16, bfloat16 and TF32 in mma, wmma and wgmma as an H100 does, bit for bit, which takes longer
        (`decode.matrices`); None: the environment's CUPYFLASH_TENSOR_CORES, else as NumPy does. cluster: blocks of a cluster, a
        number or up to three (x, y, z), which must divide the grid; None: the kernel's own (__cluster_dims__), else one block.
        processes: the most processes that run the blocks of a large grid (None: the environment's CUPYFLASH_PROCESSES, else 1), as
        far as there are processors and the blocks do not depend on each other. The result is the same. It needs races, no seed and
        no observer, and forks: on Linux, in a program with one thread. suppressions: a file of findings to let pass, or the result
        of `Suppression.read`; comments in the source count too (`state.findings`). Suppressed findings are in `Launch.suppressed`.
        stream: orders the launch among others of a history, races with which are findings, too; None: the launch is the only one.
        programmatic: it may begin before the launch in front of it in the stream is over (programmatic stream serialization):
        griddepcontrol.wait, cudaGridDependencySynchronize, waits for that. runtime: answers calls of malloc, free and other
        functions that the device brings along; None: the module has a heap of 8 MiB of its own.

        Raises ValueError or TypeError for arguments that do not fit the kernel, `UnsupportedPTX` for a kernel in `refused`.
        Faults of the kernel itself are in `Launch.findings`.
        """
        kernel = find_kernel(self.kernels, kernel)
        entry = self.program.functions[kernel]
        geometry = geometry_of(self.program, entry, triple(grid, "grid"), triple(block, "block"), cluster)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0):
            raise ValueError(f"seed must be None or a whole number from 0, got {seed!r}")
        limits = Limits.asked(max_instructions, stall_seconds, max_seconds, on_long, long_seconds)
        processes = processes_asked(processes)
        engine = engine_asked()
        numerics = approximate, tensor_cores_asked(tensor_cores)
        if stream is not None and not isinstance(stream, Stream):
            raise TypeError(f"stream must be a ptx.Stream or None, got {type(stream).__name__}")
        if programmatic and stream is None:
            raise ValueError("programmatic needs a stream, in which another launch is in front of this one")
        code = self.code(kernel)
        allowed = [one for one in asked(suppressions) if one.covers(kernel)] + self._allowed(code)
        segments, symbols = self._placed_variables()
        if isinstance(args, RawArguments):
            bound, tensors, parts = args.bound(kernel, code.params), args.segments(code.params), []
            textures = args.textures
        else:
            bound = bind(kernel, code.params, args, self._variables)
            tensors = placed_tensors(bound, len(segments))
            pairs = zip(bound.tensors, tensors, strict=True)
            textures = {one.pointer: placed(tensor.shown, one.pointer) for tensor, one in pairs if tensor.shown is not None}
            parts = unwritten_parts(bound.tensors, tensors, unwritten)
        packed = bytes(bound.data)
        data = np.frombuffer(packed or b"\0", np.uint8)
        params = Segment("parameters", WORKSPACE, data, "param", PARAM_WINDOW + PARAM_START)
        workspace = Segment("grid workspace", WORKSPACE, np.zeros(64, np.uint8))
        symbols |= {name: params.start + offset for name, offset in bound.offsets.items()}
        mark_unwritten(parts, [*segments, *tensors])
        runtime = runtime or self._runtime
        heaps = runtime.segments(code.builtins)
        shared_size, reserved = code.shared.size + shared_bytes, RESERVED_BYTES if code.reserves else 0
        if reserved:
            shared_size = -(-shared_size // 128) * 128 + reserved
        schedule = seed, on_barrier, limits
        setup = Setup(geometry, packed, params, shared_bytes, symbols, *schedule, workspace.start, *numerics, textures, runtime)

        def machine(races: bool) -> PtxMachine:
            findings, tally = Findings(kernel, allowed), LaunchTally()
            memory = LaunchMemory([*segments, *tensors, *heaps, params, workspace], shared_size, code.local.size, findings, tally)
            memory.observer, memory.reserved = observer, reserved
            memory.homes = code.homes
            memory.shared_names = {variable_name(name): offset for name, offset in code.shared.offsets.items()}
            if races:
                memory.races = detector(memory)
                memory.races.offset_name = memory.shared_name
                if stream is not None and ordered is not None:
                    memory.races.join_history(stream, ordered)
            return PtxMachine(code, setup, memory, findings, tally)

        def detector(memory: LaunchMemory) -> Races:
            watched = [*segments, *tensors, *heaps, workspace]
            return Races(code.sharing, len(code.instructions), watched, memory.shared_stride, memory.findings, geometry.blocks)

        ordered = None if stream is None else stream.begin(kernel, programmatic)
        run, ended = machine(races), False
        if limits.forecast is not None:
            compiled = 0 if code.gave_up else code.compiled_seconds_of_wave
            limits.forecast.before(compiled or code.seconds_of_wave)
        if not heaps and (engine == "llvm" or (not engine and processes == 1 and pays(code, run.waves))):
            watch = None if stream is None else run.memory.races
            run = machine(races=False)
            made, began = code.was_compiled, time.process_time()
            ended = run_compiled(run, [*segments, *tensors], watch)
            if made and ended:
                code.compiled_seconds_of_wave = (time.process_time() - began) / run.waves
            run.memory.races = watch
            if not ended:
                begun, run = run.budgets.begun, machine(races)
                run.budgets.begun = begun  # the limit of time is the launch's
        if not ended:
            began = time.process_time()
            with collection_paused():
                ended = run_apart(run, processes) or run.run()
            code.seconds_of_wave = (time.process_time() - began) / max(run.tally.waves, 1)
        findings, tally, memory = run.findings, run.tally, run.memory
        if memory.races is not None and memory.races.launches is not None:
            memory.races.launches.end()
        if memory.races is not None:
            memory.races.forget()
        written = [s for s in (*segments, *tensors) if tally.wrote(s)]
        doubted = bool(findings.doubts)
        notes = findings.settle(doubted and (not ended or code.integer_products or any(map(may_hold_nan, written))))
        counters = tally.fold(code.executed())
        # A tensor that nobody touched has traffic, too: none.
        counters.traffic = {s.name: counters.traffic.get(s.name, TensorCounts()) for s in (*tensors, *segments, *heaps)}
        traffic = {s.name: counters.traffic[s.name] for s in tensors}
        left = {segment.name: segment.array_states() == UNWRITTEN for segment, _ in parts if segment.array.size}
        still = {name: where for name, where in left.items() if where.any()}
        suppressed = tuple(Suppressed(allowed[k], findings.closed(records)) for k, records in findings.suppressed.items())
        unmatched = tuple(one for k, one in enumerate(allowed) if k not in findings.suppressed)
        found = by_cause(by_cause(self._in_source(kernel, findings.closed(findings.found)), of_line), of_thread)
        return Launch(counters, traffic, found, tuple(notes), findings.total, still, suppressed, unmatched, run.budgets.spent)

    def clock(
        self,
        kernel: str | None,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Mapping[str, Any] | Sequence[Any],
        device: Device,
        *,
        shared_bytes: int = 0,
        mhz: float | None = None,
        cold: bool = False,
    ) -> Timed:
        """Predicts the time of a launch on a device from its machine code, without running it here (docs/clock.md).

        kernel, grid, block, args and shared_bytes are those of `launch`; arrays are not written to. mhz: the clock rate, by default
        the device's boost clock. cold: the L2 was emptied before. CUDA C is compiled for the device, PTX needs ptxas.

        Raises ValueError or TypeError for arguments that do not fit, RuntimeError without NVIDIA's disassemblers.
        """
        from cupyflash.sim.clock.timed import timed

        shape = triple(grid, "grid"), triple(block, "block")
        return timed(self.machine_code(device).launch(kernel, shape, args, shared_bytes), device, mhz, cold=cold)

    def machine_code(self, device: Device) -> MachineCode:
        """Returns the module's machine code for a device: CUDA C is compiled for it, PTX needs ptxas.

        Raises RuntimeError without a tool that is needed, or if it refuses the text.
        """
        from cupyflash.sim.clock.loaded import of_ptx, of_source

        r = self.recipe
        return of_ptx(self.text, device) if r is None else of_source(r.text, device, r.options, r.name, r.expressions)

    def _allowed(self, code: Code) -> list[Suppression]:
        """Returns the suppressions in comments on a kernel's lines; in given sources, also on lines of which no kernel has code."""
        mine = lines_of(code.instructions)
        found: list[Comment] = []
        for file in sorted({file for file, _ in mine}):
            # A compiler may have put its folder before the name that it was given.
            text = next((text for name, text in self.sources.items() if f"/{file}".endswith(f"/{name}")), None)
            if file not in self._comments:
                self._comments[file] = tuple(comments(source_text(file) if text is None else text, file))
            lost = self._comments[file] if text is not None else ()
            anybody = lines_of(i for function in self.program.functions.values() for i in function.instructions) if lost else mine
            found += [one for one in self._comments[file] if one.at in mine or (one in lost and one.at not in anybody)]
        return [one.read() for one in found]

    def cuda_of(self, kernel: str) -> str:
        """Returns the CUDA C of a kernel, by its name in the PTX: the text of the module, and the files of its lines that exist."""
        lines = (i.inlined_at[-1] if i.inlined_at else i.source for i in self.program.functions[kernel].instructions)
        files = dict.fromkeys(line[0] for line in lines if line)
        return "\n".join([self.recipe.text if self.recipe else "", *map(source_text, files)])

    def _in_source(self, kernel: str, found: Sequence[Finding]) -> Sequence[Finding]:
        """Returns findings that call a tensor without a name, as arg1, by its parameter in the source, if that is there to read."""
        numbers = [_NUMBERED.fullmatch(finding.tensor or "") for finding in found]
        if not any(numbers):
            return found
        names = [name for _, name in parameters(self.cuda_of(kernel), kernel, len(self.code(kernel).params))]
        return [
            finding if number is None else finding.called(names[int(number[1])])
            for finding, number in zip(found, numbers, strict=True)
        ]

    def _placed_variables(self) -> tuple[list[Segment], dict[str, int]]:
        """Returns the module's variables as tensors with their pointers filled in, and the addresses of variables and functions."""
        segments: list[Segment] = []
        symbols = function_addresses(self.program)
        for name, data in self._variables.items():
            segment = Segment(name, len(segments), data, self.program.variables[name].space, self._starts.get(name))
            segment.writable = segment.space == "global"
            segments.append(segment)
            symbols[name] = segment.start
        for name, data in self._variables.items():
            for offset, target, plus, width in self.program.variables[name].pointers:
                address = np.uint64(symbols[target] + plus)
                data[offset : offset + width] = np.array([address]).view(np.uint8)[:width]
        return segments, symbols

    def tensors(self, kernel: str | None, args: Mapping[str, Any] | Sequence[Any]) -> dict[str, Array]:
        """Returns the arrays among a kernel's arguments by the names that a launch gives them. Raises as `launch`."""
        kernel = find_kernel(self.kernels, kernel)
        return {each.name: each.array for each in bind(kernel, self.code(kernel).params, args, self._variables).tensors}

    def code(self, kernel: str) -> Code:
        if kernel in self.refused:
            raise UnsupportedPTX(list(self.refused[kernel]), kernel)
        found = self._codes.get(kernel)
        if found is None:
            found = self._codes[kernel] = Code(self.program, kernel, self._decoded.plans)
        return found


def lines_of(instructions: Iterable[PtxInstruction]) -> set[Line]:
    """Returns the source lines of instructions, with the lines of the calls that they are inlined at."""
    return {line for i in instructions if i.source for line in (i.source, *i.inlined_at)}


def placed_tensors(bound: BoundArguments, first: int) -> list[Segment]:
    """Places a launch's tensors at virtual addresses, numbered from `first`, and writes their pointers into `bound.data`."""
    segments = []
    for number, tensor in enumerate(bound.tensors, first):
        segment = Segment(tensor.name, number, tensor.array)
        segment.places = (tensor.place,)
        if tensor.shown is not None:
            segment.narrowest = texels_of(tensor.shown).format.size
        address = segment.pointer.to_bytes(POINTER_BYTES, "little")
        if tensor.holder is None:
            bound.data[tensor.at : tensor.at + POINTER_BYTES] = address
        else:
            tensor.holder.reshape(-1)[tensor.at : tensor.at + POINTER_BYTES] = np.frombuffer(address, np.uint8)
        segments.append(segment)
    return segments


def unwritten_parts(
    tensors: Sequence[BoundTensor], segments: Sequence[Segment], unwritten: Collection[str] | Mapping[str, Array]
) -> list[tuple[Segment, Array | bool]]:
    """Returns the segments that `unwritten` names, by name or path, each with a mask of its bytes. Raises ValueError."""
    known = {key: one for tensor, one in zip(tensors, segments, strict=True) for key in (tensor.path, tensor.name)}
    for name in unwritten:
        if name not in known:
            names = ", ".join(one.name for one in segments)
            raise ValueError(f"unwritten must name arrays among the arguments, got {name!r}; they are {names}")
    parts = unwritten.items() if isinstance(unwritten, Mapping) else dict.fromkeys(unwritten, True).items()
    return [(known[name], where) for name, where in parts]


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pauses garbage collection: loading makes many objects that stay, and looking through them took half of its time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
