"""The refusals of `attention_decode`, with their words, before anything is compiled or written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyflash
from cases_decode import CACHES
from cupyflash import Device, Mask, Problem
from cupyflash.schedules import Cache, plan_decode

HALF = np.float16
Q, K, V = np.zeros((2, 4, 3, 16), HALF), np.zeros((2, 2, 64, 16), HALF), np.zeros((2, 2, 64, 16), HALF)
NEW = {"k": np.zeros((2, 2, 2, 16), HALF), "v": np.zeros((2, 2, 2, 16), HALF)}
PLAIN: dict[str, Any] = {"q": Q, "k_cache": K, "v_cache": V, "cache_seqlens": [10, 20]}
TABLE = np.array([[0, 1], [2, 3]], np.int32)
PAGED = PLAIN | {"k_cache": np.zeros((5, 2, 16, 16), HALF), "v_cache": np.zeros((5, 2, 16, 16), HALF), "block_table": TABLE}
BOTH = np.zeros((2, 2, 72, 16), HALF)
VIEW = np.lib.stride_tricks.as_strided
FIXED = np.zeros_like(K)
FIXED.flags.writeable = False


def paged(**changed: Any) -> dict[str, Any]:
    return PAGED | changed


def pages(size: int, number: int = 5) -> dict[str, Any]:
    return paged(**dict.fromkeys(CACHES, np.zeros((number, 2, size, 16), HALF)), cache_seqlens=[0, 0])


def appending(**changed: Any) -> dict[str, Any]:
    return PLAIN | NEW | changed


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # what an array is
    "q in a list": (PLAIN | {"q": Q.tolist()}, TypeError, "q must be a NumPy or CuPy array, got list"),
    "no cache": (PLAIN | {"k_cache": None}, TypeError, "k_cache must be a NumPy or CuPy array, got NoneType"),
    "no lengths": (PLAIN | {"cache_seqlens": None}, TypeError, "cache_seqlens must be a NumPy or CuPy array, or a list"),
    "a length": (PLAIN | {"cache_seqlens": 5}, TypeError, "NumPy or CuPy array, or a list or tuple of integers, got int"),
    "a masked array": (PLAIN | {"q": np.ma.masked_array(Q)}, TypeError, "q must be a NumPy or CuPy array, got MaskedArray"),
    "a table in a list": (paged(block_table=TABLE.tolist()), TypeError, "block_table must be a NumPy or CuPy array, got list"),
    "a tree in a list": (PLAIN | {"tree_mask": [[True] * 3] * 3}, TypeError, "tree_mask must be a NumPy or CuPy array, got list"),
    "sinks in a list": (PLAIN | {"sinks": [0.0] * 4}, TypeError, "sinks must be a NumPy or CuPy array, got list"),
    # dtypes
    "doubles": (PLAIN | {"q": Q.astype(float)}, TypeError, r"q must be one of .*, got float64: pass q.astype\(numpy.float32\)"),
    "another cache": (PLAIN | {"k_cache": K.astype(np.float32)}, TypeError, "k_cache must have q's dtype float16, got float32"),
    "a quantised cache": (PLAIN | {"v_cache": V.astype(np.int8)}, TypeError, "v_cache must be one of .*, got int8"),
    "another out": (PLAIN | {"out": Q.astype(np.float32)}, TypeError, "out must have q's dtype float16, got float32"),
    "lengths of floats": (
        PLAIN | {"cache_seqlens": np.ones(2)},
        TypeError,
        "cache_seqlens must be of an integer dtype, got float64",
    ),
    "a length that is none": (PLAIN | {"cache_seqlens": [1.5, 2]}, TypeError, "cache_seqlens must be integers, got 1.5 among them"),
    "lengths of a stranger": (PLAIN | {"cache_seqlens": np.ones(2, ">i4")}, TypeError, "machine's own order, got dtype >i4"),
    "another layout": (PLAIN | {"layout": "nbhd"}, ValueError, "layout must be one of bhnd, bnhd, got 'nbhd'"),
    "pages of floats": (paged(block_table=TABLE.astype(float)), TypeError, "block_table must be of an integer dtype, got float64"),
    "an array as mask": (PLAIN | {"mask": np.ones((3, 64), bool)}, TypeError, "mask must be a cupyflash.Mask or None, got ndarray"),
    "a mask of fewer keys": (PLAIN | {"mask": Mask("x[k]", x=np.ones(9, bool))}, ValueError, "x must have length 64 along axis 0"),
    "a tree of integers": (PLAIN | {"tree_mask": np.ones((3, 3), int)}, TypeError, "tree_mask must be of dtype bool, got int64"),
    "wide sinks": (PLAIN | {"sinks": np.zeros(4)}, ValueError, r"sinks must be float16, bfloat16, float32 of shape \(4,\)"),
    # shapes
    "three axes": (PLAIN | {"q": Q[0]}, ValueError, "k_cache must have as many axes as q"),
    "no queries": (PLAIN | {"q": Q[:, :, :0]}, ValueError, r"with at least one query, got shape \(2, 4, 0, 16\)"),
    "another d": (
        PLAIN | {"k_cache": K[..., :8]},
        ValueError,
        "k_cache must have q's head dimension 16",
    ),
    "no d": (PLAIN | {"q": Q[..., :0], "k_cache": K[..., :0]}, ValueError, "head_dim must be between 1 and 512, got 0"),
    "fewer values": (PLAIN | {"v_cache": V[:, :, :60]}, ValueError, "v_cache must have k_cache's shape .* but for the last axis"),
    "fewer sequences": (PLAIN | {"k_cache": K[:1], "v_cache": V[:1]}, ValueError, "k_cache must have q's batch size 2, or pages"),
    "pages without a table": (paged(block_table=None), ValueError, "or pages and a block_table, got shape"),
    "heads": (PLAIN | {"q": Q[:, :3]}, ValueError, "heads must be a multiple of kv_heads, got heads=3 and kv_heads=2"),
    "no key heads": (PLAIN | {"k_cache": K[:, :0], "v_cache": V[:, :0]}, ValueError, "got heads=4 and kv_heads=0"),
    "few lengths": (PLAIN | {"cache_seqlens": [1]}, ValueError, r"cache_seqlens must have shape \(2,\), .* got \(1,\)"),
    "lengths in two axes": (PLAIN | {"cache_seqlens": np.ones((1, 2), int)}, ValueError, r"cache_seqlens must have shape \(2,\)"),
    "one row of pages": (paged(block_table=TABLE[0]), ValueError, r"block_table must be \(b, pages of a sequence\) with b = 2"),
    "rows of pages": (paged(block_table=TABLE[:1]), ValueError, r"with b = 2, got shape \(1, 2\)"),
    "small pages": (pages(8), ValueError, r"a page_size that is a multiple of 16, got shape \(5, 2, 8, 16\)"),
    "uneven pages": (pages(24), ValueError, "k_cache must be .* a page_size that is a multiple of 16"),
    "empty pages": (pages(0), ValueError, r"a page_size that is a multiple of 16, got shape \(5, 2, 0, 16\)"),
    "no pages": (pages(16, 0), ValueError, "k_cache must have at least one page, got shape"),
    "a tree over all keys": (
        PLAIN | {"tree_mask": np.ones((3, 64), bool)},
        ValueError,
        r"must be \(n_q, n_q\) = \(3, 3\)",
    ),
    "a tree for all": (PLAIN | {"tree_mask": np.ones((1, 3, 3), bool)}, ValueError, r"or \(b, n_q, n_q\), got shape \(1, 3, 3\)"),
    "another out's shape": (PLAIN | {"out": Q[..., :8]}, ValueError, r"out must have shape \(2, 4, 3, 16\), got \(2, 4, 3, 8\)"),
    # strides
    "columns apart": (
        PLAIN | {"k_cache": np.zeros((2, 2, 64, 32), HALF)[..., ::2]},
        ValueError,
        "must be contiguous along",
    ),
    "backwards": (PLAIN | {"out": Q.copy()[:, :, ::-1]}, ValueError, "out must have positive strides"),
    "one place for two": (
        appending(k_cache=VIEW(K, K.shape, (0, *K.strides[1:]))),
        ValueError,
        "must have a place for",
    ),
    # new keys
    "k alone": (PLAIN | {"k": NEW["k"]}, ValueError, "k and v must be given together, got one of them"),
    "v alone": (PLAIN | {"v": NEW["v"]}, ValueError, "k and v must be given together, got one of them"),
    "k of all heads": (
        appending(k=np.zeros((2, 4, 2, 16), HALF)),
        ValueError,
        r"k must be \(b, h_kv, n_new, d\) =",
    ),
    "v of more": (appending(v=np.zeros((2, 2, 3, 16), HALF)), ValueError, r"v must be \(b, h_kv, n_new, d_v\) ="),
    "more than there is room for": (
        appending(**dict.fromkeys("kv", np.zeros((2, 2, 80, 16), HALF))),
        ValueError,
        "k must have at most 64 new keys, the cache's room for each sequence, got 80",
    ),
    "a cache that may not be written": (appending(v_cache=FIXED), ValueError, "v_cache must be writeable"),
    "caches that overlap": (
        appending(k_cache=BOTH[:, :, :64], v_cache=BOTH[:, :, 8:]),
        ValueError,
        "k_cache must not overlap v_cache",
    ),
    "one cache": (appending(v_cache=K), ValueError, "must not overlap"),
    "k in the cache": (appending(k=K[:, :, 30:32]), ValueError, "k_cache must not overlap k, but they share memory"),
    "q in the cache": (appending(q=V.reshape(-1)[: Q.size].reshape(Q.shape)), ValueError, "v_cache must not overlap q"),
    "lengths in the cache": (
        appending(cache_seqlens=K.reshape(-1)[:4].view(np.int32)),
        ValueError,
        "k_cache must not overlap cache_seqlens",
    ),
    "out in the cache": (PLAIN | {"out": K.reshape(-1)[: Q.size].reshape(Q.shape)}, ValueError, "out must not overlap k_cache"),
    "out in q": (PLAIN | {"out": Q}, ValueError, "out must not overlap q, but they share memory"),
    # lengths and pages
    "too long": (PLAIN | {"cache_seqlens": [1, 65]}, ValueError, "cache_seqlens must be between 0 and 64, .*, got 65"),
    "too long for new ones": (appending(cache_seqlens=[63, 1]), ValueError, "between 0 and 62, .* less the 2 new ones, got 63"),
    "negative": (PLAIN | {"cache_seqlens": [-1, 1]}, ValueError, "cache_seqlens must be between 0 and 64, .*, got -1"),
    "beyond 32 bits": (PLAIN | {"cache_seqlens": np.array([2**40, 0])}, ValueError, "between 0 and 64, .*, got 1099511627776"),
    "a page too far": (paged(block_table=TABLE + 3), ValueError, "block_table must be pages from 0 to 4, got 5 for sequence 1"),
    "a page before the first": (paged(block_table=TABLE - 1), ValueError, "pages from 0 to 4, got -1 for sequence 0"),
    "a page of two": (
        paged(block_table=np.array([[0, 1], [3, 0]], np.int32), **NEW),
        ValueError,
        "block_table must give new keys a page of their own, got page 0 of sequence 0 twice",
    ),
    "a page twice": (
        paged(block_table=np.array([[0, 1], [3, 3]], np.int32), **NEW),
        ValueError,
        "block_table must give new keys a page of their own, got page 3 of sequence 1 twice",
    ),
    # numbers and flags
    "no splits": (PLAIN | {"num_splits": 0}, ValueError, "num_splits must be between 1 and 256, got 0"),
    "a thousand splits": (PLAIN | {"num_splits": 1000}, ValueError, "num_splits must be between 1 and 256, got 1000"),
    "true splits": (PLAIN | {"num_splits": True}, TypeError, "num_splits must be an integer or None, got True"),
    "half a split": (PLAIN | {"num_splits": 0.5}, TypeError, "num_splits must be an integer or None, got 0.5"),
    "a cap of nothing": (PLAIN | {"softcap": 0.0}, ValueError, r"softcap must be between 2\*\*-64 and 2\*\*64, got 0.0"),
    "a cap that is none": (PLAIN | {"softcap": float("nan")}, ValueError, "softcap must be between .*, got nan"),
    "a true cap": (PLAIN | {"softcap": True}, TypeError, "softcap must be a real number or None, got True"),
    "a line in a text": (PLAIN | {"score": "s"}, TypeError, "score must be a cupyflash.Score or None, got str"),
    "slopes of others": (
        PLAIN | {"alibi_slopes": np.ones(3, np.float32)},
        ValueError,
        "alibi_slopes must have length 4 along axis 0, which h indexes",
    ),
    "a scale that is none": (PLAIN | {"scale": float("nan")}, ValueError, "scale must be .*, got nan"),
    "no side": (PLAIN | {"window": 5}, TypeError, r"window must be \(left, right\), integers or None, got 5"),
    "perhaps": (PLAIN | {"causal": 3}, TypeError, "causal must be True or False, got 3"),
    "one": (PLAIN | {"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_is_done(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyflash.launch.simulated.PreparedSimulation.launch", lambda *_: pytest.fail("it was launched"))
    given, error, says = REFUSED[what]
    before = {name: np.array(array) for name, array in given.items() if isinstance(array, np.ndarray)}
    with pytest.raises(error, match=says) as raised:
        cupyflash.attention_decode(**given)
    assert type(raised.value) is error and "\n" not in str(raised.value)
    assert all(array.tobytes() == np.array(given[name]).tobytes() for name, array in before.items())


def test_every_argument_is_among_them() -> None:
    """But for the words of `attention`'s own options, each is refused somewhere."""
    from inspect import signature

    changed = {
        name
        for given, *_ in REFUSED.values()
        for name in signature(cupyflash.attention_decode).parameters
        if given.get(name) is not PLAIN.get(name)
    }
    assert changed == set(signature(cupyflash.attention_decode).parameters)


@pytest.mark.parametrize(
    ("changed", "cache", "splits", "says"),
    [
        ({}, Cache(70), None, "room for the 70 new keys, got room for 64"),
        ({"padded": True, "key_lengths": (64, 60)}, Cache(2), None, "at most 62, .* less the 2 new ones, got 64"),
        ({}, Cache(page_size=48, pages=3), None, "whole pages of 48 keys, got 64"),
        ({"mask": True}, None, None, "attention_decode has no place for a mask of bool: 'standard', 'fa1', 'fa2' and 'fa3' have"),
        ({}, None, 257, "num_splits must be between 1 and 256, got 257"),
    ],
)
def test_a_plan_refuses(changed: dict[str, Any], cache: Cache | None, splits: int | None, says: str) -> None:
    problem = Problem(2, 4, 2, 3, 64, 16, "float16").asking(**changed)
    with pytest.raises(ValueError, match=says):
        plan_decode(problem, Device.named("T4"), cache, num_splits=splits)


@pytest.mark.parametrize(
    ("asked", "says"),
    [({"key_lengths": [3, 4]}, "no place for key lengths: .* attention_decode"), ({"tiling": (16, 16)}, "no tiling")],
)
def test_attention_s_own_options_are_not_its(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm 'decode' has {says}"):
        cupyflash.attention(Q, K, V, algorithm="decode", **asked)


def test_a_device_without_the_type_says_so() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        plan_decode(Problem(2, 4, 2, 3, 64, 16, "bfloat16"), Device.named("T4"))


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"appended": -1}, ValueError, "appended must be at least 0, got -1"),
        ({"appended": True}, TypeError, "appended must be an integer, got True"),
        ({"page_size": 8}, ValueError, "page_size must be at least 16, got 8"),
        ({"page_size": 40}, ValueError, "page_size must be a multiple of 16, got 40"),
        ({"pages": 1.0}, TypeError, "pages must be an integer, got 1.0"),
    ],
)
def test_a_cache_refuses(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Cache(**given)
