"""The results of the gate's programs, kept from one run to the next in `.ci/accounts/`, a file for each version of NVRTC.

A program is found again by a digest of all its parts: source, included files, constants, options, architecture, CUDA's headers for
half types. So after a change the gate compiles only changed programs, and CI those that the file lacks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from cupyflash import kernels_cu
from cupyflash.launch.compiler import FLUSH_DENORMALS, architecture, options
from cupyflash.launch.nvrtc import header_directories
from cupyflash.launch.resources import Resources
from cupyflash.schedules import Kernel

FOLDER = Path(__file__).parent / "accounts"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
Program = tuple[str, Sequence[Kernel], tuple[int, int]]
"""A label, the kernels of one compilation, a compute capability."""


class Accounts:
    """The accounts with one version of NVRTC."""

    def __init__(self, version: tuple[int, int], folder: Path = FOLDER) -> None:
        self.path = folder / "nvrtc_{}.{}.jsonl".format(*version)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.known = {line["program"]: line["kernels"] for line in map(json.loads, lines)}

    def find(self, program: Program) -> tuple[Resources, ...] | None:
        """The needs of a program's kernels, None if it has not been compiled in its present form."""
        figures = self.known.get(digest(program))
        if figures is None or not all(kernel.name in figures for kernel in program[1]):
            return None
        return tuple(
            Resources(each.name, each.threads, registers, stack, spills, each.shared_bytes + static, tuple(remarks))
            for each in program[1]
            for registers, stack, spills, static, *remarks in [figures[each.name]]
        )

    def write(self, programs: Iterable[tuple[Program, Sequence[Resources]]]) -> None:
        """Keep these, and no others."""
        lines = []
        for program, found in programs:
            label, kernels, capability = program
            figures = {
                needs.name: (
                    *(needs.registers, needs.stack_bytes, needs.spill_bytes, needs.shared_bytes - kernel.shared_bytes),
                    *needs.remarks,
                )
                for kernel, needs in zip(kernels, found, strict=True)
            }
            what = "sm_{}{} ".format(*capability) + label
            lines.append(json.dumps({"program": digest(program), "for": what, "kernels": figures}) + "\n")
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("".join(sorted(lines, key=lambda line: json.loads(line)["for"])))


def digest(program: Program) -> str:
    """A name for all that can change a program's machine code, but for the compiler."""
    _, kernels, capability = program
    first = kernels[0]
    sources = f"-DCUPYFLASH_SOURCES=0x{kernels_cu.fingerprint()}", f"-I{kernels_cu.DIRECTORY}"  # the files are told apart here
    given = [option for option in options(first) if option not in sources]
    whole = f"sm_{architecture(first, capability)}", FLUSH_DENORMALS, given, _text(first.source), _headers()
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]


@cache
def _text(name: str) -> str:
    """A source with all that it includes of ours, each file once."""
    seen: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in seen and (kernels_cu.DIRECTORY / name).exists():
            seen[name] = kernels_cu.source(name)
            for included in _INCLUDE.findall(seen[name]):
                add(included)

    add(name)
    return repr(seen)


@cache
def _headers() -> str:
    def files() -> Iterator[Path]:
        for folder in header_directories():
            yield from sorted(Path(folder).glob("cuda_*16.h*"))

    return hashlib.sha256(b"".join(path.read_bytes() for path in files())).hexdigest()
