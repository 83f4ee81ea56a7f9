"""The programs that the gate found clean, kept from one run to the next in `.ci/accounts/`, a file for each version of NVRTC.

A line is an architecture's programs of one source: of each a digest, and the registers of its kernels. The digest is of all that
the machine code depends on: the text without comments, the constants and the fields of the struct that it names, the fields'
places, options, architecture, CUDA's headers for half types. So a change compiles what it touches: a field behind the others none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cupyflash import kernels_cu
from cupyflash.launch import nvrtc
from cupyflash.launch.compiler import FLUSH_DENORMALS, architecture, options
from cupyflash.schedules import Kernel

FOLDER = Path(__file__).parent / "accounts"
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')|//[^\n]*|/\*.*?\*/|\\\n', re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
Registers = tuple[int, ...]
"""The figures of each kernel of a program."""


class Program(NamedTuple):
    """The kernels of one compilation, and a compute capability."""

    kernels: tuple[Kernel, ...]
    capability: tuple[int, int]

    @property
    def group(self) -> str:
        return "sm_{}{} ".format(*self.capability) + self.kernels[0].source


class Accounts:
    """The clean programs of one version of NVRTC."""

    def __init__(self, version: tuple[int, int], folder: Path = FOLDER) -> None:
        self.path = folder / "nvrtc_{}.{}.txt".format(*version)
        self.known: dict[tuple[str, str], Registers] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            group, _, programs = line.partition(": ")
            for each in programs.split():
                digest, *registers = re.split("[=/]", each)
                self.known[group, digest] = tuple(map(int, registers))

    def find(self, program: Program) -> Registers | None:
        """The registers of a program's kernels, None where it has not been found clean as it is now."""
        return self.known.get((program.group, digest(program)))

    def write(self, clean: Iterable[tuple[Program, Registers]]) -> None:
        """Keep these, and no others."""
        groups: dict[str, set[str]] = {}
        for program, registers in clean:
            groups.setdefault(program.group, set()).add(f"{digest(program)}={'/'.join(map(str, registers))}")
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("".join(f"{group}: {' '.join(sorted(groups[group]))}\n" for group in sorted(groups)))


def digest(program: Program) -> str:
    """A name for all that can change a program's machine code, but for the compiler."""
    first, names = program.kernels[0], [kernel.name for kernel in program.kernels]
    whole = f"sm_{architecture(first, program.capability)}", FLUSH_DENORMALS, names, given(first), _text(first.source), _headers()
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:8]


def given(kernel: Kernel) -> tuple[Any, ...]:
    """The part of a kernel's options that its text names: language, constants, fields of the struct and their places."""
    language = [option for option in options(kernel) if not option.startswith(("-D", "-I"))]
    constants, named, reached = dict(kernel.constants), {}, set(_names(kernel.source))
    while found := {name: value for name, value in constants.items() if name in reached and name not in named}:
        named |= found
        reached.update(*(_NAME.findall(str(value)) for value in found.values()))  # of a score function's lines, say
    places = kernel.params.dtype.fields or {}
    fields = [(each.declaration, places[each.name][1]) for each in kernel.params.fields if each.name in reached]
    return *language, *sorted(named.items()), *fields


@cache
def _names(source: str) -> frozenset[str]:
    return frozenset(_NAME.findall(_text(source)))


@cache
def _text(name: str) -> str:
    """A source with all that it includes of ours, each file once, without what a compiler passes over."""
    seen: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in seen and (kernels_cu.DIRECTORY / name).exists():
            seen[name] = _without_comments(kernels_cu.source(name))
            for included in _INCLUDE.findall(seen[name]):
                add(included)

    add(name)
    return "\n".join(seen.values())


def _without_comments(text: str) -> str:
    lines = (" ".join(line.split()) for line in _COMMENT.sub(lambda found: found[1] or " ", text).splitlines())
    return "".join(f"\n{line}\n" if line.startswith("#") else f"{line} " for line in lines if line)


@cache
def _headers() -> str:
    def files() -> Iterator[Path]:
        for folder in nvrtc.header_directories():  # of another compiler, too
            yield from sorted(Path(folder).glob("cuda_*16.h*"))

    return hashlib.sha256(b"".join(path.read_bytes() for path in files())).hexdigest()
