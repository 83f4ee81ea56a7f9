"""A kernel's resources, from its machine code: registers, stack, spills, shared memory, occupancy.

NVRTC compiles for any compute capability, without a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.launch.compiler import program
from cupyflash.launch.cubins import CompiledCubin, Program, compiled
from cupyflash.launch.nvrtc import remarks
from cupyflash.multiprocessor import Occupancy, occupancy
from cupyflash.schedules import Kernel

_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)'(?P<account>.*?)(?=Compiling entry function|\Z)", re.DOTALL)
_FIGURES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "stores": re.compile(r"(\d+) bytes spill stores"),
    "loads": re.compile(r"(\d+) bytes spill loads"),
}
_STATIC = re.compile(r"(\d+) bytes smem")
Examine = Callable[[Kernel, bytes], Iterable[str]]


@dataclass(frozen=True)
class Resources:
    """One kernel's needs: registers, bytes of stack and bytes of spills of a thread, bytes of shared memory of a block.

    `remarks`: those of ptxas about wgmma, none for a kernel at full speed, and those of `examine`.
    """

    name: str
    threads: int
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    remarks: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        """True if everything is in registers, without spills or local memory, and there are no remarks."""
        return self.stack_bytes == 0 and self.spill_bytes == 0 and not self.remarks

    def occupancy(self, device: Device) -> Occupancy:
        """The blocks that one multiprocessor of a device holds, and their limits."""
        return occupancy(device, self.threads, self.registers, self.shared_bytes)

    def report(self, device: Device) -> Report:
        """The needs, and the occupancy on a device, for JSON."""
        occupancy = self.occupancy(device)
        return asdict(self) | {
            "blocks_per_sm": occupancy.blocks,
            "occupancy": occupancy.fraction,
            "limits": occupancy.limits,
            "limited_by": list(occupancy.limited_by),
        }


def resources(
    kernels: Iterable[Kernel], compute_capability: tuple[int, int], examine: Examine | None = None
) -> tuple[Resources, ...]:
    """Compile kernels to machine code for sm_XY (or sm_XYa) and read the report of ptxas, each file with its constants once.

    `examine` receives each kernel with its machine code and returns further remarks. Needs NVRTC, no GPU. Raises
    `cupyflash.launch.nvrtc.CompileError` for a kernel that does not compile.
    """
    made: dict[Program, tuple[CompiledCubin, dict[str, tuple[dict[str, int], int]]]] = {}
    found = []
    for kernel in kernels:
        of = program(kernel, compute_capability)
        if of not in made:
            cubin = compiled(of)
            made[of] = cubin, parse_account(cubin.log)
        cubin, account = made[of]
        figures, static_shared = account[kernel.name]
        others = [f"'{name}'" for name in account if name != kernel.name]
        said = [remark for remark in remarks(cubin.log) if not any(other in remark for other in others)]
        found.append(
            Resources(
                kernel.name,
                kernel.threads,
                figures["registers"],
                figures["stack"],
                figures["stores"] + figures["loads"],
                kernel.shared_bytes + static_shared,
                (*said, *(examine(kernel, cubin.code) if examine else ())),
            )
        )
    return tuple(found)


def parse_account(log: str) -> dict[str, tuple[dict[str, int], int]]:
    """Parse the report of `ptxas -v`: (registers, stack, stores, loads; static shared memory in bytes) of each entry.

    Raises RuntimeError when a figure is missing: a report that cannot be read must not pass as one without spills.
    """
    entries = {}
    for entry in _ENTRY.finditer(log):
        figures = {}
        for figure, pattern in _FIGURES.items():
            told = pattern.findall(entry["account"])  # once, and once for each function that was not inlined
            if not told:
                raise RuntimeError(f"ptxas' account of {entry['name']} has no {figure}:\n{log}")
            figures[figure] = max(int(value) for value in told)
        static = _STATIC.search(entry["account"])
        entries[entry["name"]] = figures, int(static[1]) if static else 0
    if not entries:
        raise RuntimeError(f"ptxas' account names no kernel:\n{log}")
    return entries
