"""The simulator: what a schedule should move (theory), what its steps move (replay), what its kernels move (execute).

    theory.traffic(schedule) == replay(schedule) == execute(schedule, q, k, v).traffic

`l2` models what DRAM sees of that behind the L2, `l2.executed` of what kernels really asked for. `profile` says of any CUDA kernel
what a profiler's first page would. Only `execute` and its like, `profile`, `l2.executed` and `ptx` need a compiler
(`pip install 'cupyflash[sim]'`). Everything is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupyflash.sim import l2, ptx, theory
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
    from cupyflash.sim.traffic import TensorTraffic, Traffic
    from cupyflash.sim.two_level.machine import Machine, Replay, SramOverflow, replay, run

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


_HOMES = {
    "execution": "BackwardExecution Execution execute execute_backward execute_decode execute_softmax execute_varlen "
    "execute_varlen_backward",
    "profiling": "Profile profile",
    "traffic": "TensorTraffic Traffic",
    "two_level.machine": "Machine Replay SramOverflow replay run",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return found
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
