"""The controls of each section of the page as they are at first, and its numbers then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cupyflash.basics import Report
from cupyflash.device import Device
from cupyflash.request.problem import Problem
from cupyflash.schedules import fa3_tiles
from cupyflash.sim.clock.rates import ChipRates
from cupyflash.sim.learn import models

FLOAT32 = 4
A100, H100 = Device.named("A100-40GB"), Device.named("H100-SXM")
GPU_MEMORY = 80 * 10**9
"""HBM of an H100 in bytes."""


def hopper_clocks() -> dict[str, int]:
    """Clocks of FlashAttention-3's steps on an H100, d 128, float16, by the planner's rates: a product and a softmax of one
    consumer, whose rows are half of the block's, and the copy of K_j from the L2."""
    best = fa3_tiles.choose(Problem(1, 16, 16, 4096, 4096, 128, "float16"), H100)
    parts, consumers = dict(best.parts), best.config.team.consumers
    nbytes = best.config.block_cols * 128 * 2
    return {
        "product": round(parts["tensor"] / consumers / 2),
        "softmax": round(parts["exp"] / consumers),
        "copy": round(nbytes / ChipRates.of(H100)["l1.sm_port"]),
    }


STARTS: dict[str, Report] = {
    "memory": {"sram": A100.sram_per_block, "seqlen": 4096, "head_dim": 64, "heads": 16, "causal": False},
    "softmax": {"scores": [1, 3, 2, 0, 5, 4, 1, 2], "values": [2, -1, 4, 0, 1, 3, -2, 5], "block": 2, "growth": 0},
    "loops": {"seqlen": 1024, "head_dim": 64, "block_rows": 128, "block_cols": 128, "heads": 16, "causal": False},
    "warps": {"rows": 128, "cols": 64, "head_dim": 64, "count": 4},
    "decoding": {"batch": 1, "kv_heads": 8, "group": 4, "keys": 8192, "head_dim": 128, "splits": 1, "sms": H100.sm_count},
    "backward": {"seqlen": 4096, "heads": 32, "head_dim": 128, "causal": False},
    "hopper": {"turns": 6, "stages": 1, "groups": 1, "ahead": False, **hopper_clocks()},
}
"""The controls of each section."""
BLOCK_KEYS = 64
"""Keys of a block in decoding."""
BACKWARD_SRAM = A100.sram_per_block // 2
"""M of the backward's tiles, in half types."""


def numbers() -> dict[str, Report]:
    """The numbers that each section shows at first, by section."""
    return {name: OF_SECTION[name](**given) for name, given in STARTS.items()}


def total(moved: dict[str, dict[str, int]]) -> int:
    """All bytes read and written."""
    return sum(sum(side.values()) for side in moved.values())


def memory(sram: int, seqlen: int, head_dim: int, heads: int, causal: bool) -> Report:
    """The paper's blocks for an SRAM in bytes, all in float32, and the bytes of all heads by algorithm."""
    found = models.tiles(sram // FLOAT32, head_dim)
    blocks = found["block_rows"], found["block_cols"]
    names = ("standard", "fa1")
    nbytes = {name: heads * total(models.forward(name, seqlen, head_dim, *blocks, causal, FLOAT32)) for name in names}
    even = found["break_even"] * FLOAT32
    return {**found, "break_even_bytes": even, "bytes": nbytes, "ratio": nbytes["fa1"] / nbytes["standard"]}


def softmax(scores: list[float], values: list[float], block: int, growth: float) -> Report:
    """The states of online softmax after each block, and its result."""
    steps = models.online(scores, values, block, growth)
    return {"steps": steps, "result": steps[-1]["O"] / steps[-1]["l"]}


def loops(seqlen: int, head_dim: int, block_rows: int, block_cols: int, heads: int, causal: bool) -> Report:
    """Bytes of all heads in float32 by the order of loops."""
    blocks = block_rows, block_cols
    names = ("fa1", "fa2")
    return {name: heads * total(models.forward(name, seqlen, head_dim, *blocks, causal, FLOAT32)) for name in names}


def warps(rows: int, cols: int, head_dim: int, count: int) -> Report:
    """Bytes of shared memory for a tile by what warps share out."""
    return {name: sum(moved.values()) for name, moved in models.warps(rows, cols, head_dim, count).items()}


def decoding(batch: int, kv_heads: int, group: int, keys: int, head_dim: int, splits: int, sms: int) -> Report:
    """Thread blocks, rounds and bytes of a step of decoding."""
    return models.decoding(batch * kv_heads, group, keys, head_dim, splits, sms, BLOCK_KEYS)


def backward(seqlen: int, heads: int, head_dim: int, causal: bool) -> Report:
    """Bytes kept for the backward, its operations, and the HBM bytes of Algorithms 3 and 4, of all heads."""
    found = models.tiles(BACKWARD_SRAM, head_dim)
    blocks = found["block_rows"], found["block_cols"]
    moved = {name: heads * total(models.backward(name, seqlen, head_dim, *blocks, causal)) for name in ("standard", "fa1")}
    return {**models.kept(seqlen, heads, head_dim), "bytes": moved}


def hopper(**given: Any) -> Report:
    """Clocks of a row block, and the share of them in which the tensor cores work."""
    spans = models.roles(**given)
    return {"clocks": max(span[-1] for span in spans), "busy": models.busy(spans)}


OF_SECTION: dict[str, Callable[..., Report]] = {
    "memory": memory,
    "softmax": softmax,
    "loops": loops,
    "warps": warps,
    "decoding": decoding,
    "backward": backward,
    "hopper": hopper,
}
