"""Decoding's kernels compiled ahead of the first call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.schedules import plan_decode
from suites import wide


def arrays(batch: int, n_q: int, room: int, page: int | None, append: bool) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The arrays of 4 query heads, two a key head, of d 16: q, the caches and lengths, and those beside them."""
    shape = (batch, 2, room, 16) if page is None else (batch * room // page, 2, page, 16)
    q, k, v = (np.zeros(each, np.float16) for each in ((batch, 4, n_q, 16), shape, shape))
    beside: dict[str, Any] = {}
    if page:
        beside["block_table"] = np.arange(batch * room // page, dtype=np.int32).reshape(batch, -1)
    if append:
        beside |= {name: np.zeros((batch, 2, n_q, 16), np.float16) for name in "kv"}
    return [q, k, v, np.full(batch, 20)], beside


@pytest.mark.parametrize(("n_q", "page", "append"), [(1, 16, True), wide(3, None, False)])
def test_it_leaves_nothing_to_compile(n_q: int, page: int | None, append: bool) -> None:
    batches = (1, 3)
    with cupyflash.simulated_device("T4"):
        sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "room": 96, "queries": n_q, "page_size": page}
        cupyflash.warmup_decode(batch=batches, append=append, **sizes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cupyflash.launch.compiler.compile_to_ptx", lambda *_: pytest.fail("something was compiled"))
            for batch in batches:
                given, beside = arrays(batch, n_q, 96, page, append)
                cupyflash.attention_decode(*given, **beside)


def test_each_program_is_compiled_once_and_all_that_the_model_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr("cupyflash.sim.execution.module", lambda kernel, capability: compiled.append(kernel))
    with cupyflash.simulated_device("H100-SXM") as device:
        cupyflash.warmup_decode(batch=(1, 7, 8, 256), heads=32, kv_heads=8, head_dim=128, room=32768, page_size=16, append=True)
    names = [(kernel.name, kernel.constants) for kernel in compiled]
    assert len(set(names)) == len(names) and {name for name, _ in names} == {"decode", "merge_splits"}
    cache = cupyflash.schedules.Cache(1, 16, 256 * 2048)
    for batch in (1, 7, 256):  # split, and at last not
        problem = cupyflash.Problem(batch, 32, 8, 1, 32768, 128, "float16", causal=True, padded=True, alignment=16)
        assert {(each.name, each.constants) for each in plan_decode(problem, device, cache).kernels()} <= set(names)
    assert {dict(constants)["SPLIT"] for _, constants in names} == {0, 1}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch": [4, 0]}, "batch must be at least 1, got 0"),
        ({"batch": "4"}, "batch must be an integer, got '4'"),
        ({"batch": []}, r"batch must be an integer or some integers, got \[\]"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"room": 0}, "room must be at least 1, got 0"),
        ({"queries": 0}, "queries must be at least 1, got 0"),
        ({"page_size": 48}, "room must be whole pages of 48 keys"),
    ],
)
def test_sizes_that_no_call_has_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        cupyflash.warmup_decode(**{"batch": 1, "heads": 4, "head_dim": 16, "room": 64, **wrong})
