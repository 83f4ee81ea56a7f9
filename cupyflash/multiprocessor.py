"""Multiprocessors by compute capability: their limits, their rates per clock, and occupancy.

The rules of occupancy are those of `cuda_occupancy.h`, which comes with CUDA; a test compares them with that file.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyflash.device import Device

WARP = 32
MAX_THREADS_PER_BLOCK = 1024
# A multiprocessor is four partitions with a quarter of the registers each; a warp's come in units of 256.
PARTITIONS = 4
REGISTER_UNIT = 256
# Per clock, equal for all of them: exponentials, bytes of shared memory, bytes between an SM and the L2.
EXPONENTIALS = 16
SHARED_BYTES = 128
L2_BYTES = 64
GUESSED_CLOCK = 1.4e9


@dataclass(frozen=True)
class Multiprocessor:
    """The limits and rates per clock of a multiprocessor of one compute capability; shared memory in bytes."""

    threads: int
    blocks: int
    shared_unit: int = 128
    shared_reserved: int = 1024  # the system's, in each block
    fma_lanes: int = 128  # float32 FMAs a clock
    mma_sync: int | None = None  # the most FMAs a clock through mma.sync, if that is below the tensor cores' peak

    @classmethod
    def of(cls, compute_capability: tuple[int, int]) -> Multiprocessor:
        """The limits of a compute capability; ValueError if it is not known, rather than a guess."""
        if compute_capability not in _MULTIPROCESSORS:
            known = ", ".join("{}.{}".format(*each) for each in _MULTIPROCESSORS)
            raise ValueError("compute_capability = {}.{}: occupancy is known for {}".format(*compute_capability, known))
        return _MULTIPROCESSORS[compute_capability]

    @classmethod
    def like(cls, compute_capability: tuple[int, int]) -> Multiprocessor:
        """The limits of a compute capability, or of the last known one before it."""
        return _MULTIPROCESSORS[max((known for known in _MULTIPROCESSORS if known <= compute_capability), default=(7, 5))]


def tensor_rate(device: Device, dtype: str = "float16") -> float | None:
    """FMAs of the tensor cores in a clock of one multiprocessor, at the device's peak; None if that is not known."""
    peak, scalar = device.tensor_peak.get(dtype), device.tensor_peak.get("float32")
    lanes = Multiprocessor.like(device.compute_capability).fma_lanes
    return peak / scalar * lanes if peak and scalar else None  # both of the same clock


def mma_rate(device: Device, dtype: str = "float16") -> float:
    """FMAs of mma.sync on half types in a clock of one multiprocessor; a guess if the device's peak is not known."""
    rate = tensor_rate(device, dtype) or (512.0 if device.compute_capability < (8, 0) else 1024.0)
    return min(rate, Multiprocessor.like(device.compute_capability).mma_sync or rate)


def clock_rate(device: Device) -> float:
    """Clocks a second at the device's peaks, derived from its float32 FMAs; a guess if they are not known."""
    peak = device.tensor_peak.get("float32")
    return peak / (2 * Multiprocessor.like(device.compute_capability).fma_lanes * device.sm_count) if peak else GUESSED_CLOCK


# CCCL's cuda/__device/arch_traits.h; cuda_occupancy.h agrees, and has the units. FMA lanes: CUDA C++ Programming Guide,
# "Throughput of Native Arithmetic Instructions". Rates are those of rates.toml, which has the sources; a test compares them.
_MULTIPROCESSORS = {
    (7, 5): Multiprocessor(1024, 16, shared_unit=256, shared_reserved=0, fma_lanes=64),
    (8, 0): Multiprocessor(2048, 32, fma_lanes=64),
    (8, 6): Multiprocessor(1536, 16),
    (8, 7): Multiprocessor(1536, 16),
    (8, 9): Multiprocessor(1536, 24),
    (9, 0): Multiprocessor(2048, 32, mma_sync=1365),
    (10, 0): Multiprocessor(2048, 32, mma_sync=1024),
    (10, 3): Multiprocessor(2048, 32, mma_sync=1024),
    (11, 0): Multiprocessor(1536, 24),
    (12, 0): Multiprocessor(1536, 24),
    (12, 1): Multiprocessor(1536, 24),
}


@dataclass(frozen=True)
class Occupancy:
    """The number of blocks of a kernel that a multiprocessor holds at a time.

    `limits` is the number that each resource alone allows: "threads", "blocks", "registers", "shared memory" (absent if none is
    used).
    """

    threads: int
    most_threads: int
    limits: dict[str, int]

    @property
    def blocks(self) -> int:
        """Resident blocks of a multiprocessor; 0 for a kernel that cannot be launched."""
        return min(self.limits.values())

    @property
    def fraction(self) -> float:
        """Resident warps over the most that a multiprocessor can hold."""
        return self.blocks * -(-self.threads // WARP) * WARP / self.most_threads

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that allow no more blocks."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)


def occupancy(device: Device, threads: int, registers: int, shared_bytes: int, *, estimate: bool = False) -> Occupancy:
    """The occupancy of one multiprocessor by a kernel: `threads` and `shared_bytes` are a block's, `registers` a thread's.

    ValueError if the compute capability is not known, unless an `estimate` is enough.
    """
    most = Multiprocessor.like(device.compute_capability) if estimate else Multiprocessor.of(device.compute_capability)
    warps = -(-threads // WARP)
    per_warp = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    limits = {"threads": most.threads // WARP // warps, "blocks": most.blocks}
    if threads > MAX_THREADS_PER_BLOCK:
        limits["threads"] = 0
    if per_warp:
        resident_warps = device.registers_per_sm // PARTITIONS // per_warp * PARTITIONS
        # A launch is checked as if its warps filled all partitions evenly.
        launches = per_warp * (-(-warps // PARTITIONS) * PARTITIONS) <= device.registers_per_sm
        limits["registers"] = resident_warps // warps if launches else 0
    shared = -(-(shared_bytes + most.shared_reserved) // most.shared_unit) * most.shared_unit
    if shared_bytes > device.sram_per_block:
        limits["shared memory"] = 0
    elif shared_bytes:
        limits["shared memory"] = device.sram_per_sm // shared
    return Occupancy(threads, most.threads, limits)
