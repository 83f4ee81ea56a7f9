"""The list of published ladders, or the steps of those that are named; nothing is fetched, built or compared.

python benchmarks/published [NAME ...]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published import GROUPS, Ladder, ladders


def of_all(every: Sequence[Ladder]) -> None:
    """Print a line for each ladder, and how many figures each group has."""
    print(f"  {'ladder':24} {'device':30} {'steps':>5}  {'unit':8} {'needs':18} title")
    for ladder in every:
        guide = " (guide)" if ladder.use == "guide" else ""
        needs = ladder.compiler.needs
        print(f"  {ladder.name:24} {ladder.device:30} {len(ladder.steps):5}  {ladder.unit:8} {needs:18} {ladder.title}{guide}")
    count = Counter(step.group for ladder in every for step in ladder.steps)
    print("\n  figures: " + ", ".join(f"{count[group]} {group}" for group in GROUPS))


def of_one(ladder: Ladder) -> None:
    """Print a ladder's source, clock and steps."""
    print(f"  {ladder.name}: {ladder.title}\n  {ladder.repository}, figures: {ladder.figures}")
    low, high = ladder.clock.mhz
    print(f"  {ladder.device}, {low} to {high} MHz; {ladder.compiler.version}, {ladder.compiler.architecture}")
    for step in ladder.steps:
        kernels = ", ".join(launch.kernel for launch in step.launches)
        print(f"  {step.name:34} {step.figure:10,.2f} {ladder.unit:8} {step.seconds * 1e6:12,.2f} us  {kernels}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/published", description="The ladders of published times.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="ladders whose steps to list (default: a line for each ladder)")
    names = parser.parse_args(words).names
    every = {ladder.name: ladder for ladder in ladders()}
    for name in names:
        if name not in every:
            parser.error(f"no ladder {name!r}; there are {', '.join(every)}")
    if not names:
        of_all(list(every.values()))
    for name in names:
        of_one(every[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
