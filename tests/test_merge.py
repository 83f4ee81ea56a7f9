"""Partial results over disjoint keys merge into attention over all of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import cupyflash
from cupyflash import merge_states
from cupyflash.sim.numbers.yardstick import DTYPES, ulp
from suites import sweep, wide
from yardstick import check_numbers

State = tuple[np.ndarray, np.ndarray]


@st.composite
def states(draw: st.DrawFn, count: int, dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")) -> list[State]:
    """States of one shape; a tenth of the rows saw no key."""
    shape = (*draw(st.lists(st.integers(0, 3), max_size=2)), draw(st.integers(0, 9)), draw(st.integers(1, 9)))
    dtype, rng = DTYPES[draw(st.sampled_from(dtypes))], np.random.default_rng(draw(st.integers(0, 999)))
    made = []
    for _ in range(count):
        lse = (rng.standard_normal(shape[:-1]) * draw(st.sampled_from([1, 100]))).astype(np.float32)
        lse[rng.random(lse.shape) < 0.1] = -np.inf
        o = rng.standard_normal(shape).astype(np.float32)
        o[np.isneginf(lse)] = 0
        made.append((o.astype(dtype), lse))
    return made


def same(a: State, b: State) -> None:
    """The same numbers, exactly."""
    assert np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])
    assert a[0].dtype == b[0].dtype and a[1].dtype == b[1].dtype == np.float32


@given(states(1))
def test_minus_infinity_is_the_identity_on_either_side(made: list[State]) -> None:
    """Whatever the empty side holds: a row of NaN that no weight reaches does not matter."""
    (state,) = made
    for held in (0, np.nan):
        empty = np.full_like(state[0], held), np.full_like(state[1], -np.inf)
        same(merge_states(*state, *empty), (np.where(np.isneginf(state[1])[..., None], state[0].dtype.type(0), state[0]), state[1]))
        same(merge_states(*empty, *state), merge_states(*state, *empty))


@given(states(2))
def test_commutative(made: list[State]) -> None:
    a, b = made
    same(merge_states(*a, *b), merge_states(*b, *a))


@given(states(3))
def test_associative_within_rounding(made: list[State]) -> None:
    a, b, c = made
    left, right = merge_states(*merge_states(*a, *b), *c), merge_states(*a, *merge_states(*b, *c))
    eps = ulp(1, a[0].dtype)
    largest = max(float(np.abs(o.astype(np.float32)).max(initial=0)) for o, _ in made)
    assert np.abs(left[0].astype(np.float32) - right[0].astype(np.float32)).max(initial=0) <= 2 * eps * largest
    assert np.allclose(left[1], right[1], rtol=1e-6, atol=1e-6)


@given(states(2, ("float32",)))
def test_it_is_the_weighted_mean_in_float64(made: list[State]) -> None:
    (o_a, lse_a), (o_b, lse_b) = made
    o, lse = merge_states(o_a, lse_a, o_b, lse_b)
    expected = np.logaddexp(lse_a.astype(np.float64), lse_b)
    assert np.allclose(lse, expected, rtol=1e-6, atol=1e-6)
    seen = np.isfinite(expected)
    weights = [np.exp(each[seen].astype(np.float64) - expected[seen])[:, None] for each in (lse_a, lse_b)]
    assert np.allclose(o[seen], weights[0] * o_a[seen] + weights[1] * o_b[seen], rtol=1e-5, atol=1e-6)


def test_large_scores_do_not_overflow() -> None:
    o, lse = merge_states(*(np.full((1, 1), x, np.float32) if x in (2, 4) else np.full(1, x, np.float32) for x in (2, 900, 4, 900)))
    assert o[0, 0] == 3 and lse[0] == np.float32(900 + np.log(2))


@pytest.mark.parametrize("dtype", [wide("float16"), "bfloat16", wide("float32")])
@sweep(2, 5, cuts=st.lists(st.integers(0, 90), max_size=3), kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 99))
def test_parts_of_the_keys_make_the_whole(dtype: str, cuts: list[int], kv_heads: int, seed: int) -> None:
    """The rule for one kernel holds; the parts may be empty."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((heads, n, 64)) for heads, n in ((4, 40), (kv_heads, 90), (kv_heads, 90)))
    q, k, v = (array.astype(np.float32).astype(DTYPES[dtype]) for array in (q, k, v + 1))
    whole: Any = np.zeros_like(q), np.full(q.shape[:-1], -np.inf, np.float32)
    for begin, end in pairwise([0, *sorted(cuts), 90]):
        whole = merge_states(*whole, *cupyflash.attention(q, k[:, begin:end], v[:, begin:end], return_lse=True))
    check_numbers(*whole, q, k, v)


@pytest.mark.wide
def test_packed_sequences_merge_with_their_heads_first() -> None:
    """Each sequence's keys in two parts."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 70, 2, 32)).astype(np.float32)
    cu_q, cu_k = np.array([0, 30, 70], np.int32), np.array([0, 50, 70], np.int32)
    parts = ((np.r_[0:20, 50:60], [0, 20, 30]), (np.r_[20:50, 60:70], [0, 30, 40]))
    states = []
    for rows, bounds in parts:
        o, lse = cupyflash.attention_varlen(q, k[rows], v[rows], cu_q, np.array(bounds, np.int32), return_lse=True)
        states += [o.swapaxes(0, 1), lse]
    o, lse = merge_states(*states)
    expected, expected_lse = cupyflash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    assert np.allclose(o.swapaxes(0, 1), expected, atol=1e-5) and np.allclose(lse, expected_lse, atol=1e-5)


def random_states() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    o_a, o_b = rng.standard_normal((2, 3, 5, 8)).astype(np.float16)
    lse_a, lse_b = rng.standard_normal((2, 3, 5)).astype(np.float32)
    return o_a, lse_a, o_b, lse_b


@pytest.mark.parametrize("place", [None, 0, 2])
def test_out_may_be_an_input_and_strided(place: int | None) -> None:
    expected, given = merge_states(*random_states()), random_states()
    out = np.zeros((3, 5, 16), np.float16)[..., ::2] if place is None else given[place]
    found = merge_states(*given, out=out)
    assert found[0] is out
    same(found, expected)


o_a, lse_a, o_b, lse_b = random_states()
BOTH, SHARED = np.zeros((4, 5, 8), np.float16), np.zeros((3, 5, 10), np.float16)
READ_ONLY = o_a.copy()
READ_ONLY.flags.writeable = False
BAD: list[tuple[dict[str, object], type[Exception], str]] = [
    ({"o_a": o_a.tolist()}, TypeError, "o_a must be a NumPy or CuPy array"),
    ({"o_a": o_a.astype(np.float64)}, TypeError, "float64"),
    ({"o_a": o_a[0, 0]}, ValueError, r"o_a must be \(..., n, d\), got shape \(8,\)"),
    ({"lse_a": lse_a.astype(np.float64)}, TypeError, "lse_a must be of dtype float32, got float64"),
    ({"lse_b": lse_b[..., None]}, ValueError, r"lse_b must have shape \(3, 5\), got \(3, 5, 1\)"),
    ({"o_b": o_b[:1]}, ValueError, r"o_b must have shape \(3, 5, 8\)"),
    ({"o_b": o_b.astype(np.float32)}, TypeError, "o_b must be of dtype float16, got float32"),
    ({"out": np.zeros((3, 5, 9), np.float16)}, ValueError, "out must have shape"),
    ({"out": np.zeros((3, 5, 8), np.float32)}, TypeError, "out must be of dtype float16"),
    ({"out": READ_ONLY}, ValueError, "out must be writeable"),
    ({"out": as_strided(np.zeros(300, np.float16), (3, 5, 8), (16, 16, 2))}, ValueError, "a place for every element, got strides"),
    ({"out": np.broadcast_to(np.float16(0), (3, 5, 8))}, ValueError, "a place for every element"),
    ({"o_a": BOTH[:3], "out": BOTH[1:]}, ValueError, "out must not overlap o_a"),
    ({"o_b": BOTH[:3], "out": BOTH[:3, ::-1]}, ValueError, "out must not overlap o_b"),
    ({"lse_a": SHARED[:3, :, 8:].view(np.float32)[..., 0], "out": SHARED[:3, :, 2:]}, ValueError, "out must not overlap lse_a"),
]


@pytest.mark.parametrize(("changed", "error", "says"), BAD)
def test_wrong_input_is_refused_by_name(changed: dict[str, object], error: type[Exception], says: str) -> None:
    given: dict[str, Any] = {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b} | changed
    with pytest.raises(error, match=says):
        merge_states(**given)
