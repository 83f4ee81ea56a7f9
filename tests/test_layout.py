"""Arrays of (b, n, h, d), other libraries' keywords, and types that are taken as they come: what a port meets first."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash.request.keywords import ELSEWHERE

RNG = np.random.default_rng(0)
HALF = np.float16


def rows_first(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(HALF)


def swapped(x: Any) -> Any:
    return x.swapaxes(1, 2) if x.ndim == 4 else x


Q, K, V = rows_first(2, 12, 4, 16), rows_first(2, 18, 2, 16), rows_first(2, 18, 2, 16)


@pytest.mark.parametrize("n_new", [0, 2])
def test_a_decoding_of_rows_first_is_that_of_heads_first(n_new: int) -> None:
    """The caches are written in their own order."""
    new = {"k": K[:, :n_new], "v": V[:, :n_new]} if n_new else {}
    caches, others = (K.copy(), V.copy()), (swapped(K).copy(), swapped(V).copy())
    found = cupyflash.attention_decode(Q[:, :3], *caches, [16, 9], layout="bnhd", **new)
    beside = {name: swapped(array) for name, array in new.items()}
    assert np.array_equal(found, swapped(cupyflash.attention_decode(swapped(Q[:, :3]), *others, [16, 9], **beside)))
    assert all(np.array_equal(one, swapped(other)) for one, other in zip(caches, others, strict=True))


@pytest.mark.wide
def test_rows_first_in_both_passes() -> None:
    """The same bits, and arrays in C order; beside lengths, biases and sinks, whose axes stay."""
    beside = {"causal": True, "key_lengths": [18, 9], "bias": rows_first(4, 12, 18), "sinks": np.float32([0, 1, 2, 3])}
    found, pullback = cupyflash.attention_vjp(Q, K, V, layout="bnhd", deterministic=True, **beside)
    other, expected = cupyflash.attention_vjp(swapped(Q), swapped(K), swapped(V), deterministic=True, **beside)
    assert found.flags.c_contiguous and np.array_equal(found, swapped(other))
    dout = rows_first(*found.shape)
    for one, two in zip(pullback(dout), expected(swapped(dout)), strict=True):
        assert one.flags.c_contiguous and np.array_equal(one, swapped(two))


@pytest.mark.wide
def test_out_lse_and_merging_of_rows_first() -> None:
    out = np.empty_like(Q)
    parts = [cupyflash.attention(Q, K[:, at], V[:, at], layout="bnhd", return_lse=True) for at in (slice(7), slice(7, None))]
    merged, lse = cupyflash.merge_states(*parts[0], *parts[1], out=out, layout="bnhd")
    whole, expected = cupyflash.attention(Q, K, V, layout="bnhd", return_lse=True)
    assert merged is out and lse.shape == expected.shape == (2, 4, 12)
    assert np.allclose(out, whole, atol=2e-3) and np.allclose(lse, expected, atol=1e-5)
    assert cupyflash.attention(Q[0], K[0], V[0], layout="bnhd", out=out[0]).shape == (12, 4, 16)
    assert np.array_equal(out[0], whole[0]) and cupyflash.attention(Q[0, :, 0], K[0, :, 0], V[0, :, 0], layout="bnhd").ndim == 2


EXCHANGED: dict[str, tuple[Any, str]] = {
    "attention": (lambda: cupyflash.attention(Q, K, V), "bnhd"),
    "backward": (lambda: cupyflash.attention_backward(Q, Q, K, V, Q, np.zeros((2, 4, 12), np.float32)), "bnhd"),
    "bnhd": (lambda: cupyflash.attention(swapped(Q), swapped(K), swapped(V), layout="bnhd"), "bhnd"),
    "decode": (lambda: cupyflash.attention_decode(Q[:, :1], K, V, [16, 9]), "bnhd"),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_an_error_names_the_layout_that_would_fit(name: str) -> None:
    call, layout = EXCHANGED[name]
    with pytest.raises(ValueError, match=f"are the arrays {layout}. Then pass layout='{layout}'"):
        call()


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_packed_arrays_with_their_heads_first_are_named(kv_heads: int) -> None:
    """By the bounds, or else by the numbers of heads; (total, h, d) is the one order that they have."""
    q, k = np.zeros((4, 12, 16), HALF), np.zeros((kv_heads, 18, 16), HALF)
    with pytest.raises(ValueError, match=re.escape("are the arrays (h, total, d)? Then exchange their first two axes")):
        cupyflash.attention_varlen(q, k, k, [0, 12], [0, 18])
    with pytest.raises(ValueError, match=r"end with 12, the length of q, got \[0, 11\]$"):
        cupyflash.attention_varlen(q.swapaxes(0, 1), k.swapaxes(0, 1), k.swapaxes(0, 1), [0, 11], [0, 18])
    with pytest.raises(TypeError, match=re.escape("unexpected keyword argument 'layout': packed arrays are (total, h, d)")):
        cupyflash.attention_varlen(q, k, k, [0, 12], [0, 18], layout="bnhd")  # type: ignore[call-arg]


def test_an_error_of_no_other_layout_does_not_name_one() -> None:
    with pytest.raises(ValueError, match=r"got heads=4 and kv_heads=3$"):
        cupyflash.attention(np.zeros((4, 20, 16), HALF), np.zeros((3, 11, 16), HALF), np.zeros((3, 11, 16), HALF))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("is_causal", "here it is causal, aligned bottom-right"),
        ("softmax_scale", "here it is scale"),
        ("window_size", "here it is window=(left, right), with None in place of -1"),
        ("attn_mask", "here it is mask, of bool; numbers that are added to the scores are bias"),
        ("enable_gqa", "k and v may have fewer heads than q without it"),
        ("causl", "did you mean causal?"),
    ],
)
def test_a_keyword_of_another_library_names_ours(name: str, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument '{name}': {words}")):
        cupyflash.attention(Q, K, V, **{name: None})


def test_names_of_others_are_none_of_ours_and_lead_to_ours() -> None:
    """A call that has no such thing says that."""
    parameters = {name for call in ("attention", "attention_decode") for name in getattr(cupyflash, call).__signature__.parameters}
    assert not parameters & ELSEWHERE.keys() and {ours for ours, _ in ELSEWHERE.values()} <= {"", *parameters}
    with pytest.raises(TypeError, match=r"'dropout_p': attention_decode has no dropout$"):
        cupyflash.attention_decode(Q, K, V, [16, 9], dropout_p=0.1)  # type: ignore[call-arg]


def test_a_function_where_a_score_or_mask_is_says_how_to_make_one() -> None:
    for name, given in (("score", lambda s: s), ("mask", lambda q, k: k <= q), ("mask", "k <= q")):
        with pytest.raises(TypeError, match=rf"got (function|str): pass cupyflash.{name.capitalize()}\({name}\)$"):
            cupyflash.attention(Q, K, V, layout="bnhd", **{name: given})


def test_a_mask_of_numbers_names_bias() -> None:
    with pytest.raises(TypeError, match="mask must be of dtype bool, got float32: numbers that are added to the scores are bias"):
        cupyflash.attention(Q, K, V, layout="bnhd", mask=np.zeros((12, 18), np.float32))


@pytest.mark.wide
@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_integers_of_any_width(kind: Any) -> None:
    """Lengths, bounds and pages."""
    pages, cache = np.array([[0, 1], [2, 3]], np.int32), rows_first(4, 16, 2, 16)
    cu_q, cu_k = np.array([0, 5, 24], np.int32), np.array([0, 30, 36], np.int32)
    q, k, v = (array.reshape(-1, *array.shape[2:]) for array in (Q, K, V))
    calls = [
        lambda kind: cupyflash.attention_decode(
            Q[:, :1], cache, cache, np.array([20, 9], kind), block_table=pages.astype(kind), layout="bnhd"
        ),
        lambda kind: cupyflash.attention_varlen(q, k, v, cu_q.astype(kind), cu_k.astype(kind)),
        lambda kind: cupyflash.attention(Q, K, V, key_lengths=np.array([18, 9], kind), layout="bnhd"),
    ]
    assert all(np.array_equal(call(kind), call(np.int32)) for call in calls)


@pytest.mark.wide
def test_slopes_and_sinks_of_half_types() -> None:
    beside = {"alibi_slopes": np.array([0.5, 0.25, 0.125, 1], HALF), "sinks": np.array([1, 0.5, -2, 0], HALF)}
    wide = {name: array.astype(np.float32) for name, array in beside.items()}
    assert np.array_equal(*(cupyflash.attention(Q, K, V, layout="bnhd", **each) for each in (beside, wide)))
