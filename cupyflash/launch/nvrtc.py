"""CUDA C to PTX through NVRTC, which needs neither a GPU nor a driver."""

from __future__ import annotations

import glob
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from cupyflash.launch import first_use

DEBUG = {"-G", "--device-debug"}
INSTALL = "pip install 'cupyflash[sim]', or a CUDA toolkit of CuPy's CUDA version (CUDA_PATH says where, if not in its usual place)"


class CompileError(RuntimeError):
    """NVRTC refused the source. `log` is the compiler's own text, `advice` says what to do about it if we know."""

    def __init__(self, name: str, log: str, advice: str = ""):
        self.name, self.log, self.advice = name, log, advice
        super().__init__("\n".join(filter(None, (f"{name} does not compile:\n{log}", advice))))

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return CompileError, (self.name, self.log, self.advice)  # from one process to another


@cache
def header_directories() -> tuple[str, ...]:
    """Find the CUDA headers, which the CuPy wheel lacks: the directories for -I, none if they are not found.

    cuda-pathfinder, which CuPy 14 uses too, knows the CUDA extra's wheels, conda, CUDA_PATH and the system's toolkit.
    Without it: the places of earlier CuPy, which are the wheels, CUDA_PATH, the toolkit of the nvcc on the PATH, /usr/local/cuda.
    """
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        found = []
    else:
        found = [find_nvidia_header_directory(library) for library in ("cudart", "cccl")]
    if not any(found):
        found = [next((path for path in _usual_places() if os.path.isfile(os.path.join(path, "cuda_fp16.h"))), None)]
    return tuple(path for path in found if path)


def _usual_places() -> Iterator[str]:
    """The usual directories of a CUDA toolkit's headers."""
    wheels = find_spec("nvidia")
    for root in (wheels.submodule_search_locations or ()) if wheels else ():
        yield from sorted(glob.glob(os.path.join(root, "cu[0-9]*", "include")), reverse=True)
        yield os.path.join(root, "cuda_runtime", "include")
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    nvcc = shutil.which("nvcc")
    roots += [os.path.dirname(os.path.dirname(os.path.realpath(nvcc))) if nvcc else None, "/usr/local/cuda"]
    yield from (os.path.join(root, "include") for root in roots if root)


def architecture(text: str) -> str:
    """NVRTC's -arch for 80, 8.0, sm_80, compute_80, 90a and the like. Raises ValueError."""
    match = re.fullmatch(r"(?:sm_|compute_)?(\d+)\.?(\d)([a-z]?)", text.strip())
    if not match:
        raise ValueError(f"architecture {text!r} is unknown: write compute_80, sm_90 or 8.0, say")
    return f"compute_{match[1]}{match[2]}{match[3]}"


class Compiled(NamedTuple):
    """NVRTC's result: PTX or machine code, its log, the PTX names of the requested C++ names, and the PTX of machine code."""

    code: bytes
    log: str
    lowered: dict[str, str]
    ptx: str = ""

    @property
    def text(self) -> str:
        return self.code.decode().rstrip("\0")


def compile_to_ptx(source: str, options: Sequence[str], name: str) -> str:
    """Compile CUDA C to PTX text.

    `options` are NVRTC's; the default architecture is compute_80, the default language C++17. Line information is always on.
    Raises `CompileError` with NVRTC's log, ImportError where CuPy, NVRTC or a CUDA header is missing.
    """
    return compile_named(source, options, name, ()).text


def compile_named(source: str, options: Sequence[str], name: str, expressions: Sequence[str]) -> Compiled:
    """Compile CUDA C to PTX as `compile_to_ptx`, with the kernels that C++ name expressions ("twice<float>") instantiate."""
    lineinfo = () if {"-lineinfo", "--generate-line-info"} & set(options) else ("-lineinfo",)
    return _compile(source, (*options, *lineinfo), name, "getPTX", expressions)


def compile_to_cubin(source: str, options: Sequence[str], name: str, expressions: Sequence[str] = ()) -> tuple[bytes, str]:
    """Compile CUDA C for an architecture among `options` (such as -arch=sm_90) to machine code, with the report of ptxas.

    The report is the text of `ptxas -v`: registers, stack, spills and shared memory of each kernel.
    Raises as `compile_to_ptx` does.
    """
    made = compile_with_ptx(source, options, name, expressions)
    return made.code, made.log


def compile_with_ptx(source: str, options: Sequence[str], name: str, expressions: Sequence[str] = ()) -> Compiled:
    """Compile CUDA C to machine code as `compile_to_cubin`, and keep the PTX that it was made of."""
    made = _compile(source, (*options, "--ptxas-options=-v"), name, "getCUBIN", expressions)
    return made._replace(code=whole(made.code))


def whole(cubin: bytes) -> bytes:
    """Restore the last byte of machine code: a zero of the ELF file's last table, which CuPy's binding takes for the end of a text.

    CuPy loads from memory, where a zero follows anyway; a file would lack it.
    """
    # ELF-64's header: where the tables of segments and of sections begin; how long an entry is, and how many each has.
    tables, entries = struct.unpack_from("<QQ", cubin, 32), struct.unpack_from("<HHHH", cubin, 54)
    end = max(table + length * count for table, length, count in zip(tables, entries[::2], entries[1::2], strict=True))
    return cubin.ljust(end, b"\0") if end == len(cubin) + 1 else cubin


def remarks(log: str) -> tuple[str, ...]:
    """The lines of ptxas' report about wgmma: products that it makes wait for each other (C7510 to C7519), which costs most of
    their speed."""
    return tuple(line.strip() for line in log.splitlines() if re.search(r"\(C75\d\d\)", line))


def _compile(source: str, options: Sequence[str], name: str, product: str, expressions: Sequence[str] = ()) -> Compiled:
    """Run NVRTC; `product` is the binding's function that returns the result.

    For debugging in a process of its own: after that, NVRTC (seen with 13.5) makes other code of all other programs, too.
    """
    if not DEBUG & set(options):
        return _compile_here(source, options, name, product, expressions)
    told = pickle.dumps((source, tuple(options), name, product, tuple(expressions)))
    command = [sys.executable, "-c", f"from {__name__} import _answer; _answer()"]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, input=told, stdout=subprocess.PIPE, env=os.environ | path)
    if done.returncode:
        raise RuntimeError(f"the process that compiles {name} ended with {done.returncode}")
    result: Compiled | Exception = pickle.loads(done.stdout)
    if isinstance(result, Exception):
        raise result
    return result


def _answer() -> None:
    """Compile what stdin says, and write the result or the exception to stdout."""
    try:
        found: Compiled | Exception = _compile_here(*pickle.load(sys.stdin.buffer))
    except (CompileError, ImportError) as error:
        found = error
    sys.stdout.buffer.write(pickle.dumps(found))


def _compile_here(source: str, options: Sequence[str], name: str, product: str, expressions: Sequence[str]) -> Compiled:
    try:
        first_use.import_cupy()
        from cupy.cuda import nvrtc

        from cupyflash.launch import standard_headers
    except ImportError as error:
        raise ImportError(f"compiling CUDA C needs NVRTC ({error}): {INSTALL}") from error
    full = list(options)
    if not any(o.startswith(("-arch", "--gpu-architecture")) for o in full):
        full.append("-arch=compute_80")
    if not any(o.startswith(("-std", "--std")) for o in full):
        full.append("-std=c++17")
    directories = header_directories()
    full += [f"-I{path}" for path in directories]
    try:
        program = nvrtc.createProgram(source, name, *standard_headers.for_nvrtc())
    except (ImportError, RuntimeError) as error:  # the first call loads the library
        raise ImportError(f"compiling CUDA C needs NVRTC ({' '.join(str(error).split())}): {INSTALL}") from error
    if nvrtc.getVersion() < (13, 0):
        full.append("-default-device")  # takes a generic lambda within a function of the device for one of the host, else
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        nvrtc.compileProgram(program, full)
        made, log = getattr(nvrtc, product)(program), nvrtc.getProgramLog(program)
        lowered = {expression: nvrtc.getLoweredName(program, expression) for expression in expressions}
        ptx = nvrtc.getPTX(program) if product == "getCUBIN" else ""
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program) or str(error)
        if not directories and "could not open source file" in log:
            raise ImportError(f"compiling CUDA C needs the CUDA headers ({log.strip().splitlines()[0]}): {INSTALL}") from error
        advice = standard_headers.advice(log, _usual_places(), shutil.which("nvcc") is not None)
        raise CompileError(name, log, advice) from error
    finally:
        nvrtc.destroyProgram(program)
    text = ptx.decode() if isinstance(ptx, bytes) else str(ptx)
    return Compiled(made if isinstance(made, bytes) else str(made).encode(), log, lowered, text.rstrip("\0"))
