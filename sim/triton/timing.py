"""Benchmarks under the simulation: `do_bench` and autotuners take the time that the clock predicts for each launch.

A benchmark's kernels do not run on the machine: the clock executes machine code of sampled blocks, for the simulated device, whose
L2 is empty before. What else the benchmarked function does, PyTorch's operators among it, has no time. Each statement about that is
a `PredictedTime` warning, once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from cupyflash.device import Device
from cupyflash.sim.clock.loaded import MachineCode
from cupyflash.sim.clock.timed import timed

from .calls import KernelCall
from .memory import Addresses

MOST_RUN = 20_000_000
"""The most instructions that the clock executes for a launch."""


class PredictedTime(UserWarning):
    """The statement that a benchmark's time is a prediction, with its known error, or that there is none."""


@dataclass
class Times:
    """The launches of a benchmarked function: their seconds, predicted or NaN, and by kernel what to say of it."""

    device: Device
    seconds: list[float] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    def add(self, call: KernelCall, addresses: Addresses, code: MachineCode) -> None:
        """Predicts the time of a launch."""
        shape, cluster = (call.grid, call.block), call.cluster or (1, 1, 1)
        try:
            loaded = code.launch(call.kernel, shape, call.arguments(addresses), call.shared, cluster)
            loaded.launch.most = MOST_RUN
            found = timed(loaded, self.device, cold=True)
        except (ImportError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            self.said[call.kernel] = f"the clock has no time for it, which is nan: {error}"
            self.seconds.append(math.nan)
            return
        self.said.setdefault(call.kernel, f"predicted for {self.device.name} by the clock, not measured; {found.known}")
        self.seconds.append(found.seconds)

    @property
    def statements(self) -> list[str]:
        """Sentences about the time."""
        nothing = "nothing was timed: no kernel of Triton was launched, and PyTorch's operators have no time here, which is nan"
        return [f"{name}: {text}" for name, text in self.said.items()] if self.seconds else [nothing]


_times: ContextVar[Times | None] = ContextVar("cupyflash_times", default=None)


def current_times() -> Times | None:
    """Returns the benchmark that runs now."""
    return _times.get()


@contextmanager
def timing(device: Device) -> Iterator[Times]:
    """Within this context, launches are not executed but timed."""
    times = Times(device)
    token = _times.set(times)
    try:
        yield times
    finally:
        _times.reset(token)


class Benchmarks:
    """The benchmarks of a simulation."""

    def __init__(self, device: Device):
        self.device = device
        self._said: set[str] = set()

    def predicted(self, function: Callable[[], Any]) -> float:
        """Returns the predicted milliseconds of a function's launches, NaN if there are none or one has no prediction."""
        with timing(self.device) as times:
            function()
        for text in times.statements:
            if text not in self._said:
                self._said.add(text)
                warnings.warn(text, PredictedTime, 3)
        return 1e3 * sum(times.seconds) if times.seconds else math.nan

    def do_bench(
        self,
        fn: Callable[[], Any],
        warmup: int = 25,
        rep: int = 100,
        grad_to_none: Any = None,
        quantiles: Sequence[float] | None = None,
        return_mode: str = "mean",
    ) -> Any:
        """Stands for `triton.testing.do_bench`: calls `fn` once; its milliseconds are the clock's, and all quantiles are equal."""
        if return_mode not in ("min", "max", "mean", "median", "all"):
            raise ValueError(f"return_mode must be min, max, mean, median or all, got {return_mode!r}")
        found = self.predicted(fn)
        if quantiles is not None:
            return found if len(quantiles) == 1 else [found] * len(quantiles)
        return [found] if return_mode == "all" else found

    def tune(self, fn: Callable[[], Any], quantiles: Sequence[float] | None = None, **_: Any) -> list[float]:
        """Stands for the benchmark of autotuners: a configuration without a prediction is the last to be chosen."""
        found = self.predicted(fn)
        return [math.inf if math.isnan(found) else found] * len(quantiles or (0,))
