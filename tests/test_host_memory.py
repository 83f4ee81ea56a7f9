"""The estimated memory of simulated calls, and the refusal of calls that are too large, before any work."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import cupyflash
from cupyflash.device import Device
from cupyflash.request.problem import Problem
from cupyflash.request.score import Score
from cupyflash.schedules import plan, plan_backward, plan_softmax
from cupyflash.sim import execution, host_memory, verification
from cupyflash.sim.cli import main
from cupyflash.sim.numbers.yardstick import draw_gradient, drawn, handed_on, measure, measure_gradients

A100 = Device.named("A100-40GB")
FORM = Score("s + tanh(s) * exp(s - k)").form


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{}, {"causal": True, "score": FORM}, {"bias": True, "dropout": True}], ids=str)
def test_the_reference_takes_what_is_estimated(options: dict[str, Any]) -> None:
    p = Problem(1, 2, 2, 256, 256, 16, "float16", **options)

    def forward() -> None:
        inputs = drawn(p)
        measure(inputs.q, np.zeros(inputs.q.shape[:-1], np.float32), inputs)

    def backward() -> None:
        inputs = drawn(p)
        made = {"dQ": inputs.q, "dK": inputs.k, "dV": inputs.v} | ({"dbias": inputs.beside["bias"]} if p.options.bias else {})
        handed_on(inputs, "fa2")
        measure_gradients(made, draw_gradient(p), inputs)

    for work, is_backward in ((forward, False), (backward, True)):
        estimate = host_memory.referred(p, is_backward)
        assert 0.6 * estimate < peak(work) < 1.15 * estimate, (is_backward, estimate)


@pytest.mark.wide
def test_a_launch_takes_no_more_than_is_estimated() -> None:
    for heads, algorithm in ((2, "standard"), (8, "fa2")):
        p = Problem(1, heads, heads, 128, 128, 64, "float16")
        schedule, inputs = plan(p, A100, algorithm), drawn(p)
        found = peak(lambda schedule=schedule, inputs=inputs: execution.execute(schedule, *inputs.qkv))
        assert found < host_memory.launched(schedule) + 90e6


def test_what_grows_with_what_is_written() -> None:
    def need(n: int, algorithm: str = "fa2", backward: bool = False, **options: Any) -> int:
        p = Problem(1, 1, 1, n, n, 64, "float16", **options)
        return host_memory.launched((plan_backward if backward else plan)(p, A100, algorithm))

    assert need(4096) == 2 * need(2048)
    assert 3.9 < need(4096, "standard") / need(2048, "standard") <= 4
    assert need(4096, "standard") > 4096 * 4096 * host_memory.WRITTEN
    assert need(2048, backward=True) > 2 * need(2048)


def test_what_is_too_large_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYFLASH_MAX_MEMORY", "1KB")
    work = "sim.execution.run_kernels", "launch.nvrtc.compile_to_ptx", "sim.verification.run_drawn", "sim.numbers.yardstick.draw"
    for computes in work:
        monkeypatch.setattr(f"cupyflash.{computes}", lambda *_, **__: pytest.fail("something was computed"))
    x, lse = np.zeros((2, 16, 16), np.float16), np.zeros((2, 16), np.float32)
    bounds = np.array([0, 16], np.int32)
    calls: list[Callable[[], object]] = [
        lambda: cupyflash.attention(x, x, x),
        lambda: cupyflash.attention_backward(x, x, x, x, x, lse),
        lambda: cupyflash.attention_varlen(*[x.swapaxes(0, 1)] * 3, bounds, bounds, 16, 16),
        lambda: cupyflash.attention_decode(x[None], x[None], x[None], bounds[1:]),
        lambda: cupyflash.softmax(x),
        lambda: cupyflash.dropout_mask((16, 16), 0.5, seed=1),
        lambda: verification.verify(plan(Problem(1, 1, 1, 16, 16, 16, "float16"), A100)),
        lambda: execution.execute(plan(Problem(1, 2, 2, 16, 16, 16, "float16"), A100), x, x, x),
        lambda: execution.execute_softmax(plan_softmax(32, 16, "float16", A100), x),
    ]
    for call in calls:
        with pytest.raises(MemoryError, match=r"is estimated to need \d+\.\d MB of memory, and 0\.0 MB are free here"):
            call()
    for command in ("verify", "verify --decode", "verify --backward", "demo", "trace", "trace --decode --json"):
        found = CliRunner().invoke(main, command.split())
        assert found.exit_code == 2 and re.search("not enough memory: .* estimated to need", found.output), found.output
        assert "executing" not in found.output


def test_long_sequences_are_verified_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference holds all scores: 30,000 by 30,000 take seven gigabytes for one array of float64."""
    monkeypatch.setattr(host_memory, "available", lambda: 24e9)
    found = CliRunner().invoke(main, ["verify", "--seqlen", "30000", "--max-seconds", "inf"])
    assert found.exit_code == 2 and "verifying fa2 is estimated to need 45." in found.output, found.output


def test_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, size in (("64GB", 64e9), ("1.5 m", 1.5e6), ("1000", 1000), ("inf", math.inf)):
        monkeypatch.setenv("CUPYFLASH_MAX_MEMORY", text)
        assert host_memory.available() == size
    for text in ("", "many", "-1", "nan", "1 PB"):
        monkeypatch.setenv("CUPYFLASH_MAX_MEMORY", text)
        with pytest.raises(ValueError, match="CUPYFLASH_MAX_MEMORY must be a size such as 500MB or 64GB, or inf, got"):
            host_memory.available()
    monkeypatch.delenv("CUPYFLASH_MAX_MEMORY")
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    3000 kB\n"}
    monkeypatch.setattr(host_memory, "_read", lambda path, find: find(files[path]) if path in files else math.inf)
    assert host_memory.available() == 3000 * 1024
    files |= {"/sys/fs/cgroup/memory.max": "max\n"}
    assert host_memory.available() == 3000 * 1024
    files |= {"/sys/fs/cgroup/memory.max": "2000000\n", "/sys/fs/cgroup/memory.stat": "anon 500000\nfile 9\n"}
    assert host_memory.available() == 1_500_000
    files.clear()
    assert host_memory.available() == math.inf
