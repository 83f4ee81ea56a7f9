"""Shows what a benchmark's file says, as a table:  python benchmarks/report.py FILE.jsonl ..."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import records  # noqa: E402

CASE = ("pass", "dtype", "d", "n", "causal")
HEAD = f"{'':<9}{'dtype':<9}{'d':>4}{'N':>7} {'causal':<7}{'implementation':<20}{'ms':>9}{'spread':>8}{'TFLOP/s':>9}{'RMS':>9}"


def line(row: Mapping[str, Any]) -> str:
    """A measurement."""
    named = f"{row['pass']:<9}{row['dtype']:<9}{row['d']:>4}{row['n']:>7} {row['causal']!s:<7}{row['implementation']:<20}"
    if "seconds" not in row:
        return f"{named}  {row['error'][:70]}"
    rate = f"{row['tflops']:.1f}" if "tflops" in row else "-"
    errors = row.get("rms") or {}
    off = "" if not errors else "inf" if None in errors.values() else f"{max(errors.values()):.1e}"
    return f"{named}{row['seconds'] * 1e3:>9.3f}{row['spread_s'] * 1e3:>8.3f}{rate:>9}{off:>9}{''.join(doubts(row))}"


def doubts(row: Mapping[str, Any]) -> Iterator[str]:
    """What speaks against a figure."""
    if row.get("right") is False:
        yield f"  WRONG (at most {row['bound']:.1e})"
    if "invalid" in row:
        yield f"  INVALID: {row['invalid']}"
    if row.get("exposed"):
        yield f"  host not hidden ({row['host_seconds'] * 1e6:.0f} us)"


def ratios(rows: Sequence[Mapping[str, Any]], default: str) -> Iterator[str]:
    """For each case `default`'s TFLOP/s in relation to those of the best other that is right too."""
    for case in dict.fromkeys(tuple(row[name] for name in CASE) for row in rows):
        good = [row for row in rows if tuple(row[name] for name in CASE) == case and "tflops" in row and row["right"] is not False]
        mine = next((row for row in good if row["implementation"] == default), None)
        best = max((row for row in good if not row["ours"]), key=lambda row: row["tflops"], default=None)
        if mine and best:
            yield f"{case_of(mine)}: {default} has {mine['tflops'] / best['tflops']:.2f} of the TFLOP/s of {best['implementation']}"


MODEL = "clock model"  # the extra that has the model's seconds


def against(rows: Sequence[Mapping[str, Any]], modelled: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the clock model said beside what the clock did, for whatever both have."""
    measured = {(*(row[name] for name in CASE), row["implementation"]): row for row in rows if "tflops" in row}
    for said in modelled:
        row = measured.get((*(said[name] for name in CASE), said["implementation"]))
        if row:
            model, clock = said["model_seconds"], row["seconds"]
            both = f"model {model * 1e3:.3f} ms, clock {clock * 1e3:.3f} ms, {clock / model:.2f} times the model's"
            yield f"{case_of(said)}: {said['implementation']}: {both}"


def case_of(row: Mapping[str, Any]) -> str:
    return f"{row['dtype']}, d {row['d']}, N {row['n']}{', causal' if row['causal'] else ''}"


def summary(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """All of a file."""
    measured: list[Mapping[str, Any]] = []
    default = ""
    for each in lines:
        kind = each["kind"]
        if kind == "run":
            yield from ratios(measured, default)
            measured, default = [], each.get("default", "")
            of = f"{each['device']['name']}, {each['date']}, cupyflash {each['cupyflash']}, commit {each['commit']}"
            yield f"{each['what']} on {of}"
            yield from [HEAD] if default else []
        elif kind == "measurement":
            measured.append(each)
            yield line(each)
        elif kind == "left_out":
            yield f"left out, since {each['reason']}: {len(each['cases'])} cases"
        elif kind == "test":
            yield f"{each['outcome']}: {each['test']}: {each['text']}"
        elif kind == "tests":
            yield ", ".join(f"{count} {outcome}" for outcome, count in each["counts"].items()) or "no tests were run"
        elif kind == "extra" and each["name"] == MODEL and "value" in each:
            yield from against(measured, each["value"])
        elif kind == "extra":
            yield f"{each['name']}: {each.get('value', each.get('error'))}"
        elif kind == "end":
            yield f"ended: {each['reason']}, after {each['seconds']:.0f} s"
    yield from ratios(measured, default)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        print("\n".join(summary(records.read(Path(name)))))
