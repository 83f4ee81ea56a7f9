"""Runs a Python program whose Triton kernels run on the PTX machine:  python -m cupyflash.sim.triton program.py [ARGUMENTS]

CUPYFLASH_DEVICE names the simulated device.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from . import simulated_triton

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    with simulated_triton():
        runpy.run_path(sys.argv[0], run_name="__main__")
