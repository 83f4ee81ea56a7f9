"""Numba's CUDA kernels without a GPU: a program's own `kernel[grid, block](arrays)` runs on the PTX machine.

    from cupyflash.sim.numba import simulated_numba

    with simulated_numba() as launches:
        axpy[4, 128](x, y, np.float32(2))  # NumPy arrays, or those of cuda.to_device and cuda.device_array
    launches[-1].findings

Numba compiles as always, which needs no GPU; needs `pip install 'cupyflash[numba]'`. This module itself does not import Numba.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cupyflash.sim.replaced import replaced

if TYPE_CHECKING:
    from cupyflash.sim.ptx import Launch, Suppression

__all__ = ["simulated_numba"]


@contextmanager
def simulated_numba(
    *,
    findings: str | None = None,
    arch: str | None = None,
    seed: int | None = None,
    races: bool | None = None,
    suppressions: str | os.PathLike[str] | Sequence[Suppression] | None = None,
) -> Iterator[list[Launch]]:
    """Runs Numba's CUDA kernels on the PTX machine in the `with` block; gives the list of the launches made there, in order.

    findings, arch, seed, races, suppressions: as for `ptx.simulation`. Kernels take NumPy arrays and numbers, tuples and records,
    and write arrays in place; findings have the lines of the Python file. `cuda.to_device`, `device_array` and their like give
    NumPy arrays with `copy_to_host`; streams and events have nothing to do; `forall` takes blocks of 128. Kernels with a signature
    have to be decorated in the block: Numba compiles them at once, for the device at hand.

    Not simulated: `link=`, cooperative grids, and what asks the driver itself. Raises ImportError without numba-cuda.
    """
    from cupyflash.sim.ptx import simulation

    try:
        from .dispatch import replacements
    except ImportError as error:
        raise ImportError(f"simulated_numba needs numba-cuda ({error}): pip install 'cupyflash[numba]'") from error

    how = simulation(findings=findings, arch=arch, seed=seed, races=races, suppressions=suppressions)
    with how as launches, replaced(replacements()):
        yield launches
