"""Writes reports: a file is whole, or as it was before."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(path: Path, data: bytes | str) -> None:
    """Write a file, texts as UTF-8. OSError, which names it, where that fails; what was there is then there still."""
    content = data.encode() if isinstance(data, str) else data
    target = path.resolve()
    if target.exists() and not target.is_file():  # a pipe, a terminal
        target.write_bytes(content)
        return
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
        if target.exists():
            shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def save(figure: Figure, path: Path) -> None:
    """Write a picture, of the kind that the file's name ends in. ValueError for a kind that matplotlib does not write."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix[1:] or None)
    write(path, drawn.getvalue())
