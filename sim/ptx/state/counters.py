"""Counts of one launch, for the kernel and for each line of its CUDA source: bytes and requests by tensor, bank
conflicts, instructions by opcode and class, active lanes, work of the tensor cores.

While a kernel runs, everything is recorded for each instruction (`LaunchTally`); lines and totals are sums made at the end, so
that they always agree. All counts are of PTX instructions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self, TypeVar

import numpy as np

from ..text.syntax import TYPES, Array, Line, PtxInstruction
from .lane_sets import SECTOR, LaneSet, distinct
from .segments import Segment

_OPCODES = {
    "tensor core": "mma wmma wgmma",
    "atomic": "atom red",
    "async copy": "cp",
    "load shared": "ldmatrix",
    "store shared": "stmatrix",
    "barrier, fence": "bar barrier mbarrier membar fence",
    "control": "bra brx exit ret call trap brkpt",
    "warp exchange": "shfl vote match redux activemask elect movmatrix",
    "compare, select": "setp set selp slct testp",
    "conversion": "cvt",
    "move": "mov cvta isspacep createpolicy mapa",
    "special function": "rcp sqrt rsqrt ex2 lg2 sin cos tanh",
    "texture": "tex tld4 txq",
    "surface": "suld sust suq",
    "other": "prefetch prefetchu discard applypriority nanosleep pmevent setmaxnreg griddepcontrol",
}
_BY_OPCODE = {name: kind for kind, names in _OPCODES.items() for name in names.split()}
_FLOATS = {"f32": "fp32", "f32x2": "fp32", "tf32": "fp32", "f64": "fp64", "f16": "fp16, bf16", "bf16": "fp16, bf16"}
_FLOATS |= {"f16x2": "fp16, bf16", "bf16x2": "fp16, bf16"}
_SPACES = ("global", "shared", "local", "const", "param")


def instruction_class(instruction: PtxInstruction) -> str:
    """Returns the class of an instruction.

    Loads and stores, those of wmma too, go by their state space ("load global", "store shared", "load generic", ...),
    arithmetic by its last type: "fp32", "fp16, bf16", "fp64", "integer" (logic and shifts among them). "special function" are
    reciprocals, roots, exponentials, logarithms, sines and floating-point divisions below fp64; those of fp64 are "fp64".
    `ldmatrix` loads and `stmatrix` stores shared memory. `cp.async` and its groups are "async copy", whose memory is counted
    as shared and global.
    """
    types = [mod for mod in instruction.mods if mod in TYPES]
    last = types[-1] if types else ""
    arithmetic = _FLOATS.get(last, "integer" if types else "other")
    moves = instruction.opcode == "wmma" and bool({"load", "store"} & set(instruction.mods))
    if instruction.opcode in ("ld", "ldu", "st") or moves:
        named = (mod.partition("::")[0] for mod in instruction.mods)
        space = next((name for name in named if name in _SPACES), "generic")
        stores = instruction.opcode == "st" or "store" in instruction.mods
        return f"{'store' if stores else 'load'} {space}"
    if instruction.opcode == "div" and last in _FLOATS:
        found = "special function"
    else:
        found = _BY_OPCODE.get(instruction.opcode, arithmetic)
    return "fp64" if found == "special function" and last == "f64" else found


def copies_by_lanes(i: PtxInstruction) -> bool:
    """True for a cp.async that copies: not for bulk copies, groups or arrivals at an mbarrier."""
    return i.opcode == "cp" and "global" in i.mods and "bulk" not in i.mods


class Summed:
    """Counts that add up."""

    def add(self, other: Self) -> None:
        mine = vars(self)
        for name, value in vars(other).items():
            mine[name] += value


@dataclass
class TensorCounts(Summed):
    """Traffic of one tensor in global memory.

    `*_bytes` are lane-requested bytes: the sum over active lanes of the access width. `unique_*_bytes` count a byte
    once for each warp request; `*_sectors` are the distinct 32-byte sectors of each warp request; `*_requests` are
    warp-level memory instructions with at least one active lane. Atomics count as a read and a write.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    read_requests: int = 0
    write_requests: int = 0
    read_sectors: int = 0
    write_sectors: int = 0
    unique_read_bytes: int = 0
    unique_write_bytes: int = 0

    @property
    def requested_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    @property
    def sectors(self) -> int:
        return self.read_sectors + self.write_sectors

    @property
    def requests(self) -> int:
        return self.read_requests + self.write_requests

    @property
    def coalescing(self) -> float | None:
        """Requested bytes / bytes of their sectors. Above 1 where lanes share bytes; None without traffic."""
        return self.requested_bytes / (SECTOR * self.sectors) if self.sectors else None

    def sides(self) -> dict[str, TensorCounts]:
        """Reads ("read") and writes ("write") apart."""
        numbers = vars(self)
        return {
            side: TensorCounts(**{name: count for name, count in numbers.items() if side in name.split("_")})
            for side in ("read", "write")
        }

    def count(self, lanes: LaneSet, addresses: Array, size: int | Array, write: bool) -> None:
        """Counts one access of `size` bytes a lane at aligned virtual `addresses` (uint64, one a lane).

        `size` is an array where lanes differ (cp.async with a source size); then each address has one size.
        """
        if isinstance(size, int):
            requested = lanes.n * size
            first, pattern = lanes.pattern(addresses, size)
            unique, sectors = pattern.unique_bytes, pattern.sectors(first)
        else:
            requested = int(size.sum())
            place = (lanes.warp << 48) + addresses.view(np.int64) - int(addresses[0])
            unique = int(size[np.unique(place, return_index=True)[1]].sum())
            sectors = distinct(place + (int(addresses[0]) & (SECTOR - 1)) >> 5)
        self.count_side(write, requested, lanes.warps, sectors, unique)

    def count_side(self, write: bool, requested: int, requests: int, sectors: int, unique: int) -> None:
        """Counts reads, or writes."""
        if write:
            self.write_bytes += requested
            self.write_requests += requests
            self.write_sectors += sectors
            self.unique_write_bytes += unique
        else:
            self.read_bytes += requested
            self.read_requests += requests
            self.read_sectors += sectors
            self.unique_read_bytes += unique


@dataclass
class SharedCounts(Summed):
    """Shared memory: warp-level requests, lane-requested bytes, and wavefronts.

    A wavefront is one pass over the 32 banks of 4 bytes; lanes that read the same word share it. `ideal_wavefronts`
    is what the same bytes would take without bank conflicts.
    """

    requests: int = 0
    bytes: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0

    @property
    def conflicts(self) -> int:
        """Bank conflicts: wavefronts beyond the ideal."""
        return self.wavefronts - self.ideal_wavefronts

    def count(self, requests: int, nbytes: int, wavefronts: int, ideal: int) -> None:
        self.requests += requests
        self.bytes += nbytes
        self.wavefronts += wavefronts
        self.ideal_wavefronts += ideal


Addable = TypeVar("Addable", bound=Summed)


def total(kind: type[Addable], parts: Iterable[Addable]) -> Addable:
    """Returns the sum of counts of one kind."""
    out = kind()
    for part in parts:
        out.add(part)
    return out


@dataclass
class Counts:
    """Counts of some instructions: those of a line, or of a whole kernel.

    `instructions` are warp instructions (predicated-off ones included), by opcode in `by_opcode`, by class (`instruction_class`) in
    `by_class`. `thread_instructions` counts active lanes, once for each instruction; `predicated_off` counts those of them whose
    predicate was false (a conditional branch that is not taken counts as predicated off). `divergent_branches` counts the
    warps whose active lanes went different ways at a branch, once for each way beyond the first. `mma_flops` is 2 m n k for
    each warp-level mma. `traffic` is that of each tensor. `shared` maps (kind, bytes a lane) to counts; the kinds are "ld",
    "st", "atom", "ldmatrix", "stmatrix", "cp.async", "cp.async.bulk" (one lane copies all), "wgmma" (one a tile).
    `distributed` is the same for accesses to the shared memory of other blocks of the cluster, which are not in `shared`.
    `inlined_at`: the kernel's lines that call the inlined functions with this code.
    """

    instructions: int = 0
    thread_instructions: int = 0
    predicated_off: int = 0
    divergent_branches: int = 0
    mma_flops: int = 0
    by_opcode: dict[str, int] = field(default_factory=dict)
    by_class: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, TensorCounts] = field(default_factory=dict)
    shared: dict[tuple[str, int], SharedCounts] = field(default_factory=dict)
    distributed: dict[tuple[str, int], SharedCounts] = field(default_factory=dict)
    inlined_at: set[Line] = field(default_factory=set)

    def add(self, other: Counts, times: int = 1) -> None:
        """Adds the counts of other instructions, those that every warp has in common `times` over."""
        self.instructions += other.instructions * times
        self.mma_flops += other.mma_flops * times
        for mine, theirs in ((self.by_opcode, other.by_opcode), (self.by_class, other.by_class)):
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count * times
        self.inlined_at |= other.inlined_at
        self.thread_instructions += other.thread_instructions
        self.predicated_off += other.predicated_off
        self.divergent_branches += other.divergent_branches
        for tensor, moved in other.traffic.items():
            self.traffic.setdefault(tensor, TensorCounts()).add(moved)
        for known, added in ((self.shared, other.shared), (self.distributed, other.distributed)):
            for access, passed in added.items():
                known.setdefault(access, SharedCounts()).add(passed)

    @property
    def active_lanes(self) -> float:
        """Mean number of active lanes of an instruction, of 32; less where warps diverge or are not whole."""
        return self.thread_instructions / self.instructions if self.instructions else 0.0

    @property
    def global_memory(self) -> TensorCounts:
        """Traffic of all tensors together."""
        return total(TensorCounts, self.traffic.values())

    @property
    def shared_memory(self) -> SharedCounts:
        """Shared memory of all kinds and widths together."""
        return total(SharedCounts, self.shared.values())

    @property
    def distributed_memory(self) -> SharedCounts:
        """Shared memory of other blocks of the cluster, all kinds and widths together."""
        return total(SharedCounts, self.distributed.values())

    def shared_kind(self, kind: str) -> SharedCounts:
        """Returns shared memory counts of one kind, all widths together."""
        return total(SharedCounts, (counts for (name, _), counts in self.shared.items() if name == kind))


@dataclass
class Counters(Counts):
    """Counts of a launch: the whole kernel's, and `lines` with those of each line, which sum to them.

    `barriers` counts completed block barriers, `waves` how many groups of blocks ran one after the other.
    """

    lines: dict[Line, Counts] = field(default_factory=dict)
    barriers: int = 0
    waves: int = 0

    def join(self, other: Counters) -> None:
        """Adds the counts of another launch."""
        self.add(other)
        for line, counts in other.lines.items():
            self.lines.setdefault(line, Counts()).add(counts)
        self.barriers += other.barriers
        self.waves += other.waves


Mix = tuple[tuple[Line, Counts], ...]
"""Counts of one warp's execution of a stretch of code, by line."""


@dataclass
class LaunchTally:
    """The growing counts of a running launch, by instruction."""

    traffic: defaultdict[tuple[PtxInstruction, Segment], TensorCounts] = field(default_factory=lambda: defaultdict(TensorCounts))
    shared: defaultdict[tuple[PtxInstruction, str, int], SharedCounts] = field(default_factory=lambda: defaultdict(SharedCounts))
    distributed: defaultdict[tuple[PtxInstruction, str, int], SharedCounts] = field(
        default_factory=lambda: defaultdict(SharedCounts)
    )
    predicated_off: defaultdict[PtxInstruction, int] = field(default_factory=lambda: defaultdict(int))
    divergent: defaultdict[PtxInstruction, int] = field(default_factory=lambda: defaultdict(int))
    barriers: int = 0
    waves: int = 0

    def wrote(self, segment: Segment) -> bool:
        """True if any instruction has stored to a tensor."""
        return any(moved.write_bytes for (_, one), moved in self.traffic.items() if one is segment)

    def fold(self, executed: Iterable[tuple[Mix, int, int]]) -> Counters:
        """Returns the counts by line and in all; `executed` are stretches of code, with the warps and the threads that ran each."""
        lines: defaultdict[Line, Counts] = defaultdict(Counts)
        for mix, warps, threads in executed:
            for line, counts in mix:
                lines[line].add(counts, warps)
                lines[line].thread_instructions += threads * counts.instructions
        for instruction, off in self.predicated_off.items():
            lines[instruction.place].predicated_off += off
        for instruction, ways in self.divergent.items():
            lines[instruction.place].divergent_branches += ways
        for (instruction, segment), moved in self.traffic.items():
            if segment.space != "param":
                lines[instruction.place].traffic.setdefault(segment.name, TensorCounts()).add(moved)
        for space in ("shared", "distributed"):
            for (instruction, kind, size), passed in getattr(self, space).items():
                getattr(lines[instruction.place], space).setdefault((kind, size), SharedCounts()).add(passed)
        out = Counters(lines=dict(sorted(lines.items())), barriers=self.barriers, waves=self.waves)
        for counts in out.lines.values():
            out.add(counts)
        for each in (out, *out.lines.values()):
            each.by_opcode, each.by_class = most_first(each.by_opcode), most_first(each.by_class)
        return out


def mix_of(instructions: Iterable[tuple[PtxInstruction, int]]) -> Mix:
    """Returns what one warp adds to each line by executing (instruction, tensor-core FLOPs) once, without counts of lanes."""
    lines: defaultdict[Line, Counts] = defaultdict(Counts)
    for instruction, flops in instructions:
        counts = lines[instruction.place]
        counts.instructions += 1
        counts.mma_flops += flops
        for table, name in ((counts.by_opcode, instruction.opcode), (counts.by_class, instruction_class(instruction))):
            table[name] = table.get(name, 0) + 1
        counts.inlined_at.update(instruction.inlined_at[-1:])
    return tuple(lines.items())


def most_first(counts: dict[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
