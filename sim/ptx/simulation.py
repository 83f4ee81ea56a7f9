"""How the kernels of a program are run, and what becomes of their findings: settings for a `with` block.

with simulation(arch="sm_90", findings="keep") as launches:
    kernel((8,), (128,), (x, y))
launches[-1].findings
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from cupyflash.nvrtc import architecture
from cupyflash.words import plural

from .module import Launch
from .report.findings import Finding
from .report.suppressions import Suppression, asked, told

POLICIES = ("raise", "warn", "keep")


class KernelFault(RuntimeError):
    """A launch had findings; its results stand in the arrays all the same. `launch` is all that it did."""

    def __init__(self, kernel: str, launch: Launch):
        self.kernel, self.launch = kernel, launch
        super().__init__(fault_text(kernel, launch.findings))

    def __reduce__(self) -> tuple[type, tuple[str, Launch]]:
        return KernelFault, (self.kernel, self.launch)  # from one process to another


class KernelWarning(UserWarning):
    """What is no fault and yet to be said: `Launch.notes`, what was suppressed, suppressions that let nothing pass."""


class KernelFaultWarning(KernelWarning):
    """What `KernelFault` says, as a warning."""


def fault_text(kernel: str, findings: tuple[Finding, ...], called: str = "fault") -> str:
    return "\n  ".join([f"kernel {kernel} has {plural(len(findings), called)}:", *map(str, findings)])


@dataclass
class Frame:
    """One `simulation`: what it sets, None for what is as outside of it, and the launches that it saw."""

    findings: str | None = None
    arch: str | None = None
    seed: int | None = None
    races: bool | None = None
    suppressions: tuple[Suppression, ...] | None = None
    launches: list[Launch] = field(default_factory=list)


_DEFAULT = Frame("raise", "compute_80", None, True, ())
_frames: ContextVar[tuple[Frame, ...]] = ContextVar("_frames", default=())


@contextmanager
def simulation(
    *,
    findings: str | None = None,
    arch: str | None = None,
    seed: int | None = None,
    races: bool | None = None,
    suppressions: str | os.PathLike[str] | Sequence[Suppression] | None = None,
) -> Iterator[list[Launch]]:
    """Set how `RawKernel` and `RawModule` run inside of the `with` block; gives the list of the launches made there, as they come.

    findings: "raise" (a `KernelFault`, the default), "warn" (a `KernelFaultWarning`) or "keep": they are in the launches only.
    arch: what is compiled for, "sm_90", "90a", "8.6"; the default is compute_80. seed: None runs warps in lock step where they
    agree, a number in a random order. races: whether to look for them. suppressions: as in `Module.launch`. What is left out is
    as in the block around.
    A block that says `findings` keeps its launches from the lists of those around it.
    Settings are those of the thread (of the `contextvars` context). Raises ValueError for wrong settings.
    """
    if findings is not None and findings not in POLICIES:
        raise ValueError(f"findings must be one of {', '.join(map(repr, POLICIES))}, got {findings!r}")
    allowed = None if suppressions is None else asked(suppressions)
    frame = Frame(findings, None if arch is None else architecture(str(arch)), seed, races, allowed)
    token = _frames.set((*_frames.get(), frame))
    try:
        yield frame.launches
    finally:
        _frames.reset(token)


def settings() -> Frame:
    """What holds here, of all blocks around."""
    frames = (_DEFAULT, *_frames.get())

    def last(name: str) -> object:
        return next((value for frame in reversed(frames) if (value := getattr(frame, name)) is not None), None)

    return Frame(*(last(name) for name in ("findings", "arch", "seed", "races", "suppressions")))  # type: ignore[arg-type]


def deliver(kernel: str, launch: Launch, stacklevel: int) -> None:
    """Enter a launch in the lists of the blocks around, and raise or warn as they say. `stacklevel` as for `warnings.warn`."""
    policy = _DEFAULT.findings
    for frame in reversed(_frames.get()):
        frame.launches.append(launch)
        if frame.findings is not None:
            policy = frame.findings
            break
    if launch.notes and policy != "keep":
        warnings.warn(fault_text(kernel, launch.notes, "note"), KernelWarning, stacklevel + 1)
    if policy != "keep":
        for line in told(launch.suppressed, launch.unmatched):
            warnings.warn(f"kernel {kernel}: {line}", KernelWarning, stacklevel + 1)
    if launch.findings and policy == "raise":
        raise KernelFault(kernel, launch)
    if launch.findings and policy == "warn":
        warnings.warn(fault_text(kernel, launch.findings), KernelFaultWarning, stacklevel + 1)
