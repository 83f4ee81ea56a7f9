"""Tangents, and gradients of gradients: by the 2x rule against dense formulas in float64, which differences confirm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import cupyflash
from cupyflash import Mask, Score
from cupyflash.expressions.evaluate import evaluate
from cupyflash.sim.numbers.inputs import Inputs
from cupyflash.sim.numbers.reference import Rounding, exactly, kept_of, of_scores, sinks_of, visible
from cupyflash.sim.numbers.yardstick import to, ulp

RNG = np.random.default_rng(36)
FLOAT = np.float64


class Drawn(NamedTuple):
    """q, k and v, tangents of each, dout, and a call's further arguments."""

    arrays: tuple[np.ndarray, ...]
    dots: tuple[np.ndarray, ...]
    dout: np.ndarray
    asked: dict[str, Any]


def draw(dtype: str, n_q: int, n_k: int, d: int, d_v: int, **asked: Any) -> Drawn:
    """Four heads of q, and two of k and v."""
    shapes = (2, 4, n_q, d), (2, 2, n_k, d), (2, 2, n_k, d_v)
    arrays, dots = (tuple(RNG.standard_normal(shape).astype(dtype) for shape in shapes) for _ in range(2))
    return Drawn(arrays, dots, RNG.standard_normal((2, 4, n_q, d_v)).astype(dtype), asked)


def dense(drawn: Drawn, arrays: Any, dtype: Any = FLOAT, rounded: Rounding = exactly) -> dict[str, Any]:
    """O, the tangents of O and L (t_O, t_L), and gradients with tangents (dq, t_dq, and so on), in matrices."""
    inputs = Inputs.of(*drawn.arrays, **{name: value for name, value in drawn.asked.items() if name != "mask"})
    q, k, v, tq, tk, tv, G = (rounded(each.astype(dtype)) for each in (*arrays, *drawn.dots, drawn.dout))
    K, V, tK, tV = (np.repeat(each, 2, axis=1) for each in (k, v, tk, tv))
    scale, T = dtype(inputs.problem.softmax_scale), (0, 1, 3, 2)
    S0, tS0 = scale * (q @ K.transpose(T)), scale * (tq @ K.transpose(T) + q @ tK.transpose(T))
    S, slope = S0, dtype(1)
    if inputs.score is not None:
        form = inputs.score.form
        S, slope = of_scores(inputs, S0, form.tree), of_scores(inputs, S0, form.derivative)
    if "bias" in inputs.beside:
        S = S + inputs.beside["bias"].astype(dtype)
    seen = visible(inputs, S.shape)
    if "mask" in drawn.asked:
        at = {"q": np.arange(S.shape[2])[:, None] + S.shape[3] - S.shape[2], "k": np.arange(S.shape[3])}
        seen = seen & evaluate(drawn.asked["mask"].form.tree, at)
    S, tS = rounded(np.where(seen, S, -np.inf)), rounded(slope * tS0)
    sinks = sinks_of(inputs, dtype)
    m = np.maximum(S.max(axis=-1, keepdims=True), sinks)
    m = np.where(np.isneginf(m), 0, m)
    total = np.exp(S - m).sum(-1, keepdims=True) + np.exp(sinks - m)
    P = rounded(np.exp(S - m) / np.where(total == 0, 1, total))
    r = (P * tS).sum(-1, keepdims=True)
    tP = rounded(P * (tS - r))
    kept = dtype(1) if inputs.dropout is None else kept_of(inputs.dropout, P.shape).astype(dtype)
    own, tO = kept * P, rounded(kept * tP @ V + kept * P @ tV)
    O = rounded(own @ V)  # noqa: E741 (the paper's name)
    dP, tdP = rounded(kept * (G @ V.transpose(T))), rounded(kept * (G @ tV.transpose(T)))
    D = (P * dP).sum(-1, keepdims=True)
    tD = (tP * dP + P * tdP).sum(-1, keepdims=True)
    dS, tdS = rounded(P * (dP - D)), rounded(tP * (dP - D) + P * (tdP - tD))

    def shared(gradient: np.ndarray) -> np.ndarray:
        return gradient.reshape(2, 2, 2, *gradient.shape[2:]).sum(axis=2)

    made = {
        "O": O,
        "t_O": tO,
        "t_L": r[..., 0],
        "dq": scale * dS @ K,
        "dk": shared(scale * dS.transpose(T) @ q),
        "dv": shared(own.transpose(T) @ G),
    }
    made |= {"t_dq": scale * (tdS @ K + dS @ tK), "t_dv": shared((kept * tP).transpose(T) @ G)}
    made["t_dk"] = shared(scale * (tdS.transpose(T) @ q + dS.transpose(T) @ tq))
    # The largest terms of which sums cancel parts
    big = np.abs(P) * (np.abs(tS) + np.abs(r)) * (1 + np.abs(dP) + np.abs(D))
    return made | {
        "terms": big.sum(-1).max()
        * max(1, *(abs(scale) * np.abs(each).max() for each in (q, K)), *(np.abs(each).max() for each in (V, G)))
    }


def good(found: Any, name: str, drawn: Drawn) -> None:
    """At most twice the error of the dense formulas with every step in the dtype, and a few units in the last place."""
    exact, dtype = dense(drawn, drawn.arrays), drawn.arrays[0].dtype
    plain = dense(drawn, drawn.arrays, np.float32, to(dtype))
    error, rough = (np.abs(each.astype(FLOAT) - exact[name]).max() for each in (found, plain[name].astype(dtype)))
    allowed = 2 * rough + ulp(np.abs(exact[name]).max(), dtype) + 2 * ulp(exact["terms"], np.float32)
    assert found.shape == exact[name].shape and error <= allowed, (name, error, allowed, rough)


def test_the_dense_formulas_are_differences() -> None:
    """In float64, both ways along the tangents."""
    drawn = draw("float32", 10, 12, 8, 6, causal=True, bias=RNG.standard_normal((10, 12)).astype(np.float32))
    here, step = dense(drawn, drawn.arrays), 2.0**-16
    ways = [
        dense(drawn, [x.astype(FLOAT) + way * step * t for x, t in zip(drawn.arrays, drawn.dots, strict=True)]) for way in (-1, 1)
    ]
    for name in ("O", "dq", "dk", "dv"):
        np.testing.assert_allclose((ways[1][name] - ways[0][name]) / (2 * step), here[f"t_{name}"], rtol=1e-6, atol=1e-6)


CAPPED = Score("2.5 * tanh(s / 2.5) + near[q - k]", near=RNG.standard_normal(5).astype(np.float32))
TANGENTS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("float16", (20, 28, 8, 12), {"causal": True}),
    ("float32", (20, 28, 16, 16), {"score": CAPPED, "window": (9, 3)}),
    ("float32", (12, 17, 8, 12), {"dropout": 0.25, "seed": 7, "causal": True}),
    ("bfloat16", (18, 18, 8, 12), {"bias": RNG.standard_normal((18, 18)), "sinks": np.ones(4, np.float32), "scale": -0.1}),
]


@pytest.mark.wide
@pytest.mark.parametrize(("dtype", "sizes", "asked"), TANGENTS)
def test_tangents(dtype: str, sizes: tuple[int, int, int, int], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of more columns than a call takes; with heads behind rows the same bits, and L's tangent with its heads first, as L."""
    if dtype == "bfloat16":
        monkeypatch.setattr("cupyflash.second_order.USUAL_HEAD_DIM", 24)
    kind = cupyflash.arrays.numpy_dtype(dtype)
    own = asked | ({"bias": asked["bias"].astype(kind)} if "bias" in asked else {})
    drawn = draw(kind, *sizes, **own)
    out, lse, out_dot, lse_dot = cupyflash.attention_jvp(*drawn.arrays, *drawn.dots, **own, return_lse=True)
    assert out.dtype == out_dot.dtype == kind and lse.dtype == lse_dot.dtype == np.float32
    good(out, "O", drawn)
    good(out_dot, "t_O", drawn)
    np.testing.assert_allclose(lse_dot, dense(drawn, drawn.arrays)["t_L"], rtol=1e-3, atol=1e-4)
    if dtype == "float16":
        swapped = (each.swapaxes(1, 2) for each in (*drawn.arrays, *drawn.dots))
        found = cupyflash.attention_jvp(*swapped, **own, layout="bnhd", return_lse=True)
        for one, other in zip(found, (out.swapaxes(1, 2), lse, out_dot.swapaxes(1, 2), lse_dot), strict=True):
            assert np.array_equal(one, other)


MASKED: dict[str, Any] = {"causal": True, "mask": Mask("(q + k) % 3 != 0"), "sinks": np.ones(4, np.float32)}
DROPPED: dict[str, Any] = {"dropout": 0.25, "seed": 7, "score": Score("s + near[q - k]", near=CAPPED.arrays["near"])}


@pytest.mark.wide
@pytest.mark.parametrize("options", [MASKED, DROPPED])
def test_gradients_of_gradients(options: dict[str, Any]) -> None:
    """By docs/train.md's own lines."""
    drawn = draw("float32", 10, 12, 8, 6, **options)
    arrays = dict(zip(("q", "k", "v", "q_dot", "k_dot", "v_dot"), (*drawn.arrays, *drawn.dots), strict=True))
    names: dict[str, Any] = {"cupyflash": cupyflash, "options": options, "dout": drawn.dout, **arrays}
    exec(next(block for block in BLOCKS if "attention_double_backward" in block), names)
    good(names["out_dot"], "t_O", drawn)
    for name in ("t_O", "t_dq", "t_dk", "t_dv"):
        found = names["by_" + {"t_O": "dout"}.get(name, name[-1])]
        assert found.dtype == np.float32
        good(found, name, drawn)


PAGE = Path(__file__).resolve().parent.parent / "docs" / "train.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.wide
def test_a_tangent_of_none_is_zero() -> None:
    q, k, v = draw("float32", 18, 18, 8, 8).arrays
    dout = np.ones_like(q)
    assert not any(each.any() for each in cupyflash.attention_double_backward(None, None, None, dout, q, k, v))
    _, out_dot = cupyflash.attention_jvp(q, k, v, None, None, v)
    np.testing.assert_allclose(out_dot, cupyflash.attention(q, k, v), rtol=1e-6, atol=1e-6)


def test_what_is_refused() -> None:
    q = np.zeros((2, 20, 16), np.float32)
    wide = np.zeros((2, 20, 250), np.float32)
    for call, error, said in (
        (lambda: cupyflash.attention_jvp(q, q, q, q[:, :4], q, q), ValueError, "q_dot must have shape"),
        (lambda: cupyflash.attention_jvp(q, q, q, q.astype(np.float16), q, q), TypeError, "q_dot"),
        (
            lambda: cupyflash.attention_jvp(wide, wide, wide, wide, wide, wide),
            ValueError,
            "head_dim must be between 1 and 240 for attention_jvp",
        ),
        (lambda: cupyflash.attention_jvp(q, q, q, q, q, q, dropout=0.5), ValueError, "dropout needs a seed"),
        (
            lambda: cupyflash.attention_double_backward(q, q, q, q, q, q, q, softcap=3.0),
            ValueError,
            r"score must only add to s for attention_double_backward, as s \+ table\[h, q - k\] does, got 'softcap",
        ),
        (lambda: cupyflash.attention_double_backward(q, q, q, q[:, :4], q, q, q), ValueError, "dout must"),
    ):
        with pytest.raises(error, match=said):
            call()
