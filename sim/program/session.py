"""One run of a program: its process, its runtime, and the result."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cupyflash.device import Device
from cupyflash.sim import ptx
from cupyflash.sim.program import build
from cupyflash.sim.program.channel import Channel
from cupyflash.sim.program.launches import BudgetSpent, KernelRecord
from cupyflash.sim.program.lines import ProgramLines
from cupyflash.sim.program.runtime import Runtime
from cupyflash.sim.program.streams import Settings


@dataclass(frozen=True)
class ProgramResult:
    """A run's end: `status` is the program's exit status (negative: the signal that ended it), `kernels` what was launched.

    `missing`: runtime functions that are not simulated, with the number of their calls; `failed`: calls that returned an error;
    `cut`: the program was ended, as its launches took all the time that they were given, or, if `memory` says so, for want of
    memory; `timed`: it asked for times, which were
    the simulation's; `predicted`: for times that the clock predicted.
    """

    status: int
    kernels: list[KernelRecord]
    missing: dict[str, int] = field(default_factory=dict)
    failed: dict[tuple[str, str], int] = field(default_factory=dict)
    cut: bool = False
    memory: str = ""
    timed: bool = False
    predicted: bool = False
    seconds: float = 0.0

    @property
    def findings(self) -> list[ptx.Finding]:
        """Returns all findings, the first of each text, kernel by kernel."""
        return [finding for kernel in self.kernels for finding in kernel.findings.values()]


def run_program(
    program: Path,
    arguments: Sequence[str] = (),
    *,
    device: Device,
    settings: Settings | None = None,
    runtime: type[Runtime] = Runtime,
) -> ProgramResult:
    """Runs a program that loads the CUDA runtime library, with the simulated device and its `runtime` in its place.

    Raises `build.BuildError` for a program that cannot run here.
    """
    library = build.library(program)
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    served = runtime(channel, device, library.version, library.names, library.imported, settings or Settings())
    memory, served.lines = served.memory.file, ProgramLines(program.resolve())
    environment = os.environ | {"CUPYFLASH_RUN": f"{theirs.fileno()},{memory}"}
    environment["LD_LIBRARY_PATH"] = ":".join(filter(None, (str(library.folder), os.environ.get("LD_LIBRARY_PATH"))))
    with ours, theirs:
        process = subprocess.Popen([str(program.resolve()), *arguments], env=environment, pass_fds=(theirs.fileno(), memory))
        theirs.close()
        cut, short = False, ""
        try:
            channel.run()
        except BudgetSpent:
            cut = True
            process.kill()
        except MemoryError as error:
            cut, short = True, str(error) or "no more could be allocated"
            process.kill()
        except BaseException:
            process.kill()
            raise
        finally:
            status = process.wait()
            served.memory.close()
    kernels = list(served.records.values())
    return ProgramResult(
        status, kernels, dict(served.missing), dict(served.failed), cut, short, served.timed, served.predicted, served.spent
    )
