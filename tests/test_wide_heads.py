"""d and d_v above 256: FlashAttention-2's forward, whose warps share rows where O is wide; most else refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st
from test_execution import check_forward
from test_varlen import check_packed

import cupyflash
from cupyflash import Device, Problem, plan
from cupyflash.schedules import Cache, choose, fa2_tiles, plan_backward, plan_decode, plan_varlen
from cupyflash.sim.cli import main
from cupyflash.sim.numbers.reference import reference
from problems import orders
from suites import problems_each, sample, sweep

A100, H100, T4, A10 = (Device.named(name) for name in ("A100-40GB", "H100-SXM", "T4", "A10"))
DEVICES = tuple(Device.named(name) for name in ("T4", "A100-40GB", "A10", "L4", "H100-SXM", "B200", "RTX 5090"))

KINDS: dict[str, tuple[Device, tuple[int, int] | None, dict[str, Any]]] = {
    "values above 256": (A100, (32, 16), {"head_dim": 32, "head_dim_v": 272, "causal": True}),
    "both the widest": (A100, None, {"head_dim": 512}),
    "both the widest, causal": (H100, (64, 32), {"head_dim": 512, "causal": True}),
    "where shared memory is small": (T4, None, {"head_dim": 512, "causal": True}),
    "keys above 256": (A100, None, {"head_dim": 512, "head_dim_v": 64, "window": (40, 3)}),
    "neither a multiple of 8": (A10, (32, 32), {"head_dim": 57, "head_dim_v": 333, "alignment": 2, "causal": True}),
    "everything": (A100, (32, 16), {"head_dim": 384, "mask": True, "bias": True, "padded": True, "sinks": True, "window": (70, 9)}),
    "bfloat16": (H100, (64, 16), {"head_dim": 264, "head_dim_v": 448, "dtype": "bfloat16", "bias": True, "scale": -0.2}),
    "Q in registers": (A100, (64, 48), {"head_dim": 64, "head_dim_v": 320, "sinks": True}),
}


def posed(name: str, **sizes: Any) -> Problem:
    asked: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 1, "dtype": "float16"} | sizes | KINDS[name][2]
    if asked.get("padded") and "key_lengths" not in asked:
        asked["key_lengths"] = tuple(range(asked["seqlen_k"], 0, -11))[: asked["batch"]]
    return Problem(**asked)


@pytest.mark.parametrize("name", sample(KINDS, {"values above 256"}))
def test_three_ways(name: str) -> None:
    """Theory, replay and execution, the numbers, and no findings, in two orders."""
    device, tiling, _ = KINDS[name]
    for seed, lengths in ((None, (37, 70)), (3, (7, 40))):
        problem = posed(name, seqlen_q=lengths[0], seqlen_k=lengths[1], heads=1)
        check_forward(plan(problem, device, "fa2", tiling, lse=True), v_mean=1.0, schedule_seed=seed)


@st.composite
def wide_problems(draw: st.DrawFn) -> tuple[str, list[Problem]]:
    """Several problems of one of the kernels."""
    name = draw(st.sampled_from(sorted(KINDS)))
    lengths, heads = st.integers(1, 60), st.sampled_from([(1, 1), (2, 1), (2, 2)])

    def one() -> Problem:
        own, kv = draw(heads)
        sizes = {"batch": draw(st.integers(1, 2)), "heads": own, "kv_heads": kv}
        return posed(name, **sizes, seqlen_q=draw(lengths), seqlen_k=draw(lengths))

    return name, [one() for _ in range(problems_each())]


@pytest.mark.wide
@sweep(1, 3, drawn=wide_problems(), data=st.data())
def test_random_problems(drawn: tuple[str, list[Problem]], data: st.DataObject) -> None:
    device, tiling, _ = KINDS[drawn[0]]
    for problem in drawn[1]:
        check_forward(plan(problem, device, "fa2", tiling, lse=True), schedule_seed=data.draw(orders(problem)))


@pytest.mark.wide
def test_packed_sequences() -> None:
    problem = Problem(3, 2, 1, 20, 40, 512, "float16", causal=True, window=(30, 0))
    check_packed(plan_varlen(problem, A100, ((20, 40), (0, 3), (17, 9)), (32, 16), lse=True), seed=1)


def test_a_call() -> None:
    """A user's call: a score function and key lengths, the numbers of float64; "auto" is "fa2" on a Hopper, too."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 1, n, d)).astype(np.float16) for n, d in ((20, 280), (33, 280), (33, 320)))
    score = cupyflash.Score("s - 0.1 * abs(q - k)")
    with cupyflash.simulated_device(H100):
        out = cupyflash.attention(q, k, v, score=score, key_lengths=[33, 9])
    far = np.abs(np.arange(20)[:, None] + 13 - np.arange(33))
    bias = np.broadcast_to((-0.1 * far).astype(np.float16), (2, 1, 20, 33))  # off by less than the bound
    expected, _ = reference(q, k, v, bias=bias, key_lengths=np.array([33, 9]))
    assert np.abs(out - expected).max() < 2e-3
    assert choose(Problem(1, 1, 1, 9, 9, 280, "float16"), H100).algorithm == "fa2"
    assert "up to 256" in choose(Problem(1, 1, 1, 9000, 9000, 280, "float16"), H100).reason
    assert choose(Problem(1, 1, 1, 1, 90000, 280, "float16"), A100).algorithm == "fa2"  # and not "decode"


@pytest.mark.parametrize("device", sample(DEVICES, {T4, H100}), ids=lambda device: device.name)
def test_every_device_has_a_tile(device: Device) -> None:
    """For every d and d_v, with all options that take registers: warps share rows as O needs it, and fit."""
    for d, d_v in ((512, 512), (1, 512), (512, 1), (320, 272), (400, 256)):
        for asked in ({}, {"mask": True, "bias": True, "alignment": 2}, {"window": (9, 9), "alignment": 2}, {"packed": True}):
            problem = Problem(1, 8, 8, 4096, 4096, d, "float16", head_dim_v=d_v, **asked)
            for each in fa2_tiles.finalists(problem, device):
                assert each.config.col_warps == (2 if d_v > 256 else 1) and each.shared_bytes <= device.sram_per_block
                assert each.config.warps <= 8 and each.config.block_rows % each.config.warp_rows == 0


Q, K, V = (np.zeros((2, 16, 300), np.float16) for _ in range(3))
L = np.zeros((2, 16), np.float32)
WIDE = Problem(1, 2, 2, 16, 16, 300, "float16")
SAYS = r"head_dim must be between 1 and 256 for {}, got 300; up to 512 are 'fa2' in float16 and bfloat16"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fa1": (lambda: cupyflash.attention(Q, K, V, algorithm="fa1"), "algorithm 'fa1'"),
    "fa1, of blocks": (lambda: cupyflash.attention(Q, K, V, algorithm="fa1", tiling=(16, 16)), "algorithm 'fa1'"),
    "fa3": (lambda: plan(WIDE, H100, "fa3"), "algorithm 'fa3'"),
    "standard": (lambda: cupyflash.attention(Q, K, V, algorithm="standard"), "algorithm 'standard'"),
    "decode": (lambda: cupyflash.attention(Q, K, V, algorithm="decode"), "algorithm 'decode'"),
    "a cache": (lambda: plan_decode(WIDE, A100, Cache()), "decoding"),
    "attention_decode": (lambda: cupyflash.attention_decode(Q[:, None], K[:, None], V[:, None], [9, 9]), "decoding"),
    "float32": (lambda: cupyflash.attention(*(x.astype(np.float32) for x in (Q, K, V))), "float32"),
    "gradients": (lambda: cupyflash.attention_backward(Q, Q, K, V, Q, L, algorithm="fa1"), "gradients of algorithm 'fa1'"),
    "gradients of one algorithm": (lambda: plan_backward(WIDE, A100, "standard"), "gradients of algorithm 'standard'"),
    "warmup": (lambda: cupyflash.warmup(head_dim=300, algorithm="fa1"), "algorithm 'fa1'"),
    "warmup_decode": (lambda: cupyflash.warmup_decode(batch=1, heads=2, head_dim=300, room=64), "decoding"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_take_it_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is compiled."""
    monkeypatch.setattr("cupyflash.sim.execution.module", lambda *_: pytest.fail("compiled"))
    call, what = REFUSED[name]
    with pytest.raises(ValueError, match=SAYS.format(what)):
        call()


def test_values_are_refused_by_their_name() -> None:
    with pytest.raises(ValueError, match=r"head_dim_v must be between 1 and 256 for algorithm 'standard', got 257"):
        plan(Problem(1, 1, 1, 9, 9, 64, "float16", head_dim_v=257), A100, "standard")
    with pytest.raises(ValueError, match=r"the nearest blocks that run are Br 64 x Bc 64"):
        plan(Problem(1, 1, 1, 999, 999, 320, "float16"), A100, "fa2", (128, 64))


def test_explain_says_how_rows_are_shared() -> None:
    result = CliRunner().invoke(main, ("explain", "--head-dim", "512", "--seqlen", "4096", "--heads", "16", "--device", "H100-SXM"))
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "2 warps share their rows" in text and "8 warps of 16 rows, 2 to the same, 2 stages" in text
    assert "up to a d of 256" in text and "fa1, fitted" not in text and "nothing fits" not in text
