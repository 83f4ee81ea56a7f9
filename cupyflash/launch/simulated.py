"""The simulated device that stands in for a GPU when the arrays are NumPy's: which one, for how long, and runs on it."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from cupyflash.arrays import ArrayLayout
from cupyflash.basics import DEFAULT_DEVICE, DEFAULT_SECONDS, Report, Values
from cupyflash.device import Device, find_device
from cupyflash.launch.params import with_arrays
from cupyflash.launch.turns import Turns
from cupyflash.schedules import Schedule, TileSchedule
from cupyflash.schedules.mask_tiles import MaskTiles
from cupyflash.words import plural


@dataclass(frozen=True)
class Simulation:
    """The device to simulate, and the longest estimate in seconds that a call may have."""

    device: Device
    max_seconds: float


# What a kernel has run is counted where its code is: threads take turns.
_machine = Turns()
_chosen: ContextVar[Simulation | None] = ContextVar("cupyflash_simulation", default=None)


@contextmanager
def simulated_device(
    device: str | Device = DEFAULT_DEVICE, *, sram: int | str | None = None, max_seconds: float = DEFAULT_SECONDS
) -> Iterator[Device]:
    """Within this context, attention on NumPy arrays runs on `device`, with `sram` bytes (or "100KB") of SRAM if given.

    The choice belongs to the context: a thread that is started inside it has the default again. A call estimated at more than
    `max_seconds` is refused; `math.inf` allows any. Raises TypeError or ValueError as Device.named does.
    """
    if isinstance(max_seconds, bool) or not isinstance(max_seconds, int | float) or not max_seconds > 0:
        raise ValueError(f"max_seconds must be a positive number of seconds (math.inf for no limit), got {max_seconds!r}")
    if isinstance(device, Device):
        found = device if sram is None else device.with_sram(sram)
    else:
        found = find_device("device", device, sram)
    token = _chosen.set(Simulation(found, max_seconds))
    try:
        yield found
    finally:
        _chosen.reset(token)


def default_device() -> Device:
    """The device of CUPYFLASH_DEVICE (a name or a .toml path), else the default one. Raises ValueError that names the variable."""
    name = os.environ.get("CUPYFLASH_DEVICE") or DEFAULT_DEVICE
    try:
        return Device.named(name)
    except (ValueError, OSError) as error:
        raise ValueError(f"CUPYFLASH_DEVICE={name}: {error}") from error


def current_simulation() -> Simulation:
    """The simulation that `simulated_device` chose, else that of CUPYFLASH_DEVICE (a name or a .toml path) and
    CUPYFLASH_MAX_SECONDS."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    text = os.environ.get("CUPYFLASH_MAX_SECONDS", str(DEFAULT_SECONDS))
    try:
        max_seconds = float(text)
    except ValueError:
        max_seconds = math.nan
    if not max_seconds > 0:
        raise ValueError(f"CUPYFLASH_MAX_SECONDS must be a positive number of seconds or inf, got {text!r}")
    return Simulation(default_device(), max_seconds)


@dataclass(frozen=True)
class PreparedSimulation:
    """A prepared launch for NumPy arrays, as `cupyflash.launch.launcher.Prepared`: the schedule's kernels run on the simulated
    device."""

    simulation: Simulation
    schedule: TileSchedule
    values: Values
    outputs: Mapping[str, ArrayLayout]
    workspaces: Mapping[str, ArrayLayout]

    @property
    def given_tiles(self) -> tuple[MaskTiles, ...]:
        return self.schedule.given_tiles

    # The two places where attention reaches into the simulator.
    def compile(self) -> None:
        """Do everything that the first launch would do before it runs. RuntimeError if it would take too long, MemoryError if it is
        too large."""
        from cupyflash.sim.estimate import refuse_slow
        from cupyflash.sim.execution import module

        refuse_slow(self.schedule, self.simulation.max_seconds)
        with _machine.lock:
            for kernel in self.schedule.kernels():
                if kernel.grid:
                    module(kernel, self.schedule.device.compute_capability)

    def launch(self, arrays: Values, numbers: Values | None = None) -> Report:
        """Run the kernels and return the outputs, by name. RuntimeError for a launch that takes too long, or for findings;
        MemoryError."""
        from cupyflash.sim.estimate import refuse_slow

        refuse_slow(self.schedule, self.simulation.max_seconds)
        outputs = {name: np.empty(made.shape, made.dtype) for name, made in self.outputs.items()}
        workspaces = {name: np.empty(made.shape, made.dtype) for name, made in self.workspaces.items()}
        values = with_arrays(self.values, {**arrays, **outputs, **workspaces}) | dict(numbers or {})
        with _machine.lock:
            run_simulated(self.schedule, values, (*self.schedule.results, *workspaces))
        return outputs


def run_simulated(schedule: Schedule, values: Values, made: Collection[str]) -> None:
    """Run kernels as `run_kernels` does, and refuse their findings."""
    from cupyflash.sim.execution import run_kernels

    _, _, findings = run_kernels(schedule, values, made)
    refuse_findings(findings)


def refuse_findings(findings: Sequence[object]) -> None:
    """RuntimeError when the simulated device found something wrong with a kernel of ours."""
    if findings:
        first = ", the first" if len(findings) > 1 else ""
        raise RuntimeError(f"the simulated device found {plural(len(findings), 'fault')} in the kernel{first}: {findings[0]}")
