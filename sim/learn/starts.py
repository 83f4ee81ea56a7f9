"""The controls of each section of the page as they are at first, and its numbers then."""

from __future__ import annotations

from typing import Any

from cupyflash.device import Device
from cupyflash.sim.learn import models

FLOAT32 = 4
A100 = Device.named("A100-40GB")

STARTS: dict[str, dict[str, Any]] = {
    "memory": {"sram": A100.sram_per_block, "seqlen": 4096, "head_dim": 64, "heads": 16, "causal": False},
    "softmax": {"scores": [1, 3, 2, 0, 5, 4, 1, 2], "values": [2, -1, 4, 0, 1, 3, -2, 5], "block": 2, "growth": 0},
}
"""The controls of each section."""


def numbers() -> dict[str, dict[str, Any]]:
    """The numbers that each section shows at first, by section."""
    return {"memory": memory(**STARTS["memory"]), "softmax": softmax(**STARTS["softmax"])}


def memory(sram: int, seqlen: int, head_dim: int, heads: int, causal: bool) -> dict[str, Any]:
    """The paper's blocks for an SRAM in bytes, all in float32, and the bytes of all heads by algorithm."""
    found = models.tiles(sram // FLOAT32, head_dim)
    blocks = found["block_rows"], found["block_cols"]
    moved = {name: models.forward(name, seqlen, head_dim, *blocks, causal, FLOAT32) for name in ("standard", "fa1")}
    nbytes = {name: heads * sum(sum(side.values()) for side in each.values()) for name, each in moved.items()}
    even = found["break_even"] * FLOAT32
    return {**found, "break_even_bytes": even, "bytes": nbytes, "ratio": nbytes["fa1"] / nbytes["standard"]}


def softmax(scores: list[float], values: list[float], block: int, growth: float) -> dict[str, Any]:
    """The states of online softmax after each block, and its result."""
    steps = models.online(scores, values, block, growth)
    return {"steps": steps, "result": steps[-1]["O"] / steps[-1]["l"]}
