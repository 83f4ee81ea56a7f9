"""The example for PyTorch: gradients of CPU tensors on the simulated device against PyTorch's own in float64."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import measure, measure_gradients

torch = pytest.importorskip("torch", reason="examples/torch_attention.py needs PyTorch, which is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
example = importlib.import_module("torch_attention")
pytestmark = pytest.mark.wide

CASES: list[dict[str, Any]] = [
    {"causal": True},
    {"scale": 0.3, "window": (20, 5), "deterministic": True},
    {"dropout": 0.3, "seed": 7},
    {"algorithm": "standard"},
]


def theirs(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """The same by PyTorch's operations: its own autograd differentiates them."""
    S = q @ k.transpose(-1, -2) * options.get("scale", q.shape[-1] ** -0.5)
    r, c = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2], torch.arange(k.shape[-2])
    seen = torch.ones(S.shape, dtype=torch.bool)
    if options.get("causal"):
        seen &= c <= r
    if "window" in options:
        left, right = options["window"]
        seen &= (c >= r - left) & (c <= r + right)
    P = torch.softmax(S.masked_fill(~seen, float("-inf")), -1)
    if "dropout" in options:
        kept = cupyflash.dropout_mask(tuple(S.shape), options["dropout"], seed=options["seed"])
        P = P * torch.from_numpy(kept) / kept_part(options["dropout"])
    return P @ v


def kept_part(dropout: float) -> float:
    return 1 - round(dropout * 2**16) / 2**16


@pytest.mark.parametrize("options", CASES, ids=str)
def test_gradients_are_pytorch_s(options: dict[str, Any]) -> None:
    """The 2x rule, with PyTorch in float64 for the truth."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 2, n, 16)).astype(np.float16) for n in (50, 70, 70, 50))
    ours, exact = ([torch.from_numpy(x.astype(dtype)).requires_grad_() for x in (q, k, v)] for dtype in (np.float16, np.float64))
    out = example.attention(*ours, **options)
    found = out, torch.autograd.grad(out, ours, torch.from_numpy(dout))
    expected = theirs(*exact, options)
    gradients = torch.autograd.grad(expected, exact, torch.from_numpy(dout.astype(np.float64)))
    own = {name: value for name, value in options.items() if name not in ("algorithm", "deterministic")}
    inputs = Inputs.of(q, k, v, **own)
    allowed = measure(found[0].detach().numpy(), None, inputs) | measure_gradients(
        dict(zip(("dQ", "dK", "dV"), (gradient.numpy() for gradient in found[1]), strict=True)), dout, inputs
    )
    for name, one, other in zip(("O", "dQ", "dK", "dV"), (found[0], *found[1]), (expected, *gradients), strict=True):
        assert one.dtype == torch.float16 and float((one.double() - other).detach().abs().max()) <= allowed[name].allowed, name


def test_a_broadcast_gradient_and_one_input_that_needs_none() -> None:
    """`out.sum()`'s gradient has no memory of its own for each element; k needs no gradient."""
    rng = np.random.default_rng(1)
    q, k, v = (torch.from_numpy(rng.standard_normal((40, 16)).astype(np.float32)) for _ in range(3))
    q.requires_grad_(), v.requires_grad_()
    example.attention(q, k, v).sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    theirs(*exact, {}).sum().backward()
    for ours, other in ((q, exact[0]), (v, exact[2])):
        assert torch.allclose(ours.grad.double(), other.grad, atol=1e-5)
    assert k.grad is None


def test_what_the_example_prints() -> None:
    found = example.differences("cpu", n=40, d=16, causal=True)
    assert list(found) == ["O", "dQ", "dK", "dV"] and max(found.values()) < 1e-2
    table = example.learned_table("cpu", n=40, d=16)
    assert table.shape == (2, 40) and float(table.abs().max()) > 0.01
