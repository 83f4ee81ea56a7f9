"""Calls of a program, with their lines in its source: by binutils' addr2line, from what nvcc's -g tells of the host's code."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from cupyflash.sim.ptx.text.syntax import Line

WRAPPERS = ("cuda_runtime.h", "cuda_runtime_api.h")
"""Headers with functions around the runtime's own: the line is their caller's."""


@dataclass(frozen=True)
class Call:
    """A call of a runtime function: its name, and the addresses in the program that it returns to, its own caller's first."""

    function: str
    callers: tuple[int, ...] = ()


@dataclass
class ProgramLines:
    """The lines of a program's file, without a file none."""

    program: Path | None = None
    _known: dict[int, Line | None] = field(default_factory=dict)

    def of(self, call: Call) -> Line | None:
        """Returns the line of a call; None if the program was built without lines, or nothing here can read them."""
        lines = (self.at(address) for address in call.callers if address)
        return next((line for line in lines if line and Path(line[0]).name not in WRAPPERS), None)

    def at(self, address: int) -> Line | None:
        """Returns the line of the call that returns to an address."""
        if address not in self._known:
            self._known[address] = self._read(address - 1)
        return self._known[address]

    def _read(self, address: int) -> Line | None:
        reader = shutil.which("addr2line") or shutil.which("llvm-addr2line")
        if reader is None or self.program is None:
            return None
        done = subprocess.run([reader, "-e", str(self.program), hex(address)], capture_output=True, text=True)
        file, _, line = done.stdout.split(" (")[0].strip().rpartition(":")
        return (file, int(line)) if line.isdigit() and int(line) else None
