"""What a kernel takes of a multiprocessor, from its machine code: registers, stack, spills, shared memory, occupancy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cupyflash import kernels_cu
from cupyflash.compiler import FLUSH_DENORMALS, options
from cupyflash.device import Device
from cupyflash.nvrtc import compile_to_cubin
from cupyflash.schedules import Kernel

# Registers are handed out to a warp in units of 256; shared memory costs a block 1 KB of the system's from sm_80 on
# (CUDA C Programming Guide, "Compute Capabilities"; CUDA Occupancy Calculator).
REGISTER_UNIT = 256
WARP = 32
RESERVED_SHARED = 1024

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?:[^\n]*?(?P<static>\d+) bytes smem)?",
    re.DOTALL,
)


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

    def blocks_per_sm(self, device: Device) -> int:
        """Thread blocks that one multiprocessor holds at a time: the least that threads, registers and SRAM allow."""
        warps = -(-self.threads // WARP)
        per_warp = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        reserved = RESERVED_SHARED if device.compute_capability >= (8, 0) else 0
        limits = [max_threads(device) // self.threads, device.registers_per_sm // (per_warp * warps), 32]
        if self.shared_bytes:
            limits.append(device.sram_per_sm // (self.shared_bytes + reserved))
        return min(limits)

    def occupancy(self, device: Device) -> float:
        """Resident threads over the most that a multiprocessor can hold."""
        return self.blocks_per_sm(device) * self.threads / max_threads(device)


def max_threads(device: Device) -> int:
    """Most resident threads of a multiprocessor (CUDA C Programming Guide, "Compute Capabilities")."""
    return {(7, 5): 1024, (8, 0): 2048, (9, 0): 2048, (10, 0): 2048}.get(device.compute_capability, 1536)


def resources(kernel: Kernel, compute_capability: tuple[int, int]) -> Resources:
    """Compile one kernel to machine code for sm_XY and read ptxas' account of it. Needs NVRTC, no GPU."""
    arch = "-arch=sm_{}{}".format(*compute_capability)
    _, log = compile_to_cubin(kernels_cu.source(kernel.source), (arch, FLUSH_DENORMALS, *options(kernel)), kernel.source)
    for entry in _ENTRY.finditer(log):
        if entry["name"] == kernel.name:
            return Resources(
                kernel.name, kernel.threads, int(entry["registers"]), int(entry["stack"]),
                int(entry["stores"]) + int(entry["loads"]), kernel.shared_bytes + int(entry["static"] or 0),
            )  # fmt: skip
    raise RuntimeError(f"ptxas gave no account of {kernel.name}:\n{log}")
