"""Shows which weights a call with dropout keeps."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import numpy as np

from cupyflash.basics import Shape
from cupyflash.launch.dispatch import target
from cupyflash.launch.launcher import Prepared
from cupyflash.launch.simulated import run_simulated
from cupyflash.request.dropout import MOST_PAIRS, Dropout
from cupyflash.request.keywords import NO_ORIGIN
from cupyflash.request.options import MAX_LENGTH
from cupyflash.request.problem import checked_size
from cupyflash.schedules.dropout_mask import THREADS, DropoutMaskSchedule


def dropout_mask(
    shape: Shape,
    dropout: float,
    *,
    seed: int,
    offset: int = 0,
    dropout_origin: tuple[int, int, int, int] = NO_ORIGIN,
    xp: ModuleType = np,
) -> Any:
    """Return the weights that `attention` with these arguments keeps: bool of `shape`, (n_q, n_k), (h, n_q, n_k) or (b, h, n_q,
    n_k).

    False: the weight is dropped. True: it is multiplied by 1 / (1 - p), where p is `dropout` rounded to a multiple of 2**-16
    (`request.dropout.Dropout` has it as `probability`, and defines the rest). `xp` is cupy for an array on the current GPU, made on
    the current stream, or numpy, where the same kernel runs on the simulated device.

    Raises TypeError or ValueError for bad arguments; RuntimeError for a NumPy array that would take the simulated device too long.
    """
    sizes = _checked_shape(shape)
    if xp is not np and (xp is None or xp is not sys.modules.get("cupy")):
        raise TypeError(f"xp must be the module numpy or cupy, got {xp!r}")
    asked = Dropout.asked({"dropout": dropout, "seed": seed, "offset": offset, "dropout_origin": dropout_origin})
    if asked is None or 0 in sizes:
        return xp.ones(shape, bool)
    device, simulation = target(xp is not np)
    schedule = DropoutMaskSchedule(sizes, device)
    kept = xp.empty(shape, bool)
    (kernel,) = schedule.kernels()
    _, heads, n_q, n_k = sizes
    given = {"kept": kept, "elements": math.prod(sizes), "Nq": n_q, "Nk": n_k, "heads": heads, **asked.numbers}
    values = kernel.params.values(given, "float32")
    if simulation is None:
        Prepared((kernel,), values).launch({"kept": kept})
        return kept
    from cupyflash.sim.estimate import refuse_slow

    refuse_slow(schedule, simulation.max_seconds)
    run_simulated(schedule, values, ("kept",))
    return kept


def _checked_shape(shape: Any) -> tuple[int, int, int, int]:
    """(batch, heads, n_q, n_k). TypeError or ValueError for a shape that scores cannot have."""
    if not isinstance(shape, tuple | list) or not 2 <= len(shape) <= 4:
        raise TypeError(f"shape must be (n_q, n_k), (h, n_q, n_k) or (b, h, n_q, n_k), got {shape!r}")
    batch, heads, n_q, n_k = (checked_size("shape", size) for size in (1,) * (4 - len(shape)) + tuple(shape))
    if max(batch, heads) > MOST_PAIRS:
        raise ValueError(f"dropout is for at most {MOST_PAIRS:,} batches and heads, got shape {shape}")
    if math.prod((batch, heads, n_q, n_k)) > MAX_LENGTH * THREADS:
        raise ValueError(f"shape must have at most {MAX_LENGTH * THREADS:,} elements, got {shape}")
    return batch, heads, n_q, n_k
