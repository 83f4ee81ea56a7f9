"""Seeded faults: what is changed in a kernel, and what must be found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cupyflash.sim.ptx import Finding


@dataclass(frozen=True)
class Mutant:
    """`old` in `file` becomes `new`. Expected: findings of the kinds in `finds` (words), one of them at a line that holds a
    text of `lines`; where `finds` is "bytes" traffic that is not the theory's, "numbers" an error over the yardstick."""

    file: str
    old: str
    new: str
    finds: str
    lines: tuple[str, ...] = ()
    problem: str = ""

    def apply(self, directory: Path) -> None:
        """Break the file in `directory`."""
        text = (directory / self.file).read_text()
        assert text.count(self.old) >= 1, f"{self.file} has no {self.old!r}"
        (directory / self.file).write_text(text.replace(self.old, self.new))

    def is_found(self, findings: Sequence[Finding], directory: Path) -> bool:
        """Whether one of the findings is of an expected kind and at an expected line of the sources in `directory`."""
        places = set()
        for path in directory.glob("*.cu*"):
            text = path.read_text().splitlines()
            for number, line in enumerate(text, 1):
                if any(part in line for part in self.lines):
                    places.add((path.name, number))
                    while "asm volatile" in line and not text[number - 1].endswith(";"):
                        number += 1  # NVRTC 13.0 gives an asm statement the line that it ends on
                    places.add((path.name, number))
        kinds = self.finds.split("|")
        return any(f.kind in kinds and f.source is not None and (Path(f.source[0]).name, f.source[1]) in places for f in findings)
