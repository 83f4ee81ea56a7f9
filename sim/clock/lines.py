"""The source lines of machine code, from its line table, with the clocks that warps spend at each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cupyflash.launch.nvrtc import header_directories

from . import sass
from .sass import Instruction

Place = tuple[str, int]
"""A file and a line of it; a line of machine code that has none lies at ("", 0)."""
NOWHERE: Place = ("", 0)
_SECTION = re.compile(r"\s*\.section\s+\.text\.(\S+?),")
_PLACE = re.compile(r'"([^"]*)", line (\d+)')
_ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")


def places(cubin: bytes, kernel: str) -> Mapping[int, Place]:
    """Returns the line of each address of a kernel: that of inlined code, or that of its caller for code of CUDA's headers.

    Empty for a cubin without a line table. RuntimeError without a disassembler.
    """
    found = {address: _own(frames) for address, frames in calls(cubin, kernel).items()}
    return found if set(found.values()) - {NOWHERE} else {}


def calls(cubin: bytes, kernel: str) -> Mapping[int, Sequence[Place]]:
    """Returns the lines of each address of a kernel, each called from the next; raises as `places` does."""
    found: dict[int, Sequence[Place]] = {}
    section, frames, fresh = "", [NOWHERE], True
    for text in sass.listing(cubin).splitlines():
        if named := _SECTION.match(text):
            section, frames, fresh = named[1], [NOWHERE], True
        elif text.lstrip().startswith("//##"):
            frames = ([] if fresh else frames) + [(file, int(line)) for file, line in _PLACE.findall(text)]
            fresh = False
        elif section == kernel and (address := _ADDRESS.match(text)):
            found[int(address[1], 16)] = frames
            fresh = True
    return found


def _own(frames: Sequence[Place]) -> Place:
    """Returns the innermost of some lines, each called from the next, that is not in CUDA's headers; the outermost if all are."""
    headers = header_directories()
    return next((each for each in frames if each != NOWHERE and not each[0].startswith(headers)), frames[-1])


@dataclass(frozen=True)
class TimedLine:
    """A line of source (an instruction, if there are no lines): the clocks of warps there, by reason, and their share of all.

    `seconds`: its share of the launch's time.
    """

    file: str
    number: int
    text: str
    share: float
    seconds: float
    stalls: Mapping[str, float]

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> TimedLine:
        """Returns a line of `to_dict`'s."""
        return cls(**{name: data["line" if name == "number" else name] for name in cls.__dataclass_fields__})

    def to_dict(self) -> dict[str, Any]:
        """The line for JSON; docs/clock.md has the keys."""
        found = vars(self) | {"line": self.number, "stalls": dict(self.stalls)}
        del found["number"]
        return found


def lines_of(
    stalls: Mapping[int, Mapping[str, float]],
    code: Sequence[Instruction],
    where: Mapping[int, Place],
    seconds: float,
    sources: Mapping[str, str],
) -> list[TimedLine]:
    """Returns the lines at which warps spend a launch's time, longest first; instructions if `where` has no lines.

    `sources`: texts by name of source that is in no file.
    """
    spent: dict[Place, dict[str, float]] = {}
    for at, reasons in stalls.items():
        own = spent.setdefault(where.get(code[at].address, NOWHERE) if where else ("", at), {})
        for reason, clocks in reasons.items():
            own[reason] = own.get(reason, 0.0) + clocks
    total = sum(sum(reasons.values()) for reasons in spent.values())
    read = {file: texts(file, sources) for file, _ in spent}
    found = []
    for (file, number), reasons in spent.items():
        share = sum(reasons.values()) / total
        text = read[file][number - 1].strip() if 0 < number <= len(read[file]) else ""
        if not where:
            text = str(code[number]).split("  ", 2)[-1].strip()
        ordered = dict(sorted(reasons.items(), key=lambda each: -each[1]))
        found.append(TimedLine(file, number, text, share, share * seconds, ordered))
    return sorted(found, key=lambda each: -each.share)


def texts(file: str, sources: Mapping[str, str]) -> list[str]:
    """Returns the lines of a file, which may be one of `sources`; none if it cannot be read."""
    for name, text in sources.items():
        if f"/{file}".endswith(f"/{name}"):  # a compiler may have put its folder before the name
            return text.splitlines()
    try:
        return Path(file).read_text(encoding="utf-8").splitlines() if file else []
    except (OSError, UnicodeDecodeError):
        return []


def changes(before: Sequence[TimedLine], after: Sequence[TimedLine]) -> list[tuple[str, float, float]]:
    """Returns (text, seconds before, seconds after) of each line of either run, the greatest change first.

    Lines are matched by their texts in the order of the source; one that stands in another's place is that line, changed.
    """
    sides = [sorted(lines, key=lambda each: (each.file, each.number)) for lines in (before, after)]
    names = [[line.text or f"{Path(line.file).name}:{line.number}" for line in side] for side in sides]
    found: list[tuple[str, float, float]] = []
    for _, old, old_end, new, new_end in SequenceMatcher(None, names[0], names[1], autojunk=False).get_opcodes():
        for a, b in zip_longest(range(old, old_end), range(new, new_end)):
            spent = [0.0 if at is None else side[at].seconds for side, at in zip(sides, (a, b), strict=True)]
            found.append((names[0][a] if b is None else names[1][b], spent[0], spent[1]))
    return sorted(found, key=lambda each: -abs(each[2] - each[1]))
