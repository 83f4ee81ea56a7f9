"""Benchmarks under the simulation: `do_bench` and autotuners take the time that the clock predicts for each launch.

A benchmark's kernels do not run on the machine: the clock executes machine code of sampled blocks, for the simulated device, whose
L2 is empty before. What else the benchmarked function does, PyTorch's operators among it, has no time. Each statement about that is
a `PredictedTime` warning, once.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from cupyflash.device import Device
from cupyflash.sim.clock.execution import CodeLaunch, CubinKernel
from cupyflash.sim.clock.known import known_error
from cupyflash.sim.clock.whole import Clock
from cupyflash.sim.ptx.parameters import bind

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

    def add(self, call: KernelCall, addresses: Addresses, code: Callable[[], CubinKernel]) -> None:
        """Predicts the time of a launch; `code` gives its machine code."""
        try:
            bound = bind(call.kernel, call.params, call.arguments(addresses), ())
            launch = CodeLaunch(code(), call.grid, call.block, bound, call.shared, None, call.cluster or (1, 1, 1))
            launch.most = MOST_RUN
            clock = Clock(launch, self.device, cold=True)
            found = clock.time()
        except (ImportError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            self.said[call.kernel] = f"the clock has no time for it, which is nan: {error}"
            self.seconds.append(math.nan)
            return
        known = known_error(clock, found)
        self.said.setdefault(call.kernel, f"predicted for {self.device.name} by the clock, not measured; {known}")
        self.seconds.append(found.seconds)

    @property
    def statements(self) -> list[str]:
        """Sentences about the time."""
        nothing = "nothing was timed: no kernel of Triton was launched, and PyTorch's operators have no time here, which is nan"
        return [f"{name}: {text}" for name, text in self.said.items()] if self.seconds else [nothing]


UNTIMED = "launches that are neither run nor timed"
"""The place of `Times` in the setup of a benchmark."""

_times: ContextVar[Times | str | None] = ContextVar("cupyflash_times", default=None)


def current_times() -> Times | str | None:
    """Returns the benchmark that runs now, UNTIMED in its setup, None outside."""
    return _times.get()


@contextmanager
def timing(times: Times | str) -> Iterator[None]:
    """Within this context, launches are not executed but timed, or neither."""
    token = _times.set(times)
    try:
        yield
    finally:
        _times.reset(token)


class Benchmarks:
    """The benchmarks of a simulation."""

    def __init__(self, device: Device, limit: float):
        """`limit`: seconds of processor time for all of them together."""
        self.device, self.limit, self.spent = device, limit, 0.0
        self._said: set[str] = set()
        self._inside = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the processor time of the outermost benchmark."""
        inside, self._inside, began = self._inside, True, time.process_time()
        try:
            yield
        finally:
            self._inside = inside
            if not inside:
                self.spent += time.process_time() - began

    def over(self) -> bool:
        """True if the time is spent, which is said."""
        if self._inside or self.spent < self.limit:
            return False
        self.say(f"benchmarks have taken the {self.limit:,.0f} s that they may (benchmark_seconds): those behind are nan")
        return True

    def say(self, text: str) -> None:
        """Warns once of each kernel and kind of statement: a reason differs from one configuration to the next."""
        kind = text.partition(", which is nan: ")[0]
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(text, PredictedTime, 4)

    def predicted(self, function: Callable[[], Any]) -> float:
        """Returns the predicted milliseconds of a function's launches, NaN if there are none or one has no prediction."""
        if self.over():
            return math.nan
        times = Times(self.device)
        with self.counted(), timing(times):
            function()
        for text in times.statements:
            self.say(text)
        return 1e3 * sum(times.seconds) if times.seconds else math.nan

    def perf_report(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Returns what stands for `triton.testing.perf_report`: the setup of benchmarks does not launch anything, either."""

        def perf_report(benchmarks: Any) -> Callable[..., Any]:
            def decorated(function: Callable[..., Any]) -> Any:
                @functools.wraps(function)
                def sampled(*args: Any, **kwargs: Any) -> Any:
                    if self.over():
                        return math.nan
                    with self.counted(), timing(UNTIMED):
                        return function(*args, **kwargs)

                return real(benchmarks)(sampled)

            return decorated

        return perf_report

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
