"""The base of FlashAttention's Algorithms 1 and 4 (arXiv 2205.14135): K/V blocks in the outer loop, Q blocks in the inner one."""

from __future__ import annotations

from collections.abc import Callable

from cupyflash.device import Device
from cupyflash.request.problem import Problem
from cupyflash.schedules.base import GRANULE, MAX_BLOCK_ROWS
from cupyflash.schedules.moves import When
from cupyflash.tiling import TileSize, paper_blocks, round_down, shrink_to_fit

COLUMN, COLUMN_END = When("j"), When("j", at="last")
"""The begin and the end of an outer step."""
EARLIER, LAST = When(tiles="earlier"), When("gi", at="last")
"""The visits of a row block but the last, and the last."""
SEEN_ROWS, UNSEEN, EVERY_ROW = (When("gi", tiles, "begin") for tiles in ("visited", "unseen", "every"))
"""The begin of a thread block: once for each row block that is visited, that is not, or for all."""


def fit_paper_blocks(
    problem: Problem, device: Device, shared_bytes: Callable[[Problem, int, int], int], what: str, residents: str
) -> TileSize:
    """The paper's blocks, rounded down to tensor core tiles, and further until their rooms fit the SRAM.

    `shared_bytes(problem, block_rows, block_cols)` are the bytes of these rooms, for the `residents`; `what` names the algorithm.
    Raises `DoesNotFit`.
    """
    paper = paper_blocks(problem, device)
    rounded = round_down(paper.block_cols, GRANULE)
    rows = min(round_down(paper.block_rows, GRANULE), MAX_BLOCK_ROWS)

    def smaller(block_rows: int, block_cols: int) -> tuple[int, int] | None:
        if block_cols == GRANULE:
            return None
        return min(block_rows, block_cols - GRANULE), block_cols - GRANULE

    block_rows, block_cols = shrink_to_fit(
        (rows, rounded),
        smaller,
        lambda r, c: shared_bytes(problem, r, c),
        device,
        f"{what} at head_dim {problem.head_dim} {problem.dtype}",
    )
    reasons = [f"in steps of {GRANULE}: {rounded} columns"]
    if block_cols < rounded:
        reasons.append(f"{residents} fit at {block_cols} columns")
    if rows == MAX_BLOCK_ROWS < paper.block_rows:
        reasons.append(f"the register file holds {MAX_BLOCK_ROWS} rows")
    reasons.append(f"{shared_bytes(problem, block_rows, block_cols):,} of {device.sram_per_block:,} bytes")
    return TileSize(block_rows, block_cols, "; ".join(reasons))
