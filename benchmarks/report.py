"""Shows what a benchmark's file says, as a table:  python benchmarks/report.py FILE.jsonl ..."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401

# isort: split
from cupyflash.basics import Values
from cupyflash.sim.clock.measured import read

CASE = ("pass", "dtype", "d", "n", "causal")
HEAD = f"{'':<9}{'dtype':<9}{'d':>4}{'N':>7} {'causal':<7}{'implementation':<20}{'ms':>9}{'spread':>8}{'TFLOP/s':>9}{'RMS':>9}"

DECODE_HEAD = (
    f"{'':<8}{'dtype':<9}{'d':>4}{'batch':>6}{'cache':>7}{'group':>6} {'implementation':<29}{'ms':>9}{'spread':>8}{'GB/s':>9}"
    f"{'of a copy':>10}{'RMS':>9}"
)


def heading(what: str) -> str:
    """The heading of a pass' measurements."""
    return DECODE_HEAD if what == "decode" else HEAD


def line(row: Values) -> str:
    """A measurement, of decoding too."""
    if "kv_heads" in row:
        group, digits = row["heads"] // row["kv_heads"], 4
        case = f"{row['pass']:<8}{row['dtype']:<9}{row['d']:>4}{row['batch']:>6}{row['n']:>7}{group:>6} {row['implementation']:<29}"
        share = f"{row['of_copy']:.0%}" if "of_copy" in row else "-"
        rates = f"{row['gb_s']:>9.0f}{share:>10}" if "gb_s" in row else f"{'-':>9}{share:>10}"
    else:
        case, digits = (
            f"{row['pass']:<9}{row['dtype']:<9}{row['d']:>4}{row['n']:>7} {row['causal']!s:<7}{row['implementation']:<20}",
            3,
        )
        rates = f"{row['tflops']:>9.1f}" if "tflops" in row else f"{'-':>9}"
    if "seconds" not in row:
        return f"{case}  {row['error'][:70]}"
    times = f"{row['seconds'] * 1e3:>9.{digits}f}{row['spread_s'] * 1e3:>8.{digits}f}"
    return f"{case}{times}{rates}{off(row):>9}{''.join(doubts(row))}"


def ring_line(row: Values) -> str:
    """A measurement over ranks, beside one device."""
    case, modelled = row["case"], row["predicted"]["efficiency"] or 0
    wrong = "" if row["right"] else f"  WRONG: {row['apart']:.1e} apart"
    return (
        f"{row['pass']:<9}{row['way']:<19}N {case['n']:>7}{', causal' if case['causal'] else '':<8} {row['ranks']:>3} ranks "
        f"{row['seconds'] * 1e3:>10.3f} ms{row['efficiency']:>8.1%} of ideal ({modelled:.1%} by the model){wrong}"
    )


def off(row: Values) -> str:
    """The largest of its errors."""
    errors = row.get("rms") or {}
    return "" if not errors else "inf" if None in errors.values() else f"{max(errors.values()):.1e}"


def doubts(row: Values) -> Iterator[str]:
    """The objections to a figure."""
    if row.get("right") is False:
        yield f"  WRONG (at most {row['bound']:.1e})"
    if "invalid" in row:
        yield f"  INVALID: {row['invalid']}"
    if row.get("exposed"):
        yield f"  host not hidden ({row['host_seconds'] * 1e6:.0f} us)"


def ratios(rows: Sequence[Values], default: str) -> Iterator[str]:
    """The ratio, for each case, of `default`'s TFLOP/s to those of the best other implementation that is right too."""
    for case in dict.fromkeys(map(problem_of, rows)):
        good = [row for row in rows if problem_of(row) == case and "tflops" in row and row["right"] is not False]
        mine = next((row for row in good if row["implementation"] == default), None)
        best = max((row for row in good if not row["ours"]), key=lambda row: row["tflops"], default=None)
        if mine and best:
            share, unit = mine["tflops"] / best["tflops"], "GB/s" if "gb_s" in mine else "TFLOP/s"
            yield f"{case_of(mine)}: {default} has {share:.2f} of the {unit} of {best['implementation']}"


def problem_of(row: Values) -> tuple[Any, ...]:
    """The fields that rows of the same case share."""
    return tuple(row.get(name) for name in (*CASE, "batch", "heads", "kv_heads"))


MODEL = "clock model"  # the extra that has the model's seconds


def against(rows: Sequence[Values], modelled: Sequence[Values]) -> Iterator[str]:
    """The clock model's times beside the measured ones, for cases that have both."""
    measured = {(*(row[name] for name in CASE), row["implementation"]): row for row in rows if "tflops" in row}
    for said in modelled:
        row = measured.get((*(said[name] for name in CASE), said["implementation"]))
        if row:
            model, clock = said["model_seconds"], row["seconds"]
            both = f"model {model * 1e3:.3f} ms, clock {clock * 1e3:.3f} ms, {clock / model:.2f} times the model's"
            yield f"{case_of(said)}: {said['implementation']}: {both}"


def case_of(row: Values) -> str:
    if "kv_heads" in row:
        group = row["heads"] // row["kv_heads"]
        return f"{row['dtype']}, d {row['d']}, batch {row['batch']}, cache {row['n']}, {group} query heads a key head"
    return f"{row['dtype']}, d {row['d']}, N {row['n']}{', causal' if row['causal'] else ''}"


def summary(lines: Iterable[Values]) -> Iterator[str]:
    """The whole report of a file."""
    measured: list[Values] = []
    default = ""
    for each in lines:
        kind = each["kind"]
        if kind == "run":
            yield from ratios(measured, default)
            measured, default = [], each.get("default", "")
            of = f"{each['device']['name']}, {each['date']}, cupyflash {each['cupyflash']}, commit {each['commit']}"
            yield f"{each['what']} on {of}"
            yield from [heading(each["what"])] if default else []
        elif kind == "measurement":
            measured.append(each)
            yield line(each)
        elif kind == "ring":
            yield ring_line(each)
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
        print("\n".join(summary(read(Path(name)))))
