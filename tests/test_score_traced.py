"""Python functions as score and mask functions: what they are traced to, and what cannot be traced."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyflash import Mask, Score, attention
from cupyflash.expressions.evaluate import evaluate, positions

SIZES = {"b": 2, "h": 4, "kv_h": 2, "row": 6, "k": 6}
RNG = np.random.default_rng(36)
table = RNG.standard_normal((4, 16)).astype(np.float32)
document = np.sort(RNG.integers(0, 3, (2, 6))).astype(np.int32)
seen = RNG.random((6, 6)) < 0.5
single = np.array(0.5, np.float32)
cap, width, wide = 2.5, 8, True
exp = np.float32(0.75)  # a number of a name that has a meaning in the language
rows = SimpleNamespace(table=table)


def distance(h: Any, q: Any, k: Any) -> Any:
    return table[h, q - k + width]


def made(slope: np.ndarray, *, factor: float) -> Callable[..., Any]:
    return lambda s, h, q, k, more=slope[::2]: s * factor + slope[h] * (k - q) + more[h // 2]


SLOPE = RNG.standard_normal(4).astype(np.float32)
# A function, and the text that says the same with the names that it has captured.
SCORES: list[tuple[Callable[..., Any], str]] = [
    (lambda s, b, h, q, k: s + table[h, q - k + 5], "s + table[h, q - k + 5]"),
    (lambda s, h, q, k: s + distance(h, q, k) * single, "s + table[h, q - k + width] * single"),
    (
        lambda k, q, s: np.where((k <= q) & ~(q - k > width) | (k == 0), s, -np.inf),
        "where(k <= q and not q-k > width or k == 0, s, -inf)",
    ),
    (lambda s: cap * np.tanh(s / cap) if wide else s, "cap * tanh(s / cap)"),
    (made(SLOPE, factor=0.5), "s * factor + slope[h] * (k - q) + more[h // 2]"),
    (partial(lambda s, h, slope: s - slope[h], slope=SLOPE), "s - slope[h]"),
    (lambda s, b, q, k: s + (document[b, q] == document[b, k]), "s + (document[b, q] == document[b, k])"),
    (lambda s, row, k: s + (np.logical_or(seen[row, k], s > 0) & wide), "s + ((seen[row, k] or s > 0) and true)"),
    (
        lambda s, q, k, n_k: np.clip(s, -3, 3) + np.abs(q - k) % 4 - (k - q) // 3 + n_k,
        "min(max(s, -3), 3) + abs(q-k) % 4 - (k-q)//3 + n_k",
    ),
    (lambda s: sum((s * power for power in (1, 2)), np.sqrt(s * s + 1)), "sqrt(s * s + 1) + s * 1 + s * 2"),
    (lambda s, k: exp * s + np.minimum(np.exp(-s), np.maximum(k, 2.0)) - -s, "0.75 * s + min(exp(-s), max(k, 2.0)) - -s"),
    (
        lambda s, kv_h: np.sin(s) * np.cos(s) + np.log(s * s + 1) + np.floor(s) + 2 / (kv_h + 1.5),
        "sin(s)*cos(s) + log(s*s + 1) + floor(s) + 2/(kv_h + 1.5)",
    ),
]


@pytest.mark.parametrize(("function", "text"), SCORES)
def test_a_function_is_the_expression_that_its_text_is_and_numpy_s(function: Callable[..., Any], text: str) -> None:
    """One form; and NumPy computes the function itself as the reference evaluates what it was traced to."""
    found = Score(function)
    assert found.form == Score(text, **found.arrays, **found.numbers).form
    at = positions(SIZES)
    s = RNG.standard_normal((2, 4, 6, 6))
    values = at | {"s": s}
    with np.errstate(all="ignore"):
        by_numpy = function(**{name: values[name] for name in _parameters(function)})
    ours = evaluate(found.form.tree, values | found.arrays | found.numbers)
    np.testing.assert_allclose(np.broadcast_to(ours, s.shape), np.broadcast_to(by_numpy, s.shape), rtol=1e-6, atol=1e-6)


def _parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name, each in inspect.signature(function).parameters.items() if each.default is each.empty]


def test_numbers_are_captured_by_their_names_and_arrays_as_they_are() -> None:
    """So that another number, or another array, is the same kernel; a name with a meaning of its own is changed."""

    def of(cap: float, q: np.ndarray) -> Score:
        return Score(lambda s, h: cap * np.tanh(s / cap) + q[h] + cap // 2)

    one, other = of(30.0, SLOPE), of(40.0, SLOPE * 2)
    assert one.text == "cap * tanh(s / cap) + q_1[h] + 15.0" and one.numbers == {"cap": 30.0} and one.arrays["q_1"] is SLOPE
    assert of(31.0, SLOPE).form == one.form != other.form  # cap // 2 is a number of Python's
    assert Score(lambda s, h, q: s + table[h][q]).text == "s + table[h, q]"
    both = Score(partial(lambda s, h, q, one, other: s + one[h, q] + other[h, q] + table[h, q], one=table, other=table[:, ::-1]))
    assert sorted(both.arrays) == ["one", "other", "table"]


def test_names_of_different_functions_do_not_meet() -> None:
    def inner(h: Any, slope: Any = SLOPE[::-1]) -> Any:
        return slope[h]

    slope = SLOPE
    found = Score(lambda s, h: s + slope[h] + inner(h))
    assert found.text == "s + slope[h] + slope_1[h]" and found.arrays["slope"] is slope
    np.testing.assert_array_equal(found.arrays["slope_1"], SLOPE[::-1])


def test_masks() -> None:
    ids = document[0]
    found = Mask(lambda q, k: (ids[q] == ids[k]) & (k <= q))
    assert found.form == Mask("ids[q] == ids[k] and k <= q", ids=ids).form
    for function, said in ((lambda q, k: q - k, "a mask is a condition"), (lambda s: s > 0, "parameters are named b, h, kv_h")):
        with pytest.raises((TypeError, ValueError), match=said):
            Mask(function)


def test_attention_with_a_function_is_attention_with_its_text() -> None:
    q, k, v = RNG.standard_normal((3, 2, 20, 16)).astype(np.float16)
    bias = RNG.standard_normal((2, 7)).astype(np.float32)
    asked: dict[str, Any] = {"score": Score(lambda s, h, q, k: s + bias[h, q - k]), "mask": Mask(lambda q, k: (k <= q) | (k < 4))}
    text: dict[str, Any] = {"score": Score("s + bias[h, q - k]", bias=bias), "mask": Mask("k <= q or k < 4")}
    np.testing.assert_array_equal(attention(q, k, v, **asked), attention(q, k, v, **text))


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (lambda s, q, k: s if k <= q else -s, "k <= q is known only in the kernel, so Python cannot decide by it: write (a) & (b)"),
    (lambda s, q, k: np.where(k <= q and k > 0, s, 0), "k <= q is known only"),
    (lambda s, q, k: np.where(0 <= q - k <= 3, s, 0), "(a < b) & (b < c) in place of a < b < c"),
    (lambda s: max(s, 0), "np.minimum and np.maximum in place of min and max"),
    (lambda s, q: s * (not q), "q is known only"),
    (lambda s: math.tanh(s), "write np.tanh in place of math.tanh"),
    (lambda s: float(s), "cannot become a number"),
    (lambda s: s**2, "write x * x"),
    (lambda s: 2**s, "write x * x"),
    (lambda s: np.cosh(s), "cosh of 1 arguments has no place"),
    (lambda s: np.add.reduce(s), "add.reduce of"),
    (lambda s: np.add(s, 1, out=table), "add of 3 arguments"),
    (lambda s: s + table, "table is computed with as a whole"),
    (lambda s: table * s, "table is computed with as a whole"),
    (lambda s, h: (s + table)[h], "table is computed with as a whole"),
    (lambda s, h: table.T[h, 0] + s, "table.T is no element of table"),
    (lambda s, h: s + [table][0].shape[0] + rows.table[h, 0], "capture each array by a name of its own"),
    (lambda s, h: s + table[h, 0:2], "got slice"),
    (lambda s: [s], "got list"),
    (lambda s: None, "returned None"),
    (lambda s, x: s, "parameters are named s, b, h, kv_h, row, q, k, n_q, n_k, as many as it uses, got 'x'"),
    (lambda score, b, h, q_idx, kv_idx: score, "pass lambda s, b, h, row, k: function(s, b, h, row, k)"),
    (lambda *s: s[0], "got '*s'"),
    (lambda s: s.item(), "a traced value has no item"),
    (lambda s, k: s + table[k], "table is computed with as a whole"),
]


@pytest.mark.parametrize(("function", "said"), REFUSED)
def test_what_cannot_be_traced_says_what_to_write(function: Callable[..., Any], said: str) -> None:
    with pytest.raises((TypeError, AttributeError), match=re.escape(said)):
        Score(function)


# What the parser refuses, it refuses in the text that the function was traced to.
IN_TEXT: list[tuple[Callable[..., Any], str]] = [
    (lambda s, h, q: s + table[h, q / 2], "an index is an integer, 'q / 2' is a float"),
    (lambda s, h: s + table[h, -1], "an index counts from the beginning"),
    (lambda s, q: np.where(q, s, 0), "where takes a condition"),
    (lambda s, q: s + (q & 1), "and takes conditions"),
    (lambda s: s > 0, "a score is a number"),
    (lambda s, h: s + table[h, 0, 0], "table takes an index for each of its axes, 2, got 3"),
]


@pytest.mark.parametrize(("function", "said"), IN_TEXT)
def test_what_the_language_lacks_is_shown_in_the_traced_text(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Score(function)


def test_what_grows_without_end_is_refused_soon() -> None:
    def doubled(s: Any) -> Any:
        for _ in range(60):
            s = s + s
        return s

    with pytest.raises(TypeError, match="may have 10,000 characters"):
        Score(doubled)


def test_what_is_no_function_and_values_beside_one_are_refused() -> None:
    with pytest.raises(TypeError, match=r"an expression in a str, or a Python function, got ufunc"):
        Score(np.tanh)
    with pytest.raises(TypeError, match="table is given beside a function"):
        Score(lambda s: s, table=table)


def test_errors_of_the_function_itself_go_through() -> None:
    with pytest.raises(ZeroDivisionError):
        Score(lambda s: s + 1 // 0)
