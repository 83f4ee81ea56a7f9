"""Algorithms 3 and 4 through the call, their bits under any schedule, and what they have not."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupyflash import Device, Problem, attention_vjp
from cupyflash.request.options import BlockMask
from cupyflash.schedules import plan_backward
from cupyflash.sim.execution import execute_backward
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import reference
from cupyflash.sim.numbers.yardstick import draw_gradient, measure_gradients
from cupyflash.tiling import DoesNotFit
from suites import wide
from yardstick import draw

A100 = Device.named("A100-40GB")
ALGORITHMS = ("fa1", "standard")


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_schedule_seed_gives_the_same_bits(algorithm: str, dtype: str) -> None:
    problem = Problem(1, 4, 2, 50, 70, 16, dtype, causal=True)
    schedule = plan_backward(problem, A100, algorithm, (32, 32))
    q, k, v = draw(problem)
    dout = draw_gradient(problem)
    out, lse = reference(q, k, v, causal=True)
    runs = [
        execute_backward(schedule, dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32), seed=seed) for seed in (None, 0, 1)
    ]
    assert all(run.findings == () for run in runs)
    assert len({(run.dq.tobytes(), run.dk.tobytes(), run.dv.tobytes()) for run in runs}) == 1


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ["fa1", wide("standard")])
def test_through_the_call(algorithm: str) -> None:
    """Strided views, and a tiling for forward and backward."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, h, 24)).astype(np.float16).swapaxes(1, 2) for n, h in ((40, 4), (50, 2), (50, 2)))
    out, pullback = attention_vjp(q, k, v, causal=True, algorithm=algorithm, tiling=(32, 32))
    dout = rng.standard_normal(out.shape).astype(np.float16)
    gradients = dict(zip(("dQ", "dK", "dV"), pullback(dout), strict=True))
    numbers = measure_gradients(gradients, dout, Inputs.of(q, k, v, causal=True))
    assert all(each.good for each in numbers.values()), numbers


def test_what_they_have_not() -> None:
    def refused(problem: Problem, algorithm: str, words: str, **options: object) -> None:
        with pytest.raises(ValueError, match=re.escape(words)):
            plan_backward(problem, A100, algorithm, **options).kernels()  # type: ignore[arg-type]

    square = Problem(1, 1, 1, 64, 64, 32, "float16")
    sparse = Problem(1, 1, 1, 64, 64, 32, "float16", block_mask=BlockMask.of(np.ones((2, 2), bool)))
    for algorithm in ALGORITHMS:
        words = f"dbias (a call's return_dbias) must be False for algorithm {algorithm!r}"
        refused(square, algorithm, words, dbias=True)
        refused(square, algorithm, "in steps of 16", tiling=(24, 32))
    with pytest.raises(ValueError, match="dbias is the gradient of a bias, and there is none"):
        plan_backward(square, A100, dbias=True)
    refused(sparse, "standard", "the backward of 'standard' has no place for a block mask: 'fa1' and 'fa2' have")
    refused(square, "standard", "at most 128 columns", tiling=(16, 144))
    refused(sparse, "fa1", "block_mask must be (..., Tr, Tc) = (..., 4, 2)", tiling=(16, 32))
    assert plan_backward(sparse, A100, "fa1", (32, 32)).kernels()


def test_what_does_not_fit_says_how_much_it_needs() -> None:
    """A T4's 64 KB hold no 16 keys with float32 gradients at d 256."""
    with pytest.raises(DoesNotFit, match="needs at least 67,456 bytes"):
        plan_backward(Problem(1, 1, 1, 64, 64, 256, "float16"), Device.named("T4"), "fa1")
    with pytest.raises(DoesNotFit, match="of shared memory"):
        plan_backward(Problem(1, 1, 1, 64, 64, 256, "float16"), A100, "fa1", (64, 64)).kernels()
