"""The addition of a call's results for some keys to the sums over earlier keys."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from cupyflash.arrays import ArrayLayout
from cupyflash.basics import Report, Values
from cupyflash.device import Device
from cupyflash.launch.launcher import KEPT, Prepared
from cupyflash.merge import merged
from cupyflash.schedules.add_state import PARAMS, AddStateSchedule


def add_state(gpu: bool, out: Any, lse: Any, o: Any, own: Any) -> None:
    """Merges o and its log-sum-exp `own` into `out` and `lse`, both float32, in place, as `merge_states` does.

    On a GPU that is one kernel, which reads and writes each row once; NumPy does it in several passes.
    """
    if not gpu:
        out[...], lse[...] = merged(np, out, lse, o, own)
        return
    given = arrays(out, lse, o, own)
    if out.size:
        device = sys.modules["cupy"].cuda.runtime.getDevice()
        key = "add_state", device, *(ArrayLayout.of(array) for array in given.values())
        prepared = KEPT.get(key) or KEPT.keep(key, Prepared(schedule_of(given, Device.current()).kernels(), values(given)))
        prepared.launch(given)


def arrays(out: Any, lse: Any, o: Any, own: Any) -> Report:
    """The arrays by the kernel's names; a log-sum-exp is a column of one row each."""
    return {"O": out, "L": lse[..., None], "O_part": o, "L_part": own[..., None]}


def schedule_of(given: Values, device: Device) -> AddStateSchedule:
    """The schedule for such arrays, or layouts."""
    *rows, d = given["O"].shape
    return AddStateSchedule(math.prod(rows), d, given["O_part"].dtype.name, device)


def values(given: Values) -> Report:
    """The kernel's struct."""
    *pairs, n_q, _ = given["O"].shape
    sizes = {"rows": math.prod(pairs) * n_q, "Nq": n_q, "heads": pairs[-1] if pairs else 1}
    return PARAMS.values({**given, **sizes}, given["O_part"].dtype.name)
