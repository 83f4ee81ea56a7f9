"""Programs compiled once a run: the workers of a test run share what NVRTC made, in a folder that lasts as long as the run."""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path

from cupyflash.launch import nvrtc

_compile = nvrtc._compile  # as the library has it


# Where they are, for processes that tests start
shared: list[Path] = []


def share(folder: Path) -> None:
    """Read programs from the folder from now on, if any process with the same folder has compiled them."""
    shared[:] = [folder]

    def compile_once(source: str, options: Sequence[str], name: str, product: str, *names: Sequence[str]) -> nvrtc.Compiled:
        path = folder / key(source, options, name, product, *names)
        with open(path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # who else wants this program waits for it
            file.seek(0)
            known = file.read()
            if known:
                return pickle.loads(known)  # type: ignore[no-any-return]
            made = _compile(source, options, name, product, *names)
            file.write(pickle.dumps(made))
        return made

    nvrtc._compile = compile_once


def key(source: str, options: Sequence[str], name: str, product: str, *names: Sequence[str]) -> str:
    """A name for all that can change what comes out: also the compiler's version, and what the source may include."""
    try:
        from cupy.cuda import nvrtc as binding
    except ImportError:
        version = None
    else:
        version = binding.getVersion()
    folders = [Path(option.removeprefix("-I")) for option in options if option.startswith("-I")]
    included = [(str(path), path.read_bytes()) for folder in folders for path in sorted(folder.glob("*.*h"))]
    return hashlib.sha256(repr((source, tuple(options), name, product, names, version, included)).encode()).hexdigest()
