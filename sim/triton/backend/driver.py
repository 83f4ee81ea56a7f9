"""The switch for a whole program: with CUPYFLASH_TRITON set, Triton's driver is the simulated device's from the import on."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from triton.backends.driver import DriverBase

from cupyflash.sim.triton import SWITCH
from cupyflash.sim.triton.memory import Addresses

_program, _addresses = ExitStack(), Addresses()
"""The simulation of the program, which lasts as long as it does."""


def switched_on() -> bool:
    return os.environ.get(SWITCH, "0") not in ("", "0")


class Switch(DriverBase):
    """Triton asks all drivers whether they are active; this one is if the switch is on, and gives the simulated device's."""

    def __new__(cls) -> Any:
        from cupyflash.launch.simulated import current_simulation
        from cupyflash.sim.ptx import simulation
        from cupyflash.sim.triton.driver import replaced_driver

        _program.enter_context(simulation(fail_on="error"))
        return _program.enter_context(replaced_driver(current_simulation().device, _addresses))

    @classmethod
    def is_active(cls) -> bool:
        return switched_on()

    def _nothing(self, *_: Any) -> Any:
        raise NotImplementedError

    map_python_to_cpp_type = get_current_target = get_active_torch_device = get_benchmarker = _nothing


def begin() -> None:
    """Puts the simulated device in the place of GPUs, for PyTorch at once: programs may ask it for "cuda" before Triton."""
    from triton.backends.nvidia.driver import CudaDriver

    CudaDriver.is_active = staticmethod(lambda: False)
    if find_spec("torch") is not None:
        from cupyflash.launch.simulated import current_simulation
        from cupyflash.sim.triton.devices import cuda_on_cpu

        _program.enter_context(cuda_on_cpu(current_simulation().device, _addresses))


if switched_on():
    begin()
