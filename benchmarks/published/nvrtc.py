"""Cubins by NVRTC of another version, whose wheels are in a folder: by the compiler that a ladder's file names.

pip install --no-deps --target FOLDER nvidia-cuda-{nvrtc,runtime}-cu12==12.2.*

NVRTC takes device code alone: functions of the host, and templates made for it, are left out of a file; its headers are empty.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".ci"))

from other_nvrtc import NVRTCError, OtherNvrtc

HOST = (
    *("algorithm", "cassert", "chrono", "cmath", "cstdint", "cstdio", "cstdlib", "fstream", "functional", "iomanip", "iostream"),
    *("random", "string", "vector", "assert.h", "float.h", "math.h", "stdint.h", "stdio.h", "stdlib.h", "time.h", "cublas_v2.h"),
    *("cuda.h", "cuda_runtime.h", "cuda_pipeline.h", "mma.h", "cub/cub.cuh", "torch/extension.h"),
)
"""Headers that a file includes and none of its kernels needs, or that NVRTC has by itself."""
TYPES = "\n".join(
    f"typedef {signed} {name} int{bits}_t; typedef unsigned {name} uint{bits}_t; "
    for bits, name, signed in ((8, "char", "signed"), (16, "short", ""), (32, "int", ""), (64, "long long", ""))
)


def pieces(text: str) -> Iterator[str]:
    """Yields a file's lines for the preprocessor and its declarations and definitions, one after another, without comments."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    begin, depth, at = 0, 0, 0
    while at < len(text):
        directive = re.compile(r"[ \t]*#(?:\\\n|[^\n])*\n?").match(text, at)
        if directive and not depth and not text[begin:at].strip():
            yield directive[0]
            begin = at = directive.end()
            continue
        depth += (text[at] in "({") - (text[at] in ")}")
        at += 1
        if not depth and (text[at - 1] == ";" or (text[at - 1] == "}" and not re.match(r"\s*[;,{)]", text[at:]))):
            yield text[begin:at]
            begin = at
    yield text[begin:]


def device_code(text: str) -> str:
    """Returns a file without functions of the host, and without templates that are made for it."""
    return "".join(each for each in pieces(text) if not of_host(each))


def of_host(piece: str) -> bool:
    head, _, body = piece.partition("{")
    function = body and "(" in head and not re.search(r"#|__(global|device)__|\b(constexpr|struct|namespace)\b", head)
    return bool(function) or "<<<" in body or bool(re.match(r"\s*template\s+(?!<)", piece))


def build(source: Path, target: Path, options: Sequence[str], kernels: Sequence[str], wheels: Path) -> str:
    """Compiles the kernels of a file; returns the compiler's complaint, "" if it had none."""
    compiler = OtherNvrtc(wheels)
    program = compiler.createProgram(f"{TYPES}\n{device_code(source.read_text())}", source.name, [], [])
    for kernel in sorted(set(kernels)):
        compiler.addNameExpression(program, kernel)
    with tempfile.TemporaryDirectory() as place:
        for name in HOST:
            (Path(place) / name).parent.mkdir(exist_ok=True)
            (Path(place) / name).write_text("")
        includes = [place, *(str(each) for each in sorted(wheels.rglob("include")))]
        try:
            compiler.compileProgram(program, ["-default-device", *(f"-I{each}" for each in includes), *options])
        except NVRTCError:
            return compiler.getProgramLog(program)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(compiler.getCUBIN(program))
    return ""
