"""The arrays that a captured call holds: every array that its graph reads or writes stays alive, and arguments that a graph cannot
hold are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyflash import (
    Device,
    Problem,
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_vjp,
    merge_states,
)
from cupyflash.launch import launcher
from cupyflash.schedules import plan_backward
from recorded_cupy import Recorded


def test_workspaces_of_a_captured_call_stay_alive(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_held_for_graphs", [])
    arrays = [cupy.array(16, 64) for _ in range(3)]
    attention(*arrays, algorithm="fa1")
    assert launcher._held_for_graphs == []
    cupy.capturing = True
    attention(*arrays, algorithm="fa1")
    assert set(launcher._held_for_graphs.pop()) == {"l", "m", "O_acc"}
    attention(*arrays, key_lengths=cupy.array(1, dtype=np.int32))
    assert launcher._held_for_graphs == []
    attention(*arrays, key_lengths=cupy.array(1, dtype=np.int64))
    assert launcher._held_for_graphs[0].dtype == np.int32


def backward_arrays(cupy: Recorded, **changed: Any) -> dict[str, Any]:
    """The arguments of `attention_backward`, for 16 queries and keys."""
    arrays = {name: cupy.array(16, 64) for name in ("dout", "q", "k", "v", "out")}
    return arrays | {"lse": cupy.array(16, dtype=np.float32)} | changed


def held(cupy: Recorded, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> list[Any]:
    """The arrays that a call holds when it is captured, workspaces one by one; without a capture it holds nothing."""
    monkeypatch.setattr(launcher, "_held_for_graphs", [])
    call()
    assert launcher._held_for_graphs == []
    monkeypatch.setattr(cupy, "capturing", True)
    call()
    return [one for each in launcher._held_for_graphs for one in (each.values() if isinstance(each, dict) else [each])]


@pytest.mark.parametrize("changed", ["lse", "dbias", "broadcast dout", "sinks", "everything"])
def test_every_array_of_a_captured_backward_that_its_caller_does_not_have_stays_alive(
    cupy: Recorded, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    """All that the kernels are given is an argument, an output, or held."""
    arrays = backward_arrays(cupy)
    if changed in ("lse", "everything"):
        arrays["lse"] = cupy.ndarray((16,), np.dtype(np.float32), np.zeros((16, 2), np.float32)[:, 0])
    if changed in ("broadcast dout", "everything"):
        arrays["dout"] = cupy.ndarray((16, 64), np.dtype(np.float16), np.broadcast_to(np.float16(1), (16, 64)))
    options: dict[str, Any] = {}
    if changed in ("dbias", "everything"):
        options = {"bias": cupy.array(16, 16), "return_dbias": True}
    if changed in ("sinks", "everything"):
        options["sinks"] = cupy.array(1, dtype=np.float32)
    returned: list[Any] = []
    kept = held(cupy, monkeypatch, lambda: returned.extend(attention_backward(**arrays, **options)))
    given = {id(one) for one in (*arrays.values(), *options.values(), *returned, *kept)}
    passed = [value for _, _, values, _ in cupy.launches[len(cupy.launches) // 2 :] for value in values.values()]
    arrays_passed = [value for value in passed if isinstance(value, cupy.ndarray)]
    assert arrays_passed and all(id(value) in given for value in arrays_passed)
    made = {"lse": 1, "dbias": 1, "broadcast dout": 1, "sinks": 1, "everything": 4}[changed]
    assert len(kept) == made + len(plan_backward(Problem(1, 1, 1, 16, 16, 64, "float16"), Device.named("B200")).workspaces())


def test_the_log_sum_exps_that_a_pullback_alone_has_stay_alive(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (cupy.array(16, 64) for _ in range(3))
    (lse,) = held(cupy, monkeypatch, lambda: attention_vjp(q, k, v))
    assert lse.shape == (16,) and lse.dtype == np.float32


def test_all_that_a_captured_merge_allocates_stays_alive(cupy: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary: list[Any] = []

    def merge(*_: Any) -> tuple[Any, Any]:
        temporary.append(cupy.cuda.get_allocator()(16))
        return "o", "lse"

    monkeypatch.setattr("cupyflash.merge.merged", merge)
    o, lse = cupy.array(16, 64), cupy.array(16, dtype=np.float32)
    assert held(cupy, monkeypatch, lambda: merge_states(o, lse, o, lse)) == temporary[1:]


def test_what_a_graph_cannot_hold_is_refused_before_any_work(cupy: Recorded) -> None:
    """Copies from the host, and looks into bounds that are on the GPU."""
    arrays = {name: cupy.array(40, 4, 64) for name in ("q", "k", "v")}
    rest = {"dout": cupy.array(40, 4, 64), "out": cupy.array(40, 4, 64), "lse": cupy.array(4, 40, dtype=np.float32)}
    host = np.array([0, 10, 40], np.int32)
    there = cupy.ndarray((3,), host.dtype, host)
    cupy.capturing = True
    for call, given in ((attention_varlen, arrays), (attention_varlen_backward, arrays | rest)):
        for bounds in (host, [0, 10, 40]):
            with pytest.raises(ValueError, match=r"cu_seqlens_q must be on the GPU while a CUDA graph .* pass cupy.asarray"):
                call(**given, cu_seqlens_q=bounds, cu_seqlens_k=there, max_seqlen_q=30, max_seqlen_k=30)
        with pytest.raises(ValueError, match="max_seqlen_k must be given while a CUDA graph is captured"):
            call(**given, cu_seqlens_q=there, cu_seqlens_k=there, max_seqlen_q=30)
    with pytest.raises(ValueError, match="key_lengths must be on the GPU while a CUDA graph is captured"):
        attention(*(cupy.array(16, 64) for _ in range(3)), key_lengths=[7])
    assert cupy.launches == [] and cupy.compiled == [] and cupy.allocated == [] and cupy.looked_at == 0
    attention_varlen(**arrays, cu_seqlens_q=there, cu_seqlens_k=there, max_seqlen_q=30, max_seqlen_k=30)
    assert len(cupy.launches) == 1
