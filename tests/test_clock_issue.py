"""Instructions of one warp after another, as an H100 issued them (benchmarks/results, power, `issue`), beside the clock's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from test_clock import A6000, FAST, H100, code_of

from cupyflash.sim.clock.multiprocessor import ClockedMultiprocessor, Cost, Issue
from cupyflash.sim.clock.rates import ChipRates
from cupyflash.sim.clock.sass import Control
from cupyflash.sim.clock.steps import step_of
from cupyflash.sim.clock.whole import RULES

TEXTS = {
    "fadd": "FADD R{0}, R{0}, 1.5",
    "imad": "IMAD R{0}, R{0}, 3, RZ",
    "prmt": "PRMT R{0}, R{0}, 0x3210, RZ",
    "fmin": "FMNMX R{0}, R{0}, 2, PT",
}
NEAR = 0.35
"""The most that a row is off: three warps that yield to each other take turns of three in the model, not on the chip."""


def clocks(names: Sequence[str], stall: int, yields: bool, warps: int) -> float:
    """The clocks of a sub-core for an instruction, where so many of its warps have those in turns."""
    found, rates = [], ChipRates.of(H100)
    for turns in (8, 24):
        code = code_of(*[(TEXTS[name].format(k % 8), Control(stall, yields=yields)) for k in range(turns) for name in names])
        trace = [Issue(at) for at in range(len(code))]
        run = ClockedMultiprocessor([step_of(each, rates) for each in code], rates, FAST, 1).run([[trace] * 4 * warps])
        found.append(max(run.ends))
    return (found[1] - found[0]) / (16 * len(names) * warps)


@pytest.mark.parametrize(
    ("names", "stall", "yields", "measured"),
    [
        ("fadd", 1, False, (1.0, 1.0, 0.998, 1.003)),
        ("fadd", 1, True, (2.0, 0.998, 0.997, 1.004)),
        ("fadd", 4, False, (4.0, 2.001, 1.336, 1.005)),
        ("imad", 1, True, (2.0, 2.003, 2.001, 2.0)),
        ("imad fadd", 1, False, (1.0, 1.001, 1.0, 0.999)),
        ("imad fadd", 1, True, (2.0, 1.51, 1.448, 1.457)),
        ("prmt fadd", 1, True, (2.0, 1.349, 1.281, 1.283)),
        ("fadd fmin", 1, False, (1.0, 1.0, 1.0, 0.997)),
        ("fadd fmin", 2, False, (2.0, 1.495, 1.513, 1.5)),
        ("imad prmt", 1, True, (1.99, 1.506, 0.956, 0.986)),
    ],
)
def test_a_sub_core_issues_its_warps_as_an_h100_did(names: str, stall: int, yields: bool, measured: Sequence[float]) -> None:
    """Nothing is lost by a turn to another warp; who yields leaves a clock to others, who may need the same unit."""
    found = [clocks(names.split(), stall, yields, warps) for warps in (1, 2, 3, 4)]
    assert found == pytest.approx(measured, rel=NEAR)
    assert [found[k] for k in (0, 1)] == pytest.approx(measured[:2], rel=0.1)


PINNED = {1: 13627.0}
"""Clocks of the mixture below by the number of the rules by which they are."""


def test_times_change_only_with_the_number_of_the_rules() -> None:
    """If this fails, times have changed: raise RULES, and pin the clocks that the new rules give."""
    rates = ChipRates.of(A6000)
    texts = (
        "LDG.E R0, [R2.64]",
        "LDS R1, [R4]",
        "FFMA R5, R0, R1, R5",
        "IMAD R6, R6, 3, RZ",
        "MUFU.EX2 R7, R5",
        "STG.E [R2.64], R7",
    )
    code = code_of(
        *[(text, Control(2, writes=k if k < 2 else None, waits=(0, 1) if k == 2 else ())) for k, text in enumerate(texts)]
    )
    costs = {0: Cost(2.0, 128.0, 32.0), 1: Cost(1.0), 5: Cost(2.0, 128.0, 128.0)}
    traces = [[[Issue(at, costs.get(at)) for at in range(len(code))] * 20] * 12] * 3
    run = ClockedMultiprocessor([step_of(each, rates) for each in code], rates, FAST, 2).run(traces, 66.0)
    assert run.clocks == pytest.approx(PINNED[RULES], rel=1e-6)
