"""Shared memory's banks while a kernel runs: for each line of source, the access of one warp with the most conflicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupyflash.basics import Report
from cupyflash.sim.ptx.state.lane_sets import WARP, AddressPattern, bank_columns, bank_turns
from cupyflash.sim.ptx.state.segments import Access
from cupyflash.sim.ptx.text.syntax import Line

BANKS = 32


@dataclass(frozen=True)
class BankAccess:
    """One access of one warp: `lanes` at `offsets` in shared memory, `kind` and `width` (bytes a lane) as in `Counts.shared`."""

    line: Line
    kind: str
    width: int
    block: int
    warp: int
    lanes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def passes(self) -> list[int]:
        """The wavefront, from 0, in which each lane is served.

        Lanes take turns, each of as many lanes as 32 banks serve at once; in a turn, a wavefront has one word of each bank.
        """
        unit, columns = max(self.width, 4), bank_columns(self.width)
        served: dict[tuple[int, int], dict[int, int]] = {}
        places = [(lane // columns, offset // unit) for lane, offset in zip(self.lanes, self.offsets, strict=True)]
        for turn, word in places:
            words = served.setdefault((turn, word % columns), {})
            words.setdefault(word, len(words))
        begun, start = {}, 0
        for turn in sorted({turn for turn, _ in places}):
            begun[turn] = start
            start += max(len(words) for (other, _), words in served.items() if other == turn)
        return [begun[turn] + served[turn, word % columns][word] for turn, word in places]

    def to_dict(self) -> Report:
        """The access for the page; `banks` has the first bank of each lane and their number."""
        passes, columns = self.passes, bank_columns(self.width)
        wavefronts = max(passes) + 1
        ideal = len({lane // columns for lane in self.lanes})
        return {
            "file": self.line[0],
            "line": self.line[1],
            "kind": self.kind,
            "width": self.width,
            "block": self.block,
            "warp": self.warp,
            "wavefronts": wavefronts,
            "ideal_wavefronts": ideal,
            "conflicts": wavefronts - ideal,
            "lanes": [
                {"lane": lane, "offset": offset, "bank": offset // 4 % BANKS, "banks": max(self.width // 4, 1), "wavefront": number}
                for lane, offset, number in zip(self.lanes, self.offsets, passes, strict=True)
            ],
        }


class WorstAccesses:
    """An observer of a launch that keeps, for each line, kind and width, the warp's access with the most bank conflicts."""

    def __init__(self) -> None:
        self._worst: dict[tuple[Line, str, int], tuple[int, BankAccess]] = {}
        self._last: dict[tuple[Line, str, int], tuple[AddressPattern, int]] = {}

    def __call__(self, access: Access) -> None:
        size = access.size
        if access.space != "shared" or not isinstance(size, int):
            return
        key = access.instruction.place, access.kind, size
        first, pattern = access.lanes.pattern(access.addresses, size)
        known, last = self._worst.get(key), self._last.get(key)
        # A loop repeats the same access.
        if last is not None and last[0] is pattern and last[1] == first & 3:
            return
        self._last[key] = pattern, first & 3
        passes, ideal = pattern.wavefronts(first)
        if known is not None and passes - ideal <= known[0]:
            return
        addresses = access.addresses.astype(np.int64)
        turns = bank_turns(access.lanes, addresses, size)
        base = int(access.lanes.phase(bank_columns(size))[0])
        warps = (base + np.arange(len(turns)) * bank_columns(size)) // WARP
        extra = np.bincount(warps - warps[0], weights=turns - (turns > 0))
        conflicts = int(extra.max())
        if known is not None and conflicts <= known[0]:
            return
        # Among warps with equally many conflicts, the first one whose lanes take part.
        there = access.lanes.warp_ids - warps[0]
        warp = int(there[np.argmax(extra[there])]) + int(warps[0])
        positions = np.flatnonzero(access.lanes.warp == warp)
        block, number, _ = access.lanes.place(int(positions[0]))
        lanes, offsets = access.lanes.lane[positions].tolist(), addresses[positions].tolist()
        self._worst[key] = conflicts, BankAccess(*key, block, number, tuple(lanes), tuple(offsets))

    @property
    def accesses(self) -> Sequence[BankAccess]:
        """The accesses kept, those with the most conflicts first."""
        return [access for _, access in sorted(self._worst.values(), key=lambda item: -item[0])]
