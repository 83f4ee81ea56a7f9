"""Block sizes: the paper's formula, the sizes fitted to a kernel's layout, and the sizes used, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cupyflash.arrays import Held
from cupyflash.device import Device
from cupyflash.request.problem import Problem


@dataclass(frozen=True)
class TileSize(Held):
    """Br x Bc: rows of a Q block, rows of a K/V block, and the reason."""

    block_rows: int
    block_cols: int
    reason: str

    def __str__(self) -> str:
        return f"Br {self.block_rows} x Bc {self.block_cols}"

    def held(self) -> tuple[TileSize, dict[str, Any]]:
        return self, {}


# The values of `tiling=`: None for the fitted sizes, "paper" for the formula's, (block_rows, block_cols) that a kernel runs, or a
# TileSize: a design of fa3's gradients, or blocks to count with, even if no kernel runs them.
TilingChoice = Literal["paper"] | tuple[int, int] | TileSize | None


@dataclass(frozen=True)
class Tiling:
    """The three stages of choosing block sizes.

    `paper` is the formula to the letter, `fitted` the sizes that the kernel's real layout allows (None if nothing fits: then only a
    tiling that the caller chose can run), `used` the sizes that the schedule runs.
    """

    paper: TileSize
    fitted: TileSize | None
    used: TileSize


class DoesNotFit(ValueError):
    """Even the smallest block does not fit the SRAM; the message says how many bytes it needs."""


def paper_sizes(sram_elements: int, head_dim: int) -> tuple[int, int]:
    """(Br, Bc): Bc = ceil(M / 4d), Br = min(Bc, d). Source: FlashAttention (arXiv 2205.14135), Algorithm 1, line 1."""
    block_cols = max(1, -(-sram_elements // (4 * head_dim)))
    return min(block_cols, head_dim), block_cols


def paper_blocks(problem: Problem, device: Device) -> TileSize:
    """The paper's sizes, with M the SRAM of one block in elements of the input type."""
    sram_elements = device.sram_per_block // problem.itemsize
    block_rows, block_cols = paper_sizes(sram_elements, problem.head_dim)
    reason = (
        f"M = {device.sram_per_block:,} bytes = {sram_elements:,} {problem.dtype}; "
        f"Bc = ceil(M / 4d) = {block_cols}, Br = min(Bc, d) = {block_rows}"
    )
    return TileSize(block_rows, block_cols, reason)


def shrink_to_fit(
    start: tuple[int, int],
    smaller: Callable[[int, int], tuple[int, int] | None],
    need: Callable[[int, int], int],
    device: Device,
    what: str,
) -> tuple[int, int]:
    """The first of `start`, smaller(start), ... whose bytes of SRAM fit the device."""
    size: tuple[int, int] | None = start
    while size is not None:
        least = size
        if need(*size) <= device.sram_per_block:
            return size
        size = smaller(*size)
    raise DoesNotFit(
        f"{what} needs at least {need(*least):,} bytes of SRAM (blocks of {least[0]} x {least[1]}); "
        f"{device.name} gives a block {device.sram_per_block:,} bytes"
    )


def round_down(value: int, granule: int) -> int:
    """The largest multiple of `granule` not above `value`, and at least one granule."""
    return max(granule, value // granule * granule)
