"""Machine instructions as a multiprocessor sees them: unit, clocks, control code, operands from the register banks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from .bulk import BULK
from .memory import ATOMICS, SPACES, STORES
from .rates import ChipRates
from .sass import NO_SCOREBOARD, Instruction

WARP = 32


class Unit(IntEnum):
    """The part of a sub-core that takes an instruction, or MEMORY: the queue to what the sub-cores share."""

    FMA = 0  # either of the two halves, where there are two
    HEAVY = 1  # the half that multiplies whole numbers
    ALU = 2
    HALF = 3
    DOUBLE = 4
    SPECIAL = 5
    TENSOR = 6
    UNIFORM = 7
    BRANCH = 8
    MEMORY = 9
    NONE = 10
    PRODUCT = 11  # wgmma's queue, which the four tensor cores share


class Act(IntEnum):
    """An effect beside keeping a unit busy."""

    NOTHING = 0
    COPY = 1
    GROUP = 2
    WAIT_COUNT = 3
    BARRIER = 4
    PRODUCT = 5
    FENCE = 6  # of a warpgroup's registers, before its products
    WAIT_PRODUCTS = 7
    PHASE = 8
    ARRIVE = 9
    BULK = 10


FLOAT32 = ("FFMA", "FMUL", "FADD", "FADD32I", "FMUL32I", "FFMA32I", "FFMA2", "FADD2", "FMUL2", "FSWZADD")
CONVERSIONS = ("F2F", "F2I", "I2F", "FRND", "POPC", "FLO", "BREV")
BRANCHES = ("BRA", "JMP", "CALL", "RET", "EXIT", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "BRX")
CONSTANTS = ("LDC", "LDCU", "ULDC")
PRODUCTS = ("HGMMA", "IGMMA", "QGMMA", "BGMMA")
"""wgmma by types: halves, bytes, 8-bit floats, bits."""
WAITING = ("BAR", "SYNCS", "WARPGROUP", "UCGABAR_ARV", "UCGABAR_WAIT", "UTMACMDFLUSH", "USETMAXREG", "CGAERRBAR", *BULK)
UPDATES = (*ATOMICS, "UTMAREDG", "UBLKRED")
ROWS = 64
"""Rows of a warpgroup's product."""
_REGISTER = re.compile(r"[-~|!]*R(\d+)\|?((?:\.\w+)*)$")


def unit_of(i: Instruction) -> Unit:
    name = i.opcode
    if i.never or name in ("NOP", "DEPBAR", "LDGDEPBAR", "MEMBAR", "ERRBAR", "CCTL", "FENCE", "YIELD", *WAITING):
        return Unit.NONE
    if name in PRODUCTS:
        return Unit.PRODUCT
    if name in SPACES or name == "SHFL":
        return Unit.MEMORY
    if name in FLOAT32:
        return Unit.FMA
    if name in ("IMAD", "IDP", "IMAD32I"):
        return Unit.HEAVY
    if name in ("HFMA2", "HADD2", "HMUL2", "HADD2_32", "HFMA2_32", "HMNMX2"):
        return Unit.HALF
    if name in ("DFMA", "DADD", "DMUL", "DSETP", "DMNMX"):
        return Unit.DOUBLE
    if name == "MUFU" or name in CONVERSIONS:
        return Unit.SPECIAL
    if name.endswith("MMA") and name != "HFMA2":
        return Unit.TENSOR
    if name in BRANCHES:
        return Unit.BRANCH
    if name in (*CONSTANTS, "S2R", "S2UR", "CS2R", "B2R", "R2UR"):
        return Unit.NONE
    return Unit.UNIFORM if name.startswith("U") or name == "VOTEU" else Unit.ALU


@dataclass(frozen=True, slots=True)
class TraceStep:
    """An instruction as the model needs it. Times are clocks.

    `reads`: for arithmetic the places, register numbers and reuse bits of its operands; `late`: registers that an instruction of
    memory reads when it leaves its queue; `fetched`: wavefronts by which a product fetches its factors; `latency`: from issue to a
    result that a scoreboard guards; `release`: to the end of the reading of operands; `bytes`: those of a lane.
    """

    unit: int
    clocks: float
    stall: float
    yields: bool
    waits: tuple[int, ...]
    writes: int | None
    frees: int | None
    reads: tuple[tuple[int, int, bool], ...]
    late: int
    latency: float
    release: float
    bytes: int
    act: int
    count: int  # of a wait for groups: what may be pending; of a product: the registers of a thread's sums
    board: int  # that a DEPBAR waits for, and that a group sets
    closes: bool  # a group of products
    updates: bool  # sectors of the L2: an atomic, or a bulk copy that adds
    fetched: float
    result: bool  # an arithmetic result that a register gets


def of_halves(i: Instruction) -> bool:
    """True for a product of tensor cores, of any type but float64."""
    return i.opcode in PRODUCTS or (unit_of(i) == Unit.TENSOR and i.opcode != "DMMA")


def step_of(i: Instruction, rates: ChipRates) -> TraceStep:
    unit, control = unit_of(i), i.control
    act, count, board = _act(i)
    size = next((int(m) // 8 for m in i.modifiers if m in ("64", "128")), 4)
    if i.opcode in ("LDSM", "STSM"):
        size = 4 * next((int(m) for m in i.modifiers if m in ("2", "4")), 1)
    return TraceStep(
        unit,
        _clocks(i, unit, rates),
        max(control.stall, 1, _holds(i, rates), rates["issue.yielded"] if control.yields else 0),
        control.yields,
        control.waits,
        control.writes,
        control.reads,
        _reads(i) if unit in (Unit.FMA, Unit.HEAVY, Unit.ALU, Unit.HALF) else (),
        _late(i, size) if unit == Unit.MEMORY else 0,
        _latency(i, unit, size, rates),
        _release(i, unit, size, rates),
        size,
        act,
        count,
        board,
        unit == Unit.PRODUCT and "gsb0" in i.operands,
        i.opcode in UPDATES,
        _fetched(i, rates) if unit == Unit.PRODUCT else 0.0,
        unit in (Unit.FMA, Unit.HEAVY, Unit.ALU, Unit.HALF, Unit.SPECIAL) and bool(i.operands and _REGISTER.match(i.operands[0])),
    )


def _act(i: Instruction) -> tuple[Act, int, int]:
    """Returns an instruction's effect, its count and its scoreboard."""
    if i.never:
        return Act.NOTHING, 0, 0
    if i.opcode == "LDGDEPBAR" or i.opcode == "UTMACMDFLUSH":
        board = i.control.writes if i.opcode == "LDGDEPBAR" else i.control.reads
        return Act.GROUP, 0, NO_SCOREBOARD if board is None else board
    if i.opcode == "DEPBAR" and i.operands:
        count = int(i.operands[1], 0) if len(i.operands) > 1 else 0
        return Act.WAIT_COUNT, count, int(i.operands[0].removeprefix("SB"))
    if i.opcode == "WARPGROUP":
        return (Act.WAIT_PRODUCTS, int(i.operands[1], 0), 0) if "DEPBAR" in i.modifiers else (Act.FENCE, 0, 0)
    if i.opcode in PRODUCTS:
        return Act.PRODUCT, int(i.modifiers[0].split("x")[1]) // 2, 0
    if i.opcode == "SYNCS":
        return {"PHASECHK": Act.PHASE, "ARRIVE": Act.ARRIVE}.get(i.modifiers[0], Act.NOTHING), 0, 0
    if i.opcode in BULK:
        return Act.BULK, 0, 0
    return {"LDGSTS": Act.COPY, "BAR": Act.BARRIER, "UCGABAR_WAIT": Act.BARRIER}.get(i.opcode, Act.NOTHING), 0, 0


def _fetched(i: Instruction, rates: ChipRates) -> float:
    """Returns the wavefronts of a product's factors: B always comes from shared memory, A if it has a descriptor too."""
    columns = int(i.modifiers[0].split("x")[1])
    both = i.operands[1].startswith("gdesc")
    return columns / 8 * rates["wgmma.wavefronts_b"] + (rates["wgmma.wavefronts_a"] if both else 0.0)


def flops_of(i: Instruction) -> int:
    """Returns the floating-point operations of a warp's instruction: two for each product that is added."""
    if i.opcode in PRODUCTS:
        rows, columns, depth = map(int, i.modifiers[0].split("x"))
        return 2 * rows * columns * depth // 4  # of each of four warps
    if i.opcode in ("HMMA", "DMMA"):
        shape = next((each for each in i.modifiers if each.isdigit()), "16816")
        return {"16816": 4096, "1688": 2048, "1684": 1024, "884": 512}.get(shape, 0)
    of_lane = {"FFMA": 2, "FADD": 1, "FMUL": 1, "DFMA": 2, "DADD": 1, "DMUL": 1, "HFMA2": 4, "HADD2": 2, "HMUL2": 2}
    return WARP * of_lane.get(i.opcode, 0)


def _reads(i: Instruction) -> tuple[tuple[int, int, bool], ...]:
    """Returns the operands that come out of a bank; a register that stands twice is read once."""
    found: dict[int, tuple[int, int, bool]] = {}
    for place, text in enumerate(i.operands[1:]):
        register = _REGISTER.match(text)
        if register:
            found.setdefault(int(register[1]), (place, int(register[1]), ".reuse" in register[2]))
    return tuple(found.values())


def _late(i: Instruction, size: int) -> int:
    """Returns the registers that an instruction of memory reads: addresses, 2 where they have 64 bits, and stored data."""
    count = 0
    for text in i.operands:
        if "[" in text:
            inner = text[text.rindex("[") :]
            count += (2 if ".64" in inner else 1) if re.search(r"(?<!U)R\d", inner) else 0
    if i.opcode in (*STORES, *ATOMICS):
        count += size // 4
    return count + (i.opcode == "SHFL")


def _clocks(i: Instruction, unit: Unit, rates: ChipRates) -> float:
    """Returns the clocks for which a warp's instruction keeps its unit."""
    if unit == Unit.TENSOR:
        return _tensor_clocks(i, rates)
    if unit == Unit.PRODUCT:  # halves of depth 16, bytes of 32 and tf32 of 8 take equally long
        columns = int(i.modifiers[0].split("x")[1])
        least = 0.0 if i.operands[1].startswith("gdesc") else rates["wgmma.least"]
        return max(ROWS * columns * 16 / rates["wgmma.fmas"], least)
    name = {
        Unit.HEAVY: "imad",
        Unit.HALF: "fp16",
        Unit.DOUBLE: "fp64",
        Unit.SPECIAL: "special" if i.opcode == "MUFU" else "convert",
        Unit.ALU: "vote" if i.opcode.startswith("VOTE") else "pack" if i.opcode in ("F2FP", "I2FP", "F2IP") else "integer",
    }.get(unit)
    if unit == Unit.FMA:
        return WARP / min(rates["lanes.fp32"], 16)  # a half has 16 lanes
    if unit in (Unit.UNIFORM, Unit.BRANCH):
        return 1 / rates["lanes.uniform" if unit == Unit.UNIFORM else "lanes.branch"]
    return WARP / rates[f"lanes.{name}"] if name else 0.0


def _tensor_clocks(i: Instruction, rates: ChipRates) -> float:
    shape = next((each for each in i.modifiers if each.isdigit()), "16816")
    if i.opcode == "DMMA":
        return rates["tensor.dmma_884"] if "tensor.dmma_884" in rates.constants else 16 * WARP / rates["lanes.fp64"]
    if i.opcode == "IMMA":
        return rates["tensor.imma_16832"] * {"16832": 1, "16816": 0.5, "8816": 0.25}.get(shape, 1)
    if "TF32" in i.modifiers:
        return rates["tensor.hmma_1688_tf32"] * {"1688": 1, "1684": 0.5}.get(shape, 1)
    if shape == "16816":
        return rates["tensor.hmma_16816_f32" if "F32" in i.modifiers else "tensor.hmma_16816_f16"]
    return rates["tensor.hmma_1688_f32"] * {"1688": 1, "884": 0.25}.get(shape, 1)


def _latency(i: Instruction, unit: Unit, size: int, rates: ChipRates) -> float:
    name = i.opcode
    if name == "LDSM":
        return rates["latency.ldsm_1"] + rates["latency.ldsm_more"] * (size // 4 - 1)
    if name in ("LDS", "LDL"):
        return rates[f"latency.lds_{8 * size}"]
    if name in ("LDG", "LD"):
        return rates[f"latency.ldg_{8 * size}"]
    found = {
        "SHFL": "shuffle",
        "LDGSTS": "ldgsts",
        "SYNCS": "lds_32",
        "ATOMS": "atoms",
        "ATOM": "ldg_32",
        "ATOMG": "ldg_32",
        "S2R": "s2r",
        "S2UR": "s2r",
        "B2R": "s2r",
        "REDUX": "redux",
        "MUFU": "special",
        **dict.fromkeys(CONVERSIONS, "convert"),
        **dict.fromkeys(CONSTANTS, "ldc_immediate"),
    }.get(name)
    if found:
        return rates[f"latency.{found}"]
    if unit == Unit.TENSOR:
        return rates["latency.double"] if name == "DMMA" else rates["tensor.latency_16816"]
    return rates["latency.double" if unit == Unit.DOUBLE else "latency.alu"]


def _holds(i: Instruction, rates: ChipRates) -> float:
    """Returns the clocks for which an instruction holds its warp back, whatever its stall count says."""
    if i.opcode == "MEMBAR" and not i.never:
        return rates["latency.fence_block" if "CTA" in i.modifiers else "latency.fence_gpu"]
    if i.opcode == "SYNCS" and i.modifiers[0] == "ARRIVE" and "copies.mbarrier_arrive" in rates.constants:
        return rates["copies.mbarrier_arrive"]
    return 0.0


def _release(i: Instruction, unit: Unit, size: int, rates: ChipRates) -> float:
    name = i.opcode
    wide = {4: 32, 8: 64, 16: 128}[size]
    if name in ("STS", "STL"):
        return rates[f"release.sts_{wide}"]
    if name in ("STG", "ST", "RED", "REDG", "ATOM", "ATOMG"):
        return rates[f"release.stg_{wide}"]
    if name == "LDGSTS":
        return rates["release.ldgsts"]
    if name in CONSTANTS:
        return rates["release.ldc_immediate"]
    if unit == Unit.TENSOR:
        return rates["tensor.release"]
    return rates["release.ldg" if name in ("LDG", "LD") else "release.lds"]
