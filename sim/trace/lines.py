"""The papers' algorithms line by line (algorithms.toml), the line of each move of a kernel, and its reason (reasons.toml).

Algorithms 0, 1, 3 and 4 are those of FlashAttention (arXiv 2205.14135, 3 and 4 in its appendix B), FlashAttention-2's are its own 1
and 2 (arXiv 2307.08691), FlashAttention-3's its Algorithm 1, which has the producer's copies (arXiv 2407.08608). Lines say in our
letters what those say; lines that only divide tensors or end a loop are left out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cupyflash.basics import Report, Values


@dataclass(frozen=True)
class AlgorithmStep:
    """The part of an algorithm that one kernel does.

    `reads` and `writes` have the line of each tensor's moves; tensors that are not named there (masks and the like) have the line
    `usual`, or the first of `scores`. `first` is the line of a write before any read. `scores` are the lines that work on a tile of
    S. `registers`: what the kernel holds there of the current tiles.
    """

    does: str
    reads: Mapping[str, int] = field(default_factory=dict)
    writes: Mapping[str, int] = field(default_factory=dict)
    first: int | None = None
    scores: Sequence[int] = ()
    registers: str = ""
    usual: int | None = None

    def line(self, tensor: str, write: bool, first: bool) -> int | None:
        """The line of a move; `first`: True if the thread block has read nothing yet."""
        if write and first and self.first is not None:
            return self.first
        usual = self.usual if self.usual is not None or not self.scores else self.scores[0]
        return (self.writes if write else self.reads).get(tensor, usual)


@dataclass(frozen=True)
class Algorithm:
    """`lines` by number, each with its depth in loops; `steps` by kernel. Some lines are there only where one of certain tensors
    moves: `only`, by number."""

    title: str
    lines: tuple[tuple[int, int, str], ...]
    steps: Mapping[str, AlgorithmStep]
    only: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def lines_with(self, tensors: Collection[str]) -> list[tuple[int, int, str]]:
        """The lines of a call that moves these tensors."""
        return [line for line in self.lines if line[0] not in self.only or not self.only[line[0]].isdisjoint(tensors)]


def _algorithms(tables: Values) -> dict[str, Algorithm]:
    """The algorithms of one pass, by name."""
    made = {}
    for name, table in tables.items():
        steps = {kernel: AlgorithmStep(**step) for kernel, step in table["steps"].items()}
        only = {int(line): frozenset(tensors) for line, tensors in table.get("only", {}).items()}
        made[name] = Algorithm(table["title"], tuple(map(tuple, table["lines"])), steps, only)
    return made


FORWARD, BACKWARD = map(_algorithms, tomllib.loads(Path(__file__).with_name("algorithms.toml").read_text("utf-8")).values())
REASONS: Mapping[str, Values] = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text("utf-8"))


def reasons_of(kernel: str) -> Report:
    """The reasons of a kernel's moves, the ends of their sentences: "read" and "write" by tensor, and "first", of a write before
    any read, "" if that is like others."""
    own, every = REASONS.get(kernel, {}), REASONS["every"]
    return {side: {**every[side], **own.get(side, {})} for side in ("read", "write")} | {"first": own.get("first", "")}


MASK_TILES = AlgorithmStep("which tiles a mask leaves empty, whole or mixed")
