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

from cupyflash.launch.standard_headers import advice
from cupyflash.sim import files
from cupyflash.sim.program.runtime import FIRST_NUMBER, function_names

NVCC_FLAGS = ("-cudart", "shared", "-no-compress", "-lineinfo", "-g")
"""Flags of nvcc with which a program runs here: the runtime as a library, PTX that can be read, lines of all code."""


LIBRARIES = {"cudart": ("cuda", "__cuda"), "cublas": ("cublas",), "cublasLt": ("cublasLt",)}
"""The libraries whose place the stub library takes, with how the names of their functions begin."""


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
    names = re.findall(rb"\0((?:__cuda|cuda|cublas)[A-Z][A-Za-z0-9]+(?:_v\d+|_pt[sd][sz])?)(?=\0)", data)
    return {name.decode() for name in names}, int(version[1])


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
    return StubLibrary(stubs(names, version), names, wanted, version)


def stubs(names: Sequence[str], version: int) -> Path:
    """Returns the folder with the stub library of these functions: one file, by the names of all libraries. Raises BuildError."""
    source = resources.files("cupyflash.sim.program").joinpath("stubs.c").read_text(encoding="utf-8")
    key = hashlib.sha256("\n".join([source, str(version), *names]).encode()).hexdigest()[:20]
    folder = cache_folder() / f"runtime-{key}"
    sonames = {library: f"lib{library}.so.{version}" for library in LIBRARIES}
    made = folder / sonames["cudart"]
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        listed, script = folder / "names.h", folder / "versions"
        files.write(listed, "".join(f"FUNCTION({name}, {number})\n" for number, name in enumerate(names, FIRST_NUMBER)))
        own = {library: "".join(f" {name};" for name in names if library_of(name) == library) for library in LIBRARIES}
        versions = [f"{sonames[library]} {{ global:{ours} }};\n" for library, ours in own.items() if ours]
        files.write(script, "".join([*versions, "LOCAL { local: *; };\n"]))
        files.write(folder / "stubs.c", source)
        for library in ("cublas", "cublasLt"):
            with contextlib.suppress(FileExistsError):
                (folder / sonames[library]).symlink_to(made.name)
        part = folder / f"{made.name}.{os.getpid()}"
        run(
            cc(),
            *("-shared", "-fPIC", "-O1", "-w", '-DNAMES="names.h"', "-o", str(part), str(folder / "stubs.c")),
            *(f"-Wl,-soname,{made.name}", f"-Wl,--version-script,{script}", "-lpthread"),
        )
        part.replace(made)
    return folder


def library_of(function: str) -> str:
    """Returns the library that has a function, by the longest beginning of its name."""
    return max((len(begin), library) for library, begins in LIBRARIES.items() for begin in begins if function.startswith(begin))[1]


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupyflash"


def cc() -> str:
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


def linking(compiler: str, options: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns nvcc's flags for the folders of libraries that it does not find: libcudart.so, which the wheels call by its version
    only, and cuBLAS's that the options name, without which a toolkit can be. Raises BuildError."""
    root = Path(compiler).resolve().parents[1]
    runtimes = sorted(root.glob("lib*/libcudart.so.*"))
    found = [linked(one) for one in runtimes if not one.with_name("libcudart.so").exists()][:1]
    version = next((int(one.suffix[1:]) for one in runtimes if one.suffix[1:].isdigit()), 13)
    theirs = [Path(option[2:]) for option in options if option.startswith("-L") and option != "-L"]
    for library in ("cublas", "cublasLt"):
        there = [*root.glob(f"lib*/lib{library}.so"), *(one for folder in theirs for one in folder.glob(f"lib{library}.so"))]
        if f"-l{library}" in options and not there:
            found.append(link_stub(library, version))
    return tuple(f"-L{folder}" for folder in found)


def linked(library: Path) -> Path:
    """Returns a folder in which a library that is called by its version has its plain name."""
    folder = cache_folder() / f"link-{hashlib.sha256(os.fsencode(library)).hexdigest()[:20]}"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / library.stem).symlink_to(library)
    return folder


def link_stub(library: str, version: int) -> Path:
    """Returns a folder with a library to link with, whose functions are those that are simulated. Raises BuildError."""
    names = [name for name in function_names() if library_of(name) == library]
    source = "".join(f"void {name}(void) {{}}\n" for name in names)
    soname = f"lib{library}.so.{version}"
    folder = cache_folder() / f"link-{hashlib.sha256(f'{soname} {source}'.encode()).hexdigest()[:20]}"
    made, script = folder / f"lib{library}.so", folder / "versions"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / "names.c", source)
        files.write(script, f"{soname} {{ global: cublas*; }};\n")
        part = folder / f"{made.name}.{os.getpid()}"
        versions = f"-Wl,--version-script,{script}"
        run(cc(), "-shared", "-fPIC", "-w", "-o", str(part), str(folder / "names.c"), f"-Wl,-soname,{soname}", versions)
        part.replace(made)
    return folder


def flags(architecture: str) -> tuple[str, ...]:
    """Returns nvcc's flags for a program of an architecture, as 80 or 90a."""
    return (*NVCC_FLAGS, f"-arch=compute_{architecture}", f"-code=compute_{architecture}")


def build(sources: Sequence[Path], into: Path, architecture: str, options: Sequence[str]) -> Path:
    """Returns the program of these sources, compiled by nvcc. Raises BuildError with the compiler's messages."""
    program = into / sources[0].stem
    compiler = nvcc()
    run(compiler, *flags(architecture), *linking(compiler, options), *options, "-o", str(program), *map(str, sources))
    return program


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        log = done.stderr or done.stdout
        raise BuildError("\n".join(filter(None, (f"{command[0]} failed:", log.rstrip(), advice(log)))))
