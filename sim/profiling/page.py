"""A kernel's profile as one page: its source with heat by line, findings at their lines, tensors, shared memory as 32 banks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cupyflash.basics import Report
from cupyflash.sim.page import filled

if TYPE_CHECKING:
    from cupyflash.sim.profiling import Profile

AROUND = 12
"""Lines of source before and behind one that was executed, or that a finding names: the rest of a long file stays out."""


def report(profile: Profile) -> Report:
    """The data of the page: `Profile.to_dict`, `sources` (parts of files) and `banks` (accesses to shared memory)."""
    told = profile.to_dict()
    return told | {"sources": sources(profile, told), "banks": [access.to_dict() for access in profile.banks]}


def sources(profile: Profile, told: Report) -> list[Report]:
    """Parts of the executed files, the kernel's own first, then by instructions; without text if a file cannot be read."""
    needed: dict[str, set[int]] = {}
    work: dict[str, int] = {}
    for file, number in places(told):
        needed.setdefault(file, set()).add(number)
    for line in told["lines"]:
        work[line["file"]] = work.get(line["file"], 0) + line["instructions"]
    own = os.path.realpath(profile.file) if profile.file else ""
    out = []
    for file in sorted(needed, key=lambda file: (file != own, -work.get(file, 0), file)):
        lines = profile.sources.get(file, ())
        around = {n for at in needed[file] for n in range(max(at - AROUND, 1), min(at + AROUND, len(lines)) + 1)}
        parts: list[Report] = []
        for n in sorted(around | needed[file]):
            if not parts or n != parts[-1]["first"] + len(parts[-1]["lines"]):
                parts.append({"first": n, "lines": []})
            parts[-1]["lines"].append(lines[n - 1] if n <= len(lines) else "")
        name = os.path.basename(file)
        out.append({"file": file, "name": name, "own": file == own, "length": len(lines), "parts": parts})
    return out


def places(told: Report) -> Iterator[tuple[str, int]]:
    """Yield every line that a profile names."""
    for line in told["lines"]:
        yield line["file"], line["line"]
        yield from ((at["file"], at["line"]) for at in line["inlined_at"])
    for finding in (*told["findings"], *told["notes"]):
        yield finding["source"] or ("PTX", finding["ptx_line"])
        yield from finding["inlined_at"]
        if finding["other"] is not None:
            yield finding["other"]


def page(profile: Profile) -> str:
    """The profile as one HTML page that needs nothing else."""
    return filled("profile", report(profile))
