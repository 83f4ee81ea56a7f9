"""Score functions: from one text Python's own value, NumPy's, the derivative, and what the generated C computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from cupyflash import kernels_cu
from cupyflash.expressions.c import ELEMENTS, Statements
from cupyflash.expressions.evaluate import evaluate, positions
from cupyflash.expressions.tree import POSITIONS, depends_on
from cupyflash.launch.nvrtc import compile_to_ptx
from cupyflash.request.score import Form, Score, statements
from cupyflash.sim.ptx import Module
from expressions import CAPTURED, COUNT, SCORES, SHAPE, SIZES, VALUES, by_python, score, texts
from suites import sweep

seeds = {"seed": st.integers(0, 2**32)}


def values_of(tree: Any, scores: np.ndarray = SCORES, dtype: type[np.floating[Any]] = np.float64) -> np.ndarray:
    """A tree's value for each score; zeros for no tree."""
    return np.broadcast_to(0.0 if tree is None else evaluate(tree, VALUES | {"s": scores}, dtype), SHAPE)


@sweep(10, 100, **seeds)
def test_evaluated_as_python_evaluates_the_text(seed: int) -> None:
    places = [*np.ndindex(SHAPE)][seed % 7 :: 7]
    for text in texts(seed, 2):
        found = values_of(score(text).form.tree)
        np.testing.assert_allclose([found[place] for place in places], by_python(text, places), 1e-9, 1e-9, err_msg=text)


@sweep(25, 300, **seeds)
def test_derivatives_are_those_of_differences(seed: int) -> None:
    (text,) = texts(seed, 1)
    form, step = score(text).form, 2.0**-17
    at = SCORES.astype(np.float64) + 2.0**-9
    before, here, behind = (values_of(form.tree, at + way * step) for way in (-1, 0, 1))
    left, right = (here - before) / step, (behind - here) / step
    smooth = np.abs(left - right) <= 1e-2 * (1 + np.abs(left))  # else min or max change sides here, or something steps
    assert smooth.mean() > 0.8, text
    found = values_of(form.derivative, at)
    np.testing.assert_allclose(found[smooth], ((left + right) / 2)[smooth], rtol=1e-5, atol=1e-5, err_msg=text)


def program(forms: list[Form]) -> str:
    """A kernel that computes each of some score functions and its derivative, a score a thread."""
    at = {name: view if view.base is None else np.asarray(view.base) for name, view in ARRAYS.items()}
    lines = [f"  const int {name} = at[{place * COUNT} + i];" for place, name in enumerate(POSITIONS)]
    for name, view in ARRAYS.items():
        first = (view.ctypes.data - at[name].ctypes.data) // view.itemsize
        steps, lengths = (", ".join(map(str, each)) or "0" for each in ([s // view.itemsize for s in view.strides], view.shape))
        type = f"Captured<{ELEMENTS[view.dtype.name]}, {view.ndim}>"
        lines.append(f"  const {type} {name}_array = {{{name} + {first}, {{{steps}}}, {{{lengths}}}}};")
    names = {name: name for name in (*POSITIONS, *CAPTURED)} | {name: f"{name}_array" for name in ARRAYS} | {"s": "score"}
    for place, form in enumerate(forms):
        made = statements(form, names, with_derivative=True)
        results = f"values[{place * COUNT} + i] = {made.value}; slopes[{place * COUNT} + i] = {made.derivative};"
        lines.append("\n    ".join(["  {", *made.lines, results]) + "\n  }")
    pointers = ", ".join(f"const {ELEMENTS[view.dtype.name]}* {name}" for name, view in ARRAYS.items())
    head = (
        f"const float* s, const int* at, {pointers}, const float cap, const int few, const bool yes, float* values, float* slopes"
    )
    return "\n".join(
        [
            '#include "element.cuh"',
            *(
                f"__device__ __noinline__ float one_{name}(float x) {{ return {name}(x); }}\n#define {name} one_{name}"
                for name in LONG
            ),
            '#include "captured.cuh"',
            f'extern "C" __global__ void scores({head}) {{',
            f"  const int i = threadIdx.x; if (i >= {COUNT}) return; const float score = s[i];",
            *lines,
            "}",
        ]
    )


ARRAYS = {name: value for name, value in CAPTURED.items() if isinstance(value, np.ndarray)}
LONG = "sinf", "cosf", "tanhf", "logf"  # what is compiled once, and called, to save time
OPTIONS = (f"-I{kernels_cu.DIRECTORY}", "-DELEMENT=float", "-ftz=true")


def by_kernel(forms: list[Form]) -> tuple[np.ndarray, np.ndarray]:
    """Values and derivatives, (forms, *SHAPE) each, as the PTX machine computes them."""
    module = Module.from_ptx(compile_to_ptx(program(forms), OPTIONS, "scores.cu"))
    at = np.stack([np.broadcast_to(value, SHAPE).ravel() for value in positions(SIZES).values()]).astype(np.int32)
    arrays = [np.asarray(view if view.base is None else view.base) for view in ARRAYS.values()]
    values, slopes = (np.full((len(forms), *SHAPE), np.nan, np.float32) for _ in range(2))
    given = [SCORES.ravel(), at, *arrays, np.float32(CAPTURED["cap"]), np.int32(CAPTURED["few"]), True, values, slopes]
    assert module.launch("scores", 1, 128, given).findings == ()
    return values, slopes


def check_kernel(written: list[str]) -> None:
    forms = [score(text).form for text in written]
    for found, trees in zip(by_kernel(forms), ([form.tree for form in forms], [form.derivative for form in forms]), strict=True):
        for text, ours, tree in zip(written, found, trees, strict=True):
            want, rough = values_of(tree), values_of(tree, dtype=np.float32)
            allowed = 2e-6 * (1 + np.abs(want)) + 8 * np.abs(rough - want)
            np.testing.assert_array_less(np.abs(ours - want), allowed, err_msg=text)


@sweep(1, 10, **seeds)
def test_the_generated_c_computes_what_the_reference_does(seed: int) -> None:
    check_kernel(texts(seed, 24))


EDGES = [
    "document[k * k * 2000000000] + document[-k * 1000000]",  # an overflow is no licence to read elsewhere
    "deep[q * 9, -h, k + 100, document[k - 7]] * s",
    "few // (k - k) + (-2147483647 - k) // (-1) + (-2147483647 - 1) // few + (k - 2) // few * s",
    "(s + 3) // 1.5 + s // -0.125 + 6 * k // 1.5 + s // slope[h]",
    "few % (k - k) + (k - 2) % (-1) + abs(-2147483647 - 1) % 7",
    "s % -1.5 + (k - 3) % -2 + s % slope[h]",
    "1 / 3 + 1 / (k + 1) + 16777217 * s / 16777216",
    "seen[row, k] + seen[row, k] * s - yes",
    "max(s, s) + min(s, 0.125) + abs(s - s) * s",
    "-(-s) - - s + 1 * s",
    "s * s * s - s * s + s",
    "2 if s > 1 else 3 if s > 0 else s",
    "min(log(-1), s) + max(log(-1), s) + min(s, log(-1)) + max(s, log(-1))",  # not a number beside one
]


def test_c_at_the_edges() -> None:
    check_kernel(EDGES)


BY_HAND = [
    ("cap * tanh(s / cap)", "1 - tanh(s / cap) * tanh(s / cap)"),
    ("7.5 % s + s % 2", "1 - floor(7.5 / s)"),
    ("s * s / (s + 9)", "s * (s + 18) / ((s + 9) * (s + 9))"),
    ("exp(s) + log(s + 9) + sqrt(s + 9)", "exp(s) + 1 / (s + 9) + 0.5 / sqrt(s + 9)"),
    ("sin(s) * cos(s)", "cos(s) * cos(s) - sin(s) * sin(s)"),
    ("abs(s) - -s + floor(s)", "where(s < 0, 0, 2)"),
    ("max(s, s * s) + min(s, 2 * s)", "where(0 < s < 1, 1, 2 * s) + where(s < 0, 2, 1)"),
    ("abs(k - k) * s + abs(s - s + cap * s - cap * s)", "0"),
    ("s if seen[row, k] and s > 0 else slope[h] * s", "1 if seen[row, k] and s > 0 else slope[h]"),
]


@pytest.mark.parametrize(("text", "derived"), BY_HAND)
def test_derivatives_by_hand(text: str, derived: str) -> None:
    found, want = values_of(score(text).form.derivative), values_of(score(derived).form.tree)
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)


def test_positions() -> None:
    """Four heads of q on two of k, and two rows aligned with the last two of five keys."""
    made = positions({"b": 1, "h": 4, "kv_h": 2, "row": 2, "k": 5})
    heads = {"b": [0], "h": [0, 1, 2, 3], "kv_h": [0, 0, 1, 1]}
    scores = {"row": [0, 1], "q": [3, 4], "k": [0, 1, 2, 3, 4], "n_q": [2], "n_k": [5]}
    assert {name: np.ravel(value).tolist() for name, value in made.items()} == heads | scores
    assert [made[name].shape for name in ("h", "q", "k")] == [(1, 4, 1, 1), (1, 1, 2, 1), (1, 1, 1, 5)]


def test_what_is_not_chosen_does_not_enter_a_derivative() -> None:
    infinite, none = float("inf"), float("nan")
    for text in (
        "where(k <= q, s, -big)",
        "s + where(k > q, big, 0)",
        "s if k <= q else big - big",
        "min(s, none)",
        "max(none, s)",
    ):
        names = {name: value for name, value in (("big", infinite), ("none", none)) if name in text}
        form = Score(text, **names).form
        found = evaluate(form.derivative, VALUES | names)
        assert np.isin(found, (0, 1)).all(), text
    assert Score("big * k + h", big=infinite).form.derivative is None
    assert Score("floor(s) + (s > 0)").form.derivative is None


def test_equal_texts_and_types_have_equal_forms() -> None:
    one, other = np.arange(4, dtype=np.float32), np.ones(8, np.float32)[::2]
    text = "s + slope[h] * (k - q)"
    form = Score(text, slope=one).form
    assert form == Score(" s+slope[ h ]*(k-q) ", slope=other).form and hash(form) == hash(Score(text, slope=other).form)
    assert Score("a * s", a=1.5).form == Score("a * s", a=2.5).form
    others = [
        Score("s + slope[h] * (q - k)", slope=one).form,
        Score(text, slope=one.astype(np.float16)).form,
        Score("s + slope[h, 0] * (k - q)", slope=one[:, None]).form,
    ]
    assert form not in others and len({form, *others}) == 4
    assert Score("1 * s * 1").form == Score("s").form
    assert Score("s * 2").form == Score("s * 2.0").form != Score("s + a", a=2).form != Score("s + a", a=2.0).form
    made = Score(text, slope=one)
    assert made.arrays["slope"] is one and Score("s * n", n=np.int8(3)).numbers == {"n": 3}


def test_subtrees_are_computed_once_with_the_derivative() -> None:
    made = statements(Score("cap * tanh(s / cap)", cap=30.0).form, {"s": "s", "cap": "cap"}, with_derivative=True)
    assert sum("tanhf" in line for line in made.lines) == 1
    assert statements(Score("s").form, {"s": "x"}, with_derivative=True) == ((), "x", "1.0f")
    assert statements(Score("k").form, {"k": "col"}, with_derivative=True)[1:] == ("score_0", "0.0f")


def test_loads_may_be_written_before_the_rest() -> None:
    form = score("s + slope[h] * table[document[q] - k]").form
    written = Statements({name: name for name in (*POSITIONS, *CAPTURED, "s")})
    for load in form.loads:
        if "column" not in depends_on(load):
            written.value(load)
    assert ["score_load(" in line for line in written.lines].count(True) == 2  # slope[h] and document[q], once a row
    before = len(written.lines)
    written.value(form.tree)
    assert sum("score_load(" in line for line in written.lines[before:]) == 1


def test_loads_say_what_they_depend_on() -> None:
    text = "s + slope[h] + table[document[q] - document[k]] + document[k] + table[n_k - 1] + deep[b, kv_h, row, k] + single"
    found = {str(load.indices): (load.name, depends_on(load)) for load in score(text).form.loads}
    assert [(name, set(what)) for name, what in found.values()] == [
        ("slope", {"head"}),
        ("document", {"row"}),
        ("document", {"column"}),
        ("table", {"row", "column"}),
        ("table", set()),
        ("deep", {"batch", "head", "row", "column"}),
        ("single", set()),
    ]
    assert depends_on(score(text).form.tree) == {"batch", "head", "row", "column", "score"}


def test_shapes_are_held_against_the_problem() -> None:
    form = score("s + pair[b, k] + table[k - q] + document[q]").form
    shapes = {name: CAPTURED[name].shape for name in ("pair", "table", "document")}
    form.check(shapes, SIZES)
    form.check(shapes | {"table": (1,), "document": (999,)}, SIZES)
    for name, shape, said in [
        ("pair", (1, 5), "pair must have length 2 along axis 0, which b indexes, got shape (1, 5)"),
        ("pair", (2, 6), "pair must have length 5 along axis 1, which k indexes"),
        ("table", (0,), "table must have a length from 1"),
        ("document", (2**31,), "document must have a length from 1 to 2,147,483,647 along axis 0"),
    ]:
        with pytest.raises(ValueError) as error:
            form.check(shapes | {name: shape}, SIZES)
        assert said in str(error.value)
