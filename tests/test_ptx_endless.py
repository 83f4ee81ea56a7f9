"""Loops that never end: a finding at the line that the threads wait at, not a hang."""

from __future__ import annotations

import re
from functools import cache
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest

from cupyflash.sim.ptx import Estimate, Launch, Module
from cupyflash.sim.ptx.execute import scheduler
from suites import wide

SEEDS = [None, wide(0), wide(1)]

FUNCTION = """__device__ __noinline__ unsigned f(unsigned x, int n) { for (int i = 0; i < n; i++) x = x * 3 + i; return x; }
"""


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of a second of processor time goes by at every look at the clock, whatever this machine takes."""
    monkeypatch.setattr(scheduler, "processor_seconds", count(step=1 / 8).__next__)


@cache
def compiled(source: str) -> Module:
    return Module.from_source(source)


def module(body: str) -> Module:
    head = 'extern "C" __global__ void k(unsigned *x, volatile unsigned *flag, int n) {\nint t = threadIdx.x;\n'
    return compiled(f"{FUNCTION if 'f(' in body else ''}{head}{body}\n}}")


def launch(body: str, grid: int = 1, block: int = 64, seed: int | None = None, **limits: Any) -> Launch:
    args = {"x": np.zeros(256, np.uint32), "flag": np.zeros(4, np.uint32), "n": np.int32(500)}
    return module(body).launch("k", grid, block, args, seed=seed, **limits)


# The bodies that never end, and what stands in the line that they wait at.
ENDLESS = {
    "a flag that nobody sets": ("if (t == 33) {\nwhile (flag[1] == 0) {}\nx[0] = 1;\n}", "flag[1]"),
    "a flag that is set behind the wait": ("if (t == 33) {\nwhile (flag[1] == 0) {}\n}\n__syncthreads();\nflag[1] = 1;", "flag[1]"),
    "a lock that is taken": ("while (atomicCAS(x, 0u, 1u) != 0) {}\nx[t + 1] = t;", "atomicCAS"),
    "a counter that stands still": ("for (int i = 0; i < 4; i += flag[0])\nx[t + i] = i;", "flag[0]"),
    "stores for ever": ("while (true)\nx[t]++;", "x[t]"),
    "a loop that goes away from its end": ("for (int i = 0; i >= -n; i += 2)\nx[t] += i;", "x[t]"),
    "loops that end in one that does not": (
        "while (flag[0] == 0) {\nfor (int i = 0; i < n; i++)\nx[t] = x[t] * 3 + i;\n}",
        "flag[0]",
    ),
    "what it calls ends": ("while (flag[0] == 0)\nx[t] = f(x[t], n);", "flag[0]"),
    "two warps to and fro": (
        "__shared__ volatile int turn;\nif (t == 0) turn = 0;\n__syncthreads();\nif (t % 32 == 0) while (true) {\n"
        "while (turn != t / 32) {}\nturn = 1 - t / 32;\n}",
        "turn != t",
    ),
    "work in floats": ("float a = x[t];\nwhile (a * a > -1.0f) {\na = 0.5f * (a + 2.0f / a);\nx[t] = a;\n}", "0.5f"),
    "in a body of several stretches": ("while (flag[0] == 0) {\nif (t > 7) flag[2] = 1; else flag[3] = 1;\n}", "flag[0]"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_is_found_at_its_line(name: str, seed: int | None) -> None:
    body, text = ENDLESS[name]
    found = [f for f in launch(body, seed=seed).findings if f.kind != "race"]
    first = 4 if "f(" in body else 3
    line = first + body[: body.index(text)].count("\n")
    assert [f.kind for f in found] == ["endless"]
    assert "in 20 seconds of processor time (stall_seconds) no loop has come nearer to its end" in found[0].message
    place = found[0].source
    assert place is not None and f"kernel.cu:{place[1]}" in found[0].message.partition("of late at")[2]
    if "for" in body and "flag[0]" in body:  # of late it may have been in the loop inside
        assert place[1] >= (1 if "f(" in body else line)
    else:
        assert place[1] == line
    around = re.search(r"in the loop at \S*kernel.cu:(\d+)(?: to (\d+))?,", found[0].message)
    assert around is not None
    begin, end = (int(number or around[1]) for number in around.groups())
    assert begin <= line <= end
    if "t == 33" in body:
        assert (found[0].block, found[0].warp, found[0].lane) == (0, 1, 1)


# Bodies that end, after more seconds by their test's clock than a loop may stand still.
LONG = {
    "counts": "for (int i = 0; i < 20 * n + (int)flag[0]; i++) if (flag[1]) x[t] = i;",
    "counts down": "for (unsigned i = 20 * n; i-- > flag[0];) if (flag[1]) x[t] = i;",
    "loops in loops": "for (int j = 0; j < 6 + (int)flag[0]; j++) for (int i = 0; i < n; i++) x[t] += flag[1] + i;",
    "as long as each warp needs": "for (int j = 0; j < 4; j++) for (int i = 0; i < n * (1 + t / 32) / 2; i++) x[t] += flag[1] + i;",
    "one works, the others wait": "if (t < 32) { for (int i = 0; i < 9 * n; i++) x[t] += flag[1]; __threadfence(); flag[0] = 1; }\n"
    "else while (flag[0] == 0) {}",
    "together": "__shared__ unsigned s[256];\n"
    "for (int i = 0; i < 2 * n; i++) { s[t] = x[t] + i; __syncthreads(); x[t] = s[t ^ 1]; __syncthreads(); }",
    "takes items": "__shared__ unsigned item;\nwhile (true) { if (t == 0) item = atomicAdd(x + 255, 1); __syncthreads();\n"
    "unsigned i = item; __syncthreads(); if (i >= 2 * n) break; x[t] += f(i, 20); }",
    "a bit says that it is over": "for (unsigned i = 0; (i & 0xfffffff0u << 10) == 0; i += 2 + flag[0]) if (flag[1]) x[t] = i;",
    "a shifted count": "for (unsigned i = 0; i >> 14 < 1; i += 2 + flag[0]) if (flag[1]) x[t] = i;",
    "searches": "for (unsigned i = 1; i < n / 5; i++) {\n"
    "unsigned v = i; while (v != 1 + flag[0]) v = v % 2 ? 3 * v + 1 : v / 2; x[t] = v; }",
    "calls": "for (int j = 0; j < n / 8; j++) x[t] = f(x[t], n / 8);",
    "runs through memory": "for (unsigned *p = x; p != x + 9 * n; p++) if (flag[0]) x[t] = p - x;",
}


@pytest.mark.parametrize("seed", [None, wide(0)])
@pytest.mark.parametrize("name", LONG)
def test_what_ends_is_left_alone(name: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a random order one warp may take many turns before the next one, so that the looks must not follow each other as fast.
    clock = count(step=2 if seed is None else 1 / 8)
    monkeypatch.setattr(scheduler, "processor_seconds", clock.__next__)
    blocks = 1 if name == "one works, the others wait" else 2
    found = launch(LONG[name], blocks, 128, seed).findings
    assert [f for f in found if f.kind != "race"] == []
    assert next(clock) > scheduler.STALL_SECONDS


def test_a_turn_of_a_loop_may_take_longer_than_a_loop_may_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large kernels' turns take seconds of this machine. Here each look at the clock is half a minute after the last one."""
    monkeypatch.setattr(scheduler, "processor_seconds", count(step=30).__next__)
    body = """unsigned v = 1; for (int i = 0; i < {}; i++) v = v * 5 + 1;
    unsigned w = 1; do {{ w = w * 5 + 1; x[t] += w; }} while (w != v);"""
    assert [f for f in launch(body.format(scheduler.ROUNDS - 4)).findings if f.kind != "race"] == []
    assert "endless" in [f.kind for f in launch(body.format(40 * scheduler.ROUNDS)).findings]


def test_a_launch_may_have_a_budget_of_instructions() -> None:
    body = LONG["counts"]
    spent = launch(body).counters.instructions
    assert launch(body, max_instructions=spent).findings == ()
    for less in (1, spent // 2, spent - 1):
        (found,) = launch(body, max_instructions=less).findings
        assert found.kind == "budget" and f"has run {less:,} instructions (max_instructions) and goes on" in found.message


def test_a_launch_may_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends early, with what was found so far and no finding for the time, whether waves are long or many."""
    monkeypatch.setattr(scheduler, "processor_seconds", count(step=1).__next__)
    for body, grid in (("x[0] = t; for (int i = 0; i < n; i++) x[t + 1] += flag[0];", 1), ("x[t / 2] = t;", 20000)):
        whole, cut = launch(body, grid), launch(body, grid, max_seconds=5)
        assert not whole.unfinished and cut.unfinished
        assert {f.kind for f in whole.findings} == {f.kind for f in cut.findings} == {"race"}
        assert cut.counters.instructions < whole.counters.instructions
        assert not launch(body, grid, max_seconds=10**6).unfinished
    with pytest.raises(ValueError, match="max_seconds must be a number of seconds above 0"):
        launch(body, max_seconds=-1)


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_MAX_INSTRUCTIONS", "100")
    assert [f.kind for f in launch(LONG["counts"]).findings] == ["budget"]
    assert launch(LONG["counts"], max_instructions=10**9).findings == ()
    monkeypatch.delenv("CUPYFLASH_MAX_INSTRUCTIONS")
    monkeypatch.setenv("CUPYFLASH_STALL_SECONDS", "7.5")
    (found,) = launch("while (true)\nx[t]++;").findings
    assert "in 7.5 seconds of processor time" in found.message


@pytest.mark.parametrize("wrong", [0, -1, True, "many", 1.5, float("nan")])
def test_what_is_no_limit(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_instructions must be a whole number from 1, got "):
        launch("x[t] = 1;", max_instructions=wrong)
    if wrong != 1.5:
        with pytest.raises(ValueError, match="stall_seconds must be a number of seconds above 0, got "):
            launch("x[t] = 1;", stall_seconds=wrong)
    monkeypatch.setenv("CUPYFLASH_MAX_INSTRUCTIONS", str(wrong))
    with pytest.raises(ValueError, match="CUPYFLASH_MAX_INSTRUCTIONS must be a whole number from 1, got "):
        launch("x[t] = 1;")


@pytest.mark.parametrize("body, grid", [("x[t / 2] = t;", 20000), ("for (int i = 0; i < 9 * n; i++) x[t] += flag[0];", 1)])
def test_a_long_launch_is_foretold(body: str, grid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first waves if there are many, else by the time that has passed; then, of the same kernel, before it begins."""
    clock = count(step=1)
    monkeypatch.setattr(scheduler, "processor_seconds", clock.__next__)
    told: list[Estimate] = []
    began = next(clock)
    launch(body, grid, on_long=told.append)
    spent = next(clock) - began
    one_wave = grid == 1
    assert told and all(one.at_least == one_wave and (one.done > 1) != one_wave for one in told)
    assert all(later.seconds >= 2 * one.seconds for one, later in pairwise(told))
    assert spent / 2 < told[-1].seconds < 2 * spent
    monkeypatch.setattr(module(body).code("k"), "seconds_of_wave", 1000.0)
    told.clear()
    launch(body, grid, on_long=told.append)
    assert told == [Estimate(1000.0 * told[0].waves, 0, told[0].waves)]


def test_a_short_launch_is_not_foretold() -> None:
    told: list[Estimate] = []
    launch("x[t] = t;", on_long=told.append)
    assert not told


def test_who_looks_in_vain_lets_others_run_first() -> None:
    """Blocks that work one after the other: a warp that waits for its turn looks after writes, not at each of the others' steps."""
    body = """if (t == 0) while (flag[0] != blockIdx.x) {}
    __syncthreads();
    for (int i = 0; i < n; i++) x[blockIdx.x * 64 + t] += i * flag[1 + i % 2];
    __threadfence(); __syncthreads();
    if (t == 0) flag[0] = blockIdx.x + 1;"""
    assert launch(body, grid=4, max_instructions=40_000).findings == ()
