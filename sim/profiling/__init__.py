"""A profiler's first page for a kernel, counted while the PTX machine runs it, without a GPU.

profile("softmax.cu", grid=4, block=128, args={"x": x, "y": y, "n": 1000}).text()
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyflash.device import Device
from cupyflash.launch.nvrtc import CompileError, compile_to_cubin
from cupyflash.launch.resources import parse_account
from cupyflash.sim.l2 import L2, Behind
from cupyflash.sim.l2.executed import Observed
from cupyflash.sim.l2.launch import resident
from cupyflash.sim.profiling.banks import BankAccess, WorstAccesses
from cupyflash.sim.ptx import Access, Counts, Estimate, Finding, Launch, Module, SharedCounts, Suppression, Traffic
from cupyflash.sim.ptx.memory.spaces import Observer
from cupyflash.sim.ptx.module import triple
from cupyflash.sim.ptx.parameters import ask_about_types
from cupyflash.sim.ptx.text.syntax import Line, Refusal, base_name, find_kernel
from cupyflash.words import plural

if TYPE_CHECKING:
    from cupyflash.sim.clock.loaded import LoadedLaunch


@dataclass(frozen=True)
class ArrayArgument:
    """An array argument of a kernel: shape, dtype, size in bytes."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class BehindL2:
    """DRAM's traffic of a launch behind a device's L2 (`sim.l2`). `registers` are a thread's, in machine code for the target
    architecture; None if only PTX is known: then registers do not limit the number of resident thread blocks."""

    device: Device
    registers: int | None
    found: Behind

    def to_dict(self) -> dict[str, Any]:
        """The traffic for JSON."""
        cache = L2.of(self.device).as_dict()
        return {"device": self.device.name, **cache, "registers": self.registers, **self.found.as_dict()}


@dataclass(frozen=True)
class Profile:
    """The profile of one launch of a kernel. All counts are simulated: of PTX instructions, not of machine code or caches.

    `kernel` is its name in the PTX, `name` its name in the source, `file` its source file, `target` the PTX's (such as sm_80).
    `cluster`: blocks of a cluster, if the launch has clusters. `static_shared`, `dynamic_shared`: bytes of a block's shared memory.
    `tensors` are the arrays among the arguments, by name.
    `refused`: other kernels of the module that the machine does not execute, with their statements (`ptx.Module.refused`).
    `launch` has counters (whole kernel and `launch.counters.lines`), traffic by tensor and findings. `sources` maps a file of
    `launch.counters.lines` to its lines of text, if it could be read. `banks`, on request: the access to shared memory with the
    most bank conflicts of each line, kind and width. `l2`, if a device was given: its DRAM's traffic. `timeline`: one of one thread
    block, if requested, or the reason for none (`clock.timeline.told`).
    """

    kernel: str
    name: str
    file: str
    target: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    static_shared: int
    dynamic_shared: int
    seed: int | None
    tensors: Mapping[str, ArrayArgument]
    refused: Mapping[str, Sequence[Refusal]]
    launch: Launch
    sources: Mapping[str, Sequence[str]]
    cluster: tuple[int, int, int] | None = None
    banks: Sequence[BankAccess] = ()
    l2: BehindL2 | None = None
    timeline: Mapping[str, Any] = field(default_factory=lambda: {"timeline": None, "timeline_why": "it was not asked for"})

    def source_text(self, line: Line) -> str:
        """The text of a line of source, "" if it is not known."""
        file, number = line
        lines = self.sources.get(file, ())
        return lines[number - 1].strip() if number <= len(lines) else ""

    def text(self, top: int = 10, width: int = 100, whole_findings: bool = False) -> str:
        """The profile as text, `width` columns wide; each table by line shows the `top` lines. `whole_findings`: one line each."""
        from cupyflash.sim.profiling.text import ProfileText

        return ProfileText(self, top, width, whole_findings).whole()

    def html(self) -> str:
        """The profile as one self-contained page: the data of `to_dict`, the source, and `banks`."""
        from cupyflash.sim.profiling.page import page

        return page(self)

    def to_dict(self) -> dict[str, Any]:
        """The profile for JSON, every line of it; docs/profile.md describes the keys."""
        launch = self.launch
        return {
            "kernel": self.kernel,
            "name": self.name,
            "file": self.file,
            "target": self.target,
            "grid": list(self.grid),
            "block": list(self.block),
            "cluster": list(self.cluster) if self.cluster else None,
            "shared_bytes": {"static": self.static_shared, "dynamic": self.dynamic_shared},
            "seed": self.seed,
            "refused": {
                name: [{"line": line, "text": text, "reason": reason} for line, text, reason in items]
                for name, items in self.refused.items()
            },
            "counts": "simulated, of PTX instructions",
            "barriers": launch.counters.barriers,
            "tensors": {
                name: {"shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.nbytes}
                for name, tensor in self.tensors.items()
            },
            "total": counts_dict(launch.counters),
            "lines": [
                {"file": line[0], "line": line[1], "text": self.source_text(line)}
                | {"inlined_at": [{"file": file, "line": number} for file, number in sorted(counts.inlined_at)]}
                | counts_dict(counts)
                for line, counts in launch.counters.lines.items()
            ],
            "findings": told(launch.findings),
            "findings_total": launch.findings_total,
            "notes": told(launch.notes),
            "suppressed": [{"by": vars(one.by), "findings": told(one.findings), "text": str(one)} for one in launch.suppressed],
            "unmatched": told(launch.unmatched),
            **({"l2": self.l2.to_dict()} if self.l2 else {}),
            **self.timeline,
        }


def told(items: Sequence[Finding | Suppression]) -> list[dict[str, Any]]:
    """Findings or suppressions for JSON: their fields, and their text."""
    return [vars(one) | {"text": str(one)} for one in items]


def counts_dict(counts: Counts) -> dict[str, Any]:
    """The counts of a line or a kernel for JSON."""
    return {
        "instructions": counts.instructions,
        "thread_instructions": counts.thread_instructions,
        "active_lanes": counts.active_lanes,
        "predicated_off": counts.predicated_off,
        "divergent_branches": counts.divergent_branches,
        "mma_flops": counts.mma_flops,
        "by_class": counts.by_class,
        "by_opcode": counts.by_opcode,
        "global": {name: traffic_dict(traffic) for name, traffic in counts.traffic.items()},
        "shared": shared_list(counts.shared),
        "distributed": shared_list(counts.distributed),
    }


def shared_list(counts: Mapping[tuple[str, int], SharedCounts]) -> list[dict[str, Any]]:
    """Accesses to shared memory for JSON: one entry for each kind and width."""
    return [
        {"kind": kind, "width": width} | vars(passed) | {"conflicts": passed.conflicts}
        for (kind, width), passed in sorted(counts.items())
    ]


def traffic_dict(traffic: Traffic) -> dict[str, Any]:
    """The traffic of one tensor for JSON: reads and writes apart; ratios are null where nothing was accessed."""
    return {
        side: {
            "bytes": one.requested_bytes,
            "unique_bytes": one.unique_read_bytes + one.unique_write_bytes,
            "requests": one.requests,
            "sectors": one.sectors,
            "sectors_per_request": one.sectors / one.requests if one.requests else None,
            "coalescing": one.coalescing,
        }
        for side, one in traffic.sides().items()
    }


def load(path: Path, options: Sequence[str] = ()) -> Module:
    """Load a module from a file: read `.ptx`, compile anything else as CUDA C, with the file's folder searched for includes.

    Raises OSError, `cupyflash.launch.nvrtc.CompileError`, `ptx.PtxError`, and ValueError for a file that is not text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file") from error
    if path.suffix == ".ptx":
        return Module.from_ptx(text)
    path = path.resolve()
    return Module.from_source(text, (*options, f"-I{path.parent}"), name=str(path))


def registers_of(path: Path, options: Sequence[str], kernel: str) -> int | None:
    """A thread's registers in the machine code that NVRTC makes from a file with the options of `load`; None for PTX, and
    for a file that does not compile to machine code."""
    if path.suffix == ".ptx":
        return None
    path = path.resolve()
    of_arch = "-arch", "--gpu-architecture"
    made = [option.replace("compute_", "sm_") if option.startswith(of_arch) else option for option in options]
    made += ["-arch=sm_80"] * (not any(option.startswith(of_arch) for option in options))
    try:
        _, log = compile_to_cubin(path.read_text(encoding="utf-8"), (*made, f"-I{path.parent}"), str(path))
        return parse_account(log)[kernel][0]["registers"]
    except (CompileError, KeyError):
        return None


def together(*observers: Observer) -> Observer | None:
    """Combine several observers into one."""
    if len(observers) < 2:
        return observers[0] if observers else None

    def observe(access: Access) -> None:
        for observer in observers:
            observer(access)

    return observe


def profile(
    source: str | os.PathLike[str] | Module,
    kernel: str | None = None,
    *,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Mapping[str, Any] | Sequence[Any] = (),
    options: Sequence[str] = (),
    shared_bytes: int = 0,
    seed: int | None = None,
    races: bool = True,
    unwritten: Collection[str] = (),
    cluster: int | Sequence[int] | None = None,
    max_instructions: int | None = None,
    stall_seconds: float | None = None,
    suppressions: str | os.PathLike[str] | Sequence[Suppression] = (),
    banks: bool = False,
    l2: Device | None = None,
    timeline_block: int | None = None,
    on_long: Callable[[Estimate], None] | None = None,
    long_seconds: float | None = None,
) -> Profile:
    """Run a kernel on the PTX machine and report traffic, bank conflicts, instruction mix, divergence and findings.

    source: a file of CUDA C, a `.ptx` file, or a loaded `ptx.Module`. kernel: its name, in the PTX or in the source; not needed if
    there is only one. grid, block, cluster, args, shared_bytes, seed, races, unwritten, max_instructions, stall_seconds,
    suppressions, on_long and long_seconds: as in `ptx.Module.launch`; NumPy arrays are tensors, written in place. options: NVRTC's,
    for CUDA C (-arch=compute_90, -DN=64, -Ifolder). banks: keep `Profile.banks`, for the page. l2: a device; all lines that the
    kernel requests go through the model of its L2. timeline_block: the thread block (linear index in the grid) with a timeline.

    Raises ValueError or TypeError for arguments that do not fit, such as a float64 array for `float*`, OSError for a file that
    cannot be read, `cupyflash.launch.nvrtc.CompileError`, `ptx.PtxError` for code that the machine cannot execute, ImportError
    without NVRTC.
    Faults of the kernel itself are in `Profile.launch.findings`.
    """
    module = source if isinstance(source, Module) else load(Path(source), options)
    kernel = find_kernel(module.kernels, kernel)
    ask_about_types(module.cuda_of(kernel), kernel, args)
    how: dict[str, Any] = {"shared_bytes": shared_bytes, "seed": seed, "races": races, "unwritten": unwritten, "cluster": cluster}
    how |= {"max_instructions": max_instructions, "stall_seconds": stall_seconds, "suppressions": suppressions}
    how |= {"on_long": on_long, "long_seconds": long_seconds}
    blocks, threads = (math.prod(triple(each, name)) for each, name in ((grid, "grid"), (block, "block")))
    if timeline_block is not None and not 0 <= timeline_block < blocks:
        raise ValueError(f"timeline_block must be one of the grid's {plural(blocks, 'thread block')}, from 0, got {timeline_block}")
    worst, asked = WorstAccesses() if banks else None, Observed()
    if l2 is not None:
        registers = None if isinstance(source, Module) else registers_of(Path(source), options, kernel)
        shared = module.code(kernel).shared.size + shared_bytes
        if shared > l2.sram_per_block:
            raise ValueError(
                f"l2: a thread block has {shared:,} bytes of shared memory, more than the {l2.sram_per_block:,} of {l2.name}"
            )
        asked.launch(blocks, resident(l2, threads, shared, registers or 0))
    how["observer"] = together(*([worst] if worst else []), *asked.launches)
    drawn = {}
    if timeline_block is not None:  # before the launch, which writes to the arrays
        drawn["timeline"] = timeline_of(module, kernel, timeline_block, (grid, block, args, shared_bytes, cluster))
    launch = module.launch(kernel, grid, block, args, **how)
    arrays = module.tensors(kernel, args)
    tensors = {name: ArrayArgument(array.shape, str(array.dtype), array.nbytes) for name, array in arrays.items()}
    return Profile(
        kernel,
        base_name(kernel),
        "" if isinstance(source, Module) else os.fspath(source),
        module.program.target.partition(",")[0],
        triple(grid, "grid"),
        triple(block, "block"),
        module.code(kernel).shared.size,
        shared_bytes,
        seed,
        tensors,
        module.refused,
        launch,
        {file: lines_of(file, module) for file in {file for file, _ in launch.counters.lines}},
        None if cluster is None else triple(cluster, "cluster"),
        worst.accesses if worst is not None else (),
        None if l2 is None else BehindL2(l2, registers, asked.behind(L2.of(l2))),
        **drawn,
    )


def timeline_of(module: Module, kernel: str, number: int, launch: tuple[Any, ...]) -> dict[str, Any]:
    """The timeline of a thread block, or the reason for none; `launch`: grid, block, args, shared bytes and cluster."""
    from cupyflash.sim.clock import timeline
    from cupyflash.sim.clock.lines import texts

    grid, block, args, shared_bytes, cluster = launch
    device = timeline.device_of(module.program.target.partition(",")[0])
    shape, clusters = (triple(grid, "grid"), triple(block, "block")), cluster or module.program.functions[kernel].cluster or 1
    sources: dict[str, list[str]] = {}

    def text(line: Line) -> str:
        file, number = line
        if file not in sources:
            sources[file] = texts(file, module.sources)
        return sources[file][number - 1].strip() if 0 < number <= len(sources[file]) else ""

    def load() -> LoadedLaunch:
        return module.machine_code(device).launch(kernel, shape, args, shared_bytes, triple(clusters, "cluster"))

    return timeline.told(load, device, number, text)


def lines_of(file: str, module: Module) -> list[str]:
    """The lines of a source file, none if it can no longer be read."""
    if file == "PTX":
        return module.text.splitlines()
    try:
        return Path(file).read_text(errors="replace").splitlines()
    except (OSError, ValueError):
        return []
