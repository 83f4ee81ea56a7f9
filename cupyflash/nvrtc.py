"""CUDA C to PTX through NVRTC, which needs neither a GPU nor a driver."""

from __future__ import annotations

from collections.abc import Sequence


class CompileError(RuntimeError):
    """NVRTC refused the source. `log` is the compiler's own text."""

    def __init__(self, name: str, log: str):
        self.log = log
        super().__init__(f"{name} does not compile:\n{log}")


def header_directories() -> tuple[str, ...]:
    """Where the CUDA headers are (cuda_fp16.h is not in the CuPy wheel): those of the CUDA extra's own wheels."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError as error:
        raise ImportError(f"compiling CUDA C needs the CUDA headers ({error}): pip install 'cupyflash[sim]'") from error
    found = (find_nvidia_header_directory(library) for library in ("cudart", "cccl"))
    return tuple(path for path in found if path)


def compile_to_ptx(source: str, options: Sequence[str], name: str) -> str:
    """Compile CUDA C to PTX text.

    `options` are NVRTC's; without an architecture among them it is compute_80. Line information is always on, the
    language is C++17 unless the options say otherwise.
    Raises `CompileError` with NVRTC's log, ImportError where CuPy or NVRTC is missing.
    """
    lineinfo = () if {"-lineinfo", "--generate-line-info"} & set(options) else ("-lineinfo",)
    text, _ = _compile(source, (*options, *lineinfo), name, "getPTX")
    return text.decode().rstrip("\0")


def compile_to_cubin(source: str, options: Sequence[str], name: str) -> tuple[bytes, str]:
    """Compile CUDA C for an architecture among `options` (-arch=sm_90, say) to machine code, with ptxas' account of it.

    The account is the text of `ptxas -v`: registers, stack, spills and shared memory of each kernel.
    Raises as `compile_to_ptx` does.
    """
    return _compile(source, (*options, "--ptxas-options=-v"), name, "getCUBIN")


def _compile(source: str, options: Sequence[str], name: str, product: str) -> tuple[bytes, str]:
    """What NVRTC makes of a program, and its log; `product` is the binding's function that hands it over."""
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise ImportError(f"compiling CUDA C needs NVRTC ({error}): pip install 'cupyflash[sim]'") from error
    full = list(options)
    if not any(o.startswith(("-arch", "--gpu-architecture")) for o in full):
        full.append("-arch=compute_80")
    if not any(o.startswith(("-std", "--std")) for o in full):
        full.append("-std=c++17")
    full += [f"-I{path}" for path in header_directories()]
    program = nvrtc.createProgram(source, name, [], [])
    try:
        nvrtc.compileProgram(program, full)
        made, log = getattr(nvrtc, product)(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(name, nvrtc.getProgramLog(program) or str(error)) from error
    finally:
        nvrtc.destroyProgram(program)
    return made if isinstance(made, bytes) else str(made).encode(), log
