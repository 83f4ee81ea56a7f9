"""Barriers that a kernel does not need, shown by its accesses: nothing to order, or no byte in common between warps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cupyflash.basics import Array
from cupyflash.sim.ptx.state.segments import Access

BARRIER = re.compile(r"^\s*(bar\.sync|barrier\.sync)\b.*;$", re.MULTILINE)
LABEL = re.compile(r"(\$\w+):")
JUMP = re.compile(r"\s*(@!?%\w+\s+)?bra(?:\.uni)?\s+(\$\w+);")
ACCESS = re.compile(r"\b(?:ld|st|atom|red)\b\S*\.(?:shared|global)|\b(?:cp\.async\.c[ag]|ldmatrix|stmatrix)\b")
OF_ANOTHER_UNIT = re.compile(r"\b(?:cp\.async\.bulk\.(?!commit|wait)\S*|cp\.reduce\S*|mbarrier\.\S*)")
"""Accesses whose bytes an observer does not see whole, but their threads."""
COPY, WAIT = re.compile(r"\bcp\.async\.c[ag]\b"), re.compile(r"\bcp\.async\.wait_(?:group|all)\b")
UNSEEN = re.compile(r"\bwgmma\.(?:mma_async|wait_group)\b|\bcp\.async\.bulk\.wait_group\b")
"""Accesses, and waits for them, that an observer does not see."""

FOR_OTHER_BLOCKS = re.compile(r"\b(?:atom|red)\b\S*\.global|\.(?:acquire|release|acq_rel|relaxed|volatile)\b|\b(?:fence|membar)\b")
"""Instructions by which other blocks learn of accesses: a barrier puts those of all warps before them, or behind."""

Run = Callable[[Callable[[Access], None]], Any]
"""Runs a launch with an observer of its accesses."""


def beside(text: str, line: int) -> tuple[set[int], set[int]]:
    """Returns the lines of the accesses that any way leads from to a barrier, and from it to, without another barrier between."""
    lines = text.split("\n")
    labels = {found[1]: n for n, each in enumerate(lines) if (found := LABEL.match(each))}
    behind: dict[int, list[int]] = {}
    for n, each in enumerate(lines):
        jump = JUMP.match(each)
        ends = (jump and not jump[1]) or re.match(r"\s*(ret|exit);", each)
        behind[n] = ([labels[jump[2]]] if jump else []) + [n + 1] * (not ends and n + 1 < len(lines))
    before: dict[int, list[int]] = {n: [] for n in behind}
    for n, others in behind.items():
        for other in others:
            before[other].append(n)
    found = []
    for ways in (before, behind):
        reached, new = {line - 1}, list(ways[line - 1])
        while new:
            n = new.pop()
            if n not in reached and not BARRIER.match(lines[n]):
                reached.add(n)
                new += ways[n]
        waits = any(WAIT.search(lines[n]) for n in reached)
        reached |= {n for n, each in enumerate(lines) if waits and COPY.search(each)}  # their bytes are there now
        found.append(
            {n + 1 for n in reached if any(kind.search(lines[n]) for kind in (ACCESS, OF_ANOTHER_UNIT, UNSEEN, FOR_OTHER_BLOCKS))}
        )
    return found[0], found[1]


class Touched:
    """An observer: by line of PTX and side (written or not), the bytes that each warp touches, as (block, array, byte, warp)."""

    def __init__(self, lines: Iterable[int]):
        self.lines, self.rows = set(lines), {}  # type: ignore[var-annotated]
        self.arrays: dict[int, int] = {}
        self.warps: dict[int, set[int]] = {}

    def __call__(self, access: Access) -> None:
        line = access.instruction.line
        if line in self.lines:
            lanes = access.lanes
            per_block = lanes.wave.lanes_per_block // 32
            self.warps.setdefault(line, set()).update(np.unique(lanes.warp % per_block).tolist())
        if line in self.lines and isinstance(access.size, int):
            array = self.arrays.setdefault(id(access.segment), len(self.arrays))
            lanes, many = access.lanes, access.size
            bytes_of = access.addresses.astype(np.int64)[:, None] + np.arange(many)
            columns = (np.asarray(lanes.block), np.full(lanes.n, array), bytes_of.ravel(), np.asarray(lanes.warp))
            rows = np.stack([one if len(one) == lanes.n * many else np.repeat(one, many) for one in columns], 1)
            self.rows.setdefault((line, access.write), []).append(np.unique(rows, axis=0))

    def warps_of(self, lines: set[int]) -> set[int]:
        """Returns the warps of a block that execute these lines."""
        return set().union(*(self.warps.get(line, ()) for line in lines))

    def of(self, lines: set[int], write: bool) -> Array:
        """Returns the rows of these lines that write, or that read."""
        found = [rows for (line, side), many in self.rows.items() if line in lines and side == write for rows in many]
        return np.unique(np.concatenate(found), axis=0) if found else np.empty((0, 4), np.int64)


def shared_by_warps(first: Array, second: Array) -> bool:
    """True if a byte of the one is another warp's of the other."""
    both = [{tuple(row) for row in rows.tolist()} for rows in (first, second)]
    warps: dict[tuple[int, ...], set[int]] = {}
    for *place, warp in both[0]:
        warps.setdefault(tuple(place), set()).add(warp)
    return any(warps.get(tuple(place), {warp}) != {warp} for *place, warp in both[1])


def reasons(text: str, missed: list[int], run: Run) -> dict[int, str]:
    """Returns why the barriers of these lines are not needed: `text` is the kernel with them, which `run` launches.

    Of the accesses of memory that threads share, before a barrier and behind it, as far as the barriers next to it:
    "nothing behind", "nothing before": there are none on one side. "not run": none was made. "one warp": all are one warp's of
    each block. "apart": no two warps of a block touch one byte on both sides that one of them writes, in whatever order they come,
    and none is for other blocks. "not shown": none of these; the machine, which knows of each access of a byte the one before it,
    found all ordered in the way that this launch took.
    """
    sides = {line: beside(text, line) for line in missed}
    touched = Touched(one for both in sides.values() for each in both for one in each)
    if missed:
        run(touched)
    lines = text.split("\n")
    found = {}
    for line, (before, behind) in sides.items():
        if not before or not behind:
            found[line] = "nothing behind" if before else "nothing before"
        elif not (warps := touched.warps_of(before | behind)):
            found[line] = "not run"
        elif any(kind.search(lines[one - 1]) for one in before | behind for kind in (UNSEEN, FOR_OTHER_BLOCKS)):
            found[line] = "not shown"
        elif len(warps) == 1:
            found[line] = "one warp"
        elif any(OF_ANOTHER_UNIT.search(lines[one - 1]) for one in before | behind):
            found[line] = "not shown"
        else:
            pairs = [(touched.of(before, a), touched.of(behind, b)) for a, b in ((True, True), (True, False), (False, True))]
            found[line] = "not shown" if any(shared_by_warps(*pair) for pair in pairs) else "apart"
    return found
