"""setmaxnreg: how many registers the warps of a block hold (PTX ISA, "Miscellaneous Instructions: setmaxnreg").

A block gets the registers per thread that its directives say (`Function.registers`), times its threads; but no more than the
largest count that an .inc of the kernel asks for, as ptxas 13.0 has it. A warp gives some back (.dec) or takes more (.inc), which
waits until the block's pool has them. Without such directives ptxas ignores the instruction.
"""

from __future__ import annotations

import numpy as np

from ..decode.registry import RegisterCount
from ..report.findings import Stuck
from ..state.lanes import WARP, Lanes
from .agreement import Agreement
from .host import Host


class RegisterPools:
    """The pools of a wave's blocks. `held`: registers per thread of each warp; `free`: registers of each block."""

    def __init__(self, machine: Host, agreement: Agreement):
        self.machine = machine
        self.agreement = agreement
        self.launch = machine.code.registers
        counts = [p.control.count for p in machine.code.plans if isinstance(p.control, RegisterCount) and p.control.more]
        if self.launch is not None and counts:
            self.launch = min(self.launch, max(counts))
        self.per_block = machine.wave.warps_per_block
        self.held = np.full(machine.wave.size // WARP, self.launch or 0, np.int64)
        self.free = np.zeros(machine.wave.blocks, np.int64)
        self.waiting: list[tuple[int, Lanes]] = []

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def arrive(self, pc: int, lanes: Lanes) -> None:
        """Whole warps come to a setmaxnreg."""
        self.agreement.resize(self.machine.code.instructions[pc], lanes)
        if self.launch is None:
            self.machine.push(pc + 1, lanes)
            return
        for warp in lanes.warp_ids.tolist():
            self.waiting.append((pc, lanes.subset(np.flatnonzero(lanes.warp == warp))))
        # Who gives back goes first; then whoever waits, as long as somebody gets on.
        moved = True
        while moved:
            moved = False
            for one in list(self.waiting):
                moved |= self.settle(one)

    def settle(self, one: tuple[int, Lanes]) -> bool:
        """Whether a warp gets on."""
        pc, lanes = one
        control = self.machine.code.plans[pc].control
        assert isinstance(control, RegisterCount)
        warp = int(lanes.warp_ids[0])
        block, held = warp // self.per_block, int(self.held[warp])
        more = (control.count - held) * WARP
        if control.more != (more >= 0) and more:
            message = f"setmaxnreg.{'inc' if control.more else 'dec'} to {control.count} registers in a warp that has {held}"
            instruction = self.machine.code.instructions[pc]
            self.machine.memory.findings.report("register budget", message, instruction, lanes, 0, count=lanes.n)
        elif more > self.free[block]:
            return False
        self.free[block] -= more
        if self.machine.diary is not None:
            self.machine.diary.resized(lanes, pc, control.more)
        self.held[warp] = control.count
        self.waiting.remove(one)
        self.machine.push(pc + 1, lanes)
        return True

    def stuck(self) -> list[Stuck]:
        machine, out = self.machine, []
        for pc, lanes in self.waiting:
            control = machine.code.plans[pc].control
            assert isinstance(control, RegisterCount)
            block = int(lanes.block[0])
            held = self.held[block * self.per_block : (block + 1) * self.per_block]
            pool = (self.launch or 0) * WARP * self.per_block
            shares = ", ".join(f"{np.count_nonzero(held == count)} of {count}" for count in np.unique(held).tolist())
            what = (
                f"for {control.count} registers a thread: of the block's {pool} registers {int(self.free[block])} are free; "
                f"its warps hold, a thread: {shares}"
            )
            out.append(Stuck(machine.code.instructions[pc], lanes, what))
        return out
