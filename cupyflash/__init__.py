"""Exact attention for CuPy arrays, beside a simulator that proves its memory traffic.

    cupyflash.attention(q, k, v, causal=True)

runs on the GPU for CuPy arrays, and for NumPy arrays the same kernel on a simulated device. `Problem` (sizes, dtype and `Options`),
`Device` and `plan` choose a tile schedule; `cupyflash.sim` predicts, replays and executes it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from cupyflash.version import __version__ as __version__

if TYPE_CHECKING:
    from cupyflash.ahead import warmup as warmup
    from cupyflash.ahead import warmup_decode as warmup_decode
    from cupyflash.calls import attention as attention
    from cupyflash.calls import attention_backward as attention_backward
    from cupyflash.calls import attention_decode as attention_decode
    from cupyflash.calls import attention_varlen as attention_varlen
    from cupyflash.calls import attention_varlen_backward as attention_varlen_backward
    from cupyflash.calls import attention_vjp as attention_vjp
    from cupyflash.device import Device as Device
    from cupyflash.dropped import dropout_mask as dropout_mask
    from cupyflash.launch.simulated import simulated_device as simulated_device
    from cupyflash.merge import merge_states as merge_states
    from cupyflash.request.options import Options as Options
    from cupyflash.request.problem import Problem as Problem
    from cupyflash.request.score import Mask as Mask
    from cupyflash.request.score import Score as Score
    from cupyflash.rows import softmax as softmax
    from cupyflash.schedules import TileSchedule as TileSchedule
    from cupyflash.schedules import plan as plan
    from cupyflash.second_order import attention_double_backward as attention_double_backward
    from cupyflash.second_order import attention_jvp as attention_jvp
    from cupyflash.tiled_mask import block_mask as block_mask
    from cupyflash.tiling import TileSize as TileSize
    from cupyflash.tiling import Tiling as Tiling

# What is not called is not loaded: a name's module is imported when somebody first asks for it.
_HOMES = {
    "ahead": "warmup warmup_decode",
    "calls": "attention attention_backward attention_decode attention_varlen attention_varlen_backward attention_vjp",
    "device": "Device",
    "dropped": "dropout_mask",
    "merge": "merge_states",
    "request.options": "Options",
    "request.problem": "Problem",
    "rows": "softmax",
    "schedules": "TileSchedule plan",
    "second_order": "attention_double_backward attention_jvp",
    "request.score": "Mask Score",
    "launch.simulated": "simulated_device",
    "tiled_mask": "block_mask",
    "tiling": "TileSize Tiling",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        found = globals()[name] = getattr(import_module(f"cupyflash.{_HOME[name]}"), name)
        return found
    raise AttributeError(f"module 'cupyflash' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *globals()]
