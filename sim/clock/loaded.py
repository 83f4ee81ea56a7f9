"""A kernel of a file as a launch of machine code: CUDA C by NVRTC, PTX by ptxas, a cubin as it is."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cupyflash.device import Device
from cupyflash.launch.nvrtc import compile_with_ptx
from cupyflash.sim import files
from cupyflash.sim.ptx.parameters import bind
from cupyflash.sim.ptx.text.parser import parse
from cupyflash.sim.ptx.text.syntax import TYPES, Variable, find_kernel

from . import sass
from .execution import CodeLaunch, CubinKernel

NO_PTXAS = "no ptxas, which makes machine code of PTX: pip install nvidia-cuda-nvcc, or a CUDA toolkit on the PATH"


@dataclass(frozen=True)
class LoadedLaunch:
    """A launch of a kernel, the machine code that it is part of, and texts of source by name that are not files."""

    launch: CodeLaunch
    cubin: bytes
    sources: Mapping[str, str]


@dataclass(frozen=True)
class MachineCode:
    """Machine code for a device: `kernels` are its kernels' names, each with its parameters."""

    cubin: bytes
    kernels: Mapping[str, Sequence[Variable]]
    sources: Mapping[str, str] = field(default_factory=dict)

    def launch(
        self,
        kernel: str | None,
        shape: tuple[Sequence[int], Sequence[int]],
        args: Mapping[str, Any] | Sequence[Any],
        shared_bytes: int = 0,
        cluster: Sequence[int] = (1, 1, 1),
    ) -> LoadedLaunch:
        """Returns a launch; `shape`: its grid and block. ValueError for another kernel, TypeError for arguments that do not fit."""
        name = find_kernel(tuple(self.kernels), kernel)
        bound = bind(name, self.kernels[name], args, ())
        code = CubinKernel.of(self.cubin, name)
        return LoadedLaunch(CodeLaunch(code, *shape, bound, shared_bytes, None, cluster), self.cubin, self.sources)


def architecture(device: Device) -> str:
    """The architecture whose machine code a device runs, with its own instructions from 9.0 on."""
    major, minor = device.compute_capability
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def of_file(path: Path, device: Device, options: Sequence[str] = ()) -> MachineCode:
    """Reads a file: `.ptx` or `.cubin` by its name, anything else is CUDA C, compiled with `options`.

    Raises OSError, CompileError, PtxError; ValueError for a file that is not text; RuntimeError without the tools.
    """
    if path.suffix == ".cubin":
        return of_cubin(path.read_bytes())
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file") from error
    if path.suffix == ".ptx":
        return of_ptx(text, device)
    path = path.resolve()
    return of_source(text, device, (*options, f"-I{path.parent}"), str(path))


def of_source(cuda: str, device: Device, options: Sequence[str], name: str, expressions: Sequence[str] = ()) -> MachineCode:
    """Compiles CUDA C with NVRTC, with line information; `expressions`: C++ names of kernels that are templates."""
    kept = [each for each in options if not each.startswith(("-arch", "--gpu-architecture"))]
    lines = () if {"-lineinfo", "--generate-line-info"} & set(kept) else ("-lineinfo",)
    made = compile_with_ptx(cuda, (*kept, *lines, f"-arch=sm_{architecture(device)}"), name, expressions)
    program = parse(made.ptx)
    return MachineCode(made.code, {kernel: program.functions[kernel].params for kernel in program.kernels}, {name: cuda})


def of_ptx(text: str, device: Device) -> MachineCode:
    """Assembles PTX with ptxas; RuntimeError if there is none, or if it refuses the text."""
    program, tool = parse(text), sass.tool("ptxas")
    if tool is None:
        raise RuntimeError(NO_PTXAS)
    own = program.target.removeprefix("sm_")
    target = own if not own.isdigit() else architecture(device).rstrip("a")
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        files.write(source, text)
        done = subprocess.run(
            [tool, f"-arch=sm_{target}", "-lineinfo", str(source), "-o", str(made)], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"ptxas does not assemble this for sm_{target}: {(done.stderr + done.stdout).strip()}")
        return MachineCode(made.read_bytes(), {kernel: program.functions[kernel].params for kernel in program.kernels})


def of_cubin(cubin: bytes) -> MachineCode:
    """Reads machine code, which knows of a parameter only its place and size: 4 bytes take 2.0 as a float, 2 as a whole number."""
    kernels = {}
    for name in sass.read(cubin).kernels:
        kernels[name] = [
            Variable(f"param_{n}", "param", TYPES[f"b{8 * size}"], size, size)
            if size in (1, 2, 4, 8)
            else Variable(f"param_{n}", "param", TYPES["b8"], _alignment(at), size, is_array=True)
            for n, (at, size) in enumerate(sass.parameters(cubin, name))
        ]
    return MachineCode(cubin, kernels)


def _alignment(at: int) -> int:
    """Returns the alignment of a structure: at most 64 bytes, so that one at an offset lies there."""
    return min(at & -at or 8, 64)
