"""This checkout, first on Python's path, so that it is what is timed: a script imports this before anything of cupyflash."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def environment() -> dict[str, str]:
    """Variables with which a new process finds it."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
