"""Findings that somebody has looked at and lets pass: by entries of a file, or by comments in the source.

A file has an entry a line, kind, kernel, place and reason; `#` begins a comment:

    race           histogram*   hist.cu:17       every thread writes the same zero
    out-of-bounds  *            vendor/scan.cuh  its tail is masked away

Patterns are the shell's (`*`, `?`). A kernel's name is that of the PTX or of the source, a place FILE, FILE:LINE or
FILE:FIRST-LAST, of any line that a finding names: its own, the calls that it is inlined at, a race's other side. In the source, on
such a line or alone on the one before: `// cupyflash: allow race: every thread writes the same zero`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from cupyflash.words import plural

from ..text.names import base_name
from ..text.syntax import Line
from .findings import KINDS, Finding, counted

ENTRY = re.compile(r"(\S+)\s+(\S+)\s+(\S+?)(?::(\d+)(?:-(\d+))?)?\s+(\S.*)")
COMMENT = re.compile(r"(?://|/\*)\s*cupyflash:\s*allow\b\s*(.*?)\s*(?=//\s*cupyflash:|\*/|$)")
BY_LENGTH = sorted(KINDS, key=len, reverse=True)
MOST = 1 << 24
"""Bytes of a source file that is read for its comments."""


@dataclass(frozen=True)
class Suppression:
    """Findings of a kind, of kernels and places that match patterns, are let pass, for a reason. `written`: where this stands."""

    kind: str
    kernel: str
    file: str
    lines: tuple[int, int] | None
    reason: str
    written: Line

    @staticmethod
    def read(path: str | os.PathLike[str]) -> tuple[Suppression, ...]:
        """The entries of a file. Raises OSError, and ValueError for what is no entry."""
        return tuple(entries(Path(path).read_text(encoding="utf-8"), os.fspath(path)))

    def covers(self, kernel: str) -> bool:
        """Whether it is for a kernel, by its name in the PTX."""
        return any(fnmatchcase(name, self.kernel) for name in (kernel, base_name(kernel)))

    def matches(self, finding: Finding) -> bool:
        return finding.kind == self.kind and self.covers(finding.kernel) and any(map(self.at, finding.places))

    def at(self, place: Line) -> bool:
        """Whether a line is one of those that it is for."""
        file, line = place
        if self.lines is not None and not self.lines[0] <= line <= self.lines[1]:
            return False
        return fnmatchcase(file, self.file) or fnmatchcase(file, f"*/{self.file}")

    def __str__(self) -> str:
        return f"{self.written[0]}:{self.written[1]} ({self.kind}: {self.reason})"


@dataclass(frozen=True)
class Suppressed:
    """The findings of a launch that one suppression let pass."""

    by: Suppression
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        return f"{counted(self.findings)} suppressed by {self.by}"


def asked(given: str | os.PathLike[str] | Sequence[Suppression]) -> tuple[Suppression, ...]:
    """The suppressions of an argument: a file, or what `Suppression.read` gave. Raises as that, and TypeError."""
    if isinstance(given, (str, os.PathLike)):
        return Suppression.read(given)
    found = tuple(given) if isinstance(given, Sequence) else (None,)
    if not all(isinstance(one, Suppression) for one in found):
        raise TypeError(f"suppressions must be a file, or a sequence of Suppression, got {given!r}")
    return found  # type: ignore[return-value]


def entries(text: str, file: str) -> Iterator[Suppression]:
    """What stands in a file of suppressions. Raises ValueError."""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = ENTRY.fullmatch(line)
        if found is None:
            raise ValueError(f"{file}:{number}: a suppression is KIND KERNEL FILE[:LINE[-LINE]] REASON, got {line[:100]!r}")
        kind, kernel, place, first, last, reason = found.groups()
        lines = None if first is None else (int(first), int(last or first))
        yield Suppression(known(kind.replace("-", " "), (file, number)), kernel, place, lines, reason, (file, number))


@dataclass(frozen=True)
class Comment:
    """A comment that lets findings pass, not yet read: for which line, where it stands, what follows `allow`."""

    at: Line
    written: Line
    what: str

    def read(self) -> Suppression:
        """What it lets pass, in any kernel. Raises ValueError where it has no known kind, or no reason."""
        what = self.what.replace("-", " ", 2)
        kind = next((kind for kind in BY_LENGTH if re.match(rf"{kind}\b", what)), "")
        known(kind or what.partition(":")[0], self.written)
        reason = self.what[len(kind) :].strip(" :,;-")
        if not reason:
            place = f"{self.written[0]}:{self.written[1]}"
            raise ValueError(f"{place}: a comment that allows {kind} gives a reason: // cupyflash: allow {kind}: WHY")
        return Suppression(kind, "*", literal(self.at[0]), (self.at[1], self.at[1]), reason, self.written)


def comments(text: str, file: str) -> Iterator[Comment]:
    """The comments of a source file."""
    for number, line in enumerate(text.splitlines(), 1) if "cupyflash:" in text else ():
        alone = re.match(r"\s*(//|/\*.*\*/\s*$)", line) is not None
        for found in COMMENT.finditer(line):
            yield Comment((file, number + alone), (file, number), found[1])


def literal(text: str) -> str:
    """A pattern that only this text matches."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def known(kind: str, written: Line) -> str:
    """A kind of finding. Raises ValueError for what is none."""
    if kind not in KINDS:
        allowed = ", ".join(one.replace(" ", "-") for one in KINDS)
        raise ValueError(f"{written[0]}:{written[1]}: a suppression's kind is one of {allowed}, got {kind[:100]!r}")
    return kind


def source_text(file: str) -> str:
    """The text of a source file, "" where it is not to be read any more."""
    try:
        path = Path(file)
        if not path.is_file() or path.stat().st_size > MOST:
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""


def told(suppressed: Sequence[Suppressed], unmatched: Sequence[Suppression]) -> list[str]:
    """Lines that say what was suppressed, and what let nothing pass."""
    return [*map(str, suppressed), *(f"nothing to suppress for {one}" for one in unmatched)]


def suppressed_count(suppressed: Sequence[Suppressed]) -> str:
    """How many findings were suppressed, "" for none."""
    number = sum(len(one.findings) for one in suppressed)
    return f"{plural(number, 'finding')} suppressed" if number else ""
