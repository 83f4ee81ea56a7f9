"""Scores of predicted times beside published ones: predicted.json has the times, docs/clock.md the table of scores.

python benchmarks/published/scores.py [--write]

prints the table of docs/clock.md, and which figures are stale; --write puts the table there, and the errors by class of kernels
into cupyflash/clock_errors.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import calls

from cupyflash import Device, Problem, TileSchedule, plan
from cupyflash.schedules import plan_backward
from cupyflash.sim.clock.known import CLOCK, PLANNER, own_error
from cupyflash.sim.clock.measured import RESULTS as MEASURED
from cupyflash.sim.clock.measured import measured
from cupyflash.sim.clock.measured import read as lines_of
from cupyflash.sim.clock.predicted import formula_of
from cupyflash.sim.clock.whole import RULES
from published import FOLDER, USES, ladders

RESULTS = FOLDER / "predicted.json"
CALLS = FOLDER.parent / "calls.json"
PAGE = FOLDER.parents[1] / "docs" / "clock.md"
ERRORS = FOLDER.parents[1] / "cupyflash" / "clock_errors.toml"
BEGIN, END = "<!-- scores.py writes from here -->", "<!-- to here -->"
OWN, OWN_END = "<!-- own errors -->", "<!-- end -->"
APART = 1.05  # pairs of figures that differ by less have no order
NEAR = 0.2
CLASSES = "tensor cores", "memory", "arithmetic", "warp roles"


@dataclass(frozen=True)
class Result:
    """The times of a step in seconds: measured, predicted at the highest clock rate of the ladder's file and at the lowest.

    `least` and `most`: predictions at the highest rate with other phases of blocks and assumed latencies. `kind`: the class of the
    kernel that takes longest (`known.kind_of`), `binds`: its nearest limit. `rules`: the number of the clock's rules by which they
    were made (`whole.RULES`).
    """

    measured: float
    predicted: float
    lowest: float
    least: float
    most: float
    kind: str
    binds: str
    rules: int = 0

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured

    @property
    def inside(self) -> float:
        """The ratio to the nearest prediction at any rate of the interval: 1 if the measured time lies among them."""
        return min(max(self.measured, self.predicted), self.lowest) / self.measured


Results = dict[str, dict[str, Result]]
"""Results by ladder and step."""


def read(path: Path = RESULTS) -> Results:
    """The results by ladder and step."""
    data = json.loads(path.read_text()) if path.exists() else {}
    return {name: {step: Result(**one) for step, one in steps.items()} for name, steps in data.items()}


def called(path: Path = CALLS) -> Results:
    """FlashAttention's whole calls that benchmarks/calls.py timed, as results of its ladders.

    Only at the highest rate, and not over phases and latencies: at the lowest rate all of a call is taken to be as much slower.
    """
    found: Results = {}
    steps = {(ladder.name, step.name): (ladder, step) for ladder in ladders() for step in ladder.steps}
    for each in json.loads(path.read_text()):
        call, seconds = each["call"], each["seconds"]
        name, place = each["whose"].lower().replace("-", "_"), f"d {call['d']} {call['mask']}, {call['n']}"
        name = name.replace("flashattention", "flash_attention")
        ladder, step = steps.get((name, place), (None, None))
        if ladder is None or step is None or (call["direction"], call["device"]) != ("forward", ladder.device):
            continue
        lowest = seconds * ladder.clock.mhz[1] / ladder.clock.mhz[0]
        found.setdefault(name, {})[place] = Result(
            step.seconds, seconds, lowest, seconds, seconds, each["kind"], each["binds"], each.get("rules", 0)
        )
    return found


def compared() -> Results:
    """All results, by ladder."""
    return dict(sorted((read() | called()).items()))


def write(results: Results, path: Path = RESULTS) -> None:
    data = {name: {step: asdict(one) for step, one in steps.items()} for name, steps in sorted(results.items())}
    path.write_text(json.dumps(data, indent=1) + "\n")


def bias_of(ratios: Iterable[float]) -> float:
    """The distance of the geometric mean from 1."""
    return exp(mean(log(ratio) for ratio in ratios)) - 1


def signs(found: Sequence[Result]) -> list[int]:
    """For each pair of steps that differ by more than 5 %: 1 if predicted in the measured order, else -1."""
    return [
        1 if (a.measured > b.measured) == (a.predicted > b.predicted) else -1
        for a, b in combinations(found, 2)
        if max(a.measured / b.measured, b.measured / a.measured) > APART
    ]


@dataclass(frozen=True)
class Score:
    """The errors of some results: `ladders` keeps those of a ladder together, for the order and for one factor a ladder."""

    ladders: Sequence[Sequence[Result]]

    @property
    def ratios(self) -> list[float]:
        return [each.ratio for ladder in self.ladders for each in ladder]

    @property
    def scaled(self) -> list[float]:
        """The ratios after one factor a ladder."""
        found = []
        for ladder in self.ladders:
            factor = 1 + bias_of(each.ratio for each in ladder)
            found += [each.ratio / factor for each in ladder]
        return found

    @property
    def tau(self) -> float | None:
        """Kendall's tau of pairs within a ladder that differ by more than 5 %, pooled; None if there is none."""
        found = [sign for ladder in self.ladders for sign in signs(ladder)]
        return mean(found) if found else None

    @property
    def spread(self) -> float | None:
        """The median width of predictions over phases and assumed latencies, in their own time; None if none was varied."""
        varied = [each for ladder in self.ladders for each in ladder if each.most > each.least]
        return median((each.most - each.least) / each.predicted for each in varied) if varied else None

    def cells(self) -> list[str]:
        """The cells of a row: figures; median error and those within 20 %, also in the interval of rates, and after one factor a
        ladder; tau, bias, spread."""
        inside = [each.inside for ladder in self.ladders for each in ladder]
        tau = "" if self.tau is None else f"{self.tau:.2f}"
        return [
            str(len(self.ratios)),
            *(f"{middle(ratios):.1%}".replace("%", " %") + f", {near(ratios)}" for ratios in (self.ratios, inside, self.scaled)),
            tau,
            f"{bias_of(self.ratios):+.1%}".replace("%", " %"),
            "" if self.spread is None else f"{self.spread:.1%}".replace("%", " %"),
        ]


def stale(results: Results) -> str:
    """Names the results that were made by older rules of the clock, by ladder."""
    old = {name: [step for step, one in steps.items() if one.rules < RULES] for name, steps in results.items()}
    named = [f"{name} ({'all' if own == list(results[name]) else '; '.join(own)})" for name, own in old.items() if own]
    count, every = sum(map(len, old.values())), sum(map(len, results.values()))
    return f"{count} of {every} figures are by older rules of the clock: {', '.join(named) or 'none'}"


def middle(ratios: Sequence[float]) -> float:
    """The median error."""
    return median(abs(ratio - 1) for ratio in ratios)


def near(ratios: Sequence[float]) -> int:
    """Returns the number of ratios within 20 %."""
    return sum(abs(ratio - 1) <= NEAR for ratio in ratios)


def table(results: Results) -> str:
    """The table of docs/clock.md: a row for each ladder, then for each group its uses and all of it, and for each class; those of a
    compiler that cannot be had apart."""
    known = {ladder.name: ladder for ladder in ladders()}
    groups = {(ladder.name, step.name): step.group for ladder in known.values() for step in ladder.steps}
    rows = [(f"`{name}`", known[name].use, Score([list(steps.values())])) for name, steps in results.items()]
    for group in dict.fromkeys(groups.values()):
        own = [
            (
                "apart" if known[name].compiler.apart else known[name].use,
                [one for step, one in steps.items() if groups[name, step] == group],
            )
            for name, steps in results.items()
        ]
        for use in (*USES, "apart"):
            rows.append((f"{group}: {use}", "", Score([steps for its, steps in own if steps and its == use])))
        rows.append((f"**{group}: all but apart**", "", Score([steps for its, steps in own if steps and its != "apart"])))
    for kind in CLASSES:
        rows.append((f"class {kind}", "", Score(of_class(results, kind))))
    lines = [
        "| ladder | use | figures | highest rate | within the rates | one factor | tau | bias | spread |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {' | '.join([name, use, *score.cells()])} |" for name, use, score in rows if score.ladders]
    far = [
        f"| `{name}`, {step} | {one.measured * 1e6:,.1f} | {one.predicted * 1e6:,.1f} | {one.ratio:.2f} | "
        f"{one.least / one.measured:.2f} to {one.most / one.measured:.2f} | {one.binds} |"
        for name, steps in results.items()
        for step, one in steps.items()
        if abs(one.ratio - 1) > NEAR
    ]
    lines += ["", "| beyond 20 % | measured, us | predicted | ratio | over phases and assumed latencies | binds |"]
    return "\n".join([*lines, "| --- | --- | --- | --- | --- | --- |", *far])


def of_class(results: Results, kind: str) -> list[list[Result]]:
    """The results of a class of kernels, by ladder, but for those whose compiler cannot be had."""
    apart = {ladder.name for ladder in ladders() if ladder.compiler.apart}
    found = [[one for one in steps.values() if one.kind == kind] for name, steps in results.items() if name not in apart]
    return [steps for steps in found if steps]


def own(path: Path = CALLS, folder: Path = MEASURED) -> dict[str, list[float]]:
    """The predicted over the measured times of our calls, by their kinds in cupyflash/clock_errors.toml.

    Taken is the newest measurement of each call, beside the planner's formulas and, of those that benchmarks/calls.py timed, the
    clock.
    """
    clocked = {str(one.call): one.seconds for one in calls.read(path) if one.whose == calls.OURS}
    found: dict[str, list[float]] = {}
    for call, schedule in dict(timed(folder)).items():
        if taken := measured(schedule, folder):
            seconds, predicted = taken[0].seconds, {PLANNER: formula_of(schedule, 1, "").seconds}
            if call.problem == replace(schedule.problem, dtype="float16") and str(call) in clocked:
                predicted[CLOCK] = clocked[str(call)]
            for source, one in predicted.items():
                found.setdefault(own_error(source, call.direction).kind, []).append(one / seconds)
    return found


def timed(folder: Path) -> Iterator[tuple[calls.Call, TileSchedule]]:
    """The calls of files of results, each of which has a formula, and their schedules."""
    run: Mapping[str, Any] = {}
    for line in (line for path in sorted(folder.glob("*.jsonl")) for line in lines_of(path)):
        run = line if line["kind"] == "run" else run
        name, direction = line.get("implementation"), line.get("pass")
        if name not in ("fa2", "fa3") or direction not in ("forward", "backward") or "seconds" not in line:
            continue
        device, n, d = Device.named(run["device"]["name"]), line["n"], line["d"]
        p = Problem(line["batch"], line["heads"], line["heads"], n, n, d, line["dtype"], causal=line["causal"])
        schedule = (plan if direction == "forward" else plan_backward)(p, device, name)
        yield calls.Call(direction, name, device.name, d, "causal" if line["causal"] else "full", n), schedule


def errors(results: Results) -> str:
    """The errors by class of kernels, and on our calls, as cupyflash/clock_errors.toml."""
    lines = [
        "# The clock's errors on published kernels by class, and on our calls those of the clock and of the planner's formulas;",
        "# written by benchmarks/published/scores.py from predicted.json, calls.json and benchmarks/results.",
    ]
    known = {kind: Score(of_class(results, kind)).ratios for kind in CLASSES} | dict(sorted(own().items()))
    for kind, found in known.items():
        if not found:
            continue
        lines += ["", f'["{kind}"]', f"figures = {len(found)}", f"median = {middle(found):.4f}", f"near = {near(found)}"]
        lines += [f"least = {min(found):.4f}", f"most = {max(found):.4f}", f"bias = {bias_of(found):.4f}"]
    return "\n".join(lines) + "\n"


def own_table() -> str:
    """The errors on our own calls, for docs/clock.md."""
    lines = ["| | calls | median error | of the measured time |", "| --- | --- | --- | --- |"]
    for kind, found in sorted(own().items()):
        error = f"{middle(found):.0%}".replace("%", " %")
        lines.append(f"| {kind} | {len(found)} | {error} | {min(found):.2f} to {max(found):.2f} |")
    return "\n".join(lines)


def page(text: str, results: Results) -> str:
    """A page with its tables between their marks."""
    head, _, rest = text.partition(BEGIN)
    text = f"{head}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}"
    head, _, rest = text.partition(OWN)
    return f"{head}{OWN}\n{own_table()}\n{OWN_END}{rest.partition(OWN_END)[2]}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/published/scores.py", description="Scores of predicted times.")
    parser.add_argument("--write", action="store_true", help="write docs/clock.md and cupyflash/clock_errors.toml")
    results = compared()
    if parser.parse_args(words).write:
        PAGE.write_text(page(PAGE.read_text(), results))
        ERRORS.write_text(errors(results))
    print(table(results))
    print(stale(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
