"""The planner's formulas for a whole call, in microseconds of the host: by these "auto" chooses, and a ring is modelled.

docs/clock.md has what they differ by from the clock, which runs machine code and takes seconds.
"""

from __future__ import annotations

from cupyflash.device import Device
from cupyflash.multiprocessor import clock_rate
from cupyflash.request.problem import Problem
from cupyflash.schedules import decode_tiles, fa2_tiles, fa3_tiles

FORMULAS = ("fa2", "fa3", "decode")
"""The algorithms that have one."""


def clocks(problem: Problem, device: Device, algorithm: str, blocks: tuple[int, int] | None = None) -> float:
    """Clocks of a forward by one of FORMULAS, in `blocks` (Br, Bc) or those chosen; lengths and masks are not looked at.

    Raises as the `choose` of the algorithm's tiles does.
    """
    if algorithm == "decode":
        return decode_tiles.choose(problem, device).seconds * clock_rate(device)
    least = decode_tiles.least_seconds(problem, device) * clock_rate(device)  # of which the other formulas know nothing
    if algorithm == "fa3":
        return max(least, fa3_tiles.clocks(problem, device, fa3_tiles.choose(problem, device, blocks)))
    return max(least, fa2_tiles.choose(problem, device, blocks).clocks)


GRADIENTS_SLOWER = {64: 1.12, 128: 1.37}
"""By head dims up to these, the seconds that `fa2`'s gradients take for a product over those that its forward does: measured on an
H100 at N 1,024 and 4,096 (docs/measured.md: 1.12 at d 64, 1.31 to 1.40 at d 128)."""


def backward_seconds(problem: Problem, device: Device) -> float:
    """Seconds of `fa2`'s gradients: their products at the rate of its forward, less what they were measured to be slower."""
    slower = GRADIENTS_SLOWER[64 if problem.head_dim <= 64 else 128]
    return clocks(problem, device, "fa2") / clock_rate(device) * problem.backward_flops / problem.flops * slower
