"""Machine code for an architecture's own instructions (sm_90a), which CuPy does not compile for: NVRTC to a cubin, kept on disk.

The cubins are in the folder of CuPy's kernel cache, and its environment variables apply to them: CUPY_CACHE_DIR,
CUPY_CACHE_IN_MEMORY, CUPY_CACHE_SAVE_CUDA_SOURCE, CUPY_DUMP_CUDA_SOURCE_ON_ERROR. A second file has the compiler's log and a
hash of everything: a damaged or foreign cubin is recognized by it and compiled again. Only the user's own files are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cupyflash.launch import first_use, own_files
from cupyflash.launch.nvrtc import CompileError, compile_to_cubin, compile_to_ptx, header_directories, remarks

# CuPy's switches: keep nothing on disk, store the source beside the cubin, print a source that fails.
IN_MEMORY, SAVE_SOURCE, DUMP = "CUPY_CACHE_IN_MEMORY", "CUPY_CACHE_SAVE_CUDA_SOURCE", "CUPY_DUMP_CUDA_SOURCE_ON_ERROR"


class Program(NamedTuple):
    """A program to compile: CUDA C and its name, NVRTC's options, which name the included sources, and an architecture ("90a")."""

    source: str
    name: str
    options: tuple[str, ...]
    architecture: str

    @property
    def every_option(self) -> tuple[str, ...]:
        return f"-arch=sm_{self.architecture}", *self.options

    @property
    def key(self) -> str:
        """A hash of everything that can change the machine code."""
        return hashlib.sha256(repr((*self, compiler(), header_directories())).encode()).hexdigest()[:40]


class CompiledCubin(NamedTuple):
    """Machine code, and the compiler's log with the report of ptxas."""

    code: bytes
    log: str


@cache
def compiler() -> str:
    """The version and build of NVRTC, as it writes them into the PTX of an empty program."""
    return compile_to_ptx("", (), "nothing.cu")


def compiled(program: Program) -> CompiledCubin:
    """Compile the program with NVRTC, without the disk cache. Raises `CompileError`."""
    try:
        return CompiledCubin(*compile_to_cubin(program.source, program.every_option, program.name))
    except CompileError as error:
        if asked(DUMP):
            lines = "\n".join(f"{number:4} {line}" for number, line in enumerate(program.source.split("\n"), 1))
            print(f"{error}\nOptions: {' '.join(program.every_option)}\nCUDA source:\n{lines}", file=sys.stderr)
        raise


def function(program: Program, name: str) -> tuple[Any, tuple[str, ...]]:
    """A kernel of a program, as a CuPy RawKernel on the current device, and the compiler's remarks on the program."""
    path = None if asked(IN_MEMORY) else first_use.cache_folder() / f"cupyflash_{program.key}.cubin"
    cubin = None if path is None else read(path)
    if cubin is None:
        cubin = compiled(program)
        if path is not None:
            write(path, cubin, program.source)
    # Load the bytes that were read, from a folder where nobody else may write. CuPy keeps a module by its path while the process
    # lives, so no path may be used again for other contents.
    with tempfile.TemporaryDirectory(prefix="cupyflash_") as folder:
        copy = Path(folder) / f"{program.key}.cubin"
        copy.write_bytes(cubin.code)
        return sys.modules["cupy"].RawModule(path=str(copy)).get_function(name), remarks(cubin.log)


def read(path: Path) -> CompiledCubin | None:
    """Read what `write` stored; None if there is no file, or not the one that this user wrote for that program."""
    try:
        told, code = json.loads(own_files.read(path.with_suffix(".json"))), own_files.read(path)
        cubin = CompiledCubin(code, str(told["log"]))
        return cubin if told["sha256"] == _digest(path, cubin) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _digest(path: Path, cubin: CompiledCubin) -> str:
    """A hash of a file's contents: the program's key, which is the file's name, the code and the log."""
    return hashlib.sha256(repr((path.stem, *cubin)).encode()).hexdigest()


def write(path: Path, cubin: CompiledCubin, source: str) -> None:
    """Store a cubin, its log and hash, and the source if CuPy keeps sources too; warn if that fails.

    Files appear whole. If several processes write the same file, the last one wins. Files that killed writers left are removed.
    """
    told = json.dumps({"sha256": _digest(path, cubin), "log": cubin.log})
    files = {path: cubin.code, path.with_suffix(".json"): told.encode()}
    if os.environ.get(SAVE_SOURCE):
        files[path.with_suffix(".cubin.cu")] = source.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for each, data in files.items():
            own_files.write(each, data)
        own_files.read(path)  # as the next process does: on some file systems nobody owns a file
        own_files.sweep(path.parent)
    except OSError as error:
        first_use.cache_is_unusable(path.parent, error)


def asked(switch: str) -> bool:
    """True if one of CuPy's switches is on, as CuPy reads it."""
    try:
        return int(os.environ.get(switch) or 0) == 1
    except ValueError:
        return False
