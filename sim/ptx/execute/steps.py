"""How far each warp has come: loops that never end become a finding, not a hang."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..decode.code import Code
from ..order.sharing import is_strong
from ..report.findings import Findings, source
from ..state.lanes import WARP, Lanes, Wave

MAX_STEPS = 1 << 20
"""Stretches of straight code that a warp may run: a loop of as many rounds takes the machine half a minute."""

WINDOW = 1024
"""Most steps of the machine from one look at the counts to the next."""


class Steps:
    """Counts the stretches of straight code (up to a branch or a barrier) that each warp of a wave has run."""

    def __init__(self, code: Code, findings: Findings, limit: int):
        self.code = code
        self.findings = findings
        self.limit = limit
        self.window = min(WINDOW, limit)

    def begin_wave(self, wave: Wave) -> None:
        self.counts = np.zeros(wave.size // WARP, np.int64)
        self.trail: list[tuple[int, Lanes]] = []

    def exceeded(self, pc: int, lanes: Lanes) -> bool:
        """Lanes start a stretch at `pc`: whether some warp is now known to have run more than it may, which is reported."""
        self.trail.append((pc, lanes))
        if len(self.trail) < self.window:
            return False
        for group, times in Counter(lanes for _, lanes in self.trail).items():
            self.counts[group.warp_ids] += times
        over = np.flatnonzero((self.counts > self.limit) & (lanes.wave.alive_by_warp > 0))
        for warp in over.tolist():
            self.report(warp)
        self.trail.clear()
        return len(over) > 0

    def report(self, warp: int) -> None:
        """A finding at the first load or atomic that a warp has waited on lately, else at the first instruction."""
        code = self.code
        visits = sorted(((pc, lanes) for pc, lanes in self.trail if warp in lanes.warp_ids), key=lambda visit: visit[0])
        stretches = dict.fromkeys(pc for pc, _ in visits)
        round_trip = [i for pc in stretches for i in code.instructions[pc : code.block_end(pc)]]
        reads = [i for i in round_trip if i.opcode in ("ld", "atom") and "param" not in i.mods]
        loads = [i for i in reads if is_strong(i)] or reads
        lines = list(dict.fromkeys(source(i) for i in round_trip))
        message = (
            f"a warp has run {int(self.counts[warp])} stretches of code and goes on, of late at {', '.join(lines[:6])}"
            f"{' and elsewhere' if len(lines) > 6 else ''} (max_steps is {self.limit})"
        )
        lanes = visits[0][1]
        self.findings.report("endless", message, (loads or round_trip)[0], lanes, int(np.searchsorted(lanes.warp, warp)))
