"""The caches of texts, kernels and modules are bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.device import Device
from cupyflash.launch import compiler
from cupyflash.launch.recent import Recent
from cupyflash.schedules import plan_softmax
from cupyflash.sim import execution


def test_the_least_recently_asked_for_go_first() -> None:
    kept: Recent[str, int] = Recent(10, lambda _, size: size)
    for name, size in (("a", 4), ("b", 3), ("c", 3)):
        assert kept.keep(name, size) == size
    assert kept.get("a") == 4 and kept.get("z") is None and kept.total == 10
    kept.keep("d", 4)  # b, the oldest, is not enough
    assert (kept.get("b"), kept.get("c"), kept.get("a"), kept.get("d")) == (None, None, 4, 4)
    kept.keep("large", 100)
    assert len(kept) == 1 and kept.get("large") == 100
    kept.keep("e", 1)
    assert len(kept) == 1 and kept.get("e") == 1


def test_programs_of_the_simulated_device_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many functions a program writes; and what went is made again."""
    x = np.random.default_rng(0).standard_normal((1, 16, 16)).astype(np.float16)
    first = cupyflash.softmax(x)
    for kept in (execution._modules, compiler._texts):
        monkeypatch.setattr(kept, "most", 1)
    cupyflash.softmax(x.astype(np.float32))
    assert len(execution._modules) == len(compiler._texts) == 1
    assert np.array_equal(cupyflash.softmax(x), first)
    assert len(execution._modules) == len(compiler._texts) == 1


def test_functions_of_a_gpu_have_a_bound(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    monkeypatch.setattr(compiler, "MOST_FUNCTIONS", 2)
    device, made = Device.named("A100-40GB"), []
    for cols in (8, 100, 3000):
        (kernel,) = plan_softmax(4, cols, "float32", device).kernels()
        made.append(compiler.gpu_kernel(kernel, 0)[1])
        assert compiler.gpu_kernel(kernel, 0)[1] is made[-1]
    assert [function for _, function in compiler._functions.values()] == made[1:]
