"""Times the backward pass beside its peers on the GPU at hand, and writes a line of JSON a measurement:

    python benchmarks/backward.py [--out FOLDER] [--quick] [--budget SECONDS] [--dry-run]

In one run, on the same memory and stream: cupyflash as users call it ("auto"), by algorithm and deterministic, the best designs of
fa3, and the gradients of those peers of peers.py that have them; the forward that they need is not timed. What closes the run
compares "auto".
TFLOP/s count 10 B H N^2 d, half when causal: five products for the forward's two. README.md has the format.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import checkout  # noqa: F401

# isort: split
import accuracy
import command
from cases import Case
from machine import Call, Machine
from report import MODEL
from timing import Implementation, Pass, peers_of

import cupyflash
from cupyflash import Device, plan
from cupyflash.basics import Report, Values
from cupyflash.schedules import Kernel, TileSchedule, choose, fa3_backward, plan_backward

DEFAULT, FIRST = "auto", "fa2"
WIDEST = 128  # d up to which one launch makes both gradients
DESIGNS = 3  # of fa3, its own among them
OURS = (DEFAULT, FIRST, f"{FIRST} deterministic", "fa1", "standard")


def ways(device: Device, case: Case) -> Iterator[tuple[str, Report]]:
    """Ours by name, with their options: "auto", then by algorithm, fa3 where it runs, with the designs that are next to its own."""
    for name in OURS:
        algorithm, _, deterministic = name.partition(" ")
        yield name, {"algorithm": algorithm, "deterministic": bool(deterministic)}
    if not fa3_backward.refusal(case.problem, device):
        yield "fa3", {"algorithm": "fa3"}
        yield "fa3 deterministic", {"algorithm": "fa3", "deterministic": True}
        for design in fa3_backward.designs(case.problem)[1:DESIGNS]:
            yield f"fa3 {design.label}", {"algorithm": "fa3", "tiling": design}


def ours(machine: Machine, case: Case, arrays: Sequence[Any]) -> Iterator[Implementation]:
    """dQ, dK and dV by cupyflash; each has its forward behind it after its first call."""
    q, k, v, dout = arrays

    @cache
    def forward() -> tuple[Any, Any]:
        out, lse = cupyflash.attention(q, k, v, causal=case.causal, return_lse=True)
        return out, lse

    def by(options: Report) -> Call:
        return lambda: cupyflash.attention_backward(dout, q, k, v, *forward(), causal=case.causal, **options)

    for name, options in ways(machine.device, case):
        yield Implementation(name, by(options), ours=True)


def kernels(device: Device, case: Case) -> Iterator[Kernel]:
    yield from plan(case.problem, device, choose(case.problem, device).algorithm, lse=True).kernels()
    for name, options in ways(device, case):
        if name != DEFAULT:  # which is among them
            yield from plan_backward(case.problem, device, **options).kernels()


def theirs(machine: Machine, case: Case, arrays: Sequence[Any]) -> Iterable[tuple[str, Call]]:
    torch = machine.torch(*arrays)
    return torch.backward(case.causal) if torch else ()


PEERS = peers_of(accuracy.gradients, 4, theirs)
BACKWARD = Pass("backward", 2.5, 4, ("dQ", "dK", "dV"), DEFAULT, ours, PEERS, accuracy.gradients, kernels)


def variants(device: Device, cases: Sequence[Case]) -> Iterator[tuple[Values, TileSchedule]]:
    """fa2 for each case of a half type, named as its measurement is, for the clock model."""
    for case in cases:
        if case.problem.itemsize == 2 and case.d <= WIDEST:
            named = {"pass": "backward", **asdict(case), "implementation": FIRST}
            yield named, plan_backward(case.problem, device, FIRST)


def extras(simulated: bool) -> command.Extras:
    """The clock model's times of fa2, which report.py shows beside the measured ones."""
    return {MODEL: command.modelled(simulated, variants)}


def main(argv: Sequence[str] | None = None) -> int:
    return command.main(__doc__, BACKWARD, argv, extras)


if __name__ == "__main__":
    sys.exit(main())
