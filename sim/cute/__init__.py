"""CuTe DSL's kernels without a GPU: a program's own calls of compiled functions run on the PTX machine.

    from cupyflash.sim.cute import simulated_cute

    with simulated_cute("H100-SXM") as launches:
        out = flash_attn_func(q, k, v)  # flash_attn.cute: tensors of PyTorch on the CPU
    launches[-1].findings

CuTe DSL compiles as always, for the architecture of the simulated device; needs `pip install 'cupyflash[cute]'` and PyTorch (its
CPU build will do). This module itself imports neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cupyflash.device import Device, find_device

if TYPE_CHECKING:
    from cupyflash.sim.ptx import Launch, Suppression

__all__ = ["simulated_cute"]


@contextmanager
def simulated_cute(
    device: str | Device = "H100-SXM",
    *,
    findings: str | None = None,
    seed: int | None = None,
    races: bool | None = None,
    suppressions: str | os.PathLike[str] | Sequence[Suppression] | None = None,
    fail_on: str = "error",
) -> Iterator[list[Launch]]:
    """Runs CuTe DSL's kernels on the PTX machine in the `with` block; gives the list of the launches made there, in order.

    device: a `Device` or a name. findings, seed, races, suppressions, fail_on: as for `ptx.simulation`; errors raise a
    `ptx.KernelFault` by default. Programs that ask for PyTorch's device "cuda" get CPU tensors (`sim.triton.devices`).

    Functions have to be compiled in the block, by TVM FFI (`--enable-tvm-ffi`), which is switched on here. Raises ImportError
    without CuTe DSL, TVM FFI, llvmlite or PyTorch, ValueError for an unknown device.
    """
    from cupyflash.sim.ptx import simulation

    found = device if isinstance(device, Device) else find_device("device", device)
    try:
        from .host_code import replaced_runtime
    except ImportError as error:
        raise ImportError(f"simulated_cute needs CuTe DSL ({error}): pip install 'cupyflash[cute]' torch") from error

    how = simulation(findings=findings, seed=seed, races=races, suppressions=suppressions, fail_on=fail_on)
    with how as launches, replaced_runtime(found):
        yield launches
