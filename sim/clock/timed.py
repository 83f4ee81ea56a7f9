"""A launch with its time: the whole, its limits, the error that is known of such kernels, and the lines at which warps spend it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cupyflash.device import Device

from .known import KnownError, known_error
from .lines import TimedLine, lines_of, places
from .loaded import LoadedLaunch
from .stalls import stalls
from .whole import Clock, Time


@dataclass(frozen=True)
class Timed:
    """A launch's predicted time on a device. `dram`: bytes a second of DRAM while its multiprocessors are full.

    `lines`: those at which warps spend the time, the longest first; `known`: the error of predictions of such kernels.
    """

    kernel: str
    device: str
    time: Time
    dram: float
    known: KnownError
    lines: Sequence[TimedLine]

    @property
    def seconds(self) -> float:
        return self.time.seconds

    def to_dict(self) -> dict[str, Any]:
        """The report of `cupyflash time --json`."""
        time = self.time
        head = {"kernel": self.kernel, "device": self.device, **asdict(time), "binds": time.binds, "tflops": time.tflops}
        known, lines = asdict(self.known), [line.to_dict() for line in self.lines]
        return head | {"dram_gbs": self.dram / 1e9, "known_error": known, "lines": lines}


SECONDS, ISSUE_SECONDS = 0.5, 45e-6
"""Processor time of a clock's runs: of any launch, and for each instruction of the warps that it follows, as in eight launches."""


def timed(
    loaded: LoadedLaunch,
    device: Device,
    mhz: float | None = None,
    *,
    cold: bool = False,
    foretold: Callable[[float], None] = lambda seconds: None,
) -> Timed:
    """Times a launch; raises as `Clock` does, RuntimeError without a disassembler.

    foretold: is given the seconds that the clock's runs are expected to take, once the warps' instructions are known.
    """
    clock = Clock(loaded.launch, device, mhz, cold=cold)
    foretold(SECONDS + ISSUE_SECONDS * sum(len(trace) for block in clock.traces for trace in block))
    time, kernel = clock.time(), loaded.launch.kernel
    lines = lines_at(clock, loaded)
    dram = min(time.busy["DRAM"], 1) * (device.hbm_bandwidth or 0) * clock.rates["dram.read"]
    return Timed(kernel.name, device.name, time, dram, known_error(clock, time), lines)


def lines_at(clock: Clock, loaded: LoadedLaunch) -> list[TimedLine]:
    """Returns the lines at which warps spend a launch's time, longest first."""
    kernel = loaded.launch.kernel
    where = places(loaded.cubin, kernel.name)
    return lines_of(stalls(clock), kernel.instructions, where, clock.time().seconds, loaded.sources)
