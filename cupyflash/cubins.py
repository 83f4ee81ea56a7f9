"""Machine code for an architecture's own instructions (sm_90a), which CuPy does not compile for: NVRTC to a cubin, kept on disk.

The cubins lie in the folder of CuPy's kernel cache, and its environment variables hold for them: CUPY_CACHE_DIR,
CUPY_CACHE_IN_MEMORY, CUPY_CACHE_SAVE_CUDA_SOURCE, CUPY_DUMP_CUDA_SOURCE_ON_ERROR. Beside each lies a file that tells its hash, by
which a damaged one is known and compiled again, and the compiler's log.
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

from cupyflash import first_use
from cupyflash.nvrtc import CompileError, compile_to_cubin, compile_to_ptx, header_directories, remarks

# CuPy's switches: for keeping nothing on disk, for another folder, for the source beside the cubin, for a source that fails.
IN_MEMORY, FOLDER, SAVE_SOURCE, DUMP = (
    "CUPY_CACHE_IN_MEMORY",
    "CUPY_CACHE_DIR",
    "CUPY_CACHE_SAVE_CUDA_SOURCE",
    "CUPY_DUMP_CUDA_SOURCE_ON_ERROR",
)
DEFAULT_FOLDER = "~/.cupy/kernel_cache"


class Program(NamedTuple):
    """What is compiled: CUDA C of a name, NVRTC's options, which say the sources that it includes, and an architecture ("90a")."""

    source: str
    name: str
    options: tuple[str, ...]
    architecture: str

    @property
    def every_option(self) -> tuple[str, ...]:
        return f"-arch=sm_{self.architecture}", *self.options

    @property
    def key(self) -> str:
        """A name for all that can change the machine code."""
        return hashlib.sha256(repr((*self, compiler(), header_directories())).encode()).hexdigest()[:40]


class Cubin(NamedTuple):
    """Machine code, and the compiler's log with ptxas' account."""

    code: bytes
    log: str


@cache
def compiler() -> str:
    """Which NVRTC this is, to its build: what it says of itself in the PTX of nothing."""
    return compile_to_ptx("", (), "nothing.cu")


def compiled(program: Program) -> Cubin:
    """The program's machine code by NVRTC, whatever lies on disk. Raises `CompileError`."""
    try:
        return Cubin(*compile_to_cubin(program.source, program.every_option, program.name))
    except CompileError as error:
        if _asked(DUMP):
            lines = "\n".join(f"{number:4} {line}" for number, line in enumerate(program.source.split("\n"), 1))
            print(f"{error}\nOptions: {' '.join(program.every_option)}\nCUDA source:\n{lines}", file=sys.stderr)
        raise


def function(program: Program, name: str) -> tuple[Any, tuple[str, ...]]:
    """A kernel of a program, as a CuPy RawKernel on the current device, and the compiler's remarks on the program."""
    path = None if _asked(IN_MEMORY) else folder() / f"cupyflash_{program.key}.cubin"
    cubin = None if path is None else read(path)
    if cubin is None:
        cubin = compiled(program)
        if path is not None and not write(path, cubin, program.source):
            path = None
    return _function(name, cubin.code, path, program), remarks(cubin.log)


def folder() -> Path:
    """That of CuPy's kernel cache."""
    return Path(os.environ.get(FOLDER) or os.path.expanduser(DEFAULT_FOLDER))


def read(path: Path) -> Cubin | None:
    """What `write` put there; None where nothing is, or something else than was written."""
    try:
        told, code = json.loads(path.with_suffix(".json").read_bytes()), path.read_bytes()
        good = hashlib.sha256(code).hexdigest() == told["sha256"]
        return Cubin(code, str(told["log"])) if good else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: Path, cubin: Cubin, source: str) -> bool:
    """Put a cubin there, what tells of it beside, and the source where CuPy's is kept too; False where that cannot be done.

    Files appear whole. Where others write the same at the same time, the last ones stay.
    """
    told = json.dumps({"sha256": hashlib.sha256(cubin.code).hexdigest(), "log": cubin.log})
    files = {path: cubin.code, path.with_suffix(".json"): told.encode()}
    if os.environ.get(SAVE_SOURCE):
        files[path.with_suffix(".cubin.cu")] = source.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for each, data in files.items():
            _put(each, data)
    except OSError as error:
        first_use.cache_is_unusable(str(path.parent), str(error))
        return False
    return True


def _put(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="cupyflash_", suffix=".tmp", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise


def _function(name: str, code: bytes, path: Path | None, program: Program) -> Any:
    """A kernel of machine code that lies at a path, or nowhere."""
    load = sys.modules["cupy"].RawModule
    if path is not None:
        try:
            return load(path=str(path)).get_function(name)
        except RuntimeError:
            if path.exists():
                raise  # the driver refuses it; but somebody else may empty the folder at any time
    # CuPy keeps a module by its path for as long as the process lives: no path may come back with other contents.
    with tempfile.TemporaryDirectory(prefix="cupyflash_") as folder:
        copy = Path(folder) / f"{program.key}.cubin"
        copy.write_bytes(code)
        return load(path=str(copy)).get_function(name)


def _asked(switch: str) -> bool:
    """Whether one of CuPy's switches is on, as CuPy reads it."""
    try:
        return int(os.environ.get(switch) or 0) == 1
    except ValueError:
        return False
