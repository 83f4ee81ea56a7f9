"""Loops that never end: a finding at the line that the threads wait at, not a hang."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from cupyflash.sim.ptx import Launch, Module
from suites import wide

SEEDS_AND_SIZES = [(None, 1), (0, 1), wide(1, 1), wide(2, 1), wide(None, 10), wide(0, 10)]
"""Ten times the steps take ten times as long."""


@cache
def compiled(source: str) -> Module:
    return Module.from_source(source)


def launch(body: str, grid: int = 1, block: int = 64, seed: int | None = None, max_steps: int = 300) -> Launch:
    source = f'extern "C" __global__ void k(unsigned *x, volatile unsigned *flag) {{\nint t = threadIdx.x;\n{body}\n}}'
    args = {"x": np.zeros(256, np.uint32), "flag": np.zeros(4, np.uint32)}
    return compiled(source).launch("k", grid, block, args, seed=seed, max_steps=max_steps)


# The bodies that never end, and what stands in the line that they wait at.
ENDLESS = {
    "a flag that nobody sets": ("if (t == 33) {\nwhile (flag[1] == 0) {}\nx[0] = 1;\n}", "flag[1]"),
    "a flag that is set behind the wait": ("if (t == 33) {\nwhile (flag[1] == 0) {}\n}\n__syncthreads();\nflag[1] = 1;", "flag[1]"),
    "a lock that is taken": ("while (atomicCAS(x, 0u, 1u) != 0) {}\nx[t + 1] = t;", "atomicCAS"),
    "a counter that stands still": ("for (int i = 0; i < 4; i += flag[0])\nx[t + i] = i;", "flag[0]"),
    "stores for ever": ("while (true)\nx[t]++;", "x[t]"),
    "in a body of several stretches": ("while (flag[0] == 0) {\nif (t > 7) flag[2] = 1; else flag[3] = 1;\n}", "flag[0]"),
}


@pytest.mark.parametrize(("seed", "size"), SEEDS_AND_SIZES)
@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_found_at_its_line(name: str, seed: int | None, size: int) -> None:
    (body, text), steps = ENDLESS[name], 300 * size
    found = [f for f in launch(body, seed=seed, max_steps=steps).findings if f.kind != "race"]
    line = 3 + body[: body.index(text)].count("\n")
    assert [(f.kind, f.source and f.source[1]) for f in found] == [("endless", line)], found
    assert f"kernel.cu:{line}" in found[0].message and f"max_steps is {steps}" in found[0].message
    if "t == 33" in body:
        assert (found[0].block, found[0].warp, found[0].lane) == (0, 1, 1)


@pytest.mark.parametrize(("seed", "size"), SEEDS_AND_SIZES)
def test_what_ends_is_left_alone(seed: int | None, size: int) -> None:
    """However many warps take turns: the steps of one count, not of all."""
    rounds = 200 * size
    counted = f"for (unsigned i = 0; i < {rounds} + flag[0]; i++) if (flag[1]) x[t] = i;"
    assert launch(counted, 5, 128, seed, max_steps=rounds * 5 // 2).findings == ()
    assert {f.kind for f in launch(counted, 5, 128, seed, max_steps=rounds * 3 // 4).findings} == {"endless"}
    handed = "if (t == 0) flag[0] = 1;\nwhile (flag[0] == 0) {}"
    assert launch(handed, 1, 256, seed, max_steps=2000).findings == ()


def test_the_limit_must_be_a_number_of_steps() -> None:
    with pytest.raises(ValueError, match="max_steps must be at least 1, got 0"):
        launch("x[t] = 1;", max_steps=0)
