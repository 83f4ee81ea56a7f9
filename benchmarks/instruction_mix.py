"""Counts the instructions of fa2's main loop in its machine code, by what they are for:

    python benchmarks/instruction_mix.py [DEVICE ...]

Needs the compiler (NVRTC) and NVIDIA's disassemblers, no GPU: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm (or a CUDA
toolkit on the PATH). The main loop is the one for K/V blocks that no mask cuts into, once round: a tile of S for each warp.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cupyflash import Device, Problem, kernels_cu, plan  # noqa: E402
from cupyflash.compiler import FLUSH_DENORMALS, options  # noqa: E402
from cupyflash.nvrtc import compile_to_cubin  # noqa: E402
from cupyflash.schedules import Kernel  # noqa: E402

DEVICES, HEAD_DIMS = ("A100-40GB", "H100-SXM"), (64, 128)
# What an opcode is for. What is in none of these is the rest: addresses, predicates, moves, branches, barriers.
PARTS = {
    "HMMA": ("HMMA",),
    "MUFU": ("MUFU",),
    "FFMA": ("FFMA",),
    "LDSM": ("LDSM",),
    "LDGSTS": ("LDGSTS",),
    "softmax": ("FMNMX", "FMNMX3", "FADD", "FMUL", "F2FP", "SHFL", "FSETP", "VOTE"),
}
REST = "rest"
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?(\S+?)(?:\.(\S+))?(?:\s+(.*?))?\s*;")


@dataclass(frozen=True)
class Instruction:
    """One of machine code: its address, the predicate that guards it, its opcode without and with modifiers, where it branches."""

    address: int
    guard: str
    opcode: str
    full: str
    target: int | None


@dataclass(frozen=True)
class Mix:
    """Instructions of one turn of the loop by part, for a warp; `rescale`: those behind the vote that skips O's rescaling."""

    parts: dict[str, int]
    rescale: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def disassembler() -> str | None:
    """cuobjdump: on the PATH, or from NVIDIA's wheel."""
    wheels = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/cuobjdump"))
    return shutil.which("cuobjdump") or (str(wheels[-1]) if wheels else None)


def machine_code(kernel: Kernel, device: Device) -> str:
    """A kernel's SASS as text. Raises RuntimeError without a disassembler."""
    tool = disassembler()
    if tool is None:
        raise RuntimeError("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    arguments = (f"-arch={device.sm}", FLUSH_DENORMALS, *options(kernel))
    cubin, _ = compile_to_cubin(kernels_cu.source(kernel.source), arguments, kernel.source)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin + b"\0")  # CuPy's binding drops the last byte
        file.flush()
        told = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True)
    if told.returncode:
        raise RuntimeError(f"{tool} cannot read the machine code: {told.stderr.strip()}")
    return told.stdout


def instructions(sass: str) -> list[Instruction]:
    """The instructions of a listing, in order."""
    found = []
    for line in sass.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            address, guard, opcode, modifiers, operands = match.groups()
            target = re.search(r"0x([0-9a-f]+)\)?$", operands or "") if opcode == "BRA" else None
            full = f"{opcode}.{modifiers}" if modifiers else opcode
            found.append(Instruction(int(address, 16), (guard or "").strip(), opcode, full, int(target[1], 16) if target else None))
    return found


def main_loop(code: Sequence[Instruction]) -> Sequence[Instruction]:
    """The shortest loop with tensor core instructions: the other, with masks in it, is longer, and code out of line jumps far."""
    place = {each.address: at for at, each in enumerate(code)}
    loops = [
        code[place[each.target] : at + 1]
        for at, each in enumerate(code)
        if each.target is not None and each.target in place and each.target < each.address
    ]
    with_products = [loop for loop in loops if any(each.opcode == "HMMA" for each in loop)]
    if not with_products:
        raise RuntimeError("no loop with HMMA in the machine code")
    return min(with_products, key=len)


def mix(loop: Sequence[Instruction]) -> Mix:
    """The loop's instructions by part, with O's rescaling apart: what the branch behind the vote jumps over."""
    vote = next(at for at, each in enumerate(loop) if each.opcode == "VOTE")
    branch = next(at for at in range(vote, len(loop)) if loop[at].target is not None and loop[at].guard)
    skipped = [each for each in loop[branch + 1 :] if each.address < (loop[branch].target or 0)]
    part_of = {opcode: part for part, opcodes in PARTS.items() for opcode in opcodes}
    counted = Counter(part_of.get(each.opcode, REST) for each in loop if each not in skipped)
    return Mix({part: counted[part] for part in (*PARTS, REST)}, len(skipped))


def mixes(devices: Sequence[Device]) -> Iterator[tuple[Device, int, str, Mix]]:
    """For each device and d: the tile that long float16 rows get, and its loop."""
    for device in devices:
        for d in HEAD_DIMS:
            schedule = plan(Problem(4, 16, 16, 4096, 4096, d, "float16"), device)
            loop = main_loop(instructions(machine_code(schedule.kernels()[0], device)))
            yield device, d, f"{schedule.block_rows} x {schedule.block_cols}", mix(loop)


def table(devices: Sequence[Device]) -> Iterator[str]:
    """Markdown."""
    names = (*PARTS, REST)
    yield "| | tile | " + " | ".join(names) + " | all | rest | rescaling O, apart |"
    yield "| --- | --- |" + " --- |" * (len(names) + 3)
    for device, d, tile, found in mixes(devices):
        counts = " | ".join(str(found.parts[name]) for name in names)
        share = found.parts[REST] / found.total
        yield f"| {device.sm}, d {d} | {tile} | {counts} | {found.total} | {share:.1%} | {found.rescale} |"


if __name__ == "__main__":
    print("\n".join(table([Device.named(name) for name in sys.argv[1:] or DEVICES])))
