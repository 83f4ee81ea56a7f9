"""The problems that a GPU is asked first, about two hundred, by kernel and option, the most important ones first.

Data only: test_gpu_first.py poses them, and benchmarks/ahead.py compiles what they need before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cupyflash import Device, Problem, plan
from cupyflash.request.options import refused
from cupyflash.schedules import Kernel, choose, choose_backward, fa3_backward, fa3_tiles, plan_backward

HALF, DTYPES = ("bfloat16", "float16"), ("bfloat16", "float16", "float32")
BFLOAT16_SINCE = (8, 0)  # compute capability
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "plain": {},
    "window": {"window": (70, 9)},
    "padded": {"padded": True},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout": True},
}
LENGTHS, FEW_QUERIES = (300, 500), (2, 900)
SMALL_LENGTHS, SMALL_FEW = (20, 33), (2, 70)  # of the stand-in


@dataclass(frozen=True)
class First:
    """One pass by one algorithm, of 2 query heads a key head."""

    algorithm: str
    dtype: str
    d: int
    option: str
    backward: bool = False
    flags: dict[str, bool] = field(default_factory=dict)

    def __str__(self) -> str:
        words = self.algorithm, "backward" if self.backward else "forward", self.dtype, f"d{self.d}", self.option, *self.flags
        return "-".join(words)

    def problem(self, small: bool = False) -> Problem:
        if self.algorithm == "decode":
            lengths = SMALL_FEW if small else FEW_QUERIES
        else:
            lengths = SMALL_LENGTHS if small else LENGTHS
        return Problem(1, 4, 2, *lengths, self.d, self.dtype, **OPTIONS[self.option])

    def lacking(self, device: Device) -> str | None:
        """The reason why the device does not run it, None if it does."""
        if self.dtype == "bfloat16" and device.compute_capability < BFLOAT16_SINCE:
            return f"bfloat16 needs compute capability 8.0, {device.name} has less"
        if self.algorithm != "fa3":
            return None
        return (fa3_backward if self.backward else fa3_tiles).refusal(self.problem(), device)

    def kernels(self, device: Device) -> Iterator[Kernel]:
        """The kernels that a call on contiguous arrays launches."""
        problem = self.problem()
        forward = choose(problem, device).algorithm if self.algorithm == "auto" else self.algorithm
        yield from plan(problem, device, forward, lse=True).kernels()
        if self.backward:
            backward = choose_backward(problem, device).algorithm if self.algorithm == "auto" else self.algorithm
            yield from plan_backward(problem, device, backward, **self.flags).kernels()


def _all() -> Iterator[First]:
    for option in OPTIONS:
        for d in (128, 64):
            for dtype in DTYPES:
                yield First("auto", dtype, d, option)
                yield First("auto", dtype, d, option, backward=True)
            for dtype in HALF:
                yield First("fa3", dtype, d, option)
                yield First("fa3", dtype, d, option, backward=True)
                yield First("fa2", dtype, d, option)
    for d in (256, 40):
        for dtype in DTYPES:
            yield First("auto", dtype, d, "causal")
            yield First("auto", dtype, d, "causal", backward=True)
    for option in ("causal", "padded"):
        for dtype in DTYPES:
            yield First("decode", dtype, 128, option)
            yield First("fa2", dtype, 64, option, backward=True, flags={"deterministic": True})
        for dtype in HALF:
            yield First("fa3", dtype, 128, option, backward=True, flags={"deterministic": True})
    for algorithm in ("fa1", "standard"):
        for dtype in DTYPES:
            for option in ("causal", "bias"):
                yield First(algorithm, dtype, 64, option)
                yield First(algorithm, dtype, 64, option, backward=True)


def _taken(each: First) -> bool:
    """True if the algorithm has the option."""
    return each.algorithm == "auto" or not refused(each.problem().options, f"{each.algorithm}{' backward' * each.backward}")


FIRST = [each for each in _all() if _taken(each)]
