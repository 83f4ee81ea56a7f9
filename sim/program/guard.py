"""The host's accesses to pinned and managed memory that work of the device may still be using.

The program sees such memory itself, without a call. So pages on which work that the host has not waited for has touched every byte
are closed to it: to reads and writes if the work writes there, to writes if it reads. The program's handler of the fault (stubs.c)
asks; the access is judged against the history as a copy of the host's would be; then it may go on.

Pages of which only a part is in use stay open: system calls fail on closed ones, in programs that are right, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from cupyflash.basics import Array
from cupyflash.sim import ptx
from cupyflash.sim.program.channel import Channel
from cupyflash.sim.program.lines import Call, ProgramLines
from cupyflash.sim.program.memory import HOST, MANAGED, PAGE, Block, ProgramMemory
from cupyflash.sim.ptx.order.past import READ, WRITE, Touched
from cupyflash.sim.ptx.state.segments import WINDOW_BITS

CLOSED, READABLE, OPEN = 0, 1, 2
"""The protections of a page (stubs.c)."""


@dataclass
class HostGuard:
    """The pages that are closed to the host, by the address of their block."""

    channel: Channel
    memory: ProgramMemory
    history: ptx.History
    modes: dict[int, Array] = field(default_factory=dict)
    _host: object = None
    """The work that the host had waited for when pages were opened last."""

    def close(self, blocks: Iterable[Block]) -> None:
        """Closes and opens pages of these blocks by what is in use now."""
        for block in blocks:
            if block.kind not in (HOST, MANAGED) or block.registered:
                continue
            wrote, read = self.history.in_use(block.allocation.memory, PAGE)
            self.set(block, np.where(wrote, CLOSED, np.where(read, READABLE, OPEN)))

    def set(self, block: Block, modes: Array) -> None:
        before = self.modes.get(block.address, np.full(len(modes), OPEN))
        if (modes == OPEN).all():
            self.modes.pop(block.address, None)
        else:
            self.modes[block.address] = modes
        changed = np.flatnonzero(modes != before)
        for run in np.split(changed, np.flatnonzero((np.diff(changed) > 1) | (np.diff(modes[changed]) != 0)) + 1):
            if len(run):
                self.channel.protect(block.address + int(run[0]) * PAGE, len(run) * PAGE, int(modes[run[0]]))

    def waited(self) -> None:
        """Opens memory that is not in use any more, if the host has waited for something."""
        if not self.modes or self._host is self.history.host:
            return
        self._host = self.history.host
        self.close([block for block in self.memory.blocks.values() if block.address in self.modes])

    def open(self, address: int, size: int = 1) -> bool:
        """Opens the pages of a range; False if it is no memory that could be closed."""
        block = self.memory.blocks.get(address >> WINDOW_BITS)
        if block is None or block.kind not in (HOST, MANAGED) or not 0 <= address - block.address < block.stretch:
            return False
        if block.address in self.modes:
            modes = self.modes[block.address].copy()
            modes[(address - block.address) // PAGE : -(-(address - block.address + size) // PAGE)] = OPEN
            self.set(block, modes)
        return True

    def touched(self, address: int, write: bool, call: Call, lines: ProgramLines) -> list[ptx.Finding]:
        """Returns the races of an access of the host with what it has not waited for; after one the allocation stays open."""
        block = self.memory.find(address)
        if block is None or address - block.address >= block.size:
            return []
        at = address - block.address
        own = Touched(block.allocation.name, block.allocation.memory, WRITE if write else READ, ((at, at + 1),))
        found = self.history.touched(call.function, own, lambda: lines.of(call))
        if found:
            self.open(block.address, block.size)
        return found
