"""The units of a multiprocessor in the model of one thread block: which of them PTX instructions occupy, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from cupyflash.device import Device
from cupyflash.multiprocessor import (
    EXP_LATENCY,
    EXPONENTIALS,
    FIXED_LATENCY,
    INTEGER_LANES,
    PARTITIONS,
    SHARED_LATENCY,
    TENSOR_LATENCY,
    WARP,
    Multiprocessor,
    mma_rate,
    tensor_rate,
)
from cupyflash.sim.ptx.report.counters import copies_by_lanes, instruction_class
from cupyflash.sim.ptx.report.diary import Listing, ProductSpan
from cupyflash.sim.ptx.text.syntax import TYPES

TENSOR, EXP, FLOAT, INTEGER, SHARED, NONE, FREE = 0, 1, 2, 3, 4, -1, -2
"""Units: of a sub-core, the pipe to shared memory, no unit but the issue slot, and not even that."""
UNIT_NAMES = {TENSOR: "tensor cores", EXP: "exponentials", FLOAT: "floating point", INTEGER: "integers", SHARED: "shared memory"}
PIPES = SHARED
"""Units that each sub-core has: those before SHARED."""

HALF_BITS = 16
OPERAND_BITS = {"e4m3": 8, "e5m2": 8, "tf32": 32, "s4": 4, "u4": 4, "b1": 1}
"""Of types that only products have."""

BY_CLASS = {
    "tensor core": (TENSOR, "products"),
    "special function": (EXP, "special"),
    "fp32": (FLOAT, "works"),
    "fp16, bf16": (FLOAT, "works"),
    "fp64": (FLOAT, "works"),
    "integer": (INTEGER, "works"),
    "compare, select": (INTEGER, "works"),
    "conversion": (INTEGER, "works"),
    "warp exchange": (INTEGER, "works"),
    "load shared": (SHARED, "shared"),
    "store shared": (SHARED, "shared"),
    "load local": (SHARED, "shared"),
    "store local": (SHARED, "shared"),
    "load global": (SHARED, "global"),
    "store global": (SHARED, "global"),
    "load generic": (SHARED, "global"),
    "store generic": (SHARED, "global"),
    "atomic": (SHARED, "global"),
    "async copy": (SHARED, "copies"),
    "move": (FREE, "works"),
    "load param": (FREE, "works"),
}
"""Unit and kind of span by class of instruction. Other instructions take an issue slot: barriers, branches. Moves and parameters
are free: machine code renames registers and reads parameters as operands.
"""


@dataclass(frozen=True)
class TimelineStep:
    """An instruction as the model has it: `clocks` of `unit`, `latency` until its result is there; registers by number."""

    pc: int
    unit: int
    clocks: float
    latency: float
    kind: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the unit; "" for none."""
        return UNIT_NAMES.get(self.unit, "")


NOTHING = TimelineStep(-1, NONE, 0.0, 0.0, "works", (), ())


@dataclass(frozen=True)
class UnitRates:
    """The rates of a multiprocessor, in a clock: FMAs of mma.sync and of wgmma on half types and of mma.sync on float64, lanes of
    float32 and of float64."""

    mma_sync: float
    wgmma: float
    fp64_mma: float
    float_lanes: int
    fp64_lanes: int

    @classmethod
    def of(cls, device: Device) -> UnitRates:
        sm = Multiprocessor.like(device.compute_capability)
        mma_sync = mma_rate(device)
        return cls(mma_sync, tensor_rate(device) or mma_sync, sm.fp64_mma or sm.fp64_lanes, sm.fma_lanes, sm.fp64_lanes)

    def product_clocks(self, product: ProductSpan) -> float:
        """The clocks of a warpgroup's product, on all four tensor cores: elements of 8 bits take half as long as those of 16."""
        return product.fmas * product.bits / HALF_BITS / self.wgmma

    def step(self, listing: Listing, pc: int) -> TimelineStep:
        """An instruction; -1 is none."""
        if pc < 0:
            return NOTHING
        i, flops = listing.instructions[pc], listing.flops[pc]
        unit, kind = BY_CLASS.get(instruction_class(i), (NONE, "works"))
        reads, writes = registers(listing.reads[pc]), registers(listing.writes[pc])
        if i.opcode == "wgmma":
            # Its sums are there when they have been waited for.
            return TimelineStep(pc, NONE, 0.0, 0.0, "products", tuple(r for r in reads if r not in writes), ())
        if i.opcode == "shfl":
            return TimelineStep(pc, SHARED, 1.0, SHARED_LATENCY, "works", reads, writes)
        if i.opcode == "cp" and not copies_by_lanes(i):
            unit = NONE
        if unit == SHARED:
            return TimelineStep(pc, SHARED, 0.0, SHARED_LATENCY, kind, reads, writes)
        if unit == TENSOR:
            rate = self.fp64_mma if "f64" in i.mods else self.mma_sync * HALF_BITS / element_bits(i.mods)
            return TimelineStep(pc, TENSOR, PARTITIONS * flops / 2 / rate, TENSOR_LATENCY, kind, reads, writes)
        lanes = {EXP: EXPONENTIALS, FLOAT: self.float_lanes, INTEGER: INTEGER_LANES}.get(unit)
        lanes = self.fp64_lanes if lanes and "f64" in i.mods else lanes
        times = 2 if "f32x2" in i.mods else 1
        latency = EXP_LATENCY if unit == EXP else FIXED_LATENCY if unit >= 0 else 0
        return TimelineStep(pc, unit, times * PARTITIONS * WARP / lanes if lanes else 0.0, latency, kind, reads, writes)


def element_bits(mods: tuple[str, ...]) -> int:
    """The bits of an element of a product's operands: mma has the types of D, A, B and C; wmma on float16 those of D and
    C alone."""
    types = [mod for mod in mods if mod in TYPES or mod in OPERAND_BITS]
    return HALF_BITS if len(types) < 3 else OPERAND_BITS.get(types[1], 0) or TYPES[types[1]].bits


def registers(mask: int) -> tuple[int, ...]:
    """The numbers of the bits that are set."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)
