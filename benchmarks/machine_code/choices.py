"""A test of the planner's model: all tiles that fa2's forward could have, by their machine code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupyflash.schedules import fa2_tiles
from cupyflash.schedules.fa2 import Fa2Schedule
from cupyflash.schedules.fa2_tiles import Fa2Candidate, Fa2Config
from machine_code.clocks import Effort
from machine_code.costs import ROUGH
from machine_code.ours import Ours, Subject, read

ROWS = 128  # of long rows: narrower tiles are for few rows
FEWEST_COLS = 32
MOST_HELD = 230  # registers of accumulators beyond which nothing is left


@dataclass(frozen=True)
class Tile:
    """A configuration: the planner's scores a clock (as if nothing kept it from being run) and why it refuses it, if it does; what
    the compiler makes of it, and the clock model's share of mma.sync's peak."""

    config: Fa2Config
    rate: float
    refused: str | None
    registers: int
    stack: int
    share: float

    def record(self) -> dict[str, Any]:
        """The tile for JSON."""
        c = self.config
        sizes = {"block_rows": c.block_rows, "block_cols": c.block_cols, "warp_rows": c.warp_rows, "stages": c.stages}
        sizes |= {"q_in_regs": c.q_in_regs, "blocks": c.blocks}
        return sizes | {
            "rate": self.rate,
            "refused": self.refused,
            "registers": self.registers,
            "stack": self.stack,
            "share": self.share,
        }

    def __str__(self) -> str:
        tile = f"{self.config.block_rows} x {self.config.block_cols}, {self.config}"
        made = f"{self.registers} registers, {self.stack} bytes of stack"
        told = f"{made}, model {self.share:.2f}, planner {self.rate:.2f} scores a clock"
        return f"{tile}: {told}" + (f"; refused: {self.refused}" if self.refused else "")


def tiles(subject: Subject, effort: Effort = ROUGH, among: Iterable[Fa2Config] | None = None) -> Iterator[Tile]:
    """All tiles of a forward, or those `among` some, for which shared memory has room; tiles with a doubtful trace are left out."""
    planned = Ours.of(subject)
    problem, device = subject.problem(), subject.device
    assert isinstance(planned.schedule, Fa2Schedule)
    for config in fa2_tiles.configs(problem, None) if among is None else among:
        judged = fa2_tiles.candidate(problem, device, config)
        room = device.sram_per_sm // (judged.shared_bytes + 1024)
        wide = config.block_rows == ROWS and config.block_cols >= FEWEST_COLS and config.warps <= fa2_tiles.MOST_WARPS
        if not wide or judged.shared_bytes > device.sram_per_block or fa2_tiles.accumulators(problem, config) > MOST_HELD:
            continue
        # As many blocks as there is room for, where registers may be spilt for them; eight warps fill a multiprocessor.
        chosen = judged.config if not judged.rejected else replace(config, blocks=max(1, min(room, 8 // config.warps)))
        parts = fa2_tiles.part_clocks(problem, device, chosen)
        rate = chosen.blocks * chosen.block_rows * chosen.block_cols / fa2_tiles.turn(chosen, parts, chosen.blocks)
        kernel = planned.schedule.kernel_of(Fa2Candidate(chosen, judged.shared_bytes, judged.registers))
        code = read(kernel, device)
        turns = planned.turns_of(code, config.block_rows * config.block_cols)
        if turns is not None:
            share = code.cost(turns).share(effort).tensor
            yield Tile(chosen, rate, judged.rejected, code.resources["REG"], code.resources["STACK"], share)


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's; the mean rank where some are alike."""

    def ranks(values: list[float]) -> np.ndarray:
        array = np.asarray(values)
        return np.array([(array < each).sum() + ((array == each).sum() - 1) / 2 for each in array])

    return float(np.corrcoef(ranks(one), ranks(other))[0, 1]) if len(one) > 1 else 1.0


def judged(subject: Subject, effort: Effort = ROUGH, among: Iterable[Fa2Config] | None = None) -> tuple[dict[str, Any], list[str]]:
    """The tiles of a subject, best first: for JSON, and lines for a reader."""
    found = sorted(tiles(subject, effort, among), key=lambda each: -each.share)
    planned = fa2_tiles.choose(subject.problem(), subject.device).config
    chosen = next(place for place, each in enumerate(found) if each.config == planned)
    runs = [each for each in found if not each.refused]
    agree = rank_correlation([each.rate for each in runs], [each.share for each in runs])
    needless = [each for each in found if each.refused and each.stack == 0]
    spilled = [each for each in runs if each.stack]
    record = {
        "subject": str(subject),
        "tiles": [each.record() for each in found],
        "chosen": chosen + 1,
        "share": found[chosen].share,
        "best": found[0].share,
        "refused_without_stack": len(needless),
        "best_refused_without_stack": max((each.share for each in needless), default=0.0),
        "run_with_stack": len(spilled),
        "rank_correlation": round(agree, 3),
    }
    return record, [
        f"{subject}: {len(found)} tiles; the planner's choice is number {chosen + 1} of the clock model's "
        f"({found[chosen].share:.2f}, the best has {found[0].share:.2f}); rank correlation of what it does not refuse {agree:.2f}; "
        f"{len(needless)} refused that have no stack, {len(spilled)} not refused that have one",
        *(f"    {each}" for each in found),
    ]
