"""This checkout, first on Python's path, so that it is what is timed: a script imports this before anything of cupyflash."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def environment(*folders: Path) -> dict[str, str]:
    """Variables with which a new process finds it, and modules of further folders."""
    path = os.pathsep.join(filter(None, [*map(str, (ROOT, *folders)), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path}
