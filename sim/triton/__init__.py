"""Triton's kernels without a GPU: a program's own `kernel[grid](...)` runs on the PTX machine.

    from cupyflash.sim.triton import simulated_triton

    with simulated_triton("H100-SXM") as launches:
        add_kernel[(98,)](x, y, out, n, BLOCK=1024)  # tensors of PyTorch on the CPU, or NumPy arrays
    launches[-1].findings

Triton compiles as always, for the architecture of the simulated device; needs `pip install 'cupyflash[triton]'`. A program as it
stands runs by `CUPYFLASH_TRITON=1 python program.py`, or by `python -m cupyflash.sim.triton program.py`. This module itself imports
neither Triton nor PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from cupyflash.device import Device, find_device

if TYPE_CHECKING:
    from cupyflash.sim.ptx import Launch, Suppression

__all__ = ["simulated_triton"]

SWITCH = "CUPYFLASH_TRITON"
"""The variable of the environment that simulates Triton for a whole program."""


@contextmanager
def simulated_triton(
    device: str | Device | None = None,
    *,
    findings: str | None = None,
    seed: int | None = None,
    races: bool | None = None,
    suppressions: str | os.PathLike[str] | Sequence[Suppression] | None = None,
) -> Iterator[list[Launch]]:
    """Runs Triton's kernels on the PTX machine in the `with` block; gives the list of the launches made there, in order.

    device: a `Device` or a name ("H100-SXM"); None: that of `cupyflash.simulated_device` or CUPYFLASH_DEVICE, else an A100-40GB.
    findings, seed, races, suppressions: as for `ptx.simulation`; findings raise a `ptx.KernelFault` by default.

    Kernels take PyTorch's tensors on the CPU and NumPy arrays, which they write in place. If PyTorch is installed, programs that
    ask for the device "cuda" get CPU tensors (`devices`), and `torch.cuda` answers for the simulated device. Benchmarks
    (`triton.testing.do_bench`, autotuners) do not run kernels: they take the clock's prediction (`timing`).

    Raises ImportError without Triton, ValueError for an unknown device or wrong settings, RuntimeError if another device is
    simulated already.
    """
    from cupyflash.launch.simulated import current_simulation
    from cupyflash.sim.ptx import simulation

    if device is None:
        found = current_simulation().device
    else:
        found = device if isinstance(device, Device) else find_device("device", device)
    try:
        from .driver import replaced_driver
    except ImportError as error:
        if error.name != "triton":
            raise
        raise ImportError("simulated_triton needs Triton: pip install 'cupyflash[triton]'", name="triton") from error

    with ExitStack() as stack:
        launches = stack.enter_context(simulation(findings=findings, seed=seed, races=races, suppressions=suppressions))
        stack.enter_context(replaced_driver(found))
        yield launches
