"""Gradients of d and d_v above 256: two warps share the columns of one, by whatever the forward's scores are masked and changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_backward import check_backward
from test_backward_sparse import check_packed
from test_wide_heads import A10, A100, DEVICES, H100, T4

import cupyflash
from cupyflash import Device, Mask, Problem, Score
from cupyflash.request.options import BlockMask, Pattern
from cupyflash.schedules import fa2_backward_tiles as tiles
from cupyflash.schedules import plan, plan_backward, plan_varlen_backward
from cupyflash.schedules.fa2_backward import Fa2BackwardSchedule
from cupyflash.sim import replay, theory
from cupyflash.sim.numbers.reference import reference_gradients
from cupyflash.sim.verification import verify
from suites import sample

Case = tuple[Device, tuple[int, int] | None, bool, dict[str, Any]]
DOCUMENTS = Pattern.of((np.arange(20)[:, None] // 15 == np.arange(40) // 15)[None, None])
NEAR = Score("softcap * tanh((s + near[q]) / softcap)", near=np.zeros(37, np.float16), softcap=20.0)
# By device, blocks, whether dQ has a kernel of its own, and what is asked; "by turns" is that of Q and dO, or of K and V
CASES: dict[str, Case] = {
    "values above 256": (A100, (32, 32), False, {"head_dim": 32, "head_dim_v": 272, "causal": True}),
    "both the widest": (A100, None, True, {"head_dim": 512, "sinks": True, "seqlen_q": 20}),
    "both the widest, by turns": (
        T4,
        None,
        True,
        {"head_dim": 512, "mask": True, "pattern": DOCUMENTS, "seqlen_q": 20, "seqlen_k": 40},
    ),
    "neither a multiple of 8": (A10, None, False, {"head_dim": 57, "head_dim_v": 333, "alignment": 2, "mask": True, "bias": True}),
    "a score function": (H100, None, False, {"head_dim": 264, "head_dim_v": 448, "dtype": "bfloat16", "score": NEAR.form}),
    "dropped weights": (A100, None, False, {"head_dim": 320, "dropout": True, "padded": True, "key_lengths": (61,), "bias": True}),
}
DBIAS = ("neither a multiple of 8", "dropped weights")


@pytest.mark.wide
@pytest.mark.parametrize("name", sample(CASES, {"values above 256"}))
def test_three_ways(name: str) -> None:
    """Theory, replay and execution, the numbers, and no findings, warps one by one where that is quick."""
    device, tiling, deterministic, asked = CASES[name]
    problem = Problem(**{"batch": 1, "heads": 1, "kv_heads": 1, "seqlen_q": 37, "seqlen_k": 70, "dtype": "float16"} | asked)
    schedule = plan_backward(problem, device, "fa2", tiling, deterministic=deterministic, dbias=name in DBIAS)
    assert isinstance(schedule, Fa2BackwardSchedule) and (schedule.stages == 0) == name.endswith("by turns")
    check_backward(schedule, v_mean=1.0, schedule_seed=None if "widest" in name else 3)


@pytest.mark.wide
def test_block_masks() -> None:
    """The forward's, too."""
    kept = BlockMask.of(np.array([[[[1, 0, 1], [1, 1, 0]]]], bool))
    problem = Problem(1, 2, 1, 50, 90, 272, "float16", head_dim_v=264, block_mask=kept, causal=True)
    assert verify(plan(problem, A100, "fa2", (32, 32), lse=True)).good
    schedule = plan_backward(problem, A100, "fa2", (32, 32), deterministic=True)
    assert replay(schedule, literal=True) == theory.traffic(schedule)
    check_backward(schedule, blocks=(32, 32))


@pytest.mark.wide
def test_packed_sequences() -> None:
    problem = Problem(3, 2, 1, 20, 40, 272, "float16", head_dim_v=24, causal=True, window=(30, 0))
    check_packed(plan_varlen_backward(problem, A100, ((20, 40), (0, 3), (17, 9)), deterministic=True))


@pytest.mark.wide
def test_a_call() -> None:
    """A user's call: a mask function, grouped heads, gradients of float64."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((heads, n, d)).astype(np.float16)
        for heads, n, d in ((2, 20, 280), (1, 33, 280), (1, 33, 24), (2, 20, 24))
    )
    with cupyflash.simulated_device(H100):
        _, pullback = cupyflash.attention_vjp(q, k, v, mask=Mask("(q + k) % 3 != 0"))
        made = pullback(dout)
    seen = (np.arange(20)[:, None] + 13 + np.arange(33)) % 3 != 0
    expected = reference_gradients(dout, q, k, v, mask=np.broadcast_to(seen, (2, 20, 33)))
    for name, gradient in zip(("dQ", "dK", "dV"), made, strict=True):
        assert np.abs(gradient - expected[name]).max() < 1e-2


@pytest.mark.parametrize("device", sample(DEVICES, {T4, H100}), ids=lambda device: device.name)
def test_every_device_has_blocks(device: Device) -> None:
    """For every d and d_v, with all options that take room: two warps share what is wide, and fit."""
    for d, d_v in ((512, 512), (1, 512), (512, 1), (320, 272), (400, 256)):
        for asked in ({}, {"mask": True, "bias": True, "alignment": 2}, {"window": (9, 9), "alignment": 2}):
            schedule = plan_backward(
                Problem(1, 8, 8, 4096, 4096, d, "float16", head_dim_v=d_v, **asked), device, deterministic=True
            )
            assert isinstance(schedule, Fa2BackwardSchedule) and schedule.queries is not None
            assert schedule.warps == tiles.SHARING and (schedule.queries.warps == tiles.SHARING) == (d > 256)
            for kernel in schedule.kernels():
                assert kernel.shared_bytes <= device.sram_per_block and kernel.threads <= 256


def test_what_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match="needs at least 49,792 bytes of SRAM"):
        plan_backward(Problem(1, 1, 1, 9, 9, 512, "float16"), A100.with_sram("40KB"))
