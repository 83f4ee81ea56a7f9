"""Builds: the stub library of a program's runtime, and programs from CUDA C++, by the compilers that there are.

The library has a stub for each function that the simulator answers, and for each other one of the runtime that the program
imports. It is made once for each set of names, in a folder of the user's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from cupyflash.sim import files
from cupyflash.sim.program.runtime import FIRST_NUMBER, function_names

NVCC_FLAGS = ("-cudart", "shared", "-no-compress", "-lineinfo")
"""Flags of nvcc with which a program runs here: the runtime as a library, PTX that can be read, lines of the source."""


class BuildError(Exception):
    """Raised when something is missing or does not compile; the text says what."""


def imported(program: Path) -> tuple[set[str], int]:
    """Returns the runtime functions whose names are in a program's file, and the version of the library that it asks for.

    Raises BuildError for a program that does not load the runtime library.
    """
    data = program.read_bytes()
    version = re.search(rb"\0libcudart\.so\.(\d+)\0", data)
    if version is None:
        raise BuildError(f"{program} does not load libcudart.so: link it with -cudart shared (nvcc's default is static)")
    names = {found.decode() for found in re.findall(rb"\0((?:__)?cuda[A-Z][A-Za-z0-9]+(?:_v\d+|_pt[sd][sz])?)(?=\0)", data)}
    return names, int(version[1])


@dataclass(frozen=True)
class StubLibrary:
    """The folder of a stub library: its functions in order, those that the program imports, the version of the runtime."""

    folder: Path
    names: list[str]
    imported: set[str]
    version: int


def library(program: Path) -> StubLibrary:
    """Returns the stub library for a program, made now if there is none. Raises BuildError."""
    wanted, version = imported(program)
    names = sorted({*function_names(), *wanted})
    source = resources.files("cupyflash.sim.program").joinpath("stubs.c").read_text(encoding="utf-8")
    key = hashlib.sha256("\n".join([source, str(version), *names]).encode()).hexdigest()[:20]
    folder = cache_folder() / f"runtime-{key}"
    soname = f"libcudart.so.{version}"
    if not (folder / soname).exists():
        folder.mkdir(parents=True, exist_ok=True)
        stubs, script = folder / "names.h", folder / "versions"
        files.write(stubs, "".join(f"FUNCTION({name}, {number})\n" for number, name in enumerate(names, FIRST_NUMBER)))
        files.write(script, f"{soname} {{ global: cuda*; __cuda*; local: *; }};\n")
        files.write(folder / "stubs.c", source)
        made = folder / f"{soname}.{os.getpid()}"
        run(
            compiler(),
            *("-shared", "-fPIC", "-O1", "-w", '-DNAMES="names.h"', "-o", str(made), str(folder / "stubs.c")),
            *(f"-Wl,-soname,{soname}", f"-Wl,--version-script,{script}", "-lpthread"),
        )
        made.replace(folder / soname)
    return StubLibrary(folder, names, wanted, version)


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupyflash"


def compiler() -> str:
    """Returns the host's C compiler. Raises BuildError if there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    raise BuildError("there is no C compiler (CC, cc, gcc, clang): install one, as gcc")


def nvcc() -> str:
    """Returns nvcc: that on the PATH, of the wheel nvidia-cuda-nvcc, or of a toolkit. Raises BuildError if there is none."""
    wheels = find_spec("nvidia")
    folders = [Path(one) for one in (wheels.submodule_search_locations or ())] if wheels else []
    others = (one for folder in (*folders, Path("/usr/local")) for one in sorted(folder.glob("cu*/bin/nvcc"), reverse=True))
    found = shutil.which("nvcc") or next(map(str, others), None)
    if found is None:
        raise BuildError(
            "there is no nvcc: pip install 'cupyflash[nvcc]' (320 MB), or a CUDA toolkit; a binary built elsewhere runs without it"
        )
    return found


def linking(compiler: str) -> tuple[str, ...]:
    """Returns nvcc's flag for a folder with libcudart.so, which the wheels call by its version only; none if its own has it."""
    for library in sorted(Path(compiler).resolve().parents[1].glob("lib/libcudart.so.*")):
        if not library.with_name("libcudart.so").exists():
            folder = cache_folder() / f"link-{hashlib.sha256(os.fsencode(library)).hexdigest()[:20]}"
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                (folder / "libcudart.so").symlink_to(library)
            return (f"-L{folder}",)
    return ()


def flags(architecture: str) -> tuple[str, ...]:
    """Returns nvcc's flags for a program of an architecture, as 80 or 90a."""
    return (*NVCC_FLAGS, f"-arch=compute_{architecture}", f"-code=compute_{architecture}")


def build(sources: Sequence[Path], into: Path, architecture: str, options: Sequence[str]) -> Path:
    """Returns the program of these sources, compiled by nvcc. Raises BuildError with the compiler's messages."""
    program = into / sources[0].stem
    compiler = nvcc()
    run(compiler, *flags(architecture), *linking(compiler), *options, "-o", str(program), *map(str, sources))
    return program


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command[:1])} failed:\n{done.stderr or done.stdout}".rstrip())
