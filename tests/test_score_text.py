"""The texts and captured values of score functions: refusals, with their place, and limits."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from cupyflash.expressions.cost import MOST, cost
from cupyflash.expressions.evaluate import evaluate
from cupyflash.expressions.parse import MAX_DEPTH, MAX_LENGTH, MAX_PARTS, parse
from cupyflash.expressions.tree import Name
from cupyflash.request.score import Mask, Score, statements
from suites import sweep

TABLE = np.arange(6, dtype=np.float32)
PAIR = TABLE.reshape(2, 3)


def chained(levels: int, inside: str = "s") -> str:
    """A text whose tree, in which what stands between two signs is there twice, has 2**levels parts."""
    return f"where({'(0 < ' * levels}{inside}{' < 1)' * levels}, s, 1)"


# text, column (0 for any: Python's own parser says where), what is said
REFUSED = [
    ("s + s.real", 5, "'s.real' is not allowed; allowed are + - * / // %"),
    ("pow(s, 2)", 1, "'pow(s, 2)' is not allowed"),
    ("s + __import__('os').system('true')", 5, "is not allowed"),
    ("s * (lambda: s)()", 5, "is not allowed"),
    ("where(c=s > 0, a=s, b=1)", 1, "is not allowed"),
    ("min(*table)", 5, "'*table' is not allowed"),
    ("s ** 2", 1, "'s ** 2' is not allowed"),
    ("s + (q << 2)", 6, "'q << 2' is not allowed"),
    ("s + (q & 1)", 6, "'q & 1' is not allowed"),
    ("s + ~q", 5, "'~q' is not allowed"),
    ("s if s is s else k", 6, "'s is s' is not allowed"),
    ("s if q in table else k", 6, "'q in table' is not allowed"),
    ("s + 'a'", 5, "is not allowed"),
    ("s + f'{q}'", 5, "is not allowed"),
    ("s + True", 5, "'True' is not allowed"),
    ("s + 2j", 5, "'2j' is not allowed"),
    ("[s for s in table]", 1, "is not allowed"),
    ("(t := s)", 2, "is not allowed"),
    ("{s: 1}", 1, "is not allowed"),
    ("s, k", 1, "is not allowed"),
    ("(yield s)", 2, "is not allowed"),
    ("s + ...", 5, "is not allowed"),
    ("s @ k", 1, "is not allowed"),
    ("s + table[1:2]", 11, "'1:2' is not allowed"),
    ("table[h][k] + s", 1, "is not allowed"),
    ("s + x", 5, "'x' is not a name here; names are s, b, h, kv_h, row, q, k, n_q, n_k, others are captured: x=..."),
    ("s + INFINITY", 5, "'INFINITY' is not a name here"),
    ("s + exp", 5, "exp is a function: exp(...)"),
    ("s + pair", 5, "pair is an array: an element of it is pair[i, j]"),
    ("s + pair[k]", 5, "pair takes an index for each of its axes, 2, got 1"),
    ("s + s[0]", 5, "'s' is not a captured array"),
    ("s + number[0]", 5, "'number' is not a captured array"),
    ("table[s]", 7, "an index is an integer, 's' is a float"),
    ("table[q / 2] + s", 7, "'q / 2' is a float"),
    ("table[where(s > 0, 1, 0)]", 7, "an index may not depend on the score"),
    ("s + table[-1]", 11, "an index counts from the beginning, '-1' would be clamped to 0"),
    ("s and q", 1, "and takes conditions (a comparison, say), not a number"),
    ("where(q, s, 0)", 1, "where takes a condition"),
    ("s if table[k] else 0", 1, "where takes a condition"),
    ("0 if not q else s", 6, "not takes conditions"),
    ("min(s)", 1, "min takes 2 arguments or more, got 1"),
    ("exp(s, s)", 1, "exp takes 1 argument, got 2"),
    ("where(k <= q, s)", 1, "where takes 3 arguments, got 2"),
    ("s + 3000000000", 5, "3000000000 is no integer of 32 bits"),
    ("s + 1e39", 5, "1e+39 is beyond the range of float32"),
    ("s + 1e999", 5, "'1e999' is infinite: capture such a number by a name"),
    ("ö + s.x", 1, "'ö' is not a name here"),
    ("é * s.x", 1, "'é' is not a name here"),
    ("s +", 0, "not a Python expression"),
    ("(s", 0, "not a Python expression: '(' was never closed"),
    ("", 0, "not a Python expression"),
    ("s = 1", 0, "not a Python expression"),
    ("s; import os", 0, "not a Python expression"),
    ("s\nk", 0, "not a Python expression"),
    ("-" * 300 + "s", MAX_DEPTH + 1, f"nested deeper than {MAX_DEPTH} levels"),
    ("-" * 9_000 + "s", 0, "nested"),
    ("(" * 300 + "s" + ")" * 300, 0, "not a Python expression: too many nested parentheses"),
    ("+".join("s" * 100), 1, "nested deeper"),
    (" or ".join(["s > 0"] * 100), 1, "nested deeper"),
    (f"max({', '.join('s' * 100)})", 5, "nested deeper"),
    ("s < " * 100 + "s", 1, "nested deeper"),
    ("a" * 200 + " + s", 1, f"'{'a' * 97}...' is not a name here"),
    ("s + " + "1" * 150, 5, "a number of 496 bits is no integer of 32 bits"),
    (chained(30), 0, f"larger than {MAX_PARTS:,} parts"),
]


@pytest.mark.parametrize(("text", "column", "said"), REFUSED)
def test_a_refusal_shows_the_place(text: str, column: int, said: str) -> None:
    arrays = {name: value for name, value in (("table", TABLE), ("pair", PAIR), ("number", 2)) if name in text}
    with pytest.raises(ValueError) as error:
        Score(text, **arrays)
    first, line, mark = str(error.value).split("\n")
    found = re.match(r"at (?:line (\d+), )?column (\d+): ", first)
    assert found is not None and said in first and column in (0, int(found[2])) and len(first) < 400
    at, whole = mark.index("^"), text.split("\n")[int(found[1] or 1) - 1]
    assert line[at : at + 1] == whole[int(found[2]) - 1 : int(found[2])]
    assert line[4:] == whole or (len(whole) > len(line[4:].strip(".")) >= 94 and len(line) <= 110)


def balanced(parts: list[str]) -> str:
    """Their sum, no deeper than need be."""
    half = len(parts) // 2
    return parts[0] if len(parts) == 1 else f"({balanced(parts[:half])} + {balanced(parts[half:])})"


# A part with its number in it, and how many of these are more than NVRTC takes in some seconds (cupyflash/expressions/cost.py)
TOO_MANY = {
    "exp(s * 0.{}1)": 171,
    "sin(s * {}.5)": 16,
    "cos(s * {}.5)": 16,
    "s % {}.5": 16,
    "log(s + {})": 57,
    "exp(s / {}1.0)": 79,
    "tanh(s + {})": 103,
    "table[k + {}]": 171,
}


@pytest.mark.parametrize("part", TOO_MANY)
def test_what_takes_the_compiler_too_long_is_refused(part: str) -> None:
    most = TOO_MANY[part] - 1
    captured = {"table": TABLE} if "table" in part else {}
    parts = [part.replace("{}", str(number)) for number in range(10, most + 11)]
    assert cost(Score(balanced(parts[:-1]), **captured).form.tree) <= MOST
    with pytest.raises(ValueError) as error:
        Score(balanced(parts), **captured)
    assert "is too long to compile in seconds: its parts cost 1," in str(error.value) and len(str(error.value)) < 500
    assert str(error.value).count(parts[0][:3]) < 10


@pytest.mark.parametrize(
    "text",
    [
        "a" * (MAX_LENGTH + 1),
        "s" + " + s" * MAX_LENGTH,
        f"{'s + ' * 200}q > 0",
        chained(40).replace("s, 1", "table[where(" + chained(40, "k")[6:-7] + ", 0, 1)], 1"),
        balanced([f"(s > {n})" for n in range(200)]) + " > 0",
    ],
)
def test_messages_quote_a_hundred_characters(text: str) -> None:
    """And come at once, however long the text."""
    for function in (Score, Mask):
        with pytest.raises(ValueError) as error:
            function(text, unused_one=1)
        assert max(map(len, str(error.value).split("\n"))) < 250 + 8 * len("unused_one"), str(error.value)
    long = Score(balanced([f"s * {n}" for n in range(99)]))
    assert len(repr(long)) < 120 and len(repr(long.form)) < 130


def test_columns_count_letters_and_not_bytes() -> None:
    with pytest.raises(ValueError, match=r"at column 5: 's\.x' is not allowed"):
        parse("é * s.x", {name: Name("float", name) for name in "és"})


def test_lines_are_counted_where_a_text_has_several() -> None:
    with pytest.raises(ValueError, match=r"at line 2, column 3: 's\.x' is not allowed.*\n      s\.x, 0\)\n      \^\^\^$"):
        Score("where(k <= q,\n  s.x, 0)")


CAPTURED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("s > 0", {}, ValueError, "a score is a number, 's > 0' is a condition: where(s > 0, s, ...), say"),
    ("s", {"a": 1}, ValueError, "a is captured, but 's' does not use it"),
    ("s", {"s": 1}, ValueError, "s already has a meaning"),
    ("s + q", {"q": 1}, ValueError, "q already has a meaning"),
    ("exp(s)", {"exp": 1}, ValueError, "exp already has a meaning"),
    ("s if k < q else q", {"if": 1}, ValueError, "if already has a meaning"),
    ("s + a", {"a": [1, 2]}, TypeError, "a must be a number, or a NumPy or CuPy array, got list"),
    ("s + a", {"a": "1"}, TypeError, "got str"),
    ("s + a", {"a": 1j}, TypeError, "got complex"),
    ("s + a", {"a": 2**31}, ValueError, "a must be a number that a kernel can have: 2147483648 is no integer of 32 bits"),
    ("s + a", {"a": -1e39}, ValueError, "-1e+39 is beyond the range of float32"),
    ("s + a[h]", {"a": np.zeros(3)}, TypeError, "a must be of dtype float16, bfloat16, float32, bool, int8"),
    ("s + a[h]", {"a": np.zeros(3, np.uint32)}, TypeError, "got uint32"),
    ("s + a[h]", {"a": np.zeros(3, ">f4")}, TypeError, "in the machine's own order"),
    ("s + a[h, h, h, h, h]", {"a": np.zeros((1,) * 5, np.float32)}, ValueError, "a must have at most 4 axes, got shape"),
    ("s + a[h]", {"a": np.ndarray(2, np.float32, bytes(12), 0, (6,))}, ValueError, "strides in whole elements"),
    ("s + a[h]", {"a": np.ndarray(2, np.float32, bytes(12), 2)}, ValueError, "aligned to its elements of 4 bytes"),
]


@pytest.mark.parametrize(("text", "given", "kind", "said"), CAPTURED)
def test_captured_values_are_checked(text: str, given: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as error:
        Score(text, **given)
    assert said in str(error.value)


def test_a_text_is_a_str() -> None:
    with pytest.raises(TypeError, match="an expression in a str, or a Python function, got bytes"):
        Score(b"s")  # type: ignore[arg-type]


WORDS = [*"skq()[],+-*/%<>.:#'12é\n", "==", "and", "or", "not", "if", "else", "where", "abs", "2.5"]


@sweep(20, 500, text=st.text() | st.lists(st.sampled_from(WORDS)))
def test_any_text_is_read_or_refused(text: str | list[str]) -> None:
    try:
        Score(text if isinstance(text, str) else " ".join(text))
    except ValueError as error:
        assert "column" in str(error) or "condition" in str(error) or "surrogates" in str(error)


def test_types() -> None:
    """float(True) is 1.0; / is true division; ints wrap around; a number's own type counts, not its value."""
    for text, names, want in [
        ("1 / 2", {}, 0.5),
        ("(k == 3) + (k == 3)", {}, 2),
        ("yes * 2.5", {"yes": np.True_}, 2.5),
        ("-7 % 3 + -7.5 % 2", {}, 2.5),
        ("7 % -3", {}, -2),
        ("5 % 0 + 5 // 0", {}, 0),
        ("-7 // 2 + 7.5 // -2", {}, -8),
        ("2147483647 + k", {}, -(2**31) + 2),
        ("floor(-0.5)", {}, -1),
        ("half + third", {"half": np.float16(0.5), "third": Fraction(1, 4)}, 0.75),
        ("min(big, 3) + max(none, 4)", {"big": float("inf"), "none": float("nan")}, 7),
        ("i[k]", {"i": np.arange(4) + 2**32}, 3),
        ("f[()]", {}, None),
    ]:
        if want is None:
            with pytest.raises(ValueError, match="not a captured array"):
                Score(text)
            continue
        made = Score(text, **names)
        found = evaluate(made.form.tree, {"k": 3} | made.numbers | made.arrays)
        assert found == want and found.dtype == np.float64, text


def test_what_is_as_deep_as_may_be_passes_everywhere() -> None:
    for text in (
        "tanh(" * (MAX_DEPTH - 1) + "s" + ")" * (MAX_DEPTH - 1),
        "+".join("s" * MAX_DEPTH),
        f"max({', '.join('s' * MAX_DEPTH)})",
    ):
        form = Score(text).form
        assert form == Score(text).form and form.derivative is not None
        assert np.isfinite(evaluate(form.derivative, {"s": 0.5}))
        assert len(statements(form, {"s": "s"}, with_derivative=True).lines) < 4 * MAX_DEPTH
