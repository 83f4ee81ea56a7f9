"""Machine code as the assembler wrote it: each instruction with its control code, from what cuobjdump prints of a cubin.

From Volta on an instruction is a word of 128 bits. Bits 105 to 125 are the control code, by which the compiler, not the
hardware, keeps dependent instructions apart (Jia et al., arXiv 1804.06826; Huerta et al., arXiv 2503.20481):

    105-108  stall: clocks until the warp may issue its next instruction
    109      0 where the scheduler should turn to another warp
    110-112  scoreboard that is set until the result is written, 7: none
    113-115  scoreboard that is set until the operands are read, 7: none
    116-121  scoreboards that must be clear before this one issues, a bit each
    122-125  operands kept for the next instruction
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cupyflash.sim import files

SCOREBOARDS = 6
NO_SCOREBOARD = 7
INSTALL = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, or a CUDA toolkit on the PATH"
BRANCHES = ("BRA", "JMP", "CALL")
_FUNCTION = re.compile(r"\s*Function : (\S+)")
_INSTRUCTION = re.compile(
    r"\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z]\w*)(?P<modifiers>(?:\.\w+)*)"
    r"(?P<operands>[^;]*);\s*/\* 0x(?P<word>[0-9a-f]{16}) \*/"
)
_SECOND_WORD = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_ADDRESS = re.compile(r"0x([0-9a-f]+)\)?$")
_SIZED, _PARAMETER, _REGISTERS = 4, 0x17, 0x2F
_RESOURCES = re.compile(r"Function (\S+?):\s*\n\s*(.*)")


@dataclass(frozen=True)
class Control:
    """A control code. `writes` and `reads`: the scoreboard set until the result is there, until operands are read, or None."""

    stall: int = 1
    yields: bool = False
    writes: int | None = None
    reads: int | None = None
    waits: tuple[int, ...] = ()
    reuse: int = 0

    @classmethod
    def decode(cls, word: int) -> Control:
        """The control codes of a 128-bit instruction word."""

        def bits(first: int, count: int) -> int:
            return word >> first & (1 << count) - 1

        def scoreboard(number: int) -> int | None:
            return None if number == NO_SCOREBOARD else number

        waits = tuple(number for number in range(SCOREBOARDS) if bits(116 + number, 1))
        return cls(bits(105, 4), not bits(109, 1), scoreboard(bits(110, 3)), scoreboard(bits(113, 3)), waits, bits(122, 4))

    def __str__(self) -> str:
        waits = "".join(str(number) if number in self.waits else "-" for number in range(SCOREBOARDS))
        writes, reads = ("-" if each is None else each for each in (self.writes, self.reads))
        return f"waits {waits} reads {reads} writes {writes} {'yields' if self.yields else '      '} {self.stall:2d}"


@dataclass(frozen=True)
class Instruction:
    """One machine instruction. `guard` is the predicate it depends on, as "!P0", or ""; `target` is a branch's destination."""

    address: int
    opcode: str
    modifiers: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    guard: str = ""
    target: int | None = None
    control: Control = Control()

    @property
    def never(self) -> bool:
        """True if its guard is never true: the assembler fills gaps with such instructions."""
        return self.guard == "!PT"

    def __str__(self) -> str:
        guard = f"@{self.guard}" if self.guard else ""
        name = ".".join((self.opcode, *self.modifiers))
        return f"{self.address:05x}  {self.control}  {guard:5} {name} {', '.join(self.operands)}"


def parse(listing: str) -> dict[str, list[Instruction]]:
    """The kernels of `cuobjdump -sass`'s text, by name. ValueError for an instruction without its second word."""
    kernels: dict[str, list[Instruction]] = {}
    code: list[Instruction] = []
    pending: re.Match[str] | None = None
    for line in listing.splitlines():
        if function := _FUNCTION.match(line):
            code = kernels.setdefault(function[1], [])
        elif first := _INSTRUCTION.match(line):
            if pending:
                raise ValueError(f"no control code behind: {pending[0].strip()}")
            pending = first
        elif pending and (second := _SECOND_WORD.match(line)):
            code.append(_instruction(pending, int(second[1], 16)))
            pending = None
    return kernels


def _instruction(found: re.Match[str], high: int) -> Instruction:
    opcode, operands = found["opcode"], tuple(each.strip() for each in found["operands"].split(",") if each.strip())
    modifiers = tuple(found["modifiers"].split(".")[1:])
    target = _ADDRESS.search(operands[-1]) if opcode in BRANCHES and operands else None
    return Instruction(
        int(found["address"], 16),
        opcode,
        modifiers,
        operands,
        found["guard"] or "",
        int(target[1], 16) if target else None,
        Control.decode(high << 64 | int(found["word"], 16)),
    )


def disassembler() -> str | None:
    """cuobjdump: on the PATH, or from NVIDIA's wheel."""
    return tool("cuobjdump")


def tool(name: str) -> str | None:
    """A program of CUDA's: on the PATH, or from NVIDIA's wheel."""
    wheels = sorted(Path(sysconfig.get_path("purelib")).glob(f"nvidia/*/bin/{name}"))
    return shutil.which(name) or (str(wheels[-1]) if wheels else None)


@dataclass(frozen=True)
class Cubin:
    """The contents of a cubin: its architecture (80 for sm_80), its kernels' code, and what each needs (REG, STACK, SHARED...)."""

    architecture: int
    kernels: Mapping[str, list[Instruction]]
    resources: Mapping[str, Mapping[str, int]]


@lru_cache(maxsize=8)
def read(cubin: bytes) -> Cubin:
    """Raises RuntimeError where there is no disassembler, or it cannot read the file."""
    listing = _told(cubin, "-sass", "-res-usage")
    architecture = re.search(r"code for sm_(\d+)", listing)
    if architecture is None:
        raise RuntimeError("the disassembler does not say which architecture the code is for")
    resources = {
        name: {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", rest)} for name, rest in _RESOURCES.findall(listing)
    }
    return Cubin(int(architecture[1]), parse(listing), resources)


def listing(cubin: bytes) -> str:
    """Returns the code with the lines of source that it was made of, as nvdisasm prints it; raises as `read` does."""
    return _told(cubin, "-c", "--print-line-info-inline", name="nvdisasm")


def parameters(cubin: bytes, kernel: str) -> list[tuple[int, int]]:
    """The offset and size of each of a kernel's parameters, as its section .nv.info has them."""
    return list(_parameters(section(cubin, f".nv.info.{kernel}")))


def jump_tables(cubin: bytes, kernel: str) -> bytes:
    """Constant bank 2 of a kernel: the addresses among which BRX chooses."""
    return section(cubin, f".nv.constant2.{kernel}")


def section(cubin: bytes, wanted: str) -> bytes:
    """A section of a cubin, which is an ELF file; empty if it has none of that name."""
    begin, *_, size, count, names = struct.unpack_from("<QI6H", cubin, 40)  # where the section headers are, and which has the names
    sections = [struct.unpack_from("<IIQQQQ", cubin, begin + k * size) for k in range(count)]
    texts = sections[names][4]
    for name, _, _, _, at, length in sections:
        end = cubin.index(b"\0", texts + name)
        if cubin[texts + name : end].decode() == wanted:
            return cubin[at : at + length]
    return b""


def registers(cubin: bytes) -> dict[str, int]:
    """Registers of a thread by function, as section .nv.info has them: this needs no disassembler."""
    symbols, texts = section(cubin, ".symtab"), section(cubin, ".strtab")
    found = {}
    for number, count in (struct.unpack("<II", data) for data in _attributes(section(cubin, ".nv.info"), _REGISTERS)):
        (at,) = struct.unpack_from("<I", symbols, 24 * number)
        found[texts[at : texts.index(b"\0", at)].decode()] = count
    return found


def _parameters(info: bytes) -> Iterator[tuple[int, int]]:
    """Yields offsets and sizes in the parameters' order."""
    found = {}
    for data in _attributes(info, _PARAMETER):
        _, ordinal, offset, rest = struct.unpack("<IHHI", data)
        found[ordinal] = offset, rest >> 18
    yield from (found[ordinal] for ordinal in sorted(found))


def _attributes(info: bytes, wanted: int) -> Iterator[bytes]:
    """Yields the data of a kind: an attribute has a format, a kind, and a value or its length."""
    at = 0
    while at + 4 <= len(info):
        form, kind, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if kind == wanted:
                yield info[at : at + value]
            at += value


def _told(cubin: bytes, *options: str, name: str = "cuobjdump") -> str:
    program = tool(name)
    if program is None:
        raise RuntimeError(f"no {name}: {INSTALL}")
    # cuobjdump calls nvdisasm, which the wheels put beside it.
    path = os.pathsep.join(filter(None, [os.environ.get("PATH"), str(Path(program).parent)]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        files.write(file, cubin + b"\0")  # CuPy's binding of NVRTC drops the last byte
        done = subprocess.run([program, *options, str(file)], capture_output=True, text=True, env=os.environ | {"PATH": path})
    if done.returncode:
        raise RuntimeError(f"{program} cannot read the machine code: {done.stderr.strip()}")
    return done.stdout
