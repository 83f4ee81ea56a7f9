"""Files of a cache that only their user may have written, which appear whole."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# A file that is being written belongs to this user; it is this old only if its process was killed.
UNFINISHED, SECONDS = ("cupyflash_", ".tmp"), 3600.0


def read(path: Path) -> bytes:
    """Read a file that belongs to this user and that nobody else may write. OSError for any other file, and for links.

    Never waits on a pipe. Windows has no such files, users or flags.
    """
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with open(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        others = hasattr(os, "geteuid") and (found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        if others:
            raise PermissionError("files there are not this user's alone")
        return file.read()


def write(path: Path, data: bytes) -> None:
    """Write a file that appears whole. If several processes write it, the last one wins."""
    before, behind = UNFINISHED
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=before, suffix=behind)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def sweep(folder: Path) -> None:
    """Remove the files that killed writers left."""
    before, behind = UNFINISHED
    for left in folder.glob(f"{before}*{behind}"):
        with suppress(OSError):  # belongs to another user, or was just removed
            if time.time() - left.lstat().st_mtime > SECONDS:
                left.unlink()
