"""The backward call: finite differences, shapes and strides, and one clear exception for what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.yardstick import measure_gradients
from suites import wide

pytest.importorskip("cupy")

Arrays = dict[str, np.ndarray]


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def posed(q: tuple[int, ...] = (2, 20, 16), k: tuple[int, ...] = (2, 28, 16), dtype: Any = np.float32, **options: Any) -> Arrays:
    """The arguments of `attention_backward`, by name: random q, k, v and dout, and the forward's out and lse."""
    arrays = {"q": normal(*q, dtype=dtype), "k": normal(*k, dtype=dtype, seed=1), "v": normal(*k, dtype=dtype, seed=2)}
    out, lse = cupyflash.attention(**arrays, return_lse=True, **options)
    return {"dout": normal(*out.shape, dtype=dtype, seed=3), **arrays, "out": out, "lse": lse}


def check_gradients(arrays: Arrays, gradients: tuple[Any, Any, Any], **options: Any) -> None:
    """The 2x rule against float64, shapes and dtypes."""
    dout, q, k, v = (arrays[name] for name in ("dout", "q", "k", "v"))
    for gradient, of in zip(gradients, (q, k, v), strict=True):
        assert gradient.shape == of.shape and gradient.dtype == of.dtype
    numbers = measure_gradients(dict(zip(("dQ", "dK", "dV"), gradients, strict=True)), dout, Inputs.of(q, k, v, **options))
    assert all(each.good for each in numbers.values()), numbers


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        wide({}),
        wide({"causal": True}),
        wide({"window": (5, 3)}),
        {"scale": -0.4, "bias": normal(20, 28, seed=5)},
        wide({"mask": normal(2, 20, 28, seed=6) < 0.5}),
        wide({"block_mask": np.array([[True, False], [True, True]]), "tiling": (16, 16)}),
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_finite_differences_in_float32(options: dict[str, Any]) -> None:
    """Single entries of q, k and v moved both ways, every moved input in one batch; two query heads share a key head."""
    step, entries, rng = 0.02, 8, np.random.default_rng(7)
    arrays = posed(k=(1, 28, 16), **options)
    gradients = dict(zip("qkv", cupyflash.attention_backward(**arrays, **options), strict=True))
    inputs = {name: np.repeat(arrays[name][None], 2 * 3 * entries, axis=0) for name in "qkv"}
    expected, moved = [], 0
    for name, gradient in gradients.items():
        for at in rng.choice(gradient.size, entries, replace=False):
            inputs[name][moved].flat[at] += np.float32(step)
            inputs[name][moved + 1].flat[at] -= np.float32(step)
            expected.append(gradient.flat[at])
            moved += 2
    sums = (cupyflash.attention(**inputs, **options) * arrays["dout"]).sum(axis=(1, 2, 3), dtype=np.float64)
    differences = (sums[0::2] - sums[1::2]) / (2 * step)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(differences, expected, rtol=2e-3, atol=5e-4)


@pytest.mark.parametrize("dtype", [wide(np.float16), np.float32])
def test_axes_are_batch_and_heads(dtype: Any) -> None:
    """(b, h, n, d), each of the batch (h, n, d), and each head (n, d) have the same gradients."""
    arrays = posed((2, 2, 20, 16), (2, 2, 28, 16), dtype, causal=True)
    whole = cupyflash.attention_backward(**arrays, causal=True)
    check_gradients(arrays, whole, causal=True)
    for at in [(1,), (0, 1)]:
        part = cupyflash.attention_backward(**{name: array[at] for name, array in arrays.items()}, causal=True)
        for ours, of_whole in zip(part, whole, strict=True):
            np.testing.assert_allclose(ours, of_whole[at], rtol=1e-3, atol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("kv_heads", [wide(1), 2, wide(4)])
def test_gradients_of_shared_heads_add_up(kv_heads: int) -> None:
    arrays = posed((4, 20, 16), (kv_heads, 28, 16), np.float16)
    shared = cupyflash.attention_backward(**arrays)
    check_gradients(arrays, shared)
    repeated = arrays | {name: np.repeat(arrays[name], 4 // kv_heads, axis=0) for name in "kv"}
    dq, *own = cupyflash.attention_backward(**repeated)
    np.testing.assert_allclose(shared[0], dq, rtol=1e-2, atol=1e-4)
    for ours, each in zip(shared[1:], own, strict=True):
        summed = each.astype(np.float32).reshape(kv_heads, 4 // kv_heads, 28, 16).sum(axis=1)
        np.testing.assert_allclose(ours, summed, rtol=1e-2, atol=4e-3)


@pytest.mark.wide
def test_another_d_of_v() -> None:
    q, k, v = normal(2, 20, 16, dtype=np.float16), normal(2, 28, 16, dtype=np.float16, seed=1), normal(2, 28, 40, seed=2)
    v = v.astype(np.float16)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    arrays = {"dout": normal(2, 20, 40, dtype=np.float16, seed=3), "q": q, "k": k, "v": v, "out": out, "lse": lse}
    check_gradients(arrays, cupyflash.attention_backward(**arrays))


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3),  # (n, h, d) in memory
        lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],  # every other row
        lambda x: x[..., ::-1, :].copy()[..., ::-1, :],  # backwards
    ],
)
def test_strided_inputs_are_as_good_as_contiguous_ones(strided: Callable[[np.ndarray], np.ndarray]) -> None:
    arrays = posed(dtype=np.float16)
    views = arrays | {name: strided(arrays[name]) for name in ("dout", "q", "k", "v", "out")}
    views["lse"] = np.repeat(arrays["lse"], 2, axis=-1)[..., ::2]
    assert not any(array.flags.c_contiguous for array in views.values())
    for ours, plain in zip(cupyflash.attention_backward(**views), cupyflash.attention_backward(**arrays), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: np.broadcast_to(x[0, 0, 0], x.shape),  # as of out.sum()
        wide(lambda x: np.broadcast_to(x[..., :1], x.shape)),
        wide(np.asfortranarray),
        lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        wide(lambda x: x[..., ::-1].copy()[..., ::-1]),
    ],
)
def test_a_dout_of_any_strides_is_as_good_as_a_contiguous_one(strided: Callable[[np.ndarray], np.ndarray]) -> None:
    arrays = posed(dtype=np.float16)
    dout = strided(arrays["dout"])
    assert dout.strides[-1] != dout.itemsize
    plain = cupyflash.attention_backward(**arrays | {"dout": np.ascontiguousarray(dout)}, deterministic=True)
    for ours, expected in zip(cupyflash.attention_backward(**arrays | {"dout": dout}, deterministic=True), plain, strict=True):
        assert np.array_equal(ours, expected)


@pytest.mark.wide
def test_a_broadcast_dout_of_packed_sequences() -> None:
    q, k, v = (normal(20, 2, 16, dtype=np.float16, seed=seed) for seed in range(3))
    out, lse = cupyflash.attention_varlen(q, k, v, [0, 7, 20], [0, 7, 20], return_lse=True)
    one = np.broadcast_to(np.float16(1), out.shape)
    for ours, expected in zip(
        *(
            cupyflash.attention_varlen_backward(dout, q, k, v, out, lse, [0, 7, 20], [0, 7, 20], deterministic=True)
            for dout in (one, one.copy())
        ),
        strict=True,
    ):
        assert np.array_equal(ours, expected)


@pytest.mark.wide
def test_key_lengths_in_a_list() -> None:
    q, k, v = (normal(2, 2, 20, 16, dtype=np.float16, seed=seed) for seed in range(3))
    results = []
    for lengths in (np.array([20, 7]), [20, 7], (np.int8(20), 7)):
        out, pullback = cupyflash.attention_vjp(q, k, v, key_lengths=lengths, deterministic=True)
        results.append((out, *pullback(q)))
    for other in results[1:]:
        assert all(np.array_equal(ours, expected) for ours, expected in zip(other, results[0], strict=True))


@pytest.mark.parametrize(
    ("q", "k"),
    [((2, 20, 16), (2, 0, 16)), ((2, 0, 16), (2, 28, 16)), ((0, 20, 16), (0, 28, 16)), ((0, 2, 20, 16), (0, 2, 28, 16))],
)
def test_empty_arrays_have_gradients_of_zero(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    arrays = posed(q, k, np.float16)
    gradients = cupyflash.attention_backward(**arrays)
    assert [gradient.shape for gradient in gradients] == [q, k, k]
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.wide
def test_rows_without_keys_and_keys_without_rows_have_gradients_of_zero() -> None:
    """Causal with more rows than keys, and keys behind the length; what k and v hold there is never looked at."""
    q, k, v = (normal(2, 2, n, 16, dtype=np.float16, seed=n) for n in (30, 20, 20))
    k[1, :, 5:], v[1, :, 5:] = np.nan, np.inf
    options = {"causal": True, "key_lengths": np.array([20, 5])}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    dq, dk, dv = cupyflash.attention_backward(normal(2, 2, 30, 16, dtype=np.float16), q, k, v, out, lse, **options)
    assert not dq[:, :, :10].any() and dq[:, :, 11:].any(axis=-1).all()
    assert not dk[1, :, 5:].any() and not dv[1, :, 5:].any() and dv[1, :, :5].any(axis=-1).all()


def test_the_pullback_may_be_called_again_and_is_linear() -> None:
    arrays = posed(dtype=np.float32)
    out, pullback = cupyflash.attention_vjp(*(arrays[name] for name in "qkv"))
    assert np.array_equal(out, arrays["out"])
    once, twice, doubled = (pullback(dout) for dout in (arrays["dout"], arrays["dout"], 2 * arrays["dout"]))
    check_gradients(arrays, once)
    for first, second, double in zip(once, twice, doubled, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(2 * first, double, rtol=1e-5, atol=1e-6)


@pytest.mark.wide
def test_vjp_hands_its_options_to_both_passes() -> None:
    q, k, v = (normal(2, 2, n, 16, dtype=np.float16, seed=n) for n in (20, 28, 28))
    options = {"causal": True, "scale": 0.4, "key_lengths": np.array([28, 9]), "bias": normal(20, 28).astype(np.float16)}
    out, pullback = cupyflash.attention_vjp(q, k, v, algorithm="fa2", tiling=(16, 32), **options)
    dout = normal(*out.shape, dtype=np.float16)
    check_gradients({"dout": dout, "q": q, "k": k, "v": v}, pullback(dout), **options)


@pytest.mark.wide
@pytest.mark.parametrize("device", ["T4", wide("H100-SXM")])
def test_gradients_run_on_the_device_that_is_simulated(device: str) -> None:
    with cupyflash.simulated_device(device, sram="24KB"):
        arrays = posed((2, 70, 64), (2, 90, 64), np.float16, causal=True)
        check_gradients(arrays, cupyflash.attention_backward(**arrays, causal=True), causal=True)


def test_what_would_take_too_long_is_refused() -> None:
    arrays = posed(dtype=np.float16)
    with cupyflash.simulated_device(max_seconds=1e-5), pytest.raises(RuntimeError, match=r"over the limit of 1e-05 s"):
        cupyflash.attention_backward(**arrays)


GOOD = {name: normal(2, 28 if name in "kv" else 20, 16, dtype=np.float16) for name in ("dout", "q", "k", "v", "out")}
GOOD["lse"] = normal(2, 20)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"dout": GOOD["dout"][:, :-1]}, ValueError, r"dout must have shape \(2, 20, 16\), got \(2, 19, 16\)"),
        ({"dout": GOOD["dout"][0]}, ValueError, "dout must have as many axes as q"),
        ({"dout": GOOD["dout"].astype(np.float32)}, TypeError, "dout must have q's dtype float16, got float32"),
        ({"dout": np.asfortranarray(GOOD["dout"])[:, :-1]}, ValueError, r"dout must have shape \(2, 20, 16\), got \(2, 19, 16\)"),
        ({"dout": np.broadcast_to(np.float32(1), (2, 20, 16))}, TypeError, "dout must have q's dtype float16, got float32"),
        ({"out": np.asfortranarray(GOOD["out"])}, ValueError, "out must be contiguous along its last axis"),
        ({"dout": GOOD["dout"].tolist()}, TypeError, "dout must be a NumPy or CuPy array, got list"),
        ({"dout": None}, TypeError, "dout must be a NumPy or CuPy array, got NoneType"),
        ({"out": GOOD["out"][:, :-1]}, ValueError, r"out must have shape \(2, 20, 16\)"),
        ({"out": GOOD["out"].astype(np.float32)}, TypeError, "out must have q's dtype"),
        ({"lse": GOOD["lse"].astype(np.float64)}, TypeError, "lse must be of dtype float32, got float64"),
        ({"lse": GOOD["lse"][..., None]}, ValueError, r"lse must have shape \(2, 20\), got \(2, 20, 1\)"),
        ({"lse": None}, TypeError, "lse must be a NumPy or CuPy array"),
        ({"k": GOOD["k"][..., :8]}, ValueError, "k must have q's head dimension 16"),
        ({"q": GOOD["q"].astype(np.float64)}, TypeError, "must be one of float16, bfloat16, float32, got float64"),
        ({"algorithm": "fastest"}, ValueError, "algorithm must be one of auto, "),
        ({"return_dbias": True}, ValueError, "return_dbias is for a call with a bias"),
        ({"return_dbias": 1}, TypeError, "return_dbias must be True or False, got 1"),
        ({"deterministic": 1}, TypeError, "deterministic must be True or False, got 1"),
        ({"causal": None}, TypeError, "causal must be True or False"),
        ({"scale": float("nan")}, ValueError, "scale must be 0 or"),
        ({"tiling": (24, 24)}, ValueError, "in steps of 16"),
        ({"tiling": "largest"}, ValueError, "tiling must be None, 'paper' or"),
        ({"mask": np.ones((20, 27), bool)}, ValueError, "mask must broadcast"),
        ({"bias": np.ones((20, 28), np.float64)}, TypeError, "bias must be"),
        ({"key_lengths": np.array([1, 2])}, ValueError, "key_lengths must have shape"),
        ({"key_lengths": [2.5]}, TypeError, "key_lengths must be integers, got 2.5"),
        ({"block_mask": np.ones((3, 3), bool)}, ValueError, "block_mask must be"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changed: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        cupyflash.attention_backward(**(GOOD | changed))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"return_lse": True}, TypeError, "attention_vjp has no return_lse"),
        ({"out": GOOD["out"]}, TypeError, "attention_vjp has no out"),
        ({"dropout": 0.1}, ValueError, "dropout needs a seed"),
        ({"drop": 0.1}, TypeError, "drop"),
        ({"algorithm": "fastest"}, ValueError, "algorithm must be one of auto, "),
        ({"return_dbias": True}, ValueError, "return_dbias is for a call with a bias"),
        ({"return_dbias": True, "bias": np.ones((20, 28), np.float16), "deterministic": True}, ValueError, "broadcast bias"),
        ({"deterministic": "yes"}, TypeError, "deterministic must be True or False, got 'yes'"),
        ({"tiling": (16, 256)}, ValueError, "cannot run blocks of 16 x 256"),
        ({"mask": np.ones((20, 27), bool)}, ValueError, "mask must broadcast"),
    ],
)
def test_vjp_refuses_what_either_pass_would_before_it_computes(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    monkeypatch.setattr("cupyflash.launch.simulated.PreparedSimulation.launch", never)
    with pytest.raises(error, match=says):
        cupyflash.attention_vjp(*(GOOD[name] for name in "qkv"), **options)


def never(*_: Any) -> None:
    raise AssertionError("computed")


def test_vjp_refuses_an_sram_that_holds_the_forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (normal(2, 20, 64, dtype=np.float16, seed=seed) for seed in range(3))
    with cupyflash.simulated_device(sram="8KB"):
        cupyflash.attention(q, k, v)
        monkeypatch.setattr("cupyflash.launch.simulated.PreparedSimulation.launch", never)
        with pytest.raises(ValueError, match="fa2's backward at head_dim 64 float16 needs at least"):
            cupyflash.attention_vjp(q, k, v)
