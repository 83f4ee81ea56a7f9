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
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cupyflash.device import Device, find_device

if TYPE_CHECKING:
    from cupyflash.sim.ptx import Launch, Suppression

__all__ = ["simulated_triton"]

BENCHMARK_SECONDS = 60.0

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
    fail_on: str = "error",
    benchmark_seconds: float = BENCHMARK_SECONDS,
) -> Iterator[list[Launch]]:
    """Runs Triton's kernels on the PTX machine in the `with` block; gives the list of the launches made there, in order.

    device: a `Device` or a name ("H100-SXM"); None: that of `cupyflash.simulated_device` or CUPYFLASH_DEVICE, else an A100-40GB.
    findings, seed, races, suppressions, fail_on: as for `ptx.simulation`: errors raise a `ptx.KernelFault` by default, and warnings
    warn (Triton lets several warps store the same bytes). benchmark_seconds: the processor time that all benchmarks may take
    together; those behind have no time (NaN), and autotuners take their first configuration.

    Kernels take PyTorch's tensors on the CPU and NumPy arrays, which they write in place. If PyTorch is installed, programs that
    ask for the device "cuda" get CPU tensors (`devices`), and `torch.cuda` answers for the simulated device. Benchmarks
    (`triton.testing.do_bench`, autotuners) do not run kernels: they take the clock's prediction (`timing`).

    Raises ImportError without Triton, ValueError for an unknown device or wrong settings, RuntimeError if another device is
    simulated already.
    """
    from cupyflash.launch.simulated import current_simulation
    from cupyflash.sim.ptx import simulation

    if isinstance(benchmark_seconds, bool) or not isinstance(benchmark_seconds, int | float) or not benchmark_seconds >= 0:
        raise ValueError(f"benchmark_seconds must be a number of seconds from 0 (math.inf for no limit), got {benchmark_seconds!r}")
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

    how = simulation(findings=findings, seed=seed, races=races, suppressions=suppressions, fail_on=fail_on)
    with how as launches, replaced_driver(found, benchmark_seconds=benchmark_seconds):
        yield launches
