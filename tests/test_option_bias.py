"""A bias of float32 beside half types: its four bytes in every count, its digits in every kernel, its gradient in float32."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import cupyflash
from cupyflash import Device, Problem, plan
from cupyflash.arrays import numpy_dtype
from cupyflash.schedules import plan_backward
from cupyflash.sim import replay, theory
from cupyflash.sim.cli import main
from cupyflash.sim.execution import execute_backward
from cupyflash.sim.numbers.reference import reference, reference_gradients
from cupyflash.sim.numbers.yardstick import draw_gradient, drawn, handed_on, measure_gradients
from cupyflash.sim.verification import verify
from suites import wide

A100, H100 = Device.named("A100-40GB"), Device.named("H100-SXM")


def posed(dtype: str, **asked: Any) -> Problem:
    return Problem(1, 2, 1, 40, 50, 16, dtype, bias=True, bias_dtype="float32", **{"causal": True} | asked)


@pytest.mark.parametrize(
    ("algorithm", "dtype"), [("fa2", "float16"), wide("fa1", "bfloat16"), wide("fa3", "bfloat16"), wide("standard", "float16")]
)
def test_bytes_and_numbers(algorithm: str, dtype: str) -> None:
    """Theory, replay and execution agree, in all tensors, and numbers by the 2x rule; a bias has twice the bytes."""
    schedule = plan(posed(dtype), H100 if algorithm == "fa3" else A100, algorithm, lse=True)
    assert verify(schedule).good
    half = plan(posed(dtype).asking(bias_dtype=None), schedule.device, algorithm, lse=True)
    own, others = theory.traffic(schedule), theory.traffic(half)
    assert own["bias"].read_bytes == 2 * others["bias"].read_bytes
    assert all(own[name] == others[name] for name in own.keys() | others.keys() if name != "bias")


@pytest.mark.wide
@pytest.mark.parametrize(("algorithm", "dtype"), [("fa1", "float16"), ("standard", "bfloat16")])
def test_bytes_and_numbers_of_gradients(algorithm: str, dtype: str) -> None:
    assert verify(plan_backward(posed(dtype, padded=True, key_lengths=(37,)), A100, algorithm)).good


@pytest.mark.wide
def test_its_gradient() -> None:
    """In float32 by the 2x rule, and its atomics' bytes, which do not depend on the bias's type."""
    schedule = plan_backward(posed("float16", window=(30, None)), A100, dbias=True)
    inputs, dout = drawn(schedule.problem, 0, 1.0), draw_gradient(schedule.problem)
    assert inputs.beside["bias"].dtype == np.float32
    dbias = np.zeros(inputs.beside["bias"].shape, np.float32)
    made = execute_backward(schedule, dout, *inputs.qkv, *handed_on(inputs, "fa2"), dbias=dbias, **inputs.beside)
    assert made.findings == () and theory.traffic(schedule) == replay(schedule) == made.traffic
    numbers = measure_gradients(made.gradients | {"dbias": dbias}, dout, inputs)
    assert all(each.good for each in numbers.values()), numbers
    half = plan_backward(schedule.problem.asking(bias_dtype=None), A100, dbias=True)
    assert theory.traffic(half)["dbias"] == made.traffic["dbias"]


@pytest.mark.wide
def test_calls_keep_its_digits() -> None:
    """Numbers that need more digits than a half type has; the gradient has the bias's own dtype and shape."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, n, 16)).astype(np.float16) for n in (20, 30, 30))
    bias = (2048 + rng.standard_normal((2, 1, 30))).astype(np.float32)
    out, pullback = cupyflash.attention_vjp(q, k, v, bias=bias, return_dbias=True)
    exact = reference(q, k, v, bias=bias)[0]
    rounded = reference(q, k, v, bias=bias.astype(q.dtype).astype(np.float32))[0]
    error, other = (np.abs(each.astype(np.float64) - exact).max() for each in (out, rounded))
    assert error < 2e-2 < other
    dbias = pullback(out)[-1]
    wanted = reference_gradients(out, q, k, v, bias=bias)["dbias"].sum(axis=-2, keepdims=True)
    assert dbias.dtype == np.float32 and dbias.shape == bias.shape and np.allclose(dbias, wanted, atol=0.1)


@pytest.mark.parametrize(
    ("dtype", "of_bias", "said"),
    [
        ("float16", "float64", "bias must be of dtype float16 or float32, got float64"),
        ("float16", "bfloat16", "bias must be of dtype float16 or float32, got bfloat16"),
        ("float32", "float16", "bias must be of dtype float32, got float16"),
    ],
)
def test_other_types_are_refused(dtype: str, of_bias: str, said: str) -> None:
    q = np.zeros((2, 20, 16), dtype)
    with pytest.raises(TypeError, match=said):
        cupyflash.attention(q, q, q, bias=np.zeros((20, 20), of_bias if of_bias == "float64" else numpy_dtype(of_bias)))


def test_options_say_its_type_where_it_differs() -> None:
    assert posed("float32").options.bias_dtype is None and posed("float16").bias_itemsize == 4
    with pytest.raises(ValueError, match="bias_dtype is that of a bias, got 'float32' with bias=False"):
        Problem(1, 1, 1, 8, 8, 16, "float16", bias_dtype="float32")
    with pytest.raises(ValueError, match="bias_dtype must be one of float32, got 'float64'"):
        Problem(1, 1, 1, 8, 8, 16, "float16", bias=True, bias_dtype="float64")


@pytest.mark.wide
def test_commands_and_warmup() -> None:
    """Behind the L2 it has its own size, too."""
    words = "predict --seqlen 64 --head-dim 16 --algorithm fa2 --bias --bias-dtype float32 --json --l2"
    made = CliRunner().invoke(main, words.split())
    assert made.exit_code == 0 and json.loads(made.output)["problem"]["bias_dtype"] == "float32"
    cupyflash.warmup(head_dim=16, bias="float32")
    with pytest.raises(ValueError, match="bias_dtype must be one of float32, got 'float64'"):
        cupyflash.warmup(head_dim=16, bias="float64")
