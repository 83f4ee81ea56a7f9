"""Sliding windows and block masks: what is left out is neither loaded nor computed, and the counts show it."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st

import cupyflash
from cupyflash import Device, Problem, attention, plan
from cupyflash.distributed.plan import plan_ring
from cupyflash.request.options import BlockMask
from cupyflash.sim import execute, theory
from cupyflash.sim.cli import main
from cupyflash.sim.numbers.reference import reference
from cupyflash.sim.two_level.machine import replay
from cupyflash.sim.verification import verify
from problems import TILINGS, longest, orders, reach, sides, sparse_problems
from suites import sweep, wide

A100 = Device.named("A100-40GB")


def halves(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


@sweep(10, 60, data=st.data(), algorithm=st.sampled_from(["fa1", "fa2"]), tiling=st.sampled_from(TILINGS), lse=st.booleans())
def test_theory_is_replay_is_literal_replay(data: st.DataObject, algorithm: str, tiling: tuple[int, int], lse: bool) -> None:
    for problem in data.draw(sparse_problems(tiling)):
        schedule = plan(problem, A100, algorithm, tiling, lse=lse)
        assert theory.traffic(schedule) == replay(schedule) == replay(schedule, literal=True)


@pytest.mark.parametrize("algorithm", [wide("fa1"), "fa2"])
@sweep(1, 4)
def test_random_problems(algorithm: str, data: st.DataObject) -> None:
    """Theory == replay == execution, numbers by the 2x rule, nothing found."""
    tiling = data.draw(st.sampled_from(TILINGS))
    for problem in data.draw(sparse_problems(tiling, longest(tiling, 120))):
        assert verify(plan(problem, A100, algorithm, tiling, lse=True), seed=data.draw(orders(problem))).good


@pytest.mark.parametrize(
    ("device", "dtype", "d", "masks"),
    [
        wide("T4", "float16", 200, {"window": (20, 7), "alignment": 2}),
        wide("A100-40GB", "float16", 256, {"window": (20, 7), "bias": True}),
        wide("A100-40GB", "float32", 200, {"window": (20, None), "alignment": 4}),
        wide("A100-40GB", "float32", 256, {"mask": True, "causal": True}),
    ],
)
def test_heads_that_take_half_of_the_registers(device: str, dtype: str, d: int, masks: dict[str, Any]) -> None:
    """From d 177 on, masks and narrow copies make FlashAttention-2's kernel another: few loads in flight, one loop."""
    schedule = plan(Problem(1, 1, 1, 40, 50, d, dtype, **masks), Device.named(device), "fa2", lse=True)
    found = verify(schedule, seed=3)
    assert found.good


@pytest.mark.wide
@sweep(2, 20, n_q=st.integers(1, 100), n_k=st.integers(0, 100), left=sides, right=sides, causal=st.booleans())
def test_a_window_in_standard_attention(n_q: int, n_k: int, left: int | None, right: int | None, causal: bool) -> None:
    """Algorithm 0 skips nothing, but masks alike."""
    problem = Problem(1, 1, 1, n_q, n_k, 16, "float16", causal=causal, window=reach(causal, left, right))
    assert verify(plan(problem, A100, "standard", (32, 32), lse=True)).good


def test_a_window_without_limits_is_none_and_one_to_the_left_is_causal() -> None:
    def posed(**more: Any) -> Problem:
        return Problem(1, 1, 1, 64, 64, 16, "float16", **more)

    assert posed(window=(None, None)) == posed() and posed(window=(None, 0)) == posed(causal=True)
    assert posed(window=(None, 0), causal=True) == posed(window=(None, None), causal=True) == posed(causal=True)
    assert posed(window=(3, None), causal=True) == posed(window=(3, 0), causal=True) == posed(window=(3, 0))


@pytest.mark.parametrize("call", ["attention", "attention_vjp", "attention_decode", "attention_varlen", "plan_ring", "--window"])
def test_a_right_side_beside_causal_is_refused(call: str) -> None:
    """They contradict each other: `causal` ends each row at its own key."""
    refused = r"window must be \(left, None\) or \(left, 0\) beside causal, which ends each row at its own key, got \(5, 3\)"
    x, asked = np.zeros((1, 1, 8, 16), np.float16), {"causal": True, "window": (5, 3)}
    if call == "--window":
        shape = ("--seqlen", "64", "--head-dim", "64")
        result = CliRunner().invoke(main, ["predict", *shape, "--causal", "--window", "5,3"])
        assert result.exit_code == 2 and re.search(refused, " ".join(result.stderr.split()))
        return
    with pytest.raises(ValueError, match=refused):
        if call == "plan_ring":
            plan_ring(64, 64, 2, **asked)
        elif call == "attention_decode":
            cupyflash.attention_decode(x, x, x, np.array([8], np.int32), **asked)
        elif call == "attention_varlen":
            cupyflash.attention_varlen(*3 * [x[0].swapaxes(0, 1)], [0, 8], [0, 8], **asked)
        else:
            getattr(cupyflash, call)(x, x, x, **asked)


@pytest.mark.parametrize("algorithm", ["fa1", "fa2"])
@pytest.mark.parametrize("kept_of_8", [0, 1, 2, 5, 8])
def test_proposition_4(algorithm: str, kept_of_8: int) -> None:
    """Each row block keeps k of 8 column blocks: what a visit moves is k / 8 of the dense, to the byte; the rest is O(N d)."""
    n, blocks = 512, (64, 64)
    kept = np.zeros((8, 8), bool)
    for i in range(8):
        kept[i, (i + np.arange(kept_of_8)) % 8] = True
    dense = theory.traffic(plan(Problem(1, 1, 1, n, n, 64, "float16"), A100, algorithm, blocks))
    sparse = theory.traffic(plan(Problem(1, 1, 1, n, n, 64, "float16", block_mask=BlockMask.of(kept)), A100, algorithm, blocks))
    visited = ("Q", "O_acc", "l", "m") if algorithm == "fa1" else ("K", "V")
    for name in visited:
        assert 8 * sparse[name].read_bytes == kept_of_8 * dense[name].read_bytes
    assert sparse["O"] == dense["O"] and sparse["block_mask"].read_bytes == 64


@pytest.mark.wide
@pytest.mark.parametrize("algorithm", ["fa1", wide("fa2")])
def test_what_is_left_out_is_not_looked_at(algorithm: str) -> None:
    """NaN in the keys and values of blocks that nobody visits, and behind a window's edge in other blocks, does not show."""
    q, k, v = halves((2, 96, 32), (2, 160, 32), (2, 160, 32))
    kept = np.ones((3, 5), bool)
    kept[:, [1, 4]] = False
    expected = attention(q, k, v, block_mask=kept, algorithm=algorithm, tiling=(32, 32))
    for j in (1, 4):
        k[:, 32 * j : 32 * (j + 1)] = v[:, 32 * j : 32 * (j + 1)] = np.nan
    assert attention(q, k, v, block_mask=kept, algorithm=algorithm, tiling=(32, 32)).tobytes() == expected.tobytes()
    seen = np.repeat(np.repeat(kept, 32, 0), 32, 1)
    clean = (np.nan_to_num(array.astype(np.float32)).astype(array.dtype) for array in (k, v))
    assert np.allclose(expected, reference(q, *clean, mask=seen)[0], atol=5e-3)

    q, k, v = halves((1, 64, 32), (1, 256, 32), (1, 256, 32))
    expected = attention(q, k, v, window=(20, 5), algorithm=algorithm, tiling=(32, 32))
    k[:, :160] = v[:, :160] = np.nan  # row 0's own key is 192, and its window begins in block 5
    assert attention(q, k, v, window=(20, 5), algorithm=algorithm, tiling=(32, 32)).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("algorithm", "orders"), [wide("fa1", 3), wide("fa2", 3)])
def test_every_schedule_seed_gives_the_same_bits(algorithm: str, orders: int) -> None:
    rng = np.random.default_rng(3)
    block_mask = rng.random((1, 2, 3, 3)) < 0.6
    problem = Problem(1, 2, 1, 70, 90, 32, "float16", window=(40, 20), block_mask=BlockMask.of(block_mask))
    schedule = plan(problem, A100, algorithm, (32, 32))
    q, k, v = halves((1, 2, 70, 32), (1, 1, 90, 32), (1, 1, 90, 32))
    outs = {execute(schedule, q, k, v, block_mask=block_mask, seed=seed).out.tobytes() for seed in (None, 1, 2, 3)[: 1 + orders]}
    assert len(outs) == 1


q, k, v = halves((2, 50, 16), (2, 60, 16), (2, 60, 16))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"window": 5}, TypeError, "window must be"),
        ({"window": (1, 2, 3)}, TypeError, "window must be"),
        ({"window": (1.5, None)}, TypeError, "window must be"),
        ({"window": (-1, 0)}, ValueError, "at least 0"),
        ({"block_mask": np.ones((2, 2), np.uint8)}, TypeError, "dtype bool"),
        ({"block_mask": np.ones(2, bool)}, ValueError, "Tr, Tc"),
        ({"block_mask": np.ones((3, 4, 4), bool), "tiling": (16, 16)}, ValueError, "h or 1"),
        ({"block_mask": np.ones((4, 5), bool), "tiling": (16, 16)}, ValueError, r"\(\.\.\., 4, 4\)"),
        ({"block_mask": np.ones((4, 4), bool), "tiling": (16, 16), "algorithm": "standard"}, ValueError, "place for a block mask"),
    ],
)
def test_wrong_input_is_refused_by_name(options: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        attention(q, k, v, **options)


def test_unused_features_are_compiled_out() -> None:
    """The plain kernel's constants turn both off, and its block mask takes no shared memory."""
    plain = plan(Problem(1, 1, 1, 512, 512, 64, "float16"), A100, "fa2", (64, 64)).kernels()[0]
    kept = BlockMask((1, 1, 8, 8))
    sparse = plan(Problem(1, 1, 1, 512, 512, 64, "float16", block_mask=kept), A100, "fa2", (64, 64)).kernels()[0]
    assert dict(plain.constants)["SPARSE"] == dict(plain.constants)["WINDOW"] == 0 and dict(sparse.constants)["SPARSE"] == 1
    assert sparse.shared_bytes == plain.shared_bytes + 4 * math.ceil(8 / 32)
