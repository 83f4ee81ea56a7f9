"""What a kernel takes of a multiprocessor, from its machine code: registers, stack, spills, shared memory, occupancy.

Compiled by NVRTC for any compute capability, without a GPU. The rules of occupancy are those of `cuda_occupancy.h`, which
comes with CUDA; a test holds them to that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cupyflash import kernels_cu
from cupyflash.compiler import FLUSH_DENORMALS, options
from cupyflash.device import Device
from cupyflash.nvrtc import compile_to_cubin
from cupyflash.schedules import Kernel

WARP = 32
MAX_THREADS_PER_BLOCK = 1024
# A multiprocessor is four partitions with a quarter of the registers each; a warp's come in units of 256.
PARTITIONS = 4
REGISTER_UNIT = 256

_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)'(?P<account>.*?)(?=Compiling entry function|\Z)", re.DOTALL)
_FIGURES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "stores": re.compile(r"(\d+) bytes spill stores"),
    "loads": re.compile(r"(\d+) bytes spill loads"),
}
_STATIC = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor of one compute capability holds at most, and how it hands out shared memory, in bytes."""

    threads: int
    blocks: int
    shared_unit: int = 128
    shared_reserved: int = 1024  # the system's, in each block

    @classmethod
    def of(cls, compute_capability: tuple[int, int]) -> Multiprocessor:
        """The limits of a compute capability; ValueError for one that is not known, rather than a guess."""
        if compute_capability not in _MULTIPROCESSORS:
            known = ", ".join("{}.{}".format(*each) for each in _MULTIPROCESSORS)
            raise ValueError("compute_capability = {}.{}: occupancy is known for {}".format(*compute_capability, known))
        return _MULTIPROCESSORS[compute_capability]


# CCCL's cuda/__device/arch_traits.h; cuda_occupancy.h agrees, and has the units.
_MULTIPROCESSORS = {
    (7, 5): Multiprocessor(1024, 16, shared_unit=256, shared_reserved=0),
    (8, 0): Multiprocessor(2048, 32),
    (8, 6): Multiprocessor(1536, 16),
    (8, 7): Multiprocessor(1536, 16),
    (8, 9): Multiprocessor(1536, 24),
    (9, 0): Multiprocessor(2048, 32),
    (10, 0): Multiprocessor(2048, 32),
    (10, 3): Multiprocessor(2048, 32),
    (11, 0): Multiprocessor(1536, 24),
    (12, 0): Multiprocessor(1536, 24),
    (12, 1): Multiprocessor(1536, 24),
}


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel a multiprocessor holds at a time.

    `limits` is that number as each resource alone allows it: "threads", "blocks", "registers", "shared memory" (absent
    where none is used).
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
        """The resources that allow no further block."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)


@dataclass(frozen=True)
class Resources:
    """One kernel's needs: registers a thread, bytes of stack and of spills a thread, bytes of shared memory a block."""

    name: str
    threads: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int

    @property
    def clean(self) -> bool:
        """Whether everything is in registers: no spills, no local memory."""
        return self.stack_bytes == 0 and self.spill_bytes == 0

    def occupancy(self, device: Device) -> Occupancy:
        """Blocks that one multiprocessor of a device holds, and what limits them."""
        most = Multiprocessor.of(device.compute_capability)
        warps = -(-self.threads // WARP)
        per_warp = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        limits = {"threads": most.threads // WARP // warps, "blocks": most.blocks}
        if self.threads > MAX_THREADS_PER_BLOCK:
            limits["threads"] = 0
        if per_warp:
            resident_warps = device.registers_per_sm // PARTITIONS // per_warp * PARTITIONS
            # A launch is checked as if its warps filled all partitions evenly.
            launches = per_warp * (-(-warps // PARTITIONS) * PARTITIONS) <= device.registers_per_sm
            limits["registers"] = resident_warps // warps if launches else 0
        shared = -(-(self.shared_bytes + most.shared_reserved) // most.shared_unit) * most.shared_unit
        if self.shared_bytes > device.sram_per_block:
            limits["shared memory"] = 0
        elif shared:
            limits["shared memory"] = device.sram_per_sm // shared
        return Occupancy(self.threads, most.threads, limits)

    def report(self, device: Device) -> dict[str, Any]:
        """For JSON: the needs, and the occupancy on a device."""
        occupancy = self.occupancy(device)
        return asdict(self) | {
            "blocks_per_sm": occupancy.blocks,
            "occupancy": occupancy.fraction,
            "limits": occupancy.limits,
            "limited_by": list(occupancy.limited_by),
        }


def resources(kernels: Iterable[Kernel], compute_capability: tuple[int, int]) -> tuple[Resources, ...]:
    """Compile kernels to machine code for sm_XY and read ptxas' account of them, each file with its constants once.

    Needs NVRTC, no GPU. Raises `cupyflash.nvrtc.CompileError` for a kernel that does not compile.
    """
    arch = "-arch=sm_{}{}".format(*compute_capability)
    accounts: dict[tuple[str, tuple[str, ...]], dict[str, tuple[dict[str, int], int]]] = {}
    found = []
    for kernel in kernels:
        program = kernel.source, options(kernel)
        if program not in accounts:
            full = (arch, FLUSH_DENORMALS, *program[1])
            accounts[program] = parse_account(compile_to_cubin(kernels_cu.source(kernel.source), full, kernel.source)[1])
        figures, static_shared = accounts[program][kernel.name]
        found.append(
            Resources(
                kernel.name,
                kernel.threads,
                figures["registers"],
                figures["stack"],
                figures["stores"] + figures["loads"],
                kernel.shared_bytes + static_shared,
            )
        )
    return tuple(found)


def parse_account(log: str) -> dict[str, tuple[dict[str, int], int]]:
    """`ptxas -v`'s account: (registers, stack, stores, loads; static shared memory in bytes) of each entry.

    Raises RuntimeError when a figure is missing: an account that cannot be read must not pass for one without spills.
    """
    entries = {}
    for entry in _ENTRY.finditer(log):
        figures = {}
        for figure, pattern in _FIGURES.items():
            told = pattern.findall(entry["account"])  # once, and once for each function that was not inlined
            if not told:
                raise RuntimeError(f"ptxas' account of {entry['name']} does not tell {figure}:\n{log}")
            figures[figure] = max(int(value) for value in told)
        static = _STATIC.search(entry["account"])
        entries[entry["name"]] = figures, int(static[1]) if static else 0
    if not entries:
        raise RuntimeError(f"ptxas gave no account of any kernel:\n{log}")
    return entries
