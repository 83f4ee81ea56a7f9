"""Writes the tables of docs/measured.md from benchmarks/results:  python benchmarks/measured.py

A row is a case of one pass on one device, of the last file that has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from checkout import ROOT

# isort: split
from performance import replaced

from cupyflash.basics import Values
from cupyflash.sim.clock.measured import read

PAGE, RESULTS = ROOT / "docs" / "measured.md", ROOT / "benchmarks" / "results"
PEERS = {
    "forward": ("torch cudnn", "torch flash", "triton"),
    "backward": ("torch cudnn", "torch flash"),
    "decode": ("torch cudnn", "torch cudnn, packed", "torch flash", "torch flash, packed"),
}
CASE = ("dtype", "d", "batch", "heads", "kv_heads", "n", "causal")


def cases(what: str) -> dict[tuple[Any, ...], dict[str, Values]]:
    """The measurements of a pass that have a time, by case and implementation."""
    found: dict[tuple[Any, ...], dict[str, Values]] = {}
    for path in sorted(RESULTS.glob("*.jsonl"), key=lambda path: (len(path.stem), path.stem)):
        of_file: dict[tuple[Any, ...], dict[str, Values]] = {}
        for line in read(path):
            if line.get("pass") == what and "seconds" in line and "invalid" not in line:
                of_file.setdefault(tuple(line.get(name) for name in CASE), {})[line["implementation"]] = line
        found |= of_file
    return found


def star(line: Values) -> str:
    """Marks a time that holds some of the host's."""
    return "*" if line["exposed"] else ""


def told(line: Values | None, rate: str) -> str:
    """Milliseconds, and the rate in brackets."""
    return f"{line['seconds'] * 1e3:.3f}{star(line)} ({line[rate]:,.0f})" if line else "-"


def rows(what: str, own: tuple[str, ...], rate: str) -> Iterator[str]:
    """A table: the case, ours, the peers, and the first of ours that was measured over the best of them."""
    names = *own, *PEERS[what]
    yield f"| | {' | '.join(names)} | ours over the best peer |"
    yield "| --- |" + " --- |" * (len(names) + 1)
    for case, measured in sorted(cases(what).items(), key=lambda each: tuple(map(str, each[0][:1])) + each[0][1:2] + each[0][5:]):
        dtype, d, batch, heads, kv_heads, n, causal = case
        grouped = f", {heads // kv_heads} a key head" if kv_heads and heads > kv_heads else ""
        title = f"{dtype}, d {d}, {batch} x {heads}{grouped}, {n:,}{', causal' if causal and what != 'decode' else ''}"
        shown = [told(measured.get(name), rate) for name in names]
        best = min((measured[name] for name in PEERS[what] if name in measured), key=lambda each: each["seconds"])
        first = next(measured[name] for name in own if name in measured)
        yield f"| {title} | {' | '.join(shown)} | {best['seconds'] / first['seconds']:.2f}{star(best)} |"


TABLES: Mapping[str, Callable[[], Iterator[str]]] = {
    "forward": lambda: rows("forward", ("fa3", "fa2"), "tflops"),
    "gradients": lambda: rows("backward", ("fa3", "fa3 deterministic", "fa2", "fa2 deterministic"), "tflops"),
    "decode": lambda: rows("decode", ("decode", "decode, pages of 16"), "gb_s"),
}


def written(page: str) -> str:
    """The page with its tables written anew."""
    for name, table in TABLES.items():
        page = replaced(page, name, table())
    return page


def main() -> None:
    PAGE.write_text(written(PAGE.read_text()))


if __name__ == "__main__":
    sys.exit(main())
