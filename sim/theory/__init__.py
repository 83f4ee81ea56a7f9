"""Closed forms of HBM traffic, with their constants; Theorems 2 and 5 and the lower bounds.

Everything here is derived from sizes and block sizes alone, from the rows' point of view. It shares no code with the
schedules' steps, so that equality with their replay is evidence. Sources: FlashAttention (arXiv 2205.14135),
FlashAttention-2 (arXiv 2307.08691), Saha and Ye (arXiv 2402.07443), Milakov and Gimelshein (arXiv 1805.02867).
"""

from __future__ import annotations

from cupyflash.schedules import BackwardSchedule, Schedule, SoftmaxSchedule, TileSchedule, require_schedule
from cupyflash.schedules.add_state import AddStateSchedule
from cupyflash.schedules.dropout_mask import DropoutMaskSchedule
from cupyflash.sim.theory.backward import backward_traffic, standard_backward_ideal
from cupyflash.sim.theory.bounds import (
    break_even_sram,
    lower_bound,
    theorem2_flash,
    theorem2_holds_for,
    theorem2_standard,
    theorem5_break_even_sram,
    theorem5_flash,
    theorem5_standard,
)
from cupyflash.sim.theory.decode import key_bytes, splits_with_keys
from cupyflash.sim.theory.forward import forward_traffic, softmax_traffic, standard_ideal
from cupyflash.sim.traffic import Traffic

__all__ = [
    "break_even_sram",
    "key_bytes",
    "lower_bound",
    "softmax_traffic",
    "splits_with_keys",
    "standard_backward_ideal",
    "standard_ideal",
    "theorem2_flash",
    "theorem2_holds_for",
    "theorem2_standard",
    "theorem5_break_even_sram",
    "theorem5_flash",
    "theorem5_standard",
    "traffic",
]


def traffic(schedule: TileSchedule | SoftmaxSchedule | DropoutMaskSchedule | AddStateSchedule) -> Traffic:
    """The closed form of a schedule's HBM traffic, per tensor, in bytes."""
    require_schedule(schedule, Schedule, "plan")
    return backward_traffic(schedule) if isinstance(schedule, BackwardSchedule) else forward_traffic(schedule)
