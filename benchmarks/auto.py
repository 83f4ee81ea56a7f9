"""What "auto" and the planner choose, beside the clock (docs/clock.md): algorithms, tiles, splits. No GPU.

    python benchmarks/auto.py [WORD ...] [--write]

A question is a call in float16, and the ways of computing it: by each algorithm that runs it, or by one in other tiles, or in other
splits. The first way is the one taken. Words choose questions: a direction, a device's name, "algorithms", or fa2, fa3 or decode,
whose tiles or splits are asked of. --write keeps the times in auto.json, of which docs/performance.md has the tables.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import checkout  # noqa: F401

# isort: split
from records import read_rows, write_rows

from cupyflash import Device, Problem, plan
from cupyflash.multiprocessor import clock_rate
from cupyflash.schedules import (
    DecodeSchedule,
    TileSchedule,
    choose,
    choose_backward,
    fa2_backward_tiles,
    fa2_tiles,
    fa3_tiles,
    formulas,
    plan_backward,
    plan_decode,
)
from cupyflash.sim.clock.known import CLOCK, own_error
from cupyflash.sim.clock.planned import clocks

KEPT = Path(__file__).with_suffix(".json")
FORWARD, BACKWARD, ALGORITHMS = "forward", "backward", "algorithms"
OTHERS = 2
"""Other tiles than the one taken whose times are asked for."""


@dataclass(frozen=True)
class Question:
    """A call of `heads` (batch, heads, heads of K and V), and of what is asked: "algorithms", or the one whose tiles are."""

    of: str
    direction: str
    device: str
    heads: tuple[int, int, int]
    queries: int
    keys: int
    d: int
    causal: bool = False

    @property
    def words(self) -> set[str]:
        return {self.of, self.direction, self.device}

    @property
    def problem(self) -> Problem:
        return Problem(*self.heads, self.queries, self.keys, self.d, "float16", causal=self.causal)

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.heads))
        return f"{self.device} | {shape} | {self.queries:,} x {self.keys:,}{', causal' * self.causal} | {self.d}"

    def ways(self) -> Iterator[tuple[str, TileSchedule]]:
        """Yields the names of ways with their schedules, the one taken first."""
        p, device = self.problem, Device.named(self.device)
        make = plan if self.direction == FORWARD else plan_backward
        if self.of == ALGORITHMS:
            for name in self.algorithms(p, device):
                yield name, make(p, device, name)
        elif self.of == "decode":
            splits = plan_decode(p, device).splits
            for number in dict.fromkeys((splits, max(splits // 2, 1), 2 * splits)):
                yield f"{number} splits", plan_decode(p, device, num_splits=number)
        else:
            taken = make(p, device, self.of)
            yield tile_of(taken), taken
            others = (make(p, device, self.of, size) for size in self.sizes(p, device) if size != taken.blocks)
            yield from ((tile_of(each), each) for each in islice(others, OTHERS))

    def algorithms(self, p: Problem, device: Device) -> Iterator[str]:
        """Yields the algorithms that run it, the one that "auto" takes first."""
        forward = self.direction == FORWARD
        yield (taken := (choose if forward else choose_backward)(p, device).algorithm)
        runs = {"fa2": True, "fa3": fa3_tiles.refusal(p, device) is None, "decode": forward and 4 * self.queries <= self.keys}
        yield from (name for name, able in runs.items() if able and name != taken)

    def sizes(self, p: Problem, device: Device) -> Iterator[tuple[int, int]]:
        """Yields the blocks that kernels run, those first that the planner would take next."""
        if self.direction == BACKWARD:
            found = [each.size for each in fa2_backward_tiles.candidates(p, device) if not each.rejected]
        elif self.of == "fa2":
            able = [each.config for each in fa2_tiles.candidates(p, device) if not each.rejected]
            found = [(each.block_rows, each.block_cols) for each in able]
        else:
            wide = [each.config for each in fa3_tiles.candidates(p, device) if not each.rejected]
            found = [(each.team.block_rows, each.block_cols) for each in wide]
        yield from dict.fromkeys(found)


def tile_of(schedule: TileSchedule) -> str:
    return "{} x {}".format(*schedule.blocks)


def questions() -> Iterator[Question]:
    """All questions of the tables."""
    for of, direction, devices, calls in ROWS:
        for device in devices:
            yield from (Question(of, direction, device, *call) for call in calls)


PLAIN = (
    ((4, 32, 32), 1024, 1024, 64),
    ((4, 32, 32), 1024, 1024, 64, True),
    ((4, 16, 16), 1024, 1024, 128),
    ((4, 16, 16), 1024, 1024, 128, True),
    ((1, 32, 32), 4096, 4096, 64, True),
    ((1, 16, 16), 4096, 4096, 128),
    ((16, 8, 8), 256, 256, 64),
    ((1, 4, 4), 2048, 2048, 128, True),
    ((2, 32, 8), 512, 512, 128, True),
    ((1, 8, 8), 2048, 2048, 256, True),
)
FEW = ((1, 32, 8), 64, 8192, 128), ((8, 32, 8), 1, 8192, 128), ((1, 8, 2), 16, 4096, 64)
LONG = ((1, 32, 32), 4096, 4096, 64), ((1, 16, 16), 4096, 4096, 128), ((1, 8, 8), 4096, 4096, 256)
SHORT = ((16, 8, 8), 256, 256, 64), ((2, 32, 8), 512, 512, 128, True)
ROWS = (
    (ALGORITHMS, FORWARD, ("H100-SXM",), (*PLAIN, *FEW, ((1, 16, 16), 2048, 2048, 64))),
    (ALGORITHMS, FORWARD, ("H200",), (*PLAIN[1:8:2], *SHORT, *FEW)),
    (ALGORITHMS, FORWARD, ("A100-40GB", "RTX 5090"), FEW),
    (ALGORITHMS, BACKWARD, ("H100-SXM",), PLAIN),
    (ALGORITHMS, BACKWARD, ("H200",), (*PLAIN[1:8:2], *SHORT)),
    ("fa2", FORWARD, ("A100-40GB", "H100-SXM"), (*LONG, *SHORT)),
    ("fa3", FORWARD, ("H100-SXM",), (*LONG, *SHORT)),
    ("fa2", BACKWARD, ("A100-40GB", "H100-SXM"), (*LONG, *SHORT)),
    ("decode", FORWARD, ("A100-40GB", "H100-SXM"), FEW),
)


@dataclass(frozen=True)
class Answer:
    """The seconds of each way by the clock, the one taken first, and of those of a forward by the planner's formulas."""

    question: Question
    clock: dict[str, float]
    formula: dict[str, float]

    @property
    def least(self) -> str:
        return min(self.clock, key=lambda name: self.clock[name])

    @property
    def slower(self) -> float:
        """The time of the way that is taken over the least one, less 1."""
        return next(iter(self.clock.values())) / self.clock[self.least] - 1

    @property
    def error(self) -> float:
        """The clock's median error on our calls that were measured; on decoding, which none was, that on forwards."""
        return own_error(CLOCK, self.question.direction).median


def answer(question: Question) -> Answer:
    clock, formula = {}, {}
    device, p = Device.named(question.device), question.problem
    for name, schedule in question.ways():
        clock[name] = sum(each.time().seconds for each in clocks(schedule))
        if isinstance(schedule, DecodeSchedule):
            formula[name] = schedule.candidate.seconds
        elif question.direction == FORWARD:
            blocks = None if question.of == ALGORITHMS else schedule.blocks
            formula[name] = formulas.clocks(p, device, schedule.algorithm, blocks) / clock_rate(device)
    return Answer(question, clock, formula)


def read(path: Path | None = None) -> list[Answer]:
    """The answers on file."""
    return [
        Answer(Question(**{**each["question"], "heads": tuple(each["question"]["heads"])}), each["clock"], each["formula"])
        for each in read_rows(path or KEPT)
    ]


def keep(one: Answer) -> None:
    """Puts an answer into the file, in place of an older one to the same question."""
    others = [each for each in read() if each.question != one.question]
    order = list(questions())
    known = (each for each in [*others, one] if each.question in order)
    write_rows(KEPT, sorted(known, key=lambda each: order.index(each.question)))


def cells(one: Answer) -> str:
    """Each way with its microseconds: by the clock, and by the formulas in brackets."""
    own = {name: f" ({each * 1e6:,.0f})" for name, each in one.formula.items()}
    return "; ".join(f"{name} {each * 1e6:,.0f}{own.get(name, '')}" for name, each in one.clock.items())


def table(algorithms: bool) -> Iterator[str]:
    """A table of docs/performance.md: of algorithms, or of tiles and splits."""
    what = "direction" if algorithms else "of"
    yield f"| {what} | device | batch, heads, heads of K | queries x keys | d | us, the taken first | slower than the least |"
    yield "| --- |" + " --- |" * 6
    for one in (each for each in read() if (each.question.of == ALGORITHMS) == algorithms):
        q = one.question
        name = q.direction if algorithms else f"`{q.of}`, {q.direction}"
        loss = f"**{one.slower:.0%}**" if one.slower > one.error else f"{one.slower:.0%}" if one.slower > 0.005 else ""
        yield f"| {name} | {q} | {cells(one)} | {loss} |"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="what the chosen questions have")
    parser.add_argument("--write", action="store_true", help="keep the times in auto.json")
    asked = parser.parse_args(words)
    for question in (each for each in questions() if set(asked.words) <= each.words):
        begun = time.process_time()
        try:
            one = answer(question)
        except (RuntimeError, ValueError) as error:
            print(f"{question.of}, {question.direction}, {question}: {error}", flush=True)
            continue
        took = time.process_time() - begun
        print(
            f"{question.of}, {question.direction}, {question}: {cells(one)}; slower by {one.slower:.0%} ({took:.0f} s)", flush=True
        )
        if asked.write:
            keep(one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
