"""The call on CuPy arrays: the numbers under every mask, views, the same bits, and agreement with the simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chip import DTYPES, check_forward, choose, held_in, on_gpu, on_host

import cupyflash
from cupyflash import Device, Problem, plan
from cupyflash.request.options import BlockMask
from cupyflash.schedules import fa2_tiles
from cupyflash.sim import execute
from yardstick import check_numbers, draw

# One kernel each, on several problems: compiling takes longer than running.
KERNELS = choose(
    [
        (algorithm, dtype, d, causal)
        for algorithm in ("fa2", "fa1", "standard")
        for dtype in DTYPES
        for d in (16, 40, 64, 128, 256)
        for causal in (False, True)
    ],
    [
        ("fa2", "float16", 40, True),
        ("fa2", "bfloat16", 16, False),
        ("fa1", "float32", 16, True),
        ("standard", "float16", 16, False),
    ],
)
LENGTHS = choose(((128, 128), (97, 1025), (1025, 97), (1, 300)), ((33, 20), (1, 40)))


@pytest.mark.parametrize(("algorithm", "dtype", "d", "causal"), KERNELS)
def test_numbers(algorithm: str, dtype: str, d: int, causal: bool) -> None:
    for lengths in LENGTHS:
        check_forward(Problem(2, 4, 2, *lengths, d, dtype, causal=causal), algorithm)


@pytest.mark.parametrize("dtype", choose(DTYPES, DTYPES[:1]))
@pytest.mark.parametrize("d", choose([40, 64, 128, 256], [16]))
def test_each_tile_that_lengths_choose_between(dtype: str, d: int) -> None:
    problem = Problem(2, 4, 2, *choose((300, 1025), (20, 33)), d, dtype, causal=True)
    for each in fa2_tiles.finalists(problem, Device.current())[: choose(None, 1)]:
        check_forward(problem, "fa2", (each.config.block_rows, each.config.block_cols))


@pytest.mark.parametrize("dtype", choose(["float16", "float32"], ["float16"]))
@pytest.mark.parametrize("algorithm", choose(["fa2", "fa1"], ["fa2"]))
def test_the_simulated_device_computes_the_same(dtype: str, algorithm: str) -> None:
    """Not to the bit: the two round exponentials and accumulate in the tensor core differently."""
    problem = Problem(1, 2, 1, *choose((200, 300), (20, 30)), 64, dtype, causal=True)
    q, k, v = draw(problem, v_mean=1.0)
    (ours,) = on_host(cupyflash.attention(*on_gpu(q, k, v), causal=True, algorithm=algorithm))
    simulated = execute(plan(problem, Device.current(), algorithm), q, k, v).out
    assert np.abs(ours.astype(np.float64) - simulated.astype(np.float64)).max() <= (4e-3 if dtype == "float16" else 2e-6)


# What restricts the scores, each a kernel of its own, on two problems.
MASKS: dict[str, dict[str, Any]] = {
    "window": {"window": (20, 7)},
    "window to the left": {"window": (33, None)},
    "causal window": {"window": (5, None), "causal": True},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "key lengths": {"padded": True},
    "sinks": {"sinks": True, "causal": True},
    "all": {"mask": True, "bias": True, "padded": True, "causal": True, "window": (60, None)},
}


@pytest.mark.parametrize("masks", choose([*MASKS], ["causal window", "sinks", "all"]))
@pytest.mark.parametrize("dtype", choose(DTYPES, ("float16",)))
@pytest.mark.parametrize("algorithm", choose(["fa2", "fa1", "standard"], ["fa2"]))
def test_masks(dtype: str, algorithm: str, masks: str) -> None:
    for seed, (n_q, n_k) in enumerate(choose([(100, 150), (257, 130)], [(20, 33)])):
        lengths = {"key_lengths": (n_k, n_k // 2)} if MASKS[masks].get("padded") else {}
        check_forward(Problem(2, 4, 2, n_q, n_k, 64, dtype, head_dim_v=48, **MASKS[masks], **lengths), algorithm, seed=seed)


@pytest.mark.parametrize("masks", choose(["causal window", "sinks", "all"], ["sinks"]))
@pytest.mark.parametrize(("d", "d_v"), choose([(512, 512), (40, 272), (512, 64), (320, 320)], [(16, 272)]))
def test_wide_heads(d: int, d_v: int, masks: str) -> None:
    """Warps share rows where d_v is above 256."""
    n_q, n_k = choose((300, 500), (20, 33))
    lengths = {"key_lengths": (n_k, n_k // 2)} if MASKS[masks].get("padded") else {}
    check_forward(Problem(2, 4, 2, n_q, n_k, d, "float16", head_dim_v=d_v, **MASKS[masks], **lengths), "fa2")


@pytest.mark.parametrize("dtype", choose(DTYPES, ("float16",)))
@pytest.mark.parametrize("algorithm", choose(["fa2", "fa1"], ["fa2"]))
def test_block_masks(dtype: str, algorithm: str) -> None:
    tiling, (n_q, n_k) = (32, 64), choose((200, 300), (40, 70))
    for share in (0.0, 0.4, 1.0):
        kept = np.random.default_rng(0).random((1, 2, -(-n_q // 32), -(-n_k // 64))) < share
        check_forward(Problem(2, 2, 1, n_q, n_k, 64, dtype, block_mask=BlockMask.of(kept)), algorithm, tiling)


def test_masks_broadcast() -> None:
    """Of fewer axes, of length 1 and of stride 0, and of key lengths in 64 bits."""
    import cupy

    n_q, n_k = choose((100, 150), (20, 33))
    q, k, v = draw(Problem(2, 2, 2, n_q, n_k, 64, "float16"), v_mean=1.0)
    mask, bias, lengths = (np.arange(n_k) % 3 > 0)[None], np.linspace(-1, 1, n_q).astype(np.float16)[:, None], np.array([n_k, 9])
    given = {"mask": mask, "bias": bias, "key_lengths": lengths}
    out = cupyflash.attention(*on_gpu(q, k, v), **dict(zip(given, on_gpu(*given.values()), strict=True)))
    check_numbers(*on_host(out), None, q, k, v, **given)
    (host,) = on_gpu(np.zeros((1, 1), np.float16))
    still = cupy.ndarray((n_q, n_k), np.float16, host.data, strides=(0, 0))
    out = cupyflash.attention(*on_gpu(q, k, v), bias=still)
    check_numbers(*on_host(out), None, q, k, v)


def test_strided_views_and_out_without_copies() -> None:
    import cupy

    arrays = on_gpu(*draw(Problem(2, choose(30, 10), choose(30, 10), 4, 4, 64, "float16")))
    q, k, v = (array.swapaxes(1, 2) for array in arrays)
    out = cupy.empty((2, choose(30, 10), 4, 64), cupy.float16).swapaxes(1, 2)
    assert cupyflash.attention(q, k, v, out=out) is out
    check_numbers(*on_host(out), None, *on_host(q, k, v))


@pytest.mark.parametrize(("start", "row"), choose([(0, 64), (4, 72), (2, 68), (1, 65)], [(1, 65)]))
@pytest.mark.parametrize("dtype", choose(["float16", "float32"], ["float16"]))
def test_any_alignment(dtype: str, start: int, row: int) -> None:
    arrays = draw(Problem(1, 1, 1, 40, 50, row + 8, dtype))
    q, k, v = (on_gpu(array[0, 0])[0][:, start : start + 48] for array in arrays)
    check_numbers(*on_host(cupyflash.attention(q, k, v)), None, *on_host(q, k, v))


@pytest.mark.parametrize("algorithm", choose(["fa2", "fa1", "standard"], ["fa2"]))
def test_the_same_bits_every_time(algorithm: str) -> None:
    q, k, v = on_gpu(*draw(Problem(1, choose(8, 1), choose(8, 1), choose(700, 40), choose(700, 40), 64, "float16")))
    first = cupyflash.attention(q, k, v, algorithm=algorithm).tobytes()
    assert all(cupyflash.attention(q, k, v, algorithm=algorithm).tobytes() == first for _ in range(choose(10, 2)))


def test_nothing_to_see() -> None:
    """No keys, no queries, no batch: zeros and -inf, or nothing."""
    import cupy

    q = cupy.ones((2, 3, 5, 64), cupy.float16)
    out, lse = cupyflash.attention(q, q[:, :, :0], q[:, :, :0], return_lse=True)
    assert not on_host(out)[0].any() and np.isneginf(on_host(lse)[0]).all()
    assert cupyflash.attention(q[:, :, :0], q, q).shape == (2, 3, 0, 64) and cupyflash.attention(q[:0], q[:0], q[:0]).size == 0


def check_merged(dtype: str, parts: list[slice]) -> None:
    """States of parts of the keys, one of which no row sees, merge into attention over all."""
    problem = Problem(1, 2, 2, choose(100, 20), choose(400, 40), 64, dtype)
    q, k, v = draw(problem, v_mean=1.0)
    (queries,) = on_gpu(q)
    states = [cupyflash.attention(queries, *on_gpu(k[:, :, keys], v[:, :, keys]), return_lse=True) for keys in parts]
    merged = states[0]
    for state in states[1:]:
        merged = cupyflash.merge_states(*merged, *state)
    out, lse = on_host(*merged)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    check_numbers(out, lse, q, k, v, score_dtype=held_in("fa2", q))


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_merge(dtype: str) -> None:
    n = choose(400, 40)
    check_merged(dtype, [slice(0, n // 4), slice(n // 4, n // 4), slice(n // 4, n)])


def test_states_merge_into_a_part() -> None:
    import cupy

    rng = np.random.default_rng(0)
    (o_a, o_b), (lse_a, lse_b) = (
        rng.standard_normal((2, 3, 5, 8)).astype(np.float16),
        rng.standard_normal((2, 3, 5)).astype(np.float32),
    )
    lse_a[0, 0] = lse_b[0, 1] = -np.inf
    expected = cupyflash.merge_states(o_a, lse_a, o_b, lse_b)
    given = on_gpu(o_a, lse_a, o_b, lse_b)
    for out in (cupy.zeros((3, 5, 16), cupy.float16)[..., ::2], given[0]):
        found = cupyflash.merge_states(*given, out=out)
        assert found[0] is out
        assert np.allclose(*on_host(out), expected[0], atol=2e-3) and np.allclose(*on_host(found[1]), expected[1], atol=1e-6)


def test_numpy_and_cupy_do_not_mix() -> None:
    q, k, v = draw(Problem(1, 1, 1, 16, 16, 64, "float16"))
    with pytest.raises(TypeError, match="all CuPy's"):
        cupyflash.attention(*on_gpu(q), k, v)


def test_the_detected_device_is_plausible() -> None:
    device = Device.current()
    assert device.sram_per_block >= 48 * 1024 and device.sm_count > 0 and device.compute_capability >= (7, 5)
