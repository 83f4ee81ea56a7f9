"""Another NVRTC than the one CuPy is built for, through its C interface: CuPy's binding loads one version only.

pip install --no-deps --target FOLDER nvidia-cuda-{nvrtc,runtime,cccl}-cu12==12.9.*
python .ci/compile_gate.py --nvrtc FOLDER
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class NVRTCError(RuntimeError):
    """NVRTC refused."""


class OtherNvrtc:
    """The functions of CuPy's binding that cupyflash calls, of the library of a folder of wheels."""

    NVRTCError = NVRTCError

    def __init__(self, folder: Path) -> None:
        found = sorted(path for path in folder.rglob("libnvrtc.so*") if path.is_file())
        if not found:
            raise FileNotFoundError(f"no libnvrtc.so in {folder}")
        self._library = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_LOCAL)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise NVRTCError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def createProgram(self, source: str, name: str, headers: Sequence[bytes], include_names: Sequence[bytes]) -> ctypes.c_void_p:
        program = ctypes.c_void_p()
        texts, names = ((ctypes.c_char_p * len(each))(*each) for each in (headers, include_names))
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names)
        return program

    def addNameExpression(self, program: ctypes.c_void_p, name: str) -> None:
        self._call("nvrtcAddNameExpression", program, name.encode())

    def compileProgram(self, program: ctypes.c_void_p, options: Sequence[str]) -> None:
        given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        self._call("nvrtcCompileProgram", program, len(options), given)

    def _told(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, room)
        return room.raw

    def getPTX(self, program: ctypes.c_void_p) -> bytes:
        return self._told("PTX", program)

    def getCUBIN(self, program: ctypes.c_void_p) -> bytes:
        return self._told("CUBIN", program)

    def getProgramLog(self, program: ctypes.c_void_p) -> str:
        return self._told("ProgramLog", program).rstrip(b"\0").decode()

    def destroyProgram(self, program: ctypes.c_void_p) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(program))


def use(folder: Path) -> tuple[int, int]:
    """Compile with the folder's NVRTC and headers in this process from now on; return the version."""
    import cupy.cuda

    from cupyflash.launch import nvrtc

    includes = tuple(str(path.parent) for name in ("cuda_fp16.h", "cuda/std/cstdint") for path in sorted(folder.rglob(name))[:1])
    roots = tuple(each.removesuffix("/cuda/std") for each in includes)
    other = OtherNvrtc(folder)
    cupy.cuda.nvrtc = other
    nvrtc.header_directories = lambda: roots  # type: ignore[assignment]
    return other.getVersion()
