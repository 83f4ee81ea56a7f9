"""Exact attention for CuPy arrays, beside a simulator that proves its memory traffic.

    cupyflash.attention(q, k, v, causal=True)

runs on the GPU for CuPy arrays, and for NumPy arrays the same kernel on a simulated device. `Problem` (sizes, dtype and `Options`),
`Device` and `plan` choose a tile schedule; `cupyflash.sim` predicts, replays and executes it.
"""

from __future__ import annotations

from cupyflash.attention import attention
from cupyflash.decode import attention_decode
from cupyflash.device import Device
from cupyflash.dropout_mask import dropout_mask
from cupyflash.gradients import attention_backward, attention_varlen_backward, attention_vjp
from cupyflash.merge import merge_states
from cupyflash.options import Options
from cupyflash.problem import Problem
from cupyflash.schedules import TileSchedule, plan
from cupyflash.score import Mask, Score
from cupyflash.simulated import simulated_device
from cupyflash.softmax import softmax
from cupyflash.tiled_mask import block_mask
from cupyflash.tiling import TileSize, Tiling
from cupyflash.varlen import attention_varlen
from cupyflash.warmup import warmup, warmup_decode

__version__ = "0.1.0"
__all__ = [
    "Device",
    "Mask",
    "Options",
    "Problem",
    "Score",
    "TileSchedule",
    "TileSize",
    "Tiling",
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_vjp",
    "block_mask",
    "dropout_mask",
    "merge_states",
    "plan",
    "simulated_device",
    "softmax",
    "warmup",
    "warmup_decode",
]
