"""The obstacles before the first kernel has run: each in one sentence, with the way out."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cupyflash.launch.turns import Turns

PATIENCE = 2.0
"""Seconds that a terminal waits for a compiler before a message says why."""

FOLDER = "CUPY_CACHE_DIR"
"""CuPy's name for the folder of its kernel cache."""

_NO_DEVICE = 100  # cudaErrorNoDevice (driver_types.h)
_told = threading.Event()


def cupy_packages() -> list[str]:
    """The installed packages that bring a `cupy`, of which there may be one."""
    import importlib.metadata  # only an error needs it

    names = {str(each.metadata["Name"] or "").lower() for each in importlib.metadata.distributions()}
    return sorted(name for name in names if re.fullmatch(r"cupy(-cuda\d+x?|-rocm-[\d-]+)?", name))


def two_packages() -> str | None:
    """Advice for several CuPy packages, which overwrite each other's files; None if there are not several."""
    found = cupy_packages()
    if len(found) < 2:
        return None
    return (
        f"{' and '.join(found)} are both installed and overwrite each other's files: "
        f"pip uninstall {' '.join(found)}, then install one again, pip install 'cupyflash[cuda13]' or [cuda12]"
    )


def no_gpu(runtime: Any, error: Exception) -> str:
    """The reason why CUDA counts no devices: several CuPys, no driver, a driver older than CuPy's CUDA, or no device."""
    if several := two_packages():
        return several
    try:
        driver, needed = int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
    except (AttributeError, RuntimeError):
        return f"no GPU that CUDA can use: {error}"
    if not driver:
        return (
            "no NVIDIA driver was found: install one (nvidia-smi shows it; a container needs --gpus all), or stay without a GPU: "
            "NumPy arrays run on the simulated device"
        )
    if getattr(error, "status", None) != _NO_DEVICE and driver < needed:
        ours, theirs = (f"{version // 1000}.{version % 1000 // 10}" for version in (needed, driver))
        older = "pip install 'cupyflash[cuda12]' in place of [cuda13], or " if driver >= 12000 and needed >= 13000 else ""
        return f"the NVIDIA driver is for CUDA {theirs} and older, and this CuPy was built for CUDA {ours}: {older}update it"
    return f"the driver shows no GPU ({error}): nvidia-smi lists those there are, and CUDA_VISIBLE_DEVICES which of them count"


_importing = Turns()
# Why CuPy's kernels are kept as long as the process lives only
_not_kept: list[OSError] = []


def import_cupy() -> Any:
    """Import CuPy; ImportError if it is not installed.

    Its import makes the folder of its kernel cache. If that cannot be made, which would leave half of it imported, a folder that is
    removed with the process replaces it.
    """
    with _importing.lock:
        if "cupy" not in sys.modules and find_spec("cupy") is not None:
            before = os.environ.get(FOLDER)
            try:
                os.makedirs(cache_folder() if before is None else before, exist_ok=True)
            except OSError as error:
                _not_kept.append(error)
                os.environ[FOLDER] = tempfile.mkdtemp(prefix="cupyflash_")
                atexit.register(_remove, os.environ[FOLDER], os.getpid())
            try:
                import cupy
            finally:
                os.environ.pop(FOLDER, None)
                if before is not None:
                    os.environ[FOLDER] = before
    import cupy

    return cupy


def _remove(folder: str, process: int) -> None:
    if process == os.getpid():  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def cache_folder() -> Path:
    """The folder in which CuPy keeps kernels: its environment variable's, or its default."""
    return Path(os.environ.get(FOLDER) or os.path.expanduser("~/.cupy/kernel_cache"))


def say_what_is_not_kept() -> None:
    """Warn if CuPy's kernels are lost with the process."""
    for error in _not_kept:
        cache_is_unusable(cache_folder(), error)


def cache_is_unusable(folder: Path, error: OSError) -> None:
    """Warn, once a folder and reason, that kernels are kept in memory only."""
    _say_unusable(str(folder), error.strerror or str(error))


@cache
def _say_unusable(folder: str, why: str) -> None:
    warnings.warn(
        f"compiled kernels cannot be kept in {folder} ({why}), so each process compiles them anew: "
        f"set {FOLDER} to a folder that you may write",
        RuntimeWarning,
        stacklevel=3,
    )


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Say on stderr, once a process, that a terminal waits long for a compiler."""
    if _told.is_set() or not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(PATIENCE, _say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str) -> None:
    print(f"cupyflash compiles {what} for this GPU; the next time it is read from CuPy's kernel cache", file=sys.stderr, flush=True)
    _told.set()
