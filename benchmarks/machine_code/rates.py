"""The clock model's assumptions about a multiprocessor: one table, `Rates`, with the source of each figure.

A throughput is that of a whole multiprocessor. Its four sub-cores have a quarter each, except of shared memory, which they share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import IntEnum
from typing import Any

from cupyflash import Device, Problem
from cupyflash.multiprocessor import (
    BARRIER_LATENCY,
    BRANCH_LATENCY,
    EXP_LATENCY,
    EXP_QUEUE,
    EXPONENTIALS,
    INTEGER_LANES,
    L2_LATENCY,
    PARTITIONS,
    SHARED_BYTES,
    SHARED_LATENCY,
    SHARED_QUEUE,
    TENSOR_LATENCY,
    WARP,
    Multiprocessor,
)
from cupyflash.schedules import fa2_tiles
from cupyflash.sim.clock.sass import Instruction

GUIDE = "CUDA C++ Programming Guide, throughput of native arithmetic instructions"
LUO = "Luo et al., arXiv 2402.13499"
ASSUMED = "assumed"
VARIED = (0.7, 1.4)
LATENCIES = ("shared_latency", "exp_latency", "tensor_latency", "l2_latency", "read_latency", "barrier", "branch", "start")


class Unit(IntEnum):
    """The unit that executes an instruction."""

    TENSOR = 0
    EXP = 1
    FMA = 2
    ALU = 3
    MEMORY = 4
    BRANCH = 5
    BARRIER = 6
    UNIFORM = 7


# Opcodes by what they are for, and the unit; what is in none of these is integer work of the ALU, or uniform (U...).
GROUPS: dict[str, tuple[Unit, tuple[str, ...]]] = {
    "HMMA": (Unit.TENSOR, ("HMMA",)),
    "MUFU": (Unit.EXP, ("MUFU",)),
    "FP32": (Unit.FMA, ("FFMA", "FMUL", "FADD", "FFMA2", "FMUL2", "FADD2")),
    "FMNMX": (Unit.ALU, ("FMNMX", "FMNMX3")),
    "F2FP": (Unit.ALU, ("F2FP",)),
    "LDSM": (Unit.MEMORY, ("LDSM",)),
    "LDS": (Unit.MEMORY, ("LDS",)),
    "STS": (Unit.MEMORY, ("STS", "STSM")),
    "LDGSTS": (Unit.MEMORY, ("LDGSTS",)),
    "SHFL": (Unit.MEMORY, ("SHFL",)),
    "RED/ATOM": (Unit.MEMORY, ("RED", "REDG", "ATOM", "ATOMG", "ATOMS")),
    "LDG/STG": (Unit.MEMORY, ("LDG", "STG", "LD", "ST")),
    "LDL/STL": (Unit.MEMORY, ("LDL", "STL")),
    "integer": (Unit.FMA, ("IMAD", "HFMA2", "HADD2", "HMUL2")),
    "uniform": (Unit.UNIFORM, ()),
    "branch": (Unit.BRANCH, ("BRA", "BSSY", "BSYNC", "WARPSYNC", "CALL", "EXIT", "RET", "BREAK", "BRX", "YIELD", "JMP")),
    "BAR": (Unit.BARRIER, ("BAR",)),
    "other": (Unit.BARRIER, ("DEPBAR",)),
}
WAITING = (Unit.MEMORY, ("LDGDEPBAR",)), (Unit.BRANCH, ("NOP",)), (Unit.ALU, ("CS2R", "S2R", "FENCE", "S2UR"))
_OF = {opcode: (unit, group) for group, (unit, opcodes) in GROUPS.items() for opcode in opcodes}
_OF |= {opcode: (unit, "other") for unit, opcodes in WAITING for opcode in opcodes}
# Kernels whose warps do different things, by opcodes that only they have: not what the model is of.
SPECIALISED = ("HGMMA", "UTMALDG", "SYNCS", "UTCHMMA")


def unit(instruction: Instruction) -> Unit:
    if instruction.opcode in _OF:
        return _OF[instruction.opcode][0]
    return Unit.UNIFORM if instruction.opcode.startswith("U") else Unit.ALU


def group(instruction: Instruction) -> str:
    """The group under which an instruction is counted, one of GROUPS."""
    if instruction.opcode == "LDS" and instruction.never:
        return "other"
    if instruction.opcode in _OF:
        return _OF[instruction.opcode][1]
    return "uniform" if instruction.opcode.startswith("U") else "integer"


def rate(what: str, source: str, value: Any = MISSING) -> Any:
    """A row of the table that is not varied."""
    return field(default=value, metadata={"what": what, "source": source})


def latency(value: float, what: str, source: str = ASSUMED) -> Any:
    """A row that figures' sensitivity is to."""
    return field(default=value, metadata={"what": what, "source": source, "varied": True})


@dataclass(frozen=True)
class Rates:
    """The model's assumptions. Rates are per clock of a multiprocessor, the rest is clocks."""

    tensor: float = rate("FMAs of mma.sync on half types", f"the chip's peak; 9.0: {LUO}, 63% of wgmma's")
    float32: int = rate("lanes of FFMA, FADD, FMUL, IMAD", GUIDE)
    integer: int = rate("lanes of integer work, comparisons, maxima, conversions", GUIDE, INTEGER_LANES)
    exponentials: int = rate("lanes of MUFU", GUIDE, EXPONENTIALS)
    shared: int = rate("bytes of shared memory, four sub-cores together", GUIDE, SHARED_BYTES)
    shared_latency: float = latency(
        SHARED_LATENCY, "LDSM, LDS, LDL, SHFL: until the result is there, behind the pipe", f"{LUO}: 29.0 on A100 and H100"
    )
    exp_latency: float = latency(EXP_LATENCY, "MUFU: until the result is there")
    tensor_latency: float = latency(TENSOR_LATENCY, "HMMA: until the result is there, where a scoreboard says so")
    l2_latency: float = latency(
        L2_LATENCY, "LDGSTS, LDG, ATOM: until the data are there (a copy: 0.7 to 1.3 of it, drawn)", "assumed, under load"
    )
    read_latency: float = latency(15, "a scoreboard for operands: until they are read, behind the pipe")
    barrier: float = latency(BARRIER_LATENCY, "from a barrier's last warp until the others go on")
    branch: float = latency(BRANCH_LATENCY, "a taken branch within a turn, beyond its stall count")
    shared_queue: float = latency(SHARED_QUEUE, "work that may wait for shared memory before a warp must")
    exp_queue: float = latency(EXP_QUEUE, "work that may wait for the MUFU before a warp must")
    red_lines: float = latency(
        1,
        "lines of 128 bytes that a RED of 4 bytes a lane touches, a clock each: 1, since dQ's sum lies in whole lines",
        "query_sum.cuh; a clock a line: assumed",
    )
    start: float = latency(700, "from a block's end until the next one in its place runs its first instruction")
    youngest_first: bool = rate(
        "which warp is next when the last one waits: the youngest, or the oldest",
        "Huerta et al., arXiv 2503.20481: youngest; assumed here: oldest",
        False,
    )

    @classmethod
    def of(cls, architecture: int) -> Rates:
        """Return the rates of an architecture, 80 for sm_80. ValueError if no device of the catalogue has it."""
        capability = divmod(architecture, 10)
        device = next((each for each in Device.catalogue() if each.compute_capability == capability), None)
        if device is None:
            raise ValueError(f"architecture = sm_{architecture}: no device of it is known")
        fmas = fa2_tiles.fma_rate(Problem(1, 1, 1, 16, 16, 64, "float16"), device)
        return cls(tensor=fmas, float32=Multiprocessor.like(capability).fma_lanes)

    def sub_core_clocks(self, instruction: Instruction) -> float:
        """Clocks for which a warp's instruction keeps its sub-core's unit."""
        kind = unit(instruction)
        if kind == Unit.TENSOR:
            return PARTITIONS * products(instruction) / self.tensor
        lanes = {Unit.EXP: self.exponentials, Unit.FMA: self.float32, Unit.ALU: self.integer}.get(kind)
        return PARTITIONS * WARP / lanes if lanes else 0.0

    def shared_clocks(self, instruction: Instruction) -> float:
        """Clocks for which it keeps the pipe to shared memory and L1, without bank conflicts."""
        opcode, modifiers = instruction.opcode, instruction.modifiers
        if opcode in ("RED", "REDG", "ATOMG", "ATOM"):
            return self.red_lines * next((int(each[-1]) for each in modifiers if each in ("F32x2", "F32x4")), 1)
        if unit(instruction) != Unit.MEMORY or opcode == "LDGDEPBAR" or instruction.never:
            return 0.0
        matrices = next((int(each) for each in modifiers if each in ("2", "4")), 1)
        size = (
            4 * matrices if opcode in ("LDSM", "STSM") else next((int(each) // 8 for each in modifiers if each in ("64", "128")), 4)
        )
        return WARP * size / self.shared

    def variations(self) -> Iterator[tuple[str, float, Rates]]:
        """The variations of single assumptions: name, factor, and the rates that follow."""
        for row in fields(self):
            if row.metadata.get("varied"):
                for factor in VARIED:
                    yield row.name, factor, replace(self, **{row.name: getattr(self, row.name) * factor})
        yield "youngest_first", 1.0, replace(self, youngest_first=not self.youngest_first)

    def slower(self, factor: float) -> Rates:
        """The rates with all latencies multiplied by `factor`."""
        return replace(self, **{name: getattr(self, name) * factor for name in LATENCIES})

    def rows(self) -> Iterator[tuple[str, Any, str, str]]:
        """The table: name, value, what it is, and its source."""
        for row in fields(self):
            yield row.name, getattr(self, row.name), row.metadata["what"], row.metadata["source"]


def products(instruction: Instruction) -> int:
    """FMAs of an HMMA, as if of half types: m16n8k16 is HMMA.16816; TF32 takes twice the time."""
    shape = next((each for each in instruction.modifiers if each.isdigit()), "16816")
    sizes = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "1684": 16 * 8 * 4, "884": 8 * 8 * 4}
    return sizes.get(shape, 16 * 8 * 16) * (2 if "TF32" in instruction.modifiers else 1)


def markdown(architectures: tuple[int, ...] = (80, 90)) -> Iterator[str]:
    """The table for docs/performance.md."""
    columns = [list(Rates.of(each).rows()) for each in architectures]
    yield "| " + " | ".join(["assumption", *(f"sm_{each}" for each in architectures), "what it is", "source"]) + " |"
    yield "| --- |" + " --- |" * (len(architectures) + 2)
    for row in zip(*columns, strict=True):
        values = " | ".join("yes" if value is True else "no" if value is False else f"{value:,.0f}" for _, value, _, _ in row)
        name, _, what, source = row[0]
        yield f"| {name} | {values} | {what} | {source} |"
