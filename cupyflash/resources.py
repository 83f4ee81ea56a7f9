"""What a kernel takes of a multiprocessor, from its machine code: registers, stack, spills, shared memory, occupancy.

Compiled by NVRTC for any compute capability, without a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cupyflash import kernels_cu
from cupyflash.compiler import FLUSH_DENORMALS, architecture, options
from cupyflash.device import Device
from cupyflash.multiprocessor import Occupancy, occupancy
from cupyflash.nvrtc import compile_to_cubin
from cupyflash.schedules import Kernel

_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)'(?P<account>.*?)(?=Compiling entry function|\Z)", re.DOTALL)
_FIGURES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "stores": re.compile(r"(\d+) bytes spill stores"),
    "loads": re.compile(r"(\d+) bytes spill loads"),
}
_STATIC = re.compile(r"(\d+) bytes smem")


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
        return occupancy(device, self.threads, self.registers, self.shared_bytes)

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
    """Compile kernels to machine code for sm_XY (or sm_XYa) and read ptxas' account of them, each file with its constants once.

    Needs NVRTC, no GPU. Raises `cupyflash.nvrtc.CompileError` for a kernel that does not compile.
    """
    accounts: dict[tuple[str, tuple[str, ...]], dict[str, tuple[dict[str, int], int]]] = {}
    found = []
    for kernel in kernels:
        arch = f"-arch=sm_{architecture(kernel, compute_capability)}"
        program = kernel.source, (arch, *options(kernel))
        if program not in accounts:
            full = (FLUSH_DENORMALS, *program[1])
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
