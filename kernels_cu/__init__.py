"""CUDA C sources, read as text; `cupyflash.launch.compiler` turns them into machine code."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent


@cache
def source(name: str) -> str:
    """The text of a kernel file such as "fa1_forward.cu"."""
    return (DIRECTORY / name).read_text(encoding="utf-8")


@cache
def fingerprint() -> str:
    """A hash of all sources here. NVRTC's options contain it, since CuPy's disk cache does not see included files."""
    digest = hashlib.sha256()
    for path in sorted(DIRECTORY.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
