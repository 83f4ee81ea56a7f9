"""Blocks that differ in work, as under a causal mask: how much each has, by a sample of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from cupyflash.schedules.balance import Pieces, busiest

from .execution import CodeLaunch
from .steps import flops_of

SAMPLED, ALIKE = 17, 1.02
"""Blocks whose work is counted, and how much more one may have than another that has as much."""
FOLLOWED = 20_000
"""Groups of a run's instructions by which blocks that run all at once are compared: one of more takes work in turns."""
SHARE = 0.25
"""The work of the short blocks that are run beside the longest ones, at least, as a share of theirs."""


def counted(launch: CodeLaunch, blocks: Sequence[int]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Runs blocks together, whole clusters of them: the instructions that the warps of each of `blocks` issue, their floating-point
    operations, and the way of the first block's first warp."""
    warps, code, size = launch.warps, launch.kernel.instructions, prod(launch.cluster)
    every = sorted({block // size * size + rank for block in blocks for rank in range(size)})
    asked = [every.index(block) for block in blocks]
    issued, flops = np.zeros(len(every) * warps), np.zeros(len(every) * warps)
    issues, operations, path = Counter[tuple[int, ...]](), Counter[tuple[int, ...]](), []
    each = [int(flops_of(i)) for i in code]
    for event in launch.run(*(launch.index(block) for block in every)):
        issues[event.warps] += 1
        if each[event.at]:
            operations[event.warps] += each[event.at]
        if event.warps[0] == 0:
            path.append(event.at)
    for found, counts in (issued, issues), (flops, operations):
        for which, count in counts.items():
            found[list(which)] += count
    return issued.reshape(-1, warps).sum(1)[asked], flops.reshape(-1, warps).sum(1)[asked], path


def longer(launch: CodeLaunch, blocks: Sequence[int]) -> int:
    """Returns the block of some that issues more than the others, the first one if they are alike or take long."""
    issued, warps = np.zeros(len(blocks)), launch.warps
    for count, event in enumerate(launch.run(*(launch.index(block) for block in blocks))):
        if count > FOLLOWED:
            return blocks[0]
        for warp in event.warps:
            issued[warp // warps] += 1
    return blocks[int(issued.argmax())] if issued.max() > ALIKE * issued.min() else blocks[0]


def exchanges(launch: CodeLaunch, blocks: Sequence[int]) -> int:
    """Counts the threads of each of some blocks that swap a number which all of these swap (`atomicCAS`); 0 if they share none.

    A loop around it, which comes again as nobody knows whether a swap succeeds, counts once.
    """
    code, warps = launch.kernel.instructions, launch.warps
    if not any(i.opcode in ("ATOM", "ATOMG") and "CAS" in i.modifiers for i in code):
        return 0
    found: list[set[tuple[int, ...]]] = [set() for _ in blocks]
    for event in launch.run(*(launch.index(block) for block in blocks)):
        access = event.access
        if access is None or access.space != "global" or "CAS" not in code[event.at].modifiers:
            continue
        for warp in event.warps:
            lanes = np.flatnonzero(access.lanes[warp]).tolist()
            found[warp // warps].update((int(access.addresses[warp][lane]), event.at, warp % warps, lane) for lane in lanes)
    counts = [Counter(address for address, *_ in each) for each in found]
    return max((min(each[address] for each in counts) for address in counts[0]), default=0)


@dataclass(frozen=True)
class Work:
    """The instructions of each block of a `period`, after which blocks repeat themselves, and the mean of a block's operations."""

    instructions: np.ndarray
    flops: float

    @classmethod
    def of(cls, launch: CodeLaunch, period: int) -> Work:
        """Counts some of a period's blocks, between which the others lie."""
        some = np.unique(np.linspace(0, period - 1, SAMPLED).round().astype(int))
        issued, flops, _ = counted(launch, some.tolist())
        every = np.arange(period)
        return cls(np.interp(every, some, issued), float(np.interp(every, some, flops).mean()))

    @property
    def longest(self) -> int:
        """A block with the most work."""
        return int(self.instructions.argmax())

    @property
    def short(self) -> int:
        """The block that has at least a share of the longest one's work, and the least."""
        enough = self.instructions >= SHARE * self.instructions.max()
        return int(np.where(enough, self.instructions, np.inf).argmin())

    def busiest(self, clocks: tuple[float, float], blocks: int, places: int) -> tuple[float, float]:
        """The clocks of the busiest of `places` that take blocks in turns, and of the mean one. `clocks`: those of the longest
        block and of the short one; others' follow from their instructions on a line."""
        more, less = self.instructions[self.longest], self.instructions[self.short]
        slope = (clocks[0] - clocks[1]) / (more - less)
        of = np.maximum(clocks[1] + (self.instructions - less) * slope, 0.0)
        pieces = Pieces(blocks, lambda numbers: of[numbers % len(of)], len(of))
        return busiest(pieces, min(places, blocks)), pieces.total(blocks) / min(places, blocks)
