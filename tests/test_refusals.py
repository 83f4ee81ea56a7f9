"""Every argument of every public function, given what is none: one TypeError or ValueError that names it, or nothing wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import Device, Problem, plan, schedules, sim
from cupyflash.request.options import ARRAYS, OPTIONS
from cupyflash.sim import ptx, theory

A100 = Device.named("A100-40GB")
PROBLEM = Problem(1, 2, 2, 20, 20, 16, "float16")
PACKED = Problem(2, 2, 2, 10, 10, 16, "float16")
SEQLENS = ((10, 10), (10, 10))
CATALOGUE = Path(cupyflash.__file__).with_name("devices.toml")
heads, rows = np.zeros((1, 2, 20, 16), np.float16), np.zeros((20, 2, 16), np.float16)
lse, packed_lse = np.zeros((1, 2, 20), np.float32), np.zeros((2, 20), np.float32)
bounds = np.array([0, 10, 20], np.int32)
qkv, packed = dict.fromkeys("qkv", heads), dict.fromkeys("qkv", rows)
backward = {"dout": heads, "out": heads, "lse": lse}
packed_backward = {"dout": rows, "out": rows, "lse": packed_lse}
cu_seqlens = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
caches = {"q": heads, "k_cache": heads, "v_cache": heads, "cache_seqlens": np.array([7])}

# What is right, and further arguments that a signature does not name.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], Iterable[str]]] = {
    "attention": (cupyflash.attention, qkv, ()),
    "attention_backward": (cupyflash.attention_backward, qkv | backward, ()),
    "attention_vjp": (cupyflash.attention_vjp, qkv, signature(cupyflash.attention).parameters),
    "attention_varlen": (cupyflash.attention_varlen, packed | cu_seqlens, ()),
    "attention_varlen_backward": (cupyflash.attention_varlen_backward, packed | packed_backward | cu_seqlens, ()),
    "attention_decode": (cupyflash.attention_decode, caches, ()),
    "plan_decode": (schedules.plan_decode, {"problem": PROBLEM, "device": A100}, ()),
    "Cache": (schedules.Cache, {}, ()),
    "execute_decode": (
        sim.execute_decode,
        caches | {"schedule": schedules.plan_decode(PROBLEM.asking(padded=True, key_lengths=(7,)), A100)},
        ("k", "v", "block_table", "tree_mask", "sinks"),
    ),
    "merge_states": (cupyflash.merge_states, {"o_a": heads, "lse_a": lse, "o_b": heads, "lse_b": lse}, ()),
    "softmax": (cupyflash.softmax, {"x": heads}, ()),
    "dropout_mask": (cupyflash.dropout_mask, {"shape": (4, 5), "dropout": 0.5, "seed": 1}, ()),
    "warmup": (cupyflash.warmup, {"head_dim": 16}, ()),
    "warmup_decode": (cupyflash.warmup_decode, {"batch": 2, "heads": 2, "head_dim": 16, "room": 64}, ()),
    "plan": (plan, {"problem": PROBLEM, "device": A100}, ()),
    "plan_backward": (schedules.plan_backward, {"problem": PROBLEM, "device": A100}, ()),
    "plan_varlen": (schedules.plan_varlen, {"problem": PACKED, "device": A100}, ()),
    "plan_varlen_backward": (schedules.plan_varlen_backward, {"problem": PACKED, "device": A100}, ()),
    "plan_softmax": (schedules.plan_softmax, {"rows": 3, "cols": 4, "dtype": "float16", "device": A100}, ()),
    "Problem": (
        Problem,
        {"batch": 1, "heads": 2, "kv_heads": 2, "seqlen_q": 20, "seqlen_k": 20, "head_dim": 16, "dtype": "float16", "padded": True},
        OPTIONS,
    ),
    "Problem.from_arrays": (Problem.from_arrays, qkv, {**OPTIONS, **dict.fromkeys(ARRAYS)}),
    "Device.named": (Device.named, {"name": "T4"}, ()),
    "Device.from_file": (Device.from_file, {"path": CATALOGUE, "name": "T4"}, ()),
    "simulated_device": (
        lambda **given: enter(cupyflash.simulated_device(**given)),
        {"device": "T4"},
        ("sram", "max_seconds"),
    ),
    "replay": (sim.replay, {"schedule": plan(PROBLEM, A100)}, ()),
    "traffic": (theory.traffic, {"schedule": plan(PROBLEM, A100)}, ()),
    "execute": (sim.execute, qkv | {"schedule": plan(PROBLEM, A100)}, ARRAYS),
    "execute_backward": (
        sim.execute_backward,
        qkv | backward | {"schedule": schedules.plan_backward(PROBLEM, A100)},
        (*ARRAYS, "dbias"),
    ),
    "execute_varlen": (sim.execute_varlen, packed | {"schedule": schedules.plan_varlen(PACKED, A100, SEQLENS)}, ()),
    "execute_varlen_backward": (
        sim.execute_varlen_backward,
        packed | packed_backward | {"schedule": schedules.plan_varlen_backward(PACKED, A100, SEQLENS)},
        (),
    ),
    "execute_softmax": (sim.execute_softmax, {"schedule": schedules.plan_softmax(40, 16, "float16", A100), "x": heads}, ()),
    "ptx.Module.from_source": (ptx.Module.from_source, {"cuda": ""}, ()),
}
GIVEN = [
    None,
    True,
    -1,
    2.5,
    float("nan"),
    1j,
    "64",
    b"x",
    [],
    [1],
    [4.7],
    (1, 2, 3),
    {},
    object(),
    np.bool_(True),
    np.float32(1),
    np.array(3),
    np.array([0.5, 2]),
    np.array("x"),
    np.array([object()]),
    np.ma.masked_array(heads),
    np.zeros((2, 20, 20)),
    memoryview(b"abcd"),
    A100,
    PROBLEM,
]


def enter(context: Any) -> None:
    with context:
        pass


class Accepted(BaseException):
    """It would have been computed."""


def accept(*_: Any, **__: Any) -> None:
    raise Accepted


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_is_named(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    for computes in (
        "launch.simulated.PreparedSimulation.launch",
        "sim.execution.run_kernels",
        "launch.nvrtc.compile_to_ptx",
        "merge.merged",
    ):
        monkeypatch.setattr(f"cupyflash.{computes}", accept)
    for compiles in ("launch.compiler.compile_to_ptx", "launch.compiler.gpu_kernel", "sim.execution.module"):
        monkeypatch.setattr(f"cupyflash.{compiles}", accept)
    function, right, more = CALLS[call]
    unclear = []
    named = [name for name, each in signature(function).parameters.items() if each.kind is not Parameter.VAR_KEYWORD]
    for argument in dict.fromkeys((*right, *named, *more)):
        for value in GIVEN:
            try:
                function(**right | {argument: value})
            except Accepted:
                continue
            except (TypeError, ValueError) as error:
                if argument not in str(error):
                    unclear.append((argument, value, error))
            except Exception as error:
                if not isinstance(error, OSError):
                    unclear.append((argument, value, error))
    assert unclear == []


COMPUTED = ("attention", "attention_backward", "attention_varlen", "attention_decode", "softmax", "dropout_mask")


@pytest.mark.parametrize("call", COMPUTED)
def test_what_the_simulated_device_finds_stops_a_call(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A call has no result if its kernels were found wrong."""
    monkeypatch.setattr("cupyflash.sim.execution.run_kernels", lambda *_, **__: ({}, {}, ("it races",)))
    function, right, _ = CALLS[call]
    with pytest.raises(RuntimeError, match="it races"):
        function(**right)
