"""The simulator: what a schedule should move (theory), what its steps move (replay), what its kernels move (execute).

    theory.traffic(schedule) == replay(schedule) == execute(schedule, q, k, v).traffic

`l2` models what DRAM sees of that behind the L2, `l2.executed` of what kernels really asked for. `profile` says of any CUDA kernel
what a profiler's first page would. Only `execute` and its like, `profile`, `l2.executed` and `ptx` need a compiler
(`pip install 'cupyflash[sim]'`); they are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cupyflash.sim import theory
from cupyflash.sim.traffic import TensorTraffic, Traffic
from cupyflash.sim.two_level.machine import Machine, Replay, SramOverflow, replay, run

if TYPE_CHECKING:
    from cupyflash.sim import l2, ptx
    from cupyflash.sim.execution import (
        BackwardExecution,
        Execution,
        execute,
        execute_backward,
        execute_decode,
        execute_softmax,
        execute_varlen,
        execute_varlen_backward,
    )
    from cupyflash.sim.profiling import Profile, profile

__all__ = [
    "BackwardExecution",
    "Execution",
    "Machine",
    "Profile",
    "Replay",
    "SramOverflow",
    "TensorTraffic",
    "Traffic",
    "execute",
    "execute_backward",
    "execute_decode",
    "execute_softmax",
    "execute_varlen",
    "execute_varlen_backward",
    "l2",
    "profile",
    "ptx",
    "replay",
    "run",
    "theory",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("Execution", "BackwardExecution") or name.startswith("execute"):
        return getattr(importlib.import_module("cupyflash.sim.execution"), name)
    if name in ("Profile", "profile"):
        return getattr(importlib.import_module("cupyflash.sim.profiling"), name)
    if name in ("l2", "ptx"):
        return importlib.import_module(f"cupyflash.sim.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
