"""What the machine has to say about a kernel: findings with the place in the CUDA source."""

from __future__ import annotations

from dataclasses import dataclass, field

from cupyflash.words import plural

from ..state.lanes import Lanes
from ..text.syntax import Instruction

LIMIT = 100
"""How many findings a launch keeps; the rest is only counted."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, at the first lane that did it.

    `kind` is one of: "out of bounds", "misaligned", "null pointer", "read-only", "uninitialised" (memory or a register),
    "in flight" (shared memory whose asynchronous copy, or registers whose wgmma, nobody waited for), "missing fence" (wgmma's, of
    registers), "swizzle" and "disagreement" (of wgmma's descriptors with a tile, of the warps of a warpgroup), "register budget"
    (setmaxnreg), "race" (`order.races`), "proxy" (`order.proxy`), "deadlock", "endless" (a warp has run `max_steps` stretches
    of code), "partial barrier" (threads had exited before a barrier of the whole block), "missing lanes" (a warp-wide
    instruction without all lanes that it names), "inactive source" (a shuffle from a lane that does not take part), "bad
    arrival" (at an mbarrier), "bad tensor map" (`memory.maps`), "bad call" (through a pointer that is no such function), "stack
    overflow", "trap" (also a failed assertion).
    `source` is (file, line) of the CUDA source where the PTX has line information. `block` is the linear block index,
    `warp` counts within the block, `lane` within the warp. `address` is the virtual address (shared: the offset).
    """

    kind: str
    message: str
    kernel: str
    source: tuple[str, int] | None
    ptx_line: int
    block: int
    warp: int
    lane: int
    address: int | None = None
    tensor: str | None = None

    def __str__(self) -> str:
        place = f"{self.source[0]}:{self.source[1]}" if self.source else f"PTX line {self.ptx_line}"
        return f"{place}: {self.kind}: {self.message} [{self.kernel}, block {self.block}, warp {self.warp}, lane {self.lane}]"


@dataclass
class Findings:
    """Collects the findings of a launch: the first of each (kind, instruction, tensor); `total` counts all lanes."""

    kernel: str
    total: int = 0
    items: list[Finding] = field(default_factory=list)
    seen: set[tuple[object, ...]] = field(default_factory=set)

    def report(
        self,
        kind: str,
        message: str,
        instruction: Instruction,
        lanes: Lanes,
        position: int,
        *,
        count: int = 1,
        address: int | None = None,
        tensor: str | None = None,
    ) -> None:
        """Record a finding at `position` within `lanes`; `count` lanes did the same in this execution."""
        key = (kind, instruction.line, instruction.text, tensor)
        self.record(kind, message, instruction, lanes.place(position), key, count=count, address=address, tensor=tensor)

    def record(
        self,
        kind: str,
        message: str,
        instruction: Instruction,
        place: tuple[int, int, int],
        key: tuple[object, ...],
        *,
        count: int,
        address: int | None,
        tensor: str | None,
    ) -> None:
        """Record a finding of (block, warp, lane) `place`, the first with this key."""
        self.total += count
        if key in self.seen or len(self.items) >= LIMIT:
            return
        self.seen.add(key)
        block, warp, lane = place
        self.items.append(
            Finding(kind, message, self.kernel, instruction.source, instruction.line, block, warp, lane, address, tensor)
        )


@dataclass(frozen=True)
class Stuck:
    """Lanes that cannot go on at an instruction, and what they wait for: the end of "32 threads wait ..."."""

    instruction: Instruction
    lanes: Lanes
    what: str


MOST_GROUPS = 6
"""Of those that wait elsewhere, how many a deadlock's message names."""


def report_deadlock(findings: Findings, groups: list[Stuck]) -> None:
    """Nobody can go on: a finding for each group, with where the others are."""
    places: dict[tuple[Instruction, str], list[Lanes]] = {}
    for group in groups:
        places.setdefault((group.instruction, group.what), []).append(group.lanes)
    for group in groups:
        others = [
            f"{crowd(*lanes)} at {source(i)} {what}"
            for (i, what), lanes in places.items()
            if (i, what) != (group.instruction, group.what)
        ]
        more = [f"and {len(others) - MOST_GROUPS} groups more"] if len(others) > MOST_GROUPS else []
        elsewhere = "".join(f"; {other}" for other in [*others[:MOST_GROUPS], *more])
        message = f"{stuck(group.lanes.n)} {group.what}{elsewhere}"
        findings.report("deadlock", message, group.instruction, group.lanes, 0, count=group.lanes.n)


def crowd(*sets: Lanes) -> str:
    """Which threads these are, shortly: warps 0-3 of block 1."""
    where: dict[tuple[int, ...], list[int]] = {}
    by_block: dict[int, set[int]] = {}
    for lanes in sets:
        for warp in lanes.warp_ids.tolist():
            block, local = divmod(warp, lanes.wave.warps_per_block)
            by_block.setdefault(lanes.wave.number(lanes.wave.first_block + block), set()).add(local)
    for block, warps in sorted(by_block.items()):
        where.setdefault(tuple(sorted(warps)), []).append(block)
    parts = [f"{ranges('warp', list(warps))} of {ranges('block', blocks)}" for warps, blocks in where.items()]
    return ", ".join(parts[:4]) + (f" and of {len(parts) - 4} blocks more" if len(parts) > 4 else "")


def ranges(noun: str, numbers: list[int]) -> str:
    """warp 3; warps 0-3, 8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"{noun}{'s' if len(numbers) > 1 else ''} {text}"


def stuck(threads: int) -> str:
    """Who does not go on, for a message: 1 thread waits, 2 threads wait."""
    return f"{plural(threads, 'thread')} {'waits' if threads == 1 else 'wait'}"


def source(i: Instruction) -> str:
    """Where an instruction comes from: file:line of the CUDA source if the PTX says so."""
    return f"{i.source[0].rpartition('/')[2]}:{i.source[1]}" if i.source else f"PTX line {i.line} ({i.text})"
